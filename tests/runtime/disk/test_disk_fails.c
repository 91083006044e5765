/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A disk that fails: every request of every call once, in every way; each refusal at open. A
 * failure is named, the call may be made again, the bits are those of a cache without a tier, and
 * nothing is left behind.
 */

#include "disk_rig.h"
#include "save_faults.h"

#include <errno.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cache.h"

#define PROMPT 180u
#define STEPS  6u

typedef struct disk_world {
    disk_worlds w;
    disk_pair p;
    uint32_t failures;
} disk_world;

static void open_worlds_on(disk_world *f, const save_case *c, const kvf_io_ops *engine)
{
    kvf_cache_config config = save_config(c);
    *f = (disk_world){0};
    config.layers = test_on_cuda() ? 14 : 8;
    config.budget_tokens = 64;
    config.head_dim = 32;
    config.tokens_max = 256;
    config.prefill_chunk_max = 64;
    config.sequences_max = 2;
    /* On a GPU more pages than the choices of one call, which it keeps. */
    disk_config(&config, PROMPT, 1);
    fail_plan_set(UINT32_MAX, NOTHING, 0);
    disk_worlds_open(&f->w, config, engine);
    f->p = disk_begin(&f->w);
}

static void open_worlds(disk_world *f, const save_case *c)
{
    open_worlds_on(f, c, &fail_engine);
}

/* ---- calls that may fail ---- */

typedef struct attempt {
    disk_world *f;
    uint32_t layer, first, count;
    char *out;
} attempt;

static kvf_status prefill(attempt *a)
{
    const test_tokens *t = &a->f->w.t;
    const kvf_prefill_args args =
        test_chunk_args(a->f->p.tier, t, a->layer, a->first, a->count, a->out);
    return kvf_prefill(a->f->w.tier.cache, &args, a->f->w.tier.stream);
}

static kvf_status decode(attempt *a)
{
    const test_tokens *t = &a->f->w.t;
    const kvf_decode_args args = test_step_args(&a->f->p.tier, t, a->layer, a->first, a->out);
    return kvf_decode(a->f->w.tier.cache, &args, a->f->w.tier.stream);
}

static kvf_status cut(attempt *a)
{
    return kvf_sequence_truncate(a->f->w.tier.cache, a->f->p.tier, a->first, a->f->w.tier.stream);
}

static kvf_status restore(attempt *a)
{
    kvf_restore_args args;
    kvf_sequence *s = NULL;
    kvf_restore_args_init(&args);
    args.path = save_path("fails");
    const kvf_status status =
        kvf_sequence_restore(a->f->w.tier.cache, &args, a->f->w.tier.stream, &s);
    if (status != KVF_OK)
        return status;
    kvf_sequence_destroy(a->f->p.tier);
    a->f->p.tier = s;
    return KVF_OK;
}

static uint32_t free_blocks(const disk_world *f)
{
    uint32_t sum = 0;
    for (uint32_t n = 0; n < f->w.tier.cache->kv_group_count; n++)
        sum += f->w.tier.cache->kv_groups[n].pool.free_count;
    return sum;
}

/* Request 0 of the call fails, then request 1 of the next attempt, until one comes through. */
static void with_failures(attempt *a, kvf_status (*call)(attempt *a), int what)
{
    disk_world *f = a->f;
    for (uint32_t n = 0;; n++) {
        const uint64_t live = f->w.tier.runtime->context->live_bytes;
        const uint32_t free_before = free_blocks(f);
        const uint32_t length = f->p.tier->layers[a->layer].extent.length;
        assert_true(n < 1000);
        fail_plan_set(n, what, 0);
        const kvf_status status = call(a);
        fail_plan_set(UINT32_MAX, NOTHING, 0);
        test_wait(&f->w.tier);
        disk_worlds_check(&f->w);
        if (status == KVF_OK)
            return;
        const kvf_error *error = kvf_runtime_error(f->w.tier.runtime);
        f->failures++;
        assert_int_equal(status, KVF_SYSTEM);
        assert_int_equal(error->foreign, what - ERRNO);
        if (!strstr(error->text, "disk_path") && !strstr(error->text, "fails"))
            fail_msg("%s", error->text);
        assert_int_equal(f->w.tier.runtime->context->live_bytes, live);
        assert_int_equal(free_blocks(f), free_before);
        assert_int_equal(f->p.tier->layers[a->layer].extent.length, length);
    }
}

static void same_prompt(disk_world *f, int what)
{
    const size_t row =
        (size_t)f->w.t.query_heads * f->w.t.head_dim * test_dtype_bytes(f->w.t.dtype);
    attempt a = {.f = f, .count = 60, .out = test_alloc(PROMPT * row)};
    char *wanted = test_alloc(PROMPT * row);
    for (a.first = 0; a.first < PROMPT; a.first += 60)
        for (a.layer = 0; a.layer < f->w.t.layers; a.layer++) {
            const test_range range = {.layer = a.layer, .first = a.first, .count = 60, .chunk = 60};
            with_failures(&a, prefill, what);
            test_prefill(&f->w.plain, f->p.plain, &f->w.t, &range, wanted);
            test_wait(&f->w.plain);
            assert_memory_equal(a.out, wanted, 60 * row);
        }
    test_release(a.out);
    test_release(wanted);
}

/* With the bits of the other cache. */
static void same_steps(disk_world *f, uint32_t first, int what)
{
    const size_t row =
        (size_t)f->w.t.query_heads * f->w.t.head_dim * test_dtype_bytes(f->w.t.dtype);
    attempt a = {.f = f, .out = test_alloc(row)};
    char *wanted = test_alloc(row);
    for (a.first = first; a.first < first + STEPS; a.first++)
        for (a.layer = 0; a.layer < f->w.t.layers; a.layer++) {
            with_failures(&a, decode, what);
            test_decode(&f->w.plain, f->p.plain, &f->w.t, a.layer, a.first, wanted, NULL);
            test_wait(&f->w.plain);
            assert_memory_equal(a.out, wanted, row);
        }
    test_release(a.out);
    test_release(wanted);
}

static void life_with_failures(const save_case *c, int what, kvf_transfer transfer)
{
    disk_world f;
    save_case with = *c;
    open_worlds(&f, &with);
    same_prompt(&f, what);
    same_steps(&f, PROMPT, what);
    attempt a = {.f = &f, .first = PROMPT - 40};
    if (!f.w.tier.config.head_mask) {
        with_failures(&a, cut, what);
        test_ok(&f.w.plain,
                kvf_sequence_truncate(f.w.plain.cache, f.p.plain, a.first, f.w.plain.stream));
    }
    same_steps(&f, PROMPT + 20, what);
    assert_int_equal(save_now(&f.w.tier, f.p.tier, save_path("fails"), NULL), KVF_OK);
    with_failures(&a, restore, what);
    same_steps(&f, PROMPT + 40, what);
    printf("# %s, %s: %u failures\n", c->name, what >= ERRNO ? strerror(what - ERRNO) : "-",
           f.failures);
    assert_true(what < ERRNO || what == ERRNO + EAGAIN || what == ERRNO + ECANCELED ||
                f.failures > 5);
    disk_worlds_close(&f.w);
}

/* A transient failure is asked for again, and nobody sees it. */
TEST(transient_failures)
{
    static const int whats[] = {SHORT, FULL_QUEUE, ERRNO + EAGAIN, ERRNO + ECANCELED};
    for (size_t i = 0; i < sizeof whats / sizeof *whats; i++)
        if (test_takes(i))
            life_with_failures(&save_cases[4], whats[i], KVF_TRANSFER_AUTO);
}

TEST(failures_with_a_name)
{
    life_with_failures(&save_cases[4], ERRNO + EIO, KVF_TRANSFER_AUTO);
    if (TEST_SANITIZED)
        return;
    life_with_failures(&save_cases[4], ERRNO + ENOSPC, KVF_TRANSFER_AUTO);
    life_with_failures(&save_cases[8], ERRNO + EIO, KVF_TRANSFER_GATHER);
    life_with_failures(&save_cases[5], ERRNO + EIO, KVF_TRANSFER_AUTO);
    life_with_failures(&save_cases[9], ERRNO + EIO, KVF_TRANSFER_AUTO);
    life_with_failures(&disk_heads[1], ERRNO + EIO, KVF_TRANSFER_AUTO);
}

/* Chunks are read until one fails, which is at a->first and a->layer then. */
static kvf_status read_on(attempt *a)
{
    for (a->first = 0; a->first < PROMPT; a->first += a->count)
        for (a->layer = 0; a->layer < a->f->w.t.layers; a->layer++) {
            const kvf_status status = prefill(a);
            if (status != KVF_OK)
                return status;
        }
    return KVF_OK;
}

/* Writes fail from now on, and chunks are read until there is no page frame left, which is named.
 * */
static void fill_the_disk(attempt *a)
{
    const disk_world *f = a->f;
    fail_plan_set(0, ERRNO + ENOSPC, 1);
    fail_plan.kind = FAIL_WRITES;
    assert_int_equal(read_on(a), KVF_SYSTEM);
    assert_int_equal(kvf_runtime_error(f->w.tier.runtime)->foreign, ENOSPC);
}

/* Nothing can be written, and there is no page frame left: a call says so until there is room. */
TEST(a_disk_that_is_full)
{
    disk_world f;
    open_worlds(&f, &save_cases[4]);
    attempt a = {.f = &f, .count = 60, .out = test_alloc(1 << 20)};
    fill_the_disk(&a);
    test_wait(&f.w.tier);
    disk_worlds_check(&f.w);
    fail_plan_set(UINT32_MAX, NOTHING, 0);
    test_ok(&f.w.tier, prefill(&a));
    test_wait(&f.w.tier);
    test_release(a.out);
    disk_worlds_close(&f.w);
}

/* It stays full: what was there goes on once another sequence has gone. */
TEST(a_disk_that_stays_full)
{
    disk_world f;
    open_worlds(&f, &save_cases[4]);
    same_prompt(&f, NOTHING);
    same_steps(&f, PROMPT, NOTHING);
    kvf_sequence *const first = f.p.tier;
    kvf_sequence *const other = f.p.tier = test_sequence(&f.w.tier);
    attempt a = {.f = &f, .count = 60, .out = test_alloc(1 << 20)};
    fill_the_disk(&a);
    assert_non_null(strstr(kvf_runtime_error(f.w.tier.runtime)->text, "disk_path"));
    test_wait(&f.w.tier);
    disk_worlds_check(&f.w);
    kvf_sequence_destroy(other);
    f.p.tier = first;
    a.count = 1;
    char *wanted = test_scratch(1 << 16);
    for (a.first = PROMPT + STEPS; a.first < PROMPT + 2 * STEPS; a.first++)
        for (a.layer = 0; a.layer < f.w.t.layers; a.layer++) {
            test_ok(&f.w.tier, decode(&a));
            test_wait(&f.w.tier);
            test_decode(&f.w.plain, f.p.plain, &f.w.t, a.layer, a.first, wanted, NULL);
            test_wait(&f.w.plain);
            assert_memory_equal(a.out, wanted,
                                (size_t)f.w.t.query_heads * f.w.t.head_dim *
                                    test_dtype_bytes(f.w.t.dtype));
        }
    fail_plan_set(UINT32_MAX, NOTHING, 0);
    test_release(a.out);
    disk_worlds_close(&f.w);
}

/* ---- a limit of file sizes that falls while the tier is open ---- */

/* In a process that SIGXFSZ would end; 0 = as it must be. */
static int read_past_limit(const kvf_io_ops *engine)
{
    disk_world f;
    open_worlds_on(&f, &save_cases[4], engine);
    attempt a = {.f = &f, .count = 60, .out = test_alloc(1 << 20)};
    (void)signal(SIGXFSZ, SIG_DFL);
    if (setrlimit(RLIMIT_FSIZE, &(struct rlimit){6000, RLIM_INFINITY}) != 0)
        return 1;
    const kvf_status status = read_on(&a);
    const kvf_error *error = kvf_runtime_error(f.w.tier.runtime);
    if (status != KVF_SYSTEM || error->foreign != EFBIG || !strstr(error->text, "disk_path") ||
        !strstr(error->text, "RLIMIT_FSIZE"))
        return 2;
    if (setrlimit(RLIMIT_FSIZE, &(struct rlimit){RLIM_INFINITY, RLIM_INFINITY}) != 0)
        return 3;
    if (prefill(&a) != KVF_OK)
        return 4;
    test_wait(&f.w.tier);
    test_release(a.out);
    disk_worlds_close(&f.w);
    return 0;
}

TEST(past_a_limit_that_falls)
{
    const kvf_io_ops *engines[] = {&kvf_io_plain, NULL}; /* NULL: the best there is */
    for (size_t i = 0; i < 2 && !test_on_cuda(); i++) {  /* a GPU is not there after fork() */
        int ended;
        const pid_t child = fork();
        assert_true(child >= 0);
        if (child == 0)
            _exit(read_past_limit(engines[i]));
        assert_int_equal(waitpid(child, &ended, 0), child);
        assert_int_equal(ended, 0);
    }
}

/* ---- open ---- */

static kvf_status open_another(void *user, kvf_error *error)
{
    const kvf_cache *like = user;
    kvf_cache *cache = NULL;
    const kvf_status status = kvf_cache_open(like->runtime, &like->config, &cache, error);
    assert_true((status == KVF_OK) == (cache != NULL));
    kvf_cache_close(cache);
    return status;
}

TEST(each_refusal_at_open)
{
    disk_world f;
    open_worlds(&f, &save_cases[4]);
    assert_true(test_refuse_each(f.w.tier.runtime, open_another, f.w.tier.cache) > 10);
    disk_worlds_close(&f.w);
}

TESTS_RUN_BETWEEN(NULL, save_remove_folder)
