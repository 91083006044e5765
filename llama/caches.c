/* SPDX-License-Identifier: Apache-2.0 */

/*
 * llama.cpp's KV caches: buffers with tensors of layers in them, and the kvf_blocks beside them.
 *
 * Layers become known when the scheduler asks who computes their attention, which it does of whole
 * graphs before the first pass. From then on the functions of the buffer are ours, which see writes
 * that are no operations. A kvf_blocks is opened at the first step.
 *
 * Invariant: tensors of a kvl_layer are alive, because its buffer is.
 */

#include <stdlib.h>
#include <string.h>

#include "common/base.h"
#include "common/carve.h"
#include "plugin.h"

static const gg_tensor *under_views(const gg_tensor *t)
{
    while (t->view_src)
        t = t->view_src;
    return t;
}

const gg_tensor *kvl_cache_tensor(const gg_tensor *t, char kind)
{
    const char prefix[] = {'c', 'a', 'c', 'h', 'e', '_', kind, '_', 'l'};
    t = under_views(t);
    if (strncmp(t->name, prefix, sizeof prefix) != 0)
        return NULL;
    const char *digits = t->name + sizeof prefix;
    return *digits && !digits[strspn(digits, "0123456789")] ? t : NULL;
}

/* ---- functions of buffers ---- */

static kvl_buffer *find_buffer(const kvl_plugin *p, const gg_buffer *buffer)
{
    kvl_buffer *b = p->buffers;
    while (b && b->buffer != buffer)
        b = b->next;
    return b;
}

void kvl_layer_wrote(kvl_layer *l, size_t first, size_t end)
{
    if (!l->cache || !l->cache->chains)
        return;
    kvl_bring_back(l, first, end);
    kvl_chains_wrote(l->cache->chains, l->index, first, end);
}

void kvl_memory_used(const kvl_plugin *p, const void *memory, size_t bytes, int is_written)
{
    const uintptr_t from = (uintptr_t)memory, to = from + bytes;
    for (const kvl_buffer *b = p->buffers; b; b = b->next)
        for (kvl_layer *l = b->layers; l; l = l->next)
            for (int i = 0; i < 2 && l->v; i++) {
                const gg_tensor *t = i ? l->v : l->k;
                const uintptr_t data = (uintptr_t)t->data;
                if (from >= data + t->nb[2] * (size_t)t->ne[2] || to <= data)
                    continue;
                const size_t first = from > data ? (from - data) / t->nb[1] : 0;
                const size_t end = (to - 1 - data) / t->nb[1] + 1;
                if (is_written)
                    kvl_layer_wrote(l, first, end);
                else
                    kvl_bring_back(l, first, end);
            }
}

/* The functions of a buffer before ours; bytes of a tensor are to be written, or of NULL all. */
static gg_buffer_i writing(gg_buffer *buffer, const gg_tensor *tensor, size_t offset, size_t bytes)
{
    kvl_plugin *p = kvl_the_plugin();
    pthread_mutex_lock(&p->lock);
    const kvl_buffer *b = find_buffer(p, buffer);
    if (tensor)
        kvl_memory_used(p, (const char *)tensor->data + offset, bytes, 1);
    for (kvl_layer *l = b->layers; l && !tensor; l = l->next) {
        kvl_pages_forget(l);
        kvl_layer_wrote(l, 0, SIZE_MAX);
    }
    for (kvl_cache *c = b->caches; c && !tensor; c = c->next)
        c->is_lost = 0;
    const gg_buffer_i original = b->original;
    pthread_mutex_unlock(&p->lock);
    return original;
}

static void set_tensor(gg_buffer *buffer, gg_tensor *tensor, const void *data, size_t offset,
                       size_t size)
{
    writing(buffer, tensor, offset, size).set_tensor(buffer, tensor, data, offset, size);
    kvl_put_away_again(kvl_the_plugin(), tensor);
}

static void get_tensor(gg_buffer *buffer, const gg_tensor *tensor, void *data, size_t offset,
                       size_t size)
{
    kvl_plugin *p = kvl_the_plugin();
    pthread_mutex_lock(&p->lock);
    const gg_buffer_i original = find_buffer(p, buffer)->original;
    pthread_mutex_unlock(&p->lock);
    original.get_tensor(buffer, tensor, data, offset, size);
    kvl_put_away_again(p, tensor);
}

static void memset_tensor(gg_buffer *buffer, gg_tensor *tensor, uint8_t value, size_t offset,
                          size_t size)
{
    writing(buffer, tensor, offset, size).memset_tensor(buffer, tensor, value, offset, size);
}

static void clear(gg_buffer *buffer, uint8_t value)
{
    const gg_buffer_i original = writing(buffer, NULL, 0, 0);
    if (value == 0 && buffer->buft == kvl_the_plugin()->gg.backend_cpu_buffer_type())
        kvl_clear(original.base(buffer), buffer->size);
    else
        original.clear(buffer, value);
}

/* The buffer goes, and all that is known of it. */
static void free_buffer(gg_buffer *buffer)
{
    kvl_plugin *p = kvl_the_plugin();
    pthread_mutex_lock(&p->lock);
    kvl_buffer **at = &p->buffers, *b;
    while ((b = *at)->buffer != buffer)
        at = &b->next;
    *at = b->next;
    for (kvl_layer *l = b->layers; l; l = l->next)
        kvl_pages_forget(l);
    for (kvl_cache *c; (c = b->caches); free(c)) {
        kvl_cache_reset(p, c);
        b->caches = c->next;
    }
    for (kvl_layer *l; (l = b->layers); free(l))
        b->layers = l->next;
    buffer->iface = b->original;
    free(b);
    pthread_mutex_unlock(&p->lock);
    if (buffer->iface.free_buffer)
        buffer->iface.free_buffer(buffer);
}

kvl_buffer *kvl_buffer_of(kvl_plugin *p, gg_buffer *buffer)
{
    kvl_buffer *b = find_buffer(p, buffer);
    if (b || !(b = calloc(1, sizeof *b)))
        return b;
    *b = (kvl_buffer){.next = p->buffers, .buffer = buffer, .original = buffer->iface};
    p->buffers = b;
    buffer->iface.free_buffer = free_buffer;
    buffer->iface.set_tensor = set_tensor;
    buffer->iface.get_tensor = get_tensor;
    buffer->iface.memset_tensor = memset_tensor;
    buffer->iface.clear = clear;
    /* Without these ggml sets and gets tensors. */
    buffer->iface.set_tensor_2d = buffer->iface.get_tensor_2d = buffer->iface.cpy_tensor = NULL;
    return b;
}

/* ---- learning ---- */

kvl_layer *kvl_find_layer(const kvl_plugin *p, const gg_tensor *of)
{
    of = under_views(of);
    const kvl_buffer *b = find_buffer(p, of->buffer);
    kvl_layer *l = b ? b->layers : NULL;
    while (l && l->k != of && l->v != of)
        l = l->next;
    return l;
}

int kvl_lists_cells(const kvl_layer *l, const gg_tensor *node)
{
    const gg_tensor *cells = node->src[1], *of = under_views(node);
    return cells->type == GG_I64 && cells->nb[0] == sizeof(int64_t) && cells->ne[1] == 1 &&
           cells->ne[2] == 1 && (of == l->k || of == l->v) && node->nb[1] == of->nb[1];
}

kvl_layer *kvl_layer_of(kvl_plugin *p, const gg_tensor *keys)
{
    kvl_layer *l = kvl_find_layer(p, keys);
    kvl_buffer *b = l || !keys->buffer ? NULL : kvl_buffer_of(p, keys->buffer);
    if (!b || !(l = calloc(1, sizeof *l)))
        return l;
    *l = (kvl_layer){.next = b->layers, .k = keys};
    return b->layers = l;
}

/* The cache of this shape that is not open yet, or a new one. */
static kvl_cache *cache_of(kvl_buffer *b, const kvl_shape *shape)
{
    kvl_cache *c = b->caches;
    while (c &&
           (c->chains || c->refused != KVL_SERVED || memcmp(&c->shape, shape, sizeof *shape) != 0))
        c = c->next;
    if (c || !(c = malloc(sizeof *c)))
        return c;
    *c = (kvl_cache){.next = b->caches, .shape = *shape, .refused = KVL_SERVED};
    return b->caches = c;
}

/* Keys or values as they lie in a cache: heads side by side in a cell. */
static int lies_as_known(const gg_tensor *view, const gg_tensor *cache)
{
    const size_t head = kvl_row_bytes(cache->type, (size_t)view->ne[0]);
    const size_t cell = head * (size_t)view->ne[2];
    return head && view->type == cache->type && view->nb[1] == cell && cache->nb[1] == cell &&
           (view->ne[2] == 1 || view->nb[2] == head) &&
           cache->nb[2] == cell * (size_t)cache->ne[1] && view->view_offs % cache->nb[2] == 0 &&
           (view->ne[3] == 1 || view->nb[3] == cache->nb[2]) && view->ne[1] <= cache->ne[1] &&
           view->view_offs / cache->nb[2] + (size_t)view->ne[3] <= (size_t)cache->ne[2];
}

kvl_reason kvl_learn(kvl_plugin *p, kvl_layer *l, const gg_tensor *node)
{
    const gg_tensor *q = node->src[0], *k = node->src[1], *v = node->src[2];
    const gg_tensor *keys = l->k, *values = kvl_cache_tensor(v, 'v');
    float parameters[3];
    memcpy(parameters, node->op_params, sizeof parameters);
    if (!values)
        return KVL_MLA;
    if (parameters[1] != 0.0f)
        return KVL_ALIBI;
    if (!kvl_row_bytes(keys->type, (size_t)k->ne[0]) ||
        !kvl_row_bytes(values->type, (size_t)v->ne[0]))
        return KVL_TYPE;
    if (!lies_as_known(k, keys) || !lies_as_known(v, values) || keys->ne[1] % 64 ||
        values->ne[1] != keys->ne[1] || values->ne[2] != keys->ne[2] || keys->ne[3] != 1 ||
        values->buffer != keys->buffer || v->ne[1] != k->ne[1] || v->ne[2] != k->ne[2] ||
        v->ne[3] != k->ne[3] || q->ne[3] != k->ne[3] || q->ne[0] != k->ne[0] ||
        k->view_offs / keys->nb[2] != v->view_offs / values->nb[2])
        return KVL_LAYOUT;
    kvl_shape shape = {.query_heads = (uint32_t)q->ne[2],
                       .kv_heads = (uint32_t)k->ne[2],
                       .head_dim = (uint32_t)k->ne[0],
                       .value_dim = (uint32_t)v->ne[0],
                       .cells = (uint32_t)keys->ne[1],
                       .streams = (uint32_t)keys->ne[2],
                       .is_off_card = (uint32_t)find_buffer(p, keys->buffer)->is_off_card,
                       .is_wide = keys->type != GG_F16 || values->type != GG_F16};
    shape.is_wide |= shape.is_off_card; /* as rows on the card are */
    if (l->cache) {
        const int is_same = l->v == values && !memcmp(&l->cache->shape, &shape, sizeof shape);
        return is_same ? KVL_SERVED : KVL_GEOMETRY;
    }
    if (!(l->cache = cache_of(find_buffer(p, keys->buffer), &shape)))
        return KVL_MEMORY;
    l->v = values;
    l->index = l->cache->layers++;
    l->sibling = l->cache->members;
    l->cache->members = l;
    kvl_pages_learn(p, l);
    return KVL_SERVED;
}

/* ---- opening and closing ---- */

/* The arrays of a cache, in memory or over NULL. @return bytes */
static size_t lay_out(kvl_cache *c, char *memory)
{
    const kvl_shape *s = &c->shape;
    const uint64_t rows = c->plan.blocks.cache.sequences_max, kv = s->kv_heads;
    const uint64_t element = s->is_wide ? 4 : 2;
    kvf_carver carver = {.base = memory};
    KVF_CARVE(&carver, c->rows, rows);
    KVF_CARVE(&carver, c->sets, rows + 1, s->cells / 64);
    KVF_CARVE(&carver, c->table, rows, s->cells / KVL_BLOCK);
    KVF_CARVE(&carver, c->lengths, rows);
    KVF_CARVE(&carver, c->q, rows, s->query_heads, s->head_dim);
    KVF_CARVE(&carver, c->put_k, KVL_PUT, kv, s->head_dim, element);
    KVF_CARVE(&carver, c->put_v, KVL_PUT, kv, s->value_dim, element);
    KVF_CARVE(&carver, c->put_cells, KVL_PUT);
    KVF_CARVE(&carver, c->put_slots, KVL_PUT);
    KVF_CARVE(&carver, c->homes, KVL_PUT);
    return carver.bytes;
}

/* Take the library's counts over. */
static void count(kvl_plugin *p, const kvl_cache *c)
{
    kvf_blocks_stats s;
    if (!c->chains)
        return;
    kvf_blocks_stats_get(c->blocks, &s);
    kvf_blocks_stats_reset(c->blocks);
    p->counts.tokens += (double)s.tokens_attended;
    p->counts.hits += (double)s.hits;
    p->counts.misses += (double)s.misses;
    p->counts.bytes += (double)s.bytes_to_device;
}

void kvl_count_all(kvl_plugin *p)
{
    for (const kvl_buffer *b = p->buffers; b; b = b->next)
        for (const kvl_cache *c = b->caches; c; c = c->next)
            count(p, c);
}

void kvl_cache_reset(kvl_plugin *p, kvl_cache *c)
{
    kvf_stream_destroy(c->stream); /* waits, also after a failure */
    c->stream = NULL;
    if (c->chains && kvf_stream_create(c->runtime, &c->stream) == KVF_OK) {
        for (kvl_layer *l = c->members; l; l = l->sibling)
            kvl_bring_back(l, 0, SIZE_MAX);
        kvf_stream_destroy(c->stream);
    }
    count(p, c);
    kvf_blocks_close(c->blocks);
    kvf_memory_free(c->runtime, c->codes);
    kvf_pinned_free(c->runtime, c->memory);
    free(c->chains);
    c->stream = NULL;
    c->chains = NULL;
    c->blocks = NULL;
    c->codes = c->memory = NULL;
    c->rows_count = 0;
}

/* A runtime for all caches of the process, with llama.cpp's threads. */
static kvf_status open_runtime(kvl_plugin *p)
{
    kvf_runtime_config config = p->settings.runtime;
    if (!config.threads)
        config.threads = (uint32_t)p->threads;
    return p->runtime ? KVF_OK : kvf_runtime_open(&config, &p->runtime, NULL);
}

static void configure(const kvl_settings *settings, const kvl_cache *c, kvf_blocks_config *b)
{
    const kvl_shape *s = &c->shape;
    kvf_blocks_config_init(b);
    b->cache = settings->cache;
    b->cache.layers = c->layers;
    b->cache.query_heads = s->query_heads;
    b->cache.kv_heads = s->kv_heads;
    b->cache.head_dim = s->head_dim;
    b->cache.value_dim = s->value_dim == s->head_dim ? 0 : s->value_dim;
    b->cache.tensors = s->is_wide ? KVF_TENSORS_FP32 : KVF_TENSORS_FP32_QUERIES;
    b->cache.tokens_max = s->cells;
    b->cache.sequences_max = settings->rows;
    if (b->cache.budget_tokens > s->cells)
        b->cache.budget_tokens = s->cells;
    b->block_tokens = KVL_BLOCK;
    b->on_demand = 1;
    /* One for every 32 cells, and of every chain the one that it does not fill. A small cache has
     * few sequences; where it has more, chains give way to each other. */
    const uint32_t full = (uint32_t)((uint64_t)s->cells * s->streams / KVL_BLOCK);
    b->block_count = full + kvf_min_u32(settings->rows + KVL_CHAINS, full / 4 + 16);
}

kvf_status kvl_plan_make(kvf_runtime *runtime, const kvl_settings *settings, kvl_cache *c)
{
    kvl_plan *plan = &c->plan;
    kvf_blocks_config *b = &plan->blocks;
    const uint64_t most = settings->host_memory ? settings->host_memory : UINT64_MAX;
    configure(settings, c, b);
    KVF_TRY(kvf_blocks_plan_make(runtime, b, &plan->memory, NULL));
    while (plan->memory.host_bytes > most && b->block_count > 1) {
        const double fits = (double)most / (double)plan->memory.host_bytes;
        b->block_count = kvf_max_u32(1, (uint32_t)((double)(b->block_count - 1) * fits));
        KVF_TRY(kvf_blocks_plan_make(runtime, b, &plan->memory, NULL));
    }
    plan->chains = (kvl_chains_config){.layers = c->layers,
                                       .cells = c->shape.cells,
                                       .streams = c->shape.streams,
                                       .blocks = b->block_count,
                                       .chains = settings->rows + KVL_CHAINS,
                                       .budget = b->cache.budget_tokens,
                                       .before = kvl_bring_cell,
                                       .user = c};
    plan->codes = plan->memory.code_bytes * b->block_count * c->layers;
    plan->own = kvl_chains_bytes(&plan->chains) + lay_out(c, NULL);
    return KVF_OK;
}

static kvf_status open_cache(kvl_plugin *p, kvl_cache *c)
{
    const kvl_plan *plan = &c->plan;
    void *device;
    if (!c->shape.is_off_card)
        KVF_TRY(open_runtime(p));
    c->runtime = c->shape.is_off_card ? p->card.runtime : p->runtime;
    KVF_TRY(kvl_plan_make(c->runtime, &p->settings, c));
    KVF_TRY(kvf_blocks_open(c->runtime, &plan->blocks, &c->blocks, NULL));
    KVF_TRY(kvf_stream_create(c->runtime, &c->stream));
    KVF_TRY(kvf_memory_alloc(c->runtime, plan->codes, &c->codes));
    if (!c->shape.is_off_card)
        kvl_give_back_zeros(c->codes, plan->codes);
    for (uint32_t l = 0; l < c->layers; l++)
        KVF_TRY(kvf_blocks_bind(c->blocks, l, (char *)c->codes + l * (plan->codes / c->layers),
                                plan->memory.code_bytes));
    KVF_TRY(kvf_pinned_alloc(c->runtime, lay_out(c, NULL), &c->memory, &device));
    c->to_device = (ptrdiff_t)((uintptr_t)device - (uintptr_t)c->memory);
    (void)lay_out(c, c->memory);
    c->chains = kvl_chains_open(&plan->chains);
    return c->chains ? KVF_OK : KVF_OUT_OF_MEMORY;
}

/* @param layer  one of the cache */
static void say_first(const kvl_cache *c, const kvl_layer *layer)
{
    const kvl_plan *plan = &c->plan;
    const gg_tensor *k = layer->k, *v = layer->v;
    const size_t each = (k->nb[2] + v->nb[2]) * (size_t)k->ne[2]; /* of llama.cpp */
    const double host = (double)plan->memory.host_bytes, codes = (double)plan->codes;
    const double device = (double)plan->memory.device_bytes, own = (double)plan->own;
    const int is_quantized = plan->blocks.cache.pages != KVF_PAGES_NATIVE;
    kvl_say("serving %u layers%s, %u cells of room, %.0f MiB %s llama.cpp's %.0f%s, budget %u; "
            "blocks=%u host=%.0f device=%.0f codes=%.0f own=%.0f",
            c->layers, c->shape.is_off_card ? " on the card (its pages are pinned)" : "",
            plan->blocks.block_count * KVL_BLOCK, (host + device + codes + own) / 1048576.0,
            layer->stays ? "beside" : "instead of", (double)(c->layers * each) / 1048576.0,
            is_quantized && !layer->stays ? ", which comes back quantized" : "",
            plan->chains.budget, plan->blocks.block_count, host, device, codes, own);
}

kvl_reason kvl_cache_ready(kvl_plugin *p, kvl_layer *layer)
{
    kvl_cache *c = layer->cache;
    if (c->chains || c->refused != KVL_SERVED)
        return c->refused;
    const kvf_status status = open_cache(p, c);
    const kvf_error error = *kvf_runtime_error(NULL);
    if (status == KVF_OK) {
        say_first(c, layer);
        return KVL_SERVED;
    }
    kvl_cache_reset(p, c);
    c->refused = status == KVF_INVALID || status == KVF_UNSUPPORTED ? KVL_GEOMETRY : KVL_MEMORY;
    kvl_leave(p, layer, c->refused, 0, error.status == status ? error.text : NULL);
    return c->refused;
}
