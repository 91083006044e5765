/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_CALIBRATE_H
#define KVF_RUNTIME_CALIBRATE_H

/*
 * What a runtime knows of its link.
 */

#include "runtime.h"

/* The lock and the path; close takes a runtime that was never opened that far. */
KVF_CHECKED kvf_status kvf_calibration_open(kvf_runtime *rt, const char *path);
void kvf_calibration_close(kvf_runtime *rt);
/* What AUTO takes for pages of this size; NULL if nothing was measured. */
const kvf_transfer_choice *kvf_runtime_choose(kvf_runtime *runtime, size_t page_bytes,
                                              kvf_transfer_choice *choice);

#endif
