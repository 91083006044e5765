/* SPDX-License-Identifier: Apache-2.0 */

/*
 * New tokens into their physical blocks, 16 keys side by side: of any tokens and heads of a task.
 * Bound: arithmetic, of codes (code_keys_simd.h) and, where pages are quantized, of quantization
 * (quantized_simd.h); else the bytes of keys and values are copied.
 *
 * Tokens of a batch are quantized as a page of their own, whose parts are then laid in their
 * physical blocks.
 *
 * Knows nothing of rows. Exactness: the bits of write_ref.c.
 */

#include "move/quantized_simd.h"
#include "score/code_keys_simd.h"
#include "variants.h"
#include "write_token.h"

/* A page of as many tokens as a batch has, of any head; and their full precision. */
#define QUANTIZED_BYTES (KVF_CODE_LANES * (2 * KVF_HEAD_DIM_MAX + 64) + KVF_QUANTIZED_ALIGN)
#define EXACT_BYTES     (KVF_CODE_LANES * 2 * KVF_HEAD_DIM_MAX * sizeof(float))

/* Keys whose codes are made together. */
typedef struct batch {
    uint32_t count;
    const void *keys[KVF_CODE_LANES];
    uint32_t *words[KVF_CODE_LANES];
    uint16_t *scales[KVF_CODE_LANES];
    /* where pages are quantized */
    char *pages[KVF_CODE_LANES];
    uint32_t tokens[KVF_CODE_LANES]; /* of their pages */
    _Alignas(64) char exact[EXACT_BYTES];
} batch;

static const float zeros[KVF_HEAD_DIM_MAX]; /* a key of any type */

static void encode_batch(const kvf_write_args *a, batch *b)
{
    const uint32_t head_dim = a->blocks->paging.shape.head_dim;
    uint32_t words[KVF_HEAD_DIM_MAX];
    uint16_t scales[KVF_CODE_LANES];
    code_tile tile;
    for (uint32_t l = b->count; l < KVF_CODE_LANES; l++)
        b->keys[l] = zeros;
    code_tile_fill(&tile, b->keys, a->shape.dtype, head_dim);
    code_tile_encode(words, scales, &tile, head_dim);
    for (uint32_t l = 0; l < b->count; l++) {
        for (uint32_t w = 0; w < head_dim / KVF_CODE_LANES; w++)
            b->words[l][w * KVF_CODE_LANES] = words[w * KVF_CODE_LANES + l];
        *b->scales[l] = scales[l];
    }
}

/* Keys of the batch become what comes back of them. */
static void quantize_batch(const kvf_shape *s, batch *b)
{
    _Alignas(64) char page[QUANTIZED_BYTES];
    kvf_shape of_batch = *s;
    of_batch.page_size = KVF_CODE_LANES;
    const kvf_quantized_run run = {.exact = b->exact, .home = page};
    code_tile tile;
    token_vectors vectors;
    quantize_keys(&of_batch, &run, 0, b->count, &tile, &vectors);
    for (uint32_t l = 0; l < b->count; l++)
        quantize_value(&of_batch, &run, l, vectors.at[l]);
    dequantize_keys(&of_batch, &run, 0, b->count, &tile, &vectors);
    for (uint32_t l = 0; l < b->count; l++) {
        kvf_quantized_move(s, b->pages[l], b->tokens[l], &of_batch, page, l);
        store_vector(s, b->exact + l * kvf_token_bytes(s), vectors.at[l], s->head_dim);
    }
}

static void end_batch(const kvf_write_args *a, batch *b)
{
    const kvf_shape *s = &a->blocks->paging.shape;
    if (s->pages != KVF_PAGES_NATIVE)
        quantize_batch(s, b);
    encode_batch(a, b);
    b->count = 0;
}

/* A token of a head to the next lane. */
static void add(const kvf_write_args *a, batch *b, uint32_t index, const kvf_token_place *place,
                uint32_t head)
{
    const kvf_shape *s = &a->blocks->paging.shape;
    const uint32_t l = b->count++;
    b->words[l] = kvf_write_words(a, place, head);
    b->scales[l] = kvf_write_scale(a, place, head);
    if (s->pages == KVF_PAGES_NATIVE) {
        b->keys[l] = place->is_nonfinite ? zeros : kvf_write_coded(a, index, head, place);
        return;
    }
    char *exact = b->exact + l * kvf_token_bytes(s);
    kvf_write_exact(a, index, head, place, exact);
    b->keys[l] = exact;
    b->pages[l] = kvf_write_page(a, place, head);
    b->tokens[l] = place->token % s->page_size;
}

void KVF_SIMD_NAME(write)(const void *args, uint32_t task)
{
    const kvf_write_args *a = args;
    batch b;
    b.count = 0;
    kvf_write_count(a, task);
    for (uint32_t i = task * KVF_WRITE_TOKENS; i < kvf_write_end(a, task); i++) {
        kvf_token_place place;
        if (!kvf_write_token(a, i, &place))
            continue;
        for (uint32_t h = 0; h < a->blocks->paging.kv_heads; h++) {
            add(a, &b, i, &place, h);
            if (b.count == KVF_CODE_LANES)
                end_batch(a, &b);
        }
    }
    if (b.count)
        end_batch(a, &b);
}
