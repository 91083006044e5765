/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Whether a path may be a model, and what to give instead: links that lead nowhere, and folders of
 * the cache of Hugging Face, whose models are in snapshots further down.
 *
 * Knows names of folders, nothing of what is in a model.
 */

#include "model_memory.h"

#include <errno.h>
#include <glob.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

bool model_has_file(const char *path)
{
    struct stat about;
    return lstat(path, &about) == 0;
}

static bool is_folder(const char *path)
{
    struct stat about;
    return stat(path, &about) == 0 && S_ISDIR(about.st_mode);
}

/* The first path of a pattern below a folder, by the alphabet; false if there is none. */
static bool find_first(const char *folder, const char *below, char path[MODEL_PATH_BYTES])
{
    glob_t found = {0};
    const bool is_there = glob(model_path(path, folder, below), 0, NULL, &found) == 0;
    if (is_there)
        snprintf(path, MODEL_PATH_BYTES, "%s", found.gl_pathv[0]);
    globfree(&found);
    return is_there;
}

/* Folders of Hugging Face's cache: that of a model, and those above it. */
static kvf_status check_cache_folder(const char *folder, kvf_error *error)
{
    char path[MODEL_PATH_BYTES];
    if (find_first(folder, "snapshots/*", path))
        return model_fail(error, KVF_INVALID,
                          "%.200s is a folder of Hugging Face's cache, and the model is further "
                          "down; give %.250s",
                          folder, path);
    if (find_first(folder, "models--*", path) || find_first(folder, "hub/models--*", path))
        return model_fail(error, KVF_INVALID,
                          "%.200s is the cache of Hugging Face, which has many models; give the "
                          "folder of one, such as %.250s/snapshots/REVISION",
                          folder, path);
    return KVF_OK;
}

kvf_status model_check_folder(const char *model, kvf_error *error)
{
    char path[MODEL_PATH_BYTES];
    if (access(model, F_OK) != 0 && errno == ENOENT && model_has_file(model))
        return model_fail_open(model, ENOENT, error);
    if (access(model, F_OK) != 0)
        return model_fail_errno(error, errno,
                                "a model is a folder of this machine with config.json, "
                                "*.safetensors and tokenizer.json, or a GGUF file; %s cannot be "
                                "opened",
                                model);
    if (is_folder(model) && !model_has_file(model_path(path, model, "config.json")))
        return check_cache_folder(model, error);
    return KVF_OK;
}
