/* SPDX-License-Identifier: Apache-2.0 */

/* See the header. */

#include "text_part.h"

static bool begins_with(const char *name, const char *front)
{
    return strncmp(name, front, strlen(front)) == 0;
}

const char *text_part_name(const char *name)
{
    static const char outer[] = "language_model.", inner[] = "model.language_model.";
    if (begins_with(name, outer))
        return name + sizeof outer - 1;
    /* Both ends are "model.". */
    return begins_with(name, inner) ? name + sizeof inner - sizeof "model." : name;
}

static bool is_of_pictures(const char *name)
{
    if (begins_with(name, "model."))
        name += sizeof "model." - 1;
    return begins_with(name, "vision_tower.") || begins_with(name, "multi_modal_projector.");
}

void text_part_keep(kvf_weights *weights)
{
    size_t kept = 0;
    for (size_t i = 0; i < weights->count; i++)
        if (is_of_pictures(weights->entries[i].tensor.name))
            weights->bytes -= weights->entries[i].tensor.bytes;
        else
            weights->entries[kept++] = weights->entries[i];
    weights->count = kept;
}
