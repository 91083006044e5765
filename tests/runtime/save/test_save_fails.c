/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Saves and restores that fail: every call on files once in every way, a process that is killed at
 * every write, files that are damaged or cut. A failure is named, leaves nothing behind, and the
 * sequence in memory continues as if nobody had asked.
 */

#include "save_faults.h"

#include <errno.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cache.h"

/* ---- requests ---- */

/* Whatever happens to request n: either it is asked for again, or the failure has a name and there
 * is no file. */
static void each_request_once(void **state)
{
    static const struct {
        int what;
        uint32_t always;
        kvf_status status;
        int foreign;
    } cases[] = {
        {SHORT, 0, KVF_OK, 0},
        {SHORT, 1, KVF_OK, 0},
        {FULL_QUEUE, 0, KVF_OK, 0},
        {FULL_QUEUE, 1, KVF_SYSTEM, EBUSY},
        {ERRNO + EAGAIN, 0, KVF_OK, 0},
        {ERRNO + EINTR, 0, KVF_OK, 0},
        {ERRNO + ECANCELED, 0, KVF_OK, 0},
        {ERRNO + ECANCELED, 1, KVF_SYSTEM, ECANCELED},
        {ERRNO + 0, 1, KVF_SYSTEM, EIO}, /* no byte is taken, again and again */
        {ERRNO + EIO, 0, KVF_SYSTEM, EIO},
        {ERRNO + ENOSPC, 0, KVF_SYSTEM, ENOSPC},
    };
    fail_world f;
    fail_world_open(&f, 8192);
    const char *path = save_path("once");
    const uint64_t live = f.w.runtime->context->live_bytes;
    fail_plan_set(UINT32_MAX, NOTHING, 0);
    assert_int_equal(save_now(&f.w, f.s, path, NULL), KVF_OK);
    const uint32_t requests = fail_plan.count;
    assert_true(requests > 8);
    const uint32_t step = sweep_step();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (uint32_t n = 0; n < requests; n += cases[i].always ? requests : step) {
            kvf_error error;
            (void)unlink(path);
            fail_plan_set(n, cases[i].what, cases[i].always);
            assert_int_equal(save_now(&f.w, f.s, path, &error), cases[i].status);
            assert_int_equal(error.foreign, cases[i].foreign);
            assert_int_equal(save_count_files(), cases[i].status == KVF_OK);
            fail_plan_set(UINT32_MAX, NOTHING, 0);
            if (cases[i].status == KVF_OK)
                assert_int_equal(fail_restore(&f, path, &error), KVF_OK);
            else
                assert_non_null(strstr(error.text, path));
            assert_int_equal(f.w.runtime->context->live_bytes, live);
        }
    assert_int_equal(save_now(&f.w, f.s, path, NULL), KVF_OK);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (uint32_t n = 0; n < requests - 1; n += cases[i].always ? requests : step) {
            kvf_error error;
            const bool ends = cases[i].what == ERRNO + 0; /* a read of nothing: the file ends */
            fail_plan_set(n, cases[i].what, cases[i].always);
            assert_int_equal(fail_restore(&f, path, &error), ends ? KVF_CORRUPT : cases[i].status);
            assert_int_equal(f.w.runtime->context->live_bytes, live);
        }
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (!cases[i].always)
            sweep_tell_step(2 * requests - 1, step);
    fail_plan_set(UINT32_MAX, NOTHING, 0);
    assert_int_equal(fail_restore(&f, path, &(kvf_error){0}), KVF_OK);
    (void)unlink(path);
    fail_world_close(&f);
}

/* ---- whatever can be refused ---- */

static kvf_status save_or_leave(void *user, kvf_error *error)
{
    fail_world *f = user;
    const char *path = save_path("refused");
    kvf_save_args args = save_args(f->s, path, NULL);
    kvf_save *save = NULL;
    kvf_status status = kvf_sequence_save(f->w.cache, &args, f->w.stream, &save);
    *error = *kvf_runtime_error(f->w.runtime);
    if (save)
        status = kvf_save_finish(save, error);
    if (status != KVF_OK && access(path, F_OK) == 0)
        test_ok(&f->w, kvf_saved_read(f->w.runtime, path, 1, &(kvf_saved){0}, NULL, 0, NULL));
    return status;
}

static kvf_status restore_or_leave(void *user, kvf_error *error)
{
    return fail_restore(user, save_path("refused"), error);
}

/* Memory, registration, threads, events, files: each refusal once. */
static void each_refusal_once(void **state)
{
    fail_world f;
    kvf_sequence *copy = NULL;
    fail_world_open(&f, 65536);
    test_ok(&f.w, kvf_sequence_fork(f.w.cache, f.s, f.w.stream, &copy));
    void *wanted = test_steps(&f.w, copy, &f.t, FAIL_TOKENS, 8);
    kvf_sequence_destroy(copy);
    assert_true(test_refuse_each(f.w.runtime, save_or_leave, &f) >= 9);
    assert_true(test_refuse_each(f.w.runtime, restore_or_leave, &f) >= 9);
    assert_int_equal(save_count_files(), 1);
    test_steps_again(wanted, &f.w, f.s, &f.t, FAIL_TOKENS, 8);
    (void)unlink(save_path("refused"));
    fail_world_close(&f);
}

/* ---- the process ends ---- */

#define KILL_EXTENT 512u
#define KILLS_LEAST 200u

static const char *kill_call; /* instead of this call; NULL = none */

static int kill_before(void *user, const char *what)
{
    if (kill_call && strcmp(what, kill_call) == 0)
        (void)kill(getpid(), SIGKILL);
    return 0;
}

/* In a process of its own: request `at` is half done, then the process is killed. */
static void save_and_die(const char *path, const char *model, uint32_t at, uint32_t *requests)
{
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        fail_world f;
        fail_world_open(&f, KILL_EXTENT);
        fail_plan_set(at, KILL, 0);
        kvf_device_set_fault(f.w.runtime->device, kill_before, NULL);
        test_ok(&f.w, kvf_save_finish(save_begin(&f.w, f.s, path, model), NULL));
        *requests = fail_plan.count;
        _exit(0);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(at == UINT32_MAX && !kill_call ? WIFEXITED(status) && WEXITSTATUS(status) == 0
                                               : WIFSIGNALED(status));
}

static void copy_file(const char *from, const char *to)
{
    char bytes[4096];
    size_t n;
    FILE *in = fopen(from, "rb"), *out = fopen(to, "wb");
    assert_non_null(in);
    assert_non_null(out);
    while ((n = fread(bytes, 1, sizeof bytes, in)) > 0)
        assert_int_equal(fwrite(bytes, 1, n, out), n);
    fclose(in);
    fclose(out);
}

/* A word that children write too. */
static uint32_t *shared_word(void)
{
    void *word =
        mmap(NULL, sizeof(uint32_t), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(word != MAP_FAILED);
    return word;
}

/* In a process of its own, because one that had threads cannot fork under every sanitizer. */
static void read_apart(void (*read)(fail_world *f, uint32_t count, uint32_t step), uint32_t count,
                       uint32_t step)
{
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        fail_world f;
        fail_world_open(&f, KILL_EXTENT);
        read(&f, count, step);
        fail_world_close(&f);
        _exit(0);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void read_after_kills(fail_world *f, uint32_t count, uint32_t step)
{
    char name[32];
    for (uint32_t n = 0; n < count; n += step) {
        kvf_saved saved;
        snprintf(name, sizeof name, "kill-%u", n);
        const kvf_status status =
            kvf_saved_read(f->w.runtime, save_path(name), 1, &saved, NULL, 0, NULL);
        assert_int_equal(status, n / step % 2 ? KVF_OK : KVF_SYSTEM);
        if (status == KVF_OK)
            assert_string_equal(saved.model, "old");
    }
}

/* Killed at every request: the old file, or none, and whole. */
static void killed_at_every_write(void **state)
{
    char old[160];
    snprintf(old, sizeof old, "%s", save_path("old"));
    uint32_t *requests = shared_word();
    save_and_die(old, "old", UINT32_MAX, requests);
    const uint32_t count = *requests;
    /* A process takes long under a sanitizer, and on the emulated device. */
    const uint32_t step = test_afford(2) == 2 && !test_on_cuda() ? sweep_step() : 16;
    assert_true(count >= KILLS_LEAST);
    char name[32];
    for (uint32_t n = 0; n < count; n += step) {
        snprintf(name, sizeof name, "kill-%u", n);
        if (n / step % 2)
            copy_file(old, save_path(name));
        save_and_die(save_path(name), "new", n, requests);
    }
    read_apart(read_after_kills, count, step);
    sweep_tell_step(count, step);
    (void)munmap(requests, sizeof *requests);
    save_remove_folder(NULL);
}

static const char *const calls[] = {"file open", "file reserve", "file sync", "file rename",
                                    "folder sync"};

static void read_after_calls(fail_world *f, uint32_t count, uint32_t step)
{
    for (uint32_t i = 0; i < count; i += step) {
        kvf_saved saved;
        test_ok(&f->w, kvf_saved_read(f->w.runtime, save_path(calls[i]), 1, &saved, NULL, 0, NULL));
        assert_string_equal(saved.model, i + 1 < count ? "old" : "new");
    }
}

/* Killed before each call that follows the writes: the old file up to the rename, then the new. */
static void killed_around_the_rename(void **state)
{
    const uint32_t count = sizeof calls / sizeof *calls;
    uint32_t *requests = shared_word();
    for (uint32_t i = 0; i < count; i++) {
        kill_call = NULL;
        save_and_die(save_path(calls[i]), "old", UINT32_MAX, requests);
        kill_call = calls[i];
        save_and_die(save_path(calls[i]), "new", UINT32_MAX, requests);
    }
    kill_call = NULL;
    read_apart(read_after_calls, count, 1);
    (void)munmap(requests, sizeof *requests);
    save_remove_folder(NULL);
}

/* ---- files that are not what they were ---- */

static void write_all(const char *path, const char *data, size_t bytes)
{
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(data, 1, bytes, file), bytes);
    fclose(file);
}

/* A flipped bit anywhere, every length, and one byte more. */
static void damage_is_found(void **state)
{
    fail_world f;
    kvf_error error;
    size_t bytes;
    test_random random = {5};
    fail_world_open(&f, 8192);
    const char *path = save_path("damaged");
    assert_int_equal(save_now(&f.w, f.s, path, NULL), KVF_OK);
    char *data = save_read(path, &bytes);
    const uint32_t flips = test_afford(600);
    for (uint32_t i = 0; i < flips; i++) {
        /* Every bit of the first bytes, then any. */
        const size_t bit =
            i < 200 ? i * 7 : (size_t)test_random_below(&random, (uint32_t)bytes * 8);
        data[bit / 8] = (char)(data[bit / 8] ^ (1 << bit % 8));
        write_all(path, data, bytes);
        const kvf_status status =
            kvf_saved_read(f.w.runtime, path, 1, &(kvf_saved){0}, NULL, 0, &error);
        assert_true(status == KVF_CORRUPT || (status == KVF_UNSUPPORTED && bit < 128));
        if (i % 16 == 0)
            assert_int_equal(fail_restore(&f, path, &error), status);
        data[bit / 8] = (char)(data[bit / 8] ^ (1 << bit % 8));
    }
    for (size_t length = 0; length < bytes; length += length < 300 ? 1 : bytes / 97) {
        write_all(path, data, length);
        assert_int_equal(fail_restore(&f, path, &error), KVF_CORRUPT);
    }
    write_all(path, data, bytes);
    assert_int_equal(fail_restore(&f, path, &error), KVF_OK);
    FILE *file = fopen(path, "ab");
    fputc('x', file);
    fclose(file);
    assert_int_equal(fail_restore(&f, path, &error), KVF_CORRUPT);
    free(data);
    (void)unlink(path);
    fail_world_close(&f);
}

/* The file shrinks after its header was read. */
static const char *shrinking;

static int shrink(void *user, const char *what)
{
    if (strcmp(what, "engine") == 0)
        assert_int_equal(truncate(shrinking, 20480), 0);
    return 0;
}

static void shrinks_meanwhile(void **state)
{
    fail_world f;
    kvf_error error;
    fail_world_open(&f, 8192);
    shrinking = save_path("shrinks");
    assert_int_equal(save_now(&f.w, f.s, shrinking, NULL), KVF_OK);
    kvf_device_set_fault(f.w.runtime->device, shrink, NULL);
    assert_int_equal(fail_restore(&f, shrinking, &error), KVF_CORRUPT);
    assert_non_null(strstr(error.text, "before its data does"));
    kvf_device_set_fault(f.w.runtime->device, NULL, NULL);
    (void)unlink(shrinking);
    fail_world_close(&f);
}

/* ---- a limit of file sizes ---- */

/* In a process that SIGXFSZ would end; 0 = as it must be. */
static int save_past_limit(const char *path, const char *folder)
{
    test_world w;
    test_tokens t;
    kvf_error error;
    kvf_cache *cache = NULL;
    kvf_cache_config c = save_config(&save_cases[0]);
    test_open(&w, &t, &c, &(test_tokens_spec){.count = SAVE_PROMPT, .seed = 5, .sharpness = 2});
    kvf_sequence *s = test_sequence(&w);
    test_fill(&w, s, &t, 0, SAVE_PROMPT);
    (void)signal(SIGXFSZ, SIG_DFL);
    if (setrlimit(RLIMIT_FSIZE, &(struct rlimit){8192, RLIM_INFINITY}) != 0)
        return 1;
    if (save_now(&w, s, path, &error) != KVF_SYSTEM || error.foreign != EFBIG ||
        !strstr(error.text, "RLIMIT_FSIZE"))
        return 2;
    c.disk_path = folder;
    c.host_bytes = 18 << 20;
    c.tokens_max = 1 << 14;
    if (kvf_cache_open(w.runtime, &c, &cache, &error) == KVF_OK || error.foreign != EFBIG)
        return print_message("%s\n", error.text), 3;
    if (setrlimit(RLIMIT_FSIZE, &(struct rlimit){RLIM_INFINITY, RLIM_INFINITY}) != 0)
        return 4;
    if (save_now(&w, s, path, &error) != KVF_OK)
        return 5;
    test_close(&w, &t);
    return 0;
}

static void past_the_limit_of_file_sizes(void **state)
{
    int ended;
    char path[160];
    snprintf(path, sizeof path, "%s", save_path("limited"));
    if (test_on_cuda())
        return; /* a GPU is not there after fork(), and has no part in it */
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0)
        _exit(save_past_limit(path, save_folder()));
    assert_int_equal(waitpid(child, &ended, 0), child);
    assert_int_equal(ended, 0);
}

typedef struct seen_mask {
    sigset_t mask;
    _Atomic int is_seen;
} seen_mask;

static void see_mask(const void *args, uint32_t task)
{
    seen_mask *seen;
    memcpy(&seen, args, sizeof seen);
    (void)pthread_sigmask(SIG_SETMASK, NULL, &seen->mask);
    seen->is_seen = 1;
}

/* A thread of the library has the mask of who made it, and that signal. */
static void only_one_signal_is_blocked(void **state)
{
    sigset_t mine, before;
    seen_mask *seen = calloc(1, sizeof *seen);
    kvf_stream *stream;
    if (test_on_cuda()) {
        free(seen);
        return;
    }
    sigemptyset(&mine);
    sigaddset(&mine, SIGUSR2);
    assert_int_equal(pthread_sigmask(SIG_BLOCK, &mine, &before), 0);
    kvf_runtime *runtime = test_runtime();
    test_expect(runtime, kvf_stream_create(runtime, &stream), KVF_OK);
    test_expect(runtime, kvf_stream_launch(stream, see_mask, &seen, sizeof seen, 1), KVF_OK);
    while (!seen->is_seen) /* a thread that waits would do the work itself */
        usleep(100);
    test_expect(runtime, kvf_stream_wait(stream), KVF_OK);
    assert_int_equal(sigismember(&seen->mask, SIGXFSZ), 1);
    assert_int_equal(sigismember(&seen->mask, SIGUSR2), 1);
    assert_int_equal(sigismember(&seen->mask, SIGTERM), 0);
    assert_int_equal(pthread_sigmask(SIG_SETMASK, NULL, &mine), 0);
    assert_int_equal(sigismember(&mine, SIGXFSZ), 0); /* the caller's is what it was */
    assert_int_equal(pthread_sigmask(SIG_SETMASK, &before, NULL), 0);
    kvf_stream_destroy(stream);
    kvf_runtime_close(runtime);
    free(seen);
}

int main(void)
{
    /* The first ones fork, and threads do not. */
    return unit_run_around(NULL, save_remove_folder, killed_at_every_write,
                           killed_around_the_rename, each_request_once, each_refusal_once,
                           damage_is_found, shrinks_meanwhile, past_the_limit_of_file_sizes,
                           only_one_signal_is_blocked);
}
