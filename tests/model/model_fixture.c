/* SPDX-License-Identifier: Apache-2.0 */

/* See the header. */

#include "model_fixture.h"
#include "unit.h"

#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>

char *fixture_directory_create(void)
{
    const char *base = getenv("TMPDIR");
    char path[512];
    snprintf(path, sizeof path, "%s/kvf-model-XXXXXX", base != NULL ? base : "/tmp");
    assert_non_null(mkdtemp(path));
    return strdup(path);
}

void fixture_directory_remove(char *directory)
{
    DIR *list = opendir(directory);
    assert_non_null(list);
    for (struct dirent *entry = readdir(list); entry != NULL; entry = readdir(list)) {
        char path[1024];
        snprintf(path, sizeof path, "%s/%s", directory, entry->d_name);
        if (entry->d_name[0] != '.')
            unlink(path);
    }
    closedir(list);
    assert_int_equal(rmdir(directory), 0);
    free(directory);
}

void fixture_write(const char *directory, const char *name, const void *bytes, size_t size)
{
    char path[1024];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, size, file), size);
    assert_int_equal(fclose(file), 0);
}

void fixture_write_text(const char *directory, const char *name, const char *text)
{
    fixture_write(directory, name, text, strlen(text));
}

char *fixture_read(const char *path, size_t *size)
{
    FILE *file = fopen(path, "rb");
    if (file == NULL)
        fail_msg("%s cannot be opened", path);
    struct stat info;
    assert_int_equal(fstat(fileno(file), &info), 0);
    char *bytes = malloc((size_t)info.st_size + 1);
    assert_non_null(bytes);
    *size = fread(bytes, 1, (size_t)info.st_size, file);
    assert_int_equal(*size, info.st_size);
    bytes[*size] = '\0';
    fclose(file);
    return bytes;
}

kvf_tokenizer *fixture_tokenizer(const char *name)
{
    char path[1024];
    size_t size;
    snprintf(path, sizeof path, "%s/%s.tokenizer.json", KVF_GOLDENS, name);
    char *json = fixture_read(path, &size);
    kvf_tokenizer *tokenizer;
    kvf_error error = {0};
    fixture_must(kvf_tokenizer_parse(json, size, &tokenizer, &error), &error);
    free(json);
    return tokenizer;
}

void fixture_must(kvf_status got, const kvf_error *error)
{
    if (got != KVF_OK)
        fail_msg("status %d: %s", got, error->text);
}

void fixture_expect(kvf_status got, const kvf_error *error, kvf_status status, const char *part)
{
    if (got != status || error->status != status || strstr(error->text, part) == NULL)
        fail_msg("expected status %d with \"%s\", got %d (%d) with \"%s\"", status, part, got,
                 error->status, error->text);
}

void fixture_device(kvf_runtime_config *config)
{
    const char *device = getenv("KVF_TEST_DEVICE");
    config->device = device && strcmp(device, "cuda") == 0 ? KVF_DEVICE_CUDA : KVF_DEVICE_HOST;
    config->calibrate = 0; /* seconds per runtime, and nothing here depends on it */
}
