/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_INFO_REPORT_H
#define KVF_CLI_INFO_REPORT_H

/* How `kvferry info` says what it found. */

#include <stdbool.h>

/** The library's report, for people or as JSON. @return false after a message */
bool cli_info_print(const char *description, bool as_json);

#endif
