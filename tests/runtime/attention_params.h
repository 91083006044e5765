/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_RUNTIME_ATTENTION_PARAMS_H
#define KVF_TESTS_RUNTIME_ATTENTION_PARAMS_H

/*
 * Attention parameters of layers: where KVF_TEST_ATTENTION_PARAMS is in the environment, every
 * layer of every cache has others, and whatever a test says of attention is said with them: of
 * scale, soft cap and sinks, or, where it says "caps", of soft caps alone.
 */

#include <kvferry/blocks.h>

/* In force. */
double test_scale(const kvf_cache_config *c, uint32_t layer);
double test_cap(uint32_t layer); /* 0 = none */
/* q.k of a token as it goes into softmax. */
double test_logit(const kvf_cache_config *c, uint32_t layer, double product);

/* Joins the denominator. */
double test_sink(uint32_t layer, uint32_t query_head);

/* To all layers of a cache or of blocks of these settings. */
void test_give_attention_params(kvf_cache *cache, const kvf_cache_config *c);
void test_give_block_attention_params(kvf_blocks *blocks, const kvf_cache_config *c);

#endif
