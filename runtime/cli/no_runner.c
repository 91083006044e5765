/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What the command says in a build without the model runner: `run` and `tune` tell what is missing,
 * `info` prints the library's own description as it is.
 */

#include "calibration_file.h"
#include "run.h"

#include <stdlib.h>
#include <string.h>

static int tell_absence(void)
{
    fputs("kvferry: this build has no model runner: " KVF_RUNNER_ABSENCE
          "; install it and configure the build again\n",
          stderr);
    return 1;
}

int cli_run_main(int argc, char **argv)
{
    (void)argc;
    (void)argv;
    return tell_absence();
}

int cli_tune_main(int argc, char **argv)
{
    (void)argc;
    (void)argv;
    return tell_absence();
}

static int print_description(kvf_runtime *runtime)
{
    size_t needed = 0;
    kvf_status status = kvf_runtime_describe(runtime, NULL, 0, &needed);
    char *text = needed ? malloc(needed) : NULL;
    if (text && (status == KVF_OK || status == KVF_FULL))
        status = kvf_runtime_describe(runtime, text, needed, &needed);
    const int is_said = text && status == KVF_OK;
    if (is_said)
        puts(text);
    else
        fputs("kvferry: the machine could not be described\n", stderr);
    free(text);
    return is_said && fflush(stdout) == 0 ? 0 : 1;
}

int cli_info_main(int argc, char **argv)
{
    char calibration[CLI_CALIBRATION_BYTES];
    kvf_runtime_config config;
    kvf_runtime *runtime = NULL;
    kvf_error error = {0};
    if (argc > 2 || (argc == 2 && strcmp(argv[1], "--json") != 0)) {
        fputs("usage: kvferry info [--json]\n", stderr);
        return 2;
    }
    kvf_runtime_config_init(&config);
    cli_calibration_choose(&config, calibration);
    if (kvf_runtime_open(&config, &runtime, &error) != KVF_OK) {
        fprintf(stderr, "kvferry: %s\n", error.text);
        return 1;
    }
    if (kvf_runtime_calibrate(runtime) != KVF_OK)
        fprintf(stderr, "kvferry: %s\n", kvf_runtime_error(runtime)->text);
    const int result = print_description(runtime);
    kvf_runtime_close(runtime);
    return result;
}
