/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Part of kvferry/prune.h. Hidden states that wait until there is time: in host memory, or in a
 * private file through a small buffer.
 *
 * A state is opaque bytes here. Invariant: a state is moved by one copy of the stream, to or from
 * memory that no other state uses until that copy is done.
 */

#include <kvferry/prune.h>

#include "plain_file.h"
#include "runtime.h"
#include "settings.h"

/* Pinned memory comes in pieces below 1 GiB. */
#define PIECE_BYTES     ((uint64_t)512 << 20)
#define WINDOW_BYTES    ((uint64_t)4 << 20)
#define STATE_BYTES_MAX ((uint64_t)64 << 20)

typedef struct hidden_piece {
    void *host;   /* as it is freed */
    char *device; /* as copies see it */
} hidden_piece;

struct kvf_hidden {
    kvf_runtime *runtime;
    size_t state_bytes;
    uint32_t states_max;
    uint32_t piece_states; /* of each piece but the last */
    uint32_t piece_count;
    hidden_piece *pieces; /* of all states; with a file there is one, its buffer */
    bool on_disk;
    kvf_disk_file file;
};

/* ---- open and close ---- */

static uint32_t states_of_piece(uint64_t state_bytes, uint32_t states_max, bool on_disk)
{
    const uint64_t states = (on_disk ? WINDOW_BYTES : PIECE_BYTES) / state_bytes;
    return states < 1 ? 1 : states < states_max ? (uint32_t)states : states_max;
}

void kvf_hidden_plan_make_sized(uint64_t state_bytes, uint32_t states_max, int on_disk,
                                kvf_hidden_plan *plan, size_t size)
{
    const uint64_t all = state_bytes * states_max;
    kvf_hidden_plan own = {.host_bytes = all};
    if (on_disk && all) {
        own.host_bytes = state_bytes * states_of_piece(state_bytes, states_max, true);
        own.disk_bytes = all;
    }
    KVF_SIZED_GIVE(plan, size, &own);
}

static kvf_status take_pieces(kvf_hidden *h)
{
    for (uint32_t i = 0; i < h->piece_count; i++) {
        void *device = NULL;
        const uint32_t rest = h->states_max - i * h->piece_states;
        KVF_TRY(kvf_pinned_alloc(h->runtime, kvf_min_u32(rest, h->piece_states) * h->state_bytes,
                                 &h->pieces[i].host, &device));
        h->pieces[i].device = device;
    }
    return KVF_OK;
}

static kvf_status open_hidden(kvf_hidden *h, const char *disk_path)
{
    h->file = (kvf_disk_file){.buffered = -1, .direct = -1};
    h->piece_states = states_of_piece(h->state_bytes, h->states_max, h->on_disk);
    h->piece_count = h->on_disk ? 1 : (h->states_max - 1) / h->piece_states + 1;
    h->pieces = kvf_alloc(h->runtime->context, h->piece_count, sizeof *h->pieces);
    if (!h->pieces)
        KVF_FAIL(h->runtime->context, KVF_OUT_OF_MEMORY, "no memory for %u hidden states",
                 h->states_max);
    KVF_TRY(take_pieces(h));
    return h->on_disk ? kvf_disk_file_open(h->runtime->context, disk_path,
                                           (uint64_t)h->state_bytes * h->states_max, &h->file)
                      : KVF_OK;
}

kvf_status kvf_hidden_open(kvf_runtime *runtime, uint64_t state_bytes, uint32_t states_max,
                           const char *disk_path, kvf_hidden **out)
{
    KVF_CHECK_OPENS(runtime, runtime, out);
    if (state_bytes == 0 || state_bytes > STATE_BYTES_MAX || states_max == 0)
        KVF_FAIL(runtime->context, KVF_INVALID,
                 "state_bytes = %llu, states_max = %u: a state takes 1 to %llu bytes, and "
                 "there is at least one",
                 (unsigned long long)state_bytes, states_max, (unsigned long long)STATE_BYTES_MAX);
    kvf_hidden *h = kvf_alloc(runtime->context, 1, sizeof *h);
    if (!h)
        KVF_FAIL(runtime->context, KVF_OUT_OF_MEMORY, "no memory for hidden states");
    h->runtime = runtime;
    kvf_context_hold(runtime->context);
    h->state_bytes = state_bytes;
    h->states_max = states_max;
    h->on_disk = disk_path != NULL;
    const kvf_status status = open_hidden(h, disk_path);
    if (status == KVF_OK)
        *out = h;
    else
        kvf_hidden_close(h);
    return status;
}

void kvf_hidden_close(kvf_hidden *h)
{
    kvf_context *context = h ? h->runtime->context : NULL;
    if (!kvf_handle_is_alive(context))
        return;
    if (h->on_disk)
        kvf_disk_file_close(&h->file);
    for (uint32_t i = 0; h->pieces && i < h->piece_count; i++)
        kvf_pinned_free(h->runtime, h->pieces[i].host);
    kvf_free(context, h->pieces);
    kvf_free(context, h);
    kvf_context_release(context);
}

/* ---- states ---- */

/* States that lie together. */
typedef struct hidden_span {
    uint32_t count;
    size_t bytes;
    char *host, *device;
    uint64_t offset; /* in the file */
} hidden_span;

static hidden_span span_at(const kvf_hidden *h, uint32_t first, uint32_t rest)
{
    const hidden_piece *piece = &h->pieces[h->on_disk ? 0 : first / h->piece_states];
    const uint32_t at = h->on_disk ? 0 : first % h->piece_states;
    const uint32_t count = kvf_min_u32(rest, h->piece_states - at);
    return (hidden_span){.count = count,
                         .bytes = count * h->state_bytes,
                         .host = (char *)piece->host + at * h->state_bytes,
                         .device = piece->device + at * h->state_bytes,
                         .offset = (uint64_t)first * h->state_bytes};
}

static kvf_status check_states(const kvf_hidden *h, uint32_t first, uint32_t count,
                               const void *memory, const kvf_stream *stream)
{
    KVF_TRY(kvf_handle_check(h ? h->runtime->context : NULL, "hidden"));
    KVF_TRY(kvf_stream_check(h->runtime->device, stream));
    if (first > h->states_max || count > h->states_max - first)
        KVF_FAIL(h->runtime->context, KVF_INVALID,
                 "first = %u, count = %u: there is room for %u states", first, count,
                 h->states_max);
    if (!memory && count > 0)
        KVF_FAIL(h->runtime->context, KVF_INVALID, "states is NULL with count = %u", count);
    return KVF_OK;
}

kvf_status kvf_hidden_put(kvf_hidden *h, uint32_t first, uint32_t count, const void *states,
                          kvf_stream *stream)
{
    const char *from = states;
    KVF_TRY(check_states(h, first, count, states, stream));
    for (uint32_t done = 0; done < count;) {
        const hidden_span s = span_at(h, first + done, count - done);
        KVF_TRY(kvf_memory_copy(stream, s.device, from + done * h->state_bytes, s.bytes));
        if (h->on_disk) {
            KVF_TRY(kvf_stream_wait(stream));
            KVF_TRY(kvf_disk_file_write(&h->file, h->runtime->context, s.offset, s.bytes, s.host));
        }
        done += s.count;
    }
    return KVF_OK;
}

kvf_status kvf_hidden_get(kvf_hidden *h, uint32_t first, uint32_t count, void *states,
                          kvf_stream *stream)
{
    char *to = states;
    KVF_TRY(check_states(h, first, count, states, stream));
    for (uint32_t done = 0; done < count;) {
        const hidden_span s = span_at(h, first + done, count - done);
        if (h->on_disk)
            KVF_TRY(kvf_disk_file_read(&h->file, h->runtime->context, s.offset, s.bytes, s.host));
        KVF_TRY(kvf_memory_copy(stream, to + done * h->state_bytes, s.device, s.bytes));
        if (h->on_disk)
            KVF_TRY(kvf_stream_wait(stream));
        done += s.count;
    }
    return KVF_OK;
}
