/* SPDX-License-Identifier: Apache-2.0 */

/*
 * gather: workers fill a staging chunk, one device copy brings it over, a scatter fills the slots.
 *
 * While chunk i is copied and scattered on the copy stream, the workers already fill chunk i + 1. A
 * chunk lands in device memory at the same index of a landing area, so that the event which frees
 * the chunk also says that its landing place has been read. Where the slots of a chunk lie in
 * order, the copy goes straight to them.
 *
 * The workers read pages at the addresses of the request, which is right on a device whose aliases
 * the CPU can read (the host device); one where they differ must translate them in its own method.
 * Invariant: landing chunk i is written only between reserve and the event of chunk i.
 */

#include "transfer_method.h"

#define CHUNK_BYTES   ((size_t)1 << 20)
#define DEPTH         3u
/* Pages of one gather task: small against a chunk, so that workers end together; large against a
 * claim. */
#define GATHER_PAGES  8u
#define SCATTER_PAGES 16u

typedef struct gather_method {
    kvf_staging *staging;
    kvf_gather *gather;
    char *landing;       /* device [depth, chunk_bytes] */
    void **staged_to;    /* [depth, pages_per_chunk] where the workers write */
    const void **landed; /* device [depth, pages_per_chunk] where the scatter reads */
    uint32_t pages_per_chunk;
    uint32_t depth;
} gather_method;

static uint32_t pages_per_chunk(const kvf_transfer_config *config)
{
    size_t bytes = config->chunk_bytes > 0 ? config->chunk_bytes : CHUNK_BYTES;
    size_t pages = bytes / config->page_bytes;
    if (pages > config->pages_max)
        pages = config->pages_max;
    return pages > 0 ? (uint32_t)pages : 1;
}

static uint32_t ring_depth(const kvf_transfer_config *config)
{
    return config->depth > 0 ? config->depth : DEPTH;
}

static void gather_needs(const kvf_transfer_config *config, uint64_t *host_bytes,
                         uint64_t *device_bytes)
{
    uint64_t pages = (uint64_t)pages_per_chunk(config) * ring_depth(config);
    *host_bytes = pages * config->page_bytes;
    *device_bytes = pages * (config->page_bytes + sizeof(void *));
}

static void gather_close(kvf_transfer_engine *engine)
{
    gather_method *m = engine->method;
    if (m == NULL)
        return;
    kvf_device *device = engine->device;
    device->ops->memory_free(device, m->landed);
    device->ops->memory_free(device, m->landing);
    kvf_free(device->context, m->staged_to);
    kvf_gather_destroy(m->gather);
    kvf_staging_destroy(m->staging);
    kvf_free(device->context, m);
    engine->method = NULL;
}

/* Learn where the pages of every chunk lie: round the ring once. */
static kvf_status note_addresses(kvf_transfer_engine *engine, gather_method *m)
{
    for (uint32_t i = 0; i < m->depth; i++) {
        kvf_chunk chunk;
        KVF_TRY(kvf_staging_reserve(m->staging, &chunk));
        for (uint32_t p = 0; p < m->pages_per_chunk; p++) {
            size_t at = (size_t)chunk.index * m->pages_per_chunk + p;
            m->staged_to[at] = chunk.host + p * engine->config.page_bytes;
            m->landed[at] = m->landing + at * engine->config.page_bytes;
        }
        KVF_TRY(kvf_staging_submit(m->staging, &chunk, engine->copy_stream));
    }
    return engine->device->ops->stream_wait(engine->copy_stream);
}

static kvf_status gather_open(kvf_transfer_engine *engine)
{
    kvf_device *device = engine->device;
    const kvf_transfer_config *config = &engine->config;
    gather_method *m = kvf_alloc(device->context, 1, sizeof *m);
    engine->method = m;
    if (m == NULL)
        return kvf_fail(device->context, KVF_OUT_OF_MEMORY, 0, "no memory for 'gather'");
    m->pages_per_chunk = pages_per_chunk(config);
    m->depth = ring_depth(config);
    size_t pages = (size_t)m->pages_per_chunk * m->depth;
    kvf_staging_config staging = {.chunk_bytes = m->pages_per_chunk * config->page_bytes,
                                  .depth = m->depth,
                                  .memory = config->memory};
    KVF_TRY(kvf_staging_create(device->context, device, &staging, &m->staging));
    KVF_TRY(kvf_gather_create(device, config->gather_threads, config->gather_cpus, &m->gather));
    m->staged_to = kvf_alloc(device->context, pages, sizeof *m->staged_to);
    if (m->staged_to == NULL)
        return kvf_fail(device->context, KVF_OUT_OF_MEMORY, 0, "no memory for 'gather'");
    void *memory = NULL;
    KVF_TRY(device->ops->memory_alloc(device, pages * config->page_bytes, &memory));
    m->landing = memory;
    KVF_TRY(device->ops->memory_alloc(device, pages * sizeof *m->landed, &memory));
    m->landed = memory;
    return note_addresses(engine, m);
}

static int are_in_order(void *const *to, uint32_t count, size_t page_bytes)
{
    for (uint32_t i = 1; i < count; i++)
        if ((char *)to[i] != (char *)to[0] + i * page_bytes)
            return 0;
    return 1;
}

/* One filled chunk to its slots, on the copy stream. */
static kvf_status send(kvf_transfer_engine *engine, const gather_method *m, const kvf_chunk *chunk,
                       void *const *to, uint32_t count)
{
    const kvf_device_ops *ops = engine->device->ops;
    size_t page_bytes = engine->config.page_bytes;
    KVF_TRY(kvf_transfer_clock_start(engine));
    if (are_in_order(to, count, page_bytes)) {
        KVF_TRY(ops->copy_through(engine->copy_stream, to[0], chunk->device, count * page_bytes));
    } else {
        size_t first = (size_t)chunk->index * m->pages_per_chunk;
        KVF_TRY(ops->copy(engine->copy_stream, m->landing + first * page_bytes, chunk->device,
                          count * page_bytes));
        kvf_copy_args scatter = {.bytes = page_bytes,
                                 .count = count,
                                 .per_task = SCATTER_PAGES,
                                 .stream = 1,
                                 .from = m->landed + first,
                                 .to = to};
        KVF_TRY(ops->launch(engine->copy_stream, engine->device->kernels.copy, &scatter,
                            sizeof scatter, kvf_copy_tasks(&scatter)));
    }
    kvf_transfer_count(&engine->counters.copies, 1);
    return kvf_transfer_clock_stop(engine);
}

/* On the copy stream's thread, which has nothing to copy before this chunk is filled. */
static void help_to_gather(const void *raw, uint32_t task)
{
    (void)task;
    kvf_gather_help((*(gather_method *const *)raw)->gather);
}

static kvf_status move_chunk(kvf_transfer_engine *engine, gather_method *m,
                             const kvf_transfer_request *request, uint32_t first, uint32_t count)
{
    kvf_chunk chunk;
    kvf_status status = kvf_staging_try_reserve(m->staging, &chunk);
    if (status == KVF_BUSY) {
        kvf_transfer_count(&engine->counters.waits, 1);
        status = kvf_staging_reserve(m->staging, &chunk);
    }
    if (status != KVF_OK)
        return status;
    uint64_t began = kvf_now_ns();
    /* Past the cache: 8.9 to 10.3 GB/s of gather and copy at 1 MiB chunks in every run (Zen 4 in a
     * virtual machine, two cores); through the cache gave 11.6 in some runs and 5.2 in others. */
    kvf_copy_args gather = {.bytes = engine->config.page_bytes,
                            .count = count,
                            .per_task = GATHER_PAGES,
                            .stream = 1,
                            .from = request->from + first,
                            .to = m->staged_to + (size_t)chunk.index * m->pages_per_chunk};
    /* Two threads then share all the work, whichever of gather and copy is the slower one. */
    kvf_gather_begin(m->gather, &gather);
    status = engine->device->ops->host_call(engine->copy_stream, help_to_gather, &m, sizeof m);
    kvf_gather_end(m->gather);
    kvf_transfer_count(&engine->counters.gather_ns, kvf_now_ns() - began);
    if (status == KVF_OK)
        status = send(engine, m, &chunk, request->to + first, count);
    kvf_status submitted = kvf_staging_submit(m->staging, &chunk, engine->copy_stream);
    return status != KVF_OK ? status : submitted;
}

static kvf_status gather_move(kvf_transfer_engine *engine, const kvf_transfer_request *request,
                              uint32_t count)
{
    gather_method *m = engine->method;
    kvf_status status = KVF_OK;
    for (uint32_t first = 0; first < count && status == KVF_OK; first += m->pages_per_chunk)
        status =
            move_chunk(engine, m, request, first, kvf_min_u32(m->pages_per_chunk, count - first));
    kvf_status arrived = engine->device->ops->stream_wait(engine->copy_stream);
    return status != KVF_OK ? status : arrived;
}

const kvf_transfer_ops kvf_transfer_gather_ops = {
    .method = KVF_TRANSFER_GATHER,
    .name = "gather",
    .open = gather_open,
    .close = gather_close,
    .move = gather_move,
    .needs = gather_needs,
};
