/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The transfer engine: tickets, order, back-pressure, counters. Methods move the bytes.
 *
 * A request is one entry on the engine's own stream: it waits for the caller's stream, reads its
 * count there, moves its pages, and fires `done`. Nothing of it runs on the caller's thread.
 */

#include <string.h>

#include "transfer_method.h"

static const kvf_transfer_ops *const methods[] = {&kvf_transfer_direct_ops,
                                                  &kvf_transfer_gather_ops, &kvf_transfer_each_ops};

#define METHOD_COUNT (sizeof methods / sizeof *methods)

static const kvf_transfer_ops *find_method(const kvf_device *device, kvf_transfer method)
{
    if (method == KVF_TRANSFER_AUTO) {
        kvf_device_properties properties;
        device->ops->properties(device, &properties);
        method = properties.shares_host_memory ? KVF_TRANSFER_DIRECT : KVF_TRANSFER_GATHER;
    }
    for (size_t i = 0; i < METHOD_COUNT; i++)
        if (methods[i]->method == method)
            return methods[i];
    return NULL;
}

static kvf_status check(kvf_context *context, const kvf_transfer_config *config)
{
    if (config->page_bytes == 0 || config->page_bytes % 64 != 0)
        return kvf_fail(context, KVF_INVALID, 0,
                        "pages of %zu bytes cannot be moved: it must be a multiple of 64",
                        config->page_bytes);
    if (config->pages_max == 0 || config->requests_max == 0 || config->gather_threads == 0)
        return kvf_fail(context, KVF_INVALID, 0,
                        "transfer of %u pages, %u requests, gather_threads %u: each must be at "
                        "least 1",
                        config->pages_max, config->requests_max, config->gather_threads);
    return KVF_OK;
}

static kvf_status reserve(kvf_transfer_engine *engine)
{
    kvf_device *device = engine->device;
    const kvf_device_ops *ops = device->ops;
    uint32_t count = engine->config.requests_max;
    engine->slots = kvf_alloc(device->context, count, sizeof *engine->slots);
    if (engine->slots == NULL)
        return kvf_fail(device->context, KVF_OUT_OF_MEMORY, 0, "no memory for %u requests", count);
    for (uint32_t i = 0; i < count; i++) {
        KVF_TRY(ops->event_create(device, &engine->slots[i].begin));
        KVF_TRY(ops->event_create(device, &engine->slots[i].done));
    }
    KVF_TRY(ops->stream_create(device, KVF_PRIORITY_HIGH, &engine->stream));
    KVF_TRY(ops->stream_create(device, KVF_PRIORITY_HIGH, &engine->copy_stream));
    return engine->ops->open(engine);
}

kvf_status kvf_transfer_open(kvf_device *device, const kvf_transfer_config *config,
                             kvf_transfer_engine **out)
{
    *out = NULL;
    kvf_context *context = device->context;
    const kvf_transfer_ops *ops = find_method(device, config->method);
    if (ops == NULL)
        return kvf_fail(context, KVF_UNSUPPORTED, 0,
                        "transfer method %d is not in this build; use auto, direct, gather or each",
                        (int)config->method);
    KVF_TRY(check(context, config));
    kvf_transfer_engine *engine = kvf_alloc(context, 1, sizeof *engine);
    if (engine == NULL)
        return kvf_fail(context, KVF_OUT_OF_MEMORY, 0, "no memory for a transfer engine");
    engine->device = device;
    engine->ops = ops;
    engine->config = *config;
    kvf_transfer_stats_reset(engine);
    kvf_status status = ops->move != NULL ? reserve(engine) : ops->open(engine);
    engine->config.gather_cpus = NULL; /* borrowed for the call only */
    engine->config.memory.topology = NULL;
    if (status != KVF_OK) {
        kvf_transfer_close(engine);
        return status;
    }
    *out = engine;
    return KVF_OK;
}

void kvf_transfer_close(kvf_transfer_engine *engine)
{
    if (engine == NULL)
        return;
    const kvf_device_ops *ops = engine->device->ops;
    ops->stream_destroy(engine->stream);
    ops->stream_destroy(engine->copy_stream);
    engine->ops->close(engine);
    for (uint32_t i = engine->slots != NULL ? engine->config.requests_max : 0; i-- > 0;) {
        ops->event_destroy(engine->slots[i].done);
        ops->event_destroy(engine->slots[i].begin);
    }
    kvf_free(engine->device->context, engine->slots);
    kvf_free(engine->device->context, engine);
}

kvf_transfer kvf_transfer_method(const kvf_transfer_engine *engine)
{
    return engine->ops->method;
}

const char *kvf_transfer_name(kvf_transfer method)
{
    for (size_t i = 0; i < METHOD_COUNT; i++)
        if (methods[i]->method == method)
            return methods[i]->name;
    return "auto";
}

/* ---- requests
 * ------------------------------------------------------------------------------------ */

typedef struct request_call {
    kvf_transfer_engine *engine;
    kvf_transfer_slot *slot;
} request_call;

/* On the transfer stream's thread, after the caller's stream has written the arrays. */
static void run_request(const void *raw, uint32_t task)
{
    (void)task;
    const request_call *call = raw;
    kvf_transfer_engine *engine = call->engine;
    uint32_t count = *call->slot->request.count;
    kvf_status status = KVF_OK;
    if (count > engine->config.pages_max)
        status = kvf_fail(engine->device->context, KVF_CORRUPT, 0,
                          "a request names %u pages, the engine was opened for %u", count,
                          engine->config.pages_max);
    else if (count > 0)
        status = engine->ops->move(engine, &call->slot->request, count);
    if (status == KVF_OK) {
        kvf_transfer_count(&engine->counters.pages, count);
        kvf_transfer_count(&engine->counters.bytes, (uint64_t)count * engine->config.page_bytes);
    } else {
        engine->device->ops->stream_fail(engine->stream, status);
    }
}

kvf_status kvf_transfer_submit(kvf_transfer_engine *engine, const kvf_transfer_request *request,
                               kvf_stream *stream, uint32_t *ticket)
{
    const kvf_device_ops *ops = engine->device->ops;
    *ticket = engine->next_ticket;
    if (engine->ops->move == NULL)
        return KVF_OK;
    kvf_transfer_slot *slot = &engine->slots[engine->next_ticket % engine->config.requests_max];
    if (!ops->event_is_done(slot->done))
        return KVF_BUSY;
    slot->request = *request;
    slot->ticket = engine->next_ticket++;
    request_call call = {.engine = engine, .slot = slot};
    KVF_TRY(ops->event_record(slot->begin, stream));
    KVF_TRY(ops->stream_wait_event(engine->stream, slot->begin));
    KVF_TRY(ops->host_call(engine->stream, run_request, &call, sizeof call));
    return ops->event_record(slot->done, engine->stream);
}

kvf_status kvf_transfer_join(kvf_transfer_engine *engine, uint32_t ticket, kvf_stream *stream)
{
    if (engine->ops->move == NULL)
        return KVF_OK;
    kvf_transfer_slot *slot = &engine->slots[ticket % engine->config.requests_max];
    /* A slot that carries another ticket was free before: the request of this one is done. */
    if (slot->ticket != ticket)
        return KVF_OK;
    return engine->device->ops->stream_wait_event(stream, slot->done);
}

kvf_status kvf_transfer_wait_room(kvf_transfer_engine *engine)
{
    if (engine->ops->move == NULL)
        return KVF_OK;
    return engine->device->ops->event_wait(
        engine->slots[engine->next_ticket % engine->config.requests_max].done);
}

/* ---- numbers
 * --------------------------------------------------------------------------------------- */

static void clock_start(const void *raw, uint32_t task)
{
    (void)task;
    kvf_transfer_engine *engine = *(kvf_transfer_engine *const *)raw;
    engine->copy_began_ns = kvf_now_ns();
}

static void clock_stop(const void *raw, uint32_t task)
{
    (void)task;
    kvf_transfer_engine *engine = *(kvf_transfer_engine *const *)raw;
    kvf_transfer_count(&engine->counters.copy_ns, kvf_now_ns() - engine->copy_began_ns);
}

kvf_status kvf_transfer_clock_start(kvf_transfer_engine *engine)
{
    return engine->device->ops->host_call(engine->copy_stream, clock_start, &engine, sizeof engine);
}

kvf_status kvf_transfer_clock_stop(kvf_transfer_engine *engine)
{
    return engine->device->ops->host_call(engine->copy_stream, clock_stop, &engine, sizeof engine);
}

void kvf_transfer_needs(const kvf_device *device, const kvf_transfer_config *config,
                        uint64_t *host_bytes, uint64_t *device_bytes)
{
    *host_bytes = *device_bytes = 0;
    const kvf_transfer_ops *ops = find_method(device, config->method);
    if (ops != NULL && ops->needs != NULL)
        ops->needs(config, host_bytes, device_bytes);
}

uint64_t kvf_transfer_host_bytes(const kvf_transfer_engine *engine)
{
    uint64_t host_bytes = 0, device_bytes = 0;
    if (engine->ops->needs != NULL)
        engine->ops->needs(&engine->config, &host_bytes, &device_bytes);
    return host_bytes;
}

uint64_t kvf_transfer_device_bytes(const kvf_transfer_engine *engine)
{
    uint64_t host_bytes = 0, device_bytes = 0;
    if (engine->ops->needs != NULL)
        engine->ops->needs(&engine->config, &host_bytes, &device_bytes);
    return device_bytes;
}

void kvf_transfer_stats_read(kvf_transfer_engine *engine, kvf_transfer_stats *out)
{
    kvf_transfer_counters *c = &engine->counters;
    *out = (kvf_transfer_stats){
        .pages = atomic_load_explicit(&c->pages, memory_order_relaxed),
        .bytes = atomic_load_explicit(&c->bytes, memory_order_relaxed),
        .copies = atomic_load_explicit(&c->copies, memory_order_relaxed),
        .gather_ns = atomic_load_explicit(&c->gather_ns, memory_order_relaxed),
        .copy_ns = atomic_load_explicit(&c->copy_ns, memory_order_relaxed),
        .waits = atomic_load_explicit(&c->waits, memory_order_relaxed),
    };
}

void kvf_transfer_stats_reset(kvf_transfer_engine *engine)
{
    kvf_transfer_counters *c = &engine->counters;
    atomic_store_explicit(&c->pages, 0, memory_order_relaxed);
    atomic_store_explicit(&c->bytes, 0, memory_order_relaxed);
    atomic_store_explicit(&c->copies, 0, memory_order_relaxed);
    atomic_store_explicit(&c->gather_ns, 0, memory_order_relaxed);
    atomic_store_explicit(&c->copy_ns, 0, memory_order_relaxed);
    atomic_store_explicit(&c->waits, 0, memory_order_relaxed);
}
