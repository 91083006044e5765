/* SPDX-License-Identifier: Apache-2.0 */

/* The clock of the runner and of progress bars; apart, because the command has bars without the
 * runner too. */

#include "generate.h"

#include <time.h>

double kvf_clock_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec * 1e-6;
}
