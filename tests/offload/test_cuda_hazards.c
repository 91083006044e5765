/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Hazards on which a GPU refuses or blocks and a CPU does not: kernels that touch pageable memory,
 * a host that touches device memory, kernels that are loaded while streams are busy, streams that
 * share a queue of the hardware. The emulator does the same, so that each of them fails here first.
 *
 * Runs in emulated builds. Programs that must end badly run in a child process of their own.
 */

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "emu_control.h"
#include "sanitizers.h"
#include "transfer_rig.h"

#define WATCH_SECONDS 60

/* A transfer that waits for itself would wait for ever. */
static void on_alarm(int number)
{
    static const char text[] = "a stream waits for what stands after it\n";
    (void)!write(STDERR_FILENO, text, sizeof text - 1);
    _exit(3);
}

/* ---- memory ---- */

/* Rows by way of a list, so that the kernel alone knows their address. */
static void kernel_reads(rig *r, const void *from_where)
{
    const void **from = rig_shared(r, 64);
    void **to = rig_shared(r, 64);
    *from = from_where;
    *to = rig_memory(r, 4096);
    const kvf_copy_args copy = {.bytes = 4096, .count = 1, .per_task = 1, .from = from, .to = to};
    kvf_stream *stream = rig_stream(r);
    RIG_OK(r->ops->launch(stream, r->device->kernels.copy, &copy, sizeof copy, 1));
    RIG_OK(r->ops->stream_wait(stream));
}

static void read_pageable(rig *r)
{
    static _Alignas(64) char pageable[4096];
    kernel_reads(r, pageable);
}

static void read_registered(rig *r)
{
    void *registered = rig_shared(r, 4096);
    kernel_reads(r, registered);
}

static void touch_device_memory(rig *r)
{
    volatile char *memory = rig_memory(r, 64);
    memory[0]++;
}

/* How a program on a fresh device ends: its exit status, or 128 and the signal. */
static int end_of(void (*program)(rig *r))
{
    fflush(NULL);
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        rig r;
        if (!freopen("/dev/null", "w", stderr))
            _exit(2);
        rig_open(&r, NULL);
        program(&r);
        rig_close(&r);
        _exit(0);
    }
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static void test_memory(void **state)
{
    assert_int_equal(end_of(read_registered), 0);
    assert_int_equal(end_of(read_pageable), 128 + SIGABRT);
    if (!KVF_TSAN) /* under which the emulator leaves device memory open to the host */
        assert_int_not_equal(end_of(touch_device_memory), 0);
}

/* ---- queues and late kernels ---- */

static void fetch_all(kvf_transfer method, uint32_t connections)
{
    static plan p;
    rig r;
    bench_memory m;
    kvf_emu_config emu;
    kvf_emu_counts counts;
    kvf_transfer_choice mixed;
    kvf_emu_reset();
    kvf_emu_get_config(&emu);
    emu.connections = connections;
    kvf_emu_set_config(&emu);
    rig_random random = rig_seed("hazards", 300 + (uint64_t)method);
    plan_make(&p, &random, 4096);
    rig_open(&r, NULL);
    kvf_transfer_config config = transfer_engine_config(method, 4096);
    for (uint32_t b = 0; b < KVF_TRANSFER_BUCKETS; b++)
        mixed.method[b] = b < 3 ? KVF_TRANSFER_MAPPED : KVF_TRANSFER_GATHER;
    config.choice = &mixed;
    config.chunk_bytes = 20480;
    alarm(WATCH_SECONDS);
    kvf_transfer_engine *engine = transfer_run(&r, &config, &p, &m);
    alarm(0);
    kvf_emu_get_counts(&counts);
    assert_true(counts.launches > 0);
    assert_int_equal(counts.late_loads, 0);
    kvf_transfer_close(engine);
    kvf_page_pool_destroy(&m.pool);
    rig_close(&r);
    kvf_emu_reset();
}

/* However few queues the streams share, nothing stands in front of what it waits for. */
static void test_connections(void **state)
{
    const kvf_transfer methods[] = {KVF_TRANSFER_GATHER, KVF_TRANSFER_EACH, KVF_TRANSFER_MAPPED,
                                    KVF_TRANSFER_BATCH, KVF_TRANSFER_AUTO};
    for (size_t i = 0; i < sizeof methods / sizeof *methods; i++) {
        fetch_all(methods[i], 1);
        fetch_all(methods[i], 8);
    }
}

int main(void)
{
    signal(SIGALRM, on_alarm);
    return unit_run(test_memory, test_connections);
}
