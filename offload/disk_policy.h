/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_OFFLOAD_DISK_POLICY_H
#define KVF_OFFLOAD_DISK_POLICY_H

/*
 * Which berth is given up next: recency and frequency of use.
 *
 * Knows neither files nor pages. A clock: a hand goes round the berths; a berth that was used has
 * so many rounds to live as it was used, KVF_DISK_USES at most. So what is selected again and again
 * stays, what was read once for a look at all keys goes soon, and a choice costs constant time on
 * average.
 */

#include <stdbool.h>
#include <stdint.h>

#define KVF_DISK_USES 7u

typedef struct kvf_disk_policy {
    uint32_t berths;
    uint32_t hand;
    uint8_t *uses; /* [berths] */
} kvf_disk_policy;

/* Whether a berth may be given up; or written, so that it may. */
typedef bool (*kvf_disk_may)(const void *user, uint32_t berth);

void kvf_disk_policy_enter(kvf_disk_policy *p, uint32_t berth); /* with what has just come */
void kvf_disk_policy_use(kvf_disk_policy *p, uint32_t berth);
void kvf_disk_policy_drop(kvf_disk_policy *p, uint32_t berth); /* nobody will want it */

/* The next to go; UINT32_MAX if none may. */
uint32_t kvf_disk_policy_victim(kvf_disk_policy *p, kvf_disk_may may, const void *user);
/* The first that may, in the order in which the hand will come: what victim is likely to want
 * soon. Looks at `most` berths at most. */
uint32_t kvf_disk_policy_next(const kvf_disk_policy *p, uint32_t most, kvf_disk_may may,
                              const void *user);

#endif
