/* SPDX-License-Identifier: Apache-2.0 */

/*
 * ggml in plain loops: what a process has that loads the plug-in. It computes SET_ROWS and
 * FLASH_ATTN_EXT, and a ROPE that adds a number in place, as a shift of positions changes keys.
 */

#include "standin.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/convert.h"
#include "plugin.h"
#include "standin_card.h"

struct gg_context {
    void *made[4096];
    int count;
};

struct gg_graph {
    gg_tensor *nodes[64];
    int count;
};

static standin_fault broken;
uint64_t standin_computed;
int standin_threads;
int standin_fails;

void standin_break(standin_fault fault)
{
    broken = fault;
}

static void *make(gg_context *context, size_t bytes)
{
    if (context->count == 4096)
        abort();
    return context->made[context->count++] = calloc(1, bytes);
}

/* ---- tensors and graphs ---- */

const char *ggml_op_name(int op)
{
    static const char *const names[STANDIN_FLASH_ATTN] = {
        [0] = "NONE",           [30] = "RESHAPE",   [STANDIN_VIEW] = "VIEW",
        [32] = "PERMUTE",       [33] = "TRANSPOSE", [STANDIN_SET_ROWS] = "SET_ROWS",
        [STANDIN_ROPE] = "ROPE"};
    if (op == STANDIN_FLASH_ATTN)
        return broken == STANDIN_NO_OPERATION ? "FLASH_ATTENTION" : "FLASH_ATTN_EXT";
    return op < STANDIN_FLASH_ATTN && names[op] ? names[op] : "OTHER";
}

const char *ggml_type_name(int type)
{
    if (broken == STANDIN_TYPES && type)
        type++;
    return type == GG_F32    ? "f32"
           : type == GG_F16  ? "f16"
           : type == GG_Q8_0 ? "q8_0"
           : type == GG_I64  ? "i64"
           : type == GG_BF16 ? "bf16"
                             : "other";
}

const char *ggml_version(void)
{
    return "0.0.0-standin";
}

size_t ggml_nbytes(const gg_tensor *t)
{
    return t->nb[3] * (size_t)t->ne[3];
}

gg_context *ggml_init(gg_init_params params)
{
    (void)params;
    return calloc(1, sizeof(gg_context));
}

void ggml_free(gg_context *context)
{
    while (context->count)
        free(context->made[--context->count]);
    free(context);
}

size_t ggml_tensor_overhead(void)
{
    return sizeof(gg_tensor) + 32;
}

gg_tensor *ggml_new_tensor_4d(gg_context *context, int type, int64_t a, int64_t b, int64_t c,
                              int64_t d)
{
    gg_tensor *t = make(context, sizeof *t);
    const int64_t ne[4] = {a, b, c, d};
    memcpy(t->ne, ne, sizeof ne);
    t->type = type;
    t->nb[0] = type == GG_F32 ? 4 : type == GG_I64 ? 8 : type == GG_Q8_0 ? 34 : 2;
    t->nb[1] =
        kvl_row_bytes(type, (size_t)a) ? kvl_row_bytes(type, (size_t)a) : t->nb[0] * (size_t)a;
    t->nb[2] = t->nb[1] * (size_t)b;
    t->nb[3] = t->nb[2] * (size_t)c;
    return t;
}

gg_tensor *ggml_set_name(gg_tensor *tensor, const char *name)
{
    strncpy(tensor->name + (broken == STANDIN_TENSOR ? 8 : 0), name, GG_NAME - 9);
    return tensor;
}

gg_tensor *ggml_view_2d(gg_context *context, gg_tensor *of, int64_t a, int64_t b, size_t nb1,
                        size_t offset)
{
    gg_tensor *t = ggml_new_tensor_4d(context, of->type, a, b, 1, 1);
    t->op = STANDIN_VIEW;
    t->nb[1] = nb1;
    t->nb[2] = t->nb[3] = nb1 * (size_t)b;
    t->src[0] = of;
    t->view_src = of->view_src ? of->view_src : of;
    t->view_offs = offset + of->view_offs;
    t->data = of->data ? (char *)of->data + offset : NULL;
    t->buffer = of->buffer;
    return t;
}

gg_tensor *ggml_flash_attn_ext(gg_context *context, gg_tensor *q, gg_tensor *k, gg_tensor *v,
                               gg_tensor *mask, float scale, float max_bias, float softcap)
{
    gg_tensor *t = ggml_new_tensor_4d(context, GG_F32, v->ne[0], q->ne[2], q->ne[1], q->ne[3]);
    const float parameters[3] = {scale, max_bias, softcap};
    memcpy(t->op_params, parameters, sizeof parameters);
    t->op = STANDIN_FLASH_ATTN;
    t->src[0] = q, t->src[1] = k, t->src[2] = v, t->src[3] = mask;
    return t;
}

gg_graph *ggml_new_graph_custom(gg_context *context, size_t size, bool grads)
{
    (void)grads;
    return make(context, sizeof(gg_graph));
}

void ggml_graph_clear(gg_graph *graph)
{
    graph->count = 0;
}

void ggml_graph_add_node(gg_graph *graph, gg_tensor *node)
{
    if (graph->count == 64)
        abort();
    graph->nodes[graph->count++] = node;
}

void ggml_build_forward_expand(gg_graph *graph, gg_tensor *node)
{
    node->flags |= GG_FLAG_COMPUTE;
    ggml_graph_add_node(graph, node);
}

int ggml_graph_n_nodes(gg_graph *graph)
{
    return graph->count;
}

gg_tensor *ggml_graph_node(gg_graph *graph, int index)
{
    return graph->nodes[index];
}

/* ---- operations ---- */

static const char *at(const gg_tensor *t, int64_t b, int64_t c, int64_t d)
{
    return (const char *)t->data + (size_t)b * t->nb[1] + (size_t)c * t->nb[2] +
           (size_t)d * t->nb[3];
}

static void from_f32(int type, const float *from, void *to, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        if (type == GG_F16)
            ((uint16_t *)to)[i] = kvf_fp16_from_float(from[i]);
        else if (type == GG_BF16)
            ((uint16_t *)to)[i] = kvf_bf16_from_float(from[i]);
    for (int64_t block = 0; type == GG_Q8_0 && block < count / 32; block++) {
        float top = 0;
        for (int64_t i = 0; i < 32; i++)
            top = fmaxf(top, fabsf(from[block * 32 + i]));
        const uint16_t scale = kvf_fp16_from_float(top / 127);
        char *out = (char *)to + block * 34;
        memcpy(out, &scale, 2);
        for (int64_t i = 0; i < 32; i++)
            out[2 + i] = (char)lrintf(top > 0 ? from[block * 32 + i] / top * 127 : 0);
    }
}

static void set_rows(gg_tensor *t)
{
    const gg_tensor *rows = t->src[0], *cells = t->src[1];
    for (int64_t i = 0; i < rows->ne[1]; i++) {
        char *to = (char *)t->data + (size_t)((const int64_t *)cells->data)[i] * t->nb[1];
        from_f32(t->type, (const float *)at(rows, i, 0, 0), to, rows->ne[0]);
    }
}

/* Weights are relative to the largest so far. */
void standin_attend(const gg_tensor *t, int64_t token, int64_t head, int64_t s, double *out)
{
    const gg_tensor *q = t->src[0], *k = t->src[1], *v = t->src[2], *m = t->src[3];
    const float *query = (const float *)at(q, token, head, s);
    const uint16_t *mask = (const uint16_t *)at(m, token, 0, s % m->ne[3]);
    const int64_t kv_head = head / (q->ne[2] / k->ne[2]);
    double top = t->src[4] ? (double)((const float *)t->src[4]->data)[head] : -INFINITY;
    double sum = t->src[4] ? 1 : 0;
    float parameters[3], row[STANDIN_WIDTH];
    memcpy(parameters, t->op_params, sizeof parameters);
    memset(out, 0, (size_t)v->ne[0] * sizeof *out);
    for (int64_t cell = 0; cell < k->ne[1]; cell++) {
        const double open = (double)kvf_fp16_to_float(mask[cell]), cap = (double)parameters[2];
        if (open == -INFINITY)
            continue;
        double logit = 0;
        kvl_row_to_f32(k->type, at(k, cell, kv_head, s), row, (size_t)k->ne[0]);
        for (int64_t d = 0; d < k->ne[0]; d++)
            logit += (double)row[d] * (double)query[d];
        logit *= (double)parameters[0];
        logit = open + (cap != 0 ? cap * tanh(logit / cap) : logit);
        const double above = fmax(top, logit), kept = exp(top - above), weight = exp(logit - above);
        kvl_row_to_f32(v->type, at(v, cell, kv_head, s), row, (size_t)v->ne[0]);
        top = above;
        sum = sum * kept + weight;
        for (int64_t d = 0; d < v->ne[0]; d++)
            out[d] = out[d] * kept + weight * (double)row[d];
    }
    for (int64_t d = 0; d < v->ne[0] && sum > 0; d++)
        out[d] /= sum;
}

static void flash_attn(gg_tensor *t, int64_t token, int64_t head, int64_t s)
{
    double row[STANDIN_WIDTH];
    float *out = (float *)at(t, head, token, s);
    standin_attend(t, token, head, s, row);
    for (int64_t d = 0; d < t->ne[0]; d++)
        out[d] = (float)row[d];
}

static void rope(gg_tensor *t)
{
    float row[STANDIN_WIDTH];
    for (int64_t i = 0; i < t->ne[1]; i++) {
        char *at_row = (char *)t->data + (size_t)i * t->nb[1];
        kvl_row_to_f32(t->type, at_row, row, (size_t)t->ne[0]);
        for (int64_t d = 0; d < t->ne[0]; d++)
            row[d] = 0.75f - row[d];
        from_f32(t->type, row, at_row, t->ne[0]);
    }
}

static int compute(gg_backend *backend, gg_graph *graph)
{
    (void)backend;
    if (__atomic_exchange_n(&standin_fails, 0, __ATOMIC_RELAXED))
        return GG_FAILED;
    for (int i = 0; i < graph->count; i++) {
        gg_tensor *t = graph->nodes[i];
        __atomic_fetch_add(&standin_computed, t->op == STANDIN_FLASH_ATTN, __ATOMIC_RELAXED);
        if (t->op == STANDIN_SET_ROWS)
            set_rows(t);
        else if (t->op == STANDIN_ROPE)
            rope(t);
        else
            for (int64_t s = 0; s < t->ne[3]; s++)
                for (int64_t token = 0; token < t->ne[2]; token++)
                    for (int64_t head = 0; head < t->ne[1]; head++)
                        flash_attn(t, token, head, s);
    }
    return GG_SUCCESS;
}

/* ---- buffers ---- */

static void free_buffer(gg_buffer *buffer)
{
    free(buffer->context);
}

static void *base(gg_buffer *buffer)
{
    return buffer->context;
}

static void set_tensor(gg_buffer *buffer, gg_tensor *tensor, const void *data, size_t offset,
                       size_t size)
{
    (void)buffer;
    memcpy((char *)tensor->data + offset, data, size);
}

static void memset_tensor(gg_buffer *buffer, gg_tensor *tensor, uint8_t value, size_t offset,
                          size_t size)
{
    (void)buffer;
    memset((char *)tensor->data + offset, value, size);
}

static void get_tensor(gg_buffer *buffer, const gg_tensor *tensor, void *data, size_t offset,
                       size_t size)
{
    (void)buffer;
    memcpy(data, (const char *)tensor->data + offset, size);
}

static bool cpy_tensor(gg_buffer *buffer, const gg_tensor *from, gg_tensor *to)
{
    (void)buffer;
    memcpy(to->data, from->data, ggml_nbytes(to));
    return true;
}

static void clear(gg_buffer *buffer, uint8_t value)
{
    memset(buffer->context, value, buffer->size);
}

static void *cpu_type[20]; /* without functions */

gg_buffer_type *ggml_backend_cpu_buffer_type(void)
{
    return (gg_buffer_type *)(void *)cpu_type;
}

bool ggml_backend_buft_is_host(gg_buffer_type *type)
{
    return type == ggml_backend_cpu_buffer_type();
}

gg_buffer *ggml_backend_buft_alloc_buffer(gg_buffer_type *type, size_t size)
{
    if (type == standin_card_type())
        return standin_card_alloc(size);
    gg_buffer *b = calloc(1, sizeof *b);
    b->iface = (gg_buffer_i){.free_buffer = free_buffer,
                             .base = base,
                             .set_tensor = set_tensor,
                             .memset_tensor = memset_tensor,
                             .get_tensor = get_tensor,
                             .cpy_tensor = cpy_tensor,
                             .clear = clear};
    b->buft = type;
    b->context = calloc(1, size);
    b->size = size;
    return b;
}

void ggml_backend_buffer_free(gg_buffer *buffer)
{
    if (buffer->iface.free_buffer)
        buffer->iface.free_buffer(buffer);
    free(buffer);
}

gg_buffer_type *ggml_backend_buffer_get_type(gg_buffer *buffer)
{
    return broken == STANDIN_BUFFER ? NULL : buffer->buft;
}

size_t ggml_backend_buffer_get_size(gg_buffer *buffer)
{
    return buffer->size;
}

void standin_clear(gg_buffer *buffer, uint8_t value)
{
    buffer->iface.clear(buffer, value);
}

/* ---- the CPU's backend ---- */

static const char *cpu_name(const void *backend)
{
    (void)backend;
    return "CPU";
}

static void cpu_free(gg_backend *backend)
{
    free(backend);
}

static void set_n_threads(gg_backend *backend, int threads)
{
    (void)backend;
    __atomic_store_n(&standin_threads, threads, __ATOMIC_RELAXED);
}

static void *cpu_proc(gg_registry *registry, const char *name)
{
    (void)registry;
    void (*function)(gg_backend *, int) = set_n_threads;
    void *address = NULL;
    if (!strcmp(name, "ggml_backend_set_n_threads"))
        memcpy(&address, &function, sizeof address);
    return address;
}

static int cpu_device_type(gg_device *device)
{
    (void)device;
    return GG_DEVICE_CPU;
}

static bool supports_all(gg_device *device, const gg_tensor *op)
{
    (void)device;
    (void)op;
    return true;
}

static bool supports_buffer(gg_device *device, gg_buffer_type *type)
{
    (void)device;
    return ggml_backend_buft_is_host(type);
}

static gg_registry cpu_registry = {.api_version = 42, .iface.get_proc_address = cpu_proc};
static gg_device cpu_device = {.iface = {.get_type = cpu_device_type,
                                         .supports_op = supports_all,
                                         .supports_buft = supports_buffer},
                               .reg = &cpu_registry};

gg_registry *ggml_backend_reg_by_name(const char *name)
{
    if (!strcmp(name, "CUDA"))
        return standin_cuda_registry();
    return strcmp(name, "CPU") == 0 && broken != STANDIN_NO_CPU ? &cpu_registry : NULL;
}

void *ggml_backend_reg_get_proc_address(gg_registry *registry, const char *name)
{
    return registry->iface.get_proc_address(registry, name);
}

gg_registry *ggml_backend_dev_backend_reg(gg_device *device)
{
    return broken == STANDIN_DEVICE ? NULL : device->reg;
}

gg_backend *ggml_backend_init_by_type(int type, const char *params)
{
    (void)params;
    if (type != GG_DEVICE_CPU)
        return NULL;
    gg_backend *b = calloc(1, sizeof *b);
    b->guid = &cpu_device;
    b->iface = (gg_backend_i){.get_name = cpu_name, .free = cpu_free, .graph_compute = compute};
    b->device = &cpu_device;
    return b;
}

gg_device *standin_cpu_device(void)
{
    return &cpu_device;
}

gg_backend *standin_cpu(void)
{
    return ggml_backend_init_by_type(GG_DEVICE_CPU, NULL);
}

void ggml_backend_free(gg_backend *backend)
{
    backend->iface.free(backend);
}

gg_device *ggml_backend_get_device(gg_backend *backend)
{
    return broken == STANDIN_BACKEND ? NULL : backend->device;
}

void *ggml_backend_guid(gg_backend *backend)
{
    return backend->guid;
}

int ggml_backend_graph_compute(gg_backend *backend, gg_graph *graph)
{
    return backend->iface.graph_compute(backend, graph);
}
