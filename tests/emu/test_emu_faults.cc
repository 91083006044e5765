/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Kernels that are wrong, each in a child process: the emulator must say what, and where, and
 * abort. What only a sanitizer sees is tried only under it.
 */

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "emu_fiber.h"
#include "test_emu.h"

static __global__ void half_waits(uint32_t *)
{
    if (threadIdx.x < 32)
        __syncthreads();
    else if (threadIdx.x < 63)
        __syncwarp();
    else
        __syncthreads();
}

static __global__ void lane_missing_in_mask(uint32_t *)
{
    __ballot_sync(0xfffffffeu, 1);
}

static __global__ void masks_differ(uint32_t *)
{
    __shfl_sync(threadIdx.x < 16 ? KVF_FULL_WARP : 0xffff0000u, 1, 0);
}

static __global__ void operations_differ(uint32_t *)
{
    if (threadIdx.x == 3)
        __syncwarp();
    else
        __shfl_xor_sync(KVF_FULL_WARP, 1, 1);
}

static __global__ void lane_left_before(uint32_t *)
{
    if (threadIdx.x == 0)
        return;
    __syncwarp();
}

static __global__ void lane_leaves(uint32_t *)
{
    if (threadIdx.x != 31)
        __reduce_add_sync(KVF_FULL_WARP, 1u);
}

static __global__ void barriers_differ(uint32_t *)
{
    if (threadIdx.x == 7)
        __syncthreads_or(1);
    else
        __syncthreads();
}

static __global__ void part_of_warp_multiplies(uint32_t *)
{
    uint32_t r[4];
    if (threadIdx.x < 16)
        kvf_load_tiles4(r, kvf_shared());
}

static __global__ void odd_address(uint32_t *x)
{
    kvf_load_once((const char *)x + 8);
}

static __global__ void copy_outside(uint32_t *x)
{
    kvf_async_copy16(kvf_shared() + 240 + 16 * (threadIdx.x == 9), x);
}

static __global__ void traps(uint32_t *)
{
    if (threadIdx.x == 5)
        __trap();
}

/* Without a barrier between, thread t reads what thread t + 1 has yet to write. */
static __global__ void barrier_forgotten(uint32_t *x)
{
    uint32_t *s = (uint32_t *)kvf_shared();
    s[threadIdx.x] = 1;
    x[threadIdx.x] = s[(threadIdx.x + 1) % 64];
}

/* A shuffle is no barrier. */
static __global__ void shuffle_for_barrier(uint32_t *x)
{
    uint32_t *s = (uint32_t *)kvf_shared();
    s[threadIdx.x] = 1;
    __shfl_sync(KVF_FULL_WARP, 1, 0);
    x[threadIdx.x] = s[threadIdx.x ^ 1];
}

static __global__ void writes_outside(uint32_t *)
{
    kvf_shared()[blockIdx.x == 1 ? 256 : 0] = 1;
}

/* The compiler does not know that the block has 64 threads. */
static __global__ void reads_past_local(uint32_t *x)
{
    uint32_t local[8];
    for (uint32_t i = 0; i < 8; i++)
        local[i] = x[i] + i;
    x[0] = *(local + blockDim.x / 8);
}

typedef void (*fault_kernel)(uint32_t *);

static __global__ void some_never_wait(uint32_t *)
{
    if (threadIdx.x != 9)
        kvf_wait_for_earlier();
}

static bool starts_early; /* of the launches below */

/* Run the kernel in a child; its stderr, and its wait status. */
static int run_child(fault_kernel kernel, char *text, size_t size)
{
    int ends[2];
    CHECK(pipe(ends) == 0);
    fflush(NULL);
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        alignas(16) static uint32_t memory[64];
        dup2(ends[1], STDERR_FILENO);
        close(ends[0]);
        close(ends[1]);
        kvf_emu_launch("kernel_of_test<a, b>", starts_early, kernel, dim3(2), dim3(64), 256, NULL,
                       (uint32_t *)memory);
        exit(0);
    }
    close(ends[1]);
    size_t used = 0;
    for (ssize_t n; (n = read(ends[0], text + used, size - 1 - used)) > 0;)
        used += (size_t)n;
    text[used] = '\0';
    char rest[4096];
    while (read(ends[0], rest, sizeof(rest)) > 0)
        ;
    close(ends[0]);
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    return status;
}

static void expect(fault_kernel kernel, const char *name, const char *what, const char *more)
{
    static char text[1 << 16];
    const int status = run_child(kernel, text, sizeof(text));
    const bool aborted = WIFSIGNALED(status) ? WTERMSIG(status) == SIGABRT
                                             : WIFEXITED(status) && WEXITSTATUS(status) != 0;
    if (aborted && strstr(text, what) != NULL && strstr(text, more) != NULL)
        return;
    fprintf(stderr, "%s: status 0x%x, expected \"%s\" and \"%s\" in:\n%s\n", name, (unsigned)status,
            what, more, text);
    exit(1);
}

#define EXPECT(kernel, what, more) expect(kernel, #kernel, what, more)

static void expect_reports(void)
{
    EXPECT(half_waits, "kernel_of_test<a, b>: deadlock in block (0,0,0)",
           "  thread (0,0,0) .. (31,0,0) waits in __syncthreads\n"
           "  thread (32,0,0) .. (62,0,0) waits in __syncwarp of lanes 0xffffffff\n"
           "  thread (63,0,0) waits in __syncthreads\n");
    EXPECT(lane_missing_in_mask, "block (0,0,0) thread (0,0,0): vote",
           "of lanes 0xfffffffe called by lane 0");
    EXPECT(masks_differ, "block (0,0,0) thread (16,0,0): __shfl_sync of lanes 0xffff0000",
           "while lanes 0x0000ffff wait in __shfl_sync of lanes 0xffffffff");
    EXPECT(operations_differ, "thread (3,0,0): __syncwarp of lanes 0xffffffff",
           "while lanes 0x00000007 wait in __shfl_xor_sync of lanes 0xffffffff");
    EXPECT(lane_left_before, "thread (1,0,0): __syncwarp of lanes 0xffffffff",
           "of which 0x00000001 have exited");
    EXPECT(lane_leaves, "thread (31,0,0): exits, while lanes 0x7fffffff wait for it",
           "__reduce_add_sync");
    EXPECT(barriers_differ, "thread (7,0,0): __syncthreads_or", "wait in __syncthreads");
    EXPECT(part_of_warp_multiplies, "kvf_load_tiles4", "exits, while lanes 0x0000ffff");
    EXPECT(odd_address, "kvf_load_once", "is not a multiple of 16");
    EXPECT(copy_outside, "thread (9,0,0): kvf_async_copy16", "256 bytes of shared memory");
    EXPECT(traps, "block (0,0,0) thread (5,0,0): __trap", "");
    starts_early = true;
    EXPECT(some_never_wait, "thread (9,0,0): starts early, and ends without kvf_wait_for_earlier",
           "");
    starts_early = false;
}

void test_faults(void)
{
    expect_reports();
#if KVF_ASAN
    EXPECT(writes_outside, "AddressSanitizer: use-after-poison", "writes_outside");
    EXPECT(reads_past_local, "AddressSanitizer: stack-buffer-overflow", "reads_past_local");
#else
    printf("writes_outside, reads_past_local: not tried without AddressSanitizer\n");
    (void)writes_outside;
    (void)reads_past_local;
#endif
#if KVF_TSAN
    EXPECT(barrier_forgotten, "ThreadSanitizer: data race", "barrier_forgotten");
    EXPECT(shuffle_for_barrier, "ThreadSanitizer: data race", "shuffle_for_barrier");
#else
    printf("shuffle_for_barrier: not tried without ThreadSanitizer\n");
    (void)shuffle_for_barrier;
    uint32_t x[64];
    LAUNCH(barrier_forgotten, 1, 64, 256, NULL, (uint32_t *)x);
    CHECK(x[0] == KVF_EMU_POISON * 0x10001u);
#endif
}
