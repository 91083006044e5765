/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Random settings and batches: a recorded step, an enqueued one and one of each sequence on its own
 * give the same bits, whatever the settings are and wherever the sequences come from.
 *
 * Each round draws from decks that are dealt to the end before they are shuffled again, so that as
 * many rounds as the longest deck has values see every value. The host device cannot record; there
 * the other two are compared. Where a GPU attends to all there is, the host device comes near to
 * it.
 *
 * test_runtime_combinations [ROUNDS [SEED]]     as many as the longest deck where nothing is said
 */

#include "harness.h"

#include <kvferry/prune.h>

#define ROWS    64u
#define TOKENS  200u
#define LONG    140u
#define WIDE    8u /* rows of a batch that has few heads and layers, for time and memory */
#define WINDOW  4u /* queries that score a prompt */
#define LONGEST 8u /* values of a deck */

static uint32_t rounds = LONGEST;
static uint64_t seed = 4;

/* ---- what is drawn ---- */

typedef enum origin { PLAIN, MASKED, FASTKV, STRUCTKV, SNAPKV } origin;
typedef enum turn { NONE, FORK, CUT, REPLACE, SECOND, STREAM } turn;

#define DECKS(X)                                                                                   \
    X(page, 1, 2, 4, 8, 16, 32, 64)                                                                \
    X(batch, 1, 2, 3, 5, 17, 64)                                                                   \
    X(select, KVF_SELECT_HYBRID, KVF_SELECT_FULL, KVF_SELECT_STATIC, KVF_SELECT_DYNAMIC,           \
      KVF_SELECT_STREAMING, KVF_SELECT_QUEST, KVF_SELECT_ARKVALE)                                  \
    X(digest, KVF_DIGEST_CODES, KVF_DIGEST_MINMAX, KVF_DIGEST_CODES, KVF_DIGEST_CUBOID_MEAN,       \
      KVF_DIGEST_MEAN)                                                                             \
    X(subs, 1, 2, 4)                                                                               \
    X(reduce, KVF_GROUP_MEAN_SOFTMAX, KVF_GROUP_MAX, KVF_GROUP_SUM)                                \
    X(fill, KVF_FILL_TOKENS, KVF_FILL_PAGES)                                                       \
    X(dtype, KVF_BF16, KVF_FP16, KVF_FP32)                                                         \
    X(dim, 32, 64, 80, 96, 128, 192, 256, 512)                                                     \
    X(group, 1, 2, 3, 4, 7, 16)                                                                    \
    X(heads, 1, 2, 3)                                                                              \
    X(layers, 1, 2, 3)                                                                             \
    X(block, 8, 0)                                                                                 \
    X(budget, 1, 2, TOKENS)                                                                        \
    X(few_slots, 0, 1)                                                                             \
    X(transfer, KVF_TRANSFER_MAPPED, KVF_TRANSFER_AUTO, KVF_TRANSFER_DIRECT)                       \
    X(refresh, KVF_REFRESH_RESIDENT, KVF_REFRESH_EXACT)                                            \
    X(verify, 0, 0, 4)                                                                             \
    X(origin, PLAIN, MASKED, FASTKV, STRUCTKV, SNAPKV)                                             \
    X(pages, KVF_PAGES_K8V4, KVF_PAGES_NATIVE, KVF_PAGES_K8V8)                                     \
    X(turn, NONE, FORK, CUT, REPLACE, SECOND, STREAM)

#define FIELD(name, ...) uint32_t name;
typedef struct draw {
    DECKS(FIELD)
} draw;

/* Places of a deck in the order of this deal. */
static uint32_t deal(uint8_t order[LONGEST], const uint32_t *values, uint32_t count, uint32_t n,
                     test_random *r)
{
    for (uint32_t i = 0; n % count == 0 && i < count; i++) {
        const uint32_t at = test_random_below(r, i + 1);
        order[i] = order[at];
        order[at] = (uint8_t)i;
    }
    return values[order[n % count]];
}

static draw draw_round(uint32_t n, test_random *r)
{
    draw d;
#define DEAL(name, ...)                                                                            \
    {                                                                                              \
        static const uint32_t values[] = {__VA_ARGS__};                                            \
        static uint8_t order[LONGEST];                                                             \
        _Static_assert(sizeof values / sizeof *values <= LONGEST, "a deck of " #name);             \
        d.name = deal(order, values, sizeof values / sizeof *values, n, r);                        \
    }
    DECKS(DEAL)
#undef DEAL
    if (d.batch > WIDE) {
        d.heads = 1;
        d.layers = 1 + d.layers / 2;
    }
    if (test_on_cuda()) /* see kvf_cache_config.head_dim */
        d.dim = d.dim > 256 ? 256 : d.dim;
    if (d.dim > 128 || d.group > 7)
        d.heads = 1;
    return d;
}

static void print_draw(const draw *d, uint32_t n)
{
    printf("# %u:", n);
#define PRINT(name, ...) printf(" " #name " %u", d->name);
    DECKS(PRINT)
#undef PRINT
    printf("\n");
    fflush(stdout);
}

static kvf_cache_config config_of(const draw *d, test_random *r)
{
    kvf_cache_config c = test_config_small();
    c.layers = d->layers;
    c.kv_heads = d->heads;
    c.query_heads = d->heads * d->group;
    c.head_dim = d->dim;
    c.value_dim = d->dim == 192 ? 128 : 0;
    c.dtype = (kvf_dtype)d->dtype;
    c.sequences_max = d->batch + 2;
    c.tokens_max = TOKENS;
    c.prefill_chunk_max = LONG;
    c.page_size = d->page;
    /* A GPU has quantized pages of few shapes. */
    if (!test_on_cuda() ||
        (d->dtype == KVF_BF16 && (d->dim == 64 || d->dim == 128 || d->dim == 192)))
        c.pages = (kvf_pages)d->pages;
    c.select = (kvf_select)d->select;
    c.digest = (kvf_digest_kind)d->digest;
    c.sub_digests = d->digest == KVF_DIGEST_CODES ? 1 : d->subs < d->page ? d->subs : d->page;
    c.fill = (kvf_fill)d->fill;
    c.group_reduce = (kvf_group_reduce)d->reduce;
    c.transfer = (kvf_transfer)d->transfer;
    c.refresh = (kvf_refresh)d->refresh;
    c.refresh_interval = 3 + test_random_below(r, 5);
    c.verify_interval = d->verify;
    c.sink_tokens = test_random_below(r, 9);
    c.local_tokens = 1 + test_random_below(r, 24);
    c.static_ratio = test_random_below(r, 3) ? 0.25f : KVF_STATIC_RATIO_AUTO;
    c.budget_tokens = c.sink_tokens + c.local_tokens + 63 + test_random_below(r, 40);
    c.budget_tokens += d->budget == TOKENS ? TOKENS : d->budget * d->page;
    if (c.select != KVF_SELECT_STATIC && c.static_ratio != KVF_STATIC_RATIO_AUTO)
        c.budget_share = (float)test_random_below(r, 3) * 0.45f;
    c.device_bytes = d->few_slots ? 0 : UINT64_C(1) << 30;
    c.observe_window = d->origin >= FASTKV ? WINDOW : 0;
    return c;
}

/* Where a row's tokens come from, the same in every play. */
typedef struct row_plan {
    uint32_t parent; /* the row it is a fork of, or itself */
    uint32_t first;  /* token of the round's tokens */
    uint32_t prompt;
    uint32_t step; /* token of its first step */
} row_plan;

typedef struct round_plan {
    draw d;
    kvf_cache_config config;
    uint8_t mask[9];
    test_tokens t;
    row_plan rows[ROWS];
    uint32_t steps, turn_at, cut;
} round_plan;

/* Shorter than a page, about a block, many blocks. */
static uint32_t draw_prompt(const round_plan *p, uint32_t row, test_random *r)
{
    const uint32_t longest[] = {p->d.page, 40, row < 3 ? LONG : 70};
    return 1 + test_random_below(r, longest[row < 3 ? (row + 2) % 3 : test_random_below(r, 3)]);
}

static int has_codes(const kvf_cache_config *c)
{
    return c->digest == KVF_DIGEST_CODES && c->select != KVF_SELECT_QUEST &&
           c->select != KVF_SELECT_ARKVALE;
}

static void plan_round(round_plan *p, uint32_t n, test_random *r)
{
    *p = (round_plan){.d = draw_round(n, r)};
    p->config = config_of(&p->d, r);
    for (uint32_t i = 0; i < sizeof p->mask; i++)
        p->mask[i] = (uint8_t)test_random_below(r, has_codes(&p->config) ? 3 : 2);
    if (p->d.origin == MASKED) {
        p->mask[0] = 0;
        p->config.head_mask = p->mask;
        p->config.coarse_share = (float)test_random_below(r, 3) * 0.2f;
        p->config.streaming_sink = test_random_below(r, 9);
        p->config.streaming_recent = 1 + test_random_below(r, 40);
    }
    for (uint32_t i = 0; i < p->d.batch; i++) {
        row_plan *row = &p->rows[i];
        row->parent = i > 1 && test_random_below(r, 3) == 0 ? test_random_below(r, i) : i;
        row->prompt = row->parent < i ? p->rows[row->parent].prompt : draw_prompt(p, i, r);
        if (row->parent == i && i == 0)
            row->prompt = LONG - test_random_below(r, 40);
        row->first = test_random_below(r, TOKENS - row->prompt);
        row->step = test_random_below(r, TOKENS);
    }
    p->steps = p->d.batch > WIDE ? 4 : 9;
    p->turn_at = p->steps / 2;
    p->cut = 1 + test_random_below(r, 60);
    test_tokens_make(
        &p->t, &p->config,
        &(test_tokens_spec){.count = TOKENS, .seed = seed + n, .sharpness = 2.0f, .topics = 5});
}

/* ---- one play of a round ---- */

typedef enum way { TOGETHER, RECORDED, ALONE, ON_HOST } way;
static const char *const way_names[] = {"a batch", "a recorded step", "single steps", "the host"};

typedef struct play {
    const round_plan *p;
    way way;
    test_world w;
    kvf_stream *stream, *other; /* the one in use, and the one whose turn it is not */
    bool takes_turns;
    kvf_prune *prune;
    kvf_sequence *s[ROWS];
    kvf_recording *recordings[2];
    uint32_t counts[2]; /* rows of a recording: the first ones */
    uint32_t replays;
    test_rows rows; /* [layers, batch] */
} play;

static void open_prune(play *x)
{
    static const char *const names[] = {
        [FASTKV] = "fastkv", [STRUCTKV] = "structkv", [SNAPKV] = "snapkv"};
    const draw *d = &x->p->d;
    kvf_prune_config config;
    if (d->origin < FASTKV)
        return;
    kvf_prune_config_init(&config, kvf_prune_policy_find(names[d->origin]));
    config.retention = d->origin == SNAPKV ? KVF_RETENTION_OFFLOAD : KVF_RETENTION_EVICT;
    config.settings.keep = 0.4f;
    config.settings.propagate = 0.5f;
    config.settings.window = WINDOW;
    if (d->origin != SNAPKV)
        config.settings.layer = 0;
    if (d->origin == STRUCTKV)
        config.settings.pivot = KVF_PIVOT_FIXED;
    test_ok(&x->w, kvf_prune_open(x->w.cache, &config, &x->prune, NULL));
}

/* A prompt in one chunk a layer; what the pruner lets through goes on. */
static void prompt_pruned(play *x, kvf_sequence *s, const row_plan *row)
{
    const test_tokens *t = &x->p->t;
    uint32_t count = row->prompt, ids[LONG];
    uint32_t *at = test_alloc(LONG * sizeof *at);
    test_rows chunk;
    test_rows_open(&chunk, &x->p->config, LONG);
    for (uint32_t i = 0; i < count; i++)
        ids[i] = i;
    test_ok(&x->w, kvf_prune_begin(x->prune, s, count));
    for (uint32_t layer = 0; layer < t->layers; layer++) {
        kvf_prune_result result;
        for (uint32_t i = 0; i < count; i++) {
            at[i] = ids[i];
            test_rows_put(&chunk, i, t, layer, row->first + ids[i]);
        }
        const kvf_prefill_args args = {.sequence = s,
                                       .layer = layer,
                                       .tokens = count,
                                       .q = chunk.q,
                                       .k = chunk.k,
                                       .v = chunk.v,
                                       .positions = at,
                                       .out = chunk.out};
        test_ok(&x->w, kvf_prefill(x->w.cache, &args, x->stream));
        test_ok(&x->w, kvf_prune_append(x->prune, &args, x->stream));
        test_ok(&x->w, kvf_prune_layer(x->prune, s, layer, x->stream, &result));
        test_wait(&x->w);
        count = result.propagate_count;
        for (uint32_t i = 0; result.propagate && i < count; i++)
            ids[i] = ids[result.propagate[i]];
    }
    test_release(at);
    test_rows_close(&chunk);
}

static void prompt(play *x, uint32_t i)
{
    const row_plan *row = &x->p->rows[i];
    if (row->parent < i) {
        test_ok(&x->w, kvf_sequence_fork(x->w.cache, x->s[row->parent], x->stream, &x->s[i]));
        return;
    }
    x->s[i] = test_sequence(&x->w);
    if (x->prune && i < 2 && row->prompt > 4 * WINDOW) {
        prompt_pruned(x, x->s[i], row);
        return;
    }
    for (uint32_t layer = 0; layer < x->p->t.layers; layer++)
        test_prefill(&x->w, x->s[i], &x->p->t,
                     &(test_range){.layer = layer,
                                   .first = row->first,
                                   .count = row->prompt,
                                   .chunk = 100,
                                   .append_only = i > 0},
                     NULL);
}

static void decode(play *x, uint32_t row, uint32_t rows)
{
    for (uint32_t layer = 0; layer < x->p->t.layers; layer++) {
        const size_t at = (size_t)layer * x->p->d.batch + row;
        const kvf_decode_args a = test_rows_args(&x->rows, at, x->s + row, rows, layer);
        test_ok(&x->w, kvf_decode(x->w.cache, &a, x->stream));
        if (x->takes_turns) {
            kvf_stream *next = x->other;
            x->other = x->stream;
            x->stream = next;
        }
    }
}

static void wait(play *x)
{
    test_ok(&x->w, kvf_stream_wait(x->stream));
    test_ok(&x->w, kvf_stream_wait(x->other));
}

static void record(play *x, uint32_t n, uint32_t rows)
{
    if (x->way != RECORDED)
        return;
    test_ok(&x->w, kvf_record_begin(x->w.cache, x->s, rows, x->stream));
    decode(x, 0, rows);
    test_ok(&x->w, kvf_record_end(x->w.cache, &x->recordings[n]));
    x->counts[n] = rows;
}

static void play_open(play *x, const round_plan *p, way how)
{
    kvf_runtime_config rc = test_runtime_config();
    kvf_cache_config config = p->config;
    test_hooks.block_size = p->d.block;
    test_hooks.delay_seed = p->d.turn == STREAM && !test_on_cuda() ? 5 : 0;
    if (how == ON_HOST) {
        rc.device = KVF_DEVICE_HOST;
        config.transfer = KVF_TRANSFER_GATHER;
    }
    *x = (play){.p = p, .way = how};
    test_world_open(&x->w, &rc, &config);
    test_ok(&x->w, kvf_stream_create(x->w.runtime, &x->other));
    x->stream = x->w.stream;
    open_prune(x);
    test_rows_open(&x->rows, &p->config, p->d.layers * p->d.batch);
    for (uint32_t i = 0; i < p->d.batch; i++)
        prompt(x, i);
    record(x, 0, p->d.batch);
}

static void play_close(play *x)
{
    for (uint32_t i = 0; i < 2; i++)
        kvf_recording_destroy(x->recordings[i]);
    kvf_stream_destroy(x->stream == x->w.stream ? x->other : x->stream);
    kvf_prune_close(x->prune);
    test_world_close(&x->w);
    test_rows_close(&x->rows);
}

/* The first `rows` of the batch take a step, as this play does. */
static void step(play *x, uint32_t n, uint32_t rows)
{
    const round_plan *p = x->p;
    for (uint32_t layer = 0; layer < p->d.layers; layer++)
        for (uint32_t i = 0; i < rows; i++)
            test_rows_put(&x->rows, (size_t)layer * p->d.batch + i, &p->t, layer,
                          (p->rows[i].step + n) % TOKENS);
    for (uint32_t i = 0; i < 2; i++)
        if (x->recordings[i] && x->counts[i] == rows && kvf_replay_is_possible(x->recordings[i])) {
            test_ok(&x->w, kvf_replay(x->recordings[i], x->stream));
            x->replays++;
            wait(x);
            return;
        }
    if (x->way == ALONE)
        for (uint32_t i = 0; i < rows; i++)
            decode(x, i, 1);
    else
        decode(x, 0, rows);
    wait(x);
}

/* A fork that takes a step in the place of row 0, and ends. */
static void step_child(play *x)
{
    kvf_sequence *parent = x->s[0];
    test_ok(&x->w, kvf_sequence_fork(x->w.cache, parent, x->stream, &x->s[0]));
    decode(x, 0, 1);
    wait(x);
    kvf_sequence_destroy(x->s[0]);
    x->s[0] = parent;
}

/* An event in the middle of a round; what it gives lies in the places of a step. */
static void take_turn(play *x)
{
    const draw *d = &x->p->d;
    const uint32_t last = d->batch - 1;
    switch ((turn)d->turn) {
    case NONE:
        break;
    case FORK:
        step_child(x);
        break;
    case CUT: /* not within what a policy has chosen, nor with streaming heads */
        if (d->origin == PLAIN && x->p->rows[0].prompt > x->p->cut)
            test_ok(&x->w, kvf_sequence_truncate(x->w.cache, x->s[0],
                                                 x->p->rows[0].prompt - x->p->cut, x->stream));
        break;
    case REPLACE: /* the recording ends with its last row */
        kvf_sequence_destroy(x->s[last]);
        x->s[last] = NULL;
        assert_true(!x->recordings[0] || !kvf_replay_is_possible(x->recordings[0]));
        kvf_recording_destroy(x->recordings[0]);
        x->recordings[0] = NULL;
        if (last)
            test_ok(&x->w, kvf_sequence_fork(x->w.cache, x->s[0], x->stream, &x->s[last]));
        else
            prompt(x, 0);
        record(x, 0, d->batch);
        break;
    case SECOND: /* of fewer rows, by turns with the first one */
        record(x, 1, last ? last : 1);
        break;
    case STREAM:
        x->takes_turns = true;
        break;
    }
}

/* Rows of step n: by turns all and all but one, where there are two recordings. */
static uint32_t rows_of(const round_plan *p, uint32_t n)
{
    return p->d.turn == SECOND && p->d.batch > 1 && n > p->turn_at && n % 2 ? p->d.batch - 1
                                                                            : p->d.batch;
}

/* Devices round differently; ways on one device do not. */
static void compare(const play *a, const play *b, uint32_t n)
{
    const round_plan *p = a->p;
    const test_rows *x = &a->rows, *y = &b->rows;
    const size_t places = (size_t)p->d.layers * p->d.batch;
    const size_t lses = places * p->config.query_heads;
    const size_t elements = lses * test_value_dim(&p->config);
    const double off = test_distance(x->out, y->out, p->config.dtype, elements);
    const double lse_off = test_distance(x->lse, y->lse, KVF_FP32, lses);
    const int is_same = memcmp(x->out, y->out, places * x->out_bytes) == 0 &&
                        memcmp(x->lse, y->lse, lses * sizeof(float)) == 0;
    const int is_near = off <= test_tolerance(p->config.dtype) && lse_off <= TEST_LSE_TOLERANCE;
    if (b->way == ON_HOST ? !is_near : !is_same)
        fail_msg("%s and %s differ by %g at step %u, log-sum-exp by %g", way_names[a->way],
                 way_names[b->way], off, n, lse_off);
}

/* Then rounding cannot choose other pages. */
static int attends_all(const round_plan *p)
{
    return p->d.origin <= MASKED &&
           (p->d.select == KVF_SELECT_FULL ||
            (p->d.budget == TOKENS && p->d.select != KVF_SELECT_STREAMING));
}

/* Recorded where that is possible, of each sequence alone where it is not or the batch is small. */
static uint32_t play_round(const round_plan *p)
{
    const int is_recorded = test_on_cuda();
    play x[4];
    uint32_t ways = 0;
    play_open(&x[ways++], p, TOGETHER);
    if (test_on_cuda())
        play_open(&x[ways++], p, RECORDED);
    if (!is_recorded || p->d.batch <= WIDE)
        play_open(&x[ways++], p, ALONE);
    if (test_on_cuda() && attends_all(p))
        play_open(&x[ways++], p, ON_HOST);
    for (uint32_t n = 0; n < p->steps; n++) {
        for (uint32_t i = 0; n == p->turn_at && i < ways; i++) {
            take_turn(&x[i]);
            compare(&x[0], &x[i], n);
        }
        for (uint32_t i = 0; i < ways; i++) {
            step(&x[i], n, rows_of(p, n));
            compare(&x[0], &x[i], n);
        }
    }
    const uint32_t replays = x[1].replays;
    if (is_recorded)
        test_same_stats(&x[0].w, &x[1].w, 0);
    for (uint32_t i = 0; i < ways; i++)
        play_close(&x[i]);
    return replays;
}

static void random_rounds_give_the_same_bits(void **state)
{
    test_random r = {seed};
    uint32_t replays = 0;
    test_seed_print(__func__, seed);
    for (uint32_t n = 0; n < rounds; n++) {
        round_plan p;
        plan_round(&p, n, &r);
        print_draw(&p.d, n);
        replays += play_round(&p);
        test_tokens_free(&p.t);
    }
    printf("# %u replays\n", replays);
    assert_true(!test_on_cuda() || replays > rounds);
}

int main(int argc, char **argv)
{
    if (argc > 1)
        rounds = (uint32_t)strtoul(argv[1], NULL, 10);
    if (argc > 2)
        seed = strtoull(argv[2], NULL, 10);
    return unit_run(random_rounds_give_the_same_bits);
}
