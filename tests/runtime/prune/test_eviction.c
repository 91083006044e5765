/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Chunked eviction against a restatement of its definition: random queries and keys go through a
 * cache in chunks, and after every chunk the keys that each KV head still holds are looked up among
 * those that were put in. The tokens that may stay follow from scores in double precision over the
 * chunk alone; where two scores are closer than single precision tells apart, either may.
 *
 * Knows the definition, not the library's way: it keeps lists of tokens per head. Decode and the
 * footprint are checked on what remains.
 */

#include <math.h>

#include <kvferry/prune.h>

#include "naive_scores.h"

#define LAYERS 2u
#define HEADS  2u /* KV heads */
#define GROUP  2u
#define DIM    64u
#define PROMPT 210u
#define LOCAL  16u

typedef struct spec {
    const char *policy;
    kvf_eviction eviction;
    uint32_t chunk, queries;
    float keep;
    uint32_t keep_tokens;
    kvf_pool_kind pool;
    uint32_t pool_width;
    kvf_group_reduce reduce;
} spec;

/* The tokens that a head holds, as indexes into the prompt. */
typedef struct held {
    uint32_t count;
    uint32_t ids[PROMPT + 128];
} held;

typedef struct rig {
    test_world w;
    test_tokens t;
    kvf_prune *prune;
    kvf_sequence *s;
    void *out;
    const spec *spec;
    held held[LAYERS][HEADS];
    uint64_t entry_steps; /* by the definition */
} rig;

static void rig_open(rig *r, const spec *sp)
{
    kvf_cache_config cc = test_config_small();
    kvf_prune_config pc;
    *r = (rig){.spec = sp};
    cc.layers = LAYERS;
    cc.tokens_max = PROMPT + 64;
    cc.local_tokens = LOCAL;
    cc.observe_window = sp->queries;
    test_world_open(&r->w, NULL, &cc);
    test_tokens_make(&r->t, &cc,
                     &(test_tokens_spec){.count = PROMPT + 16, .seed = 5, .sharpness = 2});
    r->out = test_alloc(128 * (size_t)HEADS * GROUP * DIM * sizeof(float));
    kvf_prune_config_init(&pc, kvf_prune_policy_find(sp->policy));
    pc.retention = KVF_RETENTION_EVICT;
    pc.eviction = sp->eviction;
    pc.chunk_queries = sp->queries;
    pc.settings.window = 0;
    if (strcmp(sp->policy, "streaming") != 0)
        pc.settings.window = 1; /* of a whole prompt: not used by chunks */
    pc.settings.keep = sp->keep;
    pc.settings.keep_tokens = sp->keep_tokens;
    pc.settings.pool = sp->pool;
    pc.settings.pool_width = sp->pool_width;
    pc.settings.group_reduce = sp->reduce;
    kvf_error error = {0};
    if (kvf_prune_open(r->w.cache, &pc, &r->prune, &error) != KVF_OK)
        fail_msg("%s", error.text);
    r->s = test_sequence(&r->w);
    test_ok(&r->w, kvf_prune_begin(r->prune, r->s, PROMPT));
}

static void rig_close(rig *r)
{
    test_wait(&r->w);
    kvf_prune_close(r->prune);
    test_close(&r->w, &r->t);
    test_release(r->out);
}

static void append(rig *r, uint32_t layer, uint32_t first, uint32_t count, uint32_t position)
{
    uint32_t positions[128];
    for (uint32_t done = 0; done < count;) {
        const uint32_t n = count - done < 128 ? count - done : 128;
        for (uint32_t i = 0; i < n; i++)
            positions[i] = position + done + i;
        kvf_prefill_args a = test_chunk_args(r->s, &r->t, layer, first + done, n, r->out);
        a.positions = positions;
        test_ok(&r->w, kvf_prefill(r->w.cache, &a, r->w.stream));
        test_wait(&r->w);
        done += n;
    }
}

/* ---- the definition ---- */

/* A chunk of the prompt, then what follows it: token i of both. */
typedef struct piece {
    uint32_t first, tokens, patch;
} piece;

static uint32_t token_of(const piece *p, uint32_t i)
{
    return i < p->tokens ? p->first + i : PROMPT - p->patch + (i - p->tokens);
}

/* Tokens of a chunk that stay beyond its window, in PyramidKV's whole numbers or alike for all. */
static uint32_t layer_budget(const rig *r, uint32_t layer, uint32_t n, uint32_t window,
                             uint32_t capacity)
{
    const uint32_t mean = capacity > window ? capacity - window : 0;
    if (strcmp(r->spec->policy, "pyramidkv") != 0 || n < 2 * mean)
        return mean;
    uint32_t least = mean / 20, most = 2 * mean - least;
    if (most >= n - window) {
        most = n - window;
        least = 2 * mean - most;
    }
    return most - layer * ((most - least) / (LAYERS - 1));
}

/* How many of a piece's own tokens a head keeps; all of them if the budget is not below. */
static uint32_t kept_of(const rig *r, const piece *p, uint32_t layer, uint32_t window)
{
    const uint32_t n = p->tokens + p->patch;
    uint32_t capacity = (uint32_t)((double)p->tokens * (double)r->spec->keep + 1e-4);
    if (r->spec->keep_tokens)
        capacity = r->spec->keep_tokens < p->tokens ? r->spec->keep_tokens : p->tokens;
    capacity += p->patch;
    capacity = capacity < window ? window : capacity;
    if (capacity >= n || n == window)
        return p->tokens;
    const uint32_t kept = window + layer_budget(r, layer, n, window, capacity);
    return (kept < n ? kept : n) - p->patch;
}

/* ---- what the cache holds ---- */

static const float *key_at(const rig *r, uint32_t layer, uint32_t head, uint32_t index)
{
    const float *page = kvf_page_address(r->s, layer, head, index / 8);
    return test_seen(page + (size_t)(index % 8) * 2 * DIM, 2 * DIM * sizeof *page);
}

/* Finds every key of a head among those that may be there, in order, values included. */
static void look_up(const rig *r, uint32_t layer, uint32_t head, const held *allowed, held *got)
{
    *got = (held){.count = kvf_sequence_length(r->s, layer)};
    for (uint32_t i = 0, next = 0; i < got->count; i++) {
        const float *key = key_at(r, layer, head, i);
        for (;; next++) {
            assert_true(next < allowed->count);
            const float *k = test_k(&r->t, layer, allowed->ids[next]);
            if (memcmp(key, k + head * DIM, DIM * sizeof *k) == 0)
                break;
        }
        const float *v = test_v(&r->t, layer, allowed->ids[next]);
        assert_memory_equal(key + DIM, v + head * DIM, DIM * sizeof *v);
        got->ids[i] = allowed->ids[next++];
    }
}

/* The kept tokens of the piece are of the best: none that was dropped is clearly better. */
static void check_best(const rig *r, const piece *p, uint32_t layer, uint32_t head,
                       const held *before, const held *got)
{
    double scores[HEADS * PROMPT], heads[HEADS * GROUP * PROMPT];
    uint32_t tokens[PROMPT];
    bool is_kept[PROMPT] = {0};
    const uint32_t n = p->tokens + p->patch;
    const uint32_t window = r->spec->queries < n ? r->spec->queries : n;
    const kvf_scores_args a = {.layer = layer,
                               .window = window,
                               .first = n - window,
                               .candidates = n - window,
                               .pool = r->spec->pool,
                               .pool_width = r->spec->pool_width,
                               .group_reduce = r->spec->reduce};
    double lowest = INFINITY, highest = -INFINITY;
    for (uint32_t i = 0; i < n; i++)
        tokens[i] = token_of(p, i);
    naive_token_scores(&r->t, tokens, &a, scores, heads);
    for (uint32_t i = before->count; i < got->count; i++)
        is_kept[got->ids[i] - p->first] = true;
    for (uint32_t j = n - window; j < p->tokens; j++)
        assert_true(is_kept[j]);
    for (uint32_t j = 0; j < n - window; j++) {
        if (is_kept[j])
            lowest = fmin(lowest, scores[head * (n - window) + j]);
        else
            highest = fmax(highest, scores[head * (n - window) + j]);
    }
    assert_true(highest <= lowest * (1 + 1e-5));
}

static void check_piece(rig *r, const piece *p, uint32_t layer)
{
    const uint32_t n = p->tokens + p->patch;
    const uint32_t window = r->spec->queries < n ? r->spec->queries : n;
    for (uint32_t h = 0; h < HEADS; h++) {
        held allowed = r->held[layer][h], got;
        const uint32_t before = allowed.count;
        for (uint32_t i = 0; i < p->tokens; i++)
            allowed.ids[allowed.count++] = p->first + i;
        look_up(r, layer, h, &allowed, &got);
        assert_memory_equal(got.ids, r->held[layer][h].ids, before * sizeof *got.ids);
        assert_int_equal(got.count - before, kept_of(r, p, layer, window));
        if (got.count < allowed.count)
            check_best(r, p, layer, h, &r->held[layer][h], &got);
        for (uint32_t i = 0; i < n; i++)
            r->entry_steps += before + i + 1;
        r->held[layer][h] = got;
    }
    for (uint32_t i = 0; i < r->held[layer][0].count; i++) {
        const uint32_t a = r->held[layer][0].ids[i], b = r->held[layer][1].ids[i];
        assert_int_equal(kvf_sequence_position(r->s, layer, i), a > b ? a : b);
    }
}

static piece piece_at(const spec *sp, uint32_t first)
{
    const uint32_t rest = PROMPT - first;
    const bool is_last = rest <= sp->chunk;
    return (piece){.first = first,
                   .tokens = is_last ? rest : sp->chunk,
                   .patch = sp->eviction == KVF_EVICTION_PATCHED && !is_last ? sp->queries : 0};
}

/* ---- runs ---- */

static void check_meter(const rig *r)
{
    kvf_footprint f;
    kvf_cache_footprint(r->w.cache, &f);
    assert_true(f.entry_steps == r->entry_steps);
    assert_true(f.full_entry_steps == (uint64_t)LAYERS * HEADS * PROMPT * (PROMPT + 1) / 2);
    assert_true(f.steps == PROMPT);
}

static void decode_some(rig *r)
{
    for (uint32_t i = 0; i < 12; i++)
        for (uint32_t layer = 0; layer < LAYERS; layer++)
            test_decode(&r->w, r->s, &r->t, layer, PROMPT + i, r->out, NULL);
    test_wait(&r->w);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        const uint32_t length = kvf_sequence_length(r->s, layer);
        assert_int_equal(length, r->held[layer][0].count + 12);
        assert_int_equal(kvf_sequence_position(r->s, layer, length - 1), PROMPT + 11);
        for (uint32_t h = 0; h < HEADS; h++) {
            held allowed = r->held[layer][h], got;
            for (uint32_t i = 0; i < 12; i++)
                allowed.ids[allowed.count++] = PROMPT + i;
            look_up(r, layer, h, &allowed, &got);
        }
    }
}

static void run(const spec *sp)
{
    rig r;
    rig_open(&r, sp);
    for (uint32_t first = 0; first < PROMPT;) {
        const piece p = piece_at(sp, first);
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            append(&r, layer, first, p.tokens, first);
            if (p.patch)
                append(&r, layer, PROMPT - p.patch, p.patch, first + p.tokens);
            test_ok(&r.w, kvf_prune_chunk(r.prune, r.s, layer, p.tokens, p.patch, r.w.stream));
            test_wait(&r.w);
            check_piece(&r, &p, layer);
        }
        first += p.tokens;
    }
    check_meter(&r);
    kvf_prune_stats stats;
    kvf_prune_stats_get(r.prune, &stats);
    assert_true(stats.prompts == 1);
    assert_true(stats.tokens_full == PROMPT * LAYERS);
    assert_true(stats.kept == r.held[0][0].count + r.held[1][0].count);
    decode_some(&r);
    rig_close(&r);
}

TEST(test_sets)
{
    static const spec specs[] = {
        {"snapkv", KVF_EVICTION_NAIVE, 64, 16, 0.5f, 0, KVF_POOL_MAX, 7, KVF_GROUP_SUM},
        {"snapkv", KVF_EVICTION_NAIVE, 50, 8, 0.3f, 0, KVF_POOL_AVERAGE, 5, KVF_GROUP_MEAN_SOFTMAX},
        {"snapkv", KVF_EVICTION_PATCHED, 64, 16, 0.5f, 0, KVF_POOL_MAX, 7, KVF_GROUP_MAX},
        {"snapkv", KVF_EVICTION_PATCHED, 50, 8, 0.1f, 0, KVF_POOL_AVERAGE, 5, KVF_GROUP_SUM},
        {"snapkv", KVF_EVICTION_PATCHED, 40, 16, 0.3f, 12, KVF_POOL_MAX, 1, KVF_GROUP_SUM},
        {"pyramidkv", KVF_EVICTION_NAIVE, 70, 16, 0.4f, 0, KVF_POOL_MAX, 7, KVF_GROUP_SUM},
        {"pyramidkv", KVF_EVICTION_PATCHED, 70, 16, 0.4f, 0, KVF_POOL_MAX, 7, KVF_GROUP_SUM},
        /* the whole prompt as one chunk, chunks no longer than the window, and of one token */
        {"snapkv", KVF_EVICTION_PATCHED, PROMPT, 16, 0.25f, 0, KVF_POOL_MAX, 7, KVF_GROUP_SUM},
        {"snapkv", KVF_EVICTION_NAIVE, 7, 7, 0.5f, 0, KVF_POOL_MAX, 3, KVF_GROUP_SUM},
        {"snapkv", KVF_EVICTION_PATCHED, 7, 3, 0.5f, 0, KVF_POOL_MAX, 3, KVF_GROUP_SUM},
        {"snapkv", KVF_EVICTION_NAIVE, 1, 1, 1.0f, 0, KVF_POOL_MAX, 1, KVF_GROUP_SUM},
        {"snapkv", KVF_EVICTION_PATCHED, 1, 1, 1.0f, 0, KVF_POOL_MAX, 1, KVF_GROUP_SUM},
    };
    test_seed_print("eviction", 5);
    for (size_t i = 0; i < sizeof specs / sizeof *specs; i++)
        run(&specs[i]);
}

/* StreamingLLM looks at everything that is held: sink and newest, whatever the chunks. */
TEST(test_streaming)
{
    static const kvf_eviction kinds[] = {KVF_EVICTION_NAIVE, KVF_EVICTION_PATCHED};
    for (uint32_t kind = 0; kind < 2; kind++) {
        const spec sp = {"streaming", kinds[kind], 30, 8, 1.0f, 24, KVF_POOL_MAX, 1, KVF_GROUP_SUM};
        const uint32_t sink = 4;
        rig r;
        rig_open(&r, &sp);
        uint64_t wanted = 0;
        for (uint32_t first = 0, before = 0; first < PROMPT;) {
            const piece p = piece_at(&sp, first);
            for (uint32_t layer = 0; layer < LAYERS; layer++) {
                append(&r, layer, first, p.tokens, first);
                if (p.patch)
                    append(&r, layer, PROMPT - p.patch, p.patch, first + p.tokens);
                test_ok(&r.w, kvf_prune_chunk(r.prune, r.s, layer, p.tokens, p.patch, r.w.stream));
                assert_int_equal(kvf_sequence_length(r.s, layer), sp.keep_tokens);
                for (uint32_t i = 0; i < sp.keep_tokens; i++)
                    assert_int_equal(kvf_sequence_position(r.s, layer, i),
                                     i < sink ? i : first + p.tokens - sp.keep_tokens + i);
            }
            for (uint32_t i = 0; i < p.tokens + p.patch; i++)
                wanted += (uint64_t)LAYERS * HEADS * (before + i + 1);
            before = sp.keep_tokens;
            first += p.tokens;
        }
        r.entry_steps = wanted;
        check_meter(&r);
        rig_close(&r);
    }
}

/* ---- bad input ---- */

TEST(test_bad_calls)
{
    const spec sp = {"snapkv", KVF_EVICTION_PATCHED, 40, 16,           0.5f,
                     0,        KVF_POOL_MAX,         1,  KVF_GROUP_SUM};
    rig r;
    rig_open(&r, &sp);
    append(&r, 0, 0, 40, 0);
    kvf_stream *stream = r.w.stream;
    test_refused(r.w.runtime, kvf_prune_chunk(r.prune, r.s, 1, 40, 16, stream), KVF_INVALID,
                 "layer = 1: the next layer of this prompt is 0 (pass 0)");
    test_refused(r.w.runtime, kvf_prune_chunk(r.prune, r.s, 0, 0, 16, stream), KVF_INVALID,
                 "tokens = 0: must be 1 to 210, the rest of the prompt of 210 tokens");
    test_refused(r.w.runtime, kvf_prune_chunk(r.prune, r.s, 0, PROMPT + 1, 0, stream), KVF_INVALID,
                 "tokens = 211: must be 1 to 210, the rest of the prompt of 210 tokens");
    test_refused(r.w.runtime, kvf_prune_chunk(r.prune, r.s, 0, 40, 0, stream), KVF_INVALID,
                 "patch = 0: must be 16 here; with PATCHED every chunk but the last is followed by "
                 "chunk_queries tokens of the prompt's end, else none is");
    test_refused(r.w.runtime, kvf_prune_chunk(r.prune, r.s, 0, 12, 16, stream), KVF_INVALID,
                 "chunk_queries = 16: the patch is longer than the chunk of 12 tokens; take longer "
                 "chunks, or lower chunk_queries");
    test_refused(r.w.runtime, kvf_prune_chunk(r.prune, r.s, 0, 40, 16, stream), KVF_INVALID,
                 "layer 0 holds 40 tokens, less than the chunk of 40 and the patch of 16; call "
                 "kvf_prefill for them first");
    append(&r, 0, PROMPT - 16, 16, 40); /* refusals leave the prompt where it was */
    test_ok(&r.w, kvf_prune_chunk(r.prune, r.s, 0, 40, 16, stream));
    append(&r, 1, 0, 39, 0);
    append(&r, 1, PROMPT - 16, 16, 39);
    test_refused(r.w.runtime, kvf_prune_chunk(r.prune, r.s, 1, 39, 16, stream), KVF_INVALID,
                 "tokens = 39: at layer 0 this chunk had 40; all layers get the same");
    rig_close(&r);
}

TEST(test_bad_budgets)
{
    const spec low = {"snapkv", KVF_EVICTION_NAIVE, 40, 16,           0.25f,
                      0,        KVF_POOL_MAX,       1,  KVF_GROUP_SUM};
    const spec none = {"snapkv", KVF_EVICTION_PATCHED, 40, 16,           0.02f,
                       0,        KVF_POOL_MAX,         1,  KVF_GROUP_SUM};
    rig r;
    rig_open(&r, &low);
    append(&r, 0, 0, 40, 0);
    test_refused(r.w.runtime, kvf_prune_chunk(r.prune, r.s, 0, 40, 0, r.w.stream), KVF_INVALID,
                 "keep = 0.25: of a chunk of 40 tokens that is 10, below chunk_queries = 16, whose "
                 "tokens are always kept; raise keep, take longer chunks, or lower chunk_queries");
    rig_close(&r);
    rig_open(&r, &none);
    append(&r, 0, 0, 40, 0);
    append(&r, 0, PROMPT - 16, 16, 40);
    test_refused(
        r.w.runtime, kvf_prune_chunk(r.prune, r.s, 0, 40, 16, r.w.stream), KVF_INVALID,
        "keep = 0.02: policy 'snapkv' at layer 0 keeps none of a chunk of 40 tokens; raise "
        "keep, or take longer chunks");
    rig_close(&r);
}

TEST(test_other_policies)
{
    const spec sp = {"h2o", KVF_EVICTION_NAIVE, 40, 16, 0.5f, 0, KVF_POOL_MAX, 1, KVF_GROUP_SUM};
    rig r;
    rig_open(&r, &sp);
    append(&r, 0, 0, 40, 0);
    test_refused(r.w.runtime, kvf_prune_chunk(r.prune, r.s, 0, 40, 0, r.w.stream), KVF_UNSUPPORTED,
                 "policy 'h2o' at layer 0 needs more than the scores of the newest queries (0x8), "
                 "which a chunk does not give; take another policy, or eviction = NONE");
    rig_close(&r);
}
