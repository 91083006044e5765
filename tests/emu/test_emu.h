/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_EMU_TEST_EMU_H
#define KVF_TESTS_EMU_TEST_EMU_H

/*
 * Helpers of the tests of the emulated language. Launches run at once on the calling thread: these
 * programs link the language without the runtime.
 */

#include <stdio.h>
#include <stdlib.h>

#include "cuda.cuh"

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                        \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

#define LAUNCH(kernel, ...) CHECK(kvf_cuda_launch<kernel>(__VA_ARGS__) == cudaSuccess)

/* The order of warps and lanes that KVF_EMU_ORDER asked for is that of the calling thread. */
void test_copies(void);
void test_products(void);

/* Kernels that are wrong, each in a process of its own. Only with a single thread. */
void test_faults(void);

static inline uint32_t test_random(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

#endif
