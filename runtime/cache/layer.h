/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_LAYER_H
#define KVF_RUNTIME_LAYER_H

/*
 * Groups of what the host knows of a row (kvf_layer): its length in tokens and sealed blocks, its
 * kept queries, its static set, and what a cut or an eviction needs.
 *
 * Knows counts alone. A group is written by its functions here and by nothing else, but for a row
 * that is emptied, copied or restored, and for a copy of one as it was some tokens ago.
 */

#include "common/base.h"

/* Its tokens: those of the first `sealed` blocks are in the pool, the others in the ring. */
typedef struct kvf_layer_extent {
    uint32_t length;
    uint32_t sealed;        /* blocks */
    uint32_t sealed_before; /* in this call: before its tokens */
} kvf_layer_extent;

/* A call begins. */
static inline void kvf_extent_begin(kvf_layer_extent *e)
{
    e->sealed_before = e->sealed;
}

/* While kept tokens are appended again, the front that stayed is sealed already. */
static inline void kvf_extent_append(kvf_layer_extent *e, uint32_t tokens, uint32_t sealed)
{
    e->length += tokens;
    e->sealed = kvf_max_u32(e->sealed, sealed);
}

static inline void kvf_extent_cut(kvf_layer_extent *e, uint32_t length, uint32_t sealed)
{
    e->length = length;
    e->sealed = sealed;
}

/* Blocks that a cut brings back, and tokens that an eviction left. */
typedef struct kvf_layer_cut {
    uint32_t kept;  /* tokens that an eviction chose, per KV head its own; 0: none did */
    uint32_t spare; /* blocks[spare - 1] is in the spare block as it was; 0: none is */
    uint32_t held;  /* in a call that shortens: blocks[sealed .. held) are there already */
} kvf_layer_cut;

/* The newest of `sealed` blocks is in the spare block. */
static inline void kvf_cut_spare(kvf_layer_cut *c, uint32_t sealed)
{
    c->spare = sealed;
}

/* Blocks from `sealed` on are in the window again. */
static inline void kvf_cut_to(kvf_layer_cut *c, uint32_t sealed)
{
    c->spare = c->spare > sealed ? 0 : c->spare;
}

/* An eviction leaves `kept` tokens, which it appends again in `held` blocks. A block that is sealed
 * now never comes back to the window. */
static inline void kvf_cut_evict(kvf_layer_cut *c, uint32_t kept, uint32_t held)
{
    *c = (kvf_layer_cut){.kept = kept, .held = held};
}

static inline void kvf_cut_evicted(kvf_layer_cut *c)
{
    c->held = 0;
}

/* Queries that were kept in the ring of queries: the newest is in slot (count - 1) % window. */
typedef struct kvf_layer_queries {
    uint32_t count; /* so far */
    uint32_t from;  /* those before it are lost: a cut took what had overwritten them */
} kvf_layer_queries;

static inline void kvf_queries_add(kvf_layer_queries *q, uint32_t count)
{
    q->count += count;
}

/* Later queries do not follow those that are kept. */
static inline void kvf_queries_forget(kvf_layer_queries *q)
{
    *q = (kvf_layer_queries){0};
}

/* Only `count` are left, in the first slots. */
static inline void kvf_queries_keep(kvf_layer_queries *q, uint32_t count)
{
    *q = (kvf_layer_queries){.count = count};
}

/* The newest go, of `kept` that the ring has; it has overwritten those before. */
static inline void kvf_queries_cut(kvf_layer_queries *q, uint32_t dropped, uint32_t kept)
{
    *q = dropped < kept ? (kvf_layer_queries){.count = q->count - dropped, .from = q->count - kept}
                        : (kvf_layer_queries){0};
}

/* When the static set was chosen, and when it will be. */
typedef struct kvf_layer_refresh {
    uint32_t since;       /* decode steps */
    uint32_t needs_exact; /* the next one follows a prefill */
    uint32_t exact_from;  /* length when that became so */
    uint32_t share_from;  /* length when auto chose; 0: it has not */
    uint32_t static_from; /* length when the static set was chosen; 0: no page has bits of one */
    uint32_t in_force;    /* which of the two stores: 0 or 1 */
    uint32_t is_due;      /* in this call */
} kvf_layer_refresh;

static inline void kvf_refresh_step(kvf_layer_refresh *r, bool is_due)
{
    r->is_due = is_due;
    r->since = is_due ? 1 : r->since + 1;
}

/* Where it is due, the other store comes into force. */
static inline void kvf_refresh_flip(kvf_layer_refresh *r, uint32_t length)
{
    r->in_force ^= r->is_due;
    r->static_from = r->is_due ? length : r->static_from;
}

/* The next one looks at all keys. */
static inline void kvf_refresh_needs_exact(kvf_layer_refresh *r, uint32_t length)
{
    r->exact_from = r->needs_exact ? r->exact_from : length;
    r->needs_exact = 1;
}

static inline void kvf_refresh_was_exact(kvf_layer_refresh *r)
{
    r->needs_exact = 0;
}

static inline void kvf_refresh_chose_share(kvf_layer_refresh *r, uint32_t length)
{
    r->share_from = length;
}

/* It comes now, and not with a step; then it was exact, and the next one comes an interval later.
 */
static inline void kvf_refresh_seed(kvf_layer_refresh *r)
{
    r->is_due = 1;
}

static inline void kvf_refresh_seeded(kvf_layer_refresh *r)
{
    r->is_due = r->needs_exact = r->since = 0;
}

/* Tokens from `length` on are gone, of which `steps` came with decode steps. */
static inline void kvf_refresh_cut(kvf_layer_refresh *r, uint32_t length, uint32_t steps)
{
    r->since -= steps < r->since ? steps : r->since;
    if (r->needs_exact && length <= r->exact_from)
        r->needs_exact = 0;
    if (r->share_from > length)
        r->share_from = 0;
}

/* No page has bits of a static set any more. */
static inline void kvf_refresh_drop_set(kvf_layer_refresh *r)
{
    r->static_from = 0;
}

/* The same, and the next step chooses another with all keys. */
static inline void kvf_refresh_dissolve(kvf_layer_refresh *r)
{
    r->static_from = r->since = r->exact_from = 0;
    r->needs_exact = 1;
}

#endif
