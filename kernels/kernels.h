/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_KERNELS_H
#define KVF_KERNELS_KERNELS_H

/*
 * The table of kernels of one device. Arguments, and what a kernel does with them, are in
 * <family>/<family>_args.h; list.h names every kernel.
 *
 * A kernel is a pure function of its arguments and a task number: it allocates nothing, starts no
 * thread, knows no policy. The tasks of a launch are independent and write disjoint memory, so
 * their order and the threads that run them do not change a bit of the result. `kvf_<op>_tasks`
 * says how many tasks a launch has; it depends on the arguments only, never on the machine.
 *
 * Every pointer in the arguments is device memory (or host memory at its device alias).
 * `<family>/<op>_ref.c` is the specification in plain C, sums in double; `<op>_simd.c` is built
 * once per instruction set and must agree with it as `tests/kernels/check_kernels.c` states.
 */

#include "attend/attend_args.h"
#include "blocks/blocks_args.h"
#include "list.h"
#include "move/move_args.h"
#include "observe/observe_args.h"
#include "score/score_args.h"
#include "select/select_args.h"

typedef struct kvf_kernels {
#define KVF_KERNEL_FIELD(family, op) kvf_task_fn op;
    KVF_KERNEL_LIST(KVF_KERNEL_FIELD, KVF_KERNEL_FIELD)
#undef KVF_KERNEL_FIELD
    uint32_t isa; /* OR of kvf_isa that supplied at least one kernel */
} kvf_kernels;

/* The instruction sets of this CPU, as OR of kvf_isa. */
uint32_t kvf_cpu_isa(void);

/*
 * Fill the whole table for the host device: references first, overridden by the variants that
 * the CPU and the mask allow, in ascending order. KVF_UNSUPPORTED if an entry stays empty.
 */
KVF_CHECKED kvf_status kvf_kernels_init(kvf_kernels *table, uint32_t isa_mask);

#endif
