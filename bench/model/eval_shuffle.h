/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_BENCH_EVAL_SHUFFLE_H
#define KVF_BENCH_EVAL_SHUFFLE_H

/*
 * The control of an evaluation: the best pages by the scores of other pages, as if the rows of the
 * digest had been shuffled. What it finds, it finds by chance.
 *
 * Which page answers for which is a fixed permutation per layer and KV head; it changes only where
 * the number of pages passes a power of two, and for pages that are new.
 */

#include "model_memory.h"

typedef struct eval_shuffle {
    float *scores, *sorted; /* [pages] */
} eval_shuffle;

/* The value at `rank`, counted from the largest (Hoare's FIND). Moves the values: larger ones and
 * ties stand before it. */
float eval_nth_largest(float *values, uint32_t count, uint32_t rank);
/* The `most` best pages, ties to the lower id, ascending; work [pages]. @return how many */
uint32_t eval_best_pages(const float *scores, float *work, uint32_t pages, uint32_t most,
                         int32_t *ids);

/* For caches of at most so many pages. */
kvf_status eval_shuffle_open(eval_shuffle *shuffle, uint32_t pages, kvf_error *error);
void eval_shuffle_close(eval_shuffle *shuffle);

/* A kvf_select_fn; @p user is an eval_shuffle. */
uint32_t eval_shuffle_choose(void *user, const kvf_select_view *view, int32_t *ids);

#endif
