/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Chooses pages by the scores of others; see eval_shuffle.h.
 */

#include "eval_shuffle.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

kvf_status eval_shuffle_open(eval_shuffle *s, uint32_t pages, kvf_error *error)
{
    s->scores = calloc(pages, sizeof *s->scores);
    s->sorted = calloc(pages, sizeof *s->sorted);
    if (s->scores && s->sorted)
        return KVF_OK;
    return model_out_of_memory(error, pages * sizeof *s->scores, "scores");
}

void eval_shuffle_close(eval_shuffle *s)
{
    free(s->scores);
    free(s->sorted);
}

/* A permutation of 0 … mask, of steps that can be undone, walked until it hits a page. */
static uint32_t other_page(uint32_t page, uint32_t key, uint32_t mask, uint32_t shift,
                           uint32_t pages)
{
    do {
        page = (page + key) & mask;
        page ^= page >> shift;
        page = page * 0x9e3779b1u & mask;
        page ^= page >> shift;
        page = page * (key | 1) & mask;
    } while (page >= pages);
    return page;
}

float eval_nth_largest(float *values, uint32_t count, uint32_t nth)
{
    const int32_t rank = (int32_t)nth;
    for (int32_t low = 0, high = (int32_t)count - 1; low < high;) {
        const float pivot = values[rank];
        int32_t i = low, j = high;
        while (i <= j) {
            while (values[i] > pivot)
                i++;
            while (values[j] < pivot)
                j--;
            if (i > j)
                break;
            const float v = values[i];
            values[i++] = values[j];
            values[j--] = v;
        }
        low = j < rank ? i : low;
        high = rank < i ? j : high;
    }
    return values[rank];
}

uint32_t eval_best_pages(const float *scores, float *work, uint32_t pages, uint32_t most,
                         int32_t *ids)
{
    uint32_t above = 0, count = 0;
    most = most < pages ? most : pages;
    if (most == 0)
        return 0;
    memcpy(work, scores, pages * sizeof *work);
    const float least = eval_nth_largest(work, pages, most - 1);
    for (uint32_t p = 0; p < pages; p++)
        above += scores[p] > least;
    uint32_t ties = most - above;
    for (uint32_t p = 0; p < pages && count < most; p++) {
        const bool ties_in = scores[p] == least && ties > 0;
        ties -= ties_in;
        if (scores[p] > least || ties_in)
            ids[count++] = (int32_t)p;
    }
    return count;
}

uint32_t eval_shuffle_choose(void *user, const kvf_select_view *view, int32_t *ids)
{
    const eval_shuffle *s = user;
    const uint32_t key = (view->layer * 1031u + view->kv_head + 1) * 0x85ebca6bu;
    uint32_t mask = 1, shift = 1, count = 0;
    while (mask < view->pages)
        mask = 2 * mask + 1;
    while ((mask >> 2 * shift) != 0)
        shift++;
    for (uint32_t p = 0; p < view->pages; p++)
        s->scores[p] = view->scores[other_page(p, key, mask, shift, view->pages)];
    const uint32_t best = eval_best_pages(s->scores, s->sorted, view->pages, view->pages_max, ids);
    for (uint32_t i = 0; i < best; i++)
        if (view->scores[ids[i]] > -INFINITY)
            ids[count++] = ids[i];
    return count;
}
