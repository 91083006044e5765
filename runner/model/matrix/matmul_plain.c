/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Without oneDNN there are no products in bf16; the runner multiplies in fp32 by its own kernel.
 */

#include <stdio.h>

#include "matmul.h"

struct kvf_matmul {
    int unused;
};

bool kvf_matmul_bf16_native(void)
{
    return false; /* so nobody creates a handle */
}

void kvf_matmul_describe(char *text, size_t capacity)
{
    snprintf(text, capacity, "in fp32, built without oneDNN");
}

kvf_status kvf_matmul_create(kvf_matmul **out)
{
    *out = NULL;
    return KVF_UNSUPPORTED;
}

void kvf_matmul_destroy(kvf_matmul *matmul)
{
    (void)matmul;
}

bool kvf_matmul_bf16(kvf_matmul *matmul, const kvf_matmul_shape *s, const uint16_t *a,
                     const uint16_t *b, float *c)
{
    (void)matmul;
    (void)s;
    (void)a;
    (void)b;
    (void)c;
    return false;
}
