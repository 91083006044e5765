/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVFERRY_KVFERRY_H
#define KVFERRY_KVFERRY_H

/**
 * @file
 * kvferry: decode against a KV cache that does not fit on the device.
 *
 * The whole cache lives in pinned host memory, page by page. The device keeps a digest of every
 * page (two bits per channel of its keys, or a box around them), the local window, a cache of
 * recently used pages, and perhaps a static set of tokens. A decode step scores the digests,
 * selects pages, fetches the missing ones, and attends.
 *
 * Read this file from top to bottom: statuses, the runtime and its streams, the cache and its
 * policy, sequences, prefill, decode, selection on its own, statistics.
 *
 * The shortest use:
 *
 *     kvf_runtime_config rc;
 *     kvf_runtime_config_init(&rc);
 *     kvf_runtime_open(&rc, &runtime, &error);
 *     kvf_stream_create(runtime, &stream);
 *
 *     kvf_cache_config cc;
 *     kvf_cache_config_init(&cc);
 *     cc.layers = 32; cc.query_heads = 32; cc.kv_heads = 8; cc.head_dim = 128;
 *     cc.tokens_max = 131072; cc.budget_tokens = 1024;
 *     kvf_cache_open(runtime, &cc, &cache, &error);
 *     kvf_sequence_create(cache, &sequence);
 *
 *     for each layer: kvf_prefill(cache, &prefill, stream);   // whole prompt, or chunk by chunk
 *     for each token: for each layer: kvf_decode(cache, &decode, stream);
 *     kvf_stream_wait(stream);
 *
 * Conventions
 * - Handles are opaque. A cache belongs to a runtime; a sequence belongs to a cache. Close in the
 *   reverse order; every close, destroy and free accepts NULL. A handle that is closed earlier
 *   lives on until everything made from it is closed: a runtime until its caches, streams and
 *   memory, a cache until its pruners, recordings and saves. Sequences end with their cache.
 * - A function with a status returns KVF_INVALID and does nothing if a stream is of another
 *   runtime, or a pointer is NULL that its text does not allow to be. A function without a status
 *   then returns 0, NULL or an empty text, or does nothing.
 * - Fill a configuration with its `_init`, which sets `size` and the defaults. Other structs have
 *   no `size`: NAME, inline, passes sizeof and the pointer to NAME_sized, which the library exports
 *   and other languages bind. So structs grow at their end under one soname. A struct that the
 *   library reads may be shorter than the library's: missing fields take their default, 0 if there
 *   is no `_init`. It may be longer if the rest is 0; a nonzero rest asks for features that this
 *   library lacks: KVF_INVALID. In a struct that the library fills, it writes the common fields,
 *   and 0 to the rest. A struct that it lends (settings, plans, views) is as long as the library's:
 *   use a library that is no older than the header. kvf_error, kvf_allocator, kvf_link_times,
 *   kvf_link_line, kvf_prune_profile and kvf_structkv_measures are fixed and never change.
 * - Threads: a cache and the handles made from it may be used by one thread at a time, not always
 *   the same one; caches are independent. Any thread may use a runtime at any time. One thread at a
 *   time enqueues on a stream; any thread may wait for it.
 * - Streams: calls on one cache may name different streams. Their work runs in the order of the
 *   calls, whichever stream it is on; work of different caches is ordered only within a stream.
 * - Errors: the last error is per thread, see kvf_runtime_error.
 * - fork(): a child owns no handles. A call with its parent's objects returns KVF_INVALID or zeros;
 *   closing, destroying and freeing them does nothing, so exit handlers and garbage collection are
 *   safe, and the parent is not affected. The child may open its own runtime, on the host device if
 *   its parent used a GPU: CUDA does not work in a child. clone() is not detected.
 * - Signals: the library installs no handler. Its threads inherit the mask of the thread that
 *   opened the runtime, created the stream or began to save, and block SIGXFSZ. On a caller's
 *   thread the limit is read before each write, so on every thread a file beyond RLIMIT_FSIZE is an
 *   error of the call, also after the limit was lowered. Call no function from a handler.
 * - Calls enqueue work on the caller's stream, where it runs in order. Queries, keys, values and
 *   outputs must stay valid until the stream has done that work.
 * - On the CUDA device q, k, v and out are device memory, or pinned memory at its device address.
 *   They are aligned to 16 bytes.
 * - Shapes are row-major, last dimension fastest. The element type of queries, keys, values and
 *   outputs is `tensors` of the cache; that of pages is `dtype`.
 * - A call takes at most 64 KiB of its caller's stack, also on a fibre, not counting a GPU's
 *   driver. Stacks of the library's threads are 2 MiB or more, independent of libc and limits. On
 *   the host device a thread that waits for a stream runs work itself, but only if 512 KiB of its
 *   own stack are left.
 * - The library never exits, prints, or reads the environment. It reads and writes numbers as in
 *   the C locale. Functions without a status abort on an index out of range, such as a layer.
 */

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(KVF_BUILD) || defined(__GNUC__)
#define KVF_API     __attribute__((visibility("default")))
#define KVF_CHECKED __attribute__((warn_unused_result))
#else
#define KVF_API
#define KVF_CHECKED
#endif

#define KVF_VERSION_MAJOR 0
#define KVF_VERSION_MINOR 1
#define KVF_VERSION_PATCH 0

/* ---- statuses ---- */

/** Rows X(name, value, ...) as the values of an enum. */
#define KVF_ENUMERATOR(name, value, ...) name = value,

/** Every status of the library: X(name, value, text). Values never change meaning. */
#define KVF_STATUS_LIST(X)                                                                         \
    X(KVF_OK, 0, "success")                                                                        \
    X(KVF_INVALID, -1, "an argument or setting is out of its range")                               \
    X(KVF_OUT_OF_MEMORY, -2, "there is not enough host memory")                                    \
    X(KVF_OUT_OF_DEVICE_MEMORY, -3, "there is not enough device memory")                           \
    X(KVF_PIN_FAILED, -4, "host memory could not be pinned")                                       \
    X(KVF_FULL, -5, "a limit that was set at open is reached")                                     \
    X(KVF_BUSY, -6, "a bounded queue is full; nothing was queued")                                 \
    X(KVF_UNSUPPORTED, -7, "this build, device or geometry does not support it")                   \
    X(KVF_NOT_FINITE, -8, "a key or value is NaN or infinite")                                     \
    X(KVF_DEVICE_FAILED, -9, "the device reported an error")                                       \
    X(KVF_SYSTEM, -10, "the operating system refused")                                             \
    X(KVF_CORRUPT, -11, "a file or structure contradicts itself")

typedef enum kvf_status { KVF_STATUS_LIST(KVF_ENUMERATOR) } kvf_status;

/** Why a call failed, with the field, the value and the fix. */
typedef struct kvf_error {
    kvf_status status;
    int foreign;    /**< errno or the device's own code, 0 if none */
    char text[512]; /**< one sentence or two, no newline */
} kvf_error;

/** Name of a status, e.g. "KVF_FULL". Never NULL. Thread: any. */
KVF_API const char *kvf_status_name(kvf_status status);

/** Text of a status. Never NULL. Thread: any. */
KVF_API const char *kvf_status_text(kvf_status status);

/** Version as "major.minor.patch". Thread: any. */
KVF_API const char *kvf_version(void);

/*
 * Enums with named values are lists X(name, value, text, meaning): `text` is the value on the
 * command line, in statistics and for kvf_setting (setting.h). Values never change, from 0 on.
 */

/* ---- runtime ---- */

typedef struct kvf_runtime kvf_runtime;
typedef struct kvf_stream kvf_stream;
typedef struct kvf_cache kvf_cache;
typedef struct kvf_sequence kvf_sequence;

#define KVF_DEVICE_LIST(X)                                                                         \
    X(KVF_DEVICE_AUTO, 0, "auto", "CUDA where build, driver and GPU are there, else the host")     \
    X(KVF_DEVICE_HOST, 1, "host", "the CPU")                                                       \
    X(KVF_DEVICE_CUDA, 2, "cuda", "an NVIDIA GPU")

typedef enum kvf_device_kind { KVF_DEVICE_LIST(KVF_ENUMERATOR) } kvf_device_kind;

#define KVF_HUGE_PAGES_LIST(X)                                                                     \
    X(KVF_HUGE_PAGES_AUTO, 0, "auto", "hugetlb, then transparent, then 4 KiB")                     \
    X(KVF_HUGE_PAGES_OFF, 1, "off", "4 KiB only")                                                  \
    X(KVF_HUGE_PAGES_REQUIRED, 2, "required", "hugetlb or an error")

typedef enum kvf_huge_pages { KVF_HUGE_PAGES_LIST(KVF_ENUMERATOR) } kvf_huge_pages;

/** Instruction sets that kernels may use; KVF_ISA_ALL takes what the CPU supports. */
typedef enum kvf_isa {
    KVF_ISA_BASELINE = 1u << 0, /**< vector code for the architecture's minimum */
    KVF_ISA_AVX2 = 1u << 1,
    KVF_ISA_AVX512 = 1u << 2,
    KVF_ISA_AVX512_BF16 = 1u << 3, /**< with VNNI; attention, scores of codes and centroids only */
    KVF_ISA_NEON = 1u << 4,
    KVF_ISA_AVX_VNNI = 1u << 5,    /**< scores of codes and centroids only */
    KVF_ISA_AVX512_VNNI = 1u << 6, /**< with VBMI; scores of codes and centroids only */
    KVF_ISA_REFERENCE = 0,         /**< plain C references only */
    KVF_ISA_ALL = 0x7fffffff,
} kvf_isa;

/** Memory for the library's own structures. `alloc` may return NULL. Thread: any. */
typedef struct kvf_allocator {
    void *(*alloc)(void *user, size_t bytes, size_t alignment);
    void (*free)(void *user, void *pointer);
    void *user;
} kvf_allocator;

/** Receives one line per notable event (degraded huge pages, preflight notes). Level 0 is a note, 1
 * a warning. May be NULL. */
typedef void (*kvf_log_fn)(void *user, int level, const char *line);

typedef struct kvf_runtime_config {
    size_t size;               /**< set by init */
    kvf_device_kind device;    /**< default AUTO */
    uint32_t threads;          /**< compute threads on the host; 0 = as cores and CPU quota allow */
    uint32_t gather_threads;   /**< workers of the gather method; 0 = the library decides */
    int32_t numa_node;         /**< node for host memory; -1 = nearest the device */
    kvf_huge_pages huge_pages; /**< default AUTO */
    uint32_t allow_unpinned;   /**< 1 = if pinning fails, the host device uses pageable memory; a
                                    GPU cannot reach that; default 0 */
    uint32_t isa_mask;         /**< OR of kvf_isa; default KVF_ISA_ALL */
    kvf_allocator allocator;   /**< all NULL = malloc */
    kvf_log_fn log;            /**< default NULL */
    void *log_user;
    uint32_t device_ordinal; /**< of the CUDA device; default 0 */
    uint32_t calibrate;    /**< CUDA: 1 = measure the link (a few seconds) when the first cache with
                                transfer AUTO is opened, for pages below 3 KiB apart from larger
                                ones; 0 = use fixed limits; default 1 */
    uint32_t early_starts; /**< CUDA: 1 = kernels of a step are launched before the previous kernel
                                is done (programmatic dependent launch, compute capability 9.0 and
                                later); 0 = none is, in no runtime of this process on this device
                                while this one is open, enqueued or recorded; same bits; default 1
                              */
    /** File that keeps the measurements, per GPU, driver and link; NULL = measure in every process.
       Borrowed for the call. */
    const char *calibration_path;
} kvf_runtime_config;

KVF_API void kvf_runtime_config_init_sized(kvf_runtime_config *config, size_t size);
static inline void kvf_runtime_config_init(kvf_runtime_config *config)
{
    kvf_runtime_config_init_sized(config, sizeof *config);
}

/**
 * Open a runtime: its device, its threads, its view of the machine.
 *
 * @param config   borrowed for the call
 * @param out      receives the handle; NULL on failure
 * @param error    filled on failure; may be NULL
 * @return KVF_OK, KVF_INVALID, KVF_UNSUPPORTED, KVF_OUT_OF_MEMORY, KVF_SYSTEM; of the CUDA device
 *         also KVF_OUT_OF_DEVICE_MEMORY, KVF_DEVICE_FAILED
 *
 * Thread: any; two runtimes are independent.
 */
KVF_API KVF_CHECKED kvf_status kvf_runtime_open(const kvf_runtime_config *config, kvf_runtime **out,
                                                kvf_error *error);

/** Close a runtime, once; the handle is not to be used any more. Handles made from it may be used:
 * closing the last of them ends the runtime's threads, and waits for them. */
KVF_API void kvf_runtime_close(kvf_runtime *runtime);

/**
 * The last error of the calling thread, if it came from this runtime or from anything opened from
 * it; else KVF_OK with an empty text, never NULL. A failure in stream order is returned by the call
 * that waits.
 *
 * It is valid until another call of this thread fails, on any runtime, or the thread ends; closing
 * the runtime does not change it. Copy it to keep it or to pass it to another thread.
 *
 * @param runtime  NULL: the last error, from whichever runtime; also of calls that were given NULL
 */
KVF_API const kvf_error *kvf_runtime_error(const kvf_runtime *runtime);

/**
 * Describe machine, device and build as one JSON object: devices, NUMA nodes, links, huge pages,
 * memlock, CPU features, optional parts present or absent with the way to get them.
 *
 * @param text      receives a NUL-terminated string, at most @p capacity bytes; may be NULL if 0
 * @param needed    receives the bytes a whole answer takes, NUL included; may be NULL
 * @return KVF_OK; KVF_FULL if the text was cut
 */
KVF_API KVF_CHECKED kvf_status kvf_runtime_describe(kvf_runtime *runtime, char *text,
                                                    size_t capacity, size_t *needed);

/**
 * Measure the link now, or read the file, unless that was done before. Opening a cache with
 * transfer AUTO does it too. kvf_runtime_describe shows the result.
 *
 * @return KVF_OK, also if there is nothing to measure (the host device, calibrate = 0);
 *         KVF_OUT_OF_MEMORY, KVF_OUT_OF_DEVICE_MEMORY, KVF_PIN_FAILED, KVF_DEVICE_FAILED
 *
 * Thread: any. Waits for what it measures.
 */
KVF_API KVF_CHECKED kvf_status kvf_runtime_calibrate(kvf_runtime *runtime);

/** Compute threads in force, at least 1. */
KVF_API uint32_t kvf_runtime_threads(const kvf_runtime *runtime);

/** Name of the device, e.g. "NVIDIA H200". Never NULL; borrowed. */
KVF_API const char *kvf_runtime_device_name(const kvf_runtime *runtime);

/**
 * NUMA nodes with memory, as the operating system numbers them.
 *
 * @param ids   receives at most @p capacity numbers; may be NULL if 0
 * @return how many there are; 0 if unknown
 */
KVF_API uint32_t kvf_runtime_numa_nodes(const kvf_runtime *runtime, int32_t *ids,
                                        uint32_t capacity);

/** The device in force: HOST or CUDA. */
KVF_API kvf_device_kind kvf_runtime_device(const kvf_runtime *runtime);

/* ---- streams and device memory ---- */

KVF_API KVF_CHECKED kvf_status kvf_stream_create(kvf_runtime *runtime, kvf_stream **out);

/** Destroy a stream after the work on it is done; waits for it. */
KVF_API void kvf_stream_destroy(kvf_stream *stream);

/** Block the caller until everything enqueued so far is done. On the host device the calling thread
 * may run that work itself. @return the first error of that work. */
KVF_API KVF_CHECKED kvf_status kvf_stream_wait(kvf_stream *stream);

/**
 * Use a stream of the caller.
 *
 * @param native   a cudaStream_t of the runtime's device; the caller's, it outlives @p out
 * @param out      destroy it with kvf_stream_destroy, which waits for the stream's work and leaves
 *                 the stream itself alone
 * @return KVF_OK, KVF_OUT_OF_MEMORY, KVF_UNSUPPORTED on the host device
 */
KVF_API KVF_CHECKED kvf_status kvf_stream_wrap(kvf_runtime *runtime, void *native,
                                               kvf_stream **out);

/** The cudaStream_t of a stream; NULL on the host device. */
KVF_API void *kvf_stream_native(kvf_stream *stream);

/** One task of a launch. Tasks of a launch run in any order, on any thread, including one that
 * waits for the stream. */
typedef void (*kvf_task_fn)(const void *args, uint32_t task);

/**
 * Run a function of the caller in stream order: `fn(args, 0 … tasks-1)`, spread over the compute
 * threads. The caller's own layers (matrix products, norms) go here, so that a whole step is
 * enqueued without waiting. Host device only.
 *
 * @param args         copied, @p args_bytes (at most 384)
 * @return KVF_OK, KVF_INVALID, KVF_UNSUPPORTED
 *
 * Stream: enqueues; blocks only while the stream's queue (1024 entries) is full.
 */
KVF_API KVF_CHECKED kvf_status kvf_stream_launch(kvf_stream *stream, kvf_task_fn fn,
                                                 const void *args, size_t args_bytes,
                                                 uint32_t tasks);

/** Device memory, 64-byte aligned, zeroed. Free it when no stream uses it any more. */
KVF_API KVF_CHECKED kvf_status kvf_memory_alloc(kvf_runtime *runtime, size_t bytes, void **out);
KVF_API void kvf_memory_free(kvf_runtime *runtime, void *pointer);

/**
 * Pinned host memory on the runtime's node, which the CPU and kernels both read and write.
 *
 * @param bytes    1 byte to a little under 1 GiB, aligned to a memory page
 * @param host     receives the address for the CPU
 * @param device   receives the address for kernels and copies; equals @p host on the host device
 * @return KVF_OK, KVF_INVALID, KVF_OUT_OF_MEMORY, KVF_PIN_FAILED
 */
KVF_API KVF_CHECKED kvf_status kvf_pinned_alloc(kvf_runtime *runtime, size_t bytes, void **host,
                                                void **device);
/** @param host  as kvf_pinned_alloc gave it, or NULL. No stream may use it any more. */
KVF_API void kvf_pinned_free(kvf_runtime *runtime, void *host);

/** Copy between host and device in stream order. */
KVF_API KVF_CHECKED kvf_status kvf_memory_copy(kvf_stream *stream, void *to, const void *from,
                                               size_t bytes);

/* ---- cache ---- */

#define KVF_DTYPE_LIST(X)                                                                          \
    X(KVF_BF16, 0, "bf16", "bfloat16")                                                             \
    X(KVF_FP16, 1, "fp16", "IEEE half precision")                                                  \
    X(KVF_FP32, 2, "fp32", "IEEE single precision")

typedef enum kvf_dtype { KVF_DTYPE_LIST(KVF_ENUMERATOR) } kvf_dtype;

#define KVF_PAGES_LIST(X)                                                                          \
    X(KVF_PAGES_NATIVE, 0, "bf16", "as they came: bf16, or what dtype says")                       \
    X(KVF_PAGES_K8V8, 1, "k8v8", "int8, one scale per key and one per value; keys rotated")        \
    X(KVF_PAGES_K8V4, 2, "k8v4", "keys likewise; values in int4, scale and minimum of 32")

typedef enum kvf_pages { KVF_PAGES_LIST(KVF_ENUMERATOR) } kvf_pages;

#define KVF_TENSORS_LIST(X)                                                                        \
    X(KVF_TENSORS_DTYPE, 0, "dtype", "what dtype says")                                            \
    X(KVF_TENSORS_FP32, 1, "fp32", "IEEE single precision, rounded to dtype on its way in")        \
    X(KVF_TENSORS_FP32_QUERIES, 2, "fp32-queries", "queries and outputs; keys and values as dtype")

typedef enum kvf_tensors { KVF_TENSORS_LIST(KVF_ENUMERATOR) } kvf_tensors;

#define KVF_SELECT_LIST(X)                                                                         \
    X(KVF_SELECT_HYBRID, 0, "hybrid", "static set + top pages by digest (PRKV)")                   \
    X(KVF_SELECT_FULL, 1, "full", "every page: dense attention")                                   \
    X(KVF_SELECT_STATIC, 2, "static", "the static set takes the whole budget")                     \
    X(KVF_SELECT_DYNAMIC, 3, "dynamic", "pages take the whole budget")                             \
    X(KVF_SELECT_STREAMING, 4, "streaming", "sink + newest tokens (StreamingLLM)")                 \
    X(KVF_SELECT_QUEST, 5, "quest", "pages per query head, minmax digest (Quest)")                 \
    X(KVF_SELECT_ARKVALE, 6, "arkvale", "one page list per layer, cuboid-mean digest (ArkVale)")   \
    X(KVF_SELECT_ORACLE, 7, "oracle", "true top tokens by full attention; for evaluation")         \
    X(KVF_SELECT_CUSTOM, 8, "custom", "kvf_cache_config.select_fn chooses the pages")

typedef enum kvf_select { KVF_SELECT_LIST(KVF_ENUMERATOR) } kvf_select;

#define KVF_DIGEST_LIST(X)                                                                         \
    X(KVF_DIGEST_MINMAX, 0, "minmax", "lo = min, hi = max per channel; rounded outwards")          \
    X(KVF_DIGEST_CUBOID_MEAN, 1, "cuboid-mean",                                                    \
      "centre of the box -+ mean distance from it (ArkVale)")                                      \
    X(KVF_DIGEST_MEAN, 2, "mean", "lo = hi = mean")                                                \
    X(KVF_DIGEST_CODES, 3, "codes", "two bits per channel of every key, rotated")

typedef enum kvf_digest_kind { KVF_DIGEST_LIST(KVF_ENUMERATOR) } kvf_digest_kind;

#define KVF_GROUP_LIST(X)                                                                          \
    X(KVF_GROUP_MEAN_SOFTMAX, 0, "mean-softmax",                                                   \
      "softmax over pages per query head, then the mean")                                          \
    X(KVF_GROUP_MAX, 1, "max", "maximum of raw scores")                                            \
    X(KVF_GROUP_SUM, 2, "sum", "sum of raw scores")

typedef enum kvf_group_reduce { KVF_GROUP_LIST(KVF_ENUMERATOR) } kvf_group_reduce;

#define KVF_REFRESH_LIST(X)                                                                        \
    X(KVF_REFRESH_RESIDENT, 0, "resident", "keys of recent choices")                               \
    X(KVF_REFRESH_EXACT, 1, "exact", "all keys, as published")

typedef enum kvf_refresh { KVF_REFRESH_LIST(KVF_ENUMERATOR) } kvf_refresh;

/* A page keeps its place when the static set takes tokens of it, and then holds fewer. */
#define KVF_FILL_LIST(X)                                                                           \
    X(KVF_FILL_PAGES, 0, "pages", "as many as there is room for full ones")                        \
    X(KVF_FILL_TOKENS, 1, "tokens", "as many as give that many tokens outside the static set")

typedef enum kvf_fill { KVF_FILL_LIST(KVF_ENUMERATOR) } kvf_fill;

#define KVF_TRANSFER_LIST(X)                                                                       \
    X(KVF_TRANSFER_AUTO, 0, "auto", "direct on the host device; on CUDA by size, as measured")     \
    X(KVF_TRANSFER_DIRECT, 1, "direct", "attend pages where they live")                            \
    X(KVF_TRANSFER_GATHER, 2, "gather",                                                            \
      "workers fill staging, one copy per chunk, scatter into slots")                              \
    X(KVF_TRANSFER_EACH, 3, "each", "one copy per page; the baseline")                             \
    X(KVF_TRANSFER_MAPPED, 4, "mapped", "blocks of the device read pinned pages; can be recorded") \
    X(KVF_TRANSFER_BATCH, 5, "batch", "one submission of many copies, where the driver has it")

typedef enum kvf_transfer { KVF_TRANSFER_LIST(KVF_ENUMERATOR) } kvf_transfer;

/** The view of a custom policy: one KV head of one layer of one sequence. */
typedef struct kvf_select_view {
    uint32_t layer;
    uint32_t kv_head;
    uint32_t pages;      /**< sealed pages: the candidates, 0 … pages-1 */
    uint32_t pages_max;  /**< most that may be selected */
    const float *scores; /**< [pages], reduced over the group; -INFINITY = no token left */
    /** Tokens of the sink and of the static set, a word per block: token t is bit t % block_size of
     * word t / block_size. Page p contains tokens p * page_size to (p + 1) * page_size - 1. */
    const uint64_t *static_bits;
    uint32_t page_size, block_size; /**< in tokens */
} kvf_select_view;

/**
 * Select pages. Write at most view->pages_max distinct ids, ascending, to @p ids.
 * @return how many. Runs on a thread of the stream; must not call the library.
 */
typedef uint32_t (*kvf_select_fn)(void *user, const kvf_select_view *view, int32_t *ids);

/** static_ratio: set per layer after prefill, from the overlap of the first and the last query. */
#define KVF_STATIC_RATIO_AUTO (-1.0f)

typedef struct kvf_cache_config {
    size_t size; /**< set by init */

    /* ---- geometry: no defaults but those that are named ---- */
    uint32_t layers;      /**< 1 … 1024 */
    uint32_t query_heads; /**< a multiple of kv_heads; group 1 … 128 */
    uint32_t kv_heads;    /**< 1 … 1024 */
    uint32_t head_dim;    /**< multiple of 16, 16 … 512; GPU: 32, 64, 80, 96, 128, 192 or 256 */
    uint32_t value_dim;   /**< head_dim less a multiple of 32 (GPU: 128 of 192); 0 = head_dim */
    kvf_dtype dtype;      /**< of keys and values in the cache; default BF16 */
    float softmax_scale;  /**< 0 = 1/sqrt(head_dim) */
    /** Element type of q, k, v and out of all calls; default DTYPE. fp32 inputs are rounded to
     * dtype once, to nearest even, and results follow from the rounded numbers; a number that
     * rounds to infinity is not finite. fp32 outputs are not rounded. Pages, kvf_read_pages and
     * saved sequences are in dtype. */
    kvf_tensors tensors;

    /* ---- limits: memory is reserved for them at open ---- */
    uint32_t sequences_max; /**< default 1. On a GPU sequences_max x tokens_per_step_max x KV heads
                                 (with QUEST query heads) is at most 65535 */
    uint32_t tokens_max;    /**< per sequence, no default */
    /** Tokens of all sequences, with shared pages counted once: for forks, the prompt plus, per
     * fork, its own tokens, its window and 64. Codes are reserved for as many. 0 = sequences_max x
     * tokens_max. */
    uint64_t host_tokens_max;
    uint32_t prefill_chunk_max;   /**< tokens of one prefill call; default 512 */
    uint32_t tokens_per_step_max; /**< new tokens of a sequence in one decode call, 1 to 16;
                                       default 1. Memory for page lists grows with it */
    uint32_t observe_window;      /**< newest queries kept, for pruning: 0 to 128; default 0 */
    uint32_t reserved_limits;     /**< 0 */

    /* ---- policy: what a step attends to; kvf_cache_config_preset sets page_size to
     * group_reduce ---- */
    uint32_t page_size;        /**< tokens: 1, 2, 4, 8, 16, 32 or 64; default 4 */
    uint32_t budget_tokens;    /**< attended per KV head and step, with sink and local window;
                                  default 1024 */
    float budget_share;        /**< attend to at least this share of a sequence's tokens, 0 to 1;
                                  default 0. The static set stays a share of budget_tokens. STATIC,
                                  and a static_ratio of auto, refuse it */
    uint32_t sink_tokens;      /**< first tokens, always attended; default 4 */
    uint32_t local_tokens;     /**< the local window holds at least this many tokens, and less than
                                  a block more: 32, or page_size if that is 64; default 64 */
    kvf_select select;         /**< default DYNAMIC */
    float static_ratio;        /**< of HYBRID: share of what sink and window leave; default 0.25 */
    uint32_t refresh_interval; /**< decode steps between refreshes of the static set; default 128 */
    kvf_refresh refresh;       /**< default RESIDENT; the first one after prefill is always exact */
    kvf_digest_kind digest;    /**< default CODES; QUEST and ARKVALE use their own */
    uint32_t sub_digests;      /**< boxes per page: 1, 2 or 4; default 1 */
    kvf_fill fill;             /**< of HYBRID: how pages fill the budget; default PAGES */
    kvf_group_reduce group_reduce; /**< default MEAN_SOFTMAX */
    uint32_t reserved_policy;      /**< 0 */
    kvf_select_fn select_fn;       /**< for KVF_SELECT_CUSTOM */
    void *select_user;

    /* policy, by kinds of KV heads */
    /** [layers, kv_heads]: 1 = hot head, as without a mask; 2 = coarse head; 0 = streaming head.
     * Hot and coarse heads are retrieval heads: they keep all tokens and attend to selected pages.
     * A hot head scores every token by its code. A coarse head scores centroids of 64 keys each,
     * and by codes only the tokens of the best centroids (coarse_share); it needs digest = codes.
     * A streaming head keeps its first and newest tokens in a ring on the device and nothing on the
     * host. The query at position i attends to tokens j < sink and j > i - recent, at their true
     * positions, also in prefill and however the prompt is cut; budget and select do not apply to
     * it. A cache with streaming heads can be recorded; it cannot be listed (kvf_select_pages), cut
     * (kvf_sequence_truncate) or pruned: KVF_UNSUPPORTED. Verification and times in kvf_stats cover
     * retrieval heads. NULL = all 1. Borrowed for the call. */
    const uint8_t *head_mask;
    /** [layers]: streaming_recent of each layer, 0 in layers without a streaming head. NULL = the
     * same in all layers; kvf_cache_settings also shows NULL if all are equal. Borrowed for the
     * call. */
    const uint32_t *layer_windows;
    float coarse_share;        /**< share of its 64-token segments that a coarse head scores by
                                  codes, rounded: 0 to 1; default 0.1. At least as many segments as
                                  hold twice the pages that it selects, and always the first one
                                  and the local window's. 1 = all: as a hot head */
    uint32_t streaming_sink;   /**< first tokens that a streaming head attends to; default 128 */
    uint32_t streaming_recent; /**< newest tokens, with the query's own; default 1024 */

    /* what is measured */
    uint32_t verify_interval; /**< every N-th step also attends densely; default 0 = never */
    uint32_t phase_times;     /**< 1 = measure phases, 0 = off; default 2 = on the host device */

    /* ---- memory ---- */
    /** Storage format of sealed pages in memory, in slots, on disk, in saved files and in
     * transfers; default NATIVE. Sink and local window stay exact. A block is quantized once, when
     * it is sealed; from then on everything that reads its tokens, digests included, reads the
     * quantized ones. A token of a prompt attends as a decode step would: to exact keys and values
     * within its local window, to quantized ones before it. So results do not depend on chunks. A
     * token that is not finite is quantized as zeros, and kvf_prefill and kvf_decode report it. On
     * the CUDA device K8V8 and K8V4 need dtype BF16 and head_dim 64, 128 or 192: else
     * KVF_UNSUPPORTED. A saved sequence can be restored only to a cache of the same format. */
    kvf_pages pages;
    /** Most bytes on the device: windows, digests, tables, room for prompts (see prompt_bytes). The
     * rest is slots for pages, which sequences and layers share. 0 = as little as a call needs;
     * default KVF_DEVICE_BYTES_AUTO: 7/8 of free device memory, on the host device 1/2 of free. */
    uint64_t device_bytes;
    kvf_transfer transfer; /**< how missing pages are brought; default AUTO */

    /* memory, the disk tier: sealed pages beyond host_bytes lie in a file */
    uint32_t disk_bundle_bytes; /**< least that is read and written together; 0 = 128 KiB */
    /** Folder of the file, which is private (mode 0600), without a name, and gone with the cache.
     * NULL = all pages are in memory. Selection never reads the file; on every device the host
     * waits in a step until the selected pages are in memory. Such a cache cannot be recorded:
     * KVF_UNSUPPORTED. With a head_mask, layers of equally many retrieval heads share a file and a
     * part of host_bytes. Borrowed for the call. */
    const char *disk_path;
    uint64_t host_bytes; /**< of sealed pages in memory; at least a layer of a sequence */
    uint64_t disk_bytes; /**< most that the file may take; 0 = what host_tokens_max needs */
} kvf_cache_config;

KVF_API void kvf_cache_config_init_sized(kvf_cache_config *config, size_t size);
static inline void kvf_cache_config_init(kvf_cache_config *config)
{
    kvf_cache_config_init_sized(config, sizeof *config);
}

#define KVF_PRESET_LIST(X)                                                                         \
    X(KVF_PRESET_DEFAULT, 0, "default", "what init sets")                                          \
    X(KVF_PRESET_PRKV, 1, "prkv", "after PRKV: boxes, pages of 32, a static quarter, k = 1024")

/** A value of kvf_cache_config.device_bytes. */
#define KVF_DEVICE_BYTES_AUTO (UINT64_C(1) << 63)

/** Sets of values for the policy of a cache. */
typedef enum kvf_preset { KVF_PRESET_LIST(KVF_ENUMERATOR) } kvf_preset;

/** Set the policy (page_size down to group_reduce) and leave the rest of the config as it is.
 * A value that is no preset changes nothing. */
KVF_API void kvf_cache_config_preset(kvf_cache_config *config, kvf_preset preset);

/** Memory that a configuration needs, in bytes: exactly the memory that open reserves. */
typedef struct kvf_cache_plan {
    uint64_t host_kv_bytes;      /**< the page pool */
    uint64_t host_staging_bytes; /**< the staging ring */
    uint64_t device_kv_bytes;    /**< slots, static sets, local windows */
    /** Codes or boxes of host_tokens_max tokens; centroids of all sequences and layers. */
    uint64_t device_digest_bytes;
    uint64_t device_table_bytes; /**< page tables, bits, scores, partial results */
    uint32_t static_tokens;      /**< per KV head, without the sink */
    uint32_t dynamic_pages;      /**< per KV head and step, while the window is shortest */
    uint32_t slots;              /**< pages of a KV head that fit the device, of all
                                      sequences and layers */
    kvf_transfer transfer;       /**< the method in force */
    uint64_t host_table_bytes;   /**< positions, block lists, arguments in flight, counters */
    uint32_t block_size;         /**< tokens that are allocated, sealed and written back together */
    uint32_t disk_bundle_bytes;  /**< read and written together; 0 = there is no disk tier */
    uint64_t disk_bytes;         /**< the file of the disk tier */
    kvf_digest_kind digest;      /**< the one in force */
    uint64_t resident_tokens;    /**< sealed tokens that the slots hold, over all sequences */
    uint64_t prompt_bytes;       /**< of device_kv_bytes: a layer's tokens_max tokens, which chunks
                                      attend to; 0: chunks read host memory, slow on a GPU */
} kvf_cache_plan;

/** Check a configuration and compute its memory without reserving any. Thread: any. */
KVF_API KVF_CHECKED kvf_status kvf_cache_plan_make_sized(kvf_runtime *runtime,
                                                         const kvf_cache_config *config,
                                                         kvf_cache_plan *plan, size_t size,
                                                         kvf_error *error);
static inline KVF_CHECKED kvf_status kvf_cache_plan_make(kvf_runtime *runtime,
                                                         const kvf_cache_config *config,
                                                         kvf_cache_plan *plan, kvf_error *error)
{
    return kvf_cache_plan_make_sized(runtime, config, plan, sizeof *plan, error);
}

/**
 * Open a cache. Reserves, binds, touches and registers all memory that it will ever use.
 *
 * @return KVF_OK; KVF_INVALID names the field; KVF_OUT_OF_MEMORY, KVF_OUT_OF_DEVICE_MEMORY and
 *         KVF_PIN_FAILED say how much was asked for, how much there was, and the fix
 */
KVF_API KVF_CHECKED kvf_status kvf_cache_open(kvf_runtime *runtime, const kvf_cache_config *config,
                                              kvf_cache **out, kvf_error *error);

/** Close a cache with all its sequences. Wait for the streams that used it first. */
KVF_API void kvf_cache_close(kvf_cache *cache);

/** The settings in force, with defaults filled in. Borrowed. */
KVF_API const kvf_cache_config *kvf_cache_settings(const kvf_cache *cache);
KVF_API const kvf_cache_plan *kvf_cache_memory(const kvf_cache *cache);

/** How a layer attends. An attended token with key k and value v has the logit s = scale q.k, with
 * a cap s = cap tanh(scale q.k / cap). Then out = sum e^s v / (e^sink + sum e^s) and lse =
 * ln (e^sink + sum e^s); without a sink e^sink is 0. Verification and prune policies apply cap and
 * sinks; selection of pages applies the cap alone. */
typedef struct kvf_attention_params {
    size_t size; /**< set by init */
    float scale; /**< above 0; 0 = softmax_scale of the settings */
    /** On the host, [query_heads], copied: a logit per query head that joins the denominator, after
     * scaling; -infinity = none in this head. NULL = none at all. Not tokens: see sink_tokens. */
    const float *sinks;
    float soft_cap; /**< above 0; 0 = none */
} kvf_attention_params;

KVF_API void kvf_attention_params_init_sized(kvf_attention_params *params, size_t size);
static inline void kvf_attention_params_init(kvf_attention_params *params)
{
    kvf_attention_params_init_sized(params, sizeof *params);
}

/**
 * Set the attention parameters of a layer, which are those of kvf_attention_params_init at first. A
 * call that fails changes nothing. A layer that holds tokens refuses other parameters. A saved
 * sequence can be restored only to layers with the same parameters. With sinks the call waits for
 * earlier calls of the cache. Recordings from before a change cannot be replayed.
 *
 * @param params borrowed for the call
 * @return KVF_OK; KVF_INVALID names the field; with sinks also KVF_OUT_OF_MEMORY, KVF_DEVICE_FAILED
 */
KVF_API KVF_CHECKED kvf_status kvf_cache_attention_params(kvf_cache *cache, uint32_t layer,
                                                          const kvf_attention_params *params);

/* ---- sequences ---- */

/** @return KVF_OK; KVF_FULL when sequences_max are alive */
KVF_API KVF_CHECKED kvf_status kvf_sequence_create(kvf_cache *cache, kvf_sequence **out);

/**
 * Make a second sequence that continues from the same tokens. Sealed pages and their digests are
 * shared, and so are their copies on the device. The local window, the static set and the tables
 * are copied on @p stream.
 * @return KVF_OK; KVF_FULL when sequences_max are alive
 */
KVF_API KVF_CHECKED kvf_status kvf_sequence_fork(kvf_cache *cache, kvf_sequence *parent,
                                                 kvf_stream *stream, kvf_sequence **out);

/**
 * Cut off the newest tokens: every layer keeps its tokens at positions below @p tokens. With
 * contiguous positions @p tokens is the length that remains. Forks, sealed pages, their digests and
 * resident pages do not change; a page that is cut returns to the local window.
 *
 * Later calls run as if the dropped tokens had never been there, bit for bit: outputs, selection,
 * and the steps at which refreshes and verification are due. Two things may differ. Hits and misses
 * differ if pages came to the device since. A static set (hybrid, static) differs if the dropped
 * tokens took part in it: if it was chosen since, the next step chooses it again from all keys; a
 * RESIDENT refresh finds the pages that are resident now; and a refresh that is due before the
 * dropped tokens are replaced uses the remaining queries. Dropped tokens stay in the statistics; in
 * kvf_footprint they count as held and are no step of full attention. If pages are quantized, the
 * newest sealed block returns to the local window exact; older blocks return dequantized, and
 * results then differ by the quantization error.
 *
 * @param tokens   0 empties the sequence
 * @return KVF_OK; KVF_INVALID if the sequence ends before @p tokens; KVF_UNSUPPORTED within tokens
 *         that a prune policy chose (evict), and with streaming heads
 *
 * Stream: enqueues on @p stream; does not wait. Memory: allocates nothing.
 */
KVF_API KVF_CHECKED kvf_status kvf_sequence_truncate(kvf_cache *cache, kvf_sequence *sequence,
                                                     uint32_t tokens, kvf_stream *stream);

/** End a sequence. Its pages are free once the work enqueued so far is done. */
KVF_API void kvf_sequence_destroy(kvf_sequence *sequence);

/** Tokens that a layer of a sequence holds. */
KVF_API uint32_t kvf_sequence_length(const kvf_sequence *sequence, uint32_t layer);

/** True position of token @p index of a layer. @p index < length. */
KVF_API uint32_t kvf_sequence_position(const kvf_sequence *sequence, uint32_t layer,
                                       uint32_t index);

/* ---- prefill ---- */

typedef struct kvf_prefill_args {
    kvf_sequence *sequence;
    uint32_t layer;
    uint32_t tokens; /**< of this chunk: 1 … prefill_chunk_max */
    const void *q;   /**< [tokens, query_heads, head_dim]; NULL = append only */
    const void *k;   /**< [tokens, kv_heads, head_dim], after RoPE */
    const void *v;   /**< [tokens, kv_heads, value_dim] */
    /** [tokens] on the host, ascending, below UINT32_MAX, copied; NULL = contiguous. */
    const uint32_t *positions;
    void *out; /**< [tokens, query_heads, value_dim]; unused if q is NULL */
} kvf_prefill_args;

/**
 * Append a chunk to one layer and attend densely and causally over all tokens of the layer so far.
 * With k and v NULL nothing is appended, and q are queries of the layer's newest `tokens` tokens,
 * for a layer of the model that shares the keys of this one; see kvf_decode. A cache with quantized
 * pages refuses that.
 *
 * @return KVF_OK; KVF_FULL if tokens_max or the page pool is exhausted (nothing was appended);
 *         KVF_INVALID; KVF_NOT_FINITE if an earlier chunk or step contained a NaN
 *
 * Stream: enqueues on @p stream; does not wait. Memory: allocates nothing.
 */
KVF_API KVF_CHECKED kvf_status kvf_prefill_sized(kvf_cache *cache, const kvf_prefill_args *args,
                                                 size_t size, kvf_stream *stream);
static inline KVF_CHECKED kvf_status kvf_prefill(kvf_cache *cache, const kvf_prefill_args *args,
                                                 kvf_stream *stream)
{
    return kvf_prefill_sized(cache, args, sizeof *args, stream);
}

/* ---- decode ---- */

/** A row is a token: one per sequence, or `tokens[b]` consecutive ones of sequence b, in the order
 * of the batch. */
typedef struct kvf_decode_args {
    uint32_t layer;
    uint32_t batch;                 /**< 1 … sequences_max; distinct sequences */
    kvf_sequence *const *sequences; /**< [batch] on the host, copied */
    const void *q;                  /**< [rows, query_heads, head_dim] */
    const void *k;                  /**< [rows, kv_heads, head_dim], after RoPE */
    const void *v;                  /**< [rows, kv_heads, value_dim] */
    const uint32_t *positions;      /**< [rows] on the host, copied; NULL = last + 1 */
    void *out;                      /**< [rows, query_heads, value_dim] */
    float *lse;                     /**< [rows, query_heads] natural log; may be NULL */
    const uint32_t *tokens;         /**< [batch] on the host, copied: new tokens of each sequence,
                                         1 … tokens_per_step_max; NULL = one each */
    const float *page_scores;       /**< [rows, kv_heads, page_stride] on the device: the caller's
                                         own selection, see kvf_decode; NULL = by digest */
    const int32_t *page_ids;        /**< the same shape, instead of page_scores */
    uint32_t page_stride;           /**< of page_scores or page_ids; at most 16777216 */
} kvf_decode_args;

/**
 * One decode step of one layer for a batch: append, score, select, fetch, attend.
 *
 * With several tokens of a sequence (drafts to verify, a short turn) every token selects for itself
 * and attends causally. Outputs, selection and statistics are the same, bit for bit, as from as
 * many calls with one token each; time, and which pages were hits, may differ. Tokens that seal no
 * block, refresh no static set and are not verified form one batch: a page that several of them
 * selected is moved once. With a disk tier, and in layers with streaming heads, every token is a
 * step of its own. kvf_sequence_truncate takes tokens back. Recorded steps, page lists, and a cache
 * with both a disk tier and streaming heads take one token per sequence: else KVF_UNSUPPORTED.
 *
 * With k and v NULL a step takes queries alone, one per sequence, for a layer of the model that
 * shares the keys of another one (shared KV): `layer` owns the keys, and its own step came before.
 * Nothing is appended, and positions are NULL. The queries select for themselves, with the bits of
 * a layer that holds copies of the keys. Static set and attention parameters are the owner's; its
 * own steps do not change. Recorded steps, streaming heads and select = ORACLE refuse it.
 *
 * The same input, settings and device give the same bits, for any number of threads, any transfer
 * method, and any resident pages.
 *
 * A caller that selects by itself passes page_scores, in which entry p of a list is the score of
 * page p (tokens p * page_size to (p + 1) * page_size - 1 of the sequence in this layer), or
 * page_ids, the best page first. They replace the scores by digest, and nothing else changes: each
 * list takes as many pages as fit the budget, by score or in order, ties to the lower id. Only
 * pages of sealed blocks with a token outside sink and static set are taken. All others are skipped
 * and use no budget: pages of the local window and of the sink, which are attended anyway, ids out
 * of range (-1 fills a list), repeated ids, scores that are NaN or -infinity. Pages from
 * page_stride on are not scored. A list of fewer pages than fit attends to fewer, even if all would
 * fit. Lists of streaming heads are ignored. The arrays are 4-byte aligned, in device memory, and
 * read in stream order, by a recorded step each time that it is replayed. They need select =
 * DYNAMIC or HYBRID, which choose pages for KV heads by score: else KVF_UNSUPPORTED.
 *
 * @return as kvf_prefill; KVF_SYSTEM if a read from disk failed. A call that fails does not change
 *         what later calls attend to, return and save. Statistics do not count it, except reads
 *         from disk and, if pages move, hits that became misses.
 *
 * Stream: enqueues on @p stream; does not wait. Exception on a GPU: transfers with a host thread
 * (gather, each, batch, and auto if it selects one of these) return only when their copies are
 * enqueued, so work on @p stream must not depend on later calls. Memory: allocates nothing.
 */
KVF_API KVF_CHECKED kvf_status kvf_decode_sized(kvf_cache *cache, const kvf_decode_args *args,
                                                size_t size, kvf_stream *stream);
static inline KVF_CHECKED kvf_status kvf_decode(kvf_cache *cache, const kvf_decode_args *args,
                                                kvf_stream *stream)
{
    return kvf_decode_sized(cache, args, sizeof *args, stream);
}

/* ---- recorded decode ---- */

typedef struct kvf_recording kvf_recording;

/**
 * Record a whole decode step once and run it again without enqueueing it: CUDA graphs.
 *
 *     kvf_record_begin(cache, sequences, batch, stream);
 *     for each layer: the caller's kernels, kvf_decode(...), the caller's kernels   // not executed
 *     kvf_record_end(cache, &recording);
 *     for each token: if (kvf_replay_is_possible(recording)) kvf_replay(recording, stream);
 *                     else enqueue the step as usual
 *
 * A recorded step appends the next position of every sequence, and reads and writes the pointers
 * that were passed while recording. Replaying gives the same bits as enqueueing. The host does not
 * wait; it writes a few hundred bytes per layer. Recording needs the CUDA device, transfer MAPPED,
 * AUTO or DIRECT, a policy that runs on the device (not CUSTOM, not ORACLE), and no disk_path.
 *
 * @return KVF_OK; KVF_UNSUPPORTED with the setting that is in the way; KVF_INVALID; KVF_BUSY while
 *         another stream of the device is being recorded
 */
KVF_API KVF_CHECKED kvf_status kvf_record_begin(kvf_cache *cache, kvf_sequence *const *sequences,
                                                uint32_t batch, kvf_stream *stream);

/** End recording. On failure nothing is recorded and the cache is usable. */
KVF_API KVF_CHECKED kvf_status kvf_record_end(kvf_cache *cache, kvf_recording **out);

/** 0 if the next step refreshes a static set, verifies, or does not fit: enqueue such a step as
 * usual. Always 0 after one of the sequences is destroyed, or attention parameters change. */
KVF_API int kvf_replay_is_possible(const kvf_recording *recording);

/** Run the recorded step for the next token of every sequence. Errors as kvf_decode. */
KVF_API KVF_CHECKED kvf_status kvf_replay(kvf_recording *recording, kvf_stream *stream);

/** Work items of the recorded step: kernels, copies and fills, the caller's included. */
KVF_API uint32_t kvf_recording_nodes(const kvf_recording *recording);

/** Destroy it before its cache. Does not wait; no replay may be under way. NULL is fine. */
KVF_API void kvf_recording_destroy(kvf_recording *recording);

/* ---- selection on its own ---- */

/**
 * Page lists of one layer, FlashInfer-style: list i = batch row x kv_heads + KV head, its pages are
 * indices[indptr[i] … indptr[i+1]-1], ascending. All arrays are the caller's, in device memory.
 */
typedef struct kvf_page_lists {
    int32_t *indptr;   /**< [batch x kv_heads + 1] */
    int32_t *indices;  /**< [capacity] page index within (sequence, layer) */
    uint32_t capacity; /**< at least batch x kv_heads x pages of the longest list (see below) */
    int32_t *last_page_len; /**< [batch x kv_heads] tokens in the last page of each list */
} kvf_page_lists;

/** The most pages of one list under the settings of this cache. */
KVF_API uint32_t kvf_select_pages_max(const kvf_cache *cache);

/**
 * Append the token and select pages only; the caller attends with its own kernel. Every token to
 * attend to is in the listed pages: pages of the sink, of the local window, and selected pages,
 * each once. The cache needs static_ratio 0, because page lists cannot name single tokens, a policy
 * that selects pages for a KV head (not QUEST, ARKVALE, ORACLE), and no streaming heads. If pages
 * are quantized (kvf_cache_config.pages), the caller's kernel attends to the output of
 * kvf_read_pages. With a disk tier the call waits until listed pages are in memory. They stay there
 * until the next call on the cache; if that call is on @p stream, too, also for all work enqueued
 * on @p stream before it.
 * @return as kvf_decode; KVF_UNSUPPORTED with the setting that is in the way
 */
KVF_API KVF_CHECKED kvf_status kvf_select_pages_sized(kvf_cache *cache, const kvf_decode_args *args,
                                                      size_t args_size, const kvf_page_lists *lists,
                                                      size_t lists_size, kvf_stream *stream);
static inline KVF_CHECKED kvf_status kvf_select_pages(kvf_cache *cache, const kvf_decode_args *args,
                                                      const kvf_page_lists *lists,
                                                      kvf_stream *stream)
{
    return kvf_select_pages_sized(cache, args, sizeof *args, lists, sizeof *lists, stream);
}

/**
 * Address of a page: [page_size, head_dim + value_dim], key and value of each token side by side.
 * Sealed pages are in host memory (this is their address for the device), newer ones on the device.
 * NULL for pages of streaming heads, and for sealed pages that are quantized
 * (kvf_cache_config.pages), which kvf_read_pages copies. Valid until the sequence appends. With a
 * disk tier: valid until the next call on the cache, and NULL if the page is on disk; pages that
 * the latest kvf_select_pages listed stay in memory. Call it in stream order or after
 * kvf_stream_wait.
 */
KVF_API const void *kvf_page_address(const kvf_sequence *sequence, uint32_t layer, uint32_t kv_head,
                                     uint32_t page);

/**
 * Attend over given page lists: the other half. @p args->k, v are ignored, nothing is appended;
 * page_scores and page_ids are NULL. Quantized pages are attended as in a step, with an exact sink.
 * With a disk tier the call waits for the lists, and until their pages are in memory.
 */
KVF_API KVF_CHECKED kvf_status kvf_attend_pages_sized(kvf_cache *cache, const kvf_decode_args *args,
                                                      size_t args_size, const kvf_page_lists *lists,
                                                      size_t lists_size, kvf_stream *stream);
static inline KVF_CHECKED kvf_status kvf_attend_pages(kvf_cache *cache, const kvf_decode_args *args,
                                                      const kvf_page_lists *lists,
                                                      kvf_stream *stream)
{
    return kvf_attend_pages_sized(cache, args, sizeof *args, lists, sizeof *lists, stream);
}

/**
 * Copy listed pages to the device, contiguous and in full precision, from any storage format of the
 * cache: for a kernel of the caller that cannot read quantized pages, or needs pages in one place.
 *
 * @param args     layer, batch and sequences are those of the lists; out receives page indices[i]
 *                 as [page_size, head_dim + value_dim] at i, in device memory. Tokens of sink and
 *                 local window are exact; quantized ones are dequantized as in a step and rounded
 *                 to the element type; after the last token are zeros. Other fields are ignored.
 * @param lists    from kvf_select_pages, or the caller's; indptr ends within capacity
 * @return as kvf_attend_pages
 *
 * Stream: enqueues on @p stream; with a disk tier the call waits for the lists and their pages.
 */
KVF_API KVF_CHECKED kvf_status kvf_read_pages_sized(kvf_cache *cache, const kvf_decode_args *args,
                                                    size_t args_size, const kvf_page_lists *lists,
                                                    size_t lists_size, kvf_stream *stream);
static inline KVF_CHECKED kvf_status kvf_read_pages(kvf_cache *cache, const kvf_decode_args *args,
                                                    const kvf_page_lists *lists, kvf_stream *stream)
{
    return kvf_read_pages_sized(cache, args, sizeof *args, lists, sizeof *lists, stream);
}

/* ---- statistics ---- */

/** Totals since open or the last reset. Read and reset them after kvf_stream_wait. Figures of
 * transfers and of the disk are not counted per layer. If the device fails, counters that kernels
 * keep read 0, and a reset does nothing. */
typedef struct kvf_stats {
    uint64_t steps;           /**< (layer, sequence) decode steps */
    uint64_t tokens_attended; /**< summed over KV heads; with sink and local window */
    uint64_t tokens_held;     /**< that full attention would attend to, summed over KV heads */
    uint64_t pages_selected;  /**< summed over KV heads */
    /** In a slot, or brought there for another row of the call. Transfer DIRECT moves nothing, and
     * counts as if pages moved. On a GPU rows of a call take slots concurrently, so the pages that
     * later calls find may vary; hits and misses add up to pages_selected. */
    uint64_t hits;
    uint64_t misses;          /**< moved, once for all rows of a call; with DIRECT: would be */
    uint64_t bytes_to_device; /**< pages moved for misses */
    uint64_t bytes_to_host;   /**< sealed pages written back */
    uint64_t bytes_refresh;   /**< host pages read by exact refreshes, as large as in dtype */
    uint64_t copies;          /**< copies submitted to fetch pages */
    uint64_t refreshes;       /**< of static sets, per layer and sequence */
    uint64_t append_ns, score_ns, select_ns, gather_ns, copy_ns, attend_ns, refresh_ns;
    uint64_t verified; /**< (layer, sequence, query head) attention rows compared */
    double recall_sum; /**< of attention recall over the verified rows */
    double error_max;  /**< max |sparse - dense| over the verified rows */
    uint32_t static_tokens_min, static_tokens_max; /**< over layers; differs with the auto ratio */
    uint64_t disk_wanted; /**< bundles of the disk tier that calls needed, once per call */
    uint64_t disk_reads;  /**< of those, read from the file; the others were in memory */
    uint64_t bytes_from_disk, bytes_to_disk;
    uint64_t pages_from_disk; /**< selected pages whose bundle had to be read first */
    uint64_t disk_wait_ns;    /**< that calls waited for reads */
    uint64_t bytes_prompt;    /**< that chunks read in host memory; only if prompt_bytes is not 0 */
} kvf_stats;

KVF_API void kvf_cache_stats_sized(const kvf_cache *cache, kvf_stats *stats, size_t size);
static inline void kvf_cache_stats(const kvf_cache *cache, kvf_stats *stats)
{
    kvf_cache_stats_sized(cache, stats, sizeof *stats);
}
KVF_API void kvf_cache_layer_stats_sized(const kvf_cache *cache, uint32_t layer, kvf_stats *stats,
                                         size_t size);
static inline void kvf_cache_layer_stats(const kvf_cache *cache, uint32_t layer, kvf_stats *stats)
{
    kvf_cache_layer_stats_sized(cache, layer, stats, sizeof *stats);
}
/** All counters to 0. Wait for streams with steps on their way first: kernels count. */
KVF_API void kvf_cache_stats_reset(kvf_cache *cache);

/**
 * How much KV was held, and for how long (PruLong, section 2.1), since open or the last
 * kvf_cache_stats_reset. An entry is one token of one KV head of one layer. A step is one position
 * of a sequence, in the prompt or generated; a token that a layer never gets is a step of that
 * layer too. At each step, every entry counts that was appended and not evicted. Shares are
 * relative to full causal attention over the same steps; all are zero before the first step.
 *
 * Pages in host memory count as held, whether selected or not. An entry counts for the device while
 * it is in the sink, the local window or the ring of a streaming head. From the first decode step
 * on, entries of the static set and of the sequence's share of the slots count, too, both as full.
 * Every other entry is in host pages only.
 *
 * A fork counts as its own sequence from the fork on. Tokens that a restart computes again, and the
 * patch of chunked eviction, count as held but are no step of full attention.
 */
typedef struct kvf_footprint {
    double footprint;             /**< KV footprint: entry_steps / full_entry_steps */
    double device, host;          /**< of which by place; device + host = footprint */
    double peak;                  /**< peak KV: peak_entries / full_entries */
    double device_peak;           /**< most entries on the device at a step / full_entries */
    uint64_t steps;               /**< summed over sequences */
    uint64_t entry_steps;         /**< entries summed over steps, layers and KV heads */
    uint64_t device_entry_steps;  /**< of which on the device */
    uint64_t full_entry_steps;    /**< of full causal attention */
    uint64_t peak_entries;        /**< most that each (sequence, layer) held at a step, summed */
    uint64_t device_peak_entries; /**< the same, on the device */
    uint64_t full_entries;        /**< tokens seen x layers x KV heads, summed over sequences */
} kvf_footprint;

/** Read it between whole prompts and steps. O(sequences x layers). */
KVF_API void kvf_cache_footprint_sized(const kvf_cache *cache, kvf_footprint *footprint,
                                       size_t size);
static inline void kvf_cache_footprint(const kvf_cache *cache, kvf_footprint *footprint)
{
    kvf_cache_footprint_sized(cache, footprint, sizeof *footprint);
}

#ifdef __cplusplus
}
#endif
#endif
