/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The JSON writer.
 *
 * It knows text. Invariant: as in json_writer.h.
 */

#include "json_writer.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static void put(cli_json *json, const char *bytes, size_t size)
{
    if (!json->failed && kvf_text_append(NULL, &json->text, bytes, size, NULL) != KVF_OK)
        json->failed = true;
}

static void put_string(cli_json *json, const char *text)
{
    put(json, "\"", 1);
    for (; *text; text++) {
        unsigned char c = (unsigned char)*text;
        char escape[8];
        if (c == '"' || c == '\\')
            snprintf(escape, sizeof escape, "\\%c", c);
        else if (c < 0x20)
            snprintf(escape, sizeof escape, "\\u%04x", c);
        else
            snprintf(escape, sizeof escape, "%c", c);
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
    put_string(json, key);
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

void cli_json_end(cli_json *json, char bracket)
{
    put(json, &bracket, 1);
    json->comma = true;
}

void cli_json_text(cli_json *json, const char *key, const char *value)
{
    start(json, key);
    put_string(json, value);
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
        snprintf(number, sizeof number, "%.9g", value);
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

void cli_json_free(cli_json *json)
{
    kvf_text_free(NULL, &json->text);
}
