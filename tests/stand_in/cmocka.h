/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_STAND_IN_CMOCKA_H
#define KVF_TESTS_STAND_IN_CMOCKA_H

/*
 * The part of cmocka that the tests use, for machines that lack it and cannot install it: a GPU
 * machine without package registries runs the same suite.
 *
 * Knows no mocks and catches no signals. Prints what cmocka prints, so that what counts tests
 * counts these. Invariant: a failed assertion ends its test and no other.
 */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

typedef void (*CMUnitTestFunction)(void **state);
typedef int (*CMFixtureFunction)(void **state);

struct CMUnitTest {
    const char *name;
    CMUnitTestFunction test_func;
    CMFixtureFunction setup_func, teardown_func;
    void *initial_state;
};

#define cmocka_unit_test(f)                                                                        \
    {                                                                                              \
#f, f, NULL, NULL, NULL                                                                    \
    }
#define cmocka_unit_test_setup_teardown(f, setup, teardown)                                        \
    {                                                                                              \
#f, f, setup, teardown, NULL                                                               \
    }
#define cmocka_run_group_tests(tests, setup, teardown)                                             \
    stand_in_run(#tests, tests, sizeof(tests) / sizeof *(tests), setup, teardown)
#define cmocka_run_group_tests_name(name, tests, setup, teardown)                                  \
    stand_in_run(name, tests, sizeof(tests) / sizeof *(tests), setup, teardown)

int stand_in_run(const char *group, const struct CMUnitTest *tests, size_t count,
                 CMFixtureFunction setup, CMFixtureFunction teardown);
_Noreturn void stand_in_fail(const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
_Noreturn void stand_in_skip(void);
void stand_in_true(uintmax_t value, const char *text, const char *file, int line);
void stand_in_equal(uintmax_t a, uintmax_t b, int is_wanted, const char *file, int line);
void stand_in_text(const char *a, const char *b, const char *file, int line);
void stand_in_memory(const void *a, const void *b, size_t bytes, int is_wanted, const char *file,
                     int line);
void print_message(const char *format, ...) __attribute__((format(printf, 1, 2)));
void print_error(const char *format, ...) __attribute__((format(printf, 1, 2)));

#define STAND_IN_PLACE __FILE__, __LINE__

#define fail()                  stand_in_fail(STAND_IN_PLACE, "failure")
#define _cmocka_run_group_tests stand_in_run

#define _fail(file, line) stand_in_fail(file, line, "failure")

#define fail_msg(...) stand_in_fail(STAND_IN_PLACE, __VA_ARGS__)

#define skip() stand_in_skip()

#define assert_true(c) stand_in_true((uintmax_t)(c) != 0, #c, STAND_IN_PLACE)

#define assert_false(c) stand_in_true((uintmax_t)(c) == 0, "not " #c, STAND_IN_PLACE)

#define assert_non_null(c) stand_in_true((c) != NULL, #c " is not NULL", STAND_IN_PLACE)

#define assert_null(c) stand_in_true((c) == NULL, #c " is NULL", STAND_IN_PLACE)

#define assert_ptr_equal(a, b) stand_in_true((a) == (b), #a " is " #b, STAND_IN_PLACE)

#define assert_ptr_not_equal(a, b) stand_in_true((a) != (b), #a " is not " #b, STAND_IN_PLACE)

#define assert_int_equal(a, b) stand_in_equal((uintmax_t)(a), (uintmax_t)(b), 1, STAND_IN_PLACE)

#define assert_int_not_equal(a, b) stand_in_equal((uintmax_t)(a), (uintmax_t)(b), 0, STAND_IN_PLACE)

#define assert_string_equal(a, b) stand_in_text(a, b, STAND_IN_PLACE)

#define assert_memory_equal(a, b, size) stand_in_memory(a, b, size, 1, STAND_IN_PLACE)

#define assert_memory_not_equal(a, b, size) stand_in_memory(a, b, size, 0, STAND_IN_PLACE)

#endif
