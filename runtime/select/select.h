/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_SELECT_H
#define KVF_RUNTIME_SELECT_H

/*
 * Page selection policies behind one table: what a policy needs and how it chooses.
 *
 * A policy enqueues kernels that write ids and id_count of every list of the step, ascending. It
 * knows nothing of residency, transfer or attention. One policy is one select_<name>.c.
 */

#include "step.h"

typedef enum kvf_static_use {
    KVF_STATIC_NONE,       /* pages take the whole budget */
    KVF_STATIC_CONFIGURED, /* static_ratio divides it */
    KVF_STATIC_WHOLE,      /* the static set takes it */
} kvf_static_use;

struct kvf_select_policy {
    kvf_select select;
    const char *name;
    kvf_static_use static_use;
    uint32_t per_query_head; /* 1: one list per query head */
    uint32_t per_layer;      /* 1: one choice for all lists of a row */
    uint32_t all_pages;      /* 1: every sealed page, whatever the budget */
    uint32_t by_token;       /* 1: chooses tokens; a chosen page may give only some */
    uint32_t scores_pages;   /* 1: needs digest scores */
    kvf_status (*choose)(kvf_step *step);
};

/* NULL if there is none. */
const kvf_select_policy *kvf_select_find(kvf_select select);

/* Digest scores of the step, and for policies with groups their reduction: step->list_scores. */
KVF_CHECKED kvf_status kvf_select_score(kvf_step *step);

/* The best k [rows * choose_lists] pages of each list by score, ascending, into ids and id_count.
 */
KVF_CHECKED kvf_status kvf_choose_ranked(kvf_step *step, const uint32_t *k,
                                         const kvf_choice *choice);

/* Shared ways to choose. */
KVF_CHECKED kvf_status kvf_choose_top(kvf_step *step);
KVF_CHECKED kvf_status kvf_choose_newest(kvf_step *step);

extern const kvf_select_policy kvf_select_hybrid;
extern const kvf_select_policy kvf_select_full;
extern const kvf_select_policy kvf_select_static;
extern const kvf_select_policy kvf_select_dynamic;
extern const kvf_select_policy kvf_select_streaming;
extern const kvf_select_policy kvf_select_quest;
extern const kvf_select_policy kvf_select_arkvale;
extern const kvf_select_policy kvf_select_oracle;
extern const kvf_select_policy kvf_select_custom;

#endif
