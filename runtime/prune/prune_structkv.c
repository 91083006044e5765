/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Part of policies.h. Deeper layers get tokens by the attention that they drew in all layers so
 * far, at the layer at which attention stops exploring; what a layer keeps is decided by that layer
 * alone. After StructKV (global in-degree centrality, dynamic pivot detection, structural
 * propagation and decoupling), of which no code was published.
 *
 * Saliency of a layer: the mean of its scores (maximum over 7 tokens) over KV heads. Centrality:
 * decay times what it was, plus the saliency, up to the pivot. There the tokens of highest
 * centrality, floor(n * propagate), and the window go on; every layer keeps its tokens of highest
 * saliency, floor(n * keep), and the window, one set for all KV heads; n is the prompt. The window
 * comes on top of both counts. With block_tokens, whole blocks compete by their sums; the block
 * that the window begins in is kept.
 *
 * The pivot: a given layer (fixed, or from a calibration over all layers, below),
 * or online: the transition score of all layers so far, scaled by what was
 * seen so far; the layer at which the highest is followed by two that do not exceed it, or
 * layer_max. Scores of layers before layer_min do not compete. The paper takes the highest of all
 * layers, which nobody knows in time, and reports pivots at 12 to 28; without a layer_min the fall
 * of entropy after the first layer wins in models where it is steep, since few layers were scaled
 * by then. A calibration over all layers is no certainty either: peaks may be near each other. A
 * `layer` that is set counts whatever `pivot` says.
 */

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "common/base.h"
#include "policies.h"

/* Followed by measures [layers], scores [layers], centrality and saliency [tokens_max]. */
typedef struct structkv_state {
    _Alignas(double) uint32_t measured; /* layers whose measures are there, the first ones */
    uint32_t is_past;                   /* the pivot */
    uint32_t is_idle;                   /* the whole prompt fits into what is propagated */
} structkv_state;

typedef struct structkv_arrays {
    kvf_structkv_measures *measures;
    double *scores;
    float *centrality;
    float *saliency;
} structkv_arrays;

static structkv_arrays arrays_of(structkv_state *s, uint32_t layers, uint32_t candidates)
{
    structkv_arrays a = {.measures = (kvf_structkv_measures *)(void *)(s + 1)};
    a.scores = (double *)(void *)(a.measures + layers);
    a.centrality = (float *)(void *)(a.scores + layers);
    a.saliency = a.centrality + candidates;
    return a;
}

static const char *structkv_check(const kvf_prune_settings *settings, const kvf_prune_shape *shape,
                                  char *text, size_t capacity)
{
    if (settings->pivot != KVF_PIVOT_ONLINE && settings->layer == KVF_PRUNE_LAYER_AUTO) {
        snprintf(text, capacity,
                 "layer = AUTO: a %s pivot is a layer that is given; set layer to one of 0 to %u, "
                 "or pivot to ONLINE",
                 settings->pivot == KVF_PIVOT_FIXED ? "FIXED" : "CALIBRATED", shape->layers - 1);
        return text;
    }
    if (settings->block_tokens > shape->tokens_max) {
        snprintf(text, capacity,
                 "block_tokens = %u: the longest prompt has %u tokens; lower it, or 0 for tokens",
                 settings->block_tokens, shape->tokens_max);
        return text;
    }
    return NULL;
}

static size_t structkv_state_bytes(const kvf_prune_settings *settings, const kvf_prune_shape *shape)
{
    (void)settings;
    return sizeof(structkv_state) +
           shape->layers * (sizeof(kvf_structkv_measures) + sizeof(double)) +
           2 * (size_t)shape->tokens_max * sizeof(float);
}

static bool is_given(const kvf_prune_settings *settings)
{
    return settings->layer != KVF_PRUNE_LAYER_AUTO;
}

/* The pivot at the latest. */
static uint32_t last_layer(const kvf_prune_settings *settings, uint32_t layers)
{
    if (is_given(settings))
        return settings->layer;
    if (settings->layer_max != KVF_PRUNE_LAYER_AUTO)
        return settings->layer_max;
    return layers > 2 ? layers - 2 : 0;
}

static uint32_t first_layer(const kvf_prune_settings *settings, uint32_t layers)
{
    return settings->layer_min != KVF_PRUNE_LAYER_AUTO ? settings->layer_min : layers / 3;
}

/* Whether centrality still counts at this layer. */
static bool gathers(const kvf_prune_view *view, const structkv_state *s)
{
    return !s->is_idle && !s->is_past && view->layer <= last_layer(view->settings, view->layers);
}

static uint32_t structkv_needs(const kvf_prune_view *view)
{
    const kvf_prune_settings *settings = view->settings;
    const bool keeps_some = settings->keep_tokens || settings->keep < 1.0f;
    const bool propagates = settings->propagate_tokens || settings->propagate < 1.0f;
    if (!propagates || !gathers(view, view->state))
        return keeps_some ? KVF_PRUNE_SCORES : KVF_PRUNE_NOTHING;
    return is_given(settings) ? KVF_PRUNE_SCORES
                              : (uint32_t)KVF_PRUNE_SCORES | (uint32_t)KVF_PRUNE_PROFILE;
}

/* Saliency, and centrality with it; the product of two floats is exact in a double. */
static void accumulate(const kvf_prune_view *view, bool is_gathered, const structkv_arrays *a)
{
    for (uint32_t j = 0; j < view->candidates; j++) {
        const float saliency = (float)(kvf_choose_sum(view, j) / view->kv_heads);
        a->saliency[j] = saliency;
        if (is_gathered)
            a->centrality[j] = (float)((double)view->settings->decay * (double)a->centrality[j] +
                                       (double)saliency);
    }
}

/* The best whole blocks of those before the window's, and all from there on. */
static uint32_t select_blocks(const kvf_prune_view *view, const float *values, uint32_t budget,
                              uint32_t block, uint32_t *ids)
{
    const uint32_t blocks = view->candidates / block, count = budget / block;
    if (count >= blocks)
        return view->tokens;
    for (uint32_t b = 0; b < blocks; b++) {
        double sum = 0.0;
        for (uint32_t i = 0; i < block; i++)
            sum += (double)values[(size_t)b * block + i];
        ids[b] = kvf_choose_key((float)sum);
    }
    kvf_choose_top_keys(ids, blocks, count, ids);
    for (uint32_t i = count; i-- > 0;) /* from the end, where nothing is left to read */
        kvf_choose_range(ids[i] * block, block, ids + (size_t)i * block);
    const uint32_t chosen = count * block, rest = view->tokens - blocks * block;
    kvf_choose_range(blocks * block, rest, ids + chosen);
    return chosen + rest;
}

/* The best `budget` candidates and the window to ids; returns how many, or view->tokens for all,
 * with ids untouched. */
static uint32_t select_best(const kvf_prune_view *view, const float *values, uint32_t budget,
                            uint32_t *ids)
{
    if (view->settings->block_tokens)
        return select_blocks(view, values, budget, view->settings->block_tokens, ids);
    if (budget >= view->candidates)
        return view->tokens;
    kvf_choose_best(values, view->candidates, budget, ids);
    kvf_choose_range(view->candidates, view->tokens - view->candidates, ids + budget);
    return budget + view->tokens - view->candidates;
}

static bool is_pivot(const kvf_prune_view *view, structkv_state *s, const structkv_arrays *a)
{
    const kvf_prune_settings *settings = view->settings;
    const uint32_t last = last_layer(settings, view->layers);
    if (is_given(settings) || view->layer >= last)
        return view->layer == last;
    if (!view->profile || s->measured != view->layer)
        return false;
    a->measures[s->measured++] = kvf_structkv_measure(view->profile, view->query_heads);
    kvf_structkv_transition(settings->weights, a->measures, s->measured, a->scores);
    return kvf_structkv_is_past(a->scores, s->measured, first_layer(settings, view->layers));
}

static void structkv_decide(const kvf_prune_view *view, kvf_prune_answer *answer)
{
    const kvf_prune_settings *settings = view->settings;
    structkv_state *s = view->state;
    const structkv_arrays a = arrays_of(s, view->layers, view->candidates);
    const uint32_t propagated = kvf_propagate_count(settings, view->prompt);
    if (view->candidates == 0)
        return;
    s->is_idle = propagated >= view->candidates && !s->is_past;
    const bool is_gathered = gathers(view, s);
    accumulate(view, is_gathered, &a);
    if (is_gathered && is_pivot(view, s, &a)) {
        s->is_past = 1;
        answer->is_chosen = 1;
        answer->propagate_count = select_best(view, a.centrality, propagated, answer->propagate);
    }
    const uint32_t kept =
        select_best(view, a.saliency, kvf_keep_count(settings, view->prompt), answer->keep);
    if (kept == view->tokens)
        return;
    for (uint32_t h = 1; h < view->kv_heads; h++)
        memcpy(answer->keep + (size_t)h * kept, answer->keep, kept * sizeof *answer->keep);
    answer->keep_count = kept;
}

const kvf_prune_policy kvf_prune_structkv = {
    .size = sizeof(kvf_prune_policy),
    .name = "structkv",
    .source = "StructKV: global in-degree centrality, dynamic pivot detection, structural "
              "propagation and decoupling",
    .settings = "keep=0.1 keep_tokens propagate=0.2 propagate_tokens window=8 pool=max "
                "pool_width=7 group_reduce window_mean layer layer_min layer_max decay weights "
                "mass_share pivot block_tokens",
    .reach = KVF_PRUNE_REACH_PROPAGATE,
    .check = structkv_check,
    .state_bytes = structkv_state_bytes,
    .needs_at = structkv_needs,
    .decide = structkv_decide};

/* ---- the transition score ---- */

#define MEASURES 3u

/* In the direction that a transition goes: entropy falls, the others rise. */
static double rising(const kvf_structkv_measures *m, uint32_t which)
{
    return which == 0 ? -m->entropy : which == 1 ? m->sparsity : m->variance;
}

kvf_structkv_measures kvf_structkv_measure(const kvf_prune_profile *profile, uint32_t heads)
{
    kvf_structkv_measures mean = {0};
    for (uint32_t h = 0; profile && h < heads; h++) {
        mean.entropy += (double)profile[h].entropy;
        mean.sparsity += (double)profile[h].mass;
        mean.variance += (double)profile[h].variance;
    }
    if (heads) {
        mean.entropy /= heads;
        mean.sparsity /= heads;
        mean.variance /= heads;
    }
    return mean;
}

void kvf_structkv_transition(const float weights[3], const kvf_structkv_measures *measures,
                             uint32_t layers, double *score)
{
    for (uint32_t l = 0; score && l < layers; l++)
        score[l] = 0.0;
    if (!score || !weights || !measures)
        return;
    for (uint32_t which = 0; which < MEASURES; which++) {
        double least = INFINITY, most = -INFINITY;
        for (uint32_t l = 1; l < layers; l++) {
            const double change = rising(&measures[l], which) - rising(&measures[l - 1], which);
            least = fmin(least, change);
            most = fmax(most, change);
        }
        if (!(most > least))
            continue;
        for (uint32_t l = 1; l < layers; l++) {
            const double change = rising(&measures[l], which) - rising(&measures[l - 1], which);
            score[l] += (double)weights[which] * ((change - least) / (most - least));
        }
    }
}

/* The best of the layers from layer_min on; 0 if no score is above 0. */
static uint32_t highest(const double *score, uint32_t layers, uint32_t layer_min)
{
    uint32_t best = 0;
    double top = 0.0;
    for (uint32_t l = layer_min ? layer_min : 1; l < layers; l++) {
        if (score[l] > top) {
            top = score[l];
            best = l;
        }
    }
    return best;
}

uint32_t kvf_structkv_pivot(const double *score, uint32_t layers, uint32_t layer_min,
                            uint32_t layer_max)
{
    const uint32_t best = score ? highest(score, layers, layer_min) : 0;
    return best && best < layer_max ? best + 1 : layer_max;
}

bool kvf_structkv_is_past(const double *score, uint32_t layers, uint32_t layer_min)
{
    const uint32_t best = score ? highest(score, layers, layer_min) : 0;
    return best && layers >= best + 3;
}
