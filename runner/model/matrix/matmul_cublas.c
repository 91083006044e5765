/* SPDX-License-Identifier: Apache-2.0 */

/*
 * cuBLAS by name: see the header. Invariant: every function that is called was found at open.
 */

#include "matmul_cublas.h"

#include <cublas_v2.h>
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

typedef cublasStatus_t (*create_fn)(cublasHandle_t *);
typedef cublasStatus_t (*destroy_fn)(cublasHandle_t);
typedef cublasStatus_t (*set_stream_fn)(cublasHandle_t, cudaStream_t);
typedef cublasStatus_t (*set_workspace_fn)(cublasHandle_t, void *, size_t);
typedef cublasStatus_t (*gemm_fn)(cublasHandle_t, cublasOperation_t, cublasOperation_t, int, int,
                                  int, const void *, const void *, cudaDataType, int, const void *,
                                  cudaDataType, int, const void *, void *, cudaDataType, int,
                                  cublasComputeType_t, cublasGemmAlgo_t);

struct kvf_cublas {
    void *library; /* NULL: the process has cuBLAS already */
    cublasHandle_t handle;
    void *workspace;
    destroy_fn destroy;
    set_stream_fn set_stream;
    set_workspace_fn set_workspace;
    gemm_fn gemm;
};

/* Every function by name, into its pointer by way of an object pointer, as POSIX asks for. NULL, or
 * the first that is not there. */
static const char *find_all(kvf_cublas *c, create_fn *create)
{
    const struct {
        const char *name;
        void *to;
    } functions[] = {{"cublasCreate_v2", create},
                     {"cublasDestroy_v2", &c->destroy},
                     {"cublasSetStream_v2", &c->set_stream},
                     {"cublasSetWorkspace_v2", &c->set_workspace},
                     {"cublasGemmEx", &c->gemm}};
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        void *found = dlsym(c->library ? c->library : RTLD_DEFAULT, functions[i].name);
        if (!found)
            return functions[i].name;
        memcpy(functions[i].to, &found, sizeof found);
    }
    return NULL;
}

static kvf_status fill(kvf_cublas *c, const char *path, kvf_error *error)
{
    if (path || !dlsym(RTLD_DEFAULT, "cublasGemmEx"))
        c->library = kvf_cublas_find(path);
    if (path && !c->library)
        return model_fail(error, KVF_UNSUPPORTED,
                          "cublas = %s: cuBLAS 12 or 13 could not be loaded from there: %s", path,
                          dlerror());
    create_fn create = NULL;
    const char *lacking = find_all(c, &create);
    if (path && lacking)
        return model_fail(error, KVF_UNSUPPORTED,
                          "cublas = %s: it lacks %s, so it is not cuBLAS 12 or 13", path, lacking);
    if (lacking)
        return model_fail(error, KVF_UNSUPPORTED,
                          "cuBLAS 12 or 13 was not found; install it (libcublas-12-x or -13-x, the "
                          "CUDA toolkit, or PyTorch), give --cublas PATH, or run with --device "
                          "host");
    const cublasStatus_t status = create(&c->handle);
    if (status != CUBLAS_STATUS_SUCCESS) {
        c->handle = NULL;
        return model_fail(error, KVF_DEVICE_FAILED, "cuBLAS could not be started (status %d)",
                          (int)status);
    }
    return KVF_OK;
}

kvf_status kvf_cublas_open(void *workspace, const char *path, kvf_cublas **out, kvf_error *error)
{
    *out = NULL;
    kvf_cublas *c = calloc(1, sizeof *c);
    if (!c)
        return model_out_of_memory(error, sizeof *c, "cuBLAS");
    c->workspace = workspace;
    const kvf_status status = fill(c, path, error);
    if (status != KVF_OK) {
        kvf_cublas_close(c);
        return status;
    }
    *out = c;
    return KVF_OK;
}

void kvf_cublas_close(kvf_cublas *c)
{
    if (!c)
        return;
    if (c->handle)
        (void)c->destroy(c->handle);
    if (c->library)
        dlclose(c->library);
    free(c);
}

static cudaDataType type_of(kvf_dtype dtype)
{
    return dtype == KVF_BF16 ? CUDA_R_16BF : dtype == KVF_FP16 ? CUDA_R_16F : CUDA_R_32F;
}

kvf_status kvf_cublas_multiply(kvf_cublas *c, const kvf_cublas_product *p, void *stream)
{
    const float one = 1.0f, beta = p->accumulate ? 1.0f : 0.0f;
    const int outputs = (int)p->outputs, rows = (int)p->rows, inputs = (int)p->inputs;
    if (c->set_stream(c->handle, stream) != CUBLAS_STATUS_SUCCESS ||
        /* Setting a stream takes the workspace away. */
        c->set_workspace(c->handle, c->workspace, KVF_CUBLAS_WORKSPACE_BYTES) !=
            CUBLAS_STATUS_SUCCESS)
        return KVF_DEVICE_FAILED;
    /* cuBLAS is column-major: y^T [outputs, rows] = (weight^T)^T x^T. */
    const cublasStatus_t status =
        c->gemm(c->handle, CUBLAS_OP_T, CUBLAS_OP_N, outputs, rows, inputs, &one, p->weight,
                type_of(p->dtype), inputs, p->x, type_of(p->dtype), inputs, &beta, p->y, CUDA_R_32F,
                (int)p->y_stride, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    return status == CUBLAS_STATUS_SUCCESS ? KVF_OK : KVF_DEVICE_FAILED;
}
