/* SPDX-License-Identifier: Apache-2.0 */

/*
 * GGUF files that lie, are cut short, or hold what the runner cannot do: refused with file, field
 * or tensor, value and fix, without a leak. The replay of fuzz_gguf cuts files at every byte and
 * lets every allocation fail.
 */

#include "common/text.h"
#include "gguf_image.h"
#include "gguf_parts.h"
#include "model_fixture.h"
#include "refusals.h"
#include "tokenizer.h"
#include "unit.h"
#include "watched_heap.h"

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

/* All but the field or tensor @p without, which may be NULL. */
static bool takes(const char *without, const char *name)
{
    return !without || strcmp(without, name) != 0;
}

static void add_tokenizer(gguf_image *image, const char *without)
{
    static const char *const texts[][2] = {{"general.architecture", "llama"},
                                           {"tokenizer.ggml.model", "gpt2"},
                                           {"tokenizer.ggml.pre", "smollm"}};
    static const char *const tokens[] = {"<s>", "a", "b", "ab"};
    static const char *const merges[] = {"a b"};
    static const int32_t kinds[] = {3, 1, 1, 1};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        if (takes(without, texts[i][0]))
            gguf_image_text(image, texts[i][0], texts[i][1]);
    if (takes(without, "tokenizer.ggml.tokens"))
        gguf_image_texts(image, "tokenizer.ggml.tokens", tokens, 4);
    if (takes(without, "tokenizer.ggml.token_type"))
        gguf_image_i32s(image, "tokenizer.ggml.token_type", kinds, 4);
    if (takes(without, "tokenizer.ggml.merges"))
        gguf_image_texts(image, "tokenizer.ggml.merges", merges, 1);
    if (takes(without, "tokenizer.ggml.bos_token_id"))
        gguf_image_u32(image, "tokenizer.ggml.bos_token_id", 0);
}

static gguf_image small_model(const char *without)
{
    static const char data[64 * 64];
    gguf_image image = {0};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        if (takes(without, counts[i].key))
            gguf_image_u32(&image, counts[i].key, counts[i].value);
    if (takes(without, "llama.attention.layer_norm_rms_epsilon"))
        gguf_image_f32(&image, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
    add_tokenizer(&image, without);
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++) {
        const uint64_t numbers = tensors[i].shape[0] * (tensors[i].rank == 2 ? 64 : 1);
        if (takes(without, tensors[i].name))
            gguf_image_tensor(
                &image, tensors[i].name, tensors[i].type, tensors[i].rank, tensors[i].shape, data,
                (size_t)(tensors[i].type == IMAGE_F32 ? numbers * 4 : numbers / 32 * 18));
    }
    return image;
}

/* Reads all of a file in memory: the first failure. */
static kvf_status read_all(const void *bytes, size_t size, kvf_error *error)
{
    static const char *const parts[] = {"config.json", "tokenizer.json", "tokenizer_config.json"};
    gguf *file;
    kvf_weights *weights = NULL;
    kvf_model_config config;
    kvf_tokenizer *tokenizer = NULL;
    kvf_text text[3] = {{0}};
    KVF_TRY(gguf_open_memory(bytes, size, &file, error));
    kvf_status status = KVF_OK;
    for (size_t i = 0; i < 3 && status == KVF_OK; i++)
        status = gguf_write_part(file, parts[i], &text[i], error);
    if (status == KVF_OK)
        status = kvf_model_config_parse(text[0].bytes, text[0].size, NULL, 0, &config, error);
    if (status == KVF_OK)
        status = gguf_model_finish(file, &config, error);
    if (status == KVF_OK)
        status = kvf_tokenizer_parse(text[1].bytes, text[1].size, &tokenizer, error);
    if (status == KVF_OK)
        status = kvf_weights_open_memory(bytes, size, &weights, error);
    for (size_t i = 0; status == KVF_OK && i < kvf_weights_count(weights); i++)
        status = kvf_weights_load(kvf_weights_at(weights, i), 2, error);
    kvf_weights_close(weights);
    kvf_tokenizer_close(tokenizer);
    for (size_t i = 0; i < 3; i++)
        kvf_text_free(&text[i]);
    gguf_close(file);
    return status;
}

TEST(reads_the_small_model)
{
    kvf_error error = {0};
    gguf_image image = small_model(NULL);
    size_t size;
    void *bytes = gguf_image_make(&image, &size);
    fixture_must(read_all(bytes, size, &error), &error);
    free(bytes);
    gguf_image_free(&image);
}

/* ---- what is refused ---- */

/* TYPE KEY VALUE, in place of the field or beside the others. */
static void add_field(gguf_image *image, const char *type, const char *key, const char *value)
{
    const double number = kvf_real_of(value, NULL);
    const uint8_t flag = (uint8_t)strtoul(value, NULL, 10);
    if (strcmp(type, "u32") == 0)
        gguf_image_u32(image, key, (uint32_t)strtoul(value, NULL, 10));
    else if (strcmp(type, "f32") == 0)
        gguf_image_f32(image, key, (float)number);
    else if (strcmp(type, "bool") == 0)
        gguf_image_raw(image, key, 7, &flag, 1);
    else if (strcmp(type, "text") == 0)
        gguf_image_text(image, key, value);
    else if (strcmp(type, "i32s") == 0)
        gguf_image_i32s(image, key, (const int32_t[]){1, 1}, 2);
    else
        fail_msg("what is %s?", type);
}

/* TYPE DIMENSION,DIMENSION NAME; no dimensions are a dash. */
static void add_tensor(gguf_image *image, const char *type, char *shape)
{
    static const char zeros[256];
    const char *name = refusals_value(shape);
    uint64_t dimensions[4];
    uint32_t rank = 0;
    for (char *at = shape; *at != '-' && *at != '\0'; at += *at == ',')
        dimensions[rank++] = strtoull(at, &at, 10);
    gguf_image_tensor(image, name, (uint32_t)strtoul(type, NULL, 10), rank, dimensions, zeros,
                      sizeof zeros);
}

/*
 *     without NAME           a field or tensor is absent
 *     again KEY              a field is there twice
 *     value TYPE BYTES       of the field x, as it lies in the file
 *     tensor TYPE SHAPE NAME
 *     offset NUMBER          of the last tensor
 *     bytes AT BYTES         of the file
 *     u32 KEY NUMBER         and so on: a field has another value
 */
static kvf_status read_row(void *user, char *change, size_t size, kvf_error *error)
{
    const char *end = change + size;
    char *key = refusals_value(change), *value = refusals_value(key);
    const bool is_field = strstr("u32 f32 bool text i32s", change) != NULL;
    heap h = {0};
    gguf_image image = small_model(is_field || strcmp(change, "without") == 0 ? key : NULL);
    const uint64_t number = strtoull(key, NULL, 10);
    if (strcmp(change, "again") == 0)
        gguf_image_u32(&image, key, 1);
    else if (strcmp(change, "value") == 0)
        gguf_image_raw(&image, "x", (uint32_t)number, value, (size_t)(end - value));
    else if (strcmp(change, "tensor") == 0)
        add_tensor(&image, key, value);
    else if (strcmp(change, "offset") == 0) /* the last eight bytes of its entry */
        memcpy(image.tensors.bytes + image.tensors.size - 8, &number, 8);
    else if (is_field)
        add_field(&image, change, key, value);
    char *bytes = gguf_image_make(&image, &size);
    if (strcmp(change, "bytes") == 0)
        memcpy(bytes + number, value, (size_t)(end - value));
    heap_watch(&h);
    const kvf_status status = read_all(bytes, size, error);
    assert_int_equal(heap_left(), 0);
    free(bytes);
    gguf_image_free(&image);
    return status;
}

TEST(refuses_what_is_wrong)
{
    refusals_check(&(refusals){.path = "tests/model/gguf.refusals", .call = read_row});
}

/* ---- files ---- */

TEST(refuses_other_files)
{
    char *directory = fixture_directory_create(), path[1024];
    kvf_error error = {0};
    kvf_model_config config;
    kvf_weights *weights;
    kvf_tokenizer *tokenizer;
    fixture_write_text(directory, "x.txt", "hello, this is no model");
    snprintf(path, sizeof path, "%s/x.txt", directory);
    fixture_expect(kvf_model_config_read(path, &config, &error), &error, KVF_CORRUPT,
                   "x.txt is no GGUF file: its first bytes are not \"GGUF\"; give a GGUF file or a "
                   "directory");
    fixture_expect(kvf_weights_open(path, &weights, &error), &error, KVF_CORRUPT, "x.txt is");
    fixture_expect(kvf_tokenizer_open(path, &tokenizer, &error), &error, KVF_CORRUPT, "x.txt");
    fixture_expect(kvf_model_config_read("/nowhere/z.gguf", &config, &error), &error, KVF_SYSTEM,
                   "/nowhere/z.gguf cannot be opened: No such file");
    gguf_image image = small_model("llama.block_count");
    gguf_image_u32(&image, "llama.block_count", 3000);
    gguf_image_write(&image, directory, "y.gguf");
    snprintf(path, sizeof path, "%s/y.gguf", directory);
    fixture_expect(kvf_model_config_read(path, &config, &error), &error, KVF_CORRUPT,
                   "y.gguf as config.json: num_hidden_layers is 3000");
    gguf_image_free(&image);
    fixture_directory_remove(directory);
}
