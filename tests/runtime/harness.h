/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_RUNTIME_HARNESS_H
#define KVF_TESTS_RUNTIME_HARNESS_H

/*
 * Helpers of the tests of the runtime: random tokens, an opened runtime with stream and cache, and
 * whole runs (prefill, then decode) whose every output is kept for comparison.
 *
 * KVF_TEST_DEVICE in the environment says on which device the suite runs: host (the default) or
 * cuda. Memory that a test gives to the library there is of test_alloc or of the device; never a
 * variable of its own, which a kernel cannot reach.
 *
 * Uses the public API only. Everything random follows from a seed that the test prints. A call that
 * fails where it must not ends the test with the library's own text.
 */

#include <kvferry/kvferry.h>

#include "common/convert.h"
#include "runtime.h"
#include "sanitizers.h"
#include "sweep.h"
#include "unit.h"

/* 1 under AddressSanitizer or ThreadSanitizer: memory is not comparable, and runs are made shorter.
 */
#define TEST_SANITIZED (KVF_ASAN || KVF_TSAN)

/* ---- random numbers: splitmix64, the same on every machine ---- */
typedef struct test_random {
    uint64_t state;
} test_random;

uint64_t test_random_next(test_random *r);
uint32_t test_random_below(test_random *r, uint32_t count);
float test_random_normal(test_random *r); /* mean 0, deviation 1 */

/* Print the seed of a test, so that a failure can be run again. */
uint64_t test_seed_print(const char *test, uint64_t seed); /* the seed */
#define test_seed(seed) test_seed_print(__func__, (seed))

/* ---- tokens of one sequence: q, k, v of every layer, as the cache takes them. Those of the same
 * seed in another type are the same numbers, rounded ---- */
typedef struct test_tokens {
    kvf_dtype dtype;
    uint32_t layers, query_heads, kv_heads, head_dim, value_dim, count;
    void *q; /* [layers, count, query_heads, head_dim] */
    void *k; /* [layers, count, kv_heads, head_dim] */
    void *v; /* [layers, count, kv_heads, value_dim] */
} test_tokens;

typedef struct test_tokens_spec {
    uint32_t count;
    uint64_t seed;
    float sharpness; /* of queries; 1 gives logits of deviation 1 */
    uint32_t
        topics; /* 0: keys are independent; else keys and queries drift among so many directions */
} test_tokens_spec;

uint32_t test_value_dim(const kvf_cache_config *c);
void test_tokens_make(test_tokens *t, const kvf_cache_config *c, const test_tokens_spec *spec);
void test_tokens_free(test_tokens *t);
/* Two token strings that agree in the first `common` tokens. */
void test_branches_make(test_tokens branch[2], const kvf_cache_config *c, uint32_t count,
                        uint32_t common, uint64_t seed);
void *test_q(const test_tokens *t, uint32_t layer, uint32_t token);
void *test_k(const test_tokens *t, uint32_t layer, uint32_t token);
void *test_v(const test_tokens *t, uint32_t layer, uint32_t token);

/* ---- a cache with its runtime and stream ---- */
typedef struct test_world {
    kvf_runtime *runtime;
    kvf_stream *stream;
    kvf_cache *cache;
    kvf_cache_config config; /* as asked */
} test_world;

/* A small geometry: 1 layer, 2 KV heads, group 2, head_dim 64, fp32, pages of 8, window 16, sink 4.
 */
kvf_cache_config test_config_small(void);
/* 2 threads, 4 KiB pages, unpinned allowed; test_hooks are those of the suite's device again. */
kvf_runtime_config test_runtime_config(void);
/* Settings of a cache as FIELD=VALUE, apart by spaces; head_mask has a digit per head. */
void test_set(kvf_cache_config *c, const char *settings);
/* Seams of the next test_runtime_open; a test sets it after test_runtime_config. */
extern kvf_runtime_test_hooks test_hooks;
kvf_status test_runtime_open(const kvf_runtime_config *rc, kvf_runtime **out, kvf_error *error);
kvf_runtime *test_runtime(void); /* with test_runtime_config; the caller's to close */
int test_on_cuda(void);          /* 1: the suite runs on the CUDA device */
/* How many of `n` rounds or steps this build has time for: half of them under a sanitizer, and a
 * quarter on the emulated device under one. */
uint32_t test_afford(uint32_t n);
/* Whether case `i` of many is run. Under a sanitizer, where each takes seconds on the emulated
 * device, KVF_TEST_CASES in the environment may be `thirds`, every third one, or `others`; so each
 * runs under one of two sanitizers. For cases in which threads have the same part. Cases that
 * were left out are told when the program ends. */
int test_takes(size_t i);
/* A method that the device has: direct needs a device that shares host memory, else it is mapped.
 */
kvf_transfer test_transfer(kvf_transfer wanted);

/* `rc` may be NULL. */
void test_world_open(test_world *w, const kvf_runtime_config *rc, const kvf_cache_config *cc);
void test_world_close(test_world *w);
/* A world, and tokens for it. */
void test_open(test_world *w, test_tokens *t, const kvf_cache_config *cc,
               const test_tokens_spec *spec);
void test_close(test_world *w, test_tokens *t);
kvf_sequence *test_sequence(test_world *w);
void test_wait(test_world *w);

/* Fails the test unless `got` is `wanted`; says what the runtime's last error was. */
void test_expect_at(kvf_runtime *runtime, kvf_status got, kvf_status wanted, const char *what,
                    const char *file, int line);
#define test_expect(runtime, call, wanted)                                                         \
    test_expect_at((runtime), (call), (wanted), #call, __FILE__, __LINE__)
#define test_ok(w, call) test_expect_at((w)->runtime, (call), KVF_OK, #call, __FILE__, __LINE__)
/* The same, and that this is the whole text of the runtime's last error. */
#define test_refused(runtime, call, wanted, words)                                                 \
    (test_expect((runtime), (call), (wanted)),                                                     \
     assert_string_equal(kvf_runtime_error(runtime)->text, (words)))

/* A device asks before whatever may fail (kvf_device_set_fault): the question that is so many
 * from now is answered with yes; 0 = none. Any thread may ask. `user` may be the only one that
 * counts. */
extern _Atomic int test_refuse_in;
int test_refuse(void *user, const char *question);
/* An allocator that asks as well, and gives out nothing that is zero. */
kvf_allocator test_asking_allocator(void);
/* The first question of `call` is answered with yes, then the second, up to the last. Each time the
 * call fails with an error or does without, undoes what it made, and nothing of it is left. Returns
 * how many failed. */
uint32_t test_refuse_each(kvf_runtime *runtime, kvf_status (*call)(void *user, kvf_error *error),
                          void *user);

/* Tokens first .. first+count-1 into one layer, in chunks of at most `chunk`; out may be NULL. */
typedef struct test_range {
    uint32_t layer, first, count, chunk;
    uint32_t append_only; /* 1: q = NULL */
} test_range;
void test_prefill(test_world *w, kvf_sequence *s, const test_tokens *t, const test_range *range,
                  void *out);

/* Calls for some tokens of one layer of one sequence, and for one token. */
kvf_prefill_args test_chunk_args(kvf_sequence *s, const test_tokens *t, uint32_t layer,
                                 uint32_t first, uint32_t count, void *out);
kvf_decode_args test_step_args(kvf_sequence *const *s, const test_tokens *t, uint32_t layer,
                               uint32_t token, void *out);

/* Page lists with as much room as a call on `batch` sequences may need. */
kvf_page_lists test_page_lists(const kvf_cache *cache, uint32_t batch);
void test_page_lists_free(const kvf_page_lists *lists);

/* Rows of calls: tokens of any sequences side by side, and what becomes of them. */
typedef struct test_rows {
    uint32_t query_heads;
    size_t q_bytes, k_bytes, v_bytes, out_bytes; /* of one row */
    char *q, *k, *v, *out;                       /* [rows, heads, head_dim or value_dim] */
    float *lse;                                  /* [rows, query_heads] */
} test_rows;

void test_rows_open(test_rows *r, const kvf_cache_config *c, size_t count);
void test_rows_close(test_rows *r);
void test_rows_put(const test_rows *r, size_t row, const test_tokens *t, uint32_t layer,
                   uint32_t token);
/* A step of `batch` sequences, whose rows begin at `row`. */
kvf_decode_args test_rows_args(const test_rows *r, size_t row, kvf_sequence *const *s,
                               uint32_t batch, uint32_t layer);

/* One token of one layer of one sequence; enqueues only. out is [query_heads, value_dim]. */
void test_decode(test_world *w, kvf_sequence *s, const test_tokens *t, uint32_t layer,
                 uint32_t token, void *out, float *lse);

/* The same of every layer: tokens first .. first + count - 1 in chunks, or in steps, whose outputs
 * [count, layers, query_heads, value_dim] are the caller's to free. */
void test_fill(test_world *w, kvf_sequence *s, const test_tokens *t, uint32_t first,
               uint32_t count);
void *test_steps(test_world *w, kvf_sequence *s, const test_tokens *t, uint32_t first,
                 uint32_t count);
size_t test_steps_bytes(const test_tokens *t, uint32_t count);
/* The same steps again give these bytes, which are freed. */
void test_steps_again(void *wanted, test_world *w, kvf_sequence *s, const test_tokens *t,
                      uint32_t first, uint32_t count);

/* ---- a whole run: prompt in chunks, then steps, every layer, waited for only at the end ---- */
typedef struct test_scenario {
    const kvf_runtime_config *rc; /* NULL = test_runtime_config */
    kvf_cache_config cc;
    test_tokens_spec tokens; /* count is set by the run: prompt + steps */
    uint32_t prompt, steps, chunk;
} test_scenario;

typedef struct test_trace {
    size_t out_bytes, prefill_bytes, lse_count;
    void *out;     /* [steps, layers, query_heads, value_dim] */
    void *prefill; /* [layers, prompt, query_heads, value_dim] */
    float *lse;    /* [steps, layers, query_heads] */
    kvf_dtype dtype;
    kvf_stats stats;
} test_trace;

void test_run(const test_scenario *scenario, test_trace *trace);
void test_trace_free(test_trace *trace);
/* Decode outputs and LSE, bit for bit. */
void test_same_bits_at(const test_trace *a, const test_trace *b, const char *what, const char *file,
                       int line);
#define test_same_bits(a, b, what) test_same_bits_at((a), (b), (what), __FILE__, __LINE__)

/* Largest |a - b| over `count` elements of `dtype`; NaN on either side gives infinity. */
double test_distance(const void *a, const void *b, kvf_dtype dtype, size_t count);
/* The error of rounding to `dtype` and of fp32 sums, for values of size about 1 to 4. */
double test_tolerance(kvf_dtype dtype);
#define TEST_LSE_TOLERANCE 5e-4

size_t test_dtype_bytes(kvf_dtype dtype);
/* The type of queries, keys, values and outputs. */
kvf_dtype test_tensor_dtype(const kvf_cache_config *c);

/* Both caches have done the same work, page by page. Lists of the CUDA device give away what they
 * meet first, so rows that share pages may differ there in what was a hit: `moves` is 0. */
void test_same_stats(const test_world *a, const test_world *b, int moves);

/* ---- memory that kernels and the test may touch: pinned on CUDA; zeroed, aligned to 64 ---- */
void *test_alloc(size_t bytes);
void test_release(void *p); /* NULL is fine */
/* The same until the program ends: for what would else be a small array of the test. */
void *test_scratch(size_t bytes);
/* Whatever both sides are; waits for nothing else. */
void test_copy(void *to, const void *from, size_t bytes);
/* 1 if the tables of every list are valid; the device is idle. */
struct kvf_residency;
int test_residency_is_valid(const struct kvf_residency *residency);
/* A piece of device memory as the host sees it, for the next few calls; NULL stays NULL. */
const void *test_seen(const void *address, size_t bytes);

#endif
