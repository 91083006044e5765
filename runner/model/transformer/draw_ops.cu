/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Drawing tokens (draw_ops.h), one block per row.
 *
 * Bound by memory: a pass reads the row's logits, 513 KB at 128,256 tokens, which the product left
 * in L2. Greedy takes one pass. A draw takes two more, top-k and top-p two each: the weights of
 * bins of equal likelihood are added up in shared memory, then the tokens of the bin that matters
 * are put in order. Where they are more than fit, a bin is the next digits of their keys, and two
 * passes more. Integer sums have no order, so atomics change nothing.
 */

#include "draw_ops.h"

#include "cuda.cuh"

#define THREADS    512u
#define WARPS      (THREADS / 32u)
#define BINS       2048u
#define DIGIT_BITS 11u
#define LIST       1024u
#define LOADS      16u

static_assert(KVF_DRAW_BINS <= BINS, "bins of distances and of digits are the same");

typedef struct draw_shared {
    unsigned long long bins[BINS];
    uint64_t key[LIST];    /* of tokens of a bin */
    uint64_t weight[LIST]; /* theirs */
    uint64_t partial[WARPS];
    uint64_t result; /* a key */
    uint64_t wanted; /* of the bin */
    uint32_t bin;
    unsigned held; /* tokens in the bin */
} draw_shared;

/* A row, and which of its tokens count. */
typedef struct draw_row {
    const float *logits;
    const uint32_t *seen;
    kvf_draw_settings settings;
    uint32_t vocab_size;
    float highest;
    uint64_t last;     /* key */
    uint64_t mass_min; /* where masses count */
} draw_row;

typedef struct draw_token {
    uint64_t key, distance, weight;
} draw_token;

/* visit(id, logit) for every finite logit as the penalty leaves it. Loads come first: 32 KiB of
 * them are on their way. */
template <typename F> static __device__ __forceinline__ void each_logit(const draw_row &r, F visit)
{
    for (uint32_t first = threadIdx.x; first < r.vocab_size; first += LOADS * THREADS) {
        float logit[LOADS];
#pragma unroll
        for (uint32_t i = 0; i < LOADS; i++) {
            const uint32_t id = first + i * THREADS;
            logit[i] = id < r.vocab_size ? r.logits[id] : INFINITY;
        }
#pragma unroll
        for (uint32_t i = 0; i < LOADS; i++) {
            const uint32_t id = first + i * THREADS;
            float x = logit[i];
            if (r.settings.penalty != 1.0 && id < r.vocab_size && r.seen[id / 32] >> id % 32 & 1)
                x = kvf_draw_penalize(x, r.settings.penalty);
            if (kvf_draw_is_finite(x))
                visit(id, x);
        }
    }
}

/* visit(token) for every token that counts. */
template <typename F>
static __device__ __forceinline__ void each_token(const draw_row &r, kvf_draw_goal goal, F visit)
{
    each_logit(r, [&](uint32_t id, float logit) {
        draw_token t;
        t.key = kvf_draw_key(logit, id);
        t.distance = kvf_draw_distance(&r.settings, r.highest, logit);
        t.weight = goal == KVF_DRAW_COUNT ? 1 : kvf_draw_mass(t.distance);
        if (t.distance < KVF_DRAW_FAR && t.key <= r.last &&
            (goal == KVF_DRAW_COUNT || t.weight >= r.mass_min))
            visit(t);
    });
}

/* The smallest key of the row's tokens, in every thread. */
static __device__ uint64_t first_key(const draw_row &r, draw_shared *s)
{
    uint64_t key = UINT64_MAX;
    each_logit(r, [&](uint32_t id, float logit) {
        const uint64_t one = kvf_draw_key(logit, id);
        key = one < key ? one : key;
    });
    for (int step = 16; step > 0; step >>= 1) {
        const uint64_t other = __shfl_xor_sync(KVF_FULL_WARP, key, step);
        key = other < key ? other : key;
    }
    if (threadIdx.x % 32 == 0)
        s->partial[threadIdx.x / 32] = key;
    __syncthreads();
    for (uint32_t w = 0; w < WARPS; w++)
        key = s->partial[w] < key ? s->partial[w] : key;
    return key;
}

/* Levels: bins of distances, then the digits of keys. */
typedef struct draw_level {
    uint32_t index;  /* 0 = distances */
    uint32_t shift;  /* of the digit in a key */
    uint64_t prefix; /* of keys: what is above the digit */
    uint32_t bin;    /* of distances */
} draw_level;

static __device__ __forceinline__ uint32_t digit_of(const draw_level &l, const draw_token &t)
{
    return l.index == 0 ? (uint32_t)(t.distance >> KVF_DRAW_BIN_SHIFT)
                        : (uint32_t)(t.key >> l.shift) & (BINS - 1);
}

static __device__ __forceinline__ bool is_of(const draw_level &l, const draw_token &t)
{
    return l.index == 0 || (t.distance >> KVF_DRAW_BIN_SHIFT == l.bin &&
                            (l.index == 1 || t.key >> (l.shift + DIGIT_BITS) == l.prefix));
}

/* Sets bin and wanted for the bin that reaches what is wanted of all (level 0), or of the bin
 * before. Clears the bins. Barriers: all additions are there before. */
static __device__ void find_bin(const draw_row &r, draw_shared *s, kvf_draw_goal goal,
                                uint32_t level)
{
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, mine = BINS / THREADS;
    unsigned long long *bins = s->bins + threadIdx.x * mine;
    uint64_t sum = 0, before = 0, total = 0;
    for (uint32_t i = 0; i < mine; i++)
        sum += bins[i];
    uint64_t scan = sum;
    for (uint32_t step = 1; step < 32; step *= 2) {
        const uint64_t other = __shfl_up_sync(KVF_FULL_WARP, scan, step);
        scan += lane >= step ? other : 0;
    }
    if (lane == 31)
        s->partial[warp] = scan;
    uint64_t wanted = s->wanted;
    __syncthreads();
    for (uint32_t w = 0; w < WARPS; w++) {
        before += w < warp ? s->partial[w] : 0;
        total += s->partial[w];
    }
    before += scan - sum;
    if (level == 0) {
        uint64_t state = r.settings.state;
        wanted = kvf_draw_wanted(&r.settings, goal, total, kvf_random_next(&state));
    }
    for (uint32_t i = 0; i < mine; i++) {
        const uint64_t n = bins[i];
        if (before < wanted && wanted <= before + n) {
            s->bin = threadIdx.x * mine + i;
            s->wanted = wanted - before;
        }
        before += n;
        bins[i] = 0;
    }
    if (threadIdx.x == 0)
        s->held = 0;
    __syncthreads();
}

/* Sets result to the key of the list with which, in their order, weights reach what is wanted. */
static __device__ void find_in_list(draw_shared *s, uint32_t count)
{
    for (uint32_t i = threadIdx.x; i < count; i += THREADS) {
        uint64_t before = 0;
        for (uint32_t j = 0; j < count; j++)
            before += s->key[j] < s->key[i] ? s->weight[j] : 0;
        if (before < s->wanted && s->wanted <= before + s->weight[i])
            s->result = s->key[i];
    }
    __syncthreads();
}

/* The key of the last token that is wanted, in every thread. There is one that counts, and bins are
 * zero before and after. */
static __device__ uint64_t reach(const draw_row &r, draw_shared *s, kvf_draw_goal goal)
{
    draw_level level = {};
    for (;;) {
        each_token(r, goal, [&](const draw_token &t) {
            if (is_of(level, t))
                atomicAdd(&s->bins[digit_of(level, t)], (unsigned long long)t.weight);
        });
        __syncthreads();
        find_bin(r, s, goal, level.index);
        const uint32_t bin = s->bin;
        each_token(r, goal, [&](const draw_token &t) {
            if (!is_of(level, t) || digit_of(level, t) != bin)
                return;
            const unsigned place = atomicAdd(&s->held, 1u);
            if (place < LIST) {
                s->key[place] = t.key;
                s->weight[place] = t.weight;
            }
        });
        __syncthreads();
        if (s->held <= LIST)
            break;
        if (level.index == 0) {
            level.bin = bin;
            level.shift = 64 - DIGIT_BITS;
        } else {
            level.prefix = level.prefix << DIGIT_BITS | bin;
            level.shift -= DIGIT_BITS; /* the last eleven are of a bin of 2^9 tokens, which fit */
        }
        level.index++;
    }
    find_in_list(s, s->held);
    return s->result;
}

/* The key of the token, in every thread; UINT64_MAX if no logit is finite. */
static __device__ uint64_t draw(draw_row &r, draw_shared *s)
{
    const uint64_t best = first_key(r, s);
    if (best == UINT64_MAX || r.settings.is_greedy)
        return best;
    r.highest = kvf_draw_key_logit(best);
    r.last = UINT64_MAX;
    for (uint32_t i = threadIdx.x; i < BINS; i += THREADS)
        s->bins[i] = 0;
    __syncthreads();
#pragma unroll 1
    for (uint32_t goal = KVF_DRAW_COUNT; goal <= KVF_DRAW_TOKEN; goal++) {
        const bool skips = (goal == KVF_DRAW_COUNT && r.settings.top_k == 0) ||
                           (goal == KVF_DRAW_SHARE && r.settings.share == 0);
        r.mass_min = goal == KVF_DRAW_TOKEN ? r.settings.mass_min : 1;
        if (!skips)
            r.last = reach(r, s, (kvf_draw_goal)goal);
    }
    return r.last;
}

static __global__ void __launch_bounds__(THREADS, 1)
    draw_kernel(const __grid_constant__ kvf_draw_args a)
{
    draw_shared *s = (draw_shared *)(void *)kvf_shared();
    const uint32_t row = blockIdx.x;
    uint32_t *seen = a.seen + (size_t)row * a.seen_words;
    draw_row r = {};
    r.logits = a.logits + (size_t)row * a.vocab_size;
    r.seen = seen;
    r.settings = a.settings[row];
    r.vocab_size = a.vocab_size;
    const uint64_t key = draw(r, s);
    const uint32_t id = key == UINT64_MAX ? UINT32_MAX : (uint32_t)key;
    __syncthreads();
    if (threadIdx.x != 0)
        return;
    const uint32_t turn = a.turns[row];
    if (id != UINT32_MAX) {
        seen[id / 32] |= 1u << id % 32;
        if (!r.settings.is_greedy)
            (void)kvf_random_next(&a.settings[row].state);
    }
    a.ids[row] = id == UINT32_MAX ? 0 : id;
    a.positions[row]++;
    a.turns[row] = turn + 1;
    a.drawn[(size_t)(turn % a.places) * a.rows_max + row] = id;
}

extern "C" int kvf_draw_cuda(const kvf_draw_args *args, void *stream)
{
    return (int)kvf_cuda_launch<draw_kernel>(dim3(args->rows), dim3(THREADS), sizeof(draw_shared),
                                             (cudaStream_t)stream, *args);
}

/* Those who wait sleep: a step takes milliseconds. */
extern "C" int kvf_draw_event_create(void **event)
{
    return (int)cudaEventCreateWithFlags((cudaEvent_t *)event,
                                         cudaEventDisableTiming | cudaEventBlockingSync);
}

extern "C" void kvf_draw_event_destroy(void *event)
{
    if (event)
        (void)cudaEventDestroy((cudaEvent_t)event);
}

extern "C" int kvf_draw_event_record(void *event, void *stream)
{
    return (int)cudaEventRecord((cudaEvent_t)event, (cudaStream_t)stream);
}

extern "C" int kvf_draw_event_wait(void *event)
{
    return (int)cudaEventSynchronize((cudaEvent_t)event);
}
