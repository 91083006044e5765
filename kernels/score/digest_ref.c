/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Digest of a page, the specification: bounding boxes of its keys, channel by channel.
 *
 * Knows nothing of where digests live or which tokens are static. The box of minmax contains every
 * key that it was built from; a channel whose keys are all NaN is like one without tokens.
 */

#include <math.h>

#include "common/convert.h"
#include "variants.h"

typedef struct box {
    uint16_t lo;
    uint16_t hi;
} box;

static box channel_box(const kvf_digest_args *a, const kvf_digest_job *job, uint64_t live,
                       uint32_t channel)
{
    const kvf_shape *s = &a->shape;
    float lo = INFINITY, hi = -INFINITY;
    double sum = 0.0;
    uint32_t n = 0;
    for (uint32_t t = 0; t < s->page_size; t++) {
        if (!(live >> t & 1))
            continue;
        float x = kvf_element_get(kvf_page_key(s, job->page, t), s->dtype, channel);
        lo = x < lo ? x : lo;
        hi = x > hi ? x : hi;
        sum += (double)x;
        n++;
    }
    if (n == 0 || a->kind == KVF_DIGEST_MINMAX)
        return (box){.lo = kvf_bf16_down(lo), .hi = kvf_bf16_up(hi)};
    if (a->kind == KVF_DIGEST_MEAN) {
        uint16_t mean = kvf_bf16_from_float((float)(sum / n));
        return (box){.lo = mean, .hi = mean};
    }
    double centre = ((double)hi + (double)lo) / 2.0;
    double distance = 0.0;
    for (uint32_t t = 0; t < s->page_size; t++)
        if (live >> t & 1)
            distance += fabs(
                centre - (double)kvf_element_get(kvf_page_key(s, job->page, t), s->dtype, channel));
    distance /= n;
    return (box){.lo = kvf_bf16_from_float((float)(centre - distance)),
                 .hi = kvf_bf16_from_float((float)(centre + distance))};
}

void kvf_digest_ref(const void *args, uint32_t task)
{
    const kvf_digest_args *a = args;
    const kvf_digest_job *job = &a->jobs[task];
    if (!job->page)
        return;
    uint32_t tokens = a->shape.page_size / a->subs;
    uint64_t live = kvf_live_bits(job->count, job->skip);
    for (uint32_t sub = 0; sub < a->subs; sub++) {
        uint64_t part = kvf_live_bits(tokens, 0) << (sub * tokens);
        uint16_t *lo = (uint16_t *)job->digest + (size_t)sub * 2 * a->shape.head_dim;
        uint16_t *hi = lo + a->shape.head_dim;
        for (uint32_t c = 0; c < a->shape.head_dim; c++) {
            box b = channel_box(a, job, live & part, c);
            lo[c] = b.lo;
            hi[c] = b.hi;
        }
    }
}
