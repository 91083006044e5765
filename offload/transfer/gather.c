/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Gather workers: a team of their own that runs the copy kernel.
 *
 * Apart from the compute team, so that filling staging does not wait for a launch. The workers
 * are threads of the host whatever the device is, so the kernel comes from the host's table. Knows
 * nothing of rings or requests.
 */

#include "transfer.h"

#include "host_team.h"

struct kvf_gather {
    kvf_context *context;
    kvf_team *team;
    kvf_task_fn copy;
    kvf_team_job job;
};

kvf_status kvf_gather_create(kvf_device *device, uint32_t threads, const uint32_t *cpus,
                             kvf_gather **out)
{
    *out = NULL;
    kvf_context *context = device->context;
    KVF_ASSERT(threads >= 1);
    kvf_gather *gather = kvf_alloc(context, 1, sizeof *gather);
    if (!gather)
        KVF_FAIL(context, KVF_OUT_OF_MEMORY, "no memory for the gather workers");
    gather->context = context;
    kvf_kernels host;
    if (kvf_kernels_init(&host, KVF_ISA_ALL) != KVF_OK) {
        kvf_free(context, gather);
        KVF_FAIL(context, KVF_UNSUPPORTED, "no kernel to gather pages with");
    }
    gather->copy = device->ops->kind == KVF_DEVICE_HOST ? device->kernels.copy : host.copy;
    if (kvf_team_job_init(&gather->job, 0) != KVF_OK) {
        kvf_free(context, gather);
        KVF_FAIL(context, KVF_SYSTEM, "a lock for the gather workers could not be made");
    }
    kvf_team_config config = {
        .threads = threads, .has_guests = true, .cpus = cpus, .name = "kvf-gather"};
    kvf_status status = kvf_team_create(context, &config, &gather->team);
    if (status != KVF_OK) {
        kvf_gather_destroy(gather);
        return status;
    }
    *out = gather;
    return KVF_OK;
}

void kvf_gather_destroy(kvf_gather *gather)
{
    if (!gather)
        return;
    kvf_team_destroy(gather->team);
    kvf_team_job_fini(&gather->job);
    kvf_free(gather->context, gather);
}

void kvf_gather_begin(kvf_gather *gather, const kvf_copy_args *args)
{
    kvf_team_begin(gather->team, &gather->job, gather->copy, args, kvf_copy_tasks(args));
}

void kvf_gather_end(kvf_gather *gather)
{
    kvf_team_end(gather->team, &gather->job);
}

void kvf_gather_run(kvf_gather *gather, const kvf_copy_args *args)
{
    kvf_gather_begin(gather, args);
    kvf_gather_end(gather);
}

void kvf_gather_help(kvf_gather *gather)
{
    kvf_team_help(gather->team);
}
