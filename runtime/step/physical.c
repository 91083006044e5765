/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Physical restructuring, the published form, for comparison: a refresh re-forms the pages of a row
 * in new blocks, static tokens first, and the old blocks go back to the pool.
 *
 * Knows nothing of which tokens are static. The pool has spare blocks for one row; at rest all of
 * them are free. Resident pages are worth nothing afterwards, so residency is cleared. Forks do not
 * share blocks, because each sequence rewrites its own.
 */

#include <string.h>

#include "physical.h"

#include "ahead.h"
#include "append.h"
#include "prefill_arena.h"

/* New blocks in place of those that are there. */
static void replace_blocks(kvf_cache *cache, kvf_layer *layer)
{
    for (uint32_t p = 0; p < layer->sealed; p++) {
        kvf_block fresh;
        const kvf_status status = kvf_page_pool_acquire(&cache->pool, &fresh);
        KVF_ASSERT(status == KVF_OK); /* the spare ones */
        /* The old block goes last, so that no page gets it while it is still read. */
        cache->replaced[p] = layer->blocks[p];
        layer->blocks[p] = fresh;
    }
    for (uint32_t p = 0; p < layer->sealed; p++)
        kvf_page_pool_release(&cache->pool, cache->replaced[p]);
}

void kvf_physical_prepare(kvf_step *step, uint32_t index)
{
    kvf_cache *cache = step->cache;
    kvf_layer *layer = step->sequences ? &step->sequences[index]->layers[step->layer] : NULL;
    void **addresses;
    void *const *device;
    KVF_TAKE(step, addresses, device, layer ? layer->sealed : cache->dims.paging.pages_max);
    if (!addresses)
        return;
    kvf_row *after = &step->row_after_host[index];
    replace_blocks(cache, layer);
    layer->is_permuted = 1;
    for (uint32_t p = 0; p < layer->sealed; p++)
        addresses[p] = kvf_page_pool_device(&cache->pool, layer->blocks[p]);
    after->pool = device;
    after->sealed_before = 0;
    after->order = kvf_step_row(cache, step->sequences[index], step->layer).order;
}

kvf_status kvf_physical_permute(kvf_step *step, const kvf_observation *all)
{
    kvf_cache *cache = step->cache;
    const kvf_tables *t = &cache->tables;
    const kvf_paging *p = &cache->dims.paging;
    const uint32_t sealed = step->row_host[all->index].sealed;
    const kvf_permute_args args = {.paging = *p,
                                   .resident = all->resident,
                                   .spans_max = cache->dims.cover_max,
                                   .ids_max = cache->dims.tokens_max,
                                   .row = step->row + all->index,
                                   .after = step->row_after + all->index,
                                   .spans = t->cover.spans,
                                   .span_index = t->cover.span_index,
                                   .ids = t->token_ids,
                                   .id_count = t->token_count,
                                   .jobs = t->jobs,
                                   .counters = kvf_counters_device(cache, step->layer)};
    const kvf_digest_args digest = {.shape = p->shape,
                                    .kind = cache->config.digest,
                                    .subs = p->subs,
                                    .job_count = p->kv_heads * sealed,
                                    .jobs = args.jobs};
    const kvf_table_args table = {.paging = *p, .rows = 1, .row = args.after};
    const size_t number = kvf_row_number(cache, step->sequences[all->index], step->layer);
    cache->host_counters[step->layer].bytes_to_host += sealed * kvf_block_bytes(p);
    KVF_TRY(KVF_LAUNCH(step, permute, args));
    KVF_TRY(KVF_LAUNCH(step, digest, digest));
    KVF_TRY(KVF_LAUNCH(step, table, table));
    KVF_TRY(kvf_residency_clear(&cache->residency, (uint32_t)number * p->lists, p->lists,
                                step->stream));
    return kvf_ahead_clear(step, number);
}

kvf_status kvf_physical_check(kvf_cache *cache, const kvf_sequence *parent)
{
    uint64_t pages = 0;
    for (uint32_t i = 0; i < cache->config.layers; i++)
        pages += parent->layers[i].sealed;
    if (pages + cache->dims.spare_blocks > cache->pool.free_count)
        KVF_FAIL(cache->context, KVF_FULL,
                 "host_tokens_max = %llu: a fork under restructure = physical copies %llu pages, "
                 "%u are free; destroy a sequence, or open the cache with more",
                 (unsigned long long)cache->config.host_tokens_max, (unsigned long long)pages,
                 cache->pool.free_count - cache->dims.spare_blocks);
    return KVF_OK;
}

void kvf_physical_acquire(kvf_cache *cache, kvf_layer *child)
{
    for (uint32_t i = 0; i < child->sealed; i++) {
        const kvf_status status = kvf_page_pool_acquire(&cache->pool, &child->blocks[i]);
        KVF_ASSERT(status == KVF_OK); /* kvf_physical_check */
    }
}

/* One layer: its own blocks filled from the parent's, and the page table that names them. */
static kvf_status copy_blocks(kvf_step *step, const kvf_layer *parent, kvf_layer *child)
{
    kvf_cache *cache = step->cache;
    const kvf_paging *p = &cache->dims.paging;
    const uint32_t none_before = 0;
    for (uint32_t i = 0; i < child->sealed; i++)
        KVF_TRY(cache->device->ops->copy(
            step->stream, kvf_page_pool_device(&cache->pool, child->blocks[i]),
            kvf_page_pool_device(&cache->pool, parent->blocks[i]), kvf_block_bytes(p)));
    kvf_step_rows(step, &none_before);
    const kvf_table_args table = {.paging = *p, .rows = 1, .row = step->row};
    KVF_TRY(kvf_step_send(step));
    return KVF_LAUNCH(step, table, table);
}

kvf_status kvf_physical_fork(kvf_cache *cache, const kvf_sequence *parent, kvf_sequence *child,
                             kvf_stream *stream)
{
    for (uint32_t i = 0; i < cache->config.layers; i++) {
        kvf_step step;
        KVF_TRY(kvf_step_begin(cache, stream, &step));
        step.layer = i;
        step.rows = 1;
        step.sequences = &child;
        kvf_status status = kvf_arena_settle(&step);
        if (status == KVF_OK)
            status = copy_blocks(&step, &parent->layers[i], &child->layers[i]);
        KVF_TRY(kvf_step_end(&step, status));
    }
    return KVF_OK;
}
