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

static bool is_scalar(const json_value *value)
{
    return value->kind != JSON_OBJECT && value->kind != JSON_ARRAY;
}

static bool ends_with_bytes(const json_value *value)
{
    size_t size = value->key ? strlen(value->key) : 0;
    return size >= 5 && strcmp(value->key + size - 5, "bytes") == 0;
}

static void show_scalar(const json_value *value)
{
    char buffer[64];
    if (value->kind == JSON_STRING)
        fputs(value->as.string[0] ? value->as.string : "-", stdout);
    else if (value->kind == JSON_TRUE || value->kind == JSON_FALSE)
        fputs(value->kind == JSON_TRUE ? "yes" : "no", stdout);
    else if (value->kind == JSON_NULL)
        fputs(ends_with_bytes(value) ? "no limit known" : "-", stdout);
    else if (value->kind == JSON_INTEGER && ends_with_bytes(value))
        fputs(kvf_bytes_text(value->as.integer, buffer), stdout);
    else
        fputs(json_show(value, buffer, sizeof buffer), stdout);
}

/* "key" in words, at a depth, padded to one column for the values. */
static void show_key(const json_value *value, uint32_t index, int depth)
{
    char key[64];
    if (value->key)
        snprintf(key, sizeof key, "%s", value->key);
    else
        snprintf(key, sizeof key, "%u", index + 1);
    for (char *c = key; *c; c++)
        if (*c == '_')
            *c = ' ';
    printf("%*s%-*s ", 2 * depth, "", 26 - 2 * depth, key);
}

/* Scalars of an array in one line. @return false if it holds anything else */
static bool show_row(const json_value *parent)
{
    for (const json_value *child = json_first(parent); child; child = json_next(parent, child))
        if (parent->kind != JSON_ARRAY || !is_scalar(child))
            return false;
    const char *comma = "";
    for (const json_value *child = json_first(parent); child; child = json_next(parent, child)) {
        fputs(comma, stdout);
        show_scalar(child);
        comma = ", ";
    }
    puts(json_first(parent) ? "" : "none");
    return true;
}

/* A tree as indented lines. The reader bounds its depth, so recursion is bounded. */
static void show(const json_value *parent, int depth)
{
    uint32_t index = 0;
    for (const json_value *child = json_first(parent); child;
         child = json_next(parent, child), index++) {
        show_key(child, index, depth);
        if (is_scalar(child)) {
            show_scalar(child);
            puts("");
        } else if (!show_row(child)) {
            puts("");
            show(child, depth + 1);
        }
    }
}

bool cli_info_print(const char *description, bool as_json)
{
    cli_json j = {0};
    json_document *document = NULL;
    kvf_error error = {0};
    bool is_said = merge(description, &j);
    if (is_said && as_json)
        puts(j.text.bytes);
    else if (is_said)
        is_said =
            json_parse(j.text.bytes, j.text.size, "the description", &document, &error) == KVF_OK;
    if (document)
        show(json_root(document), 0);
    else if (!is_said)
        fprintf(stderr, "kvferry: %s\n", error.text);
    json_free(document);
    cli_json_free(&j);
    return is_said;
}
