/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Attention parameters of layers, see the header: numbers that follow from the layer and the head
 * alone.
 */

#include "attention_params.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "harness.h"

/* Which by KVF_TEST_ATTENTION_PARAMS; asked for each logit, so the environment is read once. */
static int kind(void)
{
    enum { UNREAD, NONE, CAPS, ALL };
    static int asked = UNREAD;
    if (asked == UNREAD) {
        const char *text = getenv("KVF_TEST_ATTENTION_PARAMS");
        asked = !text ? NONE : strcmp(text, "caps") == 0 ? CAPS : ALL;
    }
    return asked - NONE;
}

static int has_caps(void)
{
    return kind() > 0;
}

/* Scales and sinks, too. */
static int has_all(void)
{
    return kind() > 1;
}

double test_scale(const kvf_cache_config *c, uint32_t layer)
{
    static const double factors[] = {0.7, 1.3, 1.0};
    const double scale =
        c->softmax_scale != 0.0f ? (double)c->softmax_scale : 1.0 / sqrt(c->head_dim);
    return scale * (has_all() ? factors[layer % 3] : 1.0);
}

double test_cap(uint32_t layer)
{
    static const double caps[] = {20.0, 0.0, 10.0};
    return has_caps() ? caps[layer % 3] : 0.0;
}

double test_logit(const kvf_cache_config *c, uint32_t layer, double product)
{
    const double cap = test_cap(layer), s = test_scale(c, layer) * product;
    return cap > 0.0 && s > -INFINITY ? cap * tanh(s / cap) : s;
}

double test_sink(uint32_t layer, uint32_t query_head)
{
    static const double sinks[] = {1.5, -2.0, -INFINITY, 4.0, 0.0};
    return has_all() ? sinks[(2 * layer + query_head) % 5] : -INFINITY;
}

static kvf_attention_params params_of(const kvf_cache_config *c, uint32_t layer)
{
    enum { HEADS = 512 };
    static float sinks[HEADS];
    kvf_attention_params params;
    kvf_attention_params_init(&params);
    assert_true(c->query_heads <= HEADS);
    for (uint32_t h = 0; h < c->query_heads; h++)
        sinks[h] = (float)test_sink(layer, h);
    params.sinks = sinks;
    params.scale = (float)test_scale(c, layer);
    params.soft_cap = (float)test_cap(layer);
    return params;
}

void test_give_attention_params(kvf_cache *cache, const kvf_cache_config *c)
{
    for (uint32_t i = 0; has_caps() && i < c->layers; i++) {
        const kvf_attention_params params = params_of(c, i);
        assert_int_equal(kvf_cache_attention_params(cache, i, &params), KVF_OK);
    }
}

void test_give_block_attention_params(kvf_blocks *blocks, const kvf_cache_config *c)
{
    for (uint32_t i = 0; has_caps() && i < c->layers; i++) {
        const kvf_attention_params params = params_of(c, i);
        assert_int_equal(kvf_blocks_attention_params(blocks, i, &params), KVF_OK);
    }
}
