/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The emulated language against plain loops: places, barriers, shuffles, votes, atomics, launches.
 * Everything runs twice, with blocks, warps and lanes in both orders.
 */

#include <string.h>

#include <thread>
#include <vector>

#include "test_emu.h"

int kvf_emu_enqueue(cudaStream_t, dim3 grid, dim3 block, size_t shared_bytes,
                    std::function<void()> body, const kvf_emu_kernel *kernel)
{
    kvf_emu_run_grid(grid, block, shared_bytes, body, *kernel, NULL);
    return cudaSuccess;
}

/* There is no device here: all memory is its own. */
void kvf_emu_check_arg(const kvf_emu_kernel *, const void *, size_t)
{
}

const char *kvf_emu_refuses(const void *)
{
    return NULL;
}

/* ---- places ---- */

static __global__ void mark_places(uint32_t *seen, dim3 grid, dim3 block)
{
    if (gridDim.x != grid.x || gridDim.y != grid.y || gridDim.z != grid.z)
        return;
    if (blockDim.x != block.x || blockDim.y != block.y || blockDim.z != block.z)
        return;
    const uint32_t b = (blockIdx.z * grid.y + blockIdx.y) * grid.x + blockIdx.x;
    const uint32_t t = (threadIdx.z * block.y + threadIdx.y) * block.x + threadIdx.x;
    seen[b * block.x * block.y * block.z + t]++;
}

static void test_places(void)
{
    const dim3 grids[] = {dim3(1), dim3(5), dim3(3, 2, 2)};
    const dim3 blocks[] = {dim3(1), dim3(33), dim3(1024), dim3(4, 3, 5), dim3(1, 1, 64)};
    for (const dim3 &grid : grids)
        for (const dim3 &block : blocks) {
            const size_t n = (size_t)grid.x * grid.y * grid.z * block.x * block.y * block.z;
            std::vector<uint32_t> seen(n, 0);
            LAUNCH(mark_places, grid, block, 0, NULL, seen.data(), grid, block);
            for (uint32_t count : seen)
                CHECK(count == 1);
        }
}

/* Every thread says when it came; they do not wait. */
static __global__ void stamp(uint32_t *stamps, uint32_t *next)
{
    const uint32_t b = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    stamps[b * blockDim.x + threadIdx.x] = atomicAdd(next, 1u);
}

static void test_order(bool backwards)
{
    const uint32_t n = 3 * 2 * 2 * 70;
    std::vector<uint32_t> stamps(n, 0);
    uint32_t next = 0;
    LAUNCH(stamp, dim3(3, 2, 2), 70, 0, NULL, stamps.data(), &next);
    for (uint32_t i = 0; i < n; i++)
        CHECK(stamps[i] == (backwards ? n - 1 - i : i));
}

/* ---- barriers ---- */

/* y[block] = sum of x[0 .. n): shuffles within a warp, shared memory between warps. */
template <typename T>
static __global__ void __launch_bounds__(1024) sum_block(const T *__restrict__ x, T *y, uint32_t n)
{
    T *s = (T *)kvf_shared();
    T sum = 0;
    for (uint32_t i = threadIdx.x; i < n; i += blockDim.x)
        sum += x[i];
#pragma unroll
    for (int lanes = 16; lanes != 0; lanes /= 2)
        sum += __shfl_xor_sync(KVF_FULL_WARP, sum, lanes);
    if (threadIdx.x % warpSize == 0)
        s[threadIdx.x / warpSize] = sum;
    __syncthreads();
    for (uint32_t left = blockDim.x / warpSize / 2; left != 0; left /= 2) {
        if (threadIdx.x < left)
            s[threadIdx.x] += s[threadIdx.x + left];
        __syncthreads();
    }
    if (threadIdx.x == 0)
        y[blockIdx.x] = s[0];
}

template <typename T> static void test_sums_of(void)
{
    std::vector<T> x(1777), y(7);
    T expected = 0;
    for (size_t i = 0; i < x.size(); i++)
        expected += x[i] = (T)(i * i % 101);
    for (uint32_t threads = 32; threads <= 1024; threads *= 2) {
        LAUNCH(sum_block<T>, dim3(7), dim3(threads), threads / 32 * sizeof(T), NULL, x.data(),
               y.data(), (uint32_t)x.size());
        for (T sum : y)
            CHECK(sum == expected);
    }
}

/* Threads of odd warps exit early; the others meet without them, and vote. */
static __global__ void vote_block(int *answers)
{
    if (threadIdx.x / 32 % 2 == 1)
        return;
    for (int round = 0; round < 3; round++) {
        const int any = __syncthreads_or(threadIdx.x == 64 && round == 1);
        answers[threadIdx.x * 3 + (uint32_t)round] = any;
    }
}

/* The last threads to leave complete the barrier of those who wait. */
static __global__ void leave_late(int *after)
{
    if (threadIdx.x >= 40)
        return;
    __syncthreads();
    after[threadIdx.x] = 1;
}

static void test_barriers(void)
{
    const uint32_t threads = 160;
    std::vector<int> answers(threads * 3, -1);
    LAUNCH(vote_block, 1, threads, 0, NULL, answers.data());
    for (uint32_t t = 0; t < threads; t++)
        for (uint32_t round = 0; round < 3; round++)
            CHECK(answers[t * 3 + round] == (t / 32 % 2 == 1 ? -1 : round == 1));
    std::vector<int> after(128, 0);
    LAUNCH(leave_late, 1, 128, 0, NULL, after.data());
    for (uint32_t t = 0; t < 128; t++)
        CHECK(after[t] == (t < 40));
}

/* Shared memory holds nothing of the block before, and static shared memory works. */
static __global__ void stale(uint32_t *found)
{
    __shared__ uint32_t all[64];
    uint32_t *s = (uint32_t *)kvf_shared();
    const uint32_t was = s[threadIdx.x];
    s[threadIdx.x] = all[threadIdx.x] = threadIdx.x;
    __syncthreads();
    found[blockIdx.x * 64 + threadIdx.x] = was + s[63 - threadIdx.x] - all[63 - threadIdx.x];
}

static void test_shared(void)
{
    std::vector<uint32_t> found(128);
    LAUNCH(stale, 2, 64, 64 * 4, NULL, found.data());
    for (uint32_t x : found)
        CHECK(x == KVF_EMU_POISON * 0x10001u);
}

/* ---- warps ---- */

struct shuffled {
    int at[3], up[3], across[3]; /* widths 8, 16, 32 */
    uint64_t wide;
    double real;
    float half;
};

static __global__ void shuffle_all(shuffled *out)
{
    const uint32_t lane = threadIdx.x % 32;
    const int mine = 100 + (int)lane;
    shuffled *o = out + threadIdx.x;
    for (int w = 0; w < 3; w++) {
        const int width = 8 << w;
        o->at[w] = __shfl_sync(KVF_FULL_WARP, mine, 5 + (int)lane, width);
        o->up[w] = __shfl_up_sync(KVF_FULL_WARP, mine, 3, width);
        o->across[w] = __shfl_xor_sync(KVF_FULL_WARP, mine, 5, width);
    }
    o->wide = __shfl_sync(KVF_FULL_WARP, (uint64_t)lane << 40 | 7, 9);
    o->real = __shfl_up_sync(KVF_FULL_WARP, lane * 0.5, 1);
    o->half = __half2float(__shfl_xor_sync(KVF_FULL_WARP, __float2half_rn((float)lane), 1));
}

static void test_shuffles(void)
{
    std::vector<shuffled> out(64);
    LAUNCH(shuffle_all, 1, 64, 0, NULL, out.data());
    for (int t = 0; t < 64; t++) {
        const int lane = t % 32;
        const shuffled *o = &out[(size_t)t];
        for (int w = 0; w < 3; w++) {
            const int width = 8 << w, place = lane % width, base = lane - place;
            CHECK(o->at[w] == 100 + base + (5 + lane) % width);
            CHECK(o->up[w] == 100 + (place >= 3 ? lane - 3 : lane));
            CHECK(o->across[w] == 100 + (lane ^ 5));
        }
        CHECK(o->wide == ((uint64_t)9 << 40 | 7));
        CHECK(o->real == (lane > 0 ? lane - 1 : lane) * 0.5);
        CHECK(o->half == (float)(lane ^ 1));
    }
}

struct voted {
    unsigned ballot, add, least, most;
    int any;
};

/* Each of the two masks votes by itself; the odd lanes do so twice. */
static __global__ void vote_warp(const unsigned *x, voted *out)
{
    const uint32_t lane = threadIdx.x;
    const unsigned mask = lane % 2 ? 0xaaaaaaaau : 0x55555555u;
    voted v;
    for (uint32_t round = 0; round <= lane % 2; round++) {
        v.ballot = __ballot_sync(mask, x[lane] & 4);
        v.any = __any_sync(mask, x[lane] > 0xfffffff0u);
        v.add = __reduce_add_sync(mask, x[lane]);
        v.least = __reduce_min_sync(mask, x[lane]);
        v.most = __reduce_max_sync(mask, x[lane]);
    }
    out[lane] = v;
}

static void test_votes(void)
{
    uint32_t state = 5;
    unsigned x[32];
    for (unsigned &value : x)
        value = test_random(&state) * 257u;
    std::vector<voted> out(32);
    LAUNCH(vote_warp, 1, 32, 0, NULL, (const unsigned *)x, out.data());
    for (uint32_t lane = 0; lane < 32; lane++) {
        voted e = {};
        e.least = ~0u;
        for (uint32_t i = lane % 2; i < 32; i += 2) {
            e.ballot |= (x[i] & 4 ? 1u : 0u) << i;
            e.any |= x[i] > 0xfffffff0u;
            e.add += x[i];
            e.least = x[i] < e.least ? x[i] : e.least;
            e.most = x[i] > e.most ? x[i] : e.most;
        }
        const voted *v = &out[lane];
        CHECK(v->ballot == e.ballot && v->any == e.any && v->add == e.add);
        CHECK(v->least == e.least && v->most == e.most);
    }
}

/* ---- atomics, polling ---- */

struct counters {
    int sum, least, most, difference;
    unsigned bits, kept, parity, least_unsigned;
    unsigned long long wide, most_wide;
    float real;
};

static __global__ void count_all(counters *c)
{
    const int id = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    atomicAdd(&c->sum, id);
    atomicSub(&c->difference, id);
    atomicMin(&c->least, 7 - id);
    atomicMax(&c->most, id);
    atomicOr(&c->bits, 1u << id % 32);
    atomicAnd(&c->kept, ~(1u << id % 16));
    atomicXor(&c->parity, (unsigned)id);
    atomicMin(&c->least_unsigned, (unsigned)id + 3);
    atomicAdd(&c->wide, 1ull << 33);
    atomicMax(&c->most_wide, (unsigned long long)id << 33);
    atomicAdd(&c->real, 0.5f);
}

static void test_atomics(void)
{
    counters c = {};
    c.kept = c.least_unsigned = ~0u;
    const int each = 4 * 96, n = 2 * each;
    std::thread other([&c] { LAUNCH(count_all, 4, 96, 0, NULL, &c); });
    LAUNCH(count_all, 4, 96, 0, NULL, &c);
    other.join();
    CHECK(c.sum == each * (each - 1) && c.difference == -c.sum);
    CHECK(c.least == 7 - (each - 1) && c.most == each - 1);
    CHECK(c.bits == ~0u && c.kept == 0xffff0000u && c.parity == 0);
    CHECK(c.least_unsigned == 3);
    CHECK(c.wide == (unsigned long long)n << 33);
    CHECK(c.most_wide == (unsigned long long)(each - 1) << 33);
    CHECK(c.real == (float)n * 0.5f);
}

/* Every thread polls for the one before (even blocks) or after it, and all take a lock in turn. */
static __global__ void pass_on(uint32_t *words, unsigned *lock, uint32_t *total)
{
    const uint32_t n = blockDim.x, t = threadIdx.x;
    const uint32_t turn = blockIdx.x % 2 == 0 ? t : n - 1 - t;
    uint32_t *mine = words + blockIdx.x * (n + 1) + turn;
    while (kvf_load_acquire_system(mine) == 0)
        __nanosleep(100);
    kvf_store_release_system(mine + 1, kvf_load_acquire_system(mine) + 1);
    while (atomicCAS(lock, 0, 1) != 0)
        ;
    const uint32_t seen = *total;
    __nanosleep(1);
    *total = seen + 1;
    __threadfence();
    atomicExch(lock, 0u);
}

static void test_polling(void)
{
    const uint32_t n = 70;
    std::vector<uint32_t> words(2 * (n + 1), 0);
    words[0] = words[n + 1] = 1;
    unsigned lock = 0;
    uint32_t total = 0;
    LAUNCH(pass_on, 2, n, 0, NULL, words.data(), &lock, &total);
    CHECK(words[n] == n + 1 && words[2 * n + 1] == n + 1 && total == 2 * n);
}

/* ---- one thread, launches ---- */

static __global__ void bits(int *wrong)
{
    int n = 0;
    n += __popc(0xf0f0u) != 8;
    n += __popcll(~0ull) != 64;
    n += __ffs(0) != 0;
    n += __ffs(0x80) != 8;
    n += __ffsll(1ll << 40) != 41;
    n += __clz(0) != 32;
    n += __clz(1) != 31;
    n += __byte_perm(0x03020100u, 0x07060504u, 0x6420u) != 0x06040200u;
    n += __byte_perm(0x80u, 0, 0x1118u) != 0x000000ffu;
    n += min(3, -2) != -2;
    n += max(3u, 5u) != 5u;
    n += min(1.0f, 2.0f) != 1.0f;
    n += exp2f(3.0f) != 8.0f;
    n += kvf_device_ns() > kvf_device_ns();
    *wrong = n;
}

static void test_bits(void)
{
    int wrong = -1;
    LAUNCH(bits, 1, 1, 0, NULL, &wrong);
    CHECK(wrong == 0);
}

struct arguments {
    uint32_t *out;
    uint32_t values[20];
};

static __global__ void take(const __grid_constant__ arguments args, double factor)
{
    args.out[threadIdx.x] = (uint32_t)(args.values[threadIdx.x] * factor);
}

static void test_launches(void)
{
    arguments args = {};
    uint32_t out[20] = {};
    args.out = out;
    for (uint32_t i = 0; i < 20; i++)
        args.values[i] = i * 3;
    LAUNCH(take, 1, 20, 0, NULL, args, 2); /* the int becomes a double */
    for (uint32_t i = 0; i < 20; i++)
        CHECK(out[i] == i * 6);
    CHECK(kvf_cuda_launch<take>(0, 20, 0, NULL, args, 2) == cudaErrorInvalidConfiguration);
    CHECK(kvf_cuda_launch<take>(dim3(1, 65536), 20, 0, NULL, args, 2) ==
          cudaErrorInvalidConfiguration);
    CHECK(kvf_cuda_launch<take>(1, 1025, 0, NULL, args, 2) == cudaErrorInvalidConfiguration);
    CHECK(kvf_cuda_launch<take>(1, dim3(1, 1, 65), 0, NULL, args, 2) ==
          cudaErrorInvalidConfiguration);
    CHECK(kvf_cuda_launch<take>(1, 0, 0, NULL, args, 2) == cudaErrorInvalidConfiguration);
    CHECK(kvf_cuda_launch<take>(1, 20, 227 * 1024 + 1, NULL, args, 2) == cudaErrorInvalidValue);
    CHECK(kvf_cuda_launch<take>(1, 20, 227 * 1024, NULL, args, 2) == cudaSuccess);
}

int main(void)
{
    const char *const orders[] = {"forwards", "backwards"};
    test_faults();
    for (const char *order : orders) {
        setenv("KVF_EMU_ORDER", order, 1);
        std::thread([order] {
            test_places();
            test_order(strcmp(order, "backwards") == 0);
            test_sums_of<int>();
            test_sums_of<float>();
            test_sums_of<double>();
            test_barriers();
            test_shared();
            test_shuffles();
            test_votes();
            test_atomics();
            test_polling();
            test_bits();
            test_launches();
            test_copies();
            test_products();
        }).join();
        printf("%s: ok\n", order);
    }
    return 0;
}
