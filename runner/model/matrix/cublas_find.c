/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Looks for cuBLAS; see the header. Every candidate is tried by opening it, so a library whose own
 * needs are not met is passed over like one that is not there.
 */

#include "matmul_cublas.h"

#include <dlfcn.h>
#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PATH_BYTES 1024

static const char *const names[] = {"libcublas.so.13", "libcublas.so.12", "libcublas.so"};

static const char *const toolkits[] = {"/usr/local/cuda/lib64",
                                       "/usr/local/cuda/targets/x86_64-linux/lib",
                                       "/usr/local/cuda/targets/sbsa-linux/lib", "/opt/cuda/lib64"};

/* Folders of a Python environment, below its prefix. */
static const char *const wheels[] = {
    "lib/python3*/site-packages/nvidia/cu13/lib", "lib/python3*/site-packages/nvidia/cublas/lib",
    "lib/python3*/dist-packages/nvidia/cu13/lib", "lib/python3*/dist-packages/nvidia/cublas/lib"};

#define COUNT(array) (sizeof(array) / sizeof *(array))

static void *open_file(const char *path)
{
    return dlopen(path, RTLD_NOW | RTLD_LOCAL);
}

static void *open_in(const char *folder)
{
    char path[PATH_BYTES];
    void *library = NULL;
    for (size_t i = 0; i < COUNT(names) && !library; i++)
        if ((size_t)snprintf(path, sizeof path, "%s/%s", folder, names[i]) < sizeof path)
            library = open_file(path);
    return library;
}

static void *open_below(const char *prefix)
{
    void *library = NULL;
    for (size_t i = 0; i < COUNT(wheels) && !library; i++) {
        char pattern[PATH_BYTES];
        glob_t found;
        if ((size_t)snprintf(pattern, sizeof pattern, "%s/%s", prefix, wheels[i]) >= sizeof pattern)
            continue;
        if (glob(pattern, 0, NULL, &found) != 0)
            continue;
        for (size_t k = 0; k < found.gl_pathc && !library; k++)
            library = open_in(found.gl_pathv[k]);
        globfree(&found);
    }
    return library;
}

/* The prefixes of Python environments: the active one, then those whose bin/ is in PATH. */
void *kvf_cublas_find_of_python(void)
{
    static const char *const variables[] = {"VIRTUAL_ENV", "CONDA_PREFIX"};
    void *library = NULL;
    for (size_t i = 0; i < COUNT(variables) && !library; i++)
        if (getenv(variables[i]))
            library = open_below(getenv(variables[i]));
    const char *path = getenv("PATH");
    while (path && *path && !library) {
        const size_t length = strcspn(path, ":");
        char prefix[PATH_BYTES];
        if (length > 4 && length < sizeof prefix && strncmp(path + length - 4, "/bin", 4) == 0) {
            memcpy(prefix, path, length - 4);
            prefix[length - 4] = '\0';
            library = open_below(prefix);
        }
        path += length + (path[length] == ':');
    }
    return library;
}

void *kvf_cublas_find(const char *path)
{
    void *library = NULL;
    if (path) {
        library = open_file(path);
        return library ? library : open_in(path);
    }
    for (size_t i = 0; i < COUNT(names) && !library; i++)
        library = open_file(names[i]);
    if (!library)
        library = kvf_cublas_find_of_python();
    for (size_t i = 0; i < COUNT(toolkits) && !library; i++)
        library = open_in(toolkits[i]);
    return library;
}
