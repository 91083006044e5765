/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Bytes become a sequence of calls of the public API: settings good and bad, sequences created,
 * forked and destroyed, prompts, decode batches, selections, statistics, in any order.
 *
 * Knows the public header only. What must hold for every input: no crash; only statuses of the
 * list; a failed call leaves lengths as they were; lengths grow by what was appended; outputs of
 * finite input are finite; statistics add up; and under full attention the output equals a naive
 * dense attention over what was appended. A broken promise aborts, which the fuzzer reports.
 */

#include "fuzz_input.h"
#include "fuzz_library.h"

#include <math.h>
#include <string.h>

enum {
    SEQUENCES = 3,
    TOKENS_MAX = 160,
    TOKENS_PER_STEP = 16,
    CHUNK_MAX = SEQUENCES * TOKENS_PER_STEP,
    LAYERS_MAX = 2,
    KV_HEADS_MAX = 2,
    GROUP_MAX = 2,
    QUERY_HEADS_MAX = KV_HEADS_MAX * GROUP_MAX,
    HEAD_DIM_MAX = 80,
    OPERATIONS_MAX = 48,
};

/* What a sequence must hold, by our own account. Keys and values only where they are compared. */
typedef struct model {
    kvf_sequence *sequence; /* NULL = not alive */
    uint32_t length[LAYERS_MAX];
    float k[LAYERS_MAX][TOKENS_MAX][KV_HEADS_MAX * HEAD_DIM_MAX];
    float v[LAYERS_MAX][TOKENS_MAX][KV_HEADS_MAX * HEAD_DIM_MAX];
} model;

typedef struct world {
    fuzz_input in;
    kvf_runtime *runtime;
    kvf_stream *stream;
    kvf_cache *cache;
    kvf_cache_config config; /* as opened */
    int poisoned;            /* a NaN went in: KVF_NOT_FINITE may come from any call */
    uint32_t random;
    model models[SEQUENCES];
    float q[CHUNK_MAX * QUERY_HEADS_MAX * HEAD_DIM_MAX];
    float k[CHUNK_MAX * KV_HEADS_MAX * HEAD_DIM_MAX];
    float v[CHUNK_MAX * KV_HEADS_MAX * HEAD_DIM_MAX];
    float out[CHUNK_MAX * QUERY_HEADS_MAX * HEAD_DIM_MAX];
    float lse[CHUNK_MAX * QUERY_HEADS_MAX];
    int32_t indptr[SEQUENCES * KV_HEADS_MAX + 1];
    int32_t indices[SEQUENCES * KV_HEADS_MAX * TOKENS_MAX];
    int32_t last_page_len[SEQUENCES * KV_HEADS_MAX];
} world;

static int is_listed(kvf_status status)
{
    switch (status) {
#define CASE(name, value, text) case name:
        KVF_STATUS_LIST(CASE)
#undef CASE
        return 1;
    }
    return 0;
}

static void fill(world *w, float *values, size_t count)
{
    fuzz_fill(&w->random, values, count);
}

/* Mostly sound settings of a tiny cache, now and then a byte of nonsense in any field. */
static kvf_cache_config draw_config(world *w)
{
    static const uint32_t page_sizes[] = {8, 16, 32, 64};
    static const uint32_t head_dims[] = {64, 80};
    kvf_cache_config c;
    kvf_cache_config_init(&c);
    c.layers = fuzz_range(&w->in, 1, LAYERS_MAX);
    c.kv_heads = fuzz_range(&w->in, 1, KV_HEADS_MAX);
    c.query_heads = c.kv_heads * fuzz_range(&w->in, 1, GROUP_MAX);
    c.head_dim = head_dims[fuzz_range(&w->in, 0, 1)];
    c.dtype = KVF_FP32;
    c.sequences_max = fuzz_range(&w->in, 1, SEQUENCES);
    c.tokens_max = fuzz_range(&w->in, 96, TOKENS_MAX);
    c.host_tokens_max = fuzz_range(&w->in, 0, 3) ? 0 : 128;
    c.prefill_chunk_max = fuzz_range(&w->in, 16, CHUNK_MAX);
    c.page_size = page_sizes[fuzz_range(&w->in, 0, 3)];
    c.sink_tokens = fuzz_range(&w->in, 0, 8);
    c.local_tokens = fuzz_range(&w->in, 1, 24);
    c.budget_tokens = fuzz_range(&w->in, 48, 255);
    c.select = (kvf_select)fuzz_range(&w->in, 0, KVF_SELECT_ORACLE);
    c.static_ratio = (float)fuzz_range(&w->in, 0, 4) / 4.0f;
    if (!fuzz_range(&w->in, 0, 7))
        c.static_ratio = KVF_STATIC_RATIO_AUTO;
    c.refresh_interval = fuzz_range(&w->in, 1, 8);
    c.refresh = (kvf_refresh)fuzz_range(&w->in, 0, 1);
    c.tokens_per_step_max = fuzz_range(&w->in, 1, TOKENS_PER_STEP);
    c.digest = (kvf_digest_kind)fuzz_range(&w->in, 0, 2);
    c.sub_digests = 1u << fuzz_range(&w->in, 0, 2);
    c.group_reduce = (kvf_group_reduce)fuzz_range(&w->in, 0, 2);
    c.transfer = (kvf_transfer)fuzz_range(&w->in, 0, 3);
    c.slots = fuzz_range(&w->in, 0, 3) ? 0 : fuzz_range(&w->in, 0, 40);
    c.verify_interval = fuzz_range(&w->in, 0, 3);
    if (!fuzz_range(&w->in, 0, 5)) {
        /* After `size`, every field up to the callbacks; the pointers stay as they are. */
        const size_t first = offsetof(kvf_cache_config, layers);
        const size_t end = offsetof(kvf_cache_config, select_fn);
        const size_t at = first + fuzz_range(&w->in, 0, 255) % (end - first);
        ((unsigned char *)&c)[at] ^= (unsigned char)fuzz_range(&w->in, 1, 255);
    }
    return c;
}

/* A configuration that was spoiled may ask for far more than the buffers here hold. */
static int fits(const kvf_cache_config *c)
{
    return c->layers <= LAYERS_MAX && c->kv_heads <= KV_HEADS_MAX &&
           c->query_heads <= QUERY_HEADS_MAX && c->head_dim <= HEAD_DIM_MAX &&
           c->dtype == KVF_FP32 && c->sequences_max <= SEQUENCES && c->tokens_max <= TOKENS_MAX &&
           c->prefill_chunk_max <= CHUNK_MAX && c->softmax_scale == 0.0f;
}

static void close_cache(world *w)
{
    kvf_cache_close(w->cache); /* with all its sequences */
    w->cache = NULL;
    w->poisoned = 0;
    for (uint32_t i = 0; i < SEQUENCES; i++)
        w->models[i].sequence = NULL;
}

static void open_cache(world *w)
{
    kvf_error error = {.status = KVF_OK};
    kvf_cache_plan plan;
    kvf_cache *cache = NULL;
    const kvf_cache_config config = draw_config(w);
    const kvf_status planned = kvf_cache_plan_make(w->runtime, &config, &plan, &error);
    PROMISE(is_listed(planned));
    if (planned != KVF_OK) {
        PROMISE(error.status == planned && error.text[0]);
        PROMISE(kvf_cache_open(w->runtime, &config, &cache, &error) == planned && !cache);
        return;
    }
    if (!fits(&config) || plan.host_kv_bytes + plan.device_kv_bytes > 64u << 20)
        return;
    close_cache(w);
    const kvf_status opened = kvf_cache_open(w->runtime, &config, &cache, &error);
    PROMISE(is_listed(opened) && (opened == KVF_OK) == (cache != NULL));
    w->cache = cache;
    if (cache)
        w->config = *kvf_cache_settings(cache);
}

static void settle(world *w)
{
    const kvf_status status = kvf_stream_wait(w->stream);
    PROMISE(is_listed(status));
    PROMISE(status == KVF_OK || (status == KVF_NOT_FINITE && w->poisoned));
    if (status == KVF_OK)
        return;
    /* A stream that failed stays failed; the next input of this run goes through a fresh one. */
    kvf_stream_destroy(w->stream);
    w->stream = NULL;
    PROMISE(kvf_stream_create(w->runtime, &w->stream) == KVF_OK);
}

static void check_lengths(const world *w)
{
    for (uint32_t i = 0; i < SEQUENCES; i++) {
        const model *m = &w->models[i];
        for (uint32_t l = 0; m->sequence && l < w->config.layers; l++)
            PROMISE(kvf_sequence_length(m->sequence, l) == m->length[l]);
    }
}

static void create_or_fork(world *w)
{
    model *child = &w->models[fuzz_range(&w->in, 0, SEQUENCES - 1)];
    model *parent = &w->models[fuzz_range(&w->in, 0, SEQUENCES - 1)];
    kvf_status status;
    uint32_t alive = 0;
    if (child->sequence)
        return;
    for (uint32_t i = 0; i < SEQUENCES; i++)
        alive += w->models[i].sequence != NULL;
    if (parent->sequence) {
        status = kvf_sequence_fork(w->cache, parent->sequence, w->stream, &child->sequence);
        settle(w);
    } else {
        status = kvf_sequence_create(w->cache, &child->sequence);
    }
    PROMISE(is_listed(status));
    if (status != KVF_OK) {
        PROMISE(!child->sequence);
        PROMISE(w->poisoned || alive >= w->config.sequences_max || status == KVF_FULL);
        return;
    }
    PROMISE(alive < w->config.sequences_max);
    if (parent->sequence && parent != child) {
        kvf_sequence *own = child->sequence;
        *child = *parent;
        child->sequence = own;
    } else {
        memset(child->length, 0, sizeof child->length);
    }
}

static void destroy(world *w)
{
    model *m = &w->models[fuzz_range(&w->in, 0, SEQUENCES - 1)];
    kvf_sequence_destroy(m->sequence);
    m->sequence = NULL;
}

/* Row `row` of w->k and w->v joins the account of a layer. */
static void account(world *w, model *m, uint32_t layer, uint32_t row)
{
    const size_t floats = w->config.kv_heads * w->config.head_dim;
    PROMISE(m->length[layer] < TOKENS_MAX);
    memcpy(m->k[layer][m->length[layer]], w->k + row * floats, floats * sizeof(float));
    memcpy(m->v[layer][m->length[layer]], w->v + row * floats, floats * sizeof(float));
    m->length[layer]++;
}

/* Dense attention of one query head over the first `tokens` tokens, compared with `out`. */
static void compare_dense(const world *w, const model *m, uint32_t layer, uint32_t tokens,
                          uint32_t head, const float *q, const float *out)
{
    const uint32_t dim = w->config.head_dim;
    const uint32_t at = head / (w->config.query_heads / w->config.kv_heads) * dim;
    double logits[TOKENS_MAX], top = -INFINITY, sum = 0, result[HEAD_DIM_MAX] = {0};
    for (uint32_t t = 0; t < tokens; t++) {
        logits[t] = 0;
        for (uint32_t d = 0; d < dim; d++)
            logits[t] += (double)q[d] * (double)m->k[layer][t][at + d];
        logits[t] /= sqrt((double)dim);
        top = fmax(top, logits[t]);
    }
    for (uint32_t t = 0; t < tokens; t++) {
        const double weight = exp(logits[t] - top);
        sum += weight;
        for (uint32_t d = 0; d < dim; d++)
            result[d] += weight * (double)m->v[layer][t][at + d];
    }
    for (uint32_t d = 0; d < dim; d++)
        PROMISE(fabs(result[d] / sum - (double)out[d]) < 1e-4);
}

/* Every row of the outputs is finite, and right where attention is dense. */
static void check_rows(const world *w, const model *m, uint32_t layer, uint32_t first,
                       uint32_t tokens, uint32_t row, int dense)
{
    const uint32_t heads = w->config.query_heads, dim = w->config.head_dim;
    for (uint32_t t = 0; t < tokens; t++) {
        for (uint32_t h = 0; h < heads; h++) {
            const size_t at = ((size_t)(row + t) * heads + h) * dim;
            for (uint32_t d = 0; d < dim; d++)
                PROMISE(isfinite(w->out[at + d]));
            if (dense)
                compare_dense(w, m, layer, first + t + 1, h, w->q + at, w->out + at);
        }
    }
}

static void fill_rows(world *w, uint32_t rows)
{
    fill(w, w->q, (size_t)rows * w->config.query_heads * w->config.head_dim);
    fill(w, w->k, (size_t)rows * w->config.kv_heads * w->config.head_dim);
    fill(w, w->v, (size_t)rows * w->config.kv_heads * w->config.head_dim);
}

static void prefill(world *w)
{
    model *m = &w->models[fuzz_range(&w->in, 0, SEQUENCES - 1)];
    const uint32_t tokens = fuzz_range(&w->in, 0, CHUNK_MAX);
    const uint32_t layer = fuzz_range(&w->in, 0, LAYERS_MAX);
    const int ask = fuzz_range(&w->in, 0, 3) != 0;
    const int spoil = !fuzz_range(&w->in, 0, 31);
    if (!m->sequence)
        return;
    fill_rows(w, tokens);
    if (spoil && tokens) {
        w->k[0] = NAN;
        w->poisoned = 1;
    }
    const kvf_prefill_args args = {
        .sequence = m->sequence,
        .layer = layer,
        .tokens = tokens,
        .q = ask ? w->q : NULL,
        .k = w->k,
        .v = w->v,
        .out = ask ? w->out : NULL,
    };
    const kvf_status status = kvf_prefill(w->cache, &args, w->stream);
    PROMISE(is_listed(status));
    if (status == KVF_OK) {
        PROMISE(tokens && tokens <= w->config.prefill_chunk_max && layer < w->config.layers);
        const uint32_t first = m->length[layer];
        for (uint32_t t = 0; t < tokens; t++)
            account(w, m, layer, t);
        settle(w);
        if (ask && !w->poisoned)
            check_rows(w, m, layer, first, tokens, 0, 1);
    }
    check_lengths(w);
}

/* Draws a batch; the sequences may be none, or the same one twice. */
static uint32_t draw_batch(world *w, kvf_sequence **batch, model **members)
{
    const uint32_t mask = fuzz_range(&w->in, 0, 15);
    uint32_t count = 0;
    for (uint32_t i = 0; i < SEQUENCES; i++) {
        if (!(mask >> i & 1) || !w->models[i].sequence)
            continue;
        members[count] = &w->models[i];
        batch[count++] = w->models[i].sequence;
    }
    if (mask == 8 && w->models[0].sequence) {
        members[0] = members[1] = &w->models[0];
        batch[0] = batch[1] = w->models[0].sequence;
        count = 2;
    }
    return count;
}

/* New tokens of each sequence of a batch, of which some may be none, or too many; and their rows.
 */
static void draw_rows(world *w, uint32_t count, int has_several, uint32_t *tokens)
{
    uint32_t rows = 0;
    for (uint32_t b = 0; b < count; b++) {
        tokens[b] = has_several ? fuzz_range(&w->in, 0, TOKENS_PER_STEP) : 1;
        rows += tokens[b];
    }
    fill_rows(w, rows);
}

/* What a step that was taken must have been. */
static int is_step(const world *w, const kvf_decode_args *args, const uint32_t *tokens,
                   int by_pages)
{
    const uint32_t most = by_pages ? 1 : w->config.tokens_per_step_max;
    for (uint32_t b = 0; b < args->batch; b++)
        if (tokens[b] < 1 || tokens[b] > most)
            return 0;
    return args->batch && args->layer < w->config.layers;
}

static void check_lists(const world *w, const kvf_page_lists *lists, uint32_t count)
{
    PROMISE(lists->indptr[0] == 0);
    for (uint32_t i = 0; i < count * w->config.kv_heads; i++) {
        const int32_t first = lists->indptr[i], end = lists->indptr[i + 1];
        PROMISE(first < end && (uint32_t)(end - first) <= kvf_select_pages_max(w->cache));
        PROMISE(lists->last_page_len[i] > 0);
        PROMISE((uint32_t)lists->last_page_len[i] <= w->config.page_size);
        for (int32_t j = first + 1; j < end; j++)
            PROMISE(lists->indices[j - 1] < lists->indices[j]);
    }
}

static void decode(world *w)
{
    kvf_sequence *batch[SEQUENCES] = {NULL};
    model *members[SEQUENCES] = {NULL};
    const uint32_t layer = fuzz_range(&w->in, 0, LAYERS_MAX);
    const uint32_t way = fuzz_range(&w->in, 0, 3);
    const uint32_t count = draw_batch(w, batch, members);
    const int has_several = way && w->config.tokens_per_step_max > 1;
    uint32_t tokens[SEQUENCES];
    draw_rows(w, count, has_several, tokens);
    const kvf_decode_args args = {
        .layer = layer,
        .batch = count,
        .sequences = batch,
        .q = w->q,
        .k = w->k,
        .v = w->v,
        .out = w->out,
        .lse = way == 1 ? w->lse : NULL,
        .tokens = has_several ? tokens : NULL,
    };
    const kvf_page_lists lists = {
        .indptr = w->indptr,
        .indices = w->indices,
        .capacity = sizeof w->indices / sizeof *w->indices,
        .last_page_len = w->last_page_len,
    };
    const kvf_status status = way == 2 ? kvf_select_pages(w->cache, &args, &lists, w->stream)
                                       : kvf_decode(w->cache, &args, w->stream);
    PROMISE(is_listed(status));
    if (status == KVF_OK) {
        PROMISE(is_step(w, &args, tokens, way == 2));
        for (uint32_t b = 0, row = 0; b < count; b++)
            for (uint32_t t = 0; t < tokens[b]; t++)
                account(w, members[b], layer, row++);
        if (way == 2)
            PROMISE(is_listed(kvf_attend_pages(w->cache, &args, &lists, w->stream)));
        settle(w);
        if (way == 2 && !w->poisoned)
            check_lists(w, &lists, count);
        const int dense = w->config.select == KVF_SELECT_FULL;
        for (uint32_t b = 0, row = 0; b < count && !w->poisoned; row += tokens[b++])
            check_rows(w, members[b], layer, members[b]->length[layer] - tokens[b], tokens[b], row,
                       dense);
    }
    check_lengths(w);
}

static void statistics(world *w)
{
    kvf_stats all, layer;
    uint64_t steps = 0;
    settle(w);
    kvf_cache_stats(w->cache, &all);
    PROMISE(all.hits + all.misses <= all.pages_selected);
    PROMISE(all.recall_sum <= (double)all.verified * 1.0001);
    for (uint32_t l = 0; l < w->config.layers; l++) {
        kvf_cache_layer_stats(w->cache, l, &layer);
        steps += layer.steps;
    }
    PROMISE(steps == all.steps);
    if (fuzz_range(&w->in, 0, 1))
        kvf_cache_stats_reset(w->cache);
}

static void run(world *w)
{
    for (int i = 0; i < OPERATIONS_MAX && !fuzz_is_empty(&w->in); i++) {
        const uint32_t what = fuzz_range(&w->in, 0, 15);
        if (!w->cache || what == 0)
            open_cache(w);
        else if (what <= 2)
            create_or_fork(w);
        else if (what == 3)
            destroy(w);
        else if (what <= 6)
            prefill(w);
        else if (what == 7)
            statistics(w);
        else
            decode(w);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    world *w = calloc(1, sizeof *w);
    if (!w)
        return 0;
    w->random = 1;
    fuzz_begin(&w->in, &w->runtime, &w->stream, data, size);
    run(w);
    settle(w);
    close_cache(w);
    kvf_stream_destroy(w->stream);
    free(w);
    return 0;
}
