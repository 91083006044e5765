/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A main for fuzz targets without a fuzzer: files and folders given on the command line are
 * replayed; those after --mutate also cut short at every length and with every byte changed, for
 * the first 6 KiB. Then --random N inputs are made from a fixed seed. So every build and every
 * compiler runs the targets, with the inputs that once failed and some fresh ones. Knows nothing of
 * the target.
 */

#include "fuzz_input.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Bytes in front of a file that all are changed: every text of the corpus, and the names and
 * numbers of a file of weights. Its data follow, which targets read whatever they are. */
#define DENSE 6144u
#define APART 64u

/* Every prefix, and every byte changed to what means something in JSON or as a part of a number;
 * after the dense bytes, at some of them. */
static void replay_mutations(uint8_t *data, size_t size)
{
    static const uint8_t values[] = {0, 1, '"', '}', ',', '9', 0x40, 0xff};
    for (size_t at = 0; at < size; at += at < DENSE ? 1 : APART) {
        const uint8_t was = data[at];
        LLVMFuzzerTestOneInput(data, at);
        for (size_t v = 0; v < sizeof values; v++) {
            data[at] = values[v];
            LLVMFuzzerTestOneInput(data, size);
        }
        data[at] = was;
    }
}

static int replay_file(const char *path, int is_mutated)
{
    FILE *file = fopen(path, "rb");
    if (!file)
        return perror(path), 1;
    size_t size = 0, capacity = 1 << 16;
    uint8_t *data = malloc(capacity);
    while (data) {
        size += fread(data + size, 1, capacity - size, file);
        if (size < capacity)
            break;
        uint8_t *larger = realloc(data, capacity *= 2);
        if (!larger)
            free(data);
        data = larger;
    }
    fclose(file);
    if (!data)
        return fprintf(stderr, "%s: out of memory\n", path), 1;
    LLVMFuzzerTestOneInput(data, size);
    if (is_mutated)
        replay_mutations(data, size);
    free(data);
    return 0;
}

static int replay_path(const char *path, int is_mutated, uint32_t *count)
{
    DIR *folder = opendir(path);
    if (!folder)
        return ++*count, replay_file(path, is_mutated);
    int failed = 0;
    for (struct dirent *entry; (entry = readdir(folder));) {
        char name[4096];
        if (entry->d_name[0] == '.')
            continue;
        snprintf(name, sizeof name, "%s/%s", path, entry->d_name);
        ++*count;
        failed |= replay_file(name, is_mutated);
    }
    closedir(folder);
    return failed;
}

/* Lengths up to 512; each input comes from its own number, so that one can be run alone. */
static void replay_random(uint32_t seed)
{
    uint8_t data[512];
    uint32_t x = seed * 2654435761u + 1;
    for (size_t i = 0; i < sizeof data; i++) {
        x = x * 1664525u + 1013904223u;
        data[i] = (uint8_t)(x >> 24);
    }
    LLVMFuzzerTestOneInput(data, (x >> 8) % (sizeof data + 1));
}

int main(int argc, char **argv)
{
    uint32_t files = 0, random = 0;
    int failed = 0, is_mutated = 0;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--random") && i + 1 < argc)
            random = (uint32_t)strtoul(argv[++i], NULL, 10);
        else if (!strcmp(argv[i], "--mutate"))
            is_mutated = 1;
        else
            failed |= replay_path(argv[i], is_mutated, &files);
    }
    for (uint32_t seed = 0; seed < random; seed++)
        replay_random(seed);
    printf("replayed %u files and the random inputs 0 ... %u\n", files, random ? random - 1 : 0);
    return failed;
}
