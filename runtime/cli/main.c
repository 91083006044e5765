/* SPDX-License-Identifier: Apache-2.0 */

/* The `kvferry` command: which subcommand, and nothing else. */

#include "bench_disk.h"
#include "bench_link.h"
#include "cache_command.h"
#include "run.h"

#include <string.h>

static void print_help(FILE *file)
{
    fputs("usage: kvferry COMMAND [OPTION...]\n\n"
          "  run      read a prompt, generate tokens, with the KV cache in host memory\n"
          "  chat     talk with a model, the conversation staying in the KV cache\n"
          "  score    how well a model predicts a text, with the KV cache in host memory\n"
          "  tune     find the layer at which a model's prompts can be pruned\n"
          "  bench    link: how fast scattered pages reach the device; disk: extents of a file;\n"
          "           decode: one decode step\n"
          "  cache    saved sequences of a folder: list, verify, remove\n"
          "  info     what this machine and this build have and lack\n\n"
          "kvferry COMMAND --help tells more; kvferry --version prints the version.\n",
          file);
}

static int bench_main(int argc, char **argv)
{
    const char *what = argc > 1 ? argv[1] : "";
    if (strcmp(what, "link") == 0)
        return cli_bench_link_main(argc - 1, argv + 1);
    if (strcmp(what, "decode") == 0)
        return cli_bench_decode_main(argc - 1, argv + 1);
    if (strcmp(what, "disk") == 0)
        return cli_bench_disk_main(argc - 1, argv + 1);
    const bool wants_help = strcmp(what, "--help") == 0 || strcmp(what, "-h") == 0;
    fputs("usage: kvferry bench link [SUITE...] [OPTION...]\n"
          "       kvferry bench disk [--disk DIR] [OPTION...]\n"
          "       kvferry bench decode [OPTION...]\n\n"
          "kvferry bench link --help, and so on, tell more.\n",
          wants_help ? stdout : stderr);
    return wants_help ? 0 : 2;
}

int main(int argc, char **argv)
{
    static const char *const commands[] = {"run",   "chat",  "score", "tune",
                                           "bench", "cache", "info",  NULL};
    const char *command = argc > 1 ? argv[1] : "";
    if (strcmp(command, "run") == 0)
        return cli_run_main(argc - 1, argv + 1);
    if (strcmp(command, "chat") == 0)
        return cli_chat_main(argc - 1, argv + 1);
    if (strcmp(command, "score") == 0)
        return cli_score_main(argc - 1, argv + 1);
    if (strcmp(command, "tune") == 0)
        return cli_tune_main(argc - 1, argv + 1);
    if (strcmp(command, "bench") == 0)
        return bench_main(argc - 1, argv + 1);
    if (strcmp(command, "cache") == 0)
        return cli_cache_main(argc - 1, argv + 1);
    if (strcmp(command, "info") == 0)
        return cli_info_main(argc - 1, argv + 1);
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
    const char *near = cli_suggest(command, commands);
    fprintf(stderr, "kvferry: unknown command '%s'", command);
    fprintf(stderr, near ? "; did you mean '%s'?\n" : "; see kvferry --help\n", near);
    return 2;
}
