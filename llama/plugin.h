/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVL_PLUGIN_H
#define KVL_PLUGIN_H

/*
 * State that the parts of the plug-in share: ggml of the process, settings, the caches of llama.cpp
 * that were seen, and what was counted. There is one per process, because functions of ggml's
 * buffers get nothing but the buffer. Everything here is under its lock.
 */

#include <pthread.h>

#include "chains.h"
#include "ggml_abi.h"
#include "llama_settings.h"

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
    X(PARAMS, "params", "scale, cap or sinks of a layer changed")                                  \
    X(RANGE, "range", "a number is beyond F16")

#define KVL_REASON(name, key, text) KVL_##name,
typedef enum kvl_reason { KVL_SERVED = -1, KVL_REASONS(KVL_REASON) KVL_REASONS_COUNT } kvl_reason;
#undef KVL_REASON

typedef struct kvl_counts {
    uint64_t served, stock[KVL_REASONS_COUNT]; /* (layer, token) pairs of steps */
    uint64_t prompt, prompt_served;            /* likewise, of prompts */
    uint64_t put, verified, wrong;
    double worst; /* largest difference to the plain loop where all is attended, relative */
    double attended, held;
    uint64_t hits, misses, bytes; /* of caches that were closed */
    uint64_t forks, dropped;
} kvl_counts;

typedef struct kvl_layer {
    const gg_tensor *k, *v; /* llama.cpp's, as long as its buffer lives */
    int has_params, has_sinks;
    float scale, cap;
    float *sinks;   /* [query_heads] */
    uint64_t steps; /* of verify */
} kvl_layer;

/** A row of the latest step: the set of cells that it sees. */
typedef struct kvl_row {
    uint32_t stream, count;
    kvl_chain *chain;
} kvl_row;

typedef enum kvl_state { KVL_LEARNING, KVL_OPEN, KVL_REFUSED } kvl_state;

/** Layers of one buffer and one geometry: a kvf_blocks beside llama.cpp's tensors. */
typedef struct kvl_cache {
    gg_buffer *buffer;
    uint32_t query_heads, kv_heads, head_dim, value_dim;
    uint32_t cells, streams;
    uint32_t layers_count, layers_room;
    kvl_layer *layers;
    kvl_state state;
    kvl_reason refused; /* of REFUSED */
    uint32_t said;      /* bits of reasons */
    /* open */
    kvf_blocks *blocks;
    kvf_stream *stream;
    void *codes;
    kvl_chains *chains;
    uint32_t rows_max, table_stride, budget;
    char *scratch; /* of arrays from rows to stale */
    kvl_row *rows; /* [rows_max] */
    uint32_t rows_count;
    uint64_t *sets; /* [rows_max][cells / 64] */
    int32_t *table; /* [rows_max][table_stride] */
    int32_t *lengths;
    float *q, *out;          /* [rows_max] */
    uint16_t *put_k, *put_v; /* [KVL_PUT] */
    int64_t *put_slots;      /* likewise */
    kvl_stale *stale;        /* [stale_room] */
    uint32_t stale_room;
    /* of a prompt */
    size_t prompt_tokens; /* room */
    float *prompt_q, *prompt_out;
    uint32_t *prompt_cells;
} kvl_cache;

/** A buffer whose functions we stand in for. */
typedef struct kvl_hook {
    gg_buffer *buffer;
    gg_buffer_i original;
    struct kvl_key {
        const gg_tensor *k;
        uint32_t rows; /* that were written since it was attended to */
        int left;      /* its attention is not ours */
    } * keys;          /* caches of keys in it */
    uint32_t keys_count, keys_room;
} kvl_hook;

typedef struct kvl_plugin {
    pthread_mutex_t lock;
    int is_loaded;
    gg_api gg;
    kvl_settings settings;
    kvf_runtime *runtime;
    int threads; /* as llama.cpp said last */
    kvl_cache **caches;
    uint32_t caches_count, caches_room;
    kvl_hook **hooks;
    uint32_t hooks_count, hooks_room;
    kvl_counts counts;
    uint64_t said_served, said_stock; /* what the latest summary told */
    double said_at;
    uint32_t said; /* bits of reasons, where no cache is known */
    int has_said_flash;
    int no_hooks, no_counts; /* for controls of tests */
} kvl_plugin;

/** The plug-in of this process. */
kvl_plugin *kvl_the_plugin(void);

enum {
    KVL_PUT = 256,  /* tokens that are put in a call */
    KVL_CHAINS = 16 /* beside those of a step's rows */
};

/** The tensor of llama.cpp's cache under a tensor's views; NULL if it is none.
 * @param kind  'k' or 'v' */
const gg_tensor *kvl_cache_tensor(const gg_tensor *t, char kind);

/* caches.c: what is seen of llama.cpp's caches, and their life. */

/** Memory of a cache whose shape is known; nothing is reserved. */
typedef struct kvl_plan {
    kvf_blocks_config blocks;
    kvf_blocks_plan memory;
    kvl_chains_config chains;
    uint64_t codes, own; /* bytes: of all layers, and of the plug-in's own arrays */
} kvl_plan;
kvf_status kvl_plan_make(kvf_runtime *runtime, const kvl_settings *settings, kvl_cache *shape,
                         kvl_plan *plan, kvf_error *error);

/** A FLASH_ATTN_EXT on a cache: its layer becomes known. @return KVL_SERVED, or why it is left */
kvl_reason kvl_learn(kvl_plugin *p, const gg_tensor *node);
/** Stand in for the functions of a cache tensor's buffer. NULL without memory. */
kvl_hook *kvl_hook_buffer(kvl_plugin *p, gg_buffer *buffer);
struct kvl_key *kvl_key_of(kvl_plugin *p, const gg_tensor *k);
/** The open or learnt cache of a tensor of keys or values. */
kvl_cache *kvl_find_cache(kvl_plugin *p, const gg_tensor *of, uint32_t *layer);
/** Open it, once. @return KVL_SERVED, or why it is left */
kvl_reason kvl_cache_ready(kvl_plugin *p, kvl_cache *cache);
/** Close what the library has of it; the next step opens it anew. */
void kvl_cache_reset(kvl_plugin *p, kvl_cache *cache);
/** Every cell of a layer was written. */
void kvl_layer_wrote(kvl_cache *cache, uint32_t layer);
/** Give ggml's buffers their own functions back, and close everything. */
void kvl_close_all(kvl_plugin *p);
void kvl_counts_add(const kvl_plugin *p, kvl_counts *counts);

/* attention.c */

typedef enum kvl_outcome { KVL_DONE, KVL_LEFT, KVL_FAILED } kvl_outcome;
/** FLASH_ATTN_EXT on a cache: done, left to llama.cpp, or failed. */
kvl_outcome kvl_attend(kvl_plugin *p, gg_tensor *node);

/* plain.c */

/** The largest difference of row @p token of stream @p s of an attention's output to a plain loop
 * over llama.cpp's tensors, relative to the largest value. -1 without memory. */
double kvl_plain_difference(const gg_tensor *node, int64_t token, int64_t s);

/* say.c */

/** A line on standard error, at once; `kvferry: ` goes before it. */
void kvl_say(const char *format, ...) __attribute__((format(printf, 1, 2)));
/** A line to whoever gave KVFERRY_LLAMA_REPORT, once. */
void kvl_report(const char *format, ...) __attribute__((format(printf, 1, 2)));
/** Say once per cache that rows are left to llama.cpp, and count them. */
void kvl_leave(kvl_plugin *p, kvl_cache *cache, kvl_reason reason, const gg_tensor *k,
               uint64_t rows, const char *detail);
/** The line of what was attended; at @p end only if there is something new. */
void kvl_summary(kvl_plugin *p, int end);
double kvl_now(void);

#endif
