/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_MODEL_PART_H
#define KVF_MODEL_MODEL_PART_H

/*
 * Parts of a model by Hugging Face's names of files: files of a directory, or what a GGUF file says
 * written as they are.
 *
 * It knows where a part comes from, not what is in it. Invariant: a reader of parts need not ask
 * which kind of model it has.
 */

#include "model_memory.h"

bool model_has_part(const char *model, const char *name);

/** Read a part of at most @p bytes_max. @return as model_read_file; from a GGUF file as
 * gguf_write_part */
KVF_CHECKED kvf_status model_read_part(const char *model, const char *name, size_t bytes_max,
                                       const kvf_allocator *allocator, kvf_text *out,
                                       kvf_error *error);

/** Behind the reading of a part: puts the GGUF file that it came from in front of an error, which
 * names the part. @return @p status */
kvf_status model_blame_part(const char *model, kvf_status status, kvf_error *error);

#endif
