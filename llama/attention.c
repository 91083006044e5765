/* SPDX-License-Identifier: Apache-2.0 */

/*
 * FLASH_ATTN_EXT on a cache of llama.cpp: rows of a step become chains, stale tokens are put from
 * llama.cpp's own tensors, and one call attends for all rows.
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
    const gg_tensor *q, *k, *v, *mask, *sinks;
    const gg_tensor *keys, *values; /* of the cache */
    kvl_cache *cache;
    uint32_t layer;
    uint32_t stream;  /* the first */
    uint32_t streams; /* of this operation */
    uint32_t tokens;  /* per stream */
} operation;

static const uint16_t *mask_row(const operation *o, uint32_t token, uint32_t s)
{
    return (const uint16_t *)((const char *)o->mask->data + token * o->mask->nb[1] +
                              (size_t)(s % o->mask->ne[3]) * o->mask->nb[3]);
}

/* Keys or values as they lie in a cache: heads side by side in a cell. */
static int lies_as_known(const gg_tensor *view, const gg_tensor *cache)
{
    const size_t head = kvl_row_bytes(cache->type, (size_t)view->ne[0]);
    const size_t cell = head * (size_t)view->ne[2];
    return head && view->type == cache->type && view->nb[1] == cell && cache->nb[1] == cell &&
           (view->ne[2] == 1 || view->nb[2] == head) &&
           cache->nb[2] == cell * (size_t)cache->ne[1] && view->view_offs % cache->nb[2] == 0 &&
           (view->ne[3] == 1 || view->nb[3] == cache->nb[2]) && view->ne[1] <= cache->ne[1] &&
           view->view_offs / cache->nb[2] + (size_t)view->ne[3] <= (size_t)cache->ne[2];
}

static kvl_reason take_apart(operation *o)
{
    const gg_tensor *q = o->q, *k = o->k, *v = o->v, *m = o->mask, *out = o->node;
    const kvl_cache *c = o->cache;
    if (!m || m->type != GG_F16 || m->ne[2] != 1 || m->ne[0] != k->ne[1] || m->ne[0] % 64 ||
        m->nb[0] != 2 || m->ne[1] < q->ne[1] || (m->ne[3] != 1 && m->ne[3] != q->ne[3]))
        return KVL_MASK;
    if (q->type != GG_F32 || q->nb[0] != 4 || out->type != GG_F32 || out->nb[0] != 4 ||
        !lies_as_known(k, o->keys) || !lies_as_known(v, o->values) || q->ne[3] != k->ne[3] ||
        v->ne[3] != k->ne[3] || v->ne[1] != k->ne[1] ||
        k->view_offs / o->keys->nb[2] != v->view_offs / o->values->nb[2])
        return KVL_LAYOUT;
    if (q->ne[2] != c->query_heads || k->ne[2] != c->kv_heads || v->ne[2] != c->kv_heads ||
        q->ne[0] != c->head_dim || k->ne[0] != c->head_dim || v->ne[0] != c->value_dim ||
        c->layers[o->layer].k != o->keys || c->layers[o->layer].v != o->values)
        return KVL_GEOMETRY;
    o->stream = (uint32_t)(k->view_offs / o->keys->nb[2]);
    o->streams = (uint32_t)q->ne[3];
    o->tokens = (uint32_t)q->ne[1];
    return KVL_SERVED;
}

/* Give a layer its scale, cap and sinks; they stay. */
static kvl_reason set_attention(const operation *o)
{
    kvl_layer *l = &o->cache->layers[o->layer];
    float given[3]; /* scale, slope of ALiBi, cap */
    memcpy(given, o->node->op_params, sizeof given);
    const size_t heads = o->cache->query_heads;
    if (given[1] != 0.0f)
        return KVL_ALIBI;
    if (o->sinks && (o->sinks->type != GG_F32 || o->sinks->ne[0] != (int64_t)heads))
        return KVL_LAYOUT;
    if (l->has_params) {
        const int same = l->scale == given[0] && l->cap == given[2] &&
                         l->has_sinks == (o->sinks != NULL) &&
                         (!o->sinks || !memcmp(l->sinks, o->sinks->data, heads * sizeof(float)));
        return same ? KVL_SERVED : KVL_PARAMS;
    }
    if (o->sinks && !l->sinks && !(l->sinks = malloc(heads * sizeof(float))))
        return KVL_MEMORY;
    if (o->sinks)
        memcpy(l->sinks, o->sinks->data, heads * sizeof(float));
    kvf_attention_params params;
    kvf_attention_params_init(&params);
    params.scale = l->scale = given[0];
    params.soft_cap = l->cap = given[2];
    params.sinks = o->sinks ? l->sinks : NULL;
    l->has_sinks = o->sinks != NULL;
    if (kvf_blocks_attention_params(o->cache->blocks, o->layer, &params) != KVF_OK)
        return KVL_PARAMS;
    l->has_params = 1;
    return KVL_SERVED;
}

/* ---- putting ---- */

static int put_some(kvl_plugin *p, const operation *o, const kvl_stale *list, uint32_t count,
                    kvl_reason *reason)
{
    kvl_cache *c = o->cache;
    const size_t k = (size_t)c->kv_heads * c->head_dim, v = (size_t)c->kv_heads * c->value_dim;
    for (uint32_t i = 0; i < count; i++) {
        const char *key = (const char *)o->keys->data + list[i].cell * o->keys->nb[1];
        const char *value = (const char *)o->values->data + list[i].cell * o->values->nb[1];
        if (!kvl_row_to_f16(o->keys->type, key, c->put_k + i * k, k) ||
            !kvl_row_to_f16(o->values->type, value, c->put_v + i * v, v))
            *reason = KVL_RANGE;
        c->put_slots[i] = list[i].slot;
    }
    const kvf_blocks_put_args args = {
        .layer = o->layer, .tokens = count, .k = c->put_k, .v = c->put_v, .slots = c->put_slots};
    p->counts.put += count;
    return kvf_blocks_put(c->blocks, &args, c->stream) == KVF_OK &&
           kvf_stream_wait(c->stream) == KVF_OK;
}

static int put(kvl_plugin *p, const operation *o, uint32_t count, kvl_reason *reason)
{
    for (uint32_t at = 0; at < count; at += KVL_PUT) {
        const uint32_t n = count - at < KVL_PUT ? count - at : KVL_PUT;
        if (!put_some(p, o, o->cache->stale + at, n, reason))
            return 0;
    }
    return 1;
}

/* Put what rows of this operation see and the library lacks. */
static int put_rows(kvl_plugin *p, const operation *o, kvl_reason *reason)
{
    kvl_cache *c = o->cache;
    uint32_t count = 0;
    for (uint32_t r = 0; r < c->rows_count; r++) {
        if (!c->rows[r].count)
            continue;
        if (count + c->rows[r].count > c->stale_room) {
            if (!put(p, o, count, reason))
                return 0;
            count = 0;
        }
        count += kvl_chain_stale(c->chains, c->rows[r].chain, o->layer, c->rows[r].count,
                                 c->stale + count);
    }
    return put(p, o, count, reason);
}

/* ---- steps ---- */

/* Are sets of this operation's rows those of the rows that were found last? Leaves the sets. */
static kvl_reason read_masks(const operation *o, int *same)
{
    kvl_cache *c = o->cache;
    const uint32_t words = c->cells / 64, rows = o->tokens * o->streams;
    const size_t width = (size_t)o->mask->ne[0];
    *same = c->rows_count == rows;
    for (uint32_t r = 0; r < rows; r++) {
        uint64_t *set = c->sets + (size_t)r * words;
        const uint32_t s = r / o->tokens;
        int is_same = 0;
        const int64_t count = kvl_open_cells(mask_row(o, r % o->tokens, s), width, set, &is_same);
        if (count < 0)
            return KVL_MASK;
        for (size_t w = width / 64; w < words; w++) {
            is_same &= set[w] == 0;
            set[w] = 0;
        }
        *same &= is_same && c->rows[r].stream == o->stream + s;
        c->rows[r].stream = o->stream + s;
        c->rows[r].count = (uint32_t)count;
    }
    return KVL_SERVED;
}

/* Chains of the cache's first rows, and their block tables. */
static int find_chains(kvl_cache *c, uint32_t rows)
{
    c->rows_count = 0; /* until all are found */
    kvl_chains_begin(c->chains);
    for (uint32_t r = 0; r < rows; r++) {
        kvl_row *row = &c->rows[r];
        c->lengths[r] = (int32_t)row->count;
        if (row->count &&
            !kvl_chains_find(c->chains, row->stream, c->sets + (size_t)r * (c->cells / 64),
                             row->count, row->chain, &row->chain))
            return 0;
    }
    /* A chain may get other blocks while later rows are found. */
    for (uint32_t r = 0; r < rows; r++)
        if (c->rows[r].count)
            memcpy(c->table + (size_t)r * c->table_stride, kvl_chain_table(c->rows[r].chain),
                   (c->rows[r].count + KVL_BLOCK - 1) / KVL_BLOCK * sizeof *c->table);
    c->rows_count = rows;
    return 1;
}

static kvl_reason find_rows(const operation *o)
{
    int same;
    const kvl_reason reason = read_masks(o, &same);
    if (reason != KVL_SERVED)
        o->cache->rows_count = 0;
    if (reason != KVL_SERVED || same)
        return reason;
    return find_chains(o->cache, o->tokens * o->streams) ? KVL_SERVED : KVL_ROOM;
}

static const float *query(const operation *o, uint32_t token, uint32_t head, uint32_t s)
{
    return (const float *)((const char *)o->q->data + token * o->q->nb[1] + head * o->q->nb[2] +
                           s * o->q->nb[3]);
}

static float *output(const operation *o, uint32_t token, uint32_t head, uint32_t s)
{
    return (float *)((char *)o->node->data + head * o->node->nb[1] + token * o->node->nb[2] +
                     s * o->node->nb[3]);
}

/* Side by side, as the library takes them. Those beyond what it rounds them to are llama.cpp's. */
static kvl_reason read_queries(const operation *o, float *q)
{
    const kvl_cache *c = o->cache;
    int fits = 1;
    for (uint32_t s = 0; s < o->streams; s++)
        for (uint32_t t = 0; t < o->tokens; t++)
            for (uint32_t h = 0; h < c->query_heads; h++, q += c->head_dim) {
                memcpy(q, query(o, t, h, s), c->head_dim * sizeof *q);
                fits &= kvl_fits_f16(q, c->head_dim);
            }
    return fits ? KVL_SERVED : KVL_RANGE;
}

static void write_outputs(const operation *o, const float *out)
{
    const kvl_cache *c = o->cache;
    for (uint32_t s = 0; s < o->streams; s++)
        for (uint32_t t = 0; t < o->tokens; t++)
            for (uint32_t h = 0; h < c->query_heads; h++, out += c->value_dim)
                memcpy(output(o, t, h, s), out, c->value_dim * sizeof *out);
}

static void verify(kvl_plugin *p, const operation *o)
{
    kvl_layer *l = &o->cache->layers[o->layer];
    if (!p->settings.verify || l->steps++ % p->settings.verify)
        return;
    for (uint32_t r = 0; r < o->cache->rows_count; r++) {
        const kvl_row *row = &o->cache->rows[r];
        if (!row->count || row->count > o->cache->budget)
            continue; /* nothing, or a choice of its tokens */
        const double difference = kvl_plain_difference(o->node, r % o->tokens, r / o->tokens);
        if (difference < 0)
            continue;
        p->counts.verified++;
        p->counts.worst = fmax(p->counts.worst, difference);
        /* A wrong cell moves outputs by much more than rounding does. */
        if (difference <= 0.05)
            continue;
        p->counts.wrong++;
        kvl_say("verify: layer %u row %u: output differs from a plain loop by %.3g", o->layer, r,
                difference);
    }
}

static kvl_outcome leave(kvl_plugin *p, const operation *o, kvl_reason reason)
{
    kvl_leave(p, o->cache, reason, o->keys, (uint64_t)o->q->ne[1] * (uint64_t)o->q->ne[3], NULL);
    return KVL_LEFT;
}

/* The library's part of the cache is gone: the next step begins anew. */
static kvl_outcome fail(kvl_plugin *p, const operation *o)
{
    kvl_say("a pass failed: %s: %s", o->keys->name, kvf_runtime_error(p->runtime)->text);
    kvl_cache_reset(p, o->cache);
    return KVL_FAILED;
}

/* The library has other numbers than llama.cpp: the cache is left alone from now on. */
static kvl_outcome refuse_cache(kvl_plugin *p, const operation *o, kvl_reason reason)
{
    kvl_cache_reset(p, o->cache);
    o->cache->state = KVL_REFUSED;
    o->cache->refused = reason;
    return leave(p, o, reason);
}

static kvl_outcome step(kvl_plugin *p, const operation *o)
{
    kvl_cache *c = o->cache;
    kvl_reason reason = find_rows(o);
    if (reason == KVL_SERVED)
        reason = read_queries(o, c->q);
    if (reason != KVL_SERVED)
        return leave(p, o, reason);
    if (!put_rows(p, o, &reason))
        return fail(p, o);
    if (reason != KVL_SERVED)
        return refuse_cache(p, o, reason);
    const kvf_blocks_rows rows = {.rows = c->rows_count,
                                  .table_stride = c->table_stride,
                                  .table = c->table,
                                  .lengths = c->lengths};
    const kvf_blocks_decode_args args = {
        .layer = o->layer, .rows = &rows, .q = c->q, .out = c->out};
    if (kvf_blocks_decode(c->blocks, &args, c->stream) != KVF_OK ||
        kvf_stream_wait(c->stream) != KVF_OK)
        return fail(p, o);
    write_outputs(o, c->out);
    p->counts.served += c->rows_count;
    for (uint32_t r = 0; r < c->rows_count; r++)
        p->counts.held += (double)c->rows[r].count * c->kv_heads;
    verify(p, o);
    return KVL_DONE;
}

/* ---- prompts ---- */

/* Room for queries and outputs of a prompt, kept for the next one. */
static int prompt_room(kvl_cache *c, size_t tokens)
{
    if (tokens <= c->prompt_tokens)
        return 1;
    const size_t heads = tokens * c->query_heads;
    free(c->prompt_q), free(c->prompt_out), free(c->prompt_cells);
    c->prompt_q = malloc(heads * c->head_dim * sizeof *c->prompt_q);
    c->prompt_out = malloc(heads * c->value_dim * sizeof *c->prompt_out);
    c->prompt_cells = malloc(tokens * sizeof *c->prompt_cells);
    c->prompt_tokens = c->prompt_q && c->prompt_out && c->prompt_cells ? tokens : 0;
    return c->prompt_tokens != 0;
}

/* The one cell that a set has more than an earlier one; -1 = it is no such set. */
static int64_t one_more(const uint64_t *before, const uint64_t *set, uint32_t words)
{
    int64_t cell = -1;
    for (uint32_t w = 0; w < words; w++) {
        const uint64_t more = set[w] & ~before[w];
        if ((before[w] & ~set[w]) || (more && cell >= 0) || (more & (more - 1)))
            return -1;
        if (more)
            cell = (int64_t)w * 64 + __builtin_ctzll(more);
    }
    return cell;
}

/* Rows as chunks, in which each sees one cell more than the row before it: of chunk i the set of
 * its last row is sets[i]. @return chunks; 0 = there are others, or too many */
static uint32_t find_chunks(const operation *o, uint32_t *starts, uint32_t *contexts)
{
    kvl_cache *c = o->cache;
    const uint32_t words = c->cells / 64;
    const size_t width = (size_t)o->mask->ne[0];
    uint32_t chunks = 0;
    for (uint32_t row = 0; row < o->tokens * o->streams; row++) {
        /* The set is read to where a next chunk would have it. */
        uint64_t *set = c->sets + (size_t)chunks * words, *before = set - words;
        int same;
        const uint32_t s = row / o->tokens, token = row % o->tokens;
        if (chunks == c->rows_max - 1)
            return 0;
        memset(set, 0, words * sizeof *set);
        const int64_t count = kvl_open_cells(mask_row(o, token, s), width, set, &same);
        if (count <= 0)
            return 0;
        const int64_t cell = token && chunks ? one_more(before, set, words) : -1;
        c->prompt_cells[row] = (uint32_t)cell;
        if (cell >= 0) {
            memcpy(before, set, words * sizeof *set);
            c->rows[chunks - 1].count = (uint32_t)count;
            continue;
        }
        starts[chunks] = row;
        contexts[chunks] = (uint32_t)count - 1;
        c->rows[chunks].count = (uint32_t)count;
        c->rows[chunks++].stream = o->stream + s;
    }
    starts[chunks] = o->tokens * o->streams;
    return chunks;
}

/* Has every row of the chunks its own cell as the last one that it sees? */
static int are_causal(const kvl_cache *c, uint32_t chunks, const uint32_t *starts,
                      const uint32_t *contexts)
{
    for (uint32_t i = 0; i < chunks; i++)
        for (uint32_t j = starts[i] + 1; j < starts[i + 1]; j++)
            if (kvl_chain_place(c->rows[i].chain, c->prompt_cells[j], c->rows[i].count) !=
                contexts[i] + (j - starts[i]))
                return 0;
    return 1;
}

static kvl_outcome prompt(kvl_plugin *p, const operation *o)
{
    kvl_cache *c = o->cache;
    uint32_t starts[513], contexts[512]; /* `rows` is at most 512 */
    const uint32_t tokens = o->tokens * o->streams;
    kvl_reason reason = KVL_SERVED;
    c->rows_count = 0;
    if (!prompt_room(c, tokens))
        return KVL_LEFT;
    const uint32_t chunks = find_chunks(o, starts, contexts);
    if (!chunks || !find_chains(c, chunks) || !are_causal(c, chunks, starts, contexts) ||
        read_queries(o, c->prompt_q) != KVL_SERVED) {
        c->rows_count = 0;
        return KVL_LEFT;
    }
    const int is_put = put_rows(p, o, &reason);
    c->rows_count = 0; /* of chunks, not of a step */
    if (!is_put)
        return fail(p, o);
    if (reason != KVL_SERVED)
        return refuse_cache(p, o, reason);
    const kvf_blocks_rows rows = {
        .rows = chunks, .table_stride = c->table_stride, .table = c->table, .lengths = c->lengths};
    const kvf_blocks_extend_args args = {.layer = o->layer,
                                         .rows = &rows,
                                         .starts = starts,
                                         .contexts = contexts,
                                         .q = c->prompt_q,
                                         .out = c->prompt_out};
    if (kvf_blocks_extend(c->blocks, &args, c->stream) != KVF_OK ||
        kvf_stream_wait(c->stream) != KVF_OK)
        return fail(p, o);
    write_outputs(o, c->prompt_out);
    p->counts.prompt_served += tokens;
    return KVL_DONE;
}

kvl_outcome kvl_attend(kvl_plugin *p, gg_tensor *node)
{
    operation o = {.node = node,
                   .q = node->src[0],
                   .k = node->src[1],
                   .v = node->src[2],
                   .mask = node->src[3],
                   .sinks = node->src[4]};
    o.keys = kvl_cache_tensor(o.k, 'k');
    o.values = kvl_cache_tensor(o.v, 'v');
    if (!o.keys)
        return KVL_LEFT;
    kvl_reason reason = kvl_learn(p, node);
    if (reason == KVL_SERVED) {
        o.cache = kvl_find_cache(p, o.keys, &o.layer);
        reason = take_apart(&o);
    }
    if (reason != KVL_SERVED)
        return leave(p, &o, reason);
    const uint64_t rows = (uint64_t)o.tokens * o.streams;
    const int is_prompt = rows > p->settings.rows;
    if (is_prompt && p->settings.prompts != KVL_PROMPTS_KVFERRY) {
        p->counts.prompt += rows;
        return KVL_LEFT;
    }
    reason = kvl_cache_ready(p, o.cache);
    if (reason == KVL_SERVED)
        reason = set_attention(&o);
    if (reason != KVL_SERVED)
        return leave(p, &o, reason);
    const kvl_outcome outcome = is_prompt ? prompt(p, &o) : step(p, &o);
    if (is_prompt && outcome == KVL_LEFT)
        p->counts.prompt += rows;
    return outcome;
}
