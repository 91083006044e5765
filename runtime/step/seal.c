/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Sealing: blocks that leave the window, and their way to the pool; see the header.
 *
 * Knows nothing of selection. A block that is sealed by a decode step is copied from the ring on
 * the write-back stream; the page table points to the pool before anything of the step needs it
 * there (kvf_call_publish).
 */

#include "seal.h"

#include "writeback.h"

/* Blocks of one submission; a copy is cut into chunks that hold fewer anyway. */
#define BLOCKS_MAX 64u

kvf_status kvf_write_back(kvf_kv_group *kv_group, void *const *to, const void *const *from,
                          uint32_t count)
{
    kvf_writeback_block blocks[BLOCKS_MAX];
    for (uint32_t i = 0; i < count;) {
        uint32_t n = 0;
        for (; n < BLOCKS_MAX && i < count; n++, i++)
            blocks[n] = (kvf_writeback_block){.from = from[i], .to = to[i]};
        const kvf_writeback_job job = {
            .blocks = blocks, .count = n, .block_bytes = kvf_block_bytes(&kv_group->dims.paging)};
        KVF_TRY(kvf_writeback_enqueue(kv_group->writeback, &job, NULL));
    }
    return KVF_OK;
}

static kvf_status seal_rows(kvf_call *call, kvf_seal_args *args, const uint32_t *chunk_fault,
                            uint32_t chunk_first)
{
    const kvf_kv_group *kv_group = call->kv_group;
    *args = (kvf_seal_args){.paging = kv_group->dims.paging,
                            .rows = call->rows,
                            .row = call->row,
                            .jobs = kv_group->tables.jobs,
                            .chunk_fault = chunk_fault,
                            .chunk_first = chunk_first};
    return KVF_LAUNCH(call, seal, *args);
}

static kvf_status put_digests(kvf_call *call, const kvf_digest_job *jobs)
{
    const kvf_kv_group *kv_group = call->kv_group;
    const kvf_paging *p = &kv_group->dims.paging;
    const kvf_digest_args digest = {.shape = p->shape,
                                    .kind = kv_group->config.digest,
                                    .subs = p->subs,
                                    .job_count = call->sealed_blocks * p->block_jobs * p->kv_heads,
                                    .jobs = jobs};
    const kvf_encode_args encode = {.shape = p->shape, .job_count = digest.job_count, .jobs = jobs};
    /* A call has one row that seals much, or rows that seal a block at most. */
    const uint32_t per_row = call->rows == 1 ? call->sealed_blocks : 1;
    const kvf_centroids_args centroids = {.paging = *p,
                                          .rows = call->rows,
                                          .segments = kvf_segments(p->block_size, per_row) + 1,
                                          .row = call->row};
    if (!kvf_has_codes(kv_group))
        return KVF_LAUNCH(call, digest, digest);
    KVF_TRY(KVF_LAUNCH(call, encode, encode));
    return p->segments_max ? KVF_LAUNCH(call, centroids, centroids) : KVF_OK;
}

kvf_status kvf_call_seal_blocks(kvf_call *call, const uint32_t *chunk_fault, uint32_t chunk_first)
{
    if (!call->is_recorded)
        call->cache->counters[call->layer].bytes_to_host +=
            call->sealed_blocks * kvf_stored_block_bytes(&call->kv_group->dims.paging);
    kvf_seal_args args;
    KVF_TRY(seal_rows(call, &args, chunk_fault, chunk_first));
    return put_digests(call, args.jobs);
}

kvf_status kvf_call_admit(kvf_call *call)
{
    const kvf_kv_group *kv_group = call->kv_group;
    /* A call has one row that seals much, or rows that seal a block at most. */
    const kvf_admit_args args = {.paging = kv_group->dims.paging,
                                 .rows = call->rows,
                                 .count = call->rows == 1 ? call->sealed_blocks : 1,
                                 .row = call->row};
    return call->sealed_blocks && call->cache->runtime->test_hooks.ignores_writes != 1
               ? KVF_LAUNCH(call, admit, args)
               : KVF_OK;
}

/* Ring blocks to the pool on the write-back stream. Rows of a replay are of all layers, and go by
 * one launch. */
static kvf_status write_back(kvf_call *call)
{
    kvf_kv_group *kv_group = call->kv_group;
    if (call->is_recorded) {
        const kvf_writeback_args args = {
            .paging = kv_group->dims.paging, .rows = call->rows, .row = call->row};
        return KVF_ENQUEUE(kv_group->writeback, writeback, args);
    }
    for (uint32_t b = 0; b < call->rows; b++) {
        const kvf_row *row = &call->row_host[b];
        for (uint32_t p = row->sealed_before; p < row->sealed; p++) {
            const void *from = kvf_row_ring_block(&kv_group->dims.paging, row, p);
            KVF_TRY(kvf_write_back(
                kv_group, &call->pool_host[row->job_first + p - row->sealed_before], &from, 1));
        }
    }
    return KVF_OK;
}

kvf_status kvf_call_point_tables(kvf_call *call)
{
    uint32_t end;
    for (uint32_t first = 0; first < call->rows; first = end) {
        end = kvf_call_turn(call, first);
        const kvf_table_args args = {
            .paging = call->kv_group->dims.paging, .rows = end - first, .row = call->row + first};
        KVF_TRY(KVF_LAUNCH(call, table, args));
    }
    return KVF_OK;
}

/* Where pages are quantized a kernel of this stream does that, and digests are of what it leaves in
 * the ring. Whoever looks at a sealed block later finds it in the pool. */
static kvf_status seal_quantized(kvf_call *call)
{
    const kvf_quantize_args args = {
        .paging = call->kv_group->dims.paging, .rows = call->rows, .count = 1, .row = call->row};
    /* Rows of a replay are of all layers, and who made them has noted it. */
    for (uint32_t b = 0; b < call->rows && !call->is_recorded; b++)
        if (call->row_host[b].sealed_before < call->row_host[b].sealed)
            kvf_cut_spare(&call->states[b]->cut, call->row_host[b].sealed);
    KVF_TRY(KVF_LAUNCH(call, quantize, args));
    KVF_TRY(kvf_call_seal_blocks(call, NULL, 0));
    KVF_TRY(kvf_call_admit(call));
    return kvf_call_point_tables(call);
}

kvf_status kvf_call_seal(kvf_call *call)
{
    const kvf_device_ops *ops = call->kv_group->device->ops;
    kvf_kv_group *kv_group = call->kv_group;
    if (call->sealed_blocks == 0)
        return KVF_OK;
    if (kvf_quantizes_pages(kv_group))
        return seal_quantized(call);
    KVF_TRY(kvf_call_seal_blocks(call, NULL, 0));
    KVF_TRY(kvf_call_admit(call));
    KVF_TRY(ops->event_record(kv_group->sealed, call->stream));
    KVF_TRY(ops->stream_wait_event(kv_group->writeback, kv_group->sealed));
    KVF_TRY(write_back(call));
    return ops->event_record(kv_group->written, kv_group->writeback);
}

kvf_status kvf_call_publish(kvf_call *call)
{
    if (call->sealed_blocks == 0 || kvf_quantizes_pages(call->kv_group))
        return KVF_OK;
    KVF_TRY(call->kv_group->device->ops->stream_wait_event(call->stream, call->kv_group->written));
    return kvf_call_point_tables(call);
}
