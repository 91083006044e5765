/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The best of chosen pages, as many as there is room for by their tokens, the specification.
 *
 * Knows nothing of how pages were chosen, only that the best come first by score, ties by the lower
 * id. Ids stay ascending.
 */

#include "variants.h"

static uint32_t tokens_of(const kvf_trim_args *a, uint32_t list, int32_t id)
{
    return (uint32_t)__builtin_popcountll(kvf_trim_live(a, list, id));
}

/* Tokens of the pages whose key is at least `key`. */
static uint32_t tokens_from(const kvf_trim_args *a, uint32_t list, uint32_t key)
{
    const int32_t *ids = a->ids + (size_t)list * a->ids_max;
    uint32_t tokens = 0;
    for (uint32_t i = 0; i < a->id_count[list]; i++)
        if (kvf_trim_key(a, list, ids[i]) >= key)
            tokens += tokens_of(a, list, ids[i]);
    return tokens;
}

void kvf_trim_ref(const void *args, uint32_t task)
{
    const kvf_trim_args *a = args;
    int32_t *ids = a->ids + (size_t)task * a->ids_max;
    const uint32_t room = kvf_trim_room(a, task);
    uint32_t key = 0, count = 0;
    if (tokens_from(a, task, 0) <= room)
        return;
    /* The best key at which pages no longer fit, found bit by bit. */
    for (uint32_t bit = 0x80000000u; bit; bit >>= 1)
        if (tokens_from(a, task, key | bit) > room)
            key |= bit;
    uint32_t tokens = key == UINT32_MAX ? 0 : tokens_from(a, task, key + 1);
    for (uint32_t i = 0; i < a->id_count[task]; i++) {
        const uint32_t own = kvf_trim_key(a, task, ids[i]);
        if (own < key)
            continue;
        tokens += own == key ? tokens_of(a, task, ids[i]) : 0;
        if (own > key || tokens <= room)
            ids[count++] = ids[i];
    }
    a->id_count[task] = count;
}
