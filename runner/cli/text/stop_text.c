/* SPDX-License-Identifier: Apache-2.0 */

/* Texts that end an answer; see the header. */

#include "printer.h"

#include <string.h>

/* Whether one of the texts ends at @p end; the longest of them begins at @p start. */
static bool ends_at(const cli_stop_texts *stop, const char *bytes, size_t end, size_t *start)
{
    bool found = false;
    for (uint32_t i = 0; i < stop->count; i++) {
        const size_t length = strlen(stop->texts[i]);
        if (length > end || memcmp(bytes + end - length, stop->texts[i], length) != 0)
            continue;
        *start = found && *start < end - length ? *start : end - length;
        found = true;
    }
    return found;
}

/* Whether one of the texts may begin with these bytes, which end what is known. */
static bool may_begin(const cli_stop_texts *stop, const char *bytes, size_t size)
{
    for (uint32_t i = 0; i < stop->count; i++)
        if (size < strlen(stop->texts[i]) && memcmp(bytes, stop->texts[i], size) == 0)
            return true;
    return false;
}

/* The stop that is complete first counts, so that it does not matter how the text was cut. */
kvf_status cli_stop_push(cli_stop_filter *f, const char *bytes, size_t size, kvf_text *out,
                         kvf_error *error)
{
    if (f->found || size == 0)
        return KVF_OK;
    if (f->stop->count == 0)
        return kvf_text_append(out, bytes, size, error);
    size_t end = f->held.size, pass = 0;
    KVF_TRY(kvf_text_append(&f->held, bytes, size, error));
    while (end < f->held.size && !f->found)
        f->found = ends_at(f->stop, f->held.bytes, ++end, &pass);
    while (!f->found && pass < f->held.size &&
           !may_begin(f->stop, f->held.bytes + pass, f->held.size - pass))
        pass++;
    KVF_TRY(kvf_text_append(out, f->held.bytes, pass, error));
    memmove(f->held.bytes, f->held.bytes + pass, f->held.size - pass);
    f->held.size -= pass;
    return KVF_OK;
}

kvf_status cli_stop_finish(cli_stop_filter *f, kvf_text *out, kvf_error *error)
{
    const kvf_status status =
        f->found ? KVF_OK : kvf_text_append(out, f->held.bytes, f->held.size, error);
    f->held.size = 0;
    return status;
}

void cli_stop_free(cli_stop_filter *f)
{
    kvf_text_free(&f->held);
}
