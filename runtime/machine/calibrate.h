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
/* What AUTO takes for pages of this size; measures it, or reads the file, unless that was done
 * before. *out = NULL if nothing was measured, else `choice`. */
KVF_CHECKED kvf_status kvf_runtime_choose(kvf_runtime *rt, size_t page_bytes,
                                          kvf_transfer_choice *choice,
                                          const kvf_transfer_choice **out);

#endif
