/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_RESIDENT_H
#define KVF_TESTS_RESIDENT_H

/* Memory of this process that is there. */

#include "common/headroom.h"

/* The sum over mappings is exact; VmRSS may lack what single CPUs have counted, 1 MiB on each of
 * 128. */
static inline uint64_t resident_bytes(void)
{
    uint64_t kib = KVF_FILE_KEYS("/proc/self/smaps_rollup", "Rss");
    if (kib == 0)
        kib = KVF_FILE_KEYS("/proc/self/status", "VmRSS");
    assert_true(kib > 0);
    return kib * 1024;
}

#endif
