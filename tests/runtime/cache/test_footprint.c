/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The footprint meter: the paper's example, and random histories against a count that goes through
 * every step and every entry.
 *
 * Looks inside, because evictions are calls of the library to itself. Every check is exact: the
 * meter adds integers.
 */

#include "harness.h"

#include "cache.h"
#include "retain.h"

#define PAGE   8u
#define LOCAL  16u
#define SINK   4u
#define HEADS  2u
#define LAYERS 2u
#define TOKENS 400u

typedef struct rig {
    test_world w;
    test_tokens t;
    float *out;
    void *work; /* of kvf_sequence_keep */
} rig;

static kvf_cache_config config_of(uint32_t layers)
{
    kvf_cache_config cc = test_config_small();
    cc.layers = layers;
    cc.sequences_max = 4;
    cc.tokens_max = TOKENS;
    return cc;
}

static void rig_open(rig *r, const kvf_cache_config *cc)
{
    *r = (rig){0};
    test_world_open(&r->w, NULL, cc);
    test_tokens_make(&r->t, cc, &(test_tokens_spec){.count = TOKENS, .seed = 11, .sharpness = 1});
    r->out = test_alloc((size_t)cc->query_heads * cc->head_dim * sizeof *r->out);
    test_ok(&r->w, kvf_memory_alloc(r->w.runtime, kvf_keep_work_bytes(r->w.cache), &r->work));
}

static void rig_close(rig *r)
{
    test_wait(&r->w);
    kvf_memory_free(r->w.runtime, r->work);
    test_close(&r->w, &r->t);
    test_release(r->out);
}

/* `positions` NULL = contiguous. The values of tokens do not matter here. */
static void append(rig *r, kvf_sequence *s, uint32_t layer, uint32_t count,
                   const uint32_t *positions)
{
    const kvf_prefill_args a = {.sequence = s,
                                .layer = layer,
                                .tokens = count,
                                .k = test_k(&r->t, layer, 0),
                                .v = test_v(&r->t, layer, 0),
                                .positions = positions};
    test_ok(&r->w, kvf_prefill(r->w.cache, &a, r->w.stream));
}

static void decode(rig *r, kvf_sequence *s, uint32_t layer)
{
    test_decode(&r->w, s, &r->t, layer, 0, r->out, NULL);
}

/* The first `sink` and the newest `recent` of a layer. */
static void keep_ends(rig *r, kvf_sequence *s, uint32_t layer, uint32_t sink, uint32_t recent)
{
    uint32_t ids[HEADS * TOKENS];
    const uint32_t length = kvf_sequence_length(s, layer), count = sink + recent;
    if (length <= count)
        return;
    for (uint32_t h = 0; h < HEADS; h++)
        for (uint32_t i = 0; i < count; i++)
            ids[h * count + i] = i < sink ? i : length - count + i;
    test_ok(&r->w, kvf_sequence_keep(r->w.cache, s, layer, ids, count, r->work, r->w.stream));
    assert_int_equal(kvf_sequence_length(s, layer), count);
}

static kvf_footprint read_meter(rig *r)
{
    kvf_footprint f;
    kvf_cache_footprint(r->w.cache, &f);
    assert_true(f.device_entry_steps <= f.entry_steps);
    return f;
}

static uint64_t sum_to(uint64_t n)
{
    return n * (n + 1) / 2;
}

/* ---- closed forms ---- */

TEST(test_full_is_one)
{
    rig r;
    const kvf_cache_config cc = config_of(LAYERS);
    rig_open(&r, &cc);
    kvf_sequence *s = test_sequence(&r.w);
    const kvf_footprint none = read_meter(&r);
    assert_true(none.footprint == 0.0 && none.steps == 0 && none.peak == 0.0);
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        for (uint32_t i = 0; i < 3; i++)
            append(&r, s, layer, 1 + 40 * i, NULL);
    for (uint32_t i = 0; i < 20; i++)
        for (uint32_t layer = 0; layer < LAYERS; layer++)
            decode(&r, s, layer);
    const uint64_t n = 1 + 41 + 81 + 20;
    kvf_footprint f = read_meter(&r);
    assert_true(f.footprint == 1.0 && f.peak == 1.0);
    assert_true(f.steps == n);
    assert_true(f.entry_steps == sum_to(n) * LAYERS * HEADS);
    assert_true(f.full_entries == n * LAYERS * HEADS);
    assert_true(f.device > 0.0 && f.device < 1.0 && f.device_peak < 1.0);
    assert_true(f.device + f.host > 1.0 - 1e-12 && f.device + f.host < 1.0 + 1e-12);
    kvf_sequence_destroy(s); /* the sums stay */
    assert_true(read_meter(&r).entry_steps == f.entry_steps);
    assert_true(read_meter(&r).footprint == 1.0);
    test_wait(&r.w); /* steps write the counters */
    kvf_cache_stats_reset(r.w.cache);
    assert_true(read_meter(&r).full_entry_steps == 0);
    rig_close(&r);
}

/* PruLong's Figure 1 has 8 steps, 36 entries of full attention, and a footprint of 26/36. Its
 * picture is not to be had as text; of the patterns that the definitions allow this is the one of
 * a streaming head that holds 4 entries: sink 1, window 3, a query's own included. */
TEST(test_figure_of_the_paper)
{
    rig r;
    const kvf_cache_config cc = config_of(1);
    rig_open(&r, &cc);
    kvf_sequence *s = test_sequence(&r.w);
    for (uint32_t i = 0; i < 8; i++) {
        keep_ends(&r, s, 0, 1, 2);
        append(&r, s, 0, 1, &i);
    }
    const kvf_footprint f = read_meter(&r);
    assert_true(f.entry_steps == 26 * HEADS && f.full_entry_steps == 36 * HEADS);
    assert_true(f.footprint == 26.0 / 36.0);
    assert_true(f.peak == 4.0 / 8.0);
    rig_close(&r);
}

/* ---- the same, entry by entry ---- */

typedef struct naive_layer {
    uint32_t length, seen, steps;
    uint64_t held_max, device_max;
} naive_layer;

typedef struct naive_sequence {
    kvf_sequence *s;
    uint64_t first, again;
    naive_layer layers[LAYERS];
} naive_sequence;

typedef struct naive {
    const kvf_cache *cache;
    uint32_t paged; /* layers that have pages */
    naive_sequence sequences[4];
    uint64_t entry_steps, device_entry_steps;
    kvf_footprint ended;
} naive;

static uint64_t naive_device(const naive *m, const naive_layer *layer, uint32_t length)
{
    uint32_t sealed = 0, more = SINK;
    while (length >= sealed + PAGE + LOCAL)
        sealed += PAGE;
    if (layer->steps) {
        more += kvf_cache_memory(m->cache)->static_tokens;
        if (kvf_cache_settings(m->cache)->transfer != KVF_TRANSFER_DIRECT)
            more += kvf_cache_memory(m->cache)->slots * PAGE /
                    (kvf_cache_settings(m->cache)->sequences_max * m->paged);
    }
    return length - sealed + (sealed < more ? sealed : more);
}

/* Step by step; a token comes at its position, and every other step passes without one. */
static void naive_append(naive *m, naive_layer *layer, uint32_t count, const uint32_t *positions)
{
    uint32_t i = 0;
    if (positions[0] < layer->seen)
        layer->seen = positions[0];
    for (uint32_t step = layer->seen; step <= positions[count - 1]; step++) {
        if (positions[i] == step) {
            i++;
            layer->length++;
            const uint64_t device = naive_device(m, layer, layer->length);
            if (layer->length > layer->held_max)
                layer->held_max = layer->length;
            if (device > layer->device_max)
                layer->device_max = device;
        }
        m->entry_steps += HEADS * layer->length;
        m->device_entry_steps += HEADS * naive_device(m, layer, layer->length);
    }
    layer->seen = positions[count - 1] + 1;
}

static uint64_t naive_steps(const naive_sequence *s)
{
    uint32_t seen = 0;
    for (uint32_t i = 0; i < LAYERS; i++)
        seen = s->layers[i].seen > seen ? s->layers[i].seen : seen;
    return s->again + seen;
}

static void naive_add(const naive_sequence *s, kvf_footprint *f)
{
    const uint64_t steps = naive_steps(s);
    if (steps <= s->first)
        return;
    for (uint64_t step = s->first; step < steps; step++) {
        f->steps++;
        f->full_entry_steps += (step + 1) * LAYERS * HEADS;
    }
    f->full_entries += steps * LAYERS * HEADS;
    for (uint32_t i = 0; i < LAYERS; i++) {
        f->peak_entries += HEADS * s->layers[i].held_max;
        f->device_peak_entries += HEADS * s->layers[i].device_max;
    }
}

static void naive_compare(rig *r, const naive *m)
{
    kvf_footprint wanted = m->ended;
    const kvf_footprint got = read_meter(r);
    for (uint32_t i = 0; i < 4; i++)
        if (m->sequences[i].s)
            naive_add(&m->sequences[i], &wanted);
    assert_true(got.steps == wanted.steps);
    assert_true(got.full_entry_steps == wanted.full_entry_steps);
    assert_true(got.full_entries == wanted.full_entries);
    assert_true(got.peak_entries == wanted.peak_entries);
    assert_true(got.device_peak_entries == wanted.device_peak_entries);
    assert_true(got.entry_steps == m->entry_steps);
    assert_true(got.device_entry_steps == m->device_entry_steps);
}

static void naive_forget_peaks(naive_sequence *s)
{
    for (uint32_t i = 0; i < LAYERS; i++)
        s->layers[i].held_max = s->layers[i].device_max = 0;
}

static void random_append(rig *r, naive *m, test_random *random, naive_sequence *s)
{
    uint32_t positions[64];
    const uint32_t layer = test_random_below(random, LAYERS);
    const uint32_t count = 1 + test_random_below(random, 64);
    const uint32_t gaps = test_random_below(random, 2) * test_random_below(random, 4);
    naive_layer *state = &s->layers[layer];
    uint32_t next = state->seen;
    for (uint32_t i = 0; i < count; i++, next++)
        positions[i] = next += gaps ? test_random_below(random, gaps + 1) : 0;
    if (state->length + count > TOKENS)
        return;
    append(r, s->s, layer, count, positions);
    naive_append(m, state, count, positions);
}

static void random_decode(rig *r, naive *m, test_random *random, naive_sequence *s)
{
    const uint32_t layer = test_random_below(random, LAYERS);
    naive_layer *state = &s->layers[layer];
    if (state->length == 0 || state->length == TOKENS)
        return;
    const uint32_t position = kvf_sequence_position(s->s, layer, state->length - 1) + 1;
    decode(r, s->s, layer);
    state->steps++;
    naive_append(m, state, 1, &position);
}

/* The newest token stays, so that the next position of a decode step is the next step. */
static void random_keep(rig *r, test_random *random, naive_sequence *s)
{
    const uint32_t layer = test_random_below(random, LAYERS);
    naive_layer *state = &s->layers[layer];
    if (state->length < 2)
        return;
    const uint32_t count = 1 + test_random_below(random, state->length);
    const uint32_t recent = 1 + test_random_below(random, count);
    keep_ends(r, s->s, layer, count - recent, recent);
    state->length = count;
}

static void random_life(rig *r, naive *m, test_random *random, naive_sequence *s)
{
    naive_sequence *child = &m->sequences[test_random_below(random, 4)];
    if (!s->s) {
        *s = (naive_sequence){.s = test_sequence(&r->w)};
    } else if (!child->s) {
        *child = *s;
        test_ok(&r->w, kvf_sequence_fork(r->w.cache, s->s, r->w.stream, &child->s));
        child->first = naive_steps(s);
        naive_forget_peaks(child);
    } else {
        naive_add(s, &m->ended);
        kvf_sequence_destroy(s->s);
        s->s = NULL;
    }
}

static void random_restart(rig *r, test_random *random, naive_sequence *s)
{
    const uint64_t steps = naive_steps(s);
    if (test_random_below(random, 4) || steps == 0)
        return;
    const uint32_t again = 1 + test_random_below(random, (uint32_t)steps);
    kvf_footprint_restart(r->w.cache, s->s, again);
    test_ok(&r->w, kvf_sequence_clear(r->w.cache, s->s));
    s->again = steps - again;
    for (uint32_t i = 0; i < LAYERS; i++)
        s->layers[i].length = s->layers[i].seen = s->layers[i].steps = 0;
}

static void random_reset(rig *r, naive *m)
{
    test_ok(&r->w, kvf_stream_wait(r->w.stream)); /* steps write the counters */
    kvf_cache_stats_reset(r->w.cache);
    m->entry_steps = m->device_entry_steps = 0;
    m->ended = (kvf_footprint){0};
    for (uint32_t i = 0; i < 4; i++) {
        m->sequences[i].first = naive_steps(&m->sequences[i]);
        naive_forget_peaks(&m->sequences[i]);
    }
}

static void random_call(rig *r, naive *m, test_random *random)
{
    naive_sequence *s = &m->sequences[test_random_below(random, 4)];
    const uint32_t what = test_random_below(random, 16);
    if (!s->s || what == 0)
        random_life(r, m, random, s);
    else if (what < 6)
        random_append(r, m, random, s);
    else if (what < 11)
        random_decode(r, m, random, s);
    else if (what < 14)
        random_keep(r, random, s);
    else if (what == 14)
        random_restart(r, random, s);
    else if (test_random_below(random, 8) == 0)
        random_reset(r, m);
}

/* Streaming heads hold sink and window, all on the device; beside them a retrieval head counts as
 * ever. Layer 0 has one of each, layer 1 only streaming heads. */
TEST(test_head_mask)
{
    static const uint8_t mask[LAYERS * HEADS] = {0, 1, 0, 0};
    static const uint32_t windows[LAYERS] = {30, 11};
    const uint32_t ring = 6 + 30, other = 6 + 11, prompt = 101, steps = 20;
    rig r = {0};
    kvf_cache_config cc = config_of(LAYERS);
    cc.head_mask = mask;
    cc.streaming_sink = 6;
    cc.layer_windows = windows;
    test_world_open(&r.w, NULL, &cc);
    test_tokens_make(&r.t, &cc, &(test_tokens_spec){.count = TOKENS, .seed = 12, .sharpness = 1});
    r.out = test_alloc((size_t)cc.query_heads * cc.head_dim * sizeof *r.out);
    kvf_sequence *s = test_sequence(&r.w);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        append(&r, s, layer, 64, NULL);
        append(&r, s, layer, prompt - 64, NULL);
        for (uint32_t i = 0; i < steps; i++)
            decode(&r, s, layer);
    }
    const naive m = {.cache = r.w.cache, .paged = 1};
    kvf_footprint wanted = {0};
    uint64_t device_max = 0;
    for (uint32_t n = 1; n <= prompt + steps; n++) {
        const naive_layer layer = {.steps = n > prompt};
        const uint64_t streams = n < ring ? n : ring, others = 2 * (n < other ? n : other);
        const uint64_t device = naive_device(&m, &layer, n);
        wanted.entry_steps += n + streams + others;
        wanted.device_entry_steps += device + streams + others;
        device_max = device + streams > device_max ? device + streams : device_max;
    }
    const kvf_footprint f = read_meter(&r);
    const uint64_t n = prompt + steps;
    assert_true(f.entry_steps == wanted.entry_steps);
    assert_true(f.device_entry_steps == wanted.device_entry_steps);
    assert_true(f.full_entry_steps == LAYERS * HEADS * sum_to(n));
    assert_true(f.peak_entries == n + ring + 2 * other);
    assert_true(f.device_peak_entries == device_max + 2 * other);
    rig_close(&r);
}

TEST(test_random_histories)
{
    const uint64_t seed = 20260721;
    test_seed_print("footprint", seed);
    test_random random = {seed};
    for (uint32_t run = 0; run < 2; run++) {
        rig r;
        kvf_cache_config cc = config_of(LAYERS);
        cc.transfer = test_transfer(run ? KVF_TRANSFER_GATHER : KVF_TRANSFER_DIRECT);
        rig_open(&r, &cc);
        naive m = {.cache = r.w.cache, .paged = LAYERS};
        for (uint32_t i = 0; i < 600; i++) {
            random_call(&r, &m, &random);
            naive_compare(&r, &m);
        }
        assert_true(m.ended.steps > 0);
        rig_close(&r);
    }
}
