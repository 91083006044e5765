/* SPDX-License-Identifier: Apache-2.0 */

/*
 * <kvferry/link.h> on a runtime: its device, its node, its workers. Knows nothing of measuring.
 */

#include <kvferry/link.h>

#include "link_measure.h"
#include "runtime.h"

struct kvf_link {
    kvf_runtime *runtime;
    kvf_link_bench *bench;
};

void kvf_link_case_init(kvf_link_case *c)
{
    kvf_link_case_defaults(c);
}

kvf_status kvf_link_open(kvf_runtime *runtime, kvf_link **out)
{
    *out = NULL;
    kvf_link *link = kvf_alloc(runtime->context, 1, sizeof *link);
    if (link == NULL)
        KVF_FAIL(runtime->context, KVF_OUT_OF_MEMORY, "no memory for a link bench");
    const kvf_link_bench_config config = {.memory = kvf_runtime_memory(runtime),
                                          .gather_threads = runtime->config.gather_threads};
    link->runtime = runtime;
    const kvf_status status = kvf_link_bench_open(runtime->device, &config, &link->bench);
    if (status != KVF_OK) {
        kvf_free(runtime->context, link);
        return status;
    }
    *out = link;
    return KVF_OK;
}

void kvf_link_close(kvf_link *link)
{
    if (!link)
        return;
    kvf_link_bench_close(link->bench);
    kvf_free(link->runtime->context, link);
}

kvf_status kvf_link_measure(kvf_link *link, const kvf_link_case *c, uint64_t *samples_ns,
                            kvf_link_result *result)
{
    return kvf_link_bench_measure(link->bench, c, samples_ns, result);
}

kvf_status kvf_link_fit(const double *x, const double *y, uint32_t count, int weighted,
                        kvf_link_line *out)
{
    return kvf_link_line_fit(x, y, count, weighted, out);
}
