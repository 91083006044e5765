/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Drawing on a GPU against the sampler of the host: the same ids for every filter and every kind of
 * logits, over steps on their way at once, with positions that move on and rows that know nothing
 * of each other.
 */

#include <math.h>

#include "common/random.h"
#include "draw_queue.h"
#include "model_fixture.h"
#include "row_ops.h"
#include "sampling_cases.h"
#include "unit.h"

#define ROWS 4u

typedef struct rig {
    kvf_runtime *runtime;
    kvf_stream *stream;
    uint32_t vocab;
    kvf_draw_queue *queue;
    kvf_sampler *sampler;
    float *logits; /* [ROWS, vocab] */
    float *device;
    void *host, *alias; /* pinned, of the same shape */
    uint64_t random;
} rig;

static void must(const rig *r, kvf_status status)
{
    if (status != KVF_OK)
        fail_msg("%s: %s", kvf_status_name(status), kvf_runtime_error(r->runtime)->text);
}

static void rig_open(rig *r, uint32_t vocab)
{
    kvf_error error;
    kvf_runtime_config rc;
    void *device;
    const size_t bytes = (size_t)ROWS * vocab * sizeof(float);
    *r = (rig){.vocab = vocab, .random = 17};
    kvf_runtime_config_init(&rc);
    rc.device = KVF_DEVICE_CUDA;
    if (kvf_runtime_open(&rc, &r->runtime, &error) != KVF_OK) {
        print_message("skipped: %s\n", error.text);
        exit(77);
    }
    assert_int_equal(kvf_row_use_device(0), 0);
    assert_int_equal(kvf_row_load_kernels(), 0);
    must(r, kvf_stream_create(r->runtime, &r->stream));
    must(r, kvf_draw_queue_open(r->runtime, ROWS, vocab, &r->queue, &error));
    must(r, kvf_sampler_create(vocab, ROWS, &r->sampler, &error));
    must(r, kvf_memory_alloc(r->runtime, bytes, &device));
    must(r, kvf_pinned_alloc(r->runtime, bytes, &r->host, &r->alias));
    r->device = device;
    r->logits = r->host;
}

static void rig_close(rig *r)
{
    kvf_draw_queue_close(r->queue);
    kvf_sampler_destroy(r->sampler);
    kvf_memory_free(r->runtime, r->device);
    kvf_pinned_free(r->runtime, r->host);
    kvf_stream_destroy(r->stream);
    kvf_runtime_close(r->runtime);
}

/* Three steps with the same logits, enqueued before any is taken. Row i has case first + i. */
static void check(rig *r, uint32_t first, uint32_t kind)
{
    static const uint32_t rows[ROWS] = {2, 0, 3, 1};
    uint32_t ids[ROWS], positions[ROWS], got[ROWS];
    kvf_error error;
    for (uint32_t i = 0; i < ROWS; i++) {
        const kvf_sampling_config config = sampling_case(first + i, &r->random);
        ids[i] = kvf_random_below(&r->random, r->vocab);
        positions[i] = 100 * i;
        must(r, kvf_sampler_begin(r->sampler, rows[i], &config, &error));
        kvf_sampler_see(r->sampler, rows[i], &ids[i], 1);
        sampling_logits(r->logits + (size_t)i * r->vocab, r->vocab, kind, &r->random);
    }
    const kvf_draw_step step = {
        .ids = ids, .batch = ROWS, .sampler = r->sampler, .sampler_rows = rows};
    must(r, kvf_memory_copy(r->stream, r->device, r->alias,
                            (size_t)ROWS * r->vocab * sizeof *r->logits));
    must(r, kvf_draw_queue_feed(r->queue, &step, positions, r->stream));
    for (uint32_t n = 0; n < KVF_DRAWS_MAX; n++) {
        must(r, kvf_draw_queue_draw(r->queue, ROWS, r->device, r->stream));
        must(r, kvf_draw_queue_mark(r->queue, r->stream));
    }
    for (uint32_t n = 0; n < KVF_DRAWS_MAX; n++) {
        must(r, kvf_draw_queue_take(r->queue, got));
        for (uint32_t i = 0; i < ROWS; i++) {
            const float *logits = r->logits + (size_t)i * r->vocab;
            const uint32_t want = kvf_sampler_next(r->sampler, rows[i], logits);
            if (got[i] != want)
                fail_msg("case %u, kind %u, step %u: token %u, the host draws %u", first + i, kind,
                         n, got[i], want);
        }
    }
    /* The next step's row is where the last one left it. */
    const size_t bytes = ROWS * sizeof *got;
    uint32_t *words = r->host;
    must(r, kvf_memory_copy(r->stream, r->alias, kvf_draw_queue_ids(r->queue), bytes));
    must(r, kvf_memory_copy(r->stream, (char *)r->alias + bytes, kvf_draw_queue_positions(r->queue),
                            bytes));
    must(r, kvf_stream_wait(r->stream));
    for (uint32_t i = 0; i < ROWS; i++) {
        assert_int_equal(words[i], got[i] == KVF_SAMPLER_NONE ? 0 : got[i]);
        assert_int_equal(words[ROWS + i], 100 * i + KVF_DRAWS_MAX);
    }
}

static void every_filter_draws_what_the_host_draws(void **state)
{
    rig r;
    rig_open(&r, 300);
    /* Steps of 4 and kinds of 5: every case meets some kind, and neighbours share a launch. */
    for (uint32_t n = 0; n < SAMPLING_CASES; n += ROWS)
        check(&r, n, n / ROWS % SAMPLING_KINDS);
    rig_close(&r);
}

/* More tokens of one likelihood than a block can put in order at once. */
static void many_equal_tokens_are_told_apart(void **state)
{
    rig r;
    rig_open(&r, 5003);
    for (uint32_t kind = 0; kind < SAMPLING_KINDS; kind++) {
        check(&r, 1, kind);
        check(&r, 11, kind);
        check(&r, 511, kind);
    }
    rig_close(&r);
}

static void no_finite_logit_is_no_token(void **state)
{
    rig r;
    uint32_t ids[ROWS] = {0}, got[ROWS];
    const uint32_t rows[ROWS] = {0, 1, 2, 3};
    rig_open(&r, 40);
    for (uint32_t i = 0; i < ROWS * r.vocab; i++)
        r.logits[i] = i % 2 ? NAN : -INFINITY;
    r.logits[3 * r.vocab + 7] = -1e30f;
    const kvf_draw_step step = {.ids = ids, .batch = 4, .sampler = r.sampler, .sampler_rows = rows};
    must(&r, kvf_memory_copy(r.stream, r.device, r.alias, ROWS * r.vocab * sizeof *r.logits));
    must(&r, kvf_draw_queue_feed(r.queue, &step, ids, r.stream));
    must(&r, kvf_draw_queue_draw(r.queue, ROWS, r.device, r.stream));
    must(&r, kvf_draw_queue_mark(r.queue, r.stream));
    must(&r, kvf_draw_queue_take(r.queue, got));
    for (uint32_t i = 0; i < 3; i++)
        assert_int_equal(got[i], KVF_SAMPLER_NONE);
    assert_int_equal(got[3], 7);
    must(&r, kvf_stream_wait(r.stream));
    rig_close(&r);
}

int main(void)
{
    return unit_run(every_filter_draws_what_the_host_draws, many_equal_tokens_are_told_apart,
                    no_finite_logit_is_no_token);
}
