/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_INTERRUPT_H
#define KVF_CLI_INTERRUPT_H

/*
 * Ctrl-C as a question that is asked between chunks and tokens. A second one ends the process.
 */

#include <stdbool.h>

void cli_interrupt_watch(void);
/** Forget it, and watch again. */
void cli_interrupt_clear(void);
bool cli_interrupted(void);

#endif
