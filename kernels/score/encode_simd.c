/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Codes of keys, 16 tokens side by side. Bound: arithmetic (code_keys_simd.h).
 *
 * Knows nothing of where code groups live. Exactness: the bits of encode_ref.c.
 */

#include "code_keys_simd.h"
#include "variants.h"

void KVF_SIMD_NAME(encode)(const void *args, uint32_t task)
{
    const kvf_encode_args *a = args;
    const kvf_digest_job *job = &a->jobs[task];
    const uint32_t head_dim = a->shape.head_dim;
    if (!job->page)
        return;
    for (uint32_t t = 0; t < job->count; t += KVF_CODE_LANES) {
        char *group = (char *)job->digest + t / KVF_CODE_TOKENS * kvf_code_bytes(head_dim);
        const uint32_t first = t % KVF_CODE_TOKENS;
        uint32_t *words = (uint32_t *)(void *)group + kvf_code_word(head_dim, first, 0);
        uint16_t *scales = (uint16_t *)(void *)(group + kvf_code_scales(head_dim)) + first;
        const void *vectors[KVF_CODE_LANES];
        code_tile tile;
        for (uint32_t i = 0; i < KVF_CODE_LANES; i++)
            vectors[i] = kvf_page_key(&a->shape, job->page, t + i);
        code_tile_fill(&tile, vectors, a->shape.dtype, head_dim);
        code_tile_encode(words, scales, &tile, head_dim);
    }
}
