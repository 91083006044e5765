/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Checks of no single family of kernels: conversions, and properties between kernels, whatever the
 * variant. A digest's score bounds the keys in its box, splitting and merging does not change
 * attention, a skipped token is a token that is not there, and the two passes together are the one.
 */

#include <math.h>
#include <string.h>

#include "check_support.h"
#include "common/convert.h"

/* Every fp16 and bf16 number survives, and rounding is to the nearest of the two neighbours. */
void check_convert(check *c)
{
    if (c->cuda || !check_begin(c)) /* the host's functions; kernels that convert have checks */
        return;
    for (uint32_t i = 0; i < 65536; i++) {
        const uint16_t h = (uint16_t)i;
        const float x = kvf_fp16_to_float(h), y = kvf_bf16_to_float(h);
        check_describe(c, "bits %04x", i);
        if (isnan(x) ? !isnan(kvf_fp16_to_float(kvf_fp16_from_float(x)))
                     : kvf_fp16_from_float(x) != h)
            check_fail(c, "fp16 does not survive");
        if (isnan(y) ? !isnan(kvf_bf16_to_float(kvf_bf16_from_float(y)))
                     : kvf_bf16_from_float(y) != h || kvf_bf16_down(y) != h || kvf_bf16_up(y) != h)
            check_fail(c, "bf16 does not survive");
    }
    for (uint32_t i = 0; i < 300000; i++) {
        const float x = kvf_bits_float((uint32_t)check_random(c));
        if (isnan(x))
            continue;
        check_describe(c, "value %a", (double)x);
        const float down = kvf_bf16_to_float(kvf_bf16_down(x)),
                    up = kvf_bf16_to_float(kvf_bf16_up(x));
        const float near = kvf_bf16_to_float(kvf_bf16_from_float(x));
        if (down > x || up < x || (near != down && near != up))
            check_fail(c, "bf16 rounds to %a, %a, %a", (double)down, (double)near, (double)up);
        if (isfinite(near) && isfinite(down) && isfinite(up) &&
            fabs((double)near - (double)x) > fmin((double)x - (double)down, (double)up - (double)x))
            check_fail(c, "bf16 %a is not nearest", (double)near);
        const uint16_t h = kvf_fp16_from_float(x);
        const double error = fabs((double)kvf_fp16_to_float(h) - (double)x);
        const double below = (h & 0x7fff) && (h & 0x7fff) <= 0x7c00
                                 ? fabs((double)kvf_fp16_to_float((uint16_t)(h - 1)) - (double)x)
                                 : INFINITY;
        const double above = (h & 0x7fff) < 0x7bff
                                 ? fabs((double)kvf_fp16_to_float((uint16_t)(h + 1)) - (double)x)
                                 : INFINITY;
        if ((h & 0x7fff) != 0x7c00 && (error > below || error > above))
            check_fail(c, "fp16 %04x is not nearest", h);
        if ((h & 0x7fff) == 0x7c00 && fabsf(x) < 65520.0f)
            check_fail(c, "fp16 overflows too early");
    }
}

#define D     128u
#define P     16u
#define SPANS 9u
#define GROUP 5u

/* The score of a minmax box is at least q.k for every key in it, up to the rounding of two sums. */
static void score_bounds_keys(check *c, kvf_dtype dtype, uint32_t subs)
{
    const kvf_shape s = {dtype, D, P, KVF_PAGES_NATIVE, 0};
    if (!check_begin(c))
        return;
    check_describe(c, "score bounds keys, %s, subs=%u", check_dtype_name(dtype), subs);
    void *page = check_in(c, kvf_page_bytes(&s)), *q = check_in(c, kvf_key_bytes(&s));
    void *digest = check_out(c, kvf_digest_bytes(D, subs));
    check_fill(c, page, dtype, (size_t)2 * P * D, DATA_NORMAL);
    check_fill(c, q, dtype, D, DATA_NORMAL);
    const kvf_digest_job job = {
        .page = page, .digest = digest, .count = P, .skip = check_random(c)};
    const kvf_digest_args da = {.shape = s,
                                .kind = KVF_DIGEST_MINMAX,
                                .subs = subs,
                                .job_count = 1,
                                .jobs = check_put(c, &job, sizeof job)};
    CHECK_RUN(c, c->var, digest, &da, false);
    float *score = check_out(c, sizeof *score);
    kvf_score_args sa = {.shape = s,
                         .subs = subs,
                         .lists = 1,
                         .group = 1,
                         .pages_max = 1,
                         .q = q,
                         .digests = check_put(c, &digest, sizeof digest),
                         .pages = check_put(c, &(uint32_t){1}, sizeof(uint32_t)),
                         .scores = score};
    CHECK_RUN(c, c->var, score, &sa, false);
    for (uint32_t t = 0; t < P; t++) {
        double dot = 0.0, magnitude = 0.0;
        if (job.skip >> t & 1)
            continue;
        for (uint32_t d = 0; d < D; d++) {
            double term =
                check_value(q, dtype, d) * check_value(kvf_page_key(&s, page, t), dtype, d);
            dot += term;
            magnitude += fabs(term);
        }
        if (!((double)*score >= dot - magnitude * 2.0 * D * 0x1p-24))
            check_fail(c, "token %u has q.k %.9g, its page only %.9g", t, dot, (double)*score);
    }
}

/* Attention over spans, split by `split`, in the given passes; out and lse are the caller's. */
typedef struct setting {
    const void *q;
    const kvf_span *spans;
    uint32_t count;
    uint32_t split;
    bool two_passes;
} setting;

static void run_attention(check *c, const kvf_shape *s, const setting *x, void *out, float *lse)
{
    const uint32_t splits = kvf_div_ceil_u32(SPANS, x->split);
    const uint32_t *count = check_put(c, &x->count, sizeof x->count);
    kvf_attend_args a = {.shape = *s,
                         .lists = 1,
                         .group = GROUP,
                         .spans_max = SPANS,
                         .split = x->split,
                         .scale = 0.09f,
                         .q = x->q,
                         .spans = x->spans,
                         .span_count = count};
    a.partial_o = check_out(c, (size_t)splits * GROUP * D * sizeof(float));
    a.partial_lse = check_out(c, (size_t)splits * GROUP * sizeof(float));
    for (int pass = x->two_passes ? 1 : 0; pass <= (x->two_passes ? 2 : 0); pass++) {
        a.pass = (kvf_pass)pass;
        CHECK_RUN(c, c->var, attend, &a, pass & 1);
    }
    kvf_merge_args m = {.shape = *s,
                        .lists = 1,
                        .group = GROUP,
                        .splits_max = splits,
                        .split = x->split,
                        .span_count = count,
                        .partial_o = a.partial_o,
                        .partial_lse = a.partial_lse,
                        .out = out,
                        .lse = lse};
    CHECK_RUN(c, c->var, merge, &m, false);
}

static void attention_properties(check *c, kvf_dtype dtype)
{
    const kvf_shape s = {dtype, D, P, KVF_PAGES_NATIVE, 0};
    const size_t bytes = GROUP * kvf_key_bytes(&s), token = kvf_token_bytes(&s);
    if (!check_begin(c))
        return;
    check_describe(c, "attention, %s", check_dtype_name(dtype));
    void *q = check_in(c, bytes);
    kvf_span *spans = check_in(c, SPANS * sizeof *spans);
    kvf_span *quantized = check_in(c, SPANS * sizeof *quantized);
    check_fill(c, q, dtype, (size_t)GROUP * D, DATA_NORMAL);
    for (uint32_t i = 0; i < SPANS; i++) {
        uint8_t *page = check_in(c, kvf_page_bytes(&s)), *dense = check_in(c, kvf_page_bytes(&s));
        check_fill(c, page, dtype, (size_t)2 * P * D, DATA_NORMAL);
        check_fill_nan(dense, dtype, (size_t)2 * P * D);
        spans[i] = (kvf_span){.page = page,
                              .count = P - i % 3,
                              .skip = check_random(c),
                              .home = check_below(c, 2) ? page : NULL};
        quantized[i] = (kvf_span){.page = dense, .home = spans[i].home ? dense : NULL};
        for (uint32_t t = 0; t < spans[i].count; t++) {
            if (spans[i].skip >> t & 1)
                continue;
            memcpy(dense + quantized[i].count * token, kvf_page_key(&s, page, t), token);
            quantized[i].count++;
        }
    }
    void *out[4];
    float *lse[4];
    for (int i = 0; i < 4; i++) {
        out[i] = check_out(c, bytes);
        lse[i] = check_out(c, GROUP * sizeof *lse[i]);
    }
    setting x = {.q = q, .spans = spans, .count = SPANS, .split = 2};
    run_attention(c, &s, &x, out[0], lse[0]);
    x.two_passes = true;
    run_attention(c, &s, &x, out[1], lse[1]);
    check_bits(c, "two passes: out", out[1], out[0], bytes);
    check_bits(c, "two passes: lse", lse[1], lse[0], GROUP * sizeof *lse[0]);
    x.two_passes = false;
    x.spans = quantized;
    run_attention(c, &s, &x, out[2], lse[2]);
    /* neighbours in the element type */
    const double one_rounding = dtype == KVF_BF16 ? 0x1p-7 : dtype == KVF_FP16 ? 0x1p-10 : 1e-5;
    if (c->cuda) { /* a token's row says which thread adds it, so the order of sums changes */
        check_elements(c, "skipped = absent: out", out[2], out[0], dtype, (size_t)GROUP * D, 1e-5,
                       one_rounding);
        check_elements(c, "skipped = absent: lse", lse[2], lse[0], KVF_FP32, GROUP, 1e-5, 1e-6);
    } else {
        check_bits(c, "skipped = absent: out", out[2], out[0], bytes);
        check_bits(c, "skipped = absent: lse", lse[2], lse[0], GROUP * sizeof *lse[0]);
    }
    x.split = SPANS;
    run_attention(c, &s, &x, out[3], lse[3]);
    check_elements(c, "split = whole: out", out[3], out[0], dtype, (size_t)GROUP * D, 1e-5,
                   one_rounding);
    check_elements(c, "split = whole: lse", lse[3], lse[0], KVF_FP32, GROUP, 1e-5, 1e-6);
}

/* Chunks of several rows in one launch have the bits of a launch each. */
static void chunks_are_single_ones(check *c, uint32_t index)
{
    kvf_prefill_kernel_args a = {.kv_heads = 2, .group = 1 + index * 5 % 6};
    enum { PAGES_MOST = 160 };
    if (!check_begin(c))
        return;
    const kvf_shape s =
        check_values(c, &(kvf_shape){(kvf_dtype)(index % 3), check_head_dims[index % check_dims(c)],
                                     check_page_sizes[index % 4], KVF_PAGES_NATIVE, 0});
    a.shape = s;
    a.q_dtype = a.out_dtype = s.dtype;
    a.scale = 0.1f;
    a.window = index % 2 ? 20 : 0;
    a.sink = 3;
    a.chunks.count = 1 + check_below(c, KVF_CHUNKS_MAX);
    uint32_t tokens = 0;
    for (uint32_t i = 0; i < a.chunks.count; i++) {
        const kvf_query_chunk one = {tokens, check_below(c, 3) ? 1 + check_below(c, 4) : 60,
                                     check_below(c, 100)};
        a.tokens = kvf_max_u32(a.tokens, one.tokens);
        tokens += one.tokens;
        a.chunks.at[i] = one;
    }
    check_describe(c, "%s d=%u P=%u G=%u window=%u chunks=%u tokens=%u", check_dtype_name(s.dtype),
                   s.head_dim, s.page_size, a.group, a.window, a.chunks.count, tokens);
    const size_t heads = (size_t)a.kv_heads * a.group, row = heads * kvf_key_bytes(&s);
    const size_t out_row = heads * kvf_value_bytes(&s);
    void *q = check_in(c, tokens * row), *out[2];
    const void **blocks = check_in(c, (size_t)a.chunks.count * PAGES_MOST * sizeof *blocks);
    float *lse[2];
    check_fill(c, q, s.dtype, tokens * heads * s.head_dim, DATA_NORMAL);
    for (uint32_t i = 0; i < a.chunks.count; i++)
        for (uint32_t t = 0; t < a.chunks.at[i].base + a.chunks.at[i].tokens; t += s.page_size) {
            void *block = check_in(c, a.kv_heads * kvf_page_bytes(&s));
            check_fill(c, block, s.dtype,
                       (size_t)a.kv_heads * s.page_size * (s.head_dim + kvf_value_dim(&s)),
                       DATA_NORMAL);
            blocks[i * PAGES_MOST + t / s.page_size] = block;
        }
    for (uint32_t i = 0; i < 2; i++) {
        out[i] = check_out(c, tokens * out_row);
        lse[i] = check_out(c, tokens * heads * sizeof *lse[i]);
    }
    a.q = q;
    a.blocks = blocks;
    a.blocks_stride = PAGES_MOST;
    a.out = out[0];
    a.lse = lse[0];
    CHECK_RUN(c, c->var, prefill, &a, 0);
    for (uint32_t i = 0; i < a.chunks.count; i++) {
        const kvf_query_chunk *chunk = &a.chunks.at[i];
        kvf_prefill_kernel_args one = a;
        one.chunks.count = 0;
        one.tokens = chunk->tokens;
        one.base = chunk->base;
        one.q = (const char *)q + chunk->first * row;
        one.blocks = blocks + (size_t)i * PAGES_MOST;
        one.out = (char *)out[1] + chunk->first * out_row;
        one.lse = lse[1] + chunk->first * heads;
        CHECK_RUN(c, c->var, prefill, &one, 1);
    }
    check_bits(c, "out", out[1], out[0], tokens * out_row);
    check_bits(c, "lse", lse[1], lse[0], tokens * heads * sizeof *lse[0]);
}

/* Bits of `count` numbers in fp32, rounded, are those of `want`. */
static void check_rounded(check *c, const char *what, const float *got, const void *want,
                          kvf_dtype dtype, size_t count)
{
    uint16_t *rounded = check_in(c, count * sizeof *rounded);
    for (size_t i = 0; i < count; i++)
        kvf_element_set(rounded, dtype, i, got[i]);
    check_bits(c, what, rounded, want, count * sizeof *rounded);
}

/* Queries in fp32 are worth what they round to, and outputs in fp32 round to those in the element
 * type: a chunk with a window, a cap and sinks, or none. */
static void prefill_rounds_once(check *c, uint32_t index)
{
    enum { KV_HEADS = 2, TOKENS = 37, BEFORE = 90 };
    if (!check_begin(c))
        return;
    const kvf_shape s =
        check_values(c, &(kvf_shape){(kvf_dtype)(index % 2), check_head_dims[index % check_dims(c)],
                                     check_page_sizes[index % 4], KVF_PAGES_NATIVE, 0});
    const size_t rows = (size_t)TOKENS * KV_HEADS * GROUP, numbers = rows * kvf_value_dim(&s);
    kvf_prefill_kernel_args a = {.shape = s,
                                 .kv_heads = KV_HEADS,
                                 .group = GROUP,
                                 .tokens = TOKENS,
                                 .base = BEFORE,
                                 .sink = index % 3 ? 0 : 5,
                                 .window = index % 3 == 1 ? 0 : 40,
                                 .scale = 0.1f,
                                 .cap = index % 4 < 2 ? 0.0f : 3.0f,
                                 .q_dtype = s.dtype,
                                 .out_dtype = s.dtype};
    check_describe(c, "%s d=%u P=%u window=%u cap=%g", check_dtype_name(s.dtype), s.head_dim,
                   s.page_size, a.window, (double)a.cap);
    void *q = check_in(c, rows * kvf_key_bytes(&s));
    const void **blocks = check_in(c, (BEFORE + TOKENS) * sizeof *blocks);
    check_fill(c, q, s.dtype, rows * s.head_dim, DATA_NORMAL);
    for (uint32_t t = 0; t < BEFORE + TOKENS; t += s.page_size) {
        void *block = check_in(c, KV_HEADS * kvf_page_bytes(&s));
        check_fill(c, block, s.dtype,
                   (size_t)KV_HEADS * s.page_size * (s.head_dim + kvf_value_dim(&s)), DATA_NORMAL);
        blocks[t / s.page_size] = block;
    }
    float *lse[3];
    void *out[3];
    a.q = q;
    a.blocks = blocks;
    for (uint32_t i = 0; i < 3; i++) { /* fp32: none, out, both */
        a.out_dtype = i ? KVF_FP32 : s.dtype;
        if (i == 2) {
            a.q = check_widen(c, q, s.dtype, rows * s.head_dim);
            a.q_dtype = KVF_FP32;
        }
        out[i] = a.out = check_out(c, numbers * kvf_dtype_bytes(a.out_dtype));
        lse[i] = a.lse = check_out(c, rows * sizeof *lse[i]);
        CHECK_RUN(c, c->var, prefill, &a, i == 2);
    }
    check_bits(c, "lse", lse[2], lse[0], rows * sizeof *lse[0]);
    check_bits(c, "lse", lse[1], lse[0], rows * sizeof *lse[0]);
    check_bits(c, "out", out[2], out[1], numbers * sizeof(float));
    check_rounded(c, "rounded out", out[1], out[0], s.dtype, numbers);
}

void check_properties(check *c)
{
    for (uint32_t i = 0; i < 30; i++) {
        const kvf_dtype dtype = (kvf_dtype)(i % 3);
        score_bounds_keys(c, dtype, 1u << (i / 3 % 3));
        attention_properties(c, dtype);
        if (i < 9)
            chunks_are_single_ones(c, i);
        if (i < 12)
            prefill_rounds_once(c, i);
    }
}
