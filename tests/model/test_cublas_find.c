/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Where cuBLAS is found, and what is said where it is not: by path, by folder, in Python
 * environments; with a stand-in that has its functions. No device is touched.
 */

#include "matmul_cublas.h"
#include "model_fixture.h"
#include "unit.h"

#include <dlfcn.h>
#include <sys/stat.h>
#include <unistd.h>

#define PATH_BYTES 1024

/* A folder tree with the stand-in in it as `name`, below `folder`. */
typedef struct place {
    char *root;
    char folder[PATH_BYTES], file[PATH_BYTES];
} place;

static const char *below(const char *root, const char *path, char text[PATH_BYTES])
{
    assert_true((size_t)snprintf(text, PATH_BYTES, "%s/%s", root, path) < PATH_BYTES);
    return text;
}

static void make_folders(char *path)
{
    for (char *at = strchr(path + 1, '/'); at; at = strchr(at + 1, '/')) {
        *at = '\0';
        (void)mkdir(path, 0700);
        *at = '/';
    }
}

static place place_make(const char *library, const char *folder, const char *name)
{
    place p = {.root = fixture_directory_create()};
    below(p.root, folder, p.folder);
    below(p.folder, name, p.file);
    make_folders(p.file);
    assert_int_equal(symlink(library, p.file), 0);
    return p;
}

static void place_remove(place *p)
{
    assert_int_equal(unlink(p->file), 0);
    for (char *end = p->folder + strlen(p->folder); strlen(p->folder) > strlen(p->root);) {
        assert_int_equal(rmdir(p->folder), 0);
        end = strrchr(p->folder, '/');
        *end = '\0';
    }
    fixture_directory_remove(p->root);
}

static bool is_stand_in(void *library)
{
    return dlsym(library, "kvf_cublas_stand_in") != NULL;
}

/* With no Python environment but `prefix` by this variable. */
static void *find_with(const char *variable, const char *value)
{
    static const char *const variables[] = {"VIRTUAL_ENV", "CONDA_PREFIX", "PATH"};
    for (size_t i = 0; i < 3; i++)
        assert_int_equal(unsetenv(variables[i]), 0);
    assert_int_equal(setenv(variable, value, 1), 0);
    return kvf_cublas_find_of_python();
}

/* ---- by name ---- */

TEST(test_products)
{
    int workspace = 0, stream = 0;
    float x = 0, y = 0;
    kvf_cublas *cublas;
    kvf_error error = {0};
    assert_int_equal(kvf_cublas_open(&workspace, KVF_STAND_IN, &cublas, &error), KVF_OK);
    void *library = dlopen(KVF_STAND_IN, RTLD_NOW | RTLD_NOLOAD);
    assert_non_null(library);
    const struct {
        int alive;
        void *stream, *workspace;
        int m, n, k, products;
        void *c;
    } *seen = dlsym(library, "kvf_cublas_stand_in");
    assert_non_null(seen);
    const kvf_cublas_product product = {
        .dtype = KVF_FP32, .rows = 2, .outputs = 3, .inputs = 5, .weight = &x, .x = &x, .y = &y};
    assert_int_equal(kvf_cublas_multiply(cublas, &product, &stream), KVF_OK);
    assert_int_equal(seen->alive, 1);
    assert_int_equal(seen->products, 1);
    assert_true(seen->m == 3 && seen->n == 2 && seen->k == 5 && seen->c == &y);
    assert_true(seen->stream == &stream && seen->workspace == &workspace);
    kvf_cublas_close(cublas);
    assert_int_equal(seen->alive, 0);
    dlclose(library);
}

TEST(test_folders)
{
    static const char *const names[] = {"libcublas.so.13", "libcublas.so.12", "libcublas.so"};
    for (size_t i = 0; i < 3; i++) {
        place p = place_make(KVF_STAND_IN, "lib", names[i]);
        void *library = kvf_cublas_find(p.folder);
        assert_non_null(library);
        assert_true(is_stand_in(library));
        dlclose(library);
        place_remove(&p);
    }
}

static void expect_refused(const char *path, const char *part)
{
    kvf_error error = {0};
    kvf_cublas *cublas = NULL;
    int workspace = 0;
    const kvf_status status = kvf_cublas_open(&workspace, path, &cublas, &error);
    assert_null(cublas);
    fixture_expect(status, &error, KVF_UNSUPPORTED, path);
    assert_non_null(strstr(error.text, part));
}

TEST(test_refused)
{
    char *folder = fixture_directory_create();
    char text[PATH_BYTES];
    fixture_write_text(folder, "libcublas.so.13", "no library");
    expect_refused(folder, "could not be loaded");
    expect_refused(below(folder, "libcublas.so.13", text), "could not be loaded");
    expect_refused(below(folder, "none", text), "could not be loaded");
    expect_refused(KVF_STAND_IN_LACKING, "cublasGemmEx");
    fixture_directory_remove(folder);
}

/* ---- looked for ---- */

TEST(test_environments)
{
    static const struct {
        const char *variable, *folder;
    } cases[] = {{"VIRTUAL_ENV", "lib/python3.12/site-packages/nvidia/cu13/lib"},
                 {"VIRTUAL_ENV", "lib/python3.9/site-packages/nvidia/cublas/lib"},
                 {"CONDA_PREFIX", "lib/python3.11/site-packages/nvidia/cu13/lib"},
                 {"PATH", "lib/python3/dist-packages/nvidia/cu13/lib"},
                 {"PATH", "lib/python3.12/dist-packages/nvidia/cublas/lib"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        place p = place_make(KVF_STAND_IN, cases[i].folder, "libcublas.so.13");
        char value[PATH_BYTES + 64];
        snprintf(value, sizeof value,
                 strcmp(cases[i].variable, "PATH") == 0 ? "/nowhere/bin:/bin:%s/bin:/usr/none"
                                                        : "%s",
                 p.root);
        void *library = find_with(cases[i].variable, value);
        assert_non_null(library);
        assert_true(is_stand_in(library));
        dlclose(library);
        place_remove(&p);
        assert_null(find_with(cases[i].variable, value)); /* nothing is there any more */
    }
}

/* A library that cannot be loaded is passed over. */
TEST(test_passed_over)
{
    place p = place_make(KVF_STAND_IN, "lib", "libcublas.so.12");
    fixture_write_text(p.folder, "libcublas.so.13", "no library");
    void *library = kvf_cublas_find(p.folder);
    assert_non_null(library);
    assert_true(is_stand_in(library));
    dlclose(library);
    char text[PATH_BYTES];
    assert_int_equal(unlink(below(p.folder, "libcublas.so.13", text)), 0);
    place_remove(&p);
}
