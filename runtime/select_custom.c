/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The caller's own choice of pages, from reduced digest scores and static bits. The function runs
 * on the stream's thread, list after list; what it writes is checked there, and a bad answer fails
 * the stream.
 */

#include "select.h"

typedef struct custom_call {
    kvf_step step;
} custom_call;

static kvf_status check_ids(const kvf_step *step, const kvf_select_view *view, const int32_t *ids,
                            uint32_t count)
{
    kvf_context *context = step->cache->context;
    if (count > view->pages_max)
        return kvf_fail(context, KVF_INVALID, 0,
                        "select_fn chose %u pages, at most %u may be chosen (view->pages_max)",
                        count, view->pages_max);
    for (uint32_t i = 0; i < count; i++)
        if (ids[i] < 0 || (uint32_t)ids[i] >= view->pages || (i && ids[i] <= ids[i - 1]))
            return kvf_fail(context, KVF_INVALID, 0,
                            "select_fn wrote ids[%u] = %d: ids ascend and are below %u", i, ids[i],
                            view->pages);
    return KVF_OK;
}

static void choose_on_stream(const void *raw, uint32_t task)
{
    const custom_call *call = raw;
    const kvf_step *step = &call->step;
    const kvf_cache *cache = step->cache;
    const kvf_layout *l = &cache->layout;
    const kvf_paging *p = &cache->dims.paging;
    const uint32_t *choose = kvf_table_at(cache, l->choose);
    int32_t *ids = kvf_table_at(cache, l->ids);
    uint32_t *id_count = kvf_table_at(cache, l->id_count);
    (void)task;
    for (uint32_t i = 0; i < step->rows * p->lists; i++) {
        const kvf_row *row = &step->row[i / p->lists];
        const kvf_select_view view = {.layer = step->layer,
                                      .kv_head = i % p->lists,
                                      .pages = row->sealed,
                                      .pages_max = choose[i],
                                      .scores = step->list_scores[i],
                                      .static_bits = kvf_row_bits(p, row, i % p->lists)};
        int32_t *list = ids + (size_t)i * cache->dims.ids_max;
        uint32_t count = cache->config.select_fn(cache->config.select_user, &view, list);
        const kvf_status status = check_ids(step, &view, list, count);
        if (status != KVF_OK) {
            cache->device->ops->stream_fail(step->stream, status);
            count = 0;
        }
        id_count[i] = count;
    }
}

static kvf_status choose_by_function(kvf_step *step)
{
    const custom_call call = {.step = *step};
    return step->cache->device->ops->host_call(step->stream, choose_on_stream, &call, sizeof call);
}

const kvf_select_policy kvf_select_custom = {.select = KVF_SELECT_CUSTOM,
                                             .name = "custom",
                                             .static_use = KVF_STATIC_CONFIGURED,
                                             .scores_pages = 1,
                                             .choose = choose_by_function};
