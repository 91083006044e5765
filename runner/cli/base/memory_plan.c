/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The memory plan.
 *
 * It knows sums. Invariant: of several limits the smallest counts.
 */

#include "memory_plan.h"

#include "common/headroom.h"
#include "common/text.h"

void cli_memory_available(cli_memory_plan *plan)
{
    const char *file;
    const uint64_t cgroup = kvf_cgroup_headroom(KVF_PROC_CGROUP, KVF_SYS_CGROUP, &file);
    const uint64_t machine = kvf_machine_headroom("/proc/meminfo", cgroup);
    const bool is_limit = cgroup < machine;
    plan->available_by = !is_limit ? "the machine"
                         : strcmp(file, "memory.max") == 0
                             ? "the cgroup's limit, memory.max"
                             : "the cgroup's limit, memory.limit_in_bytes";
    plan->available_bytes = is_limit ? cgroup : machine;
    const uint64_t growth = kvf_machine_growth("/proc/meminfo", kvf_machine_is_virtual());
    if (plan->on_gpu && !is_limit) /* the library populates in pieces, and looks */
        plan->may_come_bytes = cgroup < growth ? cgroup : growth;
}

/* On the host device these are part of the total. */
static uint64_t device_bytes(const cli_memory_plan *plan)
{
    const kvf_cache_plan *c = &plan->cache;
    return plan->weight_bytes + plan->runner_bytes + c->device_kv_bytes + c->device_digest_bytes +
           c->device_table_bytes + plan->prune_device_bytes;
}

uint64_t cli_memory_plan_total(const cli_memory_plan *plan)
{
    const kvf_cache_plan *c = &plan->cache;
    const uint64_t host =
        c->host_kv_bytes + c->host_staging_bytes + c->host_table_bytes + plan->prune_host_bytes;
    return host + (plan->on_gpu ? plan->own_bytes : device_bytes(plan));
}

static void print_row(FILE *file, const char *name, uint64_t bytes, const char *note)
{
    char text[32];
    fprintf(file, "  %-22s %12s  %s\n", name, kvf_bytes_text(bytes, text), note);
}

void cli_memory_plan_print(const cli_memory_plan *plan, FILE *file)
{
    const kvf_cache_plan *c = &plan->cache;
    char note[96];
    fputs("memory plan\n", file);
    print_row(file, "weights", plan->weight_bytes,
              plan->on_gpu      ? "on the device"
              : plan->own_bytes ? "of these:"
                                : "mapped from the files");
    if (plan->own_bytes)
        print_row(file, "  converted", plan->own_bytes,
                  plan->on_gpu ? "on the host" : "the others are mapped from the file");
    print_row(file, "runner", plan->runner_bytes, "hidden states and scratch");
    snprintf(note, sizeof note, "room for %u tokens, in blocks of %u", plan->tokens, c->block_size);
    print_row(file, "KV on the host", c->host_kv_bytes, note);
    if (c->disk_bytes)
        print_row(file, "KV on disk", c->disk_bytes, "all of it, in a private file");
    print_row(file, "staging", c->host_staging_bytes, "");
    snprintf(note, sizeof note, "%llu tokens stay there, %u static tokens per KV head",
             (unsigned long long)c->resident_tokens, c->static_tokens);
    print_row(file, "KV on the device", c->device_kv_bytes, note);
    if (plan->on_gpu || c->prompt_bytes)
        print_row(file, "  of it for a prompt", c->prompt_bytes,
                  c->prompt_bytes ? "a layer, for chunks to attend to"
                                  : "no room: chunks read the host's memory, and are slow");
    print_row(file, "digests", c->device_digest_bytes, plan->digest);
    print_row(file, "tables", c->device_table_bytes + c->host_table_bytes, "");
    if (plan->prune_device_bytes + plan->prune_host_bytes > 0)
        print_row(file, "pruning", plan->prune_device_bytes + plan->prune_host_bytes,
                  "scores, choices and state");
    if (plan->hidden_disk_bytes)
        print_row(file, "hidden states on disk", plan->hidden_disk_bytes, "in a private file");
    if (plan->on_gpu)
        print_row(file, "total on the device", device_bytes(plan), "");
    print_row(file, plan->on_gpu ? "total on the host" : "total", cli_memory_plan_total(plan), "");
    if (plan->available_bytes != UINT64_MAX)
        print_row(file, "available", plan->available_bytes, plan->available_by);
}

bool cli_memory_plan_check(const cli_memory_plan *plan)
{
    uint64_t total = cli_memory_plan_total(plan);
    if (total <= plan->available_bytes)
        return true;
    char need[32], have[32];
    if (total <= plan->may_come_bytes) {
        fprintf(stderr,
                "kvferry: this run takes %s and the machine shows %s; it is tried, because a "
                "virtual machine may get more as it uses it\n",
                kvf_bytes_text(total, need), kvf_bytes_text(plan->available_bytes, have));
        return true;
    }
    fprintf(stderr,
            "kvferry: this run takes %s and %s leaves %s; shorten the prompt, -n or --context "
            "(now %u tokens), or free memory\n",
            kvf_bytes_text(total, need), plan->available_by,
            kvf_bytes_text(plan->available_bytes, have), plan->tokens);
    return false;
}
