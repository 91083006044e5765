/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_INTERRUPT_H
#define KVF_CLI_INTERRUPT_H

/*
 * Ctrl-C as a question that is asked between chunks and tokens. A second one ends the process.
 */

#include <stdbool.h>

/** From now on; what was before is forgotten. */
void cli_interrupt_watch(void);
bool cli_interrupted(void);

#endif
