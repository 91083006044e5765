/* SPDX-License-Identifier: Apache-2.0 */

/*
 * `kvferry plan --vllm MODEL ...`, `--llama MODEL ...` and `--cards`: calculators of the Python
 * package, which know what an engine takes beside kvferry.
 *
 * Knows no memory. Invariant: options are the calculator's, all of them and as they were given.
 */

#include "commands.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/text.h"

/* A module as `python3 -m` runs it; a Python that lacks it says so in a line. */
#define RUN_MODULE(name, argument)                                                                 \
    "import runpy, sys\n"                                                                          \
    "sys.argv[1:1] = " argument "\n"                                                               \
    "try:\n"                                                                                       \
    "    runpy.run_module('" name "', run_name='__main__', alter_sys=True)\n"                      \
    "except ImportError as error:\n"                                                               \
    "    sys.exit('kvferry: %s cannot import " name                                                \
    ": %s. Install the Python package of kvferry '"                                                \
    "             'for it (docs/python.md), or put a python3 that has it first in PATH'\n"         \
    "             % (sys.executable, error))\n"

static const struct {
    const char *option;
    const char *program;
} calculators[] = {
    {"--vllm", RUN_MODULE("kvferry.vllm", "[]")},
    {"--llama", RUN_MODULE("kvferry._llama", "['--plan']")},
    {"--cards", RUN_MODULE("kvferry._cards", "[]")},
};
enum { CALCULATORS = sizeof calculators / sizeof *calculators };

static void print_help(FILE *file)
{
    fputs(
        "usage: kvferry plan --vllm MODEL --gpu 80GiB --host 512GiB [OPTION...]\n"
        "       kvferry plan --llama MODEL.gguf --host 64GiB [OPTION...]\n"
        "       kvferry plan --cards [NAME=VALUE...]\n"
        "\n"
        "  How many requests of how many tokens a vLLM with kvferry has room for, or what a model\n"
        "  takes in a llama.cpp with it, before anything is loaded; or which context three models\n"
        "  have on cards of 8 to 141 GB. All are of kvferry's Python package, which has the\n"
        "  options: kvferry plan --vllm --help, kvferry plan --llama --help.\n",
        file);
}

static const char *program_of(const char *option)
{
    for (size_t i = 0; i < CALCULATORS; i++)
        if (!strcmp(calculators[i].option, option))
            return calculators[i].program;
    return NULL;
}

int cli_plan_main(int argc, char **argv)
{
    const char *program = argc > 1 ? program_of(argv[1]) : NULL;
    if (!program) {
        const int asked =
            argc > 1 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0);
        print_help(asked ? stdout : stderr);
        return asked ? 0 : 2;
    }
    /* python3 -c PROGRAM, and what was given after the option. */
    const size_t given = (size_t)argc - 2;
    const char **words = calloc(3 + given + 1, sizeof *words);
    if (words) {
        words[0] = "python3", words[1] = "-c", words[2] = program;
        memcpy(words + 3, argv + 2, given * sizeof *words);
        (void)execvp(words[0], (char *const *)words);
    }
    fprintf(stderr, "kvferry: cannot run python3: %s\n", kvf_errno_text(errno));
    free(words);
    return 1;
}
