/* SPDX-License-Identifier: Apache-2.0 */

/*
 * GGUF files: blocks of every type have the bits that the format's own Python package gives them; a
 * model has the weights, the configuration and the tokenizer that its directory has. Refusals
 * are the business of test_gguf_refused.c.
 */

#include "common/random.h"
#include "gguf_image.h"
#include "gguf_parts.h"
#include "hostile_text.h"
#include "model_fixture.h"
#include "random_model.h"
#include "tokenizer.h"
#include "unit.h"
#include "utf8.h"

#include <inttypes.h>
#include <math.h>

#define BLOCKS 256u /* of make_gguf_goldens.py */

/* ---- types ---- */

TEST(widens_as_published)
{
    size_t size;
    uint32_t types = 0;
    char *text = fixture_read(KVF_GOLDENS "/gguf_types.txt", &size), *save = NULL;
    for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        char name[16];
        uint64_t expected, hash = 0xcbf29ce484222325u;
        assert_int_equal(sscanf(line, "%15s %" SCNx64, name, &expected), 2);
        const gguf_type *type = NULL;
        for (uint32_t id = 0; id < 64 && !type; id++)
            if (strcmp(gguf_type_name(id), name) == 0)
                type = gguf_type_find(id);
        assert_non_null(type);
        char *blocks = gguf_image_blocks(type, BLOCKS);
        float *numbers = malloc((size_t)BLOCKS * type->numbers * sizeof *numbers);
        assert_non_null(numbers);
        type->widen(blocks, BLOCKS, numbers);
        for (uint32_t i = 0; i < BLOCKS * type->numbers; i++)
            hash = (hash ^ kvf_float_bits(numbers[i])) * 0x100000001b3u;
        if (hash != expected)
            fail_msg("%s: the numbers begin with %g %g %g %g, but: %s", name, (double)numbers[0],
                     (double)numbers[1 % type->numbers], (double)numbers[2 % type->numbers],
                     (double)numbers[3 % type->numbers], line);
        free(numbers);
        free(blocks);
        types++;
    }
    assert_int_equal(types, 6);
    free(text);
}

/* ---- a model ---- */

typedef struct model {
    char *directory;
    kvf_model_config config;
    kvf_weights *weights;
} model;

/* The made-up model of a golden. */
static model open_model(const char *name)
{
    char path[1024];
    size_t size;
    kvf_error error = {0};
    model m = {.directory = fixture_directory_create()};
    snprintf(path, sizeof path, "%s/logits/%s/config.json", KVF_GOLDENS, name);
    char *config = fixture_read(path, &size);
    assert_true(random_model_write(m.directory, config));
    fixture_must(kvf_model_config_read(m.directory, &m.config, &error), &error);
    fixture_must(kvf_weights_open(m.directory, &m.weights, &error), &error);
    free(config);
    return m;
}

static void close_model(model *m)
{
    kvf_weights_close(m->weights);
    fixture_directory_remove(m->directory);
}

static void add_tokenizer(gguf_image *image, const char *pre, const char *const *tokens,
                          const int32_t *kinds, uint64_t count, const char *const *merges,
                          uint64_t merge_count)
{
    gguf_image_text(image, "tokenizer.ggml.model", "gpt2");
    gguf_image_text(image, "tokenizer.ggml.pre", pre);
    gguf_image_texts(image, "tokenizer.ggml.tokens", tokens, count);
    gguf_image_i32s(image, "tokenizer.ggml.token_type", kinds, count);
    gguf_image_texts(image, "tokenizer.ggml.merges", merges, merge_count);
}

/* One whose first tokens begin and end a text. */
static void add_small_tokenizer(gguf_image *image, const char *pre)
{
    static const char *const tokens[] = {"<s>", "</s>", "<think>", "a", "b", "ab", "1", "11"};
    static const char *const merges[] = {"a b", "1 1"};
    static const int32_t kinds[] = {3, 3, 4, 1, 1, 1, 1, 1};
    add_tokenizer(image, pre, tokens, kinds, 8, merges, 2);
    gguf_image_u32(image, "tokenizer.ggml.bos_token_id", 0);
    gguf_image_u32(image, "tokenizer.ggml.eos_token_id", 1);
}

static const char *write_image(const gguf_image *image, const char *directory, char path[1024])
{
    gguf_image_write(image, directory, "model.gguf");
    snprintf(path, 1024, "%s/model.gguf", directory);
    return path;
}

/* Divisors of frequencies are a tensor there, and numbers fp32. */
static void compare_configs(const kvf_model_config *got, const kvf_model_config *want)
{
    kvf_rope_table tables[2];
    assert_int_equal(got->dtype, want->dtype);
    assert_int_equal(got->tied_embeddings, want->tied_embeddings);
    assert_memory_equal(&got->vocab_size, &want->vocab_size,
                        offsetof(kvf_model_config, positions_max) -
                            offsetof(kvf_model_config, vocab_size));
    assert_true(fabs(got->norm_eps - want->norm_eps) < 1e-10);
    kvf_rope_table_make(got, &tables[0]);
    kvf_rope_table_make(want, &tables[1]);
    assert_int_equal(tables[0].count, tables[1].count);
    assert_true(fabsf(tables[0].attention_scaling / tables[1].attention_scaling - 1.0f) < 1e-6f);
    for (uint32_t i = 0; i < tables[0].count; i++)
        assert_true(fabsf(tables[0].inv_freq[i] / tables[1].inv_freq[i] - 1.0f) < 1e-6f);
}

/* Rows in their places, names, and the numbers as they were; vectors in F32. */
TEST(has_what_its_directory_has)
{
    static const char *const names[] = {"llama-bf16", "llama-fp16", "mistral-fp32", "qwen2-fp32",
                                        "qwen3-bf16"};
    static const uint32_t types[] = {
        [KVF_BF16] = IMAGE_BF16, [KVF_FP16] = IMAGE_F16, [KVF_FP32] = IMAGE_F32};
    for (size_t k = 0; k < sizeof names / sizeof *names; k++) {
        char path[1024];
        kvf_error error = {0};
        kvf_weights *weights;
        kvf_model_config config;
        gguf_image image = {0};
        model m = open_model(names[k]);
        gguf_image_model(&image, &m.config, m.weights, types[m.config.dtype]);
        write_image(&image, m.directory, path);
        fixture_must(kvf_weights_open(path, &weights, &error), &error);
        fixture_must(kvf_model_config_read(path, &config, &error), &error);
        compare_configs(&config, &m.config);
        assert_int_equal(kvf_weights_count(weights), kvf_weights_count(m.weights));
        for (size_t i = 0; i < kvf_weights_count(weights); i++) {
            const kvf_tensor *got = kvf_weights_at(weights, i);
            const kvf_tensor *want = kvf_weights_at(m.weights, i);
            fixture_must(kvf_weights_load(got, 1 + (uint32_t)i % 3, &error), &error);
            assert_string_equal(got->name, want->name);
            assert_int_equal(got->rank, want->rank);
            assert_int_equal(got->shape[0], want->shape[0]);
            assert_int_equal(got->dtype, got->rank == 1 ? KVF_FP32 : want->dtype);
            for (uint64_t n = 0; n < want->bytes / kvf_dtype_bytes(want->dtype); n++)
                assert_true(kvf_element_get(got->data, got->dtype, n) ==
                            kvf_element_get(want->data, want->dtype, n));
        }
        kvf_weights_close(weights);
        gguf_image_free(&image);
        close_model(&m);
    }
}

/* @p other has the fields of @p image, which was made of the model. */
static void close_images(gguf_image *other, gguf_image *image, model *m)
{
    other->fields = (kvf_text){0};
    gguf_image_free(other);
    gguf_image_free(image);
    close_model(m);
}

/* A quantised matrix, widened to bf16 by any number of threads; the query's rows change places. */
TEST(widens_a_model_to_bf16)
{
    char path[1024];
    kvf_error error = {0};
    kvf_model_config config;
    gguf_image image = {0};
    model m = open_model("llama-bf16");
    gguf_image_model(&image, &m.config, m.weights, IMAGE_BF16);
    gguf_image other = {.fields = image.fields, .field_count = image.field_count};
    const gguf_type *type = gguf_type_find(IMAGE_Q8_0);
    const uint64_t shape[2] = {256, 128};
    char *blocks = gguf_image_blocks(type, 256 * 128 / 32), embedding[4096] = {0};
    float numbers[128];
    gguf_image_tensor(&other, "blk.0.attn_q.weight", IMAGE_Q8_0, 2, shape, blocks,
                      256 * 128 / 32 * 34);
    gguf_image_tensor(&other, "token_embd.weight", IMAGE_Q4_0, 2, (uint64_t[]){2, 64}, embedding,
                      72);
    write_image(&other, m.directory, path);
    fixture_must(kvf_model_config_read(path, &config, &error), &error);
    assert_int_equal(config.dtype, KVF_BF16);
    assert_int_equal(config.vocab_size, 2);
    assert_true(config.tied_embeddings);
    for (uint32_t threads = 1; threads < 6; threads += 2) {
        kvf_weights *weights;
        fixture_must(kvf_weights_open(path, &weights, &error), &error);
        assert_int_equal(kvf_weights_own_bytes(weights), 256 * 128 * 2 + 2 * 64 * 2);
        const kvf_tensor *query =
            kvf_weights_get(weights, "model.layers.0.self_attn.q_proj.weight");
        uint64_t bytes;
        assert_memory_equal(kvf_weights_source(query, &bytes), blocks, 34);
        assert_int_equal(bytes, 256 * 128 / 32 * 34);
        assert_null(query->data);
        fixture_must(kvf_weights_load(query, threads, &error), &error);
        for (uint32_t row = 0; row < 256; row++) { /* heads of 64 */
            const uint32_t i = row % 64, from = row - i + (i < 32 ? 2 * i : 2 * (i - 32) + 1);
            type->widen(blocks + (size_t)from * 4 * 34, 4, numbers);
            for (uint32_t n = 0; n < 128; n++)
                assert_int_equal(((const uint16_t *)query->data)[row * 128 + n],
                                 kvf_bf16_from_float(numbers[n]));
        }
        kvf_weights_close(weights);
    }
    free(blocks);
    close_images(&other, &image, &m);
}

/* ---- fields ---- */

TEST(reads_fields)
{
    kvf_error error = {0};
    char path[1024];
    kvf_model_config config;
    kvf_text text = {0};
    gguf_image image = {.alignment = 64};
    model m = open_model("mistral-bf16");
    gguf_image_u32(&image, "general.alignment", 64);
    gguf_image_model(&image, &m.config, m.weights, IMAGE_BF16);
    gguf_image_text(&image, "llama.rope.scaling.type", "yarn");
    gguf_image_f32(&image, "llama.rope.scaling.factor", 4.0f);
    gguf_image_u32(&image, "llama.rope.scaling.original_context_length", 256);
    add_small_tokenizer(&image, "smollm");
    gguf_image_u32(&image, "tokenizer.ggml.eot_token_id", 2);
    gguf_image_text(&image, "tokenizer.chat_template", "{{ \"a\\b\" }}\n");
    write_image(&image, m.directory, path);
    fixture_must(kvf_model_config_read(path, &config, &error), &error);
    assert_string_equal(config.architecture->name, "LlamaForCausalLM");
    assert_int_equal(m.config.positions_max, 512);
    assert_int_equal(config.positions_max, 1024); /* factor by the original length */
    assert_int_equal(config.head_dim, 64);
    assert_int_equal(config.eos_count, 2);
    assert_int_equal(config.eos_ids[1], 2);
    assert_true(config.bos_known);
    assert_string_equal(config.note, "");
    gguf *file;
    fixture_must(gguf_open(path, &file, &error), &error);
    fixture_must(gguf_write_part(file, "tokenizer_config.json", &text, &error), &error);
    assert_string_equal(text.bytes, "{\"bos_token\":\"<s>\",\"eos_token\":\"</s>\","
                                    "\"chat_template\":\"{{ \\u0022a\\u005cb\\u0022 }}\\u000a\"}");
    fixture_expect(gguf_write_part(file, "generation_config.json", &text, &error), &error,
                   KVF_SYSTEM, "model.gguf: a GGUF file has no generation_config.json");
    gguf_close(file);
    kvf_text_free(&text);
    gguf_image_free(&image);
    close_model(&m);
}

/* ---- tokenizers ---- */

typedef struct vocabulary {
    json_t *document;
    const char **tokens, **merges;
    char *joined;
    int32_t *kinds;
    uint32_t count, merge_count;
} vocabulary;

/* Merges of either spelling as "left right". */
static void read_merges(vocabulary *v, json_t *merges)
{
    char *at = v->joined;
    json_t *merge;
    size_t i;
    json_array_foreach (merges, i, merge) {
        v->merges[v->merge_count++] = at;
        at += json_is_string(merge)
                  ? sprintf(at, "%s", json_string_value(merge))
                  : sprintf(at, "%s %s", json_string_value(json_array_get(merge, 0)),
                            json_string_value(json_array_get(merge, 1)));
        at++;
    }
}

static vocabulary read_vocabulary(const char *json, size_t size, const kvf_tokenizer *tokenizer)
{
    vocabulary v = {.count = kvf_tokenizer_size(tokenizer)};
    kvf_error error = {0};
    fixture_must(json_parse(json, size, "tokenizer.json", &v.document, &error), &error);
    json_t *merges = json_object_get(json_object_get(v.document, "model"), "merges");
    v.tokens = calloc(v.count, sizeof *v.tokens);
    v.kinds = calloc(v.count, sizeof *v.kinds);
    v.merges = calloc(json_array_size(merges), sizeof *v.merges);
    v.joined = malloc(size);
    assert_true(v.tokens && v.kinds && v.merges && v.joined);
    for (uint32_t i = 0; i < v.count; i++) {
        v.tokens[i] = kvf_tokenizer_token(tokenizer, i);
        assert_non_null(v.tokens[i]);
        v.kinds[i] = 1;
    }
    json_t *token;
    size_t i;
    json_array_foreach (json_object_get(v.document, "added_tokens"), i, token)
        v.kinds[(size_t)json_number_value(json_object_get(token, "id"))] =
            json_is_true(json_object_get(token, "special")) ? 3 : 4;
    read_merges(&v, merges);
    return v;
}

static void free_vocabulary(vocabulary *v)
{
    json_decref(v->document);
    free(v->tokens);
    free(v->merges);
    free(v->joined);
    free(v->kinds);
}

static void same_ids(const kvf_tokenizer *a, const kvf_tokenizer *b)
{
    hostile_text hostile = hostile_text_open();
    kvf_text text = {0};
    kvf_token_ids x = {0}, y = {0};
    kvf_error error = {0};
    for (uint32_t i = 0; i < 1000; i++) {
        hostile_text_make(&hostile, i, &text);
        x.count = y.count = 0;
        fixture_must(kvf_tokenizer_encode(a, text.bytes, text.size, i % 2 == 0, &x, &error),
                     &error);
        fixture_must(kvf_tokenizer_encode(b, text.bytes, text.size, i % 2 == 0, &y, &error),
                     &error);
        assert_int_equal(x.count, y.count);
        if (x.count != 0)
            assert_memory_equal(x.ids, y.ids, x.count * sizeof *x.ids);
    }
    kvf_token_ids_free(&x);
    kvf_token_ids_free(&y);
    kvf_text_free(&text);
    hostile_text_close(&hostile);
}

/* A golden tokenizer, and the same tokens in a GGUF file under a name. */
TEST(encodes_as_its_directory)
{
    static const struct {
        const char *golden, *pre, *bos;
        bool composes_none; /* where the golden has NFC */
    } cases[] = {{"llama3", "llama-bpe", "<|begin_of_text|>", false},
                 {"llama3", "falcon3", "<|begin_of_text|>", false},
                 {"llama3", "pixtral", "<|begin_of_text|>", false},
                 {"llama3", "midm-2.0", "<|begin_of_text|>", false},
                 {"qwen2", "qwen2", NULL, false},
                 {"qwen2", "deepseek-r1-qwen", NULL, false},
                 {"qwen2", "kormo", NULL, true},
                 {"qwen2", "megrez", NULL, true},
                 {"tekken", "tekken", "<s>", false}};
    char *directory = fixture_directory_create();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char path[1024];
        size_t size;
        uint32_t bos = 0;
        kvf_error error = {0};
        kvf_tokenizer *want, *got;
        gguf_image image = {0};
        snprintf(path, sizeof path, "%s/%s.tokenizer.json", KVF_GOLDENS, cases[i].golden);
        char *json = fixture_read(path, &size);
        if (cases[i].composes_none)
            memcpy(strstr(json, "{\"type\":\"NFC\"}"), "null          ", 14);
        fixture_must(kvf_tokenizer_parse(json, size, &want, &error), &error);
        vocabulary v = read_vocabulary(json, size, want);
        add_tokenizer(&image, cases[i].pre, v.tokens, v.kinds, v.count, v.merges, v.merge_count);
        if (cases[i].bos) {
            assert_true(kvf_tokenizer_find(want, cases[i].bos, &bos));
            gguf_image_u32(&image, "tokenizer.ggml.bos_token_id", bos);
        }
        fixture_must(kvf_tokenizer_open(write_image(&image, directory, path), &got, &error),
                     &error);
        same_ids(want, got);
        kvf_tokenizer_close(got);
        kvf_tokenizer_close(want);
        free_vocabulary(&v);
        gguf_image_free(&image);
        free(json);
    }
    fixture_directory_remove(directory);
}

/* "1" twice stands alone under one name and not under the other; tokens are put around a text. */
TEST(cuts_by_name)
{
    static const char *const names[] = {"gpt-2",    "a.x-4.0", "mellum",
                                        "trillion", "smollm",  "minerva-7b"};
    char *directory = fixture_directory_create(), path[1024];
    for (uint32_t i = 0; i < sizeof names / sizeof *names; i++) {
        const uint32_t gpt2 = i < 4;
        gguf_image image = {0};
        kvf_tokenizer *tokenizer;
        kvf_token_ids ids = {0};
        kvf_error error = {0};
        add_small_tokenizer(&image, names[i]);
        gguf_image_flag(&image, "tokenizer.ggml.add_bos_token", gpt2);
        gguf_image_flag(&image, "tokenizer.ggml.add_eos_token", !gpt2);
        fixture_must(kvf_tokenizer_open(write_image(&image, directory, path), &tokenizer, &error),
                     &error);
        fixture_must(kvf_tokenizer_encode(tokenizer, "ab11", 4, true, &ids, &error), &error);
        static const uint32_t want[2][4] = {{5, 6, 6, 1}, {0, 5, 7}};
        assert_int_equal(ids.count, gpt2 ? 3 : 4);
        assert_memory_equal(ids.ids, want[gpt2], ids.count * sizeof *ids.ids);
        kvf_token_ids_free(&ids);
        kvf_tokenizer_close(tokenizer);
        gguf_image_free(&image);
    }
    fixture_directory_remove(directory);
}
