/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVL_STANDIN_CARD_H
#define KVL_STANDIN_CARD_H

/*
 * ggml's registry of CUDA devices, a buffer type of one, and its memory: that of the emulated
 * device in a build that has one, else of the host.
 */

#include "standin.h"

typedef struct standin_cards {
    int count;          /* 0: this ggml knows no card */
    int is_other;       /* they are not CUDA's */
    uint32_t functions; /* of a buffer type: 6, 7 or 8, as versions have them */
    int is_misread;     /* the device is looked for in another place than it is */
    uint64_t delay;     /* nanoseconds before what is written to the card is there */
    uint64_t allocated; /* buffers of the card, made since standin_cards_reset */
    uint64_t refused;   /* copies between the host and the card, likewise */
} standin_cards;
extern standin_cards standin_card;

/** No card, and functions as ggml made them. */
void standin_cards_reset(void);

/** Whether the card is a device of the library. */
int standin_has_device(void);

gg_buffer_type *standin_card_type(void);
/* For the stand-in itself. */
gg_buffer *standin_card_alloc(size_t bytes);
gg_registry *standin_cuda_registry(void);
/** Tensors as ggml allocates those of a context: the sizes first, then one buffer. */
gg_buffer *standin_allocate(gg_buffer_type *type, gg_tensor *const *tensors, int count);
/** Copies of the device, and calls that waited for it, until now. */
void standin_count_calls(uint64_t calls[2]);
/** Bytes to a tensor on the card, in order with what is enqueued there; returns before. */
void standin_enqueue(gg_tensor *tensor, const void *from, size_t bytes);

#endif
