/* SPDX-License-Identifier: Apache-2.0 */

/* See model_rig.h. */

#include "model_rig.h"
#include "unit.h"

#include "model_fixture.h"
#include "random_model.h"

#include <math.h>

static uint32_t or_else(uint32_t value, uint32_t otherwise)
{
    return value ? value : otherwise;
}

void model_shape_text(const model_shape *s, char text[MODEL_TEXT_BYTES])
{
    char window[64] = "";
    if (s->window)
        snprintf(window, sizeof window, " \"sliding_window\": %u,", s->window);
    const int bytes = snprintf(
        text, MODEL_TEXT_BYTES,
        "{\"architectures\": [\"%sForCausalLM\"], \"hidden_size\": %u,%s"
        " \"intermediate_size\": %u, \"num_hidden_layers\": %u,"
        " \"num_attention_heads\": %u, \"num_key_value_heads\": %u, \"head_dim\": %u,"
        " \"vocab_size\": %u, \"hidden_act\": \"silu\","
        " \"max_position_embeddings\": 512, \"rope_theta\": 10000.0,"
        " \"rms_norm_eps\": 1e-6, \"tie_word_embeddings\": %s,"
        " \"torch_dtype\": \"bfloat16\"}",
        s->family ? s->family : "Qwen3", or_else(s->hidden, 128), window,
        or_else(s->intermediate, 192), s->layers, or_else(s->heads, 4), or_else(s->kv_heads, 2),
        or_else(s->head_dim, 64), or_else(s->vocab, 200), s->is_untied ? "false" : "true");
    assert_in_range(bytes, 1, MODEL_TEXT_BYTES - 1);
}

static void expect(kvf_status status, const kvf_error *error, const char *what)
{
    if (status != KVF_OK)
        fail_msg("%s: %s %s", what, kvf_status_name(status), error->text);
}

void model_rig_must(const model_rig *r, kvf_status status, const char *what)
{
    expect(status, kvf_runtime_error(r->runtime), what);
}

void model_rig_read(model_rig *r, const char *from, uint32_t threads)
{
    kvf_error error = {0};
    kvf_runtime_config rc;
    *r = (model_rig){0};
    kvf_runtime_config_init(&rc);
    fixture_device(&rc);
    rc.threads = threads;
    rc.allow_unpinned = 1;
    expect(kvf_runtime_open(&rc, &r->runtime, &error), &error, "kvf_runtime_open");
    model_rig_must(r, kvf_stream_create(r->runtime, &r->stream), "kvf_stream_create");
    expect(kvf_weights_open(from, &r->weights, &error), &error, from);
    expect(kvf_model_config_read(from, &r->model, &error), &error, from);
    kvf_model_config_fit(&r->model, r->weights);
}

void model_rig_make(model_rig *r, const model_shape *shape, uint32_t threads)
{
    char text[MODEL_TEXT_BYTES], *directory = fixture_directory_create();
    model_shape_text(shape, text);
    assert_true(random_model_write(directory, text));
    model_rig_read(r, directory, threads);
    r->directory = directory;
}

kvf_transformer_options model_rig_options(const model_rig *r)
{
    return (kvf_transformer_options){
        .runtime = r->runtime, .model = &r->model, .weights = r->weights};
}

void model_rig_transformer(model_rig *r, const kvf_transformer_options *options,
                           kvf_cache_config *config)
{
    kvf_error error = {0};
    expect(kvf_transformer_open(options, &r->transformer, &error), &error, "kvf_transformer_open");
    kvf_cache_config_init(config);
    kvf_transformer_geometry(options, config);
}

void model_rig_cache(model_rig *r, const kvf_cache_config *config)
{
    kvf_error error = {0};
    expect(kvf_transformer_cache_open(r->transformer, config, &r->cache, &error), &error,
           "kvf_transformer_cache_open");
}

void model_rig_close(model_rig *r)
{
    model_rig_wait(r);
    kvf_transformer_close(r->transformer);
    kvf_cache_close(r->cache);
    kvf_weights_close(r->weights);
    kvf_stream_destroy(r->stream);
    kvf_runtime_close(r->runtime);
    if (r->directory)
        fixture_directory_remove(r->directory);
}

kvf_sequence *model_rig_sequence(const model_rig *r)
{
    kvf_sequence *sequence = NULL;
    model_rig_must(r, kvf_sequence_create(r->cache, &sequence), "kvf_sequence_create");
    return sequence;
}

void model_rig_wait(const model_rig *r)
{
    model_rig_must(r, kvf_stream_wait(r->stream), "kvf_stream_wait");
}

void model_rig_prefill(const model_rig *r, kvf_sequence *sequence, const uint32_t *ids,
                       uint32_t count)
{
    model_rig_must(
        r, kvf_transformer_prefill(r->transformer, r->cache, sequence, ids, count, r->stream),
        "kvf_transformer_prefill");
    model_rig_wait(r);
}

void model_rig_decode(const model_rig *r, kvf_sequence *const *sequences, const uint32_t *ids,
                      uint32_t batch, float *logits)
{
    const uint32_t vocab = r->model.vocab_size;
    model_rig_must(r,
                   kvf_transformer_decode(r->transformer, r->cache, sequences, ids, batch,
                                          logits != NULL, r->stream),
                   "kvf_transformer_decode");
    model_rig_wait(r);
    for (uint32_t i = 0; logits && i < batch; i++)
        memcpy(logits + (size_t)i * vocab, kvf_transformer_logits(r->transformer, i),
               vocab * sizeof *logits);
}

double model_rig_distance(const float *got, const float *want, uint32_t count)
{
    double difference = 0.0, norm = 0.0;
    for (uint32_t i = 0; i < count; i++) {
        const double d = (double)got[i] - (double)want[i];
        difference += d * d;
        norm += (double)want[i] * (double)want[i];
    }
    return sqrt(difference / norm);
}
