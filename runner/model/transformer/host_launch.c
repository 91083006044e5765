/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Launches of rows on the host device, for all operations of a transformer; see host_parts.h.
 */

#include "host_parts.h"

/* Columns of the activation that one task computes. */
#define ACTIVATION_SEGMENT 2048u

kvf_status host_launch(const transformer_step *s, kvf_task_fn fn, row_args args, uint32_t tasks)
{
    args.t = s->t;
    args.first = s->first;
    args.rows = s->rows;
    return kvf_stream_launch(s->stream, fn, &args, sizeof args, tasks);
}

kvf_status host_multiply(const transformer_step *s, kvf_linear_call call)
{
    call.rows = s->rows;
    call.separate = s->separate;
    return kvf_linear_enqueue(host_of(s->t)->engine, &call, s->stream);
}

static uint32_t activation_segments(const kvf_transformer *t)
{
    return (t->model.intermediate_size + ACTIVATION_SEGMENT - 1) / ACTIVATION_SEGMENT;
}

/* One task is one segment of one row. */
static void activate_task(const void *raw, uint32_t task)
{
    const kvf_transformer *t = ((const row_args *)raw)->t;
    size_t width = t->model.intermediate_size;
    size_t row = task / activation_segments(t);
    size_t first = task % activation_segments(t) * (size_t)ACTIVATION_SEGMENT;
    size_t count = width - first < ACTIVATION_SEGMENT ? width - first : ACTIVATION_SEGMENT;
    const float *gate = t->buffers.gate_up + row * 2 * width + first;
    float *y = (float *)t->buffers.activated + row * width + first;
    host_of(t)->kernels->swiglu(gate, gate + width, count, y);
}

kvf_status host_activate(const transformer_step *s)
{
    return host_launch(s, activate_task, (row_args){0}, s->rows * activation_segments(s->t));
}
