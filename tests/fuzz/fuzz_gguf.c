/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Any bytes as a GGUF file: refused with a message, or every part that it writes is JSON, what the
 * readers make of them is an answer, and every number of every tensor is readable.
 */

#include "fuzz_input.h"
#include "fuzz_weights.h"
#include "gguf_parts.h"
#include "json.h"
#include "tokenizer.h"

#include <string.h>

static void check_error(kvf_status status, const kvf_error *error)
{
    fuzz_require(status == KVF_OK || (error->status == status && error->text[0] != '\0'));
}

/* The written text is JSON, or text of the file is no UTF-8. */
static void check_part(const gguf *file, const char *name)
{
    kvf_text text = {0};
    kvf_error error = {.text = ""};
    json_t *json = NULL;
    kvf_model_config config;
    kvf_tokenizer *tokenizer = NULL;
    kvf_status status = gguf_write_part(file, name, &text, &error);
    check_error(status, &error);
    if (status == KVF_OK) {
        status = json_parse(text.bytes, text.size, name, &json, &error);
        fuzz_require(status == KVF_OK || status == KVF_OUT_OF_MEMORY ||
                     strstr(error.text, "unable to decode") != NULL ||
                     strstr(error.text, "duplicate object key") != NULL);
    }
    if (status == KVF_OK && strcmp(name, "config.json") == 0) {
        status = kvf_model_config_parse(text.bytes, text.size, NULL, 0, &config, &error);
        check_error(status, &error);
        if (status == KVF_OK)
            check_error(gguf_model_finish(file, &config, &error), &error);
    } else if (status == KVF_OK && strcmp(name, "tokenizer.json") == 0) {
        check_error(kvf_tokenizer_parse(text.bytes, text.size, &tokenizer, &error), &error);
        kvf_tokenizer_close(tokenizer);
    }
    json_decref(json);
    kvf_text_free(&text);
}

static void check_tensor(kvf_weights *weights, size_t index)
{
    const kvf_tensor *tensor = kvf_weights_at(weights, index);
    kvf_error error = {.text = ""};
    fuzz_require(kvf_weights_get(weights, tensor->name) == tensor);
    if (kvf_weights_load(tensor, 1 + (uint32_t)index % 2, &error) != KVF_OK) {
        fuzz_require(error.status == KVF_OUT_OF_MEMORY);
        return;
    }
    fuzz_weights_read(tensor);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char *const parts[] = {"config.json", "tokenizer.json", "tokenizer_config.json"};
    void *copy = fuzz_weights_image(data, size);
    if (!copy)
        return 0;
    heap h = {.fail_at = fuzz_heap_choose(data, size)};
    heap_watch(&h);
    gguf *file;
    kvf_weights *weights = NULL;
    kvf_error error = {.text = ""};
    kvf_status status = gguf_open_memory(copy, size, &file, &error);
    fuzz_heap_told(&h, status);
    check_error(status, &error);
    fuzz_require((status == KVF_OK) == (file != NULL));
    for (size_t i = 0; status == KVF_OK && i < 3; i++)
        check_part(file, parts[i]);
    gguf_close(file);
    if (gguf_is_image(copy, size)) {
        status = kvf_weights_open_memory(copy, size, &weights, &error);
        check_error(status, &error);
        for (size_t i = 0; status == KVF_OK && i < kvf_weights_count(weights); i++)
            check_tensor(weights, i);
    }
    kvf_weights_close(weights);
    fuzz_require(heap_left() == 0);
    free(copy);
    return 0;
}
