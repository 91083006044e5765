/* SPDX-License-Identifier: Apache-2.0 */

/*
 * config.json: the four families are read as they are published, everything else is refused with
 * field and value, and the rotary frequencies are those of HF Transformers.
 */

#include "json.h"
#include "model_config.h"
#include "model_fixture.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
// clang-format off
#include <cmocka.h>
// clang-format on

#ifndef KVF_GOLDENS
#error "KVF_GOLDENS must name the folder of the goldens"
#endif

typedef struct config_field {
    const char *name;
    const char *json; /* NULL = left out */
} config_field;

#define FIELDS_MAX 40u

typedef struct config_fields {
    config_field list[FIELDS_MAX];
    size_t count;
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

static kvf_status parse_fields(const config_fields *fields, const char *generation,
                               const kvf_allocator *allocator, kvf_model_config *config,
                               kvf_error *error)
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
                                  generation != NULL ? strlen(generation) : 0, allocator, config,
                                  error);
}

static void expect_ok(const config_fields *fields, kvf_model_config *config)
{
    kvf_error error = {0};
    if (parse_fields(fields, NULL, NULL, config, &error) != KVF_OK)
        fail_msg("%s", error.text);
}

static void reads_llama(void **state)
{
    (void)state;
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

static void reads_other_families(void **state)
{
    (void)state;
    kvf_model_config c;
    config_fields qwen2 = llama31;
    set_field(&qwen2, "architectures", "[\"Qwen2ForCausalLM\"]");
    set_field(&qwen2, "rope_scaling", NULL);
    set_field(&qwen2, "use_sliding_window", "false");
    set_field(&qwen2, "sliding_window", "131072");
    set_field(&qwen2, "max_window_layers", "28");
    set_field(&qwen2, "tie_word_embeddings", "true");
    set_field(&qwen2, "attention_bias", NULL);
    set_field(&qwen2, "torch_dtype", "\"float16\"");
    expect_ok(&qwen2, &c);
    assert_string_equal(c.architecture->family, "qwen2");
    assert_true(c.architecture->qkv_bias && c.tied_embeddings && !c.architecture->qk_norm);
    assert_int_equal(c.dtype, KVF_FP16);

    config_fields qwen3 = qwen2;
    set_field(&qwen3, "architectures", "[\"Qwen3ForCausalLM\"]");
    set_field(&qwen3, "head_dim", "64");
    set_field(&qwen3, "sliding_window", "null");
    set_field(&qwen3, "torch_dtype", NULL);
    set_field(&qwen3, "dtype", "\"float32\"");
    set_field(&qwen3, "layer_types", "[\"full_attention\",\"full_attention\"]");
    expect_ok(&qwen3, &c);
    assert_true(c.architecture->qk_norm && !c.architecture->qkv_bias);
    assert_int_equal(c.head_dim, 64);
    assert_int_equal(c.dtype, KVF_FP32);
    set_field(&qwen3, "head_dim", NULL);
    set_field(&qwen3, "hidden_size", "1000"); /* head_dim is 128 whatever the hidden size */
    expect_ok(&qwen3, &c);
    assert_int_equal(c.head_dim, 128);

    config_fields mistral = llama31;
    set_field(&mistral, "architectures", "[\"MistralForCausalLM\"]");
    set_field(&mistral, "rope_scaling", NULL);
    set_field(&mistral, "sliding_window", "null");
    expect_ok(&mistral, &c);
    assert_string_equal(c.architecture->family, "mistral");
    assert_string_equal(c.note, "");
    set_field(&mistral, "sliding_window", "131072");
    expect_ok(&mistral, &c);
    assert_string_equal(c.note, "");
    set_field(&mistral, "sliding_window", "32768"); /* Ministral-8B-2410 */
    expect_ok(&mistral, &c);
    assert_non_null(strstr(c.note, "sliding_window 32768 is not applied"));
    set_field(&mistral, "layer_types", "[\"sliding_attention\",\"full_attention\"]");
    set_field(&mistral, "architectures", "[\"MinistralForCausalLM\"]");
    expect_ok(&mistral, &c);
    assert_non_null(strstr(c.note, "sliding_window 32768 is not applied"));
}

static void joins_end_ids(void **state)
{
    (void)state;
    kvf_model_config c;
    kvf_error error = {0};
    config_fields fields = llama31;
    set_field(&fields, "eos_token_id", "7");
    set_field(&fields, "bos_token_id", NULL);
    assert_int_equal(
        parse_fields(&fields, "{\"eos_token_id\":[9,7,8],\"bos_token_id\":5}", NULL, &c, &error),
        KVF_OK);
    assert_int_equal(c.eos_count, 3);
    assert_int_equal(c.eos_ids[0], 7);
    assert_int_equal(c.eos_ids[1], 9);
    assert_int_equal(c.eos_ids[2], 8);
    assert_int_equal(c.bos_id, 5);
    set_field(&fields, "eos_token_id", NULL);
    expect_ok(&fields, &c);
    assert_int_equal(c.eos_count, 0);
    assert_false(c.bos_known);
    fixture_expect(parse_fields(&fields, "[]", NULL, &c, &error), &error, KVF_CORRUPT,
                   "generation_config.json holds an array");
    fixture_expect(parse_fields(&fields, "{\"eos_token_id\":-1}", NULL, &c, &error), &error,
                   KVF_CORRUPT, "generation_config.json: eos_token_id is -1");
}

typedef struct refusal {
    const char *name, *json;
    kvf_status status;
    const char *part;
} refusal;

static const refusal refusals[] = {
    {"architectures", "[\"GPT2LMHeadModel\"]", KVF_UNSUPPORTED,
     "architectures is \"GPT2LMHeadModel\""},
    {"architectures", "[\"Ministral3ForCausalLM\"]", KVF_UNSUPPORTED, "\"Ministral3ForCausalLM\""},
    {"architectures", "[\"A\",\"B\"]", KVF_CORRUPT, "architectures is an array"},
    {"architectures", NULL, KVF_CORRUPT, "architectures is absent"},
    {"hidden_act", "\"gelu\"", KVF_UNSUPPORTED, "hidden_act is \"gelu\""},
    {"hidden_act", "3", KVF_UNSUPPORTED, "hidden_act is 3"},
    {"quantization_config", "{\"quant_method\":\"awq\"}", KVF_UNSUPPORTED, "quantization_config"},
    {"attention_bias", "true", KVF_UNSUPPORTED, "attention_bias is true"},
    {"mlp_bias", "true", KVF_UNSUPPORTED, "mlp_bias is true"},
    {"use_sliding_window", "true", KVF_UNSUPPORTED, "use_sliding_window is true"},
    {"num_local_experts", "8", KVF_UNSUPPORTED, "num_local_experts is 8"},
    {"layer_types", "[\"sliding_attention\"]", KVF_UNSUPPORTED,
     "layer_types is \"sliding_attention\""},
    {"head_dim", "72", KVF_UNSUPPORTED, "head_dim is 72; multiples of 16 up to 256"},
    {"head_dim", "\"64\"", KVF_CORRUPT, "head_dim is \"64\""},
    {"head_dim", "0", KVF_CORRUPT, "head_dim is 0"},
    {"hidden_size", "4095", KVF_CORRUPT, "hidden_size is 4095, but must be a multiple"},
    {"hidden_size", "99999999999999999999", KVF_CORRUPT, "hidden_size is 1e+20"},
    {"hidden_size", "1e999", KVF_CORRUPT, "real number overflow"},
    {"hidden_size", "4096.5", KVF_CORRUPT, "but must be a whole number"},
    {"hidden_size", NULL, KVF_CORRUPT, "hidden_size is absent"},
    {"vocab_size", "0", KVF_CORRUPT, "vocab_size is 0"},
    {"vocab_size", "-5", KVF_CORRUPT, "vocab_size is -5"},
    {"num_hidden_layers", "4000000000", KVF_CORRUPT, "num_hidden_layers is 4000000000"},
    {"num_attention_heads", "0", KVF_CORRUPT, "num_attention_heads is 0"},
    {"num_key_value_heads", "5", KVF_CORRUPT, "num_key_value_heads is 5, but must be a divisor"},
    {"num_key_value_heads", "1", KVF_UNSUPPORTED, "at most 16 query heads may share"},
    {"max_position_embeddings", NULL, KVF_CORRUPT, "max_position_embeddings is absent"},
    {"rms_norm_eps", "0", KVF_CORRUPT, "rms_norm_eps is 0"},
    {"rms_norm_eps", "2.0", KVF_CORRUPT, "rms_norm_eps is 2"},
    {"tie_word_embeddings", "1", KVF_CORRUPT, "tie_word_embeddings is 1"},
    {"torch_dtype", "\"float8_e4m3fn\"", KVF_UNSUPPORTED, "torch_dtype is \"float8_e4m3fn\""},
    {"eos_token_id", "128256", KVF_CORRUPT, "eos_token_id is 128256"},
    {"eos_token_id", "[1,2,3,4,5,6,7,8,9]", KVF_UNSUPPORTED, "more than 8 distinct ids"},
    {"bos_token_id", "[1]", KVF_CORRUPT, "bos_token_id is an array"},
    {"rope_theta", "\"big\"", KVF_CORRUPT, "rope_theta is \"big\""},
    {"rope_theta", "0.5", KVF_CORRUPT, "rope_theta is 0.5"},
    {"rope_scaling", "4", KVF_CORRUPT, "rope_scaling is 4"},
    {"rope_scaling", "{\"rope_type\":\"longrope\"}", KVF_UNSUPPORTED, "rope_type is \"longrope\""},
    {"rope_scaling", "{\"type\":\"dynamic\",\"factor\":2}", KVF_UNSUPPORTED, "type is \"dynamic\""},
    {"rope_scaling", "{\"rope_type\":\"default\",\"mrope_section\":[1]}", KVF_UNSUPPORTED,
     "field \"mrope_section\""},
    {"rope_scaling", "{\"rope_type\":\"linear\"}", KVF_CORRUPT, "factor is absent"},
    {"rope_scaling", "{\"rope_type\":\"llama3\",\"factor\":8}", KVF_CORRUPT,
     "low_freq_factor is absent"},
    {"rope_scaling",
     "{\"rope_type\":\"llama3\",\"factor\":8,\"low_freq_factor\":4,\"high_freq_factor\":4}",
     KVF_CORRUPT, "high_freq_factor is 4, but must be above"},
    {"rope_scaling", "{\"rope_type\":\"yarn\",\"factor\":-1}", KVF_CORRUPT, "factor is -1"},
    {"rope_parameters", "{\"full_attention\":{\"rope_type\":\"yarn\"}}", KVF_OK, ""},
    {"partial_rotary_factor", "0.5", KVF_UNSUPPORTED, "partial_rotary_factor is 0.5"},
};

static void refuses_what_it_cannot_run(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        const refusal *c = &refusals[i];
        config_fields fields = llama31;
        set_field(&fields, c->name, c->json);
        fixture_heap heap = {0};
        kvf_allocator allocator = fixture_allocator(&heap);
        kvf_error error = {0};
        kvf_model_config config;
        kvf_status status = parse_fields(&fields, NULL, &allocator, &config, &error);
        if (c->status != KVF_OK)
            fixture_expect(status, &error, c->status, c->part);
        else
            assert_int_equal(status, KVF_OK);
        assert_int_equal(heap.live, 0);
    }
    kvf_model_config config;
    kvf_error error = {0};
    config_fields fields = llama31; /* rope_parameters by layer kind, when nothing overrides it */
    set_field(&fields, "rope_scaling", NULL);
    set_field(&fields, "rope_parameters", "{\"full_attention\":{\"rope_type\":\"yarn\"}}");
    fixture_expect(parse_fields(&fields, NULL, NULL, &config, &error), &error, KVF_UNSUPPORTED,
                   "field \"full_attention\"");
    fields = llama31;
    set_field(&fields, "architectures", "[\"MistralForCausalLM\"]");
    set_field(&fields, "sliding_window", "4096");
    fixture_expect(parse_fields(&fields, NULL, NULL, &config, &error), &error, KVF_UNSUPPORTED,
                   "sliding_window is 4096; windows below 32768");
}

static void refuses_broken_json(void **state)
{
    (void)state;
    char deep[300];
    memset(deep, '[', sizeof deep / 2);
    memset(deep + sizeof deep / 2, ']', sizeof deep / 2);
    const struct {
        const char *text;
        size_t size; /* 0 = strlen */
        const char *part;
    } cases[] = {
        {"", 0, "not valid JSON: unexpected token near end of file at byte 0"},
        {"null", 0, "config.json holds null"},
        {"{", 0, "not valid JSON: string or '}' expected near end of file at byte 1"},
        {"{\"a\"", 0, "not valid JSON: ':' expected near end of file at byte 4"},
        {"{\"a\":1,}", 0, "not valid JSON: "},
        {"{\"a\":[1,]}", 0, "not valid JSON: unexpected token near ']' at byte 9"},
        {"{\"a\":1 \"b\":2}", 0, "not valid JSON: '}' expected near '\"b\"' at byte 10"},
        {"{\"a\":1e}", 0, "not valid JSON: invalid token near '1e' at byte 7"},
        {"{\"a\":-}", 0, "not valid JSON: invalid token near '-' at byte 6"},
        {"{\"a\":1e400}", 0, "not valid JSON: real number overflow near '1e400' at byte 10"},
        {"{\"a\":NaN}", 0, "not valid JSON: invalid token near 'NaN' at byte 8"},
        {"{\"a\":\"\\x\"}", 0, "not valid JSON: invalid escape near"},
        {"{\"a\":\"\\ud800\"}", 0, "not valid JSON: invalid Unicode '\\uD800'"},
        {"{\"a\":\"\\ud800\\u0041\"}", 0, "not valid JSON: invalid Unicode '\\uD800\\u0041'"},
        {"{\"a\":\"\\udc00\"}", 0, "not valid JSON: invalid Unicode '\\uDC00'"},
        {"{\"a\":\"x", 0, "not valid JSON: premature end of input near '\"x' at byte 7"},
        {"{\"a\":\"\n\"}", 0, "not valid JSON: unexpected newline near '\"' at byte 6"},
        {"{\"a\":\"\xff\"}", 0, "not valid JSON: unable to decode byte 0xff near '\"' at byte 6"},
        {"{\"a\":\"\xc0\x80\"}", 0, "not valid JSON: unable to decode byte 0xc0"},
        {"{\"a\":\"\xed\xa0\x80\"}", 0, "not valid JSON: unable to decode byte 0xed"},
        {"{} x", 0, "not valid JSON: end of file expected near 'x' at byte 4"},
        {"{}\0", 3, "not valid JSON: end of file expected near end of file at byte 3"},
        {"{\"a\":1,\"b\":2,\"a\":3}", 0, "not valid JSON: duplicate object key near '\"a\"'"},
        {"{\"a\":1,\"b\":1,\"c\":1,\"d\":1,\"e\":1,\"f\":1,\"g\":1,\"h\":1,\"i\":1,\"\\u0061\":1}",
         0, "not valid JSON: duplicate object key near '\"\\u0061\"'"},
        {"{\"\\u0000\":1,\"\\u0000\":2}", 0, "not valid JSON: duplicate object key"},
        {"{\"\\u0000\":\"\\uFDEF\"}", 0, "U+FDEF beside \\u0000 at byte 11"},
        {"{\"\\u0000\":\"\xef\xb7\xaf\"}", 0, "U+FDEF beside \\u0000 at byte 11"},
        {deep, sizeof deep, "values nested too deeply, more than 64"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fixture_heap heap = {0};
        kvf_allocator allocator = fixture_allocator(&heap);
        kvf_error error = {0};
        kvf_model_config config;
        size_t size = cases[i].size != 0 ? cases[i].size : strlen(cases[i].text);
        fixture_expect(
            kvf_model_config_parse(cases[i].text, size, NULL, 0, &allocator, &config, &error),
            &error, KVF_CORRUPT, cases[i].part);
        assert_int_equal(heap.live, 0);
    }
}

static void reads_numbers_exactly(void **state)
{
    (void)state;
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
        json_document *document;
        kvf_error error;
        assert_int_equal(json_parse(numbers[i], strlen(numbers[i]), "n", NULL, &document, &error),
                         KVF_OK);
        double expected = strtod(numbers[i], NULL);
        double got = json_number(json_root(document));
        if (fabs(got - expected) > 4e-16 * fabs(expected))
            fail_msg("%s was read as %.17g", numbers[i], got);
        json_free(document);
    }
    json_document *document;
    kvf_error error;
    const char *text = "[9007199254740991,\"\\u00e9\\ud83d\\ude00\\n\\u0000\"]";
    assert_int_equal(json_parse(text, strlen(text), "n", NULL, &document, &error), KVF_OK);
    const json_value *root = json_root(document);
    assert_true(root[1].kind == JSON_INTEGER && root[1].as.integer == 9007199254740991u);
    assert_int_equal(root[2].size, 8);
    assert_memory_equal(root[2].as.string, "\xc3\xa9\xf0\x9f\x98\x80\n\0", 9);
    json_free(document);
}

/* ---- RoPE ---- */

static void frequencies_match(void **state)
{
    (void)state;
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
        if (kvf_model_config_parse(json, strlen(json), NULL, 0, NULL, &config, &error) != KVF_OK)
            fail_msg("%s: %s", json, error.text);
        kvf_rope_table table;
        kvf_rope_table_make(&config, &table);
        assert_int_equal(table.count, config.head_dim / 2);
        assert_true(fabs(table.attention_scaling - strtod(scaling, NULL)) < 1e-6);
        for (uint32_t i = 0; i < table.count; i++) {
            double expected = strtod(values, &values);
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

static void reads_directories(void **state)
{
    (void)state;
    char *directory = fixture_directory_create();
    kvf_model_config config;
    kvf_error error = {0};
    fixture_expect(kvf_model_config_read(directory, NULL, &config, &error), &error, KVF_SYSTEM,
                   "config.json cannot be opened: No such file");
    fixture_expect(kvf_model_config_read("maker/name", NULL, &config, &error), &error, KVF_SYSTEM,
                   "or a GGUF file; maker/name cannot be opened: No such file");
    fixture_write_text(
        directory, "config.json",
        "{\"architectures\":[\"LlamaForCausalLM\"],\"hidden_size\":128,"
        "\"intermediate_size\":256,\"num_hidden_layers\":4,\"num_attention_heads\":4,"
        "\"num_key_value_heads\":2,\"head_dim\":64,\"vocab_size\":1024,"
        "\"max_position_embeddings\":32768,\"tie_word_embeddings\":true}");
    fixture_write_text(directory, "generation_config.json", "{\"eos_token_id\":[2,3]}");
    bool reached = true;
    size_t fail_at = 0;
    while (reached) {
        fixture_heap heap = {.fail_at = ++fail_at};
        kvf_allocator allocator = fixture_allocator(&heap);
        kvf_status status = kvf_model_config_read(directory, &allocator, &config, &error);
        if (status != KVF_OK)
            fixture_expect(status, &error, KVF_OUT_OF_MEMORY, "could not be allocated");
        assert_int_equal(heap.live, 0);
        reached = heap.calls >= fail_at;
    }
    assert_true(fail_at > 6);
    assert_int_equal(config.head_dim, 64);
    assert_int_equal(config.eos_count, 2);
    fixture_directory_remove(directory);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reads_llama),         cmocka_unit_test(reads_other_families),
        cmocka_unit_test(joins_end_ids),       cmocka_unit_test(refuses_what_it_cannot_run),
        cmocka_unit_test(refuses_broken_json), cmocka_unit_test(reads_numbers_exactly),
        cmocka_unit_test(frequencies_match),   cmocka_unit_test(reads_directories),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
