/* SPDX-License-Identifier: Apache-2.0 */

/* Inputs of a decode bench; see the header. */

#include "bench_decode.h"

#include "common/convert.h"
#include "common/random.h"

#include <stdlib.h>
#include <string.h>

#define DECODE_LOOKS_MAX 8u
#define NOISE            0.5f /* of a theme */
#define TURNING          0.1  /* share of looks that turn to another topic in a step */

static size_t kv_count(const decode_options *o, uint32_t rows)
{
    return (size_t)rows * o->cache.kv_heads * o->cache.head_dim;
}

static kvf_status reserve(kvf_runtime *runtime, size_t count, decode_vectors *out)
{
    void *host = NULL;
    const kvf_status status =
        kvf_pinned_alloc(runtime, count * sizeof *out->host, &host, &out->alias);
    out->host = status == KVF_OK ? host : NULL;
    return status == KVF_OK ? kvf_memory_alloc(runtime, count * sizeof *out->host, &out->device)
                            : status;
}

kvf_status decode_inputs_open(decode_inputs *in, kvf_runtime *runtime, kvf_stream *stream,
                              const decode_options *o)
{
    const size_t queries = (size_t)DECODE_BATCH_MAX * o->cache.kv_heads * o->group;
    *in = (decode_inputs){.runtime = runtime, .stream = stream};
    in->drift = calloc(queries * o->cache.head_dim, sizeof *in->drift);
    in->theme = calloc(kv_count(o, 1), sizeof *in->theme);
    in->passages = calloc(o->topics, sizeof *in->passages);
    in->looks = calloc(queries * DECODE_LOOKS_MAX, sizeof *in->looks);
    if (!in->drift || !in->theme || !in->passages || !in->looks)
        return KVF_OUT_OF_MEMORY;
    const kvf_status status = reserve(runtime, kv_count(o, DECODE_CHUNK), &in->kv);
    return status == KVF_OK ? reserve(runtime, queries * o->cache.head_dim, &in->q) : status;
}

void decode_inputs_close(decode_inputs *in)
{
    if (in->runtime) {
        kvf_memory_free(in->runtime, in->kv.device);
        kvf_memory_free(in->runtime, in->q.device);
        kvf_pinned_free(in->runtime, in->kv.host);
        kvf_pinned_free(in->runtime, in->q.host);
    }
    free(in->drift);
    free(in->theme);
    free(in->passages);
    free(in->looks);
}

/* ---- passages ---- */

/* They do not begin where blocks of the library do. */
static uint32_t passage_of(const decode_options *o, uint32_t token)
{
    return (token + o->passage / 3) / o->passage;
}

/* Adds the theme of a passage for one KV head. */
static void add_theme(const decode_options *o, uint32_t passage, uint32_t head, float *to)
{
    uint64_t random = o->seed ^ ((uint64_t)passage << 20 | head) * UINT64_C(0x9e3779b97f4a7c15);
    for (uint32_t i = 0; i < o->cache.head_dim; i++)
        to[i] += kvf_random_normal(&random);
}

static uint32_t any_passage(decode_inputs *in, const decode_options *o)
{
    return kvf_random_below(&in->random, passage_of(o, o->context - 1) + 1);
}

void decode_inputs_begin(decode_inputs *in, const decode_options *o)
{
    const uint32_t heads = o->cache.kv_heads * o->group;
    in->random = o->seed;
    memset(in->drift, 0, kv_count(o, DECODE_BATCH_MAX) * o->group * sizeof *in->drift);
    if (!o->passage)
        return;
    /* All query heads of a group together look at about the budget. */
    const uint32_t fitting = o->cache.budget_tokens / (o->passage * o->group);
    in->looks_count = fitting < 1 ? 1 : fitting < DECODE_LOOKS_MAX ? fitting : DECODE_LOOKS_MAX;
    for (uint32_t i = 0; i < o->topics; i++)
        in->passages[i] = any_passage(in, o);
    for (uint32_t i = 0; i < DECODE_BATCH_MAX * heads * DECODE_LOOKS_MAX; i++)
        in->looks[i] = kvf_random_below(&in->random, o->topics);
}

/* Topics become other passages, and looks turn to other topics. */
static void turn(decode_inputs *in, const decode_options *o, uint32_t batch)
{
    const uint32_t looks = batch * o->cache.kv_heads * o->group * DECODE_LOOKS_MAX;
    for (uint32_t i = 0; i < o->topics; i++)
        if (kvf_random_unit(&in->random) < o->drift)
            in->passages[i] = any_passage(in, o);
    for (uint32_t i = 0; i < looks; i++)
        if (kvf_random_unit(&in->random) < TURNING)
            in->looks[i] = kvf_random_below(&in->random, o->topics);
}

/* ---- vectors ---- */

static kvf_status upload(const decode_inputs *in, const decode_vectors *r, size_t count)
{
    const kvf_status status =
        kvf_memory_copy(in->stream, r->device, r->alias, count * sizeof *r->host);
    return status == KVF_OK ? kvf_stream_wait(in->stream) : status;
}

/* Keys of the passage that `in->theme` has, or of none. */
static void put_key(decode_inputs *in, const decode_options *o, uint32_t row, bool has_theme)
{
    const size_t count = kv_count(o, 1);
    const float scale = has_theme ? NOISE : 1.0f;
    uint16_t *key = in->kv.host + row * count;
    for (size_t i = 0; i < count; i++)
        key[i] = kvf_bf16_from_float(scale * kvf_random_normal(&in->random) +
                                     (has_theme ? in->theme[i] : 0.0f));
}

kvf_status decode_inputs_keys(decode_inputs *in, const decode_options *o, uint32_t first,
                              uint32_t count)
{
    uint32_t current = UINT32_MAX;
    for (uint32_t i = 0; i < count; i++) {
        if (o->passage && passage_of(o, first + i) != current) {
            current = passage_of(o, first + i);
            memset(in->theme, 0, kv_count(o, 1) * sizeof *in->theme);
            for (uint32_t h = 0; h < o->cache.kv_heads; h++)
                add_theme(o, current, h, in->theme + (size_t)h * o->cache.head_dim);
        }
        put_key(in, o, i, o->passage != 0);
    }
    return upload(in, &in->kv, kv_count(o, count));
}

/* Drifting noise, and the themes of what the head looks at. */
static void put_query(decode_inputs *in, const decode_options *o, uint32_t n)
{
    const uint32_t dim = o->cache.head_dim, heads = o->cache.kv_heads * o->group;
    const float scale = o->passage ? NOISE : 2.0f;
    const float old = o->afresh ? 0.0f : 0.95f, fresh = o->afresh ? 1.0f : 0.31f;
    float *drift = in->drift + (size_t)n * dim, *query = in->theme; /* of nobody now */
    for (uint32_t i = 0; i < dim; i++) {
        drift[i] = old * drift[i] + fresh * kvf_random_normal(&in->random);
        query[i] = scale * drift[i];
    }
    for (uint32_t i = 0; o->passage && i < in->looks_count; i++)
        add_theme(o, in->passages[in->looks[n * DECODE_LOOKS_MAX + i]], n % heads / o->group,
                  query);
    for (uint32_t i = 0; i < dim; i++)
        in->q.host[(size_t)n * dim + i] = kvf_bf16_from_float(query[i]);
}

kvf_status decode_inputs_step(decode_inputs *in, const decode_options *o, uint32_t batch)
{
    const uint32_t queries = batch * o->cache.kv_heads * o->group;
    if (o->passage)
        turn(in, o, batch);
    for (uint32_t n = 0; n < queries; n++)
        put_query(in, o, n);
    const kvf_status status = upload(in, &in->q, (size_t)queries * o->cache.head_dim);
    for (uint32_t b = 0; b < batch; b++)
        put_key(in, o, b, false);
    return status == KVF_OK ? upload(in, &in->kv, kv_count(o, batch)) : status;
}
