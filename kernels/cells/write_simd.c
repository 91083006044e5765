/* SPDX-License-Identifier: Apache-2.0 */

/*
 * New tokens into their cells, the codes of 16 keys side by side: of any tokens and heads of a
 * task. Bound: arithmetic (code_keys_simd.h); the bytes of keys and values are copied.
 *
 * Knows nothing of rows. Exactness: the bits of write_ref.c.
 */

#include "score/code_keys_simd.h"
#include "variants.h"
#include "write_token.h"

/* Keys whose codes are made together. */
typedef struct batch {
    uint32_t count;
    const void *keys[KVF_CODE_LANES];
    uint32_t *words[KVF_CODE_LANES];
    uint16_t *scales[KVF_CODE_LANES];
} batch;

static const float zeros[KVF_HEAD_DIM_MAX]; /* a key of any type */

static void encode_batch(const kvf_write_args *a, batch *b)
{
    const uint32_t head_dim = a->cells->paging.shape.head_dim;
    uint32_t words[KVF_CODE_WORDS * KVF_CODE_LANES];
    uint16_t scales[KVF_CODE_LANES];
    code_tile tile;
    for (uint32_t l = b->count; l < KVF_CODE_LANES; l++)
        b->keys[l] = zeros;
    code_tile_fill(&tile, b->keys, a->dtype, head_dim);
    code_tile_encode(words, scales, &tile, head_dim);
    for (uint32_t l = 0; l < b->count; l++) {
        for (uint32_t w = 0; w < head_dim / KVF_CODE_LANES; w++)
            b->words[l][w * KVF_CODE_LANES] = words[w * KVF_CODE_LANES + l];
        *b->scales[l] = scales[l];
    }
    b->count = 0;
}

void KVF_SIMD_NAME(write)(const void *args, uint32_t task)
{
    const kvf_write_args *a = args;
    batch b = {.count = 0};
    for (uint32_t i = task * KVF_WRITE_TOKENS; i < kvf_write_end(a, task); i++) {
        kvf_token_place place;
        if (!kvf_write_token(a, i, &place))
            continue;
        for (uint32_t h = 0; h < a->cells->paging.kv_heads; h++) {
            b.keys[b.count] = place.is_odd ? zeros : kvf_write_key(a, i, h);
            b.words[b.count] = kvf_write_words(a, &place, h);
            b.scales[b.count] = kvf_write_scale(a, &place, h);
            if (++b.count == KVF_CODE_LANES)
                encode_batch(a, &b);
        }
    }
    if (b.count)
        encode_batch(a, &b);
}
