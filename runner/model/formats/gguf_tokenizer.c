/* SPDX-License-Identifier: Apache-2.0 */

/* See the header. */

#include "gguf_parts.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define TOKENS "tokenizer.ggml.tokens"

/* Kinds of tokens that are never made of others. */
enum { KIND_CONTROL = 3, KIND_USER_DEFINED = 4 };

/* ---- how text is cut ---- */

#define LLAMA3_WORDS                                                                               \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}|"                      \
    " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define QWEN2_WORDS                                                                                \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}|"                           \
    " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define UPPER "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]"
#define LOWER "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
#define TEKKEN_WORDS                                                                               \
    "[^\\r\\n\\p{L}\\p{N}]?" UPPER "*" LOWER "+|[^\\r\\n\\p{L}\\p{N}]?" UPPER "+" LOWER "*|"       \
    "\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
/* A pipeline by the file's name for it, tokenizer.ggml.pre. */
typedef struct pipeline {
    const char *pre;
    const char *split;   /* an expression that isolates its matches, or NULL */
    bool has_gpt2_words; /* then GPT-2's own expression follows */
    bool nfc, ignore_merges;
    bool adds_bos; /* where the file does not say */
} pipeline;

#define LLAMA3(name)                                                                               \
    {                                                                                              \
        .pre = (name), .split = LLAMA3_WORDS, .ignore_merges = true, .adds_bos = true              \
    }
#define GPT2(name)                                                                                 \
    {                                                                                              \
        .pre = (name), .has_gpt2_words = true                                                      \
    }
#define DIGITS(name)                                                                               \
    {                                                                                              \
        .pre = (name), .split = "\\p{N}", .has_gpt2_words = true                                   \
    }

/* Names that llama.cpp gives one expression are one here; it composes no characters. */
static const pipeline pipelines[] = {
    LLAMA3("llama-bpe"),
    LLAMA3("llama-v3"),
    LLAMA3("llama3"),
    LLAMA3("falcon3"),
    LLAMA3("pixtral"),
    LLAMA3("midm-2.0"),
    {.pre = "qwen2", .split = QWEN2_WORDS, .nfc = true},
    {.pre = "deepseek-r1-qwen", .split = QWEN2_WORDS, .nfc = true},
    {.pre = "kormo", .split = QWEN2_WORDS},
    {.pre = "megrez", .split = QWEN2_WORDS},
    {.pre = "tekken", .split = TEKKEN_WORDS, .ignore_merges = true, .adds_bos = true},
    DIGITS("smollm"),
    DIGITS("minerva-7b"),
    GPT2("gpt-2"),
    GPT2("a.x-4.0"),
    GPT2("mellum"),
    GPT2("trillion"),
};

#define PIPELINES (sizeof pipelines / sizeof *pipelines)

static const pipeline *find_pipeline(gguf_writer *w)
{
    static const char model[] = "tokenizer.ggml.model", pre[] = "tokenizer.ggml.pre";
    const gguf_string *kind = gguf_text(w, model), *name = gguf_text(w, pre);
    if (!kind || !gguf_string_is(*kind, "gpt2"))
        gguf_refuse(
            w, model,
            "\"gpt2\" (byte-level BPE) is supported; give --token-ids, or use llama.cpp with "
            "kvferry-llama");
    char fix[256] = "supported are ";
    for (size_t i = 0; i < PIPELINES; i++) {
        if (name && gguf_string_is(*name, pipelines[i].pre))
            return &pipelines[i];
        const size_t used = strlen(fix);
        snprintf(fix + used, sizeof fix - used, "%s%s", i == 0 ? "" : ", ", pipelines[i].pre);
    }
    gguf_refuse(w, pre, fix);
    return &pipelines[0];
}

/* ---- tokens ---- */

/* An id below the number of tokens; false if it is absent. */
static bool read_id(gguf_writer *w, const char *key, uint64_t *id)
{
    const gguf_value *value = gguf_find(w->file, key);
    const gguf_value *tokens = gguf_array(w, TOKENS, GGUF_STRING);
    if (!value || !tokens)
        return false;
    if (gguf_natural(value, id) && *id < tokens->count)
        return true;
    gguf_reject(w, key, "the number of a token");
    return false;
}

/* The spelling of an id that read_id gave. */
static gguf_string token_of(gguf_writer *w, uint64_t id)
{
    const gguf_value *tokens = gguf_find(w->file, TOKENS);
    const char *at = tokens->as.elements;
    gguf_string token = {at, 0};
    for (uint64_t i = 0; i <= id; i++)
        token = gguf_element(tokens, &at).as.string;
    return token;
}

static void put_added(gguf_writer *w, const gguf_value *tokens)
{
    const gguf_value *kinds = gguf_array(w, "tokenizer.ggml.token_type", GGUF_I32);
    const char *comma = "";
    if (kinds && kinds->count != tokens->count)
        gguf_reject(w, "tokenizer.ggml.token_type", "as long as " TOKENS);
    if (w->status != KVF_OK)
        return;
    const char *token_at = tokens->as.elements, *kind_at = kinds->as.elements;
    gguf_put(w, ",\"added_tokens\":[");
    for (uint64_t i = 0; i < tokens->count && w->status == KVF_OK; i++) {
        const gguf_string token = gguf_element(tokens, &token_at).as.string;
        const int64_t kind = gguf_element(kinds, &kind_at).as.integer;
        if (kind != KIND_CONTROL && kind != KIND_USER_DEFINED)
            continue;
        gguf_put(w, "%s{\"id\":%" PRIu64 ",\"content\":", comma, i);
        gguf_put_string(w, token);
        gguf_put(w, ",\"normalized\":false,\"special\":%s}",
                 kind == KIND_USER_DEFINED ? "false" : "true");
        comma = ",";
    }
    gguf_put(w, "]");
}

static void put_vocabulary(gguf_writer *w, const gguf_value *tokens)
{
    const char *at = tokens->as.elements;
    gguf_put(w, "\"vocab\":{");
    for (uint64_t i = 0; i < tokens->count && w->status == KVF_OK; i++) {
        gguf_put_string(w, gguf_element(tokens, &at).as.string);
        gguf_put(w, ":%" PRIu64 "%s", i, i + 1 < tokens->count ? "," : "");
    }
    gguf_put(w, "}");
}

static void put_model(gguf_writer *w, const pipeline *p, const gguf_value *tokens)
{
    const gguf_value *merges = gguf_array(w, "tokenizer.ggml.merges", GGUF_STRING);
    if (w->status != KVF_OK)
        return;
    gguf_put(w, ",\"model\":{\"type\":\"BPE\",\"ignore_merges\":%s,",
             p->ignore_merges ? "true" : "false");
    put_vocabulary(w, tokens);
    gguf_put(w, ",\"merges\":[");
    const char *at = merges->as.elements;
    for (uint64_t i = 0; i < merges->count && w->status == KVF_OK; i++) {
        gguf_put_string(w, gguf_element(merges, &at).as.string);
        gguf_put(w, "%s", i + 1 < merges->count ? "," : "");
    }
    gguf_put(w, "]}");
}

/* ---- tokenizer.json ---- */

static void put_split(gguf_writer *w, const pipeline *p)
{
    gguf_put(w, ",\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[");
    if (p->split) {
        gguf_put(w, "{\"type\":\"Split\",\"behavior\":\"Isolated\",\"pattern\":{\"Regex\":");
        gguf_put_string(w, (gguf_string){p->split, strlen(p->split)});
        gguf_put(w, "}},");
    }
    gguf_put(w, "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":%s}]}",
             p->has_gpt2_words ? "true" : "false");
}

static void put_piece(gguf_writer *w, const char *key, uint64_t *id, const char *comma)
{
    gguf_put(w, "%s{\"SpecialToken\":{\"id\":\"%s\"}}", comma, key);
    if (!read_id(w, key, id))
        gguf_reject(w, key, "the number of a token, for the tokenizer adds it");
}

/* Tokens that the tokenizer puts around a text. */
static void put_frame(gguf_writer *w, const pipeline *p)
{
    static const char bos[] = "tokenizer.ggml.bos_token_id", eos[] = "tokenizer.ggml.eos_token_id";
    uint64_t begin = 0, end = 0;
    const bool adds_bos =
        gguf_flag(w, "tokenizer.ggml.add_bos_token", p->adds_bos && gguf_find(w->file, bos));
    const bool adds_eos = gguf_flag(w, "tokenizer.ggml.add_eos_token", false);
    gguf_put(w, ",\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[");
    if (adds_bos)
        put_piece(w, bos, &begin, "");
    gguf_put(w, "%s{\"Sequence\":{\"id\":\"A\"}}", adds_bos ? "," : "");
    if (adds_eos)
        put_piece(w, eos, &end, ",");
    gguf_put(w, "],\"special_tokens\":{\"%s\":{\"ids\":[%" PRIu64 "]}", bos, begin);
    gguf_put(w, ",\"%s\":{\"ids\":[%" PRIu64 "]}}}", eos, end);
}

void gguf_write_tokenizer(gguf_writer *w)
{
    const pipeline *p = find_pipeline(w);
    const gguf_value *tokens = gguf_array(w, TOKENS, GGUF_STRING);
    if (w->status != KVF_OK)
        return;
    gguf_put(w, "{\"version\":\"1.0\"");
    put_frame(w, p);
    put_added(w, tokens);
    gguf_put(w, ",\"decoder\":{\"type\":\"ByteLevel\"}");
    if (p->nfc)
        gguf_put(w, ",\"normalizer\":{\"type\":\"NFC\"}");
    put_split(w, p);
    put_model(w, p, tokens);
    gguf_put(w, "}");
}

/* ---- tokenizer_config.json ---- */

void gguf_write_tokenizer_config(gguf_writer *w)
{
    static const char *const ids[][2] = {{"tokenizer.ggml.bos_token_id", "bos_token"},
                                         {"tokenizer.ggml.eos_token_id", "eos_token"},
                                         {"tokenizer.ggml.unknown_token_id", "unk_token"},
                                         {"tokenizer.ggml.padding_token_id", "pad_token"}};
    const gguf_string *chat = gguf_text(w, "tokenizer.chat_template");
    const char *comma = "";
    gguf_put(w, "{");
    for (size_t i = 0; i < sizeof ids / sizeof *ids; i++) {
        uint64_t id;
        if (!gguf_find(w->file, ids[i][0]) || !read_id(w, ids[i][0], &id))
            continue;
        gguf_put(w, "%s\"%s\":", comma, ids[i][1]);
        gguf_put_string(w, token_of(w, id));
        comma = ",";
    }
    if (chat) {
        gguf_put(w, "%s\"chat_template\":", comma);
        gguf_put_string(w, *chat);
    }
    gguf_put(w, "}");
}
