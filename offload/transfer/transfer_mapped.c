/* SPDX-License-Identifier: Apache-2.0 */

/*
 * mapped: a few blocks of the device read pinned pages straight into slots.
 *
 * One kernel on a stream of its own, between an event of the caller's stream and an event that the
 * join waits for. Ids and count come from device memory and no thread of the host takes part, so it
 * is the method that can be recorded; recorded work has events of its own, because an event that
 * was recorded into a graph cannot be asked afterwards.
 *
 * Counts are the device's. One that exceeds pages_max moves nothing; the host sees that when it
 * uses the slot again, and the next join fails. A launch for a request that another method takes
 * costs the launch and one read of the count. Invariant: the kernel moves nothing if the count is
 * outside of [low, high), and high never exceeds pages_max + 1.
 */

#include "transfer_method.h"

/* 64 KiB in flight per block: 8 cover 55 GB/s at a round trip of 2 us many times over, and are 3 to
 * 8% of a GPU. Calibration narrows it. */
#define BLOCKS 8u

typedef struct mapped_method {
    uint32_t *arrived; /* device [slot_count] */
} mapped_method;

static void mapped_close(kvf_transfer_engine *engine)
{
    mapped_method *m = engine->method[KVF_TRANSFER_MAPPED];
    if (!m)
        return;
    engine->device->ops->memory_free(engine->device, m->arrived);
    kvf_free(engine->device->context, m);
    engine->method[KVF_TRANSFER_MAPPED] = NULL;
}

static kvf_status mapped_open(kvf_transfer_engine *engine)
{
    kvf_device *device = engine->device;
    KVF_ASSERT(engine->config.blocks <= KVF_MOVE_BLOCKS_MAX);
    if (engine->config.blocks == 0)
        engine->config.blocks = BLOCKS;
    mapped_method *m = kvf_alloc(device->context, 1, sizeof *m);
    engine->method[KVF_TRANSFER_MAPPED] = m;
    if (!m)
        KVF_FAIL(device->context, KVF_OUT_OF_MEMORY, "no memory for 'mapped'");
    void *memory = NULL;
    KVF_TRY(device->ops->memory_alloc(device, engine->slot_count * sizeof *m->arrived, &memory));
    m->arrived = memory;
    return KVF_OK;
}

static kvf_status mapped_enqueue(kvf_transfer_engine *engine, const kvf_transfer_slot *slot,
                                 kvf_stream *stream, bool is_recorded)
{
    const kvf_device_ops *ops = engine->device->ops;
    kvf_stream *own = engine->read_stream;
    kvf_event *begin = is_recorded ? slot->recorded_begin : slot->begin;
    kvf_event *arrived = is_recorded ? slot->recorded_arrived : slot->arrived;
    kvf_transfer_clock *clock = NULL;
    const mapped_method *m = engine->method[KVF_TRANSFER_MAPPED];
    const uint32_t most = engine->config.pages_max + 1;
    kvf_move_args move = {.bytes = engine->config.page_bytes,
                          .from = slot->request.from,
                          .to = slot->request.to,
                          .count = slot->request.count,
                          .low = is_recorded ? 0 : engine->device_low,
                          .high = is_recorded ? most : kvf_min_u32(engine->device_high, most),
                          .blocks = engine->config.blocks};
    /* A word that stays behind says that the count was too large: nobody else takes it then. */
    if (!is_recorded && !engine->has_thread) {
        move.value = slot->ticket;
        move.arrived = &m->arrived[slot->ticket & (engine->slot_count - 1)];
        move.done = &slot->device_words->done;
    }
    KVF_TRY(ops->event_record(begin, stream));
    KVF_TRY(ops->stream_wait_event(own, begin));
    if (!is_recorded)
        KVF_TRY(kvf_transfer_clock_start(engine, own, 0, &clock));
    kvf_status status = KVF_ENQUEUE(own, move, move);
    kvf_status stopped = kvf_transfer_clock_stop(engine, own, clock);
    if (status != KVF_OK || stopped != KVF_OK)
        return status != KVF_OK ? status : stopped;
    kvf_transfer_count(&engine->counters.copies, !is_recorded);
    return ops->event_record(arrived, own);
}

static void mapped_shape(const kvf_transfer_config *config, kvf_transfer_shape *out)
{
    out->blocks = config->blocks ? config->blocks : BLOCKS;
}

const kvf_transfer_ops kvf_transfer_mapped = {
    .open = mapped_open, .close = mapped_close, .enqueue = mapped_enqueue, .shape = mapped_shape};
