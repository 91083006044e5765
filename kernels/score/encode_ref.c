/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Codes of keys, the specification; codes.h defines them.
 *
 * Knows nothing of where code groups live. Every key gets a code: one that is not finite, or zero,
 * gets the scale 0, so that it draws no attention and disturbs no other.
 */

#include "code_key.h"
#include "variants.h"

void kvf_encode_ref(const void *args, uint32_t task)
{
    const kvf_encode_args *a = args;
    const kvf_digest_job *job = &a->jobs[task];
    const uint32_t head_dim = a->shape.head_dim;
    if (!job->page)
        return;
    for (uint32_t t = 0; t < job->count; t++) {
        const void *key = kvf_page_key(&a->shape, job->page, t);
        char *group = (char *)job->digest + t / KVF_CODE_TOKENS * kvf_code_bytes(head_dim);
        uint32_t *words =
            (uint32_t *)(void *)group + kvf_code_word(head_dim, t % KVF_CODE_TOKENS, 0);
        uint16_t *scales = (uint16_t *)(void *)(group + kvf_code_scales(head_dim));
        float x[KVF_HEAD_DIM_MAX];
        for (uint32_t i = 0; i < head_dim; i++)
            x[i] = kvf_element_get(key, a->shape.dtype, i);
        scales[t % KVF_CODE_TOKENS] = kvf_code_key(words, x, head_dim);
    }
}
