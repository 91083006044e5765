/* SPDX-License-Identifier: Apache-2.0 */

/* Lines of JSON; see the header. */

#include "json_lines.h"

#include <string.h>

#define FILE_BYTES_MAX (1u << 30)

static bool is_blank(const char *line, size_t size)
{
    while (size > 0 && memchr(" \t\r", line[size - 1], 3))
        size--;
    return size == 0;
}

kvf_status cli_json_lines(const char *path, cli_line_fn fn, void *user, kvf_error *error)
{
    char where[256];
    kvf_text text = {0};
    uint64_t number = 0;
    kvf_status status = model_read_file(NULL, path, FILE_BYTES_MAX, &text, error);
    for (size_t at = 0; status == KVF_OK && at < text.size;) {
        const char *line = text.bytes + at;
        const char *newline = memchr(line, '\n', text.size - at);
        const size_t size = newline ? (size_t)(newline - line) : text.size - at;
        json_document *document = NULL;
        at += size + 1;
        snprintf(where, sizeof where, "%.200s: line %llu", path, (unsigned long long)++number);
        if (is_blank(line, size))
            continue;
        status = json_parse_as_written(line, size, where, NULL, &document, error);
        if (status == KVF_OK)
            status = fn(user, json_root(document), where, number, error);
        json_free(document);
    }
    kvf_text_free(NULL, &text);
    return status;
}
