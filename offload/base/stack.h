/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_OFFLOAD_STACK_H
#define KVF_OFFLOAD_STACK_H

/*
 * How much stack there is, so that nobody runs off its end.
 *
 * Kernels keep what they work on in their frames. They run on threads of the library, which have
 * stacks of some size whatever libc and limits say, and on a caller's thread only where enough is
 * left of its stack. `tools/check_stack.py` holds frames below what is promised here.
 */

#include <stddef.h>

#define KVF_THREAD_STACK_BYTES ((size_t)2 << 20)   /* of threads of the library, at least */
#define KVF_KERNEL_STACK_BYTES ((size_t)512 << 10) /* that a kernel and who calls it may take */

/* Bytes left on the stack of this thread; 0 where that is not known, as on a fibre. */
size_t kvf_stack_left(void);

#endif
