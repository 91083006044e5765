/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Pruning where pages are quantized: what is kept has the bits that it had, and everything else is
 * as ever.
 *
 * The yardstick is a sequence that is given the kept tokens alone: as they came, but for those that
 * come back to sink or window out of quantized pages, which are what had been quantized. Scores are
 * those of a cache of exact pages that holds what a step would see. Then runs of the library are
 * compared with each other, bit for bit.
 */

#include <string.h>

#include <kvferry/prune.h>

#include "disk_rig.h"
#include "heap.h"
#include "prune_rig.h"
#include "quantized.h"
#include "retain_world.h"

static const kvf_pages forms[] = {KVF_PAGES_K8V8, KVF_PAGES_K8V4};

/* A GPU dequantizes in bf16; and the emulated one is slow. */
static kvf_dtype dtype_here(uint32_t i)
{
    return test_on_cuda() ? KVF_BF16 : (kvf_dtype)(i % 3);
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
    const kvf_shape one = {s->dtype, s->head_dim, 1, s->pages, 0};
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
    const size_t row = kvf_row_bytes(&p->shape);
    const uint32_t id = x->ids[head * x->count + i];
    const bool is_sealed = i < kvf_sealed_blocks(kv_group, x->count) * p->block_size;
    memcpy(token, (char *)test_k(t, 0, id) + head * row, row);
    memcpy(token + row, (char *)test_v(t, 0, id) + head * row, row);
    if (id >= p->sink && id < x->exact && (i < p->sink || !is_sealed))
        quantize_and_back(&p->shape, token);
}

/* A fresh sequence of kept tokens. */
static kvf_sequence *fresh_sequence(test_world *w, const test_tokens *t, const keeping *x)
{
    kvf_sequence *s = test_sequence(w);
    const size_t row = kvf_row_bytes(&w->cache->kv_groups[0].dims.paging.shape);
    char *k = test_alloc(t->kv_heads * row), *v = test_alloc(t->kv_heads * row);
    for (uint32_t i = 0; i < x->count; i++) {
        uint32_t position = 0;
        for (uint32_t h = 0; h < t->kv_heads; h++) {
            char token[8 * KVF_HEAD_DIM_MAX];
            kept_token(w, t, x, h, i, token);
            memcpy(k + h * row, token, row);
            memcpy(v + h * row, token + row, row);
            position = kvf_max_u32(position, x->ids[h * x->count + i]);
        }
        const kvf_prefill_args args = {
            .sequence = s, .tokens = 1, .k = k, .v = v, .positions = &position};
        test_ok(w, kvf_prefill(w->cache, &args, w->stream));
        test_wait(w);
    }
    test_release(k);
    test_release(v);
    return s;
}

/* Positions, and quantized pages after the sink, whose own tokens nobody reads there. */
static void same_layer(test_world *w, const kvf_sequence *a, const kvf_sequence *b)
{
    const kvf_kv_group *kv_group = &w->cache->kv_groups[0];
    const kvf_paging *p = &kv_group->dims.paging;
    const kvf_layer *x = &a->layers[0], *y = &b->layers[0];
    const size_t bytes = kvf_stored_block_bytes(p);
    test_wait(w);
    assert_int_equal(x->length, y->length);
    assert_int_equal(x->sealed, y->sealed);
    assert_memory_equal(x->positions, y->positions, x->length * sizeof *x->positions);
    for (uint32_t i = kvf_div_ceil_u32(p->sink, p->block_size); i < x->sealed; i++)
        assert_memory_equal(test_seen(kvf_page_pool_device(&kv_group->pool, x->blocks[i]), bytes),
                            test_seen(kvf_page_pool_device(&kv_group->pool, y->blocks[i]), bytes),
                            bytes);
    assert_true(kvf_page_pool_is_valid(&kv_group->pool));
}

/* Tokens of a layer that are there as they came: its window, and the block that was sealed last. */
static uint32_t exact_from(const kvf_sequence *s)
{
    const kvf_layer *layer = &s->layers[0];
    return (layer->sealed - (layer->spare && layer->spare == layer->sealed)) *
           layer->kv_group->dims.paging.block_size;
}

static void same_steps(test_world *w, kvf_sequence *a, kvf_sequence *b, const test_tokens *t,
                       uint32_t first, uint32_t steps)
{
    save_expect(save_decode(w, a, t, first, steps), w, b, t, first, steps);
}

static kvf_cache_config keep_config(uint32_t i)
{
    static const kvf_select selects[] = {KVF_SELECT_FULL, KVF_SELECT_DYNAMIC, KVF_SELECT_HYBRID,
                                         KVF_SELECT_QUEST, KVF_SELECT_STREAMING};
    kvf_cache_config c = test_config_small();
    c.pages = forms[i % 2];
    c.dtype = dtype_here(i);
    c.page_size = 1u << i % 4;
    c.digest = i % 3 ? KVF_DIGEST_CODES : KVF_DIGEST_MINMAX;
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
static void kept_tokens_are_a_fresh_sequence(void **state)
{
    const uint64_t seed = test_seed(2311);
    test_random r = {seed};
    for (uint32_t i = 0; i < turns_here(40); i++) {
        kvf_cache_config c = keep_config(i);
        test_world w;
        test_tokens t;
        const uint32_t n = between(&r, 20, 420), count = between(&r, 2, n);
        const uint32_t window = kvf_min_u32(count, between(&r, 0, 20));
        const uint32_t front = i % 3 ? 0 : (count - window) / 2, decoded = i % 5 == 2 ? n / 10 : 0;
        c.prefill_chunk_max = between(&r, 16, 200);
        test_open(&w, &t, &c,
                  &(test_tokens_spec){.count = n + 60, .seed = seed + i, .sharpness = 2});
        kvf_sequence *s = test_sequence(&w);
        void *work = test_alloc(kvf_keep_work_bytes(w.cache));
        test_prefill(&w, s, &t, &(test_range){.count = n - decoded, .chunk = 16}, NULL);
        free(save_decode(&w, s, &t, n - decoded, decoded));
        uint32_t *ids = retain_choose(&r, c.kv_heads, &(subset){n, count, window, front});
        const keeping x = {ids, count, exact_from(s)};
        test_ok(&w, kvf_sequence_keep(w.cache, s, 0, ids, count, work, w.stream));
        test_wait(&w);
        memset(work, 0xff, kvf_keep_work_bytes(w.cache));
        kvf_sequence *fresh = fresh_sequence(&w, &t, &x);
        if (count < n)
            same_layer(&w, s, fresh);
        retain_seed_both(&w, s, fresh, &r);
        same_steps(&w, s, fresh, &t, n, 50);
        test_release(ids);
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
        test_release(work);
        test_release(ids);
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
static void a_fork_keeps_for_itself(void **state)
{
    const uint64_t seed = test_seed(2333);
    for (uint32_t i = 0; i < turns_here(4); i++) {
        test_random r = {seed + i};
        kvf_cache_config c = keep_config(i);
        const uint32_t n = 300, count = 180;
        const bool has_room = i % 2 == 0;
        kvf_runtime_config rc = test_runtime_config();
        heap h = {0};
        test_world w;
        test_tokens t;
        rc.allocator = heap_allocator(&h);
        c.host_tokens_max = has_room ? 0 : n;
        test_world_open(&w, &rc, &c);
        test_tokens_make(&t, &c,
                         &(test_tokens_spec){.count = n + 30, .seed = seed, .sharpness = 2});
        kvf_sequence *parent = test_sequence(&w), *child = NULL, *twin = NULL;
        void *work = test_alloc(kvf_keep_work_bytes(w.cache));
        test_prefill(&w, parent, &t, &(test_range){.count = n, .chunk = 100}, NULL);
        test_ok(&w, kvf_sequence_fork(w.cache, parent, w.stream, &child));
        test_ok(&w, kvf_sequence_fork(w.cache, parent, w.stream, &twin));
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
        test_release(work);
        test_release(ids);
    }
}

/* ---- what policies see ---- */

static float *scores_of(test_world *w, kvf_sequence *s, uint32_t candidates)
{
    const size_t count = (size_t)w->config.kv_heads * candidates;
    float *out = test_alloc(count * sizeof *out);
    float *work = test_alloc(kvf_scores_work_floats(w->cache) * sizeof *work);
    const kvf_scores_args args = {.window = 8,
                                  .candidates = candidates,
                                  .pool = KVF_POOL_MAX,
                                  .pool_width = 5,
                                  .group_reduce = KVF_GROUP_SUM,
                                  .out = out};
    test_ok(w, kvf_sequence_scores(w->cache, s, &args, work, w->stream));
    test_wait(w);
    test_release(work);
    return out;
}

/* Scores are those of what a step would attend to: exact sink and window, and quantized pages. */
static void scores_are_of_what_steps_see(void **state)
{
    const uint64_t seed = test_seed(2339);
    for (uint32_t i = 0; i < turns_here(6); i++) {
        kvf_cache_config c = keep_config(i);
        test_world w, plain;
        test_tokens t;
        const uint32_t n = 210 + 11 * i;
        test_open(&w, &t, &c, &(test_tokens_spec){.count = n, .seed = seed + i, .sharpness = 2});
        kvf_sequence *s = test_sequence(&w);
        test_prefill(&w, s, &t, &(test_range){.count = n, .chunk = 70}, NULL);
        float *got = scores_of(&w, s, n - 8);
        const kvf_paging *p = &w.cache->kv_groups[0].dims.paging;
        const size_t row = kvf_row_bytes(&p->shape);
        for (uint32_t id = c.sink_tokens; id < s->layers[0].sealed * p->block_size; id++)
            for (uint32_t h = 0; h < c.kv_heads; h++) {
                char token[8 * KVF_HEAD_DIM_MAX];
                char *k = (char *)test_k(&t, 0, id) + h * row, *v = test_v(&t, 0, id);
                memcpy(token, k, row);
                memcpy(token + row, v + h * row, row);
                quantize_and_back(&p->shape, token);
                memcpy(k, token, row);
                memcpy(v + h * row, token + row, row);
            }
        c.pages = KVF_PAGES_NATIVE;
        test_world_open(&plain, NULL, &c);
        s = test_sequence(&plain);
        test_prefill(&plain, s, &t, &(test_range){.count = n, .chunk = 70}, NULL);
        float *want = scores_of(&plain, s, n - 8);
        assert_memory_equal(got, want, c.kv_heads * (n - 8) * sizeof *got);
        test_release(got);
        test_release(want);
        test_world_close(&plain);
        test_close(&w, &t);
    }
}

/* ---- whole prompts ---- */

typedef struct prompt_case {
    const char *policy;
    kvf_retention retention;
    kvf_eviction eviction;
} prompt_case;

static const prompt_case prompts[] = {
    {"snapkv", KVF_RETENTION_EVICT, KVF_EVICTION_NONE},
    {"fastkv", KVF_RETENTION_OFFLOAD, KVF_EVICTION_NONE},
    {"structkv", KVF_RETENTION_EVICT, KVF_EVICTION_NONE},
    {"snapkv", KVF_RETENTION_EVICT, KVF_EVICTION_PATCHED},
    {"pyramidkv", KVF_RETENTION_OFFLOAD, KVF_EVICTION_NONE},
    {"fastkv", KVF_RETENTION_COMPLETE, KVF_EVICTION_NONE},
    {"h2o", KVF_RETENTION_EVICT, KVF_EVICTION_NONE},
    {"streaming", KVF_RETENTION_EVICT, KVF_EVICTION_NAIVE},
    {"pyramidinfer", KVF_RETENTION_OFFLOAD, KVF_EVICTION_NONE},
    {"gemfilter", KVF_RETENTION_EVICT, KVF_EVICTION_NONE},
    {"asl", KVF_RETENTION_EVICT, KVF_EVICTION_NONE},
    {"snapkv", KVF_RETENTION_EVICT, KVF_EVICTION_NAIVE},
};
#define PROMPTS (sizeof prompts / sizeof *prompts)
/* This one with exact pages, which dropping tokens reads back from disk like others. */
#define EXACT   7u

/* Cases of which all are tried on the host device, on the other so many. */
static uint32_t prompts_here(uint32_t on_cuda)
{
    return test_on_cuda() ? on_cuda : (uint32_t)PROMPTS;
}

static kvf_cache_config prompt_config(uint32_t i)
{
    kvf_cache_config c = rig_cache_config();
    c.pages = forms[i % 2];
    c.dtype = dtype_here(i + 1);
    c.page_size = 4;
    c.digest = KVF_DIGEST_CODES;
    c.select = i / 2 % 2 ? KVF_SELECT_DYNAMIC : KVF_SELECT_HYBRID;
    c.observe_window = 8;
    c.sequences_max = 3;
    return c;
}

static void open_prompt(rig *r, const kvf_cache_config *c, const prompt_case *x, float keep)
{
    rig_open(r, c, 0);
    kvf_prune_config_init(&r->config, kvf_prune_policy_find(x->policy));
    r->config.retention = x->retention;
    r->config.eviction = x->eviction;
    r->config.chunk_queries = 8;
    r->config.settings.keep = keep;
    r->config.settings.propagate = keep < 1 && x->eviction == KVF_EVICTION_NONE ? 0.5f : 1;
    if (strcmp(x->policy, "asl") == 0)
        r->config.settings.keep_tokens = r->config.settings.propagate_tokens = 60;
    if (r->config.settings.window > 8)
        r->config.settings.window = 8;
    rig_prune(r);
}

/* All layers, chunk by chunk. */
static kvf_sequence *run_chunks(rig *r, bool has_patch)
{
    progress p = rig_begin(r, PROMPT);
    for (uint32_t first = 0, n; first < PROMPT; first += n) {
        n = kvf_min_u32(40, PROMPT - first);
        const uint32_t patch = has_patch && first + n < PROMPT ? 8 : 0;
        for (p.layer = 0; p.layer < LAYERS; p.layer++) {
            rig_fill_chunk(r, &p, first, n, false);
            progress end = p;
            for (uint32_t i = PROMPT - patch; i < PROMPT; i++)
                end.positions[i] = first + n + i - (PROMPT - patch);
            if (patch)
                rig_fill_chunk(r, &end, PROMPT - patch, patch, false);
            test_ok(&r->w, kvf_prune_chunk(r->prune, p.sequence, p.layer, n, patch, r->w.stream));
        }
    }
    return p.sequence;
}

static kvf_sequence *run_prompt(rig *r)
{
    if (r->config.eviction == KVF_EVICTION_NONE)
        return rig_run(r, PROMPT).sequence;
    return run_chunks(r, r->config.eviction == KVF_EVICTION_PATCHED);
}

/* Steps after it, which are the caller's to free. */
static void *run_steps(rig *r, kvf_sequence *s)
{
    return save_decode(&r->w, s, &r->t, PROMPT, STEPS);
}

static void expect_same(rig *r, const void *want, kvf_sequence *s, const prompt_case *x,
                        const char *what)
{
    void *got = run_steps(r, s);
    if (memcmp(want, got, save_decode_bytes(&r->t, STEPS)) != 0)
        fail_msg("%s, retention %d, eviction %d: %s: other bits", x->policy, (int)x->retention,
                 (int)x->eviction, what);
    free(got);
}

/* A fork, a file, another way to move pages and a disk tier. */
static void whatever_comes_next_changes_no_bit(void **state)
{
    for (uint32_t i = 0; i < prompts_here(4); i++) {
        const prompt_case *x = &prompts[i];
        kvf_cache_config c = prompt_config(i);
        kvf_sequence *fork = NULL;
        rig r;
        if (i == EXACT)
            c.pages = KVF_PAGES_NATIVE;
        c.transfer = test_transfer(KVF_TRANSFER_GATHER);
        open_prompt(&r, &c, x, 0.4f);
        kvf_sequence *s = run_prompt(&r);
        test_ok(&r.w, kvf_sequence_fork(r.w.cache, s, r.w.stream, &fork));
        assert_int_equal(save_now(&r.w, s, save_path("pruned"), NULL), KVF_OK);
        void *want = run_steps(&r, s);
        expect_same(&r, want, fork, x, "a fork");
        kvf_sequence_destroy(fork);
        fork = save_restore(&r.w, save_path("pruned"), 1);
        expect_same(&r, want, fork, x, "a file");
        for (uint32_t layer = 0; layer < LAYERS; layer++)
            assert_int_equal(kvf_sequence_length(s, layer), kvf_sequence_length(fork, layer));
        if (c.select ==
            KVF_SELECT_DYNAMIC) { /* steps come again; others choose a static set anew */
            test_ok(&r.w, kvf_sequence_truncate(r.w.cache, s, PROMPT, r.w.stream));
            expect_same(&r, want, s, x, "a cut");
        }
        rig_close(&r);

        c.transfer = test_transfer(i % 2 ? KVF_TRANSFER_DIRECT : KVF_TRANSFER_EACH);
        open_prompt(&r, &c, x, 0.4f);
        expect_same(&r, want, run_prompt(&r), x, "a transfer method");
        rig_close(&r);

        c.transfer = KVF_TRANSFER_AUTO;
        disk_config(&c, PROMPT, 1);
        open_prompt(&r, &c, x, 0.4f);
        assert_true(r.w.cache->plan.disk_bytes > 0);
        expect_same(&r, want, run_prompt(&r), x, "a disk tier");
        assert_true(kvf_disk_tier_is_valid(r.w.cache->kv_groups[0].pool.tier));
        rig_close(&r);
        free(want);
    }
}

/* Who keeps all has not pruned. */
static void keeping_all_is_not_pruning(void **state)
{
    static const prompt_case all = {"full", KVF_RETENTION_EVICT, KVF_EVICTION_NONE};
    for (uint32_t i = 0; i < turns_here(4); i++) {
        const kvf_cache_config c = prompt_config(i);
        rig r;
        open_prompt(&r, &c, i % 2 ? &prompts[0] : &all, 1.0f);
        kvf_sequence *s = run_prompt(&r);
        void *want = run_steps(&r, s);
        kvf_sequence_destroy(s);
        s = test_sequence(&r.w);
        for (uint32_t layer = 0; layer < LAYERS; layer++)
            test_prefill(&r.w, s, &r.t,
                         &(test_range){.layer = layer, .count = PROMPT, .chunk = CHUNK}, NULL);
        expect_same(&r, want, s, i % 2 ? &prompts[0] : &all, "without pruning");
        free(want);
        rig_close(&r);
    }
}

/* The completed sequence of a pruned prompt is the prompt that was never pruned. */
static void a_completed_sequence_is_the_prompt(void **state)
{
    static const prompt_case x = {"fastkv", KVF_RETENTION_COMPLETE, KVF_EVICTION_NONE};
    for (uint32_t i = 0; i < turns_here(3); i++) {
        kvf_cache_config c = prompt_config(i);
        kvf_sequence *whole = NULL;
        uint32_t first = 1;
        rig r;
        c.select = KVF_SELECT_DYNAMIC; /* no static set that the policy has chosen */
        open_prompt(&r, &c, &x, 0.4f);
        kvf_sequence *s = run_prompt(&r), *plain = test_sequence(&r.w);
        while (first < LAYERS && kvf_sequence_length(s, first) == PROMPT)
            first++;
        assert_true(first < LAYERS);
        for (uint32_t layer = 0; layer < LAYERS; layer++)
            test_prefill(&r.w, plain, &r.t,
                         &(test_range){.layer = layer, .count = PROMPT, .chunk = CHUNK}, NULL);
        test_ok(&r.w, kvf_complete_begin(r.w.cache, s, first, PROMPT, r.w.stream, &whole));
        for (uint32_t layer = first; layer < LAYERS; layer++)
            test_prefill(&r.w, whole, &r.t,
                         &(test_range){.layer = layer, .count = PROMPT, .chunk = 33}, NULL);
        test_ok(&r.w, kvf_complete_end(r.w.cache, s, whole, r.w.stream));
        void *want = run_steps(&r, plain);
        expect_same(&r, want, s, &x, "a completed sequence");
        free(want);
        rig_close(&r);
    }
}

int main(void)
{
    return unit_run_around(NULL, save_remove_folder, kept_tokens_are_a_fresh_sequence,
                           a_fork_keeps_for_itself, scores_are_of_what_steps_see,
                           whatever_comes_next_changes_no_bit, keeping_all_is_not_pruning,
                           a_completed_sequence_is_the_prompt);
}
