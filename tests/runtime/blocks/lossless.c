/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Tokens that quantization does not change; see the header. Knows nothing of blocks.
 */

#include "lossless.h"

#include <math.h>
#include <string.h>

#include "quantized.h"

#define WIDTH 64u

static uint32_t largest_of(const float *x, uint32_t count)
{
    uint32_t at = 0;
    for (uint32_t i = 1; i < count; i++)
        at = fabsf(x[i]) > fabsf(x[at]) ? i : at;
    return at;
}

static float between(float low, float x, float high)
{
    return x < low ? low : x > high ? high : x;
}

/* Whole units, the largest channel 127 of them and the others at most `most`; zero is positive. */
static void to_int8(float *x, uint32_t count, float unit, float most)
{
    const uint32_t top = largest_of(x, count);
    for (uint32_t i = 0; i < count; i++)
        x[i] = unit * ((i == top ? copysignf(127.0f, x[i])
                                 : between(-most, nearbyintf(x[i] / unit), most)) +
                       0.0f);
}

/* A channel of a key is a sum of 64 codes, of which bf16 holds one up to 256 exactly, and fp16 one
 * up to 2,048. A key of few large codes keeps its length, not its largest channel. */
static void make_key(const kvf_shape *s, float *x)
{
    static const float most[] = {[KVF_BF16] = 2.0f, [KVF_FP16] = 30.0f, [KVF_FP32] = 127.0f};
    float length = 0.0f;
    kvf_code_rotate(x, WIDTH);
    for (uint32_t i = 0; i < WIDTH; i++)
        length += x[i] * x[i];
    const float size = s->dtype == KVF_BF16 ? sqrtf(length) : fabsf(x[largest_of(x, WIDTH)]);
    to_int8(x, WIDTH, exp2f(rintf(log2f(size / 127.0f))), most[s->dtype]);
    kvf_quantized_rotate_back(x, WIDTH);
}

/* 16 numbers one after the other, of which a group has the first and the last. */
static void make_group(float *x)
{
    uint32_t low = 0, high = 0;
    for (uint32_t i = 1; i < KVF_QUANTIZED_GROUP; i++) {
        low = x[i] < x[low] ? i : low;
        high = x[i] > x[high] ? i : high;
    }
    const float unit = exp2f(rintf(log2f((x[high] - x[low]) / 15.0f)));
    const float least = between(-120.0f, nearbyintf(x[low] / unit), 100.0f);
    for (uint32_t i = 0; i < KVF_QUANTIZED_GROUP; i++) {
        const float code = i == low    ? 0.0f
                           : i == high ? 15.0f
                                       : between(0.0f, nearbyintf(x[i] / unit) - least, 15.0f);
        x[i] = unit * (least + code);
    }
}

static void make_value(const kvf_shape *s, float *x)
{
    const uint32_t count = kvf_value_dim(s);
    if (s->pages == KVF_PAGES_K8V8) {
        to_int8(x, count, exp2f(rintf(log2f(fabsf(x[largest_of(x, count)]) / 127.0f))), 127.0f);
        return;
    }
    for (uint32_t i = 0; i < count; i += KVF_QUANTIZED_GROUP)
        make_group(x + i);
}

static void make_row(const kvf_shape *s, void *row, uint32_t count,
                     void (*make)(const kvf_shape *, float *))
{
    float x[WIDTH];
    for (uint32_t i = 0; i < count; i++)
        x[i] = kvf_element_get(row, s->dtype, i);
    make(s, x);
    for (uint32_t i = 0; i < count; i++)
        kvf_element_set(row, s->dtype, i, x[i]);
}

static void expect_no_loss(const kvf_shape *s, const void *key, const void *value)
{
    const size_t bytes = kvf_key_bytes(s), value_bytes = kvf_value_bytes(s);
    _Alignas(64) char exact[2 * WIDTH * sizeof(float)], back[sizeof exact], page[512];
    float x[WIDTH];
    assert_true(kvf_stored_page_bytes(s) <= sizeof page);
    memcpy(exact, key, bytes);
    memcpy(exact + bytes, value, value_bytes);
    kvf_quantize_token(s, page, 0, exact, x);
    kvf_dequantize_token(s, page, 0, back, x);
    assert_memory_equal(back, exact, bytes + value_bytes);
}

void lossless_make(test_tokens *t, kvf_pages pages)
{
    const kvf_shape s = {t->dtype, t->head_dim, 1, pages, (uint16_t)t->value_dim};
    const size_t rows = (size_t)t->layers * t->count * t->kv_heads;
    assert_int_equal(t->head_dim, WIDTH);
    for (size_t i = 0; i < rows; i++) {
        char *key = (char *)t->k + i * kvf_key_bytes(&s);
        char *value = (char *)t->v + i * kvf_value_bytes(&s);
        make_row(&s, key, WIDTH, make_key);
        make_row(&s, value, t->value_dim, make_value);
        expect_no_loss(&s, key, value);
    }
}
