/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_OFFLOAD_CHECKSUM_H
#define KVF_OFFLOAD_CHECKSUM_H

/*
 * 64 bits that tell whether bytes are those that were written: XXH3 of xxHash, over pieces in
 * order. Not for secrets: it finds damage, not intent. Where the build has no xxHash there is none.
 */

#include <stddef.h>
#include <stdint.h>

typedef struct kvf_checksum kvf_checksum;

/* Bytes of one, aligned to 64; the caller brings the memory. 0: this build has none. */
size_t kvf_checksum_bytes(void);
void kvf_checksum_begin(kvf_checksum *sum);
void kvf_checksum_add(kvf_checksum *sum, const void *data, size_t bytes);
uint64_t kvf_checksum_end(const kvf_checksum *sum);
/* Of one piece. */
uint64_t kvf_checksum_of(const void *data, size_t bytes);

#endif
