/* SPDX-License-Identifier: Apache-2.0 */

/* The `kvferry` command: which subcommand, and nothing else. */

#include "commands.h"
#include "options.h"

#include <stdio.h>
#include <string.h>

#define NAME(name, meaning) #name,
#define MAIN(name, meaning) cli_##name##_main,
#define HELP(name, meaning) {#name, meaning},

static const char *const names[] = {CLI_COMMAND_LIST(NAME) NULL};
static int (*const mains[])(int argc, char **argv) = {CLI_COMMAND_LIST(MAIN)};

static void print_help(FILE *file)
{
    static const char *const rows[][2] = {CLI_COMMAND_LIST(HELP)};
    fputs("usage: kvferry COMMAND [OPTION...]\n\n", file);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        fprintf(file, "  %-8s %s\n", rows[i][0], rows[i][1]);
    fputs("\nkvferry COMMAND --help tells more; kvferry --version prints the version.\n", file);
}

int main(int argc, char **argv)
{
    const char *command = argc > 1 ? argv[1] : "";
    for (size_t i = 0; names[i]; i++)
        if (strcmp(command, names[i]) == 0)
            return mains[i](argc - 1, argv + 1);
    if (strcmp(command, "--version") == 0) {
        printf("kvferry %s\n", kvf_version());
        return 0;
    }
    if (strcmp(command, "--help") == 0 || strcmp(command, "-h") == 0 ||
        strcmp(command, "help") == 0) {
        print_help(stdout);
        return 0;
    }
    if (!command[0]) {
        print_help(stderr);
        return 2;
    }
    const char *near = cli_suggest(command, names);
    fprintf(stderr, "kvferry: unknown command '%s'", command);
    fprintf(stderr, near ? "; did you mean '%s'?\n" : "; see kvferry --help\n", near);
    return 2;
}
