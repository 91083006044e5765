/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Masses of query heads into scores of pages, vectorised. Bound: reading the masses once.
 *
 * Knows nothing of codes. Every task finds the sums of its heads anew, from eight bytes per tile,
 * and damaged numbers are made harmless as in reduce_mass_ref.c. Exactness: fp32 sums, exponentials
 * to 3e-7, logarithms to 2e-7.
 */

#include <math.h>

#include "common/simd.h"
#include "variants.h"

/* min and max return their second operand for NaN. */
KVF_ALWAYS_INLINE vf tame(vf x, float least, float most)
{
    return vf_min(vf_max(x, vf_set(least)), vf_set(most));
}

KVF_ALWAYS_INLINE vf tame_top(vf x)
{
    return tame(x, -KVF_REDUCE_TOP_MAX, KVF_REDUCE_TOP_MAX);
}

/* Up to VF_LANES tops or sums, padded with -infinity, which is below all of them. */
KVF_ALWAYS_INLINE vf load_tiles(const float *from, uint32_t left)
{
    float lane[VF_LANES];
    if (left >= VF_LANES)
        return vf_load(from);
    for (uint32_t i = 0; i < VF_LANES; i++)
        lane[i] = i < left ? from[i] : -INFINITY;
    return vf_load(lane);
}

typedef struct heads {
    float top[KVF_GROUP_MAX_HEADS];   /* M */
    float share[KVF_GROUP_MAX_HEADS]; /* 1 / (S * group) */
} heads;

static void find_head(const float *top, const float *sum, uint32_t tiles, float *best, float *all)
{
    vf most = tame_top(vf_set(-INFINITY)), total = vf_zero();
    for (uint32_t i = 0; i < tiles; i += VF_LANES)
        most = vf_max(tame_top(load_tiles(top + i, tiles - i)), most);
    *best = vf_largest(most);
    const vf base = vf_set(*best), unit = vf_set(KVF_LOG2E);
    for (uint32_t i = 0; i < tiles; i += VF_LANES) {
        const vf less = vf_sub(tame_top(load_tiles(top + i, tiles - i)), base);
        const vf part = tame(load_tiles(sum + i, tiles - i), 0.0f, KVF_REDUCE_MASS_MAX);
        total = vf_add(total, vf_mul(part, vf_exp2(vf_mul(less, unit))));
    }
    *all = 0.0f;
    for (uint32_t i = 0; i < VF_LANES; i++)
        *all += total[i];
}

static void find_heads(const kvf_reduce_mass_args *a, uint32_t list, heads *x)
{
    const uint32_t tiles = kvf_tiles(a->pages[list], a->page_size);
    for (uint32_t g = 0; g < a->group; g++) {
        const size_t at = ((size_t)list * a->group + g) * a->tiles_max;
        float all;
        find_head(a->tile_max + at, a->tile_sum + at, tiles, &x->top[g], &all);
        x->share[g] = all < 0.5f ? 0.0f : 1.0f / (all * (float)a->group);
    }
    for (uint32_t g = a->group; g % VF_LANES; g++)
        x->top[g] = x->share[g] = 0.0f;
}

/* Per head of one tile: the factor of its masses, or what is added to their logarithms. */
static void find_factors(const kvf_reduce_mass_args *a, uint32_t list, uint32_t tile,
                         const heads *x, float factor[KVF_GROUP_MAX_HEADS])
{
    float top[KVF_GROUP_MAX_HEADS];
    for (uint32_t g = 0; g < a->group; g++)
        top[g] = a->tile_max[((size_t)list * a->group + g) * a->tiles_max + tile];
    for (uint32_t g = a->group; g % VF_LANES; g++)
        top[g] = 0.0f;
    for (uint32_t g = 0; g < a->group; g += VF_LANES) {
        vf y = tame_top(vf_load(top + g));
        if (a->kind == KVF_GROUP_MEAN_SOFTMAX) {
            const vf less = vf_sub(y, vf_load(x->top + g));
            y = vf_mul(vf_exp2(vf_mul(less, vf_set(KVF_LOG2E))), vf_load(x->share + g));
        }
        vf_store(factor + g, y);
    }
}

/* ln x for normal x: x = 2^n m with m within sqrt(1/2) .. sqrt(2), and ln m by its odd series in (m
 * - 1) / (m + 1). */
KVF_ALWAYS_INLINE vf log_of(vf x)
{
    const vi n = ((vi)x - 0x3f3504f3) >> 23;
    const vf m = (vf)((vi)x - (n << 23)), one = vf_set(1.0f);
    const vf s = vf_sub(m, one) / vf_add(m, one), s2 = vf_mul(s, s);
    vf p = vf_fma(s2, vf_set(2.0f / 7.0f), vf_set(2.0f / 5.0f));
    p = vf_fma(p, s2, vf_set(2.0f / 3.0f));
    p = vf_fma(p, s2, vf_set(2.0f));
    return vf_fma(__builtin_convertvector(n, vf), vf_set(KVF_LN2), vf_mul(p, s));
}

/* Scores of VF_LANES pages; heads lie `stride` apart. */
KVF_ALWAYS_INLINE vf reduce_mass_pages(const uint16_t *mass, size_t stride, uint32_t group,
                                       const float *factor, const kvf_group_reduce kind)
{
    const float start = kind == KVF_GROUP_MAX ? -INFINITY : 0.0f;
    vf best = vf_set(-1.0f), out = vf_set(start);
    for (uint32_t g = 0; g < group; g++) {
        const vf raw = vf_load_bf16(mass + g * stride);
        const vf share = vf_set(factor[g]);
        best = vf_max(raw, best);
        if (kind == KVF_GROUP_MEAN_SOFTMAX) {
            out = vf_fma(tame(raw, 0.0f, KVF_REDUCE_MASS_MAX), share, out);
            continue;
        }
        const vf score = vf_add(share, log_of(tame(raw, 0x1p-126f, KVF_REDUCE_MASS_MAX)));
        out = kind == KVF_GROUP_MAX ? vf_max(score, out) : vf_add(out, score);
    }
    return (vf)vu_pick((vu)(best >= vf_zero()), (vu)out, (vu)vf_set(-INFINITY));
}

/* `count` pages of one tile; what a whole vector lacks is read and written aside. */
KVF_ALWAYS_INLINE void reduce_mass_tile(const uint16_t *mass, size_t stride, uint32_t group,
                                        const float *factor, uint32_t count, float *out,
                                        const kvf_group_reduce kind)
{
    uint16_t rest[KVF_GROUP_MAX_HEADS * VF_LANES];
    float lane[VF_LANES];
    uint32_t i = 0;
    for (; i + VF_LANES <= count; i += VF_LANES)
        vf_store(out + i, reduce_mass_pages(mass + i, stride, group, factor, kind));
    if (i == count)
        return;
    for (uint32_t k = 0; k < group * VF_LANES; k++) {
        const uint32_t page = kvf_min_u32(i + k % VF_LANES, count - 1);
        rest[k] = mass[k / VF_LANES * stride + page];
    }
    vf_store(lane, reduce_mass_pages(rest, VF_LANES, group, factor, kind));
    memcpy(out + i, lane, (count - i) * sizeof *out);
}

/* Whether blocks have a token that counts, all of them; nearly always so in hot heads. */
KVF_ALWAYS_INLINE bool are_left(const uint64_t *bits, uint32_t blocks, uint32_t block_size)
{
    const uint64_t all = UINT64_MAX >> (64 - block_size);
    uint64_t out = 0;
    for (uint32_t b = 0; b < blocks; b++)
        out |= -(uint64_t)((bits[b] & all) == all);
    return !out;
}

/* `count` pages of one tile: those of blocks that count, in runs, and -infinity. */
KVF_ALWAYS_INLINE void reduce_mass_left(const kvf_reduce_mass_args *a, const uint64_t *bits,
                                        const uint16_t *mass, const float *factor, uint32_t count,
                                        float *out, const kvf_group_reduce kind)
{
    const uint32_t per = a->block_size / a->page_size, blocks = kvf_div_ceil_u32(count, per);
    if (are_left(bits, blocks, a->block_size)) {
        reduce_mass_tile(mass, a->pages_max, a->group, factor, count, out, kind);
        return;
    }
    uint32_t left = kvf_left_blocks(bits, blocks, a->block_size);
    for (uint32_t i = 0; i < count; i++)
        out[i] = -INFINITY;
    while (left) {
        const uint32_t first = (uint32_t)__builtin_ctz(left), rest = ~(left >> first);
        const uint32_t end = first + (rest ? (uint32_t)__builtin_ctz(rest) : 32);
        const uint32_t from = first * per, to = kvf_min_u32(count, end * per);
        reduce_mass_tile(mass + from, a->pages_max, a->group, factor, to - from, out + from, kind);
        left = end < 32 ? left >> end << end : 0;
    }
}

void KVF_SIMD_NAME(reduce_mass)(const void *args, uint32_t task)
{
    const kvf_reduce_mass_args *a = args;
    const uint32_t parts = kvf_div_ceil_u32(a->pages_max, KVF_REDUCE_PAGES);
    const uint32_t list = task / parts, step = kvf_tile_pages(a->page_size);
    const uint32_t end = kvf_min_u32(a->pages[list], (task % parts + 1) * KVF_REDUCE_PAGES);
    heads x;
    if (task % parts * KVF_REDUCE_PAGES >= end)
        return;
    if (a->kind == KVF_GROUP_MEAN_SOFTMAX)
        find_heads(a, list, &x);
    for (uint32_t p = task % parts * KVF_REDUCE_PAGES; p < end; p += step) {
        const uint64_t *bits = a->bits[list] + p / (a->block_size / a->page_size);
        const uint16_t *mass = a->mass + (size_t)list * a->group * a->pages_max + p;
        float *out = a->out + (size_t)list * a->pages_max + p;
        const uint32_t count = kvf_min_u32(step, end - p);
        float factor[KVF_GROUP_MAX_HEADS];
        find_factors(a, list, p / step, &x, factor);
        if (a->kind == KVF_GROUP_MEAN_SOFTMAX)
            reduce_mass_left(a, bits, mass, factor, count, out, KVF_GROUP_MEAN_SOFTMAX);
        else if (a->kind == KVF_GROUP_MAX)
            reduce_mass_left(a, bits, mass, factor, count, out, KVF_GROUP_MAX);
        else
            reduce_mass_left(a, bits, mass, factor, count, out, KVF_GROUP_SUM);
    }
}
