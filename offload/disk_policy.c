/* SPDX-License-Identifier: Apache-2.0 */

/* The clock of the disk tier; see the header. */

#include "disk_policy.h"

#define NONE UINT32_MAX

void kvf_disk_policy_enter(kvf_disk_policy *p, uint32_t berth)
{
    p->uses[berth] = 1;
}

void kvf_disk_policy_use(kvf_disk_policy *p, uint32_t berth)
{
    if (p->uses[berth] < KVF_DISK_USES)
        p->uses[berth]++;
}

void kvf_disk_policy_drop(kvf_disk_policy *p, uint32_t berth)
{
    p->uses[berth] = 0;
}

static uint32_t after(const kvf_disk_policy *p, uint32_t berth)
{
    return berth + 1 == p->berths ? 0 : berth + 1;
}

uint32_t kvf_disk_policy_victim(kvf_disk_policy *p, kvf_disk_may may, const void *user)
{
    bool is_any = true; /* of the round before */
    for (uint32_t round = 0; round <= KVF_DISK_USES && is_any; round++) {
        is_any = false;
        for (uint32_t i = 0; i < p->berths; i++) {
            const uint32_t berth = p->hand;
            p->hand = after(p, berth);
            if (!may(user, berth))
                continue;
            if (p->uses[berth] == 0)
                return berth;
            p->uses[berth]--;
            is_any = true;
        }
    }
    return NONE;
}

uint32_t kvf_disk_policy_next(const kvf_disk_policy *p, uint32_t most, kvf_disk_may may,
                              const void *user)
{
    uint32_t berth = p->hand;
    for (uint32_t i = 0; i < most && i < p->berths; i++, berth = after(p, berth))
        if (may(user, berth))
            return berth;
    return NONE;
}
