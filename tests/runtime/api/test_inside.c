/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A look inside: after any mix of sequences the page pool and the slot tables keep their invariants
 * and no block is lost.
 */

#include "harness.h"

#include "cache.h"

#define ALIVE 5u

typedef struct herd {
    test_world w;
    test_tokens t;
    kvf_sequence *s[ALIVE];
    test_random r;
    _Alignas(16) float out[128 * 256];
} herd;

/* Appends up to `tokens` to one layer; a full cache is fine. */
static void grow(herd *h, kvf_sequence *s, uint32_t layer, uint32_t tokens)
{
    const uint32_t at = kvf_sequence_length(s, layer), room = h->t.count - at;
    const uint32_t n = tokens < room ? tokens : room;
    if (n == 0)
        return;
    kvf_status status;
    if (test_random_below(&h->r, 2)) {
        const kvf_prefill_args a = {.sequence = s,
                                    .layer = layer,
                                    .tokens = n,
                                    .q = test_random_below(&h->r, 3) ? test_q(&h->t, layer, at)
                                                                     : NULL,
                                    .k = test_k(&h->t, layer, at),
                                    .v = test_v(&h->t, layer, at),
                                    .out = h->out};
        status = kvf_prefill(h->w.cache, &a, h->w.stream);
    } else {
        const kvf_decode_args a = test_step_args(&s, &h->t, layer, at, h->out);
        status = kvf_decode(h->w.cache, &a, h->w.stream);
    }
    if (status != KVF_OK)
        test_expect(h->w.runtime, status, KVF_FULL);
}

static void check_invariants(herd *h)
{
    kvf_cache *c = h->w.cache;
    test_wait(&h->w);
    assert_true(kvf_page_pool_is_valid(&c->kv_groups[0].pool));
    assert_true(test_residency_is_valid(&c->kv_groups[0].residency));
    for (uint32_t i = 0; i < ALIVE; i++)
        for (uint32_t layer = 0; h->s[i] && layer < c->config.layers; layer++) {
            const kvf_layer *l = &h->s[i]->layers[layer];
            assert_int_equal(l->extent.sealed, kvf_sealed_blocks(l->kv_group, l->extent.length));
            for (uint32_t p = 0; p < l->extent.sealed; p++)
                assert_true(kvf_page_pool_references(&c->kv_groups[0].pool, l->blocks[p]) >= 1);
        }
}

static void one_change(herd *h)
{
    kvf_sequence **s = &h->s[test_random_below(&h->r, ALIVE)];
    const uint32_t what = test_random_below(&h->r, 16);
    if (!*s) {
        kvf_sequence *parent = h->s[test_random_below(&h->r, ALIVE)];
        if (parent && what < 8)
            test_ok(&h->w, kvf_sequence_fork(h->w.cache, parent, h->w.stream, s));
        else
            test_ok(&h->w, kvf_sequence_create(h->w.cache, s));
    } else if (what == 1) {
        uint32_t end = kvf_sequence_length(*s, 0);
        end = kvf_max_u32(end, kvf_sequence_length(*s, 1));
        test_ok(&h->w, kvf_sequence_truncate(h->w.cache, *s, test_random_below(&h->r, end + 1),
                                             h->w.stream));
    } else if (what == 0) {
        kvf_sequence_destroy(*s);
        *s = NULL;
    } else {
        grow(h, *s, test_random_below(&h->r, 2), 1 + test_random_below(&h->r, what < 4 ? 128 : 3));
    }
}

static void invariants_hold_through_any_history(void **state)
{
    const uint64_t seed = test_seed(701);
    for (uint32_t m = 0; m < 2; m++) {
        kvf_cache_config cc = test_config_small();
        cc.layers = 2;
        cc.sequences_max = ALIVE;
        cc.host_tokens_max = 900;
        cc.transfer = m                ? KVF_TRANSFER_GATHER
                      : test_on_cuda() ? KVF_TRANSFER_MAPPED
                                       : KVF_TRANSFER_DIRECT;
        herd *h = test_alloc(sizeof *h);
        assert_non_null(h);
        h->r = (test_random){seed + m};
        test_open(&h->w, &h->t, &cc,
                  &(test_tokens_spec){.count = 500, .seed = seed, .sharpness = 2.0f, .topics = 5});
        const uint32_t blocks = h->w.cache->kv_groups[0].pool.block_count;
        for (uint32_t i = 0; i < test_afford(1500); i++) {
            one_change(h);
            if (i % 50 == 49)
                check_invariants(h);
        }
        for (uint32_t i = 0; i < ALIVE; i++) {
            kvf_sequence_destroy(h->s[i]);
            h->s[i] = NULL;
        }
        check_invariants(h);
        assert_int_equal(h->w.cache->kv_groups[0].pool.free_count, blocks);
        test_close(&h->w, &h->t);
        test_release(h);
    }
}

int main(void)
{
    return unit_run(invariants_hold_through_any_history);
}
