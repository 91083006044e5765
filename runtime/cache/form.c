/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The form of each layer: what its attention has beside softmax(scale q.k).
 *
 * Knows nothing of kernels, which get what is kept here. Sinks lie in device memory in the order in
 * which calls have heads: those of the layer's part, then those that stream.
 */

#include "form.h"

#include <math.h>
#include <string.h>

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
    for (uint32_t h = 0; form->sinks && h < cache->config.query_heads; h++)
        if (!(form->sinks[h] < INFINITY))
            KVF_FAIL(cache->context, KVF_INVALID,
                     "sinks[%u] = %g: must be a number, or -infinity for a head without one", h,
                     (double)form->sinks[h]);
    return KVF_OK;
}

/* To the layer's place in device memory. */
static kvf_status put_sinks(kvf_cache *cache, uint32_t layer, const float *sinks)
{
    const kvf_device_ops *ops = cache->device->ops;
    const uint32_t heads = cache->config.query_heads, group = heads / cache->config.kv_heads;
    const uint32_t *order = cache->places[layer].heads;
    float *to = cache->sinks + (size_t)layer * heads;
    kvf_stream *stream = NULL;
    for (uint32_t h = 0; h < cache->config.kv_heads; h++)
        memcpy(cache->words.sinks + h * group, sinks + (order ? order[h] : h) * group,
               group * sizeof *sinks);
    KVF_TRY(ops->stream_create(cache->device, KVF_PRIORITY_NORMAL, &stream));
    kvf_status status = ops->copy(stream, to, cache->words_device.sinks, heads * sizeof *sinks);
    if (status == KVF_OK)
        status = ops->stream_wait(stream);
    ops->stream_destroy(stream);
    if (status == KVF_OK)
        cache->forms[layer].sinks = to;
    return status;
}

kvf_status kvf_form_set(kvf_cache *cache, uint32_t layer, const kvf_form *form)
{
    kvf_form own = defaults;
    KVF_TRY(KVF_SIZED_READ(cache->context, kvf_form, form, &own));
    KVF_TRY(check(cache, &own));
    cache->forms[layer] =
        (kvf_layer_form){.scale = own.scale > 0.0f ? own.scale : cache->config.softmax_scale};
    return own.sinks ? put_sinks(cache, layer, own.sinks) : KVF_OK;
}
