/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_JSON_LINES_H
#define KVF_CLI_JSON_LINES_H

/*
 * A file of JSON objects, one per line; blank lines count and say nothing.
 *
 * It knows lines, not what they mean.
 */

#include "json.h"

/** A line: @p where names file and line, for messages. */
typedef kvf_status (*cli_line_fn)(void *user, const json_value *line, const char *where,
                                  uint64_t number, kvf_error *error);

/** @return KVF_OK; what reading, the line's JSON or @p fn says */
KVF_CHECKED kvf_status cli_json_lines(const char *path, cli_line_fn fn, void *user,
                                      kvf_error *error);

#endif
