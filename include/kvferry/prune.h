/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVFERRY_PRUNE_H
#define KVFERRY_PRUNE_H

/**
 * @file
 * Prefill pruning: which tokens of a prompt enter the cache, and which go on to deeper layers.
 *
 * A policy is a pure function. When a layer has attended over the whole prompt, the policy gets the
 * attention of the newest queries to every token. It returns the tokens that each KV head keeps,
 * those that deeper layers get, and whether to start over. Tokens that are not kept are deleted
 * (EVICT, as published), or remain in host pages, from which steps can fetch them, while the kept
 * tokens become the static set (OFFLOAD). With COMPLETE deeper layers get the other tokens later.
 *
 *     kvf_prune_config pc;
 *     kvf_prune_config_init(&pc, kvf_prune_policy_find("fastkv"));
 *     cc.observe_window = pc.settings.window;        // before kvf_cache_open
 *     kvf_prune_open(cache, &pc, &prune, &error);
 *
 *     kvf_prune_begin(prune, sequence, tokens);            // all of the prompt, the last included
 *     for each layer:
 *         for each chunk:
 *             kvf_prefill(cache, &chunk, stream);
 *             kvf_prune_append(prune, &chunk, stream);
 *         kvf_prune_layer(prune, sequence, layer, stream, &result);
 *         gather hidden states by result.propagate, or start over if result.restart;
 *         the rest of the layer (MLP)
 *     the first token of the answer follows from the last token's hidden state;
 *     kvf_decode for the tokens after it
 *
 * The observation window is the end of the prompt, so the prompt's last token must be in the
 * prefill. If it were held back for a first decode step, it would not take part in the choice, and
 * would attend to a cache that was chosen without it. Later questions about the prompt are not in
 * the window: for these keep more, or use OFFLOAD.
 *
 * If pages are quantized (kvf_cache_config.pages), policies score the quantized keys that a step
 * would attend to. With EVICT a kept token that was quantized and is sealed again keeps its bytes.
 * One that returns to the local window or the sink is exact if its block was sealed last, else
 * dequantized; it is quantized again when it leaves the window.
 *
 * Indexes count the tokens of that layer and ascend. Ties go to the lower index. A share of n
 * tokens is floor(n * share).
 */

#include <kvferry/kvferry.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KVF_POOL_LIST(X)                                                                           \
    X(KVF_POOL_MAX, 0, "max", "maximum; padded with -infinity")                                    \
    X(KVF_POOL_AVERAGE, 1, "avg", "mean; padded with zeros, always divided by the width")

typedef enum kvf_pool_kind { KVF_POOL_LIST(KVF_ENUMERATOR) } kvf_pool_kind;

#define KVF_RETENTION_LIST(X)                                                                      \
    X(KVF_RETENTION_OFFLOAD, 0, "offload",                                                         \
      "the rest stays in host pages; kept tokens seed the static set")                             \
    X(KVF_RETENTION_EVICT, 1, "evict", "what is not kept is deleted")                              \
    X(KVF_RETENTION_COMPLETE, 2, "complete",                                                       \
      "as offload, and deeper layers get later what they did not get at first")

typedef enum kvf_retention { KVF_RETENTION_LIST(KVF_ENUMERATOR) } kvf_retention;

/** Chunked prefill: what happens after each chunk (PruLong, section on chunked eviction). A policy
 * that scores compresses the chunk alone: floor(tokens x keep) of it stay, and what earlier chunks
 * kept is never scored again. A policy that measures nothing (streaming) decides over all that is
 * held, with its share of all tokens so far. */
#define KVF_EVICTION_LIST(X)                                                                       \
    X(KVF_EVICTION_NONE, 0, "none", "layers are pruned once, after the whole prompt")              \
    X(KVF_EVICTION_NAIVE, 1, "naive",                                                              \
      "its own last queries score a chunk, and their tokens are kept")                             \
    X(KVF_EVICTION_PATCHED, 2, "patched",                                                          \
      "the prompt's last tokens follow every chunk, score it, are dropped")

typedef enum kvf_eviction { KVF_EVICTION_LIST(KVF_ENUMERATOR) } kvf_eviction;

/** The source of StructKV's pivot. */
#define KVF_PIVOT_LIST(X)                                                                          \
    X(KVF_PIVOT_ONLINE, 0, "online", "the layer where attention changes, found during prefill")    \
    X(KVF_PIVOT_CALIBRATED, 1, "calibrated", "`layer`, measured on other text before")             \
    X(KVF_PIVOT_FIXED, 2, "fixed", "`layer`")

typedef enum kvf_pivot { KVF_PIVOT_LIST(KVF_ENUMERATOR) } kvf_pivot;

#define KVF_PRUNE_LAYER_AUTO UINT32_MAX

/** Settings of a policy. A policy ignores fields that it does not use. */
typedef struct kvf_prune_settings {
    size_t size;          /**< set by init */
    float keep;           /**< share of the prompt that a KV head keeps, with the observation window
                             (structkv: without it, here and in the next three); (0, 1] */
    float propagate;      /**< share that deeper layers get, with the observation window; (0, 1] */
    uint32_t keep_tokens; /**< instead of the share; 0 = the share counts */
    uint32_t propagate_tokens; /**< as keep_tokens */
    uint32_t layer;            /**< propagation, filter or pivot layer; AUTO = the policy's own */
    uint32_t window; /**< W: the observation window, newest tokens whose queries score the others
                        and which are always kept */
    kvf_pool_kind pool;
    uint32_t pool_width;           /**< odd; 1 = no pooling */
    kvf_group_reduce group_reduce; /**< over the query heads of a KV head, after pooling */
    uint32_t window_mean;          /**< 1 = mean over the window's queries, 0 = sum */
    uint32_t sink_tokens;          /**< streaming, h2o */
    float recent_share;            /**< h2o: of what is kept */
    uint32_t beta;                 /**< pyramidkv */
    float decay;                   /**< structkv: lambda of the centrality */
    float weights[3];              /**< structkv: of entropy, sparsity, variance */
    float mass_share;              /**< structkv: sparsity is the mass on this share of tokens */
    kvf_pivot pivot;               /**< structkv; CALIBRATED and FIXED take `layer` */
    uint32_t block_tokens;         /**< structkv: keep and propagate whole blocks; 0 = tokens */
    uint32_t layer_min;            /**< asl: first layer that may be chosen; AUTO = layers / 3.
                                      structkv, online: scores of earlier layers do not compete */
    uint32_t layer_max;            /**< structkv, asl: chosen at the latest; AUTO = layers - 2, but
                                      for asl as published: none in one pass, the last in two */
    uint32_t layers_observed;      /**< asl: L_obs; 0 = a third of the layers, 2 to 8 */
    float threshold;               /**< asl: tau */
    uint32_t two_pass;             /**< asl: run again from layer 0 with the propagated tokens */
} kvf_prune_settings;

/** Measurements that a policy needs at a layer. */
typedef enum kvf_prune_needs {
    KVF_PRUNE_NOTHING = 0,
    KVF_PRUNE_SCORES = 1u << 0,   /**< attention of the window, pooled and reduced */
    KVF_PRUNE_PROFILE = 1u << 1,  /**< entropy, sparsity and variance per query head */
    KVF_PRUNE_LOGITS = 1u << 2,   /**< raw q.k of the last query instead, unscaled, not pooled */
    KVF_PRUNE_SUMS = 1u << 3,     /**< attention summed over all queries of the prompt instead */
    KVF_PRUNE_WEIGHTED = 1u << 4, /**< with SCORES: query w of the window counts (w + 1) / W */
    KVF_PRUNE_ALL = (1u << 5) - 1,
} kvf_prune_needs;

/** Shape of one query head's attention, averaged over the window, renormalised without it. */
typedef struct kvf_prune_profile {
    float entropy;  /**< - sum a ln a */
    float mass;     /**< on the top floor(mass_share * n) tokens */
    float variance; /**< of a over tokens */
} kvf_prune_profile;

/** A policy's view of one layer of one sequence. */
typedef struct kvf_prune_view {
    const kvf_prune_settings *settings;
    void *user;  /**< kvf_prune_policy.user */
    void *state; /**< of the sequence, zeroed when its prompt begins; NULL without state_bytes */
    uint32_t layer, layers;
    uint32_t kv_heads, query_heads;
    uint32_t tokens;     /**< that this layer holds */
    uint32_t prompt;     /**< tokens of the prompt before anything was propagated */
    uint32_t pass;       /**< 0; 1 after a restart */
    uint32_t window;     /**< settings->window, at most tokens */
    uint32_t candidates; /**< columns of scores: tokens - window with SCORES, tokens with LOGITS and
                              SUMS, 0 if nothing was measured */
    const float *scores; /**< [kv_heads, candidates] */
    const kvf_prune_profile *profile; /**< [query_heads], or NULL */
    const uint32_t *positions;        /**< [tokens] true positions */
} kvf_prune_view;

/** A policy's answer; preset to keep all and propagate all. */
typedef struct kvf_prune_answer {
    uint32_t *keep;           /**< [kv_heads, keep_count] ascending, with the observation window */
    uint32_t keep_count;      /**< per KV head; view->tokens = all, `keep` is not read then */
    uint32_t *propagate;      /**< [propagate_count] ascending */
    uint32_t propagate_count; /**< view->tokens = all, `propagate` is not read then */
    uint32_t
        restart; /**< 1 = start over at layer 0 with tokens `propagate` at positions 0, 1, ... */
    uint32_t
        is_chosen;  /**< 1 = this is the layer that the policy chose (filter, pivot), for stats */
    double measure; /**< by which a layer is chosen, for kvf_prune_measures; NaN, the preset, =
                       nothing was measured */
} kvf_prune_answer;

/** Fixed while a pruner is open. */
typedef struct kvf_prune_shape {
    uint32_t layers, kv_heads, query_heads, tokens_max;
} kvf_prune_shape;

/** How far a policy reaches beyond the tokens that a layer keeps. */
typedef enum kvf_prune_reach {
    KVF_PRUNE_REACH_LAYER,     /**< nothing */
    KVF_PRUNE_REACH_PROPAGATE, /**< hands fewer tokens to deeper layers */
    KVF_PRUNE_REACH_RESTART,   /**< starts over with fewer tokens */
} kvf_prune_reach;

/** A policy: what it needs, and how it decides. All functions are pure: the same input gives the
 * same answer. They must not call the library. Every field but size, name and decide may be 0
 * or NULL. */
typedef struct kvf_prune_policy {
    size_t size;        /**< sizeof(kvf_prune_policy) */
    const char *name;   /**< as in --prune */
    const char *source; /**< the paper, for people */
    /** The settings that it looks at, separated by spaces, with its defaults where they are not the
     * common ones: "keep=0.1 keep_tokens window=32". NULL = any, with the common defaults. */
    const char *settings;
    kvf_prune_reach reach; /**< chunked eviction refuses more than LAYER */
    uint32_t needs;        /**< OR of kvf_prune_needs, the same for every layer */
    /** Instead of `needs`, if they differ from layer to layer. Measurements and the number of
     * tokens are not in the view yet; before a prompt the state is zero. */
    uint32_t (*needs_at)(const kvf_prune_view *view);
    /** Returns NULL, or writes what is wrong (field, value, fix) to text and returns it. Common
     * ranges were checked before. */
    const char *(*check)(const kvf_prune_settings *settings, const kvf_prune_shape *shape,
                         char *text, size_t capacity);
    /** Bytes of state per sequence. */
    size_t (*state_bytes)(const kvf_prune_settings *settings, const kvf_prune_shape *shape);
    void (*decide)(const kvf_prune_view *view, kvf_prune_answer *answer);
    void *user; /**< for view->user */
} kvf_prune_policy;

/** The library's own policy of this name, such as "fastkv"; NULL if there is none. Thread: any. */
KVF_API const kvf_prune_policy *kvf_prune_policy_find(const char *name);

/** The library's own policies, 0, 1, ...; NULL after the last. Thread: any. */
KVF_API const kvf_prune_policy *kvf_prune_policy_at(uint32_t index);

/** 1 if the policy looks at the field @p setting of kvf_prune_settings. Thread: any. */
KVF_API int kvf_prune_policy_takes(const kvf_prune_policy *policy, const char *setting);

typedef struct kvf_prune_config {
    size_t size; /**< set by init */
    const kvf_prune_policy
        *policy;             /**< one of the library's, or the embedder's; borrowed until close */
    kvf_retention retention; /**< default OFFLOAD */
    kvf_eviction eviction;   /**< default NONE */
    uint32_t chunk_queries;  /**< chunked eviction scores with so many queries; default 64 */
    uint32_t reserved[5];    /**< 0; `settings` stay the last */
    kvf_prune_settings settings;
} kvf_prune_config;

/** Defaults for a policy, @p policy NULL = full. */
KVF_API void kvf_prune_config_init_sized(kvf_prune_config *config, const kvf_prune_policy *policy,
                                         size_t size);
static inline void kvf_prune_config_init(kvf_prune_config *config, const kvf_prune_policy *policy)
{
    kvf_prune_config_init_sized(config, policy, sizeof *config);
}

/** Check without a cache. @return KVF_OK; KVF_INVALID names field, value and fix. Thread: any. */
KVF_API KVF_CHECKED kvf_status kvf_prune_config_check_sized(const kvf_prune_config *config,
                                                            const kvf_prune_shape *shape,
                                                            size_t size, kvf_error *error);
static inline KVF_CHECKED kvf_status kvf_prune_config_check(const kvf_prune_config *config,
                                                            const kvf_prune_shape *shape,
                                                            kvf_error *error)
{
    return kvf_prune_config_check_sized(config, shape, sizeof *shape, error);
}

typedef struct kvf_prune kvf_prune;

/** Memory that a pruner reserves. */
typedef struct kvf_prune_plan {
    uint64_t device_bytes;
    uint64_t host_bytes; /**< pinned copies, choices, state */
} kvf_prune_plan;

/**
 * Check a configuration and compute its memory without reserving any, for a cache that would be
 * opened with @p cache_config.
 * @return KVF_OK; KVF_INVALID names the field; KVF_UNSUPPORTED with streaming heads;
 *         KVF_OUT_OF_MEMORY
 *
 * Thread: any.
 */
KVF_API KVF_CHECKED kvf_status kvf_prune_plan_make_sized(kvf_runtime *runtime,
                                                         const kvf_cache_config *cache_config,
                                                         const kvf_prune_config *config,
                                                         kvf_prune_plan *plan, size_t size,
                                                         kvf_error *error);
static inline KVF_CHECKED kvf_status kvf_prune_plan_make(kvf_runtime *runtime,
                                                         const kvf_cache_config *cache_config,
                                                         const kvf_prune_config *config,
                                                         kvf_prune_plan *plan, kvf_error *error)
{
    return kvf_prune_plan_make_sized(runtime, cache_config, config, plan, sizeof *plan, error);
}

/**
 * Open a pruner for a cache. Reserves all it will use, for as many sequences as the cache holds.
 *
 * The cache's observe_window must be at least settings.window (chunk_queries with chunked
 * eviction).
 * @return KVF_OK; KVF_INVALID names the field; KVF_UNSUPPORTED with streaming heads;
 *         KVF_OUT_OF_MEMORY, KVF_OUT_OF_DEVICE_MEMORY
 */
KVF_API KVF_CHECKED kvf_status kvf_prune_open(kvf_cache *cache, const kvf_prune_config *config,
                                              kvf_prune **out, kvf_error *error);
/** Close it before its cache, after its streams were waited for. */
KVF_API void kvf_prune_close(kvf_prune *prune);
/** The settings in force. Borrowed. */
KVF_API const kvf_prune_config *kvf_prune_config_get(const kvf_prune *prune);

/** A prompt of @p tokens, its last one included, begins in an empty sequence. Sequences at
 * different layers may be under way at once. @return KVF_INVALID if the window is longer than the
 * prompt, or the sequence not empty */
KVF_API KVF_CHECKED kvf_status kvf_prune_begin(kvf_prune *prune, kvf_sequence *sequence,
                                               uint32_t tokens);

/** After each kvf_prefill of the prompt, with the same arguments. Enqueues what a policy that looks
 * at all queries needs, else does nothing. */
KVF_API KVF_CHECKED kvf_status kvf_prune_append_sized(kvf_prune *prune,
                                                      const kvf_prefill_args *args, size_t size,
                                                      kvf_stream *stream);
static inline KVF_CHECKED kvf_status kvf_prune_append(kvf_prune *prune,
                                                      const kvf_prefill_args *args,
                                                      kvf_stream *stream)
{
    return kvf_prune_append_sized(prune, args, sizeof *args, stream);
}

typedef struct kvf_prune_result {
    uint32_t keep_count; /**< tokens that a KV head of this layer kept */
    const uint32_t
        *propagate; /**< [propagate_count] indexes, borrowed until the next call; NULL = all */
    uint32_t propagate_count;
    uint32_t restart; /**< 1 = the sequence is empty again: start over with `propagate` */
} kvf_prune_result;

/**
 * A layer holds the whole prompt: measure, decide, and keep.
 *
 * @return KVF_OK; errors as kvf_prefill. After an error the sequence can only be destroyed.
 *
 * Stream: waits for @p stream where something was measured or not all tokens go on; else it only
 * enqueues, and what kvf_prefill was given must stay valid as there.
 */
KVF_API KVF_CHECKED kvf_status kvf_prune_layer_sized(kvf_prune *prune, kvf_sequence *sequence,
                                                     uint32_t layer, kvf_stream *stream,
                                                     kvf_prune_result *result, size_t size);
static inline KVF_CHECKED kvf_status kvf_prune_layer(kvf_prune *prune, kvf_sequence *sequence,
                                                     uint32_t layer, kvf_stream *stream,
                                                     kvf_prune_result *result)
{
    return kvf_prune_layer_sized(prune, sequence, layer, stream, result, sizeof *result);
}

/**
 * Chunked eviction: a layer holds what was kept of earlier chunks, then @p tokens of this chunk,
 * then @p patch tokens of the prompt's end (PATCHED, not the last chunk) which are dropped again.
 * Waits for @p stream. Every layer gets a chunk before the next one begins. The patch takes the
 * positions right after the chunk, which the next chunk uses again.
 *
 * @param patch  chunk_queries with PATCHED in every chunk but the last, else 0
 * @return KVF_OK; KVF_INVALID with nothing changed if this is not the chunk that comes next; else
 *         errors as kvf_prefill, a share that keeps less than the chunk's own queries or none, a
 *         policy that looks at more than scores or propagates (KVF_UNSUPPORTED): then the sequence
 *         can only be destroyed
 */
KVF_API KVF_CHECKED kvf_status kvf_prune_chunk(kvf_prune *prune, kvf_sequence *sequence,
                                               uint32_t layer, uint32_t tokens, uint32_t patch,
                                               kvf_stream *stream);

/** Totals of a pruner. Times count at once, the rest when the last layer of a prompt is done. Read
 * them after kvf_stream_wait. */
typedef struct kvf_prune_stats {
    uint64_t prompts;
    uint64_t tokens_computed; /**< summed over layers and passes */
    uint64_t tokens_full;     /**< the same without pruning: prompt tokens times layers */
    uint64_t kept;            /**< summed over layers: tokens per KV head */
    uint32_t chosen_layer;    /**< of the last prompt; KVF_PRUNE_LAYER_AUTO = none was */
    uint64_t observe_ns;      /**< measuring, waits for the device included */
    uint64_t decide_ns;       /**< in the policy */
    uint64_t retain_ns;       /**< seeding or evicting */
} kvf_prune_stats;

KVF_API void kvf_prune_stats_get_sized(const kvf_prune *prune, kvf_prune_stats *stats, size_t size);
static inline void kvf_prune_stats_get(const kvf_prune *prune, kvf_prune_stats *stats)
{
    kvf_prune_stats_get_sized(prune, stats, sizeof *stats);
}

/** Measures by which a policy chooses a layer, by layer, in the latest prompt: asl's relative
 * variance of ranks. NaN where there was none. Read it after kvf_stream_wait.
 * @param measures  receives [count], at most as many as there are layers */
KVF_API void kvf_prune_measures(const kvf_prune *prune, double *measures, uint32_t count);

/* ---- completing ---- */

/*
 * The first token early, and nothing lost: the layers after the pivot get few tokens so that the
 * answer begins, and the other tokens later. The pruner is opened with COMPLETE, so that the layers
 * up to the pivot lose nothing. At the pivot, the first layer that propagates fewer tokens, the
 * caller stores the hidden states of all tokens:
 *
 *     kvf_prune_layer(prune, sequence, layer, stream, &result);
 *     if (result.propagate && !has_pivot)         // the pivot
 *         kvf_hidden_put(hidden, 0, tokens, states, stream); has_pivot = 1; pivot = layer;
 *     ...
 *     answer: kvf_decode                          // with what was pruned
 *     kvf_complete_begin(cache, sequence, pivot + 1, tokens, stream, &whole);
 *     while there is time, for each layer after the pivot, for each chunk of all tokens:
 *         kvf_hidden_get(hidden, first, count, states, stream);
 *         the MLP of the layer before; queries, keys, values
 *         kvf_prefill(cache, &chunk of whole, stream);
 *         the rest of attention; kvf_hidden_put(hidden, first, count, states, stream);
 *     for each layer: kvf_prefill of whole with the tokens that were decoded meanwhile
 *     kvf_complete_end(cache, sequence, whole, stream);
 *
 * Every chunk gives the bits of an unpruned prefill that is cut in the same places. So at the end
 * the sequence is the same as after an unpruned prefill of the prompt and of the tokens that were
 * decoded meanwhile. Until then it can be decoded, cut, forked, saved and destroyed as any other.
 */

/**
 * Make the completed sequence of a pruned one: the tokens at positions below @p tokens in layers
 * below @p first_layer, shared with it as by a fork, and nothing after them. It is a sequence like
 * any other; destroy it to give up.
 *
 * @param whole  receives the handle; NULL on failure
 * @return KVF_OK; KVF_INVALID if a layer below first_layer lacks a token; as kvf_sequence_fork and
 *         kvf_sequence_truncate
 *
 * Stream: enqueues; does not wait.
 */
KVF_API KVF_CHECKED kvf_status kvf_complete_begin(kvf_cache *cache, kvf_sequence *sequence,
                                                  uint32_t first_layer, uint32_t tokens,
                                                  kvf_stream *stream, kvf_sequence **whole);

/**
 * The sequence continues completed, under the same handle. @p whole and the pruned content are
 * destroyed. Recordings of the sequence cannot be replayed any more.
 *
 * All layers of @p whole hold as many tokens as the sequence had positions. If the sequence was cut
 * to fewer tokens than the prompt's, cut @p whole as well, before other tokens come.
 * @return KVF_OK; KVF_INVALID with nothing changed if a layer is not whole; KVF_NOT_FINITE if
 *         @p whole got a NaN: destroy it, the sequence is as it was
 *
 * Stream: waits for it.
 */
KVF_API KVF_CHECKED kvf_status kvf_complete_end(kvf_cache *cache, kvf_sequence *sequence,
                                                kvf_sequence *whole, kvf_stream *stream);

/** Hidden states that wait, one per token: in host memory, or in a file. */
typedef struct kvf_hidden kvf_hidden;

/** Memory that hidden states reserve. */
typedef struct kvf_hidden_plan {
    uint64_t host_bytes; /**< all states, or the buffer of a file: 4 MiB, at least one state */
    uint64_t disk_bytes; /**< the file; 0 = there is none */
} kvf_hidden_plan;

/** Memory that kvf_hidden_open would reserve. Thread: any, a pure function of numbers. */
KVF_API void kvf_hidden_plan_make_sized(uint64_t state_bytes, uint32_t states_max, int on_disk,
                                        kvf_hidden_plan *plan, size_t size);
static inline void kvf_hidden_plan_make(uint64_t state_bytes, uint32_t states_max, int on_disk,
                                        kvf_hidden_plan *plan)
{
    kvf_hidden_plan_make_sized(state_bytes, states_max, on_disk, plan, sizeof *plan);
}

/**
 * Room for @p states_max hidden states of @p state_bytes each.
 *
 * @param disk_path  folder of a private file (mode 0600, without a name, gone on close), such as
 *                   the disk_path of the cache; NULL = all states are in memory. Its room is
 *                   reserved now
 * @return KVF_OK; KVF_INVALID; KVF_SYSTEM with errno, if the file cannot be made or there is no
 *         room for it; KVF_OUT_OF_MEMORY, KVF_PIN_FAILED
 */
KVF_API KVF_CHECKED kvf_status kvf_hidden_open(kvf_runtime *runtime, uint64_t state_bytes,
                                               uint32_t states_max, const char *disk_path,
                                               kvf_hidden **out);
/** After the streams that used it were waited for. NULL is fine. */
KVF_API void kvf_hidden_close(kvf_hidden *hidden);

/**
 * Store hidden states first ... first + count - 1. @p states is device memory.
 *
 * @return KVF_OK; KVF_INVALID; KVF_SYSTEM with errno if the file cannot be written: these states
 *         are lost, and the sequence stays pruned
 *
 * Stream: enqueues; with a file it waits. Thread: one at a time.
 */
KVF_API KVF_CHECKED kvf_status kvf_hidden_put(kvf_hidden *hidden, uint32_t first, uint32_t count,
                                              const void *states, kvf_stream *stream);
/** Bring them back. As kvf_hidden_put. */
KVF_API KVF_CHECKED kvf_status kvf_hidden_get(kvf_hidden *hidden, uint32_t first, uint32_t count,
                                              void *states, kvf_stream *stream);

/* ---- StructKV's pivot on its own ---- */

/* For a program that finds the layer of KVF_PIVOT_CALIBRATED with its own runs of a model, as
 * `kvferry tune` does: its own policy sets KVF_PRUNE_PROFILE in `needs` and collects the measures.
 */

/** Shape of a layer's attention: means over its query heads. */
typedef struct kvf_structkv_measures {
    double entropy;
    double sparsity; /**< mass on the top tokens */
    double variance;
} kvf_structkv_measures;

/** Means over @p heads profiles. Thread: any, as the next two: pure functions of numbers. */
KVF_API kvf_structkv_measures kvf_structkv_measure(const kvf_prune_profile *profile,
                                                   uint32_t heads);

/**
 * StructKV's transition score: it is high where attention changes. With d(M) the change of M from
 * the layer before, scaled to [0, 1] by the least and the greatest change over layers,
 *
 *     score[l] = w[0] d(-entropy) + w[1] d(sparsity) + w[2] d(variance),  l >= 1; score[0] = 0.
 *
 * If a measure changes by the same amount everywhere, its d is 0.
 *
 * @param measures  [layers]
 * @param score     receives [layers]
 */
KVF_API void kvf_structkv_transition(const float weights[3], const kvf_structkv_measures *measures,
                                     uint32_t layers, double *score);

/** The calibrated pivot: the layer after the one with the highest score (ties: the lower layer), at
 * most @p layer_max; @p layer_max if no score is above 0. Layers below @p layer_min do not compete.
 */
KVF_API uint32_t kvf_structkv_pivot(const double *score, uint32_t layers, uint32_t layer_min,
                                    uint32_t layer_max);

#ifdef __cplusplus
}
#endif
#endif
