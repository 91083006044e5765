/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_FUZZ_INPUT_H
#define KVF_TESTS_FUZZ_INPUT_H

/*
 * Helpers of every fuzz target: the entry that libFuzzer and the replay program call, and a reader
 * that turns bytes into small numbers. Knows nothing of what is fuzzed. After the end of the input
 * every number is the least one, so each input means one fixed sequence of choices.
 */

#include <stddef.h>
#include <stdint.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

typedef struct fuzz_input {
    const uint8_t *data;
    size_t size; /* left */
} fuzz_input;

static inline int fuzz_is_empty(const fuzz_input *in)
{
    return in->size == 0;
}

/* One byte, folded into least … most. */
static inline uint32_t fuzz_range(fuzz_input *in, uint32_t least, uint32_t most)
{
    if (in->size == 0)
        return least;
    const uint8_t byte = *in->data++;
    in->size--;
    return least + byte % (most - least + 1);
}

#endif
