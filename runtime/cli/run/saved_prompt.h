/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_SAVED_PROMPT_H
#define KVF_CLI_SAVED_PROMPT_H

/*
 * `--save` and `--load`: a prompt that was prefilled once.
 *
 * A file's note is the ids of its tokens, and its model is the fingerprint of the one that runs. It
 * knows files and ids, not how a prompt is prefilled. Invariant: what is loaded is the beginning of
 * the prompt.
 */

#include "run.h"

/** With --load: the file's tokens are the first ones of the prompt; sets run->loaded. Before memory
 * is reserved. @return KVF_OK; KVF_INVALID says which token differs; as kvf_saved_read */
KVF_CHECKED kvf_status cli_saved_check(cli_run *run, kvf_error *error);

/** With --load: the sequence of the run becomes the file's. @return as kvf_sequence_restore */
KVF_CHECKED kvf_status cli_saved_load(cli_run *run, kvf_error *error);

/** With --save, after the prefill: the file is on its way. @return as kvf_sequence_save */
KVF_CHECKED kvf_status cli_saved_begin(cli_run *run, kvf_error *error);

/** Wait for it, if it is. @return false after a message */
bool cli_saved_end(cli_run *run);

#endif
