/* SPDX-License-Identifier: Apache-2.0 */

/* A bench of a disk on a runtime, which has its errors. Knows nothing of measuring. */

#include <kvferry/disk.h>

#include "link_measure.h"
#include "runtime.h"

kvf_status kvf_disk_open(kvf_runtime *runtime, const char *folder, uint64_t bytes, kvf_disk **out)
{
    KVF_CHECK_HANDLE(runtime, runtime);
    return kvf_disk_bench_open(runtime->context, folder, bytes, out);
}
