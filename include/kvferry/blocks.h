/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVFERRY_BLOCKS_H
#define KVFERRY_BLOCKS_H

/**
 * @file
 * Pages under the caller's block tables: for engines that number blocks themselves.
 *
 * An engine (a server with a scheduler and a prefix cache, such as vLLM) gives every block of
 * tokens an id, shares blocks among requests, frees them and uses ids again. A kvf_blocks keeps the
 * keys and values of such blocks in host memory and attends as kvf_decode does. It handles ids and
 * no sequences, so the engine creates, frees and announces nothing: kvf_blocks_put writes tokens,
 * and invalidates copies of them on the device.
 *
 *     for each pass of the model, for each layer:
 *         kvf_blocks_put(blocks, &put, stream)                   all new tokens of the layer
 *         kvf_blocks_decode(blocks, &step, stream)               rows with one query
 *         kvf_blocks_extend(blocks, &chunks, stream)             rows with several: prompts
 *
 * Copies of pages on the device belong to blocks. Local window and sink of a row are in a *region*
 * of the device. A region may serve any row at any time. Its content is validated before every use:
 * it counts only if it came from the block that the row's table names, and if those tokens were not
 * written since. So a region that moves to another request costs misses, but never changes an
 * answer.
 *
 * kvf_blocks_decode gives the same bits as kvf_decode for a sequence with the same tokens and
 * settings on the same device, for any ids, regions and resident pages. With quantized pages its
 * output still depends on the tokens alone, but differs from a sequence's. Every token is quantized
 * when it is put, including the sink and the local window, which a sequence keeps exact.
 *
 * The codes of a block (two bits per channel of every key) lie in memory of the caller, so that an
 * engine sees in its own cache what a block costs: see kvf_blocks_bind.
 *
 * All functions from kvf_blocks_put on, but kvf_blocks_get, enqueue only. They allocate nothing and
 * wait for nothing; tables, lengths and slots are read on the device, when the work runs. So the
 * caller may capture them in a CUDA graph of its own, and change those arrays between launches.
 * Calls run in the order of one stream; a caller with several streams orders them itself. One
 * thread at a time.
 *
 * A wrong value in an array on the device affects its own row alone: see kvf_blocks_stats.
 */

#include <kvferry/kvferry.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvf_blocks kvf_blocks;

typedef struct kvf_blocks_config {
    size_t size;           /**< set by init */
    uint32_t block_count;  /**< ids are 0 … block_count - 1; no default */
    uint32_t block_tokens; /**< tokens of a block: a multiple of 32, and of page_size; with coarse
                                heads in head_mask of 64; default 32 */
    uint32_t on_demand;    /**< 1 = on the host device memory becomes resident as it is written,
                                and the system may lack it then; 0 = all of it at once; default 0 */
    uint32_t reserved[5];  /**< 0; `cache` stays the last */
    /** Geometry, budget and pages as for any cache. sequences_max is the number of regions, and
     * the most rows of a call; tokens_max limits each row. select is DYNAMIC, FULL or STREAMING,
     * digest CODES, transfer AUTO, MAPPED, or DIRECT if the device shares host memory.
     * host_tokens_max, prefill_chunk_max and tokens_per_step_max are ignored: drafts are rows.
     * verify_interval, observe_window and disk_path are refused by name, because a kvf_blocks
     * keeps no sequences. For quantized pages see above, and device_region_bytes of the plan.
     * head_mask is read before return. A streaming head scores, fetches and keeps only its first
     * and newest tokens; blocks hold all of its tokens, so a table means the same to all heads. */
    kvf_cache_config cache;
} kvf_blocks_config;

KVF_API void kvf_blocks_config_init_sized(kvf_blocks_config *config, size_t size);
static inline void kvf_blocks_config_init(kvf_blocks_config *config)
{
    kvf_blocks_config_init_sized(config, sizeof *config);
}

/** Memory in bytes. The caller's part: code_bytes per block and layer. */
typedef struct kvf_blocks_plan {
    uint64_t code_bytes; /**< of one block of one layer: head_dim / 4 per token, KV head */
    uint64_t host_bytes; /**< pages of all blocks and layers, and tables; quantized pages take
                              less, by 2.3 times with k8v4 and pages of 4 */
    uint64_t device_block_bytes;  /**< per block, all layers: scales, write counters, centroids */
    uint64_t device_region_bytes; /**< per region, all layers: window, sink, tables, and its part of
                                    prompt_bytes */
    uint64_t device_bytes;        /**< in all, without the caller's codes */
    uint32_t slots;               /**< pages of a KV head that fit the device, of all
                                       blocks and layers */
    kvf_transfer transfer;        /**< the method in force */
    uint64_t resident_tokens;     /**< tokens that the slots hold, over all blocks */
    uint64_t prompt_bytes;        /**< room for tokens_max tokens of a layer, which chunks use in
                                       turn: as in kvf_cache_plan */
} kvf_blocks_plan;

/** Check a configuration and compute its memory without reserving any. Errors as
 * kvf_blocks_open. Thread: any. */
KVF_API KVF_CHECKED kvf_status kvf_blocks_plan_make_sized(kvf_runtime *runtime,
                                                          const kvf_blocks_config *config,
                                                          kvf_blocks_plan *plan, size_t size,
                                                          kvf_error *error);
static inline KVF_CHECKED kvf_status kvf_blocks_plan_make(kvf_runtime *runtime,
                                                          const kvf_blocks_config *config,
                                                          kvf_blocks_plan *plan, kvf_error *error)
{
    return kvf_blocks_plan_make_sized(runtime, config, plan, sizeof *plan, error);
}

/**
 * Reserve all memory that it will ever use; see on_demand.
 *
 * @param config   borrowed for the call
 * @param out      receives the handle; NULL on failure
 * @param error    filled on failure; may be NULL
 * @return KVF_OK; KVF_INVALID and KVF_UNSUPPORTED name the field; KVF_OUT_OF_MEMORY,
 *         KVF_OUT_OF_DEVICE_MEMORY and KVF_PIN_FAILED as kvf_cache_open
 */
KVF_API KVF_CHECKED kvf_status kvf_blocks_open(kvf_runtime *runtime,
                                               const kvf_blocks_config *config, kvf_blocks **out,
                                               kvf_error *error);

/** Wait for the streams that used it first. NULL is fine. */
KVF_API void kvf_blocks_close(kvf_blocks *blocks);

/** Memory as it was planned. Borrowed. */
KVF_API const kvf_blocks_plan *kvf_blocks_memory(const kvf_blocks *blocks);

/**
 * Set where the codes of a layer lie. Bind every layer before it is used.
 *
 * The codes of block b are code_bytes (see the plan) at codes + b * block_stride. The memory is the
 * caller's and stays until the layer is bound elsewhere or the handle is closed; only the library
 * writes there. Its bytes are not read before a put writes them. After a layer is bound to other
 * memory its blocks count as unwritten: the caller puts tokens before rows name them.
 *
 * @param codes         device memory, a multiple of 16
 * @param block_stride  bytes from block to block, at least code_bytes, a multiple of 16
 * @return KVF_OK, KVF_INVALID
 *
 * Enqueues nothing. A capture that was made before goes on using the old memory.
 */
KVF_API KVF_CHECKED kvf_status kvf_blocks_bind(kvf_blocks *blocks, uint32_t layer, void *codes,
                                               size_t block_stride);

/** Set the attention parameters of a layer; see kvf_cache_attention_params. Unlike there, they may
 * change while the layer holds tokens, because stored tokens do not depend on them; they apply to
 * the calls that follow. Call it before a capture: a capture keeps scale, cap and whether there are
 * sinks, and reads the values of the layer's sinks at each replay. With sinks, steps of the layer
 * that were enqueued before must be done. */
KVF_API KVF_CHECKED kvf_status kvf_blocks_attention_params(kvf_blocks *blocks, uint32_t layer,
                                                           const kvf_attention_params *params);

/** New tokens of one layer. A token's key is [kv_heads, head_dim], its value [kv_heads, value_dim],
 * both contiguous. */
typedef struct kvf_blocks_put_args {
    uint32_t layer;
    uint32_t tokens;
    const void *k;        /**< device: [tokens] keys, after RoPE */
    const void *v;        /**< device: [tokens] values */
    size_t k_stride;      /**< elements from key to key; 0 = kv_heads * head_dim */
    size_t v_stride;      /**< elements from value to value; 0 = kv_heads * value_dim */
    const int64_t *slots; /**< device: [tokens] id * block_tokens + offset; below 0: left out */
} kvf_blocks_put_args;

/**
 * Write tokens to host memory and their codes to the caller's; invalidates copies of them on the
 * device. All puts of a layer come before the calls of the pass that read them. No token twice in a
 * call.
 *
 * A slot at or above block_count * block_tokens is skipped and counted (bad_slots). A token with a
 * NaN or an infinity is marked, and zeros are written for it: rows that hold it give NaN, and so do
 * queries of a chunk that see it, until it is written again.
 *
 * @return KVF_OK, KVF_INVALID, KVF_DEVICE_FAILED
 */
KVF_API KVF_CHECKED kvf_status kvf_blocks_put_sized(kvf_blocks *blocks,
                                                    const kvf_blocks_put_args *args, size_t size,
                                                    kvf_stream *stream);
static inline KVF_CHECKED kvf_status kvf_blocks_put(kvf_blocks *blocks,
                                                    const kvf_blocks_put_args *args,
                                                    kvf_stream *stream)
{
    return kvf_blocks_put_sized(blocks, args, sizeof *args, stream);
}

/** Tokens of one layer, to be read back, each as in kvf_blocks_put_args. Bytes between them are not
 * written. */
typedef struct kvf_blocks_get_args {
    uint32_t layer;
    uint32_t tokens;
    void *k;              /**< host: [tokens] keys; NULL: no keys */
    void *v;              /**< host: [tokens] values; NULL: no values */
    size_t k_stride;      /**< elements from key to key; 0 = kv_heads * head_dim */
    size_t v_stride;      /**< elements from value to value; 0 = kv_heads * value_dim */
    const int64_t *slots; /**< host: [tokens] as for kvf_blocks_put; below 0: nothing is written */
    uint32_t fp32;        /**< 1: k and v are in fp32; 0: in `dtype` of the cache */
} kvf_blocks_get_args;

/**
 * Read tokens back as they are attended to. Exact pages give the bits that were put, in `dtype`
 * even if `tensors` are wider; quantized pages give dequantized numbers. With fp32 the numbers are
 * those of `dtype`, widened. A token that was not finite is all NaN, so it is marked again if it is
 * put again. Slots may come in any order, and repeatedly; a slot that was never put gives any
 * content.
 *
 * Waits for the stream, and so for all puts and copies before it there. k and v are host memory and
 * filled on return; on the host device they may be the arrays of a put. A call that fails writes
 * nothing to them.
 *
 * @return KVF_OK; KVF_INVALID, also while the stream is being captured; KVF_DEVICE_FAILED
 */
KVF_API KVF_CHECKED kvf_status kvf_blocks_get_sized(kvf_blocks *blocks,
                                                    const kvf_blocks_get_args *args, size_t size,
                                                    kvf_stream *stream);
static inline KVF_CHECKED kvf_status kvf_blocks_get(kvf_blocks *blocks,
                                                    const kvf_blocks_get_args *args,
                                                    kvf_stream *stream)
{
    return kvf_blocks_get_sized(blocks, args, sizeof *args, stream);
}

/** Rows of a call: the first ceil(lengths[i] / block_tokens) ids of each are read. */
typedef struct kvf_blocks_rows {
    uint32_t rows;          /**< 1 … sequences_max */
    uint32_t table_stride;  /**< ids from row to row */
    const int32_t *table;   /**< device: [rows, table_stride] */
    const int32_t *lengths; /**< device: [rows] tokens, this pass included; 0 = no row */
    const int32_t *regions; /**< device: [rows] 0 … sequences_max - 1, each once; NULL: region i
                                 for row i. A row that keeps its region keeps its window */
} kvf_blocks_rows;

/** A step of one layer: a query per row. */
typedef struct kvf_blocks_decode_args {
    uint32_t layer;
    const kvf_blocks_rows *rows;
    const void *q;            /**< device: [rows, query_heads, head_dim] */
    void *out;                /**< device: [rows, query_heads, value_dim]; zeros for a row of
                                   length 0 */
    float *lse;               /**< device: [rows, query_heads] natural log; may be NULL */
    const float *page_scores; /**< device: [rows, kv_heads, page_stride] the caller's own selection
                                   among pages of the row, as for kvf_decode; NULL = by digest */
    const int32_t *page_ids;  /**< the same shape, instead of page_scores */
    uint32_t page_stride;     /**< of page_scores or page_ids; at most 16777216 */
} kvf_blocks_decode_args;

/**
 * One query per row, of its newest token: score, select, fetch, attend.
 * If a layer of the model shares the keys of another layer, call this and kvf_blocks_extend with
 * the other layer's index, after its put of this pass. Each call selects for itself.
 *
 * @return KVF_OK, KVF_INVALID, KVF_DEVICE_FAILED
 */
KVF_API KVF_CHECKED kvf_status kvf_blocks_decode_sized(kvf_blocks *blocks,
                                                       const kvf_blocks_decode_args *args,
                                                       size_t args_size, size_t rows_size,
                                                       kvf_stream *stream);
static inline KVF_CHECKED kvf_status kvf_blocks_decode(kvf_blocks *blocks,
                                                       const kvf_blocks_decode_args *args,
                                                       kvf_stream *stream)
{
    return kvf_blocks_decode_sized(blocks, args, sizeof *args, sizeof *args->rows, stream);
}

/** Chunks of one layer: the queries of row i are starts[i] … starts[i + 1] - 1 of q and out. */
typedef struct kvf_blocks_extend_args {
    uint32_t layer;
    const kvf_blocks_rows *rows; /**< their regions are not used and may be NULL */
    const uint32_t *starts;      /**< host: [rows + 1] ascending */
    const uint32_t *contexts; /**< host: [rows] tokens before the queries. lengths[i] on the device
                                   must be contexts[i] plus the queries of row i: else its output
                                   is NaN (bad_rows) */
    const void *q;            /**< device: [starts[rows], query_heads, head_dim] */
    void *out;                /**< device: [starts[rows], query_heads, value_dim] */
    float *lse;               /**< device: [starts[rows], query_heads] natural log; may be NULL.
                                   e^(lse of a step with the same query - lse) is the share of the
                                   attention weights that the step attended to */
} kvf_blocks_extend_args;

/**
 * Several queries per row, one for each of its newest tokens: dense and causal over all of its
 * tokens. The host's arrays are read before return.
 *
 * @return KVF_OK, KVF_INVALID, KVF_DEVICE_FAILED
 */
KVF_API KVF_CHECKED kvf_status kvf_blocks_extend_sized(kvf_blocks *blocks,
                                                       const kvf_blocks_extend_args *args,
                                                       size_t args_size, size_t rows_size,
                                                       kvf_stream *stream);
static inline KVF_CHECKED kvf_status kvf_blocks_extend(kvf_blocks *blocks,
                                                       const kvf_blocks_extend_args *args,
                                                       kvf_stream *stream)
{
    return kvf_blocks_extend_sized(blocks, args, sizeof *args, sizeof *args->rows, stream);
}

/**
 * Copy whole blocks in all layers, one pair after the other. Codes are in the caller's memory: the
 * caller copies them, before the next call.
 *
 * @param from, to   host: [count] ids, read before return
 * @return KVF_OK, KVF_INVALID, KVF_DEVICE_FAILED
 */
KVF_API KVF_CHECKED kvf_status kvf_blocks_copy(kvf_blocks *blocks, const uint32_t *from,
                                               const uint32_t *to, uint32_t count,
                                               kvf_stream *stream);

/**
 * Totals since open or the last reset, over layers. Reset them after kvf_stream_wait. Read after it
 * they are exact; before, each counts the calls that are done, and maybe more.
 *
 * A row is bad if its length is below 0 or above tokens_max or beyond its table, if an id is at or
 * above block_count, if its region is out of range or already used by an earlier row of the call,
 * or if a token is not finite. Its output and lse are NaN, and none of its tokens is read.
 * Queries of a chunk before a token that is not finite keep their outputs.
 */
typedef struct kvf_blocks_stats {
    uint64_t tokens_put;      /**< (layer, token) */
    uint64_t tokens_attended; /**< by decode, summed over KV heads */
    uint64_t pages_selected;  /**< summed over KV heads */
    uint64_t hits, misses;
    uint64_t bytes_to_device; /**< pages moved for misses */
    uint64_t pages_voided;    /**< fetched again, because they were written since */
    uint64_t tokens_brought;  /**< copied into window and sink, summed over KV heads */
    uint64_t bad_rows;
    uint64_t bad_slots;
    uint64_t bytes_prompt; /**< pages that chunks read from host memory: as in kvf_stats */
} kvf_blocks_stats;

KVF_API void kvf_blocks_stats_get_sized(const kvf_blocks *blocks, kvf_blocks_stats *stats,
                                        size_t size);
static inline void kvf_blocks_stats_get(const kvf_blocks *blocks, kvf_blocks_stats *stats)
{
    kvf_blocks_stats_get_sized(blocks, stats, sizeof *stats);
}
KVF_API void kvf_blocks_stats_reset(kvf_blocks *blocks);

#ifdef __cplusplus
}
#endif

#endif
