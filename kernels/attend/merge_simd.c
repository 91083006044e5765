/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Merge of partial attention results by log-sum-exp, vectorised. Bound: reading the partial results
 * once.
 *
 * Knows nothing of where they came from. Splits are summed in their order; one with lse = -infinity
 * is not read. Exactness: fp32 sums, exponentials to 3e-7, one rounding to the element type.
 */

#include <math.h>

#include "common/simd.h"
#include "variants.h"

typedef struct group_state {
    _Alignas(64) float top[KVF_SUBGROUP_HEADS];
    _Alignas(64) float sum[KVF_SUBGROUP_HEADS];
    _Alignas(64) float o[KVF_SUBGROUP_HEADS][KVF_HEAD_DIM_MAX];
} group_state;

/* Weights of one split, under the final maxima; lanes beyond the heads are zero. */
static void split_weights(const float *lse, uint32_t heads, const float *top, float *weights)
{
    float x[KVF_SUBGROUP_HEADS];
    for (uint32_t g = 0; g < KVF_SUBGROUP_HEADS; g++)
        x[g] = g < heads ? (lse[g] - top[g]) * KVF_LOG2E : -INFINITY;
    for (uint32_t g = 0; g < KVF_SUBGROUP_HEADS; g += VF_LANES)
        vf_store(weights + g, vf_exp2(vf_load(x + g)));
}

static void add_part(float *to, const float *from, float weight, uint32_t count)
{
    for (uint32_t d = 0; d < count; d += VF_LANES)
        vf_store(to + d, vf_fma(vf_set(weight), vf_load(from + d), vf_load(to + d)));
}

/* Heads first .. first + heads - 1 of a list, at most KVF_SUBGROUP_HEADS. */
static void merge_heads(const kvf_merge_args *a, uint32_t list, uint32_t first, uint32_t heads)
{
    const uint32_t value_dim = kvf_value_dim(&a->shape), group = a->group;
    const uint32_t splits = kvf_div_ceil_u32(a->span_count[list], a->split);
    const size_t part = (size_t)list * a->splits_max * group + first;
    const size_t out = (size_t)list * group + first;
    const float *lse = a->partial_lse + part, *o = a->partial_o + part * value_dim;
    group_state x;
    for (uint32_t g = 0; g < heads; g++) {
        const float sink = kvf_merge_sink(a, out + g);
        x.top[g] = sink;
        memset(x.o[g], 0, value_dim * sizeof *x.o[g]);
        for (uint32_t s = 0; s < splits; s++)
            x.top[g] = lse[s * group + g] > x.top[g] ? lse[s * group + g] : x.top[g];
        x.sum[g] = sink == -INFINITY ? 0.0f : expf(sink - x.top[g]);
    }
    for (uint32_t s = 0; s < splits; s++) {
        float weights[KVF_SUBGROUP_HEADS];
        split_weights(lse + (size_t)s * group, heads, x.top, weights);
        for (uint32_t g = 0; g < heads; g++) {
            if (lse[s * group + g] == -INFINITY)
                continue;
            x.sum[g] += weights[g];
            add_part(x.o[g], o + ((size_t)s * group + g) * value_dim, weights[g], value_dim);
        }
    }
    for (uint32_t g = 0; g < heads; g++) {
        const size_t query = out + g;
        const int any = !(x.sum[g] <= 0.0f);
        const vf inverse = vf_set(any ? 1.0f / x.sum[g] : 0.0f);
        for (uint32_t d = 0; d < value_dim; d += VF_LANES)
            vf_store(x.o[g] + d, vf_mul(vf_load(x.o[g] + d), inverse));
        vf_round_array(kvf_offset_mut(a->out, query * kvf_value_bytes(&a->shape)), a->shape.dtype,
                       x.o[g], value_dim);
        if (a->lse)
            a->lse[query] = any ? x.top[g] + logf(x.sum[g]) : -INFINITY;
    }
}

void KVF_SIMD_NAME(merge)(const void *args, uint32_t task)
{
    const kvf_merge_args *a = args;
    for (uint32_t first = 0; first < a->group; first += KVF_SUBGROUP_HEADS)
        merge_heads(a, task, first, kvf_min_u32(KVF_SUBGROUP_HEADS, a->group - first));
}
