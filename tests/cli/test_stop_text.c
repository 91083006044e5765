/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Texts that end an answer: however the answer is cut, what goes through is the text in front of
 * the stop that is complete first, and nothing is held back that cannot begin a stop.
 */

#include "common/random.h"
#include "printer.h"
#include "unit.h"

static void push(cli_stop_filter *filter, const char *bytes, size_t size, kvf_text *out)
{
    kvf_error error = {0};
    assert_int_equal(cli_stop_push(filter, bytes, size, out, &error), KVF_OK);
}

static void finish(cli_stop_filter *filter, kvf_text *out)
{
    kvf_error error = {0};
    assert_int_equal(cli_stop_finish(filter, out, &error), KVF_OK);
    cli_stop_free(filter);
}

static const char *shown(const kvf_text *text)
{
    return text->bytes ? text->bytes : "";
}

TEST(holds_back_what_may_begin_a_stop)
{
    const cli_stop_texts stop = {.texts = {"\nUser:", "END"}, .count = 2};
    cli_stop_filter filter = {.stop = &stop};
    kvf_text out = {0};
    push(&filter, "one\n", 4, &out);
    assert_string_equal(shown(&out), "one");
    push(&filter, "Us", 2, &out);
    assert_string_equal(shown(&out), "one");
    push(&filter, "ually E", 7, &out);
    assert_string_equal(shown(&out), "one\nUsually ");
    push(&filter, "N", 1, &out);
    push(&filter, "D of", 4, &out);
    assert_true(filter.found);
    push(&filter, " it", 3, &out);
    finish(&filter, &out);
    assert_string_equal(shown(&out), "one\nUsually ");
    kvf_text_free(&out);
}

TEST(gives_the_rest_at_the_end)
{
    const cli_stop_texts stop = {.texts = {"END"}, .count = 1}, none = {.count = 0};
    cli_stop_filter filter = {.stop = &stop}, open = {.stop = &none};
    kvf_text out = {0};
    push(&filter, "an EN", 5, &out);
    assert_string_equal(shown(&out), "an ");
    finish(&filter, &out);
    assert_false(filter.found);
    assert_string_equal(shown(&out), "an EN");
    push(&open, "!", 1, &out);
    finish(&open, &out);
    assert_string_equal(shown(&out), "an EN!");
    kvf_text_free(&out);
}

/* How much of the text goes through, by definition. */
static size_t pass_of(const cli_stop_texts *stop, const char *text, size_t size)
{
    for (size_t end = 1; end <= size; end++) {
        size_t first = end;
        for (uint32_t i = 0; i < stop->count; i++) {
            const size_t length = strlen(stop->texts[i]);
            if (length <= end && memcmp(text + end - length, stop->texts[i], length) == 0 &&
                end - length < first)
                first = end - length;
        }
        if (first < end)
            return first;
    }
    return size;
}

TEST(cuts_do_not_matter)
{
    uint64_t random = 11;
    uint32_t stopped = 0;
    for (uint32_t round = 0; round < 2000; round++) {
        char text[40], words[3][6];
        cli_stop_texts stop = {.count = 1 + (uint32_t)(kvf_random_next(&random) % 3)};
        const size_t size = kvf_random_next(&random) % sizeof text;
        for (size_t i = 0; i < size; i++)
            text[i] = "abc"[kvf_random_next(&random) % 3];
        for (uint32_t i = 0; i < stop.count; i++) {
            const size_t length = 1 + kvf_random_next(&random) % 5;
            for (size_t j = 0; j < length; j++)
                words[i][j] = "abc"[kvf_random_next(&random) % 3];
            words[i][length] = '\0';
            stop.texts[i] = words[i];
        }
        cli_stop_filter filter = {.stop = &stop};
        kvf_text out = {0};
        for (size_t at = 0; at < size;) {
            size_t piece = 1 + kvf_random_next(&random) % 4;
            piece = piece < size - at ? piece : size - at;
            push(&filter, text + at, piece, &out);
            at += piece;
        }
        stopped += filter.found;
        finish(&filter, &out);
        assert_int_equal(out.size, pass_of(&stop, text, size));
        assert_true(out.size == 0 || memcmp(out.bytes, text, out.size) == 0);
        kvf_text_free(&out);
    }
    assert_true(stopped > 500 && stopped < 1900);
}
