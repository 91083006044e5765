/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What is timed in each kind of case of the link bench.
 *
 * Every kind has one function for one repetition; what it does before its first look at the clock
 * is not measured. The first repetition of all and the last one are verified. Knows nothing of how
 * pages are chosen or methods work.
 */

#include <string.h>

#include "common/clock.h"
#include "common/random.h"
#include "link_rig.h"

#define PEAK_ROUND 64u

static kvf_status elapsed(kvf_link_rig *rig, uint64_t *ns)
{
    return rig->ops->event_elapsed(rig->begin, rig->end, ns);
}

/* What was enqueued since `began` is done: the time of the repetition. */
static kvf_status finish(kvf_link_rig *rig, uint64_t began, uint32_t at)
{
    KVF_TRY(rig->ops->stream_wait(rig->stream));
    rig->total[at] = kvf_now_ns() - began;
    return rig->back_stream ? rig->ops->stream_wait(rig->back_stream) : KVF_OK;
}

/* ---- the methods ---- */

static kvf_status repeat_both(kvf_link_rig *rig, uint32_t at)
{
    kvf_transfer_stats before, after;
    kvf_transfer_stats_read(rig->engine, &before);
    const uint64_t began = kvf_now_ns();
    KVF_TRY(kvf_link_rig_write_back(rig));
    KVF_TRY(kvf_link_rig_fetch(rig, 0, rig->stream));
    KVF_TRY(finish(rig, began, at));
    kvf_transfer_stats_read(rig->engine, &after);
    rig->copying[at] = after.copy_ns - before.copy_ns;
    rig->gather[at] = after.gather_ns - before.gather_ns;
    return KVF_OK;
}

/* ---- a part of it alone ---- */

typedef struct ring_case {
    kvf_host_memory ring; /* [depth, chunk] */
    kvf_gather *gather;
    const void **from; /* host addresses, [pages] */
    void **to;         /* [pages] */
    uint32_t per_chunk, depth;
    uint32_t workers;
    uint64_t chunks;
} ring_case;

static void ring_close(kvf_link_rig *rig, ring_case *r)
{
    kvf_context *context = rig->device->context;
    kvf_free(context, r->to);
    kvf_free(context, r->from);
    kvf_gather_destroy(r->gather);
    kvf_host_memory_destroy(context, &r->ring);
}

static kvf_status ring_open(kvf_link_rig *rig, ring_case *r)
{
    const kvf_link_case *c = rig->c;
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
    KVF_TRY(kvf_host_memory_create(context, rig->device, &memory, &r->ring));
    KVF_TRY(kvf_gather_create(rig->device, r->workers, NULL, &r->gather));
    r->from = kvf_alloc(context, c->pages, sizeof *r->from);
    r->to = kvf_alloc(context, c->pages, sizeof *r->to);
    if (!r->from || !r->to)
        KVF_FAIL(context, KVF_OUT_OF_MEMORY, "no memory for %u pages", c->pages);
    return KVF_OK;
}

static char *ring_page(const kvf_link_rig *rig, const ring_case *r, uint32_t page)
{
    return r->ring.arenas[0].host + page % (r->per_chunk * (size_t)r->depth) * rig->c->page_bytes;
}

/* The workers fill chunk after chunk. */
static void gather_pages(const ring_case *r, const kvf_link_case *c)
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

static void copy_pages(const ring_case *r, const kvf_link_case *c)
{
    for (uint32_t i = 0; i < c->pages; i++)
        memcpy(r->to[i], r->from[i], c->page_bytes);
}

/* GATHER or MEMCPY; compared afterwards: what the ring still holds. */
static kvf_status repeat_staging(kvf_link_rig *rig, ring_case *r, uint32_t at, uint64_t *verified)
{
    const kvf_link_case *c = rig->c;
    for (uint32_t i = 0; i < c->pages; i++) {
        r->from[i] = kvf_link_page_host(rig->bench, c->page_bytes, rig->ids[i]);
        r->to[i] = ring_page(rig, r, i);
    }
    const uint64_t began = kvf_now_ns();
    if (c->what == KVF_LINK_MEMCPY)
        copy_pages(r, c);
    else
        gather_pages(r, c);
    rig->total[at] = rig->gather[at] = kvf_now_ns() - began;
    if (!verified)
        return KVF_OK;
    const uint32_t room = r->per_chunk * r->depth;
    for (uint32_t i = c->pages > room ? c->pages - room : 0; i < c->pages; i++) {
        if (!kvf_link_is_right(r->to[i],
                               kvf_link_page_offset(rig->bench, c->page_bytes, rig->ids[i]),
                               c->page_bytes))
            KVF_FAIL(rig->device->context, KVF_CORRUPT,
                     "page %u of the pool did not reach staging whole", rig->ids[i]);
        *verified += c->page_bytes;
    }
    return KVF_OK;
}

/* Chunk after chunk of the ring to the slots in order. */
static kvf_status repeat_copy(kvf_link_rig *rig, ring_case *r, uint32_t at)
{
    const size_t chunk = r->per_chunk * rig->c->page_bytes;
    const size_t bytes = rig->c->pages * rig->c->page_bytes;
    const uint64_t began = kvf_now_ns();
    KVF_TRY(kvf_link_rig_write_back(rig));
    KVF_TRY(rig->ops->event_record(rig->begin, rig->stream));
    for (size_t done = 0, n = 0; done < bytes; done += chunk, n++)
        KVF_TRY(rig->ops->copy_through(rig->stream, rig->slots + done,
                                       r->ring.arenas[0].device + n % r->depth * chunk,
                                       bytes - done < chunk ? bytes - done : chunk));
    KVF_TRY(rig->ops->event_record(rig->end, rig->stream));
    KVF_TRY(finish(rig, began, at));
    return elapsed(rig, &rig->copying[at]);
}

/* The slots hold the ring over and over; chunk n of them is page n % depth x per_chunk of a pool
 * that the ring was filled from. */
static kvf_status verify_copy(kvf_link_rig *rig, const ring_case *r, uint64_t *verified)
{
    const size_t page_bytes = rig->c->page_bytes;
    const kvf_arena *bounce = &rig->control.arenas[0];
    for (uint32_t i = 0; i < rig->c->pages; i++) {
        KVF_TRY(
            rig->ops->copy(rig->stream, bounce->device, rig->slots + i * page_bytes, page_bytes));
        KVF_TRY(rig->ops->stream_wait(rig->stream));
        if (memcmp(bounce->host, ring_page(rig, r, i), page_bytes) != 0)
            KVF_FAIL(rig->device->context, KVF_CORRUPT,
                     "the copy of a staging chunk did not arrive whole at byte %zu",
                     i * page_bytes);
        *verified += page_bytes;
    }
    return KVF_OK;
}

static kvf_status run_ring(kvf_link_rig *rig, ring_case *r, kvf_link_result *result)
{
    const kvf_link_case *c = rig->c;
    const int copies = c->what == KVF_LINK_COPY;
    uint64_t *words = (uint64_t *)(void *)r->ring.arenas[0].host;
    for (size_t w = 0; w < r->ring.arenas[0].bytes / 8; w++)
        words[w] = kvf_link_word(w * 8);
    for (uint32_t i = 0; i < c->warmup + c->repetitions; i++) {
        const uint32_t at = i < c->warmup ? 0 : i - c->warmup;
        const bool is_last = i + 1 == c->warmup + c->repetitions;
        KVF_TRY(kvf_link_rig_prepare(rig));
        if (copies && is_last)
            KVF_TRY(kvf_link_rig_spoil(rig));
        if (copies)
            KVF_TRY(repeat_copy(rig, r, at));
        else
            KVF_TRY(repeat_staging(rig, r, at, i == 0 || is_last ? &result->verified_bytes : NULL));
    }
    if (copies)
        KVF_TRY(verify_copy(rig, r, &result->verified_bytes));
    result->copies = copies ? (c->pages + r->per_chunk - 1) / r->per_chunk : 0;
    result->workers = copies ? 0 : r->workers;
    result->depth = r->depth;
    result->chunk_bytes = r->per_chunk * c->page_bytes;
    return KVF_OK;
}

static kvf_status run_part(kvf_link_rig *rig, kvf_link_result *result)
{
    ring_case r = {0};
    kvf_status status = ring_open(rig, &r);
    if (status == KVF_OK)
        status = run_ring(rig, &r, result);
    ring_close(rig, &r);
    return status;
}

/* ---- one contiguous copy ---- */

static kvf_status run_peak(kvf_link_rig *rig, kvf_link_result *result)
{
    const kvf_link_case *c = rig->c;
    const size_t bytes = c->pages * c->page_bytes;
    const kvf_arena *arena = &rig->bench->pool.arenas[0];
    if (bytes > arena->bytes)
        KVF_FAIL(rig->device->context, KVF_INVALID,
                 "a contiguous copy of %zu bytes does not fit an arena of %zu; lower pages", bytes,
                 arena->bytes);
    const size_t room = (arena->bytes - bytes) / PEAK_ROUND + 1;
    size_t offset = 0;
    for (uint32_t i = 0; i < c->warmup + c->repetitions; i++) {
        const uint32_t at = i < c->warmup ? 0 : i - c->warmup;
        offset = kvf_random_next(&rig->random) % room * PEAK_ROUND;
        if (i + 1 == c->warmup + c->repetitions)
            KVF_TRY(kvf_link_rig_spoil(rig));
        const uint64_t began = kvf_now_ns();
        KVF_TRY(kvf_link_rig_write_back(rig));
        KVF_TRY(rig->ops->event_record(rig->begin, rig->stream));
        KVF_TRY(rig->ops->copy_through(rig->stream, rig->slots, arena->device + offset, bytes));
        KVF_TRY(rig->ops->event_record(rig->end, rig->stream));
        KVF_TRY(finish(rig, began, at));
        KVF_TRY(elapsed(rig, &rig->copying[at]));
    }
    const kvf_arena *bounce = &rig->control.arenas[0];
    for (size_t done = 0, part; done < bytes; done += part) {
        part = bytes - done < bounce->bytes ? bytes - done : bounce->bytes;
        KVF_TRY(rig->ops->copy(rig->stream, bounce->device, rig->slots + done, part));
        KVF_TRY(rig->ops->stream_wait(rig->stream));
        if (!kvf_link_is_right(bounce->host, offset + done, part))
            KVF_FAIL(rig->device->context, KVF_CORRUPT,
                     "a contiguous copy did not arrive whole behind byte %zu", done);
    }
    result->verified_bytes += bytes;
    result->copies = 1;
    return KVF_OK;
}

/* ---- fetches and compute ---- */

/* One step: every layer fetches, joins and computes; events stand round every fetch. */
static kvf_status repeat_cadence(kvf_link_rig *rig, kvf_event *const *events, uint32_t at)
{
    const uint64_t began = kvf_now_ns();
    KVF_TRY(kvf_link_rig_write_back(rig));
    for (uint32_t l = 0; l < rig->lists; l++) {
        KVF_TRY(rig->ops->event_record(events[2 * l], rig->stream));
        KVF_TRY(kvf_link_rig_fetch(rig, l, rig->stream));
        KVF_TRY(rig->ops->event_record(events[2 * l + 1], rig->stream));
        KVF_TRY(kvf_link_compute_enqueue(rig, rig->stream));
    }
    KVF_TRY(finish(rig, began, at));
    for (uint32_t l = 0; l < rig->lists; l++)
        KVF_TRY(rig->ops->event_elapsed(events[2 * l], events[2 * l + 1],
                                        &rig->fetch[(size_t)at * rig->lists + l]));
    return KVF_OK;
}

static kvf_status run_cadence(kvf_link_rig *rig, kvf_event **events, kvf_link_result *result)
{
    const kvf_link_case *c = rig->c;
    for (uint32_t i = 0; i < 2 * rig->lists; i++)
        KVF_TRY(rig->ops->event_create_timed(rig->device, &events[i]));
    KVF_TRY(kvf_link_compute_open(rig, c->gap_ns));
    for (uint32_t i = 0; i < c->warmup + c->repetitions; i++) {
        KVF_TRY(kvf_link_rig_prepare(rig));
        if (i + 1 == c->warmup + c->repetitions)
            KVF_TRY(kvf_link_rig_spoil(rig));
        KVF_TRY(repeat_cadence(rig, events, i < c->warmup ? 0 : i - c->warmup));
    }
    KVF_TRY(kvf_link_rig_verify(rig, rig->lists - 1, &result->verified_bytes));
    result->bytes *= rig->lists;
    return KVF_OK;
}

static kvf_status with_events(kvf_link_rig *rig, kvf_link_result *result)
{
    kvf_context *context = rig->device->context;
    const size_t count = 2 * (size_t)rig->lists;
    kvf_event **events = kvf_alloc(context, count, sizeof(kvf_event *));
    if (!events)
        KVF_FAIL(context, KVF_OUT_OF_MEMORY, "no memory for %zu events", count);
    kvf_status status = run_cadence(rig, events, result);
    (void)rig->ops->stream_wait(rig->stream);
    for (size_t i = 0; i < count; i++)
        rig->ops->event_destroy(events[i]);
    kvf_free(context, events);
    return status;
}

/* Compute on one stream; on another as many fetches as take at least as long. */
static kvf_status repeat_tax(kvf_link_rig *rig, kvf_stream *other, uint32_t fetches, uint32_t at)
{
    for (int beside = 0; beside < 2; beside++) {
        for (uint32_t f = 0; beside && f < fetches; f++)
            KVF_TRY(kvf_link_rig_fetch(rig, 0, other));
        KVF_TRY(rig->ops->event_record(rig->begin, rig->stream));
        KVF_TRY(kvf_link_compute_enqueue(rig, rig->stream));
        KVF_TRY(rig->ops->event_record(rig->end, rig->stream));
        KVF_TRY(rig->ops->stream_wait(rig->stream));
        KVF_TRY(elapsed(rig, beside ? &rig->total[at] : &rig->alone[at]));
        KVF_TRY(rig->ops->stream_wait(other));
    }
    return KVF_OK;
}

static kvf_status run_tax(kvf_link_rig *rig, kvf_stream *other, kvf_link_result *result)
{
    const kvf_link_case *c = rig->c;
    KVF_TRY(kvf_link_rig_prepare(rig));
    KVF_TRY(repeat_both(rig, 0));
    KVF_TRY(repeat_both(rig, 0)); /* warm */
    const uint64_t fetch_ns = rig->total[0] > 0 ? rig->total[0] : 1;
    /* Long enough that the first fetch, which has a head start, does not count. */
    const uint64_t length_ns = c->gap_ns > 4 * fetch_ns ? c->gap_ns : 4 * fetch_ns;
    const uint32_t fetches = (uint32_t)(2 * length_ns / fetch_ns) + 1;
    KVF_TRY(kvf_link_compute_open(rig, length_ns));
    for (uint32_t i = 0; i < c->warmup + c->repetitions; i++) {
        KVF_TRY(kvf_link_rig_prepare(rig));
        if (i + 1 == c->warmup + c->repetitions)
            KVF_TRY(kvf_link_rig_spoil(rig));
        KVF_TRY(repeat_tax(rig, other, fetches, i < c->warmup ? 0 : i - c->warmup));
    }
    return kvf_link_rig_verify(rig, 0, &result->verified_bytes);
}

static kvf_status with_stream(kvf_link_rig *rig, kvf_link_result *result)
{
    kvf_stream *other = NULL;
    KVF_TRY(rig->ops->stream_create(rig->device, KVF_PRIORITY_NORMAL, &other));
    kvf_status status = run_tax(rig, other, result);
    rig->ops->stream_destroy(other);
    return status;
}

static kvf_status run_both(kvf_link_rig *rig, kvf_link_result *result)
{
    const kvf_link_case *c = rig->c;
    for (uint32_t i = 0; i < c->warmup + c->repetitions; i++) {
        const bool is_verified = i == 0 || i + 1 == c->warmup + c->repetitions;
        KVF_TRY(kvf_link_rig_prepare(rig));
        if (is_verified)
            KVF_TRY(kvf_link_rig_spoil(rig));
        KVF_TRY(repeat_both(rig, i < c->warmup ? 0 : i - c->warmup));
        if (is_verified)
            KVF_TRY(kvf_link_rig_verify(rig, 0, &result->verified_bytes));
    }
    return KVF_OK;
}

/* Copies per repetition, and what the engine took. */
static void describe(const kvf_link_rig *rig, kvf_link_result *result)
{
    kvf_transfer_shape shape;
    if (!rig->engine)
        return;
    kvf_transfer_shape_read(rig->engine, &shape);
    result->workers = shape.workers;
    result->depth = shape.depth;
    result->blocks = shape.blocks;
    result->chunk_bytes = shape.chunk_bytes;
    result->copies = rig->lists;
    if (shape.pages_per_copy)
        result->copies *= kvf_div_ceil_u32(rig->c->pages, shape.pages_per_copy);
}

kvf_status kvf_link_run(kvf_link_rig *rig, kvf_link_result *result)
{
    kvf_status status;
    result->bytes = (uint64_t)rig->c->pages * rig->c->page_bytes;
    switch (rig->c->what) {
    case KVF_LINK_GATHER:
    case KVF_LINK_MEMCPY:
    case KVF_LINK_COPY:
        status = run_part(rig, result);
        break;
    case KVF_LINK_PEAK:
        status = run_peak(rig, result);
        break;
    case KVF_LINK_CADENCE:
        status = with_events(rig, result);
        break;
    case KVF_LINK_TAX:
        status = with_stream(rig, result);
        break;
    default:
        status = run_both(rig, result);
        break;
    }
    describe(rig, result);
    return status;
}
