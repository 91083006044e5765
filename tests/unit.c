/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The main of programs whose tests register themselves; see unit.h.
 */

#include "unit.h"

static struct CMUnitTest tests[UNIT_TESTS_MAX];
static size_t count;
static const char *file;
static CMFixtureFunction first, last;

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

int main(void)
{
    unit_set_locale();
    return _cmocka_run_group_tests(file, tests, count, first, last);
}
