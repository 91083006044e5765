/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The main of programs whose tests register themselves; see unit.h.
 */

#include "unit.h"

static struct CMUnitTest tests[UNIT_TESTS_MAX];
static size_t count;
static const char *file;
static CMFixtureFunction first, last, before_each, after_each;

void unit_add(const char *of, const char *name, CMUnitTestFunction function)
{
    if (count == UNIT_TESTS_MAX)
        abort();
    file = of;
    tests[count++] = (struct CMUnitTest){.name = name, .test_func = function};
}

void unit_around(CMFixtureFunction before, CMFixtureFunction after)
{
    first = before;
    last = after;
}

void unit_around_each(CMFixtureFunction before, CMFixtureFunction after)
{
    before_each = before;
    after_each = after;
}

int main(void)
{
    unit_set_locale();
    for (size_t i = 0; i < count; i++) {
        tests[i].setup_func = before_each;
        tests[i].teardown_func = after_each;
    }
    return _cmocka_run_group_tests(file, tests, count, first, last);
}
