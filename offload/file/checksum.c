/* SPDX-License-Identifier: Apache-2.0 */

/* XXH3 behind names of the project. Knows nothing of files. The state is xxHash's own. */

#include "checksum.h"

#if KVF_HAVE_XXHASH

#define XXH_INLINE_ALL
#include <xxhash.h>

static XXH3_state_t *state_of(kvf_checksum *sum)
{
    return (XXH3_state_t *)(void *)sum;
}

size_t kvf_checksum_bytes(void)
{
    return sizeof(XXH3_state_t);
}

void kvf_checksum_begin(kvf_checksum *sum)
{
    (void)XXH3_64bits_reset(state_of(sum));
}

void kvf_checksum_add(kvf_checksum *sum, const void *data, size_t bytes)
{
    (void)XXH3_64bits_update(state_of(sum), data, bytes);
}

uint64_t kvf_checksum_end(const kvf_checksum *sum)
{
    return XXH3_64bits_digest((const XXH3_state_t *)(const void *)sum);
}

uint64_t kvf_checksum_of(const void *data, size_t bytes)
{
    return XXH3_64bits(data, bytes);
}

#else

size_t kvf_checksum_bytes(void)
{
    return 0;
}

void kvf_checksum_begin(kvf_checksum *sum)
{
    (void)sum;
}

void kvf_checksum_add(kvf_checksum *sum, const void *data, size_t bytes)
{
    (void)sum, (void)data, (void)bytes;
}

uint64_t kvf_checksum_end(const kvf_checksum *sum)
{
    (void)sum;
    return 0;
}

uint64_t kvf_checksum_of(const void *data, size_t bytes)
{
    (void)data, (void)bytes;
    return 0;
}

#endif
