/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_CHECK_ROWS_H
#define KVF_TESTS_CHECK_ROWS_H

/*
 * Rows for the checks of the paging kernels: what a cache would have in device memory after a
 * prefill, some decoding and a refresh, with random shapes and contents.
 *
 * Knows no kernel. The invariants of kvf_row hold: sealed blocks lie in the pool and the window in
 * the ring; the sink is the front of the store; bit t of a block is set iff its token is in
 * the store; slots hold the pages that they claim.
 */

#include "check_support.h"
#include "slots.h"

typedef struct check_rows_config {
    uint32_t rows;
    uint32_t blocks_max;
    bool by_kv_head;      /* lists == kv_heads */
    bool by_token;        /* pages of one token */
    bool without_slots;   /* pages are attended where they live */
    bool all_fit;         /* there is a slot for every page */
    uint32_t statics_max; /* tokens of a static set; 0: random */
    kvf_pages pages;      /* storage format of sealed blocks; in stores the tokens are noise then */
    uint32_t pool_blocks; /* distinct blocks of the pool; a row's share them if they are fewer */
} check_rows_config;

typedef struct check_rows {
    kvf_paging p;
    uint32_t rows;
    uint32_t statics_max;  /* tokens of a static set */
    kvf_row *row;          /* [rows] */
    int32_t *slot_of_page; /* of all rows, as the two below; see slots.h */
    uint64_t *slot_words;
    char *slots;
    kvf_layer_counters *counters;
} check_rows;

void check_rows_make(check *c, check_rows *w, const check_rows_config *config);
/* Also says so: `what` and the shapes. */
void check_rows_describe(check *c, const check_rows *w, const char *what);

/* Begins a case of rows that the rest configures. False: it is not run. */
#define CHECK_ROWS(c, w, what, ...)                                                                \
    (check_begin(c) && (check_rows_make((c), (w), &(check_rows_config){__VA_ARGS__}),              \
                        check_rows_describe((c), (w), (what)), true))

/* At most `most` of 0 .. n-1, ascending, at random; returns how many. */
uint32_t check_subset(check *c, uint32_t n, uint32_t most, int32_t *to);

#endif
