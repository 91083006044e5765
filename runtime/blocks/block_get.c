/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Part of block_store.h. Tokens read back, by the host: all of them are in the pool, whatever
 * regions and slots have copies of.
 *
 * Knows nothing of rows. Which tokens are not finite only the device knows: it tells after the work
 * of the stream, whose end is waited for.
 */

#include "block_store.h"

#include <math.h>

#include "cache.h"
#include "quantized.h"

/* The end of what was enqueued, and the bits of the blocks that the call reads. */
static kvf_status settle(kvf_blocks *blocks, const kvf_blocks_get_args *args, kvf_stream *stream)
{
    const kvf_device_ops *ops = blocks->cache->device->ops;
    const kvf_physical_blocks *c = &blocks->physical;
    uint32_t first = UINT32_MAX, end = 0;
    for (uint32_t i = 0; i < args->tokens; i++) {
        if (args->slots[i] < 0)
            continue;
        const uint32_t block = (uint32_t)(args->slots[i] / c->paging.block_size);
        first = kvf_min_u32(first, block);
        end = kvf_max_u32(end, block + 1);
    }
    if (first < end)
        KVF_TRY(ops->copy(stream, blocks->nonfinite + first,
                          kvf_physical_nonfinite(c, args->layer, first),
                          (end - first) * sizeof *blocks->nonfinite));
    return ops->stream_wait(stream);
}

/* `count` numbers of token `index`, from `at` on; NULL: NaN. */
static void give(const kvf_blocks_get_args *args, kvf_dtype dtype, void *all, size_t at,
                 const void *from, uint32_t count)
{
    const kvf_dtype wanted = args->fp32 ? KVF_FP32 : dtype;
    char *to = (char *)all + at * kvf_dtype_bytes(wanted);
    if (!from)
        for (uint32_t i = 0; i < count; i++)
            kvf_element_set(to, wanted, i, NAN);
    else if (wanted == dtype)
        memcpy(to, from, count * kvf_dtype_bytes(dtype));
    else
        for (uint32_t i = 0; i < count; i++)
            kvf_element_set(to, wanted, i, kvf_element_get(from, dtype, i));
}

static void give_token(const kvf_blocks *blocks, const kvf_blocks_get_args *args, uint32_t index)
{
    const kvf_physical_blocks *c = &blocks->physical;
    const kvf_paging *p = &c->paging;
    const kvf_shape *s = &p->shape;
    const uint32_t keys = s->head_dim, values = kvf_value_dim(s);
    const size_t k_stride = args->k_stride ? args->k_stride : (size_t)p->kv_heads * keys;
    const size_t v_stride = args->v_stride ? args->v_stride : (size_t)p->kv_heads * values;
    const uint32_t block = (uint32_t)(args->slots[index] / p->block_size);
    const uint32_t token = (uint32_t)(args->slots[index] % p->block_size);
    const uint32_t number = args->layer * (uint32_t)kvf_physical_count(c) + block;
    const bool is_finite = !(blocks->nonfinite[block] >> token & 1);
    const char *page =
        (const char *)kvf_page_pool_host(&blocks->cache->kv_groups[0].pool, (kvf_block){number}) +
        token / s->page_size * kvf_stored_page_bytes(s);
    for (uint32_t h = 0; h < p->kv_heads; h++, page += kvf_stored_run_bytes(p)) {
        _Alignas(float) char exact[2 * KVF_HEAD_DIM_MAX * sizeof(float)];
        float x[KVF_HEAD_DIM_MAX];
        const char *key = exact;
        if (s->pages == KVF_PAGES_NATIVE)
            key = kvf_page_key(s, page, token % s->page_size);
        else
            kvf_dequantize_token(s, page, token % s->page_size, exact, x);
        if (args->k)
            give(args, s->dtype, args->k, index * k_stride + (size_t)h * keys,
                 is_finite ? key : NULL, keys);
        if (args->v)
            give(args, s->dtype, args->v, index * v_stride + (size_t)h * values,
                 is_finite ? key + kvf_key_bytes(s) : NULL, values);
    }
}

kvf_status kvf_block_read(kvf_blocks *blocks, const kvf_blocks_get_args *args, kvf_stream *stream)
{
    KVF_TRY(settle(blocks, args, stream));
    for (uint32_t i = 0; i < args->tokens; i++)
        if (args->slots[i] >= 0)
            give_token(blocks, args, i);
    return KVF_OK;
}
