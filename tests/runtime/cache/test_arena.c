/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The prefill arena changes where pages lie for a while, and no bit: the same history of prefill,
 * decode, forks and ends is run on two caches, one with an arena and one without, and everything
 * that comes out is compared.
 *
 * Looks inside, because the arena is the device's choice and no setting.
 */

#include "harness.h"

#include <string.h>

#include "cache.h"
#include "retain.h"
#include "slots.h"

#define ALIVE  4u
#define LAYERS 2u
#define TOKENS 460u
#define CALLS  160u

/* One of the two caches. Outputs of all calls, in order. */
typedef struct side {
    test_world w;
    kvf_sequence *s[ALIVE];
    char *out;
    size_t used, room;
} side;

typedef struct history {
    side sides[2]; /* without and with an arena */
    test_tokens t;
    test_random r;
    size_t row; /* bytes of the output of one token */
} history;

static void side_open(side *x, const kvf_cache_config *cc, uint32_t arena, uint32_t delay_seed)
{
    const kvf_runtime_config rc = test_runtime_config();
    test_hooks.delay_seed = delay_seed;
    test_hooks.prefill_arena = arena;
    test_world_open(&x->w, &rc, cc);
    assert_int_equal(x->w.cache->kv_groups[0].dims.arena_blocks != 0, arena == 1);
    x->room = 24u << 20;
    x->out = test_alloc(x->room);
}

static char *side_out(side *x, size_t bytes)
{
    char *at = x->out + x->used;
    x->used += bytes;
    assert_true(x->used <= x->room);
    return at;
}

static void prefill_some(history *h, uint32_t i, uint32_t layer, uint32_t tokens)
{
    for (uint32_t k = 0; k < 2; k++) {
        side *x = &h->sides[k];
        const uint32_t at = kvf_sequence_length(x->s[i], layer);
        const uint32_t n = at + tokens > TOKENS ? TOKENS - at : tokens;
        if (n)
            test_prefill(&x->w, x->s[i], &h->t,
                         &(test_range){.layer = layer, .first = at, .count = n, .chunk = 48},
                         side_out(x, n * h->row));
    }
}

static void decode_some(history *h, uint32_t i, uint32_t steps)
{
    for (uint32_t n = 0; n < steps; n++)
        for (uint32_t layer = 0; layer < LAYERS; layer++)
            for (uint32_t k = 0; k < 2; k++) {
                side *x = &h->sides[k];
                const uint32_t at = kvf_sequence_length(x->s[i], layer);
                if (at < TOKENS)
                    test_decode(&x->w, x->s[i], &h->t, layer, at, side_out(x, h->row), NULL);
            }
}

/* Pages as the caller sees them, after a wait. */
static void compare_pages(history *h, uint32_t i)
{
    const uint32_t layer = test_random_below(&h->r, LAYERS);
    const uint32_t pages = kvf_sequence_length(h->sides[0].s[i], layer) / 8;
    for (uint32_t k = 0; k < 2; k++)
        test_wait(&h->sides[k].w);
    for (uint32_t n = 0; n < 4 && pages; n++) {
        const uint32_t page = test_random_below(&h->r, pages), head = n % 2;
        const size_t bytes = kvf_page_bytes(&h->sides[0].w.cache->kv_groups[0].dims.paging.shape);
        const void *one = kvf_page_address(h->sides[0].s[i], layer, head, page);
        const void *other = kvf_page_address(h->sides[1].s[i], layer, head, page);
        assert_memory_equal(test_seen(one, bytes), test_seen(other, bytes), bytes);
    }
}

static void fork_or_create(history *h, uint32_t i)
{
    const uint32_t parent = test_random_below(&h->r, ALIVE);
    for (uint32_t k = 0; k < 2; k++) {
        side *x = &h->sides[k];
        if (x->s[parent])
            test_ok(&x->w, kvf_sequence_fork(x->w.cache, x->s[parent], x->w.stream, &x->s[i]));
        else
            x->s[i] = test_sequence(&x->w);
    }
}

/* About half of the tokens, other ones per KV head; a layer that was re-formed refuses. */
static void keep_some(history *h, uint32_t i, uint32_t layer)
{
    const uint32_t length = kvf_sequence_length(h->sides[0].s[i], layer), heads = 2;
    const uint32_t count = length / 2;
    uint32_t ids[2 * TOKENS];
    kvf_status status[2];
    if (count == 0)
        return;
    for (uint32_t k = 0; k < heads; k++)
        for (uint32_t n = 0; n < count; n++)
            ids[k * count + n] = 2 * n + test_random_below(&h->r, 2);
    for (uint32_t k = 0; k < 2; k++) {
        side *x = &h->sides[k];
        void *work = test_alloc(kvf_keep_work_bytes(x->w.cache));
        status[k] = kvf_sequence_keep(x->w.cache, x->s[i], layer, ids, count, work, x->w.stream);
        test_wait(&x->w);
        test_release(work);
    }
    assert_int_equal(status[0], status[1]);
    assert_true(status[0] == KVF_OK || status[0] == KVF_UNSUPPORTED);
}

static void one_call(history *h)
{
    const uint32_t i = test_random_below(&h->r, ALIVE), what = test_random_below(&h->r, 18);
    const uint32_t layer = test_random_below(&h->r, LAYERS);
    if (!h->sides[0].s[i]) {
        fork_or_create(h, i);
    } else if (what == 16) {
        keep_some(h, i, layer);
    } else if (what == 17) {
        for (uint32_t k = 0; k < 2; k++)
            test_ok(&h->sides[k].w, kvf_sequence_clear(h->sides[k].w.cache, h->sides[k].s[i]));
    } else if (what == 0) {
        for (uint32_t k = 0; k < 2; k++) {
            kvf_sequence_destroy(h->sides[k].s[i]);
            h->sides[k].s[i] = NULL;
        }
    } else if (what < 5) { /* layer after layer */
        for (uint32_t l = 0; l < LAYERS; l++)
            prefill_some(h, i, l, 100);
    } else if (what < 9) { /* a chunk of any layer */
        prefill_some(h, i, layer, 1 + test_random_below(&h->r, 48));
    } else if (what < 15) {
        decode_some(h, i, 1 + test_random_below(&h->r, 9));
    } else {
        compare_pages(h, i);
    }
}

static void run_history(const kvf_cache_config *cc, uint64_t seed, uint32_t delay_seed)
{
    history *h = test_alloc(sizeof *h);
    h->r = (test_random){seed};
    h->row = (size_t)cc->query_heads * cc->head_dim * test_dtype_bytes(cc->dtype);
    test_tokens_make(
        &h->t, cc,
        &(test_tokens_spec){.count = TOKENS, .seed = seed, .sharpness = 2.0f, .topics = 5});
    side_open(&h->sides[0], cc, 2, 0);
    side_open(&h->sides[1], cc, 1, delay_seed);
    const uint32_t calls = test_afford(CALLS);
    for (uint32_t n = 0; n < calls; n++)
        one_call(h);
    for (uint32_t k = 0; k < 2; k++)
        test_wait(&h->sides[k].w);
    assert_int_equal(h->sides[0].used, h->sides[1].used);
    assert_true(h->sides[0].used > 1000 * h->row);
    assert_memory_equal(h->sides[0].out, h->sides[1].out, h->sides[0].used);
    kvf_stats a, b;
    kvf_cache_stats(h->sides[0].w.cache, &a);
    kvf_cache_stats(h->sides[1].w.cache, &b);
    if (!test_on_cuda()) /* whose lists give away what they meet first */
        assert_int_equal(a.misses, b.misses);
    assert_int_equal(a.bytes_to_host, b.bytes_to_host);
    assert_true(a.refreshes > 0);
    for (uint32_t k = 0; k < 2; k++) {
        test_world_close(&h->sides[k].w);
        test_release(h->sides[k].out);
    }
    test_tokens_free(&h->t);
    test_release(h);
}

TEST(an_arena_changes_no_bit)
{
    const uint64_t seed = test_seed(811);
    static const struct {
        kvf_transfer transfer;
        uint32_t delay_seed;
        uint64_t device_bytes;
    } ways[] = {{KVF_TRANSFER_DIRECT, 0, 0},
                {KVF_TRANSFER_GATHER, 31, 0},
                {KVF_TRANSFER_GATHER, 37, UINT64_C(1) << 40}};
    for (uint32_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        kvf_cache_config cc = test_config_small();
        cc.layers = LAYERS;
        cc.dtype = KVF_BF16;
        cc.sequences_max = ALIVE;
        cc.transfer = ways[i].transfer;
        cc.device_bytes = ways[i].device_bytes;
        run_history(&cc, seed + i, ways[i].delay_seed);
    }
}

/* ---- chunk by chunk, layer by layer: every call takes the arena from another layer ---- */

/* How a prompt is read. */
typedef struct reading {
    uint32_t arena; /* test hook: 1 there is one, 2 there is none */
    uint32_t room;  /* halves of the pages that have slots */
    uint32_t chunk;
    uint32_t by_layer;       /* all chunks of a layer, then the next layer */
    uint32_t ignores_writes; /* no page gets a slot */
    uint32_t poisons;        /* what is sealed becomes NaN in host memory, chunk by chunk */
} reading;

static kvf_cache_plan plan_of(const kvf_cache_config *cc, uint32_t arena, uint64_t device_bytes)
{
    const kvf_runtime_config rc = test_runtime_config();
    kvf_cache_config c = *cc;
    kvf_runtime *runtime;
    kvf_cache_plan p;
    c.device_bytes = device_bytes;
    test_hooks.prefill_arena = arena;
    test_expect(NULL, test_runtime_open(&rc, &runtime, NULL), KVF_OK);
    test_expect(runtime, kvf_cache_plan_make(runtime, &c, &p, NULL), KVF_OK);
    kvf_runtime_close(runtime);
    return p;
}

static uint64_t total_of(const kvf_cache_plan *p)
{
    return p->device_kv_bytes + p->device_digest_bytes + p->device_table_bytes;
}

/* Bytes on the device with so many halves of the slots that pages could use. */
static uint64_t device_bytes_of(const kvf_cache_config *cc, const reading *r)
{
    const kvf_cache_plan least = plan_of(cc, r->arena, 0),
                         most = plan_of(cc, r->arena, UINT64_C(1) << 40);
    return r->room ? total_of(&least) + (total_of(&most) - total_of(&least)) * r->room / 2 : 0;
}

/* Nothing of a sealed block that is read there again can stay unseen. */
static void poison_pool(const kvf_sequence *s)
{
    for (uint32_t l = 0; l < LAYERS; l++) {
        const kvf_layer *layer = &s->layers[l];
        const kvf_kv_group *kv_group = layer->kv_group;
        const kvf_paging *p = &kv_group->dims.paging;
        for (uint32_t b = 0; b < layer->extent.sealed; b++) {
            const uint32_t page = b * p->block_pages;
            /* It is written back; of a streaming head there is none. */
            assert_true(kvf_page_address(s, l, 0, page) || kvf_page_address(s, l, 1, page));
            memset(kvf_page_pool_host(&kv_group->pool, layer->blocks[b]), 0xff, kvf_block_bytes(p));
        }
    }
}

/* Whether a page has a slot now. */
static bool has_slot(const kvf_kv_group *kv_group, uint32_t head, uint32_t page)
{
    const kvf_residency *r = &kv_group->residency;
    const int32_t slot =
        *(const int32_t *)test_seen(r->slot_of_page + (size_t)head * r->pages + page, sizeof slot);
    return slot >= 0 && kvf_slot_is_of(*(const uint64_t *)test_seen(
                                           r->words + (size_t)head * r->slots + (uint32_t)slot,
                                           sizeof *r->words),
                                       page);
}

/* Bytes of earlier pages that the next chunk of the layer reads in host memory: once each. */
static uint64_t bytes_to_read(const kvf_layer *layer)
{
    const kvf_kv_group *kv_group = layer->kv_group;
    const kvf_paging *p = &kv_group->dims.paging;
    const uint32_t end =
        kv_group->arena.owner == layer ? kv_group->arena.first : layer->extent.sealed;
    uint64_t pages = 0;
    for (uint32_t i = 0; kv_group->dims.arena_blocks && i < end * p->block_pages * p->kv_heads;
         i++) {
        const uint32_t block = i / p->kv_heads / p->block_pages;
        pages += !has_slot(kv_group, i % p->kv_heads,
                           layer->blocks[block].index * p->block_pages +
                               i / p->kv_heads % p->block_pages);
    }
    return pages * kvf_page_bytes(&p->shape);
}

/* Outputs of the whole prompt in `out`; returns bytes_prompt, which is what it must be. */
static uint64_t read_prompt(const reading *r, const test_tokens *t, kvf_cache_config cc, char *out,
                            size_t row)
{
    const uint32_t chunks = kvf_div_ceil_u32(TOKENS, r->chunk);
    uint64_t expected = 0;
    side x = {0};
    kvf_stats stats;
    cc.device_bytes = device_bytes_of(&cc, r);
    side_open(&x, &cc, r->arena, r->poisons ? 31 : 0);
    x.w.runtime->test_hooks.ignores_writes = r->ignores_writes;
    kvf_sequence *s = test_sequence(&x.w);
    for (uint32_t i = 0; i < LAYERS * chunks; i++) {
        const uint32_t layer = r->by_layer ? i / chunks : i % LAYERS;
        const uint32_t at = (r->by_layer ? i % chunks : i / LAYERS) * r->chunk;
        const test_range range = {.layer = layer,
                                  .first = at,
                                  .count = kvf_min_u32(r->chunk, TOKENS - at),
                                  .chunk = r->chunk};
        expected += bytes_to_read(&s->layers[layer]);
        test_prefill(&x.w, s, t, &range, out + (layer * TOKENS + at) * row);
        test_wait(&x.w);
        if (r->poisons)
            poison_pool(s);
    }
    kvf_cache_stats(x.w.cache, &stats);
    assert_int_equal(stats.bytes_prompt, expected);
    test_world_close(&x.w);
    test_release(x.out);
    return stats.bytes_prompt;
}

/* All earlier blocks of every chunk, once each. */
static uint64_t every_block_once(const kvf_cache_config *cc, uint32_t chunk, size_t row)
{
    const uint32_t block = plan_of(cc, 1, 0).block_size;
    uint64_t tokens = 0;
    for (uint32_t at = chunk; at < TOKENS; at += chunk)
        tokens += at < cc->local_tokens ? 0 : (at - cc->local_tokens) / block * block;
    return tokens * LAYERS * 2 * row / (cc->query_heads / cc->kv_heads);
}

typedef enum read_bytes { NOTHING, SOME, ALL, ANY } read_bytes;

/* With settings beside those of test_config_small. */
static void read_with(const char *settings, const reading *how, read_bytes wanted)
{
    kvf_cache_config cc = test_config_small();
    test_tokens t;
    cc.layers = LAYERS;
    cc.transfer = KVF_TRANSFER_GATHER;
    test_set(&cc, settings);
    const size_t row = (size_t)cc.query_heads * cc.head_dim * test_dtype_bytes(cc.dtype);
    const size_t bytes = LAYERS * TOKENS * row;
    char *want = test_alloc(bytes), *got = test_alloc(bytes);
    test_tokens_make(&t, &cc, &(test_tokens_spec){.count = TOKENS, .seed = 9, .sharpness = 2.0f});
    const reading without = {.arena = 2, .chunk = how->chunk};
    assert_int_equal(read_prompt(&without, &t, cc, want, row), 0);
    const uint64_t read = read_prompt(how, &t, cc, got, row);
    assert_memory_equal(got, want, bytes);
    const uint64_t all = every_block_once(&cc, how->chunk, row);
    if (wanted == NOTHING)
        assert_int_equal(read, 0);
    else if (wanted == ALL)
        assert_int_equal(read, all);
    else
        assert_in_range(read, wanted == SOME, all - 1);
    test_tokens_free(&t);
    test_release(want);
    test_release(got);
}

TEST(a_chunk_reads_what_is_on_the_device_there)
{
    static const char *const settings[] = {
        "",
        "head_mask=1001 streaming_sink=8 streaming_recent=40",
        "dtype=bf16 page_size=4 sink_tokens=20 local_tokens=40",
        "select=dynamic static_ratio=0 digest=codes local_tokens=1 sink_tokens=0",
    };
    static const uint32_t chunks[] = {17, 48, 100};
    for (uint32_t i = 0; i < test_afford(sizeof settings / sizeof *settings); i++)
        for (uint32_t c = 0; c < sizeof chunks / sizeof *chunks; c++) {
            if (!test_takes(c))
                continue;
            reading r = {.arena = 1, .chunk = chunks[c]};
            read_with(settings[i], &r, SOME);
            r.room = 1;
            read_with(settings[i], &r, ANY);
            r.room = 2;
            r.poisons = 1;
            read_with(settings[i], &r, NOTHING);
        }
    read_with("", &(reading){.arena = 1, .chunk = 48, .by_layer = 1, .poisons = 1}, NOTHING);
    read_with("", &(reading){.arena = 1, .chunk = 48, .ignores_writes = 1}, ALL);
    read_with("", &(reading){.arena = 2, .chunk = 48, .room = 2}, NOTHING); /* not counted */
}

/* A number that has no room for it leaves it out, and what a step needs is still refused by name.
 */
TEST(the_arena_gives_way)
{
    const kvf_runtime_config rc = test_runtime_config();
    kvf_cache_config cc = test_config_small();
    kvf_runtime *runtime;
    kvf_cache_plan none;
    kvf_error error;
    cc.transfer = test_transfer(KVF_TRANSFER_GATHER);
    const kvf_cache_plan with = plan_of(&cc, 0, 0);
    const uint64_t total = total_of(&with);
    assert_int_equal(with.prompt_bytes,
                     cc.tokens_max * 2 * cc.kv_heads * cc.head_dim * test_dtype_bytes(cc.dtype));
    assert_int_equal(plan_of(&cc, 0, total).prompt_bytes, with.prompt_bytes);
    const kvf_cache_plan without = plan_of(&cc, 0, total - 1);
    assert_int_equal(without.prompt_bytes, 0);
    assert_true(without.slots > with.slots); /* which get what is left */
    cc.device_bytes = total - with.prompt_bytes - 4096;
    test_expect(NULL, test_runtime_open(&rc, &runtime, NULL), KVF_OK);
    test_expect(runtime, kvf_cache_plan_make(runtime, &cc, &none, &error), KVF_INVALID);
    assert_non_null(strstr(error.text, "device_bytes = "));
    kvf_runtime_close(runtime);
    cc.transfer =
        test_transfer(KVF_TRANSFER_DIRECT); /* where pages stay, prompts find them there */
    cc.device_bytes = 0;
    assert_int_equal(plan_of(&cc, 0, 0).prompt_bytes, test_on_cuda() ? with.prompt_bytes : 0);
}
