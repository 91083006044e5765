/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The weights that queries give the tokens of a tile, by their codes, the specification.
 *
 * Knows nothing of keys, nor of other tiles. Logits are finite, so nothing can spread.
 */

#include <math.h>

#include "codes.h"
#include "common/convert.h"
#include "variants.h"

/* By the codes of list `codes`. */
static float logit(const kvf_score_codes_args *a, uint32_t codes, uint32_t query, uint32_t token)
{
    static const int32_t level[4] = {-10, -3, 3, 10};
    const kvf_code_group group = kvf_score_codes_group(a, codes, token);
    const uint32_t *words = (const uint32_t *)(const void *)group.words;
    const uint16_t *scales = (const uint16_t *)(const void *)group.scales;
    const uint32_t t = token % KVF_CODE_TOKENS;
    const int8_t *q = a->q + (size_t)query * a->head_dim;
    int32_t dot = 0;
    for (uint32_t i = 0; i < a->head_dim; i += KVF_CODE_LANES) {
        const uint32_t word = words[kvf_code_word(a->head_dim, t, i / KVF_CODE_LANES)];
        for (uint32_t j = 0; j < KVF_CODE_LANES; j++)
            dot += level[word >> kvf_code_shift(j) & 3] * q[i + j];
    }
    return (float)kvf_capped(
        (double)((float)dot * kvf_fp16_to_float(scales[t]) * a->q_scale[query]), a->cap);
}

static int counts(const kvf_score_codes_args *a, uint32_t list, uint32_t token)
{
    return !(a->bits[list][token / a->block_size] >> token % a->block_size & 1);
}

static void score_codes_query(const kvf_score_codes_args *a, uint32_t codes, uint32_t query,
                              uint32_t first, uint32_t end, float *top, float *sum)
{
    const uint32_t list = query / a->group;
    uint16_t *mass = a->mass + (size_t)query * a->pages_max;
    float logits[KVF_SCORE_CODES_TOKENS]; /* of tokens that count */
    double all = 0.0;
    *top = -INFINITY;
    for (uint32_t t = first; t < end; t++)
        if (counts(a, list, t))
            *top = fmaxf(*top, logits[t - first] = logit(a, codes, query, t));
    for (uint32_t t = first; t < end; t += a->page_size) {
        double page = 0.0;
        int any = 0;
        for (uint32_t i = t; i < t + a->page_size; i++)
            if (counts(a, list, i)) {
                any = 1;
                page += exp((double)logits[i - first] - (double)*top);
            }
        all += page;
        mass[t / a->page_size] = kvf_bf16_from_float(any ? (float)page : -1.0f);
    }
    *sum = (float)all;
}

static void score_codes_tile(const kvf_score_codes_args *a, uint32_t list, uint32_t codes,
                             uint32_t tile)
{
    const uint32_t first = tile * KVF_SCORE_CODES_TOKENS, tokens = a->pages[list] * a->page_size;
    if (first >= tokens)
        return;
    const kvf_subgroup sub = kvf_subgroup_whole(a->sub, a->group);
    for (uint32_t g = sub.first; g < sub.first + sub.count; g++) {
        const uint32_t query = list * a->group + g;
        const size_t at = (size_t)query * a->tiles_max + tile;
        score_codes_query(a, codes, query, first,
                          kvf_min_u32(tokens, first + KVF_SCORE_CODES_TOKENS), a->tile_max + at,
                          a->tile_sum + at);
    }
}

void kvf_score_codes_ref(const void *args, uint32_t task)
{
    const kvf_score_codes_args *a = args;
    const uint32_t tiles = kvf_score_codes_tiles(a), parts = kvf_div_ceil_u32(a->tiles_max, tiles);
    const uint32_t l = task / parts, first = task % parts * tiles;
    for (uint32_t i = first; i < kvf_min_u32(a->tiles_max, first + tiles); i++)
        for (uint32_t k = 0; k < kvf_score_codes_sharers(a, l, i); k++)
            score_codes_tile(a, kvf_score_codes_list(a, l + k * a->row_lists),
                             kvf_score_codes_list(a, l), i);
}
