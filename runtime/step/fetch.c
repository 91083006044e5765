/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Chosen pages on their way to where they are attended; see the header.
 *
 * Knows nothing of attention. Pages that miss a slot go over the link; those that are not in memory
 * are read first, and what is there does not wait for them.
 */

#include "fetch.h"

#include "bring.h"

static kvf_status submit(kvf_step *step, const kvf_choice *c)
{
    const kvf_kv_group *kv_group = step->kv_group;
    const kvf_fetch_args fetch = {.paging = kv_group->dims.paging,
                                  .rows = step->rows,
                                  .ids_max = c->ids_max,
                                  .row = step->row,
                                  .misses = c->misses,
                                  .miss_count = c->miss_count,
                                  .from = c->from,
                                  .to = c->to,
                                  .count = c->fetch_count};
    const kvf_transfer_request request = {.from = fetch.from, .to = fetch.to, .count = fetch.count};
    KVF_TRY(KVF_LAUNCH(step, fetch, fetch));
    if (!step->is_recorded)
        KVF_TRY(kvf_transfer_wait_room(kv_group->transfer));
    return kvf_transfer_submit(kv_group->transfer, &request, step->stream, &step->ticket);
}

kvf_status kvf_fetch_begin(kvf_step *step)
{
    KVF_TRY(kvf_bring_chosen(step));
    return kvf_moves_pages(step->kv_group) && !step->is_late
               ? submit(step, &step->kv_group->tables.now)
               : KVF_OK;
}

kvf_status kvf_fetch_mark(kvf_step *step)
{
    return kvf_bring_mark(step);
}

bool kvf_fetch_is_pending(const kvf_step *step)
{
    return kvf_moves_pages(step->kv_group) || step->is_late;
}

/* Late pages, and misses in their slots. */
kvf_status kvf_fetch_end(kvf_step *step)
{
    const kvf_kv_group *kv_group = step->kv_group;
    if (!kvf_moves_pages(kv_group))
        return kvf_bring_late(step);
    while (step->is_late) {
        kvf_choice misses;
        KVF_TRY(kvf_bring_misses(step, &misses));
        KVF_TRY(submit(step, &misses));
        if (step->is_late)
            KVF_TRY(kvf_transfer_join(kv_group->transfer, step->ticket, step->stream));
    }
    return kvf_transfer_join(kv_group->transfer, step->ticket, step->stream);
}
