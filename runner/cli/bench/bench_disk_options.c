/* SPDX-License-Identifier: Apache-2.0 */

/* The command line of `kvferry bench disk`: see the header. Knows no results. */

#include "bench.h"

#include <string.h>

#define FIELD(field) CLI_FIELD(disk_options, field)

static const cli_spelling of_case[] = {
    {"what", NULL, CLI_LIST, ""},
    {"engine", NULL, CLI_LIST, ""},
    {"direct", NULL, CLI_LIST, ""},
    {"extent_bytes", NULL, CLI_LIST, ""},
    {"depth", NULL, CLI_LIST, ""},
    {"extents", NULL, CLI_HIDDEN, NULL},
    {0},
};

/* Values that are swept where the command line does not say. */
static const char *const swept[][2] = {{"what", "random"},
                                       {"engine", "io_uring,preadv"},
                                       {"direct", "on,off"},
                                       {"extent-bytes", "16K,64K,128K,512K,2M"},
                                       {"depth", "1,8,64,256"}};

static const cli_spelling of_runtime[] = {
    {"device", NULL, CLI_PLAIN, NULL},
    {0},
};

static const cli_option rows[] = {
    {.is = {"disk", KVF_SETTING_TEXT, FIELD(folder),
            .meaning = "where the file is made; it has no name, and is gone in the end"},
     .argument = "DIR"},
    {.is = {"file", KVF_SETTING_WHOLE, FIELD(file_bytes), .low = 1 << 24, .high = 0x1p36,
            .meaning = "bytes of the file, a multiple of 16M"}},
    {.is = {"bytes", KVF_SETTING_WHOLE, FIELD(pass_bytes), .low = 4096, .high = 0x1p36,
            .meaning = "moved in a pass; a depth that finds fewer extents in it is left out"}},
    {.is = {"rounds", KVF_SETTING_WHOLE, FIELD(rounds), .low = 1, .high = DISK_ROUNDS_MAX,
            .meaning = "passes of every case, in turn"}},
    {.is = {"rest-ms", KVF_SETTING_WHOLE, FIELD(rest_ms), .high = 60000,
            .meaning =
                "milliseconds of rest before every pass, for disks that limit the mean rate"}},
};

static void set_defaults(void *options)
{
    disk_options *o = options;
    *o = (disk_options){.folder = ".",
                        .file_bytes = (uint64_t)1 << 30,
                        .pass_bytes = (uint64_t)64 << 20,
                        .rounds = 7};
    kvf_disk_case_init(&o->base);
    kvf_runtime_config_init(&o->runtime);
}

const char *disk_swept(void *user, const char *option)
{
    (void)user;
    for (size_t i = 0; i < sizeof swept / sizeof *swept; i++)
        if (strcmp(swept[i][0], option) == 0)
            return swept[i][1];
    return NULL;
}

int disk_options_parse(int argc, char **argv, cli_command *c, disk_options *out)
{
    c->name = "bench disk";
    c->usage = "usage: kvferry bench disk [--disk DIR] [OPTION...]\n\n"
               "Time reads of extents of a file, by engine, size and depth, past the page cache "
               "and through it.\nOptions with ,... take several values; every combination is "
               "measured once per round.";
    c->notes = "Without an option, these are measured: random extents of 16K,64K,128K,512K,2M, by "
               "io_uring at\ndepth 1,8,64,256 and by preadv in one thread, with direct on,off. "
               "A round begins in order, past\nthe cache: 1 MiB, 16 at a time, and 128 KiB, 64 at "
               "a time. The better one is its peak, and ratios\nare taken within a round. Before "
               "a pass through the cache, the cache drops the file.\n";
    c->stray = "see kvferry bench disk --help";
    c->defaults = set_defaults;
    cli_heading(c, "Cases:");
    cli_add_settings(c, &(cli_settings){.at = kvf_disk_setting,
                                        .base = offsetof(disk_options, base),
                                        .spellings = of_case});
    cli_heading(c, "Measurement:");
    cli_add(c, rows, sizeof rows / sizeof *rows, 0);
    bench_add_results(c, offsetof(disk_options, results));
    cli_heading(c, "Machine:");
    cli_add_settings(c, &(cli_settings){.at = kvf_runtime_setting,
                                        .base = offsetof(disk_options, runtime),
                                        .spellings = of_runtime,
                                        .only = true});
    return cli_parse(c, argc, argv, out);
}
