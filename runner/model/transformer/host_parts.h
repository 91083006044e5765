/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_HOST_PARTS_H
#define KVF_MODEL_HOST_PARTS_H

/*
 * The host device's part of a transformer besides its buffers, for transformer_host.c and
 * host_launch.c. Invariant: as in transformer_host.c.
 */

#include "transformer_ops.h"

typedef struct host_part {
    kvf_linear_engine *engine;
    const kvf_linear_kernels *kernels;
    float *attended_wide; /* [rows of one operation, q] */
    void *reservation;
} host_part;

typedef struct row_args {
    const kvf_transformer *t;
    const transformer_layer *layer;
    const float *norm; /* weight of a norm */
    uint32_t first;    /* row of the hidden states */
    uint32_t rows;
} row_args;

static inline host_part *host_of(const kvf_transformer *t)
{
    return t->device;
}

/* host_launch.c */
kvf_status host_launch(const transformer_step *s, kvf_task_fn fn, row_args args, uint32_t tasks);
kvf_status host_multiply(const transformer_step *s, kvf_linear_call call);
/* gate_up -> activated */
kvf_status host_activate(const transformer_step *s);

#endif
