/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The JSON writer.
 *
 * It knows text. Invariant: as in output.h.
 */

#include "output.h"

#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/text.h"

static void put(cli_json *json, const char *bytes, size_t size)
{
    if (!json->failed && kvf_text_append(&json->text, bytes, size, NULL) != KVF_OK)
        json->failed = true;
}

static void put_string(cli_json *json, const char *bytes, size_t size)
{
    put(json, "\"", 1);
    for (size_t i = 0, step; i < size; i += step) {
        const size_t valid = kvf_utf8_size(bytes + i, size - i);
        const unsigned char c = (unsigned char)bytes[i];
        char escape[8] = KVF_UTF8_REPLACEMENT;
        step = valid ? valid : 1;
        if (c == '"' || c == '\\')
            snprintf(escape, sizeof escape, "\\%c", c);
        else if (c < 0x20)
            snprintf(escape, sizeof escape, "\\u%04x", c);
        else if (valid)
            memcpy(escape, bytes + i, valid), escape[valid] = '\0';
        put(json, escape, strlen(escape));
    }
    put(json, "\"", 1);
}

static void start(cli_json *json, const char *key)
{
    if (json->comma)
        put(json, ", ", 2);
    json->comma = true;
    if (!key)
        return;
    put_string(json, key, strlen(key));
    put(json, ": ", 2);
}

void cli_json_object(cli_json *json, const char *key)
{
    start(json, key);
    put(json, "{", 1);
    json->comma = false;
}

void cli_json_array(cli_json *json, const char *key)
{
    start(json, key);
    put(json, "[", 1);
    json->comma = false;
}

void cli_json_end(cli_json *json, char end)
{
    put(json, &end, 1);
    json->comma = true;
}

void cli_json_bytes(cli_json *json, const char *key, const char *bytes, size_t size)
{
    start(json, key);
    put_string(json, bytes, size);
}

void cli_json_text(cli_json *json, const char *key, const char *value)
{
    cli_json_bytes(json, key, value, strlen(value));
}

void cli_json_integer(cli_json *json, const char *key, uint64_t value)
{
    char number[32];
    start(json, key);
    snprintf(number, sizeof number, "%llu", (unsigned long long)value);
    put(json, number, strlen(number));
}

void cli_json_real(cli_json *json, const char *key, double value)
{
    char number[40] = "null";
    start(json, key);
    if (isfinite(value))
        kvf_format(number, sizeof number, "%.9g", value);
    put(json, number, strlen(number));
}

void cli_json_bool(cli_json *json, const char *key, bool value)
{
    start(json, key);
    put(json, value ? "true" : "false", value ? 4 : 5);
}

void cli_json_null(cli_json *json, const char *key)
{
    start(json, key);
    put(json, "null", 4);
}

/* Reals are as short as tells them apart, not the double of a float. */
void cli_json_setting(cli_json *json, const char *key, const kvf_setting *s, const void *config)
{
    char text[PATH_MAX];
    const char *at = kvf_setting_show(s, config, text, sizeof text);
    const bool is_real = s->kind == KVF_SETTING_REAL || s->kind == KVF_SETTING_SHARE;
    if (s->kind == KVF_SETTING_SWITCH) {
        cli_json_integer(json, key, strcmp(text, "on") == 0);
    } else if (s->kind == KVF_SETTING_TEXT && !text[0]) {
        cli_json_null(json, key);
    } else if (s->kind == KVF_SETTING_TEXT) {
        cli_json_text(json, key, text);
    } else if (s->kind == KVF_SETTING_NAME || (s->special && strcmp(text, s->special) == 0)) {
        cli_json_text(json, key, text);
    } else if (!is_real) {
        cli_json_integer(json, key, strtoull(text, NULL, 10));
    } else if (s->count <= 1) {
        cli_json_real(json, key, kvf_real_of(text, NULL));
    } else {
        cli_json_array(json, key);
        for (uint32_t i = 0; i < s->count; i++, at += strcspn(at, ",") + 1)
            cli_json_real(json, NULL, kvf_real_of(at, NULL));
        cli_json_end(json, ']');
    }
}

bool cli_json_write(cli_json *json, cli_output *output, FILE *file)
{
    if (output && output->file && !json->failed) {
        cli_output_write(output, json->text.bytes, json->text.size);
        return cli_output_commit(output);
    }
    errno = 0;
    const bool done = !json->failed &&
                      fwrite(json->text.bytes, 1, json->text.size, file) == json->text.size &&
                      fflush(file) == 0;
    if (!done)
        fprintf(stderr, "kvferry: standard output: %s\n",
                errno ? kvf_errno_text(errno) : "there is no memory for the result");
    return done;
}

bool cli_json_print(cli_json *json)
{
    cli_json_end(json, '\n');
    return cli_json_write(json, NULL, stdout);
}

void cli_json_free(cli_json *json)
{
    kvf_text_free(&json->text);
}
