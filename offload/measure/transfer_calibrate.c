/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Calibration: a few requests of several sizes by every method, a line through their times, and the
 * cheapest method per size.
 *
 * Knows nothing of the file's format. Invariant: what is chosen was measured on this device, and
 * `mapped` is a single range of sizes in it, as the engine asks for.
 */

#include "transfer_calibrate.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "common/clock.h"
#include "transfer_method.h"

#define PAGE_BYTES  ((size_t)16384)
#define BUDGET_NS   UINT64_C(4000000000)
#define POOL_BYTES  ((uint64_t)128 << 20)
#define PEAK_PAGE   ((size_t)65536)
#define MANY_BYTES  ((size_t)1 << 20)
#define CASE_NS     30000000.0 /* that the repetitions of one case may take */
#define REPEATS_MIN 3u
#define REPEATS_MAX 12u
#define POINTS_MIN  3u /* for a line that means something */

static const uint32_t counts[] = {1, 4, 16, 64, 256, 1024};

#define COUNTS (sizeof counts / sizeof *counts)

/* ---- measuring ---- */

typedef struct points {
    double bytes[COUNTS], ns[COUNTS];
    uint32_t count;
    bool is_over; /* no more of this method */
} points;

typedef struct session {
    kvf_link *bench;
    kvf_link_case c;
    uint64_t until_ns;
    points of[KVF_TRANSFER_METHODS];
} session;

static bool has_time(const session *s, double ns)
{
    const uint64_t now = kvf_now_ns();
    return now < s->until_ns && ns < (double)(s->until_ns - now);
}

/* Median time of the case; *out 0 if there is no time for it, or no such method. */
static kvf_status measure(session *s, double expected_ns, double *out)
{
    kvf_link_result r;
    *out = 0;
    const double repeats = expected_ns > 0 ? CASE_NS / expected_ns : REPEATS_MAX;
    s->c.repetitions = repeats > REPEATS_MAX   ? REPEATS_MAX
                       : repeats < REPEATS_MIN ? REPEATS_MIN
                                               : (uint32_t)repeats;
    if (!has_time(s, expected_ns * (s->c.repetitions + s->c.warmup)))
        return KVF_OK;
    const kvf_status status = kvf_link_measure(s->bench, &s->c, NULL, &r);
    if (status == KVF_UNSUPPORTED)
        return KVF_OK;
    KVF_TRY(status);
    *out = (double)r.total.median_ns;
    return KVF_OK;
}

/* Small requests of all methods first, so that a slow machine knows at least those. */
static kvf_status measure_all(session *s)
{
    for (size_t i = 0; i < COUNTS; i++)
        for (uint32_t m = 1; m < KVF_TRANSFER_METHODS; m++) {
            points *p = &s->of[m];
            double ns = 0;
            if (p->is_over || !kvf_transfer_moves((kvf_transfer)m))
                continue;
            s->c.method = (kvf_transfer)m;
            s->c.pages = counts[i];
            const double last = p->count > 0 ? p->ns[p->count - 1] : 0;
            KVF_TRY(measure(s, i > 0 ? last * counts[i] / counts[i - 1] : 0, &ns));
            p->is_over = ns <= 0;
            if (p->is_over)
                continue;
            p->bytes[p->count] = (double)counts[i] * (double)s->c.page_bytes;
            p->ns[p->count++] = ns;
        }
    return KVF_OK;
}

static kvf_status measure_peak(session *s, kvf_calibration *out)
{
    double ns = 0;
    s->c.what = KVF_LINK_PEAK;
    s->c.page_bytes = PEAK_PAGE;
    s->c.pages = (uint32_t)(POOL_BYTES / 4 / PEAK_PAGE);
    const kvf_status status = measure(s, 0, &ns);
    if (status == KVF_OK && ns > 0)
        out->peak_bytes_per_second = (double)(POOL_BYTES / 4) * 1e9 / ns;
    s->c.what = KVF_LINK_BOTH;
    s->c.page_bytes = out->page_bytes;
    return status;
}

/* The cost of a second method that stands ready: few pages by the usual one alone, and beside the
 * other, which does not get them. */
static kvf_status measure_extra(session *s, const kvf_transfer_choice *usual, kvf_calibration *out)
{
    const points *few = &s->of[usual->method[0]];
    double alone = 0, beside = 0;
    if (few->count == 0 || s->of[usual->method[KVF_TRANSFER_BUCKETS - 1]].count == 0)
        return KVF_OK;
    s->c.pages = 4;
    s->c.method = usual->method[0];
    KVF_TRY(measure(s, few->ns[0], &alone));
    s->c.method = KVF_TRANSFER_AUTO;
    KVF_TRY(measure(s, few->ns[0], &beside));
    if (alone > 0 && beside > alone)
        out->extra_ns = beside - alone;
    return KVF_OK;
}

static void fit_all(const session *s, kvf_calibration *out)
{
    for (size_t m = 0; m < KVF_TRANSFER_METHODS; m++) {
        const points *p = &s->of[m];
        kvf_calibration_fit *fit = &out->fit[m];
        kvf_link_line line;
        if (p->count < POINTS_MIN || kvf_link_fit(p->bytes, p->ns, p->count, 1, &line) != KVF_OK ||
            line.slope <= 0)
            continue;
        *fit = (kvf_calibration_fit){.is_measured = true,
                                     .intercept_ns = line.intercept,
                                     .ns_per_byte = line.slope,
                                     .r_squared = line.r_squared};
        out->is_measured = true;
    }
}

/* Two methods side by side, to see what that costs: the device's for few bytes. */
static kvf_transfer_choice mixed_choice(size_t page_bytes)
{
    kvf_transfer_choice choice;
    for (uint32_t b = 0; b < KVF_TRANSFER_BUCKETS; b++)
        choice.method[b] = page_bytes << b < MANY_BYTES ? KVF_TRANSFER_MAPPED : KVF_TRANSFER_GATHER;
    return choice;
}

static kvf_status measure_device(kvf_device *device, const kvf_calibration_config *config,
                                 kvf_calibration *out)
{
    const kvf_transfer_choice mixed = mixed_choice(out->page_bytes);
    const uint64_t began = kvf_now_ns();
    const kvf_link_bench_config bench = {
        .memory = config->memory, .gather_threads = config->gather_threads, .choice = &mixed};
    session s = {.until_ns = began + (config->budget_ns > 0 ? config->budget_ns : BUDGET_NS)};
    KVF_TRY(kvf_link_bench_open(device, &bench, &s.bench));
    kvf_link_case_init(&s.c);
    s.c.page_bytes = out->page_bytes;
    s.c.pool_bytes = POOL_BYTES;
    s.c.huge_pages = config->memory.huge_pages;
    s.c.warmup = 1;
    kvf_status status = measure_peak(&s, out);
    if (status == KVF_OK)
        status = measure_all(&s);
    if (status == KVF_OK)
        status = measure_extra(&s, &mixed, out);
    kvf_link_close(s.bench);
    if (status == KVF_OK)
        fit_all(&s, out);
    out->seconds = (double)(kvf_now_ns() - began) * 1e-9;
    return status;
}

/* ---- what it is for ---- */

static uint32_t log2_of(size_t bytes)
{
    uint32_t bucket = 0;
    while (bytes >>= 1)
        bucket++;
    return bucket;
}

/* The tier that a pool gets here: asked of a small one. */
static kvf_status probe_tier(kvf_device *device, const kvf_calibration_config *config,
                             const char **tier)
{
    kvf_host_memory memory;
    kvf_host_memory_config small = config->memory;
    small.bytes = small.granule = (size_t)2 << 20;
    KVF_TRY(kvf_host_memory_create(device->context, device, &small, &memory));
    *tier = kvf_page_tier_name(kvf_arena_tier(&memory.arenas[0]));
    kvf_host_memory_destroy(device->context, &memory);
    return KVF_OK;
}

static kvf_status make_key(kvf_device *device, const kvf_calibration_config *config,
                           kvf_calibration *out)
{
    kvf_device_properties p;
    const char *tier = "";
    device->ops->properties(device, &p);
    KVF_TRY(probe_tier(device, config, &tier));
    snprintf(out->key, sizeof out->key, "%s/driver-%u/runtime-%u/gen%ux%u/node%d/%s/page2^%u/x%u",
             p.uuid[0] != '\0' ? p.uuid : p.name, p.driver_version, p.runtime_version,
             p.link_generation, p.link_width, (int)config->memory.node, tier,
             log2_of(out->page_bytes), config->gather_threads);
    for (char *c = out->key; *c != '\0'; c++)
        if (*c <= ' ' || *c > '~')
            *c = '_';
    return KVF_OK;
}

kvf_status kvf_calibrate(kvf_device *device, const kvf_calibration_config *config,
                         kvf_calibration *out)
{
    kvf_device_properties properties;
    device->ops->properties(device, &properties);
    *out =
        (kvf_calibration){.page_bytes = config->page_bytes > 0 ? config->page_bytes : PAGE_BYTES};
    if (properties.shares_host_memory && !config->is_forced)
        return KVF_OK;
    KVF_TRY(make_key(device, config, out));
    if (config->path && !config->must_measure &&
        kvf_calibration_load(device->context, config->path, out))
        return KVF_OK;
    char stale[sizeof out->note];
    memcpy(stale, out->note, sizeof stale);
    const kvf_status status = measure_device(device, config, out);
    if (status != KVF_OK) {
        *out = (kvf_calibration){.page_bytes = out->page_bytes};
        return status;
    }
    if (!config->path || !out->is_measured)
        return KVF_OK;
    if (kvf_calibration_save(device->context, config->path, out))
        memcpy(out->note, stale, sizeof stale);
    else
        kvf_log(device->context, KVF_LOG_WARNING, "%s", out->note);
    return KVF_OK;
}

/* ---- the choice ---- */

double kvf_calibration_cost_ns(const kvf_calibration *calibration, kvf_transfer method,
                               size_t page_bytes, uint32_t pages)
{
    const kvf_calibration_fit *fit = &calibration->fit[method];
    if (!fit->is_measured)
        return INFINITY;
    const int by_page = kvf_transfer_find(method)->copies_pages;
    const size_t bytes =
        by_page && page_bytes < calibration->page_bytes ? calibration->page_bytes : page_bytes;
    const double ns = fit->intercept_ns + fit->ns_per_byte * (double)bytes * pages;
    const double floor_ns = fit->ns_per_byte * (double)bytes * pages;
    return ns > floor_ns / 2 ? ns : floor_ns / 2; /* a line through noise may begin below zero */
}

/* Pages that stand for a bucket: its geometric middle. */
static uint32_t middle(uint32_t bucket)
{
    return bucket == 0 ? 1 : (uint32_t)(1.41421356 * (double)(1u << bucket));
}

/* The best method of the device, or of the engine's thread, for a bucket; AUTO if none was
 * measured. */
static kvf_transfer best_of(const kvf_calibration *calibration, int on_device, size_t page_bytes,
                            uint32_t bucket, double *ns)
{
    kvf_transfer best = KVF_TRANSFER_AUTO;
    *ns = INFINITY;
    for (uint32_t m = 1; m < KVF_TRANSFER_METHODS; m++) {
        const double cost =
            kvf_calibration_cost_ns(calibration, (kvf_transfer)m, page_bytes, middle(bucket));
        if (kvf_transfer_can_record((kvf_transfer)m) != on_device || cost >= *ns)
            continue;
        best = (kvf_transfer)m;
        *ns = cost;
    }
    return best;
}

/* Sum over buckets of cost over the least cost, with the device's best in low .. high-1 and the
 * thread's elsewhere. */
static double regret(const kvf_calibration *calibration, size_t page_bytes, uint32_t low,
                     uint32_t high)
{
    const bool is_mixed = low < high && !(low == 0 && high == KVF_TRANSFER_BUCKETS);
    double sum = 0;
    for (uint32_t b = 0; b < KVF_TRANSFER_BUCKETS; b++) {
        double thread, device;
        (void)best_of(calibration, 0, page_bytes, b, &thread);
        (void)best_of(calibration, 1, page_bytes, b, &device);
        const double least = device < thread ? device : thread;
        const double cost = b >= low && b < high ? device : thread;
        sum += (cost + (is_mixed ? calibration->extra_ns : 0)) / least;
    }
    return sum;
}

void kvf_calibration_choose(const kvf_calibration *calibration, size_t page_bytes,
                            kvf_transfer_choice *out)
{
    uint32_t best_low = 0, best_high = 0;
    double ns, least = INFINITY;
    *out = kvf_transfer_choice_default();
    if (!calibration->is_measured)
        return;
    for (uint32_t low = 0; low < KVF_TRANSFER_BUCKETS; low++)
        for (uint32_t high = low; high <= KVF_TRANSFER_BUCKETS; high++) {
            const double sum = regret(calibration, page_bytes, low, high);
            if (sum >= least || (high == low && low > 0))
                continue;
            least = sum;
            best_low = low;
            best_high = high;
        }
    /* An engine has one method of the device: the best where its range begins. */
    const kvf_transfer device = best_of(calibration, 1, page_bytes, best_low, &ns);
    for (uint32_t b = 0; b < KVF_TRANSFER_BUCKETS; b++)
        out->method[b] =
            b >= best_low && b < best_high ? device : best_of(calibration, 0, page_bytes, b, &ns);
}
