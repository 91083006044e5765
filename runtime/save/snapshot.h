/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_SNAPSHOT_H
#define KVF_RUNTIME_SNAPSHOT_H

/*
 * One layer of a sequence, out of a KV group and into one: what a fork would copy, as a snapshot.
 *
 * Knows no file and no head mask. Sealed blocks are not part of a snapshot: they do not change
 * while somebody holds them. Digests are built anew from pages and static bits, by the kernels that
 * built them first. Everything is enqueued in the cache's order; snapshots are memory that the host
 * and the device see.
 */

#include "call.h"
#include "saved_format.h"

/* Memory that both see, at the address of each. */
typedef struct kvf_seen {
    char *host, *device;
} kvf_seen;

static inline void *kvf_seen_device(const kvf_seen *m, const void *host)
{
    return m->device + ((const char *)host - m->host);
}

/* Copies between a row and a snapshot, whichever way. */
typedef struct kvf_snapshot_copy {
    kvf_call *call;
    const kvf_seen *put; /* memory of the snapshot that is put into the row; NULL: it is taken */
    kvf_status status;   /* of the first copy that failed */
} kvf_snapshot_copy;

/* An array, `kept` in the snapshot and `at` its place in the row: nothing if either is NULL. */
void kvf_snapshot_piece(kvf_snapshot_copy *c, void *kept, void *at, size_t bytes);
/* All arrays that are not blocks. */
void kvf_snapshot_state(kvf_snapshot_copy *c, const kvf_layer *state, const kvf_saved_layer *layer,
                        const kvf_snapshot *snapshot, const kvf_row *row);

/* Counts of a layer and of its state. */
void kvf_snapshot_describe(const kvf_layer *state, kvf_saved_layer *out);
/* State and blocks that are not sealed, to `snapshot` and `tail`; `layer` is described. Positions
 * and rings of streaming heads are not touched. */
KVF_CHECKED kvf_status kvf_snapshot_take(kvf_call *call, const kvf_layer *state,
                                         const kvf_saved_layer *layer, const kvf_snapshot *snapshot,
                                         char *tail);
/* The rest of a snapshot beyond its counts, or of a tail beyond its tokens, is of other sequences:
 * 0.
 */
void kvf_snapshot_scrub(const kvf_saved_head *head, const kvf_saved_layer *layer,
                        const kvf_snapshot *snapshot, char *tail);

/* KVF_CORRUPT unless the numbers of a snapshot can be used as they are. */
KVF_CHECKED kvf_status kvf_snapshot_check(kvf_context *context, const char *path,
                                          const kvf_saved_head *head, const kvf_saved_layer *layer,
                                          const kvf_snapshot *snapshot);

/* Whether state of this shape can be put as it is. */
bool kvf_snapshot_is_same(const kvf_kv_group *kv_group, const kvf_saved_layer *layer);
/* Whether a snapshot that is checked and not fresh fits: the sink of this cache is in the store,
 * and the share that static_ratio = auto chose is one that it has room for. */
bool kvf_snapshot_fits(const kvf_kv_group *kv_group, const kvf_saved_layer *layer,
                       const kvf_snapshot *snapshot);

/* How a layer is put into its KV group. */
typedef struct kvf_snapshot_layer {
    kvf_layer *state;
    uint32_t is_exact; /* 1: state as saved; 0: as if the tokens had just been appended */
    const kvf_saved_layer *saved;
    const kvf_snapshot *snapshot;
    char *tail;    /* blocks that will not be sealed, in `work` */
    kvf_seen work; /* snapshot and tail lie there, and from `used` on there is room for more */
    uint64_t used;
} kvf_snapshot_layer;

/* Bytes of work after snapshot and tail. */
uint64_t kvf_snapshot_work_bytes(const kvf_kv_group *kv_group, const kvf_saved_layer *layer);
/* Positions, length, and blocks[0 .. sealed) with their bytes are there. `done` is used to wait
 * where work is written again. The step's stream still reads `work` on return. */
KVF_CHECKED kvf_status kvf_snapshot_put(kvf_call *call, const kvf_snapshot_layer *l,
                                        kvf_event *done);

#endif
