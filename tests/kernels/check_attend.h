/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_CHECK_ATTEND_H
#define KVF_TESTS_CHECK_ATTEND_H

/*
 * Spans of pages, and what logits and averages over them may be off by; see check_attend.c.
 */

#include "check_support.h"

/* The loss of a sum per term: tensor cores add 16 products and what was there, and cut off what is
 * below 2^-23 of the largest of the 17. */
#define CUT (17.0 / 16.0 * 0x1p-23)

typedef struct bounds {
    double logit; /* D */
    double out;
} bounds;

/* `lost`: of a query, relative to it, before it meets a key. */
bounds check_bounds(const kvf_shape *s, double q_norm, double k_norm, double v_max, float scale,
                    size_t tokens, double lost);

kvf_span check_span(check *c, const kvf_shape *s, bool is_quantized, check_data data);
/* Norm of the largest key of a span, and magnitude of the largest value. */
void check_span_bounds(const kvf_shape *s, const kvf_span *span, double *k_norm, double *v_max);

/* Sinks of a third of all launches; some heads have none, some one that outweighs all. */
const float *check_sinks(check *c, uint32_t heads);

#endif
