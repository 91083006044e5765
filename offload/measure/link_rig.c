/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What one case of the link bench holds, and its single steps: prepare, fetch, write back, verify;
 * and compute to put beside it.
 *
 * Knows nothing of what is timed. Invariant: lists and slots are written only while no request is
 * in flight.
 */

#include <string.h>

#include "common/random.h"
#include "link_rig.h"

#define BOUNCE_BYTES  ((size_t)4 << 20) /* room to compare in */
#define BACK_BYTES    ((size_t)4 << 20) /* of write-back, used again and again */
#define REQUESTS_MAX  64u
#define COMPUTE_DIM   128u
#define COMPUTE_PAGE  16u
#define COMPUTE_GROUP 4u
#define LAUNCHES_MAX  4096u

static size_t list_bytes(const kvf_link_rig *rig)
{
    return (size_t)rig->lists * rig->c->pages * sizeof(void *);
}

static kvf_status open_memory(kvf_link_rig *rig)
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

static kvf_status open_write_back(kvf_link_rig *rig)
{
    const kvf_link_case *c = rig->c;
    void *memory = NULL;
    if (c->writeback_percent == 0)
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

static kvf_status open_samples(kvf_link_rig *rig)
{
    const size_t count = rig->c->repetitions;
    uint64_t **samples[] = {&rig->total, &rig->copying, &rig->gather, &rig->alone};
    for (size_t i = 0; i < sizeof samples / sizeof *samples; i++) {
        *samples[i] = kvf_alloc(rig->device->context, count, sizeof **samples[i]);
        if (!*samples[i])
            KVF_FAIL(rig->device->context, KVF_OUT_OF_MEMORY, "no memory for %zu repetitions",
                     count);
    }
    rig->fetch = kvf_alloc(rig->device->context, count * rig->lists, sizeof *rig->fetch);
    return rig->fetch ? KVF_OK
                      : kvf_fail(rig->device->context, KVF_OUT_OF_MEMORY, 0,
                                 "no memory for %zu repetitions", count);
}

static kvf_status open_engine(kvf_link_rig *rig)
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

kvf_status kvf_link_rig_open(kvf_link_rig *rig)
{
    const kvf_link_case *c = rig->c;
    kvf_device *device = rig->device;
    rig->random = c->seed;
    rig->pool_pages = kvf_link_pool_pages(rig->bench, c->page_bytes);
    if (rig->pool_pages < c->pages || rig->pool_pages > UINT32_MAX)
        KVF_FAIL(device->context, KVF_INVALID,
                 "a pool of %llu pages cannot give %u at once: raise pool_bytes, or lower "
                 "pages",
                 (unsigned long long)rig->pool_pages, c->pages);
    KVF_TRY(rig->ops->stream_create(device, KVF_PRIORITY_NORMAL, &rig->stream));
    KVF_TRY(rig->ops->event_create_timed(device, &rig->begin));
    KVF_TRY(rig->ops->event_create_timed(device, &rig->end));
    KVF_TRY(open_samples(rig));
    KVF_TRY(open_memory(rig));
    KVF_TRY(open_write_back(rig));
    const int brings =
        c->what == KVF_LINK_BOTH || c->what == KVF_LINK_CADENCE || c->what == KVF_LINK_TAX;
    return brings ? open_engine(rig) : KVF_OK;
}

void kvf_link_rig_close(kvf_link_rig *rig)
{
    const kvf_device_ops *ops = rig->ops;
    kvf_context *context = rig->device->context;
    ops->stream_destroy(rig->back_stream);
    ops->stream_destroy(rig->stream);
    kvf_transfer_close(rig->engine);
    ops->event_destroy(rig->end);
    ops->event_destroy(rig->begin);
    void *memory[] = {
        rig->compute.q, rig->compute.out, rig->compute.pages, rig->compute.blocks, rig->back_from,
        rig->count,     rig->to,          rig->from,          rig->slots};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++)
        ops->memory_free(rig->device, memory[i]);
    kvf_host_memory_destroy(context, &rig->back_to);
    kvf_host_memory_destroy(context, &rig->control);
    void *plain[] = {rig->total, rig->copying, rig->gather, rig->alone,
                     rig->fetch, rig->slot_of, rig->ids};
    for (size_t i = 0; i < sizeof plain / sizeof *plain; i++)
        kvf_free(context, plain[i]);
}

/* ---- steps ---- */

kvf_status kvf_link_rig_prepare(kvf_link_rig *rig)
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
            from[(size_t)l * c->pages + i] =
                kvf_link_page_device(rig->bench, c->page_bytes, ids[i]);
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

kvf_status kvf_link_rig_fetch(kvf_link_rig *rig, uint32_t l, kvf_stream *stream)
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

kvf_status kvf_link_rig_write_back(kvf_link_rig *rig)
{
    const size_t chunk = (size_t)1 << 20;
    for (uint64_t at = 0; at < rig->back_bytes; at += chunk) {
        const size_t part = rig->back_bytes - at < chunk ? (size_t)(rig->back_bytes - at) : chunk;
        KVF_TRY(rig->ops->copy(rig->back_stream, rig->back_to.arenas[0].device + at % BACK_BYTES,
                               rig->back_from + at % BACK_BYTES, part));
    }
    return KVF_OK;
}

kvf_status kvf_link_rig_spoil(kvf_link_rig *rig)
{
    KVF_TRY(rig->ops->fill(rig->stream, rig->slots, 0xa5, rig->c->pages * rig->c->page_bytes));
    return rig->ops->stream_wait(rig->stream);
}

kvf_status kvf_link_rig_verify(kvf_link_rig *rig, uint32_t l, uint64_t *bytes)
{
    const size_t page_bytes = rig->c->page_bytes;
    const kvf_arena *bounce = &rig->control.arenas[0];
    const uint32_t *ids = rig->ids + (size_t)l * rig->c->pages;
    const uint32_t at_once = (uint32_t)(BOUNCE_BYTES / page_bytes);
    for (uint32_t first = 0; first < rig->c->pages; first += at_once) {
        const uint32_t count = kvf_min_u32(at_once, rig->c->pages - first);
        for (uint32_t i = 0; i < count; i++)
            KVF_TRY(rig->ops->copy(rig->stream, bounce->device + i * page_bytes,
                                   rig->slots + rig->slot_of[first + i] * page_bytes, page_bytes));
        KVF_TRY(rig->ops->stream_wait(rig->stream));
        for (uint32_t i = 0; i < count; i++)
            if (!kvf_link_is_right(bounce->host + i * page_bytes,
                                   kvf_link_page_offset(rig->bench, page_bytes, ids[first + i]),
                                   page_bytes))
                KVF_FAIL(rig->device->context, KVF_CORRUPT,
                         "page %u of the pool did not arrive whole in slot %u by '%s'",
                         ids[first + i], rig->slot_of[first + i],
                         kvf_transfer_name(rig->c->method));
    }
    *bytes += (uint64_t)rig->c->pages * page_bytes;
    return KVF_OK;
}

/* ---- compute ---- */

static kvf_status launch_once(kvf_link_rig *rig, kvf_stream *stream)
{
    const kvf_prefill_kernel_args *a = &rig->compute.args;
    return KVF_ENQUEUE(stream, prefill, *a);
}

kvf_status kvf_link_compute_enqueue(kvf_link_rig *rig, kvf_stream *stream)
{
    for (uint32_t i = 0; i < rig->compute.launches; i++)
        KVF_TRY(launch_once(rig, stream));
    return KVF_OK;
}

/* Time of one launch, the second of two: the first one warms up. */
static kvf_status time_launch(kvf_link_rig *rig, uint64_t *ns)
{
    KVF_TRY(launch_once(rig, rig->stream));
    KVF_TRY(rig->ops->event_record(rig->begin, rig->stream));
    KVF_TRY(launch_once(rig, rig->stream));
    KVF_TRY(rig->ops->event_record(rig->end, rig->stream));
    KVF_TRY(rig->ops->stream_wait(rig->stream));
    return rig->ops->event_elapsed(rig->begin, rig->end, ns);
}

/* One task per multiprocessor, or per thread of the host device, so that nothing stays free. */
kvf_status kvf_link_compute_open(kvf_link_rig *rig, uint64_t length_ns)
{
    kvf_link_compute *compute = &rig->compute;
    kvf_device *device = rig->device;
    kvf_device_properties properties;
    device->ops->properties(device, &properties);
    const uint32_t heads = kvf_min_u32(properties.multiprocessors > 0 ? properties.multiprocessors
                                                                      : properties.compute_threads,
                                       1024);
    const kvf_shape shape = {.dtype = KVF_BF16, .head_dim = COMPUTE_DIM, .page_size = COMPUTE_PAGE};
    const uint32_t blocks = KVF_PREFILL_ROWS / COMPUTE_PAGE;
    const size_t row = (size_t)heads * COMPUTE_GROUP * COMPUTE_DIM * 2;
    const size_t block_bytes = heads * kvf_page_bytes(&shape);
    const kvf_arena *arena = &rig->control.arenas[0];
    KVF_TRY(rig->ops->memory_alloc(device, KVF_PREFILL_ROWS * row, &compute->q));
    KVF_TRY(rig->ops->memory_alloc(device, KVF_PREFILL_ROWS * row, &compute->out));
    KVF_TRY(rig->ops->memory_alloc(device, blocks * block_bytes, &compute->pages));
    KVF_TRY(rig->ops->memory_alloc(device, blocks * sizeof(void *), &compute->blocks));
    for (uint32_t b = 0; b < blocks; b++)
        ((void **)(void *)arena->host)[b] = (char *)compute->pages + b * block_bytes;
    KVF_TRY(rig->ops->copy(rig->stream, compute->blocks, arena->device, blocks * sizeof(void *)));
    KVF_TRY(rig->ops->stream_wait(rig->stream));
    compute->args = (kvf_prefill_kernel_args){.shape = shape,
                                              .kv_heads = heads,
                                              .group = COMPUTE_GROUP,
                                              .tokens = KVF_PREFILL_ROWS,
                                              .scale = 1,
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
