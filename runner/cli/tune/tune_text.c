/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Pieces of text to tune on.
 *
 * It knows files and tokens, not models. Invariant: all pieces have the same length, and the same
 * files give the same pieces.
 */

#include "prompt.h"
#include "tune.h"

#include <string.h>

#define TEXT_BYTES_MAX (1u << 30)

/* Tokens of all texts, one after the other. */
typedef struct texts {
    kvf_token_ids ids;
    size_t starts[TUNE_TEXTS_MAX + 1];
    bool has_bos; /* the tokenizer begins texts with one; it is not in ids */
    uint32_t bos;
} texts;

static kvf_status read_text(const cli_tune *tune, uint32_t index, texts *t, kvf_error *error)
{
    kvf_text text = {0};
    const size_t first = t->ids.count;
    kvf_status status = model_read_file(tune->options.texts[index], TEXT_BYTES_MAX, &text, error);
    if (status == KVF_OK && text.size > 0) {
        kvf_error why = {0};
        status = kvf_tokenizer_encode(tune->tokenizer, text.bytes, text.size, true, &t->ids, &why);
        if (status != KVF_OK)
            status =
                model_fail(error, status, "%.200s: %.250s", tune->options.texts[index], why.text);
    }
    kvf_text_free(&text);
    if (status != KVF_OK)
        return status;
    if (tune->model.bos_known && t->ids.count > first && t->ids.ids[first] == tune->model.bos_id) {
        t->has_bos = true;
        t->bos = tune->model.bos_id;
        memmove(t->ids.ids + first, t->ids.ids + first + 1,
                (t->ids.count - first - 1) * sizeof *t->ids.ids);
        t->ids.count--;
    }
    return KVF_OK;
}

static size_t pieces_of(const texts *t, uint32_t text, size_t body)
{
    return (t->starts[text + 1] - t->starts[text]) / body;
}

static kvf_status push_piece(cli_tune *tune, const texts *t, size_t index, size_t body,
                             kvf_error *error)
{
    uint32_t text = 0;
    for (; index >= pieces_of(t, text, body); text++)
        index -= pieces_of(t, text, body);
    if (t->has_bos)
        KVF_TRY(kvf_token_ids_push(&tune->pieces, t->bos, error));
    return kvf_token_ids_append(&tune->pieces, t->ids.ids + t->starts[text] + index * body, body,
                                error);
}

static kvf_status make_pieces(cli_tune *tune, const texts *t, kvf_error *error)
{
    const cli_tune_options *o = &tune->options;
    const size_t body = o->tokens - (t->has_bos ? 1u : 0u);
    size_t total = 0, longest = 0;
    for (uint32_t i = 0; i < o->text_count; i++) {
        const size_t tokens = t->starts[i + 1] - t->starts[i];
        total += pieces_of(t, i, body);
        longest = tokens > longest ? tokens : longest;
    }
    if (total == 0)
        return model_fail(error, KVF_INVALID,
                          "the longest text has %zu tokens and --tokens is %u; give longer text or "
                          "fewer --tokens",
                          longest, o->tokens);
    tune->tuning.tokens = o->tokens;
    tune->tuning.samples = total < o->samples ? (uint32_t)total : o->samples;
    if (total < o->samples)
        fprintf(stderr,
                "kvferry: the text has %zu pieces of %u tokens; %zu samples instead of %u\n", total,
                o->tokens, total, o->samples);
    for (size_t i = 0; i < tune->tuning.samples; i++)
        KVF_TRY(push_piece(tune, t, i * total / tune->tuning.samples, body, error));
    return KVF_OK;
}

kvf_status cli_tune_read(cli_tune *tune, kvf_error *error)
{
    texts t = {0};
    kvf_status status = KVF_OK;
    if (tune->options.tokens > tune->model.positions_max)
        return model_fail(
            error, KVF_INVALID, "--tokens is %u, the model was made for %u (%s); give less",
            tune->options.tokens, tune->model.positions_max, tune->model.positions_by);
    for (uint32_t i = 0; status == KVF_OK && i < tune->options.text_count; i++) {
        status = read_text(tune, i, &t, error);
        t.starts[i + 1] = t.ids.count;
    }
    if (status == KVF_OK)
        status = cli_check_ids(&tune->model, &t.ids, error);
    if (status == KVF_OK)
        status = make_pieces(tune, &t, error);
    kvf_token_ids_free(&t.ids);
    return status;
}
