/* SPDX-License-Identifier: Apache-2.0 */

/*
 * One answer of many tokens: what a step takes and moves, thousand by thousand.
 *
 * usage: long_answer --model DIR [--tokens N] [--part N] [--turns N] [--select NAME]
 *                    [--head-mask FILE]
 *
 * Starts with the model's first token and draws all others from what the model says, with
 * temperature 1 and a fixed seed, whether an answer ends or not. Pages are gathered into slots, so
 * that hits and misses are counted. Comma-separated values are written to standard output, a line
 * per part: processor time of all threads and wall time, ms per token; hits, misses, tokens
 * attended per KV head, per layer and step; refreshes of static sets; memory of the process.
 *
 * A machine with other work changes from part to part. So a fork is kept where a part ends, and at
 * last all of them go on by turns: a second table, two empty lines further, has the processor time
 * of a step by depth, medians of --turns steps.
 */

#include "bench_model.h"
#include "bench_report.h"
#include "common/clock.h"
#include "head_mask.h"
#include "sampling.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <kvferry/setting.h>

#define SEED      1
#define PARTS_MAX 64u
#define TURNS_MAX 1000u
#define TURNS_OFF 20u /* first steps of a fork, which bring what its slots lack */

typedef struct long_run {
    const char *model, *select, *mask;
    uint32_t tokens, part, turns;
    bench_model m;
    kvf_sampler *sampler;
    kvf_sequence *sequence, *forks[PARTS_MAX];
    uint32_t next; /* the token of the next step */
    uint32_t next_of[PARTS_MAX];
    double turn_ms[PARTS_MAX][TURNS_MAX];
} long_run;

/* All threads together. */
static double cpu_ms(void)
{
    return (double)clock() / CLOCKS_PER_SEC * 1e3;
}

/* A field of /proc/self/status in KiB, which it is told in; 0 where there is none. */
static unsigned long memory_kib(const char *field)
{
    char line[256];
    unsigned long kib = 0;
    FILE *f = fopen("/proc/self/status", "r");
    while (f && kib == 0 && fgets(line, sizeof line, f))
        if (strncmp(line, field, strlen(field)) == 0)
            kib = strtoul(line + strlen(field), NULL, 10);
    if (f)
        fclose(f);
    return kib;
}

/* A token, and the one after it. */
static kvf_status step(long_run *r, kvf_sequence *sequence, uint32_t *next)
{
    bench_model *m = &r->m;
    KVF_TRY(bench_model_wait(
        m, kvf_transformer_decode(m->transformer, m->cache, &sequence, next, 1, true, m->stream)));
    *next = kvf_sampler_next(r->sampler, 0, kvf_transformer_logits(m->transformer, 0));
    return *next == KVF_SAMPLER_NONE ? KVF_INVALID : KVF_OK;
}

/* Steps up to the token `last`, and what they took. */
static kvf_status run_part(long_run *r, uint32_t first, uint32_t last)
{
    const double wall = kvf_now_ms(), cpu = cpu_ms(), steps = last - first;
    kvf_stats s;
    kvf_cache_stats_reset(r->m.cache);
    for (uint32_t i = first; i < last; i++)
        KVF_TRY(step(r, r->sequence, &r->next));
    kvf_cache_stats(r->m.cache, &s);
    printf("%u,%.3f,%.3f,%.2f,%.2f,%.1f,%llu,%lu,%lu\n", last, (cpu_ms() - cpu) / steps,
           (kvf_now_ms() - wall) / steps, (double)s.hits / (double)s.steps,
           (double)s.misses / (double)s.steps,
           (double)s.tokens_attended / (double)s.steps / r->m.config.kv_heads,
           (unsigned long long)s.refreshes, memory_kib("VmRSS:"), memory_kib("RssAnon:"));
    fflush(stdout);
    return KVF_OK;
}

/* All forks by turns. */
static kvf_status take_turns(long_run *r, uint32_t parts)
{
    for (uint32_t turn = 0; turn < TURNS_OFF + r->turns; turn++)
        for (uint32_t i = 0; i < parts; i++) {
            const double start = cpu_ms();
            KVF_TRY(step(r, r->forks[i], &r->next_of[i]));
            if (turn >= TURNS_OFF)
                r->turn_ms[i][turn - TURNS_OFF] = cpu_ms() - start;
        }
    puts("\n\ntoken,cpu_ms_p10,cpu_ms,cpu_ms_p90");
    for (uint32_t i = 0; i < parts; i++) {
        double three[3];
        bench_percentiles(r->turn_ms[i], r->turns, three);
        printf("%u,%.3f,%.3f,%.3f\n", kvf_min_u32((i + 1) * r->part, r->tokens), three[0], three[1],
               three[2]);
    }
    return KVF_OK;
}

static kvf_status run_all(long_run *r)
{
    kvf_sampling_config config;
    kvf_error error = {0};
    kvf_sampling_config_init(&config);
    config.temperature = 1.0;
    config.seed = SEED;
    KVF_TRY(kvf_sampler_create(r->m.config.vocab_size, 1, &r->sampler, &error));
    KVF_TRY(kvf_sampler_begin(r->sampler, 0, &config, &error));
    KVF_TRY(kvf_sequence_create(r->m.cache, &r->sequence));
    puts("token,cpu_ms,wall_ms,hits,misses,attended,refreshes,rss_kib,anonymous_kib");
    uint32_t parts = 0;
    for (uint32_t first = 0; first < r->tokens; first += r->part, parts++) {
        KVF_TRY(run_part(r, first, kvf_min_u32(first + r->part, r->tokens)));
        KVF_TRY(kvf_sequence_fork(r->m.cache, r->sequence, r->m.stream, &r->forks[parts]));
        r->next_of[parts] = r->next;
    }
    return take_turns(r, parts);
}

/* A setting by its name. NULL: as the library has it. */
static bool set(kvf_cache_config *cc, const char *name, const char *value)
{
    const kvf_setting *s;
    for (uint32_t i = 0; value && (s = kvf_cache_setting(i)) != NULL; i++)
        if (strcmp(s->name, name) == 0)
            return kvf_setting_parse(s, value, cc);
    return !value;
}

/* The cache anew, with the head mask: what heads there are is known when it was opened without. */
static kvf_status use_mask(long_run *r, kvf_cache_config *cc)
{
    kvf_error error = {0};
    uint8_t *mask = malloc((size_t)cc->layers * cc->kv_heads);
    kvf_status status = mask ? KVF_OK : KVF_OUT_OF_MEMORY;
    kvf_cache_close(r->m.cache);
    r->m.cache = NULL;
    if (status == KVF_OK)
        status = kvf_head_mask_read(r->mask, cc->layers, cc->kv_heads, -1.0, mask, &error);
    cc->head_mask = mask;
    if (status == KVF_OK)
        status = kvf_transformer_cache_open(r->m.transformer, cc, &r->m.cache, &error);
    if (status != KVF_OK)
        fprintf(stderr, "long_answer: %s\n", error.text);
    free(mask);
    return status;
}

int main(int argc, char **argv)
{
    static long_run r = {.tokens = 20000, .part = 1000, .turns = 200};
    const bench_option table[] = {{.name = "--model", .text = &r.model},
                                  {"--tokens", &r.tokens, 1, 1u << 20, NULL},
                                  {"--part", &r.part, 1, 1u << 20, NULL},
                                  {"--turns", &r.turns, 1, TURNS_MAX, NULL},
                                  {.name = "--select", .text = &r.select},
                                  {.name = "--head-mask", .text = &r.mask},
                                  {0}};
    (void)bench_args_read(argc, argv, table);
    const uint32_t parts = (r.tokens + r.part - 1) / r.part;
    kvf_cache_config cc;
    kvf_cache_config_init(&cc);
    if (!r.model || parts > PARTS_MAX || !set(&cc, "select", r.select)) {
        fprintf(stderr, "long_answer: give --model, a selection that there is, %u parts at most\n",
                PARTS_MAX);
        return 2;
    }
    cc.tokens_max = r.tokens + TURNS_OFF + r.turns;
    cc.sequences_max = parts + 1;
    cc.host_tokens_max = 2ull * r.tokens + parts * (TURNS_OFF + r.turns + 1024ull);
    cc.transfer = KVF_TRANSFER_GATHER;
    kvf_status status = KVF_SYSTEM;
    if (bench_model_open(&r.m, r.model, NULL, 1, 0, &cc))
        status = r.mask ? use_mask(&r, &cc) : KVF_OK;
    if (status == KVF_OK)
        status = run_all(&r);
    if (status != KVF_OK)
        fprintf(stderr, "long_answer: %s\n", kvf_status_text(status));
    for (uint32_t i = 0; i < parts; i++)
        kvf_sequence_destroy(r.forks[i]);
    kvf_sequence_destroy(r.sequence);
    kvf_sampler_destroy(r.sampler);
    bench_model_close(&r.m);
    return status != KVF_OK;
}
