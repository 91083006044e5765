/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The signal handler of the command.
 *
 * It holds the one mutable global of the command, because a signal handler can reach nothing else.
 * Invariant: the handler only sets the global, and is gone after the first signal of its number.
 */

#include "interrupt.h"

#include <signal.h>
#include <stddef.h>

static volatile sig_atomic_t caught; /* the signal, 0 = none */

static void note(int number)
{
    caught = number;
}

static void watch(int number)
{
    struct sigaction action = {.sa_handler = note, .sa_flags = (int)(SA_RESETHAND | SA_RESTART)};
    struct sigaction before;
    sigemptyset(&action.sa_mask);
    /* A signal that nohup and the like ignore stays ignored. */
    if (number != SIGINT && sigaction(number, NULL, &before) == 0 && before.sa_handler == SIG_IGN)
        return;
    sigaction(number, &action, NULL);
}

void cli_interrupt_watch(void)
{
    if (cli_interrupt_ends())
        return;
    caught = 0;
    watch(SIGINT);
    watch(SIGTERM);
    watch(SIGHUP);
}

bool cli_interrupted(void)
{
    return caught != 0;
}

bool cli_interrupt_ends(void)
{
    return caught == SIGTERM || caught == SIGHUP;
}

int cli_interrupt_status(void)
{
    return 128 + (caught ? (int)caught : SIGINT);
}
