/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_DRAW_OPS_H
#define KVF_MODEL_DRAW_OPS_H

/*
 * From logits to the next token on a GPU; sampling.c is the specification, bit for bit.
 *
 * It knows shapes and pointers. Rows are those of a step; the token of a row is where the next step
 * looks for it. A launcher enqueues on `stream` (a cudaStream_t), may be recorded, and returns a
 * cudaError_t as int.
 */

#include "draw_mass.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvf_draw_args {
    uint32_t rows;
    uint32_t vocab_size;
    uint32_t seen_words;         /* of a row, of 32 tokens each */
    uint32_t places;             /* of the ring */
    uint32_t rows_max;           /* of a place */
    const float *logits;         /* [rows, vocab_size] */
    kvf_draw_settings *settings; /* [rows]; draws move on */
    uint32_t *seen;      /* [rows, seen_words] a bit per token; gets the one that is drawn */
    uint32_t *turns;     /* [rows] of this row so far; gets one more */
    uint32_t *positions; /* [rows] of the next token; gets one more */
    uint32_t *ids;       /* [rows] out: the next token, 0 where there is none */
    uint32_t *drawn;     /* [places, rows_max] out at place turn % places: it, or UINT32_MAX */
} kvf_draw_args;

int kvf_draw_cuda(const kvf_draw_args *args, void *stream);

/* Events of the current device (a cudaEvent_t), for the host to wait for. */
int kvf_draw_event_create(void **event);
void kvf_draw_event_destroy(void *event);
int kvf_draw_event_record(void *event, void *stream);
int kvf_draw_event_wait(void *event);

#ifdef __cplusplus
}
#endif

#endif
