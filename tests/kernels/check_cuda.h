/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_CHECK_CUDA_H
#define KVF_TESTS_CHECK_CUDA_H

/*
 * The CUDA device under the kernel checks: one stream, launches that are waited for, and memory
 * that the host and the GPU reach at the same address.
 *
 * Knows nothing of single kernels. In the emulator buffers are allocated and registered one by one,
 * so that AddressSanitizer sees their ends; on a GPU they are cut from large pieces of mapped host
 * memory, or of managed memory that is moved to the GPU before it is timed.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct check_cuda check_cuda;

/* NULL if there is nothing to run on; `why` says what is missing. */
check_cuda *check_cuda_open(bool is_timed, char why[256]);
void check_cuda_close(check_cuda *cuda);

/* "cuda (emulated)" or "cuda" and the GPU's name. */
const char *check_cuda_name(const check_cuda *cuda);
bool check_cuda_is_emulated(const check_cuda *cuda);

/* Memory of the present case, aligned to 64 bytes; NULL in the emulator, where the caller's own is
 * adopted, and abandoned before it is freed. */
void *check_cuda_take(check_cuda *cuda, size_t bytes);
void check_cuda_adopt(check_cuda *cuda, void *memory, size_t bytes);
void check_cuda_abandon(check_cuda *cuda, void *memory);
void check_cuda_release(check_cuda *cuda);

/* Pinned memory of the host that kernels read over the link, once per open device; NULL in the
 * emulator, where all memory is. */
void *check_cuda_take_home(check_cuda *cuda, size_t bytes);

typedef void (*check_launcher)(const void *args, uint32_t task);

/* One launch of kvf_<op>_cuda, given as it is in the table. All three return NULL, or what went
 * wrong. */
const char *check_cuda_run(check_cuda *cuda, check_launcher fn, const void *args, uint32_t tasks);

/* `launches` of them in one graph, each with arguments of its own, and all memory on the GPU. The
 * graph runs once and then `times` times, each time behind writes that leave nothing else in L2.
 * ns[i]: by events around run i, divided by the launches. */
const char *check_cuda_time(check_cuda *cuda, check_launcher fn, const void *const *args,
                            uint32_t tasks, uint32_t launches, uint32_t times, double *ns);

/* Bytes per ns: of a copy on the device, read and written ones together, and of one from pinned
 * memory of the host. */
typedef struct check_rates {
    double copy;
    double link;
} check_rates;

const char *check_cuda_rates(check_cuda *cuda, check_rates *out);

#endif
