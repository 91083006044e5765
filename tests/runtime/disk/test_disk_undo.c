/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A call of decode that fails half-way has no effect, nor has a cut: every read of every call fails
 * once, or the call needs more memory than there is. After each failure saved bytes, counts, memory
 * and blocks are those of a cache that never had the call, and so are the outputs of what follows.
 *
 * Both caches have a disk tier. Calls have three sequences of three tokens each where nothing else
 * is said. Which pages lie in slots and in page frames may differ, and so hits and what the disk
 * did; see runtime/step/undo.h.
 */

#include "disk_rig.h"
#include "save_faults.h"

#include <errno.h>

#include "cache.h"

#define SEQUENCES 3u
#define TOKENS    3u
#define ROWS      (SEQUENCES * TOKENS)
#define MOST      40u /* tokens after a prompt */

typedef struct undo_case {
    const char *name, *settings;
    uint32_t prompt; /* of the first sequence; others have 10 and 20 fewer */
    uint32_t tokens; /* of a sequence in a call */
    uint32_t calls;  /* that are compared */
    uint32_t memory; /* a quarter of what so many tokens take, or what one sequence needs */
} undo_case;

typedef struct side {
    test_world w;
    kvf_sequence *s[SEQUENCES];
    test_rows rows;
} side;

typedef struct worlds {
    side failing, other;
    test_tokens t;
    uint32_t failures;
} worlds;

/* Token n after the prompt of sequence i. Each sequence has its own. */
static uint32_t token_of(const undo_case *c, uint32_t i, uint32_t n)
{
    return i * (c->prompt + MOST) + c->prompt - 10 * i + n;
}

static void open_side(side *x, const kvf_cache_config *config, const undo_case *c,
                      const test_tokens *t)
{
    const kvf_runtime_config rc = test_runtime_config();
    test_hooks.io_engine = &fail_engine;
    test_world_open(&x->w, &rc, config);
    assert_true(x->w.cache->plan.disk_bytes > 0);
    test_rows_open(&x->rows, config, ROWS);
    for (uint32_t i = 0; i < SEQUENCES; i++) {
        x->s[i] = test_sequence(&x->w);
        test_fill(&x->w, x->s[i], t, i * (c->prompt + MOST), c->prompt - 10 * i);
    }
    test_wait(&x->w);
}

static void close_side(side *x)
{
    test_rows_close(&x->rows);
    test_world_close(&x->w);
}

static void open_worlds(worlds *f, const undo_case *c)
{
    kvf_cache_config config = save_config(&(save_case){c->name, c->settings});
    *f = (worlds){0};
    config.sequences_max = SEQUENCES;
    config.tokens_per_step_max = TOKENS;
    config.head_dim = 32;
    config.tokens_max = c->prompt + MOST;
    config.prefill_chunk_max = 64;
    test_set(&config, c->settings);
    disk_config(&config, c->memory, 1);
    fail_plan_set(UINT32_MAX, NOTHING, 0);
    test_tokens_make(
        &f->t, &config,
        &(test_tokens_spec){
            .count = SEQUENCES * (c->prompt + MOST), .seed = 11, .sharpness = 2.0f, .topics = 5});
    open_side(&f->failing, &config, c, &f->t);
    open_side(&f->other, &config, c, &f->t);
}

static void close_worlds(worlds *f)
{
    close_side(&f->failing);
    close_side(&f->other);
    test_tokens_free(&f->t);
}

/* ---- what must be equal ---- */

static void same_counts(const side *a, const side *b)
{
    kvf_stats x, y;
    kvf_footprint p, q;
    test_same_stats(&a->w, &b->w, 0);
    kvf_cache_stats(a->w.cache, &x);
    kvf_cache_stats(b->w.cache, &y);
    assert_int_equal(x.tokens_held, y.tokens_held);
    assert_int_equal(x.bytes_refresh, y.bytes_refresh);
    assert_int_equal(x.verified, y.verified);
    assert_true(x.recall_sum == y.recall_sum && x.error_max == y.error_max);
    assert_int_equal(x.static_tokens_min, y.static_tokens_min);
    assert_int_equal(x.static_tokens_max, y.static_tokens_max);
    kvf_cache_footprint(a->w.cache, &p);
    kvf_cache_footprint(b->w.cache, &q);
    assert_memory_equal(&p, &q, sizeof p);
}

static void same_blocks(const side *a, const side *b)
{
    for (uint32_t n = 0; n < a->w.cache->kv_group_count; n++) {
        const kvf_kv_group *kv_group = &a->w.cache->kv_groups[n];
        assert_true(kvf_page_pool_is_valid(&kv_group->pool));
        assert_true(!kv_group->pool.tier || kvf_disk_tier_is_valid(kv_group->pool.tier));
        assert_int_equal(kv_group->pool.free_count, b->w.cache->kv_groups[n].pool.free_count);
    }
    assert_int_equal(a->w.cache->broken, KVF_OK);
}

/* A file has all that a sequence is. */
static void same_file(side *a, side *b, uint32_t i)
{
    size_t bytes[2];
    assert_int_equal(save_now(&a->w, a->s[i], save_path("a"), NULL), KVF_OK);
    assert_int_equal(save_now(&b->w, b->s[i], save_path("b"), NULL), KVF_OK);
    char *x = save_read(save_path("a"), &bytes[0]), *y = save_read(save_path("b"), &bytes[1]);
    assert_int_equal(bytes[0], bytes[1]);
    assert_memory_equal(x, y, bytes[0]);
    free(x);
    free(y);
}

/* Files of one sequence, in turn. */
static void same_state(worlds *f)
{
    test_wait(&f->failing.w);
    test_wait(&f->other.w);
    same_counts(&f->failing, &f->other);
    same_blocks(&f->failing, &f->other);
    same_file(&f->failing, &f->other, f->failures % SEQUENCES);
}

/* On a GPU pages have slots since they were sealed, and a call may need none from disk. */
static void some_failed(const worlds *f)
{
    assert_true(f->failures > 0 || test_on_cuda());
}

/* ---- calls ---- */

/* Tokens that every sequence gets next, of one layer; `alone` is one of them, or all for SEQUENCES.
 */
typedef struct call {
    worlds *f;
    const undo_case *c;
    uint32_t layer, n, alone;
    bool is_queries;
} call;

static kvf_status decode(const call *k, side *x)
{
    static const uint32_t counts[SEQUENCES] = {TOKENS, TOKENS, TOKENS};
    const uint32_t tokens = k->c->tokens, first = k->alone % SEQUENCES;
    const uint32_t batch = k->alone == SEQUENCES ? SEQUENCES : 1;
    test_wait(&x->w); /* an earlier call may still read the rows */
    for (uint32_t i = 0; i < SEQUENCES; i++)
        for (uint32_t j = 0; j < tokens; j++)
            test_rows_put(&x->rows, i * tokens + j, &k->f->t, k->layer,
                          token_of(k->c, i, k->n * tokens + j));
    kvf_decode_args args = test_rows_args(&x->rows, first * tokens, x->s + first, batch, k->layer);
    args.tokens = tokens > 1 ? counts : NULL;
    if (k->is_queries)
        args.k = args.v = NULL;
    return kvf_decode(x->w.cache, &args, x->w.stream);
}

static void same_outputs(const call *k)
{
    const test_rows *x = &k->f->failing.rows, *y = &k->f->other.rows;
    test_wait(&k->f->failing.w);
    test_wait(&k->f->other.w);
    assert_memory_equal(x->out, y->out, SEQUENCES * k->c->tokens * x->out_bytes);
}

/* Read 0 of the call fails, then read 1 of the next attempt, until one comes through. */
static void fail_each_read(const call *k)
{
    worlds *f = k->f;
    for (uint32_t n = 0;; n++) {
        const uint64_t live = f->failing.w.runtime->context->live_bytes;
        assert_true(n < 1000);
        fail_plan_set(n, ERRNO + EIO, 0);
        fail_plan.kind = FAIL_READS;
        const kvf_status status = decode(k, &f->failing);
        fail_plan_set(UINT32_MAX, NOTHING, 0);
        if (status == KVF_OK)
            return;
        if (status != KVF_SYSTEM)
            fail_msg("%s", kvf_runtime_error(f->failing.w.runtime)->text);
        assert_int_equal(kvf_runtime_error(f->failing.w.runtime)->foreign, EIO);
        f->failures++;
        assert_int_equal(f->failing.w.runtime->context->live_bytes, live);
        same_state(f);
    }
}

static void each_read_fails(const undo_case *c)
{
    worlds f;
    open_worlds(&f, c);
    call k = {.f = &f, .c = c, .alone = SEQUENCES};
    for (k.n = 0; k.n < c->calls; k.n++)
        for (k.layer = 0; k.layer < f.t.layers; k.layer++) {
            k.is_queries = false;
            fail_each_read(&k);
            test_ok(&f.other.w, decode(&k, &f.other));
            same_outputs(&k);
            if (c->tokens > 1 || k.n % 4 || f.other.w.config.head_mask)
                continue;
            k.is_queries = true;
            fail_each_read(&k);
            test_ok(&f.other.w, decode(&k, &f.other));
            same_outputs(&k);
        }
    same_state(&f);
    printf("# %s: %u failures\n", c->name, f.failures);
    some_failed(&f);
    close_worlds(&f);
}

static const undo_case cases[] = {
    {"hybrid", "refresh_interval=5", 150, TOKENS, 11, 1400},
    {"hybrid, a refresh per token", "refresh_interval=1", 150, TOKENS, 4, 1400},
    {"hybrid, exact", "refresh=exact refresh_interval=7 verify_interval=4 digest=codes", 150,
     TOKENS, 8, 1400},
    {"static", "select=static refresh_interval=2", 150, TOKENS, 6, 1400},
    {"auto ratio", "static_ratio=auto refresh_interval=5", 150, TOKENS, 6, 1400},
    {"dynamic", "digest=codes select=dynamic page_size=4 dtype=fp16", 150, TOKENS, 8, 900},
    {"int4", "head_dim=64 pages=k8v4 digest=codes dtype=bf16 refresh_interval=4", 150, TOKENS, 11,
     500},
    {"moved pages", "transfer=gather refresh_interval=5", 150, TOKENS, 6, 1400},
    {"one token", "refresh_interval=5 digest=codes", 150, 1, 9, 1400},
    {"streaming heads",
     "refresh_interval=5 layers=4 head_mask=10111011 streaming_sink=5 streaming_recent=21", 150, 1,
     9, 1050},
};

TEST(reads_that_fail)
{
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (test_takes(i))
            each_read_fails(&cases[i]);
}

/* Three sequences want more pages at once than there are page frames; one by one they have them. */
static void too_many_at_once(const undo_case *c)
{
    worlds f;
    open_worlds(&f, c);
    call k = {.f = &f, .c = c};
    for (k.n = 0; k.n < test_afford(c->calls); k.n++)
        for (k.layer = 0; k.layer < f.t.layers; k.layer++) {
            k.alone = SEQUENCES;
            const kvf_status status = decode(&k, &f.failing);
            const uint32_t first = status == KVF_OK ? SEQUENCES : 0;
            if (status != KVF_OK) {
                f.failures++;
                assert_int_equal(status, KVF_FULL);
                same_state(&f);
            }
            for (k.alone = 0; k.alone < SEQUENCES; k.alone++) {
                test_ok(&f.other.w, decode(&k, &f.other));
                if (k.alone >= first)
                    test_ok(&f.failing.w, decode(&k, &f.failing));
            }
            same_outputs(&k);
        }
    same_state(&f);
    printf("# %s: %u calls were too large\n", c->name, f.failures);
    some_failed(&f);
    close_worlds(&f);
}

/* ---- cuts ---- */

typedef struct cutting {
    worlds *f;
    uint32_t i, tokens;
} cutting;

static kvf_status cut(const cutting *k, side *x)
{
    return kvf_sequence_truncate(x->w.cache, x->s[k->i], k->tokens, x->w.stream);
}

static uint64_t wanted(side *x)
{
    kvf_stats s;
    test_wait(&x->w); /* counters are of work that is done */
    kvf_cache_stats(x->w.cache, &s);
    return s.disk_wanted;
}

/* Each read of a cut fails: it has no effect on any layer. It reads what is in the window again,
 * and not all that a static set was chosen from. */
static void cut_each_read_fails(const undo_case *c, uint32_t tokens)
{
    worlds f;
    open_worlds(&f, c);
    call k = {.f = &f, .c = c, .alone = SEQUENCES};
    for (; k.n < c->calls; k.n++)
        for (k.layer = 0; k.layer < f.t.layers; k.layer++) {
            test_ok(&f.failing.w, decode(&k, &f.failing));
            test_ok(&f.other.w, decode(&k, &f.other));
        }
    for (uint32_t i = 0; i < SEQUENCES; i++) {
        const cutting now = {&f, i, c->prompt - 10 * i + c->calls * c->tokens - tokens};
        const uint32_t block = f.other.w.cache->plan.block_size;
        const uint64_t before = wanted(&f.other);
        for (uint32_t n = 0;; n++) {
            fail_plan_set(n, ERRNO + EIO, 0);
            fail_plan.kind = FAIL_READS;
            const kvf_status status = cut(&now, &f.failing);
            fail_plan_set(UINT32_MAX, NOTHING, 0);
            if (status == KVF_OK)
                break;
            assert_int_equal(status, KVF_SYSTEM);
            f.failures++;
            same_state(&f);
        }
        test_ok(&f.other.w, cut(&now, &f.other));
        same_state(&f);
        assert_true(wanted(&f.other) - before <= f.t.layers * (tokens / block + 1));
    }
    k.n = c->calls - tokens / c->tokens;
    for (k.layer = 0; k.layer < f.t.layers; k.layer++) {
        test_ok(&f.failing.w, decode(&k, &f.failing));
        test_ok(&f.other.w, decode(&k, &f.other));
        same_outputs(&k);
    }
    printf("# cuts, %s: %u failures\n", c->name, f.failures);
    some_failed(&f);
    close_worlds(&f);
}

TEST(cuts_that_fail)
{
    static const undo_case cuts[] = {
        {"hybrid", "layers=3 refresh_interval=4", 150, TOKENS, 12, 1400},
        {"int4", "layers=3 head_dim=64 pages=k8v4 digest=codes dtype=bf16 refresh_interval=4", 150,
         TOKENS, 12, 500},
        {"dynamic", "layers=3 digest=codes select=dynamic page_size=4 dtype=fp16", 150, TOKENS, 12,
         700},
    };
    for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++)
        if (test_takes(i))
            cut_each_read_fails(&cuts[i], 33);
}

#define LARGE                                                                                      \
    "page_size=64 local_tokens=34 sink_tokens=3 budget_tokens=420 kv_heads=1 query_heads=4 "

TEST(calls_that_are_too_large)
{
    static const undo_case large[] = {
        {"hybrid", LARGE "refresh_interval=7", 450, TOKENS, 11, 1},
        {"hybrid, exact", LARGE "refresh_interval=7 refresh=exact", 450, TOKENS, 11, 1},
        {"static", LARGE "select=static refresh_interval=7 refresh=exact", 450, TOKENS, 11, 1},
        {"dynamic", LARGE "select=dynamic", 450, TOKENS, 11, 1},
    };
    for (size_t i = 0; i < sizeof large / sizeof *large; i++)
        if (test_takes(i))
            too_many_at_once(&large[i]);
}

TESTS_RUN_BETWEEN(NULL, save_remove_folder)
