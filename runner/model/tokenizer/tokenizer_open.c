/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Opening a tokenizer: the files of a model that say what it is. See tokenizer.h.
 *
 * Knows files, and not what is in them (tokenizer_read.c).
 */

#include "tokenizer.h"

#include "model_memory.h"
#include "tokenizer_parts.h"

#define TOKENIZER_BYTES_MAX (256u << 20)

kvf_status kvf_tokenizer_parse(const char *json, size_t bytes, kvf_tokenizer **out,
                               kvf_error *error)
{
    *out = NULL;
    json_t *document;
    KVF_TRY(json_parse(json, bytes, "tokenizer.json", &document, error));
    kvf_tokenizer *tokenizer = model_alloc_zero(1, sizeof *tokenizer);
    if (!tokenizer) {
        json_decref(document);
        return model_out_of_memory(error, sizeof *tokenizer, "the tokenizer");
    }
    const kvf_status status = tokenizer_read(tokenizer, document, error);
    json_decref(document);
    if (status != KVF_OK) {
        kvf_tokenizer_close(tokenizer);
        return status;
    }
    *out = tokenizer;
    return KVF_OK;
}

/* Old folders have the tokenizer in another form only. */
static kvf_status check_is_there(const char *model, kvf_error *error)
{
    static const char *const others[] = {"tokenizer.model", "vocab.json", "tekken.json",
                                         "tiktoken.model"};
    for (size_t i = 0; i < 4 && !model_has_part(model, "tokenizer.json"); i++)
        if (model_has_part(model, others[i]))
            return model_fail(error, KVF_UNSUPPORTED,
                              "%.200s has %s and no tokenizer.json; write one: python3 -c 'import "
                              "sys; from transformers import AutoTokenizer as A; "
                              "A.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[1])' FOLDER",
                              model, others[i]);
    return KVF_OK;
}

/* A folder may have none; a GGUF file says the same in tokenizer.json. */
static kvf_status read_flags(const char *model, kvf_tokenizer *tokenizer, kvf_error *error)
{
    static const char config[] = "tokenizer_config.json";
    kvf_text text;
    json_t *document = NULL;
    if (!model_has_part(model, config))
        return KVF_OK;
    KVF_TRY(model_read_part(model, config, TOKENIZER_BYTES_MAX, &text, error));
    kvf_status status = json_parse(text.bytes, text.size, config, &document, error);
    if (status == KVF_OK)
        status = tokenizer_read_flags(tokenizer, document, error);
    json_decref(document);
    kvf_text_free(&text);
    return status;
}

kvf_status kvf_tokenizer_open(const char *model, kvf_tokenizer **out, kvf_error *error)
{
    kvf_text text;
    *out = NULL;
    KVF_TRY(check_is_there(model, error));
    KVF_TRY(model_read_part(model, "tokenizer.json", TOKENIZER_BYTES_MAX, &text, error));
    kvf_status status = kvf_tokenizer_parse(text.bytes, text.size, out, error);
    kvf_text_free(&text);
    if (status == KVF_OK)
        status = read_flags(model, *out, error);
    if (status != KVF_OK) {
        kvf_tokenizer_close(*out);
        *out = NULL;
    }
    return model_blame_part(model, status, error);
}
