/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Asynchronous copies arrive when they are waited for and not before; tiles and products agree with
 * a plain matrix product.
 */

#include <vector>

#include "test_emu.h"

/* ---- 16 or 8 bytes per thread ---- */

struct copied {
    uint32_t before, uncommitted, after_one, second_then, after_all, filled, unwanted, half;
};

static __global__ void copy16(const uint32_t *x, copied *out)
{
    char *s = kvf_shared() + threadIdx.x * 80;
    const uint32_t *words = (const uint32_t *)s, *from = x + threadIdx.x * 8;
    copied *o = out + threadIdx.x;
    memset(s, 0, 80);
    kvf_async_copy16(s, from);
    o->uncommitted = words[0];
    kvf_async_commit();
    o->before = words[0];
    kvf_async_copy16(s + 16, from + 4);
    kvf_async_copy16(s + 32, from, 4);
    kvf_async_copy16_if(false, s + 48, nullptr);
    kvf_async_copy16_if(true, s + 48, from);
    kvf_async_copy16_if(false, s + 48, from + 4);
    kvf_async_copy8(s + 64, from + 2);
    kvf_async_commit();
    kvf_async_wait<1>();
    o->after_one = words[3];
    o->second_then = words[4];
    kvf_async_wait<0>();
    o->after_all = words[7];
    o->filled = words[8] + words[9] + words[11];
    o->unwanted = words[15];
    o->half = words[17] + words[18];
}

static void test_async(void)
{
    const uint32_t threads = 40, poison = KVF_EMU_POISON * 0x10001u;
    alignas(16) uint32_t x[threads * 8];
    for (uint32_t i = 0; i < threads * 8; i++)
        x[i] = i + 1;
    std::vector<copied> out(threads);
    LAUNCH(copy16, 1, threads, threads * 80, NULL, (const uint32_t *)x, out.data());
    for (uint32_t t = 0; t < threads; t++) {
        CHECK(out[t].uncommitted == poison && out[t].before == poison);
        CHECK(out[t].after_one == t * 8 + 4 && out[t].second_then == poison);
        CHECK(out[t].after_all == t * 8 + 8 && out[t].filled == t * 8 + 1);
        CHECK(out[t].unwanted == t * 8 + 4 && out[t].half == t * 8 + 4);
    }
}

void test_copies(void)
{
    test_async();
}

/* ---- tiles and products ---- */

/* d [16,8] += a [16,16] b, where b is stored [16,8], or [8,16] if `by_columns`. */
template <typename T>
static __global__ void multiply(const T *a, const T *b, float *d, bool by_columns)
{
    T *sa = (T *)kvf_shared(), *sb = sa + 256;
    const uint32_t lane = threadIdx.x, group = lane / 4, pair = lane % 4 * 2;
    for (uint32_t i = lane; i < 256; i += 32)
        sa[i] = a[i];
    for (uint32_t i = lane; i < 128; i += 32)
        sb[i] = b[i];
    __syncwarp();
    uint32_t ra[4], rb[4];
    kvf_load_tiles4(ra, sa + lane % 16 * 16 + lane / 16 * 8);
    /* Two tiles would do; the other two are the same again. */
    if (by_columns)
        kvf_load_tiles4(rb, sb + lane % 8 * 16 + lane / 8 % 2 * 8);
    else
        kvf_load_tiles4_transposed(rb, sb + lane % 16 * 8);
    float r[4];
    for (uint32_t i = 0; i < 4; i++)
        r[i] = d[(group + i / 2 * 8) * 8 + pair + i % 2];
    kvf_mma(r, ra, rb, T());
    for (uint32_t i = 0; i < 4; i++)
        d[(group + i / 2 * 8) * 8 + pair + i % 2] = r[i];
}

template <typename T> static void test_products_of(uint32_t seed, bool by_columns)
{
    uint32_t state = seed;
    std::vector<T> a(256), b(128);
    std::vector<float> d(128), before(128);
    for (T &x : a)
        x = kvf_from_float<T>((float)test_random(&state) / 8388608.0f - 1.0f);
    for (T &x : b)
        x = kvf_from_float<T>((float)test_random(&state) / 8388608.0f - 1.0f);
    a[5] = kvf_from_float<T>(-3e-6f); /* less than the least normal fp16 */
    for (float &x : before)
        x = (float)test_random(&state) / 8388608.0f;
    d = before;
    LAUNCH(multiply<T>, 1, 32, (256 + 128) * sizeof(T), NULL, (const T *)a.data(),
           (const T *)b.data(), d.data(), by_columns);
    for (size_t row = 0; row < 16; row++)
        for (size_t column = 0; column < 8; column++) {
            double sum = before[row * 8 + column];
            for (size_t k = 0; k < 16; k++)
                sum += (double)kvf_to_float(a[row * 16 + k]) *
                       (double)kvf_to_float(by_columns ? b[column * 16 + k] : b[k * 8 + column]);
            /* 17 terms of at most 2: 17 roundings of 34 x 2^-24. */
            CHECK(fabs(sum - (double)d[row * 8 + column]) <= 17 * 34 * 0x1p-24);
        }
}

/* Not-a-numbers and infinities go through a product as such. */
static __global__ void multiply_special(float *d)
{
    const uint32_t half_infinity = 0x7c00u, half_nan = 0x7e00u;
    const uint32_t lane = threadIdx.x;
    uint32_t a[4] = {0, 0, 0, 0}, b[2] = {0x3c003c00u, 0x3c003c00u};
    if (lane == 0)
        a[0] = half_infinity; /* row 0, k 0 */
    if (lane == 4)
        a[0] = half_nan; /* row 1, k 0 */
    float r[4] = {0, 0, 0, 0};
    kvf_mma(r, a, b, kvf_half());
    d[lane] = r[0];
}

/* d [16,8] += a [16,32] b, b stored [8,32]. */
static __global__ void multiply_bytes(const int8_t *a, const int8_t *b, int32_t *d)
{
    const uint32_t lane = threadIdx.x, group = lane / 4, four = lane % 4 * 4;
    uint32_t ra[4], rb[2];
    int32_t r[4];
    for (uint32_t i = 0; i < 4; i++) {
        memcpy(&ra[i], a + (group + i % 2 * 8) * 32 + four + i / 2 * 16, 4);
        r[i] = d[(group + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2];
    }
    for (uint32_t i = 0; i < 2; i++)
        memcpy(&rb[i], b + group * 32 + four + i * 16, 4);
    kvf_mma_s8(r, ra, rb);
    for (uint32_t i = 0; i < 4; i++)
        d[(group + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = r[i];
}

static void test_products_of_bytes(uint32_t seed)
{
    uint32_t state = seed;
    std::vector<int8_t> a(512), b(256);
    std::vector<int32_t> d(128), before(128);
    for (int8_t &x : a)
        x = (int8_t)test_random(&state);
    for (int8_t &x : b)
        x = (int8_t)test_random(&state);
    for (int32_t &x : before)
        x = (int32_t)test_random(&state) % 1000;
    d = before;
    LAUNCH(multiply_bytes, 1, 32, 0, NULL, (const int8_t *)a.data(), (const int8_t *)b.data(),
           d.data());
    for (size_t row = 0; row < 16; row++)
        for (size_t column = 0; column < 8; column++) {
            int32_t sum = before[row * 8 + column];
            for (size_t k = 0; k < 32; k++)
                sum += a[row * 32 + k] * b[column * 32 + k];
            CHECK(sum == d[row * 8 + column]);
        }
}

void test_products(void)
{
    for (uint32_t seed = 1; seed <= 4; seed++)
        test_products_of_bytes(seed);
    for (uint32_t seed = 1; seed <= 4; seed++) {
        test_products_of<kvf_bf16>(seed, seed % 2 == 0);
        test_products_of<kvf_half>(seed, seed % 2 == 0);
    }
    float d[32];
    LAUNCH(multiply_special, 1, 32, 0, NULL, (float *)d);
    for (uint32_t lane = 0; lane < 32; lane++)
        CHECK(lane < 4 ? isinf(d[lane]) : lane < 8 ? isnan(d[lane]) : d[lane] == 0.0f);
}
