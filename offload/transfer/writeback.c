/* SPDX-License-Identifier: Apache-2.0 */

/* Write-back of sealed blocks; see the header. Keeps no state and reserves nothing. */

#include "writeback.h"

/* How many blocks from `first` on lie together on both sides. */
static uint32_t run_length(const kvf_writeback_job *args, uint32_t first)
{
    const kvf_writeback_block *b = &args->blocks[first];
    uint32_t length = 1;
    while (first + length < args->count &&
           (uintptr_t)b[length].from == (uintptr_t)b[0].from + length * args->block_bytes &&
           (uintptr_t)b[length].to == (uintptr_t)b[0].to + length * args->block_bytes)
        length++;
    return length;
}

kvf_status kvf_writeback_enqueue(kvf_stream *stream, const kvf_writeback_job *args,
                                 uint64_t *copies)
{
    const size_t chunk = args->chunk_bytes > 0 ? args->chunk_bytes : KVF_WRITEBACK_CHUNK_BYTES;
    for (uint32_t first = 0; first < args->count;) {
        const kvf_writeback_block *block = &args->blocks[first];
        const uint32_t length = run_length(args, first);
        const size_t bytes = length * args->block_bytes;
        for (size_t at = 0; at < bytes; at += chunk) {
            const size_t part = bytes - at < chunk ? bytes - at : chunk;
            KVF_TRY(stream->device->ops->copy(stream, (char *)block->to + at,
                                              (const char *)block->from + at, part));
            if (copies)
                ++*copies;
        }
        first += length;
    }
    return KVF_OK;
}
