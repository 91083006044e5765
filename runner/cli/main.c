/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The `kvferry` command: which subcommand, and that nothing but its output goes to standard output.
 *
 * Knows nothing of what they do. Invariant: 0, 1 and 2 are no other files, so no text ends up in
 * one; and a text that could not be written is no success.
 */

#include "commands.h"
#include "options.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "common/text.h"

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

/* A closed one would be the number of the next file that is opened. Opened the wrong way round they
 * refuse what a closed one refuses. */
static void take_standard_numbers(void)
{
    for (int i = 0; i < 3; i++)
        if (fcntl(i, F_GETFD) < 0 && errno == EBADF)
            (void)!open("/dev/null", i == 0 ? O_WRONLY : O_RDONLY);
}

static int choose(int argc, char **argv)
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

int main(int argc, char **argv)
{
    take_standard_numbers();
    (void)signal(SIGXFSZ, SIG_IGN); /* a limit of file sizes is an error as a full disk is, */
    (void)signal(SIGPIPE, SIG_IGN); /* and so is a pipe that nobody reads */
    const int status = choose(argc, argv);
    errno = 0;
    if ((fflush(stdout) == 0 && !ferror(stdout)) || status != 0)
        return status;
    fprintf(stderr, "kvferry: standard output: %s\n",
            errno ? kvf_errno_text(errno) : "it could not be written");
    return 1;
}
