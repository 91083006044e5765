/* SPDX-License-Identifier: Apache-2.0 */

/*
 * One decode step of one layer for a batch: append, seal, refresh, score, choose, resolve, attend.
 *
 * Knows the order of the phases and nothing of their insides. Everything is enqueued; what depends
 * on data stays on the device. A call that is refused has changed nothing; one whose pages could
 * not be brought is undone by its caller (undo.h).
 */

#include "decode.h"

#include "append.h"
#include "attend.h"
#include "bring.h"
#include "prefill_arena.h"
#include "seal.h"
#include "select.h"
#include "static_set.h"

/* ---- bookkeeping on the host ---- */

static kvf_status acquire(kvf_step *step)
{
    for (uint32_t b = 0; step->kv_group && b < step->rows; b++) {
        /* Tokens after the first one of a sequence seal nothing. */
        const kvf_status status =
            kvf_step_is_first(step, b) ? kvf_append_acquire(step->states[b], 1) : KVF_OK;
        if (status == KVF_OK)
            continue;
        while (b-- > 0) {
            kvf_layer *layer = step->states[b];
            if (kvf_step_is_first(step, b))
                kvf_append_release(layer, kvf_sealed_blocks(step->kv_group, layer->length + 1));
        }
        return status;
    }
    return KVF_OK;
}

bool kvf_refresh_is_due(const kvf_kv_group *kv_group, const kvf_layer *layer, uint32_t sealed)
{
    return kv_group->dims.static_tokens && sealed &&
           (layer->needs_exact || layer->since_refresh >= kv_group->config.refresh_interval);
}

bool kvf_verify_is_due(const kvf_kv_group *kv_group, const kvf_layer *layer)
{
    return kv_group->config.verify_interval && layer->steps % kv_group->config.verify_interval == 0;
}

/* The part of the step that pages have. */
static void note_due(const kvf_kv_group *kv_group, kvf_layer *layer, kvf_due *due)
{
    layer->queries++;
    layer->is_due = kvf_refresh_is_due(kv_group, layer, layer->sealed);
    layer->since_refresh = layer->is_due ? 1 : layer->since_refresh + 1;
    layer->is_verified = kvf_verify_is_due(kv_group, layer);
    due->refreshes += layer->is_due;
    due->verifies += layer->is_verified;
}

/* A row attends, to all that its layer has by now. */
static void count_row(kvf_step *step, const kvf_layer *layer)
{
    kvf_layer_host_counters *counters = &step->cache->counters[step->layer];
    counters->held += (uint64_t)layer->length * step->cache->config.kv_heads;
    counters->steps++;
}

void kvf_decode_note(kvf_step *step, const kvf_decode_args *args, kvf_due *due)
{
    *due = (kvf_due){0};
    for (uint32_t b = 0; b < step->rows; b++) {
        kvf_layer *layer = step->states[b];
        const uint32_t sealed = layer->sealed;
        kvf_append_note(layer, 1, args->positions ? args->positions + b : NULL);
        KVF_ASSERT(kvf_step_is_first(step, b) || layer->sealed == sealed);
        layer->by_step[layer->length - 1] = 1;
        if (step->kv_group)
            note_due(step->kv_group, layer, due);
        layer->steps++;
        count_row(step, layer);
        kvf_footprint_append(step->cache, args->sequences[b], step->layer, 1);
    }
}

void kvf_decode_take(kvf_step *step)
{
    if (!step->kv_group)
        return;
    kvf_step_rows(step);
    kvf_step_lists(step);
}

/* ---- rows that are read whole ---- */

/* The choice, or the check, looks at every key of the row. */
static bool looks_at_all(const kvf_kv_group *kv_group, const kvf_layer *layer)
{
    return kv_group->policy->all_pages || kv_group->policy->by_token ||
           kvf_verify_is_due(kv_group, layer);
}

/* A refresh does too: which pages of recent choices have no slot the host does not know. */
static bool reads_all(const kvf_kv_group *kv_group, const kvf_layer *layer)
{
    return looks_at_all(kv_group, layer) ||
           kvf_refresh_is_due(kv_group, layer, kvf_sealed_blocks(kv_group, layer->length + 1));
}

/* Rows of which all is read, before anything has changed. */
static kvf_status bring_rows(kvf_step *step)
{
    bool leaves = false; /* what is read after the refresh does not lie in the prefill arena */
    if (!step->kv_group)
        return KVF_OK;
    for (uint32_t b = 0; b < step->rows; b++)
        leaves |= looks_at_all(step->kv_group, step->states[b]);
    return kvf_bring_rows(step, reads_all, leaves ? kvf_arena_leave_rows : NULL);
}

/* Slots that were to get pages have others now, or none: all are empty, because nobody knows which
 * these are. */
static kvf_status end_failed(kvf_step *step, kvf_status failure)
{
    const kvf_kv_group *kv_group = step->kv_group;
    const kvf_status status = kvf_moves_pages(kv_group)
                                  ? kvf_residency_clear(&kv_group->residency, step->stream)
                                  : KVF_OK;
    KVF_TRY(kvf_step_end(step, status));
    return failure;
}

kvf_status kvf_decode_end(kvf_step *step, kvf_status status)
{
    kvf_bring_drop(step);
    return step->is_undone ? end_failed(step, status) : kvf_step_end(step, status);
}

kvf_status kvf_decode_prepare(kvf_step *step, const kvf_decode_args *args, kvf_stream *stream,
                              kvf_due *due)
{
    KVF_TRY(kvf_step_begin(step->cache, stream, step));
    kvf_step_at(step, args->layer, args->sequences, args->batch);
    kvf_status status = bring_rows(step);
    if (status == KVF_OK)
        status = acquire(step);
    if (status != KVF_OK)
        return kvf_step_refuse(step, status);
    kvf_decode_note(step, args, due);
    kvf_decode_take(step);
    if (due->refreshes)
        kvf_step_rows_after(step);
    return KVF_OK;
}

kvf_status kvf_decode_prepare_queries(kvf_step *step, const kvf_decode_args *args,
                                      kvf_stream *stream)
{
    KVF_TRY(kvf_step_begin(step->cache, stream, step));
    kvf_step_at(step, args->layer, args->sequences, args->batch);
    const kvf_status status = bring_rows(step);
    if (status != KVF_OK)
        return kvf_step_refuse(step, status);
    for (uint32_t b = 0; b < step->rows; b++)
        count_row(step, step->states[b]);
    kvf_decode_take(step);
    for (uint32_t b = 0; b < step->rows; b++)
        step->row_host[b].chosen_at = NULL; /* the layer's own steps go on as if nobody had asked */
    return KVF_OK;
}

kvf_status kvf_decode_send(kvf_step *step)
{
    for (uint32_t b = 0; step->kv_group && b < step->rows; b++)
        KVF_TRY(kvf_step_clear(step, step->states[b]));
    return kvf_step_send(step);
}

/* ---- phases ---- */

static bool is_one_turn(const kvf_step *step)
{
    return kvf_step_turn(step, 0) == step->rows;
}

/* Blocks to seal were complete before the call, so sealing may come first; it does where tokens
 * after the first one of a sequence may need the room in the ring. */
static kvf_status append(kvf_step *step, const kvf_decode_args *args)
{
    const kvf_kv_group *kv_group = step->kv_group;
    const kvf_append_args a = {.paging = kv_group->dims.paging,
                               .rows = step->rows,
                               .row = step->row,
                               .q = args->q,
                               .k = args->k,
                               .v = args->v,
                               .choose = kv_group->tables.choose,
                               .choose_lists = kv_group->dims.choose_lists};
    if (is_one_turn(step)) {
        KVF_TRY(KVF_LAUNCH(step, append, a));
        return kvf_step_seal(step);
    }
    KVF_TRY(kvf_step_seal(step));
    KVF_TRY(kvf_step_flip(step));
    step->sealed_blocks = 0;
    return KVF_LAUNCH(step, append, a);
}

static kvf_status refresh(kvf_step *step, uint64_t *clock)
{
    for (uint32_t b = 0; b < step->rows; b++)
        if (step->states[b]->is_due)
            KVF_TRY(kvf_static_refresh(step, b));
    step->row = step->row_after;
    step->row_host = step->row_after_host;
    return kvf_step_stamp(step, clock);
}

kvf_status kvf_decode_select(kvf_step *step, const kvf_decode_args *args, const kvf_due *due)
{
    kvf_layer_counters *counters = kvf_counters_device(step->kv_group, step->index);
    step->q = args->q;
    step->given = (kvf_given){args->page_scores, args->page_ids, args->page_stride};
    KVF_TRY(kvf_step_stamp(step, NULL));
    KVF_TRY(append(step, args));
    KVF_TRY(kvf_step_stamp(step, &counters->append_ns));
    if (due->refreshes)
        KVF_TRY(refresh(step, &counters->refresh_ns));
    /* After a refresh, which may look at every page. */
    if (!step->is_recorded)
        KVF_TRY(kvf_arena_leave_rows(step));
    if (step->kv_group->policy->scores_pages) {
        KVF_TRY(kvf_select_score(step));
        KVF_TRY(kvf_step_stamp(step, &counters->score_ns));
    }
    KVF_TRY(kvf_select_choose(step));
    return kvf_step_flip(step);
}

static kvf_status place_and_attend(kvf_step *step, void *out, float *lse)
{
    kvf_layer_counters *counters = kvf_counters_device(step->kv_group, step->index);
    KVF_TRY(kvf_step_place(step));
    KVF_TRY(kvf_step_stamp(step, &counters->select_ns));
    KVF_TRY(kvf_step_attend(step, out, lse));
    return kvf_step_stamp(step, &counters->attend_ns);
}

kvf_status kvf_decode_enqueue(kvf_step *step, const kvf_decode_args *args, const kvf_due *due)
{
    const kvf_kv_group *kv_group = step->kv_group;
    float *lse = args->lse ? args->lse : kv_group->tables.lse;
    KVF_TRY(kvf_decode_select(step, args, due));
    KVF_TRY(place_and_attend(step, args->out, lse));
    for (uint32_t b = 0; due->verifies && b < step->rows; b++)
        if (step->states[b]->is_verified)
            KVF_TRY(kvf_step_verify(step, b, args->out, lse));
    return KVF_OK;
}
