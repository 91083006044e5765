/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Prefill pruning against full prefill, in the same run: what measuring costs, and what it saves.
 *
 * Two models: the recall model with a long prompt, and a random one with the shape of Llama-3.1-8B
 * and fewer layers. All cases of a model take turns, one prompt each per round, so that what else
 * the machine does meets all of them; ratios are of medians, with their spread over rounds. Prompts
 * are random token ids: what a policy costs does not depend on what it chooses.
 *
 * The last layer of a prefill has no MLP to do, and the layer that propagates does its MLP for the
 * tokens that go on only; so with few layers half depth gains more than with many.
 */

#include "bench_model.h"
#include "bench_report.h"
#include "common/clock.h"
#include "random_model.h"

#include <stdlib.h>

#define ROUNDS_MAX 64u
#define CASES_MAX  12u
#define CHUNK      256u /* tokens of an operation, as in the command */
#define WINDOW_MAX 32u

/* A way to prefill. */
typedef struct plan {
    const char *name;
    const char *policy; /* NULL = none */
    uint32_t window;
    float keep, propagate;
    uint32_t propagate_tokens;
    uint32_t tokens; /* of the prompt */
    bool is_half;    /* the layer before half depth is the one that propagates */
    bool is_late;    /* the last layer at the latest, and not before by the rule of asl */
} plan;

/* Figures of one round. */
typedef struct sample {
    double seconds, first_token_seconds;
    double observe, decide, retain; /* seconds */
} sample;

typedef struct measured {
    const plan *plan;
    double seconds[3], ttft[3];
    double observe[3], decide[3], retain[3]; /* shares of the prefill of the same prompt */
    double extra[3];      /* seconds over full prefill of the same round, as a share of it */
    double speedup[3];    /* full prefill of the same round / this */
    double ttft_share[3]; /* of full prefill's time to the first token of the same round */
    double rate;          /* tokens computed / tokens x layers */
    uint32_t chosen;
} measured;

typedef struct rig {
    const char *path, *random_config; /* one of them */
    uint32_t tokens, rounds;
    bench_model m;
    uint32_t *ids;
} rig;

static bool rig_open(rig *r)
{
    kvf_cache_config cc;
    kvf_cache_config_init(&cc);
    cc.tokens_max = r->tokens + 64;
    cc.observe_window = WINDOW_MAX;
    r->ids = calloc(r->tokens, sizeof *r->ids);
    if (!r->ids || !bench_model_open(&r->m, r->path, r->random_config, CHUNK, r->tokens, &cc))
        return false;
    random_stream stream = random_stream_of("prompt");
    for (uint32_t i = 0; i < r->tokens; i++)
        r->ids[i] = (uint32_t)(random_stream_next(&stream) % r->m.config.vocab_size);
    return true;
}

static void rig_close(rig *r)
{
    bench_model_close(&r->m);
    free(r->ids);
}

/* ---- one prompt ---- */

static kvf_status open_prune(rig *r, const plan *p, kvf_prune **out)
{
    kvf_prune_config pc;
    kvf_error error = {0};
    kvf_prune_config_init(&pc, kvf_prune_policy_find(p->policy));
    kvf_prune_settings *s = &pc.settings;
    s->window = p->window;
    s->keep = p->keep;
    s->keep_tokens = 0;
    s->propagate = p->propagate_tokens ? 1.0f : p->propagate;
    s->propagate_tokens = p->propagate_tokens;
    if (p->is_half)
        s->layer = r->m.config.layers / 2 - 1;
    if (p->is_late) {
        s->layer_max = r->m.config.layers - 1;
        s->layers_observed = 2;
        s->threshold = 0.0f;
    }
    const kvf_status status = kvf_prune_open(r->m.cache, &pc, out, &error);
    if (status != KVF_OK)
        fprintf(stderr, "bench_prune: %s: %s\n", p->name, error.text);
    return status;
}

static kvf_status prefill(rig *r, const plan *p, kvf_prune *prune, kvf_sequence *sequence)
{
    if (!prune)
        return kvf_transformer_prefill(r->m.transformer, r->m.cache, sequence, r->ids, p->tokens,
                                       r->m.stream);
    const kvf_prompt prompt = {.sequence = sequence, .ids = r->ids, .count = p->tokens};
    return kvf_transformer_prefill_pruned(r->m.transformer, r->m.cache, prune, &prompt, 1,
                                          r->m.stream);
}

static void read_stats(const kvf_prune *prune, sample *out, measured *m)
{
    kvf_prune_stats s;
    kvf_prune_stats_get(prune, &s);
    out->observe = (double)s.observe_ns * 1e-9;
    out->decide = (double)s.decide_ns * 1e-9;
    out->retain = (double)s.retain_ns * 1e-9;
    m->rate = (double)s.tokens_computed / (double)s.tokens_full;
    m->chosen = s.chosen_layer;
}

/* One prompt and one token after it. */
static kvf_status run_once(rig *r, const plan *p, sample *out, measured *m)
{
    kvf_prune *prune = NULL;
    kvf_sequence *sequence = NULL;
    kvf_status status = p->policy ? open_prune(r, p, &prune) : KVF_OK;
    if (status == KVF_OK)
        status = kvf_sequence_create(r->m.cache, &sequence);
    const double start = kvf_now_seconds();
    if (status == KVF_OK)
        status = bench_model_wait(&r->m, prefill(r, p, prune, sequence));
    out->seconds = kvf_now_seconds() - start;
    if (status == KVF_OK)
        status =
            bench_model_wait(&r->m, kvf_transformer_decode(r->m.transformer, r->m.cache, &sequence,
                                                           r->ids, 1, true, r->m.stream));
    out->first_token_seconds = kvf_now_seconds() - start;
    if (prune && status == KVF_OK)
        read_stats(prune, out, m);
    kvf_transformer_forget(r->m.transformer);
    kvf_sequence_destroy(sequence);
    kvf_prune_close(prune);
    return status;
}

/* ---- rounds ---- */

/* Case 0 is full prefill of all tokens. */
static void summarise(sample (*rounds)[CASES_MAX], uint32_t count, uint32_t index, measured *m)
{
    double column[8][ROUNDS_MAX];
    for (uint32_t i = 0; i < count; i++) {
        const sample *s = &rounds[i][index], *full = &rounds[i][0];
        column[0][i] = s->seconds;
        column[1][i] = s->first_token_seconds;
        column[2][i] = s->observe / full->seconds;
        column[3][i] = s->decide / full->seconds;
        column[4][i] = s->retain / full->seconds;
        column[5][i] = s->seconds / full->seconds - 1.0;
        column[6][i] = full->seconds / s->seconds;
        column[7][i] = s->first_token_seconds / full->first_token_seconds;
    }
    double *out[8] = {m->seconds, m->ttft,  m->observe, m->decide,
                      m->retain,  m->extra, m->speedup, m->ttft_share};
    for (int i = 0; i < 8; i++)
        bench_percentiles(column[i], count, out[i]);
}

static kvf_status measure(rig *r, const plan *plans, uint32_t count, measured *out)
{
    static sample rounds[ROUNDS_MAX][CASES_MAX];
    kvf_status status = KVF_OK;
    sample warm;
    for (uint32_t i = 0; i < count; i++)
        out[i] = (measured){.plan = &plans[i], .rate = 1.0, .chosen = KVF_PRUNE_LAYER_AUTO};
    /* Weights are read and packed once before anything counts. */
    plan first = plans[0];
    first.tokens = first.tokens < 2 * CHUNK ? first.tokens : 2 * CHUNK;
    status = run_once(r, &first, &warm, &out[0]);
    for (uint32_t round = 0; round < r->rounds && status == KVF_OK; round++)
        for (uint32_t i = 0; i < count && status == KVF_OK; i++)
            status = run_once(r, &plans[i], &rounds[round][i], &out[i]);
    for (uint32_t i = 0; i < count && status == KVF_OK; i++)
        summarise(rounds, r->rounds, i, &out[i]);
    if (status != KVF_OK)
        fprintf(stderr, "bench_prune: %s\n", kvf_status_name(status));
    return status;
}

static double percent(double share)
{
    return share * 100.0;
}

static void print_table(const rig *r, const char *title, const measured *m, uint32_t count)
{
    printf("%s, %u layers, %u tokens, %u threads, %u rounds: medians (10th to 90th percentile)\n"
           "shares are of full prefill of the same round\n\n",
           title, r->m.config.layers, r->tokens, kvf_runtime_threads(r->m.runtime), r->rounds);
    printf("%-26s %9s %8s %16s %8s %8s %8s %22s\n", "case", "seconds", "computed", "full / this",
           "observe", "decide", "retain", "longer than full");
    for (uint32_t i = 0; i < count; i++)
        printf(
            "%-26s %9.3f %7.1f%% %5.2f (%.2f-%.2f) %7.2f%% %7.2f%% %7.2f%% %7.1f%% (%.1f-%.1f)\n",
            m[i].plan->name, m[i].seconds[1], percent(m[i].rate), m[i].speedup[1], m[i].speedup[0],
            m[i].speedup[2], percent(m[i].observe[1]), percent(m[i].decide[1]),
            percent(m[i].retain[1]), percent(m[i].extra[1]), percent(m[i].extra[0]),
            percent(m[i].extra[2]));
    printf("\n");
}

static void json_model(FILE *f, const char *name, const rig *r, const measured *m, uint32_t count,
                       const char *end)
{
    fprintf(f,
            "  \"%s\": {\"layers\": %u, \"tokens\": %u, \"threads\": %u, \"rounds\": %u, "
            "\"cases\": [\n",
            name, r->m.config.layers, r->tokens, kvf_runtime_threads(r->m.runtime), r->rounds);
    for (uint32_t i = 0; i < count; i++) {
        fprintf(f, "    {\"name\": \"%s\", \"tokens\": %u, \"compute_rate\": %.4f,\n     ",
                m[i].plan->name, m[i].plan->tokens, m[i].rate);
        if (m[i].chosen != KVF_PRUNE_LAYER_AUTO)
            fprintf(f, "\"chosen_layer\": %u, ", m[i].chosen);
        bench_json_three(f, "seconds", m[i].seconds, ", ");
        bench_json_three(f, "ttft_seconds", m[i].ttft, ",\n     ");
        bench_json_three(f, "ttft_share", m[i].ttft_share, ", ");
        bench_json_three(f, "speedup", m[i].speedup, ", ");
        bench_json_three(f, "longer_share", m[i].extra, ",\n     ");
        bench_json_three(f, "observe_share", m[i].observe, ", ");
        bench_json_three(f, "decide_share", m[i].decide, ", ");
        bench_json_three(f, "retain_share", m[i].retain, "}");
        fputs(i + 1 < count ? ",\n" : "\n", f);
    }
    fprintf(f, "  ]}%s\n", end);
}

/* ---- the recall model ---- */

enum { FULL, SHORT, SNAP_8, SNAP_32, STRUCT_DETECT, ASL_RANKS, FAST, STRUCT, ASL, RECALL_CASES };

#define ASL_TOKENS 2048u

static void recall_plans(plan *p, uint32_t tokens)
{
    const uint32_t few = tokens / 2 < ASL_TOKENS ? tokens / 2 : ASL_TOKENS;
    p[FULL] = (plan){.name = "full", .tokens = tokens};
    p[SHORT] = (plan){.name = "full, asl's tokens only", .tokens = few};
    p[SNAP_8] = (plan){
        .name = "snapkv, W = 8", .policy = "snapkv", .window = 8, .keep = 0.2f, .propagate = 1.0f};
    p[SNAP_32] = p[SNAP_8];
    p[SNAP_32].name = "snapkv, W = 32";
    p[SNAP_32].window = 32;
    p[STRUCT_DETECT] = (plan){.name = "structkv, online, late",
                              .policy = "structkv",
                              .window = 8,
                              .keep = 1.0f,
                              .propagate = 0.2f,
                              .is_late = true};
    p[ASL_RANKS] = (plan){.name = "asl, late",
                          .policy = "asl",
                          .window = 32,
                          .keep = 1.0f,
                          .is_late = true,
                          .propagate_tokens = few};
    p[FAST] = (plan){.name = "fastkv, half depth, 0.2",
                     .policy = "fastkv",
                     .window = 8,
                     .keep = 0.1f,
                     .propagate = 0.2f,
                     .is_half = true};
    p[STRUCT] = p[FAST];
    p[STRUCT].name = "structkv, half depth, 0.2";
    p[STRUCT].policy = "structkv";
    p[ASL] = (plan){.name = "asl, half depth",
                    .policy = "asl",
                    .window = 32,
                    .keep = 1.0f,
                    .is_half = true,
                    .propagate_tokens = few};
    for (int i = SNAP_8; i < RECALL_CASES; i++)
        p[i].tokens = tokens;
}

/* ASL's time to the first token against what its layers and lengths predict. */
typedef struct asl_check {
    uint32_t chosen;
    double measured, predicted; /* share of full prefill's */
} asl_check;

static asl_check check_asl(const rig *r, const measured *m)
{
    const double layers = r->m.config.layers, chosen = m[ASL].chosen;
    return (asl_check){.chosen = m[ASL].chosen,
                       .measured = m[ASL].ttft_share[1],
                       .predicted = (chosen + 1.0) / layers + (layers - chosen - 1.0) / layers *
                                                                  m[SHORT].ttft[1] /
                                                                  m[FULL].ttft[1]};
}

static void print_recall(const measured *m, const asl_check *a)
{
    const double structure = m[STRUCT_DETECT].observe[1] + m[STRUCT_DETECT].decide[1];
    printf("share of full prefill                              measured      aim\n");
    printf("observation, W = 8                                 %7.2f%%   <= 2%%\n",
           percent(m[SNAP_8].observe[1]));
    printf("observation, W = 32                                %7.2f%%   <= 2%%\n",
           percent(m[SNAP_32].observe[1]));
    printf("structkv: observation, accumulation and detection  %7.2f%%   <= 2.5%%\n",
           percent(structure));
    printf("asl's ranks and choice, without observation        %7.2f%%   <= 2%%\n",
           percent(m[ASL_RANKS].decide[1]));
    printf("full / fastkv, half depth, rate 0.2                %7.2fx   >= 1.5x\n",
           m[FAST].speedup[1]);
    printf("full / structkv, half depth, rate 0.2              %7.2fx   >= 1.5x\n",
           m[STRUCT].speedup[1]);
    printf("asl's first token / full's: predicted %.3f         %7.3f    within 10%%: %+.1f%%\n\n",
           a->predicted, a->measured, percent(a->measured / a->predicted - 1.0));
}

/* ---- the shape of Llama-3.1-8B ---- */

enum { LARGE_FULL, LARGE_FAST, LARGE_STRUCT, LARGE_CASES };

static const char large_config[] =
    "{\"architectures\": [\"LlamaForCausalLM\"], \"model_type\": \"llama\", \"hidden_size\": 4096,"
    " \"intermediate_size\": 14336, \"num_hidden_layers\": %u, \"num_attention_heads\": 32,"
    " \"num_key_value_heads\": 8, \"head_dim\": 128, \"vocab_size\": 1024, \"hidden_act\": "
    "\"silu\","
    " \"max_position_embeddings\": 131072, \"rope_theta\": 500000.0, \"rms_norm_eps\": 1e-5,"
    " \"tie_word_embeddings\": true, \"torch_dtype\": \"bfloat16\"}";

static void large_plans(plan *p, uint32_t tokens)
{
    p[LARGE_FULL] = (plan){.name = "full", .tokens = tokens};
    p[LARGE_FAST] = (plan){.name = "fastkv, half depth, 0.2",
                           .policy = "fastkv",
                           .window = 8,
                           .keep = 0.1f,
                           .propagate = 0.2f,
                           .is_half = true,
                           .tokens = tokens};
    p[LARGE_STRUCT] = p[LARGE_FAST];
    p[LARGE_STRUCT].name = "structkv, half depth, 0.2";
    p[LARGE_STRUCT].policy = "structkv";
}

/* ---- main ---- */

typedef struct options {
    const char *model;
    uint32_t tokens, rounds;
    uint32_t large_layers, large_tokens, large_rounds; /* 0 layers: leave it out */
} options;

static void load_average(double *out)
{
    if (getloadavg(out, 1) != 1)
        *out = -1.0;
}

static kvf_status run_recall(rig *r, measured *m, asl_check *asl)
{
    static plan plans[RECALL_CASES];
    recall_plans(plans, r->tokens);
    kvf_status status = rig_open(r) ? measure(r, plans, RECALL_CASES, m) : KVF_SYSTEM;
    if (status != KVF_OK)
        return status;
    *asl = check_asl(r, m);
    print_table(r, "recall model", m, RECALL_CASES);
    print_recall(m, asl);
    fflush(stdout);
    return KVF_OK;
}

static kvf_status run_large(rig *r, uint32_t layers, measured *m)
{
    static plan plans[LARGE_CASES];
    char config[sizeof large_config + 16];
    snprintf(config, sizeof config, large_config, layers);
    r->random_config = config;
    large_plans(plans, r->tokens);
    kvf_status status = rig_open(r) ? measure(r, plans, LARGE_CASES, m) : KVF_SYSTEM;
    if (status != KVF_OK)
        return status;
    print_table(r, "random model with layers of Llama-3.1-8B", m, LARGE_CASES);
    printf("full / fastkv %.2fx, full / structkv %.2fx; the aim is 1.7x\n\n",
           m[LARGE_FAST].speedup[1], m[LARGE_STRUCT].speedup[1]);
    return KVF_OK;
}

int main(int argc, char **argv)
{
    options o = {.model = "examples/recall/model",
                 .tokens = 16384,
                 .rounds = 7,
                 .large_layers = 4,
                 .large_tokens = 8192,
                 .large_rounds = 3};
    const bench_option table[] = {{.name = "--model", .text = &o.model},
                                  {"--tokens", &o.tokens, 1024, 1u << 24, NULL},
                                  {"--rounds", &o.rounds, 1, ROUNDS_MAX, NULL},
                                  {"--large-layers", &o.large_layers, 0, 256, NULL},
                                  {"--large-tokens", &o.large_tokens, 1024, 1u << 24, NULL},
                                  {"--large-rounds", &o.large_rounds, 1, ROUNDS_MAX, NULL},
                                  {0}};
    const bench_args args = bench_args_read(argc, argv, table);
    rig small = {.path = o.model, .tokens = o.tokens, .rounds = o.rounds};
    rig large = {.tokens = o.large_tokens, .rounds = o.large_rounds};
    measured m[RECALL_CASES], n[LARGE_CASES];
    asl_check asl = {0};
    double load[2];
    load_average(&load[0]);
    kvf_status status = run_recall(&small, m, &asl);
    if (status == KVF_OK && o.large_layers > 0)
        status = run_large(&large, o.large_layers, n);
    load_average(&load[1]);
    if (status == KVF_OK)
        printf("load average over a minute: %.1f before, %.1f after, this program included\n",
               load[0], load[1]);
    FILE *json = status == KVF_OK ? bench_json_open(&args) : NULL;
    if (json) {
        fprintf(json,
                "  \"load_average\": [%.2f, %.2f],\n"
                "  \"asl\": {\"chosen_layer\": %u, \"ttft_ratio\": %.4f, \"predicted\": %.4f},\n",
                load[0], load[1], asl.chosen, asl.measured, asl.predicted);
        json_model(json, "recall", &small, m, RECALL_CASES, o.large_layers ? "," : "");
        if (o.large_layers)
            json_model(json, "llama_shaped", &large, n, LARGE_CASES, "");
    }
    bench_json_close(json);
    rig_close(&small);
    rig_close(&large);
    return status != KVF_OK;
}
