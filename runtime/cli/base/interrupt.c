/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The signal handler of the command.
 *
 * It holds the one mutable global of the project, because a signal handler can reach nothing else.
 * Invariant: the handler only sets the flag, and is gone after the first signal.
 */

#include "interrupt.h"

#include <signal.h>
#include <stddef.h>

static volatile sig_atomic_t interrupted;

static void note(int number)
{
    (void)number;
    interrupted = 1;
}

void cli_interrupt_watch(void)
{
    struct sigaction action = {.sa_handler = note, .sa_flags = (int)(SA_RESETHAND | SA_RESTART)};
    sigemptyset(&action.sa_mask);
    interrupted = 0;
    sigaction(SIGINT, &action, NULL);
}

bool cli_interrupted(void)
{
    return interrupted != 0;
}
