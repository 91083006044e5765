/* SPDX-License-Identifier: Apache-2.0 */

/* The part of cmocka that the tests use; see its header. State is one thread's, as in cmocka. */

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum outcome { PASSED, FAILED, SKIPPED };

static _Thread_local jmp_buf *running; /* NULL outside a test: then a failure ends the process */

static void leave(enum outcome outcome)
{
    if (running == NULL)
        abort();
    longjmp(*running, (int)outcome);
}

void print_message(const char *format, ...)
{
    va_list list;
    va_start(list, format);
    vprintf(format, list);
    va_end(list);
}

void print_error(const char *format, ...)
{
    va_list list;
    va_start(list, format);
    vfprintf(stderr, format, list);
    va_end(list);
}

void stand_in_fail(const char *file, int line, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    fprintf(stderr, "%s:%d: error: ", file, line);
    vfprintf(stderr, format, list);
    fputc('\n', stderr);
    va_end(list);
    leave(FAILED);
    abort();
}

void stand_in_skip(void)
{
    leave(SKIPPED);
    abort();
}

void stand_in_true(uintmax_t value, const char *text, const char *file, int line)
{
    if (!value)
        stand_in_fail(file, line, "does not hold: %s", text);
}

void stand_in_equal(uintmax_t a, uintmax_t b, int is_wanted, const char *file, int line)
{
    if ((a == b) != is_wanted)
        stand_in_fail(file, line, "%#jx %s %#jx", a, is_wanted ? "!=" : "==", b);
}

void stand_in_text(const char *a, const char *b, const char *file, int line)
{
    if (strcmp(a, b) != 0)
        stand_in_fail(file, line, "\"%s\" != \"%s\"", a, b);
}

void stand_in_memory(const void *a, const void *b, size_t bytes, int is_wanted, const char *file,
                     int line)
{
    const unsigned char *x = a, *y = b;
    size_t i = 0;
    while (i < bytes && x[i] == y[i])
        i++;
    if (is_wanted && i < bytes)
        stand_in_fail(file, line, "byte %zu of %zu: %#x != %#x", i, bytes, x[i], y[i]);
    if (!is_wanted && i == bytes)
        stand_in_fail(file, line, "all %zu bytes are equal", bytes);
}

static enum outcome run_one(const struct CMUnitTest *test)
{
    jmp_buf here;
    void *state = test->initial_state;
    if (test->setup_func != NULL && test->setup_func(&state) != 0)
        return FAILED;
    running = &here;
    const int outcome = setjmp(here);
    if (outcome == PASSED)
        test->test_func(&state);
    running = NULL;
    if (test->teardown_func != NULL && test->teardown_func(&state) != 0)
        return FAILED;
    return (enum outcome)outcome;
}

int stand_in_run(const char *group, const struct CMUnitTest *tests, size_t count,
                 CMFixtureFunction setup, CMFixtureFunction teardown)
{
    static const char *const words[] = {"      OK", "  FAILED", " SKIPPED"};
    size_t counts[3] = {0};
    void *state = NULL;
    printf("[==========] %s: Running %zu test(s).\n", group, count);
    if (setup != NULL && setup(&state) != 0) {
        fprintf(stderr, "[  FAILED  ] GROUP SETUP\n");
        return 1;
    }
    for (size_t i = 0; i < count; i++) {
        printf("[ RUN      ] %s\n", tests[i].name);
        fflush(stdout);
        const enum outcome outcome = run_one(&tests[i]);
        counts[outcome]++;
        printf("[ %s ] %s\n", words[outcome], tests[i].name);
    }
    printf("[==========] %s: %zu test(s) run.\n[  PASSED  ] %zu test(s).\n", group, count,
           counts[PASSED]);
    if (counts[SKIPPED])
        printf("[  SKIPPED ] %zu test(s)\n", counts[SKIPPED]);
    if (counts[FAILED])
        fprintf(stderr, "[  FAILED  ] %zu test(s)\n", counts[FAILED]);
    if (teardown != NULL && teardown(&state) != 0)
        return 1;
    return (int)counts[FAILED];
}
