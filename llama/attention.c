/* SPDX-License-Identifier: Apache-2.0 */

/*
 * FLASH_ATTN_EXT on a cache of llama.cpp: rows of a step, or chunks of a prompt, become chains,
 * stale tokens are put from llama.cpp's own tensors, and one call attends for all of them.
 *
 * A row is served only if its mask is exactly the first cells of a chain, looked at anew for every
 * layer; everything else is left to llama.cpp's kernels, with the reason. A failure of the library
 * is a failed pass: nothing of it is kept.
 */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cell_numbers.h"
#include "plugin.h"

/** An attention, taken apart. */
typedef struct operation {
    gg_tensor *node;
    const gg_tensor *q, *mask, *sinks;
    kvl_layer *layer;
    kvl_cache *cache;
    uint32_t stream;          /* the first */
    uint32_t tokens, streams; /* tokens of each of them */
    uint32_t rows;
    int is_prompt;
} operation;

/* Are queries or outputs, whose heads and tokens are these dimensions, [streams][tokens][heads]? */
static int lies_by_rows(const gg_tensor *t, int head, int token)
{
    return t->type == GG_F32 && t->nb[0] == 4 && t->nb[head] == (size_t)t->ne[0] * 4 &&
           t->nb[token] == t->nb[head] * (size_t)t->ne[head] &&
           (t->ne[3] == 1 || t->nb[3] == t->nb[token] * (size_t)t->ne[token]);
}

static kvl_reason take_apart(operation *o)
{
    const gg_tensor *q = o->node->src[0], *k = o->node->src[1], *m = o->node->src[3];
    o->q = q;
    o->mask = m;
    o->sinks = o->node->src[4];
    o->cache = o->layer->cache;
    o->stream = (uint32_t)(k->view_offs / o->layer->k->nb[2]);
    if (!m || m->type != GG_F16 || m->ne[2] != 1 || m->ne[0] != k->ne[1] || m->ne[0] % 64 ||
        m->nb[0] != 2 || m->ne[1] < q->ne[1] || (m->ne[3] != 1 && m->ne[3] != q->ne[3]))
        return KVL_MASK;
    return q->type == GG_F32 && q->nb[0] == 4 && lies_by_rows(o->node, 1, 2) ? KVL_SERVED
                                                                             : KVL_LAYOUT;
}

/* Give a layer its scale, cap and sinks; they stay. */
static kvl_reason set_attention(const operation *o)
{
    kvl_layer *l = o->layer;
    const size_t bytes = o->cache->shape.query_heads * sizeof(float);
    float given[3]; /* scale, slope of ALiBi, cap */
    memcpy(given, o->node->op_params, sizeof given);
    if (o->sinks && (o->sinks->type != GG_F32 || o->sinks->nb[1] != bytes))
        return KVL_LAYOUT;
    if (l->has_params) {
        const int same = l->scale == given[0] && l->cap == given[2] && !l->sinks == !o->sinks &&
                         (!l->sinks || !memcmp(l->sinks, o->sinks->data, bytes));
        return same ? KVL_SERVED : KVL_PARAMS;
    }
    if (o->sinks && !l->sinks && !(l->sinks = malloc(bytes)))
        return KVL_MEMORY;
    if (o->sinks)
        memcpy(l->sinks, o->sinks->data, bytes);
    kvf_attention_params params;
    kvf_attention_params_init(&params);
    params.scale = l->scale = given[0];
    params.soft_cap = l->cap = given[2];
    params.sinks = l->sinks;
    l->has_params = kvf_blocks_attention_params(o->cache->blocks, l->index, &params) == KVF_OK;
    return l->has_params ? KVL_SERVED : KVL_PARAMS;
}

/* ---- rows ---- */

static uint64_t *set_of(const kvl_cache *c, uint32_t row)
{
    return c->sets + (size_t)row * (c->shape.cells / 64);
}

/* The set of a row of the operation. @return its cells; -1 = the mask has other values */
static int64_t read_mask(const operation *o, uint32_t row, uint64_t *set, int *same)
{
    const uint32_t token = row % o->tokens, s = row / o->tokens;
    const char *mask = (const char *)o->mask->data + token * o->mask->nb[1] +
                       (size_t)(s % o->mask->ne[3]) * o->mask->nb[3];
    const size_t width = (size_t)o->mask->ne[0];
    const int64_t count = kvl_open_cells((const uint16_t *)(const void *)mask, width, set, same);
    for (size_t w = width / 64; w < o->cache->shape.cells / 64; w++) {
        *same &= set[w] == 0;
        set[w] = 0;
    }
    return count;
}

static int find_chain(kvl_cache *c, kvl_row *row, const uint64_t *set)
{
    return kvl_chains_find(c->chains, row->stream, set, row->count, row->chain, &row->chain);
}

/* Rows are found: their lengths and block tables. A chain may get other blocks while later rows are
 * found, so all are read at the end. */
static kvl_reason found(kvl_cache *c, uint32_t rows)
{
    for (uint32_t r = 0; r < rows; r++) {
        const kvl_row *row = &c->rows[r];
        c->lengths[r] = (int32_t)row->count;
        if (row->count)
            memcpy(c->table + (size_t)r * c->table_stride, kvl_chain_table(row->chain),
                   (row->count + KVL_BLOCK - 1) / KVL_BLOCK * sizeof *c->table);
    }
    c->rows_count = rows;
    return KVL_SERVED;
}

/* Chains of a step. Where masks are those of the layer before, so are chains. */
static kvl_reason find_rows(const operation *o)
{
    kvl_cache *c = o->cache;
    int same = c->rows_count == o->rows;
    c->rows_count = 0; /* until all are found */
    for (uint32_t r = 0; r < o->rows; r++) {
        kvl_row *row = &c->rows[r];
        const uint32_t stream = o->stream + r / o->tokens;
        int is_same = 0;
        const int64_t count = read_mask(o, r, set_of(c, r), &is_same);
        if (count < 0)
            return KVL_MASK;
        same &= is_same && row->stream == stream;
        row->stream = stream;
        row->count = (uint32_t)count;
    }
    if (same) {
        c->rows_count = o->rows;
        return KVL_SERVED;
    }
    kvl_chains_begin(c->chains);
    for (uint32_t r = 0; r < o->rows; r++)
        if (c->rows[r].count && !find_chain(c, &c->rows[r], set_of(c, r)))
            return KVL_ROOM;
    return found(c, o->rows);
}

/* A prompt is a chunk per stream, if each of its rows sees one cell more than the row before it:
 * the next one of a chain. Looked at from the last row on, whose chain it is. */
static kvl_reason find_chunks(const operation *o)
{
    kvl_cache *c = o->cache;
    const size_t words = c->shape.cells / 64;
    uint64_t *set = set_of(c, 0), *left = set_of(c, 1); /* of a row, and of what it should be */
    c->rows_count = 0;
    if (o->streams > c->rows_max)
        return KVL_ROOM;
    kvl_chains_begin(c->chains);
    for (uint32_t row = o->rows; row-- > 0;) {
        const uint32_t at = row / o->tokens;
        kvl_row *chunk = &c->rows[at];
        int same;
        const int64_t count = read_mask(o, row, set, &same);
        if (count <= 0)
            return KVL_MASK;
        if (row % o->tokens == o->tokens - 1) {
            *chunk = (kvl_row){.stream = o->stream + at, .count = (uint32_t)count};
            if (!find_chain(c, chunk, set))
                return KVL_ROOM;
            memcpy(left, set, words * sizeof *set);
        }
        if (memcmp(set, left, words * sizeof *set) != 0)
            return KVL_MASK;
        c->starts[at] = row;
        c->contexts[at] = (uint32_t)count - 1;
        const uint32_t last = kvl_chain_cell(c->chains, chunk->chain, c->contexts[at]);
        left[last / 64] &= ~(UINT64_C(1) << last % 64);
    }
    c->starts[o->streams] = o->rows;
    return found(c, o->streams);
}

/* Queries side by side: llama.cpp's own where they are, else a copy. NULL = those of a prompt are
 * not, or a number is beyond what the library rounds it to. */
static const float *queries(const operation *o)
{
    const gg_tensor *q = o->q;
    const kvl_shape *s = &o->cache->shape;
    const size_t row = (size_t)s->query_heads * s->head_dim;
    const float *given = q->data;
    if (!lies_by_rows(q, 2, 1)) {
        float *to = o->cache->q;
        for (uint32_t r = 0; !o->is_prompt && r < o->rows; r++)
            for (uint32_t h = 0; h < s->query_heads; h++, to += s->head_dim)
                memcpy(to,
                       (const char *)q->data + r % o->tokens * q->nb[1] + h * q->nb[2] +
                           r / o->tokens * q->nb[3],
                       s->head_dim * sizeof *to);
        given = o->is_prompt ? NULL : o->cache->q;
    }
    return given && kvl_fits_f16(given, o->rows * row) ? given : NULL;
}

/* ---- putting ---- */

static int put(kvl_plugin *p, const operation *o, uint32_t count, kvl_reason *reason)
{
    kvl_cache *c = o->cache;
    const kvl_shape *s = &c->shape;
    const gg_tensor *keys = o->layer->k, *values = o->layer->v;
    const size_t k = (size_t)s->kv_heads * s->head_dim, v = (size_t)s->kv_heads * s->value_dim;
    const size_t element = s->is_wide ? sizeof(float) : sizeof(uint16_t);
    for (uint32_t i = 0; i < count; i++) {
        const char *key = (const char *)keys->data + c->stale[i].cell * keys->nb[1];
        const char *value = (const char *)values->data + c->stale[i].cell * values->nb[1];
        if (!kvl_row_read(keys->type, key, c->put_k + i * k * element, s->is_wide, k) ||
            !kvl_row_read(values->type, value, c->put_v + i * v * element, s->is_wide, v))
            *reason = KVL_RANGE;
        c->put_slots[i] = c->stale[i].slot;
    }
    const kvf_blocks_put_args args = {.layer = o->layer->index,
                                      .tokens = count,
                                      .k = c->put_k,
                                      .v = c->put_v,
                                      .slots = c->put_slots};
    p->counts.put += count;
    return kvf_blocks_put(c->blocks, &args, c->stream) == KVF_OK &&
           kvf_stream_wait(c->stream) == KVF_OK;
}

/* Put what rows of this operation see and the library lacks. */
static int put_rows(kvl_plugin *p, const operation *o, kvl_reason *reason)
{
    kvl_cache *c = o->cache;
    uint32_t n = 0;
    for (uint32_t r = 0; r < c->rows_count; r++) {
        const kvl_row *row = &c->rows[r];
        while (row->count &&
               (n += kvl_chain_stale(c->chains, row->chain, o->layer->index, row->count,
                                     c->stale + n, KVL_PUT - n)) == KVL_PUT) {
            if (!put(p, o, n, reason))
                return 0;
            n = 0;
        }
    }
    return n == 0 || put(p, o, n, reason);
}

/* ---- outcomes ---- */

static kvl_outcome leave(kvl_plugin *p, const operation *o, kvl_reason reason)
{
    if (o->is_prompt)
        p->counts.prompt += o->rows;
    else
        kvl_leave(p, o->layer, reason, o->rows, NULL);
    return KVL_LEFT;
}

/* The library's part of the cache is gone: the next step begins anew. */
static kvl_outcome fail(kvl_plugin *p, const operation *o)
{
    kvl_say("a pass failed: %s: %s", o->layer->k->name, kvf_runtime_error(p->runtime)->text);
    kvl_cache_reset(p, o->cache);
    return KVL_FAILED;
}

void kvl_compare(kvl_plugin *p, const gg_tensor *node, const float *own)
{
    const kvl_layer *l = kvl_find_layer(p, node->src[1]);
    const kvl_cache *c = l->cache;
    const size_t width = (size_t)(node->ne[0] * node->ne[1]);
    const float *theirs = node->data;
    for (uint32_t r = 0; r < c->rows_count; r++, own += width, theirs += width) {
        double difference = 0, largest = 1e-30;
        if (!c->rows[r].count || c->rows[r].count > c->budget)
            continue; /* nothing, or a choice of its tokens */
        for (size_t d = 0; d < width; d++) {
            const double e = fabs((double)own[d] - (double)theirs[d]);
            difference = e == e ? fmax(difference, e) : INFINITY;
            largest = fmax(largest, fabs((double)theirs[d]));
        }
        p->counts.verify++;
        p->counts.worst = fmax(p->counts.worst, difference / largest);
        /* A wrong cell moves outputs by much more than rounding does. */
        if (difference <= 0.05 * largest)
            continue;
        p->counts.wrong++;
        kvl_say("verify: layer %u row %u: output differs from llama.cpp's by %.3g", l->index, r,
                difference / largest);
    }
}

static kvf_status call(const operation *o, const float *q)
{
    kvl_cache *c = o->cache;
    const kvf_blocks_rows rows = {.rows = c->rows_count,
                                  .table_stride = c->table_stride,
                                  .table = c->table,
                                  .lengths = c->lengths};
    const kvf_blocks_decode_args step = {
        .layer = o->layer->index, .rows = &rows, .q = q, .out = o->node->data};
    const kvf_blocks_extend_args prompt = {.layer = o->layer->index,
                                           .rows = &rows,
                                           .starts = c->starts,
                                           .contexts = c->contexts,
                                           .q = q,
                                           .out = o->node->data};
    const kvf_status status = o->is_prompt ? kvf_blocks_extend(c->blocks, &prompt, c->stream)
                                           : kvf_blocks_decode(c->blocks, &step, c->stream);
    return status == KVF_OK ? kvf_stream_wait(c->stream) : status;
}

static kvl_outcome attend(kvl_plugin *p, const operation *o)
{
    kvl_reason reason = o->is_prompt ? find_chunks(o) : find_rows(o);
    if (reason != KVL_SERVED)
        return leave(p, o, reason);
    const float *q = queries(o);
    if (!q)
        return leave(p, o, KVL_RANGE);
    if (!put_rows(p, o, &reason))
        return fail(p, o);
    if (reason != KVL_SERVED) { /* the library would have other numbers than llama.cpp */
        kvl_cache_reset(p, o->cache);
        o->cache->refused = reason;
        return leave(p, o, reason);
    }
    if (call(o, q) != KVF_OK)
        return fail(p, o);
    kvl_cache *c = o->cache;
    if (o->is_prompt) {
        p->counts.prompt_served += o->rows;
        c->rows_count = 0; /* of chunks, not of a step */
        return KVL_DONE;
    }
    p->counts.served += o->rows;
    for (uint32_t r = 0; r < c->rows_count; r++)
        p->counts.held += (double)c->rows[r].count * c->shape.kv_heads;
    const uint32_t every = p->settings.verify;
    return every && o->layer->steps++ % every == 0 ? KVL_VERIFY : KVL_DONE;
}

kvl_outcome kvl_attend(kvl_plugin *p, gg_tensor *node)
{
    const gg_tensor *keys = kvl_cache_tensor(node->src[1], 'k'), *q = node->src[0];
    operation o = {.node = node, .layer = keys ? kvl_layer_of(p, keys) : NULL};
    if (!o.layer)
        return KVL_LEFT;
    o.layer->unattended = 0;
    o.tokens = (uint32_t)q->ne[1];
    o.streams = (uint32_t)q->ne[3];
    o.rows = o.tokens * o.streams;
    kvl_reason reason = kvl_learn(p, o.layer, node);
    if (reason == KVL_SERVED)
        reason = take_apart(&o);
    o.is_prompt = reason == KVL_SERVED && o.rows > p->settings.rows;
    if (o.is_prompt && p->settings.prompts != KVL_PROMPTS_KVFERRY)
        return leave(p, &o, KVL_SERVED);
    if (reason == KVL_SERVED)
        reason = kvl_cache_ready(p, o.layer);
    if (reason == KVL_SERVED)
        reason = set_attention(&o);
    return reason == KVL_SERVED ? attend(p, &o) : leave(p, &o, reason);
}
