/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Attention as a plain loop in F32 over llama.cpp's own tensors: what `verify` compares with. It
 * knows no chains and no counts.
 */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cell_numbers.h"
#include "common/convert.h"
#include "plugin.h"

typedef struct head {
    const gg_tensor *node;
    int64_t token, s, head;
    float *weights; /* [cells] */
    float *row;     /* [widest head] */
    double *out;    /* [value_dim] */
} head;

static const char *cell_of(const gg_tensor *t, int64_t cell, int64_t kv_head, int64_t s)
{
    return (const char *)t->data + (size_t)cell * t->nb[1] + (size_t)kv_head * t->nb[2] +
           (size_t)s * t->nb[3];
}

static void attend(head *a)
{
    const gg_tensor *t = a->node, *q = t->src[0], *k = t->src[1], *v = t->src[2], *m = t->src[3];
    float parameters[3];
    memcpy(parameters, t->op_params, sizeof parameters);
    const float *query = (const float *)((const char *)q->data + (size_t)a->token * q->nb[1] +
                                         (size_t)a->head * q->nb[2] + (size_t)a->s * q->nb[3]);
    const uint16_t *mask = (const uint16_t *)((const char *)m->data + (size_t)a->token * m->nb[1] +
                                              (size_t)(a->s % m->ne[3]) * m->nb[3]);
    const int64_t kv_head = a->head / (q->ne[2] / k->ne[2]);
    const float sink = t->src[4] ? ((const float *)t->src[4]->data)[a->head] : -INFINITY;
    float top = sink;
    for (int64_t cell = 0; cell < k->ne[1]; cell++) {
        a->weights[cell] = -INFINITY;
        if (kvf_fp16_to_float(mask[cell]) == -INFINITY)
            continue;
        kvl_row_to_f32(k->type, cell_of(k, cell, kv_head, a->s), a->row, (size_t)k->ne[0]);
        double dot = 0;
        for (int64_t d = 0; d < k->ne[0]; d++)
            dot += (double)a->row[d] * (double)query[d];
        float logit = (float)dot * parameters[0];
        if (parameters[2] != 0.0f)
            logit = parameters[2] * tanhf(logit / parameters[2]);
        a->weights[cell] = logit;
        top = fmaxf(top, logit);
    }
    double sum = sink == -INFINITY ? 0 : exp((double)(sink - top));
    memset(a->out, 0, (size_t)v->ne[0] * sizeof *a->out);
    for (int64_t cell = 0; cell < k->ne[1]; cell++) {
        if (a->weights[cell] == -INFINITY)
            continue;
        const double weight = exp((double)(a->weights[cell] - top));
        kvl_row_to_f32(v->type, cell_of(v, cell, kv_head, a->s), a->row, (size_t)v->ne[0]);
        sum += weight;
        for (int64_t d = 0; d < v->ne[0]; d++)
            a->out[d] += weight * (double)a->row[d];
    }
    for (int64_t d = 0; d < v->ne[0]; d++)
        a->out[d] /= sum;
}

double kvl_plain_difference(const gg_tensor *node, int64_t token, int64_t s)
{
    const gg_tensor *k = node->src[1], *v = node->src[2];
    const size_t width = (size_t)(k->ne[0] > v->ne[0] ? k->ne[0] : v->ne[0]);
    head a = {.node = node, .token = token, .s = s};
    a.weights = malloc((size_t)k->ne[1] * sizeof *a.weights);
    a.row = malloc(width * sizeof *a.row);
    a.out = malloc((size_t)v->ne[0] * sizeof *a.out);
    double difference = 0, largest = 0;
    const int has_all = a.weights && a.row && a.out;
    for (; has_all && a.head < node->src[0]->ne[2]; a.head++) {
        attend(&a);
        const float *own = (const float *)((const char *)node->data + (size_t)a.head * node->nb[1] +
                                           (size_t)token * node->nb[2] + (size_t)s * node->nb[3]);
        for (int64_t d = 0; d < v->ne[0]; d++) {
            const double e = fabs((double)own[d] - a.out[d]);
            difference = e == e ? fmax(difference, e) : INFINITY;
            largest = fmax(largest, fabs(a.out[d]));
        }
    }
    free(a.weights);
    free(a.row);
    free(a.out);
    if (!has_all)
        return -1;
    return largest > 0 ? difference / largest : difference;
}
