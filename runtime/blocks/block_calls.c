/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Part of block_store.h. Calls on pages under the caller's blocks: write, step, chunk, copy.
 *
 * Knows the order of the launches and nothing of their insides. A call has no frame: all that
 * depends on rows is on the device, so a launch takes constants and the caller's pointers. On a
 * device that can be captured a step is fused: pages that miss are brought by
 * the launch that attends, and no other stream, event or thread has a part in it.
 */

#include "block_store.h"
#include "rings.h"

#include <string.h>

#include "attend.h"
#include "select.h"

static kvf_kv_group *kv_group_of(const kvf_blocks *blocks)
{
    return &blocks->cache->kv_groups[0];
}

static kvf_physical_codes codes_of(const kvf_blocks *blocks, uint32_t layer)
{
    const kvf_physical_blocks *c = &blocks->physical;
    const size_t scales = kvf_physical_count(c) * c->paging.kv_heads * c->paging.block_size;
    return (kvf_physical_codes){.words = blocks->bindings[layer].codes,
                                .scales = c->scales + layer * scales,
                                .stride = blocks->bindings[layer].stride,
                                .id_blocks = c->id_blocks,
                                .kv_heads = c->paging.kv_heads};
}

static kvf_physical_centroids centroids_of(const kvf_blocks *blocks, uint32_t layer)
{
    const kvf_physical_blocks *c = &blocks->physical;
    return (kvf_physical_centroids){.centroids = c->coarse.centroids,
                                    .scales = c->coarse.scales,
                                    .number = c->coarse.number + (size_t)layer * c->paging.kv_heads,
                                    .kv_heads = c->paging.kv_heads,
                                    .segments = c->coarse.segments,
                                    .blocks = kvf_segment_blocks(c)};
}

kvf_status kvf_block_write(kvf_blocks *blocks, const kvf_blocks_put_args *args, kvf_stream *stream)
{
    const kvf_paging *p = &blocks->physical.paging;
    const size_t keys = (size_t)p->kv_heads * p->shape.head_dim;
    const size_t values = (size_t)p->kv_heads * kvf_value_dim(&p->shape);
    const kvf_write_args write = {.blocks = blocks->constants.physical,
                                  .pool = kvf_physical_pool_of(&blocks->physical),
                                  .codes = codes_of(blocks, args->layer),
                                  .shape = p->shape,
                                  .layer = args->layer,
                                  .tokens = args->tokens,
                                  .is_wide = kvf_has_wide_keys(&blocks->cache->config),
                                  .k = args->k,
                                  .v = args->v,
                                  .k_stride = args->k_stride ? args->k_stride : keys,
                                  .v_stride = args->v_stride ? args->v_stride : values,
                                  .slots = args->slots};
    KVF_TRY(KVF_ENQUEUE(stream, write, write));
    /* More tokens than rows: some are a prompt's, and make whole pages. */
    return p->shape.pages == KVF_PAGES_NATIVE && args->tokens > blocks->physical.regions &&
                   blocks->physical.ignores_writes != 1
               ? KVF_ENQUEUE(stream, admit_written, write)
               : KVF_OK;
}

/* ---- steps ---- */

static kvf_call step_of(const kvf_blocks *blocks, uint32_t layer, uint32_t rows, const void *q,
                        kvf_stream *stream)
{
    const kvf_physical_blocks *c = &blocks->physical;
    kvf_call call = {.cache = blocks->cache,
                     .stream = stream,
                     .kv_group = kv_group_of(blocks),
                     .layer = layer,
                     .index = layer,
                     .rows = rows,
                     .row = c->row,
                     .q = q,
                     .stride = c->paging.pages_max,
                     .is_fused = blocks->cache->runtime->properties.can_capture,
                     .bits = blocks->constants.list_bits,
                     .pages = c->pages,
                     .by_block = {.physical = c->physical, .codes = codes_of(blocks, layer)},
                     .choose_pages = c->pages};
    if (c->paging.segments_max == 0)
        return call;
    call.coarse.count = c->coarse.count;
    call.coarse.take = c->coarse.take;
    call.coarse.blocks = c->coarse.blocks;
    call.coarse.unfiltered = c->coarse.unfiltered;
    call.by_block.centroids = centroids_of(blocks, layer);
    return call;
}

/* Rows, and what their regions have of them. */
static kvf_status begin(kvf_blocks *blocks, kvf_call *call, const kvf_blocks_rows *rows)
{
    const kvf_rows_args make = {.blocks = blocks->constants.physical,
                                .layer = call->layer,
                                .rows = rows->rows,
                                .table_stride = rows->table_stride,
                                .table = rows->table,
                                .lengths = rows->lengths,
                                .regions = rows->regions};
    const kvf_validate_args validate = {.blocks = make.blocks,
                                        .row = call->row,
                                        .region = blocks->physical.region,
                                        .static_count = blocks->physical.static_count,
                                        .pages = blocks->physical.paging.shape.pages,
                                        .layer = call->layer,
                                        .rows = rows->rows,
                                        .kv_heads = blocks->physical.paging.kv_heads};
    KVF_TRY(KVF_LAUNCH(call, rows, make));
    return KVF_LAUNCH(call, validate, validate);
}

/* Centroids, which coarse heads score first. */
static kvf_status average(const kvf_blocks *blocks, const kvf_call *call)
{
    const kvf_paging *p = &blocks->physical.paging;
    const kvf_average_args args = {.blocks = blocks->constants.physical,
                                   .codes = call->by_block.codes,
                                   .layer = call->layer,
                                   .rows = call->rows,
                                   .segments_max = p->segments_max,
                                   .head_dim = p->shape.head_dim};
    return p->segments_max && kvf_has_coarse_heads(call->cache, call->layer)
               ? KVF_LAUNCH(call, average, args)
               : KVF_OK;
}

static kvf_fill_nan_args fill_nan_of(const kvf_blocks *blocks, uint32_t rows, void *out, float *lse)
{
    const kvf_cache_config *c = &blocks->cache->config;
    return (kvf_fill_nan_args){.is_bad = blocks->physical.is_bad,
                               .rows = rows,
                               .heads = c->query_heads,
                               .value_dim = c->value_dim,
                               .dtype = kvf_query_dtype(c),
                               .out = out,
                               .lse = lse};
}

/* ---- streaming heads ---- */

/* The layer's heads of `streaming`, on the device; NULL: no head of it streams. */
static const uint32_t *streaming_of(const kvf_blocks *blocks, uint32_t layer)
{
    const kvf_physical_blocks *c = &blocks->physical;
    return blocks->tails.of && blocks->tails.of[layer].ring.heads
               ? c->streaming.number + (size_t)layer * c->paging.kv_heads
               : NULL;
}

/* Outputs of streaming heads, of `rows` rows in blocks->tails, to out and lse. */
static kvf_status scatter_heads(const kvf_blocks *blocks, uint32_t layer, uint32_t rows, void *out,
                                float *lse, kvf_stream *stream)
{
    const kvf_paging *p = &blocks->physical.paging;
    const kvf_shape shape = kvf_out_shape(blocks->cache, &p->shape);
    const kvf_scatter_heads_args args = {.streaming = streaming_of(blocks, layer),
                                         .rows = rows,
                                         .kv_heads = p->kv_heads,
                                         .group = p->group,
                                         .value_bytes = (uint32_t)kvf_value_bytes(&shape),
                                         .from = blocks->tails.out,
                                         .from_lse = blocks->tails.lse,
                                         .out = out,
                                         .lse = lse};
    return KVF_ENQUEUE(stream, scatter_heads, args);
}

/* A query of every row over its tails, of a layer with streaming heads; others have no spans. */
static kvf_status attend_tails(const kvf_blocks *blocks, const kvf_call *call, void *out,
                               float *lse)
{
    const kvf_physical_blocks *c = &blocks->physical;
    const kvf_block_tails *t = &blocks->tails;
    const kvf_block_tail *tail = &t->of[call->layer];
    const kvf_gather_window_args gather_window = {.blocks = blocks->constants.physical,
                                                  .pages = c->paging.shape.pages,
                                                  .layer = call->layer,
                                                  .rows = call->rows,
                                                  .kv_heads = c->paging.kv_heads,
                                                  .ring = tail->ring,
                                                  .first = tail->first,
                                                  .spans_max = kvf_ring_total(&tail->ring),
                                                  .spans = t->spans,
                                                  .span_count = t->span_count};
    const kvf_attention attention = {.shape = tail->ring.shape,
                                     .lists = call->rows * c->paging.kv_heads,
                                     .group = c->paging.group,
                                     .spans_max = gather_window.spans_max,
                                     .q = call->q,
                                     .spans = t->spans,
                                     .span_count = t->span_count,
                                     .out = t->out,
                                     .lse = t->lse,
                                     .partial_o = t->partial_o,
                                     .partial_lse = t->partial_lse};
    KVF_TRY(KVF_LAUNCH(call, gather_window, gather_window));
    KVF_TRY(kvf_call_attend_to(call, &attention));
    return scatter_heads(blocks, call->layer, call->rows, out, lse, call->stream);
}

/* Tokens of chunk `i` once more, piece by piece, for its streaming heads; `all` is what others do.
 */
static kvf_status prefill_tails(const kvf_blocks *blocks, uint32_t layer,
                                const kvf_prefill_kernel_args *all, uint32_t i, kvf_stream *stream)
{
    const kvf_physical_blocks *c = &blocks->physical;
    const kvf_paging *p = &c->paging;
    const kvf_query_chunk *chunk = &all->chunks.at[i];
    const size_t heads = (size_t)p->kv_heads * p->group;
    const size_t element = kvf_dtype_bytes(kvf_query_dtype(&blocks->cache->config));
    const size_t query = heads * p->shape.head_dim * element;
    const size_t out = heads * kvf_value_dim(&p->shape) * element;
    kvf_prefill_kernel_args piece = *all;
    piece.chunks.count = 0;
    piece.sink = blocks->tails.of[layer].ring.sink;
    piece.window = blocks->tails.of[layer].ring.recent;
    piece.blocks = kvf_prefill_blocks(all, i);
    piece.out = blocks->tails.out;
    piece.lse = all->lse ? blocks->tails.lse : NULL;
    for (uint32_t done = 0; done < chunk->tokens; done += KVF_BLOCK_PIECE) {
        const size_t first = chunk->first + done;
        piece.tokens = kvf_min_u32(KVF_BLOCK_PIECE, chunk->tokens - done);
        piece.base = chunk->base + done;
        piece.q = (const char *)all->q + first * query;
        KVF_TRY(KVF_ENQUEUE(stream, prefill, piece));
        KVF_TRY(scatter_heads(blocks, layer, piece.tokens, (char *)all->out + first * out,
                              all->lse ? all->lse + first * heads : NULL, stream));
    }
    return KVF_OK;
}

/* ---- calls ---- */

kvf_status kvf_block_step(kvf_blocks *blocks, const kvf_blocks_decode_args *args,
                          kvf_stream *stream)
{
    const void *q = kvf_inputs_seen(blocks->cache, args->q, NULL, NULL).q;
    kvf_call call = step_of(blocks, args->layer, args->rows->rows, q, stream);
    const kvf_fill_nan_args fill = fill_nan_of(blocks, args->rows->rows, args->out, args->lse);
    call.caller_selection =
        (kvf_caller_selection){args->page_scores, args->page_ids, args->page_stride};
    KVF_TRY(begin(blocks, &call, args->rows));
    KVF_TRY(kvf_inputs_round(&call, args->q, NULL, NULL, call.rows));
    KVF_TRY(average(blocks, &call));
    if (call.kv_group->policy->scores_pages)
        KVF_TRY(kvf_select_score(&call));
    KVF_TRY(kvf_select_choose(&call));
    KVF_TRY(kvf_call_place(&call));
    KVF_TRY(kvf_call_attend(&call, args->out, args->lse));
    if (streaming_of(blocks, args->layer))
        KVF_TRY(attend_tails(blocks, &call, args->out, args->lse));
    return KVF_LAUNCH(&call, fill_nan, fill);
}

/* ---- chunks and copies ---- */

static uint32_t chunk_blocks(const kvf_blocks *blocks, const kvf_query_chunk *chunk)
{
    return kvf_div_ceil_u32(chunk->base + chunk->tokens, blocks->physical.paging.block_size);
}

/* Chunks from `first` on that one launch takes. They share room for a row, where there is one. */
static kvf_query_chunks some_chunks(const kvf_blocks *blocks, const kvf_query_chunks *all,
                                    uint32_t first)
{
    const uint32_t room = kv_group_of(blocks)->dims.scratch_blocks;
    kvf_query_chunks some = {0};
    uint32_t most = 0; /* blocks of the longest */
    for (uint32_t i = first; i < all->count; i++) {
        most = kvf_max_u32(most, chunk_blocks(blocks, &all->at[i]));
        if (room && i > first && (some.count + 1) * most > room)
            break;
        some.at[some.count++] = all->at[i];
    }
    return some;
}

/* The tokens of the chunks, in full precision on the device, where they are attended. */
static kvf_status stage_chunks(const kvf_blocks *blocks, uint32_t layer,
                               kvf_prefill_kernel_args *prefill, kvf_stream *stream)
{
    const kvf_kv_group *kv_group = kv_group_of(blocks);
    const kvf_physical_blocks *c = &blocks->physical;
    uint32_t each = 0;
    for (uint32_t i = 0; i < prefill->chunks.count; i++)
        each = kvf_max_u32(each, chunk_blocks(blocks, &prefill->chunks.at[i]));
    const kvf_dequantize_chunks_args dequantize_chunks = {.paging = c->paging,
                                                          .chunks = prefill->chunks,
                                                          .blocks_each = each,
                                                          .blocks = c->blocks,
                                                          .scratch =
                                                              kv_group->tables.scratch.blocks};
    const kvf_stage_args stage = {.paging = c->paging,
                                  .rows = prefill->chunks.count,
                                  .count = each,
                                  .row = c->row,
                                  .to = kv_group->tables.scratch.blocks,
                                  .counters = kvf_counters_device(kv_group, layer)};
    prefill->blocks = (const void *const *)blocks->constants.scratch;
    prefill->blocks_stride = each;
    return kvf_quantizes_pages(kv_group) ? KVF_ENQUEUE(stream, dequantize_chunks, dequantize_chunks)
                                         : KVF_ENQUEUE(stream, stage, stage);
}

/* In one launch each. */
static kvf_status prefill_chunks(kvf_blocks *blocks, const kvf_blocks_extend_args *args,
                                 uint32_t row, const kvf_query_chunks *chunks, kvf_stream *stream)
{
    const kvf_blocks_rows *rows = args->rows;
    const kvf_physical_blocks *c = &blocks->physical;
    const kvf_paging *p = &c->paging;
    const kvf_rows_args make = {.blocks = blocks->constants.physical,
                                .layer = args->layer,
                                .rows = chunks->count,
                                .table_stride = rows->table_stride,
                                .table = rows->table + (size_t)row * rows->table_stride,
                                .lengths = rows->lengths + row,
                                .chunks = *chunks};
    kvf_prefill_kernel_args prefill = {.shape = kvf_run_shape(p),
                                       .kv_heads = p->kv_heads,
                                       .group = p->group,
                                       .scale = blocks->cache->attention[args->layer].scale,
                                       .cap = blocks->cache->attention[args->layer].cap,
                                       .q_dtype = kvf_query_dtype(&blocks->cache->config),
                                       .out_dtype = kvf_query_dtype(&blocks->cache->config),
                                       .q = args->q,
                                       .blocks = (const void *const *)c->blocks,
                                       .out = args->out,
                                       .lse = args->lse,
                                       .blocks_stride = p->blocks_max,
                                       .chunks = *chunks,
                                       .sinks = blocks->cache->attention[args->layer].sinks};
    kvf_fill_nan_args fill = fill_nan_of(blocks, chunks->count, args->out, args->lse);
    fill.chunks = *chunks;
    for (uint32_t i = 0; i < chunks->count; i++)
        prefill.tokens = kvf_max_u32(prefill.tokens, chunks->at[i].tokens);
    KVF_TRY(KVF_ENQUEUE(stream, rows, make));
    if (kv_group_of(blocks)->dims.scratch_blocks)
        KVF_TRY(stage_chunks(blocks, args->layer, &prefill, stream));
    KVF_TRY(KVF_ENQUEUE(stream, prefill, prefill));
    for (uint32_t i = 0; streaming_of(blocks, args->layer) && i < chunks->count; i++)
        KVF_TRY(prefill_tails(blocks, args->layer, &prefill, i, stream));
    return KVF_ENQUEUE(stream, fill_nan, fill);
}

kvf_status kvf_block_prefill(kvf_blocks *blocks, const kvf_blocks_extend_args *args, uint32_t row,
                             const kvf_query_chunks *chunks, kvf_stream *stream)
{
    for (uint32_t first = 0; first < chunks->count;) {
        const kvf_query_chunks some = some_chunks(blocks, chunks, first);
        KVF_TRY(prefill_chunks(blocks, args, row + first, &some, stream));
        first += some.count;
    }
    return KVF_OK;
}

kvf_status kvf_block_clone(kvf_blocks *blocks, uint32_t from, uint32_t to, kvf_stream *stream)
{
    const kvf_physical_blocks *c = &blocks->physical;
    const kvf_clone_args clone = {.blocks = blocks->constants.physical,
                                  .from = from,
                                  .to = to,
                                  .tasks = c->layers * c->id_blocks};
    return KVF_ENQUEUE(stream, clone, clone);
}
