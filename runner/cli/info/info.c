/* SPDX-License-Identifier: Apache-2.0 */

/* `kvferry info`: asks the library about machine and build. info_report.c has the words. */

#include "commands.h"
#include "info_report.h"
#include "options.h"

#include <stdlib.h>

/* The library's description, freed with free; NULL after a message. */
static char *describe(kvf_runtime *runtime)
{
    size_t needed = 0;
    kvf_status status = kvf_runtime_describe(runtime, NULL, 0, &needed);
    char *text = needed ? malloc(needed) : NULL;
    if (text && (status == KVF_OK || status == KVF_FULL))
        status = kvf_runtime_describe(runtime, text, needed, &needed);
    if (!text || status != KVF_OK) {
        fprintf(stderr, "kvferry: the machine could not be described: %s\n",
                status != KVF_OK ? kvf_runtime_error(runtime)->text : "there is no memory for it");
        free(text);
        return NULL;
    }
    return text;
}

typedef struct info_options {
    bool as_json;
    kvf_runtime_config runtime;
} info_options;

static void set_defaults(void *options)
{
    info_options *o = options;
    o->as_json = false;
    kvf_runtime_config_init(&o->runtime);
}

int cli_info_main(int argc, char **argv)
{
    static const cli_option rows[] = {
        {.is = {"json", KVF_SETTING_SWITCH, CLI_FIELD(info_options, as_json),
                .meaning = "print one JSON object"}}};
    cli_command command = {.name = "info",
                           .usage = "usage: kvferry info [OPTION...]\n\n"
                                    "Tell what this machine and this build have and lack.",
                           .stray = "see kvferry info --help",
                           .defaults = set_defaults};
    info_options o;
    char calibration[CLI_CALIBRATION_BYTES];
    kvf_runtime *runtime = NULL;
    kvf_error error = {0};
    cli_heading(&command, "Output:");
    cli_add(&command, rows, 1, 0);
    cli_add_runtime(&command, offsetof(info_options, runtime));
    const int parsed = cli_parse(&command, argc, argv, &o);
    if (parsed >= 0)
        return parsed;
    cli_calibration_choose(&o.runtime, calibration);
    if (kvf_runtime_open(&o.runtime, &runtime, &error) != KVF_OK) {
        cli_complain(&command, error.text);
        return 1;
    }
    if (kvf_runtime_calibrate(runtime) != KVF_OK)
        fprintf(stderr, "kvferry: %s\n", kvf_runtime_error(runtime)->text);
    char *description = describe(runtime);
    bool is_said = description && cli_info_print(description, o.as_json);
    if (fflush(stdout) != 0) {
        perror("kvferry: standard output");
        is_said = false;
    }
    free(description);
    kvf_runtime_close(runtime);
    return is_said ? 0 : 1;
}
