/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Whether a path may be a model, and what to give instead: links that lead nowhere, and folders of
 * the cache of Hugging Face, whose models are in snapshots further down.
 *
 * Knows names of folders, nothing of what is in a model.
 */

#include "model_memory.h"

#include <dirent.h>
#include <errno.h>
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

/* The first name in a folder that begins with `start`, by the alphabet; false if there is none. */
static bool find_entry(const char *folder, const char *start, char name[256])
{
    DIR *open = opendir(folder);
    name[0] = '\0';
    if (!open)
        return false;
    for (const struct dirent *e; (e = readdir(open)) != NULL;)
        if (e->d_name[0] != '.' && strncmp(e->d_name, start, strlen(start)) == 0 &&
            (!name[0] || strcmp(e->d_name, name) < 0))
            snprintf(name, 256, "%s", e->d_name);
    closedir(open);
    return name[0] != '\0';
}

/* The revision that `main` is, if it is here; else any that is. */
static bool find_revision(const char *folder, char name[256])
{
    char path[MODEL_PATH_BYTES], place[MODEL_PATH_BYTES + 300];
    FILE *file = fopen(model_path(path, folder, "refs/main"), "re");
    const bool is_read = file && fgets(name, 256, file) != NULL;
    if (file)
        fclose(file);
    if (is_read) {
        name[strcspn(name, "\r\n")] = '\0';
        snprintf(place, sizeof place, "%s/snapshots/%s", folder, name);
        if (name[0] && is_folder(place))
            return true;
    }
    return find_entry(model_path(path, folder, "snapshots"), "", name);
}

/* Folders of Hugging Face's cache: that of a model, and those above it. */
static kvf_status check_cache_folder(const char *folder, kvf_error *error)
{
    char path[MODEL_PATH_BYTES], name[256];
    if (is_folder(model_path(path, folder, "snapshots"))) {
        if (find_revision(folder, name))
            return model_fail(
                error, KVF_INVALID,
                "%.200s is a folder of Hugging Face's cache, and the model is further "
                "down; give %.200s/snapshots/%s",
                folder, folder, name);
        return model_fail(
            error, KVF_INVALID,
            "%.300s is a folder of Hugging Face's cache, and its snapshots/ is empty; "
            "download the model",
            folder);
    }
    const char *hub = is_folder(model_path(path, folder, "hub")) ? "/hub" : "";
    snprintf(path, sizeof path, "%s%s", folder, hub);
    if (find_entry(path, "models--", name))
        return model_fail(error, KVF_INVALID,
                          "%.200s is the cache of Hugging Face, which holds many models; give the "
                          "folder of one, such as %.160s%s/%.100s/snapshots/REVISION",
                          folder, folder, hub, name);
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
