/* SPDX-License-Identifier: Apache-2.0 */

/* See profile.h. One launch; bringing the numbers to the host is the pruner's. */

#include "profile.h"

#include <stddef.h>

#include "choose.h"

/* The kernel writes rows of three floats. */
_Static_assert(sizeof(kvf_prune_profile) == KVF_PROFILE_VALUES * sizeof(float), "no padding");
_Static_assert(offsetof(kvf_prune_profile, entropy) == 0, "first");
_Static_assert(offsetof(kvf_prune_profile, mass) == sizeof(float), "second");
_Static_assert(offsetof(kvf_prune_profile, variance) == 2 * sizeof(float), "third");

kvf_status kvf_prune_profile_enqueue(kvf_prune *prune, uint32_t candidates, kvf_stream *stream)
{
    const kvf_prune_settings *settings = &prune->config.settings;
    const kvf_profile_args args = {.rows = prune->shape.query_heads,
                                   .stride = candidates,
                                   .count = candidates,
                                   .top = kvf_share_count(candidates + settings->window,
                                                          kvf_share_value(settings->mass_share)),
                                   .scores = prune->heads,
                                   .out = (void *)prune->profile};
    return KVF_ENQUEUE(stream, profile, args);
}
