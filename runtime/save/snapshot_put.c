/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Part of snapshot.h. A snapshot of a layer into a cache; see snapshot.h.
 *
 * Tables are made on the host and copied whole. With other settings than those of the snapshot the
 * layer is as if its tokens had just been appended: the sink is in the store, no page was chosen
 * yet, and the next step refreshes the static set.
 */

#include <string.h>

#include "addressable.h"
#include "cache.h"
#include "call.h"
#include "quantized.h"
#include "snapshot.h"

#define JOBS_MAX 16384u

/* Arrays made on the host for the device. */
typedef struct put_work {
    kvf_snapshot made;    /* of a layer that is not put as it was saved */
    void **blocks;        /* [blocks] where blocks are */
    uint32_t *block_of;   /* [blocks] */
    kvf_digest_job *jobs; /* [job_blocks, block_jobs, kv_heads] */
    kvf_row *row;         /* [3] of admit, of centroids, and of a KV group that quantizes pages */
} put_work;

typedef struct putting {
    kvf_call *call;
    kvf_kv_group *kv_group;
    const kvf_snapshot_layer *l;
    kvf_event *done;
    kvf_layer *layer;
    kvf_row row; /* as the device sees it, but for `blocks`, which are the host's */
    void **blocks_device;
    put_work work;
} putting;

static uint32_t job_blocks(const kvf_kv_group *kv_group)
{
    const kvf_paging *p = &kv_group->dims.paging;
    return kvf_max_u32(1, JOBS_MAX / (p->block_jobs * p->kv_heads));
}

static void carve_work(const kvf_kv_group *kv_group, const kvf_saved_layer *saved, kvf_carver *k,
                       put_work *w)
{
    const kvf_paging *p = &kv_group->dims.paging;
    const uint64_t blocks = kvf_div_ceil_u32(saved->length, p->block_size);
    const uint64_t tokens = kvf_static_room(p), bytes = kvf_token_bytes(&p->shape);
    *w = (put_work){0};
    KVF_CARVE(k, w->made.static_count, p->kv_heads);
    KVF_CARVE(k, w->made.static_ids, p->kv_heads, tokens);
    KVF_CARVE(k, w->made.static_kv, p->kv_heads, tokens, bytes);
    KVF_CARVE(k, w->made.bits, p->kv_heads, blocks);
    KVF_CARVE(k, w->blocks, blocks);
    KVF_CARVE(k, w->block_of, blocks);
    const uint64_t most = job_blocks(kv_group);
    KVF_CARVE(k, w->jobs, blocks < most ? blocks : most, p->block_jobs, p->kv_heads);
    KVF_CARVE(k, w->row, 3);
}

uint64_t kvf_snapshot_work_bytes(const kvf_kv_group *kv_group, const kvf_saved_layer *layer)
{
    kvf_carver carver = {0};
    put_work unused;
    carve_work(kv_group, layer, &carver, &unused);
    return carver.bytes;
}

/* ---- blocks ---- */

static void put_blocks(putting *p, kvf_snapshot_copy *c)
{
    const kvf_kv_group *kv_group = p->kv_group;
    const kvf_paging *paging = &kv_group->dims.paging;
    const uint32_t blocks = kvf_row_blocks(paging, &p->row), sealed = p->layer->extent.sealed;
    for (uint32_t b = 0; b < blocks; b++)
        p->work.blocks[b] = b < sealed ? kvf_page_pool_device(&kv_group->pool, p->layer->blocks[b])
                                       : kvf_row_ring_block(paging, &p->row, b);
    for (uint32_t b = sealed; b < blocks; b++)
        kvf_snapshot_piece(c, p->l->tail + (b - sealed) * kvf_block_bytes(paging),
                           p->work.blocks[b], kvf_block_bytes(paging));
    if (p->layer->cut.spare)
        kvf_snapshot_piece(c, p->l->snapshot->spare, kvf_row_spare(paging, &p->row),
                           kvf_block_bytes(paging));
    kvf_snapshot_piece(c, p->work.blocks, p->blocks_device, blocks * sizeof *p->work.blocks);
    p->row.blocks = p->work.blocks;
    for (uint32_t b = 0; b < sealed; b++)
        p->work.block_of[b] = p->layer->blocks[b].index;
    kvf_snapshot_piece(c, p->work.block_of, p->row.block_of, sealed * sizeof *p->work.block_of);
}

/* ---- static set ---- */

/* Token t of KV head `head`. Where pages are quantized, the saved store has it exactly, if it had
 * it. */
static void make_sink(const putting *p, uint32_t head, uint32_t t, char *to)
{
    const kvf_paging *paging = &p->kv_group->dims.paging;
    const kvf_shape *s = &paging->shape;
    const kvf_saved_layer *saved = p->l->saved;
    const kvf_snapshot *snapshot = p->l->snapshot;
    const size_t token = kvf_token_bytes(s), entry = (size_t)head * saved->static_room + t;
    const uint32_t in_block = t % paging->block_size;
    const char *block =
        kvf_page_pool_host(&p->kv_group->pool, p->layer->blocks[t / paging->block_size]);
    float x[KVF_HEAD_DIM_MAX];
    if (!kvf_quantizes_pages(p->kv_group))
        memcpy(to, block + head * kvf_run_bytes(paging) + in_block * token, token);
    else if (t < snapshot->static_count[head] && snapshot->static_ids[entry] == t)
        memcpy(to, snapshot->static_kv + entry * token, token);
    else
        kvf_dequantize_token(s,
                             block + head * kvf_stored_run_bytes(paging) +
                                 in_block / s->page_size * kvf_stored_page_bytes(s),
                             in_block % s->page_size, to, x);
}

/* The sink of sealed blocks, as if they had just been sealed. */
static void make_state(putting *p, kvf_snapshot *made)
{
    const kvf_kv_group *kv_group = p->kv_group;
    const kvf_paging *paging = &kv_group->dims.paging;
    const uint32_t sealed = p->layer->extent.sealed;
    const uint32_t sink = kvf_min_u32(paging->sink, sealed * paging->block_size);
    for (uint32_t h = 0; h < paging->kv_heads; h++) {
        for (uint32_t b = 0; b < sealed; b++)
            made->bits[(size_t)h * sealed + b] = kvf_sink_bits(paging, b);
        made->static_count[h] = sink;
        for (uint32_t t = 0; t < sink; t++) {
            made->static_ids[h * kvf_static_room(paging) + t] = t;
            make_sink(p, h, t, kvf_static_token(paging, made->static_kv, h, t));
        }
    }
}

/* ---- slots ---- */

/* Pages of the blocks into slots: what lies there of these blocks is of earlier owners. */
static kvf_status admit(const putting *p)
{
    const kvf_admit_args args = {.paging = p->kv_group->dims.paging,
                                 .rows = 1,
                                 .count = p->layer->extent.sealed,
                                 .row = kvf_seen_device(&p->l->work, p->work.row + 2)};
    p->work.row[2] = p->row;
    p->work.row[2].blocks = p->blocks_device;
    p->work.row[2].sealed_before = 0;
    p->work.row[2].use = ++p->kv_group->residency.clock;
    return args.count ? KVF_LAUNCH(p->call, admit, args) : KVF_OK;
}

/* ---- digests ---- */

/* Blocks in full precision; quantized ones where they will be dequantized. */
static const char *exact_run(const putting *p, uint32_t block, uint32_t head)
{
    const kvf_paging *paging = &p->kv_group->dims.paging;
    return kvf_quantizes_pages(p->kv_group)
               ? p->kv_group->tables.scratch.blocks + block * kvf_block_bytes(paging) +
                     head * kvf_run_bytes(paging)
               : kvf_row_run(paging, &p->row, block, head);
}

static void make_jobs(const putting *p, uint32_t first, uint32_t end)
{
    const kvf_paging *paging = &p->kv_group->dims.paging;
    const uint32_t tokens = paging->block_size / paging->block_jobs;
    const size_t bytes = paging->digest_bytes / paging->block_jobs;
    kvf_digest_job *job = p->work.jobs;
    for (uint32_t b = first; b < end; b++)
        for (uint32_t j = 0; j < paging->block_jobs; j++)
            for (uint32_t h = 0; h < paging->kv_heads; h++)
                *job++ = (kvf_digest_job){
                    .page = exact_run(p, b, h) + j * tokens * kvf_token_bytes(&paging->shape),
                    .digest =
                        kvf_row_digests(paging, &p->row, p->layer->blocks[b].index, h) + j * bytes,
                    .skip = kvf_sink_bits(paging, b) >> j * tokens & kvf_live_bits(tokens, 0),
                    .count = tokens};
}

static kvf_status put_digests(const putting *p)
{
    const kvf_kv_group *kv_group = p->kv_group;
    const kvf_device_ops *ops = kv_group->device->ops;
    const kvf_paging *paging = &kv_group->dims.paging;
    const uint32_t most = job_blocks(kv_group);
    if (kvf_quantizes_pages(kv_group)) {
        *p->work.row = p->row;
        p->work.row->blocks = p->blocks_device;
    }
    for (uint32_t first = 0; first < p->layer->extent.sealed; first += most) {
        const uint32_t end = kvf_min_u32(first + most, p->layer->extent.sealed);
        if (first) { /* the device still reads the jobs before */
            KVF_TRY(ops->event_record(p->done, p->call->stream));
            KVF_TRY(ops->event_wait(p->done));
        }
        make_jobs(p, first, end);
        const uint32_t count = (end - first) * paging->block_jobs * paging->kv_heads;
        const kvf_digest_job *jobs = kvf_seen_device(&p->l->work, p->work.jobs);
        const kvf_digest_args digest = {.shape = paging->shape,
                                        .kind = kv_group->config.digest,
                                        .subs = paging->subs,
                                        .job_count = count,
                                        .jobs = jobs};
        const kvf_encode_args encode = {.shape = paging->shape, .job_count = count, .jobs = jobs};
        const kvf_row *view;
        if (kvf_quantizes_pages(kv_group))
            KVF_TRY(kvf_dequantized_row(p->call, kv_group,
                                        kvf_seen_device(&p->l->work, p->work.row), first,
                                        end - first, &view));
        KVF_TRY(kvf_has_codes(kv_group) ? KVF_LAUNCH(p->call, encode, encode)
                                        : KVF_LAUNCH(p->call, digest, digest));
    }
    return KVF_OK;
}

/* They follow from codes. */
static kvf_status put_centroids(const putting *p)
{
    const kvf_paging *paging = &p->kv_group->dims.paging;
    if (paging->segments_max == 0)
        return KVF_OK;
    kvf_row *row = p->work.row + 1; /* the device may still read the other one */
    *row = p->row;
    row->sealed_before = 0;
    const kvf_centroids_args centroids = {.paging = *paging,
                                          .rows = 1,
                                          .segments =
                                              kvf_segments(paging->block_size, p->row.sealed),
                                          .row = kvf_seen_device(&p->l->work, row)};
    return centroids.segments ? KVF_LAUNCH(p->call, centroids, centroids) : KVF_OK;
}

/* ---- all of it ---- */

/* The host's half of the layer. */
static void put_counts(const putting *p)
{
    const kvf_saved_layer *saved = p->l->saved;
    kvf_layer *layer = p->layer;
    layer->refresh.in_force = 0;
    layer->cut = (kvf_layer_cut){.kept = saved->kept,
                                 .spare = p->l->snapshot->spare ? layer->extent.sealed : 0};
    memset(layer->by_step, 0, layer->extent.length);
    if (!p->l->is_exact)
        return;
    for (uint32_t i = 0; i < layer->extent.length; i++)
        layer->by_step[i] = p->l->snapshot->by_step[i] != 0;
    layer->steps = saved->steps;
    layer->queries = (kvf_layer_queries){.count = saved->queries, .from = saved->queries_from};
    layer->refresh = (kvf_layer_refresh){.since = saved->since_refresh,
                                         .needs_exact = (saved->flags & KVF_SAVED_NEEDS_EXACT) != 0,
                                         .exact_from = saved->exact_from,
                                         .share_from = saved->share_from,
                                         .static_from = saved->static_from};
}

kvf_status kvf_snapshot_put(kvf_call *call, const kvf_snapshot_layer *l, kvf_event *done)
{
    kvf_kv_group *kv_group = l->state->kv_group;
    kvf_carver carver = {.base = l->work.host + l->used};
    kvf_snapshot_copy c = {.call = call, .put = &l->work};
    putting p = {.call = call, .kv_group = kv_group, .l = l, .done = done, .layer = l->state};
    if (l->saved->flags & KVF_SAVED_FRESH)
        return KVF_OK;
    carve_work(kv_group, l->saved, &carver, &p.work);
    put_counts(&p);
    KVF_TRY(kvf_call_clear(call, l->state));
    p.row = kvf_call_row(kv_group, l->state);
    p.blocks_device = p.row.blocks;
    kvf_page_pool_call(&kv_group->pool);
    const kvf_status status =
        kvf_addressable_blocks(kv_group, p.layer->blocks, p.layer->extent.sealed);
    call->is_undone = status != KVF_OK;
    KVF_TRY(status);
    put_blocks(&p, &c);
    if (!l->is_exact)
        make_state(&p, &p.work.made);
    kvf_snapshot_state(&c, p.layer, l->saved, l->is_exact ? l->snapshot : &p.work.made, &p.row);
    KVF_TRY(c.status);
    KVF_TRY(admit(&p));
    KVF_TRY(put_digests(&p));
    KVF_TRY(put_centroids(&p));
    /* The next layer may take the memory of this one's blocks. */
    return kvf_addressable_wait(kv_group, call->stream);
}
