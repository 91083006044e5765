/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVL_LLAMA_RIG_H
#define KVL_LLAMA_RIG_H

/*
 * A small llama.cpp around the plug-in, on the stand-in for ggml: a KV cache with layers, writes
 * and attention as graphs of one node that go to whoever takes them, and every output compared with
 * a plain loop.
 */

#include "plugin.h"
#include "standin.h"
#include "standin_card.h"
#include "unit.h"

enum { RIG_LAYERS = 2, RIG_CELLS = 256, RIG_HEADS = 4, RIG_KV = 2, RIG_DIM = 32, RIG_ROWS = 64 };

typedef struct rig_options {
    int type;            /* of the cache; 0 = F16 */
    int streams;         /* 0 = 1 */
    const char *setting; /* KVFERRY_LLAMA; NULL = budget=full */
    const char *without; /* KVF_TEST_WITHOUT (control.c) */
    int no_hooks;
    int is_plain; /* the CPU computes, and the plug-in is asked nothing */
    int away_at;  /* tokens at which pages are put away, and most outputs not looked at; 0 = 64 */
    float cap;
} rig_options;

/** Whether the plug-in computes, of a rig that one thread uses. */
extern int rig_is_inside;

typedef uint64_t rig_set[RIG_CELLS / 64];

typedef struct rig {
    rig_options o;
    gg_context *context;
    gg_registry *registry;
    gg_device *device;
    gg_backend *backend, *cpu;
    gg_tensor *k[RIG_LAYERS], *v[RIG_LAYERS];
    gg_buffer *buffer;
    int has_card; /* queries, outputs and rows are on the card */
    /* SET_ROWS that the graph of the next attention begins with */
    gg_context *writes_context;
    gg_tensor *writes[2];
    int64_t cells[RIG_CELLS];
    int writes_count;
    /* calls of the device in the latest graph: copies, and those that wait */
    uint64_t copies, waits;
    uint64_t random;
    /* of the latest attention */
    float out[RIG_ROWS * RIG_HEADS * RIG_DIM];
    int by_kvferry;
    double worst; /* over all attentions */
    uint64_t attentions;
    /* to make a node another one than llama.cpp makes */
    void (*spoil)(gg_tensor *node);
} rig;

/** Standard error is caught from here on, if the plug-in was not loaded. */
rig *rig_open(const rig_options *options);
void rig_close(rig *r);
/** The last rig is closed, and the plug-in unloaded. @return what rig_said */
const char *rig_end(rig *r);
/** Load the plug-in with these settings; NULL = it did not load. */
gg_registry *rig_load(const char *setting);
const char *rig_said(void);
/** Pages of llama.cpp's caches that are away. */
size_t rig_away(void);
/** From here to rig_said standard error is caught. */
void rig_listen(void);
void rig_unload(void);
/** Tokens in cells from @p first on, up to @p end, of stream 0: written together, and attended by
 * one row. */
int rig_begin(rig *r, int64_t first, int64_t end, rig_set set);

/** Whether rigs have a card: KVF_TEST_CARD is set. Their caches are llama.cpp's own on it. */
int rig_has_card(void);

/** A cache of another context, its tensors in a buffer of their own. */
void rig_make_cache(rig *r);
/** Random tokens to cells of a layer, in one SET_ROWS each of keys and values. */
int rig_write(rig *r, int layer, const int64_t *cells, int count);
/** The same as the beginning of the graph of the next attention. */
void rig_write_with_next(rig *r, int layer, const int64_t *cells, int count);
/** Attention of `tokens` rows in each of `streams` streams from `first` on. */
int rig_attend(rig *r, int layer, int tokens, int first, int streams, rig_set *sets);
/** Keys of a layer change in place. */
int rig_shift(rig *r, int layer);
/** All layers: write the cells, then attend. */
int rig_pass(rig *r, const int64_t *cells, int count, int tokens, int first, int streams,
             rig_set *sets);

static inline void rig_add(uint64_t *set, uint32_t cell)
{
    set[cell / 64] |= UINT64_C(1) << cell % 64;
}

static inline void rig_take(uint64_t *set, uint32_t cell)
{
    set[cell / 64] &= ~(UINT64_C(1) << cell % 64);
}

#endif
