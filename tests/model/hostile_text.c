/* SPDX-License-Identifier: Apache-2.0 */

/* See the header. */

#include "hostile_text.h"
#include "unit.h"

#include "common/random.h"
#include "model_fixture.h"
#include "utf8.h"

static void load_fragments(hostile_text *self)
{
    size_t size;
    char *text = fixture_read(KVF_GOLDENS "/fragments.txt", &size);
    self->documents = calloc(size, sizeof *self->documents);
    assert_non_null(self->documents);
    char *save = NULL;
    for (char *line = strtok_r(text, "\n", &save); line != NULL;
         line = strtok_r(NULL, "\n", &save)) {
        kvf_error error;
        json_t **document = &self->documents[self->count++];
        assert_int_equal(json_parse(line, strlen(line), "fragments", document, &error), KVF_OK);
    }
    free(text);
    assert_true(self->count > 300);
}

static void load_ranges(hostile_text *self)
{
    size_t size;
    char *text = fixture_read(KVF_GOLDENS "/assigned.txt", &size);
    self->ranges = calloc(size, sizeof *self->ranges);
    assert_non_null(self->ranges);
    char *save = NULL;
    for (char *line = strtok_r(text, "\n", &save); line != NULL;
         line = strtok_r(NULL, "\n", &save)) {
        hostile_range *range = &self->ranges[self->ranges_count++];
        char *high;
        range->low = (uint32_t)strtoul(line, &high, 16);
        range->high = (uint32_t)strtoul(high + 1, NULL, 16);
        assert_true(*high == '-' && range->low <= range->high && range->high < 0x110000);
    }
    free(text);
    assert_true(self->ranges_count > 600);
}

hostile_text hostile_text_open(void)
{
    hostile_text self = {0};
    load_fragments(&self);
    load_ranges(&self);
    return self;
}

void hostile_text_close(hostile_text *self)
{
    for (size_t i = 0; i < self->count; i++)
        json_decref(self->documents[i]);
    free(self->documents);
    free(self->ranges);
}

/* ---- generator ---- */

static uint64_t below(uint64_t *state, uint64_t n)
{
    return kvf_random_next(state) % n;
}

static void append(kvf_text *out, const void *bytes, size_t size)
{
    kvf_error error;
    assert_int_equal(kvf_text_append(out, bytes, size, &error), KVF_OK);
}

static void append_code(kvf_text *out, uint64_t code)
{
    char bytes[4];
    append(out, bytes, utf8_encode((uint32_t)code, bytes));
}

static void append_fragment(const hostile_text *self, uint64_t *state, kvf_text *out)
{
    json_t *fragment = self->documents[below(state, self->count)];
    append(out, json_string_value(fragment), json_string_length(fragment));
}

static void append_many(uint64_t *state, uint64_t count, uint32_t first, uint64_t n, kvf_text *out)
{
    for (uint64_t i = 0; i < count; i++)
        append_code(out, first + below(state, n));
}

static void append_piece(const hostile_text *self, uint64_t *state, kvf_text *out)
{
    uint64_t kind = below(state, 16);
    if (kind < 8) {
        append(out, " ", kind == 7);
        append_fragment(self, state, out);
    } else if (kind < 10) {
        const hostile_range *range = &self->ranges[below(state, self->ranges_count)];
        append_code(out, range->low + below(state, range->high - range->low + 1));
    } else if (kind == 10) {
        json_t *fragment = self->documents[below(state, self->count)];
        uint64_t times = 2 + below(state, 20);
        for (uint64_t i = 0; i < times; i++)
            append(out, json_string_value(fragment), json_string_length(fragment));
    } else if (kind == 11) {
        append_many(state, 1 + below(state, 12), 0x20, 0x5f, out);
    } else if (kind == 12) {
        append_many(state, 1 + below(state, 9), 0x30, 10, out);
    } else if (kind == 13) {
        uint64_t count = 1 + below(state, 6);
        for (uint64_t i = 0; i < count; i++)
            append(out, &" \t\n\r"[below(state, 4)], 1);
    } else if (kind == 14) {
        append_many(state, 1 + below(state, 14), 0x61, 26, out);
    } else {
        append_code(out, 0x61 + below(state, 26));
        append_many(state, 1 + below(state, 6), 0x300, 0x70, out);
    }
}

void hostile_text_make(const hostile_text *self, uint32_t index, kvf_text *out)
{
    uint64_t state = HOSTILE_SEED ^ index * 0xd1342543de82ef95u;
    out->size = 0;
    kvf_text tail = {0};
    append(&tail, "", 0);
    append(out, "", 0);
    uint64_t pieces = 1 + below(&state, 12);
    for (uint64_t i = 0; i < pieces; i++)
        append_piece(self, &state, &tail);
    if (index % 512 == 511) {
        kvf_text piece = {0};
        append_piece(self, &state, &piece);
        uint64_t times = 100 + below(&state, 900);
        for (uint64_t i = 0; i < times; i++)
            append(out, piece.bytes, piece.size);
        kvf_text_free(&piece);
    }
    append(out, tail.bytes, tail.size);
    kvf_text_free(&tail);
}
