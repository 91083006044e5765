/* SPDX-License-Identifier: Apache-2.0 */

/*
 * tokenizer.json to a kvf_tokenizer. Every object is checked against the list of fields that are
 * understood, so that nothing in a file is ignored that could change an id.
 */

#include "tokenizer_parts.h"

#include "normalize.h"

#include <stdio.h>
#include <string.h>

/* The pattern of GPT-2, which ByteLevel with use_regex stands for. */
#define GPT2_PATTERN                                                                               \
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"

/* ---- common ---- */

typedef struct part_field {
    const char *part; /* for messages */
    json_t *object;
} part_field;

static part_field part_of(json_t *root, const char *what, const char *field)
{
    return (part_field){what, json_object_get(root, field)};
}

static kvf_status unsupported(part_field part, const char *field, const char *fix, kvf_error *error)
{
    char shown[96];
    return model_fail(error, KVF_UNSUPPORTED, "%s.%s is %s; %s", part.part, field,
                      json_show(json_object_get(part.object, field), shown, sizeof shown), fix);
}

static kvf_status check_fields(part_field part, const char *const *known, kvf_error *error)
{
    return json_check_keys(part.object, part.part, known, error);
}

static kvf_status read_flag(part_field part, const char *field, bool fallback, bool *out,
                            kvf_error *error)
{
    return json_read_flag(part.object, part.part, field, fallback, out, error);
}

/* Parts that may be a Sequence: call read for each member, or for the part itself. */
typedef kvf_status (*read_part_fn)(kvf_tokenizer *tokenizer, part_field part, kvf_error *error);

static kvf_status read_sequence(kvf_tokenizer *tokenizer, part_field part, const char *list_field,
                                read_part_fn read, kvf_error *error)
{
    if (!part.object || json_is_null(part.object))
        return KVF_OK;
    if (!json_is_text(json_object_get(part.object, "type"), "Sequence"))
        return read(tokenizer, part, error);
    const char *const known[] = {"type", list_field, NULL};
    KVF_TRY(check_fields(part, known, error));
    json_t *list = json_object_get(part.object, list_field);
    if (!json_is_array(list))
        return model_fail(error, KVF_CORRUPT, "%s.%s is %s, not an array", part.part, list_field,
                          json_kind_name(list));
    json_t *member;
    size_t i;
    json_array_foreach (list, i, member)
        KVF_TRY(read(tokenizer, (part_field){part.part, member}, error));
    return KVF_OK;
}

/* ---- normaliser ---- */

static kvf_status read_normalizer(kvf_tokenizer *tokenizer, part_field part, kvf_error *error)
{
    static const char *const fields[] = {"type", NULL};
    KVF_TRY(check_fields(part, fields, error));
    if (!json_is_text(json_object_get(part.object, "type"), "NFC"))
        return unsupported(part, "type", "NFC is supported", error);
    tokenizer->nfc = true;
    return KVF_OK;
}

/* ---- pre-tokeniser ---- */

/* @p pattern [size]; NULL = white space. */
static kvf_status add_step(kvf_tokenizer *tokenizer, const char *pattern, size_t size,
                           kvf_error *error)
{
    if (tokenizer->byte_level_split || tokenizer->steps_count == TOKENIZER_STEPS_MAX)
        return model_fail(
            error, KVF_UNSUPPORTED,
            "tokenizer.json: pre_tokenizer: at most %u steps are supported, and ByteLevel "
            "must be the last",
            TOKENIZER_STEPS_MAX);
    if (pattern)
        KVF_TRY(regex_create(pattern, size, &tokenizer->steps[tokenizer->steps_count], error));
    tokenizer->steps_count++;
    return KVF_OK;
}

static kvf_status read_split(kvf_tokenizer *tokenizer, part_field part, kvf_error *error)
{
    static const char *const known[] = {"type", "pattern", "behavior", "invert", NULL};
    bool invert;
    KVF_TRY(check_fields(part, known, error));
    KVF_TRY(read_flag(part, "invert", false, &invert, error));
    if (invert)
        return unsupported(part, "invert", "only false is supported", error);
    if (!json_is_text(json_object_get(part.object, "behavior"), "Isolated"))
        return unsupported(part, "behavior", "Isolated is supported", error);
    json_t *pattern = json_object_get(part.object, "pattern");
    json_t *regex = json_object_get(pattern, "Regex");
    if (json_object_size(pattern) != 1 || !json_is_string(regex))
        return unsupported(part, "pattern", "{\"Regex\": …} is supported", error);
    return add_step(tokenizer, json_string_value(regex), json_string_length(regex), error);
}

/* Digits and numbers of every script stand alone, one by one or as they follow each other. */
static kvf_status read_digits(kvf_tokenizer *tokenizer, part_field part, kvf_error *error)
{
    static const char *const known[] = {"type", "individual_digits", NULL};
    bool individual;
    KVF_TRY(check_fields(part, known, error));
    KVF_TRY(read_flag(part, "individual_digits", false, &individual, error));
    const char *pattern = individual ? "\\p{N}" : "\\p{N}+";
    return add_step(tokenizer, pattern, strlen(pattern), error);
}

/* Fields of ByteLevel, wherever it stands. */
static const char *const byte_level_fields[] = {"type", "add_prefix_space", "trim_offsets",
                                                "use_regex", NULL};

static kvf_status read_byte_level(kvf_tokenizer *tokenizer, part_field part, kvf_error *error)
{
    bool prefix, use_regex;
    KVF_TRY(check_fields(part, byte_level_fields, error));
    KVF_TRY(read_flag(part, "add_prefix_space", true, &prefix, error));
    KVF_TRY(read_flag(part, "use_regex", true, &use_regex, error));
    if (prefix)
        return unsupported(part, "add_prefix_space", "only false is supported", error);
    if (use_regex)
        KVF_TRY(add_step(tokenizer, GPT2_PATTERN, sizeof GPT2_PATTERN - 1, error));
    if (tokenizer->byte_level_split)
        return model_fail(error, KVF_UNSUPPORTED,
                          "tokenizer.json: pre_tokenizer: ByteLevel is there twice");
    tokenizer->byte_level_split = true;
    return KVF_OK;
}

static kvf_status read_pre_tokenizer(kvf_tokenizer *tokenizer, part_field part, kvf_error *error)
{
    static const char *const known[] = {"type", NULL};
    json_t *type = json_object_get(part.object, "type");
    if (json_is_text(type, "Split"))
        return read_split(tokenizer, part, error);
    if (json_is_text(type, "ByteLevel"))
        return read_byte_level(tokenizer, part, error);
    if (json_is_text(type, "Digits"))
        return read_digits(tokenizer, part, error);
    if (json_is_object(part.object) && !json_is_text(type, "WhitespaceSplit"))
        return unsupported(part, "type",
                           "Sequence, Split, Digits, ByteLevel and WhitespaceSplit are supported",
                           error);
    KVF_TRY(check_fields(part, known, error));
    return add_step(tokenizer, NULL, 0, error);
}

/* ---- model ---- */

static kvf_status read_word_level(kvf_tokenizer *tokenizer, part_field part, kvf_error *error)
{
    static const char *const known[] = {"type", "vocab", "unk_token", NULL};
    KVF_TRY(check_fields(part, known, error));
    json_t *unknown = json_get_set(part.object, "unk_token");
    if (unknown && !json_is_string(unknown))
        return model_fail(error, KVF_CORRUPT, "tokenizer.json: model.unk_token is %s, not a string",
                          json_kind_name(unknown));
    tokenizer->unknown_id = VOCABULARY_NONE;
    if (unknown)
        tokenizer->unknown_id = vocabulary_find(&tokenizer->vocabulary, json_string_value(unknown),
                                                json_string_length(unknown));
    return KVF_OK;
}

static kvf_status read_bpe(kvf_tokenizer *tokenizer, part_field part, kvf_error *error)
{
    static const char *const known[] = {"type",
                                        "dropout",
                                        "unk_token",
                                        "continuing_subword_prefix",
                                        "end_of_word_suffix",
                                        "fuse_unk",
                                        "byte_fallback",
                                        "ignore_merges",
                                        "vocab",
                                        "merges",
                                        NULL};
    KVF_TRY(check_fields(part, known, error));
    if (!tokenizer->byte_level_split)
        return unsupported(
            part, "type",
            "it is supported with a ByteLevel pre_tokenizer; SentencePiece's runs in "
            "llama.cpp with kvferry-llama, or give token ids",
            error);
    tokenizer->is_bpe = true;
    return bpe_create(&tokenizer->bpe, part.object, &tokenizer->vocabulary, error);
}

static kvf_status read_model(kvf_tokenizer *tokenizer, part_field part, kvf_error *error)
{
    if (!json_is_object(part.object))
        return model_fail(error, KVF_CORRUPT, "tokenizer.json: model is %s, not an object",
                          json_kind_name(part.object));
    json_t *type = json_object_get(part.object, "type");
    bool word_level = json_is_text(type, "WordLevel");
    if (!word_level && !json_is_text(type, "BPE"))
        return unsupported(
            part, "type", "BPE and WordLevel are supported, so use another model or give token ids",
            error);
    KVF_TRY(
        vocabulary_create(&tokenizer->vocabulary, json_object_get(part.object, "vocab"), error));
    return word_level ? read_word_level(tokenizer, part, error) : read_bpe(tokenizer, part, error);
}

/* ---- post-processor ---- */

/* Append the ids that special_tokens gives for a name. */
static kvf_status add_frame(kvf_tokenizer *tokenizer, json_t *specials, json_t *name, bool before,
                            kvf_error *error)
{
    if (!json_is_string(name))
        return model_fail(error, KVF_CORRUPT,
                          "tokenizer.json: post_processor.single: a SpecialToken has no id");
    json_t *ids = json_object_get(json_object_get(specials, json_string_value(name)), "ids");
    if (!json_is_array(ids))
        return model_fail(error, KVF_CORRUPT,
                          "tokenizer.json: post_processor.special_tokens does not give the ids of "
                          "\"%.80s\"",
                          json_string_value(name));
    json_t *item;
    size_t i;
    json_array_foreach (ids, i, item) {
        uint64_t id;
        size_t *count = before ? &tokenizer->prefix_count : &tokenizer->suffix_count;
        if (!json_is_whole(item, UINT32_MAX, &id) || id >= tokenizer->size)
            return model_fail(
                error, KVF_CORRUPT,
                "tokenizer.json: post_processor.special_tokens: \"%.80s\" has an id that "
                "no token has",
                json_string_value(name));
        if (*count == TOKENIZER_FRAME_MAX)
            return model_fail(error, KVF_UNSUPPORTED,
                              "tokenizer.json: post_processor.single adds more than %u tokens",
                              TOKENIZER_FRAME_MAX);
        (before ? tokenizer->prefix : tokenizer->suffix)[(*count)++] = (uint32_t)id;
    }
    return KVF_OK;
}

static kvf_status read_template(kvf_tokenizer *tokenizer, part_field part, kvf_error *error)
{
    static const char *const known[] = {"type", "single", "pair", "special_tokens", NULL};
    KVF_TRY(check_fields(part, known, error));
    json_t *single = json_object_get(part.object, "single");
    if (!json_is_array(single))
        return model_fail(error, KVF_CORRUPT,
                          "tokenizer.json: post_processor.single is %s, not an array",
                          json_kind_name(single));
    if (tokenizer->prefix_count + tokenizer->suffix_count != 0)
        return model_fail(error, KVF_UNSUPPORTED,
                          "tokenizer.json: post_processor: TemplateProcessing is there twice");
    bool seen = false;
    json_t *piece;
    size_t i;
    json_array_foreach (single, i, piece) {
        json_t *special = json_object_get(piece, "SpecialToken");
        json_t *sequence = json_object_get(piece, "Sequence");
        if (special) {
            KVF_TRY(add_frame(tokenizer, json_object_get(part.object, "special_tokens"),
                              json_object_get(special, "id"), !seen, error));
        } else if (json_is_text(json_object_get(sequence, "id"), "A") && !seen) {
            seen = true;
        } else {
            return unsupported(part, "single", "special tokens around one sequence A are supported",
                               error);
        }
    }
    return seen ? KVF_OK : unsupported(part, "single", "it must have the sequence A", error);
}

static kvf_status read_post_processor(kvf_tokenizer *tokenizer, part_field part, kvf_error *error)
{
    json_t *type = json_object_get(part.object, "type");
    if (json_is_text(type, "TemplateProcessing"))
        return read_template(tokenizer, part, error);
    if (json_is_text(type, "ByteLevel") || !json_is_object(part.object))
        return check_fields(part, byte_level_fields,
                            error); /* changes offsets, which are not computed here */
    return unsupported(part, "type", "Sequence, TemplateProcessing and ByteLevel are supported",
                       error);
}

/* ---- decoder ---- */

static kvf_status read_decoder(kvf_tokenizer *tokenizer, part_field part, kvf_error *error)
{
    if (!part.object || json_is_null(part.object))
        return KVF_OK;
    if (json_is_object(part.object) &&
        !json_is_text(json_object_get(part.object, "type"), "ByteLevel"))
        return unsupported(part, "type", "ByteLevel and null are supported", error);
    tokenizer->byte_level_decoder = true;
    return check_fields(part, byte_level_fields, error);
}

/* ---- whole ---- */

static kvf_status index_added(kvf_tokenizer *tokenizer, kvf_error *error)
{
    tokenizer->size = tokenizer->vocabulary.size;
    for (size_t i = 0; i < tokenizer->added.count; i++)
        if (tokenizer->added.list[i].id >= tokenizer->size)
            tokenizer->size = tokenizer->added.list[i].id + 1;
    size_t bytes = (size_t)tokenizer->size * sizeof *tokenizer->added_of_id;
    tokenizer->added_of_id = model_alloc(bytes);
    if (!tokenizer->added_of_id)
        return model_out_of_memory(error, bytes, "added tokens");
    memset(tokenizer->added_of_id, 0xff, bytes);
    for (uint32_t i = 0; i < tokenizer->added.count; i++)
        tokenizer->added_of_id[tokenizer->added.list[i].id] = i;
    return KVF_OK;
}

static kvf_status check_whole(part_field root, kvf_error *error)
{
    static const char *const known[] = {
        "version",       "truncation",     "padding", "added_tokens", "normalizer",
        "pre_tokenizer", "post_processor", "decoder", "model",        NULL};
    KVF_TRY(check_fields(root, known, error));
    if (json_get_set(root.object, "truncation"))
        return unsupported(root, "truncation", "set it to null", error);
    if (json_get_set(root.object, "padding"))
        return unsupported(root, "padding", "set it to null", error);
    json_t *version = json_get_set(root.object, "version");
    if (version && !json_is_text(version, "1.0"))
        return unsupported(root, "version", "1.0 is supported", error);
    return KVF_OK;
}

kvf_status tokenizer_read(kvf_tokenizer *tokenizer, json_t *root, kvf_error *error)
{
    const part_field normalizer = part_of(root, "tokenizer.json: normalizer", "normalizer");
    const part_field splits = part_of(root, "tokenizer.json: pre_tokenizer", "pre_tokenizer");
    const part_field frame = part_of(root, "tokenizer.json: post_processor", "post_processor");
    KVF_TRY(check_whole((part_field){"tokenizer.json: the file", root}, error));
    KVF_TRY(read_sequence(tokenizer, normalizer, "normalizers", read_normalizer, error));
    KVF_TRY(read_sequence(tokenizer, splits, "pretokenizers", read_pre_tokenizer, error));
    KVF_TRY(read_model(tokenizer, part_of(root, "tokenizer.json: model", "model"), error));
    if (!tokenizer->is_bpe && tokenizer->byte_level_split)
        return model_fail(
            error, KVF_UNSUPPORTED,
            "tokenizer.json: WordLevel is supported without a ByteLevel pre_tokenizer");
    KVF_TRY(added_tokens_create(&tokenizer->added, json_object_get(root, "added_tokens"),
                                &tokenizer->vocabulary, tokenizer->nfc, error));
    KVF_TRY(index_added(tokenizer, error));
    KVF_TRY(read_sequence(tokenizer, frame, "processors", read_post_processor, error));
    return read_decoder(tokenizer, part_of(root, "tokenizer.json: decoder", "decoder"), error);
}

/* ---- tokenizer_config.json ---- */

typedef struct frame_flag {
    const char *flag, *token; /* fields */
    uint32_t *ids;
    size_t *count;
} frame_flag;

/* Tokens that are put before or after a text: the token, if the flag is true; without it, if false.
 */
static kvf_status read_frame_flag(kvf_tokenizer *tokenizer, json_t *root, frame_flag f,
                                  kvf_error *error)
{
    json_t *flag = json_get_set(root, f.flag), *token = json_get_set(root, f.token);
    uint32_t id;
    if (json_is_object(token))
        token = json_object_get(token, "content");
    if (!json_is_boolean(flag) || !json_is_string(token))
        return KVF_OK;
    const bool adds = json_is_true(flag);
    if (!kvf_tokenizer_find(tokenizer, json_string_value(token), &id))
        return !adds ? KVF_OK
                     : model_fail(error, KVF_CORRUPT,
                                  "tokenizer_config.json: %s is \"%.80s\", which is no token of "
                                  "tokenizer.json, and %s is true; correct one of them",
                                  f.token, json_string_value(token), f.flag);
    const bool added = *f.count == 1 && f.ids[0] == id;
    if (adds == added || (!adds && *f.count != 1))
        return KVF_OK;
    *f.count = adds;
    f.ids[0] = id;
    const size_t used = strlen(tokenizer->note);
    snprintf(tokenizer->note + used, sizeof tokenizer->note - used,
             "%s%s of tokenizer_config.json is %s: texts get %s \"%.40s\", unlike what "
             "tokenizer.json says",
             used ? "; " : "", f.flag, adds ? "true" : "false", adds ? "a" : "no",
             json_string_value(token));
    return KVF_OK;
}

kvf_status tokenizer_read_flags(kvf_tokenizer *tokenizer, json_t *root, kvf_error *error)
{
    KVF_TRY(read_frame_flag(
        tokenizer, root,
        (frame_flag){"add_bos_token", "bos_token", tokenizer->prefix, &tokenizer->prefix_count},
        error));
    return read_frame_flag(
        tokenizer, root,
        (frame_flag){"add_eos_token", "eos_token", tokenizer->suffix, &tokenizer->suffix_count},
        error);
}
