/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Part of policies.h. How policies choose tokens.
 *
 * A threshold is found digit by digit from the top: three passes over the numbers count the digits
 * of those that share the threshold's higher digits. One more pass takes all above the threshold
 * and the first of those at it. A pass reads index j before it writes place <= j, so an array may
 * be replaced by its own answer.
 */

#include "policies.h"

#include <math.h>
#include <string.h>

#include "common/base.h"

double kvf_share_value(float share)
{
    /* The shortest decimal that reads back as this float; both parts are exact in a double. */
    static const double powers[] = {1e0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9};
    for (size_t i = 0; i < sizeof powers / sizeof *powers; i++) {
        const double decimal = nearbyint((double)share * powers[i]) / powers[i];
        if ((float)decimal == share)
            return decimal;
    }
    return (double)share;
}

uint32_t kvf_share_count(uint32_t tokens, double share)
{
    const double count = floor((double)tokens * share);
    if (!(count > 0.0))
        return 0;
    return count < (double)tokens ? (uint32_t)count : tokens;
}

uint32_t kvf_keep_count(const kvf_prune_settings *settings, uint32_t tokens)
{
    if (settings->keep_tokens)
        return kvf_min_u32(settings->keep_tokens, tokens);
    return kvf_share_count(tokens, kvf_share_value(settings->keep));
}

uint32_t kvf_propagate_count(const kvf_prune_settings *settings, uint32_t tokens)
{
    if (settings->propagate_tokens)
        return kvf_min_u32(settings->propagate_tokens, tokens);
    return kvf_share_count(tokens, kvf_share_value(settings->propagate));
}

uint32_t kvf_choose_key(float score)
{
    if (isnan(score))
        return 0;
    const float value = score + 0.0f; /* -0 becomes 0 */
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/* Numbers of one head, as scores or as keys. */
typedef struct numbers {
    const float *scores; /* NULL = keys */
    const uint32_t *keys;
    uint32_t n;
} numbers;

static inline uint32_t key_of(const numbers *r, uint32_t j)
{
    return r->scores ? kvf_choose_key(r->scores[j]) : r->keys[j];
}

#define DIGIT_BITS 11u
#define DIGITS     (1u << DIGIT_BITS)

/* The count-th highest key, count >= 1; *at is how many at it are among the count highest. */
static uint32_t find_threshold(const numbers *r, uint32_t count, uint32_t *at)
{
    static const uint32_t shifts[] = {32 - DIGIT_BITS, 32 - 2 * DIGIT_BITS, 0};
    uint32_t found = 0, mask = 0, rest = count;
    for (uint32_t pass = 0; pass < 3; pass++) {
        const uint32_t shift = shifts[pass];
        const uint32_t digits = pass == 2 ? 1u << (32 - 2 * DIGIT_BITS) : DIGITS;
        uint32_t histogram[DIGITS] = {0};
        for (uint32_t j = 0; j < r->n; j++) {
            const uint32_t key = key_of(r, j);
            if ((key & mask) == found)
                histogram[(key >> shift) & (digits - 1)]++;
        }
        uint32_t digit = digits - 1;
        while (histogram[digit] < rest)
            rest -= histogram[digit--];
        found |= digit << shift;
        mask |= (digits - 1) << shift;
    }
    *at = rest;
    return found;
}

static void choose(const numbers *r, uint32_t count, uint32_t *ids)
{
    KVF_ASSERT(count <= r->n);
    if (count == 0)
        return;
    uint32_t at;
    const uint32_t threshold = find_threshold(r, count, &at);
    uint32_t chosen = 0;
    for (uint32_t j = 0; chosen < count; j++) {
        const uint32_t key = key_of(r, j);
        if (key < threshold || (key == threshold && at == 0))
            continue;
        at -= key == threshold;
        ids[chosen++] = j;
    }
}

void kvf_choose_best(const float *scores, uint32_t n, uint32_t count, uint32_t *ids)
{
    choose(&(numbers){.scores = scores, .n = n}, count, ids);
}

void kvf_choose_top_keys(const uint32_t *keys, uint32_t n, uint32_t count, uint32_t *ids)
{
    choose(&(numbers){.keys = keys, .n = n}, count, ids);
}

void kvf_choose_range(uint32_t first, uint32_t count, uint32_t *ids)
{
    for (uint32_t i = 0; i < count; i++)
        ids[i] = first + i;
}

double kvf_choose_sum(const kvf_prune_view *view, uint32_t j)
{
    double sum = 0.0;
    for (uint32_t h = 0; h < view->kv_heads; h++)
        sum += (double)view->scores[(size_t)h * view->candidates + j];
    return sum;
}

void kvf_answer_keep_top(const kvf_prune_view *view, uint32_t count, kvf_prune_answer *answer)
{
    const uint32_t window = view->tokens - view->candidates;
    count = kvf_max_u32(count, window);
    if (view->candidates == 0 || count >= view->tokens)
        return;
    for (uint32_t h = 0; h < view->kv_heads; h++) {
        uint32_t *ids = answer->keep + (size_t)h * count;
        const float *scores = view->scores + (size_t)h * view->candidates;
        kvf_choose_best(scores, view->candidates, count - window, ids);
        kvf_choose_range(view->candidates, window, ids + (count - window));
    }
    answer->keep_count = count;
}

void kvf_answer_propagate_top(const kvf_prune_view *view, uint32_t count, uint32_t sink,
                              kvf_prune_answer *answer)
{
    const uint32_t window = view->tokens - view->candidates;
    count = kvf_max_u32(count, window);
    if (view->candidates == 0 || count >= view->tokens)
        return;
    uint32_t *ids = answer->propagate;
    for (uint32_t j = 0; j < view->candidates; j++)
        ids[j] = j < sink ? UINT32_MAX : kvf_choose_key((float)kvf_choose_sum(view, j));
    kvf_choose_top_keys(ids, view->candidates, count - window, ids);
    kvf_choose_range(view->candidates, window, ids + (count - window));
    answer->propagate_count = count;
}
