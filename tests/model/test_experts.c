/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Experts: who is chosen and with which share, how rows are grouped, that the weights of others are
 * not read, and what is refused.
 */

#include "experts.h"
#include "gguf_image.h"
#include "model_fixture.h"
#include "model_rig.h"
#include "random_model.h"
#include "unit.h"

#include <math.h>

#define EXPERTS 100u
#define USED    5u
#define PROMPT  24u /* so many rows of an expert that they are multiplied as a matrix */

/* ---- choosing ---- */

/* How many are likelier, or as likely and first. */
static uint32_t rank_of(const float *logits, uint32_t expert)
{
    uint32_t rank = 0;
    for (uint32_t i = 0; i < EXPERTS; i++)
        rank += logits[i] > logits[expert] || (logits[i] == logits[expert] && i < expert);
    return rank;
}

static void chooses_the_likeliest(void **state)
{
    random_stream stream = random_stream_of("experts");
    kvf_model_config model = {.experts = EXPERTS, .experts_used = USED};
    for (uint32_t trial = 0; trial < 200; trial++) {
        float logits[EXPERTS], shares[USED];
        uint32_t chosen[USED];
        double all = 0, best = 0, sum = 0;
        for (uint32_t i = 0; i < EXPERTS; i++) /* few levels: many are equal */
            logits[i] = (float)(random_stream_next(&stream) % 40) / 4.0f - 3.0f;
        model.experts_normed = trial % 2;
        kvf_experts_choose(&model, logits, chosen, shares);
        for (uint32_t i = 0; i < EXPERTS; i++)
            all += exp((double)logits[i]);
        for (uint32_t i = 0; i < USED; i++) {
            assert_int_equal(rank_of(logits, chosen[i]), i);
            best += exp((double)logits[chosen[i]]);
        }
        for (uint32_t i = 0; i < USED; i++) {
            const double want =
                exp((double)logits[chosen[i]]) / (model.experts_normed ? best : all);
            assert_true(fabs((double)shares[i] - want) < 1e-6);
            sum += (double)shares[i];
        }
        assert_true(model.experts_normed ? fabs(sum - 1.0) < 1e-6 : sum < 1.0);
    }
}

/* No logit is a number, or all are used: each is chosen once. */
static void chooses_each_once(void **state)
{
    kvf_model_config model = {.experts = USED, .experts_used = USED, .experts_normed = true};
    for (uint32_t nans = 0; nans < 1u << USED; nans++) {
        float logits[USED], shares[USED];
        uint32_t chosen[USED], seen = 0;
        for (uint32_t i = 0; i < USED; i++)
            logits[i] = nans >> i & 1 ? NAN : (float)(i * 7 % 5);
        kvf_experts_choose(&model, logits, chosen, shares);
        for (uint32_t i = 0; i < USED; i++)
            seen |= 1u << chosen[i];
        assert_int_equal(seen, (1u << USED) - 1);
        assert_int_equal(isnan(shares[0]) != 0, nans != 0);
    }
}

static void groups_by_expert(void **state)
{
    const uint32_t chosen[] = {6, 2, 2, 0, 6, 2};
    const uint32_t want[] = {4, 1, 2, 0, 5, 3};
    uint32_t places[6], ends[8], first[9], matrix[8];
    kvf_linear_groups groups = {.first = first, .matrix = matrix};
    for (uint32_t times = 0; times < 2; times++) {
        kvf_experts_group(chosen, 6, 8, places, ends, &groups);
        assert_int_equal(groups.count, 3);
        assert_memory_equal(matrix, ((uint32_t[]){0, 2, 6}), 3 * sizeof *matrix);
        assert_memory_equal(first, ((uint32_t[]){0, 1, 4, 6}), 4 * sizeof *first);
        assert_memory_equal(places, want, sizeof want);
    }
}

/* ---- in a model ---- */

static const model_shape shape = {
    .family = "Qwen3Moe", .layers = 2, .hidden = 64, .intermediate = 48, .experts = 6};

/* Every number of the tensors with this in their names, in bf16. */
static void fill(const model_rig *r, const char *part, uint16_t number)
{
    for (size_t i = 0; i < kvf_weights_count(r->weights); i++) {
        const kvf_tensor *tensor = kvf_weights_at(r->weights, i);
        char path[1024];
        if (!strstr(tensor->name, part))
            continue;
        size_t size;
        snprintf(path, sizeof path, "%s/model.safetensors", r->directory);
        char *bytes = fixture_read(path, &size);
        uint64_t header;
        memcpy(&header, bytes, sizeof header);
        const kvf_tensor *lowest = tensor;
        for (size_t j = 0; j < kvf_weights_count(r->weights); j++) {
            const kvf_tensor *other = kvf_weights_at(r->weights, j);
            if (other->data && (uintptr_t)other->data < (uintptr_t)lowest->data)
                lowest = other; /* joined experts are in no place yet */
        }
        char *to = bytes + 8 + header + ((const char *)tensor->data - (const char *)lowest->data);
        for (uint64_t at = 0; at < tensor->bytes; at += sizeof number)
            memcpy(to + at, &number, sizeof number);
        fixture_write(r->directory, "model.safetensors", bytes, size);
        free(bytes);
    }
}

static void run(const char *directory, float *logits)
{
    uint32_t ids[PROMPT];
    kvf_cache_config cc;
    kvf_sequence *sequence;
    model_rig r = {0};
    for (uint32_t i = 0; i < PROMPT; i++)
        ids[i] = i * 37 % 200;
    model_rig_read(&r, directory, 2);
    kvf_transformer_options options = model_rig_options(&r);
    options.chunk_max = PROMPT;
    options.batch_max = 1;
    model_rig_transformer(&r, &options, &cc);
    cc.tokens_max = PROMPT + 1;
    model_rig_cache(&r, &cc);
    model_rig_must(&r, kvf_sequence_create(r.cache, &sequence), "sequence");
    model_rig_must(&r,
                   kvf_transformer_prefill(r.transformer, r.cache, sequence, ids, PROMPT, r.stream),
                   "prefill");
    model_rig_must(&r, kvf_stream_wait(r.stream), "wait");
    model_rig_must(
        &r, kvf_transformer_decode(r.transformer, r.cache, &sequence, ids, 1, true, r.stream),
        "decode");
    model_rig_must(&r, kvf_stream_wait(r.stream), "wait");
    memcpy(logits, kvf_transformer_logits(r.transformer, 0), 200 * sizeof *logits);
    model_rig_close(&r);
}

/* All experts are as likely, so the first two are chosen. The others are not numbers. */
static void others_are_not_read(void **state)
{
    float logits[2][200];
    char part[32];
    model_rig r = {0};
    model_rig_make(&r, &shape, 1);
    fill(&r, "mlp.gate.weight", 0x3c00);
    run(r.directory, logits[0]);
    for (uint32_t i = 2; i < shape.experts; i++) {
        snprintf(part, sizeof part, "experts.%u.", i);
        fill(&r, part, 0x7fc0); /* not a number */
    }
    run(r.directory, logits[1]);
    for (uint32_t i = 0; i < 200; i++)
        assert_true(isfinite(logits[0][i]));
    assert_memory_equal(logits[0], logits[1], sizeof logits[0]);
    fill(&r, "layers.1.mlp.experts.1.", 0x7fc0);
    run(r.directory, logits[1]);
    assert_true(isnan(logits[1][0]));
    model_rig_close(&r);
}

static kvf_status open_with(const char *directory, kvf_error *error)
{
    kvf_transformer *transformer;
    model_rig r = {0};
    model_rig_read(&r, directory, 1);
    kvf_transformer_options options = model_rig_options(&r);
    options.chunk_max = options.batch_max = 1;
    const kvf_status status = kvf_transformer_open(&options, &transformer, error);
    kvf_transformer_close(transformer);
    model_rig_close(&r);
    return status;
}

static void change(const char *directory, const char *was, const char *is)
{
    size_t size;
    char path[1024];
    snprintf(path, sizeof path, "%s/model.safetensors", directory);
    char *bytes = fixture_read(path, &size);
    char *at = memmem(bytes, size, was, strlen(was));
    assert_non_null(at);
    assert_int_equal(strlen(is), strlen(was));
    memcpy(at, is, strlen(is));
    fixture_write(directory, "model.safetensors", bytes, size);
    free(bytes);
}

static void says_which_expert_is_wrong(void **state)
{
    kvf_error error = {0};
    model_rig r = {0};
    model_rig_make(&r, &shape, 1);
    char was[] = "experts.5.up_proj.weight\":{\"dtype\":\"BF16\"";
    char is[] = "experts.5.up_proj.weight\":{\"dtype\":\"F16\" ";
    change(r.directory, was, is);
    fixture_expect(open_with(r.directory, &error), &error, KVF_UNSUPPORTED,
                   "tensor model.layers.0.mlp.experts.5.up_proj.weight is F16, but that of expert "
                   "0 is BF16; use a model whose experts are of one type");
    change(r.directory, is, was);
    change(r.directory, "experts.4.down_proj", "experts.9.down_proj");
    fixture_expect(open_with(r.directory, &error), &error, KVF_CORRUPT,
                   "tensor model.layers.0.mlp.experts.4.down_proj.weight is missing");
    model_rig_close(&r);
}

/* A sink that is no number is refused by the cache, and none stays open. */
static void sinks_are_numbers(void **state)
{
    kvf_error error = {0};
    kvf_cache_config cc;
    model_rig r = {0};
    model_rig_make(&r, &(model_shape){.family = "GptOss", .layers = 2, .window = 8, .experts = 4},
                   1);
    fill(&r, "layers.1.self_attn.sinks", 0x7fc0);
    char *directory = r.directory;
    r.directory = NULL;
    model_rig_close(&r);
    model_rig_read(&r, directory, 1);
    r.directory = directory;
    kvf_transformer_options options = model_rig_options(&r);
    options.chunk_max = options.batch_max = 1;
    model_rig_transformer(&r, &options, &cc);
    cc.tokens_max = 64;
    fixture_expect(kvf_transformer_cache_open(r.transformer, &cc, &r.cache, &error), &error,
                   KVF_INVALID, "sinks[0] = nan: must be a number");
    assert_null(r.cache);
    model_rig_close(&r);
}

static void a_gpu_refuses(void **state)
{
    kvf_error error = {0};
    model_rig r = {0};
    model_rig_make(&r, &shape, 1);
    fixture_expect(open_with(r.directory, &error), &error, KVF_UNSUPPORTED,
                   "num_experts is 6: experts are computed on the host only; run this model with "
                   "--device host");
    model_rig_close(&r);
    model_rig_make(&r, &(model_shape){.family = "Gemma3", .layers = 1, .window = 8}, 1);
    fixture_expect(open_with(r.directory, &error), &error, KVF_UNSUPPORTED,
                   "architectures is Gemma3ForCausalLM, which is computed on the host only; run "
                   "this model with --device host");
    model_rig_close(&r);
}

static void a_gpu_refuses_mxfp4(void **state)
{
    kvf_error error = {0};
    model_rig r = {0};
    gguf_image image = {0};
    char path[1024], *blocks = gguf_image_blocks(gguf_type_find(GGUF_MXFP4_ID), 128 * 200 / 32);
    model_rig_make(&r, &(model_shape){.layers = 1}, 1);
    gguf_image_model(&image, &r.model, r.weights, IMAGE_BF16);
    gguf_image other = {.fields = image.fields, .field_count = image.field_count};
    gguf_image_tensor(&other, "token_embd.weight", GGUF_MXFP4_ID, 2, (uint64_t[]){200, 128}, blocks,
                      128 * 200 / 32 * 17);
    gguf_image_write(&other, r.directory, "model.gguf");
    snprintf(path, sizeof path, "%s/model.gguf", r.directory);
    fixture_expect(open_with(path, &error), &error, KVF_UNSUPPORTED,
                   "tensor model.embed_tokens.weight is MXFP4, which is computed on the host only; "
                   "run this model with --device host");
    other.fields = (kvf_text){0};
    gguf_image_free(&other);
    gguf_image_free(&image);
    free(blocks);
    model_rig_close(&r);
}

int main(void)
{
    kvf_runtime_config device;
    fixture_device(&device);
    return device.device == KVF_DEVICE_HOST
               ? unit_run(chooses_the_likeliest, chooses_each_once, groups_by_expert,
                          others_are_not_read, says_which_expert_is_wrong, sinks_are_numbers)
               : unit_run(a_gpu_refuses, a_gpu_refuses_mxfp4);
}
