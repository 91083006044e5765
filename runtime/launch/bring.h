/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_BRING_H
#define KVF_RUNTIME_BRING_H

/*
 * Pages that a step chose become addressable while it runs: hits are attended before misses are
 * looked at, and pages in memory before those that are still being read.
 *
 * All functions do nothing if the pool does not spill.
 */

#include "addressable.h"

/* After the choice of a step. While step->is_late, pages that it chose may not be addressable. */
KVF_CHECKED kvf_status kvf_bring_chosen(kvf_call *call);
/* Where pages stay: spans of late pages are attended as those of misses are; waiting for them. */
KVF_CHECKED kvf_status kvf_bring_mark(kvf_call *call);
KVF_CHECKED kvf_status kvf_bring_late(kvf_call *call);
/* Where pages move, while some are late: misses that are addressable now and were not before. */
KVF_CHECKED kvf_status kvf_bring_misses(kvf_call *call, kvf_choice *out);

#endif
