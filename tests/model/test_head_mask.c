/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Head masks from files: 0 and 1 as they are, numbers by rank with ties, and every kind of file
 * that is not a mask; and the most sensitive heads, to a file and back.
 */

#include "common/text.h"
#include "head_mask.h"
#include "refusals.h"
#include "unit.h"

#include <errno.h>
#include <unistd.h>

static char path[] = "/tmp/kvferry-mask-XXXXXX";

static int make_file(void **state)
{
    const int fd = mkstemp(path);
    return fd < 0 ? -1 : close(fd);
}

static int remove_file(void **state)
{
    return unlink(path);
}

static void write_file(const char *text, size_t size)
{
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(text, 1, size, file), size);
    assert_int_equal(fclose(file), 0);
}

static void expect_mask(const char *text, double sparsity, const char *want)
{
    uint8_t mask[6] = {9, 9, 9, 9, 9, 9};
    char got[7] = "";
    kvf_error error = {.text = ""};
    write_file(text, strlen(text));
    if (kvf_head_mask_read(path, 2, 3, sparsity, mask, &error) != KVF_OK)
        fail_msg("%s: %s", text, error.text);
    for (int i = 0; i < 6; i++)
        got[i] = (char)('0' + mask[i]);
    assert_string_equal(got, want);
}

TEST(zeros_and_ones)
{
    expect_mask("0\t1\t1\n1\t0\t0\n", -1.0, "011100");
    expect_mask("0\t1\t1\r\n1\t0\t0", -1.0, "011100");
    expect_mask("0.0\t1.000\t1e0\n+1\t-0\t0.000e5\n\n", -1.0, "011100");
    expect_mask(" 0\t1 \t 1 \n10e-1\t0\t0.00000000000000000000000000000\n", -1.0, "011100");
    expect_mask("2\t1\t0\n2.0\t+2\t20e-1\n", -1.0, "210222");
    expect_mask("2\t1\t0\n2.0\t+2\t20e-1\n", 1.0 / 3.0, "010111"); /* 2 is clipped to 1 */
    /* 0 and 1 have ranks too: among equal ones the lower layer and head stream first */
    expect_mask("0\t1\t1\n1\t0\t0\n", 0.5, "011100");
    expect_mask("0\t1\t1\n1\t0\t0\n", 1.0 / 3.0, "011101");
    expect_mask("0\t1\t1\n1\t0\t0\n", 2.0 / 3.0, "001100");
}

TEST(numbers_by_rank)
{
    const char *values = "0.3\t0.1\t0.9\n0.5\t0.20\t1e-1\n";
    expect_mask(values, 0.0, "111111");
    expect_mask(values, 1.0 / 6.0, "101111"); /* 0.1 and 1e-1 are equal: the first */
    expect_mask(values, 2.0 / 6.0, "101110");
    expect_mask(values, 0.5, "101100");
    expect_mask(values, 0.7, "001100");  /* 4.2 heads */
    expect_mask(values, 0.75, "001000"); /* 4.5 heads are 5 */
    expect_mask(values, 0.99, "000000"); /* 5.94 heads */
    /* Clipped: -1 and -2 are both 0, 1.5 and 7 are both 1. */
    expect_mask("-1\t-2\t1.5\n7\t0.5\t0.4\n", 1.0 / 6.0, "011111");
    expect_mask("-1\t-2\t1.5\n7\t0.5\t0.4\n", 5.0 / 6.0, "000100");
    expect_mask("1e300\t1e-300\t1e9999\n1e-9999\t.5\t5.\n", 0.5, "101001");
}

static void expect_most_sensitive(const double sensitivity[6], double share, const char *want)
{
    uint8_t mask[6];
    kvf_text text = {0};
    kvf_error error = {.text = ""};
    assert_int_equal(kvf_head_mask_most_sensitive(sensitivity, 2, 3, share, mask, &error), KVF_OK);
    assert_int_equal(kvf_head_mask_write(mask, 2, 3, &text, &error), KVF_OK);
    assert_int_equal(text.size, 12);
    expect_mask(text.bytes, -1.0, want);
    kvf_text_free(&text);
}

TEST(the_most_sensitive_are_hot)
{
    const double sensitivity[6] = {0.3, 0.1, 0.9, 0.5, 0.1, 0.2};
    expect_most_sensitive(sensitivity, 0.001, "221222"); /* one at least */
    expect_most_sensitive(sensitivity, 1.0 / 3.0, "221122");
    expect_most_sensitive(sensitivity, 0.41, "221122");      /* 2.46 heads */
    expect_most_sensitive(sensitivity, 2.5 / 6.0, "121122"); /* halves are rounded up */
    expect_most_sensitive(sensitivity, 5.0 / 6.0, "111121"); /* of equal ones the first */
    expect_most_sensitive(sensitivity, 1.0, "111111");
}

static kvf_status read_row(void *user, char *change, size_t size, kvf_error *error)
{
    uint8_t mask[6];
    const char *text = refusals_value(change);
    write_file(text, size - (size_t)(text - change));
    return kvf_head_mask_read(path, 2, 3, *change == '-' ? -1.0 : kvf_real_of(change, NULL), mask,
                              error);
}

TEST(refuses_what_is_no_mask)
{
    refusals_check(
        &(refusals){.path = "tests/model/head_mask.refusals", .call = read_row, .place = path});
}

TEST(bad_arguments)
{
    uint8_t mask[6];
    kvf_error error = {.text = ""};
    write_file("0\t1\t1\n1\t0\t0\n", 12);
    assert_int_equal(kvf_head_mask_read(path, 0, 3, -1.0, mask, &error), KVF_INVALID);
    assert_int_equal(kvf_head_mask_read(path, 1u << 20, 1u << 20, -1.0, mask, &error), KVF_INVALID);
    refusals_expect(kvf_head_mask_read("/nowhere/mask.tsv", 2, 3, -1.0, mask, &error), &error,
                    KVF_SYSTEM, "/nowhere/mask.tsv cannot be opened: No such file or directory");
    assert_int_equal(error.foreign, ENOENT);
    assert_int_equal(kvf_head_mask_read("/nowhere/mask.tsv", 2, 3, -1.0, mask, NULL), KVF_SYSTEM);
    char *large = calloc(1, 8192);
    assert_non_null(large);
    memset(large, '\n', 8192);
    write_file(large, 8192);
    assert_int_equal(kvf_head_mask_read(path, 2, 3, -1.0, mask, &error), KVF_INVALID);
    assert_non_null(strstr(error.text, "larger than any mask"));
    free(large);
}

TESTS_RUN_BETWEEN(make_file, remove_file)
