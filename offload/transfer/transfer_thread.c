/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The engine's own thread: it takes requests in order, and is the only one that copies for them.
 *
 * A stream tells it of a request through the word `request`, after whatever wrote the lists. On a
 * device of its own memory the word is mapped memory that a kernel writes, and the thread polls:
 * SPIN_NS on the core, then with pauses that grow with the wait, so that a request costs at most an
 * eighth more than it waited anyway and an idle engine costs nothing. A join waits on the host
 * until the copies are enqueued, and makes the stream wait for the event behind them. So no stream
 * ever waits for work that is not enqueued yet: however streams share the queues of the hardware,
 * and whatever the driver does meanwhile, nothing can stand in front of what it waits for. On a
 * device that shares the host's memory functions in the stream write the words, `done` too, and can
 * wake whoever sleeps, so there a join waits in the stream.
 *
 * Knows nothing of how pages travel. Invariants: a request that fails is done, too, and its status
 * reaches the stream that joins it before that passes the join; the thread never waits for a lock
 * that is held across a call of the device.
 */

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

/* ---- the side of the streams of a device that shares memory ---- */

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
        engine->device->ops->stream_fail(call->stream, status);
}

/* ---- the side of the caller ---- */

kvf_status kvf_transfer_thread_call(kvf_transfer_engine *engine, kvf_transfer_slot *slot,
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
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += LOST_NS;
        until.tv_sec += until.tv_nsec / 1000000000;
        until.tv_nsec %= 1000000000;
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

kvf_status kvf_transfer_thread_join(kvf_transfer_engine *engine, kvf_transfer_slot *slot,
                                    uint32_t ticket, kvf_stream *stream)
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
        ops->stream_fail(stream, status);
    }
    return is_copied ? ops->stream_wait_event(stream, slot->sent) : KVF_OK;
}

int kvf_transfer_thread_is_through(kvf_transfer_engine *engine, const kvf_transfer_slot *slot,
                                   uint32_t ticket)
{
    pthread_mutex_lock(&engine->lock);
    const bool is_through = is_sent(engine, slot, ticket);
    const bool is_copied = is_through && slot->is_copied; /* before, it is the thread's */
    pthread_mutex_unlock(&engine->lock);
    return is_copied ? engine->device->ops->event_is_done(slot->sent) : is_through;
}

kvf_status kvf_transfer_thread_wait(kvf_transfer_engine *engine, kvf_transfer_slot *slot,
                                    uint32_t ticket)
{
    KVF_TRY(await_sent(engine, slot, ticket));
    pthread_mutex_lock(&engine->lock);
    const bool is_copied = slot->ticket == ticket && slot->is_copied;
    pthread_mutex_unlock(&engine->lock);
    return is_copied ? engine->device->ops->event_wait(slot->sent) : KVF_OK;
}

/* ---- the thread ---- */

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
    (void)engine->device->ops->stream_wait(engine->copy_stream); /* it says nothing that is new */
    pthread_mutex_lock(&engine->lock);
    slot->status = status;
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

kvf_status kvf_transfer_thread_start(kvf_transfer_engine *engine)
{
    const uint32_t *cpus = engine->config.gather_cpus;
    engine->submitted = engine->sent = engine->next_ticket;
    KVF_TRY(kvf_thread_start(engine->device->context, &engine->thread, "kvf-transfer",
                             cpus ? (int64_t)cpus[0] : -1, thread_main, engine));
    engine->has_thread = true;
    return KVF_OK;
}

void kvf_transfer_thread_stop(kvf_transfer_engine *engine)
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
