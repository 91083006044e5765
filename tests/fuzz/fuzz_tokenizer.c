/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The input up to a zero byte is a tokenizer.json, the rest is text for it; the text is also given
 * to a tokenizer that is always there and uses every part. Whatever the input: ids are in range,
 * decoded text is UTF-8, streaming decodes the same, and nothing leaks when an allocation fails.
 */

#include "bpe.h"
#include "fuzz_heap.h"
#include "fuzz_input.h"
#include "tokenizer.h"
#include "utf8.h"
#include "watched_heap.h"

#include <stdio.h>
#include <string.h>

/* Byte-level BPE with the pattern of Llama 3, NFC, and added tokens with every flag. */
static kvf_tokenizer *open_fixed(void)
{
    static const char head[] =
        "{\"normalizer\":{\"type\":\"NFC\"},\"pre_tokenizer\":{\"type\":"
        "\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\",\"pattern\":{\"Regex\":"
        "\"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?\\\\p{L}+|"
        "\\\\p{N}{1,3}| ?[^\\\\s\\\\p{L}\\\\p{N}]+[\\\\r\\\\n]*|\\\\s*[\\\\r\\\\n]+|"
        "\\\\s+(?!\\\\S)|\\\\s+\"},\"behavior\":\"Isolated\"},{\"type\":"
        "\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":false}]},"
        "\"decoder\":{\"type\":\"ByteLevel\"},\"model\":{\"type\":\"BPE\","
        "\"ignore_merges\":true,\"vocab\":{";
    static const char tail[] =
        "\"th\":256,\"the\":257,\"\xc4\xa0the\":258,\"aa\":259,\"aaaa\":260},\"merges\":[\"t h\","
        "\"th e\",\"\xc4\xa0 the\",\"a a\",\"aa "
        "aa\"]},\"added_tokens\":[{\"id\":261,\"content\":\"<s>\","
        "\"special\":true},{\"id\":262,\"content\":\"<s\",\"lstrip\":true},{\"id\":263,\"content\":"
        "\"q\xcc\x87\",\"normalized\":true,\"rstrip\":true}]}";
    char text[8192];
    size_t used = (size_t)snprintf(text, sizeof text, "%s", head);
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t code = byte_alphabet_char((uint8_t)byte);
        used += (size_t)snprintf(text + used, sizeof text - used, "\"\\u%04x\":%u,", code, byte);
    }
    used += (size_t)snprintf(text + used, sizeof text - used, "%s", tail);
    kvf_tokenizer *tokenizer;
    kvf_error error = {.text = ""};
    if (kvf_tokenizer_parse(text, used, &tokenizer, &error) != KVF_OK) {
        fprintf(stderr, "%s\n", error.text);
        abort();
    }
    return tokenizer;
}

static void check_text(const kvf_tokenizer *tokenizer, const char *text, size_t size)
{
    kvf_token_ids ids = {0};
    kvf_text whole = {0};
    kvf_text streamed = {0};
    kvf_error error = {.text = ""};
    kvf_status status = kvf_tokenizer_encode(tokenizer, text, size, true, &ids, &error);
    fuzz_require(status == KVF_OK || (error.status == status && ids.count == 0));
    fuzz_require(status != KVF_OK || utf8_valid_prefix(text, size) == size);
    for (size_t i = 0; i < ids.count; i++)
        fuzz_require(ids.ids[i] < kvf_tokenizer_size(tokenizer));
    if (kvf_tokenizer_decode(tokenizer, ids.ids, ids.count, false, &whole, &error) == KVF_OK) {
        fuzz_require(utf8_valid_prefix(whole.bytes, whole.size) == whole.size);
        kvf_token_stream stream = {.tokenizer = tokenizer};
        for (size_t i = 0; i < ids.count && status == KVF_OK; i++)
            status = kvf_token_stream_push(&stream, ids.ids[i], &streamed, &error);
        if (status == KVF_OK)
            status = kvf_token_stream_finish(&stream, &streamed, &error);
        fuzz_require(status != KVF_OK ||
                     (whole.size == streamed.size &&
                      (whole.size == 0 || memcmp(whole.bytes, streamed.bytes, whole.size) == 0)));
    }
    kvf_token_ids_free(&ids);
    kvf_text_free(&whole);
    kvf_text_free(&streamed);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static kvf_tokenizer *fixed; /* opened once: opening costs more than most texts */
    if (fixed == NULL)
        fixed = open_fixed();
    const char *json = (const char *)data;
    const char *zero = size != 0 ? memchr(json, '\0', size) : NULL;
    size_t json_bytes = zero != NULL ? (size_t)(zero - json) : size;
    const char *text = zero != NULL ? zero + 1 : "a <s> b";
    size_t text_bytes = zero != NULL ? size - json_bytes - 1 : strlen(text);
    heap h = {.fail_at = fuzz_heap_choose(data, size)};
    heap_watch(&h);
    kvf_tokenizer *tokenizer;
    kvf_error error = {.text = ""};
    kvf_status status = kvf_tokenizer_parse(json, json_bytes, &tokenizer, &error);
    fuzz_require((status == KVF_OK) == (tokenizer != NULL));
    if (status == KVF_OK)
        check_text(tokenizer, text, text_bytes);
    else
        fuzz_require(error.status == status && error.text[0] != '\0');
    kvf_tokenizer_close(tokenizer);
    fuzz_require(heap_left() == 0);
    check_text(fixed, text, text_bytes);
    return 0;
}
