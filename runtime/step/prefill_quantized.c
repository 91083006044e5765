/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A chunk where pages are quantized; see the header.
 *
 * Knows nothing of quantization beyond its two kernels. The row is made exact first
 * (kvf_dequantized_row), and the chunk is appended to that: blocks that it seals beside the earlier
 * ones, the rest in the ring. Then queries go in groups that see equally many sealed blocks, as
 * many as a block has tokens, and in front of each group the next block is quantized, which leaves
 * in the row what was quantized. So attention is the one of other caches, over one page table.
 */

#include "prefill_quantized.h"

#include "chunk.h"
#include "seal.h"

/* Earlier blocks in full precision, if somebody attends to them, and those that this call seals of
 * what is in the window. */
static kvf_status make_wide(kvf_call *call, const kvf_prefill_args *args, uint32_t base,
                            const kvf_row **view)
{
    const kvf_kv_group *kv_group = call->kv_group;
    const kvf_paging *p = &kv_group->dims.paging;
    const kvf_row *row = &call->row_host[0];
    KVF_TRY(
        kvf_dequantized_row(call, kv_group, call->row, 0, args->q ? row->sealed_before : 0, view));
    for (uint32_t b = row->sealed_before; b < row->sealed && b * p->block_size < base; b++)
        KVF_TRY(kv_group->device->ops->copy(
            call->stream, kv_group->tables.scratch.blocks + b * kvf_block_bytes(p),
            kvf_row_ring_block(p, row, b), kvf_block_bytes(p)));
    return KVF_OK;
}

/* Blocks first .. end - 1, which the call seals. */
static kvf_status quantize(kvf_call *call, uint32_t first, uint32_t end)
{
    const kvf_kv_group *kv_group = call->kv_group;
    const kvf_quantize_args args = {.paging = kv_group->dims.paging,
                                    .rows = 1,
                                    .count = end - first,
                                    .first = first,
                                    .scratch = kv_group->tables.scratch.blocks,
                                    .row = call->row};
    return first < end ? KVF_LAUNCH(call, quantize, args) : KVF_OK;
}

/* Tokens first .. end - 1 of the row. */
static kvf_status attend(kvf_call *call, const kvf_prefill_args *args, uint32_t base,
                         uint32_t first, uint32_t end)
{
    const kvf_kv_group *kv_group = call->kv_group;
    const kvf_shape *s = &kv_group->dims.paging.shape;
    const size_t at = (size_t)(first - base) * kv_group->config.query_heads;
    kvf_prefill_args group = *args;
    group.tokens = end - first;
    group.q = (const char *)args->q + at * kvf_key_bytes(s);
    const kvf_shape out = kvf_out_shape(call->cache, s);
    group.out = (char *)args->out + at * kvf_value_bytes(&out);
    return kvf_chunk_attend(call, &group, first, kv_group->tables.scratch.table);
}

static kvf_status quantize_and_attend(kvf_call *call, const kvf_prefill_args *args, uint32_t base)
{
    const kvf_kv_group *kv_group = call->kv_group;
    const kvf_row *row = &call->row_host[0];
    const uint32_t end = base + args->tokens, block = kv_group->dims.paging.block_size;
    uint32_t quantized = row->sealed_before;
    for (uint32_t first = base, next; args->q && first < end; first = next) {
        /* Up to the token whose step seals one more. */
        const uint32_t sealed = kvf_sealed_blocks(kv_group, first + 1);
        next = kvf_min_u32(end, kv_group->config.local_tokens + (sealed + 1) * block - 1);
        KVF_TRY(quantize(call, quantized, sealed));
        KVF_TRY(attend(call, args, base, first, next));
        quantized = sealed;
    }
    return quantize(call, quantized, row->sealed);
}

/* Its sealed blocks, from their full precision. */
static kvf_status seal(kvf_call *call, const kvf_row *view, uint32_t base)
{
    const kvf_row *row = call->row;
    call->row = view;
    const kvf_status status = kvf_call_seal_blocks(call, call->kv_group->tables.chunk_fault, base);
    call->row = row;
    return status == KVF_OK ? kvf_call_admit(call) : status;
}

kvf_status kvf_prefill_quantized(kvf_call *call, const kvf_prefill_args *args, uint32_t base)
{
    kvf_layer *layer = call->states[0];
    const kvf_row *view;
    if (call->row_host[0].sealed_before < call->row_host[0].sealed)
        kvf_cut_spare(&layer->cut, call->row_host[0].sealed);
    KVF_TRY(kvf_call_stamp(call, NULL));
    KVF_TRY(make_wide(call, args, base, &view));
    KVF_TRY(kvf_chunk_repack(call, args, base, call->kv_group->tables.scratch.table));
    KVF_TRY(quantize_and_attend(call, args, base));
    KVF_TRY(seal(call, view, base));
    return kvf_call_point_tables(call);
}

kvf_status kvf_carry_quantized(kvf_call *call, const kvf_prefill_args *args, uint32_t base,
                               const kvf_carried *carried)
{
    const kvf_kv_group *kv_group = call->kv_group;
    const kvf_carry_args carry = {.paging = kv_group->dims.paging,
                                  .quantized = carried->blocks,
                                  .stride = carried->stride,
                                  .from = carried->from,
                                  .ids = carried->ids,
                                  .scratch = kv_group->tables.scratch.blocks,
                                  .row = call->row};
    const kvf_row *view;
    KVF_ASSERT(!args->q);
    KVF_TRY(make_wide(call, args, base, &view));
    KVF_TRY(kvf_chunk_repack(call, args, base, kv_group->tables.scratch.table));
    KVF_TRY(KVF_LAUNCH(call, carry, carry));
    KVF_TRY(seal(call, view, base));
    return kvf_call_point_tables(call);
}
