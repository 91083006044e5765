/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Prompt lookup by a look at all ids, newest first, and how long a draft is.
 *
 * It knows ids only. The place where most of the newest tokens came up before wins, and the
 * newest of these. A draft is half as long as allowed at first, twice as long
 * after one that was all right, and after another one token longer than what of it was.
 */

#include "generate.h"

#include <stdlib.h>
#include <string.h>

#define MATCH_LEAST 2u
#define MATCH_MOST  8u

struct kvf_draft {
    uint32_t most, next; /* tokens of a draft, of the next one */
    size_t count, ids_max;
    uint32_t ids[]; /* [ids_max], filled up to `count` */
};

kvf_status kvf_draft_create(uint32_t most, size_t ids_max, kvf_draft **out, kvf_error *error)
{
    const size_t bytes = sizeof(kvf_draft) + ids_max * sizeof(uint32_t);
    *out = calloc(1, bytes);
    if (!*out)
        return model_out_of_memory(error, bytes, "the ids that drafts are made of");
    (*out)->most = most;
    (*out)->next = (most + 1) / 2;
    (*out)->ids_max = ids_max;
    return KVF_OK;
}

void kvf_draft_destroy(kvf_draft *draft)
{
    free(draft);
}

void kvf_draft_see(kvf_draft *d, const uint32_t *ids, size_t count)
{
    const size_t room = d->ids_max - d->count, kept = count < room ? count : room;
    if (kept)
        memcpy(d->ids + d->count, ids, kept * sizeof *ids);
    d->count += kept;
}

void kvf_draft_cut(kvf_draft *d, size_t count)
{
    d->count = count < d->count ? count : d->count;
    d->next = (d->most + 1) / 2;
}

/* How many ids in front of `end` are the newest ones. */
static uint32_t match(const kvf_draft *d, size_t end)
{
    uint32_t same = 0;
    while (same < MATCH_MOST && same < end && d->ids[end - 1 - same] == d->ids[d->count - 1 - same])
        same++;
    return same;
}

uint32_t kvf_draft_guess(const kvf_draft *d, uint32_t most, uint32_t *ids)
{
    size_t best = 0;
    uint32_t longest = MATCH_LEAST - 1;
    most = d->next < most ? d->next : most;
    for (size_t end = d->count; end-- > 1 && longest < MATCH_MOST;) {
        const uint32_t same = match(d, end);
        if (same > longest) {
            longest = same;
            best = end;
        }
    }
    if (best == 0)
        return 0;
    const size_t count = d->count - best < most ? d->count - best : most;
    memcpy(ids, d->ids + best, count * sizeof *ids);
    return (uint32_t)count;
}

void kvf_draft_learn(kvf_draft *d, uint32_t guessed, uint32_t right)
{
    if (guessed == 0)
        return;
    const uint32_t next = right == guessed && guessed >= d->next ? 2 * d->next
                          : right == guessed                     ? d->next
                                                                 : right + 1;
    d->next = next < d->most ? next : d->most;
}
