/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_OFFLOAD_DISK_MEASURE_H
#define KVF_OFFLOAD_DISK_MEASURE_H

/*
 * Measures passes over extents of a file: <kvferry/disk.h> on a context; a runtime only opens it.
 *
 * Invariant: every 8 bytes of the file say where in it they lie (kvf_link_word), whatever passes
 * have run, so what arrives can be compared.
 */

#include <kvferry/disk.h>

#include "context.h"

KVF_CHECKED kvf_status kvf_disk_bench_open(kvf_context *context, const char *folder, uint64_t bytes,
                                           kvf_disk **out);

#endif
