/* SPDX-License-Identifier: Apache-2.0 */

/*
 * config.json: the families are read as they are published, everything else is refused with
 * field and value, and the rotary frequencies are those of HF Transformers.
 */

#include "common/text.h"
#include "json.h"
#include "model_config.h"
#include "model_fixture.h"
#include "refusals.h"
#include "unit.h"
#include "watched_heap.h"
#include "weights.h"

#include <math.h>

#ifndef KVF_GOLDENS
#error "KVF_GOLDENS must name the folder of the goldens"
#endif

typedef struct config_field {
    const char *name;
    const char *json; /* NULL = left out */
} config_field;

#define FIELDS_MAX 40u
#define TEXTS_MAX  4u

typedef struct config_fields {
    config_field list[FIELDS_MAX];
    size_t count, texts;
    char text[TEXTS_MAX][1024]; /* of set_fields */
} config_fields;

static const config_fields llama31 = {
    .list = {{"architectures", "[\"LlamaForCausalLM\"]"},
             {"model_type", "\"llama\""},
             {"hidden_size", "4096"},
             {"intermediate_size", "14336"},
             {"num_hidden_layers", "32"},
             {"num_attention_heads", "32"},
             {"num_key_value_heads", "8"},
             {"vocab_size", "128256"},
             {"max_position_embeddings", "131072"},
             {"hidden_act", "\"silu\""},
             {"rms_norm_eps", "1e-05"},
             {"rope_theta", "500000.0"},
             {"rope_scaling",
              "{\"factor\":8.0,\"low_freq_factor\":1.0,\"high_freq_factor\":4.0,"
              "\"original_max_position_embeddings\":8192,\"rope_type\":\"llama3\"}"},
             {"attention_bias", "false"},
             {"mlp_bias", "false"},
             {"tie_word_embeddings", "false"},
             {"torch_dtype", "\"bfloat16\""},
             {"bos_token_id", "128000"},
             {"eos_token_id", "[128001,128008,128009]"}},
    .count = 19,
};

static void set_field(config_fields *fields, const char *name, const char *json)
{
    for (size_t i = 0; i < fields->count; i++) {
        if (strcmp(fields->list[i].name, name) == 0) {
            fields->list[i].json = json;
            return;
        }
    }
    assert_true(fields->count < FIELDS_MAX);
    fields->list[fields->count++] = (config_field){name, json};
}

/* FIELD JSON, and others after " & "; `absent` leaves a field out. The text stays with the fields.
 */
static void set_fields(config_fields *fields, const char *text)
{
    assert_true(fields->texts < TEXTS_MAX);
    char *change = fields->text[fields->texts++];
    assert_true(strlen(text) < sizeof fields->text[0]);
    strcpy(change, text);
    for (char *next; change; change = next) {
        const char *value = refusals_part(change, &next);
        set_field(fields, change, strcmp(value, "absent") == 0 ? NULL : value);
    }
}

static kvf_status parse_fields(const config_fields *fields, const char *generation,
                               kvf_model_config *config, kvf_error *error)
{
    char text[4096] = "{";
    for (size_t i = 0; i < fields->count; i++) {
        if (fields->list[i].json == NULL)
            continue;
        size_t used = strlen(text);
        snprintf(text + used, sizeof text - used, "%s\"%s\":%s", used > 1 ? "," : "",
                 fields->list[i].name, fields->list[i].json);
    }
    strcat(text, "}");
    return kvf_model_config_parse(text, strlen(text), generation,
                                  generation != NULL ? strlen(generation) : 0, config, error);
}

static void expect_ok(const config_fields *fields, kvf_model_config *config)
{
    kvf_error error = {0};
    fixture_must(parse_fields(fields, NULL, config, &error), &error);
}

TEST(reads_llama)
{
    kvf_model_config c;
    expect_ok(&llama31, &c);
    assert_string_equal(c.architecture->name, "LlamaForCausalLM");
    assert_int_equal(c.vocab_size, 128256);
    assert_int_equal(c.hidden_size, 4096);
    assert_int_equal(c.intermediate_size, 14336);
    assert_int_equal(c.layers, 32);
    assert_int_equal(c.query_heads, 32);
    assert_int_equal(c.kv_heads, 8);
    assert_int_equal(c.head_dim, 128);
    assert_int_equal(c.positions_max, 131072);
    assert_true(c.norm_eps == 1e-5);
    assert_int_equal(c.dtype, KVF_BF16);
    assert_false(c.tied_embeddings);
    assert_false(c.architecture->qkv_bias);
    assert_false(c.architecture->qk_norm);
    assert_int_equal(c.rope.kind, KVF_ROPE_LLAMA3);
    assert_true(c.rope.theta == 5e5);
    assert_true(c.bos_known);
    assert_int_equal(c.bos_id, 128000);
    assert_int_equal(c.eos_count, 3);
    assert_int_equal(c.eos_ids[2], 128009);
    assert_string_equal(c.note, "");
    assert_string_equal(c.architecture->family, "llama");
}

TEST(reads_other_families)
{
    kvf_model_config c;
    config_fields qwen2 = llama31;
    set_fields(&qwen2,
               "architectures [\"Qwen2ForCausalLM\"] & rope_scaling absent & "
               "use_sliding_window false & sliding_window 131072 & max_window_layers 28 & "
               "tie_word_embeddings true & attention_bias absent & torch_dtype \"float16\"");
    expect_ok(&qwen2, &c);
    assert_string_equal(c.architecture->family, "qwen2");
    assert_true(c.architecture->qkv_bias && c.tied_embeddings && !c.architecture->qk_norm);
    assert_int_equal(c.dtype, KVF_FP16);

    config_fields qwen3 = qwen2;
    set_fields(&qwen3, "architectures [\"Qwen3ForCausalLM\"] & head_dim 64 & sliding_window null & "
                       "torch_dtype absent & dtype \"float32\" & "
                       "layer_types [\"full_attention\",\"full_attention\"]");
    expect_ok(&qwen3, &c);
    assert_true(c.architecture->qk_norm && !c.architecture->qkv_bias);
    assert_int_equal(c.head_dim, 64);
    assert_int_equal(c.dtype, KVF_FP32);
    set_field(&qwen3, "head_dim", NULL);
    set_field(&qwen3, "hidden_size", "1000"); /* head_dim is 128 whatever the hidden size */
    expect_ok(&qwen3, &c);
    assert_int_equal(c.head_dim, 128);

    config_fields mistral = llama31;
    set_fields(&mistral, "architectures [\"MistralForCausalLM\"] & rope_scaling absent & "
                         "sliding_window null");
    expect_ok(&mistral, &c);
    assert_string_equal(c.architecture->family, "mistral");
    assert_string_equal(c.note, "");
    set_field(&mistral, "sliding_window", "131072");
    expect_ok(&mistral, &c);
    assert_string_equal(c.note, "");
    set_field(&mistral, "sliding_window", "32768"); /* Ministral-8B-2410 */
    expect_ok(&mistral, &c);
    assert_non_null(strstr(c.note, "sliding_window 32768 is not applied"));
    assert_int_equal(c.window, 0);
    set_fields(&mistral, "layer_types [\"sliding_attention\",\"full_attention\"] & "
                         "architectures [\"MinistralForCausalLM\"] & num_hidden_layers 2");
    expect_ok(&mistral, &c);
    assert_string_equal(c.note, "");
    assert_int_equal(c.window, 32768);
    for (uint32_t head = 0; head < 8; head++)
        assert_true(c.window_mask[head] == 0 && c.window_mask[8 + head] == 1);
    set_field(&mistral, "layer_types", NULL);
    set_field(&mistral, "architectures", "[\"MistralForCausalLM\"]");
    set_field(&mistral, "sliding_window", "4096"); /* Mistral 7B 0.1 */
    expect_ok(&mistral, &c);
    assert_int_equal(c.window, 4096);
    for (uint32_t head = 0; head < 16; head++)
        assert_int_equal(c.window_mask[head], 0);
    set_field(&mistral, "sliding_window", NULL); /* which is the default of Transformers */
    expect_ok(&mistral, &c);
    assert_int_equal(c.window, 4096);
    set_field(&mistral, "sliding_window", "null");
    expect_ok(&mistral, &c);
    assert_int_equal(c.window, 0);
}

/* Model cards give only the factor; published files give the length too. */
TEST(context_follows_scaling)
{
    static const struct {
        const char *positions, *scaling;
        uint32_t expected;
    } cases[] = {
        {"32768", "null", 32768},
        {"32768", "{\"type\":\"yarn\",\"factor\":4.0,\"original_max_position_embeddings\":32768}",
         131072},
        {"40960",
         "{\"rope_type\":\"yarn\",\"factor\":4.0,\"original_max_position_embeddings\":32768}",
         131072},
        {"131072",
         "{\"rope_type\":\"yarn\",\"factor\":4.0,\"original_max_position_embeddings\":32768}",
         131072},
        {"131072", "{\"rope_type\":\"yarn\",\"original_max_position_embeddings\":32768}", 131072},
        {"40960",
         "{\"rope_type\":\"yarn\",\"factor\":1.1,\"original_max_position_embeddings\":32768}",
         40960},
        {"32768", "{\"rope_type\":\"yarn\",\"factor\":2.5,\"finetuned\":true}", 81920},
        {"4096", "{\"type\":\"linear\",\"factor\":4.0}", 16384},
        {"1000", "{\"type\":\"linear\",\"factor\":1.0005}", 1000},
        {"131072",
         "{\"rope_type\":\"llama3\",\"factor\":32.0,\"low_freq_factor\":1.0,\"high_freq_factor\":4."
         "0,"
         "\"original_max_position_embeddings\":8192}",
         131072},
        {"2147483647", "{\"type\":\"linear\",\"factor\":1e30}", 2147483647},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        kvf_model_config c;
        config_fields fields = llama31;
        set_field(&fields, "max_position_embeddings", cases[i].positions);
        set_field(&fields, "rope_scaling", cases[i].scaling);
        expect_ok(&fields, &c);
        if (c.positions_max != cases[i].expected)
            fail_msg("%s, %s: %u positions", cases[i].positions, cases[i].scaling, c.positions_max);
    }
    /* A window that the stretched positions do not fit into counts. */
    kvf_model_config c;
    config_fields mistral = llama31;
    set_fields(&mistral, "architectures [\"MistralForCausalLM\"] & max_position_embeddings 32768 & "
                         "rope_scaling {\"type\":\"yarn\",\"factor\":4.0} & sliding_window 32768");
    expect_ok(&mistral, &c);
    assert_non_null(strstr(c.note, "sliding_window 32768 is not applied"));
}

TEST(joins_end_ids)
{
    kvf_model_config c;
    kvf_error error = {0};
    config_fields fields = llama31;
    set_field(&fields, "eos_token_id", "7");
    set_field(&fields, "bos_token_id", NULL);
    assert_int_equal(
        parse_fields(&fields, "{\"eos_token_id\":[9,7,8],\"bos_token_id\":5}", &c, &error), KVF_OK);
    assert_int_equal(c.eos_count, 3);
    assert_int_equal(c.eos_ids[0], 7);
    assert_int_equal(c.eos_ids[1], 9);
    assert_int_equal(c.eos_ids[2], 8);
    assert_int_equal(c.bos_id, 5);
    set_field(&fields, "eos_token_id", NULL);
    expect_ok(&fields, &c);
    assert_int_equal(c.eos_count, 0);
    assert_false(c.bos_known);
}

/* FIELD JSON, and others after " & "; JSON is the whole text. */
static kvf_status parse_row(void *user, char *change, size_t size, kvf_error *error)
{
    config_fields fields = llama31;
    heap h = {0};
    heap_watch(&h);
    kvf_model_config config;
    kvf_status status;
    char *value = NULL;
    for (char *field = change, *next; field; field = next) {
        value = refusals_part(field, &next);
        set_field(&fields, field, strcmp(value, "absent") == 0 ? NULL : value);
    }
    if (strcmp(change, "JSON") == 0)
        status =
            kvf_model_config_parse(value, size - (size_t)(value - change), NULL, 0, &config, error);
    else
        status =
            parse_fields(&fields, strcmp(change, "generation") == 0 ? value : NULL, &config, error);
    assert_int_equal(heap_left(), 0);
    return status;
}

TEST(refuses_what_it_cannot_run)
{
    kvf_model_config config;
    refusals_check(&(refusals){.path = "tests/model/config.refusals", .call = parse_row});
    config_fields fields = llama31; /* rope_scaling overrides it */
    set_field(&fields, "rope_parameters", "{\"full_attention\":{\"rope_type\":\"yarn\"}}");
    expect_ok(&fields, &config);
}

TEST(reads_numbers_exactly)
{
    static const char *const numbers[] = {
        "1e-06",
        "0.1",
        "3.14159265358979323846",
        "123456789012345678901234567890",
        "1E+3",
        "-0.0",
        "2.2250738585072014e-308",
        "1.7976931348623157e308",
        "0.00000000000000000000000000012345",
    };
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        json_t *document;
        kvf_error error;
        assert_int_equal(json_parse(numbers[i], strlen(numbers[i]), "n", &document, &error),
                         KVF_OK);
        double expected = kvf_real_of(numbers[i], NULL);
        double got = json_number_value(document);
        if (fabs(got - expected) > 4e-16 * fabs(expected))
            fail_msg("%s was read as %.17g", numbers[i], got);
        json_decref(document);
    }
    json_t *document;
    kvf_error error;
    char deep[4096];
    memset(deep, '[', sizeof deep);
    fixture_expect(json_parse(deep, sizeof deep, "n", &document, &error), &error, KVF_CORRUPT,
                   "n: not valid JSON: maximum parsing depth reached");
    const char *text = "[9007199254740991,\"\\u00e9\\ud83d\\ude00\\n\\u0000\"]";
    assert_int_equal(json_parse(text, strlen(text), "n", &document, &error), KVF_OK);
    uint64_t whole = 0;
    const json_t *string = json_array_get(document, 1);
    assert_true(json_is_whole(json_array_get(document, 0), JSON_WHOLE_MAX, &whole));
    assert_true(whole == 9007199254740991u);
    assert_int_equal(json_string_length(string), 8);
    assert_memory_equal(json_string_value(string), "\xc3\xa9\xf0\x9f\x98\x80\n\0", 9);
    json_decref(document);
}

/* ---- RoPE ---- */

TEST(frequencies_match)
{
    size_t size;
    char *text = fixture_read(KVF_GOLDENS "/rope.txt", &size);
    char *save = NULL;
    size_t cases = 0;
    strtok_r(text, "\n", &save); /* the line that says what made it */
    for (char *json = strtok_r(NULL, "\n", &save); json != NULL;
         json = strtok_r(NULL, "\n", &save)) {
        char *scaling = strtok_r(NULL, "\n", &save);
        char *values = strtok_r(NULL, "\n", &save);
        assert_non_null(values);
        kvf_model_config config;
        kvf_error error = {0};
        if (kvf_model_config_parse(json, strlen(json), NULL, 0, &config, &error) != KVF_OK)
            fail_msg("%s: %s", json, error.text);
        kvf_rope_table table;
        kvf_rope_table_make(&config, &table);
        assert_int_equal(table.count, config.head_dim / 2);
        assert_true(fabs(table.attention_scaling - kvf_real_of(scaling, NULL)) < 1e-6);
        for (uint32_t i = 0; i < table.count; i++) {
            double expected = kvf_real_of(values, &values);
            if (fabs(table.inv_freq[i] - expected) > 1e-6 * expected)
                fail_msg("%s: frequency %u is %.9g, not %.9g", json, i, (double)table.inv_freq[i],
                         expected);
        }
        cases++;
    }
    assert_true(cases >= 19);
    free(text);
}

/* ---- directories ---- */

static const char lfs_pointer[] =
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n";

TEST(reads_directories)
{
    char *directory = fixture_directory_create();
    kvf_model_config config;
    kvf_error error = {0};
    fixture_expect(kvf_model_config_read(directory, &config, &error), &error, KVF_SYSTEM,
                   "config.json cannot be opened: No such file");
    fixture_expect(kvf_model_config_read("maker/name", &config, &error), &error, KVF_SYSTEM,
                   "or a GGUF file; maker/name cannot be opened: No such file");
    fixture_write_text(
        directory, "config.json",
        "{\"architectures\":[\"LlamaForCausalLM\"],\"hidden_size\":128,"
        "\"intermediate_size\":256,\"num_hidden_layers\":4,\"num_attention_heads\":4,"
        "\"num_key_value_heads\":2,\"head_dim\":64,\"vocab_size\":1024,"
        "\"max_position_embeddings\":32768,\"tie_word_embeddings\":true}");
    fixture_write_text(directory, "generation_config.json", "{\"eos_token_id\":[2,3]}");
    char path[1024];
    kvf_weights *weights;
    snprintf(path, sizeof path, "%s/x.gguf", directory);
    fixture_write_text(directory, "generation_config.json", lfs_pointer);
    fixture_expect(kvf_model_config_read(directory, &config, &error), &error, KVF_CORRUPT,
                   "generation_config.json is a pointer of Git LFS, not the file itself; run git "
                   "lfs pull");
    fixture_write_text(directory, "model.safetensors", lfs_pointer);
    fixture_expect(kvf_weights_open(directory, &weights, &error), &error, KVF_CORRUPT,
                   "model.safetensors is a pointer of Git LFS");
    fixture_write_text(directory, "x.gguf", lfs_pointer);
    fixture_expect(kvf_model_config_read(path, &config, &error), &error, KVF_CORRUPT,
                   "x.gguf is a pointer of Git LFS");
    fixture_write_text(directory, "generation_config.json", "{\"eos_token_id\":[2,3]}");
    bool reached = true;
    int64_t fail_at = 0;
    while (reached) {
        heap h = {.fail_at = ++fail_at};
        heap_watch(&h);
        kvf_status status = kvf_model_config_read(directory, &config, &error);
        if (status != KVF_OK)
            fixture_expect(status, &error, KVF_OUT_OF_MEMORY, "could not be allocated");
        assert_int_equal(heap_left(), 0);
        reached = h.asked >= fail_at;
    }
    assert_true(fail_at > 2);
    assert_int_equal(config.head_dim, 64);
    assert_int_equal(config.eos_count, 2);
    fixture_directory_remove(directory);
}
