/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The form of each layer: what its attention has beside softmax(scale q.k).
 *
 * Knows nothing of kernels, which get what is kept here.
 */

#include "form.h"

#include <math.h>

#include "sized.h"

static const kvf_form defaults = {.size = sizeof(kvf_form)};

void kvf_form_init_sized(kvf_form *form, size_t size)
{
    kvf_sized_init(form, size, &defaults, sizeof defaults);
}

void kvf_forms_reset(kvf_cache *cache)
{
    for (uint32_t i = 0; i < cache->config.layers; i++)
        cache->forms[i] = (kvf_layer_form){.scale = cache->config.softmax_scale};
}

static kvf_status check(const kvf_cache *cache, const kvf_form *form)
{
    if (!(form->scale >= 0.0f) || isinf(form->scale))
        KVF_FAIL(cache->context, KVF_INVALID,
                 "scale = %g: must be a number above 0, or 0 for softmax_scale = %g",
                 (double)form->scale, (double)cache->config.softmax_scale);
    return KVF_OK;
}

kvf_status kvf_form_set(kvf_cache *cache, uint32_t layer, const kvf_form *form)
{
    kvf_form own = defaults;
    KVF_TRY(KVF_SIZED_READ(cache->context, kvf_form, form, &own));
    KVF_TRY(check(cache, &own));
    cache->forms[layer] =
        (kvf_layer_form){.scale = own.scale > 0.0f ? own.scale : cache->config.softmax_scale};
    return KVF_OK;
}
