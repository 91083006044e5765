/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The staging ring.
 *
 * Knows nothing of pages: a chunk is bytes between a filler and a stream. Invariant: chunk number n
 * of the life of the ring is ring[n % depth]; it is free, reserved or in flight, and only the chunk
 * that is next in order is ever handed out.
 */

#include "staging.h"

typedef enum chunk_state { CHUNK_FREE, CHUNK_RESERVED, CHUNK_IN_FLIGHT } chunk_state;

typedef struct ring_chunk {
    kvf_chunk chunk;
    chunk_state state; /* guarded by lock */
    kvf_event *copied; /* recorded by submit */
} ring_chunk;

struct kvf_staging {
    kvf_context *context;
    kvf_device *device;
    kvf_host_memory memory;
    pthread_mutex_t lock;
    pthread_cond_t submitted; /* a reserved chunk went into flight */
    size_t chunk_bytes;
    uint32_t depth;
    uint32_t next;    /* guarded by lock: index handed out next */
    ring_chunk *ring; /* [depth] */
};

static kvf_status fill_ring(kvf_staging *staging)
{
    const kvf_host_memory *memory = &staging->memory;
    size_t per_arena = memory->arenas[0].bytes / staging->chunk_bytes;
    for (uint32_t i = 0; i < staging->depth; i++) {
        const kvf_arena *arena = &memory->arenas[i / per_arena];
        size_t offset = (i % per_arena) * staging->chunk_bytes;
        staging->ring[i].chunk = (kvf_chunk){.host = arena->host + offset,
                                             .device = arena->device + offset,
                                             .bytes = staging->chunk_bytes,
                                             .index = i};
        KVF_TRY(
            staging->device->ops->event_create(staging->device, false, &staging->ring[i].copied));
    }
    return KVF_OK;
}

kvf_status kvf_staging_create(kvf_context *context, kvf_device *device,
                              const kvf_staging_config *config, kvf_staging **out)
{
    *out = NULL;
    KVF_ASSERT(config->depth > 0 && config->chunk_bytes > 0 && config->chunk_bytes % 64 == 0);
    kvf_staging *staging = kvf_alloc(context, 1, sizeof *staging);
    if (!staging)
        KVF_FAIL(context, KVF_OUT_OF_MEMORY, "no memory for a staging ring");
    if (pthread_mutex_init(&staging->lock, NULL) != 0 ||
        pthread_cond_init(&staging->submitted, NULL) != 0) {
        kvf_free(context, staging);
        KVF_FAIL(context, KVF_SYSTEM, "a lock for a staging ring could not be made");
    }
    staging->context = context;
    staging->device = device;
    staging->chunk_bytes = config->chunk_bytes;
    staging->depth = config->depth;
    kvf_status status = KVF_OK;
    staging->ring = kvf_alloc(context, config->depth, sizeof *staging->ring);
    if (!staging->ring)
        status = kvf_fail(context, KVF_OUT_OF_MEMORY, 0, "no memory for %u staging chunks",
                          config->depth);
    if (status == KVF_OK) {
        kvf_host_memory_config memory = config->memory;
        memory.bytes = (uint64_t)config->chunk_bytes * config->depth;
        memory.granule = config->chunk_bytes;
        status = kvf_host_memory_create(context, device, &memory, &staging->memory);
    }
    if (status == KVF_OK)
        status = fill_ring(staging);
    if (status != KVF_OK) {
        kvf_staging_destroy(staging);
        return status;
    }
    *out = staging;
    return KVF_OK;
}

void kvf_staging_destroy(kvf_staging *staging)
{
    if (!staging)
        return;
    for (uint32_t i = 0; staging->ring && i < staging->depth; i++) {
        if (staging->ring[i].state == CHUNK_IN_FLIGHT)
            (void)staging->device->ops->event_wait(staging->ring[i].copied);
        staging->device->ops->event_destroy(staging->ring[i].copied);
    }
    kvf_host_memory_destroy(staging->context, &staging->memory);
    pthread_cond_destroy(&staging->submitted);
    pthread_mutex_destroy(&staging->lock);
    kvf_free(staging->context, staging->ring);
    kvf_free(staging->context, staging);
}

/* Hand out the next chunk, which is free; under the lock. */
static void take_next(kvf_staging *staging, kvf_chunk *out)
{
    ring_chunk *next = &staging->ring[staging->next];
    KVF_ASSERT(next->state == CHUNK_FREE);
    next->state = CHUNK_RESERVED;
    staging->next = (staging->next + 1) % staging->depth;
    *out = next->chunk;
}

kvf_status kvf_staging_try_reserve(kvf_staging *staging, kvf_chunk *out)
{
    kvf_status status = KVF_BUSY;
    pthread_mutex_lock(&staging->lock);
    ring_chunk *next = &staging->ring[staging->next];
    if (next->state == CHUNK_IN_FLIGHT && staging->device->ops->event_is_done(next->copied) == 1)
        next->state = CHUNK_FREE;
    if (next->state == CHUNK_FREE) {
        take_next(staging, out);
        status = KVF_OK;
    }
    pthread_mutex_unlock(&staging->lock);
    return status;
}

kvf_status kvf_staging_reserve(kvf_staging *staging, kvf_chunk *out)
{
    kvf_status status = KVF_OK;
    pthread_mutex_lock(&staging->lock);
    for (;;) {
        ring_chunk *next = &staging->ring[staging->next];
        if (next->state == CHUNK_RESERVED) {
            pthread_cond_wait(&staging->submitted, &staging->lock);
            continue;
        }
        if (next->state == CHUNK_FREE)
            break;
        pthread_mutex_unlock(&staging->lock);
        status = staging->device->ops->event_wait(next->copied);
        pthread_mutex_lock(&staging->lock);
        /* Another thread may have had it meanwhile. */
        if (next->state == CHUNK_IN_FLIGHT &&
            staging->device->ops->event_is_done(next->copied) == 1)
            next->state = CHUNK_FREE;
        if (status != KVF_OK)
            break;
    }
    if (status == KVF_OK)
        take_next(staging, out);
    pthread_mutex_unlock(&staging->lock);
    return status;
}

kvf_status kvf_staging_submit(kvf_staging *staging, const kvf_chunk *chunk, kvf_stream *stream)
{
    KVF_ASSERT(chunk->index < staging->depth);
    ring_chunk *own = &staging->ring[chunk->index];
    kvf_status status = staging->device->ops->event_record(own->copied, stream);
    pthread_mutex_lock(&staging->lock);
    KVF_ASSERT(own->state == CHUNK_RESERVED);
    own->state = CHUNK_IN_FLIGHT;
    pthread_cond_broadcast(&staging->submitted);
    pthread_mutex_unlock(&staging->lock);
    return status;
}
