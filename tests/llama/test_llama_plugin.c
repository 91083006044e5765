/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The plug-in under a stand-in for ggml: whatever happens to sequences, no output is another than
 * that of a plain loop over the cache; with counts of writes off, or without the functions of
 * buffers, it is.
 */

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include "common/convert.h"
#include "common/random.h"
#include "llama_rig.h"

/* Rounding of F16 queries, values and outputs, relative to the largest output. */
#define ROUNDING 0.01

/* ---- random edits of sequences ---- */

enum { SEQUENCES = 4 };

typedef struct wanderer {
    rig *r;
    rig_set sets[SEQUENCES];
    int streams; /* sequence i is in stream i % streams */
    char *saved;
} wanderer;

static uint32_t below(wanderer *w, uint32_t n)
{
    return kvf_random_below(&w->r->random, n);
}

/* Cells of a sequence's stream that no sequence has. */
static int free_cells(const wanderer *w, int sequence, int64_t *cells, int count)
{
    const int stream = sequence % w->streams;
    int found = 0;
    for (uint32_t cell = 0; cell < RIG_CELLS && found < count; cell++) {
        int used = 0;
        for (int i = stream; i < SEQUENCES; i += w->streams)
            used |= (int)(w->sets[i][cell / 64] >> cell % 64 & 1);
        if (!used)
            cells[found++] = (int64_t)stream * RIG_CELLS + (int64_t)cell;
    }
    return found;
}

/* A step with `tokens` new tokens of each of the sequences `from` on: rows see what is before. */
static void step(wanderer *w, int from, int sequences, int tokens)
{
    rig_set rows[RIG_ROWS];
    int64_t cells[RIG_ROWS];
    int count = 0;
    for (int i = from; i < from + sequences; i++) {
        int64_t own[RIG_ROWS];
        if (free_cells(w, i, own, tokens) < tokens)
            memset(w->sets[i], 0, sizeof w->sets[i]), free_cells(w, i, own, tokens);
        for (int t = 0; t < tokens; t++) {
            rig_add(w->sets[i], (uint32_t)(own[t] % RIG_CELLS));
            memcpy(rows[count], w->sets[i], sizeof rows[count]);
            cells[count++] = own[t];
        }
    }
    const int first = w->streams > 1 ? from : 0;
    const int per_stream = w->streams > 1 ? tokens : count;
    assert_int_equal(
        rig_pass(w->r, cells, count, per_stream, first, w->streams > 1 ? sequences : 1, rows),
        GG_SUCCESS);
}

/* State out and in: bytes of the buffer, by its functions. */
static void state(wanderer *w)
{
    const int layer = (int)below(w, RIG_LAYERS);
    gg_tensor *t = below(w, 2) ? w->r->k[layer] : w->r->v[layer];
    const size_t row = t->nb[1], cell = below(w, RIG_CELLS - 40), n = (1 + below(w, 40)) * row;
    char *bytes = malloc(n);
    ggml_backend_tensor_get(t, bytes, below(w, RIG_CELLS - 40) * row, n);
    ggml_backend_tensor_set(t, bytes, cell * row, n);
    free(bytes);
}

/* A copy as ggml makes it: bytes of one tensor are set from those of another one; or by way of a
 * card, which copies by addresses. */
static void copy(wanderer *w)
{
    const gg_tensor *from = w->r->k[below(w, RIG_LAYERS)];
    gg_tensor *to = w->r->v[below(w, RIG_LAYERS)];
    const size_t row = to->nb[1], cell = below(w, RIG_CELLS - 40);
    const size_t at = below(w, RIG_CELLS - 40) * row, bytes = (1 + below(w, 40)) * row;
    if (below(w, 2) || !w->r->has_card) {
        ggml_backend_tensor_set(to, (const char *)from->data + cell * row, at, bytes);
        return;
    }
    gg_tensor *there = ggml_new_tensor_4d(w->r->context, GG_F16, (int64_t)bytes / 2, 1, 1, 1);
    standin_allocate(standin_card_type(), &there, 1);
    ggml_backend_tensor_set(there, (const char *)from->data + cell * row, 0, bytes);
    ggml_backend_tensor_get(there, (char *)to->data + at, 0, bytes);
    ggml_backend_buffer_free(there->buffer);
}

static void edit(wanderer *w)
{
    const int who = (int)below(w, SEQUENCES), other = (who + w->streams) % SEQUENCES;
    uint64_t *set = w->sets[who];
    switch (below(w, 8)) {
    case 0: /* the same cells in another sequence */
        memcpy(w->sets[other], set, sizeof w->sets[other]);
        break;
    case 1: /* holes */
        for (uint32_t n = below(w, 30); n; n--)
            rig_take(set, below(w, RIG_CELLS));
        break;
    case 2: /* the end is cut */
        for (uint32_t n = below(w, 100), cell = RIG_CELLS; n; n--)
            rig_take(set, --cell);
        break;
    case 3:
        for (int layer = 0; layer < RIG_LAYERS; layer++)
            assert_int_equal(rig_shift(w->r, layer), GG_SUCCESS);
        break;
    case 4:
        state(w);
        break;
    case 5:
        memset(set, 0, sizeof w->sets[who]);
        break;
    case 6:
        if (!below(w, 8))
            standin_clear(w->r->buffer, below(w, 2) ? 0x11 : 0);
        break;
    case 7:
        copy(w);
        break;
    default:
        break;
    }
}

static double prompts_served; /* rows of prompts that the library computed */
static size_t went_away;      /* pages of llama.cpp's, in all steps */
static uint64_t memory_at_end;

/* The contents of llama.cpp's tensors, as a number. */
static uint64_t memory_of(const rig *r)
{
    uint64_t sum = 14695981039346656037u;
    for (int i = 0; i < 2 * RIG_LAYERS; i++) {
        const gg_tensor *t = i % 2 ? r->k[i / 2] : r->v[i / 2];
        const size_t bytes = t->nb[2] * (size_t)t->ne[2];
        unsigned char *content = malloc(bytes);
        ggml_backend_tensor_get(t, content, 0, bytes);
        for (size_t at = 0; at < bytes; at++)
            sum = (sum ^ content[at]) * 1099511628211u;
        free(content);
    }
    return sum;
}

static double wander(const rig_options *o, uint64_t seed, int actions)
{
    wanderer w = {.r = rig_open(o), .streams = o->streams ? o->streams : 1};
    w.r->random = seed;
    went_away = 0;
    for (int action = 0; action < actions; action++) {
        if (below(&w, 3) == 0)
            edit(&w);
        const int sequences = 1 + (int)below(&w, SEQUENCES);
        const int from = (int)below(&w, (uint32_t)(SEQUENCES - sequences + 1));
        step(&w, from, sequences, 1 + (int)below(&w, 4));
        went_away += rig_away();
    }
    memory_at_end = memory_of(w.r);
    const double worst = w.r->worst;
    prompts_served = kvl_the_plugin()->counts.prompt_served;
    rig_end(w.r);
    return worst;
}

TEST(no_output_is_wrong)
{
    const int types[] = {GG_F16, GG_BF16, GG_Q8_0};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        for (int streams = 1; streams <= SEQUENCES; streams += SEQUENCES - 1) {
            const rig_options o = {.type = types[i], .streams = streams};
            assert_true(wander(&o, 1 + i, 150) < ROUNDING);
            assert_int_equal(prompts_served, 0);
        }
}

TEST(no_prompt_is_wrong)
{
    for (int streams = 1; streams <= SEQUENCES; streams += SEQUENCES - 1) {
        const rig_options o = {.streams = streams, .setting = "budget=full rows=2 prompts=kvferry"};
        assert_true(wander(&o, 9, 150) < ROUNDING);
        assert_true(prompts_served > 100);
    }
}

/* Pages of llama.cpp's go wherever they can, and its memory is what it is without the plug-in. */
TEST(no_page_comes_back_wrong)
{
    static const char *const settings[] = {"budget=full", "budget=128 sink=16 local=32 rows=8",
                                           "budget=full rows=4 prompts=kvferry verify=3"};
    for (int i = 0; i < 12; i += rig_has_card() ? 5 : 1) {
        const int streams = i % 2 ? SEQUENCES : 1;
        rig_options o = {.streams = streams, .setting = settings[i / 2 % 3], .away_at = 1 + i % 3};
        const double worst = wander(&o, 20 + (uint64_t)i, 150);
        assert_true(i / 2 % 3 == 1 || worst < ROUNDING); /* a budget chooses */
        assert_true(went_away > 100);
        const uint64_t memory = memory_at_end;
        o.is_plain = 1;
        wander(&o, 20 + (uint64_t)i, 150);
        assert_true(went_away == 0 && memory == memory_at_end);
    }
}

TEST(pages_that_come_back_empty_are_seen)
{
    rig_options o = {.away_at = 1, .without = "pages"};
    assert_true(wander(&o, 20, 150) > 0.2);
    const uint64_t memory = memory_at_end;
    o.is_plain = 1;
    wander(&o, 20, 150);
    assert_true(memory != memory_at_end);
}

TEST(without_proofs_outputs_are_wrong)
{
    assert_true(wander(&(rig_options){.without = "writes"}, 1, 150) > 0.2);
    assert_true(wander(&(rig_options){.no_hooks = 1}, 1, 150) > 0.2);
}

/* ---- what is served, what is left, and what is said ---- */

TEST_IF(!rig_has_card(), steps_are_served_and_prompts_left)
{
    rig *r = rig_open(&(rig_options){.setting = "budget=full rows=4"});
    const kvl_counts *c = &kvl_the_plugin()->counts;
    rig_set sets[5] = {{0}};
    assert_int_equal(rig_begin(r, 0, 100, sets[0]), GG_SUCCESS);
    assert_true(r->by_kvferry);
    assert_int_equal(c->served, RIG_LAYERS);
    for (int i = 1; i < 5; i++)
        memcpy(sets[i], sets[0], sizeof sets[i]);
    assert_int_equal(rig_attend(r, 0, 5, 0, 1, sets), GG_SUCCESS);
    assert_false(r->by_kvferry);
    assert_int_equal(c->prompt, 5);
    assert_int_equal(rig_attend(r, 0, 4, 0, 1, sets), GG_SUCCESS);
    assert_true(r->by_kvferry);
    assert_true(r->worst < ROUNDING);
    kvl_summary(kvl_the_plugin());
    const char *text = rig_end(r);
    assert_non_null(strstr(text, "kvferry: serving 2 layers, 832 cells of room"));
    assert_non_null(strstr(text, "kvferry: attended served=6 stock=0 share=1.0000 prompt=5"));
}

/* Steps are compared with llama.cpp's own, and keep their outputs. */
TEST(verify_sees_what_is_wrong)
{
    for (int is_blind = 0; is_blind < 2; is_blind++) {
        rig *r = rig_open(&(rig_options){.setting = "budget=full verify=1",
                                         .without = is_blind ? "writes" : NULL});
        const kvl_counts *c = &kvl_the_plugin()->counts;
        rig_set set[1] = {{0}};
        for (int turn = 0; turn < 3; turn++)
            assert_int_equal(rig_begin(r, 0, 100, set[0]), GG_SUCCESS);
        assert_int_equal(c->verify, 3 * RIG_LAYERS);
        assert_int_equal(c->verify, c->served);
        assert_int_equal(c->wrong, is_blind ? 2 * RIG_LAYERS : 0);
        assert_true((r->worst > ROUNDING) == is_blind);
        assert_true(!strstr(rig_end(r), "differs from llama.cpp's") == !is_blind);
    }
}

static void alibi(gg_tensor *node)
{
    const float bias = 8.0f;
    memcpy(&node->op_params[1], &bias, sizeof bias);
}

static void mask_of_numbers(gg_tensor *node)
{
    ((uint16_t *)node->src[3]->data)[3] = 0x3c00;
}

static void values_are_keys(gg_tensor *node)
{
    node->src[2] = node->src[1];
}

static void queries_beyond_f16(gg_tensor *node)
{
    ((float *)node->src[0]->data)[5] = 1e6f;
}

static void no_scale(gg_tensor *node)
{
    memset(&node->op_params[0], 0, sizeof(float));
}

static void another_scale(gg_tensor *node)
{
    const float scale = 0.7f;
    memcpy(&node->op_params[0], &scale, sizeof scale);
}

/* A layer whose scale changes is attended with the new one. */
TEST(scales_may_change)
{
    rig *r = rig_open(&(rig_options){0});
    rig_set set[1] = {{0}};
    float own[RIG_HEADS * RIG_DIM];
    assert_int_equal(rig_begin(r, 0, 70, set[0]), GG_SUCCESS);
    r->spoil = another_scale;
    gg_backend *const by[] = {r->backend, r->cpu};
    for (int i = 0; i < 2; i++) {
        r->backend = by[i];
        r->random = 99;
        assert_int_equal(rig_attend(r, 1, 1, 0, 1, set), GG_SUCCESS);
        assert_true(r->by_kvferry == !i);
        for (int d = 0; i && d < RIG_HEADS * RIG_DIM; d++)
            assert_true(fabsf(own[d] - r->out[d]) < ROUNDING);
        memcpy(own, r->out, sizeof own);
    }
    r->backend = by[0];
    rig_end(r);
}

/* Left to llama.cpp: with its bits, counted, and said once. */
TEST(what_is_not_understood_is_left)
{
    const struct {
        void (*spoil)(gg_tensor *node);
        const char *said;
    } cases[] = {{alibi, "ALiBi"},
                 {mask_of_numbers, "the mask has values"},
                 {values_are_keys, "one tensor (MLA)"},
                 {queries_beyond_f16, "beyond F16"},
                 {no_scale, "scale, cap or sinks"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        float own[RIG_HEADS * RIG_DIM];
        rig_set set[1] = {{0}};
        if (rig_has_card() && cases[i].spoil == queries_beyond_f16)
            continue; /* they are not looked at there */
        rig *r = rig_open(&(rig_options){0});
        assert_int_equal(rig_begin(r, 0, 70, set[0]), GG_SUCCESS);
        r->spoil = cases[i].spoil;
        for (int turn = 0; turn < 2; turn++) {
            r->random = 99;
            assert_int_equal(rig_attend(r, 1, 1, 0, 1, set), GG_SUCCESS);
            assert_false(r->by_kvferry);
        }
        memcpy(own, r->out, sizeof own);
        const char *text = rig_said(), *first = strstr(text, cases[i].said);
        assert_non_null(first);
        assert_null(strstr(first + 1, cases[i].said));
        /* The CPU alone; of a card, from copies and back. */
        gg_backend *ours = r->backend;
        r->backend = r->cpu;
        r->has_card = 0;
        r->random = 99;
        assert_int_equal(rig_attend(r, 1, 1, 0, 1, set), GG_SUCCESS);
        assert_memory_equal(own, r->out, sizeof own);
        r->backend = ours;
        rig_end(r);
    }
}

TEST(values_beyond_f16_leave_the_cache)
{
    rig *r = rig_open(&(rig_options){.type = GG_BF16});
    rig_set set[1] = {{0}};
    assert_int_equal(rig_begin(r, 0, 70, set[0]), GG_SUCCESS);
    const uint16_t large = kvf_bf16_from_float(1e6f);
    ggml_backend_tensor_set(r->v[1], &large, 3 * r->v[1]->nb[1], sizeof large);
    for (int turn = 0; turn < 3; turn++) {
        assert_int_equal(rig_attend(r, 1, 1, 0, 1, set), GG_SUCCESS);
        assert_false(r->by_kvferry);
    }
    assert_true(r->worst < ROUNDING);
    assert_non_null(strstr(rig_end(r), "beyond F16"));
}

TEST(attention_that_is_off_is_said)
{
    rig *r = rig_open(&(rig_options){0});
    const int64_t cell = 3;
    for (int turn = 0; turn < 4; turn++)
        assert_int_equal(rig_write(r, 0, &cell, 1), GG_SUCCESS);
    assert_int_equal(kvl_the_plugin()->counts.left[KVL_NO_FLASH], 3);
    kvl_summary(kvl_the_plugin());
    const char *text = rig_end(r), *first = strstr(text, "add -fa on");
    assert_non_null(first);
    assert_null(strstr(first + 1, "add -fa on"));
    assert_non_null(strstr(text, "stock.no_flash=3"));
}

/* Contexts come and go; the cache of one goes before its backend. */
TEST_IF(!rig_has_card(), contexts_are_apart)
{
    rig *a = rig_open(&(rig_options){0}), *b = rig_open(&(rig_options){.streams = 2});
    rig_set set[1] = {{0}}, more[2] = {{0}};
    assert_int_equal(rig_begin(a, 0, 60, set[0]), GG_SUCCESS);
    assert_int_equal(rig_begin(b, 0, 90, more[0]), GG_SUCCESS);
    assert_int_equal(rig_attend(a, 0, 1, 0, 1, set), GG_SUCCESS);
    assert_true(a->by_kvferry);
    /* The cache of one goes before its backend, and another one comes, perhaps in its place. */
    ggml_backend_buffer_free(a->buffer);
    rig_make_cache(a);
    memset(set, 0, sizeof set);
    assert_int_equal(rig_begin(a, 0, 80, set[0]), GG_SUCCESS);
    assert_true(a->by_kvferry);
    assert_int_equal(rig_attend(b, 1, 1, 0, 1, more), GG_SUCCESS);
    assert_true(b->by_kvferry);
    assert_true(a->worst < ROUNDING && b->worst < ROUNDING);
    rig_close(b);
    rig_end(a);
}

/* A buffer that is freed has its own functions again. */
TEST_IF(!rig_has_card(), a_buffer_that_goes_has_its_own_functions)
{
    rig *r = rig_open(&(rig_options){0});
    rig_set set[1] = {{0}};
    assert_int_equal(rig_begin(r, 0, 60, set[0]), GG_SUCCESS);
    gg_buffer *buffer = r->buffer, *plain = ggml_backend_buft_alloc_buffer(buffer->buft, 64);
    assert_true(buffer->iface.clear != plain->iface.clear);
    buffer->iface.free_buffer(buffer);
    assert_memory_equal(&buffer->iface, &plain->iface, sizeof plain->iface);
    assert_null(kvl_the_plugin()->buffers);
    buffer->iface.free_buffer = NULL; /* it has run */
    ggml_backend_buffer_free(plain);
    rig_end(r);
}

/* Pages within a tensor of the cache, and those of them that are in memory. */
static void count_pages(const gg_tensor *t, size_t *pages, size_t *resident)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), bytes = t->nb[2] * (size_t)t->ne[2];
    char *at = (char *)t->data + (page - (uintptr_t)t->data % page) % page;
    for (; at + page <= (char *)t->data + bytes; at += page) {
        unsigned char is_resident = 0;
        assert_int_equal(mincore(at, page, &is_resident), 0);
        *pages += 1;
        *resident += is_resident & 1;
    }
}

static size_t resident_pages(const rig *r, size_t *pages)
{
    size_t resident = 0;
    *pages = 0;
    for (int l = 0; l < RIG_LAYERS; l++)
        count_pages(r->k[l], pages, &resident), count_pages(r->v[l], pages, &resident);
    return resident;
}

/* llama.cpp clears a cache, so that all of its memory is there before a token is. */
TEST_IF(!rig_has_card(), what_was_never_written_takes_no_memory)
{
    rig *r = rig_open(&(rig_options){.streams = 4});
    for (int turn = 0; turn < 2; turn++) {
        rig_set set[1] = {{0}};
        size_t pages;
        assert_int_equal(resident_pages(r, &pages), 0);
        assert_true(pages > 100);
        assert_int_equal(rig_begin(r, 0, 60, set[0]), GG_SUCCESS);
        const size_t written = resident_pages(r, &pages);
        assert_true(written > 0 && written < pages / 4);
        assert_true(r->worst < ROUNDING);
        standin_clear(r->buffer, 0x11);
        assert_int_equal(resident_pages(r, &pages), pages);
        standin_clear(r->buffer, 0);
    }
    rig_end(r);
}

/* A page that goes takes no memory; a token that the library has in other bits stays. */
TEST(tokens_are_there_once)
{
    rig *r = rig_open(&(rig_options){.streams = 4, .away_at = 1});
    rig_set set[1] = {{0}};
    size_t pages;
    r->attentions = 1; /* nobody looks at these outputs */
    assert_int_equal(rig_begin(r, 0, 250, set[0]), GG_SUCCESS);
    const size_t away = rig_away(), row = r->v[0]->nb[1];
    assert_true(away >= RIG_LAYERS * 2 * 5);
    const size_t resident = resident_pages(r, &pages);
    assert_true(resident < RIG_LAYERS * 2 * 4);
    /* A reader brings pages back, and they go again: what it read is what was written. */
    uint16_t key[2][RIG_KV * RIG_DIM];
    for (int i = 0; i < 2; i++) {
        ggml_backend_tensor_get(r->k[0], key[i], 120 * row, row);
        assert_int_equal(rig_away(), away);
    }
    assert_memory_equal(key[0], key[1], row);
    assert_int_equal(resident_pages(r, &pages), resident);
    /* The library makes a token of NaN of one that has a number beyond: its page is not put away.
     */
    key[0][3] = 0x7c00;
    ggml_backend_tensor_set(r->k[0], key[0], 120 * row, row);
    assert_int_equal(rig_attend(r, 0, 1, 0, 1, set), GG_SUCCESS);
    assert_true(rig_away() < away);
    ggml_backend_tensor_get(r->k[0], key[1], 120 * row, row);
    assert_memory_equal(key[0], key[1], row);
    assert_non_null(strstr(rig_end(r), " MiB instead of llama.cpp's "));
    static const rig_options both[] = {{.type = GG_BF16, .away_at = 1},
                                       {.setting = "budget=full copies=two", .away_at = 1}};
    for (size_t i = 0; i < 2; i++) {
        r = rig_open(&both[i]);
        assert_int_equal(rig_begin(r, 0, 250, set[0]), GG_SUCCESS);
        assert_int_equal(rig_away(), 0);
        assert_non_null(strstr(rig_end(r), " MiB beside llama.cpp's "));
    }
}

/* By the wish of a user: what a reader brings back is near what was written, and the same each
 * time. */
TEST_IF(!rig_has_card(), quantized_tokens_are_there_once)
{
    rig *r = rig_open(&(rig_options){.setting = "budget=full pages=k8v8 copies=one", .away_at = 1});
    rig_set set[1] = {{0}};
    const size_t row = r->k[0]->nb[1];
    uint16_t key[3][RIG_KV * RIG_DIM];
    r->attentions = 1;
    assert_int_equal(rig_begin(r, 0, 250, set[0]), GG_SUCCESS);
    for (size_t i = 0; i < RIG_KV * RIG_DIM; i++)
        key[0][i] = kvf_fp16_from_float((float)(i * 37 % 61) / 61.0f - 0.5f);
    for (size_t cell = 120; cell < 124; cell++) /* enough that pages go */
        ggml_backend_tensor_set(r->k[0], key[0], cell * row, row);
    assert_int_equal(rig_attend(r, 0, 1, 0, 1, set), GG_SUCCESS);
    const size_t away = rig_away();
    assert_true(away >= RIG_LAYERS * 2 * 5);
    for (int i = 1; i < 3; i++) {
        ggml_backend_tensor_get(r->k[0], key[i], 120 * row, row);
        assert_int_equal(rig_away(), away);
    }
    assert_memory_equal(key[1], key[2], row);
    assert_memory_not_equal(key[0], key[1], row);
    for (size_t i = 0; i < RIG_KV * RIG_DIM; i++)
        assert_true(fabsf(kvf_fp16_to_float(key[0][i]) - kvf_fp16_to_float(key[1][i])) < 0.05f);
    assert_non_null(strstr(rig_end(r), ", which comes back quantized, budget "));
}

static void *generate(void *user)
{
    rig *r = user;
    rig_set set[1] = {{0}};
    for (int64_t cell = 0; cell < 120; cell++)
        if (rig_begin(r, cell, cell + 1, set[0]) != GG_SUCCESS)
            abort();
    return NULL;
}

TEST(contexts_run_in_threads)
{
    rig *r[2] = {rig_open(&(rig_options){.away_at = 1}), rig_open(&(rig_options){0})};
    pthread_t threads[2];
    for (int i = 0; i < 2; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, generate, r[i]), 0);
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    assert_true(r[0]->worst < ROUNDING && r[1]->worst < ROUNDING);
    rig_close(r[0]);
    rig_end(r[1]);
}
