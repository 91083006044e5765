/* SPDX-License-Identifier: Apache-2.0 */

/*
 * each: one device copy per page. The baseline, for comparison; it needs no staging.
 *
 * Knows nothing beyond a request. The copies stand in the copy stream's bounded queue, which makes
 * the method wait, not the caller.
 */

#include "transfer_method.h"

static kvf_status each_open(kvf_transfer_engine *engine)
{
    (void)engine;
    return KVF_OK;
}

static void each_close(kvf_transfer_engine *engine)
{
    (void)engine;
}

static kvf_status each_move(kvf_transfer_engine *engine, const kvf_transfer_request *request,
                            uint32_t count)
{
    const kvf_device_ops *ops = engine->device->ops;
    KVF_TRY(kvf_transfer_clock_start(engine));
    for (uint32_t i = 0; i < count; i++)
        KVF_TRY(ops->copy(engine->copy_stream, request->to[i], request->from[i],
                          engine->config.page_bytes));
    KVF_TRY(kvf_transfer_clock_stop(engine));
    kvf_transfer_count(&engine->counters.copies, count);
    return ops->stream_wait(engine->copy_stream);
}

const kvf_transfer_ops kvf_transfer_each_ops = {
    .method = KVF_TRANSFER_EACH,
    .name = "each",
    .open = each_open,
    .close = each_close,
    .move = each_move,
    .needs = NULL,
};
