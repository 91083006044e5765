/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The rest, and adaptive budgets; see eval_ideas.h. Tables of the cache are read after a wait, or
 * in stream order, when the host's bookkeeping of the layer is that of the same step.
 */

#include "eval_ideas.h"

#include "common/convert.h"
#include "eval_shuffle.h"
#include "score/score_args.h"

#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define LOG_MAX 60.0f /* of a mass relative to another */

/* ---- what a step of a layer left ---- */

/* Of a row of the batch, what is looked at here. */
static kvf_row row_of(const eval_batch *b, uint32_t row, uint32_t layer)
{
    const kvf_tables *t = &b->cache->tables;
    const kvf_paging *p = &b->cache->dims.paging;
    const kvf_layer *state = &b->sequences[row]->layers[layer];
    const size_t n = kvf_row_number(b->cache, b->sequences[row], layer);
    return (kvf_row){.blocks = t->blocks + n * p->blocks_max,
                     .ring = t->rings + n * p->ring_blocks * kvf_block_bytes(p),
                     .bits = t->bits + n * p->kv_heads * p->blocks_max,
                     .length = state->length,
                     .sealed = state->sealed};
}

/* Row stride of masses and scores: most sealed pages of a row. */
static uint32_t stride_of(const eval_batch *b, uint32_t layer)
{
    uint32_t pages = 1;
    for (uint32_t row = 0; row < b->rows; row++) {
        const kvf_row r = row_of(b, row, layer);
        pages = kvf_max_u32(pages, kvf_row_sealed_pages(&b->cache->dims.paging, &r));
    }
    return pages;
}

/* A query head of a row: what the codes say of it. */
typedef struct head_masses {
    const uint16_t *mass; /* [pages] bf16, relative to the top of their tile; negative = none */
    const float *top, *sum;
    uint32_t pages, tiles;
} head_masses;

static head_masses masses_of(const eval_batch *b, uint32_t layer, uint32_t row, uint32_t head)
{
    const kvf_tables *t = &b->cache->tables;
    const kvf_paging *p = &b->cache->dims.paging;
    const uint32_t stride = stride_of(b, layer), size = p->shape.page_size;
    const size_t at = (size_t)row * b->cache->config.query_heads + head;
    const kvf_row r = row_of(b, row, layer);
    const uint32_t pages = kvf_row_sealed_pages(p, &r);
    return (head_masses){.mass = t->mass + at * stride,
                         .top = t->top + at * kvf_tiles(stride, size),
                         .sum = t->sum + at * kvf_tiles(stride, size),
                         .pages = pages,
                         .tiles = kvf_tiles(pages, size)};
}

/* exp of the logit of a key, relative to exp(against). */
static float key_mass(const kvf_cache *c, const float *q, const void *key, float against)
{
    const kvf_shape *s = &c->dims.paging.shape;
    float dot = 0.0f;
    for (uint32_t d = 0; d < s->head_dim; d++)
        dot += q[d] * kvf_element_get(key, s->dtype, d);
    return expf(fminf(dot * c->config.softmax_scale - against, LOG_MAX));
}

static void query_of(const eval_batch *b, uint32_t row, uint32_t head, float *q)
{
    const kvf_shape *s = &b->cache->dims.paging.shape;
    const size_t at = (size_t)row * b->cache->config.query_heads + head;
    for (uint32_t d = 0; d < s->head_dim; d++)
        q[d] = kvf_element_get(b->transformer->buffers.q, s->dtype, at * s->head_dim + d);
}

/* ---- the rest ---- */

static float *means_of(const eval_rest *r, size_t number, uint32_t block, uint32_t head)
{
    const kvf_paging *p = &r->batch->cache->dims.paging;
    return r->means + ((number * p->blocks_max + block) * p->kv_heads + head) * p->shape.head_dim;
}

/* Mean values of blocks that were sealed since the last time. */
static void renew_means(const eval_rest *r, const kvf_sequence *sequence, uint32_t layer)
{
    const kvf_paging *p = &r->batch->cache->dims.paging;
    const kvf_shape *s = &p->shape;
    const size_t number = kvf_row_number(r->batch->cache, sequence, layer);
    if (r->generation[number] != sequence->generation)
        r->ready[number] = 0;
    r->generation[number] = sequence->generation;
    for (uint32_t b = r->ready[number]; b < sequence->layers[layer].sealed; b++)
        for (uint32_t h = 0; h < p->kv_heads; h++) {
            const void *run = kvf_page_address(sequence, layer, h, b * p->block_pages);
            float *mean = means_of(r, number, b, h);
            memset(mean, 0, s->head_dim * sizeof *mean);
            for (uint32_t t = 0; t < p->block_size; t++)
                for (uint32_t d = 0; d < s->head_dim; d++)
                    mean[d] += kvf_element_get(kvf_page_value(s, run, t), s->dtype, d) /
                               (float)p->block_size;
        }
    r->ready[number] = sequence->layers[layer].sealed;
}

/* Mass of a page by its codes, relative to exp(against). */
static float coded_mass(const head_masses *m, uint32_t page, uint32_t tile_pages, float against)
{
    const float mass = kvf_bf16_to_float(m->mass[page]);
    return mass <= 0.0f ? 0.0f : mass * expf(fminf(m->top[page / tile_pages] - against, LOG_MAX));
}

/* The same by its keys. */
static float exact_mass(const eval_batch *b, uint32_t row, uint32_t layer, uint32_t list,
                        uint32_t page, const float *q, float against)
{
    const kvf_paging *p = &b->cache->dims.paging;
    const kvf_row r = row_of(b, row, layer);
    const uint64_t skip = kvf_row_skip(p, &r, list, page);
    const char *at = kvf_page_address(b->sequences[row], layer, list, page);
    float sum = 0.0f;
    for (uint32_t t = 0; t < p->shape.page_size; t++)
        if (!(skip >> t & 1))
            sum += key_mass(b->cache, q, kvf_page_key(&p->shape, at, t), against);
    return sum;
}

/* Weights of all blocks, relative to what was attended. @return their sum */
static float weigh_rest(const eval_rest *r, uint32_t layer, uint32_t row, uint32_t head)
{
    const eval_batch *b = r->batch;
    const kvf_paging *p = &b->cache->dims.paging;
    const kvf_choice *now = &b->cache->tables.now;
    const head_masses m = masses_of(b, layer, row, head);
    const uint32_t list = head / p->group, tile_pages = kvf_tile_pages(p->shape.page_size);
    const size_t number = (size_t)row * p->lists + list;
    const int32_t *id = now->ids + number * now->ids_max, *end = id + now->id_count[number];
    const float lse = b->cache->tables.lse[(size_t)row * b->cache->config.query_heads + head];
    float q[KVF_HEAD_DIM_MAX], sum = 0.0f;
    query_of(b, row, head, q);
    memset(r->weights, 0, p->blocks_max * sizeof *r->weights);
    for (uint32_t page = 0; page < m.pages; page++) {
        if (id < end && (uint32_t)*id == page) {
            id++;
            continue;
        }
        const float mass = r->is_exact ? exact_mass(b, row, layer, list, page, q, lse)
                                       : coded_mass(&m, page, tile_pages, lse);
        r->weights[page / p->block_pages] += mass;
        sum += mass;
    }
    return sum;
}

static void add_rest(const eval_rest *r, uint32_t layer, uint32_t row, uint32_t head)
{
    const eval_batch *b = r->batch;
    const kvf_paging *p = &b->cache->dims.paging;
    const kvf_shape *s = &p->shape;
    const float total = 1.0f + weigh_rest(r, layer, row, head);
    const size_t number = kvf_row_number(b->cache, b->sequences[row], layer);
    const size_t at = ((size_t)row * b->cache->config.query_heads + head) * s->head_dim;
    float out[KVF_HEAD_DIM_MAX];
    for (uint32_t d = 0; d < s->head_dim; d++)
        out[d] = kvf_element_get(b->transformer->buffers.attended, s->dtype, at + d);
    for (uint32_t block = 0; block < b->sequences[row]->layers[layer].sealed; block++) {
        const float *mean = means_of(r, number, block, head / p->group);
        for (uint32_t d = 0; d < s->head_dim; d++)
            out[d] += r->weights[block] * mean[d];
    }
    for (uint32_t d = 0; d < s->head_dim; d++)
        kvf_element_set(b->transformer->buffers.attended, s->dtype, at + d, out[d] / total);
}

/* In place of the transformer's: what was attended is completed first. */
static kvf_status output_with_rest(const transformer_step *s, const transformer_layer *layer,
                                   const float *norm)
{
    const eval_rest *r =
        (const eval_rest *)(const void *)((const char *)s->t->ops - offsetof(eval_rest, ops));
    const uint32_t index = (uint32_t)(layer - s->t->layers);
    KVF_TRY(kvf_stream_wait(s->stream));
    for (uint32_t row = 0; row < s->rows && index >= r->first_layer; row++) {
        renew_means(r, r->batch->sequences[row], index);
        for (uint32_t head = 0; head < r->batch->cache->config.query_heads; head++)
            add_rest(r, index, row, head);
    }
    return r->own->output(s, layer, norm);
}

kvf_status eval_rest_open(eval_rest *r, const eval_batch *batch, kvf_transformer *transformer,
                          kvf_error *error)
{
    const kvf_paging *p = &batch->cache->dims.paging;
    const size_t rows = (size_t)batch->cache->config.sequences_max * batch->cache->config.layers;
    const size_t means = rows * p->blocks_max * p->kv_heads * p->shape.head_dim;
    r->ops = *transformer->ops;
    r->own = transformer->ops;
    r->batch = batch;
    r->means = malloc(means * sizeof *r->means);
    r->ready = calloc(rows, sizeof *r->ready);
    r->generation = calloc(rows, sizeof *r->generation);
    r->weights = calloc(p->blocks_max, sizeof *r->weights);
    if (!r->means || !r->ready || !r->generation || !r->weights)
        return model_out_of_memory(error, means * sizeof *r->means, "mean values");
    r->ops.output = output_with_rest;
    transformer->ops = &r->ops;
    return KVF_OK;
}

void eval_rest_close(eval_rest *r, kvf_transformer *transformer)
{
    if (transformer->ops == &r->ops)
        transformer->ops = r->own;
    free(r->means);
    free(r->ready);
    free(r->generation);
    free(r->weights);
}

/* ---- adaptive budgets ---- */

kvf_status eval_adaptive_open(eval_adaptive *a, const kvf_model_config *model, uint32_t pages,
                              kvf_error *error)
{
    const size_t count = (size_t)model->kv_heads * pages;
    a->take = calloc(model->kv_heads, sizeof *a->take);
    a->values = calloc(count, sizeof *a->values);
    a->work = calloc(count, sizeof *a->work);
    if (a->take && a->values && a->work)
        return KVF_OK;
    return model_out_of_memory(error, 2 * count * sizeof *a->work, "scores");
}

void eval_adaptive_close(eval_adaptive *a)
{
    free(a->take);
    free(a->values);
    free(a->work);
}

/* Share of a query head's mass that is not in sink or window, whose keys are on the device. */
static float share_of_pages(const eval_batch *b, uint32_t layer, uint32_t row, uint32_t head)
{
    const kvf_paging *p = &b->cache->dims.paging;
    const kvf_row r = row_of(b, row, layer);
    const uint32_t list = head / p->group;
    const head_masses m = masses_of(b, layer, row, head);
    float top = -INFINITY, pages = 0.0f, near = 0.0f, q[KVF_HEAD_DIM_MAX];
    for (uint32_t i = 0; i < m.tiles; i++)
        top = fmaxf(top, m.top[i]);
    for (uint32_t i = 0; i < m.tiles; i++)
        pages += m.sum[i] * expf(m.top[i] - top);
    query_of(b, row, head, q);
    for (uint32_t t = 0; t < p->sink; t++)
        near += key_mass(b->cache, q, kvf_page_key(&p->shape, kvf_row_run(p, &r, 0, list), t), top);
    for (uint32_t t = r.sealed * p->block_size; t < r.length; t++) {
        const char *block = kvf_row_ring_block(p, &r, t / p->block_size);
        const char *run = block + list * kvf_run_bytes(p);
        near += key_mass(b->cache, q, kvf_page_key(&p->shape, run, t % p->block_size), top);
    }
    return pages / (pages + near);
}

/* What scores of a KV head are worth beside those of others. */
static float worth(const eval_adaptive *a, uint32_t layer, uint32_t row, uint32_t head)
{
    const uint32_t group = a->batch->cache->dims.paging.group;
    float sum = 0.0f;
    for (uint32_t g = 0; g < group && a->knows_window; g++)
        sum += share_of_pages(a->batch, layer, row, head * group + g);
    return a->knows_window ? sum / (float)group : 1.0f;
}

/* Heads that got more than the cache allows give it to the others. */
static void limit(uint32_t *take, uint32_t heads, uint32_t most)
{
    for (uint32_t h = 0; h < heads; h++)
        for (uint32_t other = 0; other < heads && take[h] > most; other++) {
            const uint32_t room = take[other] < most ? most - take[other] : 0;
            const uint32_t moved = kvf_min_u32(take[h] - most, room);
            take[other] += moved;
            take[h] -= moved;
        }
}

/* Pages for every KV head of a row; `scores` are those of the first. */
static void allot(const eval_adaptive *a, const kvf_select_view *view, uint32_t row)
{
    const uint32_t heads = a->batch->cache->dims.paging.kv_heads;
    const uint32_t stride = stride_of(a->batch, view->layer);
    const uint32_t part = view->pages_max > a->extra ? view->pages_max - a->extra : 0;
    const uint32_t least = (uint32_t)(a->floor * (float)part), rest = view->pages - least;
    float *joint = a->work;
    for (uint32_t h = 0; h < heads; h++) {
        float *values = a->values + (size_t)h * rest;
        const float factor = worth(a, view->layer, row, h);
        memcpy(joint, view->scores + (size_t)h * stride, view->pages * sizeof *joint);
        if (least > 0)
            (void)eval_nth_largest(joint, view->pages, least - 1);
        for (uint32_t i = 0; i < rest; i++)
            values[i] = fmaxf(joint[least + i], 0.0f) * factor;
        a->take[h] = least;
    }
    const uint32_t free_pages = heads * (part - least);
    if (free_pages == 0)
        return;
    memcpy(joint, a->values, (size_t)heads * rest * sizeof *joint);
    const float edge = eval_nth_largest(joint, heads * rest, free_pages - 1);
    uint32_t given = 0;
    for (uint32_t i = 0; i < heads * rest; i++) {
        a->take[i / rest] += a->values[i] > edge;
        given += a->values[i] > edge;
    }
    for (uint32_t i = 0; i < heads * rest && given < free_pages; i++) {
        a->take[i / rest] += a->values[i] == edge;
        given += a->values[i] == edge;
    }
    limit(a->take, heads, view->pages_max);
}

uint32_t eval_adaptive_choose(void *user, const kvf_select_view *view, int32_t *ids)
{
    eval_adaptive *a = user;
    const uint32_t heads = a->batch->cache->dims.paging.kv_heads;
    const uint32_t row = a->next / heads;
    a->next = (a->next + 1) % (a->batch->rows * heads);
    if (view->pages <= view->pages_max)
        return eval_best_pages(view->scores, a->work, view->pages, view->pages_max, ids);
    if (view->kv_head == 0)
        allot(a, view, row);
    return eval_best_pages(view->scores, a->work, view->pages, a->take[view->kv_head], ids);
}
