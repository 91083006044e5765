/* SPDX-License-Identifier: Apache-2.0 */

/*
 * tokenizer.json: what is not understood is refused by name, what contradicts itself is refused
 * with the reason, and the options that the goldens do not use do what they say.
 */

#include "model_fixture.h"
#include "tokenizer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
// clang-format off
#include <cmocka.h>
// clang-format on

/* A small WordLevel file; fields are replaced by name. */
typedef struct file_parts {
    const char *version, *truncation, *padding, *added, *normalizer, *pre, *post, *decoder, *model;
} file_parts;

static const char words_model[] =
    "{\"type\":\"WordLevel\",\"vocab\":{\"a\":0,\"b\":1,\"<u>\":2,\"c\":3},\"unk_token\":\"<u>\"}";

static const file_parts words = {
    .version = "\"1.0\"",
    .truncation = "null",
    .padding = "null",
    .added = "[]",
    .normalizer = "null",
    .pre = "{\"type\":\"WhitespaceSplit\"}",
    .post = "null",
    .decoder = "null",
    .model = words_model,
};

static kvf_status parse_parts(const file_parts *p, const kvf_allocator *allocator,
                              kvf_tokenizer **out, kvf_error *error)
{
    char text[4096];
    snprintf(text, sizeof text,
             "{\"version\":%s,\"truncation\":%s,\"padding\":%s,\"added_tokens\":%s,"
             "\"normalizer\":%s,\"pre_tokenizer\":%s,\"post_processor\":%s,\"decoder\":%s,"
             "\"model\":%s}",
             p->version, p->truncation, p->padding, p->added, p->normalizer, p->pre, p->post,
             p->decoder, p->model);
    return kvf_tokenizer_parse(text, strlen(text), allocator, out, error);
}

static void expect_refusal(const file_parts *p, kvf_status status, const char *part)
{
    fixture_heap heap = {0};
    kvf_allocator allocator = fixture_allocator(&heap);
    kvf_tokenizer *tokenizer;
    kvf_error error = {0};
    fixture_expect(parse_parts(p, &allocator, &tokenizer, &error), &error, status, part);
    assert_null(tokenizer);
    assert_int_equal(heap.live, 0);
}

static kvf_tokenizer *open_parts(const file_parts *p)
{
    kvf_tokenizer *tokenizer;
    kvf_error error = {0};
    if (parse_parts(p, NULL, &tokenizer, &error) != KVF_OK)
        fail_msg("%s", error.text);
    return tokenizer;
}

static void expect_ids(const kvf_tokenizer *tokenizer, const char *text, bool add_special,
                       size_t count, const uint32_t *expected)
{
    kvf_token_ids ids = {0};
    kvf_error error = {0};
    if (kvf_tokenizer_encode(tokenizer, text, strlen(text), add_special, &ids, &error) != KVF_OK)
        fail_msg("%s", error.text);
    assert_int_equal(ids.count, count);
    assert_memory_equal(ids.ids, expected, count * sizeof *expected);
    kvf_token_ids_free(NULL, &ids);
}

static void refuses_unknown_parts(void **state)
{
    (void)state;
    file_parts p = words;
    p.version = "\"2.0\"";
    expect_refusal(&p, KVF_UNSUPPORTED, "version is \"2.0\"");
    p = words;
    p.version = "\"1.0\",\"extra\":1";
    expect_refusal(&p, KVF_UNSUPPORTED, "has the unknown field \"extra\"");
    p = words;
    p.truncation = "{\"max_length\":5}";
    expect_refusal(&p, KVF_UNSUPPORTED, "truncation is an object; set it to null");
    p = words;
    p.padding = "{}";
    expect_refusal(&p, KVF_UNSUPPORTED, "padding is an object; set it to null");
    static const struct {
        const char *json, *part;
    } normalizers[] = {
        {"{\"type\":\"Lowercase\"}", "normalizer.type is \"Lowercase\""},
        {"{\"type\":\"NFKC\"}", "normalizer.type is \"NFKC\""},
        {"{\"type\":\"NFC\",\"x\":1}", "normalizer has the unknown field \"x\""},
        {"{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"NFC\"},{\"type\":\"NFD\"}]}",
         "normalizer.type is \"NFD\""},
    };
    for (size_t i = 0; i < sizeof normalizers / sizeof *normalizers; i++) {
        p = words;
        p.normalizer = normalizers[i].json;
        expect_refusal(&p, KVF_UNSUPPORTED, normalizers[i].part);
    }
    static const struct {
        const char *json, *part;
    } decoders[] = {
        {"{\"type\":\"WordPiece\"}", "decoder.type is \"WordPiece\""},
        {"{\"type\":\"ByteLevel\",\"x\":1}", "decoder has the unknown field \"x\""},
        {"{\"type\":\"Sequence\",\"decoders\":[]}", "decoder.type is \"Sequence\""},
    };
    for (size_t i = 0; i < sizeof decoders / sizeof *decoders; i++) {
        p = words;
        p.decoder = decoders[i].json;
        expect_refusal(&p, KVF_UNSUPPORTED, decoders[i].part);
    }
}

#define SPLIT(pattern) "{\"type\":\"Split\",\"pattern\":" pattern ",\"behavior\":\"Isolated\"}"
#define REGEX(pattern) SPLIT("{\"Regex\":\"" pattern "\"}")

static void refuses_unknown_splits(void **state)
{
    (void)state;
    static const struct {
        const char *json;
        kvf_status status;
        const char *part;
    } cases[] = {
        {"{\"type\":\"Metaspace\"}", KVF_UNSUPPORTED, "pre_tokenizer.type is \"Metaspace\""},
        {"{\"type\":\"Digits\",\"x\":true}", KVF_UNSUPPORTED, "has the unknown field \"x\""},
        {"{\"type\":\"Punctuation\"}", KVF_UNSUPPORTED, "\"Punctuation\""},
        {"[]", KVF_CORRUPT, "pre_tokenizer is an array"},
        {"{\"type\":\"Sequence\"}", KVF_CORRUPT, "pretokenizers is absent"},
        {"{\"type\":\"Whitespace\",\"x\":1}", KVF_UNSUPPORTED, "has the unknown field \"x\""},
        {"{\"type\":\"Split\",\"pattern\":{\"Regex\":\"a\"},\"behavior\":\"MergedWithNext\"}",
         KVF_UNSUPPORTED, "behavior is \"MergedWithNext\""},
        {"{\"type\":\"Split\",\"pattern\":{\"Regex\":\"a\"},\"behavior\":\"Isolated\",\"invert\":"
         "true}",
         KVF_UNSUPPORTED, "invert is true"},
        {SPLIT("\"a\""), KVF_UNSUPPORTED, "pattern is \"a\""},
        {SPLIT("{\"String\":\"\"}"), KVF_UNSUPPORTED, "an empty string"},
        {SPLIT("{\"Regex\":\"a\",\"String\":\"a\"}"), KVF_UNSUPPORTED, "pattern is an object"},
        {REGEX("a("), KVF_CORRUPT, "does not compile"},
        {REGEX("a.b"), KVF_UNSUPPORTED, "one of . ^ $ at byte 1"},
        {REGEX("^a"), KVF_UNSUPPORTED, "one of . ^ $"},
        {REGEX("\\\\w+"), KVF_UNSUPPORTED, "has an escape at byte 0"},
        {REGEX("\\\\bx"), KVF_UNSUPPORTED, "has an escape"},
        {REGEX("\\\\p{Han}+"), KVF_UNSUPPORTED, "a property other than a general category"},
        {REGEX("\\\\pL"), KVF_UNSUPPORTED, "a property other than"},
        {REGEX("(?<=a)b"), KVF_UNSUPPORTED, "a group other than"},
        {REGEX("(?<n>a)"), KVF_UNSUPPORTED, "a group other than"},
        {REGEX("(*UTF)a"), KVF_UNSUPPORTED, "a verb"},
        {REGEX("[a[b]]"), KVF_UNSUPPORTED, "a class within a class"},
        {REGEX("[a&&b]"), KVF_UNSUPPORTED, "a class within a class"},
        {REGEX("[]a]"), KVF_UNSUPPORTED, "an empty class"},
        {REGEX("[\\\\S]"), KVF_UNSUPPORTED, "has an escape at byte 1"},
        {REGEX("a{,3}"), KVF_UNSUPPORTED, "a brace that is no"},
        {REGEX("a{2}+"), KVF_UNSUPPORTED, "a brace that is no plain {n,m}"},
        {REGEX("a{2"), KVF_UNSUPPORTED, "a brace that is no"},
        {REGEX("a\\u0000b"), KVF_UNSUPPORTED, "a zero byte"},
        {REGEX("a{3,1}"), KVF_CORRUPT, "does not compile"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        file_parts p = words;
        p.pre = cases[i].json;
        expect_refusal(&p, cases[i].status, cases[i].part);
    }
}

#define BPE(rest) "{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1,\"ab\":2,\"abb\":3}" rest "}"
static const char byte_level[] = "{\"type\":\"ByteLevel\",\"add_prefix_space\":false}";

static void refuses_wrong_models(void **state)
{
    (void)state;
    static const struct {
        const char *json;
        kvf_status status;
        const char *part;
    } cases[] = {
        {"null", KVF_CORRUPT, "model is null"},
        {"{\"vocab\":{}}", KVF_UNSUPPORTED, "model.type is absent"},
        {"{\"type\":\"Unigram\",\"vocab\":[]}", KVF_UNSUPPORTED, "model.type is \"Unigram\""},
        {"{\"type\":\"WordLevel\"}", KVF_CORRUPT, "model.vocab is absent"},
        {"{\"type\":\"WordLevel\",\"vocab\":{\"a\":0,\"a\":1}}", KVF_CORRUPT,
         "duplicate object key near"},
        {"{\"type\":\"WordLevel\",\"vocab\":{\"a\":0,\"b\":0}}", KVF_CORRUPT,
         "\"a\" and \"b\" both have id 0"},
        {"{\"type\":\"WordLevel\",\"vocab\":{\"a\":-1}}", KVF_CORRUPT,
         "token \"a\" needs an id below"},
        {"{\"type\":\"WordLevel\",\"vocab\":{\"a\":4294967295}}", KVF_CORRUPT,
         "needs an id below 65537"},
        {"{\"type\":\"WordLevel\",\"vocab\":{\"a\":0},\"unk_token\":7}", KVF_CORRUPT,
         "unk_token is a number"},
        {"{\"type\":\"WordLevel\",\"vocab\":{\"a\":0},\"max\":7}", KVF_UNSUPPORTED,
         "field \"max\""},
        {BPE(""), KVF_CORRUPT, "merges is absent"},
        {BPE(",\"merges\":[\"a b c\"]"), KVF_CORRUPT, "merges[0] is not a pair"},
        {BPE(",\"merges\":[\"ab\"]"), KVF_CORRUPT, "merges[0] is not a pair"},
        {BPE(",\"merges\":[[\"a\",\"b\"],[\"a\"]]"), KVF_CORRUPT, "merges[1] is not a pair"},
        {BPE(",\"merges\":[[\"a\",1]]"), KVF_CORRUPT, "merges[0] is not a pair"},
        {BPE(",\"merges\":[\"b a\"]"), KVF_CORRUPT, "merges[0]: \"ba\""},
        {BPE(",\"merges\":[],\"dropout\":0.1"), KVF_UNSUPPORTED, "dropout is 0.1"},
        {BPE(",\"merges\":[],\"unk_token\":\"a\""), KVF_UNSUPPORTED,
         "unk_token is \"a\" while 254 bytes"},
        {BPE(",\"merges\":[],\"byte_fallback\":true"), KVF_UNSUPPORTED, "byte_fallback is true"},
        {BPE(",\"merges\":[],\"continuing_subword_prefix\":\"##\""), KVF_UNSUPPORTED, "\"##\""},
        {BPE(",\"merges\":[],\"end_of_word_suffix\":\"</w>\""), KVF_UNSUPPORTED, "\"</w>\""},
        {BPE(",\"merges\":[],\"ignore_merges\":1"), KVF_CORRUPT, "ignore_merges is 1"},
        {BPE(",\"merges\":[],\"cache\":1"), KVF_UNSUPPORTED, "field \"cache\""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        file_parts p = words;
        p.model = cases[i].json;
        expect_refusal(&p, cases[i].status, cases[i].part);
    }
    file_parts p = words;
    p.model = BPE(",\"merges\":[]");
    expect_refusal(&p, KVF_UNSUPPORTED, "BPE is supported with a ByteLevel pre_tokenizer");
    p = words;
    p.pre = byte_level;
    expect_refusal(&p, KVF_UNSUPPORTED, "WordLevel without");
    p.model = BPE(",\"merges\":[]");
    p.pre = "{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"ByteLevel\"},{\"type\":"
            "\"ByteLevel\"}]}";
    expect_refusal(&p, KVF_UNSUPPORTED, "ByteLevel must be the last");
    p.pre = "{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"ByteLevel\",\"use_regex\":false,"
            "\"add_prefix_space\":false},{\"type\":\"ByteLevel\",\"use_regex\":false,"
            "\"add_prefix_space\":false}]}";
    expect_refusal(&p, KVF_UNSUPPORTED, "ByteLevel is there twice");
}

static void refuses_wrong_added_tokens(void **state)
{
    (void)state;
    static const struct {
        const char *json;
        kvf_status status;
        const char *part;
    } cases[] = {
        {"{}", KVF_CORRUPT, "added_tokens is an object"},
        {"[1]", KVF_CORRUPT, "added_tokens[0] needs a content"},
        {"[{\"id\":4,\"content\":\"\"}]", KVF_CORRUPT, "added_tokens[0] needs a content"},
        {"[{\"content\":\"x\"}]", KVF_CORRUPT, "added_tokens[0] needs a content"},
        {"[{\"id\":4,\"content\":\"x\",\"y\":1}]", KVF_UNSUPPORTED, "unknown field \"y\""},
        {"[{\"id\":4,\"content\":\"x\",\"special\":1}]", KVF_CORRUPT, "special is 1"},
        {"[{\"id\":5,\"content\":\"x\"}]", KVF_CORRUPT,
         "\"x\" has id 5, but the vocabulary makes it 4"},
        {"[{\"id\":4,\"content\":\"a\"}]", KVF_CORRUPT,
         "\"a\" has id 4, but the vocabulary makes it 0"},
        {"[{\"id\":4,\"content\":\"x\"},{\"id\":5,\"content\":\"x\"}]", KVF_CORRUPT,
         "\"x\" is there twice"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        file_parts p = words;
        p.added = cases[i].json;
        expect_refusal(&p, cases[i].status, cases[i].part);
    }
    file_parts p = words; /* ids with a gap, so that the next one is taken */
    p.model = "{\"type\":\"WordLevel\",\"vocab\":{\"a\":0,\"b\":2}}";
    p.added = "[{\"id\":2,\"content\":\"x\"}]";
    expect_refusal(&p, KVF_CORRUPT, "the id 2 of \"x\" belongs to \"b\" already");
}

static void refuses_wrong_frames(void **state)
{
    (void)state;
    static const struct {
        const char *json;
        kvf_status status;
        const char *part;
    } cases[] = {
        {"{\"type\":\"BertProcessing\"}", KVF_UNSUPPORTED,
         "post_processor.type is \"BertProcessing\""},
        {"{\"type\":\"TemplateProcessing\"}", KVF_CORRUPT, "single is absent"},
        {"{\"type\":\"TemplateProcessing\",\"single\":[]}", KVF_UNSUPPORTED,
         "must have the sequence A"},
        {"{\"type\":\"TemplateProcessing\",\"single\":[{\"Sequence\":{\"id\":\"B\"}}]}",
         KVF_UNSUPPORTED, "around one sequence A"},
        {"{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{}}]}", KVF_CORRUPT,
         "a SpecialToken has no id"},
        {"{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"x\"}}]}",
         KVF_CORRUPT, "does not give the ids of \"x\""},
        {"{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"x\"}}],"
         "\"special_tokens\":{\"x\":{\"ids\":[9]}}}",
         KVF_CORRUPT, "an id that no token has"},
        {"{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"x\"}}],"
         "\"special_tokens\":{\"x\":{\"ids\":[1,1,1,1,1,1,1,1,1]}}}",
         KVF_UNSUPPORTED, "more than 8 tokens"},
        {"7", KVF_CORRUPT, "post_processor is a number"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        file_parts p = words;
        p.post = cases[i].json;
        expect_refusal(&p, cases[i].status, cases[i].part);
    }
}

static void does_what_it_says(void **state)
{
    (void)state;
    file_parts p = words;
    p.post = "{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"x\"}},"
             "{\"Sequence\":{\"id\":\"A\",\"type_id\":0}}],\"pair\":[],"
             "\"special_tokens\":{\"x\":{\"id\":\"x\",\"ids\":[3,1],\"tokens\":[\"c\",\"b\"]}}}";
    p.added = "[{\"id\":4,\"content\":\"s\xcc\xa3t\",\"normalized\":true},"
              "{\"id\":5,\"content\":\"<x>\",\"special\":true,\"lstrip\":true}]";
    p.normalizer = "{\"type\":\"NFC\"}";
    kvf_tokenizer *t = open_parts(&p);
    expect_ids(t, "a  zzz\u2003 b", true, 5, (uint32_t[]){3, 1, 0, 2, 1});
    expect_ids(t, "", true, 2, (uint32_t[]){3, 1});
    /* a normalised token is found in both spellings, whatever its own */
    expect_ids(t, "a\u1e63tb s\u0323t  <x>c", false, 6, (uint32_t[]){0, 4, 1, 4, 5, 3});
    kvf_tokenizer_close(t);

    p = words; /* a literal, removed */
    p.pre = "{\"type\":\"Split\",\"pattern\":{\"String\":\".(\"},\"behavior\":\"Removed\","
            "\"invert\":false}";
    t = open_parts(&p);
    expect_ids(t, "a.(b.(.(c", false, 3, (uint32_t[]){0, 1, 3});
    kvf_tokenizer_close(t);

    p = words; /* digits one by one, or together */
    p.model = "{\"type\":\"WordLevel\",\"vocab\":{\"a\":0,\"1\":1,\"\u0662\":2,\"1\u0662\":3}}";
    p.pre = "{\"type\":\"Digits\",\"individual_digits\":true}";
    t = open_parts(&p);
    expect_ids(t, "a1\u0662a", false, 4, (uint32_t[]){0, 1, 2, 0});
    kvf_tokenizer_close(t);
    p.pre = "{\"type\":\"Digits\"}";
    t = open_parts(&p);
    expect_ids(t, "a1\u0662a", false, 3, (uint32_t[]){0, 3, 0});
    kvf_tokenizer_close(t);

    p = words; /* no unknown token */
    p.model = "{\"type\":\"WordLevel\",\"vocab\":{\"a\":0}}";
    t = open_parts(&p);
    kvf_token_ids ids = {0};
    kvf_error error = {0};
    fixture_expect(kvf_tokenizer_encode(t, "a nope", 6, false, &ids, &error), &error, KVF_INVALID,
                   "the word \"nope\" is not in the vocabulary");
    assert_int_equal(ids.count, 0);
    kvf_token_ids_free(NULL, &ids);
    kvf_tokenizer_close(t);

    p = words; /* merges by rank; bytes without a token are dropped */
    p.pre = byte_level;
    p.model = BPE(",\"merges\":[[\"a\",\"b\"],\"ab b\"]");
    t = open_parts(&p);
    expect_ids(t, "abb", false, 1, (uint32_t[]){3});
    expect_ids(t, "bab", false, 2, (uint32_t[]){1, 2});
    expect_ids(t, "a!b", false, 2, (uint32_t[]){0, 1});
    expect_ids(t, "!", false, 0, (uint32_t[]){0});
    kvf_tokenizer_close(t);
}

/* An added token that has to be normalised, and a word pattern: found by fuzzing. */
static void survives_failing_allocation(void **state)
{
    (void)state;
    file_parts p = words;
    p.added = "[{\"id\":4,\"content\":\"n\xcc\x83\",\"normalized\":true,\"single_word\":true}]";
    p.normalizer = "{\"type\":\"NFC\"}";
    p.pre = "{\"type\":\"Whitespace\"}";
    bool reached = true;
    size_t fail_at = 0;
    while (reached) {
        fixture_heap heap = {.fail_at = ++fail_at};
        kvf_allocator allocator = fixture_allocator(&heap);
        kvf_tokenizer *tokenizer;
        kvf_token_ids ids = {0};
        kvf_error error = {0};
        kvf_status status = parse_parts(&p, &allocator, &tokenizer, &error);
        if (status == KVF_OK)
            status =
                kvf_tokenizer_encode(tokenizer, "a, n\xcc\x83 \xc3\xb1", 9, true, &ids, &error);
        if (status != KVF_OK)
            fixture_expect(status, &error, KVF_OUT_OF_MEMORY, "could not be allocated");
        kvf_token_ids_free(&allocator, &ids);
        kvf_tokenizer_close(tokenizer);
        assert_int_equal(heap.live, 0);
        reached = heap.calls >= fail_at;
    }
    assert_true(fail_at > 12);
}

static void opens_directories(void **state)
{
    (void)state;
    char *directory = fixture_directory_create();
    kvf_tokenizer *tokenizer;
    kvf_error error = {0};
    fixture_expect(kvf_tokenizer_open(directory, NULL, &tokenizer, &error), &error, KVF_SYSTEM,
                   "tokenizer.json cannot be opened: No such file");
    fixture_write_text(directory, "tokenizer.json", "{\"model\":");
    fixture_expect(kvf_tokenizer_open(directory, NULL, &tokenizer, &error), &error, KVF_CORRUPT,
                   "tokenizer.json: not valid JSON: ");
    char text[1024];
    snprintf(text, sizeof text, "{\"pre_tokenizer\":{\"type\":\"Whitespace\"},\"model\":%s}",
             words_model);
    fixture_write_text(directory, "tokenizer.json", text);
    assert_int_equal(kvf_tokenizer_open(directory, NULL, &tokenizer, &error), KVF_OK);
    expect_ids(tokenizer, "a,b", false, 3, (uint32_t[]){0, 2, 1});
    kvf_tokenizer_close(tokenizer);
    fixture_directory_remove(directory);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(refuses_unknown_parts),       cmocka_unit_test(refuses_unknown_splits),
        cmocka_unit_test(refuses_wrong_models),        cmocka_unit_test(refuses_wrong_added_tokens),
        cmocka_unit_test(refuses_wrong_frames),        cmocka_unit_test(does_what_it_says),
        cmocka_unit_test(survives_failing_allocation), cmocka_unit_test(opens_directories),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
