/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A layer's experts on the host device, in the place of its MLP.
 *
 * Rows are copied into groups by expert, all groups are multiplied in one launch, and a row adds up
 * what its experts gave, the likeliest first. So the weights of an expert that no row chose are not
 * read, those of others once, and neither the order nor the number of rows changes a bit of a step.
 * It knows no names of weights. Invariant: as in transformer_host.c.
 */

#include "experts.h"
#include "host_parts.h"

#include <string.h>

void host_experts_lay_out(const kvf_transformer_options *options, kvf_carver *k,
                          host_experts *experts)
{
    const kvf_model_config *m = options->model;
    const uint64_t rows = transformer_rows(options), chosen = transformer_mlp_rows(options);
    KVF_CARVE(k, experts->logits, rows, m->experts);
    KVF_CARVE(k, experts->chosen, chosen);
    KVF_CARVE(k, experts->shares, chosen);
    KVF_CARVE(k, experts->places, chosen);
    KVF_CARVE(k, experts->ends, m->experts);
    KVF_CARVE(k, experts->rows, chosen, m->hidden_size);
    KVF_CARVE(k, experts->groups.first, m->experts + 1u);
    KVF_CARVE(k, experts->groups.matrix, m->experts);
}

/* ---- tasks ---- */

/* One task is one row. */
static void choose_task(const void *raw, uint32_t row)
{
    const kvf_transformer *t = ((const row_args *)raw)->t;
    const host_experts *e = &host_of(t)->experts;
    const size_t first = (size_t)row * t->model.experts_used;
    kvf_experts_choose(&t->model, e->logits + (size_t)row * t->model.experts, e->chosen + first,
                       e->shares + first);
}

/* One task is all rows. */
static void group_task(const void *raw, uint32_t task)
{
    const row_args *args = raw;
    const kvf_model_config *m = &args->t->model;
    host_experts *e = &host_of(args->t)->experts;
    (void)task;
    kvf_experts_group(e->chosen, args->rows * m->experts_used, m->experts, e->places, e->ends,
                      &e->groups);
}

/* One task is one row: to each of its experts. */
static void spread_task(const void *raw, uint32_t row)
{
    const kvf_transformer *t = ((const row_args *)raw)->t;
    const host_experts *e = &host_of(t)->experts;
    const size_t hidden = t->model.hidden_size, used = t->model.experts_used;
    const float *from = (const float *)t->buffers.normed + row * hidden;
    for (size_t i = row * used; i < (row + 1) * used; i++)
        memcpy(e->rows + e->places[i] * hidden, from, hidden * sizeof *from);
}

/* One task is one row: from each of its experts. */
static void collect_task(const void *raw, uint32_t row)
{
    const row_args *args = raw;
    const kvf_transformer *t = args->t;
    const host_experts *e = &host_of(t)->experts;
    const size_t hidden = t->model.hidden_size, used = t->model.experts_used;
    float *to = t->buffers.hidden + (args->first + row) * hidden;
    for (size_t i = row * used; i < (row + 1) * used; i++) {
        const float *from = e->rows + e->places[i] * hidden;
        for (size_t c = 0; c < hidden; c++)
            to[c] += e->shares[i] * from[c];
    }
}

/* ---- enqueueing ---- */

static kvf_status multiply(const transformer_step *s, kvf_linear_call call)
{
    call.groups = &host_of(s->t)->experts.groups;
    call.groups_max = kvf_min_u32(s->t->model.experts, s->rows * s->t->model.experts_used);
    call.rows = s->rows * s->t->model.experts_used;
    call.separate = s->separate;
    return kvf_linear_enqueue(host_of(s->t)->engine, &call, s->stream);
}

kvf_status host_experts_run(const transformer_step *s, const transformer_layer *l)
{
    const transformer_buffers *b = &s->t->buffers;
    const host_experts *e = &host_of(s->t)->experts;
    KVF_TRY(host_multiply(
        s,
        (kvf_linear_call){.parts = {&l->router}, .part_count = 1, .x = b->normed, .y = e->logits}));
    KVF_TRY(host_launch(s, choose_task, (row_args){0}, s->rows));
    KVF_TRY(host_launch(s, group_task, (row_args){0}, 1));
    KVF_TRY(host_launch(s, spread_task, (row_args){0}, s->rows));
    KVF_TRY(multiply(
        s, (kvf_linear_call){
               .parts = {l->gate, l->up}, .part_count = 2, .x = e->rows, .y = b->gate_up}));
    KVF_TRY(host_activate(s, s->rows * s->t->model.experts_used));
    KVF_TRY(multiply(s, (kvf_linear_call){
                            .parts = {l->down}, .part_count = 1, .x = b->activated, .y = e->rows}));
    return host_launch(s, collect_task, (row_args){0}, s->rows);
}
