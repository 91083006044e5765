/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The link bench: checks a case, holds the pool, runs the case, sums up.
 *
 * Knows neither how pages travel nor what is timed. Invariant: whatever a case reserved is free
 * again when it ends, however it ends; the pool stays.
 */

#include "link_measure.h"

#include <stdio.h>
#include <string.h>

#include "common/clock.h"
#include "settings.h"
#include "transfer.h"

#define MIB       ((uint64_t)1 << 20)
#define COUNT_MAX 65536u

static const kvf_link_case defaults = {.what = KVF_LINK_BOTH,
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

void kvf_link_case_init_sized(kvf_link_case *c, size_t size)
{
    kvf_sized_init(c, size, &defaults, sizeof defaults);
}

/* Methods that move pages; those that do not come first. */
#define MOVER(name, value, text, meaning) [value] = (name) < KVF_TRANSFER_GATHER ? "" : (text),

#define FIELD(field)       KVF_FIELD(kvf_link_case, field)
#define COUNT(least, most) .kind = KVF_SETTING_WHOLE, .low = (double)(least), .high = (double)(most)

static const kvf_setting rows[] = {
    {FIELD(numa_node), COUNT(-1, 1023),
     .meaning = "NUMA node of the pool; -1 = the library's choice"},
    {FIELD(huge_pages), KVF_NAMED(KVF_HUGE_PAGES_LIST), .meaning = "memory pages of the pool"},
    {FIELD(what), KVF_NAMED(KVF_LINK_WHAT_LIST), .meaning = "what is measured"},
    {FIELD(pattern), KVF_NAMED(KVF_LINK_PATTERN_LIST), .meaning = "which pages are brought"},
    {FIELD(method), .kind = KVF_SETTING_NAME, .high = KVF_NAMES_HIGH(KVF_TRANSFER_LIST),
     .names = (const char *const[]){KVF_TRANSFER_LIST(MOVER) NULL},
     .meaning = "how pages are brought"},
    {FIELD(slots_in_order), .kind = KVF_SETTING_SWITCH,
     .meaning = "slots follow each other; off = scattered, as a cache has them"},
    {FIELD(writeback_percent), COUNT(0, 100),
     .meaning = "bytes to the host at the same time, in per cent of those to the device"},
    {FIELD(chunk_bytes), COUNT(0, 1024 * MIB),
     .meaning = "bytes of a staging chunk; 0 = the library's choice"},
    {FIELD(depth), COUNT(0, 1024),
     .meaning = "chunks of the staging ring; 0 = the library's choice"},
    {FIELD(workers), COUNT(0, 256), .meaning = "threads that gather; 0 = the runtime's setting"},
    {FIELD(blocks), COUNT(0, KVF_MOVE_BLOCKS_MAX),
     .meaning = "blocks of the device that read mapped pages; 0 = the library's choice"},
    {FIELD(page_bytes), COUNT(64, MIB), .meaning = "bytes of a page, a multiple of 64"},
    {FIELD(pages), COUNT(1, COUNT_MAX), .meaning = "pages of one fetch"},
    {FIELD(run_pages), COUNT(1, COUNT_MAX), .meaning = "neighbours of a run, for pattern runs"},
    {FIELD(zipf), .kind = KVF_SETTING_REAL, .low = 0.1, .high = 4,
     .meaning = "exponent of pattern zipf"},
    {FIELD(pool_bytes), COUNT(1, MIB << 24), .meaning = "host memory that pages are taken from"},
    {FIELD(layers), COUNT(1, 1024), .meaning = "fetches of a step, for cadence"},
    {FIELD(gap_ns), COUNT(0, 1000000000),
     .meaning = "nanoseconds of compute after each fetch, for cadence and tax"},
    {FIELD(repetitions), COUNT(1, COUNT_MAX), .meaning = "measured repetitions of a case"},
    {FIELD(warmup), COUNT(0, COUNT_MAX), .meaning = "repetitions before them, not measured"},
    {FIELD(seed), COUNT(0, UINT64_MAX), .meaning = "seed of the pages chosen"},
};

#define ROWS (sizeof rows / sizeof *rows)

const kvf_setting *kvf_link_setting(uint32_t index)
{
    return index < ROWS ? &rows[index] : NULL;
}

static kvf_status check(const kvf_link *bench, const kvf_link_case *c)
{
    kvf_context *context = bench->device->context;
    const uint64_t least = c->what == KVF_LINK_PIN ? MIB : (uint64_t)c->pages * c->page_bytes;
    char text[384];
    if (kvf_settings_wrong(rows, ROWS, c, text, sizeof text))
        KVF_FAIL(context, KVF_INVALID, "%s", text);
    if (!kvf_transfer_moves(c->method) || (c->method == KVF_TRANSFER_AUTO && !bench->config.choice))
        KVF_FAIL(context, KVF_INVALID,
                 "method = %s: moves no page by itself; take gather or mapped",
                 kvf_transfer_name(c->method));
    if (c->pool_bytes < least)
        KVF_FAIL(context, KVF_INVALID,
                 "pool_bytes = %llu: must be at least %llu in this case; raise it, or lower pages "
                 "or page_bytes",
                 (unsigned long long)c->pool_bytes, (unsigned long long)least);
    if (c->page_bytes % 64 != 0)
        KVF_FAIL(context, KVF_INVALID, "page_bytes = %zu: must be a multiple of 64", c->page_bytes);
    return KVF_OK;
}

static void name_tier(const kvf_arena *arena, kvf_link_result *result)
{
    snprintf(result->tier, sizeof result->tier, "%s", kvf_page_tier_name(kvf_arena_tier(arena)));
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

static kvf_status measure_pin(kvf_link *bench, const kvf_link_case *c, uint64_t *totals,
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
        name_tier(&memory.arenas[0], result);
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

static kvf_status run_pin(kvf_link *bench, const kvf_link_case *c, uint64_t *samples_ns,
                          kvf_link_result *result)
{
    kvf_context *context = bench->device->context;
    uint64_t *totals = kvf_alloc(context, c->repetitions, sizeof *totals);
    if (!totals)
        KVF_FAIL(context, KVF_OUT_OF_MEMORY, "no memory for %u repetitions", c->repetitions);
    kvf_status status = measure_pin(bench, c, totals, result);
    if (status == KVF_OK) {
        if (samples_ns)
            memcpy(samples_ns, totals, c->repetitions * sizeof *totals);
        kvf_link_times_sum_up(totals, c->repetitions, &result->total);
    }
    kvf_free(context, totals);
    return status;
}

static kvf_status measure(kvf_link *bench, const kvf_link_case *c, uint64_t *samples_ns,
                          kvf_link_result *result)
{
    kvf_link_case own = defaults;
    KVF_TRY(KVF_SIZED_READ(bench->device->context, kvf_link_case, c, &own));
    KVF_TRY(check(bench, &own));
    return own.what == KVF_LINK_PIN ? run_pin(bench, &own, samples_ns, result)
                                    : kvf_link_run(bench, &own, samples_ns, result);
}

kvf_status kvf_link_measure_sized(kvf_link *bench, const kvf_link_case *c, uint64_t *samples_ns,
                                  kvf_link_result *result, size_t size)
{
    kvf_link_result own = {.numa_node = -1};
    KVF_TRY(kvf_handle_check(bench ? bench->device->context : NULL, "link"));
    KVF_CHECK_POINTER(bench->device->context, result);
    const kvf_status status = measure(bench, c, samples_ns, &own);
    KVF_SIZED_GIVE(result, size, &own);
    return status;
}

kvf_status kvf_link_bench_open(kvf_device *device, const kvf_link_bench_config *config,
                               kvf_link **out)
{
    *out = NULL;
    KVF_ASSERT(config->gather_threads >= 1);
    kvf_link *bench = kvf_alloc(device->context, 1, sizeof *bench);
    if (!bench)
        KVF_FAIL(device->context, KVF_OUT_OF_MEMORY, "no memory for a link bench");
    bench->device = device;
    bench->config = *config;
    kvf_context_hold(device->context);
    *out = bench;
    return KVF_OK;
}

void kvf_link_close(kvf_link *bench)
{
    kvf_context *context = bench ? bench->device->context : NULL;
    if (!kvf_handle_is_alive(context))
        return;
    kvf_link_pool_drop(bench);
    kvf_free(context, bench);
    kvf_context_release(context);
}

/* ---- numbers about times ---- */

kvf_status kvf_link_fit(const double *x, const double *y, uint32_t count, int weighted,
                        kvf_link_line *out)
{
    double sw = 0, sx = 0, sy = 0;
    KVF_CHECK_POINTER(NULL, out);
    *out = (kvf_link_line){0};
    KVF_CHECK_POINTER(NULL, x);
    KVF_CHECK_POINTER(NULL, y);
    for (uint32_t i = 0; i < count; i++) {
        if (weighted && !(y[i] > 0))
            return KVF_INVALID;
        const double w = weighted ? 1 / (y[i] * y[i]) : 1;
        sw += w;
        sx += w * x[i];
        sy += w * y[i];
    }
    if (count < 2 || !(sw > 0))
        return KVF_INVALID;
    /* Round the means, so that large x do not cancel. */
    const double mx = sx / sw, my = sy / sw;
    double sxx = 0, sxy = 0, syy = 0;
    for (uint32_t i = 0; i < count; i++) {
        const double w = weighted ? 1 / (y[i] * y[i]) : 1;
        sxx += w * (x[i] - mx) * (x[i] - mx);
        sxy += w * (x[i] - mx) * (y[i] - my);
        syy += w * (y[i] - my) * (y[i] - my);
    }
    if (!(sxx > 0))
        return KVF_INVALID;
    out->slope = sxy / sxx;
    out->intercept = my - out->slope * mx;
    out->r_squared = syy > 0 ? sxy * sxy / (sxx * syy) : 1;
    return KVF_OK;
}
