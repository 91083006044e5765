/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_DRAW_QUEUE_H
#define KVF_MODEL_DRAW_QUEUE_H

/*
 * Steps whose tokens a GPU draws: what they begin with, and their tokens on the way to the host.
 *
 * A step takes ids and positions of its rows from device memory, where the step before left them,
 * so the host can enqueue it without knowing them. Tokens come through a ring of pinned memory, a
 * few steps behind. It knows rows, not models. Invariant: at most KVF_DRAWS_MAX steps are marked
 * and not taken; the caller counts them.
 */

#include "transformer.h"

typedef struct kvf_draw_queue kvf_draw_queue;

/** Bytes of device and pinned memory. */
uint64_t kvf_draw_queue_bytes(uint32_t rows_max, uint32_t vocab_size);
KVF_CHECKED kvf_status kvf_draw_queue_open(kvf_runtime *runtime, uint32_t rows_max,
                                           uint32_t vocab_size, kvf_draw_queue **out,
                                           kvf_error *error);
void kvf_draw_queue_close(kvf_draw_queue *queue);

/** The inputs of the next step: ids, positions, settings and seen tokens of its rows. No step is
 * on its way. Stream: enqueues. */
KVF_CHECKED kvf_status kvf_draw_queue_feed(kvf_draw_queue *queue, const kvf_draw_step *step,
                                           const uint32_t *positions, kvf_stream *stream);
/** Where a step finds them on the device: [rows_max] each. */
const uint32_t *kvf_draw_queue_ids(const kvf_draw_queue *queue);
const uint32_t *kvf_draw_queue_positions(const kvf_draw_queue *queue);

/** The end of a step: its tokens from logits [rows, vocab_size] on the device. May be recorded. */
KVF_CHECKED kvf_status kvf_draw_queue_draw(kvf_draw_queue *queue, uint32_t rows,
                                           const float *logits, kvf_stream *stream);
/** A step was enqueued, or its recording launched. */
KVF_CHECKED kvf_status kvf_draw_queue_mark(kvf_draw_queue *queue, kvf_stream *stream);

/** Wait for the oldest step that was marked and not taken. ids [rows of the feed] get its tokens,
 * KVF_SAMPLER_NONE where no logit is a finite number. @return KVF_OK; KVF_DEVICE_FAILED */
KVF_CHECKED kvf_status kvf_draw_queue_take(kvf_draw_queue *queue, uint32_t *ids);

#endif
