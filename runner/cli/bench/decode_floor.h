/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_DECODE_FLOOR_H
#define KVF_CLI_DECODE_FLOOR_H

/* What the memory of the device and the link give at best, in bytes per ns. Knows no caches. */

#include <kvferry/kvferry.h>

kvf_status decode_floor_reading(kvf_runtime *runtime, kvf_stream *stream, double *rate);
kvf_status decode_floor_link(kvf_runtime *runtime, double *rate);

#endif
