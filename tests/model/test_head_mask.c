/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Head masks from files: 0 and 1 as they are, numbers by rank with ties, and every kind of file
 * that is not a mask.
 */

#include "head_mask.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static char path[] = "/tmp/kvferry-mask-XXXXXX";

static int make_file(void **state)
{
    (void)state;
    const int fd = mkstemp(path);
    return fd < 0 ? -1 : close(fd);
}

static int remove_file(void **state)
{
    (void)state;
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

/* Refused, and the text has what it must say. */
static void expect_refused(const char *text, double sparsity, const char *said, const char *fix)
{
    uint8_t mask[6];
    kvf_error error = {.text = ""};
    write_file(text, strlen(text));
    assert_int_equal(kvf_head_mask_read(path, 2, 3, sparsity, mask, &error), KVF_INVALID);
    assert_int_equal(error.status, KVF_INVALID);
    if (!strstr(error.text, said) || !strstr(error.text, fix) || !strstr(error.text, path))
        fail_msg("\"%s\" does not say \"%s\", \"%s\" and the path", error.text, said, fix);
}

static void zeros_and_ones(void **state)
{
    (void)state;
    expect_mask("0\t1\t1\n1\t0\t0\n", -1.0, "011100");
    expect_mask("0\t1\t1\r\n1\t0\t0", -1.0, "011100");
    expect_mask("0.0\t1.000\t1e0\n+1\t-0\t0.000e5\n\n", -1.0, "011100");
    expect_mask(" 0\t1 \t 1 \n10e-1\t0\t0.00000000000000000000000000000\n", -1.0, "011100");
    /* 0 and 1 have ranks too: among equal ones the lower layer and head stream first */
    expect_mask("0\t1\t1\n1\t0\t0\n", 0.5, "011100");
    expect_mask("0\t1\t1\n1\t0\t0\n", 1.0 / 3.0, "011101");
    expect_mask("0\t1\t1\n1\t0\t0\n", 2.0 / 3.0, "001100");
}

static void numbers_by_rank(void **state)
{
    (void)state;
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

static void bad_shapes(void **state)
{
    (void)state;
    expect_refused("", -1.0, "0 lines", "2 lines");
    expect_refused("\n\n", -1.0, "0 lines", "2 lines");
    expect_refused("0\t1\t1\n", -1.0, "1 lines", "2 layers");
    expect_refused("0\t1\t1\n1\t1\t1\n1\t0\t0\n", -1.0, "line 3", "2 layers");
    expect_refused("0\t1\t1\n1\t0\n", -1.0, "line 2: 2 values", "3 KV heads");
    expect_refused("0\t1\t1\t1\n1\t0\t0\n", -1.0, "line 1: 4 values", "3 KV heads");
    expect_refused("0 1 1\n1 0 0\n", -1.0, "line 1: 1 values", "tabs");
    expect_refused("0\t1\t1\n\n1\t0\t0\n", -1.0, "line 2: 1 values", "3");
    expect_refused("0\t1\t1\t\n1\t0\t0\n", -1.0, "line 1: 4 values", "3");
}

static void bad_values(void **state)
{
    char longest[400];
    static const char *const odd[] = {"nan", "NaN", "-nan(1)", "inf", "-Infinity", "0x1",
                                      "one", "1,0", "1e",      "e5",  ".",         "--1",
                                      "1 0", "1_0", "+",       "1e+", "0x1p3",     "1.0.0"};
    (void)state;
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++)
        for (int mode = 0; mode < 2; mode++) {
            char text[64];
            snprintf(text, sizeof text, "0\t1\t1\n1\t%s\t0\n", odd[i]);
            expect_refused(text, mode ? 0.5 : -1.0, "line 2, column 2", odd[i]);
        }
    expect_refused("0\t1\t1\n1\t\t0\n", -1.0, "line 2, column 2", "0 or 1");
    expect_refused("0\t1\t1\n1\t \t0\n", 0.5, "line 2, column 2", "a number");
    expect_refused("0\t1\t0.5\n1\t0\t0\n", -1.0, "line 1, column 3: 0.5",
                   "share of streaming heads");
    expect_refused("0\t1\t2\n1\t0\t0\n", -1.0, "line 1, column 3: 2", "0 nor 1");
    memset(longest, '1', sizeof longest);
    memcpy(longest, "0\t1\t", 4);
    strcpy(longest + sizeof longest - 10, "\n1\t0\t0\n");
    expect_refused(longest, -1.0, "line 1, column 3", "not a number");
    write_file("0\t1\t1\n1\t0\0\t0\n", 14);
    uint8_t mask[6];
    kvf_error error = {.text = ""};
    assert_int_equal(kvf_head_mask_read(path, 2, 3, -1.0, mask, &error), KVF_INVALID);
    assert_non_null(strstr(error.text, "line 2, column 2"));
}

static void bad_arguments(void **state)
{
    static const double odd[] = {1.0, 1.5, 1e300};
    uint8_t mask[6];
    kvf_error error = {.text = ""};
    (void)state;
    write_file("0\t1\t1\n1\t0\t0\n", 12);
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++) {
        assert_int_equal(kvf_head_mask_read(path, 2, 3, odd[i], mask, &error), KVF_INVALID);
        assert_non_null(strstr(error.text, "sparsity"));
    }
    assert_int_equal(kvf_head_mask_read(path, 2, 3, strtod("nan", NULL), mask, &error),
                     KVF_INVALID);
    assert_int_equal(kvf_head_mask_read(path, 0, 3, -1.0, mask, &error), KVF_INVALID);
    assert_int_equal(kvf_head_mask_read(path, 1u << 20, 1u << 20, -1.0, mask, &error), KVF_INVALID);
    assert_int_equal(kvf_head_mask_read("/nowhere/mask.tsv", 2, 3, -1.0, mask, &error), KVF_SYSTEM);
    assert_int_equal(error.foreign, ENOENT);
    assert_non_null(strstr(error.text, "/nowhere/mask.tsv"));
    assert_int_equal(kvf_head_mask_read("/nowhere/mask.tsv", 2, 3, -1.0, mask, NULL), KVF_SYSTEM);
    char *large = calloc(1, 8192);
    assert_non_null(large);
    memset(large, '\n', 8192);
    write_file(large, 8192);
    assert_int_equal(kvf_head_mask_read(path, 2, 3, -1.0, mask, &error), KVF_INVALID);
    assert_non_null(strstr(error.text, "larger than any mask"));
    free(large);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(zeros_and_ones), cmocka_unit_test(numbers_by_rank),
        cmocka_unit_test(bad_shapes),     cmocka_unit_test(bad_values),
        cmocka_unit_test(bad_arguments),
    };
    return cmocka_run_group_tests_name("model: head masks", tests, make_file, remove_file);
}
