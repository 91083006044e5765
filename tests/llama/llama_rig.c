/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The rig: nodes as llama.cpp makes them, a scheduler of one node, and comparisons.
 */

#include "llama_rig.h"

#include <math.h>
#include <unistd.h>

#include "common/convert.h"
#include "common/random.h"

gg_registry *ggml_backend_init(void);

int rig_is_inside;

static FILE *caught;
static int own_stderr = -1;
static char said[65536];

const char *rig_said(void)
{
    if (caught) {
        fflush(stderr);
        dup2(own_stderr, STDERR_FILENO);
        close(own_stderr);
        rewind(caught);
        said[fread(said, 1, sizeof said - 1, caught)] = '\0';
        fclose(caught);
        caught = NULL;
    }
    return said;
}

/* A test failed, and nobody asked what was said. */
static void tell(void)
{
    if (caught)
        fputs(rig_said(), stderr);
}

void rig_listen(void)
{
    static int is_first = 1;
    if (is_first)
        atexit(tell);
    is_first = 0;
    tell();
    fflush(stderr);
    caught = tmpfile();
    own_stderr = dup(STDERR_FILENO);
    dup2(fileno(caught), STDERR_FILENO);
}

gg_registry *rig_load(const char *setting)
{
    if (setting)
        setenv("KVFERRY_LLAMA", setting, 1);
    else
        unsetenv("KVFERRY_LLAMA");
    return ggml_backend_init();
}

void rig_unload(void)
{
    kvl_plugin *p = kvl_the_plugin();
    assert_null(p->buffers);
    kvf_runtime_close(p->runtime);
    kvf_runtime_close(p->card.runtime);
    p->runtime = NULL;
    p->card = (kvl_card){0};
    standin_cards_reset();
    p->counts = (kvl_counts){0};
    p->is_loaded = 0;
    unsetenv("KVF_TEST_WITHOUT");
    p->away_at = KVL_AWAY;
    p->said = 0;
}

size_t rig_away(void)
{
    size_t away = 0;
    for (const kvl_buffer *b = kvl_the_plugin()->buffers; b; b = b->next)
        for (const kvl_layer *l = b->layers; l; l = l->next)
            for (const kvl_pages *g = l->pages; g < l->pages + 2; g++)
                for (size_t i = 0; g->away && i < g->count; i++)
                    away += g->away[i];
    return away;
}

static void reserve(rig *r);

void rig_make_cache(rig *r)
{
    const int type = r->o.type ? r->o.type : GG_F16, streams = r->o.streams ? r->o.streams : 1;
    gg_tensor *all[2 * RIG_LAYERS];
    for (int l = 0; l < RIG_LAYERS; l++) {
        char name[32];
        r->k[l] = ggml_new_tensor_4d(r->context, type, RIG_KV * RIG_DIM, RIG_CELLS, streams, 1);
        r->v[l] = ggml_new_tensor_4d(r->context, type, RIG_KV * RIG_DIM, RIG_CELLS, streams, 1);
        snprintf(name, sizeof name, "cache_k_l%d", l);
        ggml_set_name(r->k[l], name);
        snprintf(name, sizeof name, "cache_v_l%d", l);
        ggml_set_name(r->v[l], name);
        all[2 * l] = r->k[l];
        all[2 * l + 1] = r->v[l];
    }
    r->buffer = r->has_card ? standin_allocate(standin_card_type(), all, 2 * RIG_LAYERS)
                            : standin_allocate(ggml_backend_cpu_buffer_type(), all, 2 * RIG_LAYERS);
    standin_clear(r->buffer, 0); /* as llama.cpp does it */
    gg_buffer_i plain = r->buffer->iface;
    if (r->has_card) /* it was known before anybody attended to it */
        plain = kvl_the_plugin()->buffers->original;
    if (!r->o.is_plain)
        reserve(r);
    plain.free_buffer = r->buffer->iface.free_buffer;
    if (r->o.no_hooks)
        r->buffer->iface = plain;
}

int rig_has_card(void)
{
    return getenv("KVF_TEST_CARD") != NULL;
}

rig *rig_open(const rig_options *options)
{
    rig *r = calloc(1, sizeof *r);
    r->o = *options;
    r->random = 7;
    r->has_card = rig_has_card() && !options->is_plain; /* whose CPU reads all */
    if (!kvl_the_plugin()->is_loaded) {
        if (r->has_card)
            standin_cards_reset(), standin_card.count = 1;
        rig_listen();
        assert_non_null(rig_load(options->setting ? options->setting : "budget=full"));
        if (options->without)
            setenv("KVF_TEST_WITHOUT", options->without, 1);
        if (options->away_at)
            kvl_the_plugin()->away_at = (size_t)options->away_at;
    }
    r->registry = rig_load(NULL);
    r->device = r->registry->iface.get_device(r->registry, 0);
    r->context = ggml_init((gg_init_params){0});
    r->backend = r->device->iface.init_backend(r->device, NULL);
    assert_non_null(r->backend);
    r->cpu = standin_cpu();
    rig_make_cache(r);
    return r;
}

void rig_close(rig *r)
{
    ggml_backend_buffer_free(r->buffer);
    ggml_backend_free(r->backend);
    ggml_backend_free(r->cpu);
    ggml_free(r->context);
    free(r);
}

const char *rig_end(rig *r)
{
    rig_close(r);
    rig_unload();
    return rig_said();
}

static int run_part(rig *r, gg_context *context, gg_tensor *const *nodes, int count, bool ours)
{
    gg_graph *graph = ggml_new_graph_custom(context, 8, false);
    gg_backend *by = ours ? r->backend : r->cpu;
    for (int i = 0; i < count; i++)
        ggml_build_forward_expand(graph, nodes[i]);
    uint64_t before[2], after[2];
    standin_count_calls(before);
    __atomic_store_n(&rig_is_inside, 1, __ATOMIC_RELAXED);
    const int status = by->iface.graph_compute(by, graph);
    __atomic_store_n(&rig_is_inside, 0, __ATOMIC_RELAXED);
    standin_count_calls(after);
    r->copies = after[0] - before[0];
    r->waits = after[1] - before[1];
    return status;
}

static bool takes(const rig *r, const gg_tensor *node)
{
    __atomic_store_n(&rig_is_inside, 1, __ATOMIC_RELAXED);
    const bool takes = r->device->iface.supports_op(r->device, node);
    __atomic_store_n(&rig_is_inside, 0, __ATOMIC_RELAXED);
    return takes;
}

/* The scheduler: a node goes to the plug-in if it takes it, else to the CPU; those after each other
 * are one graph. */
static int run(rig *r, gg_context *context, gg_tensor *const *nodes, int count)
{
    int status = GG_SUCCESS;
    bool ours[3];
    for (int i = 0; i < count; i++)
        ours[i] = !r->o.is_plain && takes(r, nodes[i]);
    for (int i = 0, n; i < count && status == GG_SUCCESS; i += n) {
        for (n = 1; i + n < count && ours[i + n] == ours[i];)
            n++;
        status = run_part(r, context, nodes + i, n, ours[i]);
    }
    return status;
}

static gg_tensor *random_rows(rig *r, gg_context *context, int64_t a, int64_t b, int64_t c,
                              int64_t d)
{
    gg_tensor *t = ggml_new_tensor_4d(context, GG_F32, a, b, c, d);
    float *data = malloc(ggml_nbytes(t));
    for (size_t i = 0; i < ggml_nbytes(t) / sizeof *data; i++)
        data[i] = kvf_random_normal(&r->random);
    t->data = data;
    return t;
}

/* A tensor with data of the host goes to the card, with what it has or without. @return its data
 * there */
static void *to_card(const rig *r, gg_tensor *t, int with_data)
{
    void *data = t->data;
    if (!r->has_card)
        return data;
    t->data = NULL;
    standin_allocate(standin_card_type(), &t, 1);
    if (with_data)
        standin_enqueue(t, data, ggml_nbytes(t));
    return data;
}

static void off_card(const rig *r, gg_tensor *t, void *data)
{
    if (!r->has_card)
        return;
    ggml_backend_buffer_free(t->buffer);
    t->buffer = NULL;
    t->data = data;
}

static gg_tensor *set_rows(rig *r, gg_tensor *cache, int count)
{
    gg_context *context = r->writes_context;
    gg_tensor *node =
        ggml_new_tensor_4d(context, cache->type, cache->ne[0], cache->ne[1] * cache->ne[2], 1, 1);
    gg_tensor *numbers = ggml_new_tensor_4d(context, GG_I64, count, 1, 1, 1);
    numbers->data = r->cells;
    node->op = STANDIN_SET_ROWS;
    node->src[0] = random_rows(r, context, cache->ne[0], count, 1, 1);
    node->src[1] = numbers;
    node->view_src = cache;
    node->data = cache->data;
    return node;
}

void rig_write_with_next(rig *r, int layer, const int64_t *cells, int count)
{
    r->writes_context = ggml_init((gg_init_params){0});
    memcpy(r->cells, cells, (size_t)count * sizeof *cells);
    r->writes[0] = set_rows(r, r->k[layer], count);
    r->writes[1] = set_rows(r, r->v[layer], count);
    r->writes_count = 2;
}

static void end_writes(rig *r)
{
    if (r->writes_count)
        ggml_free(r->writes_context);
    r->writes_count = 0;
}

int rig_write(rig *r, int layer, const int64_t *cells, int count)
{
    int status = GG_SUCCESS;
    rig_write_with_next(r, layer, cells, count);
    for (int i = 0; i < 2; i++) {
        gg_tensor *rows = r->writes[i]->src[0];
        void *data = to_card(r, rows, 1);
        if (status == GG_SUCCESS)
            status = run(r, r->writes_context, &r->writes[i], 1);
        off_card(r, rows, data);
        free(rows->data);
    }
    end_writes(r);
    return status;
}

int rig_shift(rig *r, int layer)
{
    gg_context *context = ggml_init((gg_init_params){0});
    gg_tensor *cache = r->k[layer];
    gg_tensor *node =
        ggml_new_tensor_4d(context, cache->type, cache->ne[0], cache->ne[1] * cache->ne[2], 1, 1);
    node->op = STANDIN_ROPE;
    node->view_src = cache;
    node->data = cache->data;
    const int status = run(r, context, &node, 1);
    ggml_free(context);
    return status;
}

/* Keys or values of a cache as attention sees them: heads as a dimension of their own. */
static gg_tensor *by_heads(gg_context *context, gg_tensor *cache, int first, int streams)
{
    gg_tensor *t = ggml_new_tensor_4d(context, cache->type, RIG_DIM, cache->ne[1], RIG_KV, streams);
    t->nb[1] = cache->nb[1];
    t->nb[2] = cache->nb[1] / RIG_KV;
    t->nb[3] = cache->nb[2];
    t->op = STANDIN_VIEW;
    t->view_src = cache;
    t->view_offs = (size_t)first * cache->nb[2];
    t->data = (char *)cache->data + t->view_offs;
    t->buffer = cache->buffer;
    return t;
}

static gg_tensor *make_mask(gg_context *context, int tokens, int streams, rig_set *sets)
{
    gg_tensor *mask = ggml_new_tensor_4d(context, GG_F16, RIG_CELLS, tokens, 1, streams);
    uint16_t *at = malloc(ggml_nbytes(mask));
    mask->data = at;
    for (int row = 0; row < tokens * streams; row++)
        for (int cell = 0; cell < RIG_CELLS; cell++)
            *at++ = sets[row][cell / 64] >> cell % 64 & 1 ? 0 : 0xfc00;
    return mask;
}

/* llama.cpp asks of whole graphs before the first pass. */
static void reserve(rig *r)
{
    gg_context *context = ggml_init((gg_init_params){0});
    for (int layer = 0; layer < RIG_LAYERS; layer++) {
        gg_tensor *q = ggml_new_tensor_4d(context, GG_F32, RIG_DIM, 1, RIG_HEADS, 1);
        gg_tensor *node =
            ggml_flash_attn_ext(context, q, by_heads(context, r->k[layer], 0, 1),
                                by_heads(context, r->v[layer], 0, 1), NULL, 0.2f, 0.0f, r->o.cap);
        r->device->iface.supports_op(r->device, node);
    }
    ggml_free(context);
}

/* Writes that there are, and attention, in one graph. */
static int run_attention(rig *r, gg_context *context, gg_tensor *node)
{
    gg_tensor *nodes[3], *q = node->src[0], *rows[2];
    void *data[2], *queries = to_card(r, q, 1), *out = node->data;
    int n = 0;
    for (; n < r->writes_count; n++) {
        nodes[n] = r->writes[n];
        rows[n] = nodes[n]->src[0];
        data[n] = to_card(r, rows[n], 1);
    }
    to_card(r, node, 0);
    void *own = node->data;
    /* ggml's allocator gives memory of what has been read to what comes. */
    if (r->has_card && n && ggml_nbytes(node) <= ggml_nbytes(rows[0]))
        node->data = rows[0]->data;
    nodes[n] = node;
    const int status = run(r, context, nodes, n + 1);
    off_card(r, q, queries);
    if (r->has_card)
        ggml_backend_tensor_get(node, out, 0, ggml_nbytes(node));
    node->data = own;
    off_card(r, node, out);
    while (n-- > 0) {
        off_card(r, rows[n], data[n]);
        free(rows[n]->data);
    }
    end_writes(r);
    return status;
}

/* The largest difference of a row of an output to a plain loop over llama.cpp's tensors, which
 * knows no chains and no writes; relative to the largest value. */
static double plain_difference(const gg_tensor *node, int64_t token, int64_t s)
{
    double difference = 0, largest = 0, plain[STANDIN_WIDTH];
    for (int64_t head = 0; head < node->ne[1]; head++) {
        const float *own = (const float *)node->data +
                           ((s * node->ne[2] + token) * node->ne[1] + head) * node->ne[0];
        standin_attend(node, token, head, s, plain);
        for (int64_t d = 0; d < node->ne[0]; d++) {
            const double e = fabs((double)own[d] - plain[d]);
            difference = e == e ? fmax(difference, e) : INFINITY;
            largest = fmax(largest, fabs(plain[d]));
        }
    }
    return largest > 0 ? difference / largest : difference;
}

int rig_attend(rig *r, int layer, int tokens, int first, int streams, rig_set *sets)
{
    assert_true(tokens * streams <= RIG_ROWS);
    gg_context *context = ggml_init((gg_init_params){0});
    gg_tensor *q = random_rows(r, context, RIG_DIM, tokens, RIG_HEADS, streams);
    if (r->attentions % 4) { /* as llama.cpp has them: heads of a token side by side */
        q->nb[2] = q->nb[1];
        q->nb[1] = q->nb[2] * RIG_HEADS;
    }
    gg_tensor *mask = make_mask(context, tokens, streams, sets);
    gg_tensor *node = ggml_flash_attn_ext(
        context, q, by_heads(context, r->k[layer], first, streams),
        by_heads(context, r->v[layer], first, streams), mask, 0.2f, 0.0f, r->o.cap);
    node->data = r->out;
    memset(r->out, 0xff, sizeof r->out);
    if (r->spoil)
        r->spoil(node);
    const uint64_t before = __atomic_load_n(&standin_computed, __ATOMIC_RELAXED);
    const int status = run_attention(r, context, node);
    r->by_kvferry = __atomic_load_n(&standin_computed, __ATOMIC_RELAXED) == before;
    /* A loop over llama.cpp's tensors brings all of them back. */
    const int is_seen = !r->spoil && (!r->o.away_at || r->attentions % 5 == 0);
    for (int row = 0; status == GG_SUCCESS && is_seen && row < tokens * streams; row++)
        r->worst = fmax(r->worst, plain_difference(node, row % tokens, row / tokens));
    r->attentions++;
    free(q->data);
    free(mask->data);
    ggml_free(context);
    return status;
}

int rig_pass(rig *r, const int64_t *cells, int count, int tokens, int first, int streams,
             rig_set *sets)
{
    int status = GG_SUCCESS;
    for (int layer = 0; layer < RIG_LAYERS && status == GG_SUCCESS; layer++) {
        if (count)
            rig_write_with_next(r, layer, cells, count);
        status = rig_attend(r, layer, tokens, first, streams, sets);
    }
    return status;
}

int rig_begin(rig *r, int64_t first, int64_t end, rig_set set)
{
    int64_t cells[RIG_CELLS];
    for (int64_t cell = first; cell < end; cell++) {
        rig_add(set, (uint32_t)cell);
        cells[cell - first] = cell;
    }
    return rig_pass(r, cells, (int)(end - first), 1, 0, 1, (rig_set *)set);
}
