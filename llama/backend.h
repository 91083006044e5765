/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVL_BACKEND_H
#define KVL_BACKEND_H

#include "ggml_abi.h"

/** The registry that ggml gets: one accelerator device. Static; the same every time. */
gg_registry *kvl_registry(const gg_api *gg);

#endif
