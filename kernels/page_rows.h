/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_PAGE_ROWS_H
#define KVF_KERNELS_PAGE_ROWS_H

/*
 * Where the rows of a page are, and which of its tokens count. Knows the layout of a page and
 * nothing of who owns it.
 */

#include "kernels.h"

KVF_INLINE const void *kvf_offset(const void *base, size_t bytes)
{
    return (const uint8_t *)base + bytes;
}

KVF_INLINE void *kvf_offset_mut(void *base, size_t bytes)
{
    return (uint8_t *)base + bytes;
}

KVF_INLINE size_t kvf_row_bytes(const kvf_shape *s)
{
    return (size_t)s->head_dim * kvf_dtype_bytes(s->dtype);
}

KVF_INLINE const void *kvf_page_key(const kvf_shape *s, const void *page, uint32_t token)
{
    return kvf_offset(page, token * kvf_row_bytes(s));
}

KVF_INLINE const void *kvf_page_value(const kvf_shape *s, const void *page, uint32_t token)
{
    return kvf_offset(page, kvf_half_page_bytes(s) + token * kvf_row_bytes(s));
}

/* Bit t is set iff token t exists and is not skipped. */
KVF_INLINE uint64_t kvf_live_bits(uint32_t count, uint64_t skip)
{
    return count >= 64 ? ~skip : ~skip & ((UINT64_C(1) << count) - 1);
}

#endif
