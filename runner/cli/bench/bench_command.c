/* SPDX-License-Identifier: Apache-2.0 */

/* `kvferry bench`: which benchmark, and nothing else. */

#include "bench.h"
#include "commands.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

int cli_bench_main(int argc, char **argv)
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
