/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Rotary embeddings: what config.json says about them, in the style of Transformers 4
 * (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`), and the frequencies that follow.
 *
 * The frequencies are computed in float32 in the order in which Transformers computes them, because
 * its goldens are float32: an exponent rounded to float32 shifts a frequency by up to 1e-6
 * relative.
 */

#include "model_config_reader.h"

#include <float.h>
#include <math.h>
#include <string.h>

static const double pi = 3.14159265358979323846;

static const char *const known_keys[] = {"rope_type",
                                         "type",
                                         "rope_theta",
                                         "factor",
                                         "low_freq_factor",
                                         "high_freq_factor",
                                         "beta_fast",
                                         "beta_slow",
                                         "attention_factor",
                                         "mscale",
                                         "mscale_all_dim",
                                         "truncate",
                                         "partial_rotary_factor",
                                         "original_max_position_embeddings",
                                         "finetuned", /* a remark of the first models with yarn */
                                         NULL};

static void check_keys(config_reader *reader, json_t *scaling)
{
    const char *unknown = json_unknown_key(scaling, known_keys);
    if (unknown && reader->status == KVF_OK)
        reader->status = model_fail(reader->error, KVF_UNSUPPORTED,
                                    "%s: the RoPE settings have the field \"%.80s\", which is not "
                                    "supported; use another model",
                                    reader->file, unknown);
}

static void check_partial(config_reader *reader, json_t *object)
{
    json_t *partial = json_get_set(object, "partial_rotary_factor");
    if (partial && !(json_is_number(partial) && json_number_value(partial) == 1))
        config_refuse(reader, "partial_rotary_factor", partial,
                      "heads that are rotated in part are not supported, use another model");
}

static void read_kind(config_reader *reader, json_t *scaling, kvf_rope_config *rope)
{
    const char *field = json_get_set(scaling, "rope_type") ? "rope_type" : "type";
    json_t *kind = json_get_set(scaling, field);
    if (!kind || json_is_text(kind, "default"))
        rope->kind = KVF_ROPE_DEFAULT;
    else if (json_is_text(kind, "linear"))
        rope->kind = KVF_ROPE_LINEAR;
    else if (json_is_text(kind, "llama3"))
        rope->kind = KVF_ROPE_LLAMA3;
    else if (json_is_text(kind, "yarn"))
        rope->kind = KVF_ROPE_YARN;
    else
        config_refuse(reader, field, kind, "supported are default, linear, llama3 and yarn");
}

/* The length the model was trained at: Transformers prefers the field outside the dictionary. */
static double read_original(config_reader *reader, json_t *scaling, const kvf_model_config *config)
{
    static const char field[] = "original_max_position_embeddings";
    json_t *object = json_get_set(reader->root, field) ? reader->root : scaling;
    return config_positive(reader, object, field, config->positions_max);
}

static double magnitude_scale(double factor, double mscale)
{
    return factor <= 1 ? 1 : 0.1 * mscale * log(factor) + 1;
}

/* A number that Transformers replaces by its default when it is absent, null or 0. */
static double number_or(config_reader *reader, json_t *object, const char *field, double fallback)
{
    json_t *value = json_get_set(object, field);
    if (!value)
        return fallback;
    if (!json_is_number(value) || json_number_value(value) < 0)
        config_reject(reader, field, value, "a number, not negative");
    else if (json_number_value(value) > 0)
        return json_number_value(value);
    return fallback;
}

static void read_yarn(config_reader *reader, json_t *scaling, const kvf_model_config *config,
                      kvf_rope_config *rope)
{
    rope->original_positions = read_original(reader, scaling, config);
    rope->factor = config_positive(reader, scaling, "factor",
                                   config->positions_max / rope->original_positions);
    rope->beta_fast = number_or(reader, scaling, "beta_fast", 32);
    rope->beta_slow = number_or(reader, scaling, "beta_slow", 1);
    rope->truncate = config_bool(reader, scaling, "truncate", true);
    double mscale = number_or(reader, scaling, "mscale", 0);
    double mscale_all_dim = number_or(reader, scaling, "mscale_all_dim", 0);
    double inferred = magnitude_scale(rope->factor, 1);
    if (mscale > 0 && mscale_all_dim > 0)
        inferred =
            magnitude_scale(rope->factor, mscale) / magnitude_scale(rope->factor, mscale_all_dim);
    rope->attention_factor = config_positive(reader, scaling, "attention_factor", inferred);
    if (!(rope->attention_factor <= (double)FLT_MAX))
        config_reject(reader, "mscale", json_object_get(scaling, "mscale"),
                      "so small that the attention factor is an fp32 number");
}

static void read_llama3(config_reader *reader, json_t *scaling, const kvf_model_config *config,
                        kvf_rope_config *rope)
{
    rope->factor = config_positive(reader, scaling, "factor", 0);
    rope->low_freq_factor = config_positive(reader, scaling, "low_freq_factor", 0);
    rope->high_freq_factor = config_positive(reader, scaling, "high_freq_factor", 0);
    rope->original_positions = read_original(reader, scaling, config);
    if (rope->high_freq_factor <= rope->low_freq_factor)
        config_reject(reader, "high_freq_factor", json_object_get(scaling, "high_freq_factor"),
                      "above low_freq_factor");
}

/*
 * Where all positions are stretched by a factor, there are so many more of them than the model was
 * trained with: who sets the factor by hand, as model cards say, leaves max_position_embeddings as
 * it is. llama3 says nothing of lengths.
 */
static void stretch_positions(config_reader *reader, json_t *scaling, kvf_model_config *config)
{
    const kvf_rope_config *rope = &config->rope;
    if (rope->kind != KVF_ROPE_LINEAR && rope->kind != KVF_ROPE_YARN)
        return;
    const double positions =
        fmin(floor(rope->factor * read_original(reader, scaling, config)), INT32_MAX);
    if (positions > config->positions_max) {
        config->positions_max = (uint32_t)positions;
        config->positions_by = "factor of the RoPE scaling by the original length";
    }
}

void config_read_rope(config_reader *reader, kvf_model_config *config)
{
    kvf_rope_config *rope = &config->rope;
    json_t *scaling = json_get_set(reader->root, "rope_scaling");
    const char *field = "rope_scaling";
    if (!scaling || (json_is_object(scaling) && json_object_size(scaling) == 0)) {
        field = "rope_parameters";
        scaling = json_get_set(reader->root, field);
    }
    *rope = (kvf_rope_config){.factor = 1, .attention_factor = 1};
    if (scaling && !json_is_object(scaling)) {
        config_reject(reader, field, scaling, "null or an object");
        return;
    }
    if (scaling)
        check_keys(reader, scaling);
    check_partial(reader, reader->root);
    check_partial(reader, scaling);
    read_kind(reader, scaling, rope);
    bool inside = json_get_set(scaling, "rope_theta");
    rope->theta = config_positive(reader, inside ? scaling : reader->root, "rope_theta", 10000);
    if (rope->theta <= 1)
        config_reject(reader, "rope_theta",
                      json_object_get(inside ? scaling : reader->root, "rope_theta"), "above 1");
    if (rope->kind == KVF_ROPE_LINEAR)
        rope->factor = config_positive(reader, scaling, "factor", 0);
    else if (rope->kind == KVF_ROPE_LLAMA3)
        read_llama3(reader, scaling, config, rope);
    else if (rope->kind == KVF_ROPE_YARN)
        read_yarn(reader, scaling, config, rope);
    stretch_positions(reader, scaling, config);
}

/* ---- frequencies ---- */

static void scale_llama3(const kvf_rope_config *rope, kvf_rope_table *table)
{
    float original = (float)rope->original_positions;
    float low = (float)rope->low_freq_factor;
    float high = (float)rope->high_freq_factor;
    float factor = (float)rope->factor;
    float longest = (float)(rope->original_positions / rope->low_freq_factor);
    float shortest = (float)(rope->original_positions / rope->high_freq_factor);
    for (uint32_t i = 0; i < table->count; i++) {
        float frequency = table->inv_freq[i];
        float wavelength = (float)(2 * pi) / frequency;
        if (wavelength > longest) {
            table->inv_freq[i] = frequency / factor;
        } else if (wavelength >= shortest) {
            float smooth = (original / wavelength - low) / (high - low);
            table->inv_freq[i] = (1 - smooth) * frequency / factor + smooth * frequency;
        }
    }
}

/* The channel pair that turns @p rotations times over the original length, as a real number. */
static double correction_channel(const kvf_rope_config *rope, double rotations, uint32_t head_dim)
{
    return head_dim * log(rope->original_positions / (rotations * 2 * pi)) / (2 * log(rope->theta));
}

static void scale_yarn(const kvf_rope_config *rope, uint32_t head_dim, kvf_rope_table *table)
{
    double low = correction_channel(rope, rope->beta_fast, head_dim);
    double high = correction_channel(rope, rope->beta_slow, head_dim);
    if (rope->truncate) {
        low = floor(low);
        high = ceil(high);
    }
    low = fmax(low, 0);
    high = fmin(high, (double)head_dim - 1);
    if (low == high)
        high += 0.001;
    for (uint32_t i = 0; i < table->count; i++) {
        float extrapolated = table->inv_freq[i];
        float interpolated = 1.0f / ((float)rope->factor * (1.0f / extrapolated));
        float ramp = ((float)i - (float)low) / (float)(high - low);
        ramp = ramp < 0 ? 0 : ramp > 1 ? 1 : ramp;
        float keep = 1 - ramp;
        table->inv_freq[i] = interpolated * (1 - keep) + extrapolated * keep;
    }
}

void kvf_rope_table_make(const kvf_model_config *config, kvf_rope_table *out)
{
    const kvf_rope_config *rope = &config->rope;
    *out = (kvf_rope_table){.count = config->head_dim / 2,
                            .attention_scaling = (float)rope->attention_factor};
    for (uint32_t i = 0; i < out->count; i++) {
        float exponent = (float)(2 * i) / (float)config->head_dim;
        out->inv_freq[i] = 1.0f / (float)pow(rope->theta, (double)exponent);
        if (rope->kind == KVF_ROPE_LINEAR)
            out->inv_freq[i] /= (float)rope->factor;
        else if (rope->kind == KVF_ROPE_FACTORS)
            out->inv_freq[i] /= rope->factors[i];
    }
    if (rope->kind == KVF_ROPE_LLAMA3)
        scale_llama3(rope, out);
    else if (rope->kind == KVF_ROPE_YARN)
        scale_yarn(rope, config->head_dim, out);
}
