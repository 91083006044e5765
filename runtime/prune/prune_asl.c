/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Part of policies.h. The layer that hands few tokens to the deeper ones is the one at which their
 * order has settled. After Taniguchi et al., "Adaptive Layer Selection for Layer-Wise Token Pruning
 * in LLM Inference" (ASL); conditions of its published code.
 *
 * A layer's candidates are ranked by their scores, summed over KV heads: 1 for the best. From
 * layer_min on, over the last layers_observed layers: of the tokens that are among the best in any
 * of them, the mean over tokens of the variance of the rank over layers. Once that is below
 * threshold times what it was at the first layer looked at, this layer's best and the window are
 * all that deeper layers get. If that never happens, one pass chooses no layer and two passes the
 * last one, as published, or layer_max, if it is given, is chosen. A `layer` that is given is taken
 * without the rule.
 *
 * One pass: every KV head keeps what SnapKV would, or all (keep = 1), of the prompt, or after the
 * chosen layer of what it gets. Two passes: the chosen tokens, in their order, are a new prompt, of
 * which everything is kept. A prompt that fits into the budget is not pruned.
 *
 * Ranks of the layers observed are the only state of size; they are not looked at again after the
 * choice. A first variance of 0 leaves no ratio below any threshold, as in the published code.
 */

#include <stdbool.h>
#include <stdio.h>

#include "common/base.h"
#include "policies.h"

#define DIGIT_BITS 11u
#define DIGITS     (1u << DIGIT_BITS)
#define TURNS      3u /* of 11, 11 and 10 bits */

/* Followed by ranks [layers_observed, tokens_max], then keys and order [tokens_max]. */
typedef struct asl_state {
    double first_variance;
    uint32_t has_first;
    uint32_t is_chosen;
    uint32_t is_bounded; /* less is kept than was propagated */
    uint32_t is_idle;    /* the whole prompt fits into the budget */
} asl_state;

/* Layers that matter; with a given layer, or without room for the rule, `last` is all. */
typedef struct asl_layers {
    uint32_t ranked; /* the first whose ranks are needed */
    uint32_t judged; /* the first that the rule may choose */
    uint32_t last;   /* that the rule may choose */
    bool falls_back; /* it is chosen if no other was */
} asl_layers;

static uint32_t observed_of(const kvf_prune_settings *settings, uint32_t layers)
{
    const uint32_t third = kvf_min_u32(kvf_max_u32(layers / 3, 2), 8);
    return settings->layers_observed ? settings->layers_observed : third;
}

static asl_layers asl_layers_of(const kvf_prune_settings *settings, uint32_t layers)
{
    const uint32_t observed = observed_of(settings, layers);
    if (settings->layer != KVF_PRUNE_LAYER_AUTO)
        return (asl_layers){settings->layer, settings->layer, settings->layer, true};
    asl_layers at = {.falls_back = settings->two_pass};
    at.last = settings->two_pass ? layers - 1 : layers > 2 ? layers - 2 : 0;
    if (settings->layer_max != KVF_PRUNE_LAYER_AUTO) {
        at.last = settings->layer_max;
        at.falls_back = true;
    }
    at.judged = settings->layer_min != KVF_PRUNE_LAYER_AUTO ? settings->layer_min : layers / 3;
    at.judged = kvf_max_u32(at.judged, observed - 1);
    at.ranked = at.judged - (observed - 1);
    if (at.judged > at.last || (at.judged == at.last && at.falls_back))
        at.judged = at.ranked = at.falls_back ? at.last : layers; /* without the rule */
    return at;
}

static const char *asl_check(const kvf_prune_settings *settings, const kvf_prune_shape *shape,
                             char *text, size_t capacity)
{
    const uint32_t observed = observed_of(settings, shape->layers);
    if (settings->layer != KVF_PRUNE_LAYER_AUTO)
        return NULL;
    if (observed < 2 || observed > 64) {
        snprintf(text, capacity,
                 "layers_observed = %u: ranks are compared over 2 to 64 layers; published: 8",
                 observed);
        return text;
    }
    return NULL;
}

static size_t asl_state_bytes(const kvf_prune_settings *settings, const kvf_prune_shape *shape)
{
    const size_t layers =
        settings->layer != KVF_PRUNE_LAYER_AUTO ? 1 : observed_of(settings, shape->layers);
    return sizeof(asl_state) + (layers + 2) * shape->tokens_max * sizeof(uint32_t);
}

/* Whether KV heads may keep fewer tokens than the layer gets. */
static bool keeps_some(const kvf_prune_settings *settings, const asl_state *s)
{
    if (s->is_chosen)
        return s->is_bounded;
    return !settings->two_pass && (settings->keep_tokens || settings->keep < 1.0f);
}

static uint32_t asl_needs(const kvf_prune_view *view)
{
    const kvf_prune_settings *settings = view->settings;
    const asl_state *s = view->state;
    const asl_layers at = asl_layers_of(settings, view->layers);
    const bool propagates = settings->propagate_tokens || settings->propagate < 1.0f;
    if (view->pass)
        return KVF_PRUNE_NOTHING;
    if (keeps_some(settings, s))
        return KVF_PRUNE_SCORES;
    if (s->is_chosen)
        return KVF_PRUNE_NOTHING;
    const bool is_ranked = view->layer >= at.ranked && view->layer <= at.last;
    return propagates && !s->is_idle && is_ranked ? KVF_PRUNE_SCORES : KVF_PRUNE_NOTHING;
}

/* Ranks of the candidates into ranks; order of the token at equal scores. Stable counting sorts by
 * digits, lowest first, of keys that fall as scores rise. */
static void rank_candidates(const kvf_prune_view *view, uint32_t *keys, uint32_t *order,
                            uint32_t *ranks)
{
    static const uint32_t shifts[TURNS] = {0, DIGIT_BITS, 2 * DIGIT_BITS};
    uint32_t place[TURNS][DIGITS] = {0};
    const uint32_t n = view->candidates;
    for (uint32_t j = 0; j < n; j++) {
        keys[j] = ~kvf_choose_key((float)kvf_choose_sum(view, j));
        for (uint32_t t = 0; t < TURNS; t++)
            place[t][keys[j] >> shifts[t] & (DIGITS - 1)]++;
    }
    for (uint32_t t = 0; t < TURNS; t++) {
        uint32_t before = 0;
        for (uint32_t d = 0; d < DIGITS; d++) {
            const uint32_t held = place[t][d];
            place[t][d] = before;
            before += held;
        }
    }
    const uint32_t *from = NULL; /* 0, 1, ... */
    for (uint32_t t = 0; t < TURNS; t++) {
        uint32_t *to = t % 2 ? ranks : order;
        for (uint32_t i = 0; i < n; i++) {
            const uint32_t j = from ? from[i] : i;
            to[place[t][keys[j] >> shifts[t] & (DIGITS - 1)]++] = j;
        }
        from = to;
    }
    for (uint32_t i = 0; i < n; i++)
        ranks[order[i]] = i + 1;
}

/* Mean over tokens that are among the `best` first of any layer of the variance of their ranks. */
static double rank_variance(const uint32_t *ranks, uint32_t layers, uint32_t stride, uint32_t n,
                            uint32_t best)
{
    double total = 0.0;
    uint32_t tokens = 0;
    for (uint32_t j = 0; j < n; j++) {
        uint64_t sum = 0;
        uint32_t least = UINT32_MAX;
        for (uint32_t l = 0; l < layers; l++) {
            const uint32_t rank = ranks[(size_t)l * stride + j];
            least = kvf_min_u32(least, rank);
            sum += rank;
        }
        if (least > best)
            continue;
        const double mean = (double)sum / layers;
        for (uint32_t l = 0; l < layers; l++) {
            const double off = (double)ranks[(size_t)l * stride + j] - mean;
            total += off * off;
        }
        tokens++;
    }
    return tokens ? total / ((double)tokens * layers) : 0.0;
}

/* To the variance of the first layer that is judged. */
static double relative_variance(asl_state *s, double variance)
{
    if (s->has_first)
        return variance / s->first_variance;
    s->first_variance = variance;
    s->has_first = 1;
    return 1.0;
}

/* The tokens of rank 1 .. best, and the window. */
static void propagate_best(const kvf_prune_view *view, const uint32_t *ranks, uint32_t best,
                           kvf_prune_answer *answer)
{
    uint32_t count = 0;
    for (uint32_t j = 0; j < view->candidates; j++)
        if (ranks[j] <= best)
            answer->propagate[count++] = j;
    const uint32_t window = view->tokens - view->candidates;
    kvf_choose_range(view->candidates, window, answer->propagate + count);
    answer->propagate_count = count + window;
}

static void asl_decide(const kvf_prune_view *view, kvf_prune_answer *answer)
{
    const kvf_prune_settings *settings = view->settings;
    asl_state *s = view->state;
    const asl_layers at = asl_layers_of(settings, view->layers);
    const bool is_given = settings->layer != KVF_PRUNE_LAYER_AUTO;
    const uint32_t observed = is_given ? 1 : observed_of(settings, view->layers);
    if (view->pass || view->candidates == 0)
        return;
    if (keeps_some(settings, s))
        kvf_answer_keep_top(view, kvf_keep_count(settings, view->prompt), answer);
    if (s->is_chosen)
        return;
    const uint32_t budget = kvf_propagate_count(settings, view->tokens);
    s->is_idle = budget >= view->tokens;
    const uint32_t window = view->tokens - view->candidates, n = view->candidates;
    if (s->is_idle || view->layer < at.ranked || view->layer > at.last)
        return;
    const uint32_t best = kvf_max_u32(budget, window) - window; /* < n */
    /* Room for the longest prompt; the ranks of this one lie close together. */
    uint32_t *ranks = (uint32_t *)(s + 1), *own = ranks + (size_t)(view->layer % observed) * n;
    uint32_t *keys = ranks + (size_t)observed * n, *order = keys + n;
    rank_candidates(view, keys, order, own);
    bool is_chosen = view->layer == at.last && at.falls_back;
    if (!is_chosen && view->layer >= at.judged) {
        answer->measure = relative_variance(s, rank_variance(ranks, observed, n, n, best));
        is_chosen = answer->measure < (double)settings->threshold;
    }
    if (!is_chosen)
        return;
    s->is_chosen = 1;
    answer->is_chosen = 1;
    answer->restart = settings->two_pass;
    propagate_best(view, own, best, answer);
    s->is_bounded =
        !settings->two_pass && kvf_keep_count(settings, view->prompt) < answer->propagate_count;
}

const kvf_prune_policy kvf_prune_asl = {
    .size = sizeof(kvf_prune_policy),
    .name = "asl",
    .source = "Taniguchi et al., Adaptive Layer Selection for Layer-Wise Token Pruning in LLM "
              "Inference (ASL)",
    .settings = "keep keep_tokens=2048 propagate propagate_tokens=2048 window=32 pool=avg "
                "pool_width=7 group_reduce=sum window_mean layer layer_min layer_max "
                "layers_observed threshold two_pass",
    .reach = KVF_PRUNE_REACH_PROPAGATE,
    .check = asl_check,
    .state_bytes = asl_state_bytes,
    .needs_at = asl_needs,
    .decide = asl_decide};
