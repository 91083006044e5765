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

/* Runs tests, which have the names of their functions. Returns how many failed. */
#define unit_run(...) unit_run_around(NULL, NULL, __VA_ARGS__)
/* The same between two functions, of which either may be NULL. */
#define unit_run_around(before, after, ...)                                                        \
    unit_run_list(__FILE__, #__VA_ARGS__, (const CMUnitTestFunction[]){__VA_ARGS__, NULL},         \
                  (before), (after), NULL, NULL)
/* The same with the two around every single test. */
#define unit_run_each(before, after, ...)                                                          \
    unit_run_list(__FILE__, #__VA_ARGS__, (const CMUnitTestFunction[]){__VA_ARGS__, NULL}, NULL,   \
                  NULL, (before), (after))

static inline int unit_run_list(const char *group, const char *names,
                                const CMUnitTestFunction *functions, CMFixtureFunction before,
                                CMFixtureFunction after, CMFixtureFunction before_each,
                                CMFixtureFunction after_each)
{
    enum { TESTS = 64 };
    static struct CMUnitTest tests[TESTS];
    static char words[TESTS * 80];
    size_t count = 0;
    const char *locale = getenv("KVF_TEST_LOCALE");
    if (locale && !setlocale(LC_ALL, locale)) {
        fprintf(stderr, "there is no locale %s\n", locale);
        abort();
    }
    if (strlen(names) >= sizeof words)
        abort();
    strcpy(words, names);
    for (char *name = strtok(words, ", "); functions[count]; name = strtok(NULL, ", ")) {
        if (count == TESTS)
            abort();
        tests[count] = (struct CMUnitTest){.name = name,
                                           .test_func = functions[count],
                                           .setup_func = before_each,
                                           .teardown_func = after_each};
        count++;
    }
    return _cmocka_run_group_tests(group, tests, count, before, after);
}

#endif
