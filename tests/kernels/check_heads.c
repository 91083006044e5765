/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Kernels of streaming heads against their references: heads, ring. Bit for bit; what they mean is
 * also said here in a few lines, because on a CPU they have no second form.
 */

#include <math.h>
#include <string.h>

#include "check_support.h"
#include "common/convert.h"

/* `count` distinct heads of `heads`, in any order; NULL: 0, 1, ... */
static uint32_t *choose_heads(check *c, uint32_t heads, uint32_t count)
{
    if (check_below(c, 3) == 0)
        return NULL;
    uint32_t *list = check_in(c, count * sizeof *list);
    uint8_t used[64] = {0};
    for (uint32_t i = 0; i < count; i++) {
        do
            list[i] = check_below(c, heads);
        while (used[list[i]]);
        used[list[i]] = 1;
    }
    return list;
}

static uint32_t head_at(const uint32_t *list, uint32_t i)
{
    return list ? list[i] : i;
}

static void heads_case(check *c, uint32_t tokens, uint32_t bytes)
{
    if (!check_begin(c))
        return;
    const uint32_t jobs = 1 + check_below(c, 4), shift = check_below(c, 3) ? 0 : 4;
    check_describe(c, "tokens=%u bytes=%u jobs=%u shift=%u", tokens, bytes, jobs, shift);
    kvf_heads_job *job = check_in(c, jobs * sizeof *job);
    for (uint32_t j = 0; j < jobs; j++) {
        kvf_heads_job *b = &job[j];
        *b = (kvf_heads_job){.from_heads = 1 + check_below(c, 40),
                             .to_heads = 1 + check_below(c, 40),
                             .bytes = bytes};
        b->count = 1 + check_below(c, kvf_min_u32(b->from_heads, b->to_heads));
        b->from_head = choose_heads(c, b->from_heads, b->count);
        b->to_head = choose_heads(c, b->to_heads, b->count);
        const size_t from_bytes = (size_t)tokens * b->from_heads * bytes;
        const size_t to_bytes = (size_t)tokens * b->to_heads * bytes;
        b->from = (char *)check_noise_in(c, from_bytes + shift) + shift;
        b->to = check_changed(c, "to", to_bytes);
    }
    const kvf_heads_args a = {.tokens = tokens, .job_count = jobs, .jobs = job};
    CHECK_BOTH(c, heads, &a);
    for (uint32_t j = 0; j < jobs; j++)
        for (uint32_t token = 0; token < tokens; token++)
            for (uint32_t i = 0; i < job[j].count; i++) {
                const size_t from =
                    (size_t)token * job[j].from_heads + head_at(job[j].from_head, i);
                const size_t to = (size_t)token * job[j].to_heads + head_at(job[j].to_head, i);
                check_bits(c, "a head", (char *)job[j].to + to * bytes,
                           (const char *)job[j].from + from * bytes, bytes);
            }
}

/* The spans name every token below the sink and the newest ones, once and in order. */
static void ring_spans(check *c, const kvf_ring_args *a, uint32_t task)
{
    const kvf_ring *r = &a->ring;
    const kvf_row *row = &a->row[task / r->heads];
    const uint32_t head = task % r->heads, page_size = r->shape.page_size;
    const kvf_span *spans = a->spans + (size_t)task * a->spans_max;
    uint32_t token = 0, span = 0;
    for (; span < a->span_count[task]; span++)
        for (uint32_t t = 0; t < spans[span].count; t++) {
            if (spans[span].skip >> t & 1)
                continue;
            if (token >= r->sink && token + r->recent < row->length)
                token = row->length - r->recent;
            const uint32_t page = token / page_size;
            const uint32_t block = page < r->sink_blocks
                                       ? page
                                       : r->sink_blocks + (page - r->sink_blocks) % r->ring_blocks;
            const char *want =
                row->ring + ((size_t)block * r->heads + head) * kvf_page_bytes(&r->shape);
            if (spans[span].page != want || token % page_size != t)
                check_fail(c, "list %u span %u row %u is not token %u", task, span, t, token);
            token++;
        }
    if (token != row->length || span > a->spans_max)
        check_fail(c, "list %u: %u spans end at token %u of %u", task, span, token, row->length);
}

/* The newest token lies in its page as it came; a number that is not finite is told by its row. */
static void expect_ring(check *c, const kvf_ring_args *a, uint32_t bad)
{
    const kvf_ring *r = &a->ring;
    const kvf_row *row = a->row;
    const size_t bytes = kvf_key_bytes(&r->shape), value_bytes = kvf_value_bytes(&r->shape);
    for (uint32_t l = 0; l < a->rows * r->heads; l++) {
        const uint32_t b = l / r->heads, head = l % r->heads, token = row[b].length - 1;
        const size_t at = (size_t)b * a->kv_heads + head_at(a->head, head);
        const char *key = kvf_ring_page(r, row[b].ring, token / r->shape.page_size, head) +
                          token % r->shape.page_size * kvf_token_bytes(&r->shape);
        ring_spans(c, a, l);
        check_bits(c, "key", key, (const char *)a->k + at * bytes, bytes);
        check_bits(c, "value", key + bytes, (const char *)a->v + at * value_bytes, value_bytes);
    }
    for (uint32_t b = 0; b < a->rows; b++)
        if (*row[b].fault !=
            (b == bad ? (uint64_t)row[b].fault_key << 32 | (row[b].length - 1) : UINT64_MAX))
            check_fail(c, "row %u, bad row %u: fault %llx", b, bad,
                       (unsigned long long)*row[b].fault);
}

static void ring_case(check *c, uint32_t index)
{
    static const float nonfinite[] = {NAN, INFINITY, -INFINITY};
    static const uint32_t recents[] = {1, 2, 31, 32, 33, 64, 100}, sinks[] = {0, 1, 16, 33, 128};
    const uint32_t lengths[] = {1, 2, 16, 33, 127, 128, 129, 160, 161, 700, 1000, 4096, 100003};
    if (!check_begin(c))
        return;
    kvf_ring_args a = {.ring = {.shape = check_shape(c, index, index / 3, index % 4),
                                .heads = 1 + check_below(c, 4),
                                .sink = sinks[index % 5],
                                .recent = recents[index % 7]},
                       .rows = 1 + check_below(c, 3)};
    kvf_ring *r = &a.ring;
    r->shape = check_values(c, &r->shape);
    const size_t page = kvf_page_bytes(&r->shape);
    r->sink_blocks = kvf_div_ceil_u32(r->sink, r->shape.page_size);
    r->ring_blocks = kvf_div_ceil_u32(r->recent - 1, r->shape.page_size) + 1;
    a.kv_heads = r->heads + check_below(c, 3);
    check_describe(c, "%s heads=%u of %u rows=%u sink=%u recent=%u", check_shape_text(&r->shape),
                   r->heads, a.kv_heads, a.rows, r->sink, r->recent);
    const uint32_t dims[] = {r->shape.head_dim, kvf_value_dim(&r->shape)};
    const size_t heads = (size_t)a.rows * a.kv_heads, size = kvf_dtype_bytes(r->shape.dtype);
    void *k = check_in(c, heads * dims[0] * size), *v = check_in(c, heads * dims[1] * size);
    kvf_row *row = check_in(c, a.rows * sizeof *row);
    check_fill(c, k, r->shape.dtype, heads * dims[0], DATA_NORMAL);
    check_fill(c, v, r->shape.dtype, heads * dims[1], DATA_NORMAL);
    a.head = choose_heads(c, a.kv_heads, r->heads);
    const uint32_t bad = check_below(c, 2) ? a.rows : check_below(c, a.rows);
    const uint32_t of_value = check_below(c, 2);
    if (bad < a.rows)
        kvf_element_set(of_value ? v : k, r->shape.dtype,
                        ((size_t)bad * a.kv_heads + head_at(a.head, 0)) * dims[of_value] +
                            check_below(c, dims[of_value]),
                        nonfinite[check_below(c, 3)]);
    const size_t ring_bytes = (size_t)(r->sink_blocks + r->ring_blocks) * r->heads * page;
    for (uint32_t b = 0; b < a.rows; b++) {
        row[b] = (kvf_row){.ring = check_changed(c, "ring", ring_bytes),
                           .fault = check_put_out(c, &(uint64_t){UINT64_MAX}, sizeof(uint64_t)),
                           .fault_key = 7u << 12 | b,
                           .length = lengths[check_below(c, sizeof lengths / sizeof *lengths)]};
        check_track(c, "fault", row[b].fault, sizeof *row[b].fault);
    }
    a.row = row;
    a.k = k;
    a.v = v;
    a.spans_max = r->sink_blocks + r->ring_blocks + check_below(c, 3);
    const size_t lists = (size_t)a.rows * r->heads;
    a.spans = check_changed(c, "spans", lists * a.spans_max * sizeof *a.spans);
    a.span_count = check_changed(c, "span_count", lists * sizeof *a.span_count);
    CHECK_BOTH(c, ring, &a);
    expect_ring(c, &a, bad);
}

void check_heads(check *c)
{
    static const uint32_t bytes[] = {4, 8, 16, 20, 128, 160, 512, 4096};
    for (uint32_t i = 0; i < 40; i++)
        heads_case(c, 1 + (i * 7 % 40), bytes[i % 8]);
}

void check_ring(check *c)
{
    for (uint32_t i = 0; i < 105; i++)
        ring_case(c, i);
}
