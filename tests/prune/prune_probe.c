/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A policy at the other end of a pipe: reads what it is to see on stdin, prints what it answers.
 *
 * Knows no right answer; check_prune.py does. Each command is a line, some are followed by raw
 * little-endian numbers (in parentheses); every command but `set` prints one line or one answer.
 *
 *     policy NAME                        its defaults; a fresh state
 *     set FIELD VALUE                    a field of kvf_prune_settings or kvf_prune_config
 *     shape LAYERS KV_HEADS QUERY_HEADS TOKENS_MAX
 *     check                              kvf_prune_config_check
 *     decide LAYER TOKENS PROMPT PASS CANDIDATES    (scores f32 [kv_heads, candidates])
 *     open HEAD_DIM CHUNK                a cache and a pruner on it
 *     begin TOKENS                       a prompt in a fresh sequence
 *     layer LAYER TOKENS                 (q, k, v f32, positions u32) prefill, prune
 *     close
 *
 * An answer is `answer KEEP_COUNT PROPAGATE_COUNT RESTART IS_CHOSEN`, then one line of indexes per
 * KV head if not all are kept, then one line if not all are propagated.
 */

#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <kvferry/prune.h>

typedef struct answer_copy {
    kvf_prune_answer answer;
    uint32_t tokens, kv_heads;
    uint32_t *keep, *propagate;
} answer_copy;

typedef struct probe {
    kvf_prune_config config;
    kvf_prune_shape shape;
    const kvf_prune_policy *inner;
    kvf_prune_policy recorder; /* the policy, but for a decide that copies the answer */
    answer_copy seen;
    void *state;
    kvf_runtime *runtime;
    kvf_stream *stream;
    kvf_cache *cache;
    kvf_prune *prune;
    kvf_sequence *sequence;
    uint32_t head_dim, chunk;
} probe;

static void die(const char *what, const char *why)
{
    fprintf(stderr, "prune_probe: %s: %s\n", what, why);
    exit(2);
}

static void *take(size_t count, size_t size)
{
    void *memory = calloc(count ? count : 1, size);
    if (!memory)
        die("calloc", "no memory");
    return memory;
}

static void *read_raw(size_t count)
{
    void *memory = take(count, 4);
    if (fread(memory, 4, count, stdin) != count)
        die("stdin", "ends within an array");
    return memory;
}

/* ---- settings ---- */

typedef enum field_kind { FIELD_U32, FIELD_F32 } field_kind;

static const struct field {
    const char *name;
    size_t offset; /* into kvf_prune_config */
    field_kind kind;
} fields[] = {
#define SETTING(name, kind)                                                                        \
    {                                                                                              \
#name, offsetof(kvf_prune_config, settings) + offsetof(kvf_prune_settings, name), kind     \
    }
    SETTING(keep, FIELD_F32),
    SETTING(propagate, FIELD_F32),
    SETTING(keep_tokens, FIELD_U32),
    SETTING(propagate_tokens, FIELD_U32),
    SETTING(layer, FIELD_U32),
    SETTING(window, FIELD_U32),
    SETTING(pool, FIELD_U32),
    SETTING(pool_width, FIELD_U32),
    SETTING(group_reduce, FIELD_U32),
    SETTING(window_mean, FIELD_U32),
    SETTING(sink_tokens, FIELD_U32),
    SETTING(recent_share, FIELD_F32),
    SETTING(beta, FIELD_U32),
    SETTING(decay, FIELD_F32),
    SETTING(mass_share, FIELD_F32),
    SETTING(block_tokens, FIELD_U32),
    SETTING(layer_min, FIELD_U32),
    SETTING(layer_max, FIELD_U32),
    SETTING(layers_observed, FIELD_U32),
    SETTING(threshold, FIELD_F32),
    SETTING(two_pass, FIELD_U32),
    {"retention", offsetof(kvf_prune_config, retention), FIELD_U32},
    {"compat_bf16", offsetof(kvf_prune_config, compat_bf16), FIELD_U32},
};

static void set_field(probe *p, const char *name, const char *value)
{
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        if (strcmp(fields[i].name, name) != 0)
            continue;
        char *to = (char *)&p->config + fields[i].offset;
        const uint32_t whole = (uint32_t)strtoul(value, NULL, 10);
        const float real = strtof(value, NULL);
        memcpy(to, fields[i].kind == FIELD_U32 ? (const void *)&whole : (const void *)&real, 4);
        return;
    }
    die("no such field", name);
}

static void reset_state(probe *p)
{
    free(p->state);
    p->state = NULL;
    if (p->inner->state_bytes)
        p->state = take(1, p->inner->state_bytes(&p->config.settings, &p->shape));
}

static void take_policy(probe *p, const char *name)
{
    p->inner = kvf_prune_policy_find(name);
    if (!p->inner)
        die("no such policy", name);
    kvf_prune_config_init(&p->config, p->inner);
}

/* ---- answers ---- */

static void copy_answer(answer_copy *copy, const kvf_prune_view *view,
                        const kvf_prune_answer *answer)
{
    copy->answer = *answer;
    copy->tokens = view->tokens;
    copy->kv_heads = view->kv_heads;
    free(copy->keep);
    free(copy->propagate);
    const size_t kept = answer->keep_count < view->tokens ? answer->keep_count : 0;
    const size_t passed = answer->propagate_count < view->tokens ? answer->propagate_count : 0;
    copy->keep = take(view->kv_heads * kept, sizeof *copy->keep);
    copy->propagate = take(passed, sizeof *copy->propagate);
    if (kept)
        memcpy(copy->keep, answer->keep, view->kv_heads * kept * sizeof *copy->keep);
    if (passed)
        memcpy(copy->propagate, answer->propagate, passed * sizeof *copy->propagate);
}

static void print_ids(const uint32_t *ids, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        printf("%s%" PRIu32, i ? " " : "", ids[i]);
    printf("\n");
}

static void print_answer(const answer_copy *copy)
{
    const kvf_prune_answer *a = &copy->answer;
    printf("answer %" PRIu32 " %" PRIu32 " %" PRIu32 " %" PRIu32 "\n", a->keep_count,
           a->propagate_count, a->restart, a->is_chosen);
    for (uint32_t h = 0; h < copy->kv_heads && a->keep_count < copy->tokens; h++)
        print_ids(copy->keep + (size_t)h * a->keep_count, a->keep_count);
    if (a->propagate_count < copy->tokens)
        print_ids(copy->propagate, a->propagate_count);
}

/* An embedder's own policy: the library's, watched. */
static void record(const kvf_prune_view *view, kvf_prune_answer *answer)
{
    probe *p = view->user;
    p->inner->decide(view, answer);
    copy_answer(&p->seen, view, answer);
}

static void decide(probe *p, const char *args)
{
    kvf_prune_view view = {.settings = &p->config.settings,
                           .layers = p->shape.layers,
                           .kv_heads = p->shape.kv_heads,
                           .query_heads = p->shape.query_heads};
    if (sscanf(args, "%" SCNu32 " %" SCNu32 " %" SCNu32 " %" SCNu32 " %" SCNu32, &view.layer,
               &view.tokens, &view.prompt, &view.pass, &view.candidates) != 5)
        die("decide", "takes five numbers");
    const uint32_t window = p->config.settings.window;
    view.window = window < view.tokens ? window : view.tokens;
    float *scores = read_raw((size_t)view.kv_heads * view.candidates);
    uint32_t *positions = take(view.tokens, sizeof *positions);
    for (uint32_t i = 0; i < view.tokens; i++)
        positions[i] = i;
    view.scores = view.candidates ? scores : NULL;
    view.positions = positions;
    if (view.layer == 0)
        reset_state(p);
    view.state = p->state;
    kvf_prune_answer answer = {.keep =
                                   take((size_t)view.kv_heads * view.tokens, sizeof *answer.keep),
                               .keep_count = view.tokens,
                               .propagate = take(view.tokens, sizeof *answer.propagate),
                               .propagate_count = view.tokens};
    uint32_t *keep = answer.keep, *propagate = answer.propagate;
    p->inner->decide(&view, &answer);
    copy_answer(&p->seen, &view, &answer);
    print_answer(&p->seen);
    free(keep);
    free(propagate);
    free(positions);
    free(scores);
}

/* ---- with a cache ---- */

static void must(kvf_status status, const char *what, const probe *p)
{
    if (status != KVF_OK)
        die(what, p->runtime ? kvf_runtime_error(p->runtime)->text : kvf_status_text(status));
}

static void open_cache(probe *p, const char *args)
{
    if (sscanf(args, "%" SCNu32 " %" SCNu32, &p->head_dim, &p->chunk) != 2)
        die("open", "takes two numbers");
    kvf_runtime_config rc;
    kvf_runtime_config_init(&rc);
    rc.device = KVF_DEVICE_HOST;
    rc.threads = 2;
    rc.calibrate = 0;
    must(kvf_runtime_open(&rc, &p->runtime, NULL), "kvf_runtime_open", p);
    must(kvf_stream_create(p->runtime, &p->stream), "kvf_stream_create", p);
    kvf_cache_config cc;
    kvf_cache_config_init(&cc);
    cc.layers = p->shape.layers;
    cc.query_heads = p->shape.query_heads;
    cc.kv_heads = p->shape.kv_heads;
    cc.head_dim = p->head_dim;
    cc.dtype = KVF_FP32;
    cc.tokens_max = p->shape.tokens_max;
    cc.prefill_chunk_max = p->chunk;
    cc.observe_window = p->config.settings.window ? p->config.settings.window : 1;
    kvf_error error = {0};
    if (kvf_cache_open(p->runtime, &cc, &p->cache, &error) != KVF_OK)
        die("kvf_cache_open", error.text);
    p->recorder = *p->inner;
    p->recorder.name = "recorder";
    p->recorder.decide = record;
    p->recorder.user = p;
    p->config.policy = &p->recorder;
    if (kvf_prune_open(p->cache, &p->config, &p->prune, &error) != KVF_OK)
        die("kvf_prune_open", error.text);
    printf("ok\n");
}

static void begin(probe *p, const char *args)
{
    if (p->sequence)
        kvf_sequence_destroy(p->sequence);
    p->sequence = NULL;
    must(kvf_sequence_create(p->cache, &p->sequence), "kvf_sequence_create", p);
    const kvf_status status =
        kvf_prune_begin(p->prune, p->sequence, (uint32_t)strtoul(args, NULL, 10));
    printf("%s\n", status == KVF_OK ? "ok" : kvf_runtime_error(p->runtime)->text);
}

static void prefill(probe *p, uint32_t layer, uint32_t tokens)
{
    const size_t query = (size_t)p->shape.query_heads * p->head_dim;
    const size_t key = (size_t)p->shape.kv_heads * p->head_dim;
    float *q = read_raw(tokens * query), *k = read_raw(tokens * key), *v = read_raw(tokens * key);
    float *out = take(tokens * query, sizeof *out);
    uint32_t *positions = read_raw(tokens);
    for (uint32_t done = 0; done < tokens; done += p->chunk) {
        const kvf_prefill_args args = {
            .sequence = p->sequence,
            .layer = layer,
            .tokens = tokens - done < p->chunk ? tokens - done : p->chunk,
            .q = q + done * query,
            .k = k + done * key,
            .v = v + done * key,
            .positions = positions + done,
            .out = out + done * query,
        };
        must(kvf_prefill(p->cache, &args, p->stream), "kvf_prefill", p);
        must(kvf_prune_append(p->prune, &args, p->stream), "kvf_prune_append", p);
    }
    kvf_prune_result result;
    must(kvf_prune_layer(p->prune, p->sequence, layer, p->stream, &result), "kvf_prune_layer", p);
    must(kvf_stream_wait(p->stream), "kvf_stream_wait", p);
    const kvf_prune_answer *a = &p->seen.answer;
    if (result.restart != a->restart || result.propagate_count != a->propagate_count ||
        (a->propagate_count < tokens &&
         memcmp(result.propagate, p->seen.propagate, a->propagate_count * sizeof(uint32_t)) != 0))
        die("kvf_prune_layer", "hands on something else than the policy said");
    const uint32_t length = kvf_sequence_length(p->sequence, layer);
    const uint32_t wanted = p->config.retention == KVF_RETENTION_EVICT ? a->keep_count : tokens;
    if (length != (a->restart ? 0 : wanted))
        die("kvf_prune_layer", "leaves a layer of another length than the policy said");
    free(q);
    free(k);
    free(v);
    free(out);
    free(positions);
    print_answer(&p->seen);
}

static void close_cache(probe *p)
{
    if (p->sequence)
        kvf_sequence_destroy(p->sequence);
    kvf_prune_close(p->prune);
    if (p->cache)
        kvf_cache_close(p->cache);
    if (p->stream)
        kvf_stream_destroy(p->stream);
    if (p->runtime)
        kvf_runtime_close(p->runtime);
    p->sequence = NULL;
    p->prune = NULL;
    p->cache = NULL;
    p->stream = NULL;
    p->runtime = NULL;
    printf("ok\n");
}

static void obey(probe *p, const char *command, const char *args)
{
    uint32_t layer, tokens;
    if (strcmp(command, "decide") == 0) {
        decide(p, args);
    } else if (strcmp(command, "shape") == 0) {
        if (sscanf(args, "%" SCNu32 " %" SCNu32 " %" SCNu32 " %" SCNu32, &p->shape.layers,
                   &p->shape.kv_heads, &p->shape.query_heads, &p->shape.tokens_max) != 4)
            die("shape", "takes four numbers");
        printf("ok\n");
    } else if (strcmp(command, "check") == 0) {
        kvf_error error = {0};
        const kvf_status status = kvf_prune_config_check(&p->config, &p->shape, &error);
        printf("%s\n", status == KVF_OK ? "ok" : error.text);
    } else if (strcmp(command, "open") == 0) {
        open_cache(p, args);
    } else if (strcmp(command, "begin") == 0) {
        begin(p, args);
    } else if (strcmp(command, "layer") == 0) {
        if (sscanf(args, "%" SCNu32 " %" SCNu32, &layer, &tokens) != 2)
            die("layer", "takes two numbers");
        prefill(p, layer, tokens);
    } else if (strcmp(command, "close") == 0) {
        close_cache(p);
    } else {
        die("no such command", command);
    }
}

int main(void)
{
    probe p = {0};
    char line[256];
    while (fgets(line, sizeof line, stdin)) {
        char command[64] = "", name[64] = "", value[64] = "";
        int used = 0;
        if (sscanf(line, "%63s%n", command, &used) != 1)
            continue;
        if (strcmp(command, "policy") == 0 && sscanf(line + used, "%63s", name) == 1) {
            take_policy(&p, name);
            printf("ok\n");
        } else if (strcmp(command, "set") == 0 &&
                   sscanf(line + used, "%63s %63s", name, value) == 2) {
            set_field(&p, name, value);
        } else if (!p.inner) {
            die(command, "no policy yet");
        } else {
            obey(&p, command, line + used);
        }
        fflush(stdout);
    }
    free(p.state);
    free(p.seen.keep);
    free(p.seen.propagate);
    return 0;
}
