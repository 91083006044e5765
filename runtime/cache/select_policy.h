/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_SELECT_POLICY_H
#define KVF_RUNTIME_SELECT_POLICY_H

/*
 * Selection policies as data: how each chooses, what that needs, and what it makes of the settings.
 *
 * A policy is one entry of select_policy.c, and its name and meaning are in KVF_SELECT_LIST. Knows
 * no step: the ways to choose are functions of select/.
 */

#include <stdbool.h>

#include "kvferry/kvferry.h"

/* Ways to choose pages for the lists of a step. */
typedef enum kvf_choose {
    KVF_CHOOSE_TOP,      /* the best by digest score */
    KVF_CHOOSE_NEWEST,   /* the newest, or all */
    KVF_CHOOSE_TOKENS,   /* the best tokens by true attention */
    KVF_CHOOSE_FUNCTION, /* kvf_cache_config.select_fn, on a thread of the host */
} kvf_choose;

typedef enum kvf_static_use {
    KVF_STATIC_NONE,       /* pages take the whole budget */
    KVF_STATIC_CONFIGURED, /* static_ratio divides it */
    KVF_STATIC_WHOLE,      /* the static set takes it */
} kvf_static_use;

typedef struct kvf_select_policy {
    kvf_choose choose;
    kvf_static_use static_use;
    bool per_query_head; /* one list per query head */
    bool per_layer;      /* one choice for all lists of a row */
    bool all_pages;      /* every sealed page, whatever the budget */
    bool sets_digest;    /* `digest` replaces the configured one */
    kvf_digest_kind digest;
    /* These follow from `choose`. */
    bool scores_pages;   /* needs digest scores */
    bool by_token;       /* a chosen page may give only some of its tokens */
    bool calls_function; /* needs select_fn, and what that reads where the host reads it */
    bool can_record;     /* needs nothing of the host in a step */
} kvf_select_policy;

/* The caller's scores of pages per KV head can take the place of its own. */
static inline bool kvf_takes_caller_selection(const kvf_select_policy *policy)
{
    return policy->choose == KVF_CHOOSE_TOP && !policy->per_query_head && !policy->per_layer;
}

/* NULL if there is none. */
const kvf_select_policy *kvf_select_find(kvf_select select);
const char *kvf_select_name(kvf_select select);

#endif
