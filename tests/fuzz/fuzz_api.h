/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_FUZZ_API_H
#define KVF_TESTS_FUZZ_API_H

/*
 * The caches that fuzz_api.c compares, a crowded one and plain ones, their settings and tokens.
 *
 * Knows the public headers, and no calls but those that open.
 */

#include "fuzz_library.h"

#include <kvferry/prune.h>

#include <string.h>

#include "common/convert.h"

enum {
    SEQUENCES = 4,
    TOKENS_MAX = 260,
    STEP_MAX = 5, /* tokens of a sequence in a step */
    CHUNK_MAX = 120,
    LAYERS_MAX = 2,
    KV_HEADS_MAX = 3,
    GROUP_MAX = 18, /* more than a kernel takes at once */
    HEADS_MAX = KV_HEADS_MAX * GROUP_MAX,
    DIM_MAX = FUZZ_DIM_MAX,
    ROW_WANTED = 512,         /* elements of a token's queries: references take minutes for more */
    ROW_MAX = HEADS_MAX * 16, /* of as many heads as there may be, which have 16 at least */
    LISTS_MAX = SEQUENCES * KV_HEADS_MAX,
    LISTED_MAX = LISTS_MAX * 2 * TOKENS_MAX,
    WINDOW = 4, /* queries that score a prompt */
    GIVEN = 30, /* pages that a list of the caller names */
    OPERATIONS_MAX = 60,
};

typedef enum act { ASK, APPEND, STEP, PROMPT } act;

/* A call of the past. */
typedef struct entry {
    act what;
    uint32_t tokens;
} entry;

/* A sequence by our own account: its tokens, which are numbers, and the calls that brought them. */
typedef struct model {
    kvf_sequence *sequence; /* NULL = not alive */
    kvf_cache *plain;
    kvf_prune *pruner; /* of the plain cache */
    kvf_sequence *twin;
    uint32_t tokens, entries;
    uint32_t is_pruned;
    uint32_t spare; /* sealed blocks, of which a cut brings the last one back as it was */
    uint32_t token[TOKENS_MAX];
    entry log[TOKENS_MAX];
} model;

/* Rows of a call. */
typedef struct rows {
    float q[CHUNK_MAX * ROW_MAX], k[CHUNK_MAX * ROW_MAX], v[CHUNK_MAX * ROW_MAX];
    float out[CHUNK_MAX * ROW_MAX];
    float lse[CHUNK_MAX * HEADS_MAX];
    int32_t page_ids[SEQUENCES * STEP_MAX * KV_HEADS_MAX * GIVEN]; /* of a step */
    uint32_t given;                                                /* of each list; 0 = none */
} rows;

typedef struct world {
    fuzz_input in;
    kvf_runtime *runtime, *plain_runtime;
    kvf_stream *stream, *plain_stream;
    kvf_cache *cache;
    kvf_prune *pruner;
    kvf_cache_config config, plain_config;
    kvf_prune_config prune;
    uint32_t chunk;  /* of a prompt that is evicted chunk by chunk */
    uint32_t params; /* see fuzz_params_of */
    int gives;       /* steps are told which pages to select */
    int has_windows; /* see fuzz_has_windows */
    int asks_alone;  /* queries alone follow steps and chunks */
    int can_cut, has_rings, has_lists;
    int is_wild;     /* layers may have other lengths than what is accounted */
    int is_poisoned; /* a NaN went in: KVF_NOT_FINITE may come from any call, and nothing is
                        compared */
    uint8_t kinds[LAYERS_MAX * KV_HEADS_MAX];
    uint32_t windows[LAYERS_MAX];
    uint32_t next; /* number of the next token */
    model models[SEQUENCES];
    rows mine[LAYERS_MAX], theirs, alone;
    int32_t indptr[LISTS_MAX + 1], indices[LISTED_MAX], last_page_len[LISTS_MAX];
    float pages[SEQUENCES * 2 * TOKENS_MAX * 2 * ROW_MAX];
} world;

static inline uint32_t draw(world *w, uint32_t least, uint32_t most)
{
    return fuzz_range(&w->in, least, most);
}

/* ---- tokens ---- */

/* Numbers from -2 to 2 that follow from `seed`. */
static inline void fill_row(void *to, kvf_dtype dtype, size_t first, uint32_t count, uint32_t seed)
{
    uint32_t x = seed * 2654435761u + 12345u;
    for (uint32_t i = 0; i < count; i++) {
        x ^= x << 13, x ^= x >> 17, x ^= x << 5;
        kvf_element_set(to, dtype, first + i, (float)(int32_t)x / 1073741824.0f);
    }
}

static inline uint32_t seed_of(uint32_t layer, uint32_t token)
{
    return (token * LAYERS_MAX + layer) * 3;
}

static inline void fill(const world *w, rows *r, uint32_t row, uint32_t layer, uint32_t token)
{
    const kvf_cache_config *c = &w->config;
    const uint32_t q = c->query_heads * c->head_dim, k = c->kv_heads * c->head_dim;
    const uint32_t v = c->kv_heads * c->value_dim;
    fill_row(r->q, c->dtype, (size_t)row * q, q, seed_of(layer, token));
    fill_row(r->k, c->dtype, (size_t)row * k, k, seed_of(layer, token) + 1);
    fill_row(r->v, c->dtype, (size_t)row * v, v, seed_of(layer, token) + 2);
    r->given = w->gives ? GIVEN : 0;
    const uint32_t ids = c->kv_heads * r->given;
    if (row < SEQUENCES * STEP_MAX)
        fuzz_fill_ids(seed_of(layer, token) + 7, r->page_ids + (size_t)row * ids, ids,
                      c->tokens_max / c->page_size);
}

/* Bytes of a row of outputs. */
static inline size_t row_bytes(const world *w)
{
    const kvf_cache_config *c = &w->config;
    return (size_t)c->query_heads * c->value_dim * kvf_dtype_bytes(c->dtype);
}

static inline void settle(kvf_stream *stream)
{
    PROMISE(kvf_stream_wait(stream) == KVF_OK);
}

static inline void give_params(const world *w, kvf_cache *cache)
{
    float sinks[HEADS_MAX];
    for (uint32_t l = 0; w->params % 2 && l < w->config.layers; l++) {
        const kvf_attention_params params = fuzz_layer_params(w->params, &w->config, l, sinks);
        PROMISE(kvf_cache_attention_params(cache, l, &params) == KVF_OK);
    }
}

/* ---- settings ---- */

static inline uint32_t choose(void *user, const kvf_select_view *view, int32_t *ids)
{
    uint32_t count = 0;
    (void)user;
    for (uint32_t p = 0; p < view->pages && count < view->pages_max; p++)
        if (view->scores[p] > -INFINITY && (p * 7 + view->kv_head) % 3)
            ids[count++] = (int32_t)p;
    return count;
}

static inline void draw_heads(world *w, kvf_cache_config *c)
{
    const int has_codes = c->digest == KVF_DIGEST_CODES && c->select != KVF_SELECT_QUEST &&
                          c->select != KVF_SELECT_ARKVALE;
    for (uint32_t i = 0; i < sizeof w->kinds; i++)
        w->kinds[i] = (uint8_t)draw(w, 0, has_codes ? 2 : 1);
    c->head_mask = w->kinds;
    c->coarse_share = (float)draw(w, 0, 10) / 10;
    c->streaming_sink = draw(w, 0, 40);
    c->streaming_recent = draw(w, 1, 90);
    c->layer_windows = fuzz_windows(w->has_windows, c, w->windows);
}

/* Settings that answers follow from. */
static inline void draw_policy(world *w, kvf_cache_config *c)
{
    static const uint32_t dims[] = {16, 32, 48, 64, 80, 128, 512};
    c->layers = draw(w, 1, LAYERS_MAX);
    c->kv_heads = draw(w, 1, KV_HEADS_MAX);
    const uint32_t group = draw(w, 0, 255);
    c->query_heads = c->kv_heads * (group < 240 ? 1 + group % 4 : GROUP_MAX);
    c->head_dim = dims[draw(w, 0, 6)];
    if (c->query_heads * c->head_dim > ROW_WANTED)
        c->head_dim = kvf_max_u32(ROW_WANTED / c->query_heads / 16 * 16, 16);
    c->value_dim = c->head_dim; /* by the last byte, as attention parameters, so that the others
                                   mean the same */
    if (w->params / 2 % 3 == 0)
        c->value_dim -= w->params / 6 % ((c->head_dim + 31) / 32) * 32;
    c->dtype = (kvf_dtype)draw(w, 0, KVF_FP32);
    c->pages = (kvf_pages)draw(w, 0, KVF_PAGES_K8V4);
    c->tokens_max = draw(w, 140, TOKENS_MAX - 5);
    c->prefill_chunk_max = CHUNK_MAX;
    c->page_size = 1u << draw(w, 0, 6);
    c->sink_tokens = draw(w, 0, 3) ? draw(w, 0, 9) : draw(w, 0, 70);
    c->local_tokens = draw(w, 0, 3) ? draw(w, 1, 20) : draw(w, 1, 90);
    c->budget_tokens = c->sink_tokens + c->local_tokens + 63 + c->page_size;
    c->budget_tokens += draw(w, 0, 3) ? draw(w, 0, 20) : draw(w, 0, 200);
    c->select = draw(w, 0, 1) ? (kvf_select)draw(w, 0, KVF_SELECT_CUSTOM) : KVF_SELECT_DYNAMIC;
    c->select_fn = choose;
    c->static_ratio = (float)draw(w, 0, 2) / 4;
    c->refresh_interval = draw(w, 1, 6);
    c->refresh = (kvf_refresh)draw(w, 0, 1);
    c->digest = draw(w, 0, 2) ? KVF_DIGEST_CODES : (kvf_digest_kind)draw(w, 0, KVF_DIGEST_MEAN);
    c->sub_digests = c->digest == KVF_DIGEST_CODES ? 1 : kvf_min_u32(c->page_size, 2);
    c->fill = (kvf_fill)draw(w, 0, KVF_FILL_TOKENS);
    c->group_reduce = (kvf_group_reduce)draw(w, 0, KVF_GROUP_SUM);
    c->budget_share =
        c->select == KVF_SELECT_STATIC || draw(w, 0, 2) ? 0.0f : (float)draw(w, 0, 10) / 10;
    c->device_bytes = draw(w, 0, 1) ? 0 : KVF_DEVICE_BYTES_AUTO;
    if (!draw(w, 0, 2))
        draw_heads(w, c);
}

/* Settings that change no answer. */
static inline void draw_ways(world *w, kvf_cache_config *c)
{
    c->sequences_max = draw(w, 1, SEQUENCES);
    c->tokens_per_step_max = draw(w, 1, STEP_MAX);
    c->transfer = (kvf_transfer)draw(w, 0, KVF_TRANSFER_BATCH);
    c->verify_interval = draw(w, 0, 3);
    c->phase_times = draw(w, 0, 2);
    c->host_tokens_max = draw(w, 0, 3) ? 0 : c->tokens_max + draw(w, 0, 60);
    if (draw(w, 0, 2))
        return;
    c->disk_path = "/tmp";
    c->disk_bundle_bytes = draw(w, 1, 255) << draw(w, 0, 10);
    c->host_bytes = (uint64_t)draw(w, 1, 255) << draw(w, 8, 16);
}

static inline void draw_prune(world *w, kvf_cache_config *c)
{
    static const char *const names[] = {"snapkv",    "fastkv",    "h2o",
                                        "streaming", "pyramidkv", "full"};
    kvf_prune_config *p = &w->prune;
    kvf_prune_config_init(p, kvf_prune_policy_find(names[draw(w, 0, 5)]));
    p->settings.window = WINDOW;
    p->settings.keep = (float)draw(w, 1, 10) / 10;
    p->settings.propagate = (float)draw(w, 1, 10) / 10;
    p->settings.layer = 0;
    p->retention = draw(w, 0, 2) ? KVF_RETENTION_EVICT : KVF_RETENTION_OFFLOAD;
    c->observe_window = WINDOW;
    c->head_mask = NULL;
    c->layer_windows = NULL;
    if (draw(w, 0, 2))
        return;
    p->eviction = KVF_EVICTION_NAIVE;
    p->chunk_queries = WINDOW;
    p->retention = KVF_RETENTION_EVICT;
    w->chunk = draw(w, 10, CHUNK_MAX);
}

/* NULL: the cache has none, or the two do not go together. */
static inline kvf_prune *open_pruner(const world *w, kvf_cache *cache)
{
    kvf_prune *pruner = NULL;
    kvf_error error;
    if (w->config.observe_window && kvf_prune_open(cache, &w->prune, &pruner, &error) != KVF_OK)
        PROMISE(!pruner && error.text[0]);
    return pruner;
}

static inline int is_listed(kvf_status status)
{
    switch (status) {
#define CASE(name, value, text) case name:
        KVF_STATUS_LIST(CASE)
#undef CASE
        return 1;
    }
    return 0;
}

/* A byte of nonsense in a field, pointers left out: a plan says what opening says. */
static inline void open_poisoned(world *w)
{
    const size_t first = offsetof(kvf_cache_config, layers);
    kvf_cache_config c = w->config;
    const size_t at = first + (draw(w, 0, 255) | draw(w, 0, 1) << 8) % (sizeof c - first);
    kvf_cache *cache = NULL;
    kvf_cache_plan plan = {0};
    kvf_error error = {.status = KVF_OK};
    ((unsigned char *)&c)[at] ^= (unsigned char)draw(w, 1, 255);
    c.select_fn = w->config.select_fn;
    c.select_user = w->config.select_user;
    c.head_mask = NULL; /* has as many heads as the sound ones */
    c.layer_windows = NULL;
    c.disk_path = NULL;
    const kvf_status planned = kvf_cache_plan_make(w->runtime, &c, &plan, &error);
    PROMISE(is_listed(planned) &&
            (planned == KVF_OK || (error.status == planned && error.text[0])));
    if (plan.host_kv_bytes + plan.device_kv_bytes > 64u << 20 || c.sequences_max > 64 ||
        c.tokens_max > 4096 || c.prefill_chunk_max > 4096 || c.tokens_per_step_max > 64)
        return; /* far more than is wanted here */
    const kvf_status opened = kvf_cache_open(w->runtime, &c, &cache, &error);
    PROMISE(planned == KVF_OK ? is_listed(opened) : opened == planned);
    PROMISE((opened == KVF_OK) == (cache != NULL));
    kvf_cache_close(cache);
}

static inline int open_world(world *w)
{
    kvf_cache_config *c = &w->config;
    kvf_error error;
    kvf_cache_config_init(c);
    draw_policy(w, c);
    w->gives &= c->select == KVF_SELECT_DYNAMIC || c->select == KVF_SELECT_HYBRID;
    if (!draw(w, 0, 3))
        draw_prune(w, c);
    w->plain_config = *c;
    w->plain_config.transfer = KVF_TRANSFER_DIRECT;
    draw_ways(w, c);
    if (!draw(w, 0, 5))
        open_poisoned(w);
    if (kvf_cache_open(w->runtime, c, &w->cache, &error) != KVF_OK) {
        PROMISE(error.text[0] && !w->cache);
        return 0;
    }
    give_params(w, w->cache);
    w->pruner = open_pruner(w, w->cache);
    const uint32_t is_static = kvf_cache_memory(w->cache)->static_tokens;
    w->plain_config.device_bytes = draw(w, 0, 1) ? 0 : KVF_DEVICE_BYTES_AUTO;
    w->has_rings = c->head_mask && memchr(c->head_mask, 0, (size_t)c->layers * c->kv_heads) != NULL;
    w->can_cut = !is_static && !w->has_rings;
    w->has_lists = w->can_cut && c->select != KVF_SELECT_QUEST && c->select != KVF_SELECT_ARKVALE &&
                   c->select != KVF_SELECT_ORACLE;
    return 1;
}

#endif
