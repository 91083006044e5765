/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The default path of the calibration file: $XDG_CACHE_HOME/kvferry/links, or
 * ~/.cache/kvferry/links. Where no folder can be made there is no file, and calibration runs at
 * every open.
 */

#include "commands.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static bool make_folder(const char *path)
{
    return mkdir(path, 0700) == 0 || errno == EEXIST;
}

void cli_calibration_choose(kvf_runtime_config *config, char *path)
{
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    if (config->calibration_path) {
        if (strcmp(config->calibration_path, "-") == 0)
            config->calibration_path = NULL;
        return;
    }
    const bool has_cache = cache && cache[0] == '/';
    if (!has_cache && (!home || home[0] != '/'))
        return;
    int length = has_cache ? snprintf(path, CLI_CALIBRATION_BYTES, "%s", cache)
                           : snprintf(path, CLI_CALIBRATION_BYTES, "%s/.cache", home);
    if (length < 0 || (unsigned)length + sizeof "/kvferry/links" > CLI_CALIBRATION_BYTES)
        return;
    if (!make_folder(path))
        return;
    strcat(path, "/kvferry");
    if (!make_folder(path))
        return;
    strcat(path, "/links");
    config->calibration_path = path;
}
