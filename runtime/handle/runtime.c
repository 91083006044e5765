/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Opening and closing a runtime, its streams, plain device memory, pinned host memory, what is
 * known of the link, and benches of link and disk.
 *
 * Knows nothing of caches. A half-open runtime is closed by the same function as an open one.
 */

#include "runtime.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "link_measure.h"
#include "settings.h"

#include <kvferry/disk.h>
#include <kvferry/link.h>

#include "common/text.h"

#define THREADS_MAX 1024u

static const kvf_runtime_config defaults = {
    .numa_node = -1, .isa_mask = KVF_ISA_ALL, .calibrate = 1, .early_starts = 1};

void kvf_runtime_config_init_sized(kvf_runtime_config *config, size_t size)
{
    kvf_sized_init(config, size, &defaults, sizeof defaults);
}

#define FIELD(field)       KVF_FIELD(kvf_runtime_config, field)
#define COUNT(least, most) .kind = KVF_SETTING_WHOLE, .low = (least), .high = (most)

static const kvf_setting runtime_settings[] = {
    {FIELD(device), KVF_NAMED(KVF_DEVICE_LIST), .meaning = "where attention runs"},
    {FIELD(device_ordinal), COUNT(0, 1023), .meaning = "which GPU"},
    {FIELD(threads), COUNT(0, THREADS_MAX),
     .meaning = "compute threads on the host; 0 = as cores and CPU quota allow"},
    {FIELD(gather_threads), COUNT(0, THREADS_MAX),
     .meaning = "threads that gather pages; 0 = chosen from the cores"},
    {FIELD(numa_node), COUNT(-1, INT32_MAX),
     .meaning = "node of host memory; -1 = the one nearest the device"},
    {FIELD(huge_pages), KVF_NAMED(KVF_HUGE_PAGES_LIST), .meaning = "pages of host memory"},
    {FIELD(allow_unpinned), .kind = KVF_SETTING_SWITCH,
     .meaning = "run on pageable memory where pinning fails (host)"},
    {FIELD(calibrate), .kind = KVF_SETTING_SWITCH,
     .meaning = "measure the link when a cache first needs it"},
    {FIELD(early_starts), .kind = KVF_SETTING_SWITCH,
     .meaning = "kernels of a step start before the one in front of them is done (CUDA)"},
    {FIELD(calibration_path), .kind = KVF_SETTING_TEXT,
     .meaning = "file that keeps what was measured of the link"},
};

#define SETTINGS (sizeof runtime_settings / sizeof *runtime_settings)

const kvf_setting *kvf_runtime_setting(uint32_t index)
{
    return index < SETTINGS ? &runtime_settings[index] : NULL;
}

/* Errors from before there is a context. */
KVF_PRINTF(3, 4)
static kvf_status refuse(kvf_error *error, kvf_status status, const char *format, ...)
{
    kvf_error own = {.status = status};
    va_list arguments;
    va_start(arguments, format);
    kvf_vformat(own.text, sizeof own.text, format, arguments);
    va_end(arguments);
    if (error)
        *error = own;
    return kvf_fail_again(NULL, status, &own);
}

static kvf_status check_config(const kvf_runtime_config *c, kvf_error *error)
{
    char text[384];
    if (kvf_settings_wrong(runtime_settings, SETTINGS, c, text, sizeof text))
        return refuse(error, KVF_INVALID, "%s", text);
    if (!c->allocator.alloc != !c->allocator.free)
        return refuse(error, KVF_INVALID,
                      "allocator has only one of alloc and free; set both or neither");
    return KVF_OK;
}

static kvf_status find_node(kvf_runtime *rt, int32_t wanted)
{
    const kvf_topology *t = rt->topology;
    if (wanted >= 0) {
        if (kvf_topology_find(t, wanted) < 0)
            KVF_FAIL(rt->context, KVF_INVALID,
                     "numa_node = %d: this machine has no such node (%u known); use -1 for the "
                     "nearest",
                     wanted, t->known ? t->node_count : 0);
        rt->node = wanted;
        return KVF_OK;
    }
    rt->node = rt->properties.numa_node;
    return KVF_OK;
}

/* Pin the compute threads only where a node was asked for and has enough cores. */
static const uint32_t *node_cpus(const kvf_runtime *rt, int32_t node, uint32_t threads)
{
    const int32_t index = node < 0 ? -1 : kvf_topology_find(rt->topology, node);
    if (index < 0 || rt->topology->nodes[index].cpu_count < threads)
        return NULL;
    return rt->topology->cpus + rt->topology->nodes[index].cpus_offset;
}

static kvf_status open_parts(kvf_runtime *rt)
{
    rt->topology = kvf_alloc(rt->context, 1, sizeof *rt->topology);
    if (!rt->topology)
        KVF_FAIL(rt->context, KVF_OUT_OF_MEMORY, "no memory for the topology of the machine");
    KVF_TRY(kvf_topology_read(rt->context, NULL, rt->topology));
    kvf_runtime_config *c = &rt->config;
    const uint32_t threads = kvf_topology_threads(rt->topology);
    if (c->threads == 0)
        c->threads = threads;
    if (c->gather_threads == 0)
        c->gather_threads = kvf_max_u32(1, kvf_min_u32(4, threads / 2));
    const kvf_device_config device = {.threads = c->threads,
                                      .cpus = node_cpus(rt, c->numa_node, c->threads),
                                      .isa_mask = c->isa_mask,
                                      .delay_seed = rt->test_hooks.delay_seed,
                                      .ordinal = c->device_ordinal,
                                      .starts_late = !c->early_starts};
    KVF_TRY(kvf_device_open(rt->context, c->device, &device, &rt->device));
    rt->device->ops->properties(rt->device, &rt->properties);
    return find_node(rt, c->numa_node);
}

/* After the last handle of it is closed. */
static void end_runtime(void *owner)
{
    kvf_runtime *rt = owner;
    kvf_context *context = rt->context;
    kvf_device_close(rt->device);
    kvf_calibration_close(rt);
    if (rt->topology)
        kvf_topology_close(context, rt->topology);
    kvf_free(context, rt->topology);
    kvf_free(context, rt);
    kvf_context_destroy(context);
}

kvf_status kvf_runtime_open(const kvf_runtime_config *config, kvf_runtime **out, kvf_error *error)
{
    return kvf_runtime_open_with(config, NULL, out, error);
}

kvf_status kvf_runtime_open_with(const kvf_runtime_config *config,
                                 const kvf_runtime_test_hooks *test_hooks, kvf_runtime **out,
                                 kvf_error *error)
{
    if (!out)
        return refuse(error, KVF_INVALID, "out is NULL; it receives the runtime");
    *out = NULL;
    kvf_runtime_config own = defaults;
    kvf_status status = KVF_SIZED_READ(NULL, kvf_runtime_config, config, &own);
    if (status != KVF_OK)
        return kvf_runtime_report(NULL, status, error);
    KVF_TRY(check_config(&own, error));
    kvf_context *context = NULL;
    status = kvf_context_create(&own.allocator, own.log, own.log_user, &context);
    if (status != KVF_OK)
        return refuse(error, status, "no memory for a runtime");
    kvf_runtime *rt = kvf_alloc(context, 1, sizeof *rt);
    if (!rt) {
        kvf_context_destroy(context);
        return refuse(error, KVF_OUT_OF_MEMORY, "no memory for a runtime");
    }
    context->end = end_runtime;
    context->owner = rt;
    rt->context = context;
    rt->config = own;
    rt->test_hooks = test_hooks ? *test_hooks : (kvf_runtime_test_hooks){0};
    rt->config.calibration_path = NULL; /* borrowed for the call */
    rt->node = -1;
    status = kvf_calibration_open(rt, own.calibration_path);
    if (status == KVF_OK)
        status = open_parts(rt);
    if (status != KVF_OK) {
        (void)kvf_runtime_report(rt, status, error);
        kvf_runtime_close(rt);
        return status;
    }
    *out = rt;
    return KVF_OK;
}

void kvf_runtime_close(kvf_runtime *runtime)
{
    if (runtime && kvf_handle_is_alive(runtime->context))
        kvf_context_release(runtime->context);
}

kvf_status kvf_runtime_report(const kvf_runtime *runtime, kvf_status status, kvf_error *error)
{
    if (error && status == KVF_OK)
        *error = (kvf_error){.status = KVF_OK};
    else if (error)
        *error = kvf_context_told(runtime ? runtime->context : NULL, status);
    return status;
}

kvf_host_memory_config kvf_runtime_memory(const kvf_runtime *runtime)
{
    return (kvf_host_memory_config){.node = runtime->node,
                                    .huge_pages = runtime->config.huge_pages,
                                    .allow_unpinned = runtime->config.allow_unpinned,
                                    .touch_threads = runtime->config.threads,
                                    .topology = runtime->topology,
                                    .lower = "tokens_max or host_tokens_max"};
}

const kvf_error *kvf_runtime_error(const kvf_runtime *runtime)
{
    return kvf_context_last(runtime ? runtime->context : NULL);
}

uint32_t kvf_runtime_threads(const kvf_runtime *runtime)
{
    return runtime ? runtime->config.threads : 0;
}

kvf_device_kind kvf_runtime_device(const kvf_runtime *runtime)
{
    return runtime ? runtime->device->ops->kind : KVF_DEVICE_AUTO;
}

/* ---- streams and device memory ---- */

static kvf_status check_stream(const kvf_stream *stream)
{
    return kvf_handle_check(stream ? stream->device->context : NULL, "stream");
}

kvf_status kvf_stream_create(kvf_runtime *runtime, kvf_stream **out)
{
    KVF_CHECK_OPENS(runtime, runtime, out);
    return kvf_context_held(runtime->context, runtime->device->ops->stream_create(
                                                  runtime->device, KVF_PRIORITY_NORMAL, out));
}

kvf_status kvf_stream_wrap(kvf_runtime *runtime, void *native, kvf_stream **out)
{
    KVF_CHECK_OPENS(runtime, runtime, out);
    const kvf_device_ops *ops = runtime->device->ops;
    if (!ops->stream_wrap)
        KVF_FAIL(runtime->context, KVF_UNSUPPORTED,
                 "the %s device has no streams of others; use kvf_stream_create", ops->name);
    return kvf_context_held(runtime->context, ops->stream_wrap(runtime->device, native, out));
}

void *kvf_stream_native(kvf_stream *stream)
{
    const kvf_device_ops *ops = stream ? stream->device->ops : NULL;
    return ops && ops->stream_native ? ops->stream_native(stream) : NULL;
}

void kvf_stream_destroy(kvf_stream *stream)
{
    kvf_context *context = stream ? stream->device->context : NULL;
    if (!kvf_handle_is_alive(context))
        return;
    stream->device->ops->stream_destroy(stream);
    kvf_context_release(context);
}

kvf_status kvf_stream_wait(kvf_stream *stream)
{
    KVF_TRY(check_stream(stream));
    return stream->device->ops->stream_wait(stream);
}

kvf_status kvf_stream_launch(kvf_stream *stream, kvf_task_fn fn, const void *args,
                             size_t args_bytes, uint32_t tasks)
{
    KVF_TRY(check_stream(stream));
    kvf_device *device = stream->device;
    if (!fn)
        KVF_FAIL(device->context, KVF_INVALID, "fn is NULL; pass the function to run");
    if (args_bytes > KVF_LAUNCH_ARGS_MAX)
        KVF_FAIL(device->context, KVF_INVALID,
                 "args_bytes = %zu: at most %u are copied; pass a pointer to the rest", args_bytes,
                 KVF_LAUNCH_ARGS_MAX);
    if (!args && args_bytes)
        KVF_FAIL(device->context, KVF_INVALID, "args is NULL with args_bytes = %zu", args_bytes);
    if (device->ops->kind != KVF_DEVICE_HOST)
        KVF_FAIL(device->context, KVF_UNSUPPORTED,
                 "functions of the caller run on the host device only");
    return device->ops->launch(stream, fn, args, args_bytes, tasks);
}

kvf_status kvf_memory_alloc(kvf_runtime *runtime, size_t bytes, void **out)
{
    KVF_CHECK_OPENS(runtime, runtime, out);
    if (bytes == 0)
        KVF_FAIL(runtime->context, KVF_INVALID, "bytes = 0: ask for at least 1");
    return kvf_context_held(runtime->context,
                            runtime->device->ops->memory_alloc(runtime->device, bytes, out));
}

void kvf_memory_free(kvf_runtime *runtime, void *pointer)
{
    if (!pointer || !KVF_IS_ALIVE(runtime))
        return;
    runtime->device->ops->memory_free(runtime->device, pointer);
    kvf_context_release(runtime->context);
}

kvf_status kvf_memory_copy(kvf_stream *stream, void *to, const void *from, size_t bytes)
{
    KVF_TRY(check_stream(stream));
    if (bytes == 0)
        return KVF_OK;
    if (!to || !from)
        KVF_FAIL(stream->device->context, KVF_INVALID, "to or from is NULL with bytes = %zu",
                 bytes);
    return stream->device->ops->copy(stream, to, from, bytes);
}

/* ---- what is known of the link ---- */

kvf_status kvf_calibration_open(kvf_runtime *rt, const char *path)
{
    if (pthread_mutex_init(&rt->calibration_lock, NULL) != 0)
        KVF_FAIL(rt->context, KVF_SYSTEM, "a lock for the calibration could not be made");
    rt->has_calibration_lock = 1;
    if (!path)
        return KVF_OK;
    rt->calibration_path = kvf_alloc(rt->context, strlen(path) + 1, 1);
    if (!rt->calibration_path)
        KVF_FAIL(rt->context, KVF_OUT_OF_MEMORY, "no memory for calibration_path");
    memcpy(rt->calibration_path, path, strlen(path) + 1);
    return KVF_OK;
}

void kvf_calibration_close(kvf_runtime *rt)
{
    kvf_free(rt->context, rt->calibration_path);
    if (rt->has_calibration_lock)
        pthread_mutex_destroy(&rt->calibration_lock);
}

/* Bytes of the pages that are measured: what a page costs beside its bytes counts for small ones.
 */
static const size_t sizes[KVF_LINK_SIZES] = {512, 16384};

/* The one that stands for a page size: the nearer, by their ratio. */
static uint32_t nearest(size_t page_bytes)
{
    return page_bytes * page_bytes > sizes[0] * sizes[1];
}

static kvf_status calibrate(kvf_runtime *rt, uint32_t size)
{
    if ((rt->is_calibrated >> size & 1) || !rt->config.calibrate ||
        rt->properties.shares_host_memory)
        return KVF_OK;
    const kvf_calibration_config config = {.path = rt->calibration_path,
                                           .page_bytes = sizes[size],
                                           .gather_threads = rt->config.gather_threads,
                                           .memory = kvf_runtime_memory(rt)};
    KVF_TRY(kvf_calibrate(rt->device, &config, &rt->calibration[size]));
    rt->is_calibrated |= 1u << size;
    return KVF_OK;
}

static kvf_status calibrate_one(kvf_runtime *rt, uint32_t size)
{
    pthread_mutex_lock(&rt->calibration_lock);
    const kvf_status status = calibrate(rt, size);
    pthread_mutex_unlock(&rt->calibration_lock);
    return status;
}

kvf_status kvf_runtime_calibrate(kvf_runtime *runtime)
{
    KVF_CHECK_HANDLE(runtime, runtime);
    for (uint32_t i = 0; i < KVF_LINK_SIZES; i++)
        KVF_TRY(calibrate_one(runtime, i));
    return KVF_OK;
}

kvf_status kvf_runtime_choose(kvf_runtime *rt, size_t page_bytes, kvf_transfer_choice *choice,
                              const kvf_transfer_choice **out)
{
    const uint32_t size = nearest(page_bytes);
    *out = NULL;
    KVF_TRY(calibrate_one(rt, size));
    if (!(rt->is_calibrated >> size & 1) || !rt->calibration[size].is_measured)
        return KVF_OK;
    kvf_calibration_choose(&rt->calibration[size], page_bytes, choice);
    *out = choice;
    return KVF_OK;
}

/* ---- pinned host memory for the caller ----
 *
 * One piece that CPU and device both see. In front of what the caller gets lies the host memory
 * that it is part of, so that freeing needs the address alone. */

#define HEAD_BYTES ((size_t)4096) /* what the caller gets is aligned to a memory page */

_Static_assert(sizeof(kvf_host_memory) <= HEAD_BYTES, "the head has room for its owner");

kvf_status kvf_pinned_alloc(kvf_runtime *runtime, size_t bytes, void **host, void **device)
{
    if (device)
        *device = NULL;
    KVF_CHECK_OPENS(runtime, runtime, host);
    KVF_CHECK_POINTER(runtime->context, device);
    if (bytes == 0 || bytes > KVF_ARENA_BYTES_MAX - HEAD_BYTES)
        KVF_FAIL(runtime->context, KVF_INVALID, "bytes = %zu: 1 to %zu in one piece", bytes,
                 KVF_ARENA_BYTES_MAX - HEAD_BYTES);
    kvf_host_memory_config config = kvf_runtime_memory(runtime);
    config.granule = kvf_round_up(bytes, 64) + HEAD_BYTES;
    config.bytes = config.granule;
    config.lower = "bytes";
    kvf_host_memory memory;
    KVF_TRY(kvf_host_memory_create(runtime->context, runtime->device, &config, &memory));
    *(kvf_host_memory *)(void *)memory.arenas[0].host = memory;
    *host = memory.arenas[0].host + HEAD_BYTES;
    *device = memory.arenas[0].device + HEAD_BYTES;
    kvf_context_hold(runtime->context);
    return KVF_OK;
}

void kvf_pinned_free(kvf_runtime *runtime, void *host)
{
    if (!host || !KVF_IS_ALIVE(runtime))
        return;
    kvf_host_memory memory = *(kvf_host_memory *)(void *)((char *)host - HEAD_BYTES);
    kvf_host_memory_destroy(runtime->context, &memory);
    kvf_context_release(runtime->context);
}

/* ---- benches of the link and of a disk ---- */

kvf_status kvf_link_open(kvf_runtime *runtime, kvf_link **out)
{
    KVF_CHECK_OPENS(runtime, runtime, out);
    kvf_link_bench_config config = {.memory = kvf_runtime_memory(runtime),
                                    .gather_threads = runtime->config.gather_threads};
    config.memory.lower = "pool_bytes";
    return kvf_link_bench_open(runtime->device, &config, out);
}

kvf_status kvf_disk_open(kvf_runtime *runtime, const char *folder, uint64_t bytes, kvf_disk **out)
{
    KVF_CHECK_OPENS(runtime, runtime, out);
    return kvf_disk_bench_open(runtime->context, folder, bytes, out);
}
