/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A transformer's operations on a GPU: row_ops.cu; products of a step's rows by
 * small_batch_gemm.cu, which ends them with what follows, and of prompts by cuBLAS.
 *
 * Weights are copied to the device once, through two pinned buffers, so that reading the file and
 * the copy of the piece before run at the same time. Matrices that share their input lie one after
 * the other there and are one product. Hidden states are fp32, inputs of products have the model's
 * type. Invariant: after open every pointer of a layer is device memory.
 */

#include "cuda_products.h"
#include "row_ops.h"
#include "transformer_ops.h"

#include <stdlib.h>
#include <string.h>

#define UPLOAD_BYTES ((size_t)8 << 20)
#define MATRIX_ALIGN ((size_t)256)

/* Pinned memory as both sides see it. */
typedef struct pinned {
    char *host;
    char *device;
} pinned;

typedef struct cuda_part {
    kvf_cublas *cublas;
    void *workspace;
    void *reservation;
    void *weights; /* [weight_bytes] */
    float *inv_freq;
    uint32_t *arrived; /* [query_heads + 2 kv_heads], zeros between launches */
    pinned words;      /* [2, H] ids, then positions */
    pinned logits;     /* [batch_max, vocab] */
    bool starts_late;  /* and this is counted: kvf_row_refuse_early_starts */
} cuda_part;

static cuda_part *part_of(const kvf_transformer *t)
{
    return t->device;
}

/* ---- operations ---- */

static kvf_status multiply(const transformer_step *s, const cuda_weights *w, const void *x,
                           float *y, bool accumulate)
{
    return cuda_multiply(part_of(s->t)->cublas, s, w, x, y, accumulate);
}

static kvf_status cuda_start(const transformer_step *s, const uint32_t *ids,
                             const uint32_t *positions)
{
    const kvf_transformer *t = s->t;
    const cuda_part *p = part_of(t);
    const size_t all = transformer_hidden_rows(&t->options);
    const size_t row = s->first, half = t->rope.count;
    uint32_t *host = (uint32_t *)(void *)p->words.host + row;
    const uint32_t *device = (const uint32_t *)(const void *)p->words.device + row;
    memcpy(host, ids, s->rows * sizeof *ids);
    memcpy(host + all, positions, s->rows * sizeof *positions);
    const kvf_row_start_args args = {.dtype = t->embedding.dtype,
                                     .rows = s->rows,
                                     .width = t->model.hidden_size,
                                     .half = (uint32_t)half,
                                     .scaling = t->rope.attention_scaling,
                                     .ids = device,
                                     .position = device + all,
                                     .embedding = t->embedding.weight,
                                     .inv_freq = p->inv_freq,
                                     .hidden = transformer_hidden_at(s),
                                     .cosine = t->buffers.cosine + row * half,
                                     .sine = t->buffers.sine + row * half};
    return launched(kvf_row_start_cuda(&args, kvf_stream_native(s->stream)));
}

/* Rows of one array through the scratch, so that none is overwritten before it was read. */
static kvf_status move_rows(const transformer_step *s, float *array, uint32_t width,
                            const uint32_t *index)
{
    float *to = array + (size_t)s->first * width;
    const kvf_row_gather_args args = {.rows = s->rows,
                                      .width = width,
                                      .index = index,
                                      .from = array,
                                      .to = s->t->buffers.gate_up};
    KVF_TRY(launched(kvf_row_gather_cuda(&args, kvf_stream_native(s->stream))));
    return kvf_memory_copy(s->stream, to, args.to, (size_t)s->rows * width * sizeof *to);
}

/* In pieces of as many rows as the scratch takes: later pieces come from rows further on. */
static kvf_status cuda_gather(const transformer_step *s, const uint32_t *index)
{
    const kvf_transformer *t = s->t;
    const cuda_part *p = part_of(t);
    const uint32_t hidden = t->model.hidden_size, half = t->rope.count;
    const size_t piece_max =
        transformer_scratch_floats(&t->options) / (hidden > half ? hidden : half);
    const uint32_t *device = (const uint32_t *)(const void *)p->words.device + s->first;
    transformer_step piece = *s;
    memcpy((uint32_t *)(void *)p->words.host + s->first, index, s->rows * sizeof *index);
    for (uint32_t done = 0; done < s->rows; done += piece.rows) {
        const uint32_t rest = s->rows - done;
        piece.first = s->first + done;
        piece.rows = rest < piece_max ? rest : (uint32_t)piece_max;
        KVF_TRY(move_rows(&piece, t->buffers.hidden, hidden, device + done));
        KVF_TRY(move_rows(&piece, t->buffers.cosine, half, device + done));
        KVF_TRY(move_rows(&piece, t->buffers.sine, half, device + done));
    }
    return KVF_OK;
}

static kvf_status cuda_read_hidden(const transformer_step *s, float *out)
{
    const size_t bytes = s->t->model.hidden_size * sizeof *out;
    const pinned *row = &part_of(s->t)->logits;
    KVF_TRY(kvf_memory_copy(s->stream, row->device, transformer_hidden_at(s), bytes));
    KVF_TRY(kvf_stream_wait(s->stream));
    memcpy(out, row->host, bytes);
    return KVF_OK;
}

static kvf_row_norm_args norm_of(const transformer_step *s, const float *weight)
{
    return (kvf_row_norm_args){.dtype = s->t->model.dtype,
                               .rows = s->rows,
                               .width = s->t->model.hidden_size,
                               .eps = (float)s->t->model.norm_eps,
                               .x = transformer_hidden_at(s),
                               .weight = weight,
                               .y = s->t->buffers.normed};
}

static kvf_status cuda_norm(const transformer_step *s, const float *weight)
{
    const kvf_row_norm_args args = norm_of(s, weight);
    return launched(kvf_row_norm_cuda(&args, kvf_stream_native(s->stream)));
}

static kvf_status cuda_project(const transformer_step *s, const transformer_layer *l)
{
    const kvf_transformer *t = s->t;
    const kvf_model_config *m = &t->model;
    const transformer_buffers *b = &t->buffers;
    const size_t half = (size_t)s->first * t->rope.count;
    const cuda_weights weights = {.parts = {&l->query, &l->key, &l->value}, .count = 3};
    const kvf_row_rotate_args args = {.dtype = m->dtype,
                                      .rows = s->rows,
                                      .query_heads = m->query_heads,
                                      .kv_heads = m->kv_heads,
                                      .head_dim = m->head_dim,
                                      .eps = (float)m->norm_eps,
                                      .qkv = b->qkv,
                                      .bias = l->query.bias,
                                      .query_norm = l->query_norm,
                                      .key_norm = l->key_norm,
                                      .cosine = b->cosine + half,
                                      .sine = b->sine + half,
                                      .q = b->q,
                                      .k = b->k,
                                      .v = b->v};
    if (cuda_is_small_batch(s, &weights) &&
        (!l->query_norm || kvf_small_batch_norms_heads(m->head_dim))) {
        const kvf_small_batch_gemm product = cuda_small_batch(s, &weights, b->normed);
        return launched(kvf_small_batch_rotate_cuda(&product, &args, part_of(t)->arrived,
                                                    kvf_stream_native(s->stream)));
    }
    KVF_TRY(multiply(s, &weights, b->normed, b->qkv, false));
    return launched(kvf_row_rotate_cuda(&args, kvf_stream_native(s->stream)));
}

/* hidden += x W^T, and its norm. */
static kvf_status add(const transformer_step *s, const kvf_linear *linear, const void *x,
                      const float *norm)
{
    const cuda_weights weights = {.parts = {linear}, .count = 1};
    float *hidden = transformer_hidden_at(s);
    if (norm && cuda_is_small_batch(s, &weights) && s->rows <= KVF_SMALL_BATCH_NORM_ROWS) {
        const kvf_small_batch_gemm product = cuda_small_batch(s, &weights, x);
        const kvf_row_norm_args args = norm_of(s, norm);
        return launched(kvf_small_batch_add_norm_cuda(
            &product, hidden, &args, part_of(s->t)->arrived, kvf_stream_native(s->stream)));
    }
    KVF_TRY(multiply(s, &weights, x, hidden, true));
    return norm ? cuda_norm(s, norm) : KVF_OK;
}

static kvf_status cuda_output(const transformer_step *s, const transformer_layer *l,
                              const float *norm)
{
    return add(s, &l->output, s->t->buffers.attended, norm);
}

static kvf_status cuda_mlp(const transformer_step *s, const transformer_layer *l, const float *norm)
{
    const transformer_buffers *b = &s->t->buffers;
    const cuda_weights both = {.parts = {&l->gate, &l->up}, .count = 2};
    if (cuda_is_small_batch(s, &both)) {
        const kvf_small_batch_gemm product = cuda_small_batch(s, &both, b->normed);
        KVF_TRY(launched(
            kvf_small_batch_swiglu_cuda(&product, b->activated, kvf_stream_native(s->stream))));
        return add(s, &l->down, b->activated, norm);
    }
    KVF_TRY(multiply(s, &both, b->normed, b->gate_up, false));
    const kvf_row_activate_args args = {.dtype = s->t->model.dtype,
                                        .rows = s->rows,
                                        .width = s->t->model.intermediate_size,
                                        .gate_up = b->gate_up,
                                        .y = b->activated};
    KVF_TRY(launched(kvf_row_activate_cuda(&args, kvf_stream_native(s->stream))));
    return add(s, &l->down, b->activated, norm);
}

static kvf_status cuda_logits(const transformer_step *s)
{
    const kvf_transformer *t = s->t;
    const size_t bytes = (size_t)s->rows * t->model.vocab_size * sizeof(float);
    const cuda_weights head = {.parts = {&t->head}, .count = 1};
    KVF_TRY(multiply(s, &head, t->buffers.normed, t->buffers.logits, false));
    return kvf_memory_copy(s->stream, part_of(t)->logits.device, t->buffers.logits, bytes);
}

static const float *cuda_logits_row(const kvf_transformer *t, uint32_t row)
{
    const float *logits = (const float *)(const void *)part_of(t)->logits.host;
    return logits + (size_t)row * t->model.vocab_size;
}

/* ---- buffers ---- */

static size_t lay_out(const kvf_transformer_options *options, void *base, transformer_buffers *b,
                      uint32_t **arrived)
{
    const kvf_model_config *m = options->model;
    kvf_carver k = {.base = base};
    transformer_lay_out(options, kvf_dtype_bytes(m->dtype), &k, b);
    KVF_CARVE(&k, *arrived, m->query_heads + 2 * (size_t)m->kv_heads);
    return k.bytes;
}

static size_t words_bytes(const kvf_transformer_options *options)
{
    return 2 * (size_t)transformer_hidden_rows(options) * sizeof(uint32_t);
}

static size_t logits_bytes(const kvf_transformer_options *options)
{
    const size_t logits = (size_t)options->batch_max * options->model->vocab_size;
    const size_t hidden = options->model->hidden_size; /* a row of which is read through it */
    return (logits > hidden ? logits : hidden) * sizeof(float);
}

static uint64_t cuda_bytes(const kvf_transformer_options *options, uint32_t threads)
{
    transformer_buffers unused;
    uint32_t *arrived;
    (void)threads;
    return lay_out(options, NULL, &unused, &arrived) + KVF_CUBLAS_WORKSPACE_BYTES +
           words_bytes(options) + logits_bytes(options);
}

/* ---- weights ---- */

/* Two passes over the same list: the first adds up (device NULL), the second copies. */
typedef struct uploader {
    kvf_transformer *t;
    kvf_stream *stream[2];
    pinned buffer[2];
    uint32_t turn;
    char *device;
    size_t offset;
    kvf_error *error;
    kvf_status status;
} uploader;

static void upload_bytes(uploader *u, const char *from, size_t bytes)
{
    for (size_t done = 0; done < bytes && u->status == KVF_OK;) {
        const size_t piece = bytes - done < UPLOAD_BYTES ? bytes - done : UPLOAD_BYTES;
        const uint32_t turn = u->turn++ % 2;
        u->status = kvf_stream_wait(u->stream[turn]);
        if (u->status != KVF_OK)
            return;
        memcpy(u->buffer[turn].host, from + done, piece);
        u->status = kvf_memory_copy(u->stream[turn], u->device + u->offset + done,
                                    u->buffer[turn].device, piece);
        done += piece;
    }
}

/* @return where the bytes are on the device */
static void *upload(uploader *u, const void *from, size_t bytes)
{
    void *to = u->device ? u->device + u->offset : NULL;
    if (u->device)
        upload_bytes(u, from, bytes);
    u->offset += bytes;
    return to;
}

static void align(uploader *u)
{
    u->offset = (u->offset + MATRIX_ALIGN - 1) / MATRIX_ALIGN * MATRIX_ALIGN;
}

static void upload_matrices(uploader *u, kvf_linear *const *parts, uint32_t count)
{
    align(u);
    for (uint32_t i = 0; i < count; i++) { /* one after the other, as one matrix */
        kvf_linear *l = parts[i];
        if (l->dtype != u->t->model.dtype && u->status == KVF_OK)
            u->status = model_fail(u->error, KVF_UNSUPPORTED,
                                   "a matrix of the model has another element type than "
                                   "config.json's dtype; convert the weights to one type, or run "
                                   "with --device host");
        const size_t bytes = l->outputs * kvf_linear_row_bytes(l);
        void *to = u->status == KVF_OK ? upload(u, l->weight, bytes) : NULL;
        if (u->device)
            l->weight = to;
    }
}

static void upload_vector(uploader *u, const float **vector, size_t count)
{
    align(u);
    if (!*vector)
        return;
    void *to = upload(u, *vector, count * sizeof **vector);
    if (u->device)
        *vector = to;
}

/* Biases of the three projections as one row, which begins at the queries'. */
static void upload_bias(uploader *u, transformer_layer *l)
{
    kvf_linear *const parts[] = {&l->query, &l->key, &l->value};
    if (!l->query.bias)
        return;
    align(u);
    for (size_t i = 0; i < 3; i++) {
        void *to = upload(u, parts[i]->bias, parts[i]->outputs * sizeof(float));
        if (u->device)
            parts[i]->bias = to;
    }
}

static void upload_layer(uploader *u, uint32_t index)
{
    const kvf_model_config *m = &u->t->model;
    transformer_layer *l = &u->t->layers[index];
    upload_matrices(u, (kvf_linear *[]){&l->query, &l->key, &l->value}, 3);
    upload_matrices(u, (kvf_linear *[]){&l->output}, 1);
    upload_matrices(u, (kvf_linear *[]){&l->gate, &l->up}, 2);
    upload_matrices(u, (kvf_linear *[]){&l->down}, 1);
    upload_bias(u, l);
    upload_vector(u, &l->attention_norm, m->hidden_size);
    upload_vector(u, &l->mlp_norm, m->hidden_size);
    upload_vector(u, &l->query_norm, m->head_dim);
    upload_vector(u, &l->key_norm, m->head_dim);
}

static void upload_all(uploader *u)
{
    kvf_transformer *t = u->t;
    const float *inv_freq = t->rope.inv_freq;
    u->offset = 0;
    upload_matrices(u, (kvf_linear *[]){&t->embedding}, 1);
    if (t->model.tied_embeddings)
        t->head = t->embedding;
    else
        upload_matrices(u, (kvf_linear *[]){&t->head}, 1);
    upload_vector(u, &t->final_norm, t->model.hidden_size);
    upload_vector(u, &inv_freq, t->rope.count);
    if (u->device)
        part_of(t)->inv_freq = (float *)(uintptr_t)inv_freq;
    for (uint32_t layer = 0; layer < t->model.layers && u->status == KVF_OK; layer++)
        upload_layer(u, layer);
}

static kvf_status pin(kvf_runtime *runtime, size_t bytes, const char *what, pinned *out,
                      kvf_error *error)
{
    void *host = NULL, *device = NULL;
    const kvf_status status = kvf_pinned_alloc(runtime, bytes, &host, &device);
    if (status != KVF_OK)
        return model_fail(error, status, "%zu bytes for %s: %s", bytes, what,
                          kvf_runtime_error(runtime)->text);
    *out = (pinned){.host = host, .device = device};
    return KVF_OK;
}

static kvf_status upload_through(uploader *u)
{
    kvf_runtime *runtime = u->t->options.runtime;
    for (uint32_t i = 0; i < 2; i++) {
        KVF_TRY(pin(runtime, UPLOAD_BYTES, "loading weights", &u->buffer[i], u->error));
        KVF_TRY(kvf_stream_create(runtime, &u->stream[i]));
    }
    upload_all(u);
    for (uint32_t i = 0; i < 2 && u->status == KVF_OK; i++)
        u->status = kvf_stream_wait(u->stream[i]);
    return u->status;
}

static kvf_status upload_weights(kvf_transformer *t, kvf_error *error)
{
    cuda_part *p = part_of(t);
    kvf_runtime *runtime = t->options.runtime;
    uploader u = {.t = t, .error = error, .status = KVF_OK};
    upload_all(&u);
    if (u.status != KVF_OK)
        return u.status;
    if (kvf_memory_alloc(runtime, u.offset, &p->weights) != KVF_OK)
        return model_fail(error, KVF_OUT_OF_DEVICE_MEMORY, "%zu bytes of weights: %s", u.offset,
                          kvf_runtime_error(runtime)->text);
    u.device = p->weights;
    const kvf_status status = upload_through(&u);
    for (uint32_t i = 0; i < 2; i++) {
        kvf_stream_destroy(u.stream[i]);
        kvf_pinned_free(runtime, u.buffer[i].host);
    }
    if (status != KVF_OK && u.status == KVF_OK)
        return model_fail(error, status, "weights could not be copied to the device: %s",
                          kvf_runtime_error(runtime)->text);
    return status;
}

/* ---- open and close ---- */

static kvf_status reserve(kvf_transformer *t, kvf_error *error)
{
    cuda_part *p = part_of(t);
    const kvf_transformer_options *options = &t->options;
    kvf_runtime *runtime = options->runtime;
    const size_t bytes = lay_out(options, NULL, &t->buffers, &p->arrived);
    if (kvf_memory_alloc(runtime, KVF_CUBLAS_WORKSPACE_BYTES, &p->workspace) != KVF_OK ||
        kvf_memory_alloc(runtime, bytes, &p->reservation) != KVF_OK)
        return model_fail(error, KVF_OUT_OF_DEVICE_MEMORY,
                          "%zu bytes for the hidden states of a prompt: %s", bytes,
                          kvf_runtime_error(runtime)->text);
    lay_out(options, p->reservation, &t->buffers, &p->arrived);
    KVF_TRY(pin(runtime, words_bytes(options), "token ids", &p->words, error));
    return pin(runtime, logits_bytes(options), "logits", &p->logits, error);
}

static kvf_status cuda_open(kvf_transformer *t, kvf_error *error)
{
    cuda_part *p = calloc(1, sizeof *p);
    if (!p)
        return model_out_of_memory(error, sizeof *p, "the transformer");
    t->device = p;
    if (kvf_row_use_device(t->options.device_ordinal) != 0 || kvf_row_load_kernels() != 0)
        return model_fail(error, KVF_DEVICE_FAILED, "device_ordinal = %u: the GPU cannot be used",
                          t->options.device_ordinal);
    if (t->options.starts_late) {
        kvf_row_refuse_early_starts(1);
        p->starts_late = true;
    }
    KVF_TRY(reserve(t, error));
    KVF_TRY(kvf_cublas_open(p->workspace, t->options.cublas, &p->cublas, error));
    return upload_weights(t, error);
}

static void cuda_close(kvf_transformer *t)
{
    cuda_part *p = t->device;
    if (!p)
        return;
    kvf_runtime *runtime = t->options.runtime;
    if (p->starts_late && kvf_row_use_device(t->options.device_ordinal) == 0)
        kvf_row_refuse_early_starts(-1);
    kvf_cublas_close(p->cublas);
    kvf_pinned_free(runtime, p->logits.host);
    kvf_pinned_free(runtime, p->words.host);
    kvf_memory_free(runtime, p->weights);
    kvf_memory_free(runtime, p->reservation);
    kvf_memory_free(runtime, p->workspace);
    free(p);
}

const transformer_ops transformer_cuda_ops = {
    .start = cuda_start,
    .norm = cuda_norm,
    .project = cuda_project,
    .output = cuda_output,
    .mlp = cuda_mlp,
    .gather = cuda_gather,
    .read_hidden = cuda_read_hidden,
    .logits = cuda_logits,
    .logits_row = cuda_logits_row,
    .open = cuda_open,
    .close = cuda_close,
    .bytes = cuda_bytes,
    .can_record = 1,
};
