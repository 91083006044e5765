/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The link bench: checks a case, holds the pool, runs the case, sums up.
 *
 * Knows neither how pages travel nor what is timed. Invariant: whatever a case reserved is free
 * again when it ends, however it ends; the pool stays.
 */

#include "link_measure.h"

#include <string.h>

#include "common/clock.h"
#include "link_rig.h"

#define MIB       ((uint64_t)1 << 20)
#define COUNT_MAX 65536u

void kvf_link_case_defaults(kvf_link_case *c)
{
    *c = (kvf_link_case){.size = sizeof *c,
                         .what = KVF_LINK_BOTH,
                         .method = KVF_TRANSFER_GATHER,
                         .pattern = KVF_LINK_UNIFORM,
                         .run_pages = 8,
                         .zipf = 1,
                         .page_bytes = 16384,
                         .pages = 256,
                         .pool_bytes = 256 * MIB,
                         .numa_node = -1,
                         .huge_pages = KVF_HUGE_PAGES_AUTO,
                         .layers = 32,
                         .gap_ns = 100000,
                         .repetitions = 20,
                         .warmup = 3,
                         .seed = 1};
}

typedef struct range {
    const char *name;
    uint64_t value, low, high;
} range;

static kvf_status check(const kvf_link_bench *bench, const kvf_link_case *c)
{
    kvf_context *context = bench->device->context;
    const kvf_transfer first =
        bench->config.choice != NULL ? KVF_TRANSFER_AUTO : KVF_TRANSFER_GATHER;
    const uint64_t bytes = (uint64_t)c->pages * c->page_bytes;
    const range ranges[] = {
        {"size", c->size, sizeof *c, sizeof *c},
        {"what", c->what, KVF_LINK_BOTH, KVF_LINK_TAX},
        {"pattern", c->pattern, KVF_LINK_UNIFORM, KVF_LINK_RUNS},
        {"method", c->method, first, KVF_TRANSFER_BATCH},
        {"page_bytes", c->page_bytes, 64, MIB},
        {"pages", c->pages, 1, COUNT_MAX},
        {"run_pages", c->run_pages, 1, COUNT_MAX},
        {"pool_bytes", c->pool_bytes, c->what == KVF_LINK_PIN ? MIB : bytes, MIB << 24},
        {"chunk_bytes", c->chunk_bytes, 0, 1024 * MIB},
        {"depth", c->depth, 0, 1024},
        {"workers", c->workers, 0, 256},
        {"blocks", c->blocks, 0, KVF_MOVE_BLOCKS_MAX},
        {"huge_pages", c->huge_pages, KVF_HUGE_PAGES_AUTO, KVF_HUGE_PAGES_REQUIRED},
        {"writeback_percent", c->writeback_percent, 0, 100},
        {"layers", c->layers, 1, 1024},
        {"gap_ns", c->gap_ns, 0, 1000000000},
        {"repetitions", c->repetitions, 1, COUNT_MAX},
        {"warmup", c->warmup, 0, COUNT_MAX},
    };
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++)
        if (ranges[i].value < ranges[i].low || ranges[i].value > ranges[i].high)
            return kvf_fail(context, KVF_INVALID, 0,
                            "%s is %llu; it must be %llu to %llu in this case", ranges[i].name,
                            (unsigned long long)ranges[i].value, (unsigned long long)ranges[i].low,
                            (unsigned long long)ranges[i].high);
    if (c->page_bytes % 64 != 0)
        return kvf_fail(context, KVF_INVALID, 0, "page_bytes is %zu; it must be a multiple of 64",
                        c->page_bytes);
    if (!(c->zipf >= 0.1 && c->zipf <= 4))
        return kvf_fail(context, KVF_INVALID, 0, "zipf is %g; it must be 0.1 to 4", c->zipf);
    return KVF_OK;
}

/* ---- what pinning costs ---- */

/* Give back and take again; the difference to making the memory is mapping and touching. */
static kvf_status register_again(kvf_device *device, kvf_host_memory *memory, uint64_t *take_ns,
                                 uint64_t *give_ns)
{
    for (uint32_t i = 0; i < memory->arena_count; i++) {
        kvf_arena *arena = &memory->arenas[i];
        void *alias = NULL;
        if (!arena->registered)
            continue;
        const uint64_t began = kvf_now_ns();
        device->ops->host_unregister(device, arena->host, arena->mapped_bytes);
        const uint64_t given = kvf_now_ns();
        kvf_status status =
            device->ops->host_register(device, arena->host, arena->mapped_bytes, &alias);
        *take_ns += kvf_now_ns() - given;
        *give_ns += given - began;
        arena->registered = status == KVF_OK;
        arena->device = status == KVF_OK ? alias : arena->host;
        KVF_TRY(status);
    }
    return KVF_OK;
}

static kvf_status measure_pin(kvf_link_bench *bench, const kvf_link_case *c, uint64_t *totals,
                              kvf_link_result *result)
{
    kvf_device *device = bench->device;
    kvf_host_memory_config config = bench->config.memory;
    const double gib = (double)kvf_round_up(c->pool_bytes, MIB) / (double)(1024 * MIB);
    double touch = 0, take = 0, give = 0;
    config.bytes = kvf_round_up(c->pool_bytes, MIB);
    config.granule = MIB;
    config.node = c->numa_node >= 0 ? c->numa_node : config.node;
    config.huge_pages = c->huge_pages;
    kvf_link_pool_drop(bench); /* there may not be room for both */
    for (uint32_t i = 0; i < c->warmup + c->repetitions; i++) {
        kvf_host_memory memory = {0};
        uint64_t take_ns = 0, give_ns = 0;
        const uint64_t began = kvf_now_ns();
        KVF_TRY(kvf_host_memory_create(device->context, device, &config, &memory));
        const uint64_t made_ns = kvf_now_ns() - began;
        kvf_status status = register_again(device, &memory, &take_ns, &give_ns);
        memcpy(result->tier, kvf_page_tier_name(memory.arenas[0].tier),
               strlen(kvf_page_tier_name(memory.arenas[0].tier)) + 1);
        result->numa_node = memory.arenas[0].bound ? config.node : -1;
        kvf_host_memory_destroy(device->context, &memory);
        KVF_TRY(status);
        if (i < c->warmup)
            continue;
        totals[i - c->warmup] = made_ns + give_ns;
        touch += made_ns > take_ns ? (double)(made_ns - take_ns) : 0;
        take += (double)take_ns;
        give += (double)give_ns;
    }
    const double scale = 1e-9 / (gib * c->repetitions);
    result->touch_s_per_gib = touch * scale;
    result->register_s_per_gib = take * scale;
    result->unregister_s_per_gib = give * scale;
    return KVF_OK;
}

/* ---- a case ---- */

static kvf_status run_pin(kvf_link_bench *bench, const kvf_link_case *c, uint64_t *samples_ns,
                          kvf_link_result *result)
{
    kvf_context *context = bench->device->context;
    uint64_t *totals = kvf_alloc(context, c->repetitions, sizeof *totals);
    if (totals == NULL)
        return kvf_fail(context, KVF_OUT_OF_MEMORY, 0, "no memory for %u repetitions",
                        c->repetitions);
    kvf_status status = measure_pin(bench, c, totals, result);
    if (status == KVF_OK) {
        if (samples_ns != NULL)
            memcpy(samples_ns, totals, c->repetitions * sizeof *totals);
        kvf_link_times_sum_up(totals, c->repetitions, &result->total);
    }
    kvf_free(context, totals);
    return status;
}

static void sum_up(kvf_link_rig *rig, uint64_t *samples_ns, kvf_link_result *result)
{
    const kvf_link_case *c = rig->c;
    const uint32_t n = c->repetitions;
    const int times_copies =
        c->what == KVF_LINK_BOTH || c->what == KVF_LINK_COPY || c->what == KVF_LINK_PEAK;
    const int gathers = c->what == KVF_LINK_GATHER ||
                        (c->what == KVF_LINK_BOTH && c->method == KVF_TRANSFER_GATHER);
    if (samples_ns != NULL)
        memcpy(samples_ns, rig->total, n * sizeof *samples_ns);
    kvf_link_times_sum_up(rig->total, n, &result->total);
    kvf_link_times_sum_up(rig->copying, times_copies ? n : 0, &result->copying);
    kvf_link_times_sum_up(rig->gather, gathers ? n : 0, &result->gather);
    kvf_link_times_sum_up(rig->alone, c->what == KVF_LINK_TAX ? n : 0, &result->alone);
    kvf_link_times_sum_up(rig->fetch, c->what == KVF_LINK_CADENCE ? n * rig->lists : 0,
                          &result->fetch);
    result->writeback_bytes = c->what == KVF_LINK_GATHER || c->what == KVF_LINK_TAX
                                  ? 0
                                  : rig->back_bytes * c->repetitions;
}

static kvf_status run_pages(kvf_link_bench *bench, const kvf_link_case *c, uint64_t *samples_ns,
                            kvf_link_result *result)
{
    KVF_TRY(kvf_link_pool_make(bench, c));
    kvf_link_rig rig = {.bench = bench,
                        .c = c,
                        .device = bench->device,
                        .ops = bench->device->ops,
                        .lists = c->what == KVF_LINK_CADENCE ? c->layers : 1};
    const kvf_arena *arena = &bench->pool.arenas[0];
    const char *tier = kvf_page_tier_name(arena->tier);
    memcpy(result->tier, tier, strlen(tier) + 1);
    result->numa_node = arena->bound ? bench->pool_node : -1;
    kvf_status status = kvf_link_rig_open(&rig);
    if (status == KVF_OK)
        status = kvf_link_run(&rig, result);
    if (status == KVF_OK)
        sum_up(&rig, samples_ns, result);
    kvf_link_rig_close(&rig);
    return status;
}

kvf_status kvf_link_bench_measure(kvf_link_bench *bench, const kvf_link_case *c,
                                  uint64_t *samples_ns, kvf_link_result *result)
{
    *result = (kvf_link_result){.numa_node = -1};
    KVF_TRY(check(bench, c));
    return c->what == KVF_LINK_PIN ? run_pin(bench, c, samples_ns, result)
                                   : run_pages(bench, c, samples_ns, result);
}

kvf_status kvf_link_bench_open(kvf_device *device, const kvf_link_bench_config *config,
                               kvf_link_bench **out)
{
    *out = NULL;
    KVF_ASSERT(config->gather_threads >= 1);
    kvf_link_bench *bench = kvf_alloc(device->context, 1, sizeof *bench);
    if (bench == NULL)
        return kvf_fail(device->context, KVF_OUT_OF_MEMORY, 0, "no memory for a link bench");
    bench->device = device;
    bench->config = *config;
    *out = bench;
    return KVF_OK;
}

void kvf_link_bench_close(kvf_link_bench *bench)
{
    if (bench == NULL)
        return;
    kvf_link_pool_drop(bench);
    kvf_free(bench->device->context, bench);
}
