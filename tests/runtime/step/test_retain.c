/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Keeping tokens, clearing, and what comes after: scores, decode, forks, replays, dense attention
 * beside it, with layers of different lengths.
 *
 * The yardstick is a sequence that is given the kept tokens alone: as they came, but for those that
 * come back to sink or window out of quantized pages, which are what had been quantized. Looks
 * inside, because pruning does. Outputs are compared bit for bit.
 */

#include <math.h>

#include "cache.h"
#include "heap.h"
#include "quantized.h"
#include "retain_world.h"

static const kvf_pages forms[] = {KVF_PAGES_NATIVE, KVF_PAGES_K8V8, KVF_PAGES_K8V4};

/* A GPU dequantizes in bf16. */
static kvf_dtype dtype_here(uint32_t i)
{
    return test_on_cuda() && i % 3 ? KVF_BF16 : (kvf_dtype)(i / 3 % 3);
}

static uint32_t turns_here(uint32_t turns)
{
    return test_on_cuda() ? (turns + 3) / 4 : turns;
}

static uint32_t between(test_random *r, uint32_t low, uint32_t high)
{
    return low + test_random_below(r, high - low + 1);
}

/* ---- what is kept ---- */

/* A key with its value, and what a quantized page makes of them. */
static void quantize_and_back(const kvf_shape *s, void *token)
{
    _Alignas(64) char page[64 + 4 * KVF_HEAD_DIM_MAX];
    const kvf_shape one = {s->dtype, s->head_dim, 1, s->pages, s->value_dim};
    float x[KVF_HEAD_DIM_MAX];
    kvf_quantize_token(&one, page, 0, token, x);
    kvf_dequantize_token(&one, page, 0, token, x);
}

/* Keeping some tokens of a layer. */
typedef struct keeping {
    const uint32_t *ids; /* [kv_heads, count] */
    uint32_t count;
    uint32_t exact; /* tokens from this one on are there as they came, and those of the sink */
} keeping;

/* Token i of KV head `head` as it is appended. */
static void kept_token(const test_world *w, const test_tokens *t, const keeping *x, uint32_t head,
                       uint32_t i, char *token)
{
    const kvf_kv_group *kv_group = &w->cache->kv_groups[0];
    const kvf_paging *p = &kv_group->dims.paging;
    const size_t row = kvf_key_bytes(&p->shape), value = kvf_value_bytes(&p->shape);
    const uint32_t id = x->ids[head * x->count + i];
    const bool is_sealed = i < kvf_sealed_blocks(kv_group, x->count) * p->block_size;
    memcpy(token, (char *)test_k(t, 0, id) + head * row, row);
    memcpy(token + row, (char *)test_v(t, 0, id) + head * value, value);
    if (p->shape.pages != KVF_PAGES_NATIVE && id >= p->sink && id < x->exact &&
        (i < p->sink || !is_sealed))
        quantize_and_back(&p->shape, token);
}

/* A fresh sequence of kept tokens. */
static kvf_sequence *fresh_sequence(test_world *w, const test_tokens *t, const keeping *x)
{
    kvf_sequence *s = test_sequence(w);
    const kvf_shape *shape = &w->cache->kv_groups[0].dims.paging.shape;
    const size_t row = kvf_key_bytes(shape), value = kvf_value_bytes(shape);
    char *k = test_scratch(t->kv_heads * row), *v = test_scratch(t->kv_heads * value);
    for (uint32_t i = 0; i < x->count; i++) {
        uint32_t position = 0;
        for (uint32_t h = 0; h < t->kv_heads; h++) {
            char token[8 * KVF_HEAD_DIM_MAX];
            kept_token(w, t, x, h, i, token);
            memcpy(k + h * row, token, row);
            memcpy(v + h * value, token + row, value);
            position = kvf_max_u32(position, x->ids[h * x->count + i]);
        }
        const kvf_prefill_args args = {
            .sequence = s, .tokens = 1, .k = k, .v = v, .positions = &position};
        test_ok(w, kvf_prefill(w->cache, &args, w->stream));
        test_wait(w);
    }
    return s;
}

/* Positions and pages; of quantized ones those after the sink, whose own tokens nobody reads there.
 */
static void same_layer(test_world *w, const kvf_sequence *a, const kvf_sequence *b)
{
    const kvf_kv_group *kv_group = &w->cache->kv_groups[0];
    const kvf_paging *p = &kv_group->dims.paging;
    const kvf_layer *x = &a->layers[0], *y = &b->layers[0];
    const size_t bytes = kvf_stored_block_bytes(p), page = kvf_page_bytes(&p->shape);
    test_wait(w);
    assert_int_equal(x->extent.length, y->extent.length);
    assert_int_equal(x->extent.sealed, y->extent.sealed);
    assert_memory_equal(x->positions, y->positions, x->extent.length * sizeof *x->positions);
    for (uint32_t i = kvf_div_ceil_u32(p->sink, p->block_size);
         p->shape.pages != KVF_PAGES_NATIVE && i < x->extent.sealed; i++)
        assert_memory_equal(test_seen(kvf_page_pool_device(&kv_group->pool, x->blocks[i]), bytes),
                            test_seen(kvf_page_pool_device(&kv_group->pool, y->blocks[i]), bytes),
                            bytes);
    for (uint32_t h = 0; p->shape.pages == KVF_PAGES_NATIVE && h < p->kv_heads; h++)
        for (uint32_t i = 0; i < x->extent.sealed * p->block_pages; i++)
            assert_memory_equal(test_seen(kvf_page_address(a, 0, h, i), page),
                                test_seen(kvf_page_address(b, 0, h, i), page), page);
    assert_true(kvf_page_pool_is_valid(&kv_group->pool));
}

/* Tokens of a layer that are there as they came: its window, and the block that was sealed last. */
static uint32_t exact_from(const kvf_sequence *s)
{
    const kvf_layer *layer = &s->layers[0];
    return (layer->extent.sealed - (layer->cut.spare && layer->cut.spare == layer->extent.sealed)) *
           layer->kv_group->dims.paging.block_size;
}

static void same_steps(test_world *w, kvf_sequence *a, kvf_sequence *b, const test_tokens *t,
                       uint32_t first, uint32_t steps)
{
    test_steps_again(test_steps(w, a, t, first, steps), w, b, t, first, steps);
}

static kvf_cache_config keep_config(uint32_t i)
{
    static const kvf_select selects[] = {KVF_SELECT_FULL, KVF_SELECT_DYNAMIC, KVF_SELECT_HYBRID,
                                         KVF_SELECT_QUEST, KVF_SELECT_STREAMING};
    kvf_cache_config c = test_config_small();
    c.pages = forms[i % 3];
    c.dtype = dtype_here(i);
    if (i % 4 == 1) { /* narrow values, in the widths that a GPU has */
        c.head_dim = 192;
        c.value_dim = 128;
    }
    c.kv_heads = 1 + i / 2 % 3;
    c.query_heads = 2 * c.kv_heads;
    c.page_size = 1u << i % 4;
    c.digest = i / 3 % 3 ? KVF_DIGEST_CODES : KVF_DIGEST_MINMAX;
    c.select = selects[i % 5];
    c.sink_tokens = i % 7 ? 4 : 11;
    c.tokens_max = 1024;
    c.sequences_max = 3;
    c.observe_window = 8;
    c.transfer = test_transfer(i % 2 ? KVF_TRANSFER_GATHER : KVF_TRANSFER_DIRECT);
    return c;
}

/* Once, and once more what is left, as chunked eviction does; the second time with a static set
 * where there is one. */
TEST(kept_tokens_are_a_fresh_sequence)
{
    const uint64_t seed = test_seed(2311);
    test_random r = {seed};
    for (uint32_t i = 0; i < turns_here(60); i++) {
        kvf_cache_config c = keep_config(i);
        test_world w;
        test_tokens t;
        const uint32_t n = between(&r, 20, 420), count = between(&r, 2, n);
        const uint32_t window = kvf_min_u32(count, between(&r, 0, 20));
        const uint32_t front = i % 3 ? 0 : (count - window) / 2, decoded = i % 5 == 2 ? n / 10 : 0;
        const uint32_t chunk = between(&r, 16, 128);
        c.prefill_chunk_max = between(&r, chunk, 200);
        open_world(&w, &c, i % 4 > 1);
        test_tokens_make(&t, &c,
                         &(test_tokens_spec){.count = n + 60, .seed = seed + i, .sharpness = 2});
        kvf_sequence *s = test_sequence(&w);
        void *work = test_scratch(kvf_keep_work_bytes(w.cache));
        test_prefill(&w, s, &t, &(test_range){.count = n - decoded, .chunk = chunk}, NULL);
        free(test_steps(&w, s, &t, n - decoded, decoded));
        uint32_t *ids = retain_choose(&r, c.kv_heads, &(subset){n, count, window, front});
        const keeping x = {ids, count, exact_from(s)};
        uint32_t *given = test_scratch(c.kv_heads * count * sizeof *ids);
        memcpy(given, ids, c.kv_heads * count * sizeof *ids);
        test_ok(&w, kvf_sequence_keep(w.cache, s, 0, given, count, work, w.stream));
        memset(given, 0xff, c.kv_heads * count * sizeof *ids);
        test_wait(&w);
        memset(work, 0xff, kvf_keep_work_bytes(w.cache));
        kvf_sequence *fresh = fresh_sequence(&w, &t, &x);
        if (count < n)
            same_layer(&w, s, fresh);
        retain_seed_both(&w, s, fresh, &r);
        same_steps(&w, s, fresh, &t, n, 50);
        /* Both were sealed alike since; so what is kept of them is the same. */
        const uint32_t length = count + 50;
        ids = retain_choose(&r, c.kv_heads, &(subset){length, length / 2, 4, 0});
        test_ok(&w, kvf_sequence_keep(w.cache, s, 0, ids, length / 2, work, w.stream));
        test_ok(&w, kvf_sequence_keep(w.cache, fresh, 0, ids, length / 2, work, w.stream));
        same_steps(&w, s, fresh, &t, n + 50, 10);
        test_wait(&w);
        kvf_sequence_destroy(s);
        kvf_sequence_destroy(fresh);
        test_wait(&w);
        assert_int_equal(w.cache->kv_groups[0].pool.free_count,
                         w.cache->kv_groups[0].dims.block_count);
        test_close(&w, &t);
    }
}

/* The n-th allocation of the call fails, for every n, which leaves the fork as its twin is. */
static kvf_status keep_at_last(test_world *w, heap *h, kvf_sequence *s, kvf_sequence *twin,
                               const keeping *x, void *work)
{
    for (int64_t n = 1;; n++) {
        h->asked = h->failed = 0;
        h->fail_at = n;
        const kvf_status status =
            kvf_sequence_keep(w->cache, s, 0, x->ids, x->count, work, w->stream);
        h->fail_at = 0;
        if (!h->failed)
            return status;
        assert_int_equal(status, KVF_OUT_OF_MEMORY);
        same_layer(w, s, twin);
    }
}

/* A fork that keeps some tokens leaves its parent alone; without room it leaves itself alone. */
TEST(a_fork_keeps_for_itself)
{
    const uint64_t seed = test_seed(2333);
    for (uint32_t i = 0; i < turns_here(6); i++) {
        test_random r = {seed + i};
        kvf_cache_config c = keep_config(i);
        const uint32_t n = 300, count = 180;
        const bool has_room = i % 2 == 0;
        kvf_runtime_config rc = test_runtime_config();
        heap h = {0};
        test_world w;
        test_tokens t;
        rc.allocator = heap_allocator(&h);
        test_hooks.prefill_arena = i / 2 % 2;
        c.host_tokens_max = has_room ? 0 : n;
        test_world_open(&w, &rc, &c);
        test_tokens_make(&t, &c,
                         &(test_tokens_spec){.count = n + 30, .seed = seed, .sharpness = 2});
        kvf_sequence *parent = test_sequence(&w), *child = NULL, *twin = NULL;
        void *work = test_scratch(kvf_keep_work_bytes(w.cache));
        test_prefill(&w, parent, &t, &(test_range){.count = n, .chunk = 100}, NULL);
        test_ok(&w, kvf_sequence_fork(w.cache, parent, w.stream, &child));
        if (has_room) { /* with pages of its own, so that it shows what becomes of shared ones */
            twin = test_sequence(&w);
            test_prefill(&w, twin, &t, &(test_range){.count = n, .chunk = 100}, NULL);
        } else {
            test_ok(&w, kvf_sequence_fork(w.cache, parent, w.stream, &twin));
        }
        for (kvf_block b; !has_room && w.cache->kv_groups[0].pool.free_count;)
            assert_int_equal(
                kvf_page_pool_acquire_near(&w.cache->kv_groups[0].pool, KVF_BLOCK_NONE, &b),
                KVF_OK);
        uint32_t *ids = retain_choose(&r, c.kv_heads, &(subset){n, count, 0, 40});
        const keeping x = {ids, count, exact_from(child)};
        test_expect(w.runtime, keep_at_last(&w, &h, child, twin, &x, work),
                    has_room ? KVF_OK : KVF_FULL);
        same_layer(&w, parent, twin);
        if (has_room) {
            same_steps(&w, parent, twin, &t, n, 20);
            kvf_sequence_destroy(twin);
            twin = fresh_sequence(&w, &t, &x);
        }
        same_layer(&w, child, twin);
        same_steps(&w, child, twin, &t, n, has_room ? 30 : 3);
        test_close(&w, &t);
        assert_int_equal(h.live, 0);
    }
}

/* ---- what is kept beside tokens ---- */

static kvf_cache_config config_full(void)
{
    kvf_cache_config cc = test_config_small();
    cc.select = KVF_SELECT_FULL;
    cc.tokens_max = 1024;
    cc.sequences_max = 3;
    cc.observe_window = 8;
    return cc;
}

static float *scores_of(test_world *w, kvf_sequence *s, const kvf_scores_args *args)
{
    const size_t count = (size_t)w->config.kv_heads * args->candidates;
    float *out = test_scratch(count * sizeof *out);
    float *work = test_scratch(kvf_scores_work_floats(w->cache) * sizeof *work);
    kvf_scores_args a = *args;
    a.out = out;
    test_ok(w, kvf_sequence_scores(w->cache, s, &a, work, w->stream));
    test_wait(w);
    return out;
}

/* Kept queries of tokens that were kept score as those queries given do; others are gone. */
TEST(kept_queries_stay_valid)
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
        kvf_sequence *s = test_sequence(&w);
        test_prefill(&w, s, &t, &(test_range){.count = n, .chunk = 50}, NULL);
        uint32_t *ids = retain_choose(&r, cc.kv_heads,
                                      &(subset){.length = n, .count = count, .window = window});
        for (uint32_t h = 0; h < cc.kv_heads; h++) /* the token before the window goes */
            if (ids[h * count + count - window - 1] == n - window - 1)
                ids[h * count + count - window - 1] -=
                    ids[h * count + count - window - 2] < n - window - 2 ? 1 : 0;
        void *work = test_scratch(kvf_keep_work_bytes(w.cache));
        test_ok(&w, kvf_sequence_keep(w.cache, s, 0, ids, count, work, w.stream));

        kvf_sequence *fresh = fresh_sequence(&w, &t, &(keeping){ids, count, 0});
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
        }
        float one = 0.0f;
        a.window = window + 1;
        a.out = &one;
        test_expect(w.runtime, kvf_sequence_scores(w.cache, s, &a, &one, w.stream), KVF_INVALID);
        test_close(&w, &t);
    }
}

/* Scores are those of what a step would attend to: exact sink and window, and quantized pages. */
TEST(scores_are_of_what_steps_see)
{
    const uint64_t seed = test_seed(2339);
    for (uint32_t i = 1; i < turns_here(9); i += 1 + i % 3 / 2) { /* quantized ones */
        kvf_cache_config c = keep_config(i);
        test_world w, plain;
        test_tokens t;
        const uint32_t n = 210 + 11 * i;
        const kvf_scores_args a = {.window = 8,
                                   .candidates = n - 8,
                                   .pool = KVF_POOL_MAX,
                                   .pool_width = 5,
                                   .group_reduce = KVF_GROUP_SUM};
        test_open(&w, &t, &c, &(test_tokens_spec){.count = n, .seed = seed + i, .sharpness = 2});
        kvf_sequence *s = test_sequence(&w);
        test_prefill(&w, s, &t, &(test_range){.count = n, .chunk = 70}, NULL);
        float *got = scores_of(&w, s, &a);
        const kvf_paging *p = &w.cache->kv_groups[0].dims.paging;
        const size_t row = kvf_key_bytes(&p->shape), value = kvf_value_bytes(&p->shape);
        for (uint32_t id = c.sink_tokens; id < s->layers[0].extent.sealed * p->block_size; id++)
            for (uint32_t h = 0; h < c.kv_heads; h++) {
                char token[8 * KVF_HEAD_DIM_MAX];
                char *k = (char *)test_k(&t, 0, id) + h * row;
                char *v = (char *)test_v(&t, 0, id) + h * value;
                memcpy(token, k, row);
                memcpy(token + row, v, value);
                quantize_and_back(&p->shape, token);
                memcpy(k, token, row);
                memcpy(v, token + row, value);
            }
        c.pages = KVF_PAGES_NATIVE;
        test_world_open(&plain, NULL, &c);
        s = test_sequence(&plain);
        test_prefill(&plain, s, &t, &(test_range){.count = n, .chunk = 70}, NULL);
        float *want = scores_of(&plain, s, &a);
        assert_memory_equal(got, want, c.kv_heads * (n - 8) * sizeof *got);
        test_world_close(&plain);
        test_close(&w, &t);
    }
}

/* ---- clearing ---- */

TEST(a_cleared_sequence_is_a_fresh_one)
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
        char *out = test_scratch(cc.query_heads * cc.head_dim * 4);
        test_prefill(&w, s, &t, &(test_range){.count = 250, .chunk = 60}, NULL);
        for (uint32_t k = 250; k < 280; k++)
            test_decode(&w, s, &t, 0, k, out, NULL);
        if (i == 5) { /* also one that went wrong */
            float *bad = test_scratch(cc.kv_heads * cc.head_dim * sizeof *bad);
            bad[3] = NAN;
            test_ok(&w,
                    kvf_prefill(w.cache,
                                &(kvf_prefill_args){.sequence = s, .tokens = 1, .k = bad, .v = bad},
                                w.stream));
            test_wait(&w);
            test_expect(w.runtime, kvf_sequence_seed(w.cache, s, 0, bad, w.stream), KVF_NOT_FINITE);
        }
        test_ok(&w, kvf_sequence_clear(w.cache, s));
        assert_int_equal(kvf_sequence_length(s, 0), 0);
        assert_int_equal(w.cache->kv_groups[0].pool.free_count,
                         w.cache->kv_groups[0].dims.block_count);
        test_prefill(&w, s, &t, &(test_range){.first = 30, .count = 260, .chunk = 60}, NULL);
        test_prefill(&w, fresh, &t, &(test_range){.first = 30, .count = 260, .chunk = 60}, NULL);
        same_layer(&w, s, fresh);
        same_steps(&w, s, fresh, &t, 290, 40);
        test_close(&w, &t);
    }
}

/* After a prompt in a cache with streaming heads the next sequence finds nothing of it. */
TEST(streaming_heads_start_over)
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
    kvf_sequence_destroy(s);
    s = test_sequence(&w);
    test_prefill(&w, s, &t, &range, NULL);
    test_prefill(&w, fresh, &t, &range, NULL);
    same_steps(&w, s, fresh, &t, n + 20, 10);
    test_close(&w, &t);
}

/* One step of both layers, enqueued or replayed. */
static void step_layers(test_world *w, kvf_sequence **s, const test_tokens *t, uint32_t token,
                        kvf_recording *recording, const test_rows *rows)
{
    for (uint32_t layer = 0; layer < 2; layer++)
        test_rows_put(rows, layer, t, layer, token);
    if (recording) {
        test_ok(w, kvf_replay(recording, w->stream));
        return;
    }
    for (uint32_t layer = 0; layer < 2; layer++) {
        const kvf_decode_args a = test_rows_args(rows, layer, s, 1, layer);
        test_ok(w, kvf_decode(w->cache, &a, w->stream));
    }
}

/* Layer 1 keeps a third: forks, dense attention beside it, and replays where there are any. */
TEST(layers_of_different_lengths_decode)
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
        test_fill(&w, s, &t, 0, n);
        uint32_t *ids =
            retain_choose(&r, cc.kv_heads, &(subset){.length = n, .count = count, .window = 8});
        void *work = test_scratch(kvf_keep_work_bytes(w.cache));
        test_ok(&w, kvf_sequence_keep(w.cache, s, 1, ids, count, work, w.stream));
        assert_int_equal(kvf_sequence_length(s, 0), n);
        assert_int_equal(kvf_sequence_length(s, 1), count);
        assert_int_equal(kvf_sequence_position(s, 1, count - 1), n - 1);
        test_ok(&w, kvf_sequence_fork(w.cache, s, w.stream, &child));
        kvf_recording *recording = NULL;
        test_rows a, b;
        test_rows_open(&a, &cc, 2);
        test_rows_open(&b, &cc, 2);
        if (w.runtime->properties.can_capture && !verify) {
            test_ok(&w, kvf_record_begin(w.cache, &child, 1, w.stream));
            step_layers(&w, &child, &t, n, NULL, &b);
            test_ok(&w, kvf_record_end(w.cache, &recording));
        }
        for (uint32_t i = 0; i < steps; i++) {
            step_layers(&w, &s, &t, n + i, NULL, &a);
            step_layers(&w, &child, &t, n + i, recording, &b);
            test_wait(&w);
            assert_memory_equal(a.out, b.out, 2 * a.out_bytes);
        }
        assert_int_equal(kvf_sequence_position(child, 1, count + steps - 1), n + steps - 1);
        kvf_stats stats;
        kvf_cache_stats(w.cache, &stats);
        if (verify)
            assert_true(stats.recall_sum > 0.9999 * (double)stats.verified &&
                        stats.error_max < 0.05);
        kvf_recording_destroy(recording);
        test_close(&w, &t);
        test_rows_close(&a);
        test_rows_close(&b);
    }
}
