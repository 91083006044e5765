/* SPDX-License-Identifier: Apache-2.0 */

/*
 * FLASH_ATTN_EXT on a cache of llama.cpp: rows of a step, or the chunk of a prompt, become chains,
 * stale tokens are put from llama.cpp's own tensors, and one call attends for all of them. A row is
 * served only if its mask is exactly the first cells of a chain, looked at anew for every layer.
 */

#include <stdlib.h>
#include <string.h>

#include "plugin.h"

/** An attention, taken apart. */
typedef struct operation {
    gg_tensor *node;
    kvl_copies *copies;
    kvl_rows *rows_waiting;
    const int64_t *new_cells; /* [new_count] of rows_waiting */
    uint32_t new_count, new_put;
    gg_tensor *q, *mask;
    const char *mask_data; /* on the host */
    const float *queries;  /* of q, side by side, where the library reads them */
    float *out;            /* of the node, where it writes */
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

static kvl_reason take_apart(const kvl_plugin *p, operation *o)
{
    const gg_tensor *q = o->q, *k = o->node->src[1];
    gg_tensor *m = o->mask;
    o->cache = o->layer->cache;
    o->stream = (uint32_t)(k->view_offs / o->layer->k->nb[2]);
    if (!m || m->type != GG_F16 || m->ne[2] != 1 || m->ne[0] != k->ne[1] || m->ne[0] % 64 ||
        m->nb[0] != 2 || m->ne[1] < q->ne[1] || (m->ne[3] != 1 && m->ne[3] != q->ne[3]))
        return KVL_MASK;
    const int is_apart = kvl_is_on_card(p, o->node) != (int)o->cache->shape.is_off_card;
    if (q->type != GG_F32 || q->nb[0] != 4 || !lies_by_rows(o->node, 1, 2) ||
        (is_apart && o->cache->shape.is_off_card))
        return KVL_LAYOUT;
    o->mask_data = kvl_on_host(p, o->copies, m);
    o->out = is_apart ? kvl_on_host(p, o->copies, o->node) : o->node->data;
    return o->mask_data && o->out ? KVL_SERVED : KVL_MEMORY;
}

/* Scale, cap and sinks; the library knows those of the layer's calls before. */
static kvl_reason set_attention(const kvl_plugin *p, const operation *o)
{
    gg_tensor *sinks = o->node->src[4];
    float given[3]; /* scale, slope of ALiBi, cap */
    memcpy(given, o->node->op_params, sizeof given);
    if (sinks && (sinks->type != GG_F32 || sinks->ne[0] != o->cache->shape.query_heads))
        return KVL_LAYOUT;
    kvf_attention_params params;
    kvf_attention_params_init(&params);
    params.scale = given[0];
    params.soft_cap = given[2];
    params.sinks = sinks ? kvl_on_host(p, o->copies, sinks) : NULL;
    if (sinks && !params.sinks)
        return KVL_MEMORY;
    if (!(given[0] > 0.0f) ||
        kvf_blocks_attention_params(o->cache->blocks, o->layer->index, &params) != KVF_OK)
        return KVL_PARAMS;
    return KVL_SERVED;
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
    const char *mask =
        o->mask_data + token * o->mask->nb[1] + (size_t)(s % o->mask->ne[3]) * o->mask->nb[3];
    const size_t width = (size_t)o->mask->ne[0];
    const int64_t count = kvl_open_cells((const uint16_t *)(const void *)mask, width, set, same);
    for (size_t w = width / 64; w < o->cache->shape.cells / 64; w++) {
        *same &= set[w] == 0;
        set[w] = 0;
    }
    return count;
}

/* Rows are found: their lengths and block tables. A chain may get other blocks while later rows are
 * found, so all are read at the end. */
static kvl_reason found(kvl_cache *c, uint32_t rows)
{
    for (uint32_t r = 0; r < rows; r++) {
        const kvl_row *row = &c->rows[r];
        c->lengths[r] = (int32_t)row->count;
        if (row->count)
            memcpy(c->table + (size_t)r * (c->shape.cells / KVL_BLOCK), row->chain->table,
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
    for (uint32_t r = 0; r < o->rows; r++) {
        kvl_row *row = &c->rows[r];
        if (row->count &&
            !(row->chain = kvl_chains_find(c->chains, row->stream, set_of(c, r), row->count)))
            return KVL_ROOM;
    }
    return found(c, o->rows);
}

/* A prompt is a chunk, if each of its rows sees one cell more than the row before it: the next one
 * of a chain. Looked at from the last row on, whose chain it is. */
static kvl_reason find_chunk(const operation *o)
{
    kvl_cache *c = o->cache;
    kvl_row *chunk = c->rows;
    const size_t words = c->shape.cells / 64;
    uint64_t *set = set_of(c, 0), *left = set_of(c, 1); /* of a row, and of what it should be */
    c->rows_count = 0;
    if (o->streams != 1)
        return KVL_MASK;
    for (uint32_t row = o->rows; row-- > 0;) {
        int same;
        const int64_t count = read_mask(o, row, set, &same);
        if (count <= 0)
            return KVL_MASK;
        if (row == o->rows - 1) {
            *chunk = (kvl_row){.stream = o->stream, .count = (uint32_t)count};
            kvl_chains_begin(c->chains);
            chunk->chain = kvl_chains_find(c->chains, o->stream, set, chunk->count);
            if (!chunk->chain)
                return KVL_ROOM;
            memcpy(left, set, words * sizeof *set);
        }
        if (memcmp(set, left, words * sizeof *set) != 0)
            return KVL_MASK;
        const uint32_t last = kvl_chain_cell(c->chains, chunk->chain, (uint32_t)count - 1);
        left[last / 64] &= ~(UINT64_C(1) << last % 64);
    }
    return found(c, 1);
}

/* Queries side by side: llama.cpp's own where they are, else a copy of a step's. Those on the card
 * are not looked at: one that F16 cannot hold is infinite there, and its output NaN. */
static kvl_reason find_queries(const kvl_plugin *p, operation *o)
{
    gg_tensor *q = o->q;
    const kvl_shape *s = &o->cache->shape;
    const int is_by_rows = lies_by_rows(q, 2, 1);
    o->queries = q->data;
    if (is_by_rows && s->is_off_card && kvl_is_on_card(p, q))
        return KVL_SERVED;
    const char *from = kvl_on_host(p, o->copies, q);
    if (!from)
        return KVL_MEMORY;
    o->queries = (const float *)(const void *)from;
    if (!is_by_rows || s->is_off_card) {
        if (o->is_prompt)
            return KVL_LAYOUT;
        float *to = o->cache->q;
        for (uint32_t r = 0; r < o->rows; r++)
            for (uint32_t h = 0; h < s->query_heads; h++, to += s->head_dim)
                memcpy(to,
                       from + r % o->tokens * q->nb[1] + h * q->nb[2] + r / o->tokens * q->nb[3],
                       s->head_dim * sizeof *to);
        o->queries = o->cache->q;
    }
    const size_t row = (size_t)s->query_heads * s->head_dim;
    if (!kvl_fits_f16(o->queries, o->rows * row))
        return KVL_RANGE;
    if (o->queries == o->cache->q)
        o->queries = kvl_shared(o->cache, o->cache->q);
    return KVL_SERVED;
}

/* ---- putting ---- */

enum { NONE = -1 };

/* The row that waits for a cell, looked for from one on. */
static int64_t row_of(const operation *o, size_t cell, int64_t from)
{
    for (int64_t i = 0; i < o->new_count; i++) {
        const int64_t row = (from + i) % o->new_count;
        if ((size_t)o->new_cells[row] == cell)
            return row;
    }
    return NONE;
}

/* Tokens of the list from one on that are rows after each other, or in no row. @param row  of the
 * first, or none */
static uint32_t alike(const operation *o, uint32_t first, uint32_t end, int64_t row)
{
    const size_t *cells = o->cache->put_cells;
    for (uint32_t n = 1; first + n < end; n++) {
        const int64_t next = row == NONE ? 0 : row + n;
        if (row_of(o, cells[first + n], next) != (row == NONE ? NONE : next))
            return n;
    }
    return end - first;
}

/* Tokens of the list from llama.cpp's tensors. @return 0 = a number is beyond F16 */
static int read_cells(const operation *o, uint32_t first, uint32_t count, kvf_blocks_put_args *args)
{
    const kvl_cache *c = o->cache;
    const kvl_shape *s = &c->shape;
    const gg_tensor *keys = o->layer->k, *values = o->layer->v;
    const size_t k = (size_t)s->kv_heads * s->head_dim, v = (size_t)s->kv_heads * s->value_dim;
    const size_t element = s->is_wide ? sizeof(float) : sizeof(uint16_t);
    char *to_k = c->put_k + first * k * element, *to_v = c->put_v + first * v * element;
    int fits = 1;
    for (uint32_t i = 0; i < count; i++) {
        const size_t cell = c->put_cells[first + i];
        const char *key = (const char *)keys->data + cell * keys->nb[1];
        const char *value = (const char *)values->data + cell * values->nb[1];
        fits &= kvl_row_read(keys->type, key, to_k + i * k * element, s->is_wide, k);
        fits &= kvl_row_read(values->type, value, to_v + i * v * element, s->is_wide, v);
    }
    args->k = kvl_shared(c, to_k);
    args->v = kvl_shared(c, to_v);
    return fits;
}

/* Tokens that are rows of the card. */
static void point_to_rows(const operation *o, size_t row, kvf_blocks_put_args *args)
{
    const gg_tensor *keys = o->rows_waiting->nodes[0]->src[0];
    const gg_tensor *values = o->rows_waiting->nodes[1]->src[0];
    args->k = (const char *)keys->data + row * keys->nb[1];
    args->v = (const char *)values->data + row * values->nb[1];
    args->k_stride = keys->nb[1] / sizeof(float);
    args->v_stride = values->nb[1] / sizeof(float);
}

/* Enqueued: who uses the arrays again waits. */
static kvl_reason put(kvl_plugin *p, operation *o, uint32_t count)
{
    kvl_cache *c = o->cache;
    for (uint32_t first = 0, n; first < count; first += n) {
        const int64_t row = row_of(o, c->put_cells[first], 0);
        n = alike(o, first, count, row);
        kvf_blocks_put_args args = {
            .layer = o->layer->index, .tokens = n, .slots = kvl_shared(c, c->put_slots + first)};
        if (row != NONE) {
            point_to_rows(o, (size_t)row, &args);
            o->new_put += n;
        } else if (!read_cells(o, first, n, &args)) {
            kvl_cache_reset(p, c); /* the library would have other numbers than llama.cpp */
            return c->refused = KVL_RANGE;
        }
        if (kvf_blocks_put(c->blocks, &args, c->stream) != KVF_OK)
            return KVL_BROKEN;
    }
    p->counts.put += count;
    o->layer->fresh += count;
    return KVL_SERVED;
}

/* Put what rows of this operation see and the library lacks. */
static kvl_reason put_rows(kvl_plugin *p, operation *o)
{
    kvl_cache *c = o->cache;
    uint32_t n = 0;
    for (uint32_t r = 0; r < c->rows_count; r++) {
        const kvl_row *row = &c->rows[r];
        while (row->count &&
               (n += kvl_chain_stale(c->chains, row->chain, o->layer->index, row->count,
                                     c->put_cells + n, c->put_slots + n, KVL_PUT - n)) == KVL_PUT) {
            const kvl_reason reason = put(p, o, n);
            if (reason != KVL_SERVED)
                return reason;
            if (kvf_stream_wait(c->stream) != KVF_OK)
                return KVL_BROKEN;
            n = 0;
        }
    }
    return n ? put(p, o, n) : KVL_SERVED;
}

/* Is every row that waits put, from where it is? */
static int are_put(const operation *o)
{
    return o->new_put >= o->new_count && kvl_cells_are_put(o->layer, o->new_cells, o->new_count);
}

/* ---- outcomes ---- */

static kvl_outcome leave(kvl_plugin *p, const operation *o, kvl_reason reason)
{
    if (o->new_count) /* llama.cpp reads them */
        return KVL_UNWRITTEN;
    if (o->is_prompt)
        p->counts.prompt += o->rows;
    else
        kvl_leave(p, o->layer, reason, o->rows, NULL);
    o->layer->stays |= !o->is_prompt; /* llama.cpp reads all of it, perhaps at every step */
    return KVL_LEFT;
}

/* The library's part of the cache is gone: the next step begins anew, if llama.cpp has all of it.
 */
static kvl_outcome fail(kvl_plugin *p, const operation *o)
{
    kvl_say("a pass failed: %s: %s", o->layer->k->name, kvf_runtime_error(o->cache->runtime)->text);
    kvl_cache_reset(p, o->cache);
    return KVL_FAILED;
}

static kvl_reason call(const operation *o)
{
    kvl_cache *c = o->cache;
    const kvf_blocks_rows rows = {.rows = c->rows_count,
                                  .table_stride = c->shape.cells / KVL_BLOCK,
                                  .table = kvl_shared(c, c->table),
                                  .lengths = kvl_shared(c, c->lengths)};
    kvf_status status;
    if (o->is_prompt) {
        const uint32_t starts[] = {0, o->rows}, context = c->rows->count - o->rows;
        const kvf_blocks_extend_args args = {.layer = o->layer->index,
                                             .rows = &rows,
                                             .starts = starts,
                                             .contexts = &context,
                                             .q = o->queries,
                                             .out = o->out};
        status = kvf_blocks_extend(c->blocks, &args, c->stream);
    } else {
        const kvf_blocks_decode_args args = {
            .layer = o->layer->index, .rows = &rows, .q = o->queries, .out = o->out};
        status = kvf_blocks_decode(c->blocks, &args, c->stream);
    }
    if (status == KVF_OK && o->new_count) /* which waits, too */
        return kvl_cells_give(o->layer, o->new_cells, o->new_count) ? KVL_SERVED : KVL_BROKEN;
    return status == KVF_OK && kvf_stream_wait(c->stream) == KVF_OK ? KVL_SERVED : KVL_BROKEN;
}

static kvl_outcome done(kvl_plugin *p, const operation *o)
{
    kvl_cache *c = o->cache;
    *o->rows_waiting = (kvl_rows){0};
    if (kvl_is_on_card(p, o->node) && !c->shape.is_off_card)
        kvl_write(p, o->node, o->out);
    kvl_put_away_some(p, o->layer);
    if (o->is_prompt) {
        p->counts.prompt_served += o->rows;
        c->rows_count = 0; /* of a chunk, not of a step */
        return KVL_DONE;
    }
    p->counts.served += o->rows;
    int is_whole = 1; /* else the library chose among tokens */
    for (uint32_t r = 0; r < c->rows_count; r++) {
        p->counts.held += (double)c->rows[r].count * c->shape.kv_heads;
        is_whole &= c->rows[r].count && c->rows[r].count <= c->plan.chains.budget;
    }
    const uint32_t every = p->settings.verify;
    return is_whole && every && o->layer->steps++ % every == 0 ? KVL_VERIFY : KVL_DONE;
}

/* Prompts are ours where llama.cpp's kernels would be those of the CPU beside a card. */
static int takes_prompts(const kvl_plugin *p, const kvl_cache *c)
{
    return p->settings.prompts == KVL_PROMPTS_KVFERRY ||
           (p->settings.prompts == KVL_PROMPTS_AUTO && c->shape.is_off_card);
}

kvl_outcome kvl_attend(kvl_plugin *p, kvl_copies *copies, kvl_rows *rows, gg_tensor *node)
{
    gg_tensor *q = node->src[0];
    operation o = {.node = node,
                   .copies = copies,
                   .rows_waiting = rows,
                   .q = q,
                   .mask = node->src[3],
                   .layer = kvl_find_layer(p, node->src[1]),
                   .tokens = (uint32_t)q->ne[1],
                   .streams = (uint32_t)q->ne[3],
                   .rows = (uint32_t)(q->ne[1] * q->ne[3])};
    if (!kvl_rows_cells(p, copies, rows, o.layer, &o.new_cells, &o.new_count))
        return KVL_UNWRITTEN;
    if (!o.layer)
        return KVL_LEFT;
    o.layer->unattended = 0;
    kvl_reason reason = kvl_learn(p, o.layer, node);
    if (o.layer->cache && o.layer->cache->is_lost)
        return KVL_FAILED;
    if (reason == KVL_SERVED)
        reason = take_apart(p, &o);
    o.is_prompt = reason == KVL_SERVED && o.rows > p->settings.rows;
    if (o.is_prompt && !takes_prompts(p, o.cache))
        return leave(p, &o, reason);
    if (reason == KVL_SERVED)
        reason = kvl_cache_ready(p, o.layer);
    if (reason == KVL_SERVED)
        reason = set_attention(p, &o);
    if (reason == KVL_SERVED)
        reason = o.is_prompt ? find_chunk(&o) : find_rows(&o);
    if (reason == KVL_SERVED)
        reason = find_queries(p, &o);
    if (reason == KVL_SERVED)
        reason = put_rows(p, &o);
    if (reason == KVL_SERVED && !are_put(&o))
        return kvf_stream_wait(o.cache->stream) == KVF_OK ? KVL_UNWRITTEN : fail(p, &o);
    if (reason == KVL_SERVED)
        reason = call(&o);
    if (reason == KVL_BROKEN || (o.cache && o.cache->is_lost))
        return fail(p, &o);
    return reason == KVL_SERVED ? done(p, &o) : leave(p, &o, reason);
}
