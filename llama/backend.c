/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A device and a backend of ggml: an accelerator beside the CPU that takes writes to KV caches and
 * flash attention on them. Other nodes go to a CPU backend of its own, one at a time, with
 * llama.cpp's threads: kernels and bits are those of llama.cpp without the plug-in.
 */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "plugin.h"

/* A write of so few rows is not worth waking threads, and has the same bits with one. */
enum { ROWS_OF_ONE_THREAD = 64, GRAPH = 8 };

/* Belongs to one llama_context. */
typedef struct instance {
    gg_backend backend;
    gg_backend *cpu;
    gg_context *context; /* of the graph */
    gg_graph *graph;     /* of one node at a time */
    kvl_copies copies;   /* of tensors of the node */
    kvl_rows rows;       /* that wait for the attention to them */
    int threads;         /* as llama.cpp said */
} instance;

/* llama.cpp's own kernels. */
static int by_llama(kvl_plugin *p, instance *i, gg_tensor *node)
{
    const int is_small = node->op == p->gg.op.set_rows && node->src[1]->ne[0] <= ROWS_OF_ONE_THREAD;
    if (!kvl_lend(p, &i->copies, node))
        return GG_FAILED;
    p->gg.set_n_threads(i->cpu, is_small ? 1 : i->threads);
    p->gg.graph_clear(i->graph);
    p->gg.graph_add_node(i->graph, node);
    const int status = p->gg.backend_graph_compute(i->cpu, i->graph);
    kvl_take_back(p, &i->copies, node);
    return status;
}

/* ---- operations ---- */

/* Rows that wait are written by llama.cpp. */
static int write_rows(kvl_plugin *p, instance *i)
{
    int status = GG_SUCCESS;
    for (int n = 0; n < 2 && status == GG_SUCCESS; n++)
        if (i->rows.nodes[n])
            status = by_llama(p, i, i->rows.nodes[n]);
    i->rows = (kvl_rows){0};
    return status;
}

/* Rows were written: cells of a layer, and tokens that came. */
static void wrote_rows(kvl_plugin *p, instance *i, kvl_layer *l, const gg_tensor *node, int is_key)
{
    gg_tensor *rows = node->src[1];
    kvl_cache *c = l->cache;
    if (!c || !c->chains)
        return;
    const int64_t *cells = kvl_on_host(p, &i->copies, rows);
    if (!cells || !kvl_lists_cells(l, node)) { /* anything else is a write to the whole layer */
        kvl_layer_wrote(l, 0, SIZE_MAX);
        return;
    }
    for (int64_t row = 0; row < rows->ne[0]; row++) {
        const size_t cell = (size_t)cells[row];
        kvl_layer_wrote(l, cell, cell + 1);
        if (is_key && l->index == 0)
            kvl_chains_born(c->chains, cell);
    }
}

/* Keys that nobody attended to since they were written: attention went another way. */
static void watch(kvl_plugin *p, kvl_layer *l, uint32_t rows)
{
    if (l->is_left)
        return;
    if (l->unattended)
        kvl_leave(p, l, KVL_NO_FLASH, l->unattended, NULL);
    l->unattended = rows;
}

/* A write to cells: of rows, or in place, as a shift of positions. */
static int write_cells(kvl_plugin *p, instance *i, gg_tensor *node)
{
    pthread_mutex_lock(&p->lock);
    kvl_layer *l = kvl_find_layer(p, node);
    const int is_lost = l && l->cache && l->cache->is_lost;
    const int waits = l && !is_lost && kvl_rows_wait(p, &i->rows, l, node);
    pthread_mutex_unlock(&p->lock);
    if (is_lost)
        return GG_FAILED;
    int status = waits ? GG_SUCCESS : write_rows(p, i);
    if (!waits && status == GG_SUCCESS)
        status = by_llama(p, i, node);
    const int is_key = l && kvl_cache_tensor(node, 'k') == l->k,
              is_rows = node->op == p->gg.op.set_rows;
    pthread_mutex_lock(&p->lock);
    if (l && !is_rows)
        kvl_layer_wrote(l, 0, SIZE_MAX);
    else if (l)
        wrote_rows(p, i, l, node, is_key);
    if (is_key && is_rows && status == GG_SUCCESS)
        watch(p, l, (uint32_t)node->src[1]->ne[0]);
    pthread_mutex_unlock(&p->lock);
    return status;
}

/* The output of a step beside llama.cpp's own. */
static void compare(kvl_plugin *p, const gg_tensor *node, const float *theirs, const float *own)
{
    const size_t rows = (size_t)(node->ne[2] * node->ne[3]);
    const size_t count = (size_t)(node->ne[0] * node->ne[1]) * rows;
    double difference = 0, largest = 1e-30;
    for (size_t i = 0; i < count; i++) {
        const double e = fabs((double)own[i] - (double)theirs[i]);
        difference = e == e ? fmax(difference, e) : INFINITY;
        largest = fmax(largest, fabs((double)theirs[i]));
    }
    p->counts.verify += (double)rows;
    p->counts.worst = fmax(p->counts.worst, difference / largest);
    /* A wrong cell moves outputs by much more than rounding does. */
    if (difference <= 0.05 * largest)
        return;
    p->counts.wrong++;
    kvl_say("verify: %s: the output differs from llama.cpp's by %.3g", node->name,
            difference / largest);
}

/* The same by llama.cpp's own kernels; the output stays ours. */
static void verify(kvl_plugin *p, instance *i, gg_tensor *node)
{
    const size_t bytes = p->gg.nbytes(node);
    const float *output = kvl_on_host(p, &i->copies, node), *theirs = NULL;
    float *own = output ? malloc(bytes) : NULL;
    if (!own)
        return;
    memcpy(own, output, bytes);
    if (by_llama(p, i, node) == GG_SUCCESS)
        theirs = kvl_on_host(p, &i->copies, node);
    pthread_mutex_lock(&p->lock);
    if (theirs)
        compare(p, node, theirs, own);
    pthread_mutex_unlock(&p->lock);
    kvl_write(p, node, own);
    free(own);
}

static kvl_outcome try(kvl_plugin *p, instance *i, gg_tensor *node)
{
    pthread_mutex_lock(&p->lock);
    p->threads = i->threads;
    const kvl_outcome outcome = kvl_attend(p, &i->copies, &i->rows, node);
    pthread_mutex_unlock(&p->lock);
    return outcome;
}

static int attend(kvl_plugin *p, instance *i, gg_tensor *node)
{
    kvl_outcome outcome = try(p, i, node);
    if (outcome == KVL_UNWRITTEN)
        outcome = write_rows(p, i) == GG_SUCCESS ? try(p, i, node) : KVL_FAILED;
    int status = outcome == KVL_FAILED ? GG_FAILED : GG_SUCCESS;
    if (outcome == KVL_VERIFY)
        verify(p, i, node);
    else if (outcome == KVL_LEFT)
        status = by_llama(p, i, node);
    if (outcome != KVL_DONE)
        kvl_put_away_again(p, node->src[1]);
    return status;
}

static int graph_compute(gg_backend *backend, gg_graph *graph)
{
    kvl_plugin *p = kvl_the_plugin();
    instance *i = backend->context;
    const int nodes = p->gg.graph_n_nodes(graph);
    int status = GG_SUCCESS;
    kvl_card_wait(p);
    for (int n = 0; n < nodes && status == GG_SUCCESS; n++) {
        gg_tensor *node = p->gg.graph_node(graph, n);
        if (gg_is_view(&p->gg, node) || (p->gg.flags_compute && !(node->flags & GG_FLAG_COMPUTE)))
            continue;
        status = node->op == p->gg.op.flash_attn ? attend(p, i, node) : write_cells(p, i, node);
        kvl_copies_free(&i->copies);
    }
    if (status == GG_SUCCESS)
        status = write_rows(p, i);
    i->rows = (kvl_rows){0}; /* of a pass that failed */
    kvl_copies_free(&i->copies);
    if (p->settings.log_seconds > 0) {
        pthread_mutex_lock(&p->lock);
        if (kvf_now_seconds() - p->told_at >= p->settings.log_seconds)
            kvl_summary(p);
        pthread_mutex_unlock(&p->lock);
    }
    return status;
}

/* ---- backend ---- */

/* One name for the backend, the device and the registry; it describes them, too. */
static const char *name(const void *self)
{
    (void)self;
    return "kvferry";
}

static void backend_free(gg_backend *backend)
{
    kvl_plugin *p = kvl_the_plugin();
    instance *i = backend->context;
    if (i->context)
        p->gg.free(i->context);
    if (i->cpu)
        p->gg.backend_free(i->cpu);
    free(i);
}

static gg_backend *init_backend(gg_device *device, const char *params)
{
    (void)params;
    static unsigned char guid[16] = "kvferry-llama";
    kvl_plugin *p = kvl_the_plugin();
    instance *i = calloc(1, sizeof *i);
    if (!i)
        return NULL;
    i->backend = (gg_backend){
        .guid = guid,
        .iface = {.get_name = name, .free = backend_free, .graph_compute = graph_compute},
        .device = device,
        .context = i};
    i->threads = 1;
    i->cpu = p->gg.backend_init_by_type(GG_DEVICE_CPU, NULL);
    i->context = i->cpu ? p->gg.init((gg_init_params){GG_ROOM, NULL, true}) : NULL;
    i->graph = i->context ? p->gg.new_graph_custom(i->context, GRAPH, false) : NULL;
    if (i->graph)
        return &i->backend;
    backend_free(&i->backend);
    return NULL;
}

static void set_n_threads(gg_backend *backend, int threads)
{
    ((instance *)backend->context)->threads = threads > 0 ? threads : 1;
}

/* ---- device ---- */

static void memory(gg_device *device, size_t *free_bytes, size_t *total)
{
    (void)device;
    *free_bytes = *total = 0;
}

static int type(gg_device *device)
{
    (void)device;
    return GG_DEVICE_ACCEL;
}

static void properties(gg_device *device, gg_device_props *props)
{
    props->name = name(device);
    props->description = name(device);
    props->memory_free = props->memory_total = 0;
    props->type = GG_DEVICE_ACCEL;
}

static gg_buffer_type *buffer_type(gg_device *device)
{
    (void)device;
    const kvl_plugin *p = kvl_the_plugin();
    return p->card.type ? p->card.type : p->gg.backend_cpu_buffer_type();
}

static bool supports_buffer(gg_device *device, gg_buffer_type *of)
{
    (void)device;
    const kvl_plugin *p = kvl_the_plugin();
    return p->gg.backend_buft_is_host(of) || kvl_is_card_type(p, of);
}

/* A layer is left alone from now on. */
static bool leave_alone(kvl_plugin *p, kvl_layer *l, kvl_reason reason)
{
    l->is_left = 1;
    kvl_leave(p, l, reason, 0, NULL);
    return false;
}

/* Is this attention ours? */
static bool takes_attention(kvl_plugin *p, const gg_tensor *op)
{
    const gg_tensor *keys = kvl_cache_tensor(op->src[1], 'k');
    if (!keys || !keys->buffer || !keys->buffer->buft)
        return false;
    if (!p->gg.backend_buft_is_host(keys->buffer->buft)) {
        if (keys->buffer->size && kvl_is_on_card(p, keys) && kvl_is_for_host(p, keys))
            kvl_leave(p, &(kvl_layer){.k = keys}, KVL_CARD, 0, NULL);
        return false;
    }
    kvl_layer *l = kvl_layer_of(p, keys);
    if (!l || l->is_left)
        return false;
    const kvl_reason reason = kvl_learn(p, l, op);
    return reason == KVL_SERVED || leave_alone(p, l, reason);
}

/* A write to cells is ours unless their attention is not: a chain is right because all are seen. */
static bool takes_write(kvl_plugin *p, const gg_tensor *op)
{
    const gg_tensor *keys = kvl_cache_tensor(op, 'k'), *values = kvl_cache_tensor(op, 'v');
    if ((!keys && !values) || !op->view_src)
        return false;
    kvl_layer *l = keys ? kvl_layer_of(p, keys) : kvl_find_layer(p, values);
    /* llama.cpp attends to a copy of such keys, in another type. */
    if (keys && l && !l->is_left && !kvl_row_bytes(keys->type, GG_Q8_0_ELEMENTS))
        return leave_alone(p, l, KVL_TYPE);
    return !l || !l->is_left;
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

static size_t device_count(gg_registry *registry)
{
    (void)registry;
    return 1;
}

static gg_device *get_device(gg_registry *registry, size_t index)
{
    return index ? NULL : registry->context;
}

static void *get_proc_address(gg_registry *registry, const char *function)
{
    (void)registry;
    void (*set)(gg_backend *, int) = set_n_threads;
    void *address = NULL;
    if (!strcmp(function, "ggml_backend_set_n_threads"))
        memcpy(&address, &set, sizeof address);
    return address;
}

gg_registry *kvl_registry(const gg_api *gg)
{
    static gg_registry registry;
    static gg_device device = {.iface = {.get_name = name,
                                         .get_description = name,
                                         .get_memory = memory,
                                         .get_type = type,
                                         .get_props = properties,
                                         .init_backend = init_backend,
                                         .get_buffer_type = buffer_type,
                                         .supports_op = supports_op,
                                         .supports_buft = supports_buffer},
                               .reg = &registry};
    registry = (gg_registry){.api_version = gg->api_version,
                             .iface = {.get_name = name,
                                       .get_device_count = device_count,
                                       .get_device = get_device,
                                       .get_proc_address = get_proc_address},
                             .context = &device};
    return &registry;
}
