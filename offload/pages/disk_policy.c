/* SPDX-License-Identifier: Apache-2.0 */

/* Histories of the disk tier; see the header. */

#include "disk_tier.h"

#define NONE   UINT32_MAX
#define LATEST 0x8000u

/* As it is now, after calls for its group that did not use it. */
static uint32_t history(const kvf_disk_policy *p, const kvf_disk_use *u)
{
    const uint32_t age = p->groups[u->group].turns - u->turn;
    return age < 16 ? (uint32_t)u->history >> age : 0;
}

void kvf_disk_policy_use(kvf_disk_policy *p, uint32_t bundle, uint32_t group, uint64_t call)
{
    kvf_disk_turn *turn = &p->groups[group];
    kvf_disk_use *u = &p->uses[bundle];
    if (turn->call != call)
        turn->turns++;
    turn->call = call;
    const uint32_t before = history(p, u);
    *u = (kvf_disk_use){turn->turns, (uint16_t)group, (uint16_t)(before | LATEST)};
}

void kvf_disk_policy_drop(kvf_disk_policy *p, uint32_t bundle)
{
    p->uses[bundle].history = 0;
}

static uint32_t after(const kvf_disk_policy *p, uint32_t page_frame)
{
    return page_frame + 1 == p->page_frames ? 0 : page_frame + 1;
}

uint32_t kvf_disk_policy_victim(kvf_disk_policy *p, kvf_disk_may may, const void *user)
{
    uint32_t victim = NONE, least = 0, compared = 0;
    uint64_t latest = 0;
    for (uint32_t i = 0; i < p->page_frames && compared < KVF_DISK_COMPARED; i++) {
        const uint32_t page_frame = p->hand;
        p->hand = after(p, page_frame);
        if (!may(user, page_frame))
            continue;
        const kvf_disk_use *u = &p->uses[p->bundles[page_frame]];
        const uint32_t now = history(p, u);
        const uint64_t call = p->groups[u->group].call;
        compared++;
        if (victim != NONE && (now > least || (now == least && call <= latest)))
            continue;
        victim = page_frame;
        least = now;
        latest = call;
    }
    return victim;
}

uint32_t kvf_disk_policy_next(const kvf_disk_policy *p, uint32_t most, kvf_disk_may may,
                              const void *user)
{
    uint32_t page_frame = p->hand;
    for (uint32_t i = 0; i < most && i < p->page_frames; i++, page_frame = after(p, page_frame))
        if (may(user, page_frame))
            return page_frame;
    return NONE;
}
