/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A library that looks like cuBLAS to whoever loads it by name: it has the functions that the
 * runner calls, notes what they were given, and multiplies nothing. Knows nothing of devices.
 */

#include <stddef.h>

/* cublasStatus_t of success is 0. */
int cublasCreate_v2(void **handle);
int cublasDestroy_v2(void *handle);
int cublasSetStream_v2(void *handle, void *stream);
int cublasSetWorkspace_v2(void *handle, void *workspace, size_t bytes);
int cublasGemmEx(void *handle, int a_is_transposed, int b_is_transposed, int m, int n, int k,
                 const void *alpha, const void *a, int a_type, int a_stride, const void *b,
                 int b_type, int b_stride, const void *beta, void *c, int c_type, int c_stride,
                 int compute, int algorithm);

struct {
    int alive;
    void *stream, *workspace;
    int m, n, k, products;
    void *c;
} kvf_cublas_stand_in;

int cublasCreate_v2(void **handle)
{
    *handle = &kvf_cublas_stand_in;
    kvf_cublas_stand_in.alive++;
    return 0;
}

int cublasDestroy_v2(void *handle)
{
    kvf_cublas_stand_in.alive--;
    return handle != (void *)&kvf_cublas_stand_in;
}

int cublasSetStream_v2(void *handle, void *stream)
{
    kvf_cublas_stand_in.stream = stream;
    return handle != (void *)&kvf_cublas_stand_in;
}

int cublasSetWorkspace_v2(void *handle, void *workspace, size_t bytes)
{
    kvf_cublas_stand_in.workspace = workspace;
    return handle != (void *)&kvf_cublas_stand_in || bytes == 0;
}

#ifndef KVF_STAND_IN_LACKS_PRODUCTS
int cublasGemmEx(void *handle, int a_is_transposed, int b_is_transposed, int m, int n, int k,
                 const void *alpha, const void *a, int a_type, int a_stride, const void *b,
                 int b_type, int b_stride, const void *beta, void *c, int c_type, int c_stride,
                 int compute, int algorithm)
{
    (void)a_is_transposed, (void)b_is_transposed, (void)alpha, (void)a, (void)a_type;
    (void)a_stride, (void)b, (void)b_type, (void)b_stride, (void)beta, (void)c_type;
    (void)c_stride, (void)compute, (void)algorithm;
    kvf_cublas_stand_in.m = m;
    kvf_cublas_stand_in.n = n;
    kvf_cublas_stand_in.k = k;
    kvf_cublas_stand_in.c = c;
    kvf_cublas_stand_in.products++;
    return handle != (void *)&kvf_cublas_stand_in;
}
#endif
