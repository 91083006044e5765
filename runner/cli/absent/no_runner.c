/* SPDX-License-Identifier: Apache-2.0 */

/* Commands that need the model runner, in a build without it: they tell what is missing. */

#include "commands.h"

#include <stdio.h>

static int tell_absence(void)
{
    fputs("kvferry: this build has no model runner: " KVF_RUNNER_ABSENCE
          "; install it and configure the build again\n",
          stderr);
    return 1;
}

#define ABSENT(name)                                                                               \
    int cli_##name##_main(int argc, char **argv)                                                   \
    {                                                                                              \
        (void)argc;                                                                                \
        (void)argv;                                                                                \
        return tell_absence();                                                                     \
    }

ABSENT(run)
ABSENT(score)
ABSENT(tune)
