/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Masses of query heads into scores of pages, the specification.
 *
 * Knows nothing of codes. Damaged numbers are made harmless one by one, so that none of them
 * changes what other pages get, beyond its own share of a sum.
 */

#include <math.h>

#include "common/convert.h"
#include "variants.h"

/* NaN becomes `least`. */
static double tame(float x, float least, float most)
{
    return (double)(x >= least ? fminf(x, most) : least);
}

static double tame_top(float top)
{
    return tame(top, -KVF_REDUCE_TOP_MAX, KVF_REDUCE_TOP_MAX);
}

typedef struct head_sum {
    double top; /* M */
    double sum; /* S */
} head_sum;

static head_sum sum_of(const kvf_reduce_mass_args *a, size_t head, uint32_t tiles)
{
    const float *top = a->tile_max + head * a->tiles_max, *sum = a->tile_sum + head * a->tiles_max;
    head_sum r = {.top = tame_top(-INFINITY)};
    for (uint32_t i = 0; i < tiles; i++)
        r.top = fmax(r.top, tame_top(top[i]));
    for (uint32_t i = 0; i < tiles; i++)
        r.sum += tame(sum[i], 0.0f, KVF_REDUCE_MASS_MAX) * exp(tame_top(top[i]) - r.top);
    return r;
}

static float score(const kvf_reduce_mass_args *a, const head_sum *heads, uint32_t list,
                   uint32_t page)
{
    const uint32_t tile = page / kvf_tile_pages(a->page_size);
    float sum = 0.0f, best = -INFINITY;
    int any = 0;
    for (uint32_t g = 0; g < a->group; g++) {
        const size_t head = (size_t)list * a->group + g;
        const float raw = kvf_bf16_to_float(a->mass[head * a->pages_max + page]);
        const double top = tame_top(a->tile_max[head * a->tiles_max + tile]);
        const double mass = tame(raw, 0.0f, KVF_REDUCE_MASS_MAX);
        double one = top + log(fmax(mass, 0x1p-126));
        if (a->kind == KVF_GROUP_MEAN_SOFTMAX)
            one =
                heads[g].sum < 0.5 ? 0.0 : mass * exp(top - heads[g].top) / heads[g].sum / a->group;
        any |= raw >= 0.0f;
        best = fmaxf(best, (float)one);
        sum += (float)one;
    }
    return !any ? -INFINITY : a->kind == KVF_GROUP_MAX ? best : sum;
}

void kvf_reduce_mass_ref(const void *args, uint32_t task)
{
    const kvf_reduce_mass_args *a = args;
    const uint32_t parts = kvf_div_ceil_u32(a->pages_max, KVF_REDUCE_PAGES);
    const uint32_t list = task / parts, pages = a->pages[list];
    const uint32_t first = task % parts * KVF_REDUCE_PAGES;
    head_sum heads[KVF_GROUP_MAX_HEADS];
    if (first >= pages)
        return;
    for (uint32_t g = 0; g < a->group; g++)
        heads[g] = sum_of(a, (size_t)list * a->group + g, kvf_tiles(pages, a->page_size));
    for (uint32_t p = first; p < kvf_min_u32(pages, first + KVF_REDUCE_PAGES); p++) {
        const uint64_t bits = a->bits[list][p / (a->block_size / a->page_size)];
        a->out[(size_t)list * a->pages_max + p] =
            kvf_block_counts(bits, a->block_size) ? score(a, heads, list, p) : -INFINITY;
    }
}
