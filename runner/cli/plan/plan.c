/* SPDX-License-Identifier: Apache-2.0 */

/*
 * `kvferry plan --vllm MODEL ...`: the calculator of the Python package, which knows what vLLM
 * takes beside kvferry.
 *
 * Knows no memory. Invariant: options are the calculator's, all of them and as they were given.
 */

#include "commands.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The module as `python3 -m` runs it; a Python that lacks it says so in a line. */
static const char *const calculator[] = {
    "python3", "-c",
    "import runpy, sys\n"
    "try:\n"
    "    runpy.run_module('kvferry.vllm', run_name='__main__', alter_sys=True)\n"
    "except ImportError as error:\n"
    "    sys.exit('kvferry: %s cannot import kvferry.vllm: %s. Install the Python package of "
    "kvferry '\n"
    "             'for it (docs/python.md), or put a python3 that has it first in PATH'\n"
    "             % (sys.executable, error))\n"};
enum { CALCULATOR_WORDS = sizeof calculator / sizeof *calculator };

static void print_help(FILE *file)
{
    fputs(
        "usage: kvferry plan --vllm MODEL --gpu 80GiB --host 512GiB [OPTION...]\n"
        "\n"
        "  How many requests of how many tokens a vLLM with kvferry has room for, before anything\n"
        "  is loaded. It is python3 -m kvferry.vllm of kvferry's Python package, which has the\n"
        "  options: kvferry plan --vllm --help.\n",
        file);
}

int cli_plan_main(int argc, char **argv)
{
    if (argc < 2 || strcmp(argv[1], "--vllm") != 0) {
        const int asked =
            argc > 1 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0);
        print_help(asked ? stdout : stderr);
        return asked ? 0 : 2;
    }
    const size_t given = (size_t)argc - 2;
    char **words = calloc(CALCULATOR_WORDS + given + 1, sizeof *words);
    if (words) {
        memcpy(words, calculator, sizeof calculator);
        memcpy(words + CALCULATOR_WORDS, argv + 2, given * sizeof *words);
        (void)execvp(words[0], words);
    }
    fprintf(stderr, "kvferry: cannot run %s: %s\n", calculator[0], strerror(errno));
    free(words);
    return 1;
}
