/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The same input gives the same bits: whatever the transfer method, the number of threads, the
 * slots, the chunks, and the order in which streams happen to run. Batches and single sequences are
 * compared in test_combinations.c.
 *
 * Compares runs of the library with each other; what is right is the business of other tests.
 */

#include "harness.h"

static test_scenario scenario_of(const char *settings, uint64_t seed)
{
    test_scenario sc = {.cc = test_config_small(),
                        .tokens = {.seed = seed, .sharpness = 2.5f, .topics = 6},
                        .prompt = TEST_SANITIZED ? 150 : 260,
                        .steps = test_afford(50),
                        .chunk = 100};
    sc.cc.layers = 2;
    sc.cc.dtype = KVF_BF16;
    test_set(&sc.cc, settings);
    return sc;
}

/* A way to run it; 0 = as the row says. */
typedef struct way {
    kvf_transfer transfer;
    uint32_t threads, delay_seed, chunk;
} way;

typedef struct ways {
    uint32_t count;
    way of[5];
} ways;

#define BY(method) .transfer = KVF_TRANSFER_##method
/* The last two are the CUDA device's. */
static const ways transfers = {5,
                               {{BY(DIRECT)}, {BY(GATHER)}, {BY(EACH)}, {BY(BATCH)}, {BY(AUTO)}}};
/* Pages of a few tokens are moved one by one, attended in place, in one step or not. */
static const ways small = {3, {{BY(DIRECT)}, {BY(GATHER)}, {BY(EACH), .chunk = 37}}};
static const ways chunks = {4, {{0}, {.chunk = 1}, {.chunk = 37}, {BY(GATHER), .chunk = 97}}};
static const ways threads = {4, {{.threads = 1}, {.threads = 2}, {.threads = 3}, {.threads = 5}}};
/* Streams that pause at random: whatever was forgotten to wait for shows here, and under TSan. */
static const ways delays = {3, {{0}, {.delay_seed = 7919}, {.delay_seed = 15838}}};

static const struct {
    const char *settings;
    const ways *ways;
    uint32_t block; /* test hook */
} rows[] = {
    {"select=hybrid", &transfers, 8},
    {"select=full", &transfers, 8},
    {"select=static", &transfers, 8},
    {"select=dynamic", &transfers, 8},
    {"select=streaming", &transfers, 8},
    {"select=quest", &transfers, 8},
    {"select=arkvale", &transfers, 8},
    {"select=dynamic head_dim=192 value_dim=128", &transfers, 8},
    {"select=oracle", &transfers, 8},
    {"select=hybrid page_size=1 budget_tokens=120", &small, 0},
    {"select=quest page_size=1 budget_tokens=120", &small, 0},
    {"select=oracle page_size=1 budget_tokens=120", &small, 0},
    {"select=hybrid page_size=4 budget_tokens=120", &small, 0},
    {"select=quest page_size=4 budget_tokens=120", &small, 0},
    {"select=oracle page_size=4 budget_tokens=120", &small, 0},
    {"select=hybrid digest=codes page_size=4 budget_tokens=120", &small, 0},
    {"select=dynamic digest=codes page_size=1 budget_tokens=120", &small, 0},
    {"select=hybrid", &chunks, 8},
    {"select=dynamic digest=codes page_size=4 budget_tokens=64 coarse_share=0 head_mask=2012 "
     "streaming_sink=6 streaming_recent=50",
     &chunks, 8},
/* Streaming heads beside others, alone, and not at all. */
#define MASKED "select=full layers=3 kv_heads=4 query_heads=8 head_mask=010100001111 "
    {MASKED "dtype=fp32 streaming_sink=6 streaming_recent=77", &chunks, 8},
    {MASKED "page_size=64 budget_tokens=160 streaming_sink=6 streaming_recent=77", &chunks, 8},
    {MASKED "dtype=fp32 streaming_sink=0 streaming_recent=1", &chunks, 8},
    {"select=hybrid pages=k8v8", &transfers, 8},
    {"select=dynamic digest=codes pages=k8v4 head_dim=192 value_dim=128", &transfers, 8},
    {"select=dynamic digest=codes pages=k8v8 page_size=4 budget_tokens=120", &chunks, 8},
    {"select=hybrid digest=codes pages=k8v4 page_size=4 budget_tokens=120", &chunks, 8},
    {"select=quest pages=k8v8 page_size=4 budget_tokens=120", &chunks, 8},
    {"select=hybrid transfer=direct", &threads, 8},
    {"select=hybrid transfer=gather", &threads, 8},
    {"select=hybrid transfer=direct", &delays, 8},
    {"select=hybrid transfer=gather", &delays, 8},
    {"select=hybrid transfer=each", &delays, 8},
};

/* Prompts, too, where they have the same chunks, attend to quantized pages, or to rings. */
TEST(ways_give_the_same_bits)
{
    const uint64_t seed = test_seed(101);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        test_trace first = {0}, other;
        const bool any_chunks =
            strstr(rows[i].settings, "pages=k8") || strstr(rows[i].settings, MASKED);
        for (uint32_t k = 0; k < rows[i].ways->count && test_takes(i); k++) {
            const way *w = &rows[i].ways->of[k];
            test_scenario sc = scenario_of(rows[i].settings, seed + i);
            kvf_runtime_config rc = test_runtime_config();
            if (rows[i].ways == &transfers && k == 3 && !test_on_cuda())
                break;
            sc.rc = &rc;
            sc.chunk = w->chunk ? w->chunk : sc.chunk;
            rc.threads = w->threads ? w->threads : rc.threads;
            rc.gather_threads = w->threads > 1 ? w->threads - 1 : rc.gather_threads;
            test_hooks.block_size = rows[i].block;
            test_hooks.delay_seed = w->delay_seed;
            sc.cc.transfer = w->transfer ? w->transfer : sc.cc.transfer;
            test_run(&sc, k ? &other : &first);
            if (k == 0)
                continue;
            test_same_bits(&first, &other, rows[i].settings);
            if (!w->chunk || any_chunks)
                assert_memory_equal(first.prefill, other.prefill, first.prefill_bytes);
            assert_int_equal(first.stats.pages_selected, other.stats.pages_selected);
            if (rows[i].ways == &transfers &&
                !test_on_cuda()) /* which gives away what it meets first */
                assert_int_equal(first.stats.misses, other.stats.misses);
            test_trace_free(&other);
        }
        test_trace_free(&first);
    }
}

/* Residency decides what moves, never the answer. An exact refresh sees every key. */
TEST(slots_do_not_change_bits)
{
    const uint64_t seed = test_seed(109);
    static const uint64_t bytes[] = {0, 1 << 30};
    static const char *const selects[] = {"select=hybrid", "select=dynamic"};
    for (size_t i = 0; i < 2; i++) {
        test_scenario sc = scenario_of(selects[i], seed);
        sc.prompt = 260; /* long enough for pages to be missed twice, under sanitizers too */
        sc.steps = 50;
        sc.cc.refresh = KVF_REFRESH_EXACT;
        sc.cc.transfer = KVF_TRANSFER_GATHER;
        test_trace first, other;
        test_run(&sc, &first);
        uint64_t most = 0, least = UINT64_MAX;
        for (size_t j = 0; j < sizeof bytes / sizeof *bytes; j++) {
            sc.cc.device_bytes = bytes[j];
            test_run(&sc, &other);
            test_same_bits(&first, &other, "slots");
            assert_int_equal(first.stats.pages_selected, other.stats.pages_selected);
            if (j == 0)
                most = other.stats.misses;
            least = other.stats.misses;
            test_trace_free(&other);
        }
        assert_true(least < most); /* room for all: a page is missed once */
        test_trace_free(&first);
    }
}

static uint32_t cpu_isa(uint32_t mask)
{
    kvf_runtime_config rc = test_runtime_config();
    rc.isa_mask = mask;
    kvf_runtime *runtime = NULL;
    kvf_error error = {0};
    const kvf_status status = test_runtime_open(&rc, &runtime, &error);
    kvf_runtime_close(runtime);
    return status == KVF_OK;
}

/* One instruction set twice: the same bits. Two of them: the same to rounding (at full budget,
 * where rounding cannot change a choice). */
TEST(instruction_sets_agree)
{
    const uint64_t seed = test_seed(113);
    if (test_on_cuda()) {
        print_message("# skipped: these kernels are not the CUDA device's\n");
        skip();
    }
    static const uint32_t masks[] = {KVF_ISA_REFERENCE, KVF_ISA_BASELINE,
                                     KVF_ISA_BASELINE | KVF_ISA_AVX2, KVF_ISA_ALL};
    kvf_runtime_config rc = test_runtime_config();
    test_trace reference = {0}, first, second;
    for (size_t i = 0; i < sizeof masks / sizeof *masks; i++) {
        if (!cpu_isa(masks[i]))
            continue;
        rc.isa_mask = masks[i];
        test_scenario sc = scenario_of("select=hybrid", seed);
        sc.rc = &rc;
        test_run(&sc, &first);
        rc.threads = 3;
        test_run(&sc, &second);
        rc.threads = 2;
        test_same_bits(&first, &second, "one instruction set");
        test_trace_free(&second);
        test_trace_free(&first);

        sc.cc.select = KVF_SELECT_FULL;
        test_run(&sc, &first);
        if (!reference.out) {
            reference = first;
            continue;
        }
        assert_true(test_distance(reference.out, first.out, KVF_BF16, first.out_bytes / 2) <=
                    test_tolerance(KVF_BF16));
        assert_true(test_distance(reference.lse, first.lse, KVF_FP32, first.lse_count) <=
                    TEST_LSE_TOLERANCE);
        test_trace_free(&first);
    }
    test_trace_free(&reference);
}
