/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Facts of the CUDA device that only hardware can tell. Everything else is tested with the
 * emulator, in which these would pass or fail for reasons of its own.
 *
 * - alias: registered memory is one memory; what either side writes, the other sees at its alias.
 * - batch: a batch of copies delivers; recorded, it delivers at every replay or is refused.
 * - words: a host thread that sees a word sees the bytes that were written before it.
 * - replay: a recorded copy, fill and kernel give what enqueueing gives, with changed input.
 * - early: kernels that start early, each of which reads what the one before it wrote, over memory
 *   that held something else; enqueued, recorded, and recorded with a branch beside them.
 * - clock: events measure what the host's clock brackets, and no more than memory can carry.
 * - overlap: how long a copy over the link and a kernel take alone and together; printed, not
 *   judged, for other programs may use the GPU.
 *
 * Skips with 77 where there is no GPU. So it does in emulated builds, unless KVF_TEST_GPU_ONLY is
 * set, which tries the program itself.
 */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "common/clock.h"
#include "common/percentile.h"
#include "device.h"

#define PAGES      512u
#define PAGE_BYTES ((size_t)16384)
#define BYTES      (PAGES * PAGE_BYTES)
#define LARGE      ((size_t)256 << 20)
#define ROUNDS     1000u

typedef struct rig {
    kvf_context *context;
    kvf_device *device;
    const kvf_device_ops *ops;
    kvf_device_properties properties;
    kvf_stream *stream, *other;
    char *host;  /* [BYTES + 4096] registered; a word after the pages */
    char *alias; /* the same for the device */
    char *slots; /* [BYTES] of the device */
    char *seen;  /* [BYTES] what the slots hold, read back */
    void **from; /* [PAGES] of the device: page p of the host's memory, shuffled */
    void **to;   /* [PAGES] of the device: slot p */
    uint32_t *count;
} rig;

static void stop(rig *r, const char *what, int line)
{
    kvf_error error = {0};
    if (r->context != NULL)
        kvf_context_error(r->context, &error);
    fprintf(stderr, "gpu_only.c:%d: %s (%s)\n", line, what, error.text);
    exit(1);
}

#define MUST(r, condition)                                                                         \
    do {                                                                                           \
        if (!(condition))                                                                          \
            stop(r, #condition, __LINE__);                                                         \
    } while (0)
#define OK(r, call) MUST(r, (call) == KVF_OK)

static char *map_pages(rig *r, size_t bytes)
{
    void *map = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    MUST(r, map != MAP_FAILED);
    memset(map, 0, bytes);
    return map;
}

static void *device_memory(rig *r, size_t bytes)
{
    void *memory = NULL;
    OK(r, r->ops->memory_alloc(r->device, bytes, &memory));
    return memory;
}

/* Slot p gets page (p * 197 + 41) % PAGES: 197 is prime to 512, so each comes once. */
static uint32_t source_of(uint32_t slot)
{
    return (slot * 197 + 41) % PAGES;
}

static void to_device(rig *r, void *to, const void *from, size_t bytes)
{
    OK(r, r->ops->copy(r->stream, to, from, bytes));
    OK(r, r->ops->stream_wait(r->stream));
}

static int open_rig(rig *r)
{
    char absence[256];
    if (kvf_device_cuda_absence(absence)[0] != '\0') {
        printf("skipped: %s\n", absence);
        return 0;
    }
    const kvf_device_config config = {.threads = 1, .isa_mask = KVF_ISA_ALL};
    OK(r, kvf_context_create(NULL, NULL, NULL, &r->context));
    OK(r, kvf_device_open(r->context, KVF_DEVICE_CUDA, &config, &r->device));
    r->ops = r->device->ops;
    r->ops->properties(r->device, &r->properties);
    printf("%s, compute %u.%u, PCIe %u x%u\n", r->properties.name, r->properties.compute_major,
           r->properties.compute_minor, r->properties.link_generation, r->properties.link_width);
    OK(r, r->ops->stream_create(r->device, KVF_PRIORITY_NORMAL, &r->stream));
    OK(r, r->ops->stream_create(r->device, KVF_PRIORITY_HIGH, &r->other));
    void *alias = NULL;
    r->host = map_pages(r, BYTES + 4096);
    OK(r, r->ops->host_register(r->device, r->host, BYTES + 4096, &alias));
    r->alias = alias;
    r->seen = map_pages(r, BYTES);
    r->slots = device_memory(r, BYTES);
    r->from = device_memory(r, PAGES * sizeof(void *));
    r->to = device_memory(r, PAGES * sizeof(void *));
    r->count = device_memory(r, sizeof *r->count);
    void *from[PAGES], *to[PAGES];
    const uint32_t count = PAGES;
    for (uint32_t p = 0; p < PAGES; p++) {
        from[p] = r->alias + source_of(p) * PAGE_BYTES;
        to[p] = r->slots + p * PAGE_BYTES;
    }
    to_device(r, r->from, from, sizeof from);
    to_device(r, r->to, to, sizeof to);
    to_device(r, r->count, &count, sizeof count);
    return 1;
}

static void close_rig(rig *r)
{
    r->ops->memory_free(r->device, r->count);
    r->ops->memory_free(r->device, r->to);
    r->ops->memory_free(r->device, r->from);
    r->ops->memory_free(r->device, r->slots);
    r->ops->host_unregister(r->device, r->host, BYTES + 4096);
    munmap(r->seen, BYTES);
    munmap(r->host, BYTES + 4096);
    r->ops->stream_destroy(r->other);
    r->ops->stream_destroy(r->stream);
    kvf_device_close(r->device);
    MUST(r, r->context->live_blocks == 0 && r->context->live_bytes == 0);
    kvf_context_destroy(r->context);
}

/* Other bytes in every page, for every salt. */
static void write_pages(rig *r, uint32_t salt)
{
    uint32_t *words = (uint32_t *)(void *)r->host;
    for (size_t i = 0; i < BYTES / 4; i++)
        words[i] = (uint32_t)(i * 2654435761u) ^ salt * 40503u;
}

/* Every slot has its page. */
static int slots_are_right(rig *r)
{
    OK(r, r->ops->copy(r->stream, r->seen, r->slots, BYTES));
    OK(r, r->ops->stream_wait(r->stream));
    for (uint32_t p = 0; p < PAGES; p++)
        if (memcmp(r->seen + p * PAGE_BYTES, r->host + source_of(p) * PAGE_BYTES, PAGE_BYTES) != 0)
            return 0;
    return 1;
}

static void clear_slots(rig *r)
{
    OK(r, r->ops->fill(r->stream, r->slots, 0xee, BYTES));
}

static kvf_status move(rig *r)
{
    const kvf_move_args args = {.bytes = PAGE_BYTES,
                                .from = (const void *const *)r->from,
                                .to = r->to,
                                .count = r->count,
                                .high = UINT32_MAX,
                                .blocks = 8};
    return r->ops->launch(r->stream, r->device->kernels.move, &args, sizeof args,
                          kvf_move_tasks(&args));
}

/* ---- the checks ---- */

static void check_alias(rig *r)
{
    for (uint32_t salt = 1; salt <= 3; salt++) {
        write_pages(r, salt); /* after registration, by the CPU */
        clear_slots(r);
        OK(r, move(r));
        MUST(r, slots_are_right(r));
    }
    OK(r, r->ops->fill(r->stream, r->alias, 0x3c, PAGE_BYTES)); /* by the device */
    OK(r, r->ops->stream_wait(r->stream));
    for (size_t i = 0; i < PAGE_BYTES; i++)
        MUST(r, r->host[i] == 0x3c);
    printf("alias: host and device see one memory\n");
}

static kvf_status enqueue_batch(rig *r)
{
    void *to[PAGES];
    const void *from[PAGES];
    for (uint32_t p = 0; p < PAGES; p++) {
        from[p] = r->alias + source_of(p) * PAGE_BYTES;
        to[p] = r->slots + p * PAGE_BYTES;
    }
    return r->ops->copy_batch(r->stream, to, from, PAGE_BYTES, PAGES);
}

static void check_batch(rig *r)
{
    kvf_graph *graph = NULL;
    if (!r->properties.can_copy_batch) {
        MUST(r, enqueue_batch(r) == KVF_UNSUPPORTED);
        printf("batch: the driver has no call, and it is refused\n");
        return;
    }
    write_pages(r, 30);
    clear_slots(r);
    OK(r, enqueue_batch(r));
    MUST(r, slots_are_right(r));
    OK(r, r->ops->capture_begin(r->stream));
    const kvf_status recorded = enqueue_batch(r);
    if (!r->properties.can_capture_batch) {
        MUST(r, recorded == KVF_UNSUPPORTED);
        OK(r, r->ops->capture_end(r->stream, &graph));
        r->ops->graph_destroy(graph);
        printf("batch: delivers; recorded, it is refused\n");
        return;
    }
    OK(r, recorded);
    OK(r, r->ops->capture_end(r->stream, &graph));
    for (uint32_t salt = 31; salt < 34; salt++) {
        write_pages(r, salt);
        clear_slots(r);
        OK(r, r->ops->graph_launch(graph, r->stream));
        MUST(r, slots_are_right(r));
    }
    r->ops->graph_destroy(graph);
    printf("batch: delivers, at every replay too\n");
}

/* 1000 times: bytes of the host to the device and back, then a word, as `gather` publishes one. */
static void check_words(rig *r)
{
    char *words = r->host + BYTES, *alias = r->alias + BYTES;
    uint32_t *payload = (uint32_t *)(void *)r->host;
    const size_t half = 1024;
    memset(words, 0, 4096);
    for (uint32_t i = 1; i <= ROUNDS; i++) {
        const kvf_publish_args publish = {.ticket = i,
                                          .count = (const uint32_t *)(void *)alias, /* always 0 */
                                          .out_count = (uint32_t *)(void *)(alias + 64),
                                          .request = (uint32_t *)(void *)(alias + 128),
                                          .done = (uint32_t *)(void *)(alias + 192)};
        for (size_t w = 0; w < half / 4; w++)
            payload[w] = i * 7919u + (uint32_t)w;
        OK(r, r->ops->copy(r->stream, r->slots, r->alias, half));
        OK(r, r->ops->copy(r->stream, r->alias + half, r->slots, half));
        OK(r, KVF_ENQUEUE(r->stream, publish, publish));
        while (kvf_word_load((uint32_t *)(void *)(words + 128)) != i)
            ;
        MUST(r, memcmp(r->host, r->host + half, half) == 0);
    }
    OK(r, r->ops->stream_wait(r->stream));
    printf("words: %u round trips, every byte in time\n", ROUNDS);
}

static void enqueue_mixed(rig *r)
{
    clear_slots(r);
    OK(r, move(r));
    OK(r, r->ops->copy(r->stream, r->slots + 3 * PAGE_BYTES, r->slots, PAGE_BYTES));
    OK(r, r->ops->fill(r->stream, r->slots, 0x11, PAGE_BYTES / 2));
}

static uint64_t sum_of_slots(rig *r)
{
    uint64_t sum = 1469598103934665603u;
    OK(r, r->ops->copy(r->stream, r->seen, r->slots, BYTES));
    OK(r, r->ops->stream_wait(r->stream));
    for (size_t i = 0; i < BYTES / 8; i++)
        sum = (sum ^ ((const uint64_t *)(const void *)r->seen)[i]) * 1099511628211u;
    return sum;
}

static void check_replay(rig *r)
{
    kvf_graph *graph = NULL;
    OK(r, r->ops->capture_begin(r->stream));
    enqueue_mixed(r);
    OK(r, r->ops->capture_end(r->stream, &graph));
    for (uint32_t salt = 50; salt < 54; salt++) {
        write_pages(r, salt);
        enqueue_mixed(r);
        const uint64_t eager = sum_of_slots(r);
        OK(r, r->ops->fill(r->stream, r->slots, 0, BYTES));
        OK(r, r->ops->graph_launch(graph, r->stream));
        MUST(r, sum_of_slots(r) == eager);
    }
    r->ops->graph_destroy(graph);
    printf("replay: equals enqueueing\n");
}

/* ---- early starts ---- */

#define LINKS   48u /* of the chain */
#define BESIDE  8u  /* of them those of the branch */
#define QUERIES 256u
#define DIM     128u
#define STAGE   ((size_t)QUERIES * DIM * 2) /* bytes that a link reads; it writes half as many */
#define CHAIN   ((LINKS + BESIDE + 1) * STAGE)
#define POISON  0x5a

/* Link i reads stage i, as QUERIES queries in bf16, and writes a part of stage `to`. */
static kvf_rotate_args link_of(char *base, uint32_t i, uint32_t to)
{
    return (kvf_rotate_args){.dtype = KVF_BF16,
                             .head_dim = DIM,
                             .queries = QUERIES,
                             .scale = 0.09f,
                             .q = base + i * STAGE,
                             .y = (int8_t *)base + to * STAGE,
                             .y_scale = (float *)(void *)(base + to * STAGE + STAGE / 2)};
}

static void enqueue_link_of_chain(rig *r, kvf_stream *stream, uint32_t i, uint32_t to)
{
    const kvf_rotate_args link = link_of(r->slots, i, to);
    OK(r, KVF_ENQUEUE(stream, rotate, link));
}

/* Stage 0 has numbers, the others poison. The branch begins at the middle and has stages of its
 * own after those of the chain. */
static void enqueue_chain(rig *r, bool has_branch, kvf_event *fork, kvf_event *joined)
{
    OK(r, r->ops->fill(r->stream, r->slots, POISON, CHAIN));
    OK(r, r->ops->copy(r->stream, r->slots, r->alias, STAGE));
    for (uint32_t i = 0; i < LINKS; i++) {
        if (has_branch && i == LINKS / 2) {
            OK(r, r->ops->event_record(fork, r->stream));
            OK(r, r->ops->stream_wait_event(r->other, fork));
            enqueue_link_of_chain(r, r->other, i, LINKS + 1);
            for (uint32_t k = 1; k < BESIDE; k++)
                enqueue_link_of_chain(r, r->other, LINKS + k, LINKS + k + 1);
        }
        enqueue_link_of_chain(r, r->stream, i, i + 1);
    }
    if (has_branch) {
        OK(r, r->ops->event_record(joined, r->other));
        OK(r, r->ops->stream_wait_event(r->stream, joined));
    }
}

/* The bytes that the chain should leave, by the reference. */
static void work_out_chain(rig *r, char *want, bool has_branch)
{
    kvf_kernels reference;
    OK(r, kvf_kernels_init(&reference, KVF_ISA_REFERENCE));
    memset(want, POISON, CHAIN);
    memcpy(want, r->host, STAGE);
    for (uint32_t i = 0; i < LINKS + (has_branch ? BESIDE : 0); i++) {
        const kvf_rotate_args link = link_of(want, i == LINKS ? LINKS / 2 : i, i + 1);
        for (uint32_t task = 0; task < kvf_rotate_tasks(&link); task++)
            reference.rotate(&link, task);
    }
}

static void expect_chain(rig *r, const char *want)
{
    OK(r, r->ops->copy(r->stream, r->seen, r->slots, CHAIN));
    OK(r, r->ops->stream_wait(r->stream));
    for (uint32_t i = 0; i <= LINKS + BESIDE; i++)
        if (memcmp(r->seen + i * STAGE, want + i * STAGE, STAGE) != 0) {
            fprintf(stderr, "stage %u of %u\n", i, LINKS + BESIDE);
            stop(r, "a kernel that started early read what was there before", __LINE__);
        }
}

static void check_early(rig *r)
{
    char *want = map_pages(r, CHAIN);
    kvf_event *fork = NULL, *joined = NULL;
    OK(r, r->ops->event_create(r->device, false, &fork));
    OK(r, r->ops->event_create(r->device, false, &joined));
    for (int has_branch = 0; has_branch < 2; has_branch++) {
        kvf_graph *graph = NULL;
        OK(r, r->ops->capture_begin(r->stream));
        enqueue_chain(r, has_branch, fork, joined);
        OK(r, r->ops->capture_end(r->stream, &graph));
        for (uint32_t salt = 60; salt < 70; salt++) {
            write_pages(r, salt);
            work_out_chain(r, want, has_branch);
            enqueue_chain(r, has_branch, fork, joined);
            expect_chain(r, want);
            OK(r, r->ops->graph_launch(graph, r->stream));
            expect_chain(r, want);
        }
        r->ops->graph_destroy(graph);
    }
    r->ops->event_destroy(joined);
    r->ops->event_destroy(fork);
    munmap(want, CHAIN);
    printf("early: %u links, enqueued, recorded, and with a branch\n", LINKS);
}

/* ---- time ---- */

typedef struct timing {
    char *pinned, *alias; /* [LARGE] */
    char *a, *b;          /* [LARGE] of the device */
    kvf_event *began, *ended;
} timing;

/* The copy over the link takes a while; so many copies inside the device take about as long. */
static void enqueue_link(rig *r, timing *t)
{
    OK(r, r->ops->copy(r->other, t->a, t->alias, LARGE));
}

static void enqueue_kernels(rig *r, uint32_t times)
{
    for (uint32_t i = 0; i < times; i++)
        OK(r, move(r));
}

/* Both streams begin after `began` and end before `ended`, which are on r->stream. */
static uint64_t time_of(rig *r, timing *t, int has_link, uint32_t kernels)
{
    uint64_t ns = 0;
    OK(r, r->ops->stream_wait(r->stream));
    OK(r, r->ops->stream_wait(r->other));
    OK(r, r->ops->event_record(t->began, r->stream));
    OK(r, r->ops->stream_wait_event(r->other, t->began));
    if (has_link)
        enqueue_link(r, t);
    enqueue_kernels(r, kernels);
    kvf_event *joined = NULL;
    OK(r, r->ops->event_create(r->device, false, &joined));
    OK(r, r->ops->event_record(joined, r->other));
    OK(r, r->ops->stream_wait_event(r->stream, joined));
    OK(r, r->ops->event_record(t->ended, r->stream));
    OK(r, r->ops->event_wait(t->ended));
    OK(r, r->ops->event_elapsed(t->began, t->ended, &ns));
    r->ops->event_destroy(joined);
    return ns;
}

static void check_clock(rig *r, timing *t)
{
    const uint64_t before = kvf_now_ns();
    const uint64_t ns = time_of(r, t, 1, 0);
    const uint64_t around = kvf_now_ns() - before;
    const double rate = (double)LARGE / (double)ns; /* bytes per ns = GB/s */
    printf("clock: %.1f GB/s over the link, %.3f ms of %.3f ms around it\n", rate, (double)ns / 1e6,
           (double)around / 1e6);
    MUST(r, ns > 0 && ns <= around + 100000);
    MUST(r, rate > 0.5 && rate < 1000.0);
}

static double median_time(rig *r, timing *t, int has_link, uint32_t kernels)
{
    double ns[7];
    for (int i = 0; i < 7; i++)
        ns[i] = (double)time_of(r, t, has_link, kernels);
    kvf_sort(ns, 7);
    return ns[3];
}

/* A kernel that works inside the device: pages of device memory into slots. */
static void point_inside(rig *r, timing *t)
{
    void *from[PAGES];
    for (uint32_t p = 0; p < PAGES; p++)
        from[p] = t->b + source_of(p) * PAGE_BYTES;
    to_device(r, r->from, from, sizeof from);
}

static void check_overlap(rig *r, timing *t)
{
    point_inside(r, t);
    const double link = median_time(r, t, 1, 0), few = median_time(r, t, 0, 16);
    const uint32_t kernels = (uint32_t)(16.0 * link / (few > 1.0 ? few : 1.0)) + 1;
    const double work = median_time(r, t, 0, kernels), both = median_time(r, t, 1, kernels);
    printf("overlap: copy %.3f ms, %u kernels %.3f ms, both %.3f ms\n", link / 1e6, kernels,
           work / 1e6, both / 1e6);
}

static void check_times(rig *r)
{
    timing t = {0};
    void *alias = NULL;
    t.pinned = map_pages(r, LARGE);
    OK(r, r->ops->host_register(r->device, t.pinned, LARGE, &alias));
    t.alias = alias;
    t.a = device_memory(r, LARGE);
    t.b = device_memory(r, LARGE);
    OK(r, r->ops->event_create(r->device, true, &t.began));
    OK(r, r->ops->event_create(r->device, true, &t.ended));
    (void)time_of(r, &t, 1, 16); /* the link wakes up */
    check_clock(r, &t);
    check_overlap(r, &t);
    r->ops->event_destroy(t.ended);
    r->ops->event_destroy(t.began);
    r->ops->memory_free(r->device, t.b);
    r->ops->memory_free(r->device, t.a);
    r->ops->host_unregister(r->device, t.pinned, LARGE);
    munmap(t.pinned, LARGE);
}

int main(void)
{
    rig r = {0};
    if (KVF_TEST_EMULATED && getenv("KVF_TEST_GPU_ONLY") == NULL) {
        printf("skipped: this build emulates the GPU\n");
        return 77;
    }
    if (!open_rig(&r))
        return 77;
    check_alias(&r);
    check_batch(&r);
    check_words(&r);
    check_replay(&r);
    check_early(&r);
    check_times(&r);
    close_rig(&r);
    return 0;
}
