/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Appending: prefill chunks, and the pages that leave the window.
 *
 * Knows nothing of selection. A block that is sealed by a prefill chunk is written straight to its
 * pool block, or where pages are moved to be attended to the prefill arena and from there to
 * the pool. One that is sealed by a decode step is copied from the ring on the write-back stream;
 * the page table points to the pool before anything of the step needs it there (kvf_step_flip).
 */

#include "append.h"

#include <string.h>

#include "bring.h"

/* ---- blocks and positions, on the host ---- */

kvf_status kvf_append_full(const kvf_kv_group *kv_group)
{
    KVF_FAIL(kv_group->context, KVF_FULL,
             "host_tokens_max = %llu: all %u blocks of the pool are in use; destroy a sequence, or "
             "open the cache with more",
             (unsigned long long)kv_group->config.host_tokens_max, kv_group->dims.block_count);
}

kvf_status kvf_append_reserve(kvf_layer *layer, uint32_t tokens)
{
    kvf_kv_group *kv_group = layer->kv_group;
    const uint32_t sealed = kvf_sealed_blocks(kv_group, layer->length + tokens);
    for (uint32_t p = kvf_max_u32(layer->sealed, layer->held); p < sealed; p++) {
        const kvf_block before = p ? layer->blocks[p - 1] : KVF_BLOCK_NONE;
        if (kvf_page_pool_acquire_near(&kv_group->pool, before, &layer->blocks[p]) == KVF_OK)
            continue;
        kvf_append_release(layer, p);
        return kvf_append_full(kv_group);
    }
    return KVF_OK;
}

kvf_status kvf_append_acquire(kvf_layer *layer, uint32_t tokens)
{
    const uint32_t sealed = kvf_sealed_blocks(layer->kv_group, layer->length + tokens);
    KVF_TRY(kvf_append_reserve(layer, tokens));
    if (sealed <= layer->sealed)
        return KVF_OK;
    const kvf_status status =
        kvf_bring_fresh(layer->kv_group, layer->blocks + layer->sealed, sealed - layer->sealed);
    if (status != KVF_OK)
        kvf_append_release(layer, sealed);
    return status;
}

void kvf_append_release(kvf_layer *layer, uint32_t end)
{
    for (uint32_t p = end; p-- > kvf_max_u32(layer->sealed, layer->held);)
        kvf_page_pool_release(&layer->kv_group->pool, layer->blocks[p]);
}

kvf_status kvf_append_check(kvf_cache *cache, const kvf_layer *layer, uint32_t tokens,
                            const uint32_t *positions)
{
    if (tokens > cache->config.tokens_max - layer->length)
        KVF_FAIL(cache->context, KVF_FULL,
                 "tokens_max = %u: the sequence holds %u tokens and %u more do not fit; open the "
                 "cache with more",
                 cache->config.tokens_max, layer->length, tokens);
    uint32_t last = layer->length ? layer->positions[layer->length - 1] : 0;
    uint32_t has_last = layer->length > 0;
    for (uint32_t i = 0; positions && i < tokens; i++) {
        if (has_last && positions[i] <= last)
            KVF_FAIL(cache->context, KVF_INVALID,
                     "positions[%u] = %u: must be above %u, the position of the token before", i,
                     positions[i], last);
        last = positions[i];
        has_last = 1;
    }
    /* The position after the last one must be a number, too. */
    const uint64_t end = positions ? (uint64_t)last + 1 : (uint64_t)last + has_last + tokens;
    if (end > UINT32_MAX)
        KVF_FAIL(cache->context, KVF_INVALID,
                 "positions[%u] = %llu: at most %u are known; begin at a lower one", tokens - 1,
                 (unsigned long long)end - 1, UINT32_MAX - 1);
    return KVF_OK;
}

void kvf_append_note(kvf_layer *layer, uint32_t tokens, const uint32_t *positions)
{
    uint32_t next = layer->length ? layer->positions[layer->length - 1] + 1 : 0;
    for (uint32_t i = 0; i < tokens; i++)
        layer->positions[layer->length + i] = positions ? positions[i] : next + i;
    memset(layer->by_step + layer->length, 0, tokens);
    layer->length += tokens;
    /* While kept tokens are appended again, the front that stayed is sealed already. */
    if (layer->kv_group)
        layer->sealed =
            kvf_max_u32(layer->sealed, kvf_sealed_blocks(layer->kv_group, layer->length));
}

/* ---- sealing ---- */

static kvf_status seal_rows(kvf_step *step, kvf_seal_args *args, const uint32_t *chunk_fault,
                            uint32_t chunk_first)
{
    const kvf_kv_group *kv_group = step->kv_group;
    *args = (kvf_seal_args){.paging = kv_group->dims.paging,
                            .rows = step->rows,
                            .row = step->row,
                            .jobs = kv_group->tables.jobs,
                            .chunk_fault = chunk_fault,
                            .chunk_first = chunk_first};
    return KVF_LAUNCH(step, seal, *args);
}

static kvf_status put_digests(kvf_step *step, const kvf_digest_job *jobs)
{
    const kvf_kv_group *kv_group = step->kv_group;
    const kvf_paging *p = &kv_group->dims.paging;
    const kvf_digest_args digest = {.shape = p->shape,
                                    .kind = kv_group->config.digest,
                                    .subs = p->subs,
                                    .job_count = step->sealed_blocks * p->block_jobs * p->kv_heads,
                                    .jobs = jobs};
    const kvf_encode_args encode = {.shape = p->shape, .job_count = digest.job_count, .jobs = jobs};
    /* A call has one row that seals much, or rows that seal a block at most. */
    const uint32_t per_row = step->rows == 1 ? step->sealed_blocks : 1;
    const kvf_centroids_args centroids = {.paging = *p,
                                          .rows = step->rows,
                                          .segments = kvf_segments(p->block_size, per_row) + 1,
                                          .row = step->row};
    if (!kvf_has_codes(kv_group))
        return KVF_LAUNCH(step, digest, digest);
    KVF_TRY(KVF_LAUNCH(step, encode, encode));
    return p->segments_max ? KVF_LAUNCH(step, centroids, centroids) : KVF_OK;
}

kvf_status kvf_step_seal_blocks(kvf_step *step, const uint32_t *chunk_fault, uint32_t chunk_first)
{
    if (!step->is_recorded)
        step->cache->counters[step->layer].bytes_to_host +=
            step->sealed_blocks * kvf_stored_block_bytes(&step->kv_group->dims.paging);
    kvf_seal_args args;
    KVF_TRY(seal_rows(step, &args, chunk_fault, chunk_first));
    return put_digests(step, args.jobs);
}

kvf_status kvf_step_admit(kvf_step *step)
{
    const kvf_kv_group *kv_group = step->kv_group;
    /* A call has one row that seals much, or rows that seal a block at most. */
    const kvf_admit_args args = {.paging = kv_group->dims.paging,
                                 .rows = step->rows,
                                 .count = step->rows == 1 ? step->sealed_blocks : 1,
                                 .row = step->row};
    return step->sealed_blocks && step->cache->runtime->seams.ignores_writes != 1
               ? KVF_LAUNCH(step, admit, args)
               : KVF_OK;
}

static char *ring_block(const kvf_step *step, uint32_t row, uint32_t block)
{
    return kvf_row_ring_block(&step->kv_group->dims.paging, &step->row_host[row], block);
}

/* Ring blocks to the pool on the write-back stream. Rows of a replay are of all layers, and go by
 * one launch. */
static kvf_status write_back(kvf_step *step)
{
    kvf_kv_group *kv_group = step->kv_group;
    if (step->is_recorded) {
        const kvf_writeback_args args = {
            .paging = kv_group->dims.paging, .rows = step->rows, .row = step->row};
        return KVF_ENQUEUE(kv_group->writeback, writeback, args);
    }
    for (uint32_t b = 0; b < step->rows; b++) {
        const kvf_row *row = &step->row_host[b];
        for (uint32_t p = row->sealed_before; p < row->sealed; p++) {
            const void *from = ring_block(step, b, p);
            KVF_TRY(kvf_write_back(
                kv_group, &step->pool_host[row->job_first + p - row->sealed_before], &from, 1));
        }
    }
    return KVF_OK;
}

kvf_status kvf_step_point_tables(kvf_step *step)
{
    uint32_t end;
    for (uint32_t first = 0; first < step->rows; first = end) {
        end = kvf_step_turn(step, first);
        const kvf_table_args args = {
            .paging = step->kv_group->dims.paging, .rows = end - first, .row = step->row + first};
        KVF_TRY(KVF_LAUNCH(step, table, args));
    }
    return KVF_OK;
}

/* Where pages are quantized a kernel of this stream does that, and digests are of what it leaves in
 * the ring. Whoever looks at a sealed block later finds it in the pool. */
static kvf_status seal_quantized(kvf_step *step)
{
    const kvf_quantize_args args = {
        .paging = step->kv_group->dims.paging, .rows = step->rows, .count = 1, .row = step->row};
    /* Rows of a replay are of all layers, and who made them has noted it. */
    for (uint32_t b = 0; b < step->rows && !step->is_recorded; b++)
        if (step->row_host[b].sealed_before < step->row_host[b].sealed)
            step->states[b]->spare = step->row_host[b].sealed;
    KVF_TRY(KVF_LAUNCH(step, quantize, args));
    KVF_TRY(kvf_step_seal_blocks(step, NULL, 0));
    KVF_TRY(kvf_step_admit(step));
    return kvf_step_point_tables(step);
}

kvf_status kvf_step_seal(kvf_step *step)
{
    const kvf_device_ops *ops = step->kv_group->device->ops;
    kvf_kv_group *kv_group = step->kv_group;
    if (step->sealed_blocks == 0)
        return KVF_OK;
    if (kvf_quantizes_pages(kv_group))
        return seal_quantized(step);
    KVF_TRY(kvf_step_seal_blocks(step, NULL, 0));
    KVF_TRY(kvf_step_admit(step));
    KVF_TRY(ops->event_record(kv_group->sealed, step->stream));
    KVF_TRY(ops->stream_wait_event(kv_group->writeback, kv_group->sealed));
    KVF_TRY(write_back(step));
    return ops->event_record(kv_group->written, kv_group->writeback);
}

kvf_status kvf_step_flip(kvf_step *step)
{
    if (step->sealed_blocks == 0 || kvf_quantizes_pages(step->kv_group))
        return KVF_OK;
    KVF_TRY(step->kv_group->device->ops->stream_wait_event(step->stream, step->kv_group->written));
    return kvf_step_point_tables(step);
}

/* ---- prefill ---- */

/* The last queries of a chunk go to the ring of queries; query number n is in slot n % window. */
static kvf_status keep_queries(kvf_step *step, const kvf_prefill_args *args, kvf_layer *layer)
{
    const kvf_kv_group *kv_group = step->kv_group;
    const kvf_paging *p = &kv_group->dims.paging;
    const size_t bytes =
        (size_t)kv_group->config.query_heads * p->shape.head_dim * kvf_dtype_bytes(p->shape.dtype);
    if (!args->q) {
        layer->queries = layer->queries_from = 0; /* what comes next does not follow what is kept */
        return KVF_OK;
    }
    const uint32_t first = layer->queries;
    layer->queries += args->tokens;
    uint32_t i = args->tokens - kvf_min_u32(args->tokens, p->query_window);
    while (i < args->tokens) {
        const uint32_t slot = (first + i) % p->query_window;
        const uint32_t run = kvf_min_u32(args->tokens - i, p->query_window - slot);
        KVF_TRY(kv_group->device->ops->copy(step->stream, step->row_host[0].queries + slot * bytes,
                                            (const char *)args->q + i * bytes, run * bytes));
        i += run;
    }
    return KVF_OK;
}

kvf_status kvf_chunk_repack(kvf_step *step, const kvf_prefill_args *args, uint32_t base,
                            void *const *blocks)
{
    const kvf_kv_group *kv_group = step->kv_group;
    const kvf_paging *p = &kv_group->dims.paging;
    uint32_t *fault = kv_group->tables.chunk_fault;
    const kvf_repack_args a = {.shape = kvf_run_shape(p),
                               .kv_heads = p->kv_heads,
                               .tokens = args->tokens,
                               .first = base % p->block_size,
                               .k = args->k,
                               .v = args->v,
                               .blocks = blocks + base / p->block_size,
                               .fault = fault};
    KVF_TRY(kv_group->device->ops->fill(step->stream, fault, 0xff, sizeof *fault));
    return KVF_LAUNCH(step, repack, a);
}

kvf_status kvf_chunk_attend(kvf_step *step, const kvf_prefill_args *args, uint32_t base,
                            void *const *blocks)
{
    const kvf_paging *p = &step->kv_group->dims.paging;
    const kvf_prefill_kernel_args a = {.shape = kvf_run_shape(p),
                                       .kv_heads = p->kv_heads,
                                       .group = p->group,
                                       .tokens = args->tokens,
                                       .base = base,
                                       .scale = kvf_step_attention(step)->scale,
                                       .cap = kvf_step_attention(step)->cap,
                                       .q = args->q,
                                       .blocks = (const void *const *)blocks,
                                       .out = args->out,
                                       .sinks = kvf_step_attention(step)->sinks};
    return args->q ? KVF_LAUNCH(step, prefill, a) : KVF_OK;
}

kvf_status kvf_prefill_place(kvf_step *step)
{
    kvf_layer *layer = step->states[0];
    KVF_TRY(kvf_step_clear(step, layer));
    if (step->kv_group->dims.arena_blocks == 0)
        return KVF_OK;
    KVF_TRY(kvf_arena_take(step, layer, layer->sealed_before));
    kvf_arena_place(step);
    return KVF_OK;
}

/* Blocks of the chunk, in the pool or the arena. */
static kvf_status enqueue_blocks(kvf_step *step, const kvf_prefill_args *args, uint32_t base)
{
    const kvf_kv_group *kv_group = step->kv_group;
    const kvf_paging *p = &kv_group->dims.paging;
    const kvf_row *row = &step->row_host[0];
    void **to = kv_group->dims.arena_blocks ? step->arena_host : step->pool_host;
    KVF_TRY(kvf_step_stamp(step, NULL));
    if (kv_group->dims.arena_blocks && args->q)
        KVF_TRY(kvf_arena_fill(step));
    /* Blocks that have tokens already move from the ring first. */
    for (uint32_t i = row->sealed_before; i < row->sealed && i * p->block_size < base; i++)
        KVF_TRY(kv_group->device->ops->copy(step->stream, to[i - row->sealed_before],
                                            ring_block(step, 0, i), kvf_block_bytes(p)));
    KVF_TRY(kvf_step_point_tables(step));
    KVF_TRY(kvf_chunk_repack(step, args, base, row->blocks));
    KVF_TRY(kvf_step_seal_blocks(step, kv_group->tables.chunk_fault, base));
    KVF_TRY(kvf_step_admit(step));
    return kv_group->dims.arena_blocks ? kvf_arena_write_back(step) : KVF_OK;
}

kvf_status kvf_prefill_prepare(kvf_step *step, const kvf_prefill_args *args, kvf_stream *stream)
{
    kvf_layer *layer = &args->sequence->layers[args->layer];
    const uint32_t base = layer->length;
    KVF_TRY(kvf_step_begin(step->cache, stream, step));
    kvf_step_at(step, args->layer, &args->sequence, 1);
    kvf_status status = KVF_OK;
    if (step->kv_group && args->q)
        status = kvf_bring(step, layer, 0, UINT32_MAX);
    if (step->kv_group && status == KVF_OK)
        status = kvf_append_acquire(layer, args->tokens);
    if (status != KVF_OK)
        return kvf_step_refuse(step, status);
    kvf_append_note(layer, args->tokens, args->positions);
    kvf_footprint_append(step->cache, args->sequence, args->layer, args->tokens);
    kvf_layer_needs_exact(layer, base);
    if (step->kv_group)
        kvf_step_rows(step);
    return KVF_OK;
}

kvf_status kvf_prefill_enqueue(kvf_step *step, const kvf_prefill_args *args)
{
    kvf_layer *layer = step->states[0];
    const uint32_t base = layer->length - args->tokens;
    KVF_TRY(kvf_quantizes_pages(step->kv_group) ? kvf_prefill_quantized(step, args, base)
                                                : enqueue_blocks(step, args, base));
    KVF_TRY(keep_queries(step, args, layer));
    KVF_TRY(kvf_step_stamp(step, &kvf_counters_device(step->kv_group, step->index)->append_ns));
    if (kvf_quantizes_pages(step->kv_group))
        return KVF_OK; /* it has attended, too */
    return kvf_chunk_attend(step, args, base, step->row_host[0].blocks);
}

/* Blocks of the layer where a chunk of it finds them, and no new ones. */
static kvf_status enqueue_queries(kvf_step *step, const kvf_prefill_args *args)
{
    const uint32_t base = step->states[0]->length - args->tokens;
    KVF_TRY(kvf_prefill_place(step));
    KVF_TRY(kvf_step_send(step));
    if (step->kv_group->dims.arena_blocks)
        KVF_TRY(kvf_arena_fill(step));
    return kvf_chunk_attend(step, args, base, step->row_host[0].blocks);
}

kvf_status kvf_prefill_queries(kvf_cache *cache, const kvf_prefill_args *args, kvf_stream *stream)
{
    kvf_step step;
    KVF_TRY(kvf_step_begin(cache, stream, &step));
    kvf_step_at(&step, args->layer, &args->sequence, 1);
    const kvf_status status = kvf_bring(&step, step.states[0], 0, UINT32_MAX);
    if (status != KVF_OK)
        return kvf_step_refuse(&step, status);
    kvf_step_rows(&step);
    return kvf_step_end(&step, enqueue_queries(&step, args));
}

static kvf_status enqueue_again(kvf_step *step, const kvf_prefill_args *args,
                                const kvf_carried *carried, uint32_t base)
{
    KVF_TRY(kvf_prefill_place(step));
    KVF_TRY(kvf_step_send(step));
    return kvf_quantizes_pages(step->kv_group) ? kvf_carry_quantized(step, args, base, carried)
                                               : enqueue_blocks(step, args, base);
}

kvf_status kvf_append_again(kvf_cache *cache, const kvf_prefill_args *args,
                            const kvf_carried *carried, kvf_stream *stream)
{
    kvf_layer *layer = &args->sequence->layers[args->layer];
    const uint32_t base = layer->length;
    kvf_step step;
    KVF_TRY(kvf_step_begin(cache, stream, &step));
    kvf_step_at(&step, args->layer, &args->sequence, 1);
    KVF_TRY(kvf_append_acquire(layer, args->tokens));
    kvf_append_note(layer, args->tokens, args->positions);
    kvf_layer_needs_exact(layer, base);
    kvf_step_rows(&step);
    return kvf_step_end(&step, enqueue_again(&step, args, carried, base));
}
