/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Machines and callers that are not as they should be, through the public API on the emulated
 * device: no GPU, an old driver, too little memory of any kind, methods that are not there, ids out
 * of range, streams of others, recordings begun and ended in the wrong place.
 *
 * Every refusal names what was asked and what helps; afterwards the runtime is as good as before.
 */

#include "harness.h"

#include <driver_types.h>

#include "emu_control.h"
#include <kvferry/link.h>

/* ---- the machine ---- */

static kvf_emu_config machine(void)
{
    kvf_emu_config c;
    kvf_emu_reset();
    kvf_emu_get_config(&c);
    return c;
}

static kvf_runtime_config on_cuda(void)
{
    kvf_runtime_config rc = test_runtime_config();
    rc.device = KVF_DEVICE_CUDA;
    rc.allow_unpinned = 0;
    return rc;
}

static void says(const kvf_error *error, kvf_status status, const char *const *words)
{
    assert_int_equal(error->status, status);
    for (; *words; words++)
        if (!strstr(error->text, *words))
            fail_msg("no \"%s\" in \"%s\"", *words, error->text);
}

#define SAYS(error, status, ...) says((error), (status), (const char *const[]){__VA_ARGS__, NULL})

static void keep_line(void *user, int level, const char *line)
{
    snprintf(user, 512, "%s", line);
}

/* KVF_DEVICE_CUDA says why not; AUTO runs on the host, and the log says why. */
static void falls_back(const char *why, const char *fix)
{
    char line[512] = "";
    kvf_runtime *runtime = NULL;
    kvf_error error = {0};
    kvf_runtime_config rc = on_cuda();
    test_expect(NULL, test_runtime_open(&rc, &runtime, &error), KVF_UNSUPPORTED);
    assert_null(runtime);
    SAYS(&error, KVF_UNSUPPORTED, why, fix);
    rc.device = KVF_DEVICE_AUTO;
    rc.log = keep_line;
    rc.log_user = line;
    test_expect(NULL, test_runtime_open(&rc, &runtime, &error), KVF_OK);
    assert_int_equal(kvf_runtime_device(runtime), KVF_DEVICE_HOST);
    if (!strstr(line, why) || !strstr(line, "host device"))
        fail_msg("the log says \"%s\"", line);
    kvf_runtime_close(runtime);
    kvf_emu_reset();
}

TEST(a_machine_without_a_gpu)
{
    kvf_emu_config c = machine();
    c.devices = 0;
    kvf_emu_set_config(&c);
    falls_back("no GPU", "nvidia-smi");
    c = machine();
    c.device_error = cudaErrorInsufficientDriver;
    c.driver_version = 0;
    kvf_emu_set_config(&c);
    falls_back("no NVIDIA driver", "install one");
    c.driver_version = 12020;
    kvf_emu_set_config(&c);
    falls_back("supports CUDA 12.2", "update the driver");
}

TEST(a_device_that_is_not_there)
{
    kvf_emu_config c = machine();
    kvf_runtime *runtime = NULL;
    kvf_error error = {0};
    kvf_runtime_config rc = on_cuda();
    c.devices = 3;
    kvf_emu_set_config(&c);
    rc.device_ordinal = 3;
    test_expect(NULL, test_runtime_open(&rc, &runtime, &error), KVF_INVALID);
    SAYS(&error, KVF_INVALID, "device_ordinal is 3", "sees 3 CUDA devices", "0 to 2");
    rc.device = KVF_DEVICE_AUTO; /* a wrong setting is no reason for the host */
    test_expect(NULL, test_runtime_open(&rc, &runtime, &error), KVF_INVALID);
    rc.device_ordinal = 2;
    test_expect(NULL, test_runtime_open(&rc, &runtime, &error), KVF_OK);
    assert_int_equal(kvf_runtime_device(runtime), KVF_DEVICE_CUDA);
    kvf_runtime_close(runtime);
    kvf_emu_reset();
}

/* ---- too little memory ---- */

typedef struct alive {
    uint64_t allocations, registrations, streams, events, pinned_bytes;
} alive;

static alive alive_now(void)
{
    kvf_emu_counts c;
    kvf_emu_get_counts(&c);
    return (alive){c.allocations, c.registrations, c.streams, c.events, c.pinned_bytes};
}

/* The cache is refused with `words`, nothing of it stays, and a smaller one opens. */
static void too_large(kvf_runtime *runtime, const kvf_cache_config *large, kvf_status status,
                      const char *const *words)
{
    kvf_cache *cache = NULL;
    kvf_error error = {0};
    kvf_cache_config small = test_config_small();
    small.transfer = KVF_TRANSFER_AUTO;
    const alive before = alive_now();
    test_expect(runtime, kvf_cache_open(runtime, large, &cache, &error), status);
    assert_null(cache);
    says(&error, status, words);
    const alive after = alive_now();
    assert_memory_equal(&before, &after, sizeof before);
    test_expect(runtime, kvf_cache_open(runtime, &small, &cache, &error), KVF_OK);
    kvf_cache_close(cache);
}

#define TOO_LARGE(runtime, large, status, ...)                                                     \
    too_large((runtime), (large), (status), (const char *const[]){__VA_ARGS__, NULL})

TEST(memory_that_runs_out)
{
    kvf_runtime *runtime = NULL;
    kvf_error error = {0};
    const kvf_runtime_config rc = on_cuda();
    kvf_emu_config c = machine();
    c.memory_bytes = (uint64_t)64 << 20;
    kvf_emu_set_config(&c);
    test_expect(NULL, test_runtime_open(&rc, &runtime, &error), KVF_OK);

    kvf_cache_config large = test_config_small();
    large.transfer = KVF_TRANSFER_AUTO;
    large.tokens_max = 8192;
    large.layers = 160;
    TOO_LARGE(runtime, &large, KVF_OUT_OF_DEVICE_MEMORY, "MiB", "free", "lower");
    c = machine();
    c.pinned_bytes = (uint64_t)24 << 20;
    kvf_emu_set_config(&c);
    large = test_config_small();
    large.transfer = KVF_TRANSFER_AUTO;
    large.tokens_max = 32768; /* 32 MiB of pages */
    TOO_LARGE(runtime, &large, KVF_PIN_FAILED, "MiB of host memory", "registered", "already");

    /* A pool larger than the memory of any host. */
    kvf_link *link = NULL;
    kvf_link_case lc;
    kvf_link_result result;
    c = machine();
    const alive before = alive_now();
    kvf_link_case_init(&lc);
    lc.pool_bytes = UINT64_C(1) << 44;
    test_expect(runtime, kvf_link_open(runtime, &link), KVF_OK);
    test_expect(runtime, kvf_link_measure(link, &lc, NULL, &result), KVF_OUT_OF_MEMORY);
    SAYS(kvf_runtime_error(runtime), KVF_OUT_OF_MEMORY, "16.00 TiB", "lower");
    kvf_link_close(link);
    const alive after = alive_now();
    assert_memory_equal(&before, &after, sizeof before);

    void *host = NULL, *device = NULL;
    c = machine();
    c.pinned_bytes = 1 << 20;
    kvf_emu_set_config(&c);
    test_expect(runtime, kvf_pinned_alloc(runtime, 2 << 20, &host, &device), KVF_PIN_FAILED);
    SAYS(kvf_runtime_error(runtime), KVF_PIN_FAILED, "2.00 MiB", "0 B already");
    test_expect(runtime, kvf_pinned_alloc(runtime, 4096, &host, &device), KVF_OK);
    kvf_pinned_free(runtime, host);
    kvf_runtime_close(runtime);
    assert_true(kvf_emu_is_clean());
    kvf_emu_reset();
}

/* ---- what this device or driver does not have ---- */

TEST(methods_that_are_not_there)
{
    kvf_runtime *runtime = NULL;
    kvf_cache *cache = NULL;
    kvf_error error = {0};
    kvf_cache_plan plan;
    const kvf_runtime_config rc = on_cuda();
    kvf_emu_config c = machine();
    c.driver_version = 12040; /* before batches of copies */
    kvf_emu_set_config(&c);
    test_expect(NULL, test_runtime_open(&rc, &runtime, &error), KVF_OK);
    kvf_cache_config cc = test_config_small();
    const alive before = alive_now();
    cc.transfer = KVF_TRANSFER_BATCH;
    test_expect(runtime, kvf_cache_open(runtime, &cc, &cache, &error), KVF_UNSUPPORTED);
    SAYS(&error, KVF_UNSUPPORTED, "batch", "12.8", "transfer");
    cc.transfer = KVF_TRANSFER_DIRECT;
    const kvf_status direct = kvf_cache_open(runtime, &cc, &cache, &error);
    assert_true(direct == KVF_UNSUPPORTED || direct == KVF_INVALID);
    SAYS(&error, direct, "transfer = direct", "use auto");
    assert_int_equal(kvf_cache_plan_make(runtime, &cc, &plan, &error), direct);
    const alive after = alive_now();
    assert_memory_equal(&before, &after, sizeof before);
    kvf_runtime_close(runtime);
    kvf_emu_reset();
}

static void task(const void *args, uint32_t number)
{
}

TEST(streams_of_others)
{
    kvf_runtime *runtime = NULL;
    kvf_stream *own = NULL, *first = NULL, *second = NULL;
    const kvf_runtime_config rc = on_cuda();
    void *device = NULL;
    char bytes[64] = "somewhere", back[64] = "";
    (void)machine();
    test_expect(NULL, test_runtime_open(&rc, &runtime, NULL), KVF_OK);
    test_expect(runtime, kvf_memory_alloc(runtime, 64, &device), KVF_OK);
    test_expect(runtime, kvf_stream_create(runtime, &own), KVF_OK);
    test_expect(runtime, kvf_stream_launch(own, task, NULL, 0, 1), KVF_UNSUPPORTED);
    SAYS(kvf_runtime_error(runtime), KVF_UNSUPPORTED, "host device only");
    void *native = kvf_stream_native(own);
    test_expect(runtime, kvf_stream_wrap(runtime, native, &first), KVF_OK);
    test_expect(runtime, kvf_stream_wrap(runtime, native, &second), KVF_OK);
    assert_ptr_equal(kvf_stream_native(second), native);
    test_expect(runtime, kvf_memory_copy(first, device, bytes, 64), KVF_OK);
    kvf_stream_destroy(first); /* the wrapper alone */
    test_expect(runtime, kvf_memory_copy(second, back, device, 64), KVF_OK);
    kvf_stream_destroy(second);
    test_expect(runtime, kvf_stream_wait(own), KVF_OK);
    assert_memory_equal(bytes, back, 64);
    kvf_stream_destroy(own);
    kvf_memory_free(runtime, device);
    kvf_runtime_close(runtime);
    assert_true(kvf_emu_is_clean());
}

/* ---- callers that are wrong ---- */

/* Kernels read 16 bytes at a time, also where the device shares the host's memory. */
TEST(addresses_that_kernels_cannot_read)
{
    const kvf_runtime_config rc = on_cuda();
    const kvf_cache_config cc = test_config_small();
    for (int i = 0; i < 2; i++) {
        kvf_emu_config c = machine();
        c.is_integrated = c.reads_pageable = i != 0;
        kvf_emu_set_config(&c);
        test_world w;
        test_world_open(&w, &rc, &cc);
        kvf_sequence *s = test_sequence(&w);
        char *memory = test_alloc(64);
        const void *whole = memory, *odd = memory + 4;
        const kvf_decode_args args = {
            .batch = 1, .sequences = &s, .q = odd, .k = whole, .v = whole, .out = memory};
        test_expect(w.runtime, kvf_decode(w.cache, &args, w.stream), KVF_INVALID);
        SAYS(kvf_runtime_error(w.runtime), KVF_INVALID, "q = ", "a multiple of 16 bytes");
        test_release(memory);
        test_world_close(&w);
    }
    kvf_emu_reset();
}

/* A GPU that sees the host's memory as its own is called so, with what becomes of pages. */
TEST(memory_that_is_unified)
{
    static const char *const words[] = {"none", "none",
                                        "coherent, as GH200: pages are pinned and copied",
                                        "integrated, as GB10: pages are read in place"};
    for (int i = 0; i < 4; i++) {
        const kvf_runtime_config rc = on_cuda();
        kvf_emu_config c = machine();
        kvf_runtime *runtime;
        static char text[16384];
        size_t needed;
        c.is_integrated = i % 2;
        c.reads_pageable = i > 1;
        kvf_emu_set_config(&c);
        test_expect(NULL, test_runtime_open(&rc, &runtime, NULL), KVF_OK);
        test_expect(runtime, kvf_runtime_describe(runtime, text, sizeof text, &needed), KVF_OK);
        assert_true(needed <= sizeof text);
        const char *said = strstr(text, "\"unified_memory\":\"");
        if (!said ||
            strncmp(said + strlen("\"unified_memory\":\""), words[i], strlen(words[i])) != 0)
            fail_msg("%s is not in %s", words[i], text);
        kvf_runtime_close(runtime);
    }
    kvf_emu_reset();
}

static uint32_t choose_too_far(void *user, const kvf_select_view *view, int32_t *ids)
{
    ids[0] = user ? -1 : (int32_t)view->pages;
    return 1;
}

static uint32_t choose_too_many(void *user, const kvf_select_view *view, int32_t *ids)
{
    for (uint32_t i = 0; i < view->pages_max; i++)
        ids[i] = (int32_t)i;
    return view->pages_max + 1;
}

typedef struct world {
    test_world w;
    test_tokens t;
    kvf_sequence *s;
    float *out; /* [256] */
} world;

static void world_open(world *x, const kvf_cache_config *cc)
{
    kvf_runtime_config rc = on_cuda();
    (void)machine();
    test_tokens_make(&x->t, cc, &(test_tokens_spec){.count = 240, .seed = 9, .sharpness = 1.0f});
    test_world_open(&x->w, &rc, cc);
    x->out = test_alloc(256 * sizeof *x->out);
    x->s = test_sequence(&x->w);
    test_prefill(&x->w, x->s, &x->t, &(test_range){.count = 200, .chunk = 128}, NULL);
}

static void world_close(world *x)
{
    test_close(&x->w, &x->t);
    test_release(x->out);
    assert_true(kvf_emu_is_clean());
}

static kvf_decode_args next_token(world *x, uint32_t token)
{
    return test_step_args(&x->s, &x->t, 0, token, x->out);
}

/* The stream fails with the reason; the kernels never see such an id. */
TEST(ids_that_are_out_of_range)
{
    static const kvf_select_fn wrong[] = {choose_too_far, choose_too_far, choose_too_many};
    for (size_t i = 0; i < 3; i++) {
        static int below;
        world x;
        kvf_cache_config cc = test_config_small();
        cc.select = KVF_SELECT_CUSTOM;
        cc.select_fn = wrong[i];
        cc.select_user = i == 1 ? &below : NULL;
        cc.transfer = i == 0 ? KVF_TRANSFER_GATHER : KVF_TRANSFER_MAPPED;
        world_open(&x, &cc);
        const kvf_decode_args d = next_token(&x, 200);
        test_ok(&x.w, kvf_decode(x.w.cache, &d, x.w.stream));
        test_expect(x.w.runtime, kvf_stream_wait(x.w.stream), KVF_INVALID);
        SAYS(kvf_runtime_error(x.w.runtime), KVF_INVALID, "select_fn");
        world_close(&x);
    }
}

TEST(lists_that_are_out_of_range)
{
    static const int32_t bad[] = {1 << 20, -1};
    for (size_t i = 0; i < 2; i++) {
        world x;
        kvf_cache_config cc = test_config_small();
        cc.select = KVF_SELECT_DYNAMIC;
        cc.static_ratio = 0.0f;
        cc.transfer = KVF_TRANSFER_MAPPED;
        world_open(&x, &cc);
        const kvf_page_lists pl = test_page_lists(x.w.cache, 1);
        const kvf_decode_args d = next_token(&x, 200);
        test_ok(&x.w, kvf_select_pages(x.w.cache, &d, &pl, x.w.stream));
        test_wait(&x.w);
        pl.indices[0] = bad[i];
        test_ok(&x.w, kvf_attend_pages(x.w.cache, &d, &pl, x.w.stream));
        test_expect(x.w.runtime, kvf_stream_wait(x.w.stream), KVF_INVALID);
        if (strlen(kvf_runtime_error(x.w.runtime)->text) < 20)
            fail_msg("\"%s\"", kvf_runtime_error(x.w.runtime)->text);
        test_page_lists_free(&pl);
        world_close(&x);
    }
}

/* A step of all sequences must be a launch that there is. */
TEST(more_lists_than_a_launch_has)
{
    kvf_runtime *runtime = NULL;
    kvf_error error = {0};
    kvf_cache_plan plan;
    kvf_cache_config cc = test_config_small();
    kvf_emu_reset();
    const kvf_runtime_config rc = on_cuda();
    test_expect(NULL, test_runtime_open(&rc, &runtime, &error), KVF_OK);
    cc.kv_heads = cc.query_heads = 5;
    cc.sequences_max = 3277;
    cc.tokens_per_step_max = 4;
    test_expect(runtime, kvf_cache_plan_make(runtime, &cc, &plan, &error), KVF_UNSUPPORTED);
    SAYS(&error, KVF_UNSUPPORTED, "sequences_max = 3277", "tokens_per_step_max = 4",
         "65540 page lists", "takes 65535", "host device");
    cc.kv_heads = cc.query_heads = 3;
    test_expect(runtime, kvf_cache_plan_make(runtime, &cc, &plan, &error), KVF_OK);
    kvf_runtime_close(runtime);
}
