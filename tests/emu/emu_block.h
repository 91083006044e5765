/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_EMU_EMU_BLOCK_H
#define KVF_TESTS_EMU_EMU_BLOCK_H

/*
 * Functions for everything that one CUDA thread cannot do alone, which emu.h calls: barriers, warp
 * operations, asynchronous copies, errors.
 *
 * All of it may be called only inside a kernel. Each OS thread runs one block at a time, so the
 * state after these calls is the OS thread's, and nothing here is shared between them.
 */

#include <cuda_runtime_api.h>
#include <stddef.h>
#include <stdint.h>

/* ---- where the running thread is ---- */

struct kvf_emu_place {
    uint3 thread_index;
    uint3 block_index;
    uint3 block_dim;
    uint3 grid_dim;
    char *shared; /* shared_bytes, no more */
    size_t shared_bytes;
};

/* Thread-local, without the wrapper that `extern thread_local` would need. */
extern __thread kvf_emu_place kvf_emu_here __attribute__((tls_model("initial-exec")));

/* ---- barriers and warp operations ---- */

typedef enum kvf_emu_barrier_kind {
    KVF_EMU_BARRIER_PLAIN,
    KVF_EMU_BARRIER_OR,
} kvf_emu_barrier_kind;

/* Until every thread of the block that has not exited is here. The answer is that of the kind. */
int kvf_emu_barrier(kvf_emu_barrier_kind kind, int predicate);

/* A warp operation: the last lane of the mask to arrive works for all of them. complete() gets what
 * each lane brought, [32], of which it may touch the lanes in the mask, and writes the answers
 * there. */
struct kvf_emu_warp_op {
    const char *name;
    void (*complete)(void *const *operands, uint32_t mask);
    bool orders_memory;
    bool whole_warp;
};

/* Until all lanes of `mask` are here with the same mask and operation. */
void kvf_emu_warp_meet(const kvf_emu_warp_op *op, uint32_t mask, void *operand);

struct kvf_emu_shuffle {
    uint64_t value; /* the answer, afterwards */
    uint32_t source;
};
extern const kvf_emu_warp_op kvf_emu_shuffle_op, kvf_emu_shuffle_up_op, kvf_emu_shuffle_xor_op;

struct kvf_emu_vote {
    uint64_t value;
    uint32_t answer;
};
extern const kvf_emu_warp_op kvf_emu_syncwarp_op, kvf_emu_ballot_op, kvf_emu_reduce_add_op,
    kvf_emu_reduce_min_op, kvf_emu_reduce_max_op;

struct kvf_emu_tiles {
    uint32_t *registers; /* [4] */
    uint16_t row[8];
};
extern const kvf_emu_warp_op kvf_emu_tiles_op, kvf_emu_tiles_transposed_op;

struct kvf_emu_product {
    float *d;          /* [4] */
    const uint32_t *a; /* [4] */
    const uint32_t *b; /* [2] */
};
extern const kvf_emu_warp_op kvf_emu_mma_bf16_op, kvf_emu_mma_half_op;

struct kvf_emu_byte_product {
    int32_t *d;        /* [4] */
    const uint32_t *a; /* [4] */
    const uint32_t *b; /* [2] */
};
extern const kvf_emu_warp_op kvf_emu_mma_s8_op;

/* Until what the stream has before this grid is done. */
void kvf_emu_wait_for_earlier(void);

/* Let other threads run: a thread that polls must, or what it waits for never happens. */
void kvf_emu_yield(void);

uint32_t kvf_emu_lane(void);

/* The word that fences write under TSan. */
extern uint32_t kvf_emu_fence_word;

/* ---- asynchronous copies ---- */

/* Each moves its bytes as late as the program allows. Until then the destination in shared memory
 * holds KVF_EMU_POISON. */
void kvf_emu_async_copy(void *shared, const void *global, uint32_t bytes, uint32_t size);
void kvf_emu_async_commit(void);
void kvf_emu_async_wait(uint32_t groups);

/* ---- errors ---- */

/* 16 bits that are no number in bf16, fp16 and fp32, and no index of anything. */
#define KVF_EMU_POISON 0x7fc1u

void kvf_emu_poison(void *memory, size_t bytes);

/* Say what the kernel did wrong, and where, and abort. */
[[noreturn]] void kvf_emu_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* [pointer, pointer + bytes) lies in the block's dynamic shared memory, aligned; or fail. */
void kvf_emu_check_shared(const char *what, const void *pointer, size_t bytes, size_t alignment);
void kvf_emu_check_aligned(const char *what, const void *pointer, size_t alignment);
/* `pointer` is device memory or registered; or fail. */
void kvf_emu_check_global(const char *what, const void *pointer);

#endif
