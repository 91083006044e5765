/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The next frame of a recorded step to its fixed place. Knows nothing of what the frame says.
 */

#include <string.h>

#include "variants.h"

void kvf_frame_ref(const void *args, uint32_t task)
{
    const kvf_frame_args *a = args;
    const size_t frame = a->turns[task]++ % a->frames;
    memcpy(a->to + task * a->bytes, a->from + (frame * a->parts + task) * a->bytes, a->bytes);
}
