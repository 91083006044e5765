/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Block tables of one's own: an allocator of block ids, a prefix that two rows share, and steps of
 * both. The library knows ids only; who has which, and for how long, is decided here.
 *
 * The budget covers every token, so the outputs are compared with dense attention in plain C.
 */

#include <kvferry/blocks.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    QUERY_HEADS = 4,
    KV_HEADS = 2,
    GROUP = QUERY_HEADS / KV_HEADS,
    HEAD_DIM = 64,
    BLOCK = 32,
    BLOCKS = 64,
    ROWS = 2,
    PREFIX = 512, /* tokens that both rows begin with, whole blocks */
    PROMPT = 100, /* of their own */
    STEPS = 40,
    TOKENS = PREFIX + PROMPT + STEPS,
    TABLE = (TOKENS + BLOCK - 1) / BLOCK,
    Q_FLOATS = QUERY_HEADS * HEAD_DIM,
    KV_FLOATS = KV_HEADS * HEAD_DIM,
};

/* The caller's half of a row; keys and values are for the comparison alone. */
typedef struct row {
    int32_t ids[TABLE];
    uint32_t ids_count, length;
    float k[TOKENS][KV_FLOATS], v[TOKENS][KV_FLOATS];
} row;

typedef struct engine {
    kvf_runtime *runtime;
    kvf_stream *stream;
    kvf_blocks *blocks;
    int32_t free_ids[BLOCKS];
    uint32_t free_count;
    row rows[ROWS];
    float *q, *k, *v, *out; /* of a call, in device memory as all that follows */
    int64_t *slots;
    int32_t *table, *lengths;
    char *codes;
} engine;

static void must(const engine *e, kvf_status status)
{
    if (status == KVF_OK)
        return;
    fprintf(stderr, "%s: %s\n", kvf_status_name(status), kvf_runtime_error(e->runtime)->text);
    exit(1);
}

static void *device_memory(engine *e, size_t bytes)
{
    void *pointer;
    must(e, kvf_memory_alloc(e->runtime, bytes, &pointer));
    return pointer;
}

static void fill(float *values, size_t count)
{
    static uint32_t state = 1;
    for (size_t i = 0; i < count; i++) {
        state = state * 1664525u + 1013904223u;
        values[i] = (float)(state >> 8) / 8388608.0f - 1.0f;
    }
}

static void open_engine(engine *e)
{
    kvf_runtime_config machine;
    kvf_blocks_config config;
    kvf_runtime_config_init(&machine);
    machine.device = KVF_DEVICE_HOST; /* what is "device" below is host memory */
    must(e, kvf_runtime_open(&machine, &e->runtime, NULL));
    must(e, kvf_stream_create(e->runtime, &e->stream));
    kvf_blocks_config_init(&config);
    config.cache.layers = 1;
    config.cache.query_heads = QUERY_HEADS;
    config.cache.kv_heads = KV_HEADS;
    config.cache.head_dim = HEAD_DIM;
    config.cache.dtype = KVF_FP32;
    config.cache.sequences_max = ROWS;
    config.cache.tokens_max = TOKENS;
    config.cache.budget_tokens = 1024;
    config.block_count = BLOCKS;
    config.block_tokens = BLOCK;
    must(e, kvf_blocks_open(e->runtime, &config, &e->blocks, NULL));
    const size_t stride = kvf_blocks_memory(e->blocks)->code_bytes;
    e->codes = device_memory(e, BLOCKS * stride);
    must(e, kvf_blocks_bind(e->blocks, 0, e->codes, stride));
    e->q = device_memory(e, TOKENS * Q_FLOATS * sizeof(float));
    e->out = device_memory(e, TOKENS * Q_FLOATS * sizeof(float));
    e->k = device_memory(e, TOKENS * KV_FLOATS * sizeof(float));
    e->v = device_memory(e, TOKENS * KV_FLOATS * sizeof(float));
    e->slots = device_memory(e, TOKENS * sizeof *e->slots);
    e->table = device_memory(e, ROWS * TABLE * sizeof *e->table);
    e->lengths = device_memory(e, ROWS * sizeof *e->lengths);
    for (int32_t id = 0; id < BLOCKS; id++)
        e->free_ids[e->free_count++] = (int32_t)(id * 37 % BLOCKS);
}

static void close_engine(engine *e)
{
    void *const all[] = {e->q, e->k, e->v, e->out, e->slots, e->table, e->lengths, e->codes};
    kvf_blocks_close(e->blocks);
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        kvf_memory_free(e->runtime, all[i]);
    kvf_stream_destroy(e->stream);
    kvf_runtime_close(e->runtime);
}

/* Random tokens after the row, at place `at` of the call's arrays; ids as they are needed. */
static void add_tokens(engine *e, row *r, uint32_t count, uint32_t at)
{
    for (uint32_t i = 0; i < count; i++, r->length++) {
        if (r->length == r->ids_count * BLOCK)
            r->ids[r->ids_count++] = e->free_ids[--e->free_count];
        fill(e->q + (at + i) * Q_FLOATS, Q_FLOATS);
        fill(r->k[r->length], KV_FLOATS);
        fill(r->v[r->length], KV_FLOATS);
        memcpy(e->k + (at + i) * KV_FLOATS, r->k[r->length], sizeof r->k[0]);
        memcpy(e->v + (at + i) * KV_FLOATS, r->v[r->length], sizeof r->v[0]);
        e->slots[at + i] = (int64_t)r->ids[r->length / BLOCK] * BLOCK + r->length % BLOCK;
    }
}

static void put(engine *e, uint32_t tokens)
{
    const kvf_blocks_put_args args = {.tokens = tokens, .k = e->k, .v = e->v, .slots = e->slots};
    must(e, kvf_blocks_put(e->blocks, &args, e->stream));
}

/* The rows as the device reads them. */
static kvf_blocks_rows tell(engine *e, uint32_t first, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        const row *r = &e->rows[first + i];
        memcpy(e->table + (size_t)i * TABLE, r->ids, sizeof r->ids);
        e->lengths[i] = (int32_t)r->length;
    }
    return (kvf_blocks_rows){
        .rows = count, .table_stride = TABLE, .table = e->table, .lengths = e->lengths};
}

/* Newest tokens of a row that have queries: a prompt, or what a shared prefix leaves of one. */
static void extend(engine *e, uint32_t index, uint32_t tokens)
{
    const uint32_t starts[] = {0, tokens}, contexts[] = {e->rows[index].length};
    add_tokens(e, &e->rows[index], tokens, 0);
    put(e, tokens);
    const kvf_blocks_rows rows = tell(e, index, 1);
    const kvf_blocks_extend_args chunk = {
        .rows = &rows, .starts = starts, .contexts = contexts, .q = e->q, .out = e->out};
    must(e, kvf_blocks_extend(e->blocks, &chunk, e->stream));
    must(e, kvf_stream_wait(e->stream));
}

/* One query head of the newest token against all of its row's. */
static float difference(const row *r, uint32_t head, const float *q, const float *theirs)
{
    const size_t at = (size_t)(head / GROUP) * HEAD_DIM;
    double weight[TOKENS], sum = 0, top = -INFINITY, worst = 0;
    for (uint32_t t = 0; t < r->length; t++) {
        weight[t] = 0;
        for (uint32_t d = 0; d < HEAD_DIM; d++)
            weight[t] += (double)q[d] * (double)r->k[t][at + d] / sqrt(HEAD_DIM);
        top = fmax(top, weight[t]);
    }
    for (uint32_t t = 0; t < r->length; t++)
        sum += weight[t] = exp(weight[t] - top);
    for (uint32_t d = 0; d < HEAD_DIM; d++) {
        double own = 0;
        for (uint32_t t = 0; t < r->length; t++)
            own += weight[t] / sum * (double)r->v[t][at + d];
        worst = fmax(worst, fabs(own - (double)theirs[d]));
    }
    return (float)worst;
}

/* A token of every row; returns the largest difference from dense attention. */
static float step(engine *e)
{
    float worst = 0;
    for (uint32_t i = 0; i < ROWS; i++)
        add_tokens(e, &e->rows[i], 1, i);
    put(e, ROWS);
    const kvf_blocks_rows rows = tell(e, 0, ROWS);
    const kvf_blocks_decode_args args = {.rows = &rows, .q = e->q, .out = e->out};
    must(e, kvf_blocks_decode(e->blocks, &args, e->stream));
    must(e, kvf_stream_wait(e->stream));
    for (uint32_t i = 0; i < ROWS; i++)
        for (uint32_t h = 0; h < QUERY_HEADS; h++) {
            const size_t at = ((size_t)i * QUERY_HEADS + h) * HEAD_DIM;
            worst = fmaxf(worst, difference(&e->rows[i], h, e->q + at, e->out + at));
        }
    return worst;
}

int main(void)
{
    static engine e;
    kvf_blocks_stats stats;
    float worst = 0;
    open_engine(&e);
    extend(&e, 0, PREFIX);
    e.rows[1] = e.rows[0]; /* the same ids: nothing is computed or stored again */
    for (uint32_t i = 0; i < ROWS; i++)
        extend(&e, i, PROMPT);
    for (uint32_t i = 0; i < STEPS; i++)
        worst = fmaxf(worst, step(&e));
    kvf_blocks_stats_get(e.blocks, &stats);
    printf("blocks in use                 %u for %u tokens in %u rows\n", BLOCKS - e.free_count,
           e.rows[0].length + e.rows[1].length, ROWS);
    printf("tokens put, rows refused      %llu, %llu\n", (unsigned long long)stats.tokens_put,
           (unsigned long long)stats.bad_rows);
    printf("against dense attention in C  %.2g at most\n", (double)worst);
    close_engine(&e);
    return worst < 1e-5f && stats.bad_rows == 0 ? 0 : 1;
}
