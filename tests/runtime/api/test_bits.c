/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The same input gives the same bits: whatever the transfer method, the number of threads, the
 * slots, the order in which streams happen to run, and whether sequences come one by one or as a
 * batch.
 *
 * Compares runs of the library with each other; what is right is the business of other tests.
 */

#include "harness.h"

static test_scenario scenario_of(kvf_select select, uint64_t seed)
{
    test_scenario sc = {.cc = test_config_small(),
                        .tokens = {.seed = seed, .sharpness = 2.5f, .topics = 6},
                        .prompt = TEST_SANITIZED ? 150 : 260,
                        .steps = test_afford(50),
                        .chunk = 100};
    sc.cc.layers = 2;
    sc.cc.dtype = KVF_BF16;
    sc.cc.select = select;
    return sc;
}

static const kvf_select all_selects[] = {
    KVF_SELECT_HYBRID,    KVF_SELECT_FULL,  KVF_SELECT_STATIC,  KVF_SELECT_DYNAMIC,
    KVF_SELECT_STREAMING, KVF_SELECT_QUEST, KVF_SELECT_ARKVALE, KVF_SELECT_ORACLE,
};

static const char *select_names[] = {"hybrid",    "full",  "static",  "dynamic",
                                     "streaming", "quest", "arkvale", "oracle"};

static void every_transfer_method_gives_the_same_bits(void **state)
{
    const uint64_t seed = test_seed(101);
    /* The last two are the CUDA device's. */
    static const kvf_transfer methods[] = {KVF_TRANSFER_GATHER, KVF_TRANSFER_EACH,
                                           KVF_TRANSFER_BATCH, KVF_TRANSFER_AUTO};
    const size_t count = test_on_cuda() ? 4 : 2;
    for (size_t i = 0; i < sizeof all_selects / sizeof *all_selects; i++) {
        if (!test_takes(i))
            continue;
        test_scenario sc = scenario_of(all_selects[i], seed + i);
        sc.cc.transfer = KVF_TRANSFER_DIRECT;
        test_trace direct, other;
        test_run(&sc, &direct);
        for (size_t m = 0; m < count; m++) {
            sc.cc.transfer = methods[m];
            test_run(&sc, &other);
            test_same_bits(&direct, &other, select_names[i]);
            assert_int_equal(direct.stats.pages_selected, other.stats.pages_selected);
            if (!test_on_cuda()) /* which gives away what it meets first */
                assert_int_equal(direct.stats.misses, other.stats.misses);
            assert_int_equal(direct.stats.pages_selected, other.stats.pages_selected);
            test_trace_free(&other);
        }
        test_trace_free(&direct);
    }
}

static void thread_counts_give_the_same_bits(void **state)
{
    const uint64_t seed = test_seed(103);
    static const uint32_t threads[] = {2, 3, 5};
    static const kvf_transfer methods[] = {KVF_TRANSFER_DIRECT, KVF_TRANSFER_GATHER};
    for (size_t m = 0; m < 2; m++) {
        test_scenario sc = scenario_of(KVF_SELECT_HYBRID, seed + m);
        sc.cc.transfer = methods[m];
        kvf_runtime_config rc = test_runtime_config();
        sc.rc = &rc;
        test_trace one, more;
        rc.threads = rc.gather_threads = 1;
        test_run(&sc, &one);
        for (size_t i = 0; i < sizeof threads / sizeof *threads; i++) {
            rc.threads = threads[i];
            rc.gather_threads = threads[i] - 1;
            test_run(&sc, &more);
            test_same_bits(&one, &more, "threads");
            assert_memory_equal(one.prefill, more.prefill, one.prefill_bytes);
            test_trace_free(&more);
        }
        test_trace_free(&one);
    }
}

/* Pages of a few tokens in blocks of 32: moved one by one, attended in place, in one step or not.
 */
static void small_pages_give_the_same_bits(void **state)
{
    const uint64_t seed = test_seed(113);
    static const kvf_select selects[] = {KVF_SELECT_HYBRID, KVF_SELECT_QUEST, KVF_SELECT_ORACLE};
    static const kvf_transfer methods[] = {KVF_TRANSFER_GATHER, KVF_TRANSFER_EACH};
    for (uint32_t i = 0; i < 8; i++) {
        if (!test_takes(i))
            continue;
        test_scenario sc = scenario_of(selects[i % 3], seed + i);
        const kvf_runtime_config rc = test_runtime_config();
        test_seams.block_size = 0;
        sc.rc = &rc;
        sc.cc.page_size = i < 3 || i == 7 ? 1 : 4;
        if (i >= 6) {
            sc.cc.digest = KVF_DIGEST_CODES;
            sc.cc.select = i == 7 ? KVF_SELECT_DYNAMIC : KVF_SELECT_HYBRID;
        }
        sc.cc.budget_tokens = 120;
        sc.cc.transfer = KVF_TRANSFER_DIRECT;
        test_trace direct, other;
        test_run(&sc, &direct);
        for (size_t m = 0; m < 2; m++) {
            sc.cc.transfer = methods[m];
            sc.chunk = m ? 37 : 100;
            test_run(&sc, &other);
            test_same_bits(&direct, &other, "small pages");
            assert_int_equal(direct.stats.pages_selected, other.stats.pages_selected);
            test_trace_free(&other);
        }
        test_trace_free(&direct);
    }
}

/* Streams that pause at random: whatever was forgotten to wait for shows here, and under TSan. */
static void delays_do_not_change_bits(void **state)
{
    const uint64_t seed = test_seed(107);
    static const kvf_transfer methods[] = {KVF_TRANSFER_DIRECT, KVF_TRANSFER_GATHER,
                                           KVF_TRANSFER_EACH};
    for (size_t m = 0; m < 3; m++) {
        test_scenario sc = scenario_of(KVF_SELECT_HYBRID, seed);
        sc.prompt = 140;
        sc.steps = 24;
        sc.cc.transfer = methods[m];
        kvf_runtime_config rc = test_runtime_config();
        sc.rc = &rc;
        test_trace calm, shaken;
        test_run(&sc, &calm);
        for (uint32_t delay = 1; delay <= 2; delay++) {
            test_seams.delay_seed = delay * 7919;
            test_run(&sc, &shaken);
            test_same_bits(&calm, &shaken, "delays");
            test_trace_free(&shaken);
        }
        test_trace_free(&calm);
    }
}

/* Residency decides what moves, never the answer. An exact refresh sees every key. */
static void slots_do_not_change_bits(void **state)
{
    const uint64_t seed = test_seed(109);
    static const uint64_t bytes[] = {0, 1 << 30};
    static const kvf_select selects[] = {KVF_SELECT_HYBRID, KVF_SELECT_DYNAMIC};
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
static void instruction_sets_agree(void **state)
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
        test_scenario sc = scenario_of(KVF_SELECT_HYBRID, seed);
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

#define BATCH 3u

typedef struct batch_run {
    const kvf_cache_config *cc;
    const test_tokens *tokens; /* [BATCH] */
    const uint32_t *prompts;   /* [BATCH] lengths differ */
    uint32_t steps;
    uint32_t together; /* 1: one call per layer and step for all sequences */
} batch_run;

/* out is [steps, layers, BATCH, query_heads, head_dim] */
static void run_batch(const batch_run *b, void *out, float *lse)
{
    test_world w;
    test_world_open(&w, NULL, b->cc);
    const size_t row = (size_t)b->cc->query_heads * b->cc->head_dim,
                 size = test_dtype_bytes(b->cc->dtype);
    const size_t kv_row = (size_t)b->cc->kv_heads * b->cc->head_dim;
    kvf_sequence *s[BATCH];
    char *q = test_alloc(b->steps * b->cc->layers * BATCH * row * size);
    char *k = test_alloc(b->steps * b->cc->layers * BATCH * kv_row * size);
    char *v = test_alloc(b->steps * b->cc->layers * BATCH * kv_row * size);
    assert_true(q && k && v);
    for (uint32_t i = 0; i < BATCH; i++) {
        s[i] = test_sequence(&w);
        for (uint32_t layer = 0; layer < b->cc->layers; layer++)
            test_prefill(&w, s[i], &b->tokens[i],
                         &(test_range){.layer = layer, .count = b->prompts[i], .chunk = 128}, NULL);
    }
    for (uint32_t step = 0; step < b->steps; step++)
        for (uint32_t layer = 0; layer < b->cc->layers; layer++) {
            const size_t at = ((size_t)step * b->cc->layers + layer) * BATCH;
            for (uint32_t i = 0; i < BATCH; i++) {
                const uint32_t token = b->prompts[i] + step;
                memcpy(q + (at + i) * row * size, test_q(&b->tokens[i], layer, token), row * size);
                memcpy(k + (at + i) * kv_row * size, test_k(&b->tokens[i], layer, token),
                       kv_row * size);
                memcpy(v + (at + i) * kv_row * size, test_v(&b->tokens[i], layer, token),
                       kv_row * size);
                if (!b->together)
                    test_decode(&w, s[i], &b->tokens[i], layer, token,
                                (char *)out + (at + i) * row * size,
                                lse + (at + i) * b->cc->query_heads);
            }
            kvf_decode_args a = {.layer = layer,
                                 .batch = BATCH,
                                 .sequences = s,
                                 .q = q + at * row * size,
                                 .k = k + at * kv_row * size,
                                 .v = v + at * kv_row * size,
                                 .out = (char *)out + at * row * size,
                                 .lse = lse + at * b->cc->query_heads};
            if (b->together)
                test_ok(&w, kvf_decode(w.cache, &a, w.stream));
        }
    test_wait(&w);
    test_world_close(&w);
    test_release(q);
    test_release(k);
    test_release(v);
}

static void batch_equals_single_runs(void **state)
{
    const uint64_t seed = test_seed(127);
    static const uint32_t prompts[BATCH] = {TEST_SANITIZED ? 130 : 260, 33, 101};
    const uint32_t steps = test_afford(30);
    static const kvf_transfer methods[] = {KVF_TRANSFER_DIRECT, KVF_TRANSFER_GATHER};
    for (size_t i = 0; i < sizeof all_selects / sizeof *all_selects; i++) {
        if (!test_takes(i))
            continue;
        kvf_cache_config cc = scenario_of(all_selects[i], seed).cc;
        cc.sequences_max = BATCH;
        cc.transfer = methods[i % 2];
        test_tokens tokens[BATCH];
        for (uint32_t b = 0; b < BATCH; b++)
            test_tokens_make(
                &tokens[b], &cc,
                &(test_tokens_spec){
                    .count = prompts[b] + steps, .seed = seed + b, .sharpness = 2.0f, .topics = 5});
        batch_run run = {.cc = &cc, .tokens = tokens, .prompts = prompts, .steps = steps};
        const size_t rows = (size_t)steps * cc.layers * BATCH * cc.query_heads;
        char *alone = test_alloc(rows * cc.head_dim * 2u),
             *together = test_alloc(rows * cc.head_dim * 2u);
        float *lse = test_alloc(rows * 2 * sizeof *lse);
        assert_true(alone && together && lse);
        run_batch(&run, alone, lse);
        run.together = 1;
        run_batch(&run, together, lse + rows);
        if (memcmp(alone, together, rows * cc.head_dim * 2u) != 0 ||
            memcmp(lse, lse + rows, rows * sizeof *lse) != 0)
            fail_msg("%s: a batch and single runs differ by %g", select_names[i],
                     test_distance(alone, together, KVF_BF16, rows * cc.head_dim));
        test_release(alone);
        test_release(together);
        test_release(lse);
        for (uint32_t b = 0; b < BATCH; b++)
            test_tokens_free(&tokens[b]);
    }
}

int main(void)
{
    return unit_run(every_transfer_method_gives_the_same_bits, thread_counts_give_the_same_bits,
                    small_pages_give_the_same_bits, delays_do_not_change_bits,
                    slots_do_not_change_bits, instruction_sets_agree, batch_equals_single_runs);
}
