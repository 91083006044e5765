/* SPDX-License-Identifier: Apache-2.0 */

/* Asks the system once per thread, which takes microseconds; see the header. */

#include "stack.h"

#include <pthread.h>
#include <stdint.h>

/* Of a thread, and written by it alone: its stack stays where it is. */
static _Thread_local struct {
    uintptr_t low, high; /* high = 0: not asked yet */
} bounds;

static void ask(void)
{
    pthread_attr_t attributes;
    void *low = NULL;
    size_t bytes = 0;
    bounds.high = 1; /* no address is inside */
    if (pthread_getattr_np(pthread_self(), &attributes) != 0)
        return;
    if (pthread_attr_getstack(&attributes, &low, &bytes) == 0) {
        bounds.low = (uintptr_t)low;
        bounds.high = (uintptr_t)low + bytes;
    }
    pthread_attr_destroy(&attributes);
}

size_t kvf_stack_left(void)
{
    const uintptr_t here = (uintptr_t)__builtin_frame_address(0);
    if (bounds.high == 0)
        ask();
    return here > bounds.low && here < bounds.high ? here - bounds.low : 0;
}
