/* SPDX-License-Identifier: Apache-2.0 */

/*
 * tokenizer.json: what is not understood is refused by name, what contradicts itself is refused
 * with the reason, and the options that the goldens do not use do what they say.
 */

#include "model_fixture.h"
#include "refusals.h"
#include "tokenizer.h"
#include "unit.h"
#include "watched_heap.h"

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

static kvf_status parse_parts(const file_parts *p, kvf_tokenizer **out, kvf_error *error)
{
    char text[4096];
    snprintf(text, sizeof text,
             "{\"version\":%s,\"truncation\":%s,\"padding\":%s,\"added_tokens\":%s,"
             "\"normalizer\":%s,\"pre_tokenizer\":%s,\"post_processor\":%s,\"decoder\":%s,"
             "\"model\":%s}",
             p->version, p->truncation, p->padding, p->added, p->normalizer, p->pre, p->post,
             p->decoder, p->model);
    return kvf_tokenizer_parse(text, strlen(text), out, error);
}

static kvf_tokenizer *open_parts(const file_parts *p)
{
    kvf_tokenizer *tokenizer;
    kvf_error error = {0};
    fixture_must(parse_parts(p, &tokenizer, &error), &error);
    return tokenizer;
}

static void expect_ids(const kvf_tokenizer *tokenizer, const char *text, bool add_special,
                       size_t count, const uint32_t *expected)
{
    kvf_token_ids ids = {0};
    kvf_error error = {0};
    fixture_must(kvf_tokenizer_encode(tokenizer, text, strlen(text), add_special, &ids, &error),
                 &error);
    assert_int_equal(ids.count, count);
    assert_memory_equal(ids.ids, expected, count * sizeof *expected);
    kvf_token_ids_free(&ids);
}

static const char **part_of(file_parts *p, const char *name)
{
    const struct {
        const char *name, **at;
    } all[] = {
        {"version", &p->version},     {"truncation", &p->truncation}, {"padding", &p->padding},
        {"added_tokens", &p->added},  {"normalizer", &p->normalizer}, {"pre_tokenizer", &p->pre},
        {"post_processor", &p->post}, {"decoder", &p->decoder},       {"model", &p->model}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (strcmp(all[i].name, name) == 0)
            return all[i].at;
    fail_msg("no part is called %s", name);
    return NULL;
}

/* FIELD JSON, and others after " & ". */
static kvf_status parse_row(void *user, char *change, size_t size, kvf_error *error)
{
    file_parts p = words;
    heap h = {0};
    heap_watch(&h);
    kvf_tokenizer *tokenizer;
    for (char *field = change, *next; field; field = next) {
        const char *json = refusals_part(field, &next);
        *part_of(&p, field) = json;
    }
    const kvf_status status = parse_parts(&p, &tokenizer, error);
    assert_int_equal(tokenizer == NULL, status != KVF_OK);
    kvf_tokenizer_close(tokenizer);
    assert_int_equal(heap_left(), 0);
    return status;
}

TEST(refuses_wrong_files)
{
    refusals_check(&(refusals){.path = "tests/model/tokenizer.refusals", .call = parse_row});
}

#define BPE(rest) "{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1,\"ab\":2,\"abb\":3}" rest "}"
static const char byte_level[] = "{\"type\":\"ByteLevel\",\"add_prefix_space\":false}";

TEST(does_what_it_says)
{
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
    kvf_token_ids_free(&ids);
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

TEST(opens_directories)
{
    char *directory = fixture_directory_create();
    kvf_tokenizer *tokenizer;
    kvf_error error = {0};
    fixture_expect(kvf_tokenizer_open(directory, &tokenizer, &error), &error, KVF_SYSTEM,
                   "tokenizer.json cannot be opened: No such file");
    fixture_write_text(directory, "tokenizer.model", "");
    fixture_expect(kvf_tokenizer_open(directory, &tokenizer, &error), &error, KVF_UNSUPPORTED,
                   "has tokenizer.model and no tokenizer.json; write one: python3 -c ");
    fixture_write_text(directory, "tokenizer.json", "{\"model\":");
    fixture_expect(kvf_tokenizer_open(directory, &tokenizer, &error), &error, KVF_CORRUPT,
                   "tokenizer.json: not valid JSON: ");
    char text[1024];
    snprintf(text, sizeof text, "{\"pre_tokenizer\":{\"type\":\"WhitespaceSplit\"},\"model\":%s}",
             words_model);
    fixture_write_text(directory, "tokenizer.json", text);
    assert_int_equal(kvf_tokenizer_open(directory, &tokenizer, &error), KVF_OK);
    expect_ids(tokenizer, "a , b", false, 3, (uint32_t[]){0, 2, 1});
    kvf_tokenizer_close(tokenizer);
    fixture_directory_remove(directory);
}

static const char plain[] = "null";
static const char framed[] =
    "{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"<u>\"}},"
    "{\"Sequence\":{\"id\":\"A\"}}],\"special_tokens\":{\"<u>\":{\"ids\":[2]}}}";

static void write_framed(const char *directory, const char *post)
{
    char text[1024];
    snprintf(text, sizeof text,
             "{\"pre_tokenizer\":{\"type\":\"WhitespaceSplit\"},\"model\":%s,"
             "\"post_processor\":%s}",
             words_model, post);
    fixture_write_text(directory, "tokenizer.json", text);
}

/* The flags of tokenizer_config.json for a text's ends go over the post-processor. */
TEST(follows_the_flags)
{
    static const struct {
        const char *post, *config;
        size_t count;
        uint32_t ids[3];
        const char *note;
    } cases[] = {
        {plain,
         "{\"add_bos_token\":true,\"bos_token\":\"<u>\"}",
         2,
         {2, 0},
         "is true: texts get a"},
        {plain,
         "{\"add_bos_token\":true,\"bos_token\":{\"content\":\"c\"},\"add_eos_token\":true,"
         "\"eos_token\":\"b\"}",
         3,
         {3, 0, 1},
         "\"b\""},
        {plain, "{\"add_bos_token\":true}", 1, {0}, ""},
        {plain, "{\"add_bos_token\":false,\"bos_token\":\"new\"}", 1, {0}, ""},
        {plain, "{\"bos_token\":\"<u>\"}", 1, {0}, ""},
        {framed, "{\"bos_token\":\"<u>\"}", 2, {2, 0}, ""},
        {framed, "{\"add_bos_token\":null,\"bos_token\":\"<u>\"}", 2, {2, 0}, ""},
        {framed, "{\"add_bos_token\":true,\"bos_token\":\"<u>\"}", 2, {2, 0}, ""},
        {framed,
         "{\"add_bos_token\":false,\"bos_token\":\"<u>\"}",
         1,
         {0},
         "is false: texts get no"},
    };
    char *directory = fixture_directory_create();
    kvf_tokenizer *t;
    kvf_error error = {0};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        write_framed(directory, cases[i].post);
        fixture_write_text(directory, "tokenizer_config.json", cases[i].config);
        fixture_must(kvf_tokenizer_open(directory, &t, &error), &error);
        expect_ids(t, "a", true, cases[i].count, cases[i].ids);
        expect_ids(t, "a", false, 1, (uint32_t[]){0});
        if (!strstr(kvf_tokenizer_note(t), cases[i].note) ||
            (kvf_tokenizer_note(t)[0] != 0) != (cases[i].note[0] != 0))
            fail_msg("%s: %s", cases[i].config, kvf_tokenizer_note(t));
        kvf_tokenizer_close(t);
    }
    fixture_directory_remove(directory);
}

/* A frame that the text spells too, and flags that cannot be followed. */
TEST(refuses_flags_without_tokens)
{
    char *directory = fixture_directory_create();
    kvf_tokenizer *t;
    kvf_error error = {0};
    write_framed(directory, framed);
    assert_int_equal(kvf_tokenizer_open(directory, &t, &error), KVF_OK);
    assert_true(kvf_tokenizer_starts_twice(t, (uint32_t[]){2, 2, 0}, 3));
    assert_false(kvf_tokenizer_starts_twice(t, (uint32_t[]){2, 0, 2}, 3));
    assert_false(kvf_tokenizer_starts_twice(t, (uint32_t[]){2}, 1));
    kvf_tokenizer_close(t);
    fixture_write_text(directory, "tokenizer_config.json",
                       "{\"add_bos_token\":true,\"bos_token\":\"new\"}");
    fixture_expect(kvf_tokenizer_open(directory, &t, &error), &error, KVF_CORRUPT,
                   "tokenizer_config.json: bos_token is \"new\", which is no token of "
                   "tokenizer.json, and add_bos_token is true");
    assert_null(t);
    fixture_write_text(directory, "tokenizer_config.json", "{");
    fixture_expect(kvf_tokenizer_open(directory, &t, &error), &error, KVF_CORRUPT,
                   "tokenizer_config.json: not valid JSON");
    fixture_directory_remove(directory);
}
