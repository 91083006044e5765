/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Forms of layers, see forms.h: numbers that follow from the layer and the head alone.
 */

#include "forms.h"

#include <math.h>
#include <stdlib.h>

#include "harness.h"

static int has_forms(void)
{
    return getenv("KVF_TEST_FORMS") != NULL;
}

double test_scale(const kvf_cache_config *c, uint32_t layer)
{
    static const double factors[] = {0.7, 1.3, 1.0};
    const double scale =
        c->softmax_scale != 0.0f ? (double)c->softmax_scale : 1.0 / sqrt(c->head_dim);
    return scale * (has_forms() ? factors[layer % 3] : 1.0);
}

double test_logit(const kvf_cache_config *c, uint32_t layer, double product)
{
    return test_scale(c, layer) * product;
}

static kvf_form form_of(const kvf_cache_config *c, uint32_t layer)
{
    kvf_form form;
    kvf_form_init(&form);
    form.scale = (float)test_scale(c, layer);
    return form;
}

void test_give_forms(kvf_cache *cache, const kvf_cache_config *c)
{
    for (uint32_t i = 0; has_forms() && i < c->layers; i++) {
        const kvf_form form = form_of(c, i);
        assert_int_equal(kvf_cache_form(cache, i, &form), KVF_OK);
    }
}

void test_give_block_forms(kvf_blocks *blocks, const kvf_cache_config *c)
{
    for (uint32_t i = 0; has_forms() && i < c->layers; i++) {
        const kvf_form form = form_of(c, i);
        assert_int_equal(kvf_blocks_form(blocks, i, &form), KVF_OK);
    }
}
