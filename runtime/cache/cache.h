/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_CACHE_H
#define KVF_RUNTIME_CACHE_H

/*
 * A cache: settings, sequences (begun, ended, cleared, checked), the order of its calls, and the
 * KV groups that have their pages.
 *
 * A KV group has the pages of layers with equally many retrieval heads: of a cache without a head
 * mask there is one, with all of them. With one there is a KV group for every number r > 0 of
 * retrieval heads that a layer has, and streaming heads live in rings on the device (rings.h). A
 * layer is in one KV group at most, so what the host knows of a row is kept once, by its sequence:
 * lengths, positions and blocks, at the time of enqueueing.
 */

#include <stdatomic.h>

#include "footprint.h"
#include "kv_group.h"

typedef struct kvf_rings kvf_rings;

struct kvf_sequence {
    kvf_cache *cache;
    uint32_t slot;
    uint32_t is_alive;
    uint32_t generation; /* falls with every sequence in this slot: tells faults of older ones */
    kvf_layer *layers;   /* [layers] */
};

/* Where the heads of a layer are. */
typedef struct kvf_layer_group {
    kvf_kv_group *kv_group; /* NULL: all heads stream */
    uint32_t index;         /* of the layer in the KV group */
    const uint32_t *heads;  /* [kv_heads] those of the KV group, then those that stream; NULL = the
                               KV group has all, in order */
} kvf_layer_group;

/* How a layer attends; see kvf_attention_params. */
typedef struct kvf_layer_attention {
    float scale; /* not 0 */
    float cap;   /* 0 = none */
    const float
        *sinks; /* on the device, of the KV group's query heads, then those that stream; or NULL */
    const float *sinks_host; /* the same on the host, as they were given */
} kvf_layer_attention;

/* Sums that only the host knows. */
typedef struct kvf_layer_host_counters {
    uint64_t steps, bytes_to_host, refreshes;
    uint64_t streamed; /* tokens attended by streaming heads */
    uint64_t held;     /* tokens there were, over steps and KV heads */
} kvf_layer_host_counters;

/* Counts and layers of a call of decode before it; see undo.h. */
typedef struct kvf_undo {
    kvf_layer *layers;       /* [sequences_max] */
    kvf_footprint_row *rows; /* [sequences_max] */
    uint64_t entry_steps, device_entry_steps;
    kvf_layer_host_counters counters;
} kvf_undo;

/* Host memory that the device sees: carved twice, from the address of either. */
typedef struct kvf_words {
    uint64_t *faults; /* [sequences_max] */
    uint64_t *stamp;
    float *sinks; /* [query_heads] on their way to the device */
} kvf_words;

/* Where the caller's numbers are, in the element type, where they come in another one:
 * room of the call under way, in device memory. */
typedef struct kvf_input_room {
    char *q, *k, *v; /* [kvf_input_rows] */
} kvf_input_room;

struct kvf_cache {
    kvf_runtime *runtime;
    kvf_context *context;
    kvf_device *device;
    kvf_cache_config config; /* resolved */
    kvf_cache_plan plan;
    char *disk_path;         /* the settings' own */
    uint8_t *head_mask;      /* likewise, or NULL */
    uint32_t *layer_windows; /* likewise */
    size_t frame_bytes;      /* of the largest call; see kvf_calls_plan */

    uint64_t device_beside; /* bytes on the device that its owner has besides */
    char *device_memory[3]; /* what tables are carved from: kv, digest, table */
    kvf_host_memory control_memory;
    char *host_memory;
    kvf_words words, words_device;

    uint32_t kv_group_count;
    kvf_kv_group *kv_groups;
    kvf_layer_group *layer_groups; /* [layers] */
    kvf_rings *rings;              /* of streaming heads, or NULL */

    kvf_sequence *sequences;           /* [sequences_max] */
    kvf_layer *layers;                 /* [sequences_max, layers] */
    kvf_layer **states;                /* [rows] of a step; rows = kvf_rows_max */
    kvf_sequence **row_sequences;      /* [rows] of a call with several tokens of a sequence */
    kvf_layer_host_counters *counters; /* [layers] */
    kvf_layer_attention *attention;    /* [layers] */
    float *sinks;                      /* [layers, query_heads] in device memory, of attention */
    float *sinks_host;                 /* [layers, query_heads] likewise on the host */
    uint64_t attention_changes;        /* each another than the layer had */
    kvf_footprint_meter footprint;
    kvf_undo undo;
    kvf_input_room inputs;

    kvf_order order;
    kvf_recording *recording; /* under way, or NULL */
    kvf_status broken;        /* a call failed half-way */
    atomic_flag in_use;
    atomic_uint users; /* its owner, and pruners, recordings and saves of it */
};

/* Settings and sizes first; the plan follows from them (kvf_calls_plan). *out is to be destroyed
 * even on failure. */
KVF_CHECKED kvf_status kvf_cache_create(kvf_runtime *runtime, const kvf_cache_config *config,
                                        kvf_cache **out);
/* Then every reservation it will ever make, as planned. */
KVF_CHECKED kvf_status kvf_cache_reserve(kvf_cache *cache, kvf_reservation *r);
/* Memory of the device, on demand if the cache's is. */
KVF_CHECKED kvf_status kvf_cache_take_memory(kvf_cache *cache, size_t bytes, void **out);
void kvf_cache_destroy(kvf_cache *cache); /* NULL is fine, and half of a cache */

/* Something was made of it that may be closed after it: it is destroyed with the last of them. */
void kvf_cache_hold(kvf_cache *cache);
void kvf_cache_release(kvf_cache *cache);

/* Which of the KV group's heads this one of the layer is; not below their number: it streams. */
static inline uint32_t kvf_layer_group_head(const kvf_layer_group *at, uint32_t kv_head)
{
    uint32_t head = at->heads ? 0 : kv_head;
    while (at->heads && at->heads[head] != kv_head)
        head++;
    return head;
}

/* The caller's queries and outputs, or keys and values, are wider than the element type. */
static inline bool kvf_has_wide_queries(const kvf_cache_config *c)
{
    return c->tensors != KVF_TENSORS_DTYPE && c->dtype != KVF_FP32;
}

static inline bool kvf_has_wide_keys(const kvf_cache_config *c)
{
    return c->tensors == KVF_TENSORS_FP32 && c->dtype != KVF_FP32;
}

/* Their types. */
static inline kvf_dtype kvf_query_dtype(const kvf_cache_config *c)
{
    return kvf_has_wide_queries(c) ? KVF_FP32 : c->dtype;
}

static inline kvf_dtype kvf_key_dtype(const kvf_cache_config *c)
{
    return kvf_has_wide_keys(c) ? KVF_FP32 : c->dtype;
}

/* Rows that a call hands over at most, but for chunks under block tables of the caller. */
static inline uint32_t kvf_input_rows(const kvf_cache *cache)
{
    const kvf_cache_config *c = &cache->config;
    const bool by_block = cache->kv_group_count && cache->kv_groups[0].dims.by_block;
    const uint32_t scored = c->observe_window ? KVF_OBSERVE_WINDOW_MAX : 0;
    return by_block ? c->sequences_max
                    : kvf_max_u32(kvf_max_u32(c->prefill_chunk_max, kvf_rows_max(c)), scored);
}

/* Some heads have rings and no pages: what needs all tokens of all heads cannot be done. */
static inline bool kvf_has_streaming_heads(const kvf_cache *cache)
{
    return cache->rings != NULL;
}

/* Newest tokens that streaming heads of a layer see. */
static inline uint32_t kvf_streaming_recent(const kvf_cache_config *c, uint32_t layer)
{
    return c->layer_windows ? c->layer_windows[layer] : c->streaming_recent;
}

/* The setting that gives the longest of these, which is streaming_recent once it is resolved. */
static inline const char *kvf_streaming_name(const kvf_cache_config *c)
{
    return c->layer_windows ? "the longest of layer_windows" : "streaming_recent";
}

/* Kinds of KV heads, as kvf_cache_config.head_mask has them. */
enum { KVF_HEAD_STREAMING, KVF_HEAD_HOT, KVF_HEAD_COARSE };

/* Head `head` of a layer's KV group scores centroids first. */
static inline bool kvf_is_coarse(const kvf_cache *cache, uint32_t layer, uint32_t head)
{
    const kvf_cache_config *c = &cache->config;
    const uint32_t *heads = cache->layer_groups[layer].heads;
    return c->head_mask &&
           c->head_mask[(size_t)layer * c->kv_heads + (heads ? heads[head] : head)] ==
               KVF_HEAD_COARSE;
}

static inline bool kvf_has_coarse_heads(const kvf_cache *cache, uint32_t layer)
{
    const kvf_kv_group *kv_group = cache->layer_groups[layer].kv_group;
    for (uint32_t h = 0; kv_group && h < kv_group->config.kv_heads; h++)
        if (kvf_is_coarse(cache, layer, h))
            return true;
    return false;
}

/* The caller's settings, as this library knows them; everything else takes such. */
KVF_CHECKED kvf_status kvf_config_read(kvf_context *context, const kvf_cache_config *config,
                                       kvf_cache_config *own);

/* Settings -> sizes. `resolved` gets the defaults. */
KVF_CHECKED kvf_status kvf_config_resolve(kvf_runtime *runtime, const kvf_cache_config *config,
                                          kvf_cache_config *resolved, kvf_dims *dims);
/* The storage format of kvf_cache_config.pages. */
const char *kvf_pages_name(kvf_pages pages);
/* Some head of the mask, in any layer, has this value. */
bool kvf_config_has_heads(const kvf_cache_config *config, uint8_t kind);

/* Every layer gets the one that settings say. */
void kvf_attention_params_reset(kvf_cache *cache);

/* `layer` was checked; on failure it keeps what it has. With tokens it takes no others. */
KVF_CHECKED kvf_status kvf_attention_params_set(kvf_cache *cache, uint32_t layer,
                                                const kvf_attention_params *params);

/* Places, KV groups and rings, without memory for pages. `config` is as the user gave it, `dims`
 * are of the cache's settings. */
KVF_CHECKED kvf_status kvf_kv_groups_create(kvf_cache *cache, const kvf_cache_config *config,
                                            const kvf_dims *dims);
void kvf_kv_groups_destroy(kvf_cache *cache); /* half of them is fine */

/*
 * Statistics of a cache, in all and of one layer.
 *
 * Where kernels count in device memory, counts are brought to the host and sent back. The caller's
 * streams are waited for; a stream that is being recorded cannot be, and then nothing is brought.
 */

void kvf_stats_read(const kvf_cache *cache, kvf_stats *stats);
void kvf_stats_read_layer(const kvf_cache *cache, uint32_t layer, kvf_stats *stats);
void kvf_stats_reset(kvf_cache *cache);
/* As at open: nothing was counted, and what is on the device is not looked at. After a failure the
 * device may still be told so while kernels count. */
KVF_CHECKED kvf_status kvf_stats_clear(kvf_cache *cache);

/*
 * Sequences: begun, ended, cleared, checked.
 */

/* KVF_FULL if none is free. */
KVF_CHECKED kvf_status kvf_sequence_begin(kvf_cache *cache, kvf_sequence **out);
void kvf_sequence_end(kvf_sequence *sequence);
/* The sequence is empty again, as if it had just begun; later calls overwrite what they need in the
 * cache's order. */
KVF_CHECKED kvf_status kvf_sequence_clear(kvf_cache *cache, kvf_sequence *sequence);

/* One layer is empty again, likewise. */
void kvf_layer_clear(kvf_layer *layer);

/* `to` holds what `from` does, in its own arrays; blocks are not copied. */
void kvf_layer_copy(kvf_layer *to, const kvf_layer *from);

KVF_CHECKED kvf_status kvf_sequence_check(kvf_cache *cache, const kvf_sequence *sequence);
KVF_CHECKED kvf_status kvf_layer_check(kvf_cache *cache, uint32_t layer);
/* Whether a key or value was not finite, and the refusal of what comes after it. */
bool kvf_sequence_fault(const kvf_sequence *sequence, uint32_t *layer, uint32_t *token);
KVF_CHECKED kvf_status kvf_sequence_fail(kvf_cache *cache, uint32_t layer, uint32_t token);

#endif
