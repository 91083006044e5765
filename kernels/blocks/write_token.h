/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_BLOCKS_WRITE_TOKEN_H
#define KVF_KERNELS_BLOCKS_WRITE_TOKEN_H

/*
 * A new token into its physical block, all but its codes: for the host forms of `write`. Where
 * pages are quantized, who quantizes does it.
 *
 * Knows nothing of rows.
 */

#include <math.h>
#include <string.h>

#include "blocks_args.h"
#include "element.h"
#include "score/codes.h"

/* Where a token is, once it is there. */
typedef struct kvf_token_place {
    uint32_t block, token;
    int is_nonfinite; /* it is zeros, and so are its codes */
} kvf_token_place;

/* Bytes of a number of the caller's. */
static inline size_t kvf_write_element(const kvf_write_args *a)
{
    return a->is_wide ? sizeof(float) : kvf_dtype_bytes(a->shape.dtype);
}

static inline const void *kvf_write_key(const kvf_write_args *a, uint32_t index, uint32_t head)
{
    const size_t at = index * a->k_stride + (size_t)head * a->blocks->paging.shape.head_dim;
    return kvf_offset(a->k, at * kvf_write_element(a));
}

static inline const void *kvf_write_value(const kvf_write_args *a, uint32_t index, uint32_t head)
{
    const size_t at = index * a->v_stride + (size_t)head * kvf_value_dim(&a->blocks->paging.shape);
    return kvf_offset(a->v, at * kvf_write_element(a));
}

/* `count` numbers of the caller's as the element type has them. A loop without branches for bf16,
 * so that it is vectorised. */
static inline void kvf_write_vector(const kvf_write_args *a, void *to, const void *from,
                                    uint32_t count)
{
    const float *x = from;
    uint16_t *rounded = to;
    if (!a->is_wide)
        memcpy(to, from, count * kvf_dtype_bytes(a->shape.dtype));
    else if (a->shape.dtype == KVF_BF16)
        for (uint32_t i = 0; i < count; i++)
            rounded[i] = kvf_bf16_from_float(x[i]);
    else
        for (uint32_t i = 0; i < count; i++)
            rounded[i] = kvf_fp16_from_float(x[i]);
}

/* Whether all of `count` numbers of the caller's are finite, once they are rounded. */
static inline int kvf_write_is_finite(const kvf_write_args *a, const void *x, size_t count)
{
    const kvf_dtype dtype = a->shape.dtype;
    const float most = kvf_rounds_below(dtype);
    uint32_t bad = 0;
    if (!a->is_wide)
        return !kvf_has_no_finite(x, count * kvf_dtype_bytes(dtype), dtype);
    for (size_t i = 0; i < count; i++)
        bad |= !(fabsf(((const float *)x)[i]) < most);
    return !bad;
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
    kvf_write_vector(a, to, kvf_write_key(a, index, head), s->head_dim);
    kvf_write_vector(a, to + kvf_key_bytes(s), kvf_write_value(a, index, head), kvf_value_dim(s));
}

/* The page that a token of a head goes to. */
static inline char *kvf_write_page(const kvf_write_args *a, const kvf_token_place *at,
                                   uint32_t head)
{
    return kvf_physical_page(a->blocks, a->layer, at->block, head, at->token);
}

/* The key that a code is of, where pages are exact: it was written. */
static inline const void *kvf_write_coded(const kvf_write_args *a, uint32_t index, uint32_t head,
                                          const kvf_token_place *at)
{
    const kvf_shape *s = &a->blocks->paging.shape;
    return a->is_wide ? kvf_page_key(s, kvf_write_page(a, at, head), at->token % s->page_size)
                      : kvf_write_key(a, index, head);
}

/* Returns 0 if token `index` of the call is left out. */
static inline int kvf_write_token(const kvf_write_args *a, uint32_t index, kvf_token_place *place)
{
    const kvf_physical_blocks *c = a->blocks;
    const kvf_paging *p = &c->paging;
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
    const size_t keys = (size_t)p->kv_heads * p->shape.head_dim;
    const size_t values = (size_t)p->kv_heads * kvf_value_dim(&p->shape);
    const int is_nonfinite = !kvf_write_is_finite(a, k, keys) || !kvf_write_is_finite(a, v, values);
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
