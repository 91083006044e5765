/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The sensitivity of heads: against plain arithmetic on the pages of a cache, quantized ones too;
 * that looking changes no bit; that threads do not either; and that there is none where all tokens
 * are attended anyway.
 */

#include "head_sensitivity.h"
#include "layer_ops.h"
#include "model_rig.h"
#include "unit.h"

#include <math.h>

enum { LAYERS = 3, HEADS = 2, GROUP = 2, DIM = 64, WIDTH = HEADS * GROUP * DIM, HIDDEN = 128 };
enum { VOCAB = 200, PROMPT = 300, STEPS = 6, PAGE = 4, SINK = 6, CELLS = LAYERS * HEADS };
enum { PAGES = (PROMPT + STEPS) / PAGE + 1, PAGE_FLOATS = PAGE * 2 * DIM };

typedef struct run {
    model_rig rig;
    kvf_head_sensitivity *sensitivity;
    kvf_sequence *sequence;
    float *pages; /* [PAGES, HEADS, PAGE, 2, DIM] */
    double expected[CELLS];
    double sensitivities[CELLS];
    float logits[STEPS][VOCAB];
} run;

static uint32_t id_of(uint32_t index)
{
    return (index * index * 7u + index * 37u + 5u) % VOCAB;
}

static bool is_on_gpu(void)
{
    const char *device = getenv("KVF_TEST_DEVICE");
    return device && strcmp(device, "cuda") == 0;
}

/* On the host in fp32, so that outputs tell small differences. */
static void run_open(run *r, uint32_t budget, uint32_t threads, kvf_pages pages)
{
    kvf_cache_config cc;
    kvf_error error = {0};
    *r = (run){0};
    model_rig_make(&r->rig, &(model_shape){.layers = LAYERS}, threads);
    if (!is_on_gpu())
        r->rig.model.dtype = KVF_FP32;
    kvf_transformer_options options = model_rig_options(&r->rig);
    options.chunk_max = 64;
    options.prompt_max = PROMPT;
    options.batch_max = 1;
    model_rig_transformer(&r->rig, &options, &cc);
    cc.tokens_max = PROMPT + STEPS;
    cc.page_size = PAGE;
    cc.sink_tokens = SINK;
    cc.local_tokens = 16;
    cc.budget_tokens = budget;
    cc.pages = pages;
    model_rig_cache(&r->rig, &cc);
    assert_int_equal(kvf_head_sensitivity_open(r->rig.runtime, &r->rig.model, r->rig.cache,
                                               r->rig.stream, &r->sensitivity, &error),
                     KVF_OK);
    r->sequence = model_rig_sequence(&r->rig);
    model_rig_must(&r->rig,
                   kvf_memory_alloc(r->rig.runtime, HEADS * PAGES * PAGE_FLOATS * sizeof(float),
                                    (void **)&r->pages),
                   "pages");
}

static void run_close(run *r)
{
    kvf_transformer_forget(r->rig.transformer);
    kvf_sequence_destroy(r->sequence);
    kvf_head_sensitivity_close(r->sensitivity);
    kvf_memory_free(r->rig.runtime, r->pages);
    model_rig_close(&r->rig);
}

/* Steps after a prompt. */
static void run_steps(run *r, kvf_attention_fn see, void *user)
{
    uint32_t ids[PROMPT];
    const model_rig *m = &r->rig;
    for (uint32_t i = 0; i < PROMPT; i++)
        ids[i] = id_of(i);
    model_rig_prefill(m, r->sequence, ids, PROMPT);
    model_rig_must(m, kvf_transformer_observe(m->transformer, see, user), "observe");
    for (uint32_t step = 0; step < STEPS; step++) {
        const uint32_t id = id_of(PROMPT + step);
        model_rig_decode(m, &r->sequence, &id, 1, r->logits[step]);
    }
    kvf_head_sensitivity_take(r->sensitivity, r->sensitivities);
}

/* ---- plain arithmetic ---- */

/* All pages as steps attend to them. */
static void read_pages(const run *r, uint32_t layer)
{
    const uint32_t length = kvf_sequence_length(r->sequence, layer);
    for (uint32_t page = 0; page * PAGE < length; page++) {
        int32_t indptr[] = {0, 1, 2}, indices[] = {(int32_t)page, (int32_t)page};
        const int32_t count = (int32_t)kvf_min_u32(PAGE, length - page * PAGE);
        int32_t last[] = {count, count};
        const kvf_page_lists lists = {
            .indptr = indptr, .indices = indices, .capacity = HEADS, .last_page_len = last};
        const kvf_decode_args args = {.layer = layer,
                                      .batch = 1,
                                      .sequences = &(kvf_sequence *){r->sequence},
                                      .out = r->pages + (size_t)page * HEADS * PAGE_FLOATS};
        model_rig_must(&r->rig, kvf_read_pages(r->rig.cache, &args, &lists, r->rig.stream), "read");
        model_rig_wait(&r->rig);
    }
}

/* One query head over the sink and the newest pages that the budget has room for. */
static void stream_head(const run *r, const kvf_attention_view *view, uint32_t query_head,
                        double out[DIM])
{
    const uint32_t budget = kvf_cache_settings(r->rig.cache)->budget_tokens;
    const uint32_t length = kvf_sequence_length(r->sequence, view->layer);
    const uint32_t pages = (length + PAGE - 1) / PAGE, newest = (budget - SINK) / PAGE;
    const float *q = (const float *)view->q + (size_t)query_head * DIM;
    double sum = 0.0;
    memset(out, 0, DIM * sizeof *out);
    for (uint32_t token = 0; token < length; token++) {
        const uint32_t page = token / PAGE;
        if (page > (SINK - 1) / PAGE && page + newest < pages)
            continue;
        const float *k = r->pages + (size_t)(page * HEADS + query_head / GROUP) * PAGE_FLOATS +
                         (size_t)(token % PAGE) * 2 * DIM;
        double logit = 0.0;
        for (uint32_t c = 0; c < DIM; c++)
            logit += (double)q[c] * (double)k[c];
        const double weight = exp(logit / sqrt(DIM));
        sum += weight;
        for (uint32_t c = 0; c < DIM; c++)
            out[c] += weight * (double)k[DIM + c];
    }
    for (uint32_t c = 0; c < DIM; c++)
        out[c] /= sum;
}

static kvf_status expect_and_see(void *user, const kvf_attention_view *view)
{
    run *r = user;
    double changed[WIDTH], size = 0.0;
    float row[WIDTH];
    read_pages(r, view->layer);
    for (uint32_t head = 0; head < HEADS * GROUP; head++) {
        stream_head(r, view, head, changed + head * DIM);
        for (uint32_t c = head * DIM; c < (head + 1) * DIM; c++)
            changed[c] = (double)((const float *)view->attended)[c] - changed[c];
    }
    for (uint32_t i = 0; i < HIDDEN; i++)
        size += (double)view->hidden[i] * (double)view->hidden[i];
    for (uint32_t output = 0; output < view->output->outputs; output++) {
        kvf_numbers_widen((const char *)view->output->weight +
                              output * kvf_linear_row_bytes(view->output),
                          view->output->dtype, WIDTH, row);
        for (uint32_t head = 0; head < HEADS; head++) {
            double lost = 0.0;
            for (uint32_t c = head * GROUP * DIM; c < (head + 1) * GROUP * DIM; c++)
                lost += (double)row[c] * changed[c];
            r->expected[view->layer * HEADS + head] += lost * lost / size / STEPS;
        }
    }
    return kvf_head_sensitivity_see(r->sensitivity, view);
}

TEST_IF(!is_on_gpu(), sensitivity_is_what_streaming_loses)
{
    static const kvf_pages forms[] = {KVF_PAGES_NATIVE, KVF_PAGES_K8V8, KVF_PAGES_K8V4};
    static run r;
    for (uint32_t form = 0; form < 3; form++) {
        run_open(&r, 64, 2, forms[form]);
        run_steps(&r, expect_and_see, &r);
        for (uint32_t i = 0; i < CELLS; i++) {
            if (!(r.expected[i] > 1e-9))
                fail_msg("cell %u: %g is no sensitivity", i, r.expected[i]);
            /* Outputs in fp32 differ by 1e-6 of their size, and o - o' is a tenth of that. */
            if (fabs(r.sensitivities[i] - r.expected[i]) > 1e-4 * r.expected[i])
                fail_msg("form %u, cell %u: %g instead of %g", form, i, r.sensitivities[i],
                         r.expected[i]);
        }
        run_close(&r);
    }
}

TEST_IF(!is_on_gpu(), looking_changes_no_bit)
{
    static run plain, seen;
    run_open(&plain, 64, 1, KVF_PAGES_NATIVE);
    run_steps(&plain, NULL, NULL);
    run_open(&seen, 64, 1, KVF_PAGES_NATIVE);
    run_steps(&seen, kvf_head_sensitivity_see, seen.sensitivity);
    assert_memory_equal(plain.logits, seen.logits, sizeof plain.logits);
    for (uint32_t i = 0; i < CELLS; i++)
        assert_true(plain.sensitivities[i] == 0.0 && seen.sensitivities[i] > 0.0);
    run_close(&plain);
    run_close(&seen);
}

TEST_IF(!is_on_gpu(), threads_change_no_bit)
{
    static run one, two;
    run_open(&one, 64, 1, KVF_PAGES_K8V4);
    run_steps(&one, kvf_head_sensitivity_see, one.sensitivity);
    run_open(&two, 64, 3, KVF_PAGES_K8V4);
    run_steps(&two, kvf_head_sensitivity_see, two.sensitivity);
    assert_memory_equal(one.logits, two.logits, sizeof one.logits);
    assert_memory_equal(one.sensitivities, two.sensitivities, sizeof one.sensitivities);
    run_close(&one);
    run_close(&two);
}

TEST_IF(!is_on_gpu(), a_full_budget_has_no_sensitivity)
{
    static run r;
    run_open(&r, PROMPT + STEPS + 2 * PAGE, 2, KVF_PAGES_NATIVE);
    run_steps(&r, kvf_head_sensitivity_see, r.sensitivity);
    for (uint32_t i = 0; i < CELLS; i++)
        if (r.sensitivities[i] > 1e-10) /* rounding in fp32, squared */
            fail_msg("cell %u: %g", i, r.sensitivities[i]);
    run_close(&r);
}

TEST_IF(is_on_gpu(), a_gpu_shows_nothing)
{
    run r;
    run_open(&r, 64, 1, KVF_PAGES_NATIVE);
    assert_int_equal(
        kvf_transformer_observe(r.rig.transformer, kvf_head_sensitivity_see, r.sensitivity),
        KVF_UNSUPPORTED);
    assert_int_equal(kvf_transformer_observe(r.rig.transformer, NULL, NULL), KVF_OK);
    run_close(&r);
}
