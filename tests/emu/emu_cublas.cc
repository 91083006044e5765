/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The matrix products of cuBLAS that the runner calls, in the emulator: in the order of the
 * handle's stream, on its worker, recorded under capture like everything else.
 *
 * bf16, fp16 or fp32 in and out, sums in fp32 over ascending k, so the same input gives the same
 * bits. Tiles of the operands are unpacked to fp32 first; the inner loop is over whole vectors.
 */

#include <algorithm>
#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <string.h>

#include "emu_fiber.h"
#include "emu_state.h"

struct cublasContext {
    cudaStream_t stream = nullptr;
    int device = 0;
};

namespace emu
{
namespace
{

const int TILE_M = 64, TILE_N = 32, TILE_K = 256;

/* Column-major, as everything in cuBLAS: element (row, column) at [row + column * leading]. */
struct Matrix {
    const void *data;
    cudaDataType type;
    size_t leading;
    bool is_transposed;
};

struct Product {
    size_t m, n, k;
    float alpha, beta;
    Matrix a, b;
    void *c;
    cudaDataType c_type;
    size_t c_leading;
};

inline float load(const void *data, cudaDataType type, size_t at)
{
    switch (type) {
    case CUDA_R_16BF: {
        uint32_t bits = (uint32_t)((const uint16_t *)data)[at] << 16;
        float value;
        memcpy(&value, &bits, sizeof value);
        return value;
    }
    case CUDA_R_16F:
        return __half2float(((const __half *)data)[at]);
    default:
        return ((const float *)data)[at];
    }
}

void store(void *data, cudaDataType type, size_t at, float value)
{
    switch (type) {
    case CUDA_R_16BF:
        ((__nv_bfloat16 *)data)[at] = __float2bfloat16_rn(value);
        break;
    case CUDA_R_16F:
        ((__half *)data)[at] = __float2half_rn(value);
        break;
    default:
        ((float *)data)[at] = value;
    }
}

template <cudaDataType type>
void unpack_as(float *to, int width, const Matrix &matrix, size_t i0, int rows, size_t l0,
               int depth)
{
    size_t row_step = matrix.is_transposed ? matrix.leading : 1;
    size_t depth_step = matrix.is_transposed ? 1 : matrix.leading;
    for (int l = 0; l < depth; l++) {
        size_t at = i0 * row_step + (l0 + (size_t)l) * depth_step;
        for (int i = 0; i < rows; i++)
            to[l * width + i] = load(matrix.data, type, at + (size_t)i * row_step);
        for (int i = rows; i < width; i++)
            to[l * width + i] = 0;
    }
}

/* to[l][i] <- op(matrix)(i0 + i, l0 + l); zeros past `rows` up to `width`. */
void unpack(float *to, int width, const Matrix &matrix, size_t i0, int rows, size_t l0, int depth)
{
    if (matrix.type == CUDA_R_16BF)
        unpack_as<CUDA_R_16BF>(to, width, matrix, i0, rows, l0, depth);
    else if (matrix.type == CUDA_R_16F)
        unpack_as<CUDA_R_16F>(to, width, matrix, i0, rows, l0, depth);
    else
        unpack_as<CUDA_R_32F>(to, width, matrix, i0, rows, l0, depth);
}

/* sums[TILE_N][TILE_M] += A[depth][TILE_M] x B[depth][TILE_N], all of them the emulator's own: what
 * a product reads and writes of the device is checked where it is unpacked and stored. */
KVF_EMU_QUIET void multiply(float *sums, const float *a, const float *b, int columns, int depth)
{
    for (int j = 0; j < columns; j++) {
        float row[TILE_M];
        memcpy(row, sums + j * TILE_M, sizeof row);
        for (int l = 0; l < depth; l++) {
            float factor = b[l * TILE_N + j];
            const float *from = a + l * TILE_M;
            for (int i = 0; i < TILE_M; i++)
                row[i] += from[i] * factor;
        }
        memcpy(sums + j * TILE_M, row, sizeof row);
    }
}

void finish(const Product &p, const float *sums, size_t i0, int rows, size_t j0, int columns)
{
    for (int j = 0; j < columns; j++) {
        for (int i = 0; i < rows; i++) {
            size_t at = i0 + (size_t)i + (j0 + (size_t)j) * p.c_leading;
            float value = p.alpha * sums[j * TILE_M + i];
            if (p.beta != 0) /* with 0, C may hold anything */
                value += p.beta * load(p.c, p.c_type, at);
            store(p.c, p.c_type, at, value);
        }
    }
}

void run_product(const Product &p)
{
    std::vector<float> a((size_t)TILE_M * TILE_K), b((size_t)TILE_N * TILE_K);
    std::vector<float> sums((size_t)TILE_M * TILE_N);
    Matrix right = p.b;
    right.is_transposed = !p.b.is_transposed; /* unpacked by columns of op(B) */
    for (size_t i0 = 0; i0 < p.m; i0 += TILE_M) {
        int rows = (int)std::min<size_t>(TILE_M, p.m - i0);
        for (size_t j0 = 0; j0 < p.n; j0 += TILE_N) {
            int columns = (int)std::min<size_t>(TILE_N, p.n - j0);
            std::fill(sums.begin(), sums.end(), 0.0f);
            for (size_t l0 = 0; l0 < p.k; l0 += TILE_K) {
                int depth = (int)std::min<size_t>(TILE_K, p.k - l0);
                unpack(a.data(), TILE_M, p.a, i0, rows, l0, depth);
                unpack(b.data(), TILE_N, right, j0, columns, l0, depth);
                multiply(sums.data(), a.data(), b.data(), columns, depth);
            }
            finish(p, sums.data(), i0, rows, j0, columns);
        }
    }
}

bool is_known(cudaDataType type)
{
    return type == CUDA_R_16BF || type == CUDA_R_16F || type == CUDA_R_32F;
}

size_t bytes_of(cudaDataType type, int rows, int columns, int leading)
{
    size_t one = type == CUDA_R_32F ? 4 : 2;
    return columns == 0 ? 0 : one * ((size_t)leading * (size_t)(columns - 1) + (size_t)rows);
}

/* Does the operand lie on the device? */
bool is_placed(const void *data, size_t bytes)
{
    Place place = place_of(data, bytes);
    return bytes == 0 || place == Place::Device || place == Place::Pinned;
}

cublasStatus_t status_of(cudaError_t error)
{
    switch (error) {
    case cudaSuccess:
        return CUBLAS_STATUS_SUCCESS;
    case cudaErrorMemoryAllocation:
        return CUBLAS_STATUS_ALLOC_FAILED;
    case cudaErrorInvalidValue:
        return CUBLAS_STATUS_INVALID_VALUE;
    case cudaErrorNotSupported:
        return CUBLAS_STATUS_NOT_SUPPORTED;
    default:
        return CUBLAS_STATUS_EXECUTION_FAILED;
    }
}

} // namespace
} // namespace emu

using emu::count;
using emu::counts;
using emu::status_of;

#define EMU_ENTER_CUBLAS(name)                                                                     \
    static emu::EntryPoint entry_point(name);                                                      \
    cudaError_t outcome = emu::enter(entry_point, 0);                                              \
    if (outcome != cudaSuccess)                                                                    \
    return status_of(outcome)

extern "C" {

cublasStatus_t cublasCreate(cublasHandle_t *out)
{
    if (out != nullptr)
        *out = nullptr;
    EMU_ENTER_CUBLAS("cublasCreate");
    if (out == nullptr)
        return CUBLAS_STATUS_INVALID_VALUE;
    *out = new cublasContext;
    (*out)->device = emu::current_device();
    count(counts.cublas_handles);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasDestroy(cublasHandle_t handle)
{
    static emu::EntryPoint entry_point("cublasDestroy");
    cudaError_t outcome = emu::enter(entry_point, emu::ENTRY_UNSAFE);
    if (outcome != cudaSuccess && !emu::failed_by_fault())
        return status_of(outcome);
    if (handle == nullptr)
        return CUBLAS_STATUS_NOT_INITIALIZED;
    emu::uncount(counts.cublas_handles);
    delete handle;
    return status_of(outcome);
}

cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t stream)
{
    EMU_ENTER_CUBLAS("cublasSetStream");
    if (handle == nullptr)
        return CUBLAS_STATUS_NOT_INITIALIZED;
    cudaStream_t named = stream;
    if (emu::check_stream(named) != cudaSuccess)
        return CUBLAS_STATUS_INVALID_VALUE;
    handle->stream = stream;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetStream(cublasHandle_t handle, cudaStream_t *stream)
{
    EMU_ENTER_CUBLAS("cublasGetStream");
    if (handle == nullptr || stream == nullptr)
        return handle == nullptr ? CUBLAS_STATUS_NOT_INITIALIZED : CUBLAS_STATUS_INVALID_VALUE;
    *stream = handle->stream;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetWorkspace(cublasHandle_t handle, void *workspace, size_t bytes)
{
    EMU_ENTER_CUBLAS("cublasSetWorkspace");
    if (handle == nullptr)
        return CUBLAS_STATUS_NOT_INITIALIZED;
    bool is_fine = (uintptr_t)workspace % 256 == 0 && emu::is_placed(workspace, bytes);
    return is_fine ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode)
{
    EMU_ENTER_CUBLAS("cublasSetMathMode");
    (void)mode;
    return handle == nullptr ? CUBLAS_STATUS_NOT_INITIALIZED : CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetPointerMode(cublasHandle_t handle, cublasPointerMode_t mode)
{
    EMU_ENTER_CUBLAS("cublasSetPointerMode");
    if (handle == nullptr)
        return CUBLAS_STATUS_NOT_INITIALIZED;
    return mode == CUBLAS_POINTER_MODE_HOST ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

cublasStatus_t cublasGetVersion(cublasHandle_t handle, int *version)
{
    EMU_ENTER_CUBLAS("cublasGetVersion");
    (void)handle;
    if (version == nullptr)
        return CUBLAS_STATUS_INVALID_VALUE;
    *version = CUBLAS_VERSION;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t transa,
                            cublasOperation_t transb, int m, int n, int k, const void *alpha,
                            const void *a, cudaDataType a_type, int lda, const void *b,
                            cudaDataType b_type, int ldb, const void *beta, void *c,
                            cudaDataType c_type, int ldc, cublasComputeType_t compute,
                            cublasGemmAlgo_t algorithm)
{
    EMU_ENTER_CUBLAS("cublasGemmEx");
    (void)algorithm;
    if (handle == nullptr)
        return CUBLAS_STATUS_NOT_INITIALIZED;
    cudaStream_t stream = handle->stream;
    bool is_ta = transa != CUBLAS_OP_N, is_tb = transb != CUBLAS_OP_N;
    int a_rows = is_ta ? k : m, a_columns = is_ta ? m : k;
    int b_rows = is_tb ? n : k, b_columns = is_tb ? k : n;
    if (m < 0 || n < 0 || k < 0 || alpha == nullptr || beta == nullptr ||
        lda < std::max(1, a_rows) || ldb < std::max(1, b_rows) || ldc < std::max(1, m) ||
        emu::check_stream(stream) != cudaSuccess)
        return CUBLAS_STATUS_INVALID_VALUE;
    bool is_fp32_sum = compute == CUBLAS_COMPUTE_32F || compute == CUBLAS_COMPUTE_32F_PEDANTIC ||
                       compute == CUBLAS_COMPUTE_32F_FAST_TF32;
    if (!is_fp32_sum || !emu::is_known(a_type) || a_type != b_type || !emu::is_known(c_type) ||
        (a_type == CUDA_R_32F && c_type != CUDA_R_32F) ||
        (a_type != c_type && c_type != CUDA_R_32F))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if (m == 0 || n == 0)
        return CUBLAS_STATUS_SUCCESS;
    if (!emu::is_placed(a, emu::bytes_of(a_type, a_rows, a_columns, lda)) ||
        !emu::is_placed(b, emu::bytes_of(b_type, b_rows, b_columns, ldb)) ||
        !emu::is_placed(c, emu::bytes_of(c_type, m, n, ldc)))
        return CUBLAS_STATUS_INVALID_VALUE;
    emu::Product p = {};
    p.m = (size_t)m;
    p.n = (size_t)n;
    p.k = (size_t)k;
    memcpy(&p.alpha, alpha, sizeof p.alpha);
    memcpy(&p.beta, beta, sizeof p.beta);
    p.a = {a, a_type, (size_t)lda, is_ta};
    p.b = {b, b_type, (size_t)ldb, is_tb};
    p.c = c;
    p.c_type = c_type;
    p.c_leading = (size_t)ldc;
    return status_of(emu::submit(
        stream, [=] { emu::run_product(p); }, "gemm"));
}

} // extern "C"
