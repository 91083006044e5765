/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Transfers on a CUDA that fails: every call of it fails once while a request is on its way, or the
 * device is lost with it. Nobody waits for ever, the caller learns of it, and after a failure that
 * is not the device's end the same engine brings the right bytes.
 *
 * Runs in emulated builds, whose CUDA does as it is told.
 */

#include <cuda_runtime_api.h>

#include "emu_control.h"
#include "offload_rig.h"
#include "page_pool.h"
#include "sweep.h"
#include "transfer.h"

#define PAGES 24u
#define BYTES ((size_t)1024)

typedef struct lists {
    const void *from[PAGES];
    void *to[PAGES];
    uint32_t count;
} lists;

typedef struct ferry {
    rig r;
    kvf_page_pool pool;
    kvf_transfer_engine *engine;
    kvf_stream *stream;
    char *slots;    /* pinned [2, PAGES], so that it can be read here */
    lists *l;       /* pinned [2] */
    uint32_t trips; /* even and odd ones use slots and lists of their own */
} ferry;

static void open_ferry(ferry *f, kvf_transfer method)
{
    const kvf_host_memory_config memory = {
        .node = -1, .huge_pages = KVF_HUGE_PAGES_OFF, .touch_threads = 1};
    void *block;
    memset(f, 0, sizeof *f);
    kvf_emu_reset();
    rig_open(&f->r, &(rig_config){.threads = 1});
    RIG_OK(kvf_page_pool_create(f->r.context, f->r.device, &memory, NULL, BYTES, PAGES, &f->pool));
    for (uint32_t p = 0; p < PAGES; p++)
        memset(kvf_page_pool_host(&f->pool, (kvf_block){p}), (int)p + 1, BYTES);
    assert_int_equal(cudaHostAlloc(&block, 2 * PAGES * BYTES, cudaHostAllocMapped), cudaSuccess);
    f->slots = block;
    assert_int_equal(cudaHostAlloc(&block, 2 * sizeof *f->l, cudaHostAllocMapped), cudaSuccess);
    f->l = block;
    RIG_OK(f->r.ops->stream_create(f->r.device, KVF_PRIORITY_NORMAL, &f->stream));
    /* A choice of AUTO, so that both sides stand ready. */
    kvf_transfer_choice mixed;
    for (uint32_t b = 0; b < KVF_TRANSFER_BUCKETS; b++)
        mixed.method[b] = b < 3 ? KVF_TRANSFER_MAPPED : KVF_TRANSFER_GATHER;
    const kvf_transfer_config config = {.method = method,
                                        .choice = &mixed,
                                        .page_bytes = BYTES,
                                        .pages_max = PAGES,
                                        .requests_max = 2,
                                        .chunk_bytes = 8 * BYTES,
                                        .depth = 2,
                                        .gather_threads = 1,
                                        .memory = memory,
                                        .pool = &f->pool.memory};
    RIG_OK(kvf_transfer_open(f->r.device, &config, &f->engine));
}

static void close_ferry(ferry *f)
{
    f->r.ops->stream_destroy(f->stream);
    kvf_transfer_close(f->engine);
    (void)cudaFreeHost(f->l); /* a lost device frees, and says that it is lost */
    (void)cudaFreeHost(f->slots);
    kvf_page_pool_destroy(&f->pool);
    rig_close(&f->r);
}

static char *slots_of_trip(const ferry *f)
{
    return f->slots + f->trips % 2 * PAGES * BYTES;
}

/* All pages in reverse, on the ferry's stream. The first error wins; whatever was enqueued is
 * waited for. A trip that failed to join may still have copies on their way, which the next one
 * waits for: that one must not touch the same memory from here. */
static kvf_status cross(ferry *f)
{
    f->trips++;
    lists *l = &f->l[f->trips % 2];
    const kvf_transfer_request request = {.from = l->from, .to = l->to, .count = &l->count};
    uint32_t ticket;
    memset(slots_of_trip(f), 0, PAGES * BYTES);
    for (uint32_t i = 0; i < PAGES; i++) {
        l->from[i] = kvf_page_pool_device(&f->pool, (kvf_block){PAGES - 1 - i});
        l->to[i] = slots_of_trip(f) + i * BYTES;
    }
    l->count = PAGES;
    kvf_status status = kvf_transfer_submit(f->engine, &request, f->stream, &ticket);
    if (status == KVF_BUSY) {
        status = kvf_transfer_wait_room(f->engine);
        if (status == KVF_OK)
            status = kvf_transfer_submit(f->engine, &request, f->stream, &ticket);
    }
    if (status == KVF_OK)
        status = kvf_transfer_join(f->engine, ticket, f->stream);
    const kvf_status waited = f->r.ops->stream_wait(f->stream);
    return status != KVF_OK ? status : waited;
}

static void assert_arrived(const ferry *f)
{
    for (uint32_t i = 0; i < PAGES; i++)
        for (size_t b = 0; b < BYTES; b += 64)
            assert_int_equal(slots_of_trip(f)[i * BYTES + b], PAGES - i);
}

/* A stream keeps its error, so the next one is fresh. */
static void use_on(ferry *f)
{
    f->r.ops->stream_destroy(f->stream);
    RIG_OK(f->r.ops->stream_create(f->r.device, KVF_PRIORITY_NORMAL, &f->stream));
    for (uint32_t i = 0; i < 3; i++) {
        kvf_error error;
        if (cross(f) == KVF_OK)
            continue;
        kvf_context_error(f->r.context, &error);
        fail_msg("after %s failed: trip %u: %s", kvf_emu_failed_call(), i, error.text);
    }
    assert_arrived(f);
}

static uint64_t fail_each(kvf_transfer method, int is_sticky)
{
    uint64_t failures = 0, tried = 0;
    for (uint64_t nth = 1;; nth += is_sticky ? 1 + nth / 6 : sweep_step(), tried++) {
        ferry f;
        kvf_emu_counts counts;
        open_ferry(&f, method);
        RIG_OK(cross(&f));
        kvf_emu_get_counts(&counts);
        const uint64_t before = counts.faults;
        kvf_emu_fail_call(NULL, nth, is_sticky ? 719 : 2, is_sticky);
        kvf_status status = KVF_OK;
        for (uint32_t i = 0; i < 3 && status == KVF_OK; i++)
            status = cross(&f);
        kvf_emu_get_counts(&counts);
        const int has_fired = counts.faults > before;
        if (!is_sticky) {
            kvf_emu_fail_call(NULL, 0, 0, 0);
            if (status == KVF_OK)
                assert_arrived(&f);
            use_on(&f);
        }
        failures += status != KVF_OK;
        if (!has_fired)
            RIG_OK(status);
        close_ferry(&f);
        if (!has_fired) {
            sweep_tell(tried, nth - 1);
            return failures;
        }
        if (is_sticky)
            assert_int_not_equal(status, KVF_OK);
    }
}

TEST(test_every_call)
{
    const kvf_transfer methods[] = {KVF_TRANSFER_GATHER, KVF_TRANSFER_EACH, KVF_TRANSFER_MAPPED,
                                    KVF_TRANSFER_BATCH, KVF_TRANSFER_AUTO};
    for (size_t m = 0; m < sizeof methods / sizeof *methods; m++) {
        const uint64_t failures = fail_each(methods[m], 0);
        printf("%s: %llu failures\n", kvf_transfer_name(methods[m]), (unsigned long long)failures);
        assert_true(failures * sweep_step() >= 3);
    }
}

/* After that nothing works, but everything returns. */
TEST(test_lost)
{
    const kvf_transfer methods[] = {KVF_TRANSFER_GATHER, KVF_TRANSFER_MAPPED, KVF_TRANSFER_AUTO};
    for (size_t m = 0; m < sizeof methods / sizeof *methods; m++)
        printf("%s: lost %llu times\n", kvf_transfer_name(methods[m]),
               (unsigned long long)fail_each(methods[m], 1));
}
