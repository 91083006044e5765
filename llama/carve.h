/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVL_CARVE_H
#define KVL_CARVE_H

#include <stddef.h>

/** The next part of an arena, aligned to a cache line; without an arena only its bytes are counted,
 * so that what a layout takes and what it gets are one function. */
static inline void *kvl_carve(char *arena, size_t *at, size_t bytes)
{
    void *part = arena ? arena + *at : NULL;
    *at += (bytes + 63) / 64 * 64;
    return part;
}

#endif
