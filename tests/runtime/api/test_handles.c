/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Handles and who may use them: each thread reads its own last error, a child of fork() finds them
 * dead and its parent undisturbed, streams of others are refused, and whatever is closed before
 * what was made of it lives until that is closed. Handles that are NULL: check_null.py.
 */

#include "harness.h"

#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <kvferry/blocks.h>
#include <kvferry/disk.h>
#include <kvferry/prune.h>
#include <kvferry/save.h>

#define TOKENS 300u

/* ---- errors ---- */

typedef struct caller {
    kvf_runtime *runtime;
    kvf_stream *stream;
    uint32_t number, rounds;
    uint32_t is_by_stream; /* the error is met in stream order, by a thread of the library */
    uint32_t wrong;        /* texts that were not its own */
    kvf_error first;
} caller;

/* Ids that no cache has, and that say whose they are. */
static uint32_t choose_wrong(void *user, const kvf_select_view *view, int32_t *ids)
{
    const caller *c = user;
    ids[0] = (int32_t)(1000000 + c->number);
    return 1;
}

/* One call that fails; its text has the number of the caller. */
static kvf_status fail_once(const caller *c, kvf_cache *cache, kvf_sequence *sequence,
                            const test_tokens *t, void *out)
{
    if (!c->is_by_stream)
        return kvf_sequence_truncate(cache, sequence, 1000000 + c->number, c->stream);
    kvf_stream *stream = NULL; /* the error of a stream stays with it */
    test_expect(c->runtime, kvf_stream_create(c->runtime, &stream), KVF_OK);
    kvf_decode_args a = test_step_args(&sequence, t, 0, TOKENS, out);
    kvf_status status = kvf_decode(cache, &a, stream);
    if (status == KVF_OK)
        status = kvf_stream_wait(stream);
    kvf_stream_destroy(stream);
    return status;
}

static void *call_and_fail(void *user)
{
    caller *c = user;
    kvf_cache_config cc = test_config_small();
    if (c->is_by_stream) {
        cc.select = KVF_SELECT_CUSTOM;
        cc.digest = KVF_DIGEST_MINMAX;
        cc.select_fn = choose_wrong;
        cc.select_user = c;
    }
    test_world w = {.runtime = c->runtime, .stream = c->stream, .config = cc};
    test_tokens t;
    char number[16];
    snprintf(number, sizeof number, "%u", 1000000 + c->number);
    test_tokens_make(&t, &cc, &(test_tokens_spec){.count = TOKENS + 1, .seed = 7, .sharpness = 1});
    test_expect(c->runtime, kvf_cache_open(c->runtime, &cc, &w.cache, NULL), KVF_OK);
    kvf_sequence *s = test_sequence(&w);
    void *out = test_alloc((size_t)cc.query_heads * cc.head_dim * 4);
    test_prefill(&w, s, &t, &(test_range){.count = TOKENS, .chunk = 100, .append_only = 1}, NULL);
    for (uint32_t i = 0; i < c->rounds; i++) {
        const kvf_status status = fail_once(c, w.cache, s, &t, out);
        const kvf_error *last = kvf_runtime_error(c->runtime);
        if (i == 0)
            c->first = *last;
        c->wrong += status != KVF_INVALID || last->status != status ||
                    !strstr(last->text, number) ||
                    (!c->is_by_stream && strcmp(last->text, c->first.text) != 0);
    }
    kvf_cache_close(w.cache);
    test_release(out);
    test_tokens_free(&t);
    return NULL;
}

static void check_threads(uint32_t is_by_stream, uint32_t rounds)
{
    kvf_runtime *runtime = test_runtime();
    caller callers[2];
    pthread_t threads[2];
    for (uint32_t i = 0; i < 2; i++) {
        callers[i] = (caller){.runtime = runtime,
                              .number = 1 + i,
                              .rounds = test_afford(rounds),
                              .is_by_stream = is_by_stream};
        test_expect(runtime, kvf_stream_create(runtime, &callers[i].stream), KVF_OK);
    }
    for (uint32_t i = 0; i < 2; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, call_and_fail, &callers[i]), 0);
    for (uint32_t i = 0; i < 2; i++) {
        pthread_join(threads[i], NULL);
        if (callers[i].wrong)
            fail_msg("thread %u: %u texts are not its own; the first was: %s", i, callers[i].wrong,
                     callers[i].first.text);
    }
    /* This thread has met none. */
    assert_int_equal(kvf_runtime_error(runtime)->status, KVF_OK);
    assert_string_equal(kvf_runtime_error(runtime)->text, "");
    for (uint32_t i = 0; i < 2; i++)
        kvf_stream_destroy(callers[i].stream);
    kvf_runtime_close(runtime);
}

TEST(threads_read_their_own_errors)
{
    check_threads(0, 20000);
}

TEST(errors_of_streams_reach_who_waits_for_them)
{
    check_threads(1, 40);
}

/* A runtime at the address of one that was closed has no error from then. */
TEST(errors_end_with_their_runtime)
{
    void *p = NULL;
    for (uint32_t i = 0; i < 8; i++) {
        kvf_runtime *runtime = test_runtime();
        assert_int_equal(kvf_runtime_error(runtime)->status, KVF_OK);
        test_expect(runtime, kvf_memory_alloc(runtime, 0, &p), KVF_INVALID);
        assert_int_equal(kvf_runtime_error(runtime)->status, KVF_INVALID);
        kvf_runtime_close(runtime);
    }
}

/* ---- fork ---- */

#define CHILD_LIMIT_S 60u

typedef struct family {
    test_world w;
    test_tokens t;
    kvf_sequence *s;
    kvf_prune *prune;
    kvf_hidden *hidden;
    kvf_disk *disk;
    kvf_save *save;
    void *memory, *pinned, *pinned_alias, *out;
} family;

/* Calls of a child; `line` is that of the call that was not refused as it should be, or 0. */
#define REFUSED(call)                                                                              \
    do {                                                                                           \
        const kvf_error *e_ = kvf_runtime_error(NULL);                                             \
        if ((call) != KVF_INVALID || !strstr(e_->text, "fork"))                                    \
            return __LINE__;                                                                       \
    } while (0)

static int refuse_caches(family *f)
{
    kvf_sequence *other = NULL;
    kvf_cache *cache = NULL;
    kvf_prune *prune = NULL;
    kvf_prefill_args p = test_chunk_args(f->s, &f->t, 0, TOKENS, 1, NULL);
    kvf_decode_args a = test_step_args(&f->s, &f->t, 0, TOKENS, f->out);
    kvf_prune_config pc;
    kvf_prune_config_init(&pc, NULL);
    REFUSED(kvf_prefill(f->w.cache, &p, f->w.stream));
    REFUSED(kvf_decode(f->w.cache, &a, f->w.stream));
    REFUSED(kvf_sequence_create(f->w.cache, &other));
    REFUSED(kvf_sequence_fork(f->w.cache, f->s, f->w.stream, &other));
    REFUSED(kvf_sequence_truncate(f->w.cache, f->s, 1, f->w.stream));
    REFUSED(kvf_cache_open(f->w.runtime, &f->w.config, &cache, NULL));
    REFUSED(kvf_prune_open(f->w.cache, &pc, &prune, NULL));
    REFUSED(kvf_prune_begin(f->prune, f->s, 10));
    if (!kvf_save_is_done(f->save))
        return __LINE__;
    REFUSED(kvf_save_finish(f->save, NULL));
    return 0;
}

static int refuse_runtimes(family *f)
{
    kvf_stream *stream = NULL;
    void *p = NULL, *alias = NULL;
    kvf_disk_result result;
    kvf_disk_case c;
    kvf_disk_case_init(&c);
    REFUSED(kvf_stream_wait(f->w.stream));
    REFUSED(kvf_memory_copy(f->w.stream, f->memory, f->memory, 64));
    REFUSED(kvf_stream_create(f->w.runtime, &stream));
    REFUSED(kvf_memory_alloc(f->w.runtime, 64, &p));
    REFUSED(kvf_pinned_alloc(f->w.runtime, 64, &p, &alias));
    REFUSED(kvf_runtime_describe(f->w.runtime, NULL, 0, NULL));
    REFUSED(kvf_runtime_calibrate(f->w.runtime));
    REFUSED(kvf_hidden_put(f->hidden, 0, 1, f->memory, f->w.stream));
    REFUSED(kvf_disk_measure(f->disk, &c, &result));
    if (strcmp(kvf_runtime_error(f->w.runtime)->text, kvf_runtime_error(NULL)->text) != 0)
        return __LINE__;
    return 0;
}

static void close_all(family *f)
{
    kvf_disk_close(f->disk);
    kvf_hidden_close(f->hidden);
    kvf_memory_free(f->w.runtime, f->memory);
    kvf_pinned_free(f->w.runtime, f->pinned);
    kvf_prune_close(f->prune);
    kvf_sequence_destroy(f->s);
    kvf_cache_close(f->w.cache);
    kvf_stream_destroy(f->w.stream);
    kvf_runtime_close(f->w.runtime);
}

static int open_own(void)
{
    kvf_runtime_config rc = test_runtime_config();
    kvf_runtime *runtime = NULL;
    void *p = NULL;
    rc.device = KVF_DEVICE_HOST; /* a GPU is not for a child of who used it */
    if (TEST_SANITIZED)          /* which let a child start no threads */
        return 0;
    if (kvf_runtime_open(&rc, &runtime, NULL) != KVF_OK ||
        kvf_memory_alloc(runtime, 64, &p) != KVF_OK)
        return __LINE__;
    kvf_memory_free(runtime, p);
    kvf_runtime_close(runtime);
    return 0;
}

/* Its first mistake, as a line; 0 = nothing. */
static int live_as_child(family *f)
{
    int line = refuse_caches(f);
    line = line ? line : refuse_runtimes(f);
    close_all(f);
    return line ? line : open_own();
}

static void step(family *f, uint32_t token)
{
    test_decode(&f->w, f->s, &f->t, 0, token, f->out, NULL);
    test_wait(&f->w);
}

static void family_open(family *f, const kvf_cache_config *cc)
{
    kvf_prune_config pc;
    kvf_save_args sa;
    *f = (family){0};
    test_open(&f->w, &f->t, cc,
              &(test_tokens_spec){.count = TOKENS + 8, .seed = 5, .sharpness = 1});
    f->s = test_sequence(&f->w);
    f->out = test_alloc((size_t)cc->query_heads * cc->head_dim * 4);
    test_prefill(&f->w, f->s, &f->t, &(test_range){.count = TOKENS, .chunk = 128}, NULL);
    kvf_prune_config_init(&pc, NULL);
    test_ok(&f->w, kvf_prune_open(f->w.cache, &pc, &f->prune, NULL));
    test_ok(&f->w, kvf_hidden_open(f->w.runtime, 64, 4, NULL, &f->hidden));
    test_ok(&f->w, kvf_disk_open(f->w.runtime, "/tmp", 16u << 20, &f->disk));
    test_ok(&f->w, kvf_memory_alloc(f->w.runtime, 256, &f->memory));
    test_ok(&f->w, kvf_pinned_alloc(f->w.runtime, 256, &f->pinned, &f->pinned_alias));
    kvf_save_args_init(&sa);
    sa.sequence = f->s;
    sa.path = "/tmp/kvf_test_handles.kvs";
    const kvf_status status = kvf_sequence_save(f->w.cache, &sa, f->w.stream, &f->save);
    assert_true(status == KVF_OK || status == KVF_UNSUPPORTED); /* a build without checksums */
}

/* Outputs of two steps, with a child between them or not. */
static void run_family(const kvf_cache_config *cc, int has_child, float *out)
{
    const size_t row = (size_t)cc->query_heads * cc->head_dim;
    family f;
    family_open(&f, cc);
    step(&f, TOKENS);
    test_copy(out, f.out, row * 4);
    if (has_child) {
        fflush(NULL);
        const pid_t child = fork();
        assert_true(child >= 0);
        if (child == 0) {
            alarm(CHILD_LIMIT_S);
            const int line = live_as_child(&f);
            if (line)
                dprintf(2, "# the child: line %d: %s\n", line, kvf_runtime_error(NULL)->text);
            _exit(line != 0);
        }
        int status = 0;
        assert_int_equal(waitpid(child, &status, 0), child);
        if (!WIFEXITED(status) || WEXITSTATUS(status))
            fail_msg("the child ended with status 0x%x (0xe: it hung)", status);
    }
    step(&f, TOKENS + 1);
    test_copy(out + row, f.out, row * 4);
    if (f.save)
        test_ok(&f.w, kvf_save_finish(f.save, NULL));
    (void)unlink("/tmp/kvf_test_handles.kvs");
    test_release(f.out);
    test_tokens_free(&f.t);
    close_all(&f);
}

static void check_family(const kvf_cache_config *cc)
{
    const size_t bytes = 2 * (size_t)cc->query_heads * cc->head_dim * 4;
    float *alone = calloc(1, bytes), *beside = calloc(1, bytes);
    assert_true(alone && beside);
    run_family(cc, 0, alone);
    run_family(cc, 1, beside);
    assert_memory_equal(alone, beside, bytes);
    free(alone);
    free(beside);
}

TEST(a_child_finds_its_handles_dead)
{
    kvf_cache_config cc = test_config_small();
    cc.observe_window = 32;
    check_family(&cc);
}

TEST(a_child_leaves_the_disk_tier_alone)
{
    kvf_cache_config cc = test_config_small();
    cc.observe_window = 32;
    cc.disk_path = "/tmp";
    cc.host_bytes = 17u << 20;
    cc.disk_bundle_bytes = 16384;
    cc.tokens_max = 16384;
    check_family(&cc);
}

/* ---- handles of others ---- */

static void expect_named(kvf_status status, const char *word)
{
    const kvf_error *last = kvf_runtime_error(NULL);
    if (status != KVF_INVALID || last->status != KVF_INVALID || !strstr(last->text, word))
        fail_msg("no \"%s\" in %s: %s", word, kvf_status_name(status), last->text);
}

TEST(streams_of_others_are_refused)
{
    const kvf_cache_config cc = test_config_small();
    test_world w;
    test_tokens t;
    kvf_runtime *other = test_runtime();
    kvf_stream *strange = NULL;
    const char *word = "stream is of another runtime";
    test_open(&w, &t, &cc, &(test_tokens_spec){.count = 40, .seed = 5, .sharpness = 1});
    test_expect(other, kvf_stream_create(other, &strange), KVF_OK);
    kvf_sequence *s = test_sequence(&w), *fork = NULL;
    const kvf_prefill_args p = test_chunk_args(s, &t, 0, 0, 20, test_scratch(20 * 4 * 64 * 4));
    const kvf_decode_args a = test_step_args(&s, &t, 0, 20, p.out);
    expect_named(kvf_prefill(w.cache, &p, strange), word);
    expect_named(kvf_decode(w.cache, &a, strange), word);
    expect_named(kvf_sequence_fork(w.cache, s, strange, &fork), word);
    expect_named(kvf_sequence_truncate(w.cache, s, 0, strange), word);
    expect_named(kvf_record_begin(w.cache, &s, 1, strange), word);
    expect_named(kvf_record_begin(w.cache, &s, 1, NULL), "stream is NULL");
    assert_int_equal(kvf_sequence_length(s, 0), 0); /* nothing was appended */
    test_ok(&w, kvf_prefill(w.cache, &p, w.stream));
    test_wait(&w);
    kvf_stream_destroy(strange);
    kvf_runtime_close(other);
    test_close(&w, &t);
}

/* ---- closing in another order ---- */

TEST(what_is_closed_too_early_lives_on)
{
    kvf_cache_config cc = test_config_small();
    float first[256], second[256];
    cc.observe_window = 32;
    family f;
    family_open(&f, &cc);
    step(&f, TOKENS);
    test_copy(first, f.out, sizeof first);
    kvf_runtime_close(f.w.runtime);
    test_ok(&f.w, kvf_sequence_truncate(f.w.cache, f.s, TOKENS, f.w.stream));
    step(&f, TOKENS);
    test_copy(second, f.out, sizeof second);
    assert_memory_equal(first, second, sizeof first);
    kvf_cache_close(f.w.cache); /* the save and the pruner keep it */
    if (f.save)
        assert_int_equal(kvf_save_finish(f.save, NULL), KVF_OK);
    (void)unlink("/tmp/kvf_test_handles.kvs");
    kvf_prune_close(f.prune);
    kvf_stream_destroy(f.w.stream);
    kvf_hidden_close(f.hidden);
    kvf_disk_close(f.disk);
    kvf_pinned_free(f.w.runtime, f.pinned);
    test_release(f.out);
    test_tokens_free(&f.t);
    kvf_memory_free(f.w.runtime, f.memory); /* the last that was made of the runtime */
}
