/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_MOVE_QUANTIZED_SIMD_H
#define KVF_KERNELS_MOVE_QUANTIZED_SIMD_H

/*
 * Tokens of quantized pages, up to KVF_CODE_LANES of a run side by side, with the bits of
 * quantized.h.
 *
 * Knows runs, not where they come from. Keys are rotated as codes_simd.h does it, a lane per token,
 * and turned to vectors for everything else; values stay vectors.
 */

#include "quantized.h"
#include "quantized_run.h"
#include "score/codes_simd.h"

/* Numbers of so many tokens, or their codes as integers. */
typedef struct token_vectors {
    _Alignas(64) float at[KVF_CODE_LANES][KVF_HEAD_DIM_MAX];
} token_vectors;

/* Adding it rounds to an integer, which is in the low bits then. */
#define ROUNDER 0x1.8p23f

/* Tokens from `first` on that are taken at a time; lanes beyond them do what the last one does. */
KVF_ALWAYS_INLINE uint32_t tokens_at(const kvf_paging *p, uint32_t first)
{
    return kvf_min_u32(KVF_CODE_LANES, p->block_size - first);
}

KVF_ALWAYS_INLINE char *page_of(const kvf_shape *s, const kvf_quantized_run *run, uint32_t t)
{
    return run->home + t / s->page_size * kvf_stored_page_bytes(s);
}

/* Vectors to a tile, or a tile to vectors. */
KVF_ALWAYS_INLINE void vectors_to_tile(code_tile *tile, const token_vectors *vectors,
                                       uint32_t head_dim)
{
    const void *from[KVF_CODE_LANES];
    for (uint32_t r = 0; r < KVF_CODE_LANES; r++)
        from[r] = vectors->at[r];
    code_tile_put(tile, from, KVF_FP32, head_dim);
}

KVF_ALWAYS_INLINE void tile_to_vectors(token_vectors *vectors, const code_tile *tile,
                                       uint32_t head_dim)
{
    const void *from[VF_TRANSPOSE];
    for (uint32_t i = 0; i < head_dim; i += VF_TRANSPOSE) {
        for (uint32_t k = 0; k < VF_TRANSPOSE; k++)
            from[k] = tile->at + (i + k) * KVF_CODE_LANES;
        for (uint32_t r = 0; r < KVF_CODE_LANES; r += VF_TRANSPOSE)
            vf_transpose_keys(&vectors->at[r][i], KVF_HEAD_DIM_MAX, from, KVF_FP32, r);
    }
}

/* The low bytes of integers. */
static inline void store_bytes(void *to, const float *from, uint32_t count)
{
    uint32_t word[KVF_HEAD_DIM_MAX];
    uint8_t *byte = to;
    memcpy(word, from, count * sizeof *word);
    for (uint32_t i = 0; i < count; i++)
        byte[i] = (uint8_t)word[i];
}

/* ---- the way there ---- */

/* Scales of VF_LANES rotated keys, which become integers, in place. */
static inline void round_keys(float *x, uint16_t *scales, uint32_t head_dim)
{
    vi top = (vi)vu_set(0); /* bits, whose order is that of magnitudes; NaN is above all numbers */
    float largest[VF_LANES], unit[VF_LANES];
    for (uint32_t i = 0; i < head_dim; i++) {
        const vi bits = (vi)vf_abs(vf_load(x + i * KVF_CODE_LANES));
        top = (vi)vu_pick((vu)(bits > top), (vu)bits, (vu)top);
    }
    vf_store(largest, (vf)top);
    for (uint32_t l = 0; l < VF_LANES; l++) {
        const int is_flat = !(largest[l] > 0.0f && largest[l] <= FLT_MAX);
        scales[l] = is_flat ? 0 : kvf_bf16_up(largest[l] / 127.0f);
        unit[l] = kvf_bf16_to_float(scales[l]);
    }
    const vf units = vf_load(unit);
    const vu is_sound = (vu)(units > vf_zero());
    for (uint32_t i = 0; i < head_dim; i++) {
        const vf y = vf_add(vf_load(x + i * KVF_CODE_LANES) / units, vf_set(ROUNDER));
        vu_store(x + i * KVF_CODE_LANES, (vu)y & is_sound);
    }
}

static inline void quantize_keys(const kvf_shape *s, const kvf_quantized_run *run, uint32_t first,
                                 uint32_t count, code_tile *tile, token_vectors *vectors)
{
    const void *from[KVF_CODE_LANES];
    uint16_t scales[KVF_CODE_LANES];
    for (uint32_t r = 0; r < KVF_CODE_LANES; r++)
        from[r] = run->exact + (first + kvf_min_u32(r, count - 1)) * kvf_token_bytes(s);
    code_tile_fill(tile, from, s->dtype, s->head_dim);
    for (uint32_t k = 0; k < KVF_CODE_LANES; k += VF_LANES)
        round_keys(tile->at + k, scales + k, s->head_dim);
    tile_to_vectors(vectors, tile, s->head_dim);
    for (uint32_t r = 0; r < count; r++) {
        const uint32_t t = (first + r) % s->page_size;
        const char *page = page_of(s, run, first + r);
        store_bytes(kvf_quantized_key(s, page, t), vectors->at[r], s->head_dim);
        *kvf_quantized_key_scale(s, page, t) = scales[r];
    }
}

static inline uint16_t quantize_bytes(void *to, float *x, uint32_t count)
{
    const float largest = kvf_quantized_largest(x, count);
    const int is_flat = !(largest > 0.0f && largest <= FLT_MAX);
    const uint16_t scale = is_flat ? 0 : kvf_bf16_up(largest / 127.0f);
    const vf unit = vf_set(kvf_bf16_to_float(scale));
    const vu is_sound = (vu)(unit > vf_zero());
    for (uint32_t i = 0; i < count; i += VF_LANES)
        vu_store(x + i, (vu)vf_add(vf_load(x + i) / unit, vf_set(ROUNDER)) & is_sound);
    store_bytes(to, x, count);
    return scale;
}

/* KVF_QUANTIZED_GROUP channels, which are finite and become codes. */
static inline void quantize_halves(uint8_t *to, uint16_t *scales, float *x)
{
    const uint32_t half = KVF_QUANTIZED_GROUP / 2;
    vf least = vf_load(x), most = least;
    float low[VF_LANES], high[VF_LANES];
    for (uint32_t i = VF_LANES; i < KVF_QUANTIZED_GROUP; i += VF_LANES) {
        least = vf_min(least, vf_load(x + i));
        most = vf_max(most, vf_load(x + i));
    }
    vf_store(low, least);
    vf_store(high, most);
    for (uint32_t l = 1; l < VF_LANES; l++) {
        low[0] = low[l] < low[0] ? low[l] : low[0];
        high[0] = high[l] > high[0] ? high[l] : high[0];
    }
    const uint32_t steps = kvf_quantized_steps(low[0], high[0]);
    scales[0] = (uint16_t)steps;
    scales[1] = (uint16_t)(steps >> 16);
    const vf scale = vf_set(kvf_fp16_to_float(scales[0]));
    const vf minimum = vf_set(kvf_fp16_to_float(scales[1]));
    const vu is_sound = (vu)(scale > vf_zero());
    for (uint32_t i = 0; i < KVF_QUANTIZED_GROUP; i += VF_LANES) {
        const vf code = vf_min(vf_sub(vf_load(x + i), minimum) / scale, vf_set(15.0f));
        vu_store(x + i, (vu)vf_add(vf_max(code, vf_zero()), vf_set(ROUNDER)) & is_sound & 15u);
    }
    for (uint32_t i = 0; i < half; i += VF_LANES)
        vu_store(x + i, vu_load(x + i) | vu_load(x + half + i) << 4);
    store_bytes(to, x, half);
}

static inline void quantize_value(const kvf_shape *s, const kvf_quantized_run *run, uint32_t t,
                                  float *x)
{
    const uint32_t value_dim = kvf_value_dim(s);
    const char *page = page_of(s, run, t);
    uint8_t *to = kvf_quantized_value(s, page, t % s->page_size);
    uint16_t *scales = kvf_quantized_value_scale(s, page, t % s->page_size);
    vf_widen_array(x, run->exact + t * kvf_token_bytes(s) + kvf_key_bytes(s), s->dtype, value_dim);
    if (s->pages == KVF_PAGES_K8V8) {
        *scales = quantize_bytes(to, x, value_dim);
        return;
    }
    if (!(kvf_quantized_largest(x, value_dim) <= FLT_MAX))
        memset(x, 0, value_dim * sizeof *x);
    for (uint32_t i = 0; i < value_dim; i += KVF_QUANTIZED_GROUP, scales += 2)
        if (value_dim - i >= KVF_QUANTIZED_GROUP)
            quantize_halves(to + i / 2, scales, x + i);
        else
            kvf_quantize_int4(to + i / 2, scales, x + i, value_dim - i);
}

/* ---- and back ---- */

KVF_ALWAYS_INLINE void scale_bytes(float *x, const void *from, float scale, uint32_t count)
{
    for (uint32_t i = 0; i < count; i += VF_LANES)
        vf_store(x + i, vf_mul(vf_set(scale), vf_load_i8((const int8_t *)from + i)));
}

static inline void dequantize_keys(const kvf_shape *s, const kvf_quantized_run *run, uint32_t first,
                                   uint32_t count, code_tile *tile, token_vectors *vectors)
{
    for (uint32_t r = 0; r < KVF_CODE_LANES; r++) {
        const uint32_t token = first + kvf_min_u32(r, count - 1), t = token % s->page_size;
        const char *page = page_of(s, run, token);
        scale_bytes(vectors->at[r], kvf_quantized_key(s, page, t),
                    kvf_bf16_to_float(*kvf_quantized_key_scale(s, page, t)), s->head_dim);
    }
    vectors_to_tile(tile, vectors, s->head_dim);
    code_tile_turn(tile, s->head_dim);
    code_tile_signs(tile, s->head_dim);
    tile_to_vectors(vectors, tile, s->head_dim);
}

/* KVF_QUANTIZED_GROUP channels. */
KVF_ALWAYS_INLINE void dequantize_halves(float *x, const uint8_t *from, const uint16_t *scales)
{
    const uint32_t half = KVF_QUANTIZED_GROUP / 2;
    const vf scale = vf_set(kvf_fp16_to_float(scales[0]));
    const vf minimum = vf_set(kvf_fp16_to_float(scales[1]));
    for (uint32_t i = 0; i < half; i += VF_LANES) {
        const vu both = vu_load_u8(from + i);
        const vf low = __builtin_convertvector((vi)(both & 15u), vf);
        const vf high = __builtin_convertvector((vi)(both >> 4), vf);
        vf_store(x + i, vf_add(minimum, vf_mul(scale, low)));
        vf_store(x + half + i, vf_add(minimum, vf_mul(scale, high)));
    }
}

static inline void dequantize_value(const kvf_shape *s, const kvf_quantized_run *run, uint32_t t,
                                    float *x)
{
    const uint32_t value_dim = kvf_value_dim(s);
    const char *page = page_of(s, run, t);
    const uint8_t *from = kvf_quantized_value(s, page, t % s->page_size);
    const uint16_t *scales = kvf_quantized_value_scale(s, page, t % s->page_size);
    if (s->pages == KVF_PAGES_K8V8) {
        scale_bytes(x, from, kvf_bf16_to_float(*scales), value_dim);
        return;
    }
    for (uint32_t i = 0; i < value_dim; i += KVF_QUANTIZED_GROUP, scales += 2)
        if (value_dim - i >= KVF_QUANTIZED_GROUP)
            dequantize_halves(x + i, from + i / 2, scales);
        else
            kvf_dequantize_int4(from + i / 2, scales, x + i, value_dim - i);
}

/* Within the finite numbers of the element type, in place, then stored. */
static inline void store_vector(const kvf_shape *s, void *to, float *x, uint32_t count)
{
    const vf most = vf_set(kvf_quantized_within(s->dtype, FLT_MAX)), least = vf_zero() - most;
    for (uint32_t i = 0; i < count; i += VF_LANES)
        vf_store(x + i, vf_max(least, vf_min(most, vf_load(x + i))));
    vf_round_array(to, s->dtype, x, count);
}

/* `count` tokens in full precision; those of the sink are left alone. */
static inline void dequantize_tokens(const kvf_shape *s, const kvf_quantized_run *run,
                                     uint32_t first, uint32_t count, code_tile *tile,
                                     token_vectors *vectors)
{
    dequantize_keys(s, run, first, count, tile, vectors);
    for (uint32_t r = 0; r < count; r++) {
        const uint32_t t = first + r;
        char *to = run->exact + t * kvf_token_bytes(s);
        if (run->sink >> t & 1)
            continue;
        store_vector(s, to, vectors->at[r], s->head_dim);
        dequantize_value(s, run, t, vectors->at[r]);
        store_vector(s, to + kvf_key_bytes(s), vectors->at[r], kvf_value_dim(s));
    }
}

#endif
