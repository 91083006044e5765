/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Attention as a plain loop over llama.cpp's own tensors. It knows no chains and no writes.
 */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/convert.h"
#include "llama_rig.h"

static const void *at(const gg_tensor *t, int64_t i, int64_t j, int64_t s)
{
    return (const char *)t->data + (size_t)i * t->nb[1] + (size_t)j * t->nb[2] +
           (size_t)s * t->nb[3];
}

/* A head of a row, with the numbers of a cell in `row`: weights relative to the largest so far. */
static void attend(const gg_tensor *t, int64_t token, int64_t head, int64_t s, float *row,
                   double *out)
{
    const gg_tensor *q = t->src[0], *k = t->src[1], *v = t->src[2], *m = t->src[3];
    const float *query = at(q, token, head, s);
    const uint16_t *mask = at(m, token, 0, s % m->ne[3]);
    const int64_t kv_head = head / (q->ne[2] / k->ne[2]);
    double top = t->src[4] ? (double)((const float *)t->src[4]->data)[head] : -INFINITY;
    double sum = t->src[4] ? 1 : 0;
    float parameters[3];
    memcpy(parameters, t->op_params, sizeof parameters);
    memset(out, 0, (size_t)v->ne[0] * sizeof *out);
    for (int64_t cell = 0; cell < k->ne[1]; cell++) {
        if (kvf_fp16_to_float(mask[cell]) == -INFINITY)
            continue;
        double logit = 0, cap = (double)parameters[2];
        kvl_row_to_f32(k->type, at(k, cell, kv_head, s), row, (size_t)k->ne[0]);
        for (int64_t d = 0; d < k->ne[0]; d++)
            logit += (double)row[d] * (double)query[d];
        logit *= (double)parameters[0];
        if (cap != 0)
            logit = cap * tanh(logit / cap);
        const double above = fmax(top, logit), kept = exp(top - above), weight = exp(logit - above);
        kvl_row_to_f32(v->type, at(v, cell, kv_head, s), row, (size_t)v->ne[0]);
        top = above;
        sum = sum * kept + weight;
        for (int64_t d = 0; d < v->ne[0]; d++)
            out[d] = out[d] * kept + weight * (double)row[d];
    }
    for (int64_t d = 0; d < v->ne[0]; d++)
        out[d] /= sum;
}

double rig_plain_difference(const gg_tensor *node, int64_t token, int64_t s)
{
    const size_t k = (size_t)node->src[1]->ne[0], v = (size_t)node->src[2]->ne[0];
    double difference = 0, largest = 0, *out = malloc(v * sizeof *out);
    float *row = malloc((k > v ? k : v) * sizeof *row);
    for (int64_t head = 0; out && row && head < node->src[0]->ne[2]; head++) {
        const float *own = at(node, head, token, s);
        attend(node, token, head, s, row, out);
        for (size_t d = 0; d < v; d++) {
            const double e = fabs((double)own[d] - out[d]);
            difference = e == e ? fmax(difference, e) : INFINITY;
            largest = fmax(largest, fabs(out[d]));
        }
    }
    const int has_all = out && row;
    free(out);
    free(row);
    return !has_all ? -1 : largest > 0 ? difference / largest : difference;
}
