/* SPDX-License-Identifier: Apache-2.0 */

/*
 * One decode step of one layer for a batch: append, seal, refresh, score, choose, resolve, attend.
 *
 * Knows the order of the phases and nothing of their insides. Everything is enqueued; what depends
 * on data stays on the device. A call that is refused has changed nothing; one whose pages could
 * not be read from disk takes its tokens back.
 */

#include "decode.h"

#include "ahead.h"
#include "append.h"
#include "attend.h"
#include "bring.h"
#include "prefill_arena.h"
#include "select.h"
#include "speculate.h"
#include "static_set.h"
#include "truncate.h"

/* ---- bookkeeping on the host ---- */

static kvf_status acquire(kvf_cache *cache, const kvf_decode_args *args)
{
    for (uint32_t b = 0; b < args->batch; b++) {
        const kvf_status status =
            kvf_append_acquire(cache, &args->sequences[b]->layers[args->layer], 1);
        if (status == KVF_OK)
            continue;
        while (b-- > 0) {
            kvf_layer *layer = &args->sequences[b]->layers[args->layer];
            kvf_append_release(cache, layer, kvf_sealed_blocks(cache, layer->length + 1));
        }
        return status;
    }
    return KVF_OK;
}

bool kvf_refresh_is_due(const kvf_cache *cache, const kvf_layer *layer, uint32_t sealed)
{
    return cache->dims.static_tokens && sealed &&
           (layer->needs_exact || layer->since_refresh >= cache->config.refresh_interval);
}

bool kvf_verify_is_due(const kvf_cache *cache, const kvf_layer *layer)
{
    return cache->config.verify_interval && layer->steps % cache->config.verify_interval == 0;
}

void kvf_decode_note(kvf_cache *cache, const kvf_decode_args *args, uint32_t *sealed_before,
                     kvf_due *due)
{
    *due = (kvf_due){0};
    for (uint32_t b = 0; b < args->batch; b++) {
        kvf_layer *layer = &args->sequences[b]->layers[args->layer];
        sealed_before[b] = layer->sealed;
        kvf_append_note(cache, layer, 1, args->positions ? args->positions + b : NULL);
        layer->by_step[layer->length - 1] = 1;
        layer->queries++;
        cache->host_counters[args->layer].steps++;
        layer->is_due = kvf_refresh_is_due(cache, layer, layer->sealed);
        layer->since_refresh = layer->is_due ? 1 : layer->since_refresh + 1;
        due->refreshes += layer->is_due;
        layer->is_verified = kvf_verify_is_due(cache, layer);
        layer->steps++;
        kvf_footprint_append(cache, args->sequences[b], args->layer, 1);
        due->verifies += layer->is_verified;
    }
}

void kvf_decode_take(kvf_step *step, const uint32_t *sealed_before)
{
    kvf_step_rows(step, sealed_before);
    kvf_step_lists(step);
    kvf_ahead_lists(step);
}

void kvf_decode_take_dry(kvf_step *step)
{
    kvf_decode_take(step, NULL);
}

/* ---- with a disk tier ---- */

/* The choice, or the check, looks at every key of the row. */
static bool looks_at_all(const kvf_cache *cache, const kvf_layer *layer)
{
    return cache->policy->all_pages || cache->policy->by_token || kvf_verify_is_due(cache, layer);
}

/* A refresh does too, if it is exact, if pages have no slots, if boxes are renewed; and one in a
 * step that seals, because taking that back looks at all bits. */
static bool reads_all(const kvf_cache *cache, const kvf_layer *layer)
{
    const bool is_exact =
        layer->needs_exact || cache->config.refresh == KVF_REFRESH_EXACT ||
        (cache->config.static_ratio == KVF_STATIC_RATIO_AUTO && !layer->share_from);
    const uint32_t sealed = kvf_sealed_blocks(cache, layer->length + 1);
    return looks_at_all(cache, layer) || (kvf_refresh_is_due(cache, layer, sealed) &&
                                          (is_exact || !kvf_moves_pages(cache) ||
                                           !kvf_has_codes(cache) || sealed > layer->sealed));
}

/* Rows of which all is read, before anything has changed. */
static kvf_status bring_rows(kvf_step *step)
{
    bool leaves = false; /* what is read after the refresh does not lie in the prefill arena */
    for (uint32_t b = 0; b < step->rows; b++)
        leaves |= looks_at_all(step->cache, &step->sequences[b]->layers[step->layer]);
    if (step->cache->pool.tier && leaves)
        KVF_TRY(kvf_arena_leave_rows(step));
    return kvf_bring_rows(step, reads_all);
}

/* What the step was to read did not come: its tokens go, and the slots that they were to get. */
static kvf_status take_back(kvf_step *step, kvf_status failure)
{
    kvf_cache *cache = step->cache;
    const uint32_t lists = cache->dims.paging.lists;
    kvf_error error;
    kvf_context_error(cache->context, &error);
    kvf_status status = KVF_OK;
    for (uint32_t b = 0; b < step->rows && status == KVF_OK; b++)
        status = kvf_residency_clear(
            &cache->residency,
            (uint32_t)kvf_row_number(cache, step->sequences[b], step->layer) * lists, lists,
            step->stream);
    KVF_TRY(kvf_step_end(step, status));
    for (uint32_t b = 0; b < step->rows && status == KVF_OK; b++)
        status = kvf_truncate_layer(cache, step->sequences[b], step->layer, step->stream);
    if (status != KVF_OK)
        return cache->broken = status;
    return kvf_fail(cache->context, failure, error.foreign, "%s", error.text);
}

kvf_status kvf_decode_end(kvf_step *step, kvf_status status)
{
    kvf_bring_drop(step);
    return step->is_undone ? take_back(step, status) : kvf_step_end(step, status);
}

kvf_status kvf_decode_prepare(kvf_step *step, const kvf_decode_args *args, kvf_stream *stream,
                              kvf_due *due)
{
    kvf_cache *cache = step->cache;
    KVF_TRY(kvf_step_begin(cache, stream, step));
    step->layer = args->layer;
    step->rows = args->batch;
    step->sequences = args->sequences;
    step->q = args->q;
    kvf_status status = bring_rows(step);
    if (status == KVF_OK)
        status = acquire(cache, args);
    if (status != KVF_OK)
        return kvf_step_refuse(step, status);
    kvf_decode_note(cache, args, cache->sealed_before, due);
    kvf_decode_take(step, cache->sealed_before);
    if (due->refreshes)
        kvf_step_rows_after(step);
    return KVF_OK;
}

/* ---- phases ---- */

static kvf_status append(kvf_step *step, const kvf_decode_args *args)
{
    const kvf_cache *cache = step->cache;
    const kvf_append_args a = {.paging = cache->dims.paging,
                               .rows = step->rows,
                               .row = step->row,
                               .q = args->q,
                               .k = args->k,
                               .v = args->v,
                               .choose = cache->tables.choose,
                               .choose_lists = cache->dims.choose_lists};
    KVF_TRY(KVF_LAUNCH(step, append, a));
    return kvf_step_seal(step);
}

static kvf_status refresh(kvf_step *step, uint64_t *clock)
{
    if (step->row_shadow)
        step->row = step->row_shadow;
    for (uint32_t b = 0; b < step->rows; b++)
        if (step->sequences[b]->layers[step->layer].is_due)
            KVF_TRY(kvf_static_refresh(step, b));
    step->row = step->row_after;
    step->row_host = step->row_after_host;
    return kvf_step_stamp(step, clock);
}

kvf_status kvf_decode_select(kvf_step *step, const kvf_decode_args *args, const kvf_due *due)
{
    kvf_layer_counters *counters = kvf_counters_device(step->cache, step->layer);
    for (uint32_t b = 0; b < step->rows; b++)
        KVF_TRY(kvf_step_clear(step, step->sequences[b], step->layer));
    KVF_TRY(kvf_step_send(step));
    KVF_TRY(kvf_step_stamp(step, NULL));
    KVF_TRY(append(step, args));
    KVF_TRY(kvf_step_stamp(step, &counters->append_ns));
    if (due->refreshes)
        KVF_TRY(refresh(step, &counters->refresh_ns));
    /* After a refresh, which may look at every page. */
    if (!step->is_recorded)
        KVF_TRY(kvf_arena_leave_rows(step));
    if (step->cache->policy->scores_pages) {
        KVF_TRY(kvf_select_score(step));
        KVF_TRY(kvf_step_stamp(step, &counters->score_ns));
    }
    KVF_TRY(kvf_select_choose(step));
    return kvf_step_flip(step);
}

kvf_status kvf_decode_enqueue(kvf_step *step, const kvf_decode_args *args, const kvf_due *due)
{
    const kvf_cache *cache = step->cache;
    kvf_layer_counters *counters = kvf_counters_device(cache, step->layer);
    float *lse = args->lse ? args->lse : cache->tables.lse;
    KVF_TRY(kvf_decode_select(step, args, due));
    KVF_TRY(kvf_ahead_join(step));
    KVF_TRY(kvf_step_place(step));
    KVF_TRY(kvf_step_stamp(step, &counters->select_ns));
    KVF_TRY(kvf_step_attend(step, args->out, lse));
    KVF_TRY(kvf_step_stamp(step, &counters->attend_ns));
    for (uint32_t b = 0; due->verifies && b < step->rows; b++)
        if (step->sequences[b]->layers[step->layer].is_verified)
            KVF_TRY(kvf_step_verify(step, b, args->out, lse));
    return kvf_ahead_fetch(step);
}

kvf_status kvf_decode_step(kvf_cache *cache, const kvf_decode_args *args, kvf_stream *stream)
{
    kvf_step step = {.cache = cache};
    kvf_due due;
    KVF_TRY(kvf_decode_prepare(&step, args, stream, &due));
    const kvf_status status = kvf_decode_enqueue(&step, args, &due);
    return kvf_decode_end(&step, status);
}
