/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Part of select.h. The caller's own choice of pages, from reduced digest scores and static bits.
 * The function runs on a thread of the host in stream order, list after list; what it writes is
 * checked there, and a bad answer fails the stream.
 *
 * On a device whose memory the host cannot read, copies to and from registered memory stand around
 * the call.
 */

#include "select.h"

/* Where the host reads and writes, and what it needs to know. The rows are those of the frame. */
typedef struct custom_call {
    const kvf_kv_group *kv_group;
    kvf_stream *stream;
    const kvf_row *row;
    uint32_t rows;
    uint32_t layer;
    const uint32_t *heads; /* of the layer, by those of the KV group; NULL = the same */
    uint32_t stride;
    const uint32_t *choose; /* [rows, lists] */
    const float *scores;    /* [rows, lists, stride] */
    const uint64_t *bits;   /* [rows, lists, blocks_max]; NULL = where the rows say */
    int32_t *ids;           /* [rows, lists, ids_max] */
    uint32_t *id_count;     /* [rows, lists] */
} custom_call;

static kvf_status check_ids(kvf_context *context, const kvf_select_view *view, const int32_t *ids,
                            uint32_t count)
{
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
    const custom_call *custom = raw;
    const kvf_kv_group *kv_group = custom->kv_group;
    const kvf_paging *p = &kv_group->dims.paging;
    (void)task;
    for (uint32_t i = 0; i < custom->rows * p->lists; i++) {
        const kvf_row *row = &custom->row[i / p->lists];
        const uint32_t head = i % p->lists;
        const kvf_select_view view = {.layer = custom->layer,
                                      .kv_head = custom->heads ? custom->heads[head] : head,
                                      .pages = kvf_row_sealed_pages(p, row),
                                      .pages_max = custom->choose[i],
                                      .scores = custom->scores + (size_t)i * custom->stride,
                                      .static_bits = custom->bits
                                                         ? custom->bits + (size_t)i * p->blocks_max
                                                         : kvf_row_bits(p, row, head),
                                      .page_size = p->shape.page_size,
                                      .block_size = p->block_size};
        int32_t *ids = custom->ids + (size_t)i * kv_group->dims.ids_max;
        uint32_t count = kv_group->config.select_fn(kv_group->config.select_user, &view, ids);
        const kvf_status status = check_ids(kv_group->context, &view, ids, count);
        if (status != KVF_OK) {
            kv_group->device->ops->stream_fail(custom->stream, status);
            count = 0;
        }
        custom->id_count[i] = count;
    }
}

/* Copies of what the function reads; of what it writes, after it. */
static kvf_status copy_in(kvf_call *call, const custom_call *custom)
{
    const kvf_kv_group *kv_group = call->kv_group;
    const kvf_device_ops *ops = kv_group->device->ops;
    const kvf_tables *t = &kv_group->tables;
    const kvf_paging *p = &kv_group->dims.paging;
    const size_t lists = (size_t)call->rows * p->lists;
    KVF_TRY(ops->copy(call->stream, kv_group->control_device.mirror.choose, t->choose,
                      lists * sizeof *custom->choose));
    KVF_TRY(ops->copy(call->stream, kv_group->control_device.mirror.scores, t->reduced,
                      lists * call->stride * sizeof *custom->scores));
    const size_t bits = (size_t)p->lists * p->blocks_max;
    for (uint32_t b = 0; b < call->rows; b++)
        KVF_TRY(ops->copy(call->stream, kv_group->control_device.mirror.bits + b * bits,
                          call->row_host[b].bits, bits * sizeof *custom->bits));
    return KVF_OK;
}

static kvf_status copy_out(kvf_call *call)
{
    const kvf_kv_group *kv_group = call->kv_group;
    const kvf_device_ops *ops = kv_group->device->ops;
    const kvf_tables *t = &kv_group->tables;
    const size_t lists = (size_t)call->rows * kv_group->dims.paging.lists;
    KVF_TRY(ops->copy(call->stream, t->now.ids, kv_group->control_device.mirror.ids,
                      lists * kv_group->dims.ids_max * sizeof(int32_t)));
    return ops->copy(call->stream, t->now.id_count, kv_group->control_device.mirror.id_count,
                     lists * sizeof(uint32_t));
}

kvf_status kvf_choose_by_function(kvf_call *call)
{
    const kvf_kv_group *kv_group = call->kv_group;
    const kvf_device_ops *ops = kv_group->device->ops;
    const kvf_tables *t = &kv_group->tables;
    custom_call custom = {.kv_group = kv_group,
                          .stream = call->stream,
                          .row = call->row_host,
                          .rows = call->rows,
                          .layer = call->layer,
                          .heads = call->cache->layer_groups[call->layer].heads,
                          .stride = call->stride,
                          .choose = t->choose,
                          .scores = t->reduced,
                          .ids = t->now.ids,
                          .id_count = t->now.id_count};
    if (!kv_group->dims.needs_mirror)
        return ops->host_call(call->stream, choose_on_stream, &custom, sizeof custom);
    custom.choose = kv_group->control.mirror.choose;
    custom.scores = kv_group->control.mirror.scores;
    custom.bits = kv_group->control.mirror.bits;
    custom.ids = kv_group->control.mirror.ids;
    custom.id_count = kv_group->control.mirror.id_count;
    KVF_TRY(copy_in(call, &custom));
    KVF_TRY(ops->host_call(call->stream, choose_on_stream, &custom, sizeof custom));
    return copy_out(call);
}
