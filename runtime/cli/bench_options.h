/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_BENCH_OPTIONS_H
#define KVF_CLI_BENCH_OPTIONS_H

/*
 * Single values on the command lines of both benches. Each says on stderr what was wrong and
 * returns false then.
 */

#include "axes.h"
#include "table.h"

bool cli_bench_number(const char *option, const char *text, int64_t least, int64_t most,
                      int64_t *out);
bool cli_bench_u32(const char *option, const char *text, uint32_t least, uint32_t most,
                   uint32_t *out);
bool cli_bench_device(const char *text, kvf_device_kind *out);
bool cli_bench_format(const char *text, cli_format *out);

#endif
