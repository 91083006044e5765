/* SPDX-License-Identifier: Apache-2.0 */

/*
 * How long the copies of the transfer engine take, by the clock of the streams that carry them.
 *
 * A clock is a pair of events; it is read when both are done, by whoever asks next, so nobody waits
 * for a time. Knows nothing of requests. Invariant: only a closed clock is read, and it is free
 * afterwards; a clock belongs to the thread that opened it until that closes it.
 */

#include "transfer_method.h"

kvf_status kvf_transfer_clocks_create(kvf_transfer_engine *engine)
{
    kvf_device *device = engine->device;
    for (uint32_t i = 0; i < KVF_TRANSFER_CLOCKS; i++) {
        KVF_TRY(device->ops->event_create(device, true, &engine->clocks[i].begin));
        KVF_TRY(device->ops->event_create(device, true, &engine->clocks[i].end));
    }
    return KVF_OK;
}

void kvf_transfer_clocks_destroy(kvf_transfer_engine *engine)
{
    for (uint32_t i = KVF_TRANSFER_CLOCKS; i-- > 0;) {
        engine->device->ops->event_destroy(engine->clocks[i].end);
        engine->device->ops->event_destroy(engine->clocks[i].begin);
    }
}

/* Under the clock lock. */
static void read_done(kvf_transfer_engine *engine)
{
    const kvf_device_ops *ops = engine->device->ops;
    for (uint32_t i = 0; i < KVF_TRANSFER_CLOCKS; i++) {
        kvf_transfer_clock *clock = &engine->clocks[i];
        uint64_t ns = 0;
        if (clock->state != KVF_CLOCK_CLOSED || ops->event_is_done(clock->end) != 1)
            continue;
        if (ops->event_elapsed(clock->begin, clock->end, &ns) == KVF_OK)
            kvf_transfer_count(&engine->counters.copy_ns, ns);
        clock->state = KVF_CLOCK_FREE;
    }
}

void kvf_transfer_clocks_read(kvf_transfer_engine *engine)
{
    pthread_mutex_lock(&engine->clock_lock);
    read_done(engine);
    pthread_mutex_unlock(&engine->clock_lock);
}

/* Under the clock lock. */
static kvf_transfer_clock *find(kvf_transfer_engine *engine, int state)
{
    for (uint32_t i = 0; i < KVF_TRANSFER_CLOCKS; i++)
        if ((int)engine->clocks[i].state == state)
            return &engine->clocks[i];
    return NULL;
}

kvf_status kvf_transfer_clock_start(kvf_transfer_engine *engine, kvf_stream *stream, bool may_wait,
                                    kvf_transfer_clock **clock)
{
    const kvf_device_ops *ops = engine->device->ops;
    kvf_status status = KVF_OK;
    pthread_mutex_lock(&engine->clock_lock);
    *clock = find(engine, KVF_CLOCK_FREE);
    while (!*clock && status == KVF_OK) {
        read_done(engine);
        *clock = find(engine, KVF_CLOCK_FREE);
        kvf_transfer_clock *busy = find(engine, KVF_CLOCK_CLOSED);
        if (*clock || !may_wait || !busy)
            break;
        pthread_mutex_unlock(&engine->clock_lock);
        status = ops->event_wait(busy->end);
        pthread_mutex_lock(&engine->clock_lock);
    }
    if (*clock)
        (*clock)->state = KVF_CLOCK_OPEN;
    pthread_mutex_unlock(&engine->clock_lock);
    if (status == KVF_OK && *clock)
        status = ops->event_record((*clock)->begin, stream);
    if (status != KVF_OK && *clock) {
        pthread_mutex_lock(&engine->clock_lock);
        (*clock)->state = KVF_CLOCK_FREE;
        pthread_mutex_unlock(&engine->clock_lock);
        *clock = NULL;
    }
    return status;
}

kvf_status kvf_transfer_clock_stop(kvf_transfer_engine *engine, kvf_stream *stream,
                                   kvf_transfer_clock *clock)
{
    if (!clock)
        return KVF_OK;
    kvf_status status = engine->device->ops->event_record(clock->end, stream);
    pthread_mutex_lock(&engine->clock_lock);
    clock->state = status == KVF_OK ? KVF_CLOCK_CLOSED : KVF_CLOCK_FREE;
    pthread_mutex_unlock(&engine->clock_lock);
    return status;
}
