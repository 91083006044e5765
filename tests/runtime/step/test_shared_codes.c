/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Digests of shared blocks are there once: a plan for forks has room for one prompt, rows of forks
 * name the same blocks, and whatever a fork does leaves every byte that others have as it was. That
 * forks have the bits of single sequences is the business of test_forks.c. Looks inside.
 */

#include <string.h>

#include "retain_world.h"

/* ---- the plan ---- */

/* Settings of Llama-3.1-8B's heads; the number of layers does not matter. */
static kvf_cache_config config_of_8b(uint32_t sequences, uint32_t context, uint32_t answer)
{
    kvf_cache_config c;
    kvf_cache_config_init(&c);
    c.layers = 2;
    c.query_heads = 32;
    c.kv_heads = 8;
    c.head_dim = 128;
    c.dtype = KVF_BF16;
    c.sequences_max = sequences;
    c.tokens_max = context + answer;
    return c;
}

static uint64_t digest_bytes(kvf_runtime *runtime, const kvf_cache_config *c)
{
    kvf_cache_plan plan;
    kvf_error error = {0};
    if (kvf_cache_plan_make(runtime, c, &plan, &error) != KVF_OK)
        fail_msg("%s", error.text);
    return plan.device_digest_bytes;
}

static void sixteen_forks_take_an_eighth(void **state)
{
    enum { FORKS = 16, ANSWER = 256, WINDOW = 64 + 32 };
    static const uint32_t contexts[] = {32768, 131072};
    static const uint8_t kinds[16] = {1, 2, 2, 1, 2, 2, 1, 2, 2, 1, 2, 2, 1, 2, 2, 1};
    kvf_runtime *runtime = test_runtime();
    for (uint32_t i = 0; i < 6; i++) {
        const uint32_t context = contexts[i % 2];
        kvf_cache_config one = config_of_8b(1, context, ANSWER);
        kvf_cache_config forks = config_of_8b(FORKS, context, ANSWER);
        one.head_mask = forks.head_mask =
            i / 2 == 1 ? kinds : NULL; /* coarse heads have centroids, too */
        one.digest = forks.digest = i / 2 == 2 ? KVF_DIGEST_MINMAX : KVF_DIGEST_CODES;
        const uint64_t single = digest_bytes(runtime, &one);
        assert_true(digest_bytes(runtime, &forks) >= FORKS * single); /* of prompts of their own */
        forks.host_tokens_max = context + FORKS * (ANSWER + WINDOW);
        const uint64_t shared = digest_bytes(runtime, &forks);
        if (8 * shared > FORKS * single)
            fail_msg("%u tokens: %u forks need %llu bytes of digests, a sequence %llu", context,
                     FORKS, (unsigned long long)shared, (unsigned long long)single);
    }
    kvf_runtime_close(runtime);
}

/* ---- what others have ---- */

enum { TOKENS = 700, PROMPT = 300 };

static kvf_cache_config config_small(kvf_select select, kvf_digest_kind digest)
{
    kvf_cache_config c = test_config_small();
    c.head_dim = 32;
    c.layers = 2;
    c.dtype = KVF_BF16;
    c.page_size = 4;
    c.budget_tokens = 96;
    c.tokens_max = TOKENS;
    c.sequences_max = 4;
    c.digest = digest;
    c.select = select;
    c.refresh_interval = 8;
    c.transfer = test_transfer(KVF_TRANSFER_DIRECT);
    return c;
}

static size_t row_digest_bytes(const kvf_kv_group *kv_group, const kvf_layer *layer)
{
    return (size_t)layer->extent.sealed * kv_group->dims.paging.kv_heads *
           kv_group->dims.paging.digest_bytes;
}

/* Digests of all sealed blocks of a layer, and which these are. */
static char *digests_of(const test_world *w, const kvf_sequence *s, uint32_t index)
{
    const kvf_layer *layer = &s->layers[index];
    const kvf_kv_group *kv_group = layer->kv_group;
    const kvf_paging *p = &kv_group->dims.paging;
    const kvf_row row = kvf_step_row(kv_group, layer);
    const uint32_t *named = test_seen(row.block_of, layer->extent.sealed * sizeof *named);
    char *all = malloc(row_digest_bytes(kv_group, layer) + 1), *to = all;
    assert_non_null(all);
    (void)w;
    for (uint32_t b = 0; b < layer->extent.sealed; b++)
        assert_int_equal(named[b], layer->blocks[b].index);
    for (uint32_t b = 0; b < layer->extent.sealed; b++)
        for (uint32_t h = 0; h < p->kv_heads; h++, to += p->digest_bytes)
            memcpy(to,
                   test_seen(kvf_row_digests(p, &row, layer->blocks[b].index, h), p->digest_bytes),
                   p->digest_bytes);
    return all;
}

typedef struct watched {
    const kvf_sequence *s;
    char *digests[2];
    uint32_t sealed;
} watched;

static watched watch(test_world *w, const kvf_sequence *s)
{
    watched o = {.s = s, .sealed = s->layers[0].extent.sealed};
    test_wait(w);
    for (uint32_t i = 0; i < 2; i++)
        o.digests[i] = digests_of(w, s, i);
    return o;
}

static void is_as_it_was(test_world *w, watched *o, const char *after)
{
    test_wait(w);
    assert_int_equal(o->s->layers[0].extent.sealed, o->sealed);
    for (uint32_t i = 0; i < 2; i++) {
        char *now = digests_of(w, o->s, i);
        if (memcmp(now, o->digests[i],
                   row_digest_bytes(o->s->layers[i].kv_group, &o->s->layers[i])) != 0)
            fail_msg("%s: digests of layer %u of another sequence changed", after, i);
        free(now);
        free(o->digests[i]);
    }
}

static uint32_t blocks_in_common(const kvf_sequence *a, const kvf_sequence *b)
{
    uint32_t blocks = 0;
    while (blocks < a->layers[0].extent.sealed && blocks < b->layers[0].extent.sealed &&
           a->layers[0].blocks[blocks].index == b->layers[0].blocks[blocks].index)
        blocks++;
    return blocks;
}

static void step_layers(test_world *w, kvf_sequence *s, const test_tokens *t, uint32_t first,
                        uint32_t count)
{
    void *out = test_scratch(4096);
    for (uint32_t i = first; i < first + count; i++)
        for (uint32_t layer = 0; layer < 2; layer++)
            test_decode(w, s, t, layer, i, out, NULL);
}

static void prompt(test_world *w, kvf_sequence *s, const test_tokens *t, uint32_t first,
                   uint32_t count)
{
    for (uint32_t layer = 0; layer < 2; layer++)
        test_prefill(w, s, t,
                     &(test_range){.layer = layer, .first = first, .count = count, .chunk = 100},
                     NULL);
}

/* Every other token of layer 0 goes. */
static void keep_half(test_world *w, kvf_sequence *s)
{
    const uint32_t heads = w->config.kv_heads, length = s->layers[0].extent.length,
                   count = length / 2;
    uint32_t *ids = must(heads * count * sizeof *ids);
    void *work = must(kvf_keep_work_bytes(w->cache));
    for (uint32_t h = 0; h < heads; h++)
        for (uint32_t i = 0; i < count; i++)
            ids[h * count + i] = length - 2 * (count - i) + h % 2;
    for (uint32_t layer = 0; layer < 2; layer++)
        test_ok(w, kvf_sequence_keep(w->cache, s, layer, ids, count, work, w->stream));
    test_wait(w);
    test_release(ids);
    test_release(work);
}

static void nobody_writes_what_others_have(void **state)
{
    static const kvf_select selects[] = {KVF_SELECT_DYNAMIC, KVF_SELECT_HYBRID};
    const uint64_t seed = test_seed(4711);
    for (uint32_t i = 0; i < 8; i++) {
        kvf_cache_config cc =
            config_small(selects[i % 2], i < 4 ? KVF_DIGEST_CODES : KVF_DIGEST_MINMAX);
        test_world w;
        test_tokens t;
        open_world(&w, &cc, i % 4 < 2 ? 1 : 2);
        test_tokens_make(&t, &cc,
                         &(test_tokens_spec){.count = TOKENS, .seed = seed + i, .sharpness = 2.0f});
        kvf_sequence *parent = test_sequence(&w), *child = NULL, *grandchild = NULL;
        prompt(&w, parent, &t, 0, PROMPT);
        step_layers(&w, parent, &t, PROMPT, 20);
        watched o = watch(&w, parent);
        test_ok(&w, kvf_sequence_fork(w.cache, parent, w.stream, &child));
        assert_int_equal(blocks_in_common(parent, child), o.sealed);
        step_layers(&w, child, &t, PROMPT + 40, 70);
        assert_true(child->layers[0].extent.sealed > o.sealed);
        is_as_it_was(&w, &o, "steps that seal");

        o = watch(&w, child);
        test_ok(&w, kvf_sequence_fork(w.cache, child, w.stream, &grandchild));
        test_ok(&w, kvf_sequence_truncate(w.cache, grandchild, 150, w.stream));
        prompt(&w, grandchild, &t, 400, 200);
        is_as_it_was(&w, &o, "a cut, and other tokens");
        assert_int_equal(blocks_in_common(parent, grandchild),
                         (150 - 16) / w.cache->plan.block_size);

        o = watch(&w, parent);
        watched third = watch(&w, grandchild);
        keep_half(&w, child);
        is_as_it_was(&w, &o, "a fork that keeps half");
        is_as_it_was(&w, &third, "a fork that keeps half");

        o = watch(&w, grandchild);
        kvf_sequence_destroy(parent); /* whose blocks others get, but for shared ones */
        kvf_sequence *other = test_sequence(&w);
        prompt(&w, other, &t, 50, 600);
        is_as_it_was(&w, &o, "the end of the first, and a prompt in its place");
        test_close(&w, &t);
    }
}

int main(void)
{
    return unit_run(sixteen_forks_take_an_eighth, nobody_writes_what_others_have);
}
