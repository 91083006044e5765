/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_BENCH_CHECK_H
#define KVF_BENCH_CHECK_H

/* Calls of a benchmark that must succeed: what failed is told, and the program ends. */

#include <kvferry/kvferry.h>
#include <stdio.h>
#include <stdlib.h>

/* @p runtime: NULL before there is one. */
static inline void bench_check(const kvf_runtime *runtime, kvf_status status)
{
    if (status == KVF_OK)
        return;
    fprintf(stderr, "%s\n", runtime ? kvf_runtime_error(runtime)->text : "no runtime");
    exit(1);
}

#endif
