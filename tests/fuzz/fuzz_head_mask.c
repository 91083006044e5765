/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Any bytes as a head mask: refused with a message, or a mask of zeros, ones and twos, or of zeros
 * and ones in which as many heads stream as were asked for. The first byte chooses shape and
 * sparsity.
 */

#include "fuzz_heap.h"
#include "fuzz_input.h"
#include "head_mask.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static bool write_file(const char *path, const uint8_t *data, size_t size)
{
    FILE *file = fopen(path, "wb");
    if (file == NULL)
        return false;
    const bool is_written = fwrite(data, 1, size, file) == size;
    return fclose(file) == 0 && is_written;
}

static void check_mask(const char *path, uint32_t layers, uint32_t kv_heads, double sparsity)
{
    uint8_t *mask = malloc((size_t)layers * kv_heads); /* to the byte */
    kvf_error error = {.text = ""};
    if (mask == NULL)
        return;
    memset(mask, 7, (size_t)layers * kv_heads);
    const kvf_status status = kvf_head_mask_read(path, layers, kv_heads, sparsity, mask, &error);
    double streaming = 0.0;
    for (uint32_t i = 0; status == KVF_OK && i < layers * kv_heads; i++) {
        fuzz_require(mask[i] <= (sparsity < 0.0 ? 2 : 1));
        streaming += !mask[i];
    }
    if (status == KVF_OK && sparsity >= 0.0)
        fuzz_require(streaming == floor(sparsity * layers * kv_heads + 0.5));
    if (status != KVF_OK)
        fuzz_require(error.status == status && error.text[0] != '\0');
    free(mask);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char path[] = "/tmp/kvferry-fuzz-XXXXXX";
    const uint8_t how = size != 0 ? data[0] : 0;
    const int fd = mkstemp(path);
    if (fd < 0)
        return 0;
    close(fd);
    if (write_file(path, size != 0 ? data + 1 : data, size != 0 ? size - 1 : 0))
        check_mask(path, 1 + how % 3, 1 + how / 3 % 4, how & 0x80 ? (how >> 4 & 7) / 8.0 : -1.0);
    unlink(path);
    return 0;
}
