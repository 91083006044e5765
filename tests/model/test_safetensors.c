/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Safetensors files: what is good is read exactly, and whatever is wrong is refused with the name
 * of the tensor or file, without a leak, whichever allocation fails.
 */

#include "model_fixture.h"
#include "refusals.h"
#include "unit.h"
#include "watched_heap.h"
#include "weights.h"

#define IMAGE_MAX 4096u

typedef struct image {
    _Alignas(16) char bytes[IMAGE_MAX];
    size_t size;
} image;

static void put_u64(char *out, uint64_t value)
{
    for (size_t i = 0; i < 8; i++)
        out[i] = (char)(value >> (8 * i));
}

/* Header, padded with spaces to 8 bytes as the format's library does, then data 0, 1, 2, … */
static image make_image(const char *header, size_t data_bytes)
{
    image out = {.size = 0};
    size_t length = strlen(header);
    size_t padded = (length + 7) / 8 * 8;
    assert_true(8 + padded + data_bytes <= IMAGE_MAX);
    put_u64(out.bytes, padded);
    memset(out.bytes + 8, ' ', padded);
    memcpy(out.bytes + 8, header, length);
    for (size_t i = 0; i < data_bytes; i++)
        out.bytes[8 + padded + i] = (char)i;
    out.size = 8 + padded + data_bytes;
    return out;
}

static const char good_header[] =
    "{\"__metadata__\":{\"format\":\"pt\"},"
    "\"b.weight\":{\"dtype\":\"BF16\",\"shape\":[2,3],\"data_offsets\":[0,12]},"
    "\"a.weight\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[16,24]},"
    "\"c\":{\"dtype\":\"F16\",\"shape\":[],\"data_offsets\":[12,14]},"
    "\"empty\":{\"dtype\":\"F16\",\"shape\":[0,7],\"data_offsets\":[24,24]}}";
enum { GOOD_DATA = 24 };

static kvf_status open_image(const image *file, kvf_weights **out, kvf_error *error)
{
    return kvf_weights_open_memory(file->bytes, file->size, out, error);
}

TEST(reads_what_is_there)
{
    image file = make_image(good_header, GOOD_DATA);
    kvf_error error;
    kvf_weights *weights;
    assert_int_equal(open_image(&file, &weights, &error), KVF_OK);
    assert_int_equal(kvf_weights_count(weights), 4);
    assert_int_equal(kvf_weights_bytes(weights), 12 + 8 + 2);
    static const char *const names[] = {"a.weight", "b.weight", "c", "empty"};
    for (size_t i = 0; i < 4; i++)
        assert_string_equal(kvf_weights_at(weights, i)->name, names[i]);
    const kvf_tensor *b = kvf_weights_get(weights, "b.weight");
    assert_non_null(b);
    assert_int_equal(b->dtype, KVF_BF16);
    assert_int_equal(b->rank, 2);
    assert_int_equal(b->shape[0], 2);
    assert_int_equal(b->shape[1], 3);
    assert_memory_equal(b->data, "\0\1\2\3\4\5\6\7\10\11\12\13", 12);
    assert_int_equal(kvf_weights_get(weights, "c")->rank, 0);
    assert_memory_equal(kvf_weights_get(weights, "c")->data, "\14\15", 2);
    assert_memory_equal(kvf_weights_get(weights, "a.weight")->data, "\20\21\22\23\24\25\26\27", 8);
    assert_null(kvf_weights_get(weights, "d"));
    kvf_weights_close(weights);
    kvf_weights_close(NULL);
}

TEST(finds_by_shape)
{
    image file = make_image(good_header, GOOD_DATA);
    kvf_error error;
    kvf_weights *weights;
    const kvf_tensor *tensor;
    assert_int_equal(open_image(&file, &weights, &error), KVF_OK);
    assert_int_equal(kvf_weights_find(weights, "b.weight", 2, (uint64_t[]){2, 3}, &tensor, &error),
                     KVF_OK);
    fixture_expect(kvf_weights_find(weights, "b.weight", 2, (uint64_t[]){3, 2}, &tensor, &error),
                   &error, KVF_CORRUPT,
                   "tensor b.weight has shape [2, 3], but config.json needs [3, 2]");
    fixture_expect(kvf_weights_find(weights, "b.weight", 1, (uint64_t[]){6}, &tensor, &error),
                   &error, KVF_CORRUPT, "needs [6]");
    fixture_expect(kvf_weights_find(weights, "lm_head.weight", 1, (uint64_t[]){6}, &tensor, &error),
                   &error, KVF_CORRUPT, "tensor lm_head.weight is missing");
    kvf_weights_close(weights);
}

/* Bytes that a header length that lies would reach. */
TEST(refuses_lying_lengths)
{
    image file = make_image(good_header, GOOD_DATA);
    static const uint64_t lies[] = {
        0, 1, UINT64_MAX, UINT64_MAX - 7, 1ull << 63, 100ull << 20, (100ull << 20) + 1, IMAGE_MAX};
    for (size_t i = 0; i < sizeof lies / sizeof *lies; i++) {
        put_u64(file.bytes, lies[i]);
        kvf_error error;
        kvf_weights *weights;
        fixture_expect(open_image(&file, &weights, &error), &error, KVF_CORRUPT, "memory: ");
    }
}

/* ---- directories ---- */

static const char shard_a[] = "{\"a\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[0,4]}}";
static const char shard_b[] = "{\"b\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[0,4]},"
                              "\"c\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[4,8]}}";
static const char good_index[] =
    "{\"metadata\":{\"total_size\":12},\"weight_map\":{\"a\":\"s1.safetensors\","
    "\"b\":\"s2.safetensors\",\"c\":\"s2.safetensors\"}}";

static void write_shards(const char *directory, const char *index)
{
    image a = make_image(shard_a, 4);
    image b = make_image(shard_b, 8);
    fixture_write(directory, "s1.safetensors", a.bytes, a.size);
    fixture_write(directory, "s2.safetensors", b.bytes, b.size);
    fixture_write_text(directory, "model.safetensors.index.json", index);
}

TEST(opens_directories)
{
    char *directory = fixture_directory_create();
    kvf_error error;
    kvf_weights *weights;
    fixture_expect(kvf_weights_open(directory, &weights, &error), &error, KVF_SYSTEM,
                   "holds neither model.safetensors nor");
    write_shards(directory, good_index);
    assert_int_equal(kvf_weights_open(directory, &weights, &error), KVF_OK);
    assert_int_equal(kvf_weights_count(weights), 3);
    assert_memory_equal(kvf_weights_get(weights, "c")->data, "\4\5\6\7", 4);
    kvf_weights_close(weights);
    image single = make_image(good_header, GOOD_DATA);
    fixture_write(directory, "model.safetensors", single.bytes, single.size);
    assert_int_equal(kvf_weights_open(directory, &weights, &error), KVF_OK);
    assert_int_equal(kvf_weights_count(weights), 4);
    kvf_weights_close(weights);
    fixture_write(directory, "model.safetensors", "", 0);
    fixture_expect(kvf_weights_open(directory, &weights, &error), &error, KVF_CORRUPT,
                   "not a regular file with contents");
    fixture_directory_remove(directory);
}

/* A row of a header, or of the index of a directory. */
static kvf_status open_row(void *user, char *change, size_t size, kvf_error *error)
{
    const char *directory = user, *json = refusals_value(change);
    heap h = {0};
    heap_watch(&h);
    kvf_weights *weights;
    kvf_status status;
    if (strcmp(change, "header") == 0) {
        const image file = make_image(json, 16);
        status = open_image(&file, &weights, error);
    } else {
        write_shards(directory, json);
        status = kvf_weights_open(directory, &weights, error);
    }
    assert_int_equal(weights == NULL, status != KVF_OK);
    kvf_weights_close(weights);
    assert_int_equal(heap_left(), 0);
    return status;
}

TEST(refuses_what_is_wrong)
{
    char *directory = fixture_directory_create();
    const image copy = make_image(shard_a, 4);
    fixture_write(directory, "s4.safetensors", copy.bytes, copy.size);
    refusals_check(&(refusals){.path = "tests/model/safetensors.refusals",
                               .call = open_row,
                               .user = directory,
                               .place = directory});
    fixture_directory_remove(directory);
}

TEST(survives_failing_allocation)
{
    char *directory = fixture_directory_create();
    write_shards(directory, good_index);
    const image file = make_image(good_header, GOOD_DATA);
    bool reached = true;
    int64_t fail_at = 0;
    while (reached) {
        heap h = {.fail_at = ++fail_at};
        heap_watch(&h);
        kvf_error error = {0};
        kvf_weights *weights;
        kvf_status status = kvf_weights_open(directory, &weights, &error);
        if (status == KVF_OK)
            kvf_weights_close(weights);
        else
            fixture_expect(status, &error, KVF_OUT_OF_MEMORY, "could not be allocated");
        assert_int_equal(heap_left(), 0);
        reached = h.asked >= fail_at;
        h = (heap){.fail_at = fail_at};
        heap_watch(&h);
        status = open_image(&file, &weights, &error);
        for (size_t i = 0; status == KVF_OK && i < kvf_weights_count(weights); i++)
            status = kvf_weights_load(kvf_weights_at(weights, i), 1, &error);
        kvf_weights_close(weights);
        if (status != KVF_OK)
            fixture_expect(status, &error, KVF_OUT_OF_MEMORY, "could not be allocated");
        assert_int_equal(heap_left(), 0);
        reached = reached || h.asked >= fail_at;
    }
    assert_true(fail_at > 8);
    fixture_directory_remove(directory);
}
