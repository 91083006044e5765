/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Steps over forks. Common tokens are scored by one look at them, so a family of forks is
 * decoded in batches, and then each member once more alone: every step gives the same bits. A
 * step finds common blocks in their tables: held against a plain comparison.
 *
 * A family grows by chance: forks of forks, that are cut and get other tokens, while parents go. A
 * member has a log of what it was given, with its outputs; a fork has that of its parent.
 */

#include <string.h>

#include "call.h"
#include "extents.h"
#include "harness.h"

#ifndef TEST_HAS_EMULATOR
#define TEST_HAS_EMULATOR 0
#endif
#if TEST_HAS_EMULATOR
#include "emu_control.h"
#endif

enum {
    MEMBERS = 16,
    TILE = 1024, /* tokens of a tile, and of two of them and a window a prompt */
    POOL = 2400, /* tokens there are to choose from */
    PROMPT = 2200,
    LENGTH = 3600, /* at most */
    EVENTS = 128,  /* of a member, at most */
    TURN = 16,     /* tokens of a sequence in a call, at most */
    OUTS = 1024,   /* outputs of all members */
};

/* Tokens of the pool that came, or a cut. */
typedef struct event {
    enum { STEP, CHUNK, CUT } kind;
    uint32_t token, count; /* first of the pool, how many; of a cut `count` tokens stay */
    uint32_t out;          /* of a step */
} event;

typedef struct member {
    kvf_sequence *s; /* NULL = not alive */
    uint32_t length, count;
    event log[EVENTS];
} member;

typedef struct family {
    kvf_cache_config cc;
    test_world w;
    test_tokens pool;
    test_random random;
    uint32_t members, outs;
    member m[MEMBERS];
    test_rows rows; /* of a call */
    char *all;      /* [OUTS] outputs of steps */
} family;

static size_t row_bytes(const family *f)
{
    return test_steps_bytes(&f->pool, 1);
}

static uint32_t below(family *f, uint32_t count)
{
    return test_random_below(&f->random, count);
}

static event *note(member *m, event e)
{
    assert_true(m->count < EVENTS);
    m->length = e.kind == CUT ? e.count : m->length + e.count;
    assert_true(m->length <= LENGTH);
    m->log[m->count] = e;
    return &m->log[m->count++];
}

static void append_chunk(family *f, kvf_sequence *s, uint32_t token, uint32_t count)
{
    for (uint32_t first = 0; first < count; first += 512) {
        const uint32_t rest = count - first < 512 ? count - first : 512;
        kvf_prefill_args a = test_chunk_args(s, &f->pool, 0, token + first, rest, NULL);
        a.q = NULL;
        test_ok(&f->w, kvf_prefill(f->w.cache, &a, f->w.stream));
    }
}

static void grow(family *f, member *m, uint32_t token, uint32_t count)
{
    note(m, (event){.kind = CHUNK, .token = token, .count = count});
    append_chunk(f, m->s, token, count);
}

static void cut(family *f, member *m, uint32_t length)
{
    note(m, (event){.kind = CUT, .count = length});
    test_ok(&f->w, kvf_sequence_truncate(f->w.cache, m->s, length, f->w.stream));
}

/* The tokens that a call brings. */
typedef struct call {
    kvf_sequence *s[MEMBERS];
    uint32_t tokens[MEMBERS], of[MEMBERS * TURN], batch, rows;
} call;

/* Everybody alive, from the member `turn` on, gets 1 to `most` tokens. */
static void fill_call(family *f, call *c, uint32_t most, uint32_t turn)
{
    c->batch = c->rows = 0;
    for (uint32_t i = 0; i < f->members; i++) {
        member *m = &f->m[(i + turn) % f->members];
        if (!m->s)
            continue;
        c->s[c->batch] = m->s;
        c->tokens[c->batch] = 1 + below(f, most);
        for (uint32_t n = 0; n < c->tokens[c->batch]; n++) {
            const uint32_t token = below(f, POOL);
            assert_true(f->outs < OUTS);
            c->of[c->rows] = f->outs++;
            note(m, (event){.kind = STEP, .token = token, .count = 1, .out = c->of[c->rows]});
            test_rows_put(&f->rows, c->rows++, &f->pool, 0, token);
        }
        c->batch++;
    }
}

static kvf_decode_args args_of(const family *f, const call *c, uint32_t most)
{
    kvf_decode_args a = test_rows_args(&f->rows, 0, c->s, c->batch, 0);
    a.tokens = most > 1 ? c->tokens : NULL;
    return a;
}

static void keep_outputs(family *f, const call *c)
{
    test_wait(&f->w);
    for (uint32_t r = 0; r < c->rows; r++)
        memcpy(f->all + c->of[r] * row_bytes(f), f->rows.out + r * row_bytes(f), row_bytes(f));
}

static void step_all(family *f, uint32_t most)
{
    call c;
    fill_call(f, &c, most, below(f, f->members));
    const kvf_decode_args a = args_of(f, &c, most);
    test_ok(&f->w, kvf_decode(f->w.cache, &a, f->w.stream));
    keep_outputs(f, &c);
}

/* Steps of a recording, where it may be replayed; some members are cut in the middle of them. */
static void replay_all(family *f, uint32_t steps, bool can_cut)
{
    kvf_recording *r = NULL;
    uint32_t replays = 0;
    call c;
    for (uint32_t i = 0; i < steps; i++) {
        for (uint32_t n = 1; can_cut && i == steps / 2 && n < f->members; n += 2)
            if (f->m[n].s)
                cut(f, &f->m[n], 900 + below(f, f->m[n].length - 900));
        fill_call(f, &c, 1, 1);
        const kvf_decode_args a = args_of(f, &c, 1);
        if (!r) {
            test_ok(&f->w, kvf_record_begin(f->w.cache, c.s, c.batch, f->w.stream));
            test_ok(&f->w, kvf_decode(f->w.cache, &a, f->w.stream));
            test_ok(&f->w, kvf_record_end(f->w.cache, &r));
        }
        const bool can_replay = kvf_replay_is_possible(r);
        replays += can_replay;
        test_ok(&f->w,
                can_replay ? kvf_replay(r, f->w.stream) : kvf_decode(f->w.cache, &a, f->w.stream));
        keep_outputs(f, &c);
    }
    test_wait(&f->w);
    assert_true(replays || f->cc.select == KVF_SELECT_HYBRID); /* which refreshes static sets */
    kvf_recording_destroy(r);
}

static void open_family(family *f, const kvf_cache_config *cc, uint32_t members, uint64_t seed)
{
    const test_tokens_spec spec = {.count = POOL, .seed = seed, .sharpness = 2.0f};
    *f = (family){.cc = *cc, .members = members, .random = {seed}};
    f->cc.sequences_max = members;
    f->cc.tokens_max = LENGTH;
    test_open(&f->w, &f->pool, &f->cc, &spec);
    test_rows_open(&f->rows, &f->cc, MEMBERS * TURN);
    f->all = test_alloc(OUTS * row_bytes(f));
    f->m[0].s = test_sequence(&f->w);
    grow(f, &f->m[0], 0, PROMPT);
}

static void close_family(family *f)
{
    test_wait(&f->w);
    test_close(&f->w, &f->pool);
    test_rows_close(&f->rows);
    test_release(f->all);
}

static void fork_member(family *f, uint32_t from, uint32_t to)
{
    f->m[to] = f->m[from];
    test_ok(&f->w, kvf_sequence_fork(f->w.cache, f->m[from].s, f->w.stream, &f->m[to].s));
}

/* The member's log on a sequence of its own, in a cache of its own. */
static void replay_alone(family *f, const member *m)
{
    family alone = {.cc = f->cc};
    char *out = test_alloc(row_bytes(f));
    alone.cc.sequences_max = 1;
    alone.pool = f->pool;
    test_world_open(&alone.w, NULL, &alone.cc);
    kvf_sequence *s = test_sequence(&alone.w);
    for (uint32_t i = 0; i < m->count; i++) {
        const event *e = &m->log[i];
        if (e->kind == CHUNK)
            append_chunk(&alone, s, e->token, e->count);
        if (e->kind == CUT)
            test_ok(&alone.w, kvf_sequence_truncate(alone.w.cache, s, e->count, alone.w.stream));
        if (e->kind != STEP)
            continue;
        test_decode(&alone.w, s, &f->pool, 0, e->token, out, NULL);
        test_wait(&alone.w);
        if (memcmp(out, f->all + e->out * row_bytes(f), row_bytes(f)) != 0)
            fail_msg("event %u of member %u: the step differs from one alone by %g", i,
                     (uint32_t)(m - f->m),
                     test_distance(out, f->all + e->out * row_bytes(f), test_tensor_dtype(&f->cc),
                                   row_bytes(f) / test_dtype_bytes(test_tensor_dtype(&f->cc))));
    }
    test_world_close(&alone.w);
    test_release(out);
}

static kvf_cache_config config_of(void)
{
    kvf_cache_config c = test_config_small();
    c.head_dim = 32;
    c.dtype = KVF_BF16;
    c.page_size = 4;
    c.budget_tokens = 96;
    c.prefill_chunk_max = 512;
    c.digest = KVF_DIGEST_CODES;
    return c;
}

static void family_of(const kvf_cache_config *cc, uint32_t members, bool can_cut, uint64_t seed)
{
    family *f = calloc(1, sizeof *f);
    assert_non_null(f);
    const uint32_t most = cc->tokens_per_step_max;
    open_family(f, cc, members, seed);
    step_all(f, most);
    for (uint32_t i = 1; i < members; i++) {
        const uint32_t from = below(f, i);
        fork_member(f, f->m[from].s ? from : i - 1, i);
        if (can_cut && below(f, 3) == 0)
            cut(f, &f->m[i], 900 + below(f, f->m[i].length - 900));
        if (below(f, 3) == 0 && f->m[i].length < PROMPT + 300)
            grow(f, &f->m[i], below(f, 1000), 1 + below(f, 1000));
        step_all(f, most);
        if (i == members / 2 && i > 1) { /* a parent that may have children */
            kvf_sequence_destroy(f->m[0].s);
            f->m[0].s = NULL;
        }
    }
    for (uint32_t i = 0; i < 4; i++)
        step_all(f, most);
    if (test_on_cuda() && most == 1 && cc->transfer == KVF_TRANSFER_MAPPED)
        replay_all(f, 4, can_cut);
    for (uint32_t i = 0; i < members; i++)
        if (f->m[i].s && (i < 2 || i % 3 == 0))
            replay_alone(f, &f->m[i]);
    close_family(f);
    free(f);
}

TEST(families_equal_single_sequences)
{
    static const uint8_t kinds[] = {1, 2}, rings[] = {0, 1};
    const uint64_t seed = test_seed(811);
    static const struct {
        uint32_t members;
        const uint8_t *mask;
        const char *settings; /* beside pages of 4 tokens, chosen by codes */
    } rows[] = {
        {3, NULL, "select=hybrid"},
        {6, NULL, "page_size=8 transfer=gather"},
        {1, NULL, "tokens_per_step_max=16"},
        {4, NULL, "page_size=1 tokens_per_step_max=3 select=hybrid transfer=gather"},
        {5, kinds, "tokens_per_step_max=5"},
        {3, rings, "page_size=16 tokens_per_step_max=3 transfer=gather streaming_recent=50"},
        {3, NULL, "page_size=8 select=hybrid digest=minmax transfer=gather"},
        {16, NULL, "select=hybrid"},
        {2, NULL, "select=dynamic"},
        /* in every way that slots are filled */
        {16, NULL, "transfer=mapped"},
        {6, NULL, "digest=minmax transfer=batch"},
        {6, NULL, "page_size=2 select=quest digest=minmax transfer=each"},
        {5, NULL, "page_size=8 select=arkvale digest=cuboid-mean transfer=gather"},
        {8, NULL, "tokens_per_step_max=3 transfer=gather"},
        {3, NULL, "tokens_per_step_max=3 head_dim=192 value_dim=128"},
        {5, NULL, "select=hybrid digest=minmax transfer=gather refresh=exact"},
        {5, NULL, "page_size=8 transfer=gather pages=k8v4 head_dim=64"},
        {5, NULL, "transfer=gather device_bytes=1073741824"},
        {5, NULL, "transfer=gather host_bytes=1310720"}, /* the least there may be */
    };
    for (uint32_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const bool is_on_disk = strstr(rows[i].settings, "host_bytes");
        if (!test_takes(i) || (TEST_SANITIZED && test_on_cuda() && rows[i].members > 5))
            continue;
        if (is_on_disk && kvf_checksum_bytes() == 0)
            continue; /* the build has no disk tier */
        kvf_cache_config c = config_of();
        c.select = KVF_SELECT_DYNAMIC;
        c.transfer = KVF_TRANSFER_DIRECT;
        c.head_mask = rows[i].mask;
        c.coarse_share = 0.3f;
        c.device_bytes = 0;
        c.disk_path = is_on_disk ? "/tmp" : NULL;
        test_set(&c, rows[i].settings);
        c.transfer = test_transfer(c.transfer);
        family_of(&c, rows[i].members, rows[i].mask != rings, seed + i);
    }
}

/* ---- pages that are moved once ---- */

enum { CROWD = 16, CROWD_STEPS = 12 };

/* In steps of so many forks: rows of a call; all get the same token, and so choose the same; steps
 * are replays of one that is recorded. */
typedef struct crowd {
    uint32_t members, alone;
    bool is_same, is_recorded, forgets; /* before each step, what is in slots */
} crowd;

static void decode_crowd(family *f, const crowd *c, call *all)
{
    for (uint32_t first = 0; first < c->members; first += c->alone) {
        const kvf_decode_args a = test_rows_args(&f->rows, first, all->s + first, c->alone, 0);
        test_ok(&f->w, kvf_decode(f->w.cache, &a, f->w.stream));
    }
}

/* The counters of a crowd. */
static kvf_stats crowd_of(kvf_cache_config cc, crowd c)
{
    family *f = calloc(1, sizeof *f);
    kvf_recording *r = NULL;
    call all = {0};
    kvf_stats stats;
    assert_non_null(f);
    open_family(f, &cc, c.members, 5);
    step_all(f, 1);
    for (uint32_t i = 1; i < c.members; i++)
        fork_member(f, i / 2, i); /* forks of forks */
    for (uint32_t i = 0; i < c.members; i++)
        all.s[i] = f->m[i].s;
    if (c.is_recorded) {
        test_ok(&f->w, kvf_record_begin(f->w.cache, all.s, c.members, f->w.stream));
        decode_crowd(f, &c, &all);
        test_ok(&f->w, kvf_record_end(f->w.cache, &r));
    }
    test_wait(&f->w);
    kvf_cache_stats_reset(f->w.cache);
    for (uint32_t n = 0; n < CROWD_STEPS; n++) {
        for (uint32_t i = 0; i < c.members; i++)
            test_rows_put(&f->rows, i, &f->pool, 0, 100 * n + (c.is_same ? 0 : i));
        if (c.forgets)
            test_ok(&f->w, kvf_residency_clear(&f->w.cache->kv_groups[0].residency, f->w.stream));
        if (r)
            test_ok(&f->w, kvf_replay(r, f->w.stream));
        else
            decode_crowd(f, &c, &all);
        test_wait(&f->w);
    }
    kvf_cache_stats(f->w.cache, &stats);
    assert_true(test_residency_is_valid(&f->w.cache->kv_groups[0].residency));
    kvf_recording_destroy(r);
    close_family(f);
    free(f);
    return stats;
}

/* A page that rows of a call choose alike is moved once, by whichever way, and is then there for
 * calls of one. With room for all nothing that was sealed is moved at all. */
TEST(forks_move_a_page_once)
{
    static const struct {
        kvf_transfer transfer;
        bool is_recorded;
    } ways[] = {{KVF_TRANSFER_MAPPED, true},
                {KVF_TRANSFER_MAPPED, false},
                {KVF_TRANSFER_GATHER, false},
                {KVF_TRANSFER_BATCH, false},
                {KVF_TRANSFER_EACH, false}};
    for (uint32_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        const bool is_recorded = ways[i].is_recorded && test_on_cuda();
        const crowd single = {1, 1, true, false, true},
                    same = {CROWD, CROWD, true, is_recorded, true};
        const crowd apart = {CROWD, CROWD, false, is_recorded, true};
        const crowd in_turn = {CROWD, 1, false, false, true};
        kvf_cache_config c = config_of();
        if (!test_takes(i) || ways[i].is_recorded != is_recorded)
            continue;
        c.select = KVF_SELECT_DYNAMIC;
        c.transfer = ways[i].transfer;
        const kvf_stats one = crowd_of(c, single), all = crowd_of(c, same);
        assert_true(one.misses > 0);
        assert_int_equal(all.misses, one.misses);
        assert_int_equal(all.bytes_to_device, one.bytes_to_device);
        assert_int_equal(all.pages_selected, CROWD * one.pages_selected);
        assert_int_equal(all.hits, all.pages_selected - all.misses);
        const kvf_stats parted = crowd_of(c, apart), singly = crowd_of(c, in_turn);
        assert_int_equal(parted.pages_selected, singly.pages_selected);
        assert_int_equal(parted.misses, singly.misses);
        assert_true(parted.misses > one.misses);
        c.device_bytes = UINT64_C(1) << 30;
        const kvf_stats resident = crowd_of(c, (crowd){CROWD, CROWD, false, is_recorded, false});
        assert_int_equal(resident.misses + resident.bytes_to_device, 0);
        assert_int_equal(resident.hits, resident.pages_selected);
    }
}

/* ---- the kernel that scores ---- */

#if TEST_HAS_EMULATOR
typedef enum kinship { STRANGERS, KIN, KIN_SHORT } kinship;

/* Launches of the form for tiles that rows have in common, and of the one for single rows. */
typedef struct scored {
    uint64_t together, singly;
} scored;

static scored scored_since(scored before)
{
    return (scored){kvf_emu_launches_of("score_codes_pages<*, false>*") - before.together,
                    kvf_emu_launches_of("score_codes_pages<*, true>*") - before.singly};
}

static void score_members(uint32_t members, kinship kin)
{
    family *f = calloc(1, sizeof *f);
    kvf_cache_config c = config_of();
    assert_non_null(f);
    c.select = KVF_SELECT_DYNAMIC;
    c.transfer = KVF_TRANSFER_MAPPED;
    open_family(f, &c, members, 7);
    for (uint32_t i = 1; i < members; i++) {
        if (kin == STRANGERS) {
            f->m[i].s = test_sequence(&f->w);
            grow(f, &f->m[i], 0, PROMPT);
            continue;
        }
        fork_member(f, 0, i);
        if (kin == KIN_SHORT)
            cut(f, &f->m[i], TILE - 1);
    }
    test_wait(&f->w);
    const scored before = scored_since((scored){0});
    step_all(f, 1);
    const scored eager = scored_since(before);
    replay_all(f, 3, false);
    const scored all = scored_since(before);
    const bool is_together = kin == KIN;
    assert_int_equal(is_together ? eager.together : eager.singly, 1);
    assert_int_equal(is_together ? eager.singly : eager.together, 0);
    assert_int_equal(is_together ? all.together : all.singly, 4);
    assert_int_equal(is_together ? all.singly : all.together, 0);
    close_family(f);
    free(f);
}

/* Eager and recorded steps of rows without a tile in common take the form for single rows. */
TEST(the_form_that_scores_is_that_of_the_rows)
{
    kvf_emu_config config;
    if (!test_on_cuda())
        return;
    kvf_emu_get_config(&config);
    config.multiprocessors = 1; /* few tiles keep it busy */
    kvf_emu_set_config(&config);
    score_members(1, STRANGERS);
    score_members(3, STRANGERS);
    score_members(3, KIN);
    score_members(3, KIN_SHORT);
    kvf_emu_reset();
}
#endif

/* ---- who has what in common ---- */

enum { ROWS = 24, TILES = 12, BLOCK = 32, PER_TILE = TILE / BLOCK };

/* Random trees of rows: a block that a row does not have of another has an id of its own. */
static void make_tree(test_random *r, kvf_layer *states, kvf_block (*blocks)[TILES * PER_TILE])
{
    uint32_t next = 0;
    for (uint32_t b = 0; b < ROWS; b++) {
        const uint32_t from = test_random_below(r, b + 1);
        const uint32_t most = from < b ? states[from].extent.sealed : 0;
        const uint32_t stays = test_random_below(r, most + 1);
        const uint32_t kept = test_random_below(r, 2) ? most : stays;
        states[b] = (kvf_layer){.blocks = blocks[b]};
        states[b].extent.sealed = kept + test_random_below(r, TILES * PER_TILE - kept + 1);
        memcpy(blocks[b], blocks[from], kept * sizeof **blocks);
        for (uint32_t i = kept; i < states[b].extent.sealed; i++)
            blocks[b][i] = (kvf_block){next++};
    }
}

static uint32_t blocks_in_common(const kvf_layer *a, const kvf_layer *b)
{
    uint32_t blocks = 0;
    while (blocks < a->extent.sealed && blocks < b->extent.sealed &&
           a->blocks[blocks].index == b->blocks[blocks].index)
        blocks++;
    return blocks;
}

/* With at most `most` rows at once: as without, but where another one starts anew. */
static void rows_at_once_are_few(kvf_call *step, uint32_t most)
{
    uint32_t before[ROWS], n = 0;
    memcpy(before, step->shared.common, step->rows * sizeof *before);
    kvf_call_share(step, most);
    for (uint32_t i = 0; i < step->rows; i++) {
        n = step->shared.common[i] ? n + 1 : 1;
        assert_true(n <= most);
        assert_true(step->shared.common[i] == before[i] ||
                    (step->shared.common[i] == 0 && i >= most));
    }
}

/* Between any two rows, the least of `common` is what they have in common. */
TEST(order_says_what_is_common)
{
    test_random random = {test_seed(77)};
    kvf_block(*blocks)[TILES * PER_TILE] = calloc(ROWS, sizeof *blocks);
    kvf_layer states[ROWS], *list[ROWS];
    char frame_memory[4096];
    kvf_cache cache = {.frame_bytes = sizeof frame_memory};
    kvf_kv_group kv_group = {.dims.paging.block_size = BLOCK};
    assert_non_null(blocks);
    for (uint32_t n = 0; n < 200; n++) {
        kvf_frame frame = {.host.base = frame_memory, .device = frame_memory};
        kvf_row rows[ROWS];
        kvf_call step = {.cache = &cache,
                         .frame = &frame,
                         .kv_group = &kv_group,
                         .rows = 1 + test_random_below(&random, ROWS),
                         .states = list,
                         .row_host = rows};
        uint32_t seen = 0;
        bool any_tile = false;
        make_tree(&random, states, blocks);
        for (uint32_t b = 0; b < ROWS; b++) {
            list[b] = &states[b];
            rows[b] = (kvf_row){.sealed = states[b].extent.sealed};
        }
        if (step.rows > 1) { /* two tokens of a sequence */
            list[1] = list[0];
            rows[1] = rows[0];
        }
        kvf_call_share(&step, UINT32_MAX);
        for (uint32_t i = 0; i < step.rows; i++) {
            uint32_t least = UINT32_MAX;
            seen |= 1u << step.shared.order[i];
            for (uint32_t j = i; j-- > 0;) {
                least = kvf_min_u32(least, step.shared.common[j + 1]);
                assert_int_equal(least, blocks_in_common(list[step.shared.order[i]],
                                                         list[step.shared.order[j]]) /
                                            PER_TILE);
            }
        }
        assert_int_equal(seen, (1u << step.rows) - 1);
        assert_int_equal(step.shared.common[0], 0);
        for (uint32_t i = 0; i < step.rows; i++)
            any_tile = any_tile || step.shared.common[i];
        assert_int_equal(step.shared.tiles, any_tile);
        kvf_call_share(&step, 1);
        assert_int_equal(step.shared.tiles, 0);
        step.is_recorded = 1;
        kvf_call_share(&step, 1);
        assert_int_equal(step.shared.tiles, any_tile);
        kvf_call_share(&step, UINT32_MAX);
        rows_at_once_are_few(&step, 1 + test_random_below(&random, 4));
    }
    free(blocks);
}

/* A tile is one task for many rows only where other tiles keep the device busy. */
TEST(few_tiles_are_weighed_by_many)
{
    enum { FORKS = 16, LISTS = 3 };
    kvf_kv_group kv_group = {.dims.paging = {.block_size = BLOCK, .lists = LISTS}};
    kvf_row rows[FORKS];
    const kvf_call step = {.kv_group = &kv_group, .rows = FORKS, .row_host = rows};
    const kvf_device_properties threads[] = {{.compute_threads = 2}, {.compute_threads = 64}};
    const kvf_device_properties cuda = {.multiprocessors = 132};
    for (uint32_t b = 0; b < FORKS; b++)
        rows[b] = (kvf_row){.sealed = 128 * PER_TILE};
    assert_true(kvf_call_rows_at_once(&step, &threads[0]) >= FORKS);
    assert_true(kvf_call_rows_at_once(&step, &threads[1]) >= FORKS);
    assert_true(kvf_call_rows_at_once(&step, &cuda) >= FORKS);
    for (uint32_t b = 0; b < FORKS; b++)
        rows[b] = (kvf_row){.sealed = 3 * PER_TILE - 1};
    assert_true(kvf_call_rows_at_once(&step, &threads[0]) >= FORKS);
    assert_int_equal(kvf_call_rows_at_once(&step, &threads[1]), 1);
    assert_int_equal(kvf_call_rows_at_once(&step, &cuda), 1);
}
