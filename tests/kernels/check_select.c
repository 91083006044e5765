/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Kernels that select pages, on lists and page tables, against their references: topk, newest,
 * spread, caller_scores, trim, mask, select, fetch, overlap, drop.
 *
 * Bit for bit. Where a result can be said in a line without the reference, it is checked against
 * that as well, because on a CPU most of these kernels have no second form.
 */

#include <float.h>
#include <math.h>
#include <string.h>

#include "check_rows.h"
#include "variants.h"

static void topk_case(check *c, uint32_t count, uint32_t k, uint32_t data)
{
    kvf_topk_args a = {0};
    if (!check_begin(c))
        return;
    a.lists = 1 + check_below(c, 3);
    const uint32_t offset = check_below(c, 2) ? check_below(c, 40) : 0;
    a.stride = offset + count + check_below(c, 5);
    a.ids_max = k + check_below(c, 3);
    a.work_stride = count;
    check_describe(c, "lists=%u first=%u count=%u k=%u data=%u", a.lists, offset, count, k, data);
    float *scores = check_in(c, (size_t)a.lists * a.stride * sizeof *scores);
    uint32_t *first = check_in(c, a.lists * sizeof *first);
    for (uint32_t i = 0; i < a.lists; i++) {
        check_scores(c, scores + (size_t)i * a.stride, a.stride, data);
        first[i] = offset;
    }
    a.scores = scores;
    a.first = offset ? first : NULL;
    a.count = check_counts(c, a.lists, count);
    a.k = check_counts(c, a.lists, k);
    const bool is_shared = check_below(c, 4) > 0;
    uint32_t *arrived = check_out(c, a.lists * sizeof *arrived);
    memset(arrived, 0, a.lists * sizeof *arrived);
    a.arrived = is_shared ? arrived : NULL;
    a.ids = check_changed(c, "ids", (size_t)a.lists * a.ids_max * sizeof *a.ids);
    a.id_count = check_changed(c, "id_count", a.lists * sizeof *a.id_count);
    a.work = check_changed(c, NULL, (size_t)a.lists * a.work_stride * sizeof *a.work);
    CHECK_BOTH(c, topk, &a);
    for (uint32_t i = 0; i < a.lists; i++)
        if (arrived[i] != 0)
            check_fail(c, "list %u still counts %u blocks", i, arrived[i]);
}

void check_topk(check *c)
{
    static const uint32_t counts[] = {0, 1, 2, 7, 8, 31, 64, 100, 513, 4096};
    static const uint32_t ks[] = {0, 1, 2, 8, 24, 100, 5000};
    for (uint32_t n = 0; n < 10; n++)
        for (uint32_t k = 0; k < 7; k++)
            for (uint32_t data = 0; data < 8; data++)
                topk_case(c, counts[n], ks[k], data);
    for (uint32_t data = 0; data < 11; data++) {
        topk_case(c, 65536 + 37, 24, data);
        topk_case(c, 70001, 1024, data);
        topk_case(c, 131072, 512, data);
        topk_case(c, 8000 + 1600 * data, 500, data); /* about where sets begin to pay */
    }
    topk_case(c, 1u << 20, 2048, 0);
    topk_case(c, 1000003, 512, 2);
    topk_case(c, 1000001, 256, 8);
    topk_case(c, 1u << 20, 1024, 10);
}

static void newest_case(check *c)
{
    check_rows w;
    if (!CHECK_ROWS(c, &w, "newest", .rows = 1 + check_below(c, 3),
                    .blocks_max = 1 + check_below(c, 400), .pool_blocks = 8))
        return;
    const uint32_t lists = w.rows * w.p.lists;
    kvf_newest_args a = {
        .paging = w.p, .rows = w.rows, .ids_max = w.p.pages_max + check_below(c, 3), .row = w.row};
    uint32_t *choose = check_in(c, lists * sizeof *choose);
    for (uint32_t l = 0; l < lists; l++)
        choose[l] = check_below(c, a.ids_max + 1);
    a.choose = choose;
    a.ids = check_changed(c, "ids", (size_t)lists * a.ids_max * sizeof *a.ids);
    a.id_count = check_changed(c, "id_count", lists * sizeof *a.id_count);
    CHECK_BOTH(c, newest, &a);

    kvf_spread_args s = {.rows = lists, .lists = 1 + check_below(c, 4), .ids_max = a.ids_max};
    s.from = a.ids;
    s.from_count = a.id_count;
    s.ids = check_changed(c, "spread ids", (size_t)lists * s.lists * a.ids_max * sizeof *s.ids);
    s.id_count = check_changed(c, "spread id_count", lists * s.lists * sizeof *s.id_count);
    CHECK_BOTH(c, spread, &s);
}

/* Ids that name no page, or one that was named, are among them. */
static void caller_scores_case(check *c, bool by_score)
{
    check_rows w;
    if (!CHECK_ROWS(c, &w, by_score ? "given scores" : "given ids", .rows = 1 + check_below(c, 3),
                    .blocks_max = 1 + check_below(c, 400), .by_kv_head = true, .pool_blocks = 8))
        return;
    const uint32_t lists = w.rows * w.p.lists;
    kvf_caller_scores_args a = {.paging = w.p,
                                .rows = w.rows,
                                .stride = w.p.pages_max + check_below(c, 3),
                                .caller_stride = 1 + check_below(c, 2 * w.p.pages_max),
                                .caller_heads = w.p.lists + check_below(c, 3),
                                .row = w.row};
    const size_t entries = (size_t)w.rows * a.caller_heads * a.caller_stride;
    uint32_t *heads = check_in(c, w.p.lists * sizeof *heads);
    for (uint32_t l = 0; l < w.p.lists; l++)
        heads[l] = a.caller_heads - 1 - l;
    a.heads = check_below(c, 2) ? heads : NULL;
    if (by_score) {
        float *scores = check_in(c, entries * sizeof *scores);
        for (size_t i = 0; i < entries; i++)
            scores[i] = check_below(c, 9)   ? (float)check_normal(c)
                        : check_below(c, 2) ? -INFINITY
                                            : NAN;
        a.scores = scores;
    } else {
        int32_t *ids = check_noise_in(c, entries * sizeof *ids);
        for (size_t i = 0; i < entries; i++)
            if (check_below(c, 9))
                ids[i] = (int32_t)check_below(c, w.p.pages_max + 2) - 1;
        a.ids = ids;
    }
    a.out = check_changed(c, "out", (size_t)lists * a.stride * sizeof *a.out);
    CHECK_BOTH(c, caller_scores, &a);
}

static uint32_t tokens_of(const kvf_trim_args *a, uint32_t list, int32_t id)
{
    return (uint32_t)__builtin_popcountll(kvf_trim_live(a, list, id));
}

/* The pages that are left of `count` fit and come first; the best other page would not fit. */
static void check_trimmed(check *c, const kvf_trim_args *a, uint32_t list, const int32_t *all,
                          uint32_t count)
{
    const float *scores = a->scores + (size_t)list * a->stride;
    const int32_t *ids = a->ids + (size_t)list * a->ids_max;
    int32_t best = -1, last = -1; /* of those that are gone, of those that are left */
    uint32_t tokens = 0, kept = 0;
    for (uint32_t i = 0; i < count; i++) {
        const bool stays = kept < a->id_count[list] && ids[kept] == all[i];
        kept += stays;
        tokens += stays ? tokens_of(a, list, all[i]) : 0;
        if (stays && (last < 0 || scores[all[i]] <= scores[last]))
            last = all[i];
        if (!stays && (best < 0 || scores[all[i]] > scores[best]))
            best = all[i];
    }
    if (kept != a->id_count[list] || tokens > kvf_trim_room(a, list))
        check_fail(c, "list %u: %u of %u pages with %u tokens", list, kept, count, tokens);
    if (best >= 0 && tokens_of(a, list, best) + tokens <= kvf_trim_room(a, list))
        check_fail(c, "list %u: page %d fits and is left out", list, best);
    if (best >= 0 && last >= 0 && !(scores[last] > scores[best]) &&
        !(scores[last] >= scores[best] && last < best))
        check_fail(c, "list %u: page %d comes before page %d", list, best, last);
}

/* Scores have ties, pages any number of tokens; what is left fits, and the next page does not. */
static void trim_case(check *c)
{
    check_rows w;
    if (!CHECK_ROWS(c, &w, "trim", .rows = 1 + check_below(c, 3),
                    .blocks_max = 1 + check_below(c, 100), .by_kv_head = true, .pool_blocks = 8))
        return;
    const uint32_t lists = w.rows * w.p.lists;
    kvf_trim_args a = {.paging = w.p,
                       .rows = w.rows,
                       .stride = w.p.pages_max + check_below(c, 3),
                       .ids_max = w.p.pages_max + check_below(c, 3),
                       .row = w.row};
    float *scores = check_in(c, (size_t)lists * a.stride * sizeof *scores);
    static const float some[] = {-INFINITY, INFINITY, -0.0f, 0.0f, -1e-40f, 1e-40f, FLT_MAX, 1.0f};
    for (size_t i = 0; i < (size_t)lists * a.stride; i++)
        scores[i] = check_below(c, 2) ? (float)check_normal(c) : some[check_below(c, 8)];
    a.scores = scores;
    a.ids = check_changed(c, "ids", (size_t)lists * a.ids_max * sizeof *a.ids);
    a.id_count = check_changed(c, "id_count", lists * sizeof *a.id_count);
    for (uint32_t l = 0; l < lists; l++) {
        const uint32_t pages = kvf_row_sealed_pages(&w.p, &w.row[l / w.p.lists]);
        a.id_count[l] = 0;
        for (uint32_t i = 0; i < pages; i++)
            if (check_below(c, 3))
                a.ids[(size_t)l * a.ids_max + a.id_count[l]++] = (int32_t)i;
    }
    int32_t *all = check_put(c, a.ids, (size_t)lists * a.ids_max * sizeof *all);
    uint32_t *counts = check_put(c, a.id_count, lists * sizeof *counts);
    CHECK_BOTH(c, trim, &a);
    for (uint32_t l = 0; l < lists && !c->failed; l++)
        check_trimmed(c, &a, l, all + (size_t)l * a.ids_max, counts[l]);
}

static void mask_case(check *c)
{
    kvf_mask_args a = {0};
    if (!check_begin(c))
        return;
    const uint32_t lists = 1 + check_below(c, 4), pages = 1 + check_below(c, 60);
    a.paging.lists = lists;
    a.paging.shape.page_size = check_page_sizes[check_below(c, CHECK_PAGE_SIZES)];
    const uint32_t tokens = pages * a.paging.shape.page_size;
    a.tokens_max = tokens;
    a.ids_max = pages;
    check_describe(c, "mask, lists=%u tokens=%u P=%u", lists, tokens, a.paging.shape.page_size);
    int32_t *chosen = check_in(c, (size_t)lists * tokens * sizeof *chosen);
    uint32_t *count = check_in(c, lists * sizeof *count);
    for (uint32_t l = 0; l < lists; l++)
        count[l] = check_subset(c, tokens, tokens, chosen + (size_t)l * tokens);
    a.tokens = chosen;
    a.token_count = count;
    a.ids = check_changed(c, "ids", (size_t)lists * pages * sizeof *a.ids);
    a.id_count = check_changed(c, "id_count", lists * sizeof *a.id_count);
    a.masks = check_changed(c, "masks", (size_t)lists * pages * sizeof *a.masks);
    CHECK_BOTH(c, mask, &a);
    for (uint32_t l = 0; l < lists; l++) {
        uint32_t kept = 0;
        for (uint32_t i = 0; i < a.id_count[l]; i++)
            kept += (uint32_t)__builtin_popcountll(~a.masks[(size_t)l * pages + i]);
        if (kept != count[l])
            check_fail(c, "list %u: %u tokens chosen, %u kept", l, count[l], kept);
    }
}

/* Scores of every list, and how many pages of them are wanted. */
static float *make_scores(check *c, const check_rows *w, kvf_select_args *a)
{
    const uint32_t lists = w->rows * w->p.lists;
    float *scores = check_in(c, (size_t)lists * a->stride * sizeof *scores);
    uint32_t *count = check_in(c, lists * sizeof *count);
    for (uint32_t l = 0; l < lists; l++)
        count[l] = kvf_row_sealed_pages(&w->p, &w->row[l / w->p.lists]);
    a->scores = scores;
    a->count = count;
    a->k = check_counts(c, lists, a->assemble.choices.ids_max);
    return scores;
}

/* Every chosen page is attended in a slot of its own list; those that were chosen before, too. */
static void expect_chosen(check *c, const check_rows *w, const kvf_select_args *a, bool again)
{
    const kvf_assemble_args *assemble = &a->assemble;
    const kvf_choices *choices = &assemble->choices;
    for (uint32_t l = 0; l < w->rows * w->p.lists; l++) {
        const kvf_row *row = &w->row[l / w->p.lists];
        const kvf_span *chosen = assemble->spans + (size_t)l * assemble->spans_max +
                                 assemble->span_count[l] - choices->id_count[l];
        if (again && choices->miss_count[l] != 0)
            check_fail(c, "list %u misses %u pages that it just chose", l, choices->miss_count[l]);
        for (uint32_t i = 0; i < choices->id_count[l]; i++) {
            const int32_t id = choices->ids[l * choices->ids_max + i];
            const int32_t slot = kvf_row_slot_of(&w->p, row, l % w->p.lists, (uint32_t)id);
            if (slot < 0 || slot != choices->slot_of_id[l * choices->ids_max + i] ||
                chosen[i].page != kvf_row_slot(&w->p, row, l % w->p.lists, (uint32_t)slot))
                check_fail(c, "list %u: page %d is not attended in its slot", l, id);
        }
    }
}

/* Scores of pages as masses, and as the kernel of masses has them: two good exponentials differ by
 * an ulp, and so may what is chosen by them. */
static void make_scored(check *c, const check_rows *w, kvf_select_args *a, bool has_ties)
{
    static const kvf_group_reduce kinds[] = {KVF_GROUP_MAX, KVF_GROUP_SUM};
    const kvf_kernels *const table = c->cuda ? c->var : c->ref;
    const uint32_t lists = w->rows * w->p.lists;
    a->masses = (kvf_reduce_mass_args){
        .kind = check_below(c, 5) ? KVF_GROUP_MEAN_SOFTMAX : kinds[check_below(c, 2)],
        .page_size = w->p.shape.page_size,
        .block_size = w->p.block_size,
        .lists = lists,
        .group = check_groups[check_below(c, lists * a->stride > 20000 ? 5 : CHECK_GROUPS)],
        .pages_max = a->stride,
        .pages = a->count,
        .out = (float *)(uintptr_t)a->scores};
    check_masses(c, &a->masses, check_below(c, 4) == 0, has_ties);
    CHECK_RUN(c, table, reduce_mass, &a->masses, false);
}

static void select_given(const void *args, uint32_t task)
{
    kvf_select_args a = *(const kvf_select_args *)args;
    a.masses.mass = NULL;
    kvf_select_ref(&a, task);
}

/* A stride of scores: aligned for eight at once, or not. */
static uint32_t stride_of(check *c, uint32_t pages)
{
    return check_below(c, 2) ? (uint32_t)kvf_round_up(pages, 8) : pages + check_below(c, 5);
}

/* Everything that a recorded step does between scores and attention, several times. A GPU may give
 * lists other slots than the reference, and where they meet in a bucket take other pages away:
 * where there are several rows every page has room. */
static void select_case(check *c, uint32_t rows, uint32_t blocks_max, uint32_t ids_max,
                        bool of_masses)
{
    check_rows w;
    if (!CHECK_ROWS(c, &w, "select", .rows = rows, .blocks_max = blocks_max, .by_kv_head = true,
                    .all_fit = rows > 1,
                    .by_token = blocks_max > 1000, /* several blocks of a GPU per list */
                    .statics_max = 40, .pool_blocks = blocks_max))
        return;
    const uint32_t lists = w.rows * w.p.lists;
    kvf_select_args a = {.stride = stride_of(c, w.p.pages_max), .work_stride = w.p.pages_max};
    kvf_assemble_args *assemble = &a.assemble;
    kvf_choices *choices = &assemble->choices;
    *choices = (kvf_choices){.paging = w.p,
                             .rows = w.rows,
                             .ids_max = kvf_min_u32(ids_max, w.p.pages_max),
                             .row = w.row,
                             .counters = w.counters};
    const size_t ids = (size_t)lists * choices->ids_max;
    assemble->arrival = (kvf_arrival)check_below(c, 3);
    assemble->spans_max = w.p.static_pages + w.p.ring_blocks * w.p.block_pages + choices->ids_max;
    float *scores = make_scores(c, &w, &a);
    a.work = check_out(c, (size_t)lists * a.work_stride * sizeof *a.work);
    a.arrived = check_changed(c, "arrived", lists * sizeof *a.arrived);
    memset(a.arrived, 0, lists * sizeof *a.arrived);
    choices->ids = check_changed(c, "ids", ids * sizeof *choices->ids);
    choices->id_count = check_changed(c, "id_count", lists * sizeof *choices->id_count);
    choices->missed = check_changed(c, "missed", ids * sizeof *choices->missed);
    choices->miss_count = check_changed(c, "miss_count", lists * sizeof *choices->miss_count);
    assemble->span_count = check_changed(c, "span_count", lists * sizeof *assemble->span_count);
    check_track(c, "counters", w.counters, sizeof *w.counters);
    choices->slot_of_id = check_out(c, ids * sizeof *choices->slot_of_id);
    choices->misses = check_out(c, ids * sizeof *choices->misses);
    assemble->spans = check_out(c, (size_t)lists * assemble->spans_max * sizeof *assemble->spans);
    check_track(c, NULL, w.slot_of_page, (size_t)w.p.kv_heads * w.p.pool_pages * sizeof(int32_t));
    check_track(c, NULL, w.slot_words, (size_t)w.p.kv_heads * w.p.slots * sizeof(uint64_t));
    for (uint32_t turn = 0; turn < 4; turn++) {
        for (size_t i = 0; i < (size_t)lists * a.stride; i++)
            scores[i] = turn == 1           ? (float)check_below(c, 3)
                        : check_below(c, 9) ? (float)check_normal(c)
                                            : -INFINITY;
        if (turn == 3) /* what was chosen last, again: nothing is missed */
            a.k = NULL, a.masses.mass = NULL;
        else if (of_masses)
            make_scored(c, &w, &a, turn == 1);
        for (uint32_t b = 0; b < w.rows; b++)
            w.row[b].use++;
        check_both(c, of_masses ? select_given : c->ref->select, c->var->select, CHECK_ARGS(&a), 1);
        expect_chosen(c, &w, &a, turn == 3);
    }
}

static void fetch_case(check *c, uint32_t rows)
{
    check_rows w;
    if (!CHECK_ROWS(c, &w, "fetch", .rows = rows, .blocks_max = 1 + check_below(c, 30),
                    .pages = (kvf_pages)check_below(c, 3), .pool_blocks = 6))
        return;
    const uint32_t lists = w.rows * w.p.lists;
    const uint32_t ids_max = 1 + check_below(c, 70);
    kvf_miss *misses = check_in(c, (size_t)lists * ids_max * sizeof *misses);
    uint32_t *count = check_in(c, lists * sizeof *count), sum = 0;
    for (uint32_t l = 0; l < lists; l++) {
        const uint32_t sealed = kvf_row_sealed_pages(&w.p, &w.row[l / w.p.lists]);
        count[l] = sealed && check_below(c, 4) ? check_below(c, ids_max + 1) : 0;
        sum += count[l];
        for (uint32_t i = 0; i < count[l]; i++)
            misses[(size_t)l * ids_max + i] =
                (kvf_miss){(int32_t)check_below(c, sealed), (int32_t)check_below(c, w.p.slots)};
    }
    const kvf_fetch_args a = {.choices = {.paging = w.p,
                                          .rows = w.rows,
                                          .ids_max = ids_max,
                                          .row = w.row,
                                          .misses = misses,
                                          .miss_count = count},
                              .from = check_changed(c, "from", sum * sizeof *a.from),
                              .to = check_changed(c, "to", sum * sizeof *a.to),
                              .count = check_changed(c, "count", sizeof *a.count)};
    CHECK_BOTH(c, fetch, &a);
    if (*a.count != sum)
        check_fail(c, "%u misses, counted %u", sum, *a.count);
}

static void overlap_case(check *c)
{
    check_rows w;
    if (!CHECK_ROWS(c, &w, "overlap", .rows = 1, .blocks_max = 1 + check_below(c, 30),
                    .pool_blocks = 4))
        return;
    const uint32_t heads = w.p.kv_heads, tokens = 1 + check_below(c, 1500);
    kvf_overlap_args a = {
        .paging = w.p, .row = w.row, .rest = 1 + check_below(c, 300), .counters = w.counters};
    int32_t *ids[2];
    uint32_t *count[2];
    uint64_t sum = 0;
    a.ids_max = tokens;
    for (int i = 0; i < 2; i++) {
        ids[i] = check_in(c, (size_t)heads * tokens * sizeof(int32_t));
        count[i] = check_in(c, heads * sizeof(uint32_t));
        for (uint32_t h = 0; h < heads; h++)
            count[i][h] = check_subset(c, tokens, tokens, ids[i] + (size_t)h * tokens);
    }
    for (uint32_t h = 0; h < heads; h++)
        for (uint32_t i = 0; i < count[0][h]; i++)
            for (uint32_t j = 0; j < count[1][h]; j++)
                sum += ids[0][(size_t)h * tokens + i] == ids[1][(size_t)h * tokens + j];
    a.a = ids[0];
    a.a_count = count[0];
    a.b = ids[1];
    a.b_count = count[1];
    if (!w.row->share)
        w.row->share = check_out(c, 2 * sizeof *w.row->share);
    a.choose_lists = check_below(c, 2) ? w.p.lists : 1;
    a.choose = check_changed(c, "choose", a.choose_lists * sizeof *a.choose);
    check_track(c, "share", w.row->share, 2 * sizeof *w.row->share);
    check_track(c, "counters", a.counters, sizeof *a.counters);
    CHECK_BOTH(c, overlap, &a);
    const uint32_t common = (uint32_t)(sum / heads) / w.p.shape.page_size * w.p.shape.page_size;
    if (count[0][0] >= a.rest && w.row->share[0] != kvf_min_u32(common, a.rest))
        check_fail(c, "%u tokens in common, share %u of %u", common, w.row->share[0], a.rest);
}

void check_lists(check *c)
{
    for (uint32_t i = 0; i < 10; i++)
        newest_case(c);
    for (uint32_t i = 0; i < 16; i++)
        caller_scores_case(c, i % 2);
    for (uint32_t i = 0; i < 16; i++)
        trim_case(c);
    for (uint32_t i = 0; i < 12; i++)
        mask_case(c);
    for (uint32_t i = 0; i < 16; i++)
        fetch_case(c, i % 4 == 3 ? 20 : 1 + i % 3);
    for (uint32_t i = 0; i < 10; i++)
        overlap_case(c);
    for (uint32_t i = 0; i < 14; i++)
        select_case(c, 1 + i % 4, i ? 1 + 3 * i : 1100, 1 + check_below(c, KVF_SLOT_WAYS), i % 2);
    for (uint32_t i = 0; i < 2; i++) {
        select_case(c, 2, 300, 700, i);   /* more than a GPU's block has threads */
        select_case(c, 2, 1100, 3000, i); /* and more than its shared memory keeps */
    }
    for (uint32_t i = 0; i < 8; i++)
        select_case(c, 1 + i % 3, 20 + 90 * i, 1 + check_below(c, KVF_SLOT_WAYS), true);
    select_case(c, 2, 600, 5000, true);  /* keys of a list in shared memory, of one block */
    select_case(c, 2, 1100, 5000, true); /* and more than it has room for */
}

static void drop_case(check *c)
{
    check_rows w;
    if (!CHECK_ROWS(c, &w, "drop", .rows = 1 + check_below(c, 4), .blocks_max = 12,
                    .pool_blocks = 4))
        return;
    const kvf_drop_args a = {
        .paging = w.p, .rows = w.rows, .sets = check_below(c, 2), .row = w.row};
    for (uint32_t b = 0; b < w.rows; b++) {
        const size_t heads = w.p.kv_heads;
        if (check_below(c, 4) == 0)
            w.row[b].chosen_at = NULL;
        else
            check_track(c, "chosen_at", w.row[b].chosen_at,
                        heads * w.p.pages_max * sizeof(uint32_t));
        check_track(c, "static_count", w.row[b].static_count, heads * sizeof(uint32_t));
        check_track(c, "bits", w.row[b].bits, heads * w.p.blocks_max * sizeof(uint64_t));
    }
    CHECK_BOTH(c, drop, &a);
}

void check_drop(check *c)
{
    for (uint32_t i = 0; i < 16; i++)
        drop_case(c);
}
