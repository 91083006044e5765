/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Calls with several tokens of a sequence: which of them make one step, and steps one after the
 * other.
 *
 * Knows nothing of what a step does. Tokens of a sequence make one step only where all but the
 * first leave alone what the sequence has once: they seal no block, refresh no static set, are not
 * verified, and follow none of these. So what a row sees is what it would see in a call of its own,
 * and it gives the same bits. A step that fails ends the call; whoever called undoes the steps
 * before it.
 */

#include "several.h"

#include "append.h"
#include "attend.h"
#include "rings.h"
#include "static_set.h"

/* Tokens of one sequence may be in one step: nothing that belongs to a sequence has to be in order
 * token by token, but its slots (see kvf_call_turn). */
static bool can_share(const kvf_cache *cache, uint32_t layer)
{
    const kvf_kv_group *kv_group = cache->layer_groups[layer].kv_group;
    return kv_group && kv_group->dims.step_tokens > 1 && kvf_streaming_count(cache, layer) == 0;
}

/* The next token's effect on the sequence. */
typedef enum effect { EFFECT_NONE, EFFECT_SEALS, EFFECT_ALONE } effect;

static effect advance(const kvf_kv_group *kv_group, kvf_layer *at)
{
    const uint32_t before = at->extent.sealed;
    kvf_extent_append(&at->extent, 1, kvf_sealed_blocks(kv_group, at->extent.length + 1));
    const bool seals = at->extent.sealed > before;
    const bool is_due = kvf_refresh_is_due(kv_group, at, at->extent.sealed);
    const bool is_alone = is_due || kvf_verify_is_due(kv_group, at);
    kvf_refresh_step(&at->refresh, is_due);
    if (is_due)
        kvf_refresh_was_exact(&at->refresh);
    at->steps++;
    return is_alone ? EFFECT_ALONE : seals ? EFFECT_SEALS : EFFECT_NONE;
}

/* The first row after those that make one step with row `first`. */
static uint32_t step_end(const kvf_cache *cache, uint32_t layer, uint32_t first, uint32_t rows)
{
    kvf_sequence *const *sequences = cache->row_sequences;
    const kvf_kv_group *kv_group = cache->layer_groups[layer].kv_group;
    const bool shares = can_share(cache, layer);
    kvf_layer at = {0};
    effect last = EFFECT_NONE;
    for (uint32_t r = first; r < rows; r++) {
        const bool is_next = r > first && sequences[r] == sequences[r - 1];
        if (is_next && !shares)
            return r;
        if (!is_next)
            at = sequences[r]->layers[layer];
        const effect now = shares ? advance(kv_group, &at) : EFFECT_NONE;
        if (is_next && (now != EFFECT_NONE || last == EFFECT_ALONE))
            return r;
        last = now;
    }
    return rows;
}

/* Before anything is appended. Blocks of the pool go to nobody else while this call lasts. */
static kvf_status check_room(const kvf_cache *cache, const kvf_decode_args *args)
{
    const kvf_kv_group *kv_group = cache->layer_groups[args->layer].kv_group;
    uint64_t needed = 0;
    for (uint32_t b = 0; kv_group && b < args->batch; b++) {
        const kvf_layer *layer = &args->sequences[b]->layers[args->layer];
        const uint32_t sealed = kvf_sealed_blocks(kv_group, layer->extent.length + args->tokens[b]);
        needed += kvf_max_u32(sealed, layer->extent.sealed) - layer->extent.sealed;
    }
    return kv_group && needed > kv_group->pool.free_count ? kvf_append_full(kv_group) : KVF_OK;
}

static uint32_t list_rows(const kvf_cache *cache, const kvf_decode_args *args)
{
    uint32_t rows = 0;
    for (uint32_t b = 0; b < args->batch; b++)
        for (uint32_t i = 0; i < args->tokens[b]; i++)
            cache->row_sequences[rows++] = args->sequences[b];
    return rows;
}

/* Rows first .. end-1 of the call as a batch. */
static kvf_decode_args some_rows(const kvf_cache *cache, const kvf_decode_args *args,
                                 uint32_t first, uint32_t end)
{
    const kvf_cache_config *c = &cache->config;
    const size_t of_query = kvf_dtype_bytes(kvf_query_dtype(c)) * c->query_heads;
    const size_t of_key = kvf_dtype_bytes(kvf_key_dtype(c)) * c->kv_heads;
    const size_t key = (size_t)first * c->head_dim, value = (size_t)first * c->value_dim;
    const size_t selected = (size_t)first * c->kv_heads * args->page_stride;
    return (kvf_decode_args){
        .layer = args->layer,
        .batch = end - first,
        .sequences = cache->row_sequences + first,
        .q = (const char *)args->q + key * of_query,
        .k = (const char *)args->k + key * of_key,
        .v = (const char *)args->v + value * of_key,
        .positions = args->positions ? args->positions + first : NULL,
        .out = (char *)args->out + value * of_query,
        .lse = args->lse ? args->lse + (size_t)first * c->query_heads : NULL,
        .page_scores = args->page_scores ? args->page_scores + selected : NULL,
        .page_ids = args->page_ids ? args->page_ids + selected : NULL,
        .page_stride = args->page_stride,
    };
}

kvf_status kvf_several_begin(kvf_cache *cache, const kvf_decode_args *args, uint32_t *rows)
{
    KVF_TRY(check_room(cache, args));
    *rows = list_rows(cache, args);
    return KVF_OK;
}

kvf_decode_args kvf_several_next(const kvf_cache *cache, const kvf_decode_args *args, uint32_t rows,
                                 uint32_t *first)
{
    const uint32_t begin = *first;
    *first = step_end(cache, args->layer, begin, rows);
    return some_rows(cache, args, begin, *first);
}
