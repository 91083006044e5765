/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_CHECK_CUDA_H
#define KVF_TESTS_CHECK_CUDA_H

/*
 * The CUDA device under the kernel checks: one stream, launches that are waited for, and memory
 * of the host with a twin on the device.
 *
 * Knows nothing of single kernels. Tests write and read buffers of the host; they are copied to
 * plain device memory before a launch and back after it. An address in a buffer or in arguments
 * becomes that of the twin on the way, and its own again on the way back. Under AddressSanitizer,
 * in the emulator, buffers are registered one by one instead, so that it sees their ends.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

typedef struct check_cuda check_cuda;

/* Bytes per ns: of a copy on the device, read and written ones together, and of one from pinned
 * memory of the host. */
typedef struct check_rates {
    double copy;
    double link;
} check_rates;

typedef void (*check_launcher)(const void *args, uint32_t task);

/* Arguments of a launch; addresses in them are the host's. */
typedef struct check_args {
    const void *at;
    size_t bytes;
} check_args;

typedef struct check_launch {
    check_launcher fn;
    check_args args;
    uint32_t tasks;
} check_launch;

#if KVF_HAVE_CUDA

/* NULL if there is nothing to run on; `why` says what is missing. */
check_cuda *check_cuda_open(bool is_timed, char why[256]);
void check_cuda_close(check_cuda *cuda);

/* "cuda (emulated)" or "cuda" and the GPU's name. */
const char *check_cuda_name(const check_cuda *cuda);
bool check_cuda_is_emulated(const check_cuda *cuda);

/* Memory of the present case, aligned to 64 bytes; NULL under AddressSanitizer, where the caller's
 * own is adopted, and abandoned before it is freed. */
void *check_cuda_take(check_cuda *cuda, size_t bytes);
/* All of it to the device, or back. */
const char *check_cuda_put(check_cuda *cuda);
const char *check_cuda_get(check_cuda *cuda);
void check_cuda_adopt(check_cuda *cuda, void *memory, size_t bytes);
void check_cuda_abandon(check_cuda *cuda, void *memory);
void check_cuda_release(check_cuda *cuda);

/* Pinned memory of the host that kernels read over the link, once per open device; NULL where
 * buffers are adopted. */
void *check_cuda_take_home(check_cuda *cuda, size_t bytes);

/* One launch of kvf_<op>_cuda, given as it is in the table, on what was put there. All return NULL,
 * or what went wrong. */
const char *check_cuda_run(check_cuda *cuda, check_launcher fn, check_args args, uint32_t tasks);

/* `count` of them in one graph, likewise. The graph runs once and then `times` times, each time
 * after writes that leave nothing else in L2. ns[i]: by events around run i. */
const char *check_cuda_time(check_cuda *cuda, const check_launch *launches, uint32_t count,
                            uint32_t times, double *ns);

const char *check_cuda_rates(check_cuda *cuda, check_rates *out);

#else

/* There is nothing to run on, so that nothing else is ever called. */
#define CHECK_NONE                            "no CUDA device in this build"
#define check_cuda_open(is_timed, why)        (snprintf((why), 256, CHECK_NONE), NULL)
#define check_cuda_close(cuda)                ((void)(cuda))
#define check_cuda_name(cuda)                 ((void)(cuda), "cuda")
#define check_cuda_is_emulated(cuda)          ((void)(cuda), false)
#define check_cuda_take(cuda, bytes)          ((void)(cuda), (void)(bytes), NULL)
#define check_cuda_take_home(cuda, bytes)     ((void)(cuda), (void)(bytes), NULL)
#define check_cuda_put(cuda)                  ((void)(cuda), CHECK_NONE)
#define check_cuda_get(cuda)                  ((void)(cuda), CHECK_NONE)
#define check_cuda_adopt(cuda, memory, bytes) ((void)(cuda))
#define check_cuda_abandon(cuda, memory)      ((void)(cuda))
#define check_cuda_release(cuda)              ((void)(cuda))
#define check_cuda_run(cuda, fn, args, tasks) ((void)(cuda), CHECK_NONE)
#define check_cuda_time(cuda, launches, count, times, ns)                                          \
    ((void)(cuda), (void)(launches), (void)(count), (ns)[0] = 0.0, CHECK_NONE)
#define check_cuda_rates(cuda, out) ((void)(cuda), (void)(out), CHECK_NONE)

#endif

#endif
