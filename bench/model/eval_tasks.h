/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_BENCH_EVAL_TASKS_H
#define KVF_BENCH_EVAL_TASKS_H

/*
 * What eval_selection is to do: documents, each with texts that follow it.
 *
 * A file has one task a line; fields are apart by tabs, and \n, \t and \\ stand for a line break, a
 * tab and a backslash:
 *
 *     document TEXT                  what follows until the next one is of this document
 *     ask COUNT TEXT [ENOUGH ...]    generate COUNT tokens after TEXT, or fewer, where all of
 *                                    ENOUGH was said, in capitals or not
 *     score CUE TEXT                 the loss of TEXT behind CUE, which may be empty
 *
 * It knows text and ids, nothing of models or caches. Invariant: every document has at least two
 * tokens, every task at least one.
 */

#include "tokenizer.h"

#include <stdio.h>

typedef struct eval_task {
    kvf_token_ids ids; /* fed; when scored, all but the last */
    uint32_t generate; /* tokens; 0 = the text is scored */
    uint32_t cue;      /* first ids that are fed and not scored */
    char *enough;      /* texts, each with its end, and an empty one; NULL = none */
} eval_task;

typedef struct eval_document {
    kvf_token_ids ids;
    eval_task *tasks;
    uint32_t count;
} eval_document;

typedef struct eval_tasks {
    eval_document *documents;
    uint32_t count;
    uint64_t tokens;                /* of all documents */
    uint32_t longest, longest_task; /* tokens, of a task with what it generates */
} eval_tasks;

kvf_status eval_tasks_read(const char *path, const kvf_tokenizer *tokenizer, eval_tasks *out,
                           kvf_error *error);
void eval_tasks_free(eval_tasks *tasks);

/* @return whether what was said, which ends with a 0, is all that is wanted */
bool eval_task_is_said(const eval_task *task, const char *said);

/* Text behind a tab, as in such a file. */
void eval_text_write(FILE *file, const char *bytes, size_t size);

#endif
