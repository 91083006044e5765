/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_BLOCKS_WRITE_TOKEN_H
#define KVF_KERNELS_BLOCKS_WRITE_TOKEN_H

/*
 * A new token into its physical block, all but its codes: for the host forms of `write`. Where
 * pages are quantized, who quantizes does it.
 *
 * Knows nothing of rows.
 */

#include <string.h>

#include "blocks_args.h"
#include "element.h"
#include "score/codes.h"

/* Where a token is, once it is there. */
typedef struct kvf_token_place {
    uint32_t block, token;
    int is_nonfinite; /* it is zeros, and so are its codes */
} kvf_token_place;

static inline const void *kvf_write_key(const kvf_write_args *a, uint32_t index, uint32_t head)
{
    const size_t element = kvf_dtype_bytes(a->shape.dtype);
    const size_t at = index * a->k_stride + (size_t)head * a->blocks->paging.shape.head_dim;
    return kvf_offset(a->k, at * element);
}

static inline const void *kvf_write_value(const kvf_write_args *a, uint32_t index, uint32_t head)
{
    const size_t element = kvf_dtype_bytes(a->shape.dtype);
    const size_t at = index * a->v_stride + (size_t)head * kvf_value_dim(&a->blocks->paging.shape);
    return kvf_offset(a->v, at * element);
}

static inline void kvf_note_nonfinite(uint64_t *nonfinite, uint32_t token, int is_nonfinite)
{
    const uint64_t bit = UINT64_C(1) << token;
    if (is_nonfinite)
        __atomic_fetch_or(nonfinite, bit, __ATOMIC_RELAXED);
    else
        __atomic_fetch_and(nonfinite, ~bit, __ATOMIC_RELAXED);
}

/* Key and value of a head in full precision, one after the other. */
static inline void kvf_write_exact(const kvf_write_args *a, uint32_t index, uint32_t head,
                                   const kvf_token_place *place, char *to)
{
    const kvf_shape *s = &a->blocks->paging.shape;
    if (place->is_nonfinite) {
        memset(to, 0, kvf_token_bytes(s));
        return;
    }
    memcpy(to, kvf_write_key(a, index, head), kvf_row_bytes(s));
    memcpy(to + kvf_row_bytes(s), kvf_write_value(a, index, head), kvf_value_bytes(s));
}

/* The page that a token of a head goes to. */
static inline char *kvf_write_page(const kvf_write_args *a, const kvf_token_place *at,
                                   uint32_t head)
{
    return kvf_physical_page(a->blocks, a->layer, at->block, head, at->token);
}

/* Returns 0 if token `index` of the call is left out. */
static inline int kvf_write_token(const kvf_write_args *a, uint32_t index, kvf_token_place *place)
{
    const kvf_physical_blocks *c = a->blocks;
    const kvf_paging *p = &c->paging;
    const size_t bytes = kvf_row_bytes(&p->shape), value_bytes = kvf_value_bytes(&p->shape);
    const int64_t slot = a->slots[index];
    if (slot < 0)
        return 0;
    if ((uint64_t)slot >= kvf_physical_count(c) * p->block_size) {
        __atomic_fetch_add(&c->counters[a->layer].bad_slots, 1, __ATOMIC_RELAXED);
        return 0;
    }
    const uint32_t block = (uint32_t)((uint64_t)slot / p->block_size);
    const uint32_t token = (uint32_t)((uint64_t)slot % p->block_size);
    const void *k = kvf_write_key(a, index, 0), *v = kvf_write_value(a, index, 0);
    const int is_nonfinite = kvf_has_no_finite(k, p->kv_heads * bytes, p->shape.dtype) ||
                             kvf_has_no_finite(v, p->kv_heads * value_bytes, p->shape.dtype);
    *place = (kvf_token_place){.block = block, .token = token, .is_nonfinite = is_nonfinite};
    for (uint32_t h = 0; p->shape.pages == KVF_PAGES_NATIVE && h < p->kv_heads; h++)
        kvf_write_exact(a, index, h, place,
                        kvf_write_page(a, place, h) +
                            token % p->shape.page_size * kvf_token_bytes(&p->shape));
    kvf_note_nonfinite(kvf_physical_nonfinite(c, a->layer, block), token, is_nonfinite);
    kvf_physical_writes(c, a->layer, block)[token] += c->ignores_writes != 1;
    if (p->segments_max && !c->ignores_writes)
        __atomic_store_n(kvf_physical_is_centroid(c, a->layer, block), 0, __ATOMIC_RELAXED);
    __atomic_fetch_add(&c->counters[a->layer].tokens_put, 1, __ATOMIC_RELAXED);
    return 1;
}

/* The first of a token's words of a head; they are KVF_CODE_LANES apart. */
static inline uint32_t *kvf_write_words(const kvf_write_args *a, const kvf_token_place *at,
                                        uint32_t head)
{
    const kvf_paging *p = &a->blocks->paging;
    const uint32_t head_dim = p->shape.head_dim;
    char *group =
        kvf_physical_words(&a->codes, head_dim, p->block_size, at->block, head, at->token);
    return (uint32_t *)(void *)group + kvf_code_word(head_dim, at->token % KVF_CODE_TOKENS, 0);
}

static inline uint16_t *kvf_write_scale(const kvf_write_args *a, const kvf_token_place *at,
                                        uint32_t head)
{
    return kvf_physical_scales(&a->codes, a->blocks->paging.block_size, at->block, head) +
           at->token;
}

/* By one task. */
static inline void kvf_write_count(const kvf_write_args *a, uint32_t task)
{
    if (task == 0)
        ++*a->blocks->clock;
}

/* The token after the last one of a task. */
static inline uint32_t kvf_write_end(const kvf_write_args *a, uint32_t task)
{
    return kvf_min_u32(a->tokens, (task + 1) * KVF_WRITE_TOKENS);
}

#endif
