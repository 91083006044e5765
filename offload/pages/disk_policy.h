/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_OFFLOAD_DISK_POLICY_H
#define KVF_OFFLOAD_DISK_POLICY_H

/*
 * Which page frame is given up next: recency and frequency of use, where what is used comes in
 * turns.
 *
 * Knows neither files nor pages. A group is a set of bundles that calls ask for in turn, as steps
 * do the layers of a model. A bundle has a history: which of the last sixteen calls for its group
 * used it, the latest as the highest bit. The smallest history goes; of equals, that whose group
 * had its turn last, because it waits longest for the next. So a group does not drive out what the
 * following ones are about to use. Only some page frames are compared, so a choice costs constant
 * time.
 */

#include <stdbool.h>
#include <stdint.h>

#define KVF_DISK_COMPARED 64u /* page frames per choice */

typedef struct kvf_disk_use {
    uint32_t turn; /* of its group, when it was used last */
    uint16_t group, history;
} kvf_disk_use;

typedef struct kvf_disk_turn {
    uint64_t call;  /* the latest for this group */
    uint32_t turns; /* calls for it */
} kvf_disk_turn;

typedef struct kvf_disk_policy {
    uint32_t page_frames;
    uint32_t hand;
    const uint32_t *bundles; /* [page frames] who lies there */
    kvf_disk_use *uses;      /* [bundles] zeros at first; kept when a bundle goes */
    kvf_disk_turn *groups;   /* zeros at first */
} kvf_disk_policy;

/* Whether a page frame may be given up; or written, so that it may. Some bundle lies there. */
typedef bool (*kvf_disk_may)(const void *user, uint32_t page_frame);

/* Once per call; calls grow from 1 on. */
void kvf_disk_policy_use(kvf_disk_policy *p, uint32_t bundle, uint32_t group, uint64_t call);
void kvf_disk_policy_drop(kvf_disk_policy *p, uint32_t bundle); /* nobody will want it */

/* The next to go; UINT32_MAX if none may. */
uint32_t kvf_disk_policy_victim(kvf_disk_policy *p, kvf_disk_may may, const void *user);
/* The first that may, in the order in which the hand will come: what victim is likely to want
 * soon. Looks at `most` page frames at most. */
uint32_t kvf_disk_policy_next(const kvf_disk_policy *p, uint32_t most, kvf_disk_may may,
                              const void *user);

#endif
