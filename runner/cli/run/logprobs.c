/* SPDX-License-Identifier: Apache-2.0 */

/* Log-probabilities of an answer; see the header. */

#include "logprobs.h"

#include "sampling.h"

#include <math.h>
#include <stdlib.h>

static bool reserve(cli_logprobs *l)
{
    if (l->count < l->capacity)
        return true;
    const uint32_t capacity = l->capacity ? 2 * l->capacity : 256;
    float *model = realloc(l->model, capacity * sizeof *model);
    if (model)
        l->model = model;
    float *drawn = realloc(l->drawn, capacity * sizeof *drawn);
    if (drawn)
        l->drawn = drawn;
    cli_likely *likely = realloc(l->likely, (capacity * (size_t)l->top + 1) * sizeof *likely);
    if (likely)
        l->likely = likely;
    if (!model || !drawn || !likely)
        return false;
    l->capacity = capacity;
    return true;
}

/* The likeliest, first; what there is no number for is none of them. */
static void find_likely(cli_likely *out, uint32_t top, const float *logits, uint32_t vocab_size)
{
    uint32_t held = 0;
    for (uint32_t id = 0; id < vocab_size; id++) {
        if (!(logits[id] == logits[id]) || (held == top && !(logits[id] > out[top - 1].logprob)))
            continue;
        uint32_t at = held < top ? held++ : top - 1;
        for (; at > 0 && logits[id] > out[at - 1].logprob; at--)
            out[at] = out[at - 1];
        out[at] = (cli_likely){id, logits[id]};
    }
    const double first = held ? -kvf_logits_loss(logits, vocab_size, out[0].id) : 0.0;
    const float highest = held ? out[0].logprob : 0.0f;
    for (uint32_t i = 0; i < held; i++)
        out[i].logprob = (float)(first + ((double)out[i].logprob - (double)highest));
    for (uint32_t i = held; i < top; i++)
        out[i] = (cli_likely){0, -HUGE_VALF};
}

bool cli_logprobs_add(cli_logprobs *l, const float *logits, uint32_t vocab_size, uint32_t id,
                      double drawn)
{
    if (!reserve(l))
        return false;
    l->model[l->count] = (float)-kvf_logits_loss(logits, vocab_size, id);
    l->drawn[l->count] = (float)drawn;
    if (l->top)
        find_likely(l->likely + (size_t)l->count * l->top, l->top, logits, vocab_size);
    l->count++;
    return true;
}

static void write_reals(cli_json *j, const char *key, const float *values, uint32_t count)
{
    cli_json_array(j, key);
    for (uint32_t i = 0; i < count; i++)
        cli_json_real(j, NULL, (double)values[i]);
    cli_json_end(j, ']');
}

/* [[[id, logprob], ...], ...] */
static void write_likely(cli_json *j, const cli_logprobs *l)
{
    cli_json_array(j, "top_logprobs");
    for (uint32_t i = 0; i < l->count; i++) {
        cli_json_array(j, NULL);
        for (uint32_t k = 0; k < l->top; k++) {
            const cli_likely *one = &l->likely[(size_t)i * l->top + k];
            cli_json_array(j, NULL);
            cli_json_integer(j, NULL, one->id);
            cli_json_real(j, NULL, (double)one->logprob);
            cli_json_end(j, ']');
        }
        cli_json_end(j, ']');
    }
    cli_json_end(j, ']');
}

void cli_logprobs_write(cli_json *j, const cli_logprobs *l, bool has_drawn)
{
    write_reals(j, "logprobs", l->model, l->count);
    if (has_drawn)
        write_reals(j, "draw_logprobs", l->drawn, l->count);
    if (l->top)
        write_likely(j, l);
}

void cli_logprobs_free(cli_logprobs *l)
{
    free(l->model);
    free(l->drawn);
    free(l->likely);
    *l = (cli_logprobs){.top = l->top};
}
