/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_JSON_WRITER_H
#define KVF_CLI_JSON_WRITER_H

/*
 * Writes JSON into memory.
 *
 * It knows commas and escapes. Invariant: what was written so far is the beginning of one valid
 * object, whatever the strings hold; running out of memory is remembered until the end.
 */

#include "model_memory.h"

#include <kvferry/setting.h>

/** Zero-initialise. */
typedef struct cli_json {
    kvf_text text;
    bool comma;  /* the next member needs one */
    bool failed; /* out of memory */
} cli_json;

/** key NULL inside arrays and at the top. */
void cli_json_object(cli_json *json, const char *key);
void cli_json_array(cli_json *json, const char *key);
void cli_json_end(cli_json *json, char bracket); /* '}' or ']' */
void cli_json_text(cli_json *json, const char *key, const char *value);
/** Zero bytes are escaped. */
void cli_json_bytes(cli_json *json, const char *key, const char *bytes, size_t size);
void cli_json_integer(cli_json *json, const char *key, uint64_t value);
void cli_json_real(cli_json *json, const char *key, double value); /* null if not finite */
void cli_json_bool(cli_json *json, const char *key, bool value);
void cli_json_null(cli_json *json, const char *key);
/** A field of a config of the library, under @p key. */
void cli_json_setting(cli_json *json, const char *key, const kvf_setting *setting,
                      const void *config);
/** The object as a line on standard output. @return false after a message */
bool cli_json_print(cli_json *json);
void cli_json_free(cli_json *json);

#endif
