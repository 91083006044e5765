/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Any bytes as a safetensors file: refused with a message, or every byte of every tensor is
 * readable, and lies in the file unless the tensor is put together from others.
 */

#include "fuzz_input.h"
#include "fuzz_weights.h"

static void check_tensor(kvf_weights *weights, size_t index, const char *bytes, size_t size)
{
    const kvf_tensor *tensor = kvf_weights_at(weights, index);
    size_t offset = (size_t)((const char *)tensor->data - bytes);
    kvf_error error = {.text = ""};
    fuzz_require(kvf_weights_get(weights, tensor->name) == tensor);
    if (tensor->data)
        fuzz_require(offset <= size && tensor->bytes <= size - offset);
    else if (kvf_weights_load(tensor, 1 + (uint32_t)index % 2, &error) != KVF_OK) {
        fuzz_require(error.status == KVF_OUT_OF_MEMORY);
        return;
    }
    fuzz_weights_read(tensor);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    void *copy = fuzz_weights_image(data, size);
    if (!copy)
        return 0;
    heap h = {.fail_at = fuzz_heap_choose(data, size)};
    heap_watch(&h);
    kvf_weights *weights;
    kvf_error error = {.text = ""};
    kvf_status status = kvf_weights_open_memory(copy, size, &weights, &error);
    fuzz_heap_told(&h, status);
    fuzz_require((status == KVF_OK) == (weights != NULL));
    if (status == KVF_OK)
        for (size_t i = 0; i < kvf_weights_count(weights); i++)
            check_tensor(weights, i, copy, size);
    else
        fuzz_require(error.status == status && error.text[0] != '\0');
    kvf_weights_close(weights);
    fuzz_require(heap_left() == 0);
    free(copy);
    return 0;
}
