/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Chosen pages on their way to where they are attended; see the header.
 *
 * Knows nothing of attention. Pages that miss a slot go over the link; those that are not in memory
 * are read first, and what is there does not wait for them.
 */

#include "fetch.h"

#include "bring.h"

static kvf_status submit(kvf_call *call, const kvf_choice *c)
{
    const kvf_kv_group *kv_group = call->kv_group;
    const kvf_fetch_args fetch = {.choices = kvf_call_choices(call, c),
                                  .from = c->from,
                                  .to = c->to,
                                  .count = c->fetch_count};
    const kvf_transfer_request request = {.from = fetch.from, .to = fetch.to, .count = fetch.count};
    KVF_TRY(KVF_LAUNCH(call, fetch, fetch));
    if (!call->is_recorded)
        KVF_TRY(kvf_transfer_wait_room(kv_group->transfer));
    return kvf_transfer_submit(kv_group->transfer, &request, call->stream, &call->ticket);
}

kvf_status kvf_fetch_begin(kvf_call *call)
{
    KVF_TRY(kvf_bring_chosen(call));
    return kvf_moves_pages(call->kv_group) && !call->is_late
               ? submit(call, &call->kv_group->tables.now)
               : KVF_OK;
}

kvf_status kvf_fetch_mark(kvf_call *call)
{
    return kvf_bring_mark(call);
}

bool kvf_fetch_is_pending(const kvf_call *call)
{
    return kvf_moves_pages(call->kv_group) || call->is_late;
}

/* Late pages, and misses in their slots. */
kvf_status kvf_fetch_end(kvf_call *call)
{
    const kvf_kv_group *kv_group = call->kv_group;
    if (!kvf_moves_pages(kv_group))
        return kvf_bring_late(call);
    while (call->is_late) {
        kvf_choice misses;
        KVF_TRY(kvf_bring_misses(call, &misses));
        KVF_TRY(submit(call, &misses));
        if (call->is_late)
            KVF_TRY(kvf_transfer_join(kv_group->transfer, call->ticket, call->stream));
    }
    return kvf_transfer_join(kv_group->transfer, call->ticket, call->stream);
}
