/* SPDX-License-Identifier: Apache-2.0 */

/* The shared rig of the offload tests; see its header. It keeps no state of its own. */

#include "offload_rig.h"

#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/random.h"

kvf_device_kind rig_kind(void)
{
    const char *wanted = getenv("KVF_TEST_DEVICE");
    return wanted != NULL && strcmp(wanted, "cuda") == 0 ? KVF_DEVICE_CUDA : KVF_DEVICE_HOST;
}

void rig_open(rig *r, const rig_config *config)
{
    memset(r, 0, sizeof *r);
    RIG_OK(kvf_context_create(NULL, NULL, NULL, &r->context));
    kvf_device_config device = {.threads =
                                    config != NULL && config->threads > 0 ? config->threads : 2,
                                .isa_mask = KVF_ISA_ALL,
                                .delay_seed = config != NULL ? config->delay_seed : 0};
    r->kind = rig_kind();
    RIG_OK(kvf_device_open(r->context, r->kind, &device, &r->device));
    r->ops = r->device->ops;
}

/* All tasks of a launch, one after the other, on a thread of the stream. */
typedef struct all_tasks {
    kvf_task_fn fn;
    uint32_t tasks;
    _Alignas(16) char args[RIG_ARGS_MAX];
} all_tasks;

static void run_all(const void *raw, uint32_t task)
{
    const all_tasks *all = raw;
    for (uint32_t i = 0; i < all->tasks; i++)
        all->fn(all->args, i);
}

kvf_status rig_launch(rig *r, kvf_stream *stream, kvf_task_fn fn, const void *args,
                      size_t args_bytes, uint32_t tasks)
{
    if (r->kind == KVF_DEVICE_HOST)
        return r->ops->launch(stream, fn, args, args_bytes, tasks);
    all_tasks all = {.fn = fn, .tasks = tasks};
    assert_true(args_bytes <= sizeof all.args);
    memcpy(all.args, args, args_bytes);
    return r->ops->host_call(stream, run_all, &all, sizeof all);
}

typedef struct fail_args {
    rig *r;
    kvf_stream *stream;
} fail_args;

static void fail_stream(const void *raw, uint32_t task)
{
    const fail_args *a = raw;
    a->r->ops->stream_fail(a->stream, KVF_CORRUPT);
}

kvf_status rig_fail(rig *r, kvf_stream *stream)
{
    const fail_args args = {r, stream};
    return r->ops->host_call(stream, fail_stream, &args, sizeof args);
}

kvf_stream *rig_stream(rig *r)
{
    assert_true(r->made_count < RIG_MADE_MAX);
    kvf_stream **stream = &r->made[r->made_count++].stream;
    RIG_OK(r->ops->stream_create(r->device, KVF_PRIORITY_NORMAL, stream));
    return *stream;
}

kvf_event *rig_event(rig *r)
{
    assert_true(r->made_count < RIG_MADE_MAX);
    kvf_event **event = &r->made[r->made_count++].event;
    RIG_OK(r->ops->event_create(r->device, false, event));
    return *event;
}

void *rig_memory(rig *r, size_t bytes)
{
    assert_true(r->made_count < RIG_MADE_MAX);
    void **memory = &r->made[r->made_count++].memory;
    RIG_OK(r->ops->memory_alloc(r->device, bytes, memory));
    return *memory;
}

void rig_put(rig *r, void *to, const void *from, size_t bytes)
{
    kvf_stream *stream;
    RIG_OK(r->ops->stream_create(r->device, KVF_PRIORITY_NORMAL, &stream));
    RIG_OK(r->ops->copy(stream, to, from, bytes));
    RIG_OK(r->ops->stream_wait(stream));
    r->ops->stream_destroy(stream);
}

void rig_set(rig *r, void *to, int byte, size_t bytes)
{
    kvf_stream *stream;
    RIG_OK(r->ops->stream_create(r->device, KVF_PRIORITY_NORMAL, &stream));
    RIG_OK(r->ops->fill(stream, to, byte, bytes));
    RIG_OK(r->ops->stream_wait(stream));
    r->ops->stream_destroy(stream);
}

void *rig_shared(rig *r, size_t bytes)
{
    const size_t whole = kvf_round_up(bytes, 4096);
    void *host = aligned_alloc(4096, whole), *alias = NULL;
    assert_true(host && r->made_count < RIG_MADE_MAX);
    memset(host, 0, whole);
    RIG_OK(r->ops->host_register(r->device, host, whole, &alias));
    assert_ptr_equal(alias, host);
    r->made[r->made_count].bytes = whole;
    return r->made[r->made_count++].shared = host;
}

void rig_close(rig *r)
{
    kvf_device_set_fault(r->device, NULL, NULL);
    for (uint32_t i = 0; i < r->made_count; i++)
        r->ops->stream_destroy(r->made[i].stream); /* waits */
    for (uint32_t i = 0; i < r->made_count; i++) {
        r->ops->event_destroy(r->made[i].event);
        r->ops->memory_free(r->device, r->made[i].memory);
        if (r->made[i].shared)
            r->ops->host_unregister(r->device, r->made[i].shared, r->made[i].bytes);
        free(r->made[i].shared);
    }
    kvf_device_close(r->device);
    assert_int_equal(r->context->live_blocks, 0);
    assert_int_equal(r->context->live_bytes, 0);
    kvf_context_destroy(r->context);
}

rig_random rig_seed(const char *test, uint64_t seed)
{
    printf("%s: seed %llu\n", test, (unsigned long long)seed);
    return (rig_random){.state = seed * 0x9e3779b97f4a7c15u + 0x1234567u};
}

uint64_t rig_next(rig_random *r)
{
    return kvf_random_next(&r->state);
}

uint32_t rig_below(rig_random *r, uint32_t limit)
{
    return kvf_random_below(&r->state, limit);
}

int rig_refuse(void *user, const char *what)
{
    rig_fault *fault = user;
    if (fault->only != NULL && strcmp(fault->only, what) != 0)
        return 0;
    if (++fault->seen != fault->at)
        return 0;
    snprintf(fault->refused, sizeof fault->refused, "%s", what);
    return 1;
}

void *rig_alloc(void *user, size_t bytes, size_t alignment)
{
    if (user != NULL && rig_refuse(user, "alloc"))
        return NULL;
    return aligned_alloc(alignment, kvf_round_up(bytes, alignment));
}

void rig_free(void *user, void *pointer)
{
    free(pointer);
}

const char *rig_error(rig *r, kvf_error *error)
{
    kvf_context_error(r->context, error);
    return error->text;
}

void rig_tells(rig *r, const char *const *words)
{
    kvf_error error;
    rig_error(r, &error);
    for (; *words; words++)
        if (!strstr(error.text, *words))
            fail_msg("'%s' is not in: %s", *words, error.text);
}

void rig_in_child(int (*run)(const void *user), const void *user)
{
    int status;
    fflush(NULL);
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        alarm(30);
        _exit(run(user));
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    if (status != 0)
        fail_msg("the child ended with %#x", (unsigned)status);
}

void rig_tree_put(const rig_tree *t, const char *path, const char *text)
{
    char full[256];
    snprintf(full, sizeof full, "%s/%s", t->root, path);
    for (char *at = full + strlen(t->root) + 1; (at = strchr(at, '/')) != NULL; at++) {
        *at = '\0';
        assert_true(mkdir(full, 0700) == 0 || errno == EEXIST);
        *at = '/';
    }
    FILE *file = fopen(full, "w");
    assert_non_null(file);
    fputs(text, file);
    assert_int_equal(fclose(file), 0);
}

void rig_tree_remove(const rig_tree *t)
{
    char command[128];
    snprintf(command, sizeof command, "rm -r %s", t->root);
    assert_int_equal(system(command), 0);
}

void rig_deny(uint32_t call, uint32_t most, int code)
{
    struct sock_filter rows[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[1])),
        BPF_JUMP(BPF_JMP | BPF_JGT | BPF_K, most, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (uint32_t)code),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const struct sock_fprog program = {.len = sizeof rows / sizeof *rows, .filter = rows};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0)
        _exit(0);
}
