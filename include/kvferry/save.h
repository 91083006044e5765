/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVFERRY_SAVE_H
#define KVFERRY_SAVE_H

/**
 * @file
 * Sequences that last: saved to a file, and restored into a cache to continue bit for bit.
 *
 *     kvf_save_args sa;
 *     kvf_save_args_init(&sa);
 *     sa.sequence = sequence; sa.path = "prompt.kvs"; sa.model = "llama-3.1-8b:5f1e...";
 *     kvf_sequence_save(cache, &sa, stream, &save);     // enqueues; decoding may go on
 *     ...
 *     kvf_save_finish(save, &error);                    // waits; KVF_OK if the file is whole
 *
 *     kvf_restore_args ra;
 *     kvf_restore_args_init(&ra);
 *     ra.path = "prompt.kvs"; ra.model = "llama-3.1-8b:5f1e...";
 *     kvf_sequence_restore(cache, &ra, stream, &sequence);
 *
 * A file holds the pages of all layers, positions, local windows, static sets, kept queries, rings
 * of streaming heads, and recent choices. It holds no digests: they are built again from
 * the pages, so the file is smaller and does not depend on them.
 *
 * After a crash or power loss at any moment the path names the old file, the new one, or none;
 * never a file that opens and is not whole. A file whose size, header or checksums do not match is
 * refused: KVF_CORRUPT.
 */

#include <kvferry/kvferry.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvf_save kvf_save;

typedef struct kvf_save_args {
    size_t size; /**< set by init */
    kvf_sequence *sequence;
    /** A file there is replaced once the new one is whole; no folder, no device. */
    const char *path;
    const char *model;   /**< name of the model, at most 63 bytes; NULL = "" */
    const void *note;    /**< bytes of the caller's, such as token ids; copied; may be NULL */
    uint32_t note_bytes; /**< at most 64 MiB */
} kvf_save_args;

KVF_API void kvf_save_args_init_sized(kvf_save_args *args, size_t size);
static inline void kvf_save_args_init(kvf_save_args *args)
{
    kvf_save_args_init_sized(args, sizeof *args);
}

/**
 * Save a sequence as it is after the work enqueued on @p stream so far. Tokens that are not in
 * sealed pages are copied on the stream; a separate thread writes the file. The sequence may
 * continue, fork, or be destroyed meanwhile. Its pages count as used until kvf_save_finish.
 *
 * A prompt that a pruner began is saved without the pruner's state: save between prompts.
 *
 * @return KVF_OK; KVF_INVALID names the argument; KVF_UNSUPPORTED if the build lacks checksums;
 *         KVF_OUT_OF_MEMORY, KVF_PIN_FAILED, KVF_SYSTEM; KVF_NOT_FINITE
 *
 * Stream: enqueues on @p stream; does not wait. Memory: a copy of windows, static sets and tables.
 */
KVF_API KVF_CHECKED kvf_status kvf_sequence_save(kvf_cache *cache, const kvf_save_args *args,
                                                 kvf_stream *stream, kvf_save **out);

/** 1 once kvf_save_finish will not wait. Thread: any. */
KVF_API int kvf_save_is_done(const kvf_save *save);

/**
 * Wait for the file, and end the save. Finish it before its cache is closed; it is a call on the
 * cache like any other. If it returns KVF_OK the file is there, whole and durable.
 *
 * @param error   filled on failure; may be NULL
 * @return KVF_OK; KVF_SYSTEM with errno, such as ENOSPC, EIO, or EFBIG beyond RLIMIT_FSIZE. An
 *         earlier file under this path is then unchanged, unless the text mentions that the new
 *         file's name could not be made durable. KVF_NOT_FINITE; KVF_OUT_OF_MEMORY;
 *         KVF_DEVICE_FAILED
 */
KVF_API KVF_CHECKED kvf_status kvf_save_finish(kvf_save *save, kvf_error *error);

typedef struct kvf_restore_args {
    size_t size; /**< set by init */
    const char *path;
    const char *model; /**< must equal the file's; NULL = any */
    uint32_t exact;    /**< 1 (default) = refuse a file that would not continue bit for bit under
                          the settings of this cache, and name the setting; 0 = take its tokens */
} kvf_restore_args;

KVF_API void kvf_restore_args_init_sized(kvf_restore_args *args, size_t size);
static inline void kvf_restore_args_init(kvf_restore_args *args)
{
    kvf_restore_args_init_sized(args, sizeof *args);
}

/**
 * Make a sequence from a file. The cache's geometry (layers, heads, head_dim, value_dim, dtype,
 * head_mask, streaming_sink and streaming windows) must equal the file's, and so must the attention
 * parameters of every layer (kvf_cache_attention_params): set them before. A file with pages of 64
 * tokens needs a cache with such pages, and the reverse. With `exact` every setting that decides
 * which tokens are attended must be equal as well. Without it, if such a setting differs, the
 * sequence is as if its tokens had been appended without queries: the next step chooses a static
 * set again. If all are equal, it continues bit for bit. Settings of transfer, limits and
 * statistics may always differ.
 *
 * @return KVF_OK; KVF_SYSTEM if the file cannot be read; KVF_CORRUPT if it is damaged;
 *         KVF_UNSUPPORTED for another format version. KVF_INVALID names the setting or the model
 *         that differs; KVF_FULL if tokens_max, sequences_max or the page pool is too small
 *
 * Stream: enqueues on @p stream, and waits for it. On failure no sequence was made.
 */
KVF_API KVF_CHECKED kvf_status kvf_sequence_restore(kvf_cache *cache, const kvf_restore_args *args,
                                                    kvf_stream *stream, kvf_sequence **out);

/** The header of a file. */
typedef struct kvf_saved {
    uint64_t bytes;  /**< of the file */
    uint32_t tokens; /**< of the longest layer */
    uint32_t layers, query_heads, kv_heads, head_dim;
    kvf_dtype dtype;
    uint32_t page_size;
    uint32_t note_bytes;
    char model[64];
    char library[16]; /**< version of kvferry that wrote it */
    uint32_t value_dim;
    uint32_t reserved; /**< 0 */
} kvf_saved;

/**
 * Read the header of a file, and check it as a whole. Pages are checked only with @p verify = 1, or
 * when the sequence is restored.
 *
 * @param note       receives at most @p capacity bytes of the caller's note; may be NULL if 0
 * @param error      filled on failure; may be NULL
 * @return KVF_OK, KVF_SYSTEM, KVF_CORRUPT, KVF_UNSUPPORTED, KVF_OUT_OF_MEMORY
 *
 * Thread: any.
 */
KVF_API KVF_CHECKED kvf_status kvf_saved_read_sized(kvf_runtime *runtime, const char *path,
                                                    int verify, kvf_saved *out, size_t size,
                                                    void *note, size_t capacity, kvf_error *error);
static inline KVF_CHECKED kvf_status kvf_saved_read(kvf_runtime *runtime, const char *path,
                                                    int verify, kvf_saved *out, void *note,
                                                    size_t capacity, kvf_error *error)
{
    return kvf_saved_read_sized(runtime, path, verify, out, sizeof *out, note, capacity, error);
}

#ifdef __cplusplus
}
#endif
#endif
