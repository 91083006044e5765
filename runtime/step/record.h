/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_RECORD_H
#define KVF_RUNTIME_RECORD_H

/*
 * Recorded decode: a whole step as a graph of the device, run again and again.
 *
 * What the host knows of a step (lengths, rows, pool addresses) is in one part per recorded call.
 * The graph begins with a kernel that brings the next frame of parts from a ring in host memory to
 * fixed places; everything behind it reads those. Launches are sized by maxima, and counts are read
 * on the device. So a replay writes one frame and launches one graph. A graph seals nothing: blocks
 * that leave the window, of all layers, are sealed by a few launches before it.
 *
 * A graph may hold the calls of several caches: then each of them has a recording, with a ring of
 * its own and without a graph, and the one who captures goes through the steps that
 * kvf_recording_begin, _end and _replay are made of.
 *
 * Invariants: frame `replays % KVF_REPLAYS` of the ring is written only after the replay that used
 * it is done; the device's turns equal `replays`.
 */

#include "decode.h"

/* Replays whose frames may be in flight; a power of two. */
#define KVF_REPLAYS 8u

typedef struct kvf_masked_recording kvf_masked_recording;

struct kvf_recording {
    kvf_cache *cache;
    kvf_masked_recording *masked; /* of a cache with a head mask (masked_record.h), or NULL */
    kvf_graph *graph;             /* NULL of calls that are part of another's graph */
    kvf_stream *stream;           /* that is being recorded; NULL afterwards */
    uint32_t batch;
    uint32_t parts;                /* calls recorded */
    uint32_t rows_max;             /* layers * batch: rows that may seal a block */
    size_t part_bytes, seal_bytes; /* of a frame, of a list of such rows */
    kvf_sequence **sequences;      /* [batch] */
    uint32_t *generations;         /* [batch] of the sequences */
    uint32_t *layers;              /* [parts] */
    uint8_t *has_layer;            /* [layers of the cache] */
    kvf_host_memory ring; /* [KVF_REPLAYS, layers, part_bytes], then [KVF_REPLAYS, seal_bytes] */
    char *device;         /* [layers, part_bytes], then turns [layers] */
    char *seal_device;    /* [seal_bytes] of the same memory */
    kvf_event *done[KVF_REPLAYS];
    uint32_t is_busy[KVF_REPLAYS];
    uint64_t replays;
    uint32_t sealing;   /* rows that the next replay seals a block of */
    kvf_ahead ahead;    /* of the call recorded last */
    kvf_status failure; /* of a call while recording */
};

/* Settings and sequences were checked. From then on cache->recording is set, until the end. */
KVF_CHECKED kvf_status kvf_recording_begin(kvf_cache *cache, kvf_sequence *const *sequences,
                                           uint32_t batch, kvf_stream *stream);
/* A step of one layer; nothing runs. */
KVF_CHECKED kvf_status kvf_recording_decode(kvf_recording *recording, const kvf_decode_args *args,
                                            kvf_stream *stream);
KVF_CHECKED kvf_status kvf_recording_end(kvf_recording *recording, kvf_recording **out);
bool kvf_recording_can_replay(const kvf_recording *recording);
KVF_CHECKED kvf_status kvf_recording_replay(kvf_recording *recording, kvf_stream *stream);
void kvf_recording_close(kvf_recording *recording);

/* ---- the steps of these ---- */

/* Room for frames; nothing is recorded. `take` finds out, in a dry step, what a call has in its
 * frame. The one that fails leaves nothing. */
KVF_CHECKED kvf_status kvf_recording_open(kvf_cache *cache, kvf_sequence *const *sequences,
                                          uint32_t batch, void (*take)(kvf_step *step),
                                          kvf_recording **out);
/* The stream is being captured: from here on cache->recording is set. A failure is kept. */
void kvf_recording_start(kvf_recording *recording, kvf_stream *stream);
/* The next call, if it may be recorded: its step, with its part of the first frame. */
KVF_CHECKED kvf_status kvf_recording_call(kvf_recording *recording, const kvf_decode_args *args,
                                          kvf_stream *stream, kvf_frame *frame, kvf_step *step);
/* The first failure of a call is kept for the end; returns its argument. */
kvf_status kvf_recording_keep(kvf_recording *recording, kvf_status status);
/* The end of the calls: joins what runs beside them, and says what failed. Then cache->recording is
 * NULL. With the end of the capture, and the graph, by the one who captures. */
KVF_CHECKED kvf_status kvf_recording_finish(kvf_recording *recording);
KVF_CHECKED kvf_status kvf_recording_capture_end(kvf_recording *recording);

bool kvf_recording_is_alive(const kvf_recording *recording);
/* For one more token in every layer; blocks of the pool are not asked for. */
bool kvf_recording_has_room(const kvf_recording *recording);
/* Why the next replay cannot be, nothing changes; as far as sequences tell, and all of it. */
KVF_CHECKED kvf_status kvf_recording_check_sequences(kvf_recording *recording);
KVF_CHECKED kvf_status kvf_recording_check(kvf_recording *recording);
/* Until the next frame may be written. */
KVF_CHECKED kvf_status kvf_recording_await(kvf_recording *recording);
/* The step of a call of the next replay, with its part of the next frame. */
kvf_step kvf_recording_step(kvf_recording *recording, uint32_t part, kvf_frame *frame);
/* Bookkeeping of every call, and its part of the frame; after kvf_recording_check and _await. The
 * graph comes behind what kvf_recording_lead enqueues. */
void kvf_recording_note(kvf_recording *recording);
/* Behind the last call of the cache; and what a cache has to do before the graph. */
KVF_CHECKED kvf_status kvf_recording_follow(kvf_recording *recording, kvf_stream *stream);
KVF_CHECKED kvf_status kvf_recording_lead(kvf_recording *recording, kvf_stream *stream);
/* Behind the graph; a failure of what came since kvf_recording_note breaks the cache. */
KVF_CHECKED kvf_status kvf_recording_mark(kvf_recording *recording, kvf_stream *stream,
                                          kvf_status status);

#endif
