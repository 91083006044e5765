/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What the command says in a build without the model runner: `run` and `tune` tell what is missing,
 * `info` prints the library's own description as it is.
 */

#include "run.h"

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

int cli_chat_main(int argc, char **argv)
{
    (void)argc;
    (void)argv;
    return tell_absence();
}

int cli_score_main(int argc, char **argv)
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

bool cli_info_print(const char *description, bool as_json)
{
    (void)as_json;
    return puts(description) >= 0;
}
