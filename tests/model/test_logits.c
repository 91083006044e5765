/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Logits of the runner against HF Transformers: random small models of every family, and the recall
 * model; after the prompt and after each of 64 given tokens, at full cache.
 *
 * The goldens and the ids come from make_logits_goldens.py. Two comparisons, both relative (norm of
 * the difference by norm): with HF in the model's own type, over all rows; and with HF in fp32 on
 * the same weights, row by row. The tolerances are 2e-2 in bf16 (HF's own rounding measures 1e-2
 * over all rows), 1e-4 in fp32; fp16 has three more bits than bf16, so 2.5e-3 = 2e-2 / 8.
 *
 * A row of a trained model may lie between two answers; then rounding to bf16 alone, anywhere,
 * moves it by more than 2e-2: HF's bf16 run is off by 3.0e-2 and 2.9e-2 in two rows of the recall
 * model. How far the runner is off there depends on what it rounds. It keeps activations in fp32,
 * and rounds keys and values; products that multiply bf16 in hardware, on a CPU that can and on a
 * GPU, round the activations that enter them too. HF rounds all of that and every other result,
 * with the same unit roundoff 2^-8. So, to first order, the runner's deviation is a sum over a
 * subset of HF's independent terms, and its distribution over rows lies below HF's. Which rows are
 * the worst is chance, and the order of a sum in a library decides it. Therefore rows are compared
 * by rank: the k-th worst may be off by the tolerance or by HF's k-th worst, whichever is more. At
 * most two rows of the recall model gain by that, and nothing does in fp32 or where weights are
 * widened.
 */

#include "model_fixture.h"
#include "model_rig.h"
#include "random_model.h"
#include "sweep.h"
#include "unit.h"

#include <math.h>

#define STEPS 64u
#define CHUNK 48u /* not a divisor of the prompt, nor a multiple of the page */

typedef struct golden {
    const char *name;
    const char *test; /* NULL = name */
    CMUnitTestFunction run;
    uint32_t prompt;
    uint32_t stride; /* every stride-th token of the vocabulary is in the file */
    uint32_t threads;
    kvf_linear_bf16 bf16;
    const char *said, *instead; /* of config.json, once the weights are written; NULL = as it is */
    bool has_head_only;         /* the embedding is there by the name of the head */
    bool on_host;               /* and nowhere else */
} golden;

typedef struct rig {
    model_rig model;
    kvf_sequence *sequence;
} rig;

static void rig_open(rig *r, const char *from, const golden *g)
{
    kvf_cache_config cc;
    model_rig_read(&r->model, from, g->threads);
    kvf_transformer_options options = model_rig_options(&r->model);
    options.chunk_max = CHUNK;
    options.batch_max = 1;
    options.bf16 = g->bf16;
    model_rig_transformer(&r->model, &options, &cc);
    cc.tokens_max = g->prompt + STEPS;
    cc.select = KVF_SELECT_FULL;
    model_rig_cache(&r->model, &cc);
    r->sequence = model_rig_sequence(&r->model);
}

static void feed_prompt(rig *r, const uint32_t *ids, uint32_t count)
{
    for (uint32_t done = 0; done < count; done += CHUNK)
        model_rig_prefill(&r->model, r->sequence, ids + done,
                          count - done < CHUNK ? count - done : CHUNK);
}

/* Squared norms of a difference and of what was wanted. */
typedef struct deviation {
    double difference, norm;
} deviation;

static deviation row_deviation(const float *got, const float *want, uint32_t count, uint32_t stride)
{
    deviation sum = {0};
    for (uint32_t i = 0; i < count; i++) {
        double d = (double)got[(size_t)i * stride] - (double)want[i];
        sum.difference += d * d;
        sum.norm += (double)want[i] * (double)want[i];
    }
    return sum;
}

static double relative(deviation d)
{
    return sqrt(d.difference / d.norm);
}

/* NaN first, then the worst. */
static int worst_first(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return isnan(y) - isnan(x) + (y > x) - (y < x);
}

static double tolerance(kvf_dtype dtype)
{
    return dtype == KVF_FP32 ? 1e-4 : dtype == KVF_FP16 ? 2.5e-3 : 2e-2;
}

static float *read_golden(const golden *g, const char *suffix, uint32_t columns)
{
    char path[1024];
    size_t bytes;
    snprintf(path, sizeof path, "%s/logits/%s%s", KVF_GOLDENS, g->name, suffix);
    float *rows = (float *)(void *)fixture_read(path, &bytes);
    assert_int_equal(bytes, (STEPS + 1) * columns * sizeof(float));
    return rows;
}

/* Rows by rank: see the head of this file. */
static void judge_rows(kvf_dtype dtype, bool rounds, double *rows, double *rows_of_hf,
                       uint32_t steps)
{
    qsort(rows, steps + 1, sizeof *rows, worst_first);
    qsort(rows_of_hf, steps + 1, sizeof *rows_of_hf, worst_first);
    uint32_t failed = 0;
    for (uint32_t i = 0; i <= steps; i++) {
        const bool as_hf = rounds && rows_of_hf[i] > tolerance(dtype);
        const double most = as_hf ? rows_of_hf[i] : tolerance(dtype);
        if (i == 0 || as_hf || !(rows[i] <= most))
            print_message("  row of rank %u: relative error %.1e (at most %.1e)\n", i, rows[i],
                          most);
        failed += !(rows[i] <= most);
    }
    assert_int_equal(failed, 0);
}

/* All that are in the goldens; the first ones on the emulated device, where each takes long. */
static uint32_t steps_here(void)
{
    const char *text = getenv("KVF_TEST_STEPS");
    const uint32_t steps = text ? (uint32_t)strtoul(text, NULL, 10) : STEPS;
    return steps < STEPS ? steps : STEPS;
}

static void compare(const char *from, const golden *g, const uint32_t *ids)
{
    const uint32_t steps = steps_here();
    rig r = {0};
    rig_open(&r, from, g);
    uint32_t columns = (r.model.model.vocab_size + g->stride - 1) / g->stride;
    float *own = read_golden(g, ".f32", columns), *exact = read_golden(g, ".exact.f32", columns);
    float *logits = malloc(r.model.model.vocab_size * sizeof *logits);
    assert_non_null(logits);
    feed_prompt(&r, ids, g->prompt - 1);
    deviation whole = {0};
    double rows[STEPS + 1], rows_of_hf[STEPS + 1];
    for (uint32_t i = 0; i <= steps; i++) {
        model_rig_decode(&r.model, &r.sequence, ids + g->prompt - 1 + i, 1, logits);
        const float *own_row = own + i * columns, *exact_row = exact + i * columns;
        deviation row = row_deviation(logits, own_row, columns, g->stride);
        whole.difference += row.difference;
        whole.norm += row.norm;
        rows[i] = relative(row_deviation(logits, exact_row, columns, g->stride));
        rows_of_hf[i] = relative(row_deviation(own_row, exact_row, columns, 1));
    }
    assert_int_equal(kvf_transformer_check(r.model.transformer, NULL), KVF_OK);
    const kvf_dtype dtype = r.model.model.dtype;
    if (g->said) /* so that the tolerance is that of the weights */
        assert_int_equal(dtype, KVF_FP32);
    print_message("%-12s %u threads: relative error %.1e (at most %.1e)\n", g->name, g->threads,
                  relative(whole), tolerance(dtype));
    const bool rounds =
        g->bf16 != KVF_LINEAR_BF16_OFF || kvf_runtime_device(r.model.runtime) == KVF_DEVICE_CUDA;
    judge_rows(dtype, rounds, rows, rows_of_hf, steps);
    sweep_tell(steps + 1, STEPS + 1);
    assert_true(relative(whole) <= tolerance(dtype));
    free(logits);
    free(own);
    free(exact);
    model_rig_close(&r.model);
}

/* @p text with @p instead where it has @p said. */
static void write_config(const char *directory, const char *text, const char *said,
                         const char *instead)
{
    char changed[4096];
    const char *at = strstr(text, said);
    assert_non_null(at);
    snprintf(changed, sizeof changed, "%.*s%s%s", (int)(at - text), text, instead,
             at + strlen(said));
    fixture_write_text(directory, "config.json", changed);
}

static void rename_embedding(const char *directory)
{
    static const char was[] = "\"model.embed_tokens.weight\"", is[] = "\"lm_head.weight\"";
    char path[1024];
    size_t size;
    snprintf(path, sizeof path, "%s/model.safetensors", directory);
    char *bytes = fixture_read(path, &size);
    char *at = memmem(bytes, size, was, sizeof was - 1);
    assert_non_null(at);
    memset(at, ' ', sizeof was - 1);
    memcpy(at, is, sizeof is - 1);
    fixture_write(directory, "model.safetensors", bytes, size);
    free(bytes);
}

static void compare_random(void **state)
{
    const golden *g = *state;
    char path[1024];
    snprintf(path, sizeof path, "%s/logits/%s/config.json", KVF_GOLDENS, g->name);
    size_t bytes;
    char *config = fixture_read(path, &bytes);
    char *directory = fixture_directory_create();
    assert_true(random_model_write(directory, config));
    if (g->has_head_only)
        rename_embedding(directory);
    if (g->said)
        write_config(directory, config, g->said, g->instead);
    kvf_model_config model;
    kvf_error error;
    fixture_must(kvf_model_config_read(directory, &model, &error), &error);
    uint32_t ids[256];
    random_stream stream = random_stream_of("ids");
    for (uint32_t i = 0; i < g->prompt + STEPS; i++)
        ids[i] = (uint32_t)(random_stream_next(&stream) % model.vocab_size);
    compare(directory, g, ids);
    fixture_directory_remove(directory);
    free(config);
}

static void compare_recall(void **state)
{
    const golden *g = *state;
    uint32_t ids[512];
    size_t bytes;
    char *text = fixture_read(KVF_GOLDENS "/logits/recall.ids", &bytes), *next = text;
    for (uint32_t i = 0; i < g->prompt + STEPS; i++)
        ids[i] = (uint32_t)strtoul(next, &next, 10);
    free(text);
    compare(KVF_RECALL_MODEL, g, ids);
}

#define RANDOM(model, ...)                                                                         \
    {                                                                                              \
        .name = (model), .run = compare_random, .prompt = 100, .stride = 5, .threads = __VA_ARGS__ \
    }
#define RECALL(...)                                                                                \
    {                                                                                              \
        .name = "recall", .run = compare_recall, .prompt = 300, .stride = 16,                      \
        .threads = __VA_ARGS__                                                                     \
    }

int main(void)
{
    static golden goldens[] = {
        RANDOM("llama-bf16", 1),
        RANDOM("llama-fp32", 2),
        RANDOM("llama-fp16", 1),
        RANDOM("mistral-bf16", 2),
        RANDOM("mistral-fp32", 1),
        RANDOM("qwen2-bf16", 1),
        RANDOM("qwen2-fp32", 3),
        RANDOM("qwen3-bf16", 2),
        RANDOM("qwen3-fp32", 1),
        RANDOM("mistral-windows", 2),
        RANDOM("ministral-windows", 1),
        /* Models by their weights: Transformers loads these as the models that they were. */
        RANDOM("llama-fp32", 1, .test = "no type", .said = "\"torch_dtype\": \"float32\",",
               .instead = ""),
        RANDOM("mistral-fp32", 1, .test = "a head that is said to be tied",
               .said = "\"tie_word_embeddings\": false",
               .instead = "\"tie_word_embeddings\": true"),
        RANDOM("llama-fp32", 2, .test = "a head and no embedding", .has_head_only = true),
        RECALL(2),
        /* A GPU never widens weights. */
        RANDOM("qwen2-bf16", 2, .test = "qwen2-bf16, widened to fp32", .bf16 = KVF_LINEAR_BF16_OFF,
               .on_host = true),
        RECALL(2, .test = "recall, widened to fp32", .bf16 = KVF_LINEAR_BF16_OFF, .on_host = true),
    };
    enum { GOLDENS = sizeof goldens / sizeof goldens[0] };
    kvf_runtime_config device;
    fixture_device(&device);
    struct CMUnitTest tests[GOLDENS] = {{0}};
    size_t count = 0;
    for (golden *g = goldens; g < goldens + GOLDENS; g++)
        if (!g->on_host || device.device == KVF_DEVICE_HOST)
            tests[count++] = (struct CMUnitTest){
                .name = g->test ? g->test : g->name, .test_func = g->run, .initial_state = g};
    return _cmocka_run_group_tests("logits", tests, count, NULL, NULL);
}
