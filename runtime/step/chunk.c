/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Keys and values into blocks of a table, and queries over them: the same in every way of a chunk.
 *
 * Knows a table of blocks, and not whose they are.
 */

#include "chunk.h"

kvf_status kvf_chunk_repack(kvf_call *call, const kvf_prefill_args *args, uint32_t base,
                            void *const *blocks)
{
    const kvf_kv_group *kv_group = call->kv_group;
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
    KVF_TRY(kv_group->device->ops->fill(call->stream, fault, 0xff, sizeof *fault));
    return KVF_LAUNCH(call, repack, a);
}

kvf_status kvf_chunk_attend(kvf_call *call, const kvf_prefill_args *args, uint32_t base,
                            void *const *blocks)
{
    const kvf_paging *p = &call->kv_group->dims.paging;
    const kvf_prefill_kernel_args a = {.shape = kvf_run_shape(p),
                                       .kv_heads = p->kv_heads,
                                       .group = p->group,
                                       .tokens = args->tokens,
                                       .base = base,
                                       .scale = kvf_call_attention(call)->scale,
                                       .cap = kvf_call_attention(call)->cap,
                                       .q_dtype = p->shape.dtype,
                                       .out_dtype = kvf_query_dtype(&call->cache->config),
                                       .q = args->q,
                                       .blocks = (const void *const *)blocks,
                                       .out = args->out,
                                       .sinks = kvf_call_attention(call)->sinks};
    return args->q ? KVF_LAUNCH(call, prefill, a) : KVF_OK;
}
