/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_HOST_PARTS_H
#define KVF_MODEL_HOST_PARTS_H

/*
 * The host device's part of a transformer besides its buffers, for transformer_host.c,
 * host_launch.c and host_experts.c. Invariant: as in transformer_host.c.
 */

#include "transformer_ops.h"

/* R = rows of one operation, E = experts, U = experts of a token. */
typedef struct host_experts {
    float *logits;            /* [R, E] */
    uint32_t *chosen;         /* [R, U] */
    float *shares;            /* [R, U] */
    uint32_t *places;         /* [R, U] rows of each among those of the groups */
    uint32_t *ends;           /* [E] */
    float *rows;              /* [R U, hidden] in groups: what experts get, then what they give */
    kvf_linear_groups groups; /* room for E */
} host_experts;

typedef struct host_part {
    kvf_linear_engine *engine;
    const kvf_linear_kernels *kernels;
    float *attended_wide; /* [R, q] */
    host_experts experts; /* where the model has them */
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
/* `rows` of gate_up -> activated */
kvf_status host_activate(const transformer_step *s, uint32_t rows);

/* host_experts.c */
void host_experts_lay_out(const kvf_transformer_options *options, kvf_carver *k,
                          host_experts *experts);
/* normed -> hidden += */
kvf_status host_experts_run(const transformer_step *s, const transformer_layer *l);

#endif
