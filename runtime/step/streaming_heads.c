/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Streaming heads: packing, rings, and attention over a sink and a window.
 *
 * Knows nothing of KV groups. Attention of a chunk does not know of the pages between sink and
 * window: they are left out of its page table, and tokens after them are counted as if they
 * followed the sink's pages. Because whole pages are left out, and the window of the first query
 * begins after them, every distance between tokens that see each other stays what it is. Because
 * whole tiles are (KVF_PREFILL_TILE), so does the order in which they are summed, wherever a chunk
 * begins; pages in front of the window that a tile has as well are zeros, and no query sees them.
 */

#include "streaming_heads.h"

#include <string.h>

#include "attend.h"

/* ---- packing ---- */

static const kvf_rings *rings_of(const kvf_heads_work *work)
{
    return work->call->cache->rings;
}

kvf_heads_work kvf_heads_work_of(kvf_call *call, uint32_t tokens)
{
    const uint32_t streaming = kvf_streaming_count(call->cache, call->layer);
    return (kvf_heads_work){.call = call,
                            .streaming = streaming,
                            .tokens = tokens,
                            .is_mixed = streaming && call->kv_group};
}

static const kvf_ring *ring_of(const kvf_cache *cache, uint32_t layer)
{
    return &cache->rings->layers[layer].ring;
}

kvf_packed_heads kvf_heads_packed(const kvf_heads_work *work, bool is_streaming)
{
    const kvf_rings *z = rings_of(work);
    if (!work->is_mixed)
        return (kvf_packed_heads){work->q, work->k, work->v, work->out, work->lse};
    return (kvf_packed_heads){.q = work->q ? z->q[is_streaming] : NULL,
                              .k = z->k[is_streaming],
                              .v = z->v[is_streaming],
                              .out = work->q ? z->out[is_streaming] : NULL,
                              .lse = work->lse ? z->lse[is_streaming] : NULL};
}

/* The heads of a kind: from `all` to `packed`, or back. */
static kvf_heads_job job_of(const kvf_heads_work *work, bool is_streaming, size_t bytes)
{
    const uint32_t all = work->call->cache->config.kv_heads, retrieval = all - work->streaming;
    const uint32_t count = is_streaming ? work->streaming : retrieval;
    return (kvf_heads_job){.from_head = work->heads + (is_streaming ? retrieval : 0),
                           .from_heads = all,
                           .to_heads = count,
                           .count = count,
                           .bytes = (uint32_t)bytes};
}

static kvf_heads_job pack(kvf_heads_job job, const void *from, const void *to)
{
    job.from = from;
    job.to = (void *)(uintptr_t)to;
    return job;
}

static kvf_heads_job unpack(kvf_heads_job job, const void *from, void *to)
{
    return (kvf_heads_job){.from = from,
                           .to = to,
                           .to_head = job.from_head,
                           .from_heads = job.to_heads,
                           .to_heads = job.from_heads,
                           .count = job.count,
                           .bytes = job.bytes};
}

void kvf_heads_take_jobs(kvf_heads_work *work)
{
    const kvf_rings *z = rings_of(work);
    const uint32_t count = work->call->cache->config.kv_heads;
    const size_t key = kvf_key_bytes(&z->shape), value = kvf_value_bytes(&z->shape);
    const kvf_shape out = kvf_out_shape(work->call->cache, &z->shape);
    uint32_t *heads;
    kvf_heads_job *jobs;
    KVF_TAKE(work->call, heads, work->heads, count);
    KVF_TAKE(work->call, jobs, work->pack_jobs.jobs, KVF_HEADS_JOBS_MAX);
    memcpy(heads, work->call->cache->layer_groups[work->call->layer].heads, count * sizeof *heads);
    work->pack_jobs.tokens = work->tokens;
    work->unpack_jobs = work->pack_jobs;
    if (!work->is_mixed)
        return;
    uint32_t n = 0;
    for (int kind = 0; kind < 2; kind++) {
        const kvf_packed_heads h = kvf_heads_packed(work, kind);
        if (work->q)
            jobs[n++] = pack(job_of(work, kind, z->group * key), work->q, h.q);
        if (kind && !work->is_chunk)
            continue; /* a step appends to the ring from the caller's keys and values */
        jobs[n++] = pack(job_of(work, kind, key), work->k, h.k);
        jobs[n++] = pack(job_of(work, kind, value), work->v, h.v);
    }
    work->pack_jobs.job_count = n;
    work->unpack_jobs.jobs = work->pack_jobs.jobs + n;
    for (int kind = 0; kind < 2 && work->q; kind++) {
        const kvf_packed_heads h = kvf_heads_packed(work, kind);
        jobs[n++] = unpack(job_of(work, kind, z->group * kvf_value_bytes(&out)), h.out, work->out);
        if (work->lse)
            jobs[n++] = unpack(job_of(work, kind, z->group * sizeof(float)), h.lse, work->lse);
    }
    work->unpack_jobs.job_count = n - work->pack_jobs.job_count;
    KVF_ASSERT(n <= KVF_HEADS_JOBS_MAX);
}

kvf_status kvf_heads_pack(const kvf_heads_work *work)
{
    return work->streaming ? KVF_LAUNCH(work->call, heads, work->pack_jobs) : KVF_OK;
}

kvf_status kvf_heads_unpack(const kvf_heads_work *work)
{
    return work->streaming ? KVF_LAUNCH(work->call, heads, work->unpack_jobs) : KVF_OK;
}

static kvf_row row_of(const kvf_layer *state)
{
    return (kvf_row){.ring = state->ring,
                     .fault = state->fault,
                     .fault_key = state->fault_key,
                     .length = state->extent.length};
}

/* ---- prefill ---- */

static void *chunk_block(const kvf_heads_work *work, uint32_t i)
{
    const kvf_rings *z = rings_of(work);
    return z->chunk + (size_t)i * work->streaming * kvf_page_bytes(&z->shape);
}

/* Arrays of a chunk in the frame; `seen` has where the device finds it. */
typedef struct chunk_tables {
    kvf_row *row;
    void **chunk;
    const void **window;
    const void **from;
    void **to;
} chunk_tables;

static chunk_tables take_tables(kvf_call *call, uint32_t pages, uint32_t window_pages,
                                kvf_streaming_chunk *seen)
{
    chunk_tables t;
    KVF_TAKE(call, t.row, seen->row, 1);
    KVF_TAKE(call, t.chunk, seen->chunk, pages);
    KVF_TAKE(call, t.window, seen->window, window_pages);
    KVF_TAKE(call, t.from, seen->keep.from, pages);
    KVF_TAKE(call, t.to, seen->keep.to, pages);
    return t;
}

size_t kvf_streaming_frame_bytes(const kvf_cache *cache, uint32_t rows, bool is_chunk)
{
    const kvf_rings *z = cache->rings;
    if (!z)
        return 0;
    const size_t pages = is_chunk ? z->chunk_blocks * sizeof(void *) : 0;
    const size_t window = is_chunk ? z->window_blocks * sizeof(void *) : 0;
    const size_t arrays[] = {cache->config.kv_heads * sizeof(uint32_t),
                             KVF_HEADS_JOBS_MAX * sizeof(kvf_heads_job),
                             rows * sizeof(kvf_row),
                             pages,
                             window,
                             pages,
                             pages};
    size_t bytes = 0;
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
        bytes += kvf_round_up(arrays[i], KVF_CARVE_ALIGN);
    return bytes;
}

/* Pages after those that stand in front of `window`, which are whole tiles; see the top. */
static uint32_t shift_of(const kvf_rings *z, uint32_t front, uint32_t window)
{
    const uint32_t first = window / z->tile_blocks * z->tile_blocks;
    return first > front ? first - front : 0;
}

kvf_streaming_chunk kvf_streaming_take_chunk(const kvf_heads_work *work)
{
    const kvf_rings *z = rings_of(work);
    const uint32_t page_size = z->shape.page_size;
    const kvf_row row = row_of(work->call->states[0]);
    kvf_streaming_chunk c = {.ring = *ring_of(work->call->cache, work->call->layer),
                             .blocks = row.ring,
                             .base = row.length - work->tokens,
                             .keep.per_task = 1};
    const uint32_t first = c.base / page_size, last = (row.length - 1) / page_size;
    const uint32_t window = kvf_ring_first(&c.ring, c.base + 1);
    const uint32_t front = (uint32_t)kvf_round_up(c.ring.sink_blocks, z->tile_blocks);
    c.shift = shift_of(z, front, window);
    c.keep.bytes = c.ring.heads * kvf_page_bytes(&c.ring.shape);
    const uint32_t window_pages = last + 1 - c.shift;
    const chunk_tables t = take_tables(work->call, last + 1 - first, window_pages, &c);
    KVF_ASSERT(last - first < z->chunk_blocks);
    KVF_ASSERT(window_pages <= z->window_blocks);
    *t.row = row;
    for (uint32_t i = 0; i < window_pages; i++) { /* what queries of the chunk attend to */
        const uint32_t page = i < front ? i : i + c.shift;
        const bool is_seen = page < c.ring.sink_blocks || page >= window;
        t.window[i] = page >= first ? chunk_block(work, page - first)
                      : is_seen     ? kvf_ring_page(&c.ring, c.blocks, page, 0)
                                    : z->hidden;
    }
    for (uint32_t page = first; page <= last; page++) {
        t.chunk[page - first] = chunk_block(work, page - first);
        if (page >= c.ring.sink_blocks && page + c.ring.ring_blocks <= last)
            continue; /* neither of the sink nor among the newest: not kept */
        t.from[c.keep.count] = t.chunk[page - first];
        t.to[c.keep.count++] = kvf_ring_page(&c.ring, c.blocks, page, 0);
    }
    return c;
}

/* Sinks of the streaming heads, which come after the others. */
static const float *sinks_of(const kvf_heads_work *work)
{
    const float *sinks = kvf_call_attention(work->call)->sinks;
    const uint32_t others = work->call->cache->config.kv_heads - work->streaming;
    return sinks ? sinks + (size_t)others * rings_of(work)->group : NULL;
}

static kvf_status append_chunk(const kvf_heads_work *work, const kvf_streaming_chunk *c)
{
    const kvf_call *call = work->call;
    const kvf_cache *cache = call->cache;
    const kvf_device_ops *ops = cache->device->ops;
    const kvf_packed_heads heads = kvf_heads_packed(work, true);
    const uint32_t page_size = c->ring.shape.page_size;
    const kvf_repack_args repack = {.shape = c->ring.shape,
                                    .kv_heads = c->ring.heads,
                                    .tokens = work->tokens,
                                    .first = c->base % page_size,
                                    .k = heads.k,
                                    .v = heads.v,
                                    .blocks = c->chunk,
                                    .fault = rings_of(work)->chunk_fault};
    /* A row without sealed blocks: only what repack met is passed on to its fault word. */
    const kvf_seal_args note = {.paging = {.shape = c->ring.shape, .kv_heads = 1, .block_jobs = 1},
                                .rows = 1,
                                .row = c->row,
                                .chunk_fault = repack.fault,
                                .chunk_first = c->base};
    if (repack.first) /* the page that the chunk continues */
        KVF_TRY(ops->copy(call->stream, chunk_block(work, 0),
                          kvf_ring_page(&c->ring, c->blocks, c->base / page_size, 0),
                          c->keep.bytes));
    KVF_TRY(ops->fill(call->stream, repack.fault, 0xff, sizeof *repack.fault));
    KVF_TRY(KVF_LAUNCH(call, repack, repack));
    return KVF_LAUNCH(call, seal, note);
}

kvf_status kvf_streaming_prefill(const kvf_heads_work *work, const kvf_streaming_chunk *c)
{
    const kvf_call *call = work->call;
    const kvf_packed_heads heads = kvf_heads_packed(work, true);
    const kvf_prefill_kernel_args attend = {.shape = c->ring.shape,
                                            .kv_heads = c->ring.heads,
                                            .group = rings_of(work)->group,
                                            .tokens = work->tokens,
                                            .base = c->base - c->shift * c->ring.shape.page_size,
                                            .sink = c->ring.sink,
                                            .window = c->ring.recent,
                                            .scale = kvf_call_attention(call)->scale,
                                            .cap = kvf_call_attention(call)->cap,
                                            .q_dtype = c->ring.shape.dtype,
                                            .out_dtype = kvf_query_dtype(&call->cache->config),
                                            .q = heads.q,
                                            .blocks = c->window,
                                            .out = heads.out,
                                            .sinks = sinks_of(work)};
    KVF_TRY(append_chunk(work, c));
    if (heads.q)
        KVF_TRY(KVF_LAUNCH(call, prefill, attend));
    return KVF_LAUNCH(call, copy, c->keep);
}

/* ---- decode ---- */

static void take_rows(kvf_heads_work *work)
{
    const kvf_call *call = work->call;
    kvf_row *row;
    KVF_TAKE(work->call, row, work->row, work->tokens);
    for (uint32_t b = 0; b < work->tokens; b++)
        row[b] = row_of(call->states[b]);
}

kvf_heads_work kvf_heads_take_step(kvf_call *call, const kvf_decode_args *args)
{
    const kvf_inputs in = kvf_inputs_seen(call->cache, args->q, args->k, args->v);
    kvf_heads_work work = kvf_heads_work_of(call, call->rows);
    work.q = in.q;
    work.k = in.k;
    work.v = in.v;
    work.out = args->out;
    work.lse = args->lse;
    if (work.streaming) {
        kvf_heads_take_jobs(&work);
        take_rows(&work);
    }
    return work;
}

kvf_status kvf_streaming_decode(const kvf_heads_work *work)
{
    const kvf_call *call = work->call;
    const kvf_cache *cache = call->cache;
    const kvf_rings *z = rings_of(work);
    const kvf_packed_heads heads = kvf_heads_packed(work, true);
    const uint32_t kv_heads = cache->config.kv_heads;
    const kvf_ring_args ring = {.ring = *ring_of(cache, call->layer),
                                .rows = work->tokens,
                                .kv_heads = kv_heads,
                                .spans_max = kvf_ring_total(ring_of(cache, call->layer)),
                                .head = work->heads + kv_heads - work->streaming,
                                .row = work->row,
                                .k = work->k,
                                .v = work->v,
                                .spans = z->spans,
                                .span_count = z->span_count};
    const kvf_attention attention = {.shape = z->shape,
                                     .lists = work->tokens * ring.ring.heads,
                                     .group = z->group,
                                     .spans_max = ring.spans_max,
                                     .q = heads.q,
                                     .spans = ring.spans,
                                     .span_count = ring.span_count,
                                     .out = heads.out,
                                     .lse = heads.lse,
                                     .partial_o = z->partial_o,
                                     .partial_lse = z->partial_lse,
                                     .sinks = sinks_of(work),
                                     .heads = ring.ring.heads * z->group};
    KVF_TRY(KVF_LAUNCH(call, ring, ring));
    return kvf_call_attend_to(call, &attention);
}

void kvf_streaming_scrub(const kvf_cache *cache, uint32_t layer, uint32_t length, char *copy)
{
    const kvf_ring *ring = ring_of(cache, layer);
    const uint32_t blocks = kvf_ring_total(ring);
    const size_t page = kvf_page_bytes(&ring->shape), token = kvf_token_bytes(&ring->shape);
    const uint32_t size = ring->shape.page_size, last = length % size;
    const uint32_t pages = kvf_div_ceil_u32(length, size);
    if (pages < blocks)
        memset(copy + pages * ring->heads * page, 0, (blocks - pages) * ring->heads * page);
    for (uint32_t h = 0; last && h < ring->heads; h++)
        memset((char *)kvf_ring_page(ring, copy, pages - 1, h) + last * token, 0,
               page - last * token);
}
