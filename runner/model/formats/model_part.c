/* SPDX-License-Identifier: Apache-2.0 */

/* See the header. */

#include "model_memory.h"

#include "gguf_parts.h"

#include <unistd.h>

bool model_has_part(const char *model, const char *name)
{
    char path[MODEL_PATH_BYTES];
    if (!gguf_is_file(model))
        return access(model_path(path, model, name), F_OK) == 0;
    return gguf_has_part(name);
}

static kvf_status write_part(const char *model, const char *name, size_t bytes_max, kvf_text *out,
                             kvf_error *error)
{
    gguf *file;
    KVF_TRY(gguf_open(model, &file, error));
    kvf_status status = gguf_write_part(file, name, out, error);
    if (status == KVF_OK && out->size > bytes_max)
        status = model_fail(error, KVF_CORRUPT,
                            "%.120s: as %s it is larger than the %zu bytes "
                            "allowed",
                            gguf_name(file), name, bytes_max);
    gguf_close(file);
    return status;
}

kvf_status model_read_part(const char *model, const char *name, size_t bytes_max, kvf_text *out,
                           kvf_error *error)
{
    char path[MODEL_PATH_BYTES];
    kvf_status status;
    *out = (kvf_text){0};
    if (gguf_is_file(model)) {
        status = write_part(model, name, bytes_max, out, error);
    } else {
        model_path(path, model, name);
        status = model_read_file(path, bytes_max, out, error);
        if (status == KVF_OK)
            status = model_check_pointer(path, out->bytes, out->size, error);
    }
    if (status != KVF_OK)
        kvf_text_free(out);
    return status;
}

kvf_status model_blame_part(const char *model, kvf_status status, kvf_error *error)
{
    if (status == KVF_OK || !error || !gguf_is_file(model))
        return status;
    const kvf_error cause = *error;
    model_fail(error, status, "%.120s as %.380s", model_base_name(model), cause.text);
    error->foreign = cause.foreign;
    return status;
}
