/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The library's report on machine and build, and what the runner adds, for people or as JSON.
 *
 * It knows how to show a JSON object to people. Invariant: --json prints exactly one object, the
 * library's own with a member "runner".
 */

#include "info_report.h"

#include "common/text.h"
#include "json.h"
#include "linear.h"
#include "matmul.h"
#include "output.h"

#include <dlfcn.h>
#include <string.h>
#include <unistd.h>

/* The plug-in for llama.cpp: beside the library as they are installed, or as they are built. "" =
 * there is none. */
static const char *find_llama_plugin(char *path, size_t capacity)
{
    static const char *const places[] = {"", "../llama/"};
    Dl_info library;
    const char *(*inside)(void) = kvf_version;
    void *address;
    memcpy(&address, &inside, sizeof address);
    const char *slash = dladdr(address, &library) ? strrchr(library.dli_fname, '/') : NULL;
    for (size_t i = 0; slash && i < sizeof places / sizeof *places; i++) {
        const int folder = (int)(slash + 1 - library.dli_fname);
        kvf_format(path, capacity, "%.*s%slibggml-kvferry.so", folder, library.dli_fname,
                   places[i]);
        if (access(path, R_OK) == 0)
            return path;
    }
    return "";
}

static void describe_runner(cli_json *j)
{
    cli_json_object(j, "runner");
    char matmul[64];
    kvf_matmul_describe(matmul, sizeof matmul);
    cli_json_text(j, "matrix_products", matmul);
    cli_json_bool(j, "bf16_in_hardware", kvf_matmul_bf16_native());
    cli_json_text(j, "matrix_vector_kernels", kvf_linear_kernels_choose(KVF_ISA_ALL)->name);
    cli_json_text(j, "families", "Llama-3, Mistral and Ministral, Qwen2.5, Qwen3");
    char plugin[4096];
    cli_json_text(j, "llama_plugin", find_llama_plugin(plugin, sizeof plugin));
    cli_json_end(j, '}');
}

/* The library's object, without its last brace, and the runner's member. */
static bool merge(const char *description, cli_json *j)
{
    const char *end = strrchr(description, '}');
    if (!end)
        return false;
    size_t size = (size_t)(end - description);
    while (size > 0 && strchr(" \n\t", description[size - 1]))
        size--;
    if (kvf_text_append(&j->text, description, size, NULL) != KVF_OK)
        return false;
    j->comma = size > 1;
    describe_runner(j);
    cli_json_end(j, '}');
    return !j->failed;
}

static bool is_scalar(const json_t *value)
{
    return !json_is_object(value) && !json_is_array(value);
}

/* @p key of the value; "" = it has none */
static void show_scalar(const char *key, const json_t *value)
{
    char buffer[64];
    uint64_t bytes;
    const size_t size = strlen(key);
    const bool is_bytes = size >= 5 && strcmp(key + size - 5, "bytes") == 0;
    if (json_is_string(value))
        fputs(json_string_length(value) ? json_string_value(value) : "-", stdout);
    else if (json_is_boolean(value))
        fputs(json_is_true(value) ? "yes" : "no", stdout);
    else if (json_is_null(value))
        fputs(is_bytes ? "no limit known" : "-", stdout);
    else if (is_bytes && json_is_whole(value, JSON_WHOLE_MAX, &bytes))
        fputs(kvf_bytes_text(bytes, buffer), stdout);
    else
        fputs(json_show(value, buffer, sizeof buffer), stdout);
}

/* Scalars of an array in one line. @return false if it holds anything else */
static bool show_row(const json_t *parent)
{
    json_t *child;
    size_t i;
    json_array_foreach (parent, i, child)
        if (!is_scalar(child))
            return false;
    json_array_foreach (parent, i, child) {
        fputs(i ? ", " : "", stdout);
        show_scalar("", child);
    }
    puts(i ? "" : "none");
    return true;
}

static void show(json_t *parent, int depth);

/* "key" in words, at a depth, padded to one column for the values. */
static void show_member(const char *key, json_t *value, int depth)
{
    char words[64];
    snprintf(words, sizeof words, "%s", key);
    for (char *c = words; *c; c++)
        if (*c == '_')
            *c = ' ';
    printf("%*s%-*s ", 2 * depth, "", 26 - 2 * depth, words);
    if (is_scalar(value)) {
        show_scalar(key, value);
        puts("");
    } else if (json_object_size(value) != 0 || !show_row(value)) {
        puts("");
        show(value, depth + 1);
    }
}

/* A tree as indented lines; array elements by number. The reader bounds its depth. */
static void show(json_t *parent, int depth)
{
    const char *key;
    char number[24];
    json_t *child;
    size_t i;
    json_object_foreach (parent, key, child)
        show_member(key, child, depth);
    json_array_foreach (parent, i, child) {
        snprintf(number, sizeof number, "%zu", i + 1);
        show_member(number, child, depth);
    }
}

bool cli_info_print(const char *description, bool as_json)
{
    cli_json j = {0};
    json_t *document = NULL;
    kvf_error error = {0};
    bool is_said = merge(description, &j);
    if (is_said && as_json)
        puts(j.text.bytes);
    else if (is_said)
        is_said =
            json_parse(j.text.bytes, j.text.size, "the description", &document, &error) == KVF_OK;
    if (document)
        show(document, 0);
    else if (!is_said)
        fprintf(stderr, "kvferry: %s\n", error.text);
    json_decref(document);
    cli_json_free(&j);
    return is_said;
}
