/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_INTERRUPT_H
#define KVF_CLI_INTERRUPT_H

/*
 * Ctrl-C, and signals by which schedulers and containers end a process (SIGTERM, SIGHUP), as a
 * question that is asked between chunks and tokens. A second one ends the process.
 */

#include <stdbool.h>

/** From now on; an earlier Ctrl-C is forgotten, an earlier SIGTERM or SIGHUP is not. */
void cli_interrupt_watch(void);
bool cli_interrupted(void);
/** Not only what is being done is to end, but the command. */
bool cli_interrupt_ends(void);
/** Exit status of what was interrupted: 128 and the number of the signal. */
int cli_interrupt_status(void);

#endif
