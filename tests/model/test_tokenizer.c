/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Tokenizers of five kinds against HF `tokenizers`: the ids of 10240 hostile strings each, and the
 * text they decode to, whole and streamed. goldens/NAME.txt holds what HF gave.
 */

#include "bpe.h"
#include "hostile_text.h"
#include "model_fixture.h"
#include "tokenizer.h"
#include "unit.h"
#include "utf8.h"
#include "watched_heap.h"

#include <inttypes.h>
#include <pthread.h>

static hostile_text hostile;

static int open_hostile(void **state)
{
    hostile = hostile_text_open();
    print_message("seed %u, %u strings\n", HOSTILE_SEED, HOSTILE_STRINGS);
    return 0;
}

static int close_hostile(void **state)
{
    hostile_text_close(&hostile);
    return 0;
}

static uint64_t hash_step(uint64_t hash, uint32_t value)
{
    return (hash ^ value) * 0x100000001b3u;
}

static uint64_t hash_text(uint64_t hash, const kvf_text *text)
{
    for (size_t i = 0; i < text->size; i++)
        hash = hash_step(hash, (unsigned char)text->bytes[i]);
    return hash;
}

typedef struct result {
    kvf_text text;
    kvf_token_ids ids;
    kvf_text plain, skipped; /* decoded with and without special tokens */
} result;

static void result_make(result *r, const kvf_tokenizer *tokenizer, uint32_t index)
{
    kvf_error error = {0};
    hostile_text_make(&hostile, index, &r->text);
    r->ids.count = r->plain.size = r->skipped.size = 0;
    if (kvf_tokenizer_encode(tokenizer, r->text.bytes, r->text.size, index % 2 == 0, &r->ids,
                             &error) != KVF_OK)
        fail_msg("string %u: %s", index, error.text);
    assert_int_equal(
        kvf_tokenizer_decode(tokenizer, r->ids.ids, r->ids.count, false, &r->plain, &error),
        KVF_OK);
    assert_int_equal(
        kvf_tokenizer_decode(tokenizer, r->ids.ids, r->ids.count, true, &r->skipped, &error),
        KVF_OK);
}

static void result_free(result *r)
{
    kvf_text_free(&r->text);
    kvf_token_ids_free(&r->ids);
    kvf_text_free(&r->plain);
    kvf_text_free(&r->skipped);
}

/* The next line of the golden file that starts with @p word, after the word. */
static char *next_line(char **save, const char *word)
{
    char *line = strtok_r(NULL, "\n", save);
    if (line == NULL || strncmp(line, word, strlen(word)) != 0)
        fail_msg("the golden has \"%.40s\" where \"%s\" should be", line != NULL ? line : "no line",
                 word);
    return line + strlen(word);
}

static void expect_ids(const result *r, uint32_t index, char *expected)
{
    size_t count = 0;
    for (char *end = expected; *expected != '\0'; expected = end, count++) {
        unsigned long id = strtoul(expected, &end, 10);
        if (count >= r->ids.count || r->ids.ids[count] != id)
            fail_msg("string %u \"%s\": id %zu is not %lu", index, r->text.bytes, count, id);
        while (*end == ' ')
            end++;
    }
    assert_int_equal(r->ids.count, count);
}

enum { FULL = 24 };

static void matches_golden(const char *name)
{
    char path[1024];
    size_t size;
    snprintf(path, sizeof path, "%s/%s.txt", KVF_GOLDENS, name);
    char *golden = fixture_read(path, &size);
    char *save = NULL;
    print_message("%s: %s\n", name, strtok_r(golden, "\n", &save));
    kvf_tokenizer *tokenizer = fixture_tokenizer(name);
    result r = {0};
    uint64_t hash = 0;
    uint64_t ids = 0;
    for (uint32_t index = 0; index < HOSTILE_STRINGS; index++) {
        result_make(&r, tokenizer, index);
        ids += r.ids.count;
        if (index < FULL)
            expect_ids(&r, index, next_line(&save, "ids "));
        if (index % HOSTILE_GROUP == 0)
            hash = 0xcbf29ce484222325u;
        for (size_t i = 0; i < r.ids.count; i++)
            hash = hash_step(hash, r.ids.ids[i]);
        hash = hash_text(hash_step(hash, UINT32_MAX), &r.plain);
        hash = hash_text(hash_step(hash, UINT32_MAX), &r.skipped);
        if (index % HOSTILE_GROUP == HOSTILE_GROUP - 1 &&
            strtoull(next_line(&save, "hash "), NULL, 16) != hash)
            fail_msg("%s: strings %u to %u differ from HF", name, index - HOSTILE_GROUP + 1, index);
    }
    assert_null(strtok_r(NULL, "\n", &save));
    print_message("%s: %" PRIu64 " ids\n", name, ids);
    result_free(&r);
    kvf_tokenizer_close(tokenizer);
    free(golden);
}

TEST(ids_are_those_of_hf)
{
    static const char *const names[] = {"llama3", "qwen2", "tekken", "gpt2", "words"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        matches_golden(names[i]);
}

/* ---- decoding ---- */

/* Streaming any ids, also such that break characters apart, gives the pieces of the whole, each of
   them whole characters. */
TEST(streams_whole_characters)
{
    static const char *const names[] = {"llama3", "qwen2", "gpt2", "words"};
    uint64_t random = 42;
    for (size_t n = 0; n < sizeof names / sizeof *names; n++) {
        kvf_tokenizer *tokenizer = fixture_tokenizer(names[n]);
        kvf_error error;
        kvf_text whole = {0};
        kvf_text streamed = {0};
        for (uint32_t trial = 0; trial < 2000; trial++) {
            uint32_t ids[40];
            for (size_t i = 0; i < 40; i++) {
                random = random * 6364136223846793005u + 1442695040888963407u;
                /* mostly the single bytes, which come first; sometimes an id that nobody has */
                uint32_t limit = trial % 4 == 0 ? kvf_tokenizer_size(tokenizer) + 5 : 260;
                ids[i] = (uint32_t)(random >> 33) % limit;
            }
            whole.size = streamed.size = 0;
            bool skip = trial % 2 == 0;
            assert_int_equal(kvf_tokenizer_decode(tokenizer, ids, 40, skip, &whole, &error),
                             KVF_OK);
            kvf_token_stream stream = {.tokenizer = tokenizer, .skip_special = skip};
            for (size_t i = 0; i < 40; i++) {
                assert_int_equal(kvf_token_stream_push(&stream, ids[i], &streamed, &error), KVF_OK);
                assert_int_equal(utf8_valid_prefix(streamed.bytes, streamed.size), streamed.size);
            }
            assert_int_equal(kvf_token_stream_finish(&stream, &streamed, &error), KVF_OK);
            assert_int_equal(whole.size, streamed.size);
            assert_memory_equal(whole.bytes, streamed.bytes, whole.size);
        }
        kvf_text_free(&whole);
        kvf_text_free(&streamed);
        kvf_tokenizer_close(tokenizer);
    }
}

TEST(replaces_broken_characters)
{
    static const struct {
        uint8_t bytes[6];
        size_t count;
        const char *text;
    } cases[] = {
        {{0xf0, 0x9f, 0x98, 0x80}, 4, "\xf0\x9f\x98\x80"},
        {{0xf0, 0x9f, 0x98}, 3, "\xef\xbf\xbd"},
        {{0xf0, 0x9f, 'a'},
         3,
         "\xef\xbf\xbd"
         "a"},
        {{0xe0, 0x80, 0x80}, 3, "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"},
        {{0xed, 0xa0, 0x80}, 3, "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"},
        {{0xf4, 0x90, 0x80, 0x80}, 4, "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"},
        {{0xc3, 0xc3, 0xa9}, 3, "\xef\xbf\xbd\xc3\xa9"},
        {{0xff, 0xc0, 'x'}, 3, "\xef\xbf\xbd\xef\xbf\xbdx"},
    };
    kvf_tokenizer *tokenizer = fixture_tokenizer("llama3");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        uint32_t ids[6];
        for (size_t b = 0; b < cases[i].count; b++) {
            uint8_t byte = cases[i].bytes[b];
            char name[5] = {0};
            utf8_encode(byte_alphabet_char(byte), name);
            assert_true(kvf_tokenizer_find(tokenizer, name, &ids[b]));
        }
        kvf_text text = {0};
        kvf_error error;
        assert_int_equal(kvf_tokenizer_decode(tokenizer, ids, cases[i].count, false, &text, &error),
                         KVF_OK);
        assert_string_equal(text.bytes, cases[i].text);
        kvf_text_free(&text);
    }
    kvf_tokenizer_close(tokenizer);
}

/* ---- other promises ---- */

TEST(answers_questions)
{
    kvf_tokenizer *tokenizer = fixture_tokenizer("llama3");
    uint32_t id;
    assert_true(kvf_tokenizer_find(tokenizer, "<|eot_id|>", &id));
    assert_true(kvf_tokenizer_is_special(tokenizer, id));
    assert_string_equal(kvf_tokenizer_token(tokenizer, id), "<|eot_id|>");
    assert_int_equal(kvf_tokenizer_size(tokenizer), 1405);
    assert_null(kvf_tokenizer_token(tokenizer, 1405));
    assert_false(kvf_tokenizer_find(tokenizer, "no such token", &id));
    assert_true(kvf_tokenizer_find(tokenizer, "!", &id));
    assert_int_equal(id, 0);
    assert_false(kvf_tokenizer_is_special(tokenizer, id));
    kvf_tokenizer_close(tokenizer);
    kvf_tokenizer_close(NULL);
}

TEST(refuses_broken_text)
{
    static const struct {
        const char *text;
        size_t size;
        const char *part;
    } cases[] = {
        {"ab\xff", 3, "byte 2 (0xff)"},           {"\xc3", 1, "byte 0 (0xc3)"},
        {"a\xed\xa0\x80", 4, "byte 1 (0xed)"},    {"\xf0\x82\x82\xac", 4, "byte 0 (0xf0)"},
        {"\xe2\x82\xac\x80", 4, "byte 3 (0x80)"}, {"\xf5\x80\x80\x80", 4, "byte 0 (0xf5)"},
    };
    kvf_tokenizer *tokenizer = fixture_tokenizer("qwen2");
    kvf_token_ids ids = {0};
    kvf_error error = {0};
    assert_int_equal(kvf_tokenizer_encode(tokenizer, "", 0, true, &ids, &error), KVF_OK);
    assert_int_equal(ids.count, 0);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        fixture_expect(
            kvf_tokenizer_encode(tokenizer, cases[i].text, cases[i].size, true, &ids, &error),
            &error, KVF_INVALID, cases[i].part);
    assert_int_equal(ids.count, 0);
    kvf_tokenizer_close(tokenizer);
}

/* A megabyte without a boundary costs what a megabyte costs: the time limit of this test is the
   check that neither merging nor ordering marks is quadratic. */
TEST(long_words_are_not_quadratic)
{
    enum { BYTES = 1 << 20 };
    static const char *const units[] = {
        "a", " ", "\n", "the", "\xcc\xa3\xcc\x81", "\xe4\xb8\xad", "<|im_", "9"};
    char *text = malloc(BYTES);
    assert_non_null(text);
    kvf_tokenizer *tokenizer = fixture_tokenizer("qwen2");
    for (size_t u = 0; u < sizeof units / sizeof *units; u++) {
        size_t unit = strlen(units[u]);
        size_t size = BYTES / unit * unit;
        for (size_t at = 0; at < size; at += unit)
            memcpy(text + at, units[u], unit);
        kvf_token_ids ids = {0};
        kvf_error error;
        assert_int_equal(kvf_tokenizer_encode(tokenizer, text, size, false, &ids, &error), KVF_OK);
        assert_true(ids.count > 0);
        kvf_token_ids_free(&ids);
    }
    kvf_tokenizer_close(tokenizer);
    free(text);
}

/* Whichever allocation fails, there is a message and nothing is left. */
TEST(survives_failing_allocation)
{
    static const char *const names[] = {"llama3", "gpt2", "words"};
    static const char text[] = "<s> e\xcc\x81"
                               "cole <mask> 123 hello  world\n\n<|eot_id|> 'tis";
    for (size_t n = 0; n < sizeof names / sizeof *names; n++) {
        char path[1024];
        size_t size;
        snprintf(path, sizeof path, "%s/%s.tokenizer.json", KVF_GOLDENS, names[n]);
        char *json = fixture_read(path, &size);
        bool reached = true;
        int64_t fail_at = 0;
        while (reached) {
            heap h = {.fail_at = ++fail_at};
            heap_watch(&h);
            kvf_tokenizer *tokenizer;
            kvf_token_ids ids = {0};
            kvf_text out = {0};
            kvf_error error = {0};
            kvf_status status = kvf_tokenizer_parse(json, size, &tokenizer, &error);
            if (status == KVF_OK)
                status = kvf_tokenizer_encode(tokenizer, text, sizeof text - 1, true, &ids, &error);
            if (status == KVF_OK)
                status = kvf_tokenizer_decode(tokenizer, ids.ids, ids.count, false, &out, &error);
            if (status != KVF_OK)
                fixture_expect(status, &error, KVF_OUT_OF_MEMORY, "could not be allocated");
            kvf_token_ids_free(&ids);
            kvf_text_free(&out);
            kvf_tokenizer_close(tokenizer);
            assert_int_equal(heap_left(), 0);
            reached = h.asked >= fail_at;
        }
        assert_true(fail_at > 12);
        free(json);
    }
}

/* ---- threads ---- */

typedef struct worker {
    const kvf_tokenizer *tokenizer;
    uint64_t hash;
} worker;

static void *encode_some(void *argument)
{
    worker *self = argument;
    result r = {0};
    for (uint32_t index = 0; index < 512; index++) {
        result_make(&r, self->tokenizer, index);
        for (size_t i = 0; i < r.ids.count; i++)
            self->hash = hash_step(self->hash, r.ids.ids[i]);
    }
    result_free(&r);
    return NULL;
}

TEST(threads_share_one)
{
    kvf_tokenizer *tokenizer = fixture_tokenizer("gpt2");
    worker workers[4];
    pthread_t threads[4];
    for (size_t i = 0; i < 4; i++) {
        workers[i] = (worker){.tokenizer = tokenizer, .hash = 1};
        assert_int_equal(pthread_create(&threads[i], NULL, encode_some, &workers[i]), 0);
    }
    for (size_t i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    for (size_t i = 1; i < 4; i++)
        assert_true(workers[i].hash == workers[0].hash);
    kvf_tokenizer_close(tokenizer);
}

TESTS_RUN_BETWEEN(open_hostile, close_hostile)
