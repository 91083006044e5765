/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A device and a backend of ggml: an accelerator beside the CPU that takes writes to KV caches and
 * flash attention on them, and nothing else.
 *
 * Operations that it does not serve go to a CPU backend of its own, one node at a time, with the
 * threads of llama.cpp: kernels and bits are those of llama.cpp without the plug-in.
 */

#include "backend.h"

#include <stdlib.h>
#include <string.h>

#include "cell_numbers.h"
#include "plugin.h"

/* A write of so few rows is not worth waking threads, and has the same bits with one. */
enum { ROWS_OF_ONE_THREAD = 64, GRAPH = 8 };

/** The part that belongs to one llama_context. */
typedef struct instance {
    gg_backend *cpu;
    gg_context *context; /* of the graph */
    gg_graph *graph;     /* of one node at a time */
    void *memory;
    int threads; /* as llama.cpp said, and as the CPU backend has it */
    int set_to;
} instance;

static void use_threads(kvl_plugin *p, instance *i, int threads)
{
    if (i->set_to != threads)
        p->gg.set_n_threads(i->cpu, threads);
    i->set_to = threads;
}

/* llama.cpp's own kernels. */
static int by_llama(kvl_plugin *p, instance *i, gg_tensor *node)
{
    const int is_small = node->op == p->gg.op.set_rows && node->src[1]->ne[0] <= ROWS_OF_ONE_THREAD;
    use_threads(p, i, is_small ? 1 : i->threads);
    p->gg.graph_clear(i->graph);
    p->gg.graph_add_node(i->graph, node);
    return p->gg.backend_graph_compute(i->cpu, i->graph);
}

/* ---- operations ---- */

/* Cells of rows that were written. */
static void count_rows(kvl_plugin *p, const gg_tensor *node, const gg_tensor *cache, int is_key)
{
    const gg_tensor *rows = node->src[1];
    uint32_t layer;
    kvl_cache *c = kvl_find_cache(p, cache, &layer);
    if (!c || !c->chains)
        return;
    /* Rows of cells are numbered over all streams. Anything else is a write to the whole layer. */
    if (rows->type != GG_I64 || rows->nb[0] != sizeof(int64_t) || rows->ne[1] != 1 ||
        rows->ne[2] != 1 || node->nb[1] != cache->nb[1]) {
        kvl_layer_wrote(c, layer);
        return;
    }
    const size_t total = (size_t)c->cells * c->streams;
    if (is_key && layer == 0)
        kvl_chains_pass(c->chains);
    for (int64_t i = 0; i < rows->ne[0]; i++) {
        const size_t cell = (size_t)((const int64_t *)rows->data)[i];
        if (cell >= total)
            continue; /* ggml itself would have failed */
        kvl_chains_wrote(c->chains, layer, cell);
        if (is_key && layer == 0)
            kvl_chains_born(c->chains, cell);
    }
}

/* Keys that nobody attended to since they were written: attention went another way. */
static void watch(kvl_plugin *p, const gg_tensor *keys, uint32_t rows)
{
    struct kvl_key *key = kvl_key_of(p, keys);
    if (!key || key->left)
        return;
    uint32_t layer;
    kvl_cache *cache = kvl_find_cache(p, keys, &layer);
    if (key->rows) {
        if (!cache && !p->has_said_flash)
            kvl_leave(p, NULL, KVL_NO_FLASH, keys, key->rows, NULL);
        else if (cache)
            kvl_leave(p, cache, KVL_NO_FLASH, keys, key->rows, NULL);
        else
            p->counts.stock[KVL_NO_FLASH] += key->rows;
        p->has_said_flash = 1;
    }
    key->rows = rows;
}

static int write_rows(kvl_plugin *p, instance *i, gg_tensor *node)
{
    const gg_tensor *keys = kvl_cache_tensor(node, 'k'), *values = kvl_cache_tensor(node, 'v');
    const int status = by_llama(p, i, node);
    if (status != GG_SUCCESS || (!keys && !values))
        return status;
    pthread_mutex_lock(&p->lock);
    count_rows(p, node, keys ? keys : values, keys != NULL);
    if (keys)
        watch(p, keys, (uint32_t)node->src[1]->ne[0]);
    pthread_mutex_unlock(&p->lock);
    return status;
}

static int attend(kvl_plugin *p, instance *i, gg_tensor *node)
{
    pthread_mutex_lock(&p->lock);
    p->threads = i->threads;
    const gg_tensor *keys = kvl_cache_tensor(node->src[1], 'k');
    struct kvl_key *key = keys ? kvl_key_of(p, keys) : NULL;
    if (key)
        key->rows = 0;
    const kvl_outcome outcome = kvl_attend(p, node);
    pthread_mutex_unlock(&p->lock);
    if (outcome == KVL_LEFT)
        return by_llama(p, i, node);
    return outcome == KVL_DONE ? GG_SUCCESS : GG_FAILED;
}

/* An operation in place on cells, as a shift of positions. */
static int change(kvl_plugin *p, instance *i, gg_tensor *node)
{
    const gg_tensor *keys = kvl_cache_tensor(node, 'k'), *values = kvl_cache_tensor(node, 'v');
    const int status = by_llama(p, i, node);
    if (!keys && !values)
        return status;
    uint32_t layer;
    pthread_mutex_lock(&p->lock);
    kvl_cache *c = kvl_find_cache(p, keys ? keys : values, &layer);
    if (c)
        kvl_layer_wrote(c, layer);
    pthread_mutex_unlock(&p->lock);
    return status;
}

static int graph_compute(gg_backend *backend, gg_graph *graph)
{
    kvl_plugin *p = kvl_the_plugin();
    instance *i = backend->context;
    const int nodes = p->gg.graph_n_nodes(graph);
    int status = GG_SUCCESS;
    for (int n = 0; n < nodes && status == GG_SUCCESS; n++) {
        gg_tensor *node = p->gg.graph_node(graph, n);
        if (gg_is_view(&p->gg, node) || (p->gg.flags_compute && !(node->flags & GG_FLAG_COMPUTE)))
            continue;
        if (node->op == p->gg.op.set_rows)
            status = write_rows(p, i, node);
        else if (node->op == p->gg.op.flash_attn)
            status = attend(p, i, node);
        else
            status = change(p, i, node);
    }
    if (p->settings.log_seconds > 0) {
        pthread_mutex_lock(&p->lock);
        if (kvl_now() - p->said_at >= p->settings.log_seconds)
            kvl_summary(p, 0);
        pthread_mutex_unlock(&p->lock);
    }
    return status;
}

/* ---- backend ---- */

static const char *backend_name(gg_backend *backend)
{
    (void)backend;
    return "kvferry";
}

static void close_instance(kvl_plugin *p, instance *i)
{
    if (i->context)
        p->gg.free(i->context);
    if (i->cpu)
        p->gg.backend_free(i->cpu);
    free(i->memory);
    free(i);
}

static void backend_free(gg_backend *backend)
{
    kvl_plugin *p = kvl_the_plugin();
    close_instance(p, backend->context);
    free(backend);
    pthread_mutex_lock(&p->lock);
    kvl_summary(p, 1);
    pthread_mutex_unlock(&p->lock);
}

static gg_backend *init_backend(gg_device *device, const char *params)
{
    (void)params;
    static unsigned char guid[16] = {'k', 'v', 'f', 'e', 'r', 'r', 'y',
                                     '-', 'l', 'l', 'a', 'm', 'a'};
    kvl_plugin *p = kvl_the_plugin();
    gg_backend *backend = calloc(1, sizeof *backend);
    instance *i = calloc(1, sizeof *i);
    const size_t bytes = p->gg.graph_overhead_custom(GRAPH, false) + 4096;
    if (!backend || !i)
        goto fail;
    i->memory = malloc(bytes);
    i->cpu = i->memory ? p->gg.backend_init_by_type(GG_DEVICE_CPU, NULL) : NULL;
    i->context = i->cpu ? p->gg.init((gg_init_params){bytes, i->memory, true}) : NULL;
    i->graph = i->context ? p->gg.new_graph_custom(i->context, GRAPH, false) : NULL;
    if (!i->graph)
        goto fail;
    i->threads = 1;
    *backend = (gg_backend){.guid = guid, .device = device, .context = i};
    backend->iface.get_name = backend_name;
    backend->iface.free = backend_free;
    backend->iface.graph_compute = graph_compute;
    return backend;
fail:
    free(backend);
    if (i)
        close_instance(p, i);
    return NULL;
}

static void set_n_threads(gg_backend *backend, int threads)
{
    ((instance *)backend->context)->threads = threads > 0 ? threads : 1;
}

/* ---- device ---- */

static const char *device_name(gg_device *device)
{
    (void)device;
    return "kvferry";
}

static const char *device_description(gg_device *device)
{
    (void)device;
    return "kvferry: attention by retrieval over the KV cache";
}

static void device_memory(gg_device *device, size_t *free_bytes, size_t *total)
{
    (void)device;
    *free_bytes = *total = 0;
}

static int device_type(gg_device *device)
{
    (void)device;
    return GG_DEVICE_ACCEL;
}

static void device_props(gg_device *device, gg_device_props *props)
{
    props->name = device_name(device);
    props->description = device_description(device);
    props->memory_free = props->memory_total = 0;
    props->type = GG_DEVICE_ACCEL;
}

static gg_buffer_type *device_buffer_type(gg_device *device)
{
    (void)device;
    return kvl_the_plugin()->gg.backend_cpu_buffer_type();
}

static bool supports_buffer(gg_device *device, gg_buffer_type *type)
{
    (void)device;
    return kvl_the_plugin()->gg.backend_buft_is_host(type);
}

/* A cache is left alone from now on. */
static bool leave_alone(kvl_plugin *p, struct kvl_key *key, kvl_reason reason)
{
    key->left = 1;
    if (!(p->said >> reason & 1))
        kvl_leave(p, NULL, reason, key->k, 0, NULL);
    p->said |= 1u << reason;
    return false;
}

/* Is this attention ours? */
static bool takes_attention(kvl_plugin *p, const gg_tensor *op)
{
    const gg_tensor *keys = kvl_cache_tensor(op->src[1], 'k');
    if (!keys || !keys->buffer || !keys->buffer->buft ||
        !p->gg.backend_buft_is_host(keys->buffer->buft))
        return false;
    struct kvl_key *key = kvl_key_of(p, keys);
    if (!key || key->left)
        return false;
    const kvl_reason reason = kvl_learn(p, op);
    return reason == KVL_SERVED || leave_alone(p, key, reason);
}

/* A write to cells is ours unless their attention is not: its counts are what proves a chain. */
static bool takes_write(kvl_plugin *p, const gg_tensor *op)
{
    const gg_tensor *keys = kvl_cache_tensor(op, 'k'), *values = kvl_cache_tensor(op, 'v');
    if ((!keys && !values) || !op->view_src)
        return false;
    struct kvl_key *key = keys ? kvl_key_of(p, keys) : NULL;
    /* llama.cpp attends to a copy of such keys, in another type. */
    if (key && !key->left && !kvl_row_bytes(keys->type, GG_Q8_0_ELEMENTS))
        return leave_alone(p, key, KVL_TYPE);
    return !key || !key->left;
}

static bool supports_op(gg_device *device, const gg_tensor *op)
{
    (void)device;
    kvl_plugin *p = kvl_the_plugin();
    if (gg_is_view(&p->gg, op))
        return true;
    pthread_mutex_lock(&p->lock);
    const bool takes = op->op == p->gg.op.flash_attn ? takes_attention(p, op) : takes_write(p, op);
    pthread_mutex_unlock(&p->lock);
    return takes;
}

/* ---- registry ---- */

static const char *registry_name(gg_registry *registry)
{
    (void)registry;
    return "kvferry";
}

static size_t device_count(gg_registry *registry)
{
    (void)registry;
    return 1;
}

static gg_device *get_device(gg_registry *registry, size_t index)
{
    return index ? NULL : registry->context;
}

static void *get_proc_address(gg_registry *registry, const char *name)
{
    (void)registry;
    void (*function)(gg_backend *, int) = set_n_threads;
    void *address = NULL;
    if (!strcmp(name, "ggml_backend_set_n_threads"))
        memcpy(&address, &function, sizeof address);
    return address;
}

gg_registry *kvl_registry(const gg_api *gg)
{
    static gg_device device;
    static gg_registry registry;
    registry = (gg_registry){.api_version = gg->api_version,
                             .iface = {.get_name = registry_name,
                                       .get_device_count = device_count,
                                       .get_device = get_device,
                                       .get_proc_address = get_proc_address},
                             .context = &device};
    device = (gg_device){.iface = {.get_name = device_name,
                                   .get_description = device_description,
                                   .get_memory = device_memory,
                                   .get_type = device_type,
                                   .get_props = device_props,
                                   .init_backend = init_backend,
                                   .get_buffer_type = device_buffer_type,
                                   .supports_op = supports_op,
                                   .supports_buft = supports_buffer},
                         .reg = &registry};
    return &registry;
}
