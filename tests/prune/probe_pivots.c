/* SPDX-License-Identifier: Apache-2.0 */

/*
 * ASL and StructKV at the other end of a pipe, several prompts at once: reads what the policy is to
 * see on stdin, prints what it answers.
 *
 * Knows no right answer; check_prune_pivots.py does. Each command is a line, some are followed by
 * raw little-endian numbers (in parentheses):
 *
 *     policy NAME
 *     set FIELD VALUE
 *     shape LAYERS KV_HEADS QUERY_HEADS TOKENS_MAX
 *     check                                     "ok" or what is wrong
 *     states COUNT                              so many fresh states
 *     needs STATE LAYER PASS                    a number
 *     profile HEADS CANDIDATES TOP              (f32 [heads, candidates]) three numbers per head
 *     transition LAYERS                         (f64 [layers, 3]) scores, then pivot and fired
 *     decide STATE LAYER TOKENS PROMPT PASS CANDIDATES PROFILED
 *                                               (scores f32, then f32 [query_heads, 3] if PROFILED)
 *
 * An answer is `answer KEEP_COUNT PROPAGATE_COUNT RESTART IS_CHOSEN`, then one line of indexes per
 * KV head if not all are kept, then one line if not all are propagated. What a policy must not
 * write is guarded: a state's end, and the room behind what it may answer.
 */

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <kvferry/prune.h>

#include "kernels.h"
#include "policies.h"
#include "structkv_transition.h"

#define STATES_MAX 8u
#define GUARD      0xa5a5a5a5u

static struct {
    kvf_prune_config config;
    kvf_prune_shape shape;
    kvf_kernels kernels;
    uint32_t states;
    size_t state_bytes;
    char *state[STATES_MAX];
} probe;

static void die(const char *what, const char *why)
{
    fprintf(stderr, "probe_pivots: %s: %s\n", what, why);
    exit(2);
}

static void *take(size_t count, size_t size)
{
    void *memory = calloc(count ? count : 1, size);
    if (!memory)
        die("calloc", "no memory");
    return memory;
}

static void *read_raw(size_t count, size_t size)
{
    void *memory = take(count, size);
    if (fread(memory, size, count, stdin) != count)
        die("stdin", "ends within an array");
    return memory;
}

/* ---- settings ---- */

static const struct {
    const char *name;
    size_t offset;
    int is_real;
} fields[] = {
#define WHOLE(name)                                                                                \
    {                                                                                              \
#name, offsetof(kvf_prune_settings, name), 0                                               \
    }
#define REAL(name)                                                                                 \
    {                                                                                              \
#name, offsetof(kvf_prune_settings, name), 1                                               \
    }
    REAL(keep),
    REAL(propagate),
    WHOLE(keep_tokens),
    WHOLE(propagate_tokens),
    WHOLE(layer),
    WHOLE(window),
    REAL(decay),
    REAL(mass_share),
    WHOLE(pivot),
    WHOLE(block_tokens),
    WHOLE(layer_min),
    WHOLE(layer_max),
    WHOLE(layers_observed),
    REAL(threshold),
    WHOLE(two_pass),
    {"weight0", offsetof(kvf_prune_settings, weights), 1},
    {"weight1", offsetof(kvf_prune_settings, weights) + sizeof(float), 1},
    {"weight2", offsetof(kvf_prune_settings, weights) + 2 * sizeof(float), 1},
};

static void set_field(const char *name, const char *value)
{
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        if (strcmp(fields[i].name, name) != 0)
            continue;
        char *to = (char *)&probe.config.settings + fields[i].offset;
        const uint32_t whole = (uint32_t)strtoul(value, NULL, 10);
        const float real = strtof(value, NULL);
        memcpy(to, fields[i].is_real ? (const void *)&real : (const void *)&whole, 4);
        return;
    }
    die("no such field", name);
}

/* ---- states ---- */

static void drop_states(void)
{
    for (uint32_t i = 0; i < probe.states; i++)
        free(probe.state[i]);
    probe.states = 0;
}

static void make_states(uint32_t count)
{
    const kvf_prune_policy *policy = probe.config.policy;
    const uint32_t guard = GUARD;
    drop_states();
    if (count > STATES_MAX || !policy->state_bytes)
        die("states", "too many, or a policy without state");
    probe.state_bytes = policy->state_bytes(&probe.config.settings, &probe.shape);
    for (; probe.states < count; probe.states++) {
        probe.state[probe.states] = take(1, probe.state_bytes + sizeof guard);
        memcpy(probe.state[probe.states] + probe.state_bytes, &guard, sizeof guard);
    }
    printf("%zu\n", probe.state_bytes);
}

static void *state_at(uint32_t index)
{
    if (index >= probe.states)
        die("state", "no such one");
    return probe.state[index];
}

/* ---- answers ---- */

static void print_ids(const uint32_t *ids, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        printf("%s%" PRIu32, i ? " " : "", ids[i]);
    printf("\n");
}

static void print_answer(const kvf_prune_view *view, const kvf_prune_answer *a)
{
    printf("answer %" PRIu32 " %" PRIu32 " %" PRIu32 " %" PRIu32 "\n", a->keep_count,
           a->propagate_count, a->restart, a->is_chosen);
    for (uint32_t h = 0; h < view->kv_heads && a->keep_count < view->tokens; h++)
        print_ids(a->keep + (size_t)h * a->keep_count, a->keep_count);
    if (a->propagate_count < view->tokens)
        print_ids(a->propagate, a->propagate_count);
}

static kvf_prune_view new_view(void)
{
    return (kvf_prune_view){.settings = &probe.config.settings,
                            .layers = probe.shape.layers,
                            .kv_heads = probe.shape.kv_heads,
                            .query_heads = probe.shape.query_heads,
                            .window = probe.config.settings.window};
}

static void decide(const char *args)
{
    const kvf_prune_policy *policy = probe.config.policy;
    kvf_prune_view view = new_view();
    uint32_t index, is_profiled;
    if (sscanf(args,
               "%" SCNu32 " %" SCNu32 " %" SCNu32 " %" SCNu32 " %" SCNu32 " %" SCNu32 " %" SCNu32,
               &index, &view.layer, &view.tokens, &view.prompt, &view.pass, &view.candidates,
               &is_profiled) != 7)
        die("decide", "takes seven numbers");
    const size_t room = (size_t)view.kv_heads * view.tokens;
    float *scores = read_raw((size_t)view.kv_heads * view.candidates, sizeof *scores);
    kvf_prune_profile *profile =
        read_raw(is_profiled ? view.query_heads : 0, sizeof(kvf_prune_profile));
    uint32_t *positions = take(view.tokens, sizeof *positions);
    kvf_prune_answer answer = {.keep = take(room + 1, sizeof(uint32_t)),
                               .keep_count = view.tokens,
                               .propagate = take(view.tokens + 1, sizeof(uint32_t)),
                               .propagate_count = view.tokens};
    uint32_t *const keep = answer.keep, *const propagate = answer.propagate;
    uint32_t guard;
    keep[room] = propagate[view.tokens] = GUARD;
    for (uint32_t i = 0; i < view.tokens; i++)
        positions[i] = i;
    view.scores = view.candidates ? scores : NULL;
    view.profile = is_profiled ? profile : NULL;
    view.positions = positions;
    view.state = state_at(index);
    policy->decide(&view, &answer);
    memcpy(&guard, probe.state[index] + probe.state_bytes, sizeof guard);
    if (guard != GUARD || keep[room] != GUARD || propagate[view.tokens] != GUARD ||
        answer.keep != keep || answer.propagate != propagate)
        die("decide", "wrote where it must not");
    print_answer(&view, &answer);
    free(positions);
    free(propagate);
    free(keep);
    free(profile);
    free(scores);
}

/* ---- numbers ---- */

static void profile(const char *args)
{
    kvf_profile_args a = {0};
    if (sscanf(args, "%" SCNu32 " %" SCNu32 " %" SCNu32, &a.rows, &a.count, &a.top) != 3)
        die("profile", "takes three numbers");
    float *scores = read_raw((size_t)a.rows * a.count, sizeof *scores);
    a.stride = a.count;
    a.scores = scores;
    a.out = take((size_t)a.rows * KVF_PROFILE_VALUES, sizeof *a.out);
    for (uint32_t i = 0; i < kvf_profile_tasks(&a); i++)
        probe.kernels.profile(&a, i);
    for (uint32_t i = 0; i < a.rows * KVF_PROFILE_VALUES; i++)
        printf("%.9g ", (double)a.out[i]);
    printf("\n");
    free(a.out);
    free(scores);
}

static void transition(const char *args)
{
    const kvf_prune_settings *s = &probe.config.settings;
    const uint32_t layers = (uint32_t)strtoul(args, NULL, 10);
    kvf_structkv_measures *measures = read_raw(layers, sizeof *measures);
    double *score = take(layers, sizeof *score);
    uint32_t fired = 1;
    for (; fired <= layers; fired++) {
        kvf_structkv_transition(s->weights, measures, fired, score);
        if (kvf_structkv_is_past(score, fired, s->layer_min))
            break;
    }
    kvf_structkv_transition(s->weights, measures, layers, score);
    for (uint32_t l = 0; l < layers; l++)
        printf("%.17g ", score[l]);
    printf("%" PRIu32 " %" PRIu32 "\n",
           kvf_structkv_pivot(score, layers, s->layer_min, s->layer_max),
           fired > layers ? layers : fired - 1);
    free(score);
    free(measures);
}

static void needs(const char *args)
{
    const kvf_prune_policy *policy = probe.config.policy;
    kvf_prune_view view = new_view();
    uint32_t index;
    if (sscanf(args, "%" SCNu32 " %" SCNu32 " %" SCNu32, &index, &view.layer, &view.pass) != 3)
        die("needs", "takes three numbers");
    view.state = state_at(index);
    printf("%" PRIu32 "\n", policy->needs_at ? policy->needs_at(&view) : policy->needs);
}

static void check(void)
{
    kvf_error error = {0};
    const kvf_status status = kvf_prune_config_check(&probe.config, &probe.shape, &error);
    printf("%s\n", status == KVF_OK ? "ok" : error.text);
}

static void obey(const char *command, const char *args)
{
    char name[64] = "", value[64] = "";
    const int words = sscanf(args, "%63s %63s", name, value);
    kvf_prune_shape *s = &probe.shape;
    if (strcmp(command, "policy") == 0 && kvf_prune_policy_find(name))
        kvf_prune_config_init(&probe.config, kvf_prune_policy_find(name));
    else if (!probe.config.policy)
        die(command, "no policy yet");
    else if (strcmp(command, "set") == 0 && words == 2)
        set_field(name, value);
    else if (strcmp(command, "shape") == 0 &&
             sscanf(args, "%" SCNu32 " %" SCNu32 " %" SCNu32 " %" SCNu32, &s->layers, &s->kv_heads,
                    &s->query_heads, &s->tokens_max) == 4)
        drop_states();
    else if (strcmp(command, "check") == 0)
        check();
    else if (strcmp(command, "states") == 0)
        make_states((uint32_t)strtoul(name, NULL, 10));
    else if (strcmp(command, "needs") == 0)
        needs(args);
    else if (strcmp(command, "profile") == 0)
        profile(args);
    else if (strcmp(command, "transition") == 0)
        transition(args);
    else if (strcmp(command, "decide") == 0)
        decide(args);
    else
        die("no such command", command);
}

int main(void)
{
    char line[256];
    if (kvf_kernels_init(&probe.kernels, KVF_ISA_ALL) != KVF_OK)
        die("kernels", "none");
    while (fgets(line, sizeof line, stdin)) {
        char command[64] = "";
        int used = 0;
        if (sscanf(line, "%63s%n", command, &used) != 1)
            continue;
        obey(command, line + used);
        fflush(stdout);
    }
    drop_states();
    return 0;
}
