/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Part of kvferry/save.h: every function of it; see api.c. Files are known here by their names
 * only.
 */

#include <string.h>

#include "api.h"
#include "cache.h"
#include "extents.h"
#include "plain_file.h"
#include "saving.h"
#include "settings.h"

static const kvf_save_args save_defaults = {0};
static const kvf_restore_args restore_defaults = {.exact = 1};

void kvf_save_args_init_sized(kvf_save_args *args, size_t size)
{
    kvf_sized_init(args, size, &save_defaults, sizeof save_defaults);
}

void kvf_restore_args_init_sized(kvf_restore_args *args, size_t size)
{
    kvf_sized_init(args, size, &restore_defaults, sizeof restore_defaults);
}

static kvf_status check_path(kvf_cache *cache, const char *path)
{
    if (!path || !path[0])
        KVF_FAIL(cache->context, KVF_INVALID, "path is empty; name a file");
    return KVF_OK;
}

static kvf_status check_save(kvf_cache *cache, const kvf_save_args *args)
{
    KVF_TRY(check_path(cache, args->path));
    KVF_TRY(kvf_new_file_check(cache->context, args->path));
    if (args->model && strlen(args->model) >= KVF_SAVED_MODEL_MAX)
        KVF_FAIL(cache->context, KVF_INVALID, "model = '%.40s...': at most %u bytes; pass a digest",
                 args->model, KVF_SAVED_MODEL_MAX - 1);
    if (args->note_bytes > KVF_SAVED_NOTE_MAX || (args->note_bytes && !args->note))
        KVF_FAIL(cache->context, KVF_INVALID,
                 "note_bytes = %u: at most %u, and note must not be NULL", args->note_bytes,
                 KVF_SAVED_NOTE_MAX);
    if (kvf_checksum_bytes() == 0)
        KVF_FAIL(cache->context, KVF_UNSUPPORTED,
                 "this build cannot save or restore sequences; install libxxhash-dev and build "
                 "with -Dxxhash=enabled");
    return kvf_sequence_check(cache, args->sequence);
}

kvf_status kvf_sequence_save(kvf_cache *cache, const kvf_save_args *args, kvf_stream *stream,
                             kvf_save **out)
{
    KVF_CHECK_OPENS(cache, cache, out);
    KVF_TRY(kvf_enter_enqueueing(cache, stream));
    kvf_save_args own = save_defaults;
    kvf_status status = KVF_SIZED_READ(cache->context, kvf_save_args, args, &own);
    if (status == KVF_OK)
        status = check_save(cache, &own);
    if (status == KVF_OK)
        status = kvf_save_begin(cache, &own, stream, out);
    return kvf_leave(cache, status);
}

int kvf_save_is_done(const kvf_save *save)
{
    return !save || !kvf_handle_is_alive(save->cache->context) ||
           __atomic_load_n(&save->is_done, __ATOMIC_ACQUIRE) != 0;
}

kvf_status kvf_save_finish(kvf_save *save, kvf_error *error)
{
    kvf_runtime *runtime = save ? save->cache->runtime : NULL;
    kvf_status status = kvf_handle_check(runtime ? runtime->context : NULL, "save");
    if (status != KVF_OK)
        return kvf_runtime_report(NULL, status, error);
    kvf_context *context = runtime->context;
    kvf_context_hold(context); /* the save may be the last that keeps the runtime */
    status = kvf_runtime_report(runtime, kvf_save_end(save), error);
    kvf_context_release(context);
    return status;
}

kvf_status kvf_sequence_restore(kvf_cache *cache, const kvf_restore_args *args, kvf_stream *stream,
                                kvf_sequence **out)
{
    KVF_CHECK_OPENS(cache, cache, out);
    KVF_TRY(kvf_enter_enqueueing(cache, stream));
    kvf_restore_args own = restore_defaults;
    kvf_status status = KVF_SIZED_READ(cache->context, kvf_restore_args, args, &own);
    if (status == KVF_OK)
        status = check_path(cache, own.path);
    if (status == KVF_OK)
        status = kvf_restore(cache, &own, stream, out);
    return kvf_leave(cache, status);
}

static void describe(const kvf_saved_file *file, kvf_saved *out)
{
    const kvf_saved_head *head = file->header.head;
    const kvf_shape shape = kvf_saved_shape(head);
    *out = (kvf_saved){.bytes = file->bytes,
                       .layers = head->layers,
                       .query_heads = head->query_heads,
                       .kv_heads = head->kv_heads,
                       .head_dim = head->head_dim,
                       .value_dim = kvf_value_dim(&shape),
                       .dtype = (kvf_dtype)head->dtype,
                       .page_size = head->page_size,
                       .note_bytes = head->note_bytes};
    for (uint32_t i = 0; i < head->layers; i++)
        out->tokens = kvf_max_u32(out->tokens, file->header.layers[i].length);
    memcpy(out->model, head->model, sizeof out->model);
    memcpy(out->library, head->library, sizeof out->library);
}

kvf_status kvf_saved_read_sized(kvf_runtime *runtime, const char *path, int verify, kvf_saved *out,
                                size_t size, void *note, size_t capacity, kvf_error *error)
{
    kvf_saved own;
    kvf_saved_file file;
    kvf_status status = kvf_handle_check(runtime ? runtime->context : NULL, "runtime");
    if (status != KVF_OK)
        return kvf_runtime_report(NULL, status, error);
    kvf_context *context = runtime->context;
    status = kvf_pointer_check(context, "path", path);
    if (status == KVF_OK)
        status = kvf_pointer_check(context, "out", out);
    if (status != KVF_OK)
        return kvf_runtime_report(runtime, status, error);
    status = kvf_saved_open(runtime, path, &file);
    if (status == KVF_OK && verify)
        status = kvf_saved_check(&file);
    if (status == KVF_OK) {
        const size_t bytes = file.header.head->note_bytes;
        describe(&file, &own);
        KVF_SIZED_GIVE(out, size, &own);
        if (note && bytes && capacity)
            memcpy(note, file.header.note, bytes < capacity ? bytes : capacity);
    }
    kvf_saved_close(&file);
    return kvf_runtime_report(runtime, status, error);
}
