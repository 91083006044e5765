/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_CUDA_KERNELS_H
#define KVF_KERNELS_CUDA_KERNELS_H

/*
 * The kernels of the CUDA device: for every operation of the table a launcher kvf_<op>_cuda, in
 * `kernels/<family>/<op>.cu`, or in the file of its idea (list.h).
 *
 * A launcher takes the same arguments as the reference, chooses grid and block from what the host
 * knows (shapes and maxima, never counts that live on the device), enqueues, and returns a
 * cudaError_t as int. `tasks` is that of kvf_<op>_tasks, and not 0; a launcher may ignore it.
 * It allocates nothing, waits for nothing, and may be recorded in a graph.
 */

#include "kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* `stream` is a cudaStream_t. */
typedef int (*kvf_cuda_launch_fn)(const void *args, uint32_t tasks, void *stream);

#define KVF_CUDA_LAUNCHER(family, op)                                                              \
    int kvf_##op##_cuda(const void *args, uint32_t tasks, void *stream);
KVF_KERNEL_LIST(KVF_CUDA_LAUNCHER, KVF_CUDA_LAUNCHER)
#undef KVF_CUDA_LAUNCHER

/* Load all of them on the current device, with all the shared memory that its blocks can get:
 * nothing is left to load when streams are busy. Returns a cudaError_t. */
int kvf_cuda_load_kernels(void);

/* One more (1) or less (-1) that wants no kernel of the library to start early on the current
 * device: while there is any, each that is enqueued or recorded waits for all before it. */
void kvf_cuda_refuse_early_starts(int more);

/* Fill the table for the CUDA device. Its entries are launchers in disguise: only the CUDA device
 * calls them, as kvf_cuda_launch_fn. KVF_UNSUPPORTED if an entry stays empty. */
KVF_CHECKED kvf_status kvf_kernels_init_cuda(kvf_kernels *table);

#ifdef __cplusplus
}
#endif

#endif
