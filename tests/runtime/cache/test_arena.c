/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The prefill arena changes where pages lie for a while, and no bit: the same history of prefill,
 * decode, forks and ends is run on two caches, one with an arena and one without, and everything
 * that comes out is compared.
 *
 * Looks inside, because the arena is the device's choice and no setting.
 */

#include "harness.h"

#include "cache.h"
#include "retain.h"
#include "sequence.h"

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
    kvf_runtime_config rc = test_runtime_config();
    kvf_cache_config fitting = *cc;
    test_seams.delay_seed = delay_seed;
    fitting.transfer = test_transfer(cc->transfer);
    x->w.config = *cc;
    test_expect(NULL, test_runtime_open(&rc, &x->w.runtime, NULL), KVF_OK);
    x->w.runtime->seams.prefill_arena = arena;
    test_ok(&x->w, kvf_stream_create(x->w.runtime, &x->w.stream));
    test_ok(&x->w, kvf_cache_open(x->w.runtime, &fitting, &x->w.cache, NULL));
    assert_int_equal(x->w.cache->parts[0].dims.arena_blocks != 0, arena == 1);
    x->room = 24u << 20;
    x->out = test_alloc(x->room);
    assert_non_null(x->out);
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
        const size_t bytes = kvf_page_bytes(&h->sides[0].w.cache->parts[0].dims.paging.shape);
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
        void *work = test_alloc(kvf_keep_work_bytes(x->w.cache) + 64);
        assert_non_null(work);
        void *aligned = (void *)(((uintptr_t)work + 63) / 64 * 64);
        status[k] = kvf_sequence_keep(x->w.cache, x->s[i], layer, ids, count, aligned, x->w.stream);
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
    assert_non_null(h);
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

static void an_arena_changes_no_bit(void **state)
{
    const uint64_t seed = test_seed(811);
    static const struct {
        kvf_transfer transfer;
        uint32_t delay_seed;
    } ways[] = {{KVF_TRANSFER_DIRECT, 0}, {KVF_TRANSFER_GATHER, 31}, {KVF_TRANSFER_GATHER, 37}};
    for (uint32_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        kvf_cache_config cc = test_config_small();
        cc.layers = LAYERS;
        cc.dtype = KVF_BF16;
        cc.sequences_max = ALIVE;
        cc.transfer = ways[i].transfer;
        run_history(&cc, seed + i, ways[i].delay_seed);
    }
}

/* Prefill layer after layer finds every earlier token of its layer on the device. */
static void layer_major_prefill_stays_in_the_arena(void **state)
{
    kvf_cache_config cc = test_config_small();
    test_tokens t;
    side x = {0};
    cc.layers = LAYERS;
    test_tokens_make(&t, &cc, &(test_tokens_spec){.count = 300, .seed = 5, .sharpness = 1.0f});
    side_open(&x, &cc, 1, 0);
    kvf_sequence *s = test_sequence(&x.w);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        for (uint32_t at = 0; at < 300; at += 50) {
            const test_range range = {.layer = layer, .first = at, .count = 50, .chunk = 50};
            test_prefill(&x.w, s, &t, &range, NULL);
            const kvf_prefill_arena *a = &x.w.cache->parts[0].arena;
            assert_ptr_equal(a->owner, &s->layers[layer]);
            assert_int_equal(a->first, 0);
            assert_int_equal(a->end, s->layers[layer].sealed);
        }
    }
    float *out = test_scratch(256 * sizeof *out);
    test_decode(&x.w, s, &t, 0, 0, out, NULL);
    assert_ptr_equal(x.w.cache->parts[0].arena.owner, &s->layers[1]); /* another layer decodes */
    test_decode(&x.w, s, &t, 1, 0, out, NULL);
    assert_null(x.w.cache->parts[0].arena.owner);
    test_wait(&x.w);
    const kvf_cache_plan *plan = kvf_cache_memory(x.w.cache);
    assert_true(plan->device_kv_bytes > x.w.cache->parts[0].dims.arena_blocks *
                                            kvf_block_bytes(&x.w.cache->parts[0].dims.paging));
    test_world_close(&x.w);
    test_release(x.out);
    test_tokens_free(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_arena_changes_no_bit),
        cmocka_unit_test(layer_major_prefill_stays_in_the_arena),
    };
    return cmocka_run_group_tests_name("runtime: arena", tests, NULL, NULL);
}
