/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Streaming heads: packing, rings, and attention over a sink and a window.
 *
 * Knows nothing of inner caches. Attention of a chunk does not know of the pages between sink and
 * window: they are left out of its page table, and tokens behind them are counted as if they
 * followed the sink's pages. Because whole pages are left out, and the window of the first query
 * begins behind them, every distance between tokens that see each other stays what it is.
 */

#include "streaming_heads.h"

#include <string.h>

/* ---- packing ---- */

static const kvf_masked_sizes *sizes_of(const kvf_masked_call *call)
{
    return &call->step->cache->masked->sizes;
}

static kvf_ring ring_of(const kvf_cache *cache, const kvf_masked_layer *layer)
{
    kvf_ring ring = cache->masked->sizes.ring;
    ring.heads = layer->streaming;
    return ring;
}

static char *blocks_of(const kvf_cache *cache, const kvf_masked_layer *layer, uint32_t slot)
{
    const kvf_masked_sizes *z = &cache->masked->sizes;
    const size_t block = layer->streaming * kvf_page_bytes(&z->ring.shape);
    return layer->rings + (size_t)slot * z->blocks * block;
}

kvf_masked_heads kvf_masked_heads_of(const kvf_masked_call *call, bool is_streaming)
{
    const kvf_masked *m = call->step->cache->masked;
    if (!call->is_mixed)
        return (kvf_masked_heads){call->q, call->k, call->v, call->out, call->lse};
    return (kvf_masked_heads){.q = call->q ? m->q[is_streaming] : NULL,
                              .k = m->k[is_streaming],
                              .v = m->v[is_streaming],
                              .out = call->q ? m->out[is_streaming] : NULL,
                              .lse = call->lse ? m->lse[is_streaming] : NULL};
}

/* The heads of a kind: from `all` to `packed`, or back. */
static kvf_heads_job job_of(const kvf_masked_call *call, bool is_streaming, size_t bytes)
{
    const kvf_masked_layer *layer = call->layer;
    return (kvf_heads_job){.from_head = call->heads + (is_streaming ? layer->retrieval : 0),
                           .from_heads = layer->retrieval + layer->streaming,
                           .to_heads = is_streaming ? layer->streaming : layer->retrieval,
                           .count = is_streaming ? layer->streaming : layer->retrieval,
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

void kvf_masked_take_jobs(kvf_masked_call *call)
{
    const kvf_masked_sizes *z = sizes_of(call);
    const uint32_t count = call->step->cache->config.kv_heads;
    const size_t row = kvf_row_bytes(&z->ring.shape);
    uint32_t *heads;
    kvf_heads_job *jobs;
    KVF_TAKE(call->step, heads, call->heads, count);
    KVF_TAKE(call->step, jobs, call->pack.jobs, KVF_MASKED_JOBS_MAX);
    if (!heads)
        return;
    memcpy(heads, call->layer->heads, count * sizeof *heads);
    call->pack.rows = call->rows;
    call->unpack = call->pack;
    if (!call->is_mixed)
        return;
    uint32_t n = 0;
    for (int kind = 0; kind < 2; kind++) {
        const kvf_masked_heads h = kvf_masked_heads_of(call, kind);
        if (call->q)
            jobs[n++] = pack(job_of(call, kind, z->group * row), call->q, h.q);
        if (kind && !call->is_chunk)
            continue; /* a step appends to the ring from the caller's keys and values */
        jobs[n++] = pack(job_of(call, kind, row), call->k, h.k);
        jobs[n++] = pack(job_of(call, kind, row), call->v, h.v);
    }
    call->pack.job_count = n;
    call->unpack.jobs = call->pack.jobs + n;
    for (int kind = 0; kind < 2 && call->q; kind++) {
        const kvf_masked_heads h = kvf_masked_heads_of(call, kind);
        jobs[n++] = unpack(job_of(call, kind, z->group * row), h.out, call->out);
        if (call->lse)
            jobs[n++] = unpack(job_of(call, kind, z->group * sizeof(float)), h.lse, call->lse);
    }
    call->unpack.job_count = n - call->pack.job_count;
    KVF_ASSERT(n <= KVF_MASKED_JOBS_MAX);
}

static kvf_row row_of(const kvf_masked_call *call, const kvf_sequence *sequence, uint32_t tokens)
{
    const kvf_cache *cache = call->step->cache;
    return (kvf_row){.ring = blocks_of(cache, call->layer, sequence->slot),
                     .fault = cache->control_device.faults + sequence->slot,
                     .fault_key = sequence->generation << 12 | call->step->layer,
                     .length = sequence->layers[call->step->layer].length + tokens};
}

/* ---- prefill ---- */

static void *chunk_block(const kvf_masked_call *call, uint32_t i)
{
    const kvf_masked_sizes *z = sizes_of(call);
    return call->step->cache->masked->chunk +
           (size_t)i * call->layer->streaming * kvf_page_bytes(&z->ring.shape);
}

/* What a chunk has in the frame; `seen` has where the device finds it. */
typedef struct chunk_tables {
    kvf_row *row;
    void **chunk;
    const void **window;
    const void **from;
    void **to;
} chunk_tables;

static chunk_tables take_tables(kvf_step *step, uint32_t pages, uint32_t window_pages,
                                kvf_streaming_chunk *seen)
{
    chunk_tables t;
    KVF_TAKE(step, t.row, seen->row, 1);
    KVF_TAKE(step, t.chunk, seen->chunk, pages);
    KVF_TAKE(step, t.window, seen->window, window_pages);
    KVF_TAKE(step, t.from, seen->keep.from, pages);
    KVF_TAKE(step, t.to, seen->keep.to, pages);
    return t;
}

void kvf_streaming_take_most(const kvf_masked_call *call)
{
    kvf_streaming_chunk unused;
    (void)take_tables(call->step, sizes_of(call)->chunk_blocks, sizes_of(call)->window_blocks,
                      &unused);
}

kvf_streaming_chunk kvf_streaming_take_chunk(const kvf_masked_call *call,
                                             const kvf_sequence *sequence)
{
    const kvf_cache *cache = call->step->cache;
    const uint32_t page_size = sizes_of(call)->ring.shape.page_size;
    const kvf_row row = row_of(call, sequence, call->rows);
    kvf_streaming_chunk c = {.ring = ring_of(cache, call->layer),
                             .blocks = row.ring,
                             .base = row.length - call->rows,
                             .keep.per_task = 1};
    const uint32_t first = c.base / page_size, last = (row.length - 1) / page_size;
    c.shift = kvf_ring_first(&c.ring, c.base + 1) - c.ring.sink_blocks;
    c.keep.bytes = c.ring.heads * kvf_page_bytes(&c.ring.shape);
    const uint32_t window_pages = last + 1 - c.shift;
    const chunk_tables t = take_tables(call->step, last + 1 - first, window_pages, &c);
    KVF_ASSERT(last - first < sizes_of(call)->chunk_blocks);
    KVF_ASSERT(window_pages <= sizes_of(call)->window_blocks);
    *t.row = row;
    for (uint32_t i = 0; i < window_pages; i++) { /* what queries of the chunk attend to */
        const uint32_t page = i < c.ring.sink_blocks ? i : i + c.shift;
        t.window[i] = page >= first ? chunk_block(call, page - first)
                                    : kvf_ring_page(&c.ring, c.blocks, page, 0);
    }
    for (uint32_t page = first; page <= last; page++) {
        t.chunk[page - first] = chunk_block(call, page - first);
        if (page >= c.ring.sink_blocks && page + c.ring.ring_blocks <= last)
            continue; /* neither of the sink nor among the newest: not kept */
        t.from[c.keep.count] = t.chunk[page - first];
        t.to[c.keep.count++] = kvf_ring_page(&c.ring, c.blocks, page, 0);
    }
    return c;
}

static kvf_status append_chunk(const kvf_masked_call *call, const kvf_streaming_chunk *c)
{
    const kvf_step *step = call->step;
    const kvf_cache *cache = step->cache;
    const kvf_device_ops *ops = cache->device->ops;
    const kvf_masked_heads heads = kvf_masked_heads_of(call, true);
    const uint32_t page_size = c->ring.shape.page_size;
    const kvf_repack_args repack = {.shape = c->ring.shape,
                                    .kv_heads = c->ring.heads,
                                    .tokens = call->rows,
                                    .first = c->base % page_size,
                                    .k = heads.k,
                                    .v = heads.v,
                                    .blocks = c->chunk,
                                    .fault = cache->tables.chunk_fault};
    /* A row without sealed blocks: only what repack met is passed on to its fault word. */
    const kvf_seal_args note = {.paging = {.shape = c->ring.shape, .kv_heads = 1, .block_jobs = 1},
                                .rows = 1,
                                .row = c->row,
                                .chunk_fault = repack.fault,
                                .chunk_first = c->base};
    if (repack.first) /* the page that the chunk continues */
        KVF_TRY(ops->copy(step->stream, chunk_block(call, 0),
                          kvf_ring_page(&c->ring, c->blocks, c->base / page_size, 0),
                          c->keep.bytes));
    KVF_TRY(ops->fill(step->stream, repack.fault, 0xff, sizeof *repack.fault));
    KVF_TRY(KVF_LAUNCH(step, repack, repack));
    return KVF_LAUNCH(step, seal, note);
}

kvf_status kvf_streaming_prefill(const kvf_masked_call *call, const kvf_streaming_chunk *c)
{
    const kvf_step *step = call->step;
    const kvf_masked_heads heads = kvf_masked_heads_of(call, true);
    const kvf_prefill_kernel_args attend = {.shape = c->ring.shape,
                                            .kv_heads = c->ring.heads,
                                            .group = sizes_of(call)->group,
                                            .tokens = call->rows,
                                            .base = c->base - c->shift * c->ring.shape.page_size,
                                            .sink = c->ring.sink,
                                            .window = c->ring.recent,
                                            .scale = step->cache->config.softmax_scale,
                                            .q = heads.q,
                                            .blocks = c->window,
                                            .out = heads.out};
    KVF_TRY(append_chunk(call, c));
    if (heads.q)
        KVF_TRY(KVF_LAUNCH(step, prefill, attend));
    return KVF_LAUNCH(step, copy, c->keep);
}

/* ---- decode ---- */

const kvf_row *kvf_streaming_take_rows(const kvf_masked_call *call, kvf_sequence *const *sequences)
{
    kvf_row *row;
    const kvf_row *seen;
    KVF_TAKE(call->step, row, seen, call->rows);
    for (uint32_t b = 0; row && b < call->rows; b++)
        row[b] = row_of(call, sequences[b], 1);
    return seen;
}

kvf_status kvf_streaming_decode(const kvf_masked_call *call, const kvf_row *row)
{
    const kvf_step *step = call->step;
    const kvf_cache *cache = step->cache;
    const kvf_masked_sizes *z = sizes_of(call);
    const kvf_masked_heads heads = kvf_masked_heads_of(call, true);
    const kvf_ring_args ring = {.ring = ring_of(cache, call->layer),
                                .rows = call->rows,
                                .kv_heads = call->layer->retrieval + call->layer->streaming,
                                .spans_max = z->blocks,
                                .head = call->heads + call->layer->retrieval,
                                .row = row,
                                .k = call->k,
                                .v = call->v,
                                .spans = cache->tables.spans,
                                .span_count = cache->tables.span_count};
    const kvf_attend_args attend = {.shape = z->ring.shape,
                                    .pass = KVF_PASS_ALL,
                                    .lists = call->rows * ring.ring.heads,
                                    .group = z->group,
                                    .spans_max = z->blocks,
                                    .split = z->split,
                                    .scale = cache->config.softmax_scale,
                                    .q = heads.q,
                                    .spans = ring.spans,
                                    .span_count = ring.span_count,
                                    .partial_o = cache->tables.partial_o,
                                    .partial_lse = cache->tables.partial_lse};
    const kvf_merge_args merge = {.shape = z->ring.shape,
                                  .lists = attend.lists,
                                  .group = z->group,
                                  .splits_max = kvf_div_ceil_u32(z->blocks, z->split),
                                  .split = z->split,
                                  .span_count = ring.span_count,
                                  .partial_o = attend.partial_o,
                                  .partial_lse = attend.partial_lse,
                                  .out = heads.out,
                                  .lse = heads.lse};
    KVF_TRY(KVF_LAUNCH(step, ring, ring));
    KVF_TRY(KVF_LAUNCH(step, attend, attend));
    return KVF_LAUNCH(step, merge, merge);
}

char *kvf_streaming_ring(const kvf_sequence *sequence, uint32_t layer, size_t *bytes)
{
    const kvf_cache *cache = sequence->cache;
    const kvf_masked_layer *l = cache->masked ? &cache->masked->layers[layer] : NULL;
    const kvf_masked_sizes *z = l ? &cache->masked->sizes : NULL;
    *bytes = l ? (size_t)z->blocks * l->streaming * kvf_page_bytes(&z->ring.shape) : 0;
    return *bytes ? blocks_of(cache, l, sequence->slot) : NULL;
}

void kvf_streaming_scrub(const kvf_cache *cache, uint32_t layer, uint32_t length, char *copy)
{
    const kvf_masked_sizes *z = &cache->masked->sizes;
    const kvf_ring ring = ring_of(cache, &cache->masked->layers[layer]);
    const size_t page = kvf_page_bytes(&ring.shape), token = kvf_token_bytes(&ring.shape);
    const uint32_t size = ring.shape.page_size, last = length % size;
    const uint32_t pages = kvf_div_ceil_u32(length, size);
    if (pages < z->blocks)
        memset(copy + pages * ring.heads * page, 0, (z->blocks - pages) * ring.heads * page);
    for (uint32_t h = 0; last && h < ring.heads; h++)
        memset((char *)kvf_ring_page(&ring, copy, pages - 1, h) + last * token, 0,
               page - last * token);
}

kvf_status kvf_streaming_fork(kvf_step *step, const kvf_sequence *parent, const kvf_sequence *child)
{
    const kvf_cache *cache = step->cache;
    for (uint32_t i = 0; i < cache->config.layers; i++) {
        size_t bytes;
        char *const to = kvf_streaming_ring(child, i, &bytes);
        if (to && parent->layers[i].length)
            KVF_TRY(cache->device->ops->copy(step->stream, to,
                                             kvf_streaming_ring(parent, i, &bytes), bytes));
    }
    return KVF_OK;
}
