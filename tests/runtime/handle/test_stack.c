/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A caller with the least stack that kvferry.h promises to do with: whatever a cache and a pruner
 * can do is called from it. Below it is memory that nobody may touch.
 *
 * On the host device a wait may run kernels, whose frames are many times as large: not here.
 */

#include <alloca.h>
#include <kvferry/prune.h>
#include <kvferry/save.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "harness.h"
#include "host_team.h"

#define CALLER_BYTES ((size_t)(TEST_SANITIZED ? 1024 : 64) << 10)
#define TOKENS       400u
#define STEPS        4u
#define PATTERN      ((char)0xa5)

typedef struct scene {
    kvf_select select;
    kvf_dtype dtype;
    kvf_pages pages;
} scene;

typedef struct caller {
    scene scene;
    kvf_cache_config config;
    test_tokens t;
    test_world w;
    char *out;
    size_t left; /* of the stack, where the calls were made */
    bool is_done;
} caller;

static void step(caller *c, kvf_sequence *s, uint32_t token)
{
    for (uint32_t layer = 0; layer < c->config.layers; layer++) {
        test_decode(&c->w, s, &c->t, layer, token, c->out, NULL);
        test_wait(&c->w);
    }
}

/* A prompt under a policy; without one where `policy` is NULL. */
static kvf_sequence *fill(caller *c, const kvf_prune_policy *policy)
{
    kvf_sequence *s = test_sequence(&c->w);
    kvf_prune *prune = NULL;
    kvf_prune_config config;
    kvf_prune_config_init(&config, policy);
    config.settings.window = 8;
    if (policy) {
        kvf_error error = {0};
        test_ok(&c->w, kvf_prune_open(c->w.cache, &config, &prune, &error));
        test_ok(&c->w, kvf_prune_begin(prune, s, TOKENS));
    }
    uint32_t count = TOKENS;
    for (uint32_t layer = 0; layer < c->config.layers && count == TOKENS; layer++) {
        kvf_prune_result result = {0};
        for (uint32_t first = 0; first < TOKENS; first += 100) {
            const kvf_prefill_args args = test_chunk_args(s, &c->t, layer, first, 100, c->out);
            test_ok(&c->w, kvf_prefill(c->w.cache, &args, c->w.stream));
            test_wait(&c->w);
            if (prune)
                test_ok(&c->w, kvf_prune_append(prune, &args, c->w.stream));
        }
        if (prune)
            test_ok(&c->w, kvf_prune_layer(prune, s, layer, c->w.stream, &result));
        test_wait(&c->w);
        count = result.propagate ? result.propagate_count : TOKENS;
    }
    kvf_prune_close(prune);
    return s;
}

static void save_and_restore(caller *c, kvf_sequence *s)
{
    char path[] = "/tmp/kvf-stack-XXXXXX";
    kvf_save_args args;
    kvf_restore_args restore;
    kvf_sequence *again = NULL;
    kvf_save *save = NULL;
    kvf_error error;
    close(mkstemp(path));
    kvf_save_args_init(&args);
    args.sequence = s;
    args.path = path;
    if (kvf_sequence_save(c->w.cache, &args, c->w.stream, &save) == KVF_UNSUPPORTED) {
        (void)unlink(path);
        return; /* this build has no checksums */
    }
    test_ok(&c->w, kvf_save_finish(save, &error));
    kvf_restore_args_init(&restore);
    restore.path = path;
    test_ok(&c->w, kvf_sequence_restore(c->w.cache, &restore, c->w.stream, &again));
    (void)unlink(path);
    kvf_sequence_destroy(again);
}

static void *calls(void *argument)
{
    caller *c = argument;
    c->left = kvf_stack_left();
    test_world_open(&c->w, NULL, &c->config);
    kvf_sequence *s = fill(c, NULL), *fork = NULL;
    for (uint32_t i = 0; i < STEPS; i++)
        step(c, s, TOKENS + i);
    test_ok(&c->w, kvf_sequence_fork(c->w.cache, s, c->w.stream, &fork));
    test_ok(&c->w, kvf_sequence_truncate(c->w.cache, fork, TOKENS - 90, c->w.stream));
    test_wait(&c->w);
    save_and_restore(c, s);
    kvf_sequence_destroy(fork);
    kvf_sequence_destroy(s);
    for (uint32_t i = 0; c->scene.pages == KVF_PAGES_NATIVE && kvf_prune_policy_at(i); i++)
        kvf_sequence_destroy(fill(c, kvf_prune_policy_at(i)));
    test_world_close(&c->w);
    c->is_done = true;
    return NULL;
}

/* On a stack of so many bytes; returns how many of them were touched. */
static size_t on_a_stack(size_t bytes, void *(*run)(void *), void *argument)
{
    const size_t guard = (size_t)1 << 20;
    pthread_attr_t attributes;
    pthread_t thread;
    char *map = mmap(NULL, guard + bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(map != MAP_FAILED);
    assert_int_equal(mprotect(map + guard, bytes, PROT_READ | PROT_WRITE), 0);
    memset(map + guard, PATTERN, bytes);
    assert_int_equal(pthread_attr_init(&attributes), 0);
    assert_int_equal(pthread_attr_setstack(&attributes, map + guard, bytes), 0);
    assert_int_equal(pthread_create(&thread, &attributes, run, argument), 0);
    assert_int_equal(pthread_join(thread, NULL), 0);
    pthread_attr_destroy(&attributes);
    size_t left = 0;
    while (left < bytes && map[guard + left] == PATTERN)
        left++;
    munmap(map, guard + bytes);
    return bytes - left;
}

TEST(callers_with_little_stack)
{
    if (test_on_cuda()) /* the stack of a driver is not ours, and the emulator takes more */
        return;
    static const scene scenes[] = {
        {KVF_SELECT_HYBRID, KVF_FP32, KVF_PAGES_NATIVE},
        {KVF_SELECT_FULL, KVF_BF16, KVF_PAGES_NATIVE},
        {KVF_SELECT_HYBRID, KVF_BF16, KVF_PAGES_K8V4},
        {KVF_SELECT_QUEST, KVF_FP16, KVF_PAGES_NATIVE},
        {KVF_SELECT_ORACLE, KVF_BF16, KVF_PAGES_NATIVE},
    };
    for (size_t i = 0; i < sizeof scenes / sizeof *scenes; i++) {
        caller c = {.scene = scenes[i], .config = test_config_small()};
        c.config.select = scenes[i].select;
        c.config.dtype = scenes[i].dtype;
        c.config.pages = scenes[i].pages;
        c.config.layers = 2;
        c.config.head_dim = 128;
        c.config.tokens_max = TOKENS + STEPS;
        c.config.prefill_chunk_max = 100;
        c.config.sequences_max = 3;
        c.config.observe_window = 8;
        c.config.budget_tokens = 128;
        test_tokens_make(
            &c.t, &c.config,
            &(test_tokens_spec){.count = TOKENS + STEPS, .seed = 3, .sharpness = 2.0f});
        c.out = test_alloc(TOKENS * (size_t)c.t.query_heads * c.t.head_dim * sizeof(float));
        const size_t used = on_a_stack(CALLER_BYTES, calls, &c);
        printf("# scene %zu: %zu of %zu KiB of stack\n", i, used >> 10, CALLER_BYTES >> 10);
        assert_true(c.is_done && c.left > 0 && c.left < CALLER_BYTES);
        test_release(c.out);
        test_tokens_free(&c.t);
    }
}

/* ---- where a thread is on its stack ---- */

/* Behind an array whose size nobody knows before: sanitizers leave such a one on the stack. */
__attribute__((noinline)) static size_t left_behind(size_t bytes)
{
    char *here = alloca(bytes);
    memset(here, 1, bytes);
    return kvf_stack_left() + (size_t)here[bytes / 2] - 1;
}

typedef struct {
    size_t plain, deeper;
} looked;

static void *look(void *argument)
{
    looked *l = argument;
    l->plain = left_behind(16);
    l->deeper = left_behind(20000);
    return NULL;
}

/* How much of a stack a thread's own variables take depends on libraries; differences do not. */
TEST(knows_what_is_left)
{
    const size_t sizes[] = {1 << 20, 2 << 20, 8 << 20};
    looked l[3];
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        (void)on_a_stack(sizes[i], look, &l[i]);
        assert_true(l[i].deeper > 0 && l[i].plain < sizes[i] &&
                    l[i].plain + (512 << 10) > sizes[i]);
        assert_in_range(l[i].plain - l[i].deeper, 19000, 21000);
        assert_in_range(l[i].plain - l[0].plain + 8192, sizes[i] - sizes[0],
                        sizes[i] - sizes[0] + 16384);
    }
}
