/* SPDX-License-Identifier: Apache-2.0 */

/*
 * llama.cpp's KV caches as this plug-in knows them: tensors of layers, the buffer that they lie in,
 * and the kvf_blocks beside them.
 *
 * Layers become known when the scheduler asks who computes their attention, which it does of whole
 * graphs before the first pass; a kvf_blocks is opened at the first step. From the first sight on
 * the functions of the buffer are ours: they raise counts of cells that are written by no operation
 * (a state that is loaded, a copy of a sequence, a clear), and forget tensors when the buffer goes.
 *
 * Invariant: tensors of a kvl_cache are alive, because its buffer is.
 */

#include <kvferry/setting.h>
#include <stdlib.h>
#include <string.h>

#include "cell_numbers.h"
#include "common/base.h"
#include "common/carve.h"
#include "plugin.h"

const gg_tensor *kvl_cache_tensor(const gg_tensor *t, char kind)
{
    while (t->view_src)
        t = t->view_src;
    const char prefix[] = {'c', 'a', 'c', 'h', 'e', '_', kind, '_', 'l'};
    if (strncmp(t->name, prefix, sizeof prefix) != 0)
        return NULL;
    const char *digits = t->name + sizeof prefix;
    return *digits && !digits[strspn(digits, "0123456789")] ? t : NULL;
}

/* Make room for one more of a growing array. */
static int grow(void **array, uint32_t count, uint32_t *room, size_t bytes)
{
    if (count < *room)
        return 1;
    const uint32_t more = *room ? *room * 2 : 8;
    void *larger = realloc(*array, more * bytes);
    if (!larger)
        return 0;
    *array = larger;
    *room = more;
    return 1;
}

/* ---- functions of buffers ---- */

static kvl_hook *hook_of(kvl_plugin *p, const gg_buffer *buffer)
{
    for (uint32_t i = 0; i < p->hooks_count; i++)
        if (p->hooks[i]->buffer == buffer)
            return p->hooks[i];
    return NULL;
}

static int holds(const gg_tensor *cache, const char *data)
{
    const char *base = cache->data;
    return base && data >= base && data < base + cache->nb[3] * (size_t)cache->ne[3];
}

/* Bytes of a buffer's tensor were written: count the cells. */
static void wrote(kvl_plugin *p, const gg_buffer *buffer, const char *data, size_t bytes)
{
    for (uint32_t i = 0; i < p->caches_count; i++) {
        kvl_cache *c = p->caches[i];
        if (c->buffer != buffer || !c->chains)
            continue;
        for (uint32_t l = 0; l < c->layers_count; l++) {
            const gg_tensor *of = holds(c->layers[l].k, data)   ? c->layers[l].k
                                  : holds(c->layers[l].v, data) ? c->layers[l].v
                                                                : NULL;
            if (!of || !bytes)
                continue;
            const size_t from = (size_t)(data - (const char *)of->data);
            const size_t total = (size_t)c->cells * c->streams;
            for (size_t cell = from / of->nb[1]; cell < total && cell * of->nb[1] < from + bytes;
                 cell++)
                kvl_chains_wrote(c->chains, l, cell);
        }
    }
}

/* The functions of a buffer before ours, after its cells were counted. */
static gg_buffer_i counted(gg_buffer *buffer, const gg_tensor *tensor, size_t offset, size_t bytes)
{
    kvl_plugin *p = kvl_the_plugin();
    pthread_mutex_lock(&p->lock);
    const gg_buffer_i original = hook_of(p, buffer)->original;
    wrote(p, buffer, (const char *)tensor->data + offset, bytes);
    pthread_mutex_unlock(&p->lock);
    return original;
}

static void set_tensor(gg_buffer *buffer, gg_tensor *tensor, const void *data, size_t offset,
                       size_t size)
{
    counted(buffer, tensor, offset, size).set_tensor(buffer, tensor, data, offset, size);
}

static void memset_tensor(gg_buffer *buffer, gg_tensor *tensor, uint8_t value, size_t offset,
                          size_t size)
{
    counted(buffer, tensor, offset, size).memset_tensor(buffer, tensor, value, offset, size);
}

static void set_tensor_2d(gg_buffer *buffer, gg_tensor *tensor, const void *data, size_t offset,
                          size_t size, size_t copies, size_t stride_tensor, size_t stride_data)
{
    const size_t bytes = copies ? (copies - 1) * stride_tensor + size : 0;
    counted(buffer, tensor, offset, bytes)
        .set_tensor_2d(buffer, tensor, data, offset, size, copies, stride_tensor, stride_data);
}

static bool cpy_tensor(gg_buffer *buffer, const gg_tensor *from, gg_tensor *to)
{
    const size_t bytes = kvl_the_plugin()->gg.nbytes(to);
    return counted(buffer, to, 0, bytes).cpy_tensor(buffer, from, to);
}

static void clear(gg_buffer *buffer, uint8_t value)
{
    kvl_plugin *p = kvl_the_plugin();
    pthread_mutex_lock(&p->lock);
    const gg_buffer_i original = hook_of(p, buffer)->original;
    for (uint32_t i = 0; i < p->caches_count; i++)
        for (uint32_t l = 0; p->caches[i]->buffer == buffer && l < p->caches[i]->layers_count; l++)
            kvl_layer_wrote(p->caches[i], l);
    pthread_mutex_unlock(&p->lock);
    original.clear(buffer, value);
}

static void forget_cache(kvl_plugin *p, uint32_t index)
{
    kvl_cache *c = p->caches[index];
    kvl_cache_reset(p, c);
    for (uint32_t l = 0; l < c->layers_count; l++)
        free(c->layers[l].sinks);
    free(c->layers);
    free(c);
    p->caches[index] = p->caches[--p->caches_count];
}

/* The buffer goes, and all that is known of it. */
static gg_buffer_i forget(kvl_plugin *p, const gg_buffer *buffer)
{
    for (uint32_t i = p->caches_count; i-- > 0;)
        if (p->caches[i]->buffer == buffer)
            forget_cache(p, i);
    kvl_hook *hook = hook_of(p, buffer);
    const gg_buffer_i original = hook->original;
    for (uint32_t i = 0; i < p->hooks_count; i++)
        if (p->hooks[i] == hook) {
            p->hooks[i] = p->hooks[--p->hooks_count];
            break;
        }
    free(hook->keys);
    free(hook);
    return original;
}

static void free_buffer(gg_buffer *buffer)
{
    kvl_plugin *p = kvl_the_plugin();
    pthread_mutex_lock(&p->lock);
    const gg_buffer_i original = forget(p, buffer);
    pthread_mutex_unlock(&p->lock);
    buffer->iface = original;
    if (original.free_buffer)
        original.free_buffer(buffer);
}

kvl_hook *kvl_hook_buffer(kvl_plugin *p, gg_buffer *buffer)
{
    kvl_hook *hook = hook_of(p, buffer);
    if (hook)
        return hook;
    if (!grow((void **)&p->hooks, p->hooks_count, &p->hooks_room, sizeof *p->hooks))
        return NULL;
    hook = calloc(1, sizeof *hook);
    if (!hook)
        return NULL;
    hook->buffer = buffer;
    hook->original = buffer->iface;
    p->hooks[p->hooks_count++] = hook;
    buffer->iface.free_buffer = free_buffer;
    if (p->no_hooks)
        return hook;
    /* ggml does without a function that a buffer lacks, by one that it has. */
    if (hook->original.set_tensor)
        buffer->iface.set_tensor = set_tensor;
    if (hook->original.memset_tensor)
        buffer->iface.memset_tensor = memset_tensor;
    if (hook->original.set_tensor_2d)
        buffer->iface.set_tensor_2d = set_tensor_2d;
    if (hook->original.cpy_tensor)
        buffer->iface.cpy_tensor = cpy_tensor;
    if (hook->original.clear)
        buffer->iface.clear = clear;
    return hook;
}

struct kvl_key *kvl_key_of(kvl_plugin *p, const gg_tensor *k)
{
    kvl_hook *hook = k->buffer ? kvl_hook_buffer(p, k->buffer) : NULL;
    if (!hook)
        return NULL;
    for (uint32_t i = 0; i < hook->keys_count; i++)
        if (hook->keys[i].k == k)
            return &hook->keys[i];
    if (!grow((void **)&hook->keys, hook->keys_count, &hook->keys_room, sizeof *hook->keys))
        return NULL;
    hook->keys[hook->keys_count] = (struct kvl_key){.k = k};
    return &hook->keys[hook->keys_count++];
}

/* ---- learning ---- */

kvl_cache *kvl_find_cache(kvl_plugin *p, const gg_tensor *of, uint32_t *layer)
{
    for (uint32_t i = 0; i < p->caches_count; i++)
        for (uint32_t l = 0; l < p->caches[i]->layers_count; l++)
            if (p->caches[i]->layers[l].k == of || p->caches[i]->layers[l].v == of) {
                *layer = l;
                return p->caches[i];
            }
    return NULL;
}

static int same_shape(const kvl_cache *a, const kvl_cache *b)
{
    return a->buffer == b->buffer && a->query_heads == b->query_heads &&
           a->kv_heads == b->kv_heads && a->head_dim == b->head_dim &&
           a->value_dim == b->value_dim && a->cells == b->cells && a->streams == b->streams;
}

/* A cache that still learns and has this shape, or a new one. */
static kvl_cache *learning(kvl_plugin *p, const kvl_cache *shape)
{
    for (uint32_t i = 0; i < p->caches_count; i++)
        if (p->caches[i]->state == KVL_LEARNING && same_shape(p->caches[i], shape))
            return p->caches[i];
    if (!grow((void **)&p->caches, p->caches_count, &p->caches_room, sizeof *p->caches))
        return NULL;
    kvl_cache *c = malloc(sizeof *c);
    if (!c)
        return NULL;
    *c = *shape;
    return p->caches[p->caches_count++] = c;
}

kvl_reason kvl_learn(kvl_plugin *p, const gg_tensor *node)
{
    const gg_tensor *q = node->src[0], *k = node->src[1], *v = node->src[2];
    const gg_tensor *keys = kvl_cache_tensor(k, 'k'), *values = kvl_cache_tensor(v, 'v');
    uint32_t layer;
    float parameters[3];
    memcpy(parameters, node->op_params, sizeof parameters);
    if (!values)
        return KVL_MLA;
    if (parameters[1] != 0.0f)
        return KVL_ALIBI;
    if (!kvl_row_bytes(keys->type, (size_t)k->ne[0]) ||
        !kvl_row_bytes(values->type, (size_t)v->ne[0]))
        return KVL_TYPE;
    if (kvl_find_cache(p, keys, &layer))
        return KVL_SERVED;
    const kvl_cache shape = {.buffer = keys->buffer,
                             .query_heads = (uint32_t)q->ne[2],
                             .kv_heads = (uint32_t)k->ne[2],
                             .head_dim = (uint32_t)k->ne[0],
                             .value_dim = (uint32_t)v->ne[0],
                             .cells = (uint32_t)keys->ne[1],
                             .streams = (uint32_t)keys->ne[2]};
    if (shape.cells % 64 || values->ne[1] != keys->ne[1] || values->ne[2] != keys->ne[2] ||
        values->buffer != keys->buffer || keys->ne[0] != k->ne[0] * k->ne[2] ||
        values->ne[0] != v->ne[0] * v->ne[2] || keys->ne[3] != 1)
        return KVL_LAYOUT;
    if (!kvl_hook_buffer(p, keys->buffer))
        return KVL_MEMORY;
    kvl_cache *c = learning(p, &shape);
    if (!c || !grow((void **)&c->layers, c->layers_count, &c->layers_room, sizeof *c->layers))
        return KVL_MEMORY;
    c->layers[c->layers_count++] = (kvl_layer){.k = keys, .v = values};
    return KVL_SERVED;
}

/* ---- opening and closing ---- */

/* Arrays of steps, over an arena or over NULL. @return bytes */
static size_t lay_out(kvl_cache *c, char *arena)
{
    const uint64_t rows = c->rows_max, kv = c->kv_heads, heads = c->query_heads;
    kvf_carver carver = {.base = arena};
    c->stale_room = c->cells + 4096;
    KVF_CARVE(&carver, c->rows, rows);
    KVF_CARVE(&carver, c->sets, rows, c->cells / 64);
    KVF_CARVE(&carver, c->table, rows, c->table_stride);
    KVF_CARVE(&carver, c->lengths, rows);
    KVF_CARVE(&carver, c->q, rows, heads, c->head_dim);
    KVF_CARVE(&carver, c->out, rows, heads, c->value_dim);
    KVF_CARVE(&carver, c->put_k, KVL_PUT, kv, c->head_dim);
    KVF_CARVE(&carver, c->put_v, KVL_PUT, kv, c->value_dim);
    KVF_CARVE(&carver, c->put_slots, KVL_PUT);
    KVF_CARVE(&carver, c->stale, c->stale_room);
    return carver.bytes;
}

static void close_blocks(kvl_plugin *p, kvl_cache *c)
{
    kvf_stream_destroy(c->stream);
    kvl_chains_close(c->chains);
    kvf_blocks_close(c->blocks);
    if (c->codes)
        kvf_memory_free(p->runtime, c->codes);
    c->chains = NULL;
    c->blocks = NULL;
    c->stream = NULL;
    c->codes = NULL;
    free(c->scratch), free(c->prompt_q), free(c->prompt_out), free(c->prompt_cells);
    c->scratch = NULL;
    c->prompt_q = c->prompt_out = NULL;
    c->prompt_cells = NULL;
    c->prompt_tokens = c->rows_count = 0;
}

static void add_counts(const kvl_cache *c, kvl_counts *counts)
{
    if (!c->blocks || !c->chains)
        return;
    kvf_blocks_stats s;
    kvf_blocks_stats_get(c->blocks, &s);
    counts->attended += (double)s.tokens_attended;
    counts->hits += s.hits;
    counts->misses += s.misses;
    counts->bytes += s.bytes_to_device;
    counts->forks += kvl_chains_stats_get(c->chains)->forks;
    counts->dropped += kvl_chains_stats_get(c->chains)->dropped;
}

void kvl_counts_add(const kvl_plugin *p, kvl_counts *counts)
{
    for (uint32_t i = 0; i < p->caches_count; i++)
        add_counts(p->caches[i], counts);
}

void kvl_cache_reset(kvl_plugin *p, kvl_cache *c)
{
    kvf_stream_destroy(c->stream); /* waits, also after a failure */
    c->stream = NULL;
    add_counts(c, &p->counts);
    close_blocks(p, c);
    for (uint32_t l = 0; l < c->layers_count; l++)
        c->layers[l].has_params = 0;
    if (c->state == KVL_OPEN)
        c->state = KVL_LEARNING;
}

/* A runtime for all caches of the process, with llama.cpp's threads. */
static kvf_status open_runtime(kvl_plugin *p, kvf_error *error)
{
    if (p->runtime)
        return KVF_OK;
    kvf_runtime_config rc = p->settings.runtime;
    if (!rc.threads)
        rc.threads = (uint32_t)p->threads;
    return kvf_runtime_open(&rc, &p->runtime, error);
}

/* Blocks beside one for every 32 cells: of every chain the one that it does not fill, and one to
 * copy to. A small cache has few sequences; where it has more, chains give way to each other. */
static uint32_t spare_blocks(const kvl_settings *settings, uint32_t blocks)
{
    const uint32_t all = 2 * (settings->rows + KVL_CHAINS), few = blocks / 4 + 16;
    return all < few ? all : few;
}

static void configure(const kvl_settings *settings, const kvl_cache *c, kvf_blocks_config *b)
{
    kvf_blocks_config_init(b);
    b->cache = settings->cache;
    b->cache.layers = c->layers_count;
    b->cache.query_heads = c->query_heads;
    b->cache.kv_heads = c->kv_heads;
    b->cache.head_dim = c->head_dim;
    b->cache.value_dim = c->value_dim == c->head_dim ? 0 : c->value_dim;
    b->cache.tensors = KVF_TENSORS_FP32_QUERIES;
    b->cache.tokens_max = c->cells;
    b->cache.sequences_max = settings->rows;
    if (settings->full || b->cache.budget_tokens > c->cells)
        b->cache.budget_tokens = c->cells;
    b->block_tokens = KVL_BLOCK;
    b->block_count = (uint32_t)((uint64_t)c->cells * c->streams / KVL_BLOCK);
    b->block_count += spare_blocks(settings, b->block_count);
}

kvf_status kvl_plan_make(kvf_runtime *runtime, const kvl_settings *settings, kvl_cache *c,
                         kvl_plan *plan, kvf_error *error)
{
    kvf_blocks_config *b = &plan->blocks;
    configure(settings, c, b);
    KVF_TRY(kvf_blocks_plan_make(runtime, b, &plan->memory, error));
    while (settings->host_memory && plan->memory.host_bytes > settings->host_memory &&
           b->block_count > 1) {
        const double fits = (double)settings->host_memory / (double)plan->memory.host_bytes;
        b->block_count = (uint32_t)((double)(b->block_count - 1) * fits);
        b->block_count += !b->block_count;
        KVF_TRY(kvf_blocks_plan_make(runtime, b, &plan->memory, error));
    }
    c->rows_max = settings->rows;
    c->table_stride = c->cells / KVL_BLOCK;
    c->budget = b->cache.budget_tokens;
    plan->chains = (kvl_chains_config){.layers = c->layers_count,
                                       .cells = c->cells,
                                       .streams = c->streams,
                                       .blocks = b->block_count,
                                       .chains = settings->rows + KVL_CHAINS,
                                       .budget = c->budget};
    plan->codes = plan->memory.code_bytes * b->block_count * c->layers_count;
    plan->own = kvl_chains_bytes(&plan->chains) + lay_out(c, NULL);
    return KVF_OK;
}

static kvf_status open_blocks(kvl_plugin *p, kvl_cache *c, kvl_plan *plan, kvf_error *error)
{
    KVF_TRY(open_runtime(p, error));
    KVF_TRY(kvl_plan_make(p->runtime, &p->settings, c, plan, error));
    KVF_TRY(kvf_blocks_open(p->runtime, &plan->blocks, &c->blocks, error));
    kvf_status status = kvf_stream_create(p->runtime, &c->stream);
    if (status == KVF_OK)
        status = kvf_memory_alloc(p->runtime, plan->codes, &c->codes);
    for (uint32_t l = 0; status == KVF_OK && l < c->layers_count; l++)
        status =
            kvf_blocks_bind(c->blocks, l, (char *)c->codes + l * (plan->codes / c->layers_count),
                            plan->memory.code_bytes);
    if (status != KVF_OK)
        *error = *kvf_runtime_error(p->runtime);
    return status;
}

static void say_first(const kvl_cache *c, const kvl_plan *plan)
{
    const kvf_blocks_plan *memory = &plan->memory;
    const double mib = 1048576.0;
    char pages[32] = "native";
    if (plan->blocks.cache.pages)
        kvf_setting_show(kvl_setting_of("pages"), &plan->blocks.cache, pages, sizeof pages);
    kvl_say("serving %u of %u layers, %llu cells of room, host %.0f MiB, device %.0f MiB, budget "
            "%u, pages %s; heads=%u kv_heads=%u head_dim=%u layers=%u blocks=%u host=%llu "
            "device=%llu codes=%llu own=%llu",
            c->layers_count, c->layers_count,
            (unsigned long long)plan->blocks.block_count * KVL_BLOCK,
            (double)memory->host_bytes / mib,
            ((double)memory->device_bytes + (double)plan->codes) / mib, c->budget, pages,
            c->query_heads, c->kv_heads, c->head_dim, c->layers_count, plan->blocks.block_count,
            (unsigned long long)memory->host_bytes, (unsigned long long)memory->device_bytes,
            (unsigned long long)plan->codes, (unsigned long long)plan->own);
}

kvl_reason kvl_cache_ready(kvl_plugin *p, kvl_cache *c)
{
    if (c->state == KVL_OPEN)
        return KVL_SERVED;
    if (c->state == KVL_REFUSED)
        return c->refused;
    kvf_error error = {0};
    kvl_plan plan;
    const kvf_status status = open_blocks(p, c, &plan, &error);
    if (status == KVF_OK && (c->scratch = calloc(1, lay_out(c, NULL)))) {
        lay_out(c, c->scratch);
        plan.chains.no_counts = p->no_counts;
        c->chains = kvl_chains_open(&plan.chains);
    }
    if (c->chains) {
        c->state = KVL_OPEN;
        say_first(c, &plan);
        return KVL_SERVED;
    }
    close_blocks(p, c);
    c->state = KVL_REFUSED;
    c->refused = status == KVF_INVALID || status == KVF_UNSUPPORTED ? KVL_GEOMETRY : KVL_MEMORY;
    kvl_leave(p, c, c->refused, c->layers[0].k, 0,
              status == KVF_OK ? "host memory of the plug-in" : error.text);
    return c->refused;
}

void kvl_layer_wrote(kvl_cache *c, uint32_t layer)
{
    const size_t total = (size_t)c->cells * c->streams;
    for (size_t cell = 0; c->chains && cell < total; cell++)
        kvl_chains_wrote(c->chains, layer, cell);
}

void kvl_close_all(kvl_plugin *p)
{
    while (p->hooks_count) {
        gg_buffer *buffer = p->hooks[0]->buffer;
        buffer->iface = forget(p, buffer);
    }
    while (p->caches_count)
        forget_cache(p, 0);
    kvf_runtime_close(p->runtime);
    p->runtime = NULL;
    free(p->hooks);
    free(p->caches);
    p->hooks = NULL;
    p->caches = NULL;
    p->hooks_room = p->caches_room = 0;
}
