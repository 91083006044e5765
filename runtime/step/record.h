/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_RECORD_H
#define KVF_RUNTIME_RECORD_H

/*
 * Recorded decode: a whole step as a graph of the device, run again and again. The host's knowledge
 * of a step (lengths, rows, pool addresses, heads to pack) is in one piece per recorded call. The
 * graph begins with a kernel that brings the next frame of pieces from a ring in host memory to
 * fixed places; everything after it reads those. Launches are sized by maxima, and counts are read
 * on the device. So a replay writes one frame and launches one graph, however many KV groups the
 * cache has. A graph seals nothing: blocks that leave the window, of all layers, are sealed by a
 * few launches before it.
 *
 * Invariants: frame `replays % KVF_REPLAYS` of the ring is written only after the replay that used
 * it is done; the device's turns equal `replays`.
 */

#include "cache.h"

/* Replays whose frames may be in flight; a power of two. */
#define KVF_REPLAYS 8u

struct kvf_recording {
    kvf_cache *cache;
    kvf_graph *graph;
    kvf_stream *stream; /* that is being recorded; NULL afterwards */
    uint32_t batch;
    uint32_t count;                /* calls recorded */
    uint32_t rows_max;             /* layers * batch: rows that may seal a block */
    size_t call_bytes, seal_bytes; /* of a frame, of such rows */
    kvf_sequence **sequences;      /* [batch] */
    uint64_t *generations;         /* [batch] of the sequences */
    uint64_t attention_changes;    /* to layers of the cache before it */
    kvf_decode_args *calls;        /* [layers] as they were recorded */
    uint8_t *has_layer;            /* [layers] */
    uint32_t *sealing;             /* [kv_groups] rows that the next replay seals a block of */
    uint32_t *uses;                /* [kv_groups] number of the call that does */
    kvf_host_memory ring; /* [KVF_REPLAYS, layers, call_bytes], then [KVF_REPLAYS, seal_bytes] */
    char *device;         /* [layers, call_bytes], then turns [layers] */
    char *seal_device;    /* [seal_bytes] of the same memory */
    kvf_event *done[KVF_REPLAYS];
    uint32_t is_busy[KVF_REPLAYS];
    uint64_t replays;
    kvf_status failure; /* of a call while recording */
};

/* Settings and sequences were checked. From then on cache->recording is set, until the end. */
KVF_CHECKED kvf_status kvf_recording_begin(kvf_cache *cache, kvf_sequence *const *sequences,
                                           uint32_t batch, kvf_stream *stream);
/* A step of one layer; nothing runs. The first failure is kept for the end. */
KVF_CHECKED kvf_status kvf_recording_decode(kvf_recording *recording, const kvf_decode_args *args,
                                            kvf_stream *stream);
KVF_CHECKED kvf_status kvf_recording_end(kvf_recording *recording, kvf_recording **out);
bool kvf_recording_can_replay(const kvf_recording *recording);
/* Refused if it cannot be, and then nothing has changed. */
KVF_CHECKED kvf_status kvf_recording_replay(kvf_recording *recording, kvf_stream *stream);
void kvf_recording_close(kvf_recording *recording);

#endif
