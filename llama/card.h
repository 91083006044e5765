/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVL_CARD_H
#define KVL_CARD_H

/*
 * llama.cpp's card: which of its buffers lie in host memory instead, and tensors of the card for
 * the CPU.
 */

#include <kvferry/blocks.h>

#include "ggml_abi.h"

typedef struct kvl_plugin kvl_plugin;
typedef struct kvl_layer kvl_layer;

/** The one GPU of llama.cpp, as far as caches are taken off it. */
typedef struct kvl_card {
    gg_buffer_type *type; /* of its memory; NULL = there is none that is served */
    kvf_runtime *runtime; /* of the library, on it */
    int (*wait)(void);    /* for all of its work */
    uint64_t copied;      /* tensors that the plug-in copied from it */
    /* functions of the buffer type before ours */
    gg_buffer *(*alloc_buffer)(gg_buffer_type *type, size_t bytes);
    size_t (*alloc_size)(gg_buffer_type *type, const gg_tensor *tensor);
    /* of its buffers */
    void (*set_tensor)(gg_buffer *buffer, gg_tensor *tensor, const void *from, size_t at,
                       size_t bytes);
    void (*get_tensor)(gg_buffer *buffer, const gg_tensor *tensor, void *to, size_t at,
                       size_t bytes);
    /* cells whose sizes were asked for, one after the other, and nothing else since */
    char first[GG_NAME];
    size_t bytes;
    uint32_t keys, values;
} kvl_card;

/** Look for a card, once ggml is known: its caches are taken off it from now on. */
void kvl_card_open(kvl_plugin *p);

/** Whether this is a tensor of cells that belongs into host memory. */
bool kvl_is_for_host(const kvl_plugin *p, const gg_tensor *t);

/** Wait for what llama.cpp enqueued on the card, whether its scheduler did or not. */
void kvl_card_wait(const kvl_plugin *p);

/** Whether memory of this type is the card's. */
bool kvl_is_card_type(const kvl_plugin *p, const gg_buffer_type *type);
bool kvl_is_on_card(const kvl_plugin *p, const gg_tensor *t);

/** Copies of tensors of the card, while a node is computed. All zero at first. */
typedef struct kvl_copies {
    struct kvl_copy *newest;
} kvl_copies;

/** Data of a tensor for the CPU: its own memory, or the copy of it. NULL without memory. */
void *kvl_on_host(const kvl_plugin *p, kvl_copies *copies, gg_tensor *t);
void kvl_copies_free(kvl_copies *copies);

/** The whole of a tensor from memory of the host, wherever it lies. */
void kvl_write(const kvl_plugin *p, gg_tensor *t, const void *from);

/** SET_ROWS of rows on the card to keys and to values of a layer, of which nothing was done yet.
 * The attention to their cells puts the rows, and the cells get what the library has of them. All
 * zero: none wait. */
typedef struct kvl_rows {
    gg_tensor *nodes[2]; /* of keys, of values */
} kvl_rows;

/** Whether a SET_ROWS on a layer waits from now on. */
bool kvl_rows_wait(const kvl_plugin *p, kvl_rows *rows, const kvl_layer *layer, gg_tensor *node);

/** Cells that rows of both wait for, which are a layer's. @return 0 = they must be written before
 * its attention; else their number in @p count, which is 0 if none wait */
int kvl_rows_cells(kvl_plugin *p, kvl_copies *copies, const kvl_rows *rows, const kvl_layer *layer,
                   const int64_t **cells, uint32_t *count);

/** Let the CPU compute a node: data of its tensors on the card are copies until kvl_take_back,
 * which writes the output. @return 0 without memory, and nothing is lent */
int kvl_lend(const kvl_plugin *p, kvl_copies *copies, gg_tensor *node);
void kvl_take_back(const kvl_plugin *p, const kvl_copies *copies, gg_tensor *node);

#endif
