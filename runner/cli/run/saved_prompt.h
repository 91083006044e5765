/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_SAVED_PROMPT_H
#define KVF_CLI_SAVED_PROMPT_H

/*
 * `--save` and `--load`: a prompt that was prefilled once.
 *
 * A file's note is the ids of its prompt, and its model is the fingerprint of the one that runs. It
 * knows files and ids, not how a prompt is prefilled. Invariant: what is loaded is the beginning of
 * the prompt.
 */

#include "run.h"

/** With --load: sets run->loaded.prompt, the prompt of the file, and run->loaded.tokens, how many
 * of its tokens the sequence has; a last one may wait to be fed. Needs model and weights; opens the
 * runtime.
 * @return KVF_OK; KVF_INVALID; as kvf_runtime_open and kvf_saved_read */
KVF_CHECKED kvf_status cli_saved_read(cli_run *run, kvf_error *error);

/** The prompt begins with what is loaded, or is what was saved if none was given.
 * @return KVF_OK; KVF_INVALID says which token differs */
KVF_CHECKED kvf_status cli_saved_match(cli_run *run, kvf_error *error);

/** With --save: the file can be written, as far as can be said. Needs the runtime.
 * @return KVF_OK, KVF_UNSUPPORTED, KVF_SYSTEM */
KVF_CHECKED kvf_status cli_saved_check(const cli_run *run, kvf_error *error);

/** With --load: the sequence of the run becomes the file's. @return as kvf_sequence_restore */
KVF_CHECKED kvf_status cli_saved_load(cli_run *run, kvf_error *error);

/** With --load: host tokens that its sequence takes, window included; else 0. */
uint64_t cli_saved_room(const cli_run *run);

/** With --save, after the prefill: the file is on its way. @return as kvf_sequence_save */
KVF_CHECKED kvf_status cli_saved_begin(cli_run *run, kvf_error *error);

/** Wait for it, if it is. @return false after a message */
bool cli_saved_end(cli_run *run);

#endif
