/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The transfer engine: tickets, order, back-pressure, counters, and its own thread. Methods move
 * the bytes.
 *
 * A request is handed to the engine's thread, to the method of the device or, where the count
 * decides and only the device knows it, to both, and the one that it is not for lets it pass.
 * Nothing of it waits on the caller's thread. Knows no method by name, but for what AUTO takes.
 *
 * The thread takes requests in order, and is the only one that copies for them. A stream tells it
 * of a request through the word `request`, after whatever wrote the lists. On a device of its own
 * memory the word is mapped memory that a kernel writes, and the thread polls: SPIN_NS on the core,
 * then with pauses that grow with the wait, so that a request costs at most an eighth more than it
 * waited anyway and an idle engine costs nothing. A join waits on the host until the copies are
 * enqueued, and makes the stream wait for the event after them. So no stream ever waits for work
 * that is not enqueued yet: however streams share the queues of the hardware, and whatever the
 * driver does meanwhile, nothing can stand in front of what it waits for. On a device that shares
 * the host's memory functions in the stream write the words, `done` too, and can wake whoever
 * sleeps, so there a join waits in the stream.
 *
 * Invariants: a request that fails is done, too, and its status reaches the stream that joins it
 * before that passes the join; the thread never waits for a lock that is held across a call of the
 * device.
 */

#include <string.h>
#include <sys/prctl.h>
#include <time.h>

#include "common/clock.h"
#include "host_team.h"
#include "transfer_method.h"

#define SPIN_NS      20000u
#define SPIN_TURNS   16u
#define PAUSE_NS_MIN 2000u
#define PAUSE_NS_MAX 500000u
/* How often a thread that closes looks whether the device is still there. */
#define LOST_NS      100000000u

typedef struct word_call {
    kvf_transfer_engine *engine;
    kvf_transfer_slot *slot;
    kvf_stream *stream;
    uint32_t ticket;
} word_call;

#define ROW(NAME, name) [KVF_TRANSFER_##NAME] = &kvf_transfer_##name,
static const kvf_transfer_ops *const methods[KVF_TRANSFER_METHODS] = {KVF_TRANSFER_ROWS(ROW)};

/* The method of AUTO on a device of its own memory for what is recorded, and for everything where
 * nothing was measured: no thread of the host has a part in it. */
#define AUTO_ON_DEVICE KVF_TRANSFER_MAPPED

const kvf_transfer_ops *kvf_transfer_find(kvf_transfer method)
{
    return (uint32_t)method < KVF_TRANSFER_METHODS ? methods[method] : NULL;
}

const char *kvf_transfer_name(kvf_transfer method)
{
    return KVF_NAMES(KVF_TRANSFER_LIST)[method];
}

kvf_transfer kvf_transfer_in_force(kvf_transfer method, int shares_memory)
{
    return method == KVF_TRANSFER_AUTO && shares_memory ? KVF_TRANSFER_DIRECT : method;
}

bool kvf_transfer_moves(kvf_transfer method)
{
    const kvf_transfer_ops *ops = kvf_transfer_find(method);
    return !ops || ops->move || ops->enqueue;
}

bool kvf_transfer_can_record(kvf_transfer method)
{
    const kvf_transfer_ops *ops = kvf_transfer_find(method);
    return !ops || !ops->move;
}

kvf_transfer_choice kvf_transfer_choice_default(void)
{
    kvf_transfer_choice choice;
    for (uint32_t b = 0; b < KVF_TRANSFER_BUCKETS; b++)
        choice.method[b] = AUTO_ON_DEVICE;
    return choice;
}

/* Which method takes which bucket. */
static kvf_transfer_choice resolve(const kvf_transfer_config *config, int shares_memory)
{
    kvf_transfer_choice choice = kvf_transfer_choice_default();
    const kvf_transfer method = kvf_transfer_in_force(config->method, shares_memory);
    if (config->method == KVF_TRANSFER_AUTO && config->choice)
        return *config->choice;
    for (uint32_t b = 0; b < KVF_TRANSFER_BUCKETS && method != KVF_TRANSFER_AUTO; b++)
        choice.method[b] = method;
    return choice;
}

static bool shares_memory(const kvf_device *device)
{
    kvf_device_properties properties;
    device->ops->properties(device, &properties);
    return properties.shares_host_memory != 0;
}

/* Take over a choice: it is whole, and what the device takes in it a single range. */
static void take_choice(kvf_transfer_engine *engine, const kvf_transfer_choice *choice)
{
    uint32_t ranges = 0, moves = 0;
    for (uint32_t b = 0; b < KVF_TRANSFER_BUCKETS; b++) {
        const kvf_transfer method = choice->method[b];
        const kvf_transfer_ops *ops = kvf_transfer_find(method);
        KVF_ASSERT(ops);
        engine->by_bucket[b] = ops;
        engine->methods |= 1u << method;
        moves += (uint32_t)kvf_transfer_moves(method);
        if (!ops->enqueue)
            continue;
        if (b == 0 || choice->method[b - 1] != method) {
            ranges++;
            engine->on_device = ops;
            engine->device_low = b == 0 ? 0 : 1u << b;
        }
        engine->device_high = b + 1 == KVF_TRANSFER_BUCKETS ? UINT32_MAX : 1u << (b + 1);
    }
    KVF_ASSERT(ranges <= 1 && (moves == 0 || moves == KVF_TRANSFER_BUCKETS));
}

/* ---- the thread, from streams of a device that shares memory ---- */

/* In stream order on the caller's stream: the lists are written. */
static void ring(const void *raw, uint32_t task)
{
    (void)task;
    const word_call *call = raw;
    kvf_transfer_engine *engine = call->engine;
    kvf_word_store(&call->slot->words->request, call->ticket);
    pthread_mutex_lock(&engine->lock);
    atomic_fetch_add_explicit(&engine->rung, 1, memory_order_relaxed);
    if (engine->is_asleep)
        pthread_cond_signal(&engine->news);
    pthread_mutex_unlock(&engine->lock);
}

static void finish(kvf_transfer_engine *engine, kvf_transfer_slot *slot, uint32_t ticket)
{
    pthread_mutex_lock(&engine->lock);
    kvf_word_store(&slot->words->done, ticket);
    pthread_cond_broadcast(&engine->changed);
    pthread_mutex_unlock(&engine->lock);
}

/* In stream order on the copy stream: the last byte has arrived. */
static void answer(const void *raw, uint32_t task)
{
    (void)task;
    const word_call *call = raw;
    finish(call->engine, call->slot, call->ticket);
}

/* `stream` fails with `status`, and with what the thread said of it. */
static void fail_stream(kvf_transfer_engine *engine, kvf_stream *stream, kvf_status status)
{
    pthread_mutex_lock(&engine->lock);
    const kvf_error error = engine->error;
    pthread_mutex_unlock(&engine->lock);
    engine->device->ops->stream_fail(stream,
                                     kvf_fail_again(engine->device->context, status, &error));
}

/* In stream order on the stream that joins. */
static void await_done(const void *raw, uint32_t task)
{
    (void)task;
    const word_call *call = raw;
    kvf_transfer_engine *engine = call->engine;
    kvf_transfer_slot *slot = call->slot;
    kvf_status status = KVF_OK;
    uint64_t until = kvf_now_ns() + SPIN_NS;
    while (!kvf_transfer_is_done(slot, call->ticket) && kvf_now_ns() < until)
        for (unsigned i = 0; i < SPIN_TURNS; i++)
            kvf_pause();
    pthread_mutex_lock(&engine->lock);
    while (!kvf_transfer_is_done(slot, call->ticket))
        pthread_cond_wait(&engine->changed, &engine->lock);
    if (slot->ticket == call->ticket) {
        status = slot->status;
        slot->is_told = true;
    }
    if (status == KVF_OK) {
        status = engine->untold;
        engine->untold = KVF_OK;
    }
    pthread_mutex_unlock(&engine->lock);
    if (status != KVF_OK)
        fail_stream(engine, call->stream, status);
}

/* ---- the thread, from the caller ---- */

/* Make the stream tell the thread about the slot's request. */
static kvf_status thread_call(kvf_transfer_engine *engine, kvf_transfer_slot *slot,
                              kvf_stream *stream)
{
    const kvf_device_ops *ops = engine->device->ops;
    kvf_transfer_words *words = slot->device_words;
    if (engine->shares) {
        word_call call = {.engine = engine, .slot = slot, .ticket = slot->ticket};
        KVF_TRY(ops->host_call(stream, ring, &call, sizeof call));
    } else {
        kvf_publish_args publish = {.low = engine->device_low,
                                    .high = engine->device_high,
                                    .list_max = engine->config.pages_max,
                                    .ticket = slot->ticket,
                                    .count = slot->request.count,
                                    .from = slot->request.from,
                                    .to = slot->request.to,
                                    .out_from = slot->device_from,
                                    .out_to = slot->device_to,
                                    .out_count = &words->count,
                                    .request = &words->request,
                                    .done = &words->done};
        KVF_TRY(KVF_ENQUEUE(stream, publish, publish));
    }
    pthread_mutex_lock(&engine->lock);
    engine->submitted = slot->ticket + 1;
    if (engine->is_asleep)
        pthread_cond_signal(&engine->news);
    pthread_mutex_unlock(&engine->lock);
    return KVF_OK;
}

/* Under the lock: the thread is through with the request; where functions in streams tell of the
 * last byte, that has arrived, too. */
static bool is_sent(const kvf_transfer_engine *engine, const kvf_transfer_slot *slot,
                    uint32_t ticket)
{
    return (int32_t)(engine->sent - ticket) > 0 &&
           (!engine->shares || kvf_transfer_is_done(slot, ticket));
}

/* Until that is so, on the host. */
static kvf_status await_sent(kvf_transfer_engine *engine, const kvf_transfer_slot *slot,
                             uint32_t ticket)
{
    kvf_status status = KVF_OK;
    pthread_mutex_lock(&engine->lock);
    while (status == KVF_OK && !is_sent(engine, slot, ticket)) {
        const struct timespec until = kvf_clock_in(CLOCK_REALTIME, LOST_NS);
        if (pthread_cond_timedwait(&engine->changed, &engine->lock, &until) == 0)
            continue;
        /* A device that is lost tells the thread of nothing any more. */
        pthread_mutex_unlock(&engine->lock);
        status = engine->device->ops->stream_wait(engine->copy_stream);
        pthread_mutex_lock(&engine->lock);
    }
    pthread_mutex_unlock(&engine->lock);
    return status;
}

/* Make the stream wait for the slot's request, and fail with it. On a device of its own memory the
 * caller waits until the copies are enqueued. */
static kvf_status thread_join(kvf_transfer_engine *engine, kvf_transfer_slot *slot, uint32_t ticket,
                              kvf_stream *stream)
{
    const kvf_device_ops *ops = engine->device->ops;
    if (engine->shares) {
        word_call call = {.engine = engine, .slot = slot, .stream = stream, .ticket = ticket};
        return ops->host_call(stream, await_done, &call, sizeof call);
    }
    KVF_TRY(await_sent(engine, slot, ticket));
    bool is_copied = false;
    pthread_mutex_lock(&engine->lock);
    kvf_status status = engine->untold;
    engine->untold = KVF_OK;
    if (slot->ticket == ticket && status == KVF_OK) {
        status = slot->status;
        slot->is_told |= status != KVF_OK;
        is_copied = slot->is_copied;
    }
    pthread_mutex_unlock(&engine->lock);
    if (status != KVF_OK) {
        engine->is_tainted = engine->on_device != NULL;
        fail_stream(engine, stream, status);
    }
    return is_copied ? ops->stream_wait_event(stream, slot->sent) : KVF_OK;
}

/* 1 if the request is done and the thread needs its slot no more; -1: the device could not say. */
static int thread_is_through(kvf_transfer_engine *engine, const kvf_transfer_slot *slot,
                             uint32_t ticket)
{
    pthread_mutex_lock(&engine->lock);
    const bool is_through = is_sent(engine, slot, ticket);
    const bool is_copied = is_through && slot->is_copied; /* before, it is the thread's */
    pthread_mutex_unlock(&engine->lock);
    return is_copied ? engine->device->ops->event_is_done(slot->sent) : is_through;
}

/* Until that is so, on the host. */
static kvf_status thread_wait(kvf_transfer_engine *engine, kvf_transfer_slot *slot, uint32_t ticket)
{
    KVF_TRY(await_sent(engine, slot, ticket));
    pthread_mutex_lock(&engine->lock);
    const bool is_copied = slot->ticket == ticket && slot->is_copied;
    pthread_mutex_unlock(&engine->lock);
    return is_copied ? engine->device->ops->event_wait(slot->sent) : KVF_OK;
}

/* ---- what the thread does ---- */

static void pause_ns(uint64_t ns)
{
    struct timespec time = {.tv_sec = 0, .tv_nsec = (long)ns};
    nanosleep(&time, NULL);
}

static bool is_asked(const kvf_transfer_slot *slot, uint32_t ticket)
{
    return (int32_t)(kvf_word_load(&slot->words->request) - ticket) >= 0;
}

/* Whether nothing will come any more: the engine closes and the device is gone. */
static bool is_lost(kvf_transfer_engine *engine, uint64_t *look_at)
{
    uint64_t now = kvf_now_ns();
    if (now < *look_at)
        return false;
    *look_at = now + LOST_NS;
    pthread_mutex_lock(&engine->lock);
    bool is_closing = engine->is_closing;
    pthread_mutex_unlock(&engine->lock);
    return is_closing && engine->device->ops->stream_wait(engine->copy_stream) != KVF_OK;
}

/* Until the stream has got to the request; 0 if it never will. */
static bool await_request(kvf_transfer_engine *engine, const kvf_transfer_slot *slot,
                          uint32_t ticket)
{
    uint64_t began = kvf_now_ns(), waited = 0, look_at = began + LOST_NS;
    while (!is_asked(slot, ticket)) {
        for (unsigned i = 0; i < SPIN_TURNS; i++)
            kvf_pause();
        waited = kvf_now_ns() - began;
        if (waited < SPIN_NS)
            continue;
        if (engine->shares) {
            pthread_mutex_lock(&engine->lock);
            engine->is_asleep = true;
            while (!is_asked(slot, ticket))
                pthread_cond_wait(&engine->news, &engine->lock);
            engine->is_asleep = false;
            pthread_mutex_unlock(&engine->lock);
        } else if (is_lost(engine, &look_at)) {
            return false;
        } else {
            uint64_t ns = waited / 8;
            pause_ns(ns < PAUSE_NS_MIN ? PAUSE_NS_MIN : ns > PAUSE_NS_MAX ? PAUSE_NS_MAX : ns);
        }
    }
    return true;
}

/* Nothing of the request is on its way any more; let its stream go on, with the error. */
static void fail_request(kvf_transfer_engine *engine, kvf_transfer_slot *slot, uint32_t ticket,
                         kvf_status status)
{
    const kvf_error error = kvf_context_told(engine->device->context, status);
    (void)engine->device->ops->stream_wait(engine->copy_stream); /* it says nothing that is new */
    pthread_mutex_lock(&engine->lock);
    slot->status = status;
    engine->error = error;
    pthread_mutex_unlock(&engine->lock);
    finish(engine, slot, ticket);
}

static kvf_status send_request(kvf_transfer_engine *engine, kvf_transfer_slot *slot,
                               const kvf_transfer_list *list, uint32_t ticket)
{
    const kvf_device_ops *ops = engine->device->ops;
    kvf_context *context = engine->device->context;
    if (list->count > engine->config.pages_max)
        KVF_FAIL(context, KVF_CORRUPT, "a request names %u pages, the engine was opened for %u",
                 list->count, engine->config.pages_max);
    KVF_TRY(engine->by_bucket[kvf_transfer_bucket(list->count)]->move(engine, list));
    /* Counted first: whoever sees the word sees the counters. */
    kvf_transfer_count(&engine->counters.pages, list->count);
    kvf_transfer_count(&engine->counters.bytes, (uint64_t)list->count * engine->config.page_bytes);
    if (!engine->shares) {
        KVF_TRY(ops->event_record(slot->sent, engine->copy_stream));
        slot->is_copied = true; /* others read it once `sent` has grown */
        return KVF_OK;
    }
    word_call call = {.engine = engine, .slot = slot, .ticket = ticket};
    return ops->host_call(engine->copy_stream, answer, &call, sizeof call);
}

static void run_request(kvf_transfer_engine *engine, kvf_transfer_slot *slot, uint32_t ticket)
{
    kvf_transfer_list list = {.from = slot->from,
                              .to = slot->to,
                              .device_to = slot->request.to,
                              .count = slot->words->count};
    if (engine->shares) {
        list.from = slot->request.from;
        list.to = slot->request.to;
        list.count = *slot->request.count;
        if (list.count == 0 ||
            (list.count >= engine->device_low && list.count < engine->device_high)) {
            finish(engine, slot, ticket);
            return;
        }
    }
    if (list.count == 0) /* publish has written `done` */
        return;
    kvf_status status = send_request(engine, slot, &list, ticket);
    if (status != KVF_OK)
        fail_request(engine, slot, ticket, status);
}

static void *thread_main(void *argument)
{
    kvf_transfer_engine *engine = argument;
    pthread_mutex_lock(&engine->lock);
    uint32_t ticket = engine->sent;
    pthread_mutex_unlock(&engine->lock);
    /* Pauses of microseconds shall not become those of the default slack, 50. */
    (void)prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL);
    for (;;) {
        pthread_mutex_lock(&engine->lock);
        engine->is_asleep = true;
        while (engine->submitted == ticket && !engine->is_closing)
            pthread_cond_wait(&engine->news, &engine->lock);
        engine->is_asleep = false;
        bool is_over = engine->submitted == ticket;
        pthread_mutex_unlock(&engine->lock);
        if (is_over)
            break;
        kvf_transfer_slot *slot = kvf_transfer_slot_of(engine, ticket);
        if (await_request(engine, slot, ticket))
            run_request(engine, slot, ticket);
        else
            fail_request(engine, slot, ticket, KVF_DEVICE_FAILED);
        ticket++;
        pthread_mutex_lock(&engine->lock);
        engine->sent = ticket;
        pthread_cond_broadcast(&engine->changed);
        pthread_mutex_unlock(&engine->lock);
    }
    return NULL;
}

static kvf_status thread_start(kvf_transfer_engine *engine)
{
    const uint32_t *cpus = engine->config.gather_cpus;
    engine->submitted = engine->sent = engine->next_ticket;
    KVF_TRY(kvf_thread_start(engine->device->context, &engine->thread, "kvf-transfer",
                             cpus ? (int64_t)cpus[0] : -1, thread_main, engine));
    engine->has_thread = true;
    return KVF_OK;
}

/* Finishes what was submitted. */
static void thread_stop(kvf_transfer_engine *engine)
{
    if (!engine->has_thread)
        return;
    pthread_mutex_lock(&engine->lock);
    engine->is_closing = true;
    pthread_cond_broadcast(&engine->news);
    pthread_mutex_unlock(&engine->lock);
    pthread_join(engine->thread, NULL);
    engine->has_thread = false;
}

/* ---- opening ---- */

static uint32_t slots_for(const kvf_transfer_config *config)
{
    uint32_t count = 1;
    while (count < config->requests_max)
        count *= 2;
    return count;
}

/*
 * The memory of one slot: words, and lists where the host cannot read those of the device.
 */
static size_t slot_bytes(const kvf_transfer_config *config)
{
    return sizeof(kvf_transfer_words) +
           2 * kvf_round_up((size_t)config->pages_max * sizeof(void *), 64);
}

static bool uses_thread(const kvf_transfer_engine *engine)
{
    for (uint32_t b = 0; b < KVF_TRANSFER_BUCKETS; b++)
        if (engine->by_bucket[b]->move)
            return true;
    return false;
}

static kvf_status place_words(kvf_transfer_engine *engine)
{
    kvf_device *device = engine->device;
    const uint32_t count = engine->slot_count;
    const size_t list_bytes = kvf_round_up((size_t)engine->config.pages_max * sizeof(void *), 64);
    const size_t each = slot_bytes(&engine->config);
    char *host = NULL, *alias = NULL;
    if (engine->shares) {
        engine->plain_words = kvf_alloc(device->context, count, sizeof *engine->plain_words);
        if (!engine->plain_words)
            KVF_FAIL(device->context, KVF_OUT_OF_MEMORY, "no memory for %u requests", count);
    } else {
        kvf_host_memory_config memory = engine->config.memory;
        memory.bytes = memory.granule = kvf_round_up(each * count, 4096);
        memory.huge_pages = KVF_HUGE_PAGES_OFF;
        KVF_TRY(kvf_host_memory_create(device->context, device, &memory, &engine->words));
        host = engine->words.arenas[0].host;
        alias = engine->words.arenas[0].device;
    }
    for (uint32_t i = 0; i < count; i++) {
        kvf_transfer_slot *slot = &engine->slots[i];
        if (!host) {
            slot->words = slot->device_words = engine->plain_words + i;
        } else {
            char *lists = host + (size_t)count * sizeof *slot->words + i * 2 * list_bytes;
            char *device_lists = alias + (lists - host);
            slot->words = (kvf_transfer_words *)(void *)host + i;
            slot->device_words = (kvf_transfer_words *)(void *)alias + i;
            slot->from = (const void **)(void *)lists;
            slot->to = (void **)(void *)(lists + list_bytes);
            slot->device_from = (const void **)(void *)device_lists;
            slot->device_to = (void **)(void *)(device_lists + list_bytes);
        }
        /* As after the round of tickets before the first. */
        slot->ticket = engine->next_ticket - count + i;
        kvf_word_store(&slot->words->request, slot->ticket);
        kvf_word_store(&slot->words->done, slot->ticket);
    }
    return KVF_OK;
}

static kvf_status create_events(kvf_transfer_engine *engine)
{
    kvf_device *device = engine->device;
    const kvf_device_ops *ops = device->ops;
    for (uint32_t i = 0; i < engine->slot_count; i++) {
        kvf_transfer_slot *slot = &engine->slots[i];
        if (uses_thread(engine) && !engine->shares)
            KVF_TRY(ops->event_create(device, false, &slot->sent));
        if (!engine->on_device)
            continue;
        KVF_TRY(ops->event_create(device, false, &slot->begin));
        KVF_TRY(ops->event_create(device, false, &slot->arrived));
        KVF_TRY(ops->event_create(device, false, &slot->recorded_begin));
        KVF_TRY(ops->event_create(device, false, &slot->recorded_arrived));
    }
    if (engine->on_device)
        KVF_TRY(ops->stream_create(device, KVF_PRIORITY_HIGH, &engine->read_stream));
    if (uses_thread(engine))
        KVF_TRY(ops->stream_create(device, KVF_PRIORITY_HIGH, &engine->copy_stream));
    return kvf_transfer_clocks_create(engine);
}

static kvf_status open_methods(kvf_transfer_engine *engine)
{
    for (uint32_t m = 0; m < KVF_TRANSFER_METHODS; m++)
        if ((engine->methods >> m & 1) && methods[m]->open)
            KVF_TRY(methods[m]->open(engine));
    return KVF_OK;
}

static kvf_status reserve(kvf_transfer_engine *engine)
{
    kvf_device *device = engine->device;
    engine->slot_count = slots_for(&engine->config);
    engine->next_ticket = engine->next_recorded =
        engine->slot_count + (engine->config.first_ticket & ~(engine->slot_count - 1));
    engine->slots = kvf_alloc(device->context, engine->slot_count, sizeof *engine->slots);
    if (!engine->slots)
        KVF_FAIL(device->context, KVF_OUT_OF_MEMORY, "no memory for %u requests",
                 engine->config.requests_max);
    if (pthread_mutex_init(&engine->lock, NULL) != 0 ||
        pthread_mutex_init(&engine->clock_lock, NULL) != 0 ||
        pthread_cond_init(&engine->news, NULL) != 0 ||
        pthread_cond_init(&engine->changed, NULL) != 0)
        KVF_FAIL(device->context, KVF_SYSTEM, "a lock for transfers could not be made");
    engine->has_locks = true;
    KVF_TRY(place_words(engine));
    KVF_TRY(create_events(engine));
    KVF_TRY(open_methods(engine));
    return uses_thread(engine) ? thread_start(engine) : KVF_OK;
}

static bool is_in_place(const kvf_transfer_engine *engine)
{
    return !kvf_transfer_moves(kvf_transfer_method(engine));
}

kvf_status kvf_transfer_open(kvf_device *device, const kvf_transfer_config *config,
                             kvf_transfer_engine **out)
{
    *out = NULL;
    kvf_context *context = device->context;
    KVF_ASSERT(config->page_bytes > 0 && config->page_bytes % 64 == 0);
    KVF_ASSERT(config->pages_max > 0 && config->gather_threads > 0);
    KVF_ASSERT(config->requests_max > 0 && config->requests_max <= 1u << 20);
    kvf_transfer_engine *engine = kvf_alloc(context, 1, sizeof *engine);
    if (!engine)
        KVF_FAIL(context, KVF_OUT_OF_MEMORY, "no memory for a transfer engine");
    engine->device = device;
    engine->config = *config;
    engine->shares = (uint32_t)shares_memory(device);
    atomic_init(&engine->rung, 0);
    kvf_transfer_stats_reset(engine);
    const kvf_transfer_choice choice = resolve(config, (int)engine->shares);
    take_choice(engine, &choice);
    /* Recorded requests go by the device, also where no size of others does. */
    if (config->method == KVF_TRANSFER_AUTO && !engine->shares && !engine->on_device) {
        engine->methods |= 1u << AUTO_ON_DEVICE;
        engine->on_device = methods[AUTO_ON_DEVICE];
    }
    const kvf_status status = is_in_place(engine) ? open_methods(engine) : reserve(engine);
    engine->config.gather_cpus = NULL; /* borrowed for the call only */
    engine->config.memory.topology = NULL;
    engine->config.choice = NULL;
    if (status != KVF_OK) {
        kvf_transfer_close(engine);
        return status;
    }
    *out = engine;
    return KVF_OK;
}

void kvf_transfer_close(kvf_transfer_engine *engine)
{
    if (!engine)
        return;
    const kvf_device_ops *ops = engine->device->ops;
    kvf_context *context = engine->device->context;
    thread_stop(engine);
    ops->stream_destroy(engine->copy_stream);
    ops->stream_destroy(engine->read_stream);
    for (uint32_t m = KVF_TRANSFER_METHODS; m-- > 0;)
        if ((engine->methods >> m & 1) && methods[m]->close)
            methods[m]->close(engine);
    kvf_transfer_clocks_destroy(engine);
    for (uint32_t i = engine->slots ? engine->slot_count : 0; i-- > 0;) {
        kvf_event *events[] = {engine->slots[i].recorded_arrived, engine->slots[i].recorded_begin,
                               engine->slots[i].arrived, engine->slots[i].begin,
                               engine->slots[i].sent};
        for (size_t e = 0; e < sizeof events / sizeof *events; e++)
            ops->event_destroy(events[e]);
    }
    kvf_host_memory_destroy(context, &engine->words);
    kvf_free(context, engine->plain_words);
    if (engine->has_locks) {
        pthread_cond_destroy(&engine->changed);
        pthread_cond_destroy(&engine->news);
        pthread_mutex_destroy(&engine->clock_lock);
        pthread_mutex_destroy(&engine->lock);
    }
    kvf_free(context, engine->slots);
    kvf_free(context, engine);
}

kvf_transfer kvf_transfer_method(const kvf_transfer_engine *engine)
{
    for (uint32_t m = 0; m < KVF_TRANSFER_METHODS; m++)
        if (engine->methods == 1u << m)
            return (kvf_transfer)m;
    return KVF_TRANSFER_AUTO;
}

void kvf_transfer_shape_read(const kvf_transfer_engine *engine, kvf_transfer_shape *out)
{
    *out = (kvf_transfer_shape){0};
    for (uint32_t m = 0; m < KVF_TRANSFER_METHODS; m++)
        if ((engine->methods >> m & 1) && methods[m]->shape)
            methods[m]->shape(&engine->config, out);
}

/* ---- requests ---- */

/* The device may take requests that are not recorded. */
static bool asks_device(const kvf_transfer_engine *engine)
{
    return engine->device_low < engine->device_high;
}

/* 1 if the request that stands in the way of the next one is done; -1: the device could not say,
 * which is no reason to come again. */
static int has_room(kvf_transfer_engine *engine)
{
    const uint32_t ticket = engine->next_ticket - engine->config.requests_max;
    const kvf_transfer_slot *slot = kvf_transfer_slot_of(engine, ticket);
    const int is_through = engine->has_thread ? thread_is_through(engine, slot, ticket) : 1;
    if (is_through <= 0)
        return is_through;
    return asks_device(engine) ? engine->device->ops->event_is_done(slot->arrived) : 1;
}

/* `mapped` alone: the request whose slot is used again should have written its word. */
static void check_word(kvf_transfer_engine *engine, const kvf_transfer_slot *slot)
{
    if (engine->has_thread || kvf_transfer_is_done(slot, slot->ticket))
        return;
    engine->untold = kvf_fail(engine->device->context, KVF_CORRUPT, 0,
                              "a request named more pages than the %u that the engine was opened "
                              "for",
                              engine->config.pages_max);
    engine->error = kvf_context_told(engine->device->context, engine->untold);
}

static kvf_status submit_recorded(kvf_transfer_engine *engine, const kvf_transfer_request *request,
                                  kvf_stream *stream, uint32_t *ticket)
{
    if (!engine->on_device)
        KVF_FAIL(engine->device->context, KVF_UNSUPPORTED,
                 "transfer '%s' takes a thread of the host and cannot be recorded; use "
                 "mapped or auto",
                 kvf_transfer_name(kvf_transfer_method(engine)));
    kvf_transfer_slot slot = *kvf_transfer_slot_of(engine, engine->next_recorded);
    slot.request = *request;
    KVF_TRY(engine->on_device->enqueue(engine, &slot, stream, 1));
    *ticket = engine->next_recorded++;
    return KVF_OK;
}

/* *is_recorded: the stream is being recorded. */
static kvf_status look(const kvf_transfer_engine *engine, kvf_stream *stream, bool *is_recorded)
{
    const kvf_device_ops *ops = engine->device->ops;
    const int answer = ops->is_capturing(stream);
    if (answer < 0)
        KVF_FAIL(engine->device->context, KVF_DEVICE_FAILED,
                 "the device could not report whether a stream is being recorded");
    *is_recorded = answer;
    return KVF_OK;
}

/* Errors travel along events, and those of a stream that failed shall not reach the next one. */
static kvf_status replace_stream(kvf_transfer_engine *engine)
{
    const kvf_device_ops *ops = engine->device->ops;
    kvf_stream *fresh = NULL;
    KVF_TRY(ops->stream_create(engine->device, KVF_PRIORITY_HIGH, &fresh));
    ops->stream_destroy(engine->read_stream);
    engine->read_stream = fresh;
    engine->is_tainted = false;
    return KVF_OK;
}

kvf_status kvf_transfer_submit(kvf_transfer_engine *engine, const kvf_transfer_request *request,
                               kvf_stream *stream, uint32_t *ticket)
{
    *ticket = engine->next_ticket;
    if (is_in_place(engine))
        return KVF_OK;
    bool is_recorded = false;
    KVF_TRY(look(engine, stream, &is_recorded));
    if (is_recorded)
        return submit_recorded(engine, request, stream, ticket);
    const int room = has_room(engine);
    if (room <= 0)
        return room < 0 ? KVF_DEVICE_FAILED : KVF_BUSY;
    if (engine->is_tainted)
        KVF_TRY(replace_stream(engine));
    kvf_transfer_slot *slot = kvf_transfer_slot_of(engine, engine->next_ticket);
    pthread_mutex_lock(&engine->lock);
    check_word(engine, slot);
    if (slot->status != KVF_OK && !slot->is_told)
        engine->untold = slot->status;
    slot->status = KVF_OK;
    slot->is_told = false;
    slot->is_copied = false;
    slot->ticket = engine->next_ticket;
    slot->request = *request;
    pthread_mutex_unlock(&engine->lock);
    kvf_status status =
        asks_device(engine) ? engine->on_device->enqueue(engine, slot, stream, 0) : KVF_OK;
    if (status != KVF_OK) {
        /* The caller knows; the word shall not tell it once more. */
        if (!engine->has_thread)
            kvf_word_store(&slot->words->done, slot->ticket);
        return status;
    }
    if (engine->has_thread)
        KVF_TRY(thread_call(engine, slot, stream));
    engine->next_ticket++;
    return KVF_OK;
}

typedef struct fail_call {
    kvf_transfer_engine *engine;
    kvf_stream *stream;
    kvf_status status;
} fail_call;

static void tell_stream(const void *raw, uint32_t task)
{
    (void)task;
    const fail_call *call = raw;
    fail_stream(call->engine, call->stream, call->status);
}

/* In stream order, so that what came before is not blamed. */
static kvf_status tell(kvf_transfer_engine *engine, kvf_stream *stream)
{
    const fail_call call = {.engine = engine, .stream = stream, .status = engine->untold};
    engine->untold = KVF_OK;
    engine->is_tainted = true;
    return engine->device->ops->host_call(stream, tell_stream, &call, sizeof call);
}

kvf_status kvf_transfer_join(kvf_transfer_engine *engine, uint32_t ticket, kvf_stream *stream)
{
    if (is_in_place(engine))
        return KVF_OK;
    const kvf_device_ops *ops = engine->device->ops;
    kvf_transfer_slot *slot = kvf_transfer_slot_of(engine, ticket);
    bool is_recorded = false;
    KVF_TRY(look(engine, stream, &is_recorded));
    if (is_recorded)
        return ops->stream_wait_event(stream, slot->recorded_arrived);
    if (asks_device(engine))
        KVF_TRY(ops->stream_wait_event(stream, slot->arrived));
    if (engine->has_thread)
        return thread_join(engine, slot, ticket, stream);
    return engine->untold != KVF_OK ? tell(engine, stream) : KVF_OK;
}

kvf_status kvf_transfer_wait_room(kvf_transfer_engine *engine)
{
    if (is_in_place(engine) || has_room(engine) == 1)
        return KVF_OK;
    const uint32_t ticket = engine->next_ticket - engine->config.requests_max;
    kvf_transfer_slot *slot = kvf_transfer_slot_of(engine, ticket);
    if (asks_device(engine))
        KVF_TRY(engine->device->ops->event_wait(slot->arrived));
    return engine->has_thread ? thread_wait(engine, slot, ticket) : KVF_OK;
}

/* ---- numbers ---- */

void kvf_transfer_needs(const kvf_device *device, const kvf_transfer_config *config,
                        uint64_t *host_bytes, uint64_t *device_bytes)
{
    const int shares = shares_memory(device);
    const kvf_transfer_choice choice = resolve(config, shares);
    uint32_t used = 0;
    bool moves = false;
    *host_bytes = *device_bytes = 0;
    for (uint32_t b = 0; b < KVF_TRANSFER_BUCKETS; b++)
        used |= 1u << choice.method[b];
    for (uint32_t m = 0; m < KVF_TRANSFER_METHODS; m++) {
        uint64_t host = 0, own = 0;
        if ((used >> m & 1) == 0 || !methods[m])
            continue;
        moves |= kvf_transfer_moves((kvf_transfer)m);
        if (methods[m]->needs)
            methods[m]->needs(config, &host, &own);
        *host_bytes += host;
        *device_bytes += own;
    }
    if (moves && !shares)
        *host_bytes += kvf_round_up(slot_bytes(config) * slots_for(config), 4096);
}

void kvf_transfer_stats_read(kvf_transfer_engine *engine, kvf_transfer_stats *out)
{
    kvf_transfer_counters *c = &engine->counters;
    if (engine->has_locks)
        kvf_transfer_clocks_read(engine);
    *out = (kvf_transfer_stats){
        .pages = atomic_load_explicit(&c->pages, memory_order_relaxed),
        .bytes = atomic_load_explicit(&c->bytes, memory_order_relaxed),
        .copies = atomic_load_explicit(&c->copies, memory_order_relaxed),
        .gather_ns = atomic_load_explicit(&c->gather_ns, memory_order_relaxed),
        .copy_ns = atomic_load_explicit(&c->copy_ns, memory_order_relaxed),
        .waits = atomic_load_explicit(&c->waits, memory_order_relaxed),
    };
}

void kvf_transfer_stats_reset(kvf_transfer_engine *engine)
{
    kvf_transfer_counters *c = &engine->counters;
    if (engine->has_locks)
        kvf_transfer_clocks_read(engine);
    atomic_store_explicit(&c->pages, 0, memory_order_relaxed);
    atomic_store_explicit(&c->bytes, 0, memory_order_relaxed);
    atomic_store_explicit(&c->copies, 0, memory_order_relaxed);
    atomic_store_explicit(&c->gather_ns, 0, memory_order_relaxed);
    atomic_store_explicit(&c->copy_ns, 0, memory_order_relaxed);
    atomic_store_explicit(&c->waits, 0, memory_order_relaxed);
}
