/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Part of pruner.h. Chunked eviction: after each chunk of a prompt, a layer keeps the best of that
 * chunk. After Bhaskar et al., "Cache Me If You Can: How Many KVs Do You Need for Effective
 * Long-Context LMs?" (PruLong), 2025, section 3, and what its published code does where the text
 * leaves it open.
 *
 * NAIVE: the chunk's own last `chunk_queries` queries score it and are kept. PATCHED: a chunk that
 * is not the last is followed by the prompt's last `chunk_queries` tokens, which score it and are
 * dropped again; the last chunk scores itself. As published, both compress only the chunk: what
 * earlier chunks kept is neither scored again nor seen by the softmax that scores, and each chunk
 * of c tokens keeps floor(c x keep), window included where it is the chunk's own. One set per KV
 * head, from the scores of its whole group.
 *
 * Knows no policy by name. A policy that scores sees a view of the chunk alone, with the budget of
 * the chunk and the scoring queries as its window, so that SnapKV and PyramidKV are themselves. One
 * that measures nothing decides by place, so it sees all that the layer holds, and its share is of
 * all tokens so far: StreamingLLM keeps one sink, not one per chunk. Invariants: a slot's `layer`
 * goes round once per chunk, `tokens` is that chunk's, `appended` counts the chunks before it.
 */

#include <string.h>

#include "policies.h"
#include "pruner.h"

typedef struct chunk {
    kvf_prune_slot *slot;
    uint32_t layer;
    uint32_t held;   /* of earlier chunks */
    uint32_t tokens; /* of this one */
    uint32_t patch;
    uint32_t is_last; /* 1: of the prompt */
} chunk;

/* The policy's view, and the settings of this chunk. */
typedef struct question {
    kvf_prune_view view;
    kvf_prune_settings settings;
    uint32_t needs;
    uint32_t begin; /* token index in the layer of the view's first one */
} question;

/* ---- is it the call that comes next? ---- */

static kvf_status check_chunk(kvf_prune *prune, const chunk *c)
{
    const kvf_prune_slot *slot = c->slot;
    const uint32_t queries = prune->config.chunk_queries;
    const uint32_t length = slot->sequence->layers[c->layer].extent.length;
    const bool wants_patch = prune->config.eviction == KVF_EVICTION_PATCHED && !c->is_last;
    if (c->tokens == 0 || c->tokens > slot->prompt - slot->appended)
        KVF_FAIL(prune->context, KVF_INVALID,
                 "tokens = %u: must be 1 to %u, the rest of the prompt of %u tokens", c->tokens,
                 slot->prompt - slot->appended, slot->prompt);
    if (c->layer > 0 && c->tokens != slot->tokens)
        KVF_FAIL(prune->context, KVF_INVALID,
                 "tokens = %u: at layer 0 this chunk had %u; all layers get the same", c->tokens,
                 slot->tokens);
    if (c->patch != (wants_patch ? queries : 0))
        KVF_FAIL(prune->context, KVF_INVALID,
                 "patch = %u: must be %u here; with PATCHED every chunk but the last is followed "
                 "by chunk_queries tokens of the prompt's end, else none is",
                 c->patch, wants_patch ? queries : 0);
    if (c->patch > c->tokens)
        KVF_FAIL(prune->context, KVF_INVALID,
                 "chunk_queries = %u: the patch is longer than the chunk of %u tokens; take longer "
                 "chunks, or lower chunk_queries",
                 c->patch, c->tokens);
    if (length < c->tokens + c->patch)
        KVF_FAIL(prune->context, KVF_INVALID,
                 "layer %u holds %u tokens, less than the chunk of %u and the patch of %u; call "
                 "kvf_prefill for them first",
                 c->layer, length, c->tokens, c->patch);
    return KVF_OK;
}

static kvf_status find_chunk(kvf_prune *prune, kvf_sequence *sequence, chunk *c)
{
    KVF_TRY(kvf_prune_slot_find(prune, sequence, c->layer, &c->slot));
    c->is_last = c->tokens == c->slot->prompt - c->slot->appended;
    KVF_TRY(check_chunk(prune, c));
    c->held = sequence->layers[c->layer].extent.length - c->tokens - c->patch;
    return KVF_OK;
}

/* ---- asking the policy ---- */

static kvf_status find_needs(kvf_prune *prune, const chunk *c, question *q)
{
    q->view = kvf_prune_view_of(prune, c->slot);
    q->needs = kvf_prune_needs_at(prune->policy, &q->view);
    if (q->needs & ~(uint32_t)(KVF_PRUNE_SCORES | KVF_PRUNE_WEIGHTED))
        KVF_FAIL(prune->context, KVF_UNSUPPORTED,
                 "policy '%s' at layer %u needs more than the scores of the newest queries (%#x), "
                 "which a chunk does not give; take another policy, or eviction = NONE",
                 prune->policy->name, c->layer, q->needs);
    return KVF_OK;
}

/* The chunk's own queries are kept: a share that leaves no room for them was not meant so. A last
 * chunk may be too short for it. */
static kvf_status check_budget(kvf_prune *prune, const chunk *c, uint32_t budget)
{
    const uint32_t queries = prune->config.chunk_queries;
    const bool is_short = c->is_last && c->slot->appended > 0;
    if (c->patch || is_short || c->tokens <= queries || budget >= queries)
        return KVF_OK;
    KVF_FAIL(
        prune->context, KVF_INVALID,
        "keep = %g: of a chunk of %u tokens that is %u, below chunk_queries = %u, whose tokens "
        "are always kept; raise keep, take longer chunks, or lower chunk_queries",
        (double)prune->config.settings.keep, c->tokens, budget, queries);
}

static kvf_status ask_of(kvf_prune *prune, const chunk *c, question *q)
{
    const bool scores = q->needs & KVF_PRUNE_SCORES;
    const uint32_t seen = c->slot->appended + c->tokens;
    const uint32_t budget = scores ? kvf_keep_count(&prune->config.settings, c->tokens)
                                   : kvf_keep_count(&prune->config.settings, seen);
    if (scores)
        KVF_TRY(check_budget(prune, c, budget));
    q->settings = prune->config.settings;
    q->begin = scores ? c->held : 0;
    q->view.settings = &q->settings;
    q->view.tokens = c->tokens + (scores ? c->patch : c->held);
    q->view.positions += q->begin;
    if (scores && c->patch)
        q->settings.window = c->patch;
    else if (scores)
        q->settings.window = kvf_min_u32(prune->config.chunk_queries, c->tokens);
    q->view.window = kvf_min_u32(q->settings.window, q->view.tokens);
    /* The window is kept whatever the budget; that of a patch is not of the chunk. */
    q->settings.keep_tokens =
        kvf_max_u32(budget + (scores ? c->patch : 0), kvf_max_u32(1, q->view.window));
    q->view.candidates = scores ? q->view.tokens - q->view.window : 0;
    return KVF_OK;
}

static kvf_status measure(kvf_prune *prune, const chunk *c, question *q, kvf_stream *stream)
{
    kvf_scores_args args = kvf_prune_scores_args(prune, &q->view, q->needs, q->view.window);
    args.first += q->begin;
    args.begin = q->begin;
    args.candidates = q->begin + q->view.candidates;
    const size_t count = (size_t)q->view.kv_heads * q->view.candidates;
    KVF_TRY(kvf_prune_mark(prune, NULL, stream));
    KVF_TRY(kvf_sequence_scores(prune->cache, c->slot->sequence, &args, prune->work, stream));
    KVF_TRY(kvf_prune_mark(prune, &prune->clock->observe_ns, stream));
    return kvf_prune_read(prune, c->slot->sequence, prune->scores, count, stream, &q->view.scores);
}

static kvf_status decide(kvf_prune *prune, const chunk *c, const question *q,
                         kvf_prune_answer *answer)
{
    KVF_TRY(kvf_prune_decide(prune, &q->view, answer));
    if (answer->restart || answer->propagate_count < q->view.tokens)
        KVF_FAIL(prune->context, KVF_UNSUPPORTED,
                 "policy '%s' at layer %u shortens deeper layers, which chunked eviction cannot; "
                 "set propagate = 1, or eviction = NONE",
                 prune->policy->name, c->layer);
    return KVF_OK;
}

/* ---- keeping ---- */

/* One KV head's part of the answer, in the view's indexes: the layer's in its place. */
static void place_head(uint32_t *to, const uint32_t *from, uint32_t count, const question *q)
{
    memmove(to + q->begin, from, (count - q->begin) * sizeof *to);
    for (uint32_t i = 0; i < q->begin; i++)
        to[i] = i;
    for (uint32_t i = q->begin; i < count; i++)
        to[i] += q->begin;
}

/* Tokens that earlier chunks kept, then those that the policy keeps of the chunk, without the
 * patch.
 * @return how many of a KV head, in place of the answer's */
static uint32_t place(kvf_prune *prune, const chunk *c, const question *q,
                      const kvf_prune_answer *answer)
{
    const uint32_t dropped = q->needs & KVF_PRUNE_SCORES ? c->patch : 0;
    const uint32_t kept = answer->keep_count, count = q->begin + kept - dropped;
    /* Parts get longer or shorter: none may reach one that is still to be moved. */
    for (uint32_t i = 0; i < q->view.kv_heads; i++) {
        const uint32_t h = count < kept ? i : q->view.kv_heads - 1 - i;
        place_head(prune->keep + (size_t)h * count, answer->keep + (size_t)h * kept, count, q);
    }
    return count;
}

static void take_all(const kvf_prune *prune, uint32_t count)
{
    for (uint32_t h = 0; h < prune->shape.kv_heads; h++)
        kvf_choose_range(0, count, prune->keep + (size_t)h * count);
}

static kvf_status keep(kvf_prune *prune, const chunk *c, const question *q,
                       const kvf_prune_answer *answer, kvf_stream *stream, uint32_t *kept)
{
    kvf_sequence *sequence = c->slot->sequence;
    const uint32_t length = sequence->layers[c->layer].extent.length;
    *kept = length - c->patch;
    if (answer->keep_count < q->view.tokens)
        *kept = place(prune, c, q, answer);
    else if (c->patch)
        take_all(prune, *kept);
    if (*kept == 0)
        KVF_FAIL(prune->context, KVF_INVALID,
                 "keep = %g: policy '%s' at layer %u keeps none of a chunk of %u tokens; raise "
                 "keep, or take longer chunks",
                 (double)prune->config.settings.keep, prune->policy->name, c->layer, c->tokens);
    if (*kept < length)
        KVF_TRY(kvf_prune_evict(prune, sequence, c->layer, prune->keep, *kept, stream));
    if (c->patch)
        kvf_footprint_rewind(prune->cache, sequence, c->layer, c->patch);
    return KVF_OK;
}

/* ---- a chunk of a layer ---- */

static void advance(kvf_prune *prune, const chunk *c, uint32_t kept)
{
    kvf_prune_slot *slot = c->slot;
    const uint32_t done = slot->appended;
    slot->tokens = c->tokens;
    slot->computed += c->tokens + c->patch;
    if (c->is_last) {
        kvf_prune_advance(prune, slot, kept);
        slot->appended = done;
        return;
    }
    if (++slot->layer < prune->shape.layers)
        return;
    slot->layer = 0;
    slot->appended = done + c->tokens;
}

static kvf_status prune_chunk(kvf_prune *prune, const chunk *c, kvf_stream *stream)
{
    question q;
    kvf_prune_answer answer;
    uint32_t kept;
    KVF_TRY(find_needs(prune, c, &q));
    KVF_TRY(ask_of(prune, c, &q));
    if (q.view.candidates)
        KVF_TRY(measure(prune, c, &q, stream));
    else
        KVF_TRY(kvf_prune_read(prune, c->slot->sequence, prune->scores, 0, stream, &q.view.scores));
    KVF_TRY(decide(prune, c, &q, &answer));
    KVF_TRY(keep(prune, c, &q, &answer, stream, &kept));
    advance(prune, c, kept);
    return KVF_OK;
}

kvf_status kvf_pruner_chunk(kvf_prune *prune, kvf_sequence *sequence, uint32_t layer,
                            uint32_t tokens, uint32_t patch, kvf_stream *stream)
{
    chunk c = {.layer = layer, .tokens = tokens, .patch = patch};
    KVF_TRY(find_chunk(prune, sequence, &c));
    const kvf_status status = prune_chunk(prune, &c, stream);
    if (status != KVF_OK)
        c.slot->sequence = NULL;
    return status;
}
