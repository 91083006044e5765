/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_FETCH_H
#define KVF_RUNTIME_FETCH_H

/*
 * Chosen pages on their way to where they are attended, in a step with a launch per phase.
 */

#include "call.h"

/* After the choice: pages that miss set out. */
KVF_CHECKED kvf_status kvf_fetch_begin(kvf_call *call);
/* Spans are made: those of pages that have not come are attended as those of misses are. */
KVF_CHECKED kvf_status kvf_fetch_mark(kvf_call *call);
/* Some pages may be attended before others are there, until the end. */
bool kvf_fetch_is_pending(const kvf_call *call);
KVF_CHECKED kvf_status kvf_fetch_end(kvf_call *call);

#endif
