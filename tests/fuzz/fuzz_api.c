/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Bytes become calls on a crowded cache: batches, several tokens of a sequence, queries alone,
 * forks, cuts, files, page lists and pruned prompts, under any settings of moving pages, threads
 * and disk; at the end also calls on single layers, calls that must be refused, and what is not
 * finite. Every fourth input is one of block tables (api_blocks.c).
 *
 * Knows the public headers. Every sequence has a twin that is alone in a plain cache, which has the
 * same settings but for those that change no answer. A fork's twin plays its parent's calls again,
 * and a cut one's the rest of them. Promises for every input: no crash; only statuses of
 * the list; outputs have the bits of the twin, and are a naive dense attention where all tokens are
 * attended; listed pages are read as they came, or near that, and attention over what was read is
 * what attending to the lists gives; a call that fails changes no length; statistics add up. A
 * broken promise aborts.
 */

#include "fuzz_api.h"

#include <kvferry/save.h>

#include <unistd.h>

/* ---- calls of either ---- */

static kvf_status prefill(kvf_cache *cache, kvf_sequence *s, uint32_t layer, uint32_t tokens,
                          rows *r, const uint32_t *positions, int asks, kvf_stream *stream)
{
    const kvf_prefill_args args = {.sequence = s,
                                   .layer = layer,
                                   .tokens = tokens,
                                   .q = asks ? r->q : NULL,
                                   .k = r->k,
                                   .v = r->v,
                                   .positions = positions,
                                   .out = r->out};
    const kvf_status status = kvf_prefill(cache, &args, stream);
    settle(stream);
    return status;
}

static kvf_decode_args step_args(uint32_t layer, kvf_sequence *const *sequences, uint32_t count,
                                 rows *r)
{
    return (kvf_decode_args){.layer = layer,
                             .batch = count,
                             .sequences = sequences,
                             .q = r->q,
                             .k = r->k,
                             .v = r->v,
                             .out = r->out,
                             .lse = r->lse,
                             .page_ids = r->given ? r->page_ids : NULL,
                             .page_stride = r->given};
}

static kvf_status step(kvf_cache *cache, kvf_sequence *s, uint32_t layer, rows *r,
                       kvf_stream *stream)
{
    const kvf_decode_args args = step_args(layer, &s, 1, r);
    const kvf_status status = kvf_decode(cache, &args, stream);
    settle(stream);
    return status;
}

/* ---- queries alone: of the newest tokens, in the last layer ---- */

static int can_ask_alone(const world *w)
{
    return w->asks_alone && !w->has_rings && w->config.select != KVF_SELECT_ORACLE;
}

static void fill_alone(const world *w, rows *r, uint32_t row, uint32_t token)
{
    const uint32_t layer = w->config.layers - 1, q = w->config.query_heads * w->config.head_dim;
    fill(w, r, row, layer, token);
    fill_row(r->q, w->config.dtype, (size_t)row * q, q, seed_of(layer, token) + 11);
}

static void step_alone(const world *w, kvf_cache *cache, kvf_sequence *const *sequences,
                       uint32_t count, rows *r, kvf_stream *stream)
{
    kvf_decode_args args = step_args(w->config.layers - 1, sequences, count, r);
    args.k = args.v = NULL;
    PROMISE(kvf_decode(cache, &args, stream) == KVF_OK);
    settle(stream);
}

static void prefill_alone(const world *w, kvf_cache *cache, kvf_sequence *s, uint32_t tokens,
                          rows *r, kvf_stream *stream)
{
    const kvf_prefill_args args = {
        .sequence = s, .layer = w->config.layers - 1, .tokens = tokens, .q = r->q, .out = r->out};
    PROMISE(kvf_prefill(cache, &args, stream) == KVF_OK);
    settle(stream);
}

/* Where a pruned prompt goes. */
typedef struct place {
    kvf_cache *cache;
    kvf_prune *pruner;
    kvf_sequence *sequence;
    kvf_stream *stream;
} place;

static kvf_status evict_by_chunks(world *w, const place *p, const uint32_t *token, uint32_t tokens)
{
    rows *r = &w->theirs;
    uint32_t at[CHUNK_MAX];
    kvf_status status = KVF_OK;
    for (uint32_t first = 0, n; status == KVF_OK && first < tokens; first += n) {
        n = kvf_min_u32(w->chunk, tokens - first);
        for (uint32_t l = 0; status == KVF_OK && l < w->config.layers; l++) {
            for (uint32_t i = 0; i < n; i++) {
                fill(w, r, i, l, token[first + i]);
                at[i] = first + i;
            }
            status = prefill(p->cache, p->sequence, l, n, r, at, 1, p->stream);
            if (status == KVF_OK)
                status = kvf_prune_chunk(p->pruner, p->sequence, l, n, 0, p->stream);
        }
    }
    return status;
}

static kvf_status prune_prompt(world *w, const place *p, const uint32_t *token, uint32_t tokens)
{
    rows *r = &w->theirs;
    uint32_t ids[CHUNK_MAX], n = tokens;
    kvf_status status = kvf_prune_begin(p->pruner, p->sequence, tokens);
    if (status == KVF_OK && w->prune.eviction)
        return evict_by_chunks(w, p, token, tokens);
    for (uint32_t i = 0; i < tokens; i++)
        ids[i] = i;
    for (uint32_t l = 0; status == KVF_OK && l < w->config.layers; l++) {
        const kvf_prefill_args args = {p->sequence, l, n, r->q, r->k, r->v, ids, r->out};
        kvf_prune_result result = {0};
        for (uint32_t i = 0; i < n; i++)
            fill(w, r, i, l, token[ids[i]]);
        status = kvf_prefill(p->cache, &args, p->stream);
        if (status == KVF_OK)
            status = kvf_prune_append(p->pruner, &args, p->stream);
        if (status == KVF_OK)
            status = kvf_prune_layer(p->pruner, p->sequence, l, p->stream, &result);
        settle(p->stream);
        for (uint32_t i = 0; result.propagate && i < result.propagate_count; i++)
            ids[i] = ids[result.propagate[i]];
        n = result.propagate ? result.propagate_count : n;
    }
    return status;
}

/* ---- twins ---- */

static void play_entry(world *w, model *m, const entry *e, const uint32_t *token)
{
    rows *r = &w->theirs;
    const place p = {m->plain, m->pruner, m->twin, w->plain_stream};
    if (e->what == PROMPT)
        PROMISE(prune_prompt(w, &p, token, e->tokens) == KVF_OK);
    for (uint32_t l = 0; e->what != PROMPT && l < w->config.layers; l++) {
        for (uint32_t t = 0; t < e->tokens; t++)
            fill(w, r, t, l, token[t]);
        PROMISE((e->what == STEP ? step(m->plain, m->twin, l, r, w->plain_stream)
                                 : prefill(m->plain, m->twin, l, e->tokens, r, NULL, e->what == ASK,
                                           w->plain_stream)) == KVF_OK);
    }
}

/* A twin that has done what the sequence has. */
static void play_again(world *w, model *m)
{
    kvf_error error;
    uint32_t first = 0;
    if (!m->plain) {
        PROMISE(kvf_cache_open(w->plain_runtime, &w->plain_config, &m->plain, &error) == KVF_OK);
        give_params(w, m->plain);
        m->pruner = open_pruner(w, m->plain);
    }
    kvf_sequence_destroy(m->twin);
    PROMISE(kvf_sequence_create(m->plain, &m->twin) == KVF_OK);
    for (uint32_t i = 0; i < m->entries; first += m->log[i++].tokens)
        play_entry(w, m, &m->log[i], m->token + first);
    PROMISE(first == m->tokens);
}

static uint32_t sealed(const world *w, uint32_t tokens)
{
    const uint32_t local = w->config.local_tokens;
    return tokens < local ? 0 : (tokens - local) / kvf_max_u32(w->config.page_size, 32);
}

static void note(const world *w, model *m, act what, uint32_t tokens)
{
    const uint32_t before = sealed(w, m->tokens);
    m->log[m->entries++] = (entry){what, tokens};
    m->tokens += tokens;
    m->spare = sealed(w, m->tokens) > before ? sealed(w, m->tokens) : m->spare;
}

static void forget(model *m)
{
    kvf_sequence_destroy(m->sequence);
    m->sequence = NULL;
    m->tokens = m->entries = m->is_pruned = m->spare = 0;
}

/* A call on some layer failed because the cache is full: back to where all of them were. */
static void undo(world *w, model *m)
{
    if (!w->can_cut || m->is_pruned || w->config.pages != KVF_PAGES_NATIVE)
        forget(m);
    else if (kvf_sequence_length(m->sequence, 0) > m->tokens)
        PROMISE(kvf_sequence_truncate(w->cache, m->sequence, m->tokens, w->stream) == KVF_OK);
    settle(w->stream);
}

static void check_lengths(const world *w)
{
    for (uint32_t i = 0; i < SEQUENCES; i++)
        for (uint32_t l = 0; w->models[i].sequence && l < w->config.layers; l++) {
            const model *m = &w->models[i];
            const uint32_t length = kvf_sequence_length(m->sequence, l);
            PROMISE(length == kvf_sequence_length(m->twin, l));
            PROMISE(m->is_pruned || w->is_wild || length == m->tokens);
        }
}

static model *pick(world *w)
{
    model *m = &w->models[draw(w, 0, SEQUENCES - 1)];
    for (uint32_t i = 0; i < SEQUENCES && !m->sequence; i++)
        m = &w->models[i];
    return m->sequence ? m : NULL;
}

static model *free_one(world *w)
{
    for (uint32_t i = 0; i < SEQUENCES; i++)
        if (!w->models[i].sequence)
            return &w->models[i];
    return NULL;
}

static uint32_t count_alive(const world *w)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < SEQUENCES; i++)
        count += w->models[i].sequence != NULL;
    return count;
}

/* ---- operations ---- */

static void create(world *w)
{
    model *m = free_one(w);
    if (!m)
        return;
    const int has_room = count_alive(w) < w->config.sequences_max;
    const kvf_status status = kvf_sequence_create(w->cache, &m->sequence);
    PROMISE(status == (has_room ? KVF_OK : KVF_FULL) && has_room == (m->sequence != NULL));
    if (has_room)
        play_again(w, m);
}

static void fork_one(world *w)
{
    model *parent = pick(w), *child = free_one(w);
    if (!parent || !child)
        return;
    const int has_room = count_alive(w) < w->config.sequences_max;
    const kvf_status status =
        kvf_sequence_fork(w->cache, parent->sequence, w->stream, &child->sequence);
    PROMISE(status == (has_room ? KVF_OK : KVF_FULL) && has_room == (child->sequence != NULL));
    settle(w->stream);
    if (!has_room)
        return;
    const model own = *child;
    *child = *parent;
    child->sequence = own.sequence;
    child->plain = own.plain;
    child->pruner = own.pruner;
    child->twin = own.twin;
    play_again(w, child);
}

static void destroy(world *w)
{
    model *m = pick(w);
    if (m && count_alive(w) > 1)
        forget(m);
}

/* A KV head of a sequence. */
typedef struct head_of {
    const world *w;
    const model *m;
    uint32_t layer, kv_head;
    float kv[2 * DIM_MAX];
} head_of;

static const float *token_at(void *user, uint32_t token)
{
    head_of *h = user;
    const kvf_cache_config *c = &h->w->config;
    static float row[KV_HEADS_MAX * DIM_MAX];
    for (uint32_t i = 0; i < 2; i++) {
        const uint32_t dim = i ? c->value_dim : c->head_dim;
        fill_row(row, c->dtype, 0, c->kv_heads * dim,
                 seed_of(h->layer, h->m->token[token]) + 1 + i);
        for (uint32_t d = 0; d < dim; d++)
            h->kv[i * c->head_dim + d] = kvf_element_get(row, c->dtype, h->kv_head * dim + d);
    }
    return h->kv;
}

/* A query head of row `row` of a call attended to `tokens` tokens. Returns its log-sum-exp. */
static double check_head(const world *w, uint32_t layer, uint32_t row, uint32_t head,
                         uint32_t tokens, fuzz_token_fn token_of, void *user, double limit)
{
    const kvf_cache_config *c = &w->config;
    const size_t number = (size_t)row * c->query_heads + head;
    float q[DIM_MAX], out[DIM_MAX];
    for (uint32_t d = 0; d < c->head_dim; d++)
        q[d] = kvf_element_get(w->mine[layer].q, c->dtype, number * c->head_dim + d);
    for (uint32_t d = 0; d < c->value_dim; d++)
        out[d] = kvf_element_get(w->mine[layer].out, c->dtype, number * c->value_dim + d);
    const fuzz_params params = fuzz_params_of(w->params, c->head_dim, layer, head);
    return fuzz_check_dense(q, c->head_dim, c->value_dim, tokens, token_of, user, &params, out,
                            limit);
}

/* Row `row` of a call attended to the first `tokens` tokens. */
static void check_dense(const world *w, const model *m, uint32_t layer, uint32_t row,
                        uint32_t tokens)
{
    static const double limits[] = {[KVF_BF16] = 0.08, [KVF_FP16] = 0.01, [KVF_FP32] = 1e-3};
    const kvf_cache_config *c = &w->config;
    if (m->is_pruned || w->has_rings || c->pages != KVF_PAGES_NATIVE)
        return;
    for (uint32_t h = 0; h < c->query_heads; h++) {
        head_of head = {w, m, layer, h / (c->query_heads / c->kv_heads), {0}};
        check_head(w, layer, row, h, tokens, token_at, &head, limits[c->dtype]);
    }
}

static void chunk_alone(world *w, const model *m, uint32_t tokens)
{
    for (uint32_t t = 0; t < tokens; t++) {
        fill_alone(w, &w->alone, t, m->token[m->tokens + t]);
        fill_alone(w, &w->theirs, t, m->token[m->tokens + t]);
    }
    prefill_alone(w, w->cache, m->sequence, tokens, &w->alone, w->stream);
    prefill_alone(w, m->plain, m->twin, tokens, &w->theirs, w->plain_stream);
    PROMISE(!memcmp(w->alone.out, w->theirs.out, tokens * row_bytes(w)));
}

static void chunk(world *w)
{
    const kvf_cache_config *c = &w->config;
    const size_t key_bytes = c->head_dim * kvf_dtype_bytes(c->dtype);
    model *m = pick(w);
    const act what = draw(w, 0, 2) ? ASK : APPEND;
    uint32_t tokens = draw(w, 1, draw(w, 0, 1) ? CHUNK_MAX : 40);
    if (!m || m->tokens == w->config.tokens_max)
        return;
    tokens = kvf_min_u32(tokens, w->config.tokens_max - m->tokens);
    for (uint32_t t = 0; t < tokens; t++)
        m->token[m->tokens + t] = w->next++;
    for (uint32_t l = 0; l < w->config.layers; l++) {
        for (uint32_t t = 0; t < tokens; t++)
            fill(w, &w->mine[l], t, l, m->token[m->tokens + t]);
        const kvf_status status =
            prefill(w->cache, m->sequence, l, tokens, &w->mine[l], NULL, what == ASK, w->stream);
        PROMISE(status == KVF_OK || (status == KVF_FULL && w->config.host_tokens_max));
        if (status != KVF_OK) {
            undo(w, m);
            return;
        }
    }
    for (uint32_t l = 0; l < w->config.layers; l++) {
        memcpy(w->theirs.q, w->mine[l].q, tokens * c->query_heads * key_bytes);
        memcpy(w->theirs.k, w->mine[l].k, tokens * c->kv_heads * key_bytes);
        memcpy(w->theirs.v, w->mine[l].v, tokens * row_bytes(w) / c->query_heads * c->kv_heads);
        PROMISE(prefill(m->plain, m->twin, l, tokens, &w->theirs, NULL, what == ASK,
                        w->plain_stream) == KVF_OK);
        PROMISE(what == APPEND || !memcmp(w->mine[l].out, w->theirs.out, tokens * row_bytes(w)));
        if (what == ASK)
            check_dense(w, m, l, tokens - 1, m->tokens + tokens);
    }
    if (can_ask_alone(w) && w->config.pages == KVF_PAGES_NATIVE)
        chunk_alone(w, m, tokens);
    note(w, m, what, tokens);
}

static void prompt(world *w)
{
    model *m = pick(w);
    const uint32_t tokens = draw(w, 2 * WINDOW, CHUNK_MAX);
    if (!m || !w->pruner || m->tokens)
        return;
    const place p = {w->cache, w->pruner, m->sequence, w->stream};
    for (uint32_t t = 0; t < tokens; t++)
        m->token[t] = w->next++;
    const kvf_status status = prune_prompt(w, &p, m->token, tokens);
    settle(w->stream);
    if (status != KVF_OK) { /* a share that keeps too little, a policy that wants more, no room */
        PROMISE(kvf_runtime_error(w->runtime)->text[0]);
        forget(m);
        return;
    }
    note(w, m, PROMPT, tokens);
    m->is_pruned = 1;
    play_entry(w, m, &m->log[0], m->token);
}

/* New tokens of some sequences, and their rows. */
typedef struct batch {
    uint32_t count, rows;
    model *members[SEQUENCES];
    kvf_sequence *sequences[SEQUENCES];
    uint32_t tokens[SEQUENCES];
} batch;

static batch draw_batch(world *w, uint32_t most)
{
    const uint32_t without = draw(w, 0, 15);
    batch b = {0};
    for (uint32_t i = 0; i < SEQUENCES; i++) {
        model *m = &w->models[i];
        const uint32_t tokens = draw(w, 1, most);
        if (!m->sequence || (without >> i & 1 && b.count) ||
            m->tokens + tokens > w->config.tokens_max)
            continue;
        for (uint32_t t = 0; t < tokens; t++)
            m->token[m->tokens + t] = w->next++;
        b.tokens[b.count] = tokens;
        b.members[b.count] = m;
        b.sequences[b.count++] = m->sequence;
        b.rows += tokens;
    }
    return b;
}

static kvf_decode_args call_of(world *w, const batch *b, uint32_t layer)
{
    rows *r = &w->mine[layer];
    uint32_t row = 0;
    for (uint32_t i = 0; i < b->count; i++)
        for (uint32_t t = 0; t < b->tokens[i]; t++)
            fill(w, r, row++, layer, b->members[i]->token[b->members[i]->tokens + t]);
    return step_args(layer, b->sequences, b->count, r);
}

static int attends_all(const world *w, uint32_t tokens)
{
    const kvf_cache_config *c = &w->config;
    return c->select == KVF_SELECT_FULL ||
           (c->select != KVF_SELECT_CUSTOM && !w->gives && tokens <= c->budget_tokens);
}

/* The twins take the same steps, one by one; `is_same`: with the same outputs. */
static void step_twins(world *w, const batch *b, int is_same)
{
    const uint32_t heads = w->config.query_heads;
    for (uint32_t l = 0; l < w->config.layers; l++)
        for (uint32_t i = 0, row = 0; i < b->count; i++)
            for (uint32_t t = 0; t < b->tokens[i]; t++, row++) {
                model *m = b->members[i];
                fill(w, &w->theirs, 0, l, m->token[m->tokens + t]);
                PROMISE(step(m->plain, m->twin, l, &w->theirs, w->plain_stream) == KVF_OK);
                PROMISE(!is_same || !memcmp((char *)w->mine[l].out + row * row_bytes(w),
                                            w->theirs.out, row_bytes(w)));
                PROMISE(!is_same || !memcmp(w->mine[l].lse + row * heads, w->theirs.lse,
                                            heads * sizeof(float)));
                const uint32_t seen = m->tokens + t + 1;
                if (is_same && attends_all(w, seen))
                    check_dense(w, m, l, row, seen);
            }
    for (uint32_t i = 0; i < b->count; i++)
        for (uint32_t t = 0; t < b->tokens[i]; t++)
            note(w, b->members[i], STEP, 1);
}

/* Returns 0 where the cache is full, and nothing was appended. */
static int is_done(world *w, const batch *b, kvf_status status)
{
    settle(w->stream);
    PROMISE(status == KVF_OK || (status == KVF_FULL && w->config.host_tokens_max));
    for (uint32_t i = 0; status != KVF_OK && i < b->count; i++)
        undo(w, b->members[i]);
    return status == KVF_OK;
}

/* A row for each sequence, and its twin's. */
static void decode_alone(world *w, const batch *b)
{
    const uint32_t heads = w->config.query_heads;
    for (uint32_t i = 0; i < b->count; i++)
        fill_alone(w, &w->alone, i, b->members[i]->token[b->members[i]->tokens - 1]);
    step_alone(w, w->cache, b->sequences, b->count, &w->alone, w->stream);
    for (uint32_t i = 0; i < b->count; i++) {
        model *m = b->members[i];
        fill_alone(w, &w->theirs, 0, m->token[m->tokens - 1]);
        step_alone(w, m->plain, &m->twin, 1, &w->theirs, w->plain_stream);
        PROMISE(!memcmp((char *)w->alone.out + i * row_bytes(w), w->theirs.out, row_bytes(w)));
        PROMISE(!memcmp(w->alone.lse + i * heads, w->theirs.lse, heads * sizeof(float)));
    }
}

static void decode(world *w)
{
    const int is_single = (w->config.disk_path && w->has_rings) || draw(w, 0, 1);
    const batch b = draw_batch(w, is_single ? 1 : w->config.tokens_per_step_max);
    for (uint32_t l = 0; b.count && l < w->config.layers; l++) {
        kvf_decode_args args = call_of(w, &b, l);
        args.tokens = is_single ? NULL : b.tokens;
        if (!is_done(w, &b, kvf_decode(w->cache, &args, w->stream)))
            return;
    }
    step_twins(w, &b, 1);
    if (b.count && can_ask_alone(w))
        decode_alone(w, &b);
}

static void cut(world *w)
{
    model *m = pick(w);
    const uint32_t far = draw(w, 0, 2), off = draw(w, 0, far == 0 ? 5 : far == 1 ? 40 : 255);
    if (!m || !w->can_cut || m->is_pruned)
        return;
    const uint32_t tokens = off < m->tokens ? m->tokens - off : 0;
    const uint32_t before = sealed(w, m->tokens), after = sealed(w, tokens);
    if (tokens && after < before && w->config.pages != KVF_PAGES_NATIVE &&
        (after + 1 < before || m->spare != before))
        return; /* what comes back was quantized */
    PROMISE(kvf_sequence_truncate(w->cache, m->sequence, tokens, w->stream) == KVF_OK);
    settle(w->stream);
    m->spare = after < before ? 0 : m->spare;
    while (m->tokens > tokens) {
        entry *e = &m->log[m->entries - 1];
        const uint32_t less = kvf_min_u32(m->tokens - tokens, e->tokens);
        e->tokens -= less;
        m->tokens -= less;
        m->entries -= e->tokens == 0;
    }
    play_again(w, m);
}

/* Into a file and back. */
static void keep(world *w)
{
    model *m = pick(w);
    char path[64];
    kvf_save *save = NULL;
    kvf_error error;
    if (!m)
        return;
    snprintf(path, sizeof path, "/tmp/kvferry-twins-%d.kvs", (int)getpid());
    kvf_save_args to;
    kvf_save_args_init(&to);
    to.sequence = m->sequence;
    to.path = path;
    const kvf_status begun = kvf_sequence_save(w->cache, &to, w->stream, &save);
    if (begun == KVF_UNSUPPORTED) /* a build without checksums */
        return;
    PROMISE(begun == KVF_OK);
    PROMISE(kvf_save_finish(save, &error) == KVF_OK);
    kvf_sequence_destroy(m->sequence);
    kvf_restore_args from;
    kvf_restore_args_init(&from);
    from.path = path;
    const kvf_status status = kvf_sequence_restore(w->cache, &from, w->stream, &m->sequence);
    unlink(path);
    /* Blocks that it shared with a fork are its own now. */
    PROMISE(status == KVF_OK || (status == KVF_FULL && w->config.host_tokens_max));
    if (status != KVF_OK)
        forget(m);
}

/* ---- page lists ---- */

/* A token of a page that was read, against what was put; those after the newest are zeros. */
static void check_token(const world *w, const model *m, uint32_t layer, uint32_t head,
                        uint32_t token, size_t at)
{
    static const float limits[] = {0.0f, 0.1f, 0.3f}; /* what quantization may cost */
    static float k[KV_HEADS_MAX * DIM_MAX], v[KV_HEADS_MAX * DIM_MAX];
    const kvf_cache_config *c = &w->config;
    const uint32_t dim = c->head_dim, value_dim = c->value_dim;
    const int is_there = token <= m->tokens;
    const float limit = is_there ? limits[c->pages] : 0.0f;
    if (is_there) {
        fill_row(k, c->dtype, 0, c->kv_heads * dim, seed_of(layer, m->token[token]) + 1);
        fill_row(v, c->dtype, 0, c->kv_heads * value_dim, seed_of(layer, m->token[token]) + 2);
    }
    for (uint32_t d = 0; d < dim; d++) {
        const float key = is_there ? kvf_element_get(k, c->dtype, head * dim + d) : 0.0f;
        PROMISE(fabsf(kvf_element_get(w->pages, c->dtype, at + d) - key) <= limit);
    }
    for (uint32_t d = 0; d < value_dim; d++) {
        const float value = is_there ? kvf_element_get(v, c->dtype, head * value_dim + d) : 0.0f;
        PROMISE(fabsf(kvf_element_get(w->pages, c->dtype, at + dim + d) - value) <= limit);
    }
}

static void check_read(const world *w, const batch *b, uint32_t layer)
{
    const kvf_cache_config *c = &w->config;
    PROMISE(w->indptr[0] == 0);
    for (uint32_t list = 0; list < b->count * c->kv_heads; list++) {
        const int32_t first = w->indptr[list], end = w->indptr[list + 1];
        PROMISE(first < end && (uint32_t)(end - first) <= kvf_select_pages_max(w->cache));
        PROMISE(w->last_page_len[list] > 0 && (uint32_t)w->last_page_len[list] <= c->page_size);
        for (int32_t i = first + 1; i < end; i++)
            PROMISE(w->indices[i - 1] < w->indices[i]);
        for (int32_t i = w->indptr[list]; i < w->indptr[list + 1]; i++)
            for (uint32_t t = 0; t < c->page_size; t++) {
                const model *m = b->members[list / c->kv_heads];
                if (!m->is_pruned)
                    check_token(w, m, layer, list % c->kv_heads,
                                (uint32_t)w->indices[i] * c->page_size + t,
                                ((size_t)i * c->page_size + t) * (c->head_dim + c->value_dim));
            }
    }
}

/* A token of a list that was read. */
typedef struct list_of {
    const world *w;
    size_t first; /* token of w->pages */
} list_of;

static const float *token_read(void *user, uint32_t token)
{
    const list_of *l = user;
    const kvf_cache_config *c = &l->w->config;
    const uint32_t size = c->head_dim + c->value_dim;
    static float kv[2 * DIM_MAX];
    for (uint32_t d = 0; d < size; d++)
        kv[d] = kvf_element_get(l->w->pages, c->dtype, (l->first + token) * size + d);
    return kv;
}

/* Attention of query head `head` of row `row` over what was read. */
static void check_attended(const world *w, uint32_t layer, uint32_t row, uint32_t head)
{
    const kvf_cache_config *c = &w->config;
    const uint32_t list = row * c->kv_heads + head / (c->query_heads / c->kv_heads);
    const uint32_t pages = (uint32_t)(w->indptr[list + 1] - w->indptr[list]);
    const uint32_t tokens = (pages - 1) * c->page_size + (uint32_t)w->last_page_len[list];
    list_of l = {w, (size_t)w->indptr[list] * c->page_size};
    /* Rounding to bf16, of outputs and of what is read of quantized pages. */
    const double limit = c->dtype == KVF_BF16 ? 0.08 : c->pages ? 0.02 : 0.005;
    const double lse = check_head(w, layer, row, head, tokens, token_read, &l, limit);
    PROMISE(fabs(lse - (double)w->mine[layer].lse[row * c->query_heads + head]) < 0.05);
}

static void by_lists(world *w)
{
    const kvf_page_lists lists = {w->indptr, w->indices, LISTED_MAX, w->last_page_len};
    if (!w->has_lists)
        return;
    const batch b = draw_batch(w, 1);
    for (uint32_t l = 0; b.count && l < w->config.layers; l++) {
        kvf_decode_args args = call_of(w, &b, l);
        if (!is_done(w, &b, kvf_select_pages(w->cache, &args, &lists, w->stream)))
            return;
        args.page_ids = NULL;
        PROMISE(kvf_attend_pages(w->cache, &args, &lists, w->stream) == KVF_OK);
        args.out = w->pages;
        PROMISE(kvf_read_pages(w->cache, &args, &lists, w->stream) == KVF_OK);
        settle(w->stream);
        check_read(w, &b, l);
        for (uint32_t h = 0; h < b.count * w->config.query_heads; h++)
            check_attended(w, l, h / w->config.query_heads, h % w->config.query_heads);
    }
    step_twins(w, &b, 0);
}

/* ---- calls that may be wrong ---- */

/* Rows of new tokens, which have numbers from `first` on, for a layer that may not be there. */
static rows *fill_wild(world *w, rows *r, uint32_t layer, uint32_t first, uint32_t count)
{
    for (uint32_t i = 0; i < count && i < CHUNK_MAX; i++)
        fill(w, r, i, layer, first + i);
    return r;
}

/* Tokens of one layer, so that layers have lengths of their own. */
static void wild_chunk(world *w)
{
    model *m = pick(w);
    const uint32_t layer = draw(w, 0, LAYERS_MAX), tokens = draw(w, 0, CHUNK_MAX + 1);
    const int asks = (int)draw(w, 0, 1), is_bad = !draw(w, 0, 15);
    const uint32_t first = w->next;
    if (!m || m->is_pruned)
        return;
    w->next += tokens;
    rows *r = fill_wild(w, &w->mine[0], layer, first, tokens);
    if (is_bad && tokens) {
        kvf_element_set(r->k, w->config.dtype, 0, NAN);
        w->is_poisoned = 1;
    }
    const kvf_prefill_args args = {.sequence = m->sequence,
                                   .layer = layer,
                                   .tokens = tokens,
                                   .q = asks ? r->q : NULL,
                                   .k = r->k,
                                   .v = r->v,
                                   .out = r->out};
    const kvf_status status = kvf_prefill(w->cache, &args, w->stream);
    PROMISE(is_listed(status));
    settle(w->stream);
    if (status != KVF_OK)
        return;
    PROMISE(tokens && tokens <= w->config.prefill_chunk_max && layer < w->config.layers);
    if (w->is_poisoned)
        return;
    (void)fill_wild(w, &w->theirs, layer, first, tokens);
    PROMISE(prefill(m->plain, m->twin, layer, tokens, &w->theirs, NULL, asks, w->plain_stream) ==
            KVF_OK);
    PROMISE(!asks || !memcmp(r->out, w->theirs.out, tokens * row_bytes(w)));
}

/* A batch of any sequences, of which one may be there twice, with any numbers of tokens. */
static void wild_step(world *w)
{
    const uint32_t layer = draw(w, 0, LAYERS_MAX), mask = draw(w, 0, 15), twice = !draw(w, 0, 7);
    const int has_several = (int)draw(w, 0, 1);
    const uint32_t first = w->next;
    batch b = {0};
    int is_sound = layer < w->config.layers;
    for (uint32_t i = 0; i < SEQUENCES; i++) {
        model *m = &w->models[i];
        const uint32_t tokens = has_several ? draw(w, 0, STEP_MAX + 1) : 1;
        if (!(mask >> i & 1) || !m->sequence || m->is_pruned)
            continue;
        b.members[b.count] = m;
        b.sequences[b.count] = m->sequence;
        b.tokens[b.count++] = tokens;
        b.rows += tokens;
        is_sound &= tokens >= 1 && tokens <= (has_several ? w->config.tokens_per_step_max : 1);
    }
    if (twice && b.count > 1)
        b.sequences[0] = b.sequences[1];
    is_sound &= b.count > 0 && !(twice && b.count > 1);
    w->next += b.rows;
    rows *r = fill_wild(w, &w->mine[0], layer, first, b.rows);
    kvf_decode_args args = step_args(layer, b.sequences, b.count, r);
    args.tokens = has_several ? b.tokens : NULL;
    const kvf_status status = kvf_decode(w->cache, &args, w->stream);
    PROMISE(is_listed(status) && (status != KVF_OK || is_sound));
    settle(w->stream);
    for (uint32_t i = 0, row = 0; status == KVF_OK && !w->is_poisoned && i < b.count; i++)
        for (uint32_t t = 0; t < b.tokens[i]; t++, row++) {
            fill(w, &w->theirs, 0, layer, first + row);
            PROMISE(step(b.members[i]->plain, b.members[i]->twin, layer, &w->theirs,
                         w->plain_stream) == KVF_OK);
            PROMISE(!memcmp((char *)r->out + row * row_bytes(w), w->theirs.out, row_bytes(w)));
        }
}

static void wild(world *w)
{
    w->is_wild = 1;
    for (int i = 0; i < OPERATIONS_MAX && !fuzz_is_empty(&w->in); i++) {
        if (draw(w, 0, 2))
            wild_step(w);
        else
            wild_chunk(w);
        if (!w->is_poisoned)
            check_lengths(w);
    }
}

static void statistics(world *w)
{
    kvf_stats all, layer;
    uint64_t steps = 0;
    kvf_cache_stats(w->cache, &all);
    PROMISE(all.hits + all.misses <= all.pages_selected);
    PROMISE(all.recall_sum <= (double)all.verified * 1.001); /* sums of exp() by two ways */
    for (uint32_t l = 0; l < w->config.layers; l++) {
        kvf_cache_layer_stats(w->cache, l, &layer);
        steps += layer.steps;
    }
    PROMISE(steps == all.steps);
}

/* ---- an input ---- */

static void run(world *w)
{
    static void (*const rare[])(world * w) = {create, create,   fork_one, fork_one, cut,
                                              cut,    keep,     destroy,  prompt,   by_lists,
                                              chunk,  by_lists, chunk,    chunk,    chunk};
    const uint32_t count = sizeof rare / sizeof *rare;
    create(w);
    prompt(w);
    chunk(w);
    for (int i = 0; i < OPERATIONS_MAX && !w->is_wild && !fuzz_is_empty(&w->in); i++) {
        const uint32_t what = draw(w, 0, 2 * count);
        if (what < count)
            rare[what](w);
        else if (what < 2 * count)
            decode(w);
        else
            wild(w); /* and nothing after it */
        if (!w->is_poisoned)
            check_lengths(w);
    }
    statistics(w);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    world *w = calloc(1, sizeof *w);
    if (!w)
        return 0;
    fuzz_begin(&w->in, &w->runtime, &w->stream, data, size);
    w->plain_runtime = fuzz_runtime(1);
    w->params = size ? data[size - 1] : 0;
    w->gives = fuzz_gives(data, size);
    w->has_windows = fuzz_has_windows(data, size);
    w->asks_alone = size && data[size / 2] % 2;
    PROMISE(kvf_stream_create(w->plain_runtime, &w->plain_stream) == KVF_OK);
    if (!draw(w, 0, 3))
        fuzz_blocks(w->in, w->runtime, w->stream);
    else if (open_world(w))
        run(w);
    kvf_prune_close(w->pruner);
    kvf_cache_close(w->cache);
    for (uint32_t i = 0; i < SEQUENCES; i++) {
        kvf_prune_close(w->models[i].pruner);
        kvf_cache_close(w->models[i].plain);
    }
    kvf_stream_destroy(w->stream);
    kvf_stream_destroy(w->plain_stream);
    free(w);
    return 0;
}
