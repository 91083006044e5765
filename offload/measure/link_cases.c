/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A case of the link bench that brings pages: the pool that they are of, what the case holds, its
 * single steps, and what of them is timed.
 *
 * Every 8 bytes of the pool are a function of their offset, so any page of any size can be compared
 * with what it should be. Every kind of case is a row: how it is opened, one function for one
 * repetition, what is compared. A repetition is measured from its first look at the clock on. The
 * last one is verified, and of some kinds the first of all. Knows nothing of how methods work.
 * Invariant: lists and slots are written only while no request is in flight; slot i belongs to
 * entry i of the list that was written last.
 */

#include "link_measure.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "common/clock.h"
#include "common/random.h"
#include "transfer.h"

#define MIB           ((size_t)1 << 20)
#define PEAK_ROUND    64u
#define BOUNCE_BYTES  ((size_t)4 << 20) /* room to compare in */
#define BACK_BYTES    ((size_t)4 << 20) /* of write-back, used again and again */
#define REQUESTS_MAX  64u
#define COMPUTE_DIM   128u
#define COMPUTE_PAGE  16u
#define COMPUTE_GROUP 4u
#define LAUNCHES_MAX  4096u

/* Compute of a known length: dense attention of a few tokens, once or often. */
typedef struct link_compute {
    kvf_prefill_kernel_args args;
    void *q, *pages, *out, *blocks; /* device */
    uint32_t launches;              /* that take about the length asked for */
} link_compute;

/* A ring of staging by itself. */
typedef struct link_ring {
    kvf_host_memory memory; /* [depth, chunk] */
    kvf_gather *gather;
    const void **from; /* host addresses, [pages] */
    void **to;         /* [pages] */
    uint32_t per_chunk, depth;
    uint32_t workers;
} link_ring;

typedef struct link_kind link_kind;

typedef struct link_rig {
    kvf_link *bench;
    const kvf_link_case *c;
    const link_kind *kind;
    kvf_device *device;
    const kvf_device_ops *ops;
    kvf_stream *stream;      /* of the caller */
    kvf_stream *back_stream; /* of write-back, low priority */
    kvf_event *begin, *end;
    kvf_transfer_engine *engine; /* NULL where the case needs none */
    uint64_t random;
    uint32_t lists; /* requests that are prepared at once: layers, or 1 */
    uint64_t pool_pages;
    uint32_t *ids;           /* [lists, pages] */
    uint32_t *slot_of;       /* [pages] */
    char *slots;             /* device [pages, page_bytes] */
    const void **from;       /* device [lists, pages] */
    void **to;               /* device [pages] */
    uint32_t *count;         /* device [1] */
    kvf_host_memory control; /* what is copied to from, to and count; then room to compare in */
    char *back_from;         /* device, of write-back; NULL without */
    kvf_host_memory back_to;
    uint64_t back_bytes;                                /* per repetition */
    uint64_t *total, *copying, *gather, *alone, *fetch; /* [repetitions], fetch [x layers] */
    link_compute compute;
    link_ring ring;
    size_t offset;      /* of the pool that PEAK copied last */
    kvf_event **events; /* CADENCE: [2, layers] */
    kvf_stream *other;  /* TAX: of fetches, */
    uint32_t fetches;   /* as many as take at least as long as the compute */
} link_rig;

struct link_kind {
    kvf_status (*open)(link_rig *rig);   /* beyond what every kind has */
    kvf_status (*poison)(link_rig *rig); /* where bytes arrive, before they are compared */
    kvf_status (*repeat)(link_rig *rig, uint32_t at);
    kvf_status (*verify)(link_rig *rig, uint64_t *verified);
    kvf_status (*copy)(link_rig *rig); /* of repeat_copies */
    bool is_verified_first;            /* the first repetition, too */
    bool keeps_pages;                  /* pages are not chosen before every repetition */
    bool writes_back;
};

/* ---- the pool ---- */

void kvf_link_pool_drop(kvf_link *bench)
{
    kvf_host_memory_destroy(bench->device->context, &bench->pool);
    bench->pool = (kvf_host_memory){0};
    bench->pool_bytes = 0;
}

static void fill(kvf_link *bench)
{
    uint64_t offset = 0;
    for (uint32_t i = 0; i < bench->pool.arena_count; i++) {
        uint64_t *words = (uint64_t *)(void *)bench->pool.arenas[i].host;
        const size_t count = bench->pool.arenas[i].bytes / 8;
        for (size_t w = 0; w < count; w++)
            words[w] = kvf_link_word(offset + w * 8);
        offset += count * 8;
    }
}

static kvf_status make_pool(kvf_link *bench, const kvf_link_case *c)
{
    const int32_t node = c->numa_node >= 0 ? c->numa_node : bench->config.memory.node;
    const uint64_t bytes = kvf_round_up(c->pool_bytes, MIB);
    if (bench->pool_bytes == bytes && bench->pool_node == node &&
        bench->pool_huge_pages == c->huge_pages)
        return KVF_OK;
    kvf_link_pool_drop(bench);
    kvf_host_memory_config memory = bench->config.memory;
    memory.bytes = bytes;
    memory.granule = MIB;
    memory.node = node;
    memory.huge_pages = c->huge_pages;
    KVF_TRY(kvf_host_memory_create(bench->device->context, bench->device, &memory, &bench->pool));
    bench->pool_bytes = bytes;
    bench->pool_node = node;
    bench->pool_huge_pages = c->huge_pages;
    fill(bench);
    return KVF_OK;
}

/* Every arena holds whole pages only; all but the last one are of the same size. */
static uint64_t pages_of_arena(const kvf_link *bench, size_t page_bytes)
{
    return bench->pool.arenas[0].bytes / page_bytes;
}

static uint64_t pool_pages(const kvf_link *bench, size_t page_bytes)
{
    const kvf_host_memory *pool = &bench->pool;
    return (pool->arena_count - 1) * pages_of_arena(bench, page_bytes) +
           pool->arenas[pool->arena_count - 1].bytes / page_bytes;
}

static char *page_host(const kvf_link *bench, size_t page_bytes, uint32_t id)
{
    const uint64_t per_arena = pages_of_arena(bench, page_bytes);
    return bench->pool.arenas[id / per_arena].host + id % per_arena * page_bytes;
}

static char *page_device(const kvf_link *bench, size_t page_bytes, uint32_t id)
{
    const uint64_t per_arena = pages_of_arena(bench, page_bytes);
    return bench->pool.arenas[id / per_arena].device + id % per_arena * page_bytes;
}

static uint64_t page_offset(const kvf_link *bench, size_t page_bytes, uint32_t id)
{
    const uint64_t per_arena = pages_of_arena(bench, page_bytes);
    return id / per_arena * bench->pool.arenas[0].bytes + id % per_arena * page_bytes;
}

bool kvf_link_is_right(const char *bytes, uint64_t offset, size_t count)
{
    for (size_t i = 0; i < count; i += 8) {
        uint64_t word;
        memcpy(&word, bytes + i, sizeof word);
        if (word != kvf_link_word(offset + i))
            return false;
    }
    return true;
}

/* ---- which pages ---- */

/* A permutation of 0 .. count-1 without a table: ranks far apart land far apart. */
static uint32_t spread(uint64_t rank, uint64_t count)
{
    static const uint64_t primes[] = {2654435761u, 2246822519u, 3266489917u};
    for (size_t i = 0; i < sizeof primes / sizeof *primes; i++)
        if (count % primes[i] != 0)
            return (uint32_t)(rank * primes[i] % count);
    return (uint32_t)rank;
}

/* A rank 0 .. count-1 with weight (rank + 1)^-s, by the inverse of the continuous distribution. */
static uint64_t zipf_rank(double s, uint64_t count, double u)
{
    const double n = (double)count + 1;
    double x;
    if (fabs(s - 1) < 1e-6)
        x = exp(u * log(n));
    else
        x = pow(1 + u * (pow(n, 1 - s) - 1), 1 / (1 - s));
    uint64_t rank = x >= 1 ? (uint64_t)x - 1 : 0;
    return rank < count ? rank : count - 1;
}

void kvf_link_choose(const kvf_link_case *c, uint64_t pool_pages, uint64_t *random, uint32_t *ids)
{
    const uint32_t run = kvf_min_u32(c->run_pages, (uint32_t)pool_pages);
    for (uint32_t i = 0; i < c->pages; i++) {
        const uint64_t r = kvf_random_next(random);
        switch (c->pattern) {
        case KVF_LINK_ZIPF:
            ids[i] =
                spread(zipf_rank(c->zipf, pool_pages, (double)(r >> 11) * 0x1p-53), pool_pages);
            break;
        case KVF_LINK_RUNS:
            ids[i] = i % run > 0 ? ids[i - 1] + 1 : (uint32_t)(r % (pool_pages - run + 1));
            break;
        case KVF_LINK_UNIFORM:
        default:
            /* One page of each of `pages` equal parts, the parts in any order: all distinct. */
            {
                const uint64_t part = pool_pages / c->pages;
                ids[i] = (uint32_t)(part * i + r % part);
            }
            break;
        }
    }
    if (c->pattern != KVF_LINK_UNIFORM)
        return;
    for (uint32_t i = c->pages; i-- > 1;) {
        const uint32_t j = (uint32_t)(kvf_random_next(random) % (i + 1)), other = ids[i];
        ids[i] = ids[j];
        ids[j] = other;
    }
}

/* ---- what a case holds ---- */

static size_t list_bytes(const link_rig *rig)
{
    return (size_t)rig->lists * rig->c->pages * sizeof(void *);
}

static kvf_status open_memory(link_rig *rig)
{
    const kvf_link_case *c = rig->c;
    kvf_device *device = rig->device;
    kvf_context *context = device->context;
    const size_t slots = c->pages * c->page_bytes;
    void *memory = NULL;
    rig->ids = kvf_alloc(context, (size_t)rig->lists * c->pages, sizeof *rig->ids);
    rig->slot_of = kvf_alloc(context, c->pages, sizeof *rig->slot_of);
    if (!rig->ids || !rig->slot_of)
        KVF_FAIL(context, KVF_OUT_OF_MEMORY, "no memory for %u pages", c->pages);
    for (uint32_t i = 0; i < c->pages; i++)
        rig->slot_of[i] = i;
    for (uint32_t i = c->slots_in_order ? 0 : c->pages; i-- > 1;) {
        const uint32_t j = (uint32_t)(kvf_random_next(&rig->random) % (i + 1));
        const uint32_t other = rig->slot_of[i];
        rig->slot_of[i] = rig->slot_of[j];
        rig->slot_of[j] = other;
    }
    KVF_TRY(rig->ops->memory_alloc(device, slots, &memory));
    rig->slots = memory;
    KVF_TRY(rig->ops->memory_alloc(device, list_bytes(rig), &memory));
    rig->from = memory;
    KVF_TRY(rig->ops->memory_alloc(device, c->pages * sizeof *rig->to, &memory));
    rig->to = memory;
    KVF_TRY(rig->ops->memory_alloc(device, sizeof *rig->count, &memory));
    rig->count = memory;
    kvf_host_memory_config control = rig->bench->config.memory;
    control.bytes = control.granule =
        kvf_round_up(list_bytes(rig) > BOUNCE_BYTES ? list_bytes(rig) : BOUNCE_BYTES, 4096);
    control.huge_pages = KVF_HUGE_PAGES_AUTO;
    return kvf_host_memory_create(context, device, &control, &rig->control);
}

static kvf_status open_write_back(link_rig *rig)
{
    const kvf_link_case *c = rig->c;
    void *memory = NULL;
    if (c->writeback_percent == 0 || c->what == KVF_LINK_BACK)
        return KVF_OK;
    rig->back_bytes = (uint64_t)c->pages * c->page_bytes * c->writeback_percent / 100 / 64 * 64;
    kvf_host_memory_config back = rig->bench->config.memory;
    back.bytes = back.granule = BACK_BYTES;
    back.node = rig->bench->pool_node;
    KVF_TRY(kvf_host_memory_create(rig->device->context, rig->device, &back, &rig->back_to));
    KVF_TRY(rig->ops->memory_alloc(rig->device, BACK_BYTES, &memory));
    rig->back_from = memory;
    return rig->ops->stream_create(rig->device, KVF_PRIORITY_LOW, &rig->back_stream);
}

static kvf_status open_samples(link_rig *rig)
{
    const size_t count = rig->c->repetitions;
    rig->total = kvf_alloc(rig->device->context, (4 + rig->lists) * count, sizeof *rig->total);
    if (!rig->total)
        KVF_FAIL(rig->device->context, KVF_OUT_OF_MEMORY, "no memory for %zu repetitions", count);
    rig->copying = rig->total + count;
    rig->gather = rig->copying + count;
    rig->alone = rig->gather + count;
    rig->fetch = rig->alone + count;
    return KVF_OK;
}

static kvf_status open_engine(link_rig *rig)
{
    const kvf_link_case *c = rig->c;
    const kvf_link_bench_config *b = &rig->bench->config;
    kvf_transfer_config config = {.method = c->method,
                                  .page_bytes = c->page_bytes,
                                  .pages_max = c->pages,
                                  .requests_max = kvf_min_u32(rig->lists, REQUESTS_MAX),
                                  .chunk_bytes = c->chunk_bytes,
                                  .depth = c->depth,
                                  .gather_threads = c->workers > 0 ? c->workers : b->gather_threads,
                                  .blocks = c->blocks,
                                  .memory = b->memory,
                                  .pool = &rig->bench->pool,
                                  .choice = b->choice};
    config.memory.node = rig->bench->pool_node;
    return kvf_transfer_open(rig->device, &config, &rig->engine);
}

static kvf_status open_rig(link_rig *rig)
{
    const kvf_link_case *c = rig->c;
    kvf_device *device = rig->device;
    rig->random = c->seed;
    rig->pool_pages = pool_pages(rig->bench, c->page_bytes);
    if (rig->pool_pages < c->pages || rig->pool_pages > UINT32_MAX)
        KVF_FAIL(
            device->context, KVF_INVALID,
            "pool_bytes = %llu: holds %llu pages of %zu bytes, and %u are taken at once; raise "
            "it, or lower pages",
            (unsigned long long)c->pool_bytes, (unsigned long long)rig->pool_pages, c->page_bytes,
            c->pages);
    KVF_TRY(rig->ops->stream_create(device, KVF_PRIORITY_NORMAL, &rig->stream));
    KVF_TRY(rig->ops->event_create(device, true, &rig->begin));
    KVF_TRY(rig->ops->event_create(device, true, &rig->end));
    KVF_TRY(open_samples(rig));
    KVF_TRY(open_memory(rig));
    KVF_TRY(open_write_back(rig));
    return rig->kind->open(rig);
}

static void close_rig(link_rig *rig)
{
    const kvf_device_ops *ops = rig->ops;
    kvf_context *context = rig->device->context;
    ops->stream_destroy(rig->back_stream);
    ops->stream_destroy(rig->other);
    ops->stream_destroy(rig->stream);
    kvf_transfer_close(rig->engine);
    kvf_gather_destroy(rig->ring.gather);
    for (uint32_t i = 0; rig->events && i < 2 * rig->lists; i++)
        ops->event_destroy(rig->events[i]);
    ops->event_destroy(rig->end);
    ops->event_destroy(rig->begin);
    void *memory[] = {
        rig->compute.q, rig->compute.out, rig->compute.pages, rig->compute.blocks, rig->back_from,
        rig->count,     rig->to,          rig->from,          rig->slots};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++)
        ops->memory_free(rig->device, memory[i]);
    kvf_host_memory_destroy(context, &rig->ring.memory);
    kvf_host_memory_destroy(context, &rig->back_to);
    kvf_host_memory_destroy(context, &rig->control);
    void *plain[] = {rig->total, rig->slot_of, rig->ids, rig->ring.to, rig->ring.from, rig->events};
    for (size_t i = 0; i < sizeof plain / sizeof *plain; i++)
        kvf_free(context, plain[i]);
}

/* ---- steps ---- */

static kvf_status prepare(link_rig *rig)
{
    const kvf_link_case *c = rig->c;
    const kvf_arena *arena = &rig->control.arenas[0];
    const void **from = (const void **)(void *)arena->host;
    void **to = (void **)(void *)arena->host;
    const uint32_t count = c->pages;
    for (uint32_t l = 0; l < rig->lists; l++) {
        uint32_t *ids = rig->ids + (size_t)l * c->pages;
        kvf_link_choose(c, rig->pool_pages, &rig->random, ids);
        for (uint32_t i = 0; i < c->pages; i++)
            from[(size_t)l * c->pages + i] = page_device(rig->bench, c->page_bytes, ids[i]);
    }
    KVF_TRY(rig->ops->copy(rig->stream, rig->from, arena->device, list_bytes(rig)));
    KVF_TRY(rig->ops->stream_wait(rig->stream));
    for (uint32_t i = 0; i < c->pages; i++)
        to[i] = rig->slots + rig->slot_of[i] * c->page_bytes;
    KVF_TRY(rig->ops->copy(rig->stream, rig->to, arena->device, c->pages * sizeof *to));
    KVF_TRY(rig->ops->stream_wait(rig->stream));
    memcpy(arena->host, &count, sizeof count);
    KVF_TRY(rig->ops->copy(rig->stream, rig->count, arena->device, sizeof count));
    return rig->ops->stream_wait(rig->stream);
}

static kvf_status fetch(link_rig *rig, uint32_t l, kvf_stream *stream)
{
    const kvf_transfer_request request = {
        .from = rig->from + (size_t)l * rig->c->pages, .to = rig->to, .count = rig->count};
    uint32_t ticket;
    kvf_status status = kvf_transfer_submit(rig->engine, &request, stream, &ticket);
    if (status == KVF_BUSY) {
        KVF_TRY(kvf_transfer_wait_room(rig->engine));
        status = kvf_transfer_submit(rig->engine, &request, stream, &ticket);
    }
    KVF_TRY(status);
    return kvf_transfer_join(rig->engine, ticket, stream);
}

static kvf_status write_back(link_rig *rig)
{
    const size_t chunk = (size_t)1 << 20;
    for (uint64_t at = 0; at < rig->back_bytes; at += chunk) {
        const size_t part = rig->back_bytes - at < chunk ? (size_t)(rig->back_bytes - at) : chunk;
        KVF_TRY(rig->ops->copy(rig->back_stream, rig->back_to.arenas[0].device + at % BACK_BYTES,
                               rig->back_from + at % BACK_BYTES, part));
    }
    return KVF_OK;
}

static kvf_status poison_slots(link_rig *rig)
{
    KVF_TRY(rig->ops->fill(rig->stream, rig->slots, 0xa5, rig->c->pages * rig->c->page_bytes));
    return rig->ops->stream_wait(rig->stream);
}

/* Slots hold the last list. */
static kvf_status verify_slots(link_rig *rig, uint64_t *bytes)
{
    const size_t page_bytes = rig->c->page_bytes;
    const kvf_arena *bounce = &rig->control.arenas[0];
    const uint32_t *ids = rig->ids + (size_t)(rig->lists - 1) * rig->c->pages;
    const uint32_t at_once = (uint32_t)(BOUNCE_BYTES / page_bytes);
    for (uint32_t first = 0; first < rig->c->pages; first += at_once) {
        const uint32_t count = kvf_min_u32(at_once, rig->c->pages - first);
        for (uint32_t i = 0; i < count; i++)
            KVF_TRY(rig->ops->copy(rig->stream, bounce->device + i * page_bytes,
                                   rig->slots + rig->slot_of[first + i] * page_bytes, page_bytes));
        KVF_TRY(rig->ops->stream_wait(rig->stream));
        for (uint32_t i = 0; i < count; i++)
            if (!kvf_link_is_right(bounce->host + i * page_bytes,
                                   page_offset(rig->bench, page_bytes, ids[first + i]), page_bytes))
                KVF_FAIL(rig->device->context, KVF_CORRUPT,
                         "page %u of the pool did not arrive whole in slot %u by '%s'",
                         ids[first + i], rig->slot_of[first + i],
                         kvf_transfer_name(rig->c->method));
    }
    *bytes += (uint64_t)rig->c->pages * page_bytes;
    return KVF_OK;
}

/* ---- compute ---- */

static kvf_status launch_once(link_rig *rig, kvf_stream *stream)
{
    const kvf_prefill_kernel_args *a = &rig->compute.args;
    return KVF_ENQUEUE(stream, prefill, *a);
}

static kvf_status enqueue_compute(link_rig *rig, kvf_stream *stream)
{
    for (uint32_t i = 0; i < rig->compute.launches; i++)
        KVF_TRY(launch_once(rig, stream));
    return KVF_OK;
}

/* Time of one launch, the second of two: the first one warms up. */
static kvf_status time_launch(link_rig *rig, uint64_t *ns)
{
    KVF_TRY(launch_once(rig, rig->stream));
    KVF_TRY(rig->ops->event_record(rig->begin, rig->stream));
    KVF_TRY(launch_once(rig, rig->stream));
    KVF_TRY(rig->ops->event_record(rig->end, rig->stream));
    KVF_TRY(rig->ops->stream_wait(rig->stream));
    return rig->ops->event_elapsed(rig->begin, rig->end, ns);
}

/* One task per multiprocessor, or per thread of the host device, so that nothing stays free. */
static kvf_status open_compute(link_rig *rig, uint64_t length_ns)
{
    link_compute *compute = &rig->compute;
    kvf_device *device = rig->device;
    kvf_device_properties properties;
    device->ops->properties(device, &properties);
    const uint32_t heads = kvf_min_u32(properties.multiprocessors > 0 ? properties.multiprocessors
                                                                      : properties.compute_threads,
                                       1024);
    const kvf_shape shape = {.dtype = KVF_BF16, .head_dim = COMPUTE_DIM, .page_size = COMPUTE_PAGE};
    const uint32_t blocks = KVF_PREFILL_QUERIES / COMPUTE_PAGE;
    const size_t row = (size_t)heads * COMPUTE_GROUP * COMPUTE_DIM * 2;
    const size_t block_bytes = heads * kvf_page_bytes(&shape);
    const kvf_arena *arena = &rig->control.arenas[0];
    KVF_TRY(rig->ops->memory_alloc(device, KVF_PREFILL_QUERIES * row, &compute->q));
    KVF_TRY(rig->ops->memory_alloc(device, KVF_PREFILL_QUERIES * row, &compute->out));
    KVF_TRY(rig->ops->memory_alloc(device, blocks * block_bytes, &compute->pages));
    KVF_TRY(rig->ops->memory_alloc(device, blocks * sizeof(void *), &compute->blocks));
    for (uint32_t b = 0; b < blocks; b++)
        ((void **)(void *)arena->host)[b] = (char *)compute->pages + b * block_bytes;
    KVF_TRY(rig->ops->copy(rig->stream, compute->blocks, arena->device, blocks * sizeof(void *)));
    KVF_TRY(rig->ops->stream_wait(rig->stream));
    compute->args = (kvf_prefill_kernel_args){.shape = shape,
                                              .kv_heads = heads,
                                              .group = COMPUTE_GROUP,
                                              .tokens = KVF_PREFILL_QUERIES,
                                              .scale = 1,
                                              .q_dtype = shape.dtype,
                                              .out_dtype = shape.dtype,
                                              .q = compute->q,
                                              .blocks = compute->blocks,
                                              .out = compute->out};
    uint64_t ns = 0;
    KVF_TRY(time_launch(rig, &ns));
    const uint64_t launches = ns > 0 ? (length_ns + ns / 2) / ns : 1;
    compute->launches = launches < 1              ? 1
                        : launches > LAUNCHES_MAX ? LAUNCHES_MAX
                                                  : (uint32_t)launches;
    return KVF_OK;
}

static kvf_status elapsed(link_rig *rig, uint64_t *ns)
{
    return rig->ops->event_elapsed(rig->begin, rig->end, ns);
}

/* All work since `began` is done: the time of the repetition. */
static kvf_status finish(link_rig *rig, uint64_t began, uint32_t at)
{
    KVF_TRY(rig->ops->stream_wait(rig->stream));
    rig->total[at] = kvf_now_ns() - began;
    return rig->back_stream ? rig->ops->stream_wait(rig->back_stream) : KVF_OK;
}

/* ---- the methods ---- */

static kvf_status repeat_both(link_rig *rig, uint32_t at)
{
    kvf_transfer_stats before, after;
    kvf_transfer_stats_read(rig->engine, &before);
    const uint64_t began = kvf_now_ns();
    KVF_TRY(write_back(rig));
    KVF_TRY(fetch(rig, 0, rig->stream));
    KVF_TRY(finish(rig, began, at));
    kvf_transfer_stats_read(rig->engine, &after);
    rig->copying[at] = after.copy_ns - before.copy_ns;
    rig->gather[at] = after.gather_ns - before.gather_ns;
    return KVF_OK;
}

/* ---- a part of it alone ---- */

static kvf_status open_ring(link_rig *rig)
{
    const kvf_link_case *c = rig->c;
    link_ring *r = &rig->ring;
    kvf_context *context = rig->device->context;
    const size_t chunk = c->chunk_bytes > 0 ? c->chunk_bytes : (size_t)1 << 20;
    r->per_chunk = chunk > c->page_bytes ? (uint32_t)(chunk / c->page_bytes) : 1;
    r->depth = c->depth > 0 ? c->depth : 3;
    r->workers = c->what == KVF_LINK_MEMCPY ? 1
                 : c->workers > 0           ? c->workers
                                            : rig->bench->config.gather_threads;
    kvf_host_memory_config memory = rig->bench->config.memory;
    memory.granule = r->per_chunk * c->page_bytes;
    memory.bytes = memory.granule * r->depth;
    memory.arena_bytes_max = memory.bytes > KVF_ARENA_BYTES_MAX ? 0 : memory.bytes;
    memory.node = rig->bench->pool_node;
    if (memory.bytes > KVF_ARENA_BYTES_MAX)
        KVF_FAIL(context, KVF_INVALID,
                 "a staging ring of %u chunks of %zu bytes is larger than 1 GiB; lower "
                 "depth or chunk_bytes",
                 r->depth, memory.granule);
    KVF_TRY(kvf_host_memory_create(context, rig->device, &memory, &r->memory));
    KVF_TRY(kvf_gather_create(rig->device, r->workers, NULL, &r->gather));
    r->from = kvf_alloc(context, c->pages, sizeof *r->from);
    r->to = kvf_alloc(context, c->pages, sizeof *r->to);
    if (!r->from || !r->to)
        KVF_FAIL(context, KVF_OUT_OF_MEMORY, "no memory for %u pages", c->pages);
    uint64_t *words = (uint64_t *)(void *)r->memory.arenas[0].host;
    for (size_t w = 0; w < r->memory.arenas[0].bytes / 8; w++)
        words[w] = kvf_link_word(w * 8);
    return KVF_OK;
}

static char *ring_page(const link_rig *rig, uint32_t page)
{
    const link_ring *r = &rig->ring;
    return r->memory.arenas[0].host + page % (r->per_chunk * (size_t)r->depth) * rig->c->page_bytes;
}

/* The workers fill chunk after chunk. */
static void gather_pages(const link_ring *r, const kvf_link_case *c)
{
    for (uint32_t first = 0; first < c->pages; first += r->per_chunk) {
        kvf_copy_args args = {.bytes = c->page_bytes,
                              .count = kvf_min_u32(r->per_chunk, c->pages - first),
                              .per_task = kvf_gather_per_task(c->page_bytes),
                              .stream = 1,
                              .from = r->from + first,
                              .to = r->to + first};
        kvf_gather_run(r->gather, &args);
    }
}

static void copy_pages(const link_ring *r, const kvf_link_case *c)
{
    for (uint32_t i = 0; i < c->pages; i++)
        memcpy(r->to[i], r->from[i], c->page_bytes);
}

static kvf_status repeat_staging(link_rig *rig, uint32_t at)
{
    const kvf_link_case *c = rig->c;
    link_ring *r = &rig->ring;
    for (uint32_t i = 0; i < c->pages; i++) {
        r->from[i] = page_host(rig->bench, c->page_bytes, rig->ids[i]);
        r->to[i] = ring_page(rig, i);
    }
    const uint64_t began = kvf_now_ns();
    if (c->what == KVF_LINK_MEMCPY)
        copy_pages(r, c);
    else
        gather_pages(r, c);
    rig->total[at] = rig->gather[at] = kvf_now_ns() - began;
    return KVF_OK;
}

/* Pages that the ring still holds. */
static kvf_status verify_staging(link_rig *rig, uint64_t *verified)
{
    const kvf_link_case *c = rig->c;
    const uint32_t room = rig->ring.per_chunk * rig->ring.depth;
    for (uint32_t i = c->pages > room ? c->pages - room : 0; i < c->pages; i++) {
        if (!kvf_link_is_right(rig->ring.to[i], page_offset(rig->bench, c->page_bytes, rig->ids[i]),
                               c->page_bytes))
            KVF_FAIL(rig->device->context, KVF_CORRUPT,
                     "page %u of the pool did not reach staging whole", rig->ids[i]);
        *verified += c->page_bytes;
    }
    return KVF_OK;
}

/* ---- copies ---- */

/* The copies of the kind, on both clocks. */
static kvf_status repeat_copies(link_rig *rig, uint32_t at)
{
    const uint64_t began = kvf_now_ns();
    KVF_TRY(write_back(rig));
    KVF_TRY(rig->ops->event_record(rig->begin, rig->stream));
    KVF_TRY(rig->kind->copy(rig));
    KVF_TRY(rig->ops->event_record(rig->end, rig->stream));
    KVF_TRY(finish(rig, began, at));
    return elapsed(rig, &rig->copying[at]);
}

static size_t slots_bytes(const link_rig *rig)
{
    return rig->c->pages * rig->c->page_bytes;
}

/* Chunk after chunk of the ring to the slots in order. */
static kvf_status copy_ring(link_rig *rig)
{
    const size_t chunk = rig->ring.per_chunk * rig->c->page_bytes, bytes = slots_bytes(rig);
    for (size_t done = 0, n = 0; done < bytes; done += chunk, n++)
        KVF_TRY(
            rig->ops->copy_through(rig->stream, rig->slots + done,
                                   rig->ring.memory.arenas[0].device + n % rig->ring.depth * chunk,
                                   bytes - done < chunk ? bytes - done : chunk));
    return KVF_OK;
}

/* The slots hold the ring over and over; chunk n of them is page n % depth x per_chunk of a pool
 * that the ring was filled from. */
static kvf_status verify_ring(link_rig *rig, uint64_t *verified)
{
    const size_t page_bytes = rig->c->page_bytes;
    const kvf_arena *bounce = &rig->control.arenas[0];
    for (uint32_t i = 0; i < rig->c->pages; i++) {
        KVF_TRY(
            rig->ops->copy(rig->stream, bounce->device, rig->slots + i * page_bytes, page_bytes));
        KVF_TRY(rig->ops->stream_wait(rig->stream));
        if (memcmp(bounce->host, ring_page(rig, i), page_bytes) != 0)
            KVF_FAIL(rig->device->context, KVF_CORRUPT,
                     "the copy of a staging chunk did not arrive whole at byte %zu",
                     i * page_bytes);
        *verified += page_bytes;
    }
    return KVF_OK;
}

static kvf_status check_contiguous(link_rig *rig)
{
    const kvf_arena *arena = &rig->bench->pool.arenas[0];
    if (slots_bytes(rig) > arena->bytes)
        KVF_FAIL(
            rig->device->context, KVF_INVALID,
            "pages = %u: one copy of %zu bytes does not fit a piece of the pool, of %zu; lower "
            "pages or page_bytes",
            rig->c->pages, slots_bytes(rig), arena->bytes);
    return KVF_OK;
}

static kvf_status copy_peak(link_rig *rig)
{
    const kvf_arena *arena = &rig->bench->pool.arenas[0];
    const size_t room = (arena->bytes - slots_bytes(rig)) / PEAK_ROUND + 1;
    rig->offset = kvf_random_next(&rig->random) % room * PEAK_ROUND;
    return rig->ops->copy_through(rig->stream, rig->slots, arena->device + rig->offset,
                                  slots_bytes(rig));
}

static kvf_status verify_peak(link_rig *rig, uint64_t *verified)
{
    const size_t bytes = slots_bytes(rig);
    const kvf_arena *bounce = &rig->control.arenas[0];
    for (size_t done = 0, part; done < bytes; done += part) {
        part = bytes - done < bounce->bytes ? bytes - done : bounce->bytes;
        KVF_TRY(rig->ops->copy(rig->stream, bounce->device, rig->slots + done, part));
        KVF_TRY(rig->ops->stream_wait(rig->stream));
        if (!kvf_link_is_right(bounce->host, rig->offset + done, part))
            KVF_FAIL(rig->device->context, KVF_CORRUPT,
                     "a contiguous copy did not arrive whole after byte %zu", done);
    }
    *verified += bytes;
    return KVF_OK;
}

/* The other way: from the slots, which get the beginning of the pool first. */
static kvf_status open_back(link_rig *rig)
{
    kvf_host_memory_config memory = rig->bench->config.memory;
    KVF_TRY(check_contiguous(rig));
    memory.bytes = memory.granule = kvf_round_up(slots_bytes(rig), 4096);
    memory.node = rig->bench->pool_node;
    memory.huge_pages = rig->c->huge_pages;
    KVF_TRY(kvf_host_memory_create(rig->device->context, rig->device, &memory, &rig->back_to));
    KVF_TRY(rig->ops->copy(rig->stream, rig->slots, rig->bench->pool.arenas[0].device,
                           slots_bytes(rig)));
    return rig->ops->stream_wait(rig->stream);
}

static kvf_status poison_host(link_rig *rig)
{
    memset(rig->back_to.arenas[0].host, 0xa5, slots_bytes(rig));
    return KVF_OK;
}

static kvf_status copy_back(link_rig *rig)
{
    return rig->ops->copy_through(rig->stream, rig->back_to.arenas[0].device, rig->slots,
                                  slots_bytes(rig));
}

static kvf_status verify_back(link_rig *rig, uint64_t *verified)
{
    if (!kvf_link_is_right(rig->back_to.arenas[0].host, 0, slots_bytes(rig)))
        KVF_FAIL(rig->device->context, KVF_CORRUPT,
                 "a contiguous copy of %zu bytes did not reach the host whole", slots_bytes(rig));
    *verified += slots_bytes(rig);
    return KVF_OK;
}

/* ---- fetches and compute ---- */

static kvf_status open_cadence(link_rig *rig)
{
    const size_t count = 2 * (size_t)rig->lists;
    KVF_TRY(open_engine(rig));
    rig->events = kvf_alloc(rig->device->context, count, sizeof *rig->events);
    if (!rig->events)
        KVF_FAIL(rig->device->context, KVF_OUT_OF_MEMORY, "no memory for %zu events", count);
    for (size_t i = 0; i < count; i++)
        KVF_TRY(rig->ops->event_create(rig->device, true, &rig->events[i]));
    return open_compute(rig, rig->c->gap_ns);
}

/* One step: every layer fetches, joins and computes; events stand round every fetch. */
static kvf_status repeat_cadence(link_rig *rig, uint32_t at)
{
    kvf_event *const *events = rig->events;
    const uint64_t began = kvf_now_ns();
    KVF_TRY(write_back(rig));
    for (uint32_t l = 0; l < rig->lists; l++) {
        KVF_TRY(rig->ops->event_record(events[2 * l], rig->stream));
        KVF_TRY(fetch(rig, l, rig->stream));
        KVF_TRY(rig->ops->event_record(events[2 * l + 1], rig->stream));
        KVF_TRY(enqueue_compute(rig, rig->stream));
    }
    KVF_TRY(finish(rig, began, at));
    for (uint32_t l = 0; l < rig->lists; l++)
        KVF_TRY(rig->ops->event_elapsed(events[2 * l], events[2 * l + 1],
                                        &rig->fetch[(size_t)at * rig->lists + l]));
    return KVF_OK;
}

static kvf_status open_tax(link_rig *rig)
{
    KVF_TRY(open_engine(rig));
    KVF_TRY(rig->ops->stream_create(rig->device, KVF_PRIORITY_NORMAL, &rig->other));
    KVF_TRY(prepare(rig));
    KVF_TRY(repeat_both(rig, 0));
    KVF_TRY(repeat_both(rig, 0)); /* warm */
    const uint64_t fetch_ns = rig->total[0] > 0 ? rig->total[0] : 1;
    /* Long enough that the first fetch, which has a head start, does not count. */
    const uint64_t length_ns = rig->c->gap_ns > 4 * fetch_ns ? rig->c->gap_ns : 4 * fetch_ns;
    rig->fetches = (uint32_t)(2 * length_ns / fetch_ns) + 1;
    return open_compute(rig, length_ns);
}

/* Compute on one stream; on another as many fetches as take at least as long. */
static kvf_status repeat_tax(link_rig *rig, uint32_t at)
{
    for (int beside = 0; beside < 2; beside++) {
        for (uint32_t f = 0; beside && f < rig->fetches; f++)
            KVF_TRY(fetch(rig, 0, rig->other));
        KVF_TRY(rig->ops->event_record(rig->begin, rig->stream));
        KVF_TRY(enqueue_compute(rig, rig->stream));
        KVF_TRY(rig->ops->event_record(rig->end, rig->stream));
        KVF_TRY(rig->ops->stream_wait(rig->stream));
        KVF_TRY(elapsed(rig, beside ? &rig->total[at] : &rig->alone[at]));
        KVF_TRY(rig->ops->stream_wait(rig->other));
    }
    return KVF_OK;
}

/* ---- kinds ---- */

static const link_kind kinds[] = {
    [KVF_LINK_BOTH] = {open_engine, poison_slots, repeat_both, verify_slots,
                       .is_verified_first = true, .writes_back = true},
    [KVF_LINK_GATHER] = {open_ring, NULL, repeat_staging, verify_staging,
                         .is_verified_first = true},
    [KVF_LINK_MEMCPY] = {open_ring, NULL, repeat_staging, verify_staging,
                         .is_verified_first = true},
    [KVF_LINK_COPY] = {open_ring, poison_slots, repeat_copies, verify_ring, copy_ring,
                       .writes_back = true},
    [KVF_LINK_PEAK] = {check_contiguous, poison_slots, repeat_copies, verify_peak, copy_peak,
                       .keeps_pages = true, .writes_back = true},
    [KVF_LINK_BACK] = {open_back, poison_host, repeat_copies, verify_back, copy_back,
                       .keeps_pages = true, .writes_back = true},
    [KVF_LINK_CADENCE] = {open_cadence, poison_slots, repeat_cadence, verify_slots,
                          .writes_back = true},
    [KVF_LINK_TAX] = {open_tax, poison_slots, repeat_tax, .verify = verify_slots},
};

static kvf_status repeat_all(link_rig *rig, uint64_t *verified)
{
    const link_kind *kind = rig->kind;
    const uint32_t warmup = rig->c->warmup, all = warmup + rig->c->repetitions;
    for (uint32_t i = 0; i < all; i++) {
        const bool is_verified = i + 1 == all || (i == 0 && kind->is_verified_first);
        if (!kind->keeps_pages)
            KVF_TRY(prepare(rig));
        if (is_verified && kind->poison)
            KVF_TRY(kind->poison(rig));
        KVF_TRY(kind->repeat(rig, i < warmup ? 0 : i - warmup));
        if (is_verified)
            KVF_TRY(kind->verify(rig, verified));
    }
    return KVF_OK;
}

/* Bytes and copies per repetition, and what the engine or the ring took. */
static void describe(const link_rig *rig, kvf_link_result *result)
{
    const kvf_link_case *c = rig->c;
    const link_ring *ring = &rig->ring;
    kvf_transfer_shape shape = {.depth = ring->depth,
                                .chunk_bytes = ring->per_chunk * c->page_bytes};
    if (rig->engine)
        kvf_transfer_shape_read(rig->engine, &shape);
    else if (c->what == KVF_LINK_COPY)
        shape.pages_per_copy = ring->per_chunk;
    else
        shape.workers = ring->workers;
    result->bytes = (uint64_t)rig->lists * slots_bytes(rig);
    result->workers = shape.workers;
    result->depth = shape.depth;
    result->blocks = shape.blocks;
    result->chunk_bytes = shape.chunk_bytes;
    result->copies = shape.workers && ring->depth ? 0 : rig->lists;
    if (shape.pages_per_copy)
        result->copies *= kvf_div_ceil_u32(c->pages, shape.pages_per_copy);
}

static void sum_up(link_rig *rig, uint64_t *samples_ns, kvf_link_result *result)
{
    const kvf_link_what what = rig->c->what;
    const uint32_t n = rig->c->repetitions;
    const bool is_both = what == KVF_LINK_BOTH;
    const bool gathers = what == KVF_LINK_GATHER || (is_both && result->workers > 0);
    if (samples_ns)
        memcpy(samples_ns, rig->total, n * sizeof *samples_ns);
    kvf_link_times_sum_up(rig->total, n, &result->total);
    kvf_link_times_sum_up(rig->copying, is_both || rig->kind->copy ? n : 0, &result->copying);
    kvf_link_times_sum_up(rig->gather, gathers ? n : 0, &result->gather);
    kvf_link_times_sum_up(rig->alone, what == KVF_LINK_TAX ? n : 0, &result->alone);
    kvf_link_times_sum_up(rig->fetch, what == KVF_LINK_CADENCE ? n * rig->lists : 0,
                          &result->fetch);
    result->writeback_bytes = rig->kind->writes_back ? rig->back_bytes * n : 0;
}

kvf_status kvf_link_run(kvf_link *bench, const kvf_link_case *c, uint64_t *samples_ns,
                        kvf_link_result *result)
{
    KVF_TRY(make_pool(bench, c));
    link_rig rig = {.bench = bench,
                    .c = c,
                    .kind = &kinds[c->what],
                    .device = bench->device,
                    .ops = bench->device->ops,
                    .lists = c->what == KVF_LINK_CADENCE ? c->layers : 1};
    const kvf_arena *arena = &bench->pool.arenas[0];
    snprintf(result->tier, sizeof result->tier, "%s", kvf_page_tier_name(kvf_arena_tier(arena)));
    result->numa_node = arena->bound ? bench->pool_node : -1;
    kvf_status status = open_rig(&rig);
    if (status == KVF_OK)
        status = repeat_all(&rig, &result->verified_bytes);
    if (status == KVF_OK) {
        describe(&rig, result);
        sum_up(&rig, samples_ns, result);
    }
    close_rig(&rig);
    return status;
}
