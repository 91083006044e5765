/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVL_PLUGIN_H
#define KVL_PLUGIN_H

/*
 * State that the parts of the plug-in share. There is one kvl_plugin per process, because functions
 * of ggml's buffers get nothing but the buffer. Everything here is under its lock.
 */

#include <kvferry/blocks.h>
#include <pthread.h>

#include "card.h"
#include "chains.h"
#include "ggml_abi.h"

enum { KVL_SETTING_TEXT = 640 };

typedef enum kvl_prompts { KVL_PROMPTS_AUTO, KVL_PROMPTS_LLAMA, KVL_PROMPTS_KVFERRY } kvl_prompts;

/** Where tokens are: in the library's pages, or in llama.cpp's memory as well. AUTO and ONE differ
 * in quantized pages, from which llama.cpp gets other numbers back than it wrote. */
typedef enum kvl_tokens_kept { KVL_COPIES_AUTO, KVL_COPIES_ONE, KVL_COPIES_TWO } kvl_tokens_kept;

typedef struct kvl_settings {
    int off;
    kvf_runtime_config runtime; /* threads 0: those of llama.cpp */
    kvf_cache_config cache;     /* policy and memory; geometry is the model's */
    uint64_t host_memory;       /* most bytes of pages; 0 = what there is */
    uint32_t rows;              /* most tokens of a pass that are a step */
    kvl_prompts prompts;
    kvl_tokens_kept copies;
    double log_seconds; /* between summaries; 0 = at the end only */
    uint32_t verify;    /* every N-th step of a layer is compared with llama.cpp's; 0 = none */
} kvl_settings;

/** Why rows went to llama.cpp's kernels: X(name, key of the summary, text). */
#define KVL_REASONS(X)                                                                             \
    X(NO_FLASH, "no_flash", "flash attention is off: add -fa on")                                  \
    X(MASK, "mask", "the mask has values other than 0 and -infinity, or another shape")            \
    X(ALIBI, "alibi", "ALiBi")                                                                     \
    X(MLA, "mla", "keys and values are one tensor (MLA)")                                          \
    X(TYPE, "type", "the type of the cache is none of F16, BF16, Q8_0")                            \
    X(LAYOUT, "layout", "keys, values or queries lie in another way")                              \
    X(GEOMETRY, "geometry", "the library does not have heads of this shape")                       \
    X(MEMORY, "memory", "there is not enough memory")                                              \
    X(ROOM, "room", "more blocks are in use than there is room for")                               \
    X(PARAMS, "params", "the library does not have this scale, cap or sinks")                      \
    X(RANGE, "range", "a number is beyond F16")                                                    \
    X(CARD, "card", "its keys and values are on the card")

#define KVL_REASON(name, key, text) KVL_##name,
typedef enum kvl_reason {
    KVL_BROKEN = -2, /* the library failed, and so does the pass */
    KVL_SERVED = -1,
    KVL_REASONS(KVL_REASON) KVL_REASONS_COUNT
} kvl_reason;
#undef KVL_REASON

/** Counters, which the summary tells. */
typedef struct kvl_counts {
    double served, stock;           /* (layer, token) pairs of steps */
    double prompt, prompt_served;   /* likewise, of prompts: llama.cpp's, and ours */
    double tokens, held;            /* attended, and what a full budget would have; per KV head */
    double hits, misses, bytes;     /* of the library */
    double put, verify, wrong;      /* tokens; rows */
    double worst;                   /* largest difference of those, relative */
    double left[KVL_REASONS_COUNT]; /* whose sum is stock */
} kvl_counts;

typedef struct kvl_cache kvl_cache;

/** The whole system pages of a tensor. */
typedef struct kvl_pages {
    char *first;
    size_t count;
    size_t before;       /* bytes of the tensor in front of the first */
    size_t row;          /* bytes of a cell */
    unsigned char *away; /* [count] whether what belongs there is the library's alone; NULL = no */
} kvl_pages;

/** Keys and values of a layer, as llama.cpp has them. */
struct kvl_layer {
    struct kvl_layer *next;
    struct kvl_layer *sibling; /* in the cache */
    const gg_tensor *k, *v;    /* v: NULL until attention to them was seen */
    uint32_t unattended;       /* rows that were written since somebody attended to them */
    int is_left;               /* their attention is not ours */
    kvl_cache *cache;          /* NULL until attention was seen */
    uint32_t index;            /* of the layer in it */
    uint64_t steps;            /* of verify */
    int stays;                 /* llama.cpp's memory of it is never put away */
    kvl_pages pages[2];        /* of k, of v */
    size_t fresh, back;        /* tokens put, and pages brought back, since pages were put away */
};

/** A row of the latest step: the set of cells that it sees. */
typedef struct kvl_row {
    uint32_t stream, count;
    kvl_chain *chain;
} kvl_row;

typedef struct kvl_shape {
    uint32_t query_heads, kv_heads, head_dim, value_dim;
    uint32_t cells, streams; /* cells of a stream */
    uint32_t is_wide;        /* the library gets tokens in F32 */
    uint32_t is_off_card;    /* its steps run on llama.cpp's card */
} kvl_shape;

/** Memory of a cache whose shape is known. */
typedef struct kvl_plan {
    kvf_blocks_config blocks;
    kvf_blocks_plan memory;
    kvl_chains_config chains;
    uint64_t codes, own; /* bytes: of all layers, and of the plug-in's own arrays */
} kvl_plan;

/** Layers of one shape in a buffer: a kvf_blocks beside llama.cpp's tensors. */
struct kvl_cache {
    kvl_cache *next;
    kvl_shape shape;
    uint32_t layers;
    kvl_layer *members;
    kvl_reason refused; /* KVL_SERVED as long as it is not */
    uint32_t said;      /* bits of reasons */
    int is_lost;        /* tokens that the library alone had cannot be read: every pass fails */
    /* of an open one */
    kvl_plan plan;
    kvf_runtime *runtime;
    kvf_blocks *blocks;
    kvf_stream *stream;
    void *codes;
    kvl_chains *chains; /* NULL = it is not open */
    uint32_t rows_count;
    void *memory;        /* of the arrays that follow, which the device reads, too */
    ptrdiff_t to_device; /* from an address of it to the device's */
    kvl_row *rows;       /* as many as there may be in a step */
    uint64_t *sets;      /* of each, and one more: [cells / 64] */
    int32_t *table;      /* of each: [cells / KVL_BLOCK] */
    int32_t *lengths;
    float *q;
    char *put_k, *put_v; /* of KVL_PUT tokens, as what follows */
    size_t *put_cells;
    int64_t *put_slots;
    int64_t *homes; /* of cells of pages */
};

/** A buffer whose functions we stand in for, and what is known of the tensors in it. */
typedef struct kvl_buffer {
    struct kvl_buffer *next;
    gg_buffer *buffer;
    gg_buffer_i original;
    int is_off_card; /* the host's, instead of the card's */
    kvl_layer *layers;
    kvl_cache *caches;
} kvl_buffer;

struct kvl_plugin {
    pthread_mutex_t lock;
    int is_loaded;
    gg_api gg;
    kvl_settings settings;
    kvl_card card;
    kvf_runtime *runtime; /* on the host */
    int threads;          /* as llama.cpp said last */
    kvl_buffer *buffers;
    kvl_counts counts;
    double told_at; /* the latest summary */
    uint32_t said;  /* bits of reasons, where no cache is known */
    size_t away_at; /* fewest fresh tokens of a layer at which pages are put away */
};

kvl_plugin *kvl_the_plugin(void);

enum {
    KVL_PUT = 256,  /* tokens that are put in a call */
    KVL_AWAY = 64,  /* away_at, but in tests */
    KVL_CHAINS = 16 /* beside those of a step's rows */
};

/** The tensor of llama.cpp's cache under a tensor's views; NULL if it is none.
 * @param kind  'k' or 'v' */
const gg_tensor *kvl_cache_tensor(const gg_tensor *t, char kind);

/* llama_settings.c */

/** @param text   NULL or empty: defaults
 *  @param error  what is wrong, KVL_SETTING_TEXT bytes
 *  @return 1; 0 = the error says why */
int kvl_settings_read(const char *text, kvl_settings *settings, char *error);

/* cell_numbers.c */

/** Whether no finite value would overflow in F16. */
int kvl_fits_f16(const float *x, size_t count);
/** Bytes of a row of a ggml type; 0 = a type, or a length, that is not served. */
size_t kvl_row_bytes(int type, size_t count);
void kvl_row_to_f32(int type, const void *from, float *to, size_t count);
/** A row of a cache as the library gets it: F16 as it is, or @p is_wide, any type in F32.
 * @return 0 if a value overflows in F16 */
int kvl_row_read(int type, const void *from, void *to, uint32_t is_wide, size_t count);
/** Cells that a row of a mask (F16: 0 = seen, -infinity = not) leaves open, as bits.
 * @param count  elements, a multiple of 64
 * @param set    in: a set; out: the mask's
 * @param same   whether both are the same
 * @return how many cells are open; -1 = there is another value: the set is not to be used */
int64_t kvl_open_cells(const uint16_t *mask, size_t count, uint64_t *set, int *same);

/* caches.c */

/** Plan the memory of a cache; nothing is reserved. */
kvf_status kvl_plan_make(kvf_runtime *runtime, const kvl_settings *settings, kvl_cache *cache);

/** A buffer, whose functions are ours from now on. NULL without memory. */
kvl_buffer *kvl_buffer_of(kvl_plugin *p, gg_buffer *buffer);
/** The layer of keys, known from now on, as its buffer is. NULL without memory. */
kvl_layer *kvl_layer_of(kvl_plugin *p, const gg_tensor *keys);
/** The layer of keys or values; NULL = it is not known. */
kvl_layer *kvl_find_layer(const kvl_plugin *p, const gg_tensor *of);
/** Whether a SET_ROWS on a layer lists cells, which are numbered over all streams. */
int kvl_lists_cells(const kvl_layer *layer, const gg_tensor *node);
/** A FLASH_ATTN_EXT on a layer: its cache becomes known. @return KVL_SERVED, or why it is left */
kvl_reason kvl_learn(kvl_plugin *p, kvl_layer *layer, const gg_tensor *node);
/** Open the layer's cache, once. @return KVL_SERVED, or why it is left */
kvl_reason kvl_cache_ready(kvl_plugin *p, kvl_layer *layer);
/** An address of the arrays that the device reads, as the library gets it. */
static inline void *kvl_shared(const kvl_cache *cache, void *at)
{
    return (void *)((uintptr_t)at + (uintptr_t)cache->to_device);
}
/** Close what the library has of it; the next step opens it anew. */
void kvl_cache_reset(kvl_plugin *p, kvl_cache *cache);
/** Cells of a layer, numbered over all streams, were written. */
void kvl_layer_wrote(kvl_layer *layer, size_t first, size_t end);
/** Memory of the host is about to be read or written by others than its CPU: cells in it. */
void kvl_memory_used(const kvl_plugin *p, const void *memory, size_t bytes, int is_written);
/** Bring p->counts up to now. */
void kvl_count_all(kvl_plugin *p);

/* backend.c */

/** The registry that ggml gets: one accelerator device. Static; the same every time. */
gg_registry *kvl_registry(const gg_api *gg);

/* attention.c */

typedef enum kvl_outcome {
    KVL_DONE,
    KVL_VERIFY, /* done, and to be verified */
    KVL_LEFT,
    KVL_UNWRITTEN, /* nothing is done: rows that wait have to be written first */
    KVL_FAILED
} kvl_outcome;
/** FLASH_ATTN_EXT on a cache. @param rows  that wait, for this or another layer; none once done */
kvl_outcome kvl_attend(kvl_plugin *p, kvl_copies *copies, kvl_rows *rows, gg_tensor *node);

/* put_away.c: pages of llama.cpp's cache that the library's pages stand for. */

/** The pages of a layer that is known, which take no memory where they were never written, and
 * whether they may be put away. */
void kvl_pages_learn(const kvl_plugin *p, kvl_layer *layer);
/** Tokens were put: now and then, pages of a layer whose tokens the library has are given back to
 * the system. Whoever touches one of them gets it again. */
void kvl_put_away_some(const kvl_plugin *p, kvl_layer *layer);
/** A reader that is not ours is done: pages that it got are put away again. */
void kvl_put_away_again(kvl_plugin *p, const gg_tensor *of);
/** Bring cells of a layer, numbered over all streams, back. */
void kvl_bring_back(kvl_layer *layer, size_t first, size_t end);
/** Bring a cell back in a layer of a cache, or in all of them: of kvl_chains_config. */
void kvl_bring_cell(void *cache, uint32_t layer, size_t cell);
/** Whether cells of a layer are all put. */
int kvl_cells_are_put(const kvl_layer *layer, const int64_t *cells, uint32_t count);
/** llama.cpp's cells get what the library has of them, once its stream is done; all are put, and
 * there. @return 0 = it failed */
int kvl_cells_give(const kvl_layer *layer, const int64_t *cells, uint32_t count);
/** All memory is there, whatever is in it. */
void kvl_pages_forget(kvl_layer *layer);

/* resident.c */

/** Whole pages are a fault to write. @return 0 = they are not */
int kvl_pages_guard(void *pages, size_t bytes);
/** Whole pages are given back, and a fault to touch. @return 0 = they are as they were */
int kvl_pages_hide(void *pages, size_t bytes);
/** Hidden pages have this content (NULL: zeros), at once for every thread. @return 0 = they have
 * not */
int kvl_pages_show(void *pages, size_t bytes, const void *content);
/** Whether both can be done here. */
int kvl_can_hide(void);
/** Pages of zeros in this memory, which malloc gave, take none until they are written. */
void kvl_give_back_zeros(void *memory, size_t bytes);
/** Zeros everywhere; pages of them take no memory. */
void kvl_clear(void *memory, size_t bytes);

/* say.c */

/** A line on standard error, at once; `kvferry: ` goes before it. */
void kvl_say(const char *format, ...) __attribute__((format(printf, 1, 2)));
/** Count rows that are left to llama.cpp, and say once per cache why. */
void kvl_leave(kvl_plugin *p, kvl_layer *layer, kvl_reason reason, uint64_t rows,
               const char *detail);
/** The line of what was attended, if there was anything. */
void kvl_summary(kvl_plugin *p);

#endif
