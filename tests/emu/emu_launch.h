/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_EMU_EMU_LAUNCH_H
#define KVF_TESTS_EMU_EMU_LAUNCH_H

/*
 * Where the two halves of the emulator meet: the language (emu.h, emu_block.cc), which runs one
 * grid on the calling thread, and the runtime (emu_runtime.cc), which has streams, graphs and
 * memory. Neither knows anything else of the other.
 */

#include <cuda_runtime_api.h>
#include <functional>
#include <stddef.h>
#include <typeinfo>

/* Limits of a device of compute capability 9.0. */
#define KVF_EMU_BLOCK_THREADS_MAX 1024u
#define KVF_EMU_SHARED_BYTES_MAX  (227u * 1024u)

/* ---- the runtime provides ---- */

/* A kernel that is launched. */
struct kvf_emu_kernel {
    const char *name; /* with the arguments of its template */
    const void *function;
    bool starts_early; /* it may begin before what the stream has before it is done */
};

/* Abort if a word of this argument is the address of memory that no kernel may touch. */
void kvf_emu_check_arg(const kvf_emu_kernel *kernel, const void *arg, size_t bytes);

/* Enqueue a launch that kvf_emu_check_launch() accepted: keep `body`, and later, in the order of
 * the stream (or at every replay of the graph under capture), pass it to kvf_emu_run_grid().
 * Returns a cudaError_t. */
int kvf_emu_enqueue(cudaStream_t stream, dim3 grid, dim3 block, size_t shared_bytes,
                    std::function<void()> body, const kvf_emu_kernel *kernel);

/* NULL if a kernel may touch `pointer`; else what is wrong with it. */
const char *kvf_emu_refuses(const void *pointer);

/* ---- the language provides ---- */

/* The name of a kernel, which `tag` has as the argument of a template. Kept until the process ends.
 */
const char *kvf_emu_name_of(const std::type_info &tag);

/* cudaSuccess, or what CUDA answers to a launch of this shape. */
cudaError_t kvf_emu_check_launch(dim3 grid, dim3 block, size_t shared_bytes);

/* Run all blocks of a grid on the calling thread; returns when all have ended. `body` is called
 * once per CUDA thread. Several threads may run grids at the same time; a grid must not start
 * another. Errors of the kernel (deadlock, wrong mask, __trap, an early start without a wait in
 * every thread) are printed and abort the process. `earlier`, or NULL, is what the stream has
 * before the grid: the first thread that waits for it has it done, on a thread of its own. */
void kvf_emu_run_grid(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()> &body,
                      const kvf_emu_kernel &kernel, const std::function<void()> *earlier);

#endif
