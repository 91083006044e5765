/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What selections of a cache do to a model's answers and losses: every task under every
 * configuration, with one prefill per document for all of them.
 *
 * usage: eval_selection --model DIR --tasks FILE --configs FILE [--out FILE] [--lanes N]
 *        eval_selection --model DIR --tasks FILE [--out FILE]        only counts tokens
 *
 * A configuration is a line: a name, a tab, and settings of a cache as FIELD=VALUE, apart by
 * spaces, also head_mask=FILE, and extend=dense, where questions are read densely but for their
 * last token; what is not said is the library's default. What comes out is one line per
 * configuration, answer, loss and sum, fields apart by tabs:
 *
 *     config NAME
 *     answer DOCUMENT TASK TEXT
 *     loss DOCUMENT TASK TOKENS SUM FIRST      FIRST: tokens that were the likeliest
 *     stats FIELD=VALUE ...
 *     refused REASON         in place of all these: the library has no such cache
 *     same NAME              likewise: an earlier configuration comes to the same settings
 *
 * In front of them stands, and without configurations, which needs no weights, is all:
 *
 *     document DOCUMENT TOKENS
 *     task DOCUMENT TASK TOKENS        that are fed; only without configurations
 *
 * A document ends with a decode step, as in `kvferry run`; every task continues on a fork, and as
 * many as there are lanes are decoded at once, of whatever document. A batch does not change a bit
 * of attention. Figures are sums over all steps behind the documents.
 *
 * It knows tasks, not what is right. Invariant: what a configuration says does not depend on
 * others.
 */

#include "bench_report.h"
#include "common/clock.h"
#include "eval_prefill.h"
#include "eval_tasks.h"
#include "head_mask.h"
#include "sampling.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <kvferry/setting.h>

#define CHUNK       256u /* tokens of an operation, as in the command */
#define LANES_MAX   32u
#define CONFIGS_MAX 256u
#define LINE_BYTES  1024 /* of a configuration */
#define TEXT_BYTES  4096 /* of all settings of a cache */

/* A task on its way. */
typedef struct lane {
    const eval_task *task;    /* NULL = free */
    uint32_t document, index; /* of the task */
    kvf_sequence *fork;
    uint32_t fed;  /* of its ids */
    uint32_t next; /* the token that the next step gets */
    kvf_token_ids said;
    double loss;
    uint32_t first; /* tokens that were the likeliest */
    bool is_done;
} lane;

/* A configuration that was run. */
typedef struct past_config {
    char name[LINE_BYTES];
    char settings[TEXT_BYTES]; /* as the library resolved them */
} past_config;

/* A document, and what continues it. */
typedef struct parent {
    eval_prefill prefill;
    kvf_sequence *sequence; /* of one configuration */
    float *logits;          /* [vocab] behind its last token */
} parent;

typedef struct evaluation {
    const char *model, *tasks_file, *configs_file, *out_file;
    uint32_t lanes_max;
    eval_machine machine;
    kvf_tokenizer *tokenizer;
    eval_tasks tasks;
    parent *parents; /* [tasks.count] */
    FILE *out;
    /* of one configuration */
    kvf_cache *cache;
    uint8_t *head_mask; /* [layers, kv_heads], or NULL */
    bool extends_dense; /* questions, but for their last token */
    uint64_t batches;
    double seconds, cpu_seconds;
    lane lanes[LANES_MAX];
    /* of all */
    double start;
    past_config *past; /* [CONFIGS_MAX] */
    uint32_t past_count;
} evaluation;

static kvf_status fail_library(const evaluation *e, kvf_status status, kvf_error *error)
{
    const kvf_error *last = kvf_runtime_error(e->machine.runtime);
    return model_fail(error, status, "%s",
                      last->status == status ? last->text : kvf_status_text(status));
}

/* ---- one task ---- */

static uint32_t likeliest(const float *logits, uint32_t count)
{
    uint32_t best = 0;
    for (uint32_t i = 1; i < count; i++)
        if (logits[i] > logits[best])
            best = i;
    return best;
}

/* One more token of an answer. */
static kvf_status take_token(const evaluation *e, lane *l, kvf_error *error)
{
    kvf_text text = {0};
    KVF_TRY(kvf_token_ids_push(NULL, &l->said, l->next, error));
    l->is_done = l->said.count == l->task->generate ||
                 kvf_ids_have(e->machine.model.eos_ids, e->machine.model.eos_count, l->next);
    if (!l->task->enough)
        return KVF_OK;
    kvf_status status =
        kvf_tokenizer_decode(e->tokenizer, l->said.ids, l->said.count, true, &text, error);
    l->is_done = l->is_done || (text.bytes && eval_task_is_said(l->task, text.bytes));
    kvf_text_free(NULL, &text);
    return status;
}

/* What the logits of a step say of a lane: a loss, a token, or nothing yet. */
static kvf_status take_logits(const evaluation *e, lane *l, const float *logits, kvf_error *error)
{
    const uint32_t vocab = e->machine.model.vocab_size;
    const eval_task *t = l->task;
    if (t->generate == 0 && l->fed >= t->cue) {
        l->loss += kvf_logits_loss(logits, vocab, t->ids.ids[l->fed]);
        l->first += likeliest(logits, vocab) == t->ids.ids[l->fed];
    }
    if (t->generate == 0 && l->fed + 1 == t->ids.count) {
        l->is_done = true;
    } else if (l->fed < t->ids.count) {
        l->next = t->ids.ids[l->fed++];
    } else {
        l->next = likeliest(logits, vocab);
        KVF_TRY(take_token(e, l, error));
    }
    return KVF_OK;
}

/* A question, but for its last token. */
static kvf_status read_question(evaluation *e, lane *l)
{
    const eval_machine *m = &e->machine;
    const uint32_t *ids = l->task->ids.ids, count = (uint32_t)l->task->ids.count - 1;
    for (uint32_t rows; l->fed < count; l->fed += rows) {
        rows = kvf_min_u32(count - l->fed, CHUNK);
        KVF_TRY(kvf_transformer_prefill(m->transformer, e->cache, l->fork, ids + l->fed, rows,
                                        m->stream));
        KVF_TRY(kvf_stream_wait(m->stream));
    }
    return KVF_OK;
}

static kvf_status begin(evaluation *e, lane *l, uint32_t document, uint32_t index, kvf_error *error)
{
    const parent *p = &e->parents[document];
    *l = (lane){
        .task = &e->tasks.documents[document].tasks[index], .document = document, .index = index};
    kvf_status status = kvf_sequence_fork(e->cache, p->sequence, e->machine.stream, &l->fork);
    if (status == KVF_OK && e->extends_dense && l->task->generate > 0)
        status = read_question(e, l);
    return status == KVF_OK ? take_logits(e, l, p->logits, error) : fail_library(e, status, error);
}

static kvf_status finish(evaluation *e, lane *l, kvf_error *error)
{
    kvf_text text = {0};
    kvf_status status = KVF_OK;
    if (l->task->generate == 0) {
        fprintf(e->out, "loss\t%u\t%u\t%zu\t%.6f\t%u\n", l->document, l->index,
                l->task->ids.count - l->task->cue, l->loss, l->first);
    } else {
        status = kvf_tokenizer_decode(e->tokenizer, l->said.ids, l->said.count, true, &text, error);
        fprintf(e->out, "answer\t%u\t%u", l->document, l->index);
        eval_text_write(e->out, text.bytes, text.size);
        fputc('\n', e->out);
    }
    kvf_text_free(NULL, &text);
    kvf_token_ids_free(NULL, &l->said);
    kvf_sequence_destroy(l->fork);
    *l = (lane){0};
    return status;
}

/* ---- all tasks ---- */

static kvf_status decode(evaluation *e, kvf_sequence **sequences, const uint32_t *ids,
                         uint32_t count, kvf_error *error)
{
    const eval_machine *m = &e->machine;
    const kvf_status enqueued =
        kvf_transformer_decode(m->transformer, e->cache, sequences, ids, count, true, m->stream);
    const kvf_status waited = kvf_stream_wait(m->stream);
    const kvf_status status = enqueued != KVF_OK ? enqueued : waited;
    return status == KVF_OK ? kvf_transformer_check(m->transformer, error)
                            : fail_library(e, status, error);
}

/* One step of all lanes that have a task. */
static kvf_status step(evaluation *e, kvf_error *error)
{
    kvf_sequence *sequences[LANES_MAX];
    uint32_t ids[LANES_MAX], of_row[LANES_MAX], count = 0;
    for (uint32_t i = 0; i < e->lanes_max; i++) {
        if (!e->lanes[i].task || e->lanes[i].is_done)
            continue;
        of_row[count] = i;
        ids[count] = e->lanes[i].next;
        sequences[count++] = e->lanes[i].fork;
    }
    if (count == 0)
        return KVF_OK;
    KVF_TRY(decode(e, sequences, ids, count, error));
    e->batches++;
    for (uint32_t row = 0; row < count; row++)
        KVF_TRY(take_logits(e, &e->lanes[of_row[row]],
                            kvf_transformer_logits(e->machine.transformer, row), error));
    return KVF_OK;
}

/* The next task that was not begun; those that are scored come first, because they are long.
 * @return false after the last */
static bool next_task(const evaluation *e, bool *wants_scored, uint32_t *document, uint32_t *index)
{
    for (;;) {
        for (; *document < e->tasks.count; (*document)++, *index = 0)
            for (const eval_document *d = &e->tasks.documents[*document]; *index < d->count;
                 (*index)++)
                if ((d->tasks[*index].generate == 0) == *wants_scored)
                    return true;
        if (!*wants_scored)
            return false;
        *wants_scored = false;
        *document = *index = 0;
    }
}

static kvf_status run_tasks(evaluation *e, kvf_error *error)
{
    uint32_t document = 0, index = 0, busy = 0;
    bool wants_scored = true, has_more = next_task(e, &wants_scored, &document, &index);
    while (has_more || busy > 0) {
        for (uint32_t i = 0; i < e->lanes_max && has_more; i++) {
            if (e->lanes[i].task)
                continue;
            KVF_TRY(begin(e, &e->lanes[i], document, index++, error));
            busy++;
            has_more = next_task(e, &wants_scored, &document, &index);
        }
        KVF_TRY(step(e, error));
        for (uint32_t i = 0; i < e->lanes_max; i++) {
            if (!e->lanes[i].is_done)
                continue;
            KVF_TRY(finish(e, &e->lanes[i], error));
            busy--;
        }
    }
    return KVF_OK;
}

static void drop_lanes(evaluation *e)
{
    (void)!kvf_stream_wait(e->machine.stream);
    for (uint32_t i = 0; i < e->lanes_max; i++) {
        kvf_token_ids_free(NULL, &e->lanes[i].said);
        kvf_sequence_destroy(e->lanes[i].fork);
        e->lanes[i] = (lane){0};
    }
}

/* A document into the cache; its last token is a decode step. */
static kvf_status load(evaluation *e, uint32_t document, kvf_error *error)
{
    const eval_machine *m = &e->machine;
    const kvf_token_ids *ids = &e->tasks.documents[document].ids;
    parent *p = &e->parents[document];
    kvf_status status = kvf_sequence_create(e->cache, &p->sequence);
    if (status == KVF_OK)
        status = eval_prefill_load(m, &p->prefill, e->cache, p->sequence);
    if (status != KVF_OK)
        return fail_library(e, status, error);
    KVF_TRY(decode(e, &p->sequence, ids->ids + ids->count - 1, 1, error));
    memcpy(p->logits, kvf_transformer_logits(m->transformer, 0),
           m->model.vocab_size * sizeof *p->logits);
    return KVF_OK;
}

/* Of all threads: on a busy machine it says more than the clock. */
static double cpu_seconds(void)
{
    return (double)clock() / CLOCKS_PER_SEC;
}

static kvf_status run_all(evaluation *e, kvf_error *error)
{
    for (uint32_t d = 0; d < e->tasks.count; d++)
        KVF_TRY(load(e, d, error));
    kvf_cache_stats_reset(e->cache);
    e->batches = 0;
    const double start = kvf_now_seconds(), cpu_start = cpu_seconds();
    KVF_TRY(run_tasks(e, error));
    e->seconds = kvf_now_seconds() - start;
    e->cpu_seconds = cpu_seconds() - cpu_start;
    return KVF_OK;
}

static void close_sequences(evaluation *e)
{
    drop_lanes(e);
    for (uint32_t d = 0; d < e->tasks.count; d++) {
        kvf_sequence_destroy(e->parents[d].sequence);
        e->parents[d].sequence = NULL;
    }
}

/* ---- one configuration ---- */

/* head_mask=FILE */
static kvf_status set_mask(evaluation *e, const char *path, kvf_cache_config *cc, kvf_error *error)
{
    const kvf_model_config *m = &e->machine.model;
    free(e->head_mask);
    e->head_mask = malloc((size_t)m->layers * m->kv_heads);
    if (!e->head_mask)
        return model_fail(error, KVF_OUT_OF_MEMORY, "no memory for a head mask");
    cc->head_mask = e->head_mask;
    return kvf_head_mask_read(path, m->layers, m->kv_heads, -1.0, e->head_mask, error);
}

static kvf_status set_field(evaluation *e, kvf_cache_config *cc, char *word, kvf_error *error)
{
    char *value = strchr(word, '=');
    const kvf_setting *s;
    if (!value)
        return model_fail(error, KVF_INVALID, "'%s' is not FIELD=VALUE", word);
    *value++ = '\0';
    if (strcmp(word, "head_mask") == 0)
        return set_mask(e, value, cc, error);
    if (strcmp(word, "extend") == 0) {
        e->extends_dense = strcmp(value, "dense") == 0;
        return e->extends_dense || strcmp(value, "sparse") == 0
                   ? KVF_OK
                   : model_fail(error, KVF_INVALID, "extend cannot be %s", value);
    }
    for (uint32_t i = 0; (s = kvf_cache_setting(i)) != NULL; i++)
        if (strcmp(s->name, word) == 0)
            return kvf_setting_parse(s, value, cc)
                       ? KVF_OK
                       : model_fail(error, KVF_INVALID, "%s cannot be %s", word, value);
    return model_fail(error, KVF_INVALID, "a cache has no setting %s", word);
}

static kvf_status read_config(evaluation *e, char *words, kvf_cache_config *cc, kvf_error *error)
{
    const kvf_transformer_options geometry = {
        .model = &e->machine.model, .runtime = e->machine.runtime, .chunk_max = CHUNK};
    e->extends_dense = false;
    kvf_cache_config_init(cc);
    kvf_transformer_geometry(&geometry, cc);
    cc->prefill_chunk_max = 2048;
    cc->transfer = KVF_TRANSFER_GATHER;
    cc->sequences_max = e->tasks.count + e->lanes_max;
    cc->tokens_max = e->tasks.longest + e->tasks.longest_task;
    for (char *rest = NULL, *word = strtok_r(words, " ", &rest); word;
         word = strtok_r(NULL, " ", &rest))
        KVF_TRY(set_field(e, cc, word, error));
    /* Sealed pages of a document are there once for all its forks. */
    cc->host_tokens_max = e->tasks.tokens +
                          (uint64_t)cc->sequences_max * (cc->local_tokens + 256u) +
                          (uint64_t)e->lanes_max * e->tasks.longest_task;
    return KVF_OK;
}

static void write_stats(const evaluation *e)
{
    const kvf_cache_plan *p = kvf_cache_memory(e->cache);
    kvf_stats s;
    kvf_cache_stats(e->cache, &s);
    fprintf(e->out,
            "stats\tlayers=%u\tkv_heads=%u\tsteps=%llu\ttokens_attended=%llu\tpages_selected=%llu\t"
            "hits=%llu\tmisses=%llu\tpages_ahead=%llu\tpages_ahead_used=%llu\t"
            "bytes_to_device=%llu\tverified=%llu\trecall_sum=%.9g\t"
            "digest_bytes=%llu\tdevice_kv_bytes=%llu\ttokens_max=%u\tsequences_max=%u\tbatches=%"
            "llu\tseconds=%.3f\tcpu_seconds=%.3f\tall_seconds=%.1f\tall_cpu_seconds=%.1f\n",
            e->machine.model.layers, e->machine.model.kv_heads, (unsigned long long)s.steps,
            (unsigned long long)s.tokens_attended, (unsigned long long)s.pages_selected,
            (unsigned long long)s.hits, (unsigned long long)s.misses,
            (unsigned long long)s.pages_ahead, (unsigned long long)s.pages_ahead_used,
            (unsigned long long)s.bytes_to_device, (unsigned long long)s.verified, s.recall_sum,
            (unsigned long long)p->device_digest_bytes, (unsigned long long)p->device_kv_bytes,
            kvf_cache_settings(e->cache)->tokens_max, kvf_cache_settings(e->cache)->sequences_max,
            (unsigned long long)e->batches, e->seconds, e->cpu_seconds,
            kvf_now_seconds() - e->start, cpu_seconds());
    fflush(e->out);
}

/* All settings as text. */
static void settings_text(const evaluation *e, char *text)
{
    const kvf_setting *s;
    char one[64];
    int used = 0;
    for (uint32_t i = 0; (s = kvf_cache_setting(i)) != NULL && used < TEXT_BYTES; i++)
        used += snprintf(text + used, (size_t)(TEXT_BYTES - used), " %s=%s", s->name,
                         kvf_setting_show(s, kvf_cache_settings(e->cache), one, sizeof one));
    const kvf_cache_config *c = kvf_cache_settings(e->cache);
    const size_t heads = (size_t)c->layers * c->kv_heads;
    if (e->extends_dense && used < TEXT_BYTES)
        used += snprintf(text + used, (size_t)(TEXT_BYTES - used), " extend=dense");
    for (size_t i = 0; c->head_mask && i < heads && used + 2 < TEXT_BYTES; i++)
        used += snprintf(text + used, 3, " %u", c->head_mask[i]);
}

/* @return the name of an earlier configuration of the same settings; NULL: this is the first */
static const char *find_same(evaluation *e, const char *name)
{
    char text[TEXT_BYTES];
    settings_text(e, text);
    for (uint32_t i = 0; i < e->past_count; i++)
        if (strcmp(e->past[i].settings, text) == 0)
            return e->past[i].name;
    if (e->past_count < CONFIGS_MAX) {
        past_config *past = &e->past[e->past_count++];
        snprintf(past->name, sizeof past->name, "%s", name);
        memcpy(past->settings, text, sizeof text);
    }
    return NULL;
}

/* The cache of a configuration. A cache that there is not is no failure: it is told. */
static kvf_status open_cache(evaluation *e, char *words, kvf_error *error)
{
    kvf_cache_config cc;
    kvf_status status = read_config(e, words, &cc, error);
    if (status == KVF_OK)
        status = kvf_cache_open(e->machine.runtime, &cc, &e->cache, error);
    if (status != KVF_INVALID && status != KVF_UNSUPPORTED)
        return status;
    fprintf(e->out, "refused\t%s\n", error->text);
    return KVF_OK;
}

static kvf_status run_config(evaluation *e, char *line, kvf_error *error)
{
    char *words = strchr(line, '\t');
    if (!words)
        return model_fail(error, KVF_INVALID, "'%.40s' is no configuration", line);
    *words++ = '\0';
    const double start = kvf_now_seconds();
    fprintf(e->out, "config\t%s\n", line);
    kvf_status status = open_cache(e, words, error);
    const bool is_open = status == KVF_OK && e->cache;
    const char *same = is_open ? find_same(e, line) : NULL;
    if (same) {
        fprintf(e->out, "same\t%s\n", same);
    } else if (is_open) {
        status = run_all(e, error);
        if (status == KVF_OK)
            write_stats(e);
    }
    close_sequences(e);
    kvf_cache_close(e->cache);
    e->cache = NULL;
    fprintf(stderr, "%-44s %6.1f s, %6.1f s of CPU%s\n", line, kvf_now_seconds() - start,
            same || !is_open ? 0.0 : e->cpu_seconds,
            !is_open ? ", refused"
            : same   ? ", the same as an earlier one"
                     : "");
    return status;
}

static kvf_status run_configs(evaluation *e, kvf_error *error)
{
    char line[LINE_BYTES];
    FILE *f = fopen(e->configs_file, "r");
    if (!f)
        return model_fail(error, KVF_SYSTEM, "%s cannot be read", e->configs_file);
    kvf_status status = KVF_OK;
    while (status == KVF_OK && fgets(line, sizeof line, f)) {
        line[strcspn(line, "\n")] = '\0';
        if (line[0])
            status = run_config(e, line, error);
    }
    fclose(f);
    return status;
}

/* ---- open, run, close ---- */

static kvf_status open_machine(evaluation *e, kvf_error *error)
{
    eval_machine *m = &e->machine;
    kvf_runtime_config rc;
    kvf_runtime_config_init(&rc);
    rc.device = KVF_DEVICE_HOST; /* buffers are host memory */
    rc.allow_unpinned = 1;
    m->chunk = CHUNK;
    KVF_TRY(kvf_model_config_read(e->model, NULL, &m->model, error));
    KVF_TRY(kvf_weights_open(e->model, NULL, &m->weights, error));
    kvf_model_config_fit(&m->model, m->weights);
    KVF_TRY(kvf_tokenizer_open(e->model, NULL, &e->tokenizer, error));
    KVF_TRY(kvf_runtime_open(&rc, &m->runtime, error));
    KVF_TRY(kvf_stream_create(m->runtime, &m->stream));
    const kvf_transformer_options options = {.runtime = m->runtime,
                                             .model = &m->model,
                                             .weights = m->weights,
                                             .chunk_max = CHUNK,
                                             .batch_max = e->lanes_max};
    m->unused = calloc(EVAL_QUERIES, (size_t)m->model.query_heads * m->model.head_dim * 4);
    if (!m->unused)
        return model_out_of_memory(error, EVAL_QUERIES, "queries");
    return kvf_transformer_open(&options, &m->transformer, error);
}

static kvf_status read_documents(evaluation *e, kvf_error *error)
{
    const double start = kvf_now_seconds();
    KVF_TRY(eval_tasks_read(e->tasks_file, e->tokenizer, &e->tasks, error));
    if (e->tasks.longest + e->tasks.longest_task > e->machine.model.positions_max)
        return model_fail(error, KVF_INVALID,
                          "a document of %u tokens and a task of %u need more than the model's %u "
                          "positions",
                          e->tasks.longest, e->tasks.longest_task, e->machine.model.positions_max);
    e->parents = calloc(e->tasks.count, sizeof *e->parents);
    if (!e->parents)
        return model_out_of_memory(error, e->tasks.count * sizeof *e->parents, "documents");
    for (uint32_t i = 0; i < e->tasks.count; i++) {
        const kvf_token_ids *ids = &e->tasks.documents[i].ids;
        for (size_t t = 0; t < ids->count; t++)
            if (ids->ids[t] >= e->machine.model.vocab_size)
                return model_fail(error, KVF_INVALID, "the tokenizer belongs to another model");
        parent *p = &e->parents[i];
        p->logits = calloc(e->machine.model.vocab_size, sizeof *p->logits);
        if (!p->logits)
            return model_out_of_memory(error, e->machine.model.vocab_size * sizeof *p->logits,
                                       "logits");
        KVF_TRY(
            eval_prefill_make(&e->machine, ids->ids, (uint32_t)ids->count - 1, &p->prefill, error));
        fprintf(e->out, "document\t%u\t%zu\n", i, ids->count);
    }
    fprintf(stderr, "%u documents, %llu tokens: prefill %.1f s\n", e->tasks.count,
            (unsigned long long)e->tasks.tokens, kvf_now_seconds() - start);
    return KVF_OK;
}

/* Only the tokenizer is read. */
static kvf_status count_tokens(evaluation *e, kvf_error *error)
{
    KVF_TRY(kvf_tokenizer_open(e->model, NULL, &e->tokenizer, error));
    KVF_TRY(eval_tasks_read(e->tasks_file, e->tokenizer, &e->tasks, error));
    for (uint32_t i = 0; i < e->tasks.count; i++) {
        const eval_document *d = &e->tasks.documents[i];
        fprintf(e->out, "document\t%u\t%zu\n", i, d->ids.count);
        for (uint32_t t = 0; t < d->count; t++)
            fprintf(e->out, "task\t%u\t%u\t%zu\n", i, t, d->tasks[t].ids.count);
    }
    return KVF_OK;
}

static kvf_status run_all_configs(evaluation *e, kvf_error *error)
{
    e->past = calloc(CONFIGS_MAX, sizeof *e->past);
    if (!e->past)
        return model_out_of_memory(error, sizeof *e->past, "configurations");
    KVF_TRY(open_machine(e, error));
    KVF_TRY(read_documents(e, error));
    return run_configs(e, error);
}

static void close_all(evaluation *e)
{
    eval_machine *m = &e->machine;
    for (uint32_t i = 0; e->parents && i < e->tasks.count; i++) {
        eval_prefill_free(&e->parents[i].prefill);
        free(e->parents[i].logits);
    }
    free(e->parents);
    eval_tasks_free(&e->tasks);
    kvf_transformer_close(m->transformer);
    kvf_stream_destroy(m->stream);
    kvf_runtime_close(m->runtime);
    kvf_tokenizer_close(e->tokenizer);
    kvf_weights_close(m->weights);
    free(m->unused);
    free(e->head_mask);
    free(e->past);
}

int main(int argc, char **argv)
{
    static evaluation e = {.lanes_max = 8};
    kvf_error error = {0};
    const bench_option table[] = {
        {.name = "--model", .text = &e.model},          {.name = "--tasks", .text = &e.tasks_file},
        {.name = "--configs", .text = &e.configs_file}, {.name = "--out", .text = &e.out_file},
        {"--lanes", &e.lanes_max, 1, LANES_MAX, NULL},  {0}};
    (void)bench_args_read(argc, argv, table);
    if (!e.model || !e.tasks_file) {
        fputs("eval_selection: --model and --tasks are needed\n", stderr);
        return 2;
    }
    e.out = e.out_file ? fopen(e.out_file, "w") : stdout;
    if (!e.out) {
        perror(e.out_file);
        return 1;
    }
    e.start = kvf_now_seconds();
    const kvf_status status =
        e.configs_file ? run_all_configs(&e, &error) : count_tokens(&e, &error);
    if (status != KVF_OK)
        fprintf(stderr, "eval_selection: %s %s\n", kvf_status_name(status), error.text);
    const bool written = !ferror(e.out) && fclose(e.out) == 0;
    close_all(&e);
    return status != KVF_OK || !written;
}
