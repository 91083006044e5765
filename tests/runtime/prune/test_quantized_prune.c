/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Pruning where pages are quantized: runs of the library that end in the same are compared with
 * each other, bit for bit. Keeping itself is in test_retain.
 */

#include <string.h>

#include <kvferry/prune.h>

#include "disk_rig.h"
#include "prune_rig.h"

static const kvf_pages forms[] = {KVF_PAGES_K8V8, KVF_PAGES_K8V4};

/* A GPU dequantizes in bf16; and the emulated one is slow. */
static kvf_dtype dtype_here(uint32_t i)
{
    return test_on_cuda() ? KVF_BF16 : (kvf_dtype)(i % 3);
}

static uint32_t turns_here(uint32_t turns)
{
    return test_on_cuda() ? (turns + 3) / 4 : turns;
}

/* ---- whole prompts ---- */

typedef struct prompt_case {
    const char *policy;
    kvf_retention retention;
    kvf_eviction eviction;
} prompt_case;

static const prompt_case prompts[] = {
    {"snapkv", KVF_RETENTION_EVICT, KVF_EVICTION_NONE},
    {"fastkv", KVF_RETENTION_OFFLOAD, KVF_EVICTION_NONE},
    {"structkv", KVF_RETENTION_EVICT, KVF_EVICTION_NONE},
    {"snapkv", KVF_RETENTION_EVICT, KVF_EVICTION_PATCHED},
    {"pyramidkv", KVF_RETENTION_OFFLOAD, KVF_EVICTION_NONE},
    {"fastkv", KVF_RETENTION_COMPLETE, KVF_EVICTION_NONE},
    {"h2o", KVF_RETENTION_EVICT, KVF_EVICTION_NONE},
    {"streaming", KVF_RETENTION_EVICT, KVF_EVICTION_NAIVE},
    {"pyramidinfer", KVF_RETENTION_OFFLOAD, KVF_EVICTION_NONE},
    {"gemfilter", KVF_RETENTION_EVICT, KVF_EVICTION_NONE},
    {"asl", KVF_RETENTION_EVICT, KVF_EVICTION_NONE},
    {"snapkv", KVF_RETENTION_EVICT, KVF_EVICTION_NAIVE},
};
#define PROMPTS (sizeof prompts / sizeof *prompts)
/* This one with exact pages, which dropping tokens reads back from disk like others. */
#define EXACT   7u

/* Cases of which all are tried on the host device, on the other so many. */
static uint32_t prompts_here(uint32_t on_cuda)
{
    return test_on_cuda() ? on_cuda : (uint32_t)PROMPTS;
}

static kvf_cache_config prompt_config(uint32_t i)
{
    kvf_cache_config c = rig_cache_config();
    c.pages = forms[i % 2];
    c.dtype = dtype_here(i + 1);
    c.page_size = 4;
    c.digest = KVF_DIGEST_CODES;
    c.select = i / 2 % 2 ? KVF_SELECT_DYNAMIC : KVF_SELECT_HYBRID;
    c.observe_window = 8;
    c.sequences_max = 3;
    return c;
}

static void open_prompt(rig *r, const kvf_cache_config *c, const prompt_case *x, float keep)
{
    rig_open(r, c, 0);
    kvf_prune_config_init(&r->config, kvf_prune_policy_find(x->policy));
    r->config.retention = x->retention;
    r->config.eviction = x->eviction;
    r->config.chunk_queries = 8;
    r->config.settings.keep = keep;
    r->config.settings.propagate = keep < 1 && x->eviction == KVF_EVICTION_NONE ? 0.5f : 1;
    if (strcmp(x->policy, "asl") == 0)
        r->config.settings.keep_tokens = r->config.settings.propagate_tokens = 60;
    if (r->config.settings.window > 8)
        r->config.settings.window = 8;
    rig_prune(r);
}

/* All layers, chunk by chunk. */
static kvf_sequence *run_chunks(rig *r, bool has_patch)
{
    progress p = rig_begin(r, PROMPT);
    for (uint32_t first = 0, n; first < PROMPT; first += n) {
        n = kvf_min_u32(40, PROMPT - first);
        const uint32_t patch = has_patch && first + n < PROMPT ? 8 : 0;
        for (p.layer = 0; p.layer < LAYERS; p.layer++) {
            rig_fill_chunk(r, &p, first, n, false);
            progress end = p;
            for (uint32_t i = PROMPT - patch; i < PROMPT; i++)
                end.positions[i] = first + n + i - (PROMPT - patch);
            if (patch)
                rig_fill_chunk(r, &end, PROMPT - patch, patch, false);
            test_ok(&r->w, kvf_prune_chunk(r->prune, p.sequence, p.layer, n, patch, r->w.stream));
        }
    }
    return p.sequence;
}

static kvf_sequence *run_prompt(rig *r)
{
    if (r->config.eviction == KVF_EVICTION_NONE)
        return rig_run(r, PROMPT).sequence;
    return run_chunks(r, r->config.eviction == KVF_EVICTION_PATCHED);
}

/* Steps after it, which are the caller's to free. */
static void *run_steps(rig *r, kvf_sequence *s)
{
    return test_steps(&r->w, s, &r->t, PROMPT, STEPS);
}

static void expect_same(rig *r, const void *want, kvf_sequence *s, const prompt_case *x,
                        const char *what)
{
    void *got = run_steps(r, s);
    if (memcmp(want, got, test_steps_bytes(&r->t, STEPS)) != 0)
        fail_msg("%s, retention %d, eviction %d: %s: other bits", x->policy, (int)x->retention,
                 (int)x->eviction, what);
    free(got);
}

/* A fork, a file, another way to move pages and a disk tier. */
TEST(whatever_comes_next_changes_no_bit)
{
    for (uint32_t i = 0; i < prompts_here(4); i++) {
        const prompt_case *x = &prompts[i];
        kvf_cache_config c = prompt_config(i);
        kvf_sequence *fork = NULL;
        rig r;
        if (i == EXACT)
            c.pages = KVF_PAGES_NATIVE;
        c.transfer = test_transfer(KVF_TRANSFER_GATHER);
        open_prompt(&r, &c, x, 0.4f);
        kvf_sequence *s = run_prompt(&r);
        test_ok(&r.w, kvf_sequence_fork(r.w.cache, s, r.w.stream, &fork));
        assert_int_equal(save_now(&r.w, s, save_path("pruned"), NULL), KVF_OK);
        void *want = run_steps(&r, s);
        expect_same(&r, want, fork, x, "a fork");
        kvf_sequence_destroy(fork);
        fork = save_restore(&r.w, save_path("pruned"), 1);
        expect_same(&r, want, fork, x, "a file");
        for (uint32_t layer = 0; layer < LAYERS; layer++)
            assert_int_equal(kvf_sequence_length(s, layer), kvf_sequence_length(fork, layer));
        if (c.select ==
            KVF_SELECT_DYNAMIC) { /* steps come again; others choose a static set anew */
            test_ok(&r.w, kvf_sequence_truncate(r.w.cache, s, PROMPT, r.w.stream));
            expect_same(&r, want, s, x, "a cut");
        }
        rig_close(&r);

        c.transfer = test_transfer(i % 2 ? KVF_TRANSFER_DIRECT : KVF_TRANSFER_EACH);
        open_prompt(&r, &c, x, 0.4f);
        expect_same(&r, want, run_prompt(&r), x, "a transfer method");
        rig_close(&r);

        c.transfer = KVF_TRANSFER_AUTO;
        disk_config(&c, PROMPT, 1);
        open_prompt(&r, &c, x, 0.4f);
        assert_true(r.w.cache->plan.disk_bytes > 0);
        expect_same(&r, want, run_prompt(&r), x, "a disk tier");
        assert_true(kvf_disk_tier_is_valid(r.w.cache->kv_groups[0].pool.tier));
        rig_close(&r);
        free(want);
    }
}

/* Who keeps all has not pruned. */
TEST(keeping_all_is_not_pruning)
{
    static const prompt_case all = {"full", KVF_RETENTION_EVICT, KVF_EVICTION_NONE};
    for (uint32_t i = 0; i < turns_here(4); i++) {
        const kvf_cache_config c = prompt_config(i);
        rig r;
        open_prompt(&r, &c, i % 2 ? &prompts[0] : &all, 1.0f);
        kvf_sequence *s = run_prompt(&r);
        void *want = run_steps(&r, s);
        kvf_sequence_destroy(s);
        s = test_sequence(&r.w);
        test_fill(&r.w, s, &r.t, 0, PROMPT);
        expect_same(&r, want, s, i % 2 ? &prompts[0] : &all, "without pruning");
        free(want);
        rig_close(&r);
    }
}

/* The completed sequence of a pruned prompt is the prompt that was never pruned. */
TEST(a_completed_sequence_is_the_prompt)
{
    static const prompt_case x = {"fastkv", KVF_RETENTION_COMPLETE, KVF_EVICTION_NONE};
    for (uint32_t i = 0; i < turns_here(3); i++) {
        kvf_cache_config c = prompt_config(i);
        kvf_sequence *whole = NULL;
        uint32_t first = 1;
        rig r;
        c.select = KVF_SELECT_DYNAMIC; /* no static set that the policy has chosen */
        open_prompt(&r, &c, &x, 0.4f);
        kvf_sequence *s = run_prompt(&r), *plain = test_sequence(&r.w);
        while (first < LAYERS && kvf_sequence_length(s, first) == PROMPT)
            first++;
        assert_true(first < LAYERS);
        test_fill(&r.w, plain, &r.t, 0, PROMPT);
        test_ok(&r.w, kvf_complete_begin(r.w.cache, s, first, PROMPT, r.w.stream, &whole));
        for (uint32_t layer = first; layer < LAYERS; layer++)
            test_prefill(&r.w, whole, &r.t,
                         &(test_range){.layer = layer, .count = PROMPT, .chunk = 33}, NULL);
        test_ok(&r.w, kvf_complete_end(r.w.cache, s, whole, r.w.stream));
        void *want = run_steps(&r, plain);
        expect_same(&r, want, s, &x, "a completed sequence");
        free(want);
        rig_close(&r);
    }
}

TESTS_RUN_BETWEEN(NULL, save_remove_folder)
