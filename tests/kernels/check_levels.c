/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Two levels of digests against their references, and what they promise: super, and score with
 * chosen supers.
 *
 * super: bit for bit. Scores: as for one level, see check_moves.c. A page that is scored has the
 * same bits with one level and with two, and no page scores higher than its super, up to the
 * rounding of the two sums: each is off by at most 4 head_dim * 2^-24 of |q| (|lo| + |hi|).
 */

#include <math.h>
#include <string.h>

#include "check_support.h"
#include "common/convert.h"
#include "page_rows.h"

typedef struct levels {
    kvf_score_args score;
    kvf_super_args super;
    kvf_score_args supers; /* the second level, scored like pages */
    double tolerance;
} levels;

/* Boxes with lo <= hi; some empty, some pages long. Returns the largest |lo| + |hi|. */
static double fill_digests(check *c, uint16_t *to, uint32_t boxes, uint32_t head_dim,
                           check_data data)
{
    const uint32_t empty_in = 2 + check_below(c, 8);
    double best = 0.0;
    for (uint32_t b = 0; b < boxes; b++, to += 2 * head_dim) {
        check_fill(c, to, KVF_BF16, 2 * (size_t)head_dim, data);
        const bool is_empty = check_below(c, empty_in) == 0;
        for (uint32_t d = 0; d < head_dim; d++) {
            const uint16_t lo = to[d], hi = to[head_dim + d];
            const bool swap = kvf_bf16_to_float(lo) > kvf_bf16_to_float(hi);
            to[d] = is_empty ? 0x7f80 : swap ? hi : lo;
            to[head_dim + d] = is_empty ? 0xff80 : swap ? lo : hi;
        }
        best = fmax(best, check_norm(to, KVF_BF16, 1, head_dim) +
                              check_norm(to + head_dim, KVF_BF16, 1, head_dim));
    }
    return best;
}

static void make_lists(check *c, levels *x, uint32_t pages, check_data data)
{
    kvf_score_args *a = &x->score;
    const uint32_t head_dim = a->shape.head_dim, all = kvf_div_ceil_u32(pages, KVF_SUPER_PAGES);
    const size_t rows = (size_t)a->lists * a->group;
    void *q = check_in(c, rows * kvf_row_bytes(&a->shape));
    const void **digests = check_in(c, a->lists * sizeof *digests);
    void **supers = check_in(c, a->lists * sizeof *supers);
    uint32_t *counts = check_in(c, a->lists * sizeof *counts);
    uint32_t *super_counts = check_in(c, a->lists * sizeof *super_counts);
    double norm = 0.0;
    check_fill(c, q, a->shape.dtype, rows * head_dim, data);
    for (uint32_t l = 0; l < a->lists; l++) {
        counts[l] = l == 0 ? pages : check_below(c, pages + 1);
        super_counts[l] = kvf_div_ceil_u32(counts[l], KVF_SUPER_PAGES);
        uint16_t *boxes = check_in(c, counts[l] * kvf_digest_bytes(head_dim, a->subs));
        norm = fmax(norm, fill_digests(c, boxes, counts[l] * a->subs, head_dim, data));
        digests[l] = boxes;
        const size_t bytes = super_counts[l] * kvf_digest_bytes(head_dim, 1);
        supers[l] = check_out(c, bytes);
        check_track(c, "super", supers[l], bytes);
    }
    a->q = q;
    a->digests = digests;
    a->pages = counts;
    x->super = (kvf_super_args){.head_dim = head_dim,
                                .subs = a->subs,
                                .lists = a->lists,
                                .supers_max = all,
                                .digests = digests,
                                .pages = counts,
                                .supers = supers};
    x->supers = *a;
    x->supers.subs = 1;
    x->supers.pages_max = all + check_below(c, 3);
    x->supers.digests = (const void *const *)supers;
    x->supers.pages = super_counts;
    /* the norm of a super's corners is at most that of all its boxes' */
    x->tolerance = 4.0 * head_dim * 0x1p-24 * check_norm(q, a->shape.dtype, rows, head_dim) * norm *
                       sqrt((double)KVF_SUPER_PAGES * a->subs) +
                   0x1p-126;
}

/* Some supers of every list, ascending; `all` leaves none out. */
static void choose(check *c, levels *x, bool all)
{
    kvf_score_args *a = &x->score;
    a->chosen_max = x->super.supers_max + check_below(c, 3);
    int32_t *chosen = check_in(c, (size_t)a->lists * a->chosen_max * sizeof *chosen);
    uint32_t *count = check_in(c, a->lists * sizeof *count);
    const uint32_t one_in = 1 + check_below(c, 6);
    for (uint32_t l = 0; l < a->lists; l++) {
        count[l] = 0;
        for (uint32_t s = 0; s < x->supers.pages[l]; s++)
            if (all || check_below(c, one_in) == 0)
                chosen[(size_t)l * a->chosen_max + count[l]++] = (int32_t)s;
    }
    a->chosen = chosen;
    a->chosen_count = count;
}

static float *score(check *c, const kvf_kernels *table, kvf_score_args *a)
{
    float *out = check_out(c, (size_t)a->lists * a->group * a->pages_max * sizeof *out);
    a->scores = out;
    CHECK_RUN(c, table, score, a, kvf_score_tasks(a), table == c->var);
    return out;
}

static bool is_chosen(const kvf_score_args *a, uint32_t list, uint32_t page)
{
    for (uint32_t i = 0; i < a->chosen_count[list]; i++)
        if (a->chosen[(size_t)list * a->chosen_max + i] == (int32_t)(page / KVF_SUPER_PAGES))
            return true;
    return false;
}

/* Scores with chosen supers, of both levels, against scores of everything. */
static void compare_levels(check *c, levels *x, const float *all, const float *some,
                           const float *supers)
{
    const kvf_score_args *a = &x->score;
    for (uint32_t row = 0; row < a->lists * a->group; row++) {
        const uint32_t list = row / a->group;
        for (uint32_t p = 0; p < a->pages[list]; p++) {
            const size_t at = (size_t)row * a->pages_max + p;
            const float bound = supers[(size_t)row * x->supers.pages_max + p / KVF_SUPER_PAGES];
            const float want = is_chosen(a, list, p) ? all[at] : -INFINITY;
            if (memcmp(&some[at], &want, sizeof want) != 0)
                check_fail(c, "row %u page %u: %a with two levels, not %a", row, p,
                           (double)some[at], (double)want);
            if ((double)all[at] > (double)bound + 2 * x->tolerance)
                check_fail(c, "row %u page %u scores %a, its super %a", row, p, (double)all[at],
                           (double)bound);
        }
    }
}

static void levels_case(check *c, const kvf_shape *shape, uint32_t group, uint32_t subs,
                        uint32_t pages, check_data data)
{
    levels x = {.score = {.shape = *shape, .group = group, .subs = subs}};
    if (!check_begin(c))
        return;
    x.score.lists = 1 + check_below(c, 3);
    x.score.pages_max = pages + check_below(c, 40);
    check_describe(c, "%s d=%u G=%u subs=%u lists=%u pages=%u of %u data=%d",
                   check_dtype_name(shape->dtype), shape->head_dim, group, subs, x.score.lists,
                   pages, x.score.pages_max, (int)data);
    make_lists(c, &x, pages, data);

    uint32_t *first = check_in(c, x.score.lists * sizeof *first);
    uint32_t *count = check_in(c, x.score.lists * sizeof *count);
    for (uint32_t l = 0; l < x.score.lists; l++) {
        first[l] = check_below(c, x.super.supers_max + 2);
        count[l] = check_below(c, x.super.supers_max + 1);
    }
    kvf_super_args part = x.super;
    part.first = check_below(c, 4) ? first : NULL;
    part.count = check_below(c, 4) ? count : NULL;
    CHECK_BOTH(c, super, &part, kvf_super_tasks(&part));
    CHECK_BOTH(c, super, &x.super, kvf_super_tasks(&x.super));

    const float *supers = score(c, c->var, &x.supers);
    const float *all = score(c, c->var, &x.score);
    for (uint32_t i = 0; i < 2; i++) {
        choose(c, &x, i == 0);
        const float *some = score(c, c->var, &x.score);
        compare_levels(c, &x, all, some, supers);
        check_elements(c, "scores", some, score(c, c->ref, &x.score), KVF_FP32,
                       (size_t)x.score.lists * group * x.score.pages_max, x.tolerance, 0x1p-23);
    }
}

void check_levels(check *c)
{
    static const uint32_t pages[] = {1, 15, 16, 17, 40, 255, 256, 300, 530};
    for (uint32_t i = 0; i < 5 * 3 * 9; i++) {
        const kvf_shape shape = {(kvf_dtype)(i % 3), check_head_dims[i % 5], 32};
        levels_case(c, &shape, 1 + i * 7 % KVF_GROUP_MAX_HEADS, 1u << i / 3 % 3, pages[i / 15],
                    i % 4 ? DATA_NORMAL : (check_data)(i / 4 % DATA_COUNT));
    }
}
