/* SPDX-License-Identifier: Apache-2.0 */

/*
 * See cuda_scenes.h. Knows nothing of what a test wants to prove.
 */

#include "cuda_scenes.h"

#include <signal.h>
#include <unistd.h>

#include <kvferry/link.h>
#include <kvferry/prune.h>

/* A hang detector: a play takes milliseconds, and a second or so under a sanitizer. */
#define PLAY_SECONDS 60

/* ---- the watchdog ---- */

static char watched[256];

static void on_alarm(int number)
{
    (void)number;
    const ssize_t written = write(2, watched, strlen(watched));
    (void)written;
    abort();
}

void scene_watch(const char *what, uint64_t nth)
{
    snprintf(watched, sizeof watched, "# hangs: %s with call %llu failing\n", what,
             (unsigned long long)nth);
    alarm(PLAY_SECONDS);
}

void scene_watch_start(void)
{
    signal(SIGALRM, on_alarm);
}

/* ---- a runtime with the inputs of all scenes ---- */

kvf_runtime_config stage_config(stage *st)
{
    kvf_runtime_config rc = test_runtime_config();
    rc.device = KVF_DEVICE_CUDA;
    rc.allow_unpinned = 0;
    rc.allocator = heap_allocator(&st->heap);
    return rc;
}

static void *upload(stage *st, kvf_stream *stream, const void *from, size_t bytes)
{
    void *p = NULL;
    test_expect(st->runtime, kvf_memory_alloc(st->runtime, bytes, &p), KVF_OK);
    if (from)
        test_expect(st->runtime, kvf_memory_copy(stream, p, from, bytes), KVF_OK);
    return p;
}

/* To floats that bf16 has: as pairs of bf16, which scenes with quantized pages take them for, they
 * are zeros and numbers. */
static void *upload_pairs(stage *st, kvf_stream *stream, void *values, size_t bytes)
{
    uint32_t *bits = values;
    for (size_t i = 0; i < bytes / sizeof *bits; i++)
        bits[i] &= 0xffff0000u;
    return upload(st, stream, values, bytes);
}

kvf_cache_config stage_small_config(void)
{
    kvf_cache_config cc = test_config_small();
    cc.layers = LAYERS;
    cc.tokens_max = 128;
    cc.prefill_chunk_max = 32;
    cc.budget_tokens = 48;
    cc.refresh_interval = 2;
    cc.sequences_max = 2;
    cc.transfer = KVF_TRANSFER_GATHER;
    return cc;
}

void stage_open(stage *st)
{
    kvf_error error = {0};
    kvf_stream *stream = NULL;
    test_tokens t;
    const kvf_cache_config cc = stage_small_config();
    *st = (stage){0};
    const kvf_runtime_config rc = stage_config(st);
    if (test_runtime_open(&rc, &st->runtime, &error) != KVF_OK)
        fail_msg("kvf_runtime_open: %s", error.text);
    test_tokens_make(
        &t, &cc, &(test_tokens_spec){.count = TOKENS, .seed = 5, .sharpness = 2.0f, .topics = 4});
    test_expect(st->runtime, kvf_stream_create(st->runtime, &stream), KVF_OK);
    const size_t row = (size_t)LAYERS * TOKENS * DIM * sizeof(float);
    st->q = upload_pairs(st, stream, t.q, row * HEADS);
    st->k = upload_pairs(st, stream, t.k, row * KV_HEADS);
    st->v = upload_pairs(st, stream, t.v, row * KV_HEADS);
    st->out = upload(st, stream, NULL, row * HEADS);
    test_expect(st->runtime, kvf_stream_wait(stream), KVF_OK);
    kvf_stream_destroy(stream);
    test_tokens_free(&t);
}

void stage_close(stage *st)
{
    kvf_memory_free(st->runtime, st->q);
    kvf_memory_free(st->runtime, st->k);
    kvf_memory_free(st->runtime, st->v);
    kvf_memory_free(st->runtime, st->out);
    kvf_runtime_close(st->runtime);
    assert_int_equal(st->heap.live, 0);
}

kvf_status stage_stream(stage *st, kvf_stream **out)
{
    return st->on_default ? kvf_stream_wrap(st->runtime, NULL, out)
                          : kvf_stream_create(st->runtime, out);
}

/* ---- plays ---- */

typedef struct actors {
    stage *st;
    kvf_stream *stream;
    kvf_cache *cache;
    kvf_sequence *s[2];
    kvf_recording *recording;
    kvf_prune *prune;
    int32_t *lists; /* device memory */
    int gives;      /* steps are told which pages to select: queries serve as scores */
    uint32_t steps; /* so far */
    kvf_error error;
} actors;

static kvf_status prefill_chunk(actors *a, uint32_t layer, uint32_t first, uint32_t tokens)
{
    stage *st = a->st;
    const kvf_prefill_args p = {.sequence = a->s[0],
                                .layer = layer,
                                .tokens = tokens,
                                .q = stage_token(st->q, HEADS, layer, first),
                                .k = stage_token(st->k, KV_HEADS, layer, first),
                                .v = stage_token(st->v, KV_HEADS, layer, first),
                                .out = st->out};
    return kvf_prefill(a->cache, &p, a->stream);
}

static kvf_status prefill_layer(actors *a, uint32_t layer)
{
    kvf_status status = KVF_OK;
    for (uint32_t first = 0; first < PROMPT && status == KVF_OK; first += 28)
        status = prefill_chunk(a, layer, first, 28);
    return status;
}

static kvf_status prefill(actors *a)
{
    kvf_status status = KVF_OK;
    for (uint32_t layer = 0; layer < LAYERS && status == KVF_OK; layer++)
        status = prefill_layer(a, layer);
    return status;
}

static kvf_decode_args step_of(actors *a, uint32_t layer, uint32_t token)
{
    stage *st = a->st;
    return (kvf_decode_args){.layer = layer,
                             .batch = 1,
                             .sequences = a->s,
                             .q = stage_token(st->q, HEADS, layer, token),
                             .k = stage_token(st->k, KV_HEADS, layer, token),
                             .v = stage_token(st->v, KV_HEADS, layer, token),
                             .out = st->out,
                             .page_scores = a->gives ? stage_token(st->q, HEADS, layer, 0) : NULL,
                             .page_stride = a->gives ? DIM : 0};
}

static kvf_status decode(actors *a)
{
    const uint32_t token = PROMPT + a->steps++ % STEPS;
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        const kvf_decode_args d = step_of(a, layer, token);
        const kvf_status status = kvf_decode(a->cache, &d, a->stream);
        if (status != KVF_OK)
            return status;
    }
    return KVF_OK;
}

static kvf_status open_actors(actors *a, stage *st, const scene *s)
{
    kvf_cache_config cc = stage_small_config();
    *a = (actors){.st = st};
    test_set(&cc, s->settings ? s->settings : "");
    if (s->adjust)
        s->adjust(&cc);
    kvf_status status = stage_stream(st, &a->stream);
    if (status == KVF_OK) {
        status = kvf_cache_open(st->runtime, &cc, &a->cache, &a->error);
        if (status != KVF_OK && (a->error.status != status || !a->error.text[0]))
            fail_msg("%s: kvf_cache_open: %s, and its error is %s \"%s\"", s->name,
                     kvf_status_name(status), kvf_status_name(a->error.status), a->error.text);
    }
    if (status == KVF_OK)
        status = kvf_sequence_create(a->cache, &a->s[0]);
    return status;
}

/* Outputs to the host, and everything back. */
static kvf_status close_actors(actors *a, kvf_status status, float *out)
{
    if (status == KVF_OK)
        status = kvf_memory_copy(a->stream, out, a->st->out, OUT_FLOATS * sizeof *out);
    if (a->stream) {
        const kvf_status waited = kvf_stream_wait(a->stream);
        if (status == KVF_OK)
            status = waited;
    }
    kvf_stream_destroy(a->stream); /* waits again where the wait was refused */
    kvf_recording_destroy(a->recording);
    kvf_memory_free(a->st->runtime, a->lists);
    kvf_prune_close(a->prune);
    kvf_sequence_destroy(a->s[1]);
    kvf_sequence_destroy(a->s[0]);
    kvf_cache_close(a->cache);
    return status;
}

static kvf_status play_acts(stage *st, const scene *s, float *out)
{
    actors a;
    kvf_status status = open_actors(&a, st, s);
    a.gives = s == &given_scene;
    for (const scene_act *act = s->acts; *act && status == KVF_OK; act++)
        status = (*act)(&a);
    return close_actors(&a, status, out);
}

/* ---- acts ---- */

static kvf_status fork_one(actors *a)
{
    return kvf_sequence_fork(a->cache, a->s[0], a->stream, &a->s[1]);
}

/* Chunk by chunk, so that each call brings a layer's earlier block to the device. */
static kvf_status prefill_by_chunks(actors *a)
{
    kvf_stats stats;
    kvf_status status = KVF_OK;
    for (uint32_t first = 0; first < PROMPT && status == KVF_OK; first += PROMPT / 4)
        for (uint32_t layer = 0; layer < LAYERS && status == KVF_OK; layer++)
            status = prefill_chunk(a, layer, first, PROMPT / 4);
    if (status == KVF_OK)
        status = kvf_stream_wait(a->stream);
    if (status != KVF_OK)
        return status;
    kvf_cache_stats(a->cache, &stats);
    assert_int_equal(stats.bytes_prompt, 0); /* every page has a slot */
    assert_true(stats.bytes_to_host > 0);
    return KVF_OK;
}

static kvf_status cut(actors *a)
{
    return kvf_sequence_truncate(a->cache, a->s[0], PROMPT / 2 + 1, a->stream);
}

/* A prompt of which tokens are evicted, among them sealed ones. */
static kvf_status prefill_pruned(actors *a)
{
    kvf_prune_config config;
    kvf_prune_config_init(&config, kvf_prune_policy_find("snapkv"));
    config.retention = KVF_RETENTION_EVICT;
    config.settings.keep = 0.7f;
    config.settings.window = 4;
    kvf_status status = kvf_prune_open(a->cache, &config, &a->prune, &a->error);
    if (status == KVF_OK)
        status = kvf_prune_begin(a->prune, a->s[0], PROMPT);
    for (uint32_t layer = 0; layer < LAYERS && status == KVF_OK; layer++) {
        kvf_prune_result result;
        status = prefill_layer(a, layer);
        if (status == KVF_OK)
            status = kvf_prune_layer(a->prune, a->s[0], layer, a->stream, &result);
        if (status == KVF_OK)
            assert_true(result.keep_count < PROMPT);
    }
    return status;
}

/* The other sequence's turn; it may be new. */
static kvf_status change_places(actors *a)
{
    kvf_sequence *first = a->s[0];
    a->s[0] = a->s[1];
    a->s[1] = first;
    return a->s[0] ? KVF_OK : kvf_sequence_create(a->cache, &a->s[0]);
}

static kvf_status expect_disk_reads(actors *a)
{
    kvf_stats stats;
    const kvf_status status = kvf_stream_wait(a->stream); /* whose steps write what is read here */
    if (status != KVF_OK)
        return status;
    kvf_cache_stats(a->cache, &stats);
    assert_true(stats.disk_reads > 0);
    return KVF_OK;
}

/* Statistics are read while everything is alive; they have no status, so only the rest counts. */
static kvf_status read_stats(actors *a)
{
    kvf_stats stats;
    const kvf_status status = kvf_stream_wait(a->stream);
    if (status != KVF_OK)
        return status;
    kvf_cache_stats(a->cache, &stats);
    kvf_cache_layer_stats(a->cache, 1, &stats);
    kvf_cache_stats_reset(a->cache);
    return KVF_OK;
}

static kvf_status attend_to_lists(actors *a)
{
    enum { LISTS = KV_HEADS };
    const uint32_t most = kvf_select_pages_max(a->cache);
    void *memory = NULL;
    kvf_status status = kvf_memory_alloc(
        a->st->runtime, (LISTS + 1 + LISTS * most + LISTS) * sizeof(int32_t), &memory);
    if (status != KVF_OK)
        return status;
    a->lists = memory;
    const kvf_page_lists pl = {.indptr = a->lists,
                               .indices = a->lists + LISTS + 1,
                               .capacity = LISTS * most,
                               .last_page_len = a->lists + LISTS + 1 + LISTS * most};
    const kvf_decode_args d = step_of(a, 0, PROMPT);
    status = kvf_select_pages(a->cache, &d, &pl, a->stream);
    return status == KVF_OK ? kvf_attend_pages(a->cache, &d, &pl, a->stream) : status;
}

static kvf_status record_and_replay(actors *a)
{
    kvf_status status = kvf_record_begin(a->cache, a->s, 1, a->stream);
    if (status != KVF_OK)
        return status;
    status = decode(a);
    const kvf_status ended = kvf_record_end(a->cache, &a->recording);
    if (status != KVF_OK && ended == KVF_OK)
        fail_msg("a call failed while recording, and the recording came out");
    status = status == KVF_OK ? ended : status;
    if (status == KVF_OK && !kvf_replay_is_possible(a->recording))
        fail_msg("the recording cannot be replayed");
    return status == KVF_OK ? kvf_replay(a->recording, a->stream) : status;
}

/* ---- without a cache ---- */

static kvf_status play_memory(stage *st, const scene *s, float *out)
{
    kvf_stream *stream = NULL, *wrapped = NULL;
    void *device = NULL, *host = NULL, *alias = NULL;
    (void)s;
    kvf_status status = kvf_stream_create(st->runtime, &stream);
    if (status == KVF_OK)
        status = kvf_stream_wrap(st->runtime, kvf_stream_native(stream), &wrapped);
    if (status == KVF_OK)
        status = kvf_memory_alloc(st->runtime, 4096, &device);
    if (status == KVF_OK)
        status = kvf_pinned_alloc(st->runtime, 4096, &host, &alias);
    if (status == KVF_OK) {
        memset(host, 5, 4096);
        status = kvf_memory_copy(wrapped, device, alias, 4096);
    }
    if (status == KVF_OK)
        status = kvf_memory_copy(wrapped, out, device, OUT_FLOATS * sizeof *out);
    if (status == KVF_OK)
        status = kvf_stream_wait(wrapped);
    kvf_stream_destroy(wrapped);
    kvf_stream_destroy(stream);
    kvf_pinned_free(st->runtime, host);
    kvf_memory_free(st->runtime, device);
    return status;
}

static kvf_status play_link(stage *st, const scene *s, float *out)
{
    static const kvf_transfer methods[] = {KVF_TRANSFER_GATHER, KVF_TRANSFER_MAPPED,
                                           KVF_TRANSFER_BATCH, KVF_TRANSFER_EACH};
    kvf_link *link = NULL;
    (void)s;
    memset(out, 0, OUT_FLOATS * sizeof *out);
    kvf_status status = kvf_link_open(st->runtime, &link);
    for (size_t i = 0; i < 4 && status == KVF_OK; i++) {
        kvf_link_case c;
        kvf_link_result r;
        kvf_link_case_init(&c);
        c.method = methods[i];
        c.page_bytes = 1024;
        c.pages = 4;
        c.pool_bytes = 65536;
        c.huge_pages = KVF_HUGE_PAGES_OFF;
        c.repetitions = 1;
        c.warmup = 0;
        status = kvf_link_measure(link, &c, NULL, &r);
    }
    kvf_link_close(link);
    return status;
}

/* ---- the scenes ---- */

/* As little memory as a call needs: a prompt of every layer. */
static void on_disk(kvf_cache_config *cc)
{
    cc->disk_path = "/tmp";
    cc->host_bytes = (uint64_t)10 * 8 * KV_HEADS * DIM * 2 * sizeof(float);
}

static uint32_t choose_first(void *user, const kvf_select_view *view, int32_t *ids)
{
    uint32_t n = 0;
    while (n < view->pages_max && n < view->pages) {
        ids[n] = (int32_t)n;
        n++;
    }
    return n;
}

static void custom(kvf_cache_config *cc)
{
    cc->select = KVF_SELECT_CUSTOM;
    cc->select_fn = choose_first;
}

#define ACTS(...)                                                                                  \
    .play = play_acts, .acts = (const scene_act[])                                                 \
    {                                                                                              \
        __VA_ARGS__, NULL                                                                          \
    }
#define DECODED  ACTS(prefill, decode, fork_one, decode, decode)
#define RECORDED ACTS(prefill, decode, record_and_replay)

const scene memory_scene = {"memory and streams", .play = play_memory};
const scene gather_scene = {"decode by gather", DECODED};
const scene mapped_scene = {"decode by mapped", "transfer=mapped", DECODED};
const scene batch_scene = {"decode by batch", "transfer=batch", DECODED};
const scene each_scene = {"decode by each", "transfer=each", DECODED};
const scene verified_scene = {"verified decode", "transfer=auto verify_interval=2", DECODED};
const scene refresh_scene = {"exact refresh", "refresh=exact", DECODED};
const scene custom_scene = {"custom policy", .adjust = custom, DECODED};
const scene given_scene = {"a caller's selection", "transfer=mapped", DECODED};
const scene pages_scene = {"page lists", "select=dynamic static_ratio=0",
                           ACTS(prefill, attend_to_lists)};
const scene record_scene = {"recorded decode", "transfer=mapped refresh_interval=128", RECORDED};
/* A layer of both kinds first: what a replay does for both caches. */
const scene record_masked_scene = {
    "recorded decode with a head mask",
    "transfer=mapped refresh_interval=128 head_mask=1000 streaming_sink=4 streaming_recent=16",
    RECORDED};
const scene prune_scene = {"quantized pages, pruned", "pages=k8v4 dtype=bf16 observe_window=4",
                           ACTS(prefill_pruned, decode, decode, decode)};
const scene chunks_scene = {"prompt by chunks", "local_tokens=1", ACTS(prefill_by_chunks)};
/* Steps that seal a block, refresh and are taken back. */
const scene truncate_scene = {"truncate", ACTS(prefill, decode, decode, decode, cut, decode)};
/* Two prompts of which one fits into memory, and steps of both. */
const scene disk_scene = {"disk tier", "transfer=auto tokens_max=64 disk_bundle_bytes=1",
                          .adjust = on_disk,
                          ACTS(prefill, change_places, prefill, change_places, decode,
                               change_places, decode, expect_disk_reads)};
const scene stats_scene = {"statistics", ACTS(decode, read_stats)};
const scene link_scene = {"link", .play = play_link};

uint64_t scene_count_calls(stage *st, const scene *s, float *wanted)
{
    kvf_emu_counts counts;
    scene_watch(s->name, 0);
    kvf_emu_reset();
    const kvf_status status = s->play(st, s, wanted);
    if (status != KVF_OK)
        fail_msg("%s: %s, \"%s\"", s->name, kvf_status_name(status),
                 kvf_runtime_error(st->runtime)->text);
    kvf_emu_get_counts(&counts);
    alarm(0);
    return counts.calls;
}
