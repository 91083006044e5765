/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_FORM_H
#define KVF_RUNTIME_FORM_H

/*
 * Forms of layers, as the caller gives them.
 */

#include "cache.h"

/* Every layer gets the one that settings say. */
void kvf_forms_reset(kvf_cache *cache);

/* `layer` was checked. KVF_INVALID: the layer keeps the form that it has. */
KVF_CHECKED kvf_status kvf_form_set(kvf_cache *cache, uint32_t layer, const kvf_form *form);

#endif
