/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_RUNTIME_SAVE_RIG_H
#define KVF_TESTS_RUNTIME_SAVE_RIG_H

/*
 * Helpers of tests of saved sequences: a folder of their own, caches of many settings, and whole
 * continuations to compare.
 */

#include <kvferry/save.h>

#include "harness.h"

/* A folder of this process; removed with its files by the rig's teardown. */
const char *save_folder(void);
/* A file in it: the text is valid until the eighth call after. */
const char *save_path(const char *name);
int save_remove_folder(void **state); /* the teardown of a group of tests; its argument is unused */
uint32_t save_count_files(void);      /* in the folder */
char *save_read(const char *path, size_t *bytes); /* a whole file; free() it */

/* Settings that differ in what a sequence keeps, as of test_set; NULL after the last. */
typedef struct save_case {
    const char *name, *settings;
} save_case;
extern const save_case save_cases[];
/* 2 layers, small pages. */
kvf_cache_config save_config(const save_case *c);

#define SAVE_PROMPT 150u
#define SAVE_STEPS  24u

kvf_save_args save_args(kvf_sequence *s, const char *path, const char *model);
kvf_save *save_begin(test_world *w, kvf_sequence *s, const char *path, const char *model);
/* Save as "test" and wait. */
kvf_status save_now(test_world *w, kvf_sequence *s, const char *path, kvf_error *error);
kvf_sequence *save_restore(test_world *w, const char *path, uint32_t exact);

#endif
