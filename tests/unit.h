/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_UNIT_H
#define KVF_TESTS_UNIT_H

/*
 * cmocka, with what it wants in front of it, and the part of C's library that every test uses.
 *
 * KVF_TEST_LOCALE in the environment is the locale that a program of tests runs in.
 */

#include <locale.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { UNIT_TESTS_MAX = 64 };

/* A test of a program without a main of its own: all of its file run, in their order. */
#define TEST(name) TEST_IF(true, name)
/* The same if a condition holds when the program starts, such as a device that it has. */
#define TEST_IF(condition, name)                                                                   \
    static void name(void **state);                                                                \
    __attribute__((constructor)) static void unit_add_##name(void)                                 \
    {                                                                                              \
        if (condition)                                                                             \
            unit_add(__FILE__, #name, name);                                                       \
    }                                                                                              \
    static void name(void **state)

/* All of them run between two functions, of which either may be NULL. */
#define TESTS_RUN_BETWEEN(before, after)                                                           \
    __attribute__((constructor)) static void unit_around_all(void)                                 \
    {                                                                                              \
        unit_around((before), (after));                                                            \
    }

/* The same around every single test. */
#define EACH_TEST_RUNS_BETWEEN(before, after)                                                      \
    __attribute__((constructor)) static void unit_around_every_one(void)                           \
    {                                                                                              \
        unit_around_each((before), (after));                                                       \
    }

void unit_add(const char *of, const char *name, CMUnitTestFunction function);
void unit_around(CMFixtureFunction before, CMFixtureFunction after);
void unit_around_each(CMFixtureFunction before, CMFixtureFunction after);

/* For a main that chooses: runs tests, which have the names of their functions. Returns how many
 * failed. */
#define unit_run(...) unit_run_around(NULL, NULL, __VA_ARGS__)
/* The same between two functions, of which either may be NULL. */
#define unit_run_around(before, after, ...)                                                        \
    unit_run_list(__FILE__, #__VA_ARGS__, (const CMUnitTestFunction[]){__VA_ARGS__, NULL},         \
                  (before), (after))

static inline void unit_set_locale(void)
{
    const char *locale = getenv("KVF_TEST_LOCALE");
    if (locale && !setlocale(LC_ALL, locale)) {
        fprintf(stderr, "there is no locale %s\n", locale);
        abort();
    }
}

static inline int unit_run_list(const char *group, const char *names,
                                const CMUnitTestFunction *functions, CMFixtureFunction before,
                                CMFixtureFunction after)
{
    static struct CMUnitTest tests[UNIT_TESTS_MAX];
    static char words[UNIT_TESTS_MAX * 80];
    size_t count = 0;
    unit_set_locale();
    if (strlen(names) >= sizeof words)
        abort();
    strcpy(words, names);
    for (char *name = strtok(words, ", "); functions[count]; name = strtok(NULL, ", ")) {
        if (count == UNIT_TESTS_MAX)
            abort();
        tests[count] = (struct CMUnitTest){.name = name, .test_func = functions[count]};
        count++;
    }
    return _cmocka_run_group_tests(group, tests, count, before, after);
}

#endif
