/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Pruned caches: keeping tokens against a fresh sequence that was given only those,
 * clearing, what is refused, and what comes after: decode, forks, replays, dense attention beside
 * it, with layers of different lengths.
 *
 * Looks inside, because pruning does. Outputs are compared bit for bit.
 */

#include "cache.h"
#include "retain_world.h"

#include <math.h>

static uint32_t between(test_random *r, uint32_t low, uint32_t high)
{
    return low + test_random_below(r, high - low + 1);
}

/* ---- keeping ---- */

/* A fresh sequence with what `ids` say of tokens of layer 0. */
static void append_only(test_world *w, kvf_sequence *s, const test_tokens *t, const uint32_t *ids,
                        uint32_t count)
{
    const size_t row = t->head_dim * test_dtype_bytes(t->dtype);
    char *k = must(t->kv_heads * row), *v = must(t->kv_heads * row);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t position = 0;
        for (uint32_t h = 0; h < t->kv_heads; h++) {
            const uint32_t id = ids[h * count + i];
            position = id > position ? id : position;
            memcpy(k + h * row, (char *)test_k(t, 0, id) + h * row, row);
            memcpy(v + h * row, (char *)test_v(t, 0, id) + h * row, row);
        }
        test_ok(w,
                kvf_prefill(w->cache,
                            &(kvf_prefill_args){
                                .sequence = s, .tokens = 1, .k = k, .v = v, .positions = &position},
                            w->stream));
        test_wait(w);
    }
    test_release(k);
    test_release(v);
}

static void same_layer(test_world *w, const kvf_sequence *a, const kvf_sequence *b)
{
    const kvf_paging *p = &w->cache->kv_groups[0].dims.paging;
    const uint32_t n = kvf_sequence_length(a, 0);
    test_wait(w);
    assert_int_equal(n, kvf_sequence_length(b, 0));
    assert_int_equal(a->layers[0].sealed, b->layers[0].sealed);
    for (uint32_t i = 0; i < n; i++)
        assert_int_equal(kvf_sequence_position(a, 0, i), kvf_sequence_position(b, 0, i));
    for (uint32_t h = 0; h < p->kv_heads; h++)
        for (uint32_t i = 0; i < a->layers[0].sealed; i++)
            assert_memory_equal(test_seen(kvf_page_address(a, 0, h, i), kvf_page_bytes(&p->shape)),
                                test_seen(kvf_page_address(b, 0, h, i), kvf_page_bytes(&p->shape)),
                                kvf_page_bytes(&p->shape));
    assert_true(kvf_page_pool_is_valid(&w->cache->kv_groups[0].pool));
}

/* Both decode the same tokens; every output must have the same bits. */
static void same_decode(test_world *w, kvf_sequence *a, kvf_sequence *b, const test_tokens *t,
                        uint32_t first, uint32_t steps)
{
    const size_t row = (size_t)t->query_heads * t->head_dim * test_dtype_bytes(t->dtype);
    char *out[2] = {must(row), must(row)};
    for (uint32_t i = 0; i < steps; i++) {
        test_decode(w, a, t, 0, first + i, out[0], NULL);
        test_decode(w, b, t, 0, first + i, out[1], NULL);
        test_wait(w);
        assert_memory_equal(out[0], out[1], row);
    }
    test_release(out[0]);
    test_release(out[1]);
}

typedef struct keep_case {
    kvf_cache_config cc;
    uint32_t arena; /* as kvf_runtime.prefill_arena */
    subset subset;
    uint32_t chunk, steps;
    uint32_t decoded; /* of the length, by decode steps */
} keep_case;

static void run_keep(const keep_case *x, uint64_t seed)
{
    test_world w;
    test_tokens t;
    test_random r = {seed};
    const uint32_t n = x->subset.length;
    test_tokens_make(
        &t, &x->cc,
        &(test_tokens_spec){.count = n + x->steps, .seed = seed, .sharpness = 2.0f, .topics = 4});
    open_world(&w, &x->cc, x->arena);
    kvf_sequence *s = test_sequence(&w), *fresh = test_sequence(&w);
    const size_t row = (size_t)t.query_heads * t.head_dim * test_dtype_bytes(t.dtype);
    char *out = must(row);
    test_prefill(&w, s, &t, &(test_range){.count = n - x->decoded, .chunk = x->chunk}, NULL);
    for (uint32_t i = n - x->decoded; i < n; i++)
        test_decode(&w, s, &t, 0, i, out, NULL);
    uint32_t *ids = retain_choose(&r, x->cc.kv_heads, &x->subset);
    void *work = must(kvf_keep_work_bytes(w.cache));
    uint32_t *given = must(x->cc.kv_heads * x->subset.count * sizeof *ids);
    memcpy(given, ids, x->cc.kv_heads * x->subset.count * sizeof *ids);
    test_ok(&w, kvf_sequence_keep(w.cache, s, 0, given, x->subset.count, work, w.stream));
    memset(given, 0xff, x->cc.kv_heads * x->subset.count * sizeof *ids);
    test_wait(&w);
    memset(work, 0xff, kvf_keep_work_bytes(w.cache));
    append_only(&w, fresh, &t, ids, x->subset.count);
    same_layer(&w, s, fresh);
    retain_seed_both(&w, s, fresh, &r);
    same_decode(&w, s, fresh, &t, n, x->steps);
    kvf_sequence_destroy(s);
    kvf_sequence_destroy(fresh);
    test_wait(&w);
    assert_int_equal(w.cache->kv_groups[0].pool.free_count, w.cache->kv_groups[0].dims.block_count);
    test_close(&w, &t);
    test_release(out);
    test_release(ids);
    test_release(given);
    test_release(work);
}

static kvf_cache_config config_full(void)
{
    kvf_cache_config cc = test_config_small();
    cc.select = KVF_SELECT_FULL;
    cc.tokens_max = 1024;
    cc.sequences_max = 3;
    cc.observe_window = 8;
    return cc;
}

static void kept_tokens_are_a_fresh_sequence(void **state)
{
    const uint64_t seed = 4711;
    static const kvf_select selects[] = {KVF_SELECT_FULL, KVF_SELECT_QUEST, KVF_SELECT_HYBRID,
                                         KVF_SELECT_STREAMING};
    test_random r = {seed};
    test_seed_print(__func__, seed);
    for (uint32_t i = 0; i < test_afford(40); i++) {
        keep_case x = {.cc = config_full(), .chunk = between(&r, 16, 128), .steps = 20};
        x.cc.dtype = (kvf_dtype)(i % 3);
        x.cc.kv_heads = between(&r, 1, 3);
        x.cc.query_heads = x.cc.kv_heads * 2;
        x.cc.prefill_chunk_max = between(&r, x.chunk, 200);
        x.cc.select = selects[i % 4];
        x.arena = i % 4 > 1;
        x.cc.transfer =
            test_transfer(i % 2 && !x.arena ? KVF_TRANSFER_DIRECT : KVF_TRANSFER_GATHER);
        x.subset.length = between(&r, 2, 500);
        x.decoded = i % 5 == 2 || i % 4 == 2 ? between(&r, 0, x.subset.length - 1) % 40 : 0;
        if (i % 8 == 2) /* before any refresh, as after a prompt */
            x.decoded = 0;
        x.subset.count = i % 6 == 5 ? x.subset.length : between(&r, 1, x.subset.length);
        x.subset.window = between(&r, 0, 20);
        x.subset.front = i % 3 == 0 ? x.subset.count / 2 : 0;
        if (x.subset.window + x.subset.front > x.subset.count)
            x.subset.window = x.subset.front = 0;
        run_keep(&x, seed + i);
    }
}

/* ---- what is kept beside tokens ---- */

static float *scores_of(test_world *w, kvf_sequence *s, const kvf_scores_args *args)
{
    const size_t count = (size_t)w->config.kv_heads * args->candidates;
    float *out = must(count * sizeof *out);
    float *work = must(kvf_scores_work_floats(w->cache) * sizeof *work);
    kvf_scores_args a = *args;
    a.out = out;
    test_ok(w, kvf_sequence_scores(w->cache, s, &a, work, w->stream));
    test_wait(w);
    test_release(work);
    return out;
}

/* Kept queries of tokens that were kept score as those queries given do; others are gone. */
static void kept_queries_stay_valid(void **state)
{
    const uint64_t seed = test_seed(91);
    for (uint32_t window = 0; window < 24; window += 5) {
        test_world w;
        test_tokens t;
        test_random r = {seed + window};
        kvf_cache_config cc = config_full();
        cc.observe_window = 20;
        const uint32_t n = 133, count = 70;
        open_world(&w, &cc, 0);
        test_tokens_make(&t, &cc, &(test_tokens_spec){.count = n, .seed = seed, .sharpness = 2.0f});
        kvf_sequence *s = test_sequence(&w), *fresh = test_sequence(&w);
        test_prefill(&w, s, &t, &(test_range){.count = n, .chunk = 50}, NULL);
        uint32_t *ids = retain_choose(&r, cc.kv_heads,
                                      &(subset){.length = n, .count = count, .window = window});
        for (uint32_t h = 0; h < cc.kv_heads; h++) /* the token before the window goes */
            if (ids[h * count + count - window - 1] == n - window - 1)
                ids[h * count + count - window - 1] -=
                    ids[h * count + count - window - 2] < n - window - 2 ? 1 : 0;
        void *work = must(kvf_keep_work_bytes(w.cache));
        test_ok(&w, kvf_sequence_keep(w.cache, s, 0, ids, count, work, w.stream));
        append_only(&w, fresh, &t, ids, count);
        kvf_scores_args a = {.window = window,
                             .candidates = count,
                             .pool = KVF_POOL_MAX,
                             .pool_width = 5,
                             .group_reduce = KVF_GROUP_SUM};
        if (window) {
            kvf_scores_args given = a;
            given.q = test_q(&t, 0, n - window);
            given.first = count - window;
            float *x = scores_of(&w, s, &a), *y = scores_of(&w, fresh, &given);
            assert_memory_equal(x, y, cc.kv_heads * count * sizeof *x);
            test_release(x);
            test_release(y);
        }
        float one = 0.0f;
        a.window = window + 1;
        a.out = &one;
        test_expect(w.runtime, kvf_sequence_scores(w.cache, s, &a, &one, w.stream), KVF_INVALID);
        test_close(&w, &t);
        test_release(ids);
        test_release(work);
    }
}

/* ---- clearing ---- */

static void a_cleared_sequence_is_a_fresh_one(void **state)
{
    const uint64_t seed = test_seed(5150);
    for (uint32_t i = 0; i < 6; i++) {
        test_world w;
        test_tokens t;
        kvf_cache_config cc = test_config_small();
        cc.sequences_max = 2;
        cc.static_ratio = i == 3 ? KVF_STATIC_RATIO_AUTO : 0.25f;
        cc.transfer = test_transfer(i ? KVF_TRANSFER_GATHER : KVF_TRANSFER_DIRECT);
        open_world(&w, &cc, i % 3);
        test_tokens_make(&t, &cc,
                         &(test_tokens_spec){.count = 400, .seed = seed, .sharpness = 2.0f});
        kvf_sequence *s = test_sequence(&w), *fresh = test_sequence(&w);
        char *out = must(cc.query_heads * cc.head_dim * 4);
        test_prefill(&w, s, &t, &(test_range){.count = 250, .chunk = 60}, NULL);
        for (uint32_t k = 250; k < 280; k++)
            test_decode(&w, s, &t, 0, k, out, NULL);
        if (i == 5) { /* also one that went wrong */
            float *bad = must(cc.kv_heads * cc.head_dim * sizeof *bad);
            bad[3] = NAN;
            test_ok(&w,
                    kvf_prefill(w.cache,
                                &(kvf_prefill_args){.sequence = s, .tokens = 1, .k = bad, .v = bad},
                                w.stream));
            test_wait(&w);
            test_expect(w.runtime, kvf_sequence_seed(w.cache, s, 0, bad, w.stream), KVF_NOT_FINITE);
            test_release(bad);
        }
        test_ok(&w, kvf_sequence_clear(w.cache, s));
        assert_int_equal(kvf_sequence_length(s, 0), 0);
        assert_int_equal(w.cache->kv_groups[0].pool.free_count,
                         w.cache->kv_groups[0].dims.block_count);
        test_prefill(&w, s, &t, &(test_range){.first = 30, .count = 260, .chunk = 60}, NULL);
        test_prefill(&w, fresh, &t, &(test_range){.first = 30, .count = 260, .chunk = 60}, NULL);
        same_layer(&w, s, fresh);
        same_decode(&w, s, fresh, &t, 290, 40);
        test_close(&w, &t);
        test_release(out);
    }
}

/* Behind a prompt in a cache with streaming heads the next sequence finds nothing of it, and the
 * cache says that it cannot be pruned. */
static void streaming_heads_start_over(void **state)
{
    static const uint8_t mask[] = {1, 0};
    test_world w;
    test_tokens t;
    kvf_cache_config cc = config_full();
    cc.head_mask = mask;
    cc.streaming_sink = 4;
    cc.streaming_recent = 32;
    const uint32_t n = 150;
    open_world(&w, &cc, 0);
    test_tokens_make(&t, &cc, &(test_tokens_spec){.count = n + 30, .seed = 3, .sharpness = 2.0f});
    kvf_sequence *s = test_sequence(&w), *fresh = test_sequence(&w);
    const test_range range = {.first = 20, .count = n, .chunk = 60};
    test_prefill(&w, s, &t, &(test_range){.count = n, .chunk = 60}, NULL);
    kvf_prune_config pc;
    kvf_prune *prune = NULL;
    kvf_prune_config_init(&pc, NULL);
    test_expect(w.runtime, kvf_prune_open(w.cache, &pc, &prune, NULL), KVF_UNSUPPORTED);
    assert_null(prune);
    kvf_sequence_destroy(s);
    s = test_sequence(&w);
    test_prefill(&w, s, &t, &range, NULL);
    test_prefill(&w, fresh, &t, &range, NULL);
    same_decode(&w, s, fresh, &t, n + 20, 10);
    test_close(&w, &t);
}

/* ---- forks, refusals, layers ---- */

/* A fork that keeps some tokens leaves its parent alone; without room it leaves itself alone. */
static void a_fork_keeps_for_itself(void **state)
{
    const uint64_t seed = test_seed(612);
    for (uint32_t i = 0; i < 4; i++) {
        test_world w;
        test_tokens t;
        test_random r = {seed + i};
        const uint32_t n = 300, count = 200;
        const bool has_room = i % 2;
        kvf_cache_config cc = config_full();
        cc.host_tokens_max = has_room ? 0 : n;
        cc.transfer = test_transfer(i > 1 ? KVF_TRANSFER_GATHER : KVF_TRANSFER_DIRECT);
        open_world(&w, &cc, i > 1);
        test_tokens_make(&t, &cc,
                         &(test_tokens_spec){.count = n + 20, .seed = seed, .sharpness = 2.0f});
        kvf_sequence *parent = test_sequence(&w), *child = NULL, *twin = NULL;
        test_prefill(&w, parent, &t, &(test_range){.count = n, .chunk = 100}, NULL);
        test_ok(&w, kvf_sequence_fork(w.cache, parent, w.stream, &child));
        test_ok(&w, kvf_sequence_fork(w.cache, parent, w.stream, &twin));
        while (!has_room && w.cache->kv_groups[0].pool.free_count) { /* none is left */
            kvf_block block;
            assert_int_equal(
                kvf_page_pool_acquire_near(&w.cache->kv_groups[0].pool, KVF_BLOCK_NONE, &block),
                KVF_OK);
        }
        uint32_t *ids =
            retain_choose(&r, cc.kv_heads, &(subset){.length = n, .count = count, .front = 40});
        void *work = must(kvf_keep_work_bytes(w.cache));
        test_expect(w.runtime, kvf_sequence_keep(w.cache, child, 0, ids, count, work, w.stream),
                    has_room ? KVF_OK : KVF_FULL);
        same_layer(&w, parent, twin);
        if (has_room) {
            kvf_sequence_destroy(twin);
            twin = test_sequence(&w);
            append_only(&w, twin, &t, ids, count);
        }
        same_layer(&w, child, twin);
        same_decode(&w, child, twin, &t, n, has_room ? 20 : 3);
        test_close(&w, &t);
        test_release(ids);
        test_release(work);
    }
}

static void bad_calls_change_nothing(void **state)
{
    test_world w;
    test_tokens t;
    kvf_cache_config cc = config_full();
    const uint32_t n = 100;
    open_world(&w, &cc, 0);
    test_tokens_make(&t, &cc, &(test_tokens_spec){.count = n + 9, .seed = 1, .sharpness = 2.0f});
    kvf_sequence *s = test_sequence(&w), *twin = test_sequence(&w);
    test_prefill(&w, s, &t, &(test_range){.count = n, .chunk = 100}, NULL);
    test_prefill(&w, twin, &t, &(test_range){.count = n, .chunk = 100}, NULL);
    uint32_t good[] = {1, 5, 99, 0, 5, 98}, order[] = {1, 5, 99, 5, 0, 98};
    uint32_t twice[] = {1, 5, 5, 0, 5, 98}, beyond[] = {1, 5, 99, 0, 5, 100};
    void *work = must(kvf_keep_work_bytes(w.cache));
#define BAD(call) test_expect(w.runtime, call, KVF_INVALID)
    BAD(kvf_sequence_keep(w.cache, s, 0, order, 3, work, w.stream));
    BAD(kvf_sequence_keep(w.cache, s, 0, twice, 3, work, w.stream));
    BAD(kvf_sequence_keep(w.cache, s, 0, beyond, 3, work, w.stream));
    BAD(kvf_sequence_keep(w.cache, s, 0, good, 0, work, w.stream));
    BAD(kvf_sequence_keep(w.cache, s, 0, good, 101, work, w.stream));
    BAD(kvf_sequence_keep(w.cache, s, 7, good, 3, work, w.stream));
    BAD(kvf_sequence_keep(w.cache, s, 0, NULL, 3, work, w.stream));
    BAD(kvf_sequence_keep(w.cache, NULL, 0, good, 3, work, w.stream));
    BAD(kvf_sequence_seed(w.cache, s, 7, work, w.stream));
    BAD(kvf_sequence_seed(w.cache, s, 0, NULL, w.stream));
    BAD(kvf_sequence_clear(w.cache, NULL));
    float *out = test_scratch(400 * sizeof *out);
    kvf_scores_args a = {
        .window = 8, .candidates = 92, .pool_width = 7, .out = out, .pool = KVF_POOL_MAX};
    kvf_scores_args bad[] = {a, a, a, a, a, a, a, a};
    bad[0].window = 0;
    bad[1].window = 9; /* more than observe_window */
    bad[2].pool_width = 6;
    bad[3].candidates = cc.tokens_max + 1;
    bad[4].begin = 93;
    bad[5].layer = 1;
    bad[6].out = NULL;
    bad[7].q = test_q(&t, 0, 0);
    bad[7].first = 93;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        BAD(kvf_sequence_scores(w.cache, s, &bad[i], out, w.stream));
#undef BAD
    same_layer(&w, s, twin);
    same_decode(&w, s, twin, &t, n, 9);
    test_close(&w, &t);
    test_release(work);
}

/* One step of both layers, enqueued or replayed. */
static void step_layers(test_world *w, kvf_sequence **s, const test_tokens *t, uint32_t token,
                        kvf_recording *recording, char *place)
{
    const size_t q = t->query_heads * t->head_dim * test_dtype_bytes(t->dtype);
    const size_t kv = t->kv_heads * t->head_dim * test_dtype_bytes(t->dtype);
    for (uint32_t layer = 0; layer < 2; layer++) {
        memcpy(place + layer * 4 * q, test_q(t, layer, token), q);
        memcpy(place + layer * 4 * q + q, test_k(t, layer, token), kv);
        memcpy(place + layer * 4 * q + 2 * q, test_v(t, layer, token), kv);
    }
    if (recording) {
        test_ok(w, kvf_replay(recording, w->stream));
        return;
    }
    for (uint32_t layer = 0; layer < 2; layer++) {
        char *at = place + layer * 4 * q;
        test_ok(w, kvf_decode(w->cache,
                              &(kvf_decode_args){.layer = layer,
                                                 .batch = 1,
                                                 .sequences = s,
                                                 .q = at,
                                                 .k = at + q,
                                                 .v = at + 2 * q,
                                                 .out = at + 3 * q},
                              w->stream));
    }
}

/* Layer 1 keeps a third: forks, dense attention beside it, and replays where there are any. */
static void layers_of_different_lengths_decode(void **state)
{
    const uint64_t seed = 2024;
    test_world w;
    test_tokens t;
    test_random r = {seed};
    const uint32_t n = 240, count = 80, steps = 30;
    kvf_cache_config cc = config_full();
    cc.layers = 2;
    cc.dtype = KVF_BF16;
    cc.transfer = test_transfer(KVF_TRANSFER_DIRECT);
    test_seed_print(__func__, seed);
    for (uint32_t verify = 0; verify < 2; verify++) {
        cc.verify_interval = verify;
        open_world(&w, &cc, 0);
        test_tokens_make(&t, &cc,
                         &(test_tokens_spec){.count = n + steps, .seed = seed, .sharpness = 2.0f});
        kvf_sequence *s = test_sequence(&w), *child = NULL;
        for (uint32_t layer = 0; layer < 2; layer++)
            test_prefill(&w, s, &t, &(test_range){.layer = layer, .count = n, .chunk = 100}, NULL);
        uint32_t *ids =
            retain_choose(&r, cc.kv_heads, &(subset){.length = n, .count = count, .window = 8});
        void *work = must(kvf_keep_work_bytes(w.cache));
        test_ok(&w, kvf_sequence_keep(w.cache, s, 1, ids, count, work, w.stream));
        assert_int_equal(kvf_sequence_length(s, 0), n);
        assert_int_equal(kvf_sequence_length(s, 1), count);
        assert_int_equal(kvf_sequence_position(s, 1, count - 1), n - 1);
        test_ok(&w, kvf_sequence_fork(w.cache, s, w.stream, &child));
        kvf_recording *recording = NULL;
        const size_t q = t.query_heads * t.head_dim * 2;
        char *a = must(8 * q), *b = must(8 * q);
        if (w.runtime->properties.can_capture && !verify) {
            test_ok(&w, kvf_record_begin(w.cache, &child, 1, w.stream));
            step_layers(&w, &child, &t, n, NULL, b);
            test_ok(&w, kvf_record_end(w.cache, &recording));
        }
        for (uint32_t i = 0; i < steps; i++) {
            step_layers(&w, &s, &t, n + i, NULL, a);
            step_layers(&w, &child, &t, n + i, recording, b);
            test_wait(&w);
            assert_memory_equal(a, b, 8 * q);
        }
        assert_int_equal(kvf_sequence_position(child, 1, count + steps - 1), n + steps - 1);
        kvf_stats stats;
        kvf_cache_stats(w.cache, &stats);
        if (verify)
            assert_true(stats.recall_sum > 0.9999 * (double)stats.verified &&
                        stats.error_max < 0.05);
        kvf_recording_destroy(recording);
        test_close(&w, &t);
        test_release(ids);
        test_release(work);
        test_release(a);
        test_release(b);
    }
}

int main(void)
{
    return unit_run(kept_tokens_are_a_fresh_sequence, kept_queries_stay_valid,
                    a_cleared_sequence_is_a_fresh_one, streaming_heads_start_over,
                    a_fork_keeps_for_itself, bad_calls_change_nothing,
                    layers_of_different_lengths_decode);
}
