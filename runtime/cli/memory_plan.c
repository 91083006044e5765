/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The memory plan.
 *
 * It knows where Linux says how much memory is left: /proc/meminfo and the memory controller of
 * cgroups, versions 1 and 2. Invariant: of several limits the smallest counts.
 */

#include "memory_plan.h"

#include <stdlib.h>
#include <string.h>

#define CGROUP_PATH_BYTES 1024u

/* The number in a one-line file; UINT64_MAX for "max", or if there is none. */
static uint64_t read_number(const char *directory, const char *name)
{
    char path[CGROUP_PATH_BYTES + 64];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    FILE *file = fopen(path, "r");
    if (!file)
        return UINT64_MAX;
    char line[64] = "", *end = line;
    bool read = fgets(line, sizeof line, file) != NULL;
    fclose(file);
    uint64_t value = read ? strtoull(line, &end, 10) : 0;
    return end != line ? value : UINT64_MAX;
}

/* "<key> <number>" or "<key>: <number>" of a file, times unit; UINT64_MAX if it is not there. */
static uint64_t read_field(const char *directory, const char *name, const char *key, uint64_t unit)
{
    char path[CGROUP_PATH_BYTES + 64], line[256];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    FILE *file = fopen(path, "r");
    uint64_t value = UINT64_MAX;
    size_t length = strlen(key);
    while (file && value == UINT64_MAX && fgets(line, sizeof line, file))
        if (strncmp(line, key, length) == 0 && (line[length] == ' ' || line[length] == ':'))
            value = strtoull(line + length + 1, NULL, 10) * unit;
    if (file)
        fclose(file);
    return value;
}

/* Room below one cgroup's limit; pages of files that are not in use count as room. */
static uint64_t cgroup_room(const char *directory, const char *limit_name, const char *usage_name)
{
    uint64_t limit = read_number(directory, limit_name);
    uint64_t usage = read_number(directory, usage_name);
    if (limit >= UINT64_MAX / 4 || usage == UINT64_MAX)
        return UINT64_MAX;
    uint64_t idle = read_field(directory, "memory.stat", "inactive_file", 1);
    if (idle == UINT64_MAX || idle > usage)
        idle = 0;
    uint64_t used = usage - idle;
    return limit > used ? limit - used : 0;
}

/* The path of this process in the version 2 hierarchy ("0::/path"); false if there is none. */
static bool cgroup_path(char path[CGROUP_PATH_BYTES])
{
    char line[CGROUP_PATH_BYTES];
    FILE *file = fopen("/proc/self/cgroup", "r");
    bool found = false;
    while (file && !found && fgets(line, sizeof line, file)) {
        found = strncmp(line, "0::", 3) == 0;
        line[strcspn(line, "\n")] = '\0';
    }
    if (file)
        fclose(file);
    if (found)
        snprintf(path, CGROUP_PATH_BYTES, "/sys/fs/cgroup%.900s", line + 3);
    return found;
}

static uint64_t cgroup_available(void)
{
    uint64_t room =
        cgroup_room("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes");
    char path[CGROUP_PATH_BYTES];
    if (!cgroup_path(path))
        return room;
    /* A limit of any ancestor holds; a container sees its own root under /sys/fs/cgroup. */
    for (;;) {
        uint64_t here = cgroup_room(path, "memory.max", "memory.current");
        if (here < room)
            room = here;
        char *slash = strrchr(path, '/');
        if (!slash || slash - path < (long)strlen("/sys/fs/cgroup"))
            return room;
        *slash = '\0';
    }
}

uint64_t cli_memory_available(const char **by)
{
    uint64_t machine = read_field("/proc", "meminfo", "MemAvailable", 1024);
    uint64_t cgroup = cgroup_available();
    *by = cgroup < machine ? "the cgroup's limit" : "the machine";
    return cgroup < machine ? cgroup : machine;
}

uint64_t cli_memory_plan_total(const cli_memory_plan *plan)
{
    const kvf_cache_plan *c = &plan->cache;
    const uint64_t host =
        c->host_kv_bytes + c->host_staging_bytes + c->host_table_bytes + plan->prune_host_bytes;
    return plan->on_gpu ? host : host + cli_memory_plan_device(plan);
}

uint64_t cli_memory_plan_device(const cli_memory_plan *plan)
{
    const kvf_cache_plan *c = &plan->cache;
    return plan->weight_bytes + plan->runner_bytes + c->device_kv_bytes + c->device_digest_bytes +
           c->device_table_bytes + plan->prune_device_bytes;
}

const char *cli_bytes_text(uint64_t bytes, char text[24])
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    double value = (double)bytes;
    size_t unit = 0;
    for (; value >= 1024.0 && unit + 1 < sizeof units / sizeof units[0]; unit++)
        value /= 1024.0;
    snprintf(text, 24, unit ? "%.1f %s" : "%.0f %s", value, units[unit]);
    return text;
}

static void print_row(FILE *file, const char *name, uint64_t bytes, const char *note)
{
    char text[24];
    fprintf(file, "  %-22s %12s  %s\n", name, cli_bytes_text(bytes, text), note);
}

void cli_memory_plan_print(const cli_memory_plan *plan, FILE *file)
{
    const kvf_cache_plan *c = &plan->cache;
    char note[96];
    fputs("memory plan\n", file);
    print_row(file, "weights", plan->weight_bytes,
              plan->on_gpu ? "on the device" : "mapped from the files");
    print_row(file, "runner", plan->runner_bytes, "hidden states and scratch");
    snprintf(note, sizeof note, "room for %u tokens", plan->tokens);
    print_row(file, "KV on the host", c->host_kv_bytes, note);
    print_row(file, "staging", c->host_staging_bytes, "");
    snprintf(note, sizeof note, "%u slots, %u static tokens per KV head", c->slots,
             c->static_tokens);
    print_row(file, "KV on the device", c->device_kv_bytes, note);
    print_row(file, "digests", c->device_digest_bytes, "");
    print_row(file, "tables", c->device_table_bytes + c->host_table_bytes, "");
    if (plan->prune_device_bytes + plan->prune_host_bytes > 0)
        print_row(file, "pruning", plan->prune_device_bytes + plan->prune_host_bytes,
                  "scores, choices and state");
    if (plan->on_gpu)
        print_row(file, "total on the device", cli_memory_plan_device(plan), "");
    print_row(file, plan->on_gpu ? "total on the host" : "total", cli_memory_plan_total(plan), "");
    if (plan->available_bytes != UINT64_MAX)
        print_row(file, "available", plan->available_bytes, plan->available_by);
}

bool cli_memory_plan_check(const cli_memory_plan *plan)
{
    uint64_t total = cli_memory_plan_total(plan);
    if (total <= plan->available_bytes)
        return true;
    char need[24], have[24];
    fprintf(stderr,
            "kvferry: this run takes %s and %s leaves %s; shorten the prompt, -n or --context "
            "(now %u tokens), or free memory\n",
            cli_bytes_text(total, need), plan->available_by,
            cli_bytes_text(plan->available_bytes, have), plan->tokens);
    return false;
}
