/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A bench of the link on a runtime: its device, its node, its workers. Knows nothing of measuring.
 */

#include <kvferry/link.h>

#include "link_measure.h"
#include "runtime.h"

kvf_status kvf_link_open(kvf_runtime *runtime, kvf_link **out)
{
    KVF_CHECK_HANDLE(runtime, runtime);
    kvf_link_bench_config config = {.memory = kvf_runtime_memory(runtime),
                                    .gather_threads = runtime->config.gather_threads};
    config.memory.lower = "pool_bytes";
    return kvf_link_bench_open(runtime->device, &config, out);
}
