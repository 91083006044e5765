/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_MODEL_FIXTURE_H
#define KVF_TESTS_MODEL_FIXTURE_H

/*
 * Helpers of the tests of runner/model: files in a directory that disappears afterwards, and
 * errors.
 */

#include "heap.h"
#include "model_memory.h"
#include "tokenizer.h"

/** A fresh directory; freed by fixture_directory_remove, with every plain file in it. */
char *fixture_directory_create(void);
void fixture_directory_remove(char *directory);
void fixture_write(const char *directory, const char *name, const void *bytes, size_t size);
void fixture_write_text(const char *directory, const char *name, const char *text);

/** A whole file, zero-terminated; freed with free. Fails the test if it cannot be read. */
char *fixture_read(const char *path, size_t *size);

/** That of goldens/NAME.tokenizer.json. */
kvf_tokenizer *fixture_tokenizer(const char *name);

/** Which device to run on: KVF_TEST_DEVICE=cuda, else the host device. Its link is not measured. */
void fixture_device(kvf_runtime_config *config);

/** The call succeeded, or the test fails with what the error says. */
void fixture_must(kvf_status got, const kvf_error *error);

/** The error has this status and its text holds this part. */
void fixture_expect(kvf_status got, const kvf_error *error, kvf_status status, const char *part);

#endif
