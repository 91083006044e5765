/* SPDX-License-Identifier: Apache-2.0 */

/*
 * gather: workers fill a staging chunk, one device copy brings it over, a scatter fills the slots.
 *
 * While chunk i is copied and scattered on the copy stream, the workers already fill chunk i + 1. A
 * chunk lands in device memory at the same index of a landing area, so that the event which frees
 * the chunk also says that its landing place has been read. Where the slots of a chunk lie in
 * order, the copy goes straight to them.
 *
 * A page is named by its device alias; the workers read it at the host address that the arenas of
 * the pool give for it. Invariant: landing chunk i is written only between reserve and the event of
 * chunk i.
 */

#include <stdlib.h>

#include "common/clock.h"
#include "transfer_method.h"

#define CHUNK_BYTES ((size_t)1 << 20)
#define DEPTH       3u

/* Addresses that lie together for the device and for the host: neighbouring arenas of the pool are
 * one run. */
typedef struct pool_run {
    uintptr_t device;
    uintptr_t host;
    uintptr_t bytes;
} pool_run;

typedef struct gather_method {
    kvf_staging *staging;
    kvf_gather *gather;
    char *landing;        /* device [depth, chunk_bytes] */
    void **staged_to;     /* [depth, pages_per_chunk] where the workers write */
    const void **landed;  /* device [depth, pages_per_chunk] where the scatter reads */
    const void **sources; /* [pages_per_chunk] where the workers read; NULL: as
                             the list says */
    pool_run *runs;       /* [run_count] of the pool, in ascending order */
    uint32_t run_count;
    uint32_t pages_per_chunk;
    uint32_t depth;
} gather_method;

static uint32_t chunk_pages(const kvf_transfer_config *config)
{
    size_t bytes = config->chunk_bytes > 0 ? config->chunk_bytes : CHUNK_BYTES;
    size_t pages = bytes / config->page_bytes;
    if (pages > config->pages_max)
        pages = config->pages_max;
    return pages > 0 ? (uint32_t)pages : 1;
}

static uint32_t chunk_depth(const kvf_transfer_config *config)
{
    return config->depth > 0 ? config->depth : DEPTH;
}

static void gather_needs(const kvf_transfer_config *config, uint64_t *host_bytes,
                         uint64_t *device_bytes)
{
    uint64_t pages = (uint64_t)chunk_pages(config) * chunk_depth(config);
    *host_bytes = pages * config->page_bytes;
    *device_bytes = pages * (config->page_bytes + sizeof(void *));
}

static void gather_close(kvf_transfer_engine *engine)
{
    gather_method *m = engine->method[KVF_TRANSFER_GATHER];
    if (!m)
        return;
    kvf_device *device = engine->device;
    device->ops->memory_free(device, m->landed);
    device->ops->memory_free(device, m->landing);
    kvf_free(device->context, m->runs);
    kvf_free(device->context, m->sources);
    kvf_free(device->context, m->staged_to);
    kvf_gather_destroy(m->gather);
    kvf_staging_destroy(m->staging);
    kvf_free(device->context, m);
    engine->method[KVF_TRANSFER_GATHER] = NULL;
}

/* Learn where the pages of every chunk lie: round the ring once. */
static kvf_status note_addresses(kvf_transfer_engine *engine, gather_method *m)
{
    kvf_device *device = engine->device;
    const size_t count = (size_t)m->depth * m->pages_per_chunk;
    const void **landed = kvf_alloc(device->context, count, sizeof *landed);
    kvf_status status = KVF_OK;
    if (!landed)
        KVF_FAIL(device->context, KVF_OUT_OF_MEMORY, "no memory for 'gather'");
    for (uint32_t i = 0; i < m->depth && status == KVF_OK; i++) {
        kvf_chunk chunk;
        status = kvf_staging_reserve(m->staging, &chunk);
        if (status != KVF_OK)
            break;
        for (uint32_t p = 0; p < m->pages_per_chunk; p++) {
            size_t at = (size_t)chunk.index * m->pages_per_chunk + p;
            m->staged_to[at] = chunk.host + p * engine->config.page_bytes;
            landed[at] = m->landing + at * engine->config.page_bytes;
        }
        status = kvf_staging_submit(m->staging, &chunk, engine->copy_stream);
    }
    if (status == KVF_OK)
        status = device->ops->copy(engine->copy_stream, m->landed, landed, count * sizeof *landed);
    kvf_status arrived = device->ops->stream_wait(engine->copy_stream);
    kvf_free(device->context, landed);
    return status != KVF_OK ? status : arrived;
}

static int by_device(const void *a, const void *b)
{
    const uintptr_t x = ((const pool_run *)a)->device, y = ((const pool_run *)b)->device;
    return (x > y) - (x < y);
}

/* Learn where the pool lies. */
static kvf_status note_pool(const kvf_transfer_engine *engine, gather_method *m)
{
    const kvf_host_memory *pool = engine->config.pool;
    if (!pool)
        return KVF_OK;
    m->runs = kvf_alloc(engine->device->context, pool->arena_count, sizeof *m->runs);
    if (!m->runs)
        KVF_FAIL(engine->device->context, KVF_OUT_OF_MEMORY, "no memory for 'gather'");
    for (uint32_t i = 0; i < pool->arena_count; i++)
        m->runs[i] = (pool_run){.device = (uintptr_t)pool->arenas[i].device,
                                .host = (uintptr_t)pool->arenas[i].host,
                                .bytes = pool->arenas[i].bytes};
    qsort(m->runs, pool->arena_count, sizeof *m->runs, by_device);
    for (uint32_t i = 0; i < pool->arena_count; i++) {
        const pool_run next = m->runs[i];
        pool_run *last = m->run_count > 0 ? &m->runs[m->run_count - 1] : NULL;
        if (last && last->device + last->bytes == next.device &&
            last->host + last->bytes == next.host)
            last->bytes += next.bytes;
        else
            m->runs[m->run_count++] = next;
    }
    return KVF_OK;
}

static kvf_status gather_open(kvf_transfer_engine *engine)
{
    kvf_device *device = engine->device;
    const kvf_transfer_config *config = &engine->config;
    KVF_ASSERT(config->pool || engine->shares);
    gather_method *m = kvf_alloc(device->context, 1, sizeof *m);
    engine->method[KVF_TRANSFER_GATHER] = m;
    if (!m)
        KVF_FAIL(device->context, KVF_OUT_OF_MEMORY, "no memory for 'gather'");
    m->pages_per_chunk = chunk_pages(config);
    m->depth = chunk_depth(config);
    KVF_TRY(note_pool(engine, m));
    size_t pages = (size_t)m->pages_per_chunk * m->depth;
    kvf_staging_config staging = {.chunk_bytes = m->pages_per_chunk * config->page_bytes,
                                  .depth = m->depth,
                                  .memory = config->memory};
    KVF_TRY(kvf_staging_create(device->context, device, &staging, &m->staging));
    KVF_TRY(kvf_gather_create(device, config->gather_threads, config->gather_cpus, &m->gather));
    m->staged_to = kvf_alloc(device->context, pages, sizeof *m->staged_to);
    m->sources = kvf_alloc(device->context, m->pages_per_chunk, sizeof *m->sources);
    if (!m->staged_to || !m->sources)
        KVF_FAIL(device->context, KVF_OUT_OF_MEMORY, "no memory for 'gather'");
    void *memory = NULL;
    KVF_TRY(device->ops->memory_alloc(device, pages * config->page_bytes, &memory));
    m->landing = memory;
    KVF_TRY(device->ops->memory_alloc(device, pages * sizeof *m->landed, &memory));
    m->landed = memory;
    return note_addresses(engine, m);
}

/* The host address of a page; NULL if it is not wholly in the pool. A request names thousands of
 * them in any order, so the search has no branch to guess. */
static const char *host_address(const gather_method *m, size_t page_bytes, const void *alias)
{
    const uintptr_t address = (uintptr_t)alias;
    const pool_run *run = m->runs;
    for (uint32_t n = m->run_count; n > 1; n -= n / 2)
        run += run[n / 2].device <= address ? n / 2 : 0;
    const uintptr_t offset = address - run->device;
    if (offset >= run->bytes || page_bytes > run->bytes - offset)
        return NULL;
    return (const char *)(run->host + offset);
}

static kvf_status find_sources(const kvf_transfer_engine *engine, gather_method *m,
                               const void *const *from, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        m->sources[i] = host_address(m, engine->config.page_bytes, from[i]);
        if (!m->sources[i])
            KVF_FAIL(engine->device->context, KVF_CORRUPT,
                     "a request names a page at %p, which is not in the pool", from[i]);
    }
    return KVF_OK;
}

static bool are_in_order(void *const *to, uint32_t count, size_t page_bytes)
{
    for (uint32_t i = 1; i < count; i++)
        if ((char *)to[i] != (char *)to[0] + i * page_bytes)
            return false;
    return true;
}

/* One filled chunk to its slots, on the copy stream. */
static kvf_status send(kvf_transfer_engine *engine, const gather_method *m, const kvf_chunk *chunk,
                       const kvf_transfer_list *list, uint32_t first, uint32_t count)
{
    const kvf_device_ops *ops = engine->device->ops;
    const size_t page_bytes = engine->config.page_bytes;
    kvf_transfer_count(&engine->counters.copies, 1);
    if (are_in_order(list->to + first, count, page_bytes))
        return ops->copy_through(engine->copy_stream, list->to[first], chunk->device,
                                 count * page_bytes);
    const size_t at = (size_t)chunk->index * m->pages_per_chunk;
    KVF_TRY(ops->copy(engine->copy_stream, m->landing + at * page_bytes, chunk->device,
                      count * page_bytes));
    kvf_copy_args scatter = {.bytes = page_bytes,
                             .count = count,
                             .per_task = kvf_gather_per_task(page_bytes),
                             .stream = 1,
                             .from = m->landed + at,
                             .to = list->device_to + first};
    return KVF_ENQUEUE(engine->copy_stream, copy, scatter);
}

/* On the copy stream's thread, which has nothing to copy before this chunk is filled. */
static void help_to_gather(const void *raw, uint32_t task)
{
    (void)task;
    kvf_gather_help((*(gather_method *const *)raw)->gather);
}

/* Fill a chunk; the workers, this thread, and on the host device the copy stream's one. */
static kvf_status fill(kvf_transfer_engine *engine, gather_method *m, const kvf_chunk *chunk,
                       const kvf_transfer_list *list, uint32_t first, uint32_t count)
{
    kvf_context *context = engine->device->context;
    kvf_status status = KVF_OK;
    uint64_t began = kvf_now_ns();
    if (kvf_context_refuses(context, "gather"))
        KVF_FAIL(context, KVF_SYSTEM, "the gather workers are gone");
    if (engine->config.pool)
        KVF_TRY(find_sources(engine, m, list->from + first, count));
    /* Past the cache: 8.9 to 10.3 GB/s of gather and copy at 1 MiB chunks in every run (Zen 4 in a
     * virtual machine, two cores); through the cache gave 11.6 in some runs and 5.2 in others. */
    kvf_copy_args gather = {.bytes = engine->config.page_bytes,
                            .count = count,
                            .per_task = kvf_gather_per_task(engine->config.page_bytes),
                            .stream = 1,
                            .from = engine->config.pool ? m->sources : list->from + first,
                            .to = m->staged_to + (size_t)chunk->index * m->pages_per_chunk};
    kvf_gather_begin(m->gather, &gather);
    if (engine->shares)
        status = engine->device->ops->host_call(engine->copy_stream, help_to_gather, &m, sizeof m);
    kvf_gather_end(m->gather);
    kvf_transfer_count(&engine->counters.gather_ns, kvf_now_ns() - began);
    return status;
}

static kvf_status move_chunk(kvf_transfer_engine *engine, gather_method *m,
                             const kvf_transfer_list *list, uint32_t first, uint32_t count)
{
    kvf_chunk chunk;
    kvf_status status = kvf_staging_try_reserve(m->staging, &chunk);
    if (status == KVF_BUSY) {
        kvf_transfer_count(&engine->counters.waits, 1);
        status = kvf_staging_reserve(m->staging, &chunk);
    }
    if (status != KVF_OK)
        return status;
    status = fill(engine, m, &chunk, list, first, count);
    if (status == KVF_OK) {
        kvf_transfer_clock *clock;
        status = kvf_transfer_clock_start(engine, engine->copy_stream, 1, &clock);
        if (status == KVF_OK)
            status = send(engine, m, &chunk, list, first, count);
        kvf_status stopped = kvf_transfer_clock_stop(engine, engine->copy_stream, clock);
        status = status != KVF_OK ? status : stopped;
    }
    kvf_status submitted = kvf_staging_submit(m->staging, &chunk, engine->copy_stream);
    return status != KVF_OK ? status : submitted;
}

static kvf_status gather_move(kvf_transfer_engine *engine, const kvf_transfer_list *list)
{
    gather_method *m = engine->method[KVF_TRANSFER_GATHER];
    const uint32_t most = m->pages_per_chunk;
    kvf_status status = KVF_OK;
    for (uint32_t first = 0; first < list->count && status == KVF_OK; first += most)
        status = move_chunk(engine, m, list, first, kvf_min_u32(most, list->count - first));
    return status;
}

static void gather_shape(const kvf_transfer_config *config, kvf_transfer_shape *out)
{
    out->workers = config->gather_threads;
    out->depth = chunk_depth(config);
    out->pages_per_copy = chunk_pages(config);
    out->chunk_bytes = out->pages_per_copy * config->page_bytes;
}

const kvf_transfer_ops kvf_transfer_gather = {.open = gather_open,
                                              .close = gather_close,
                                              .move = gather_move,
                                              .needs = gather_needs,
                                              .shape = gather_shape};
