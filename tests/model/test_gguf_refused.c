/* SPDX-License-Identifier: Apache-2.0 */

/*
 * GGUF files that lie, are cut short, split wrongly, or hold what the runner cannot do: refused
 * with file, field or tensor, value and fix, without a leak, whichever allocation fails.
 */

#include "gguf_image.h"
#include "gguf_model.h"
#include "model_fixture.h"
#include "tokenizer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <setjmp.h>
// clang-format off
#include <cmocka.h>
// clang-format on

/* A model of one layer, head_dim 64, as small as it can be, and its tokenizer. */
static const struct {
    const char *key;
    uint32_t value;
} counts[] = {{"llama.block_count", 1},          {"llama.context_length", 128},
              {"llama.embedding_length", 64},    {"llama.feed_forward_length", 32},
              {"llama.attention.head_count", 1}, {"llama.rope.dimension_count", 64}};

static const struct {
    const char *name;
    uint32_t type, rank;
    uint64_t shape[2];
} tensors[] = {
    {"token_embd.weight", IMAGE_Q4_0, 2, {4, 64}},    {"output_norm.weight", IMAGE_F32, 1, {64}},
    {"blk.0.attn_norm.weight", IMAGE_F32, 1, {64}},   {"blk.0.ffn_norm.weight", IMAGE_F32, 1, {64}},
    {"blk.0.attn_q.weight", IMAGE_Q4_0, 2, {64, 64}},
};

/* Everything but the fields and tensors in @p without, which ends with NULL. */
static bool is_left_out(const char *const *without, const char *name)
{
    for (; without && *without; without++)
        if (strcmp(*without, name) == 0)
            return true;
    return false;
}

static void add_tokenizer(gguf_image *image, const char *const *without)
{
    static const char *const tokens[] = {"<s>", "a", "b", "ab"};
    static const char *const merges[] = {"a b"};
    static const int32_t kinds[] = {3, 1, 1, 1};
    if (!is_left_out(without, "tokenizer.ggml.model"))
        gguf_image_text(image, "tokenizer.ggml.model", "gpt2");
    if (!is_left_out(without, "tokenizer.ggml.pre"))
        gguf_image_text(image, "tokenizer.ggml.pre", "smollm");
    if (!is_left_out(without, "tokenizer.ggml.tokens"))
        gguf_image_texts(image, "tokenizer.ggml.tokens", tokens, 4);
    if (!is_left_out(without, "tokenizer.ggml.token_type"))
        gguf_image_i32s(image, "tokenizer.ggml.token_type", kinds, 4);
    if (!is_left_out(without, "tokenizer.ggml.merges"))
        gguf_image_texts(image, "tokenizer.ggml.merges", merges, 1);
    if (!is_left_out(without, "tokenizer.ggml.bos_token_id"))
        gguf_image_u32(image, "tokenizer.ggml.bos_token_id", 0);
}

static gguf_image small_model(const char *const *without)
{
    static const char data[64 * 64];
    gguf_image image = {0};
    if (!is_left_out(without, "general.architecture"))
        gguf_image_text(&image, "general.architecture", "llama");
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        if (!is_left_out(without, counts[i].key))
            gguf_image_u32(&image, counts[i].key, counts[i].value);
    if (!is_left_out(without, "llama.attention.layer_norm_rms_epsilon"))
        gguf_image_f32(&image, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
    add_tokenizer(&image, without);
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++) {
        const uint64_t numbers = tensors[i].shape[0] * (tensors[i].rank == 2 ? 64 : 1);
        if (!is_left_out(without, tensors[i].name))
            gguf_image_tensor(
                &image, tensors[i].name, tensors[i].type, tensors[i].rank, tensors[i].shape, data,
                (size_t)(tensors[i].type == IMAGE_F32 ? numbers * 4 : numbers / 32 * 18));
    }
    return image;
}

/* Reads all of a file in memory: the first failure. */
static kvf_status read_all(const void *bytes, size_t size, const kvf_allocator *allocator,
                           kvf_error *error)
{
    static const char *const parts[] = {"config.json", "tokenizer.json", "tokenizer_config.json"};
    gguf *file;
    kvf_weights *weights = NULL;
    kvf_model_config config;
    kvf_tokenizer *tokenizer = NULL;
    kvf_text text[3] = {{0}};
    KVF_TRY(gguf_open_memory(bytes, size, allocator, &file, error));
    kvf_status status = KVF_OK;
    for (size_t i = 0; i < 3 && status == KVF_OK; i++)
        status = gguf_write_part(file, parts[i], allocator, &text[i], error);
    if (status == KVF_OK)
        status =
            kvf_model_config_parse(text[0].bytes, text[0].size, NULL, 0, allocator, &config, error);
    if (status == KVF_OK)
        status = gguf_model_finish(file, &config, error);
    if (status == KVF_OK)
        status = kvf_tokenizer_parse(text[1].bytes, text[1].size, allocator, &tokenizer, error);
    if (status == KVF_OK)
        status = kvf_weights_open_memory(bytes, size, allocator, &weights, error);
    for (size_t i = 0; status == KVF_OK && i < kvf_weights_count(weights); i++)
        status = kvf_weights_load(weights, kvf_weights_at(weights, i), 2, error);
    kvf_weights_close(weights);
    kvf_tokenizer_close(tokenizer);
    for (size_t i = 0; i < 3; i++)
        kvf_text_free(allocator, &text[i]);
    gguf_close(file);
    return status;
}

static kvf_status read_image(const gguf_image *image, kvf_error *error)
{
    fixture_heap heap = {0};
    const kvf_allocator allocator = fixture_allocator(&heap);
    size_t size;
    void *bytes = gguf_image_make(image, &size);
    const kvf_status status = read_all(bytes, size, &allocator, error);
    assert_int_equal(heap.live, 0);
    free(bytes);
    return status;
}

/* Frees the image. */
static void expect_refused(gguf_image *image, kvf_status status, const char *part)
{
    kvf_error error = {0};
    fixture_expect(read_image(image, &error), &error, status, part);
    gguf_image_free(image);
}

static void reads_the_small_model(void **state)
{
    (void)state;
    kvf_error error = {0};
    gguf_image image = small_model(NULL);
    if (read_image(&image, &error) != KVF_OK)
        fail_msg("%s", error.text);
    gguf_image_free(&image);
}

/* ---- fields ---- */

static void refuses_what_is_missing(void **state)
{
    static const struct {
        const char *name, *part;
    } cases[] = {
        {"general.architecture", "general.architecture is absent, but must be text"},
        {"llama.block_count", "llama.block_count is absent, but must be a whole number"},
        {"llama.context_length", "llama.context_length is absent"},
        {"llama.embedding_length", "llama.embedding_length is absent"},
        {"llama.feed_forward_length", "llama.feed_forward_length is absent"},
        {"llama.attention.head_count", "llama.attention.head_count is absent"},
        {"llama.attention.layer_norm_rms_epsilon", "rms_epsilon is absent, but must be a finite"},
        {"token_embd.weight", "tensor token_embd.weight is missing"},
        {"tokenizer.ggml.model", "tokenizer.ggml.model is absent; \"gpt2\""},
        {"tokenizer.ggml.pre", "tokenizer.ggml.pre is absent; supported are llama-bpe"},
        {"tokenizer.ggml.tokens", "tokenizer.ggml.tokens is absent, but must be an array of texts"},
        {"tokenizer.ggml.token_type", "token_type is absent, but must be an array of I32"},
        {"tokenizer.ggml.merges", "tokenizer.ggml.merges is absent"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        kvf_error error = {0};
        gguf_image image = small_model((const char *const[]){cases[i].name, NULL});
        const kvf_status status = read_image(&image, &error);
        fixture_expect(status, &error, status == KVF_UNSUPPORTED ? status : KVF_CORRUPT,
                       cases[i].part);
        gguf_image_free(&image);
    }
}

/* A field is replaced by, or added with, another value. */
typedef struct wrong_field {
    const char *key;
    char kind; /* u, f, b, t, a: of the next */
    double number;
    const char *text;
    kvf_status status;
    const char *part;
} wrong_field;

static void add_field(gguf_image *image, const wrong_field *field)
{
    const int32_t two[2] = {1, 1};
    const uint8_t flag = field->kind == 'b' ? (uint8_t)field->number : 0;
    switch (field->kind) {
    case 'u':
        gguf_image_u32(image, field->key, (uint32_t)field->number);
        break;
    case 'f':
        gguf_image_f32(image, field->key, (float)field->number);
        break;
    case 'b':
        gguf_image_raw(image, field->key, 7, &flag, 1);
        break;
    case 't':
        gguf_image_text(image, field->key, field->text);
        break;
    default:
        gguf_image_i32s(image, field->key, two, 2);
    }
}

static void refuses_wrong_fields(void **state)
{
    static const wrong_field cases[] = {
        {"general.architecture", 't', 0, "mamba", KVF_UNSUPPORTED,
         "architecture is \"mamba\"; supported are llama, qwen2, qwen3"},
        {"general.architecture", 'u', 1, "", KVF_CORRUPT, "is 1, but must be text"},
        {"general.alignment", 'u', 24, "", KVF_CORRUPT, "is no multiple of general.alignment, 24"},
        {"general.alignment", 'u', 12, "", KVF_CORRUPT, "general.alignment is 12, but must be"},
        {"general.alignment", 't', 0, "32", KVF_CORRUPT, "must be a multiple of 8"},
        {"llama.block_count", 'u', 0, "", KVF_CORRUPT, "llama.block_count is 0, but must be"},
        {"llama.block_count", 'u', 4e9, "", KVF_CORRUPT, "llama.block_count is 4000000000"},
        {"llama.block_count", 'u', 5000, "", KVF_CORRUPT, "num_hidden_layers is 5000"},
        {"llama.attention.head_count_kv", 'a', 0, "", KVF_CORRUPT,
         "head_count_kv is an array of 2"},
        {"llama.attention.head_count", 'u', 7, "", KVF_CORRUPT,
         "key_length is absent, but must be"},
        {"llama.attention.key_length", 'u', 33, "", KVF_UNSUPPORTED, "dimension_count is 64"},
        {"llama.attention.value_length", 'u', 32, "", KVF_UNSUPPORTED, "value_length is 32"},
        {"llama.rope.dimension_count", 'u', 32, "", KVF_UNSUPPORTED, "dimension_count is 32; it"},
        {"llama.rope.scaling.type", 't', 0, "longrope", KVF_UNSUPPORTED,
         "rope_type is \"longrope\""},
        {"llama.rope.scaling.type", 't', 0, "linear", KVF_CORRUPT, "factor is absent"},
        {"llama.rope.freq_base", 'f', -1, "", KVF_CORRUPT, "rope_theta is -1"},
        {"llama.rope.freq_base", 't', 0, "x", KVF_CORRUPT,
         "freq_base is \"x\", but must be a finite"},
        {"llama.rope.scale_linear", 'f', 4, "", KVF_UNSUPPORTED, "scale_linear is 4"},
        {"llama.expert_count", 'u', 8, "", KVF_UNSUPPORTED, "expert_count is 8; mixtures"},
        {"llama.logit_scale", 'f', 2, "", KVF_UNSUPPORTED, "logit_scale is 2; scaled logits"},
        {"llama.attention.causal", 'b', 0, "", KVF_UNSUPPORTED, "causal is false"},
        {"llama.attention.causal", 'b', 2, "", KVF_CORRUPT, "is 2, but must be 0 or 1"},
        {"llama.attention.sliding_window", 'u', 100, "", KVF_UNSUPPORTED, "sliding_window is 100"},
        {"llama.attention.layer_norm_rms_epsilon", 'f', 1e40, "", KVF_CORRUPT, "epsilon is inf"},
        {"tokenizer.ggml.model", 't', 0, "llama", KVF_UNSUPPORTED, "model is \"llama\"; \"gpt2\""},
        {"tokenizer.ggml.pre", 't', 0, "default", KVF_UNSUPPORTED, "pre is \"default\"; supported"},
        {"tokenizer.ggml.tokens", 'a', 0, "", KVF_CORRUPT, "tokens is an array of 2, but must be"},
        {"tokenizer.ggml.token_type", 'a', 0, "", KVF_CORRUPT, "token_type is an array of 2"},
        {"tokenizer.ggml.bos_token_id", 'u', 4, "", KVF_CORRUPT, "bos_token_id"},
        {"tokenizer.ggml.add_eos_token", 'b', 1, "", KVF_CORRUPT, "eos_token_id is absent"},
        {"tokenizer.ggml.add_bos_token", 'u', 1, "", KVF_CORRUPT, "is 1, but must be true or"},
        {"tokenizer.chat_template", 'u', 1, "", KVF_CORRUPT,
         "chat_template is 1, but must be text"},
        {"split.count", 'u', 3, "", KVF_CORRUPT, "is part 1 of 3"},
        {"split.no", 'u', 1, "", KVF_CORRUPT, "is part 2 of 1"},
        {"split.tensors.count", 'u', 9, "", KVF_CORRUPT, "does not say 5"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        gguf_image image = small_model((const char *const[]){cases[i].key, NULL});
        add_field(&image, &cases[i]);
        expect_refused(&image, cases[i].status, cases[i].part);
    }
}

static void refuses_a_field_twice(void **state)
{
    (void)state;
    gguf_image image = small_model(NULL);
    gguf_image_u32(&image, "llama.block_count", 1);
    expect_refused(&image, KVF_CORRUPT, "field llama.block_count is there twice");
}

/* Values that say they are longer than the file. */
static void refuses_long_values(void **state)
{
    static const struct {
        uint32_t kind;
        const char *bytes;
        size_t size;
        kvf_status status;
        const char *part;
    } cases[] = {
        {8, "\xff\xff\xff\xff\xff\xff\xff\x7f", 8, KVF_CORRUPT, "needs 9223372036854775807 bytes"},
        {8, "\xff\xff\xff\xff\xff\xff\xff\xff", 8, KVF_CORRUPT, "needs 18446744073709551615 bytes"},
        {9, "\4\0\0\0\xff\xff\xff\xff\xff\xff\xff\xff", 12, KVF_CORRUPT,
         "has 18446744073709551615 elements"},
        {9, "\10\0\0\0\0\0\0\0\0\0\0\1", 12, KVF_CORRUPT, "has 72057594037927936 elements"},
        {9, "\10\0\0\0\2\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\xff\xff\xff\xff\0\0\0\0", 28, KVF_CORRUPT,
         "a string of an array at byte"},
        {9, "\11\0\0\0\1\0\0\0\0\0\0\0", 12, KVF_UNSUPPORTED, "is an array of arrays"},
        {9, "\15\0\0\0\1\0\0\0\0\0\0\0", 12, KVF_CORRUPT, "a value of type 13"},
        {9, "\7\0\0\0\2\0\0\0\0\0\0\0\1\2", 14, KVF_CORRUPT, "is 2, but must be 0 or 1"},
        {13, "", 0, KVF_CORRUPT, "x has a value of type 13, but types are 0 to 12"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        gguf_image image = small_model(NULL);
        gguf_image_raw(&image, "x", cases[i].kind, cases[i].bytes, cases[i].size);
        expect_refused(&image, cases[i].status, cases[i].part);
    }
}

/* ---- tensors ---- */

static void refuses_wrong_tensors(void **state)
{
    static const struct {
        const char *name;
        uint32_t type, rank;
        uint64_t shape[4];
        kvf_status status;
        const char *part;
    } cases[] = {
        {"blk.0.attn_q.bias",
         0,
         1,
         {4},
         KVF_UNSUPPORTED,
         "blk.0.attn_q.bias has no place in a llama"},
        {"blk.1.attn_k.weight",
         0,
         1,
         {4},
         KVF_UNSUPPORTED,
         "no place in a llama model of 1 layers"},
        {"blk.00.attn_k.weight", 0, 1, {4}, KVF_UNSUPPORTED, "blk.00.attn_k.weight has no place"},
        {"blk.0.ffn_gate_inp.weight", 0, 1, {4}, KVF_UNSUPPORTED, "use another model"},
        {"blk.0.attn_norm.weight", 0, 1, {4}, KVF_CORRUPT, "is in more than one file"},
        {"blk.0.attn_k.weight",
         10,
         1,
         {256},
         KVF_UNSUPPORTED,
         "has type 10 (Q2_K); supported are F32"},
        {"blk.0.attn_k.weight", 99, 1, {256}, KVF_UNSUPPORTED, "has type 99 (unknown)"},
        {"blk.0.attn_k.weight",
         2,
         2,
         {4, 48},
         KVF_CORRUPT,
         "rows of 48 numbers, but its type Q4_0"},
        {"blk.0.attn_k.weight", 12, 2, {4, 64}, KVF_CORRUPT, "Q4_K comes in blocks of 256"},
        {"blk.0.attn_k.weight", 0, 0, {0}, KVF_CORRUPT, "has 0 dimensions"},
        {"blk.0.attn_k.weight", 0, 2, {0, 64}, KVF_CORRUPT, "has a dimension of 0"},
        {"blk.0.attn_k.weight", 0, 2, {1ull << 40, 1ull << 40}, KVF_CORRUPT, "makes it too large"},
        {"blk.0.attn_k.weight", 0, 2, {64, 64}, KVF_CORRUPT, "has 16384 bytes at offset"},
        {"blk.0.attn_k.weight", 0, 2, {3, 4}, KVF_CORRUPT, "not as many rows as 1 heads"},
        {"blk.0.attn k.weight", 0, 1, {4}, KVF_CORRUPT, "names have 1 to 127 visible characters"},
        {"", 0, 1, {4}, KVF_CORRUPT, "has 0 bytes"},
        {"rope_freqs.weight", 0, 1, {31}, KVF_UNSUPPORTED, "31 numbers of type F32; 32 of F32"},
        {"rope_freqs.weight", 0, 1, {32}, KVF_CORRUPT, "has 0 at 0, but must have numbers above 0"},
    };
    static const char zeros[256];
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        gguf_image image = small_model(NULL);
        gguf_image_tensor(&image, cases[i].name, cases[i].type, cases[i].rank, cases[i].shape,
                          zeros, sizeof zeros);
        expect_refused(&image, cases[i].status, cases[i].part);
    }
}

/* Offsets are the last eight bytes of an entry. */
static void refuses_wrong_offsets(void **state)
{
    static const struct {
        uint64_t offset;
        const char *part;
    } cases[] = {{0, "tensors model.embed_tokens.weight and model.layers.0.self_attn.q_proj.weight "
                     "overlap"},
                 {8, "at offset 8, which is no multiple of general.alignment, 32"},
                 {1ull << 40, "at offset 1099511627776, but the file has"},
                 {UINT64_MAX - 31, "but the file has"}};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        gguf_image image = small_model(NULL);
        memcpy(image.tensors.bytes + image.tensors.size - 8, &cases[i].offset, 8);
        expect_refused(&image, KVF_CORRUPT, cases[i].part);
    }
}

/* ---- bytes ---- */

static void refuses_wrong_headers(void **state)
{
    static const struct {
        size_t at, size;
        const char *bytes;
        kvf_status status;
        const char *part;
    } cases[] = {
        {4, 4, "\1\0\0\0", KVF_UNSUPPORTED, "the version is 1; 2 and 3 are supported"},
        {4, 4, "\0\0\0\3", KVF_UNSUPPORTED, "(a big-endian file)"},
        {8, 8, "\xff\xff\xff\xff\xff\xff\xff\xff", KVF_CORRUPT, "18446744073709551615 tensors"},
        {16, 8, "\xff\xff\xff\xff\xff\xff\xff\x7f", KVF_CORRUPT, "9223372036854775807 fields"},
        {16, 8, "\0\0\0\0\0\0\0\0", KVF_CORRUPT, "in memory: "},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        kvf_error error = {0};
        gguf_image image = small_model(NULL);
        size_t size;
        char *bytes = gguf_image_make(&image, &size);
        memcpy(bytes + cases[i].at, cases[i].bytes, cases[i].size);
        fixture_expect(read_all(bytes, size, NULL, &error), &error, cases[i].status, cases[i].part);
        free(bytes);
        gguf_image_free(&image);
    }
}

/* Every proper prefix is refused, padding behind the last tensor aside. */
static void refuses_truncation(void **state)
{
    (void)state;
    gguf_image image = small_model(NULL);
    size_t size;
    char *bytes = gguf_image_make(&image, &size);
    for (size_t cut = 0; cut < size; cut++) {
        char *copy = malloc(cut != 0 ? cut : 1); /* exact, so that ASan sees an overrun */
        assert_non_null(copy);
        memcpy(copy, bytes, cut);
        kvf_error error = {0};
        assert_int_equal(read_all(copy, cut, NULL, &error), KVF_CORRUPT);
        free(copy);
        cut += cut > 2000 ? 30 : 0; /* the data are one case */
    }
    free(bytes);
    gguf_image_free(&image);
}

static void survives_failing_allocation(void **state)
{
    (void)state;
    gguf_image image = small_model(NULL);
    size_t size, fail_at = 0;
    void *bytes = gguf_image_make(&image, &size);
    for (bool reached = true; reached;) {
        fixture_heap heap = {.fail_at = ++fail_at};
        const kvf_allocator allocator = fixture_allocator(&heap);
        kvf_error error = {0};
        const kvf_status status = read_all(bytes, size, &allocator, &error);
        if (status != KVF_OK)
            fixture_expect(status, &error, KVF_OUT_OF_MEMORY, "could not be allocated");
        assert_int_equal(heap.live, 0);
        reached = heap.calls >= fail_at;
    }
    assert_true(fail_at > 30);
    free(bytes);
    gguf_image_free(&image);
}

/* ---- files ---- */

/* Fields in the first part, tensors in all. */
static void write_parts(const char *directory, uint32_t parts)
{
    static const char data[512];
    for (uint32_t i = 0; i < parts; i++) {
        char name[64], tensor[64];
        gguf_image image = i == 0 ? small_model(NULL) : (gguf_image){0};
        gguf_image_raw(&image, "split.no", 2, &(uint16_t){(uint16_t)i}, 2);
        gguf_image_raw(&image, "split.count", 2, &(uint16_t){(uint16_t)parts}, 2);
        if (i == 0)
            gguf_image_i32s(&image, "general.tags", NULL, 0);
        const int32_t total = (int32_t)(5 + parts - 1);
        gguf_image_raw(&image, "split.tensors.count", 5, &total, sizeof total);
        snprintf(tensor, sizeof tensor, "blk.0.ffn_%s.weight", i == 1 ? "up" : "gate");
        if (i > 0)
            gguf_image_tensor(&image, tensor, IMAGE_F16, 2, (uint64_t[]){i, 64}, data, i * 128u);
        snprintf(name, sizeof name, "m-%05u-of-%05u.gguf", i + 1, parts);
        gguf_image_write(&image, directory, name);
        gguf_image_free(&image);
    }
}

static void reads_split_files(void **state)
{
    (void)state;
    char *directory = fixture_directory_create(), path[1024], other[1024];
    kvf_error error = {0};
    kvf_weights *weights;
    write_parts(directory, 3);
    snprintf(path, sizeof path, "%s/m-00001-of-00003.gguf", directory);
    if (kvf_weights_open(path, NULL, &weights, &error) != KVF_OK)
        fail_msg("%s", error.text);
    assert_int_equal(kvf_weights_count(weights), 7);
    assert_int_equal(kvf_weights_get(weights, "model.layers.0.mlp.gate_proj.weight")->shape[0], 2);
    kvf_weights_close(weights);
    snprintf(other, sizeof other, "%s/m-00002-of-00003.gguf", directory);
    fixture_expect(kvf_weights_open(other, NULL, &weights, &error), &error, KVF_CORRUPT,
                   "m-00002-of-00003.gguf is part 2 of 3 (split.no + 1, split.count) and was taken "
                   "for part 1 of 1; give the first part");
    assert_int_equal(unlink(other), 0);
    fixture_expect(kvf_weights_open(path, NULL, &weights, &error), &error, KVF_SYSTEM,
                   "m-00002-of-00003.gguf cannot be opened");
    write_parts(directory, 2);
    snprintf(other, sizeof other, "%s/m-00002-of-00003.gguf", directory);
    snprintf(path, sizeof path, "%s/m-00002-of-00002.gguf", directory);
    assert_int_equal(rename(path, other), 0);
    snprintf(path, sizeof path, "%s/m-00001-of-00003.gguf", directory);
    fixture_expect(kvf_weights_open(path, NULL, &weights, &error), &error, KVF_CORRUPT,
                   "m-00002-of-00003.gguf is part 2 of 2");
    fixture_directory_remove(directory);
}

static void refuses_other_files(void **state)
{
    (void)state;
    char *directory = fixture_directory_create(), path[1024];
    kvf_error error = {0};
    kvf_model_config config;
    kvf_weights *weights;
    kvf_tokenizer *tokenizer;
    fixture_write_text(directory, "x.txt", "hello, this is no model");
    snprintf(path, sizeof path, "%s/x.txt", directory);
    fixture_expect(kvf_model_config_read(path, NULL, &config, &error), &error, KVF_CORRUPT,
                   "x.txt is no GGUF file: its first bytes are not \"GGUF\"; give a GGUF file or a "
                   "directory");
    fixture_expect(kvf_weights_open(path, NULL, &weights, &error), &error, KVF_CORRUPT, "x.txt is");
    fixture_expect(kvf_tokenizer_open(path, NULL, &tokenizer, &error), &error, KVF_CORRUPT,
                   "x.txt");
    fixture_expect(kvf_model_config_read("/nowhere/z.gguf", NULL, &config, &error), &error,
                   KVF_SYSTEM, "/nowhere/z.gguf cannot be opened: No such file");
    gguf_image image = small_model((const char *const[]){"llama.block_count", NULL});
    gguf_image_u32(&image, "llama.block_count", 3000);
    gguf_image_write(&image, directory, "y.gguf");
    snprintf(path, sizeof path, "%s/y.gguf", directory);
    fixture_expect(kvf_model_config_read(path, NULL, &config, &error), &error, KVF_CORRUPT,
                   "y.gguf as config.json: num_hidden_layers is 3000");
    gguf_image_free(&image);
    fixture_directory_remove(directory);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reads_the_small_model), cmocka_unit_test(refuses_what_is_missing),
        cmocka_unit_test(refuses_wrong_fields),  cmocka_unit_test(refuses_a_field_twice),
        cmocka_unit_test(refuses_long_values),   cmocka_unit_test(refuses_wrong_tensors),
        cmocka_unit_test(refuses_wrong_offsets), cmocka_unit_test(refuses_wrong_headers),
        cmocka_unit_test(refuses_truncation),    cmocka_unit_test(survives_failing_allocation),
        cmocka_unit_test(reads_split_files),     cmocka_unit_test(refuses_other_files),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
