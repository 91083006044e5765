/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The shape of attention over tokens: variants against the reference, and the reference against the
 * same figures from a sorted row.
 *
 * A sum of n terms in fp32, over 64 partial sums at least, is off by at most r = (n / 64 + 24) *
 * 2^-24 of itself. The sum divides every share, so an entropy H is off by (1 + H) r and by what its
 * own sum and logarithms add; a variance v, whose terms are squares of differences from 1 / n, by 2
 * r (v + 2 / n^2) and its own sum.
 */

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "check_support.h"

#define DATA_KINDS 8u

static void fill_row(check *c, float *row, uint32_t count, uint32_t data)
{
    static const float special[] = {0.0f, -0.0f, 0x1p-149f, -3.0f, NAN, 2.0f, 2.0f, -INFINITY};
    const uint32_t only = count ? check_below(c, count) : 0;
    for (uint32_t i = 0; i < count; i++) {
        switch (data) {
        case 0: /* few large ones */
            row[i] = (float)exp(3.0 * check_normal(c) - 6.0);
            break;
        case 1: /* ties and zeros */
            row[i] = (float)check_below(c, 3);
            break;
        case 2:
            row[i] = 0.37f;
            break;
        case 3:
            row[i] = 0.0f;
            break;
        case 4:
            row[i] = i == only ? 5.5f : 0.0f;
            break;
        case 5: /* what counts as nothing, too */
            row[i] = special[check_below(c, 8)];
            break;
        case 6: /* all digits of the keys differ */
            row[i] = ldexpf(1.0f + (float)i / (float)count, (int)(i % 60) - 100);
            break;
        default: /* only the last digit differs */
            row[i] = 1.0f + (float)check_below(c, 200) * 0x1p-23f;
            break;
        }
    }
}

static int descending(const void *x, const void *y)
{
    const float a = *(const float *)x, b = *(const float *)y;
    return (a < b) - (a > b);
}

/* In double, from the sorted row, by the definition. */
static void restate(float *sorted, uint32_t count, uint32_t top, float out[KVF_PROFILE_VALUES])
{
    double total = 0.0, entropy = 0.0, mass = 0.0, squares = 0.0;
    for (uint32_t i = 0; i < count; i++) {
        if (!(sorted[i] > 0.0f))
            sorted[i] = 0.0f;
        total += (double)sorted[i];
    }
    out[0] = out[1] = out[2] = 0.0f;
    if (total == 0.0)
        return;
    qsort(sorted, count, sizeof *sorted, descending);
    for (uint32_t i = 0; i < count; i++) {
        const double a = (double)sorted[i] / total;
        entropy += a > 0.0 ? a * log(1.0 / a) : 0.0;
        mass += i < top ? a : 0.0;
        squares += pow(a - 1.0 / count, 2.0);
    }
    out[0] = (float)entropy;
    out[1] = (float)mass;
    out[2] = (float)(squares / count);
}

static void compare(check *c, const char *what, const float *got, const float *want, uint32_t rows,
                    double r, double n)
{
    for (uint32_t i = 0; i < rows; i++) {
        const size_t at = (size_t)i * KVF_PROFILE_VALUES;
        check_describe(c, "%s row=%u", what, i);
        check_elements(c, "entropy", got + at, want + at, KVF_FP32, 1, 2 * r + 2e-7, 3 * r + 3e-7);
        check_elements(c, "mass", got + at + 1, want + at + 1, KVF_FP32, 1, 0.0, 2 * r + 2e-7);
        check_elements(c, "variance", got + at + 2, want + at + 2, KVF_FP32, 1, 5 * r / (n * n),
                       4 * r + 2e-7);
    }
}

static void profile_case(check *c, uint32_t count, uint32_t top, uint32_t data)
{
    kvf_profile_args a = {.count = count, .top = top};
    char what[96];
    if (!check_begin(c))
        return;
    a.vectors = 1 + check_below(c, 3);
    a.stride = count + check_below(c, 5);
    snprintf(what, sizeof what, "vectors=%u count=%u top=%u data=%u", a.vectors, count, top, data);
    check_describe(c, "%s", what);
    const size_t values = (size_t)a.vectors * KVF_PROFILE_VALUES;
    float *scores = check_in(c, (size_t)a.vectors * a.stride * sizeof *scores);
    float *sorted = check_in(c, count * sizeof *sorted);
    float *want = check_in(c, values * sizeof *want);
    for (uint32_t i = 0; i < a.vectors; i++) {
        float *vector = scores + (size_t)i * a.stride;
        fill_row(c, vector, a.stride, data);
        for (uint32_t j = 0; j < count; j++)
            sorted[j] = vector[j];
        restate(sorted, count, top, want + (size_t)i * KVF_PROFILE_VALUES);
    }
    a.scores = scores;
    float *out[2];
    for (int i = 0; i < 2; i++) {
        out[i] = a.out = check_out(c, values * sizeof(float));
        CHECK_RUN(c, i ? c->var : c->ref, profile, &a, i);
    }
    compare(c, what, out[0], want, a.vectors, 0x1p-22, fmax(count, 1.0));
    compare(c, what, out[1], out[0], a.vectors, (count / 64.0 + 24) * 0x1p-24, fmax(count, 1.0));
}

void check_profile(check *c)
{
    static const uint32_t counts[] = {0, 1, 2, 7, 8, 31, 64, 100, 513, 4096};
    for (uint32_t n = 0; n < 10; n++)
        for (uint32_t data = 0; data < DATA_KINDS; data++) {
            const uint32_t tops[] = {0, 1, counts[n] / 10, counts[n] / 2, counts[n], counts[n] + 5};
            for (uint32_t t = 0; t < 6; t++)
                profile_case(c, counts[n], tops[t], data);
        }
    for (uint32_t data = 0; data < DATA_KINDS; data++)
        profile_case(c, 16384 + 37, 1638, data);
}
