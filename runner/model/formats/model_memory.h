/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_MEMORY_H
#define KVF_MODEL_MEMORY_H

/*
 * Memory and errors for everything that reads a model directory.
 *
 * This file knows no format. Invariant: a function that fails has filled the error and left nothing
 * allocated.
 */

#include "common/convert.h"

#include <limits.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/** Growable token ids. Zero-initialise; ids are the owner's until kvf_token_ids_free. */
typedef struct kvf_token_ids {
    uint32_t *ids;
    size_t count; /* count <= capacity */
    size_t capacity;
} kvf_token_ids;

/** Growable bytes, always followed by a zero byte that size does not count. Zero-initialise. */
typedef struct kvf_text {
    char *bytes;
    size_t size; /* size < capacity once anything was written */
    size_t capacity;
} kvf_text;

void kvf_token_ids_free(kvf_token_ids *ids);
void kvf_text_free(kvf_text *text);

/** Whether @p id is one of them. */
bool kvf_ids_have(const uint32_t *ids, size_t count, uint32_t id);

/** Append one, or [count] that lie elsewhere. KVF_OUT_OF_MEMORY leaves the contents as they were.
 */
KVF_CHECKED kvf_status kvf_token_ids_push(kvf_token_ids *ids, uint32_t id, kvf_error *error);
KVF_CHECKED kvf_status kvf_token_ids_append(kvf_token_ids *ids, const uint32_t *from, size_t count,
                                            kvf_error *error);
KVF_CHECKED kvf_status kvf_text_append(kvf_text *text, const void *bytes, size_t size,
                                       kvf_error *error);

/* ---- for the readers themselves ---- */

/** @return NULL if there is none; 16-byte aligned. @p bytes 0 counts as 1. Weak, as model_free is:
 * a test has its own and lets the N-th allocation fail. */
void *model_alloc(size_t bytes);
/** As model_alloc for count x bytes, zeroed; NULL on overflow too. */
void *model_alloc_zero(size_t count, size_t bytes);
void model_free(void *pointer);
/** @p pointer, freed, and its first @p used bytes in @p bytes others; NULL changes nothing. */
void *model_grow(void *pointer, size_t used, size_t bytes);

/** @p text [size], copied, with a zero byte after it. @p what names it in an error. */
KVF_CHECKED kvf_status model_copy_text(const char *text, size_t size, const char *what, char **out,
                                       kvf_error *error);

/** Room for one more of @p count elements of a list from realloc, which doubles where it is full.
 * @return the list; NULL if there is no memory, and it is what it was */
void *model_room(void *list, uint32_t count, uint32_t *capacity, size_t element);

/** FNV-1a, folded. */
uint64_t model_hash(const char *bytes, size_t size);

/** Fill @p error (may be NULL) and return @p status. */
kvf_status model_fail(kvf_error *error, kvf_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/** As model_fail with errno kept in error->foreign and its text appended. */
kvf_status model_fail_errno(kvf_error *error, int number, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/** @p path could not be opened: why, also where it is a link that leads nowhere. @return KVF_SYSTEM
 */
kvf_status model_fail_open(const char *path, int number, kvf_error *error);
kvf_status model_out_of_memory(kvf_error *error, size_t bytes, const char *what);

/** Whether something has this name, be it a link that leads nowhere. */
bool model_has_file(const char *path);
/** A path that cannot be a model is refused, with what to give instead. */
KVF_CHECKED kvf_status model_check_folder(const char *model, kvf_error *error);

/** Read a whole file of text, of at most @p bytes_max, without a byte order mark at its start. */
KVF_CHECKED kvf_status model_read_file(const char *path, size_t bytes_max, kvf_text *out,
                                       kvf_error *error);
/** A byte order mark at the start of a text is no part of it. */
void model_skip_mark(kvf_text *text);
/** Whether a file that was asked for is here: Git without LFS leaves a pointer to it instead.
 * @return KVF_OK; KVF_CORRUPT with what to do */
KVF_CHECKED kvf_status model_check_pointer(const char *path, const char *bytes, size_t size,
                                           kvf_error *error);
/** Room for a path; one that was cut short is too long for the system, which then says so. */
#define MODEL_PATH_BYTES (PATH_MAX + 1)
/** Bytes of a file, mapped read-only, or of the caller. */
typedef struct model_mapping {
    const char *bytes;
    size_t size;
    bool mapped; /* else the caller's memory */
} model_mapping;

/** Map a whole regular file that is not empty, nor a pointer of Git LFS; model_unmap frees what
 * came of it. */
KVF_CHECKED kvf_status model_map(const char *path, model_mapping *out, kvf_error *error);
void model_unmap(model_mapping *mapping);

/** directory + "/" + name. @return @p path */
const char *model_path(char path[MODEL_PATH_BYTES], const char *directory, const char *name);
/** A path without its folders. */
const char *model_base_name(const char *path);

/*
 * Parts of a model by Hugging Face's names of files: files of a directory, or what a GGUF file says
 * written as they are.
 *
 * It knows where a part comes from, not what is in it. Invariant: a reader of parts need not ask
 * which kind of model it has.
 */

bool model_has_part(const char *model, const char *name);

/** Read a part of at most @p bytes_max. @return as model_read_file; from a GGUF file as
 * gguf_write_part */
KVF_CHECKED kvf_status model_read_part(const char *model, const char *name, size_t bytes_max,
                                       kvf_text *out, kvf_error *error);

/** Behind the reading of a part: puts the GGUF file that it came from in front of an error, which
 * names the part. @return @p status */
kvf_status model_blame_part(const char *model, kvf_status status, kvf_error *error);

#endif
