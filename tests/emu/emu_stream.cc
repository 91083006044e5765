/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Streams of the emulated runtime.
 *
 * Every stream has a worker that takes entries off a list in order. Nothing of theirs runs on the
 * caller's thread. Knows no graphs beyond asking whether a stream is capturing.
 */

#include <algorithm>
#include <errno.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include <unordered_set>

#include "emu_state.h"

namespace emu
{

/* ---- words ---- */

void word_sleep(const Word &word, uint32_t seen, uint64_t timeout_ns)
{
    struct timespec t = {.tv_sec = (time_t)(timeout_ns / 1000000000u),
                         .tv_nsec = (long)(timeout_ns % 1000000000u)};
    syscall(SYS_futex, (const void *)&word, FUTEX_WAIT_PRIVATE, seen, &t, nullptr, 0);
}

void word_wake(Word &word)
{
    syscall(SYS_futex, (void *)&word, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
}

void word_wait(const Word &word, uint32_t value, std::memory_order order)
{
    for (;;) {
        uint32_t seen = word.load(order);
        if ((int32_t)(seen - value) >= 0)
            return;
        word_sleep(word, seen, 100000000u);
    }
}

/* ---- delays ---- */

static thread_local CUstream_st *own_stream = nullptr; /* of a worker */

uint32_t delay_random()
{
    if (own_stream == nullptr || own_stream->delay_state == 0)
        return 0;
    uint64_t x = own_stream->delay_state;
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    own_stream->delay_state = x;
    return (uint32_t)(x >> 32);
}

/* One pause in four, up to 200 us: enough to reverse any order that nothing enforces. */
void maybe_delay()
{
    uint32_t x = delay_random();
    if (x == 0 || (x & 3) != 0)
        return;
    struct timespec time = {.tv_sec = 0, .tv_nsec = (long)((x >> 2) % 200000u)};
    nanosleep(&time, nullptr);
}

/* ---- workers ---- */

/* A queue of the hardware: what was enqueued on any of its streams begins in that order. */
struct Connection {
    std::mutex callers;
    uint32_t enqueued = 0; /* under callers */
    Word done{0};
};
static const uint32_t CONNECTIONS_MAX = 32;
static Connection connections[CONNECTIONS_MAX];

namespace
{

/* Never destroyed: workers may outlive main(). */
std::shared_mutex &tables_lock = *new std::shared_mutex; /* of the three below */
auto &streams = *new std::unordered_set<CUstream_st *>;
auto &workers = *new std::unordered_set<CUstream_st *>; /* internal ones too */
auto &legacy = *new std::vector<Ref<CUstream_st>>;      /* by device; never closed */
std::atomic<uint32_t> stream_number{0};

void worker_main(Ref<CUstream_st> stream, Entry *head)
{
    own_stream = stream.get();
    for (uint32_t done = 0;;) {
        uint32_t enqueued = stream->enqueued.load(std::memory_order_acquire);
        if (enqueued == done) {
            if (stream->is_closing.load(std::memory_order_acquire) &&
                stream->enqueued.load(std::memory_order_acquire) == done)
                break;
            word_sleep(stream->enqueued, enqueued, 100000000u);
            continue;
        }
        Entry *entry = head->next.load(std::memory_order_acquire);
        delete head;
        head = entry;
        maybe_delay();
        Connection *queue = entry->queue;
        if (queue != nullptr)
            word_wait(queue->done, entry->turn, std::memory_order_relaxed);
        if (entry->always || lost() == cudaSuccess)
            entry->work();
        entry->work = nullptr;
        if (queue != nullptr) {
            queue->done.store(entry->turn + 1, std::memory_order_relaxed);
            word_wake(queue->done);
        }
        stream->done.store(++done, std::memory_order_release);
        word_wake(stream->done);
    }
    delete head;
    std::unique_lock<std::shared_mutex> hold(tables_lock);
    workers.erase(stream.get());
}

} // namespace

Ref<CUstream_st> stream_open(int device, unsigned flags)
{
    Ref<CUstream_st> stream(new CUstream_st);
    stream->device = device;
    stream->flags = flags;
    stream->number = stream_number.fetch_add(1, std::memory_order_relaxed) + 1;
    uint32_t seed = config().delay_seed;
    if (seed != 0)
        stream->delay_state = (seed + (uint64_t)stream->number * 7919u) * 0x9e3779b97f4a7c15u | 1u;
    Entry *first = new Entry;
    stream->tail = first;
    {
        std::unique_lock<std::shared_mutex> hold(tables_lock);
        workers.insert(stream.get());
    }
    std::thread(worker_main, stream, first).detach();
    return stream;
}

void stream_close(CUstream_st *stream)
{
    stream->is_closing.store(true, std::memory_order_release);
    word_wake(stream->enqueued);
}

static void append(CUstream_st *stream, Work work, bool always)
{
    uint32_t enqueued = stream->enqueued.load(std::memory_order_relaxed);
    uint32_t room = config().queue_entries;
    if (enqueued - stream->done.load(std::memory_order_relaxed) >= room) {
        count(counts.full_queues);
        word_wait(stream->done, enqueued - room + 1, std::memory_order_relaxed);
    }
    Entry *entry = new Entry;
    entry->work = std::move(work);
    entry->always = always;
    Visible visible;
    std::unique_lock<std::mutex> turn;
    if (stream->queue != nullptr) {
        turn = std::unique_lock<std::mutex>(stream->queue->callers);
        entry->queue = stream->queue;
        entry->turn = stream->queue->enqueued++;
    }
    stream->tail->next.store(entry, std::memory_order_release);
    stream->tail = entry;
    stream->enqueued.store(enqueued + 1, std::memory_order_release);
    word_wake(stream->enqueued);
}

static std::vector<Ref<CUstream_st>> workers_of(int device)
{
    std::vector<Ref<CUstream_st>> all;
    std::shared_lock<std::shared_mutex> hold(tables_lock);
    for (CUstream_st *s : workers)
        if (device < 0 || s->device == device)
            all.emplace_back(s);
    return all;
}

/* ---- the default stream ----
 *
 * NULL, or cudaStreamLegacy. It comes after all that blocking streams of its device were given
 * before, and they after what it was given; streams with cudaStreamNonBlocking have no part in it.
 */

static bool is_blocking(const CUstream_st *stream)
{
    return (stream->flags & cudaStreamNonBlocking) == 0;
}

/* NULL before its first use. */
static CUstream_st *made_legacy(int device)
{
    std::shared_lock<std::shared_mutex> hold(tables_lock);
    return (size_t)device < legacy.size() ? legacy[(size_t)device].get() : nullptr;
}

static CUstream_st *legacy_of(int device)
{
    static std::mutex &making = *new std::mutex;
    CUstream_st *found = made_legacy(device);
    if (found != nullptr)
        return found;
    std::lock_guard<std::mutex> turn(making);
    found = made_legacy(device);
    if (found != nullptr)
        return found;
    Ref<CUstream_st> made = stream_open(device, cudaStreamNonBlocking);
    made->is_legacy = true;
    std::unique_lock<std::shared_mutex> hold(tables_lock);
    if (legacy.size() <= (size_t)device)
        legacy.resize((size_t)device + 1);
    legacy[(size_t)device] = made;
    return made.get();
}

static void append_legacy_wait(CUstream_st *stream)
{
    CUstream_st *first = made_legacy(stream->device);
    if (first == nullptr)
        return;
    uint32_t target = first->enqueued.load(std::memory_order_relaxed);
    if (target == stream->legacy_seen)
        return;
    stream->legacy_seen = target;
    append(
        stream, [=] { word_wait(first->done, target, std::memory_order_acquire); }, true);
}

static void append_blocking_waits(CUstream_st *stream)
{
    for (const auto &other : workers_of(stream->device)) {
        uint32_t target = other->enqueued.load(std::memory_order_relaxed);
        if (is_blocking(other.get()))
            append(
                stream, [=] { word_wait(other->done, target, std::memory_order_acquire); }, true);
    }
}

void push(CUstream_st *stream, Work work, bool always)
{
    std::lock_guard<std::mutex> hold(stream->callers);
    if (stream->is_legacy)
        append_blocking_waits(stream);
    else if (is_blocking(stream))
        append_legacy_wait(stream);
    append(stream, std::move(work), always);
}

void stream_drain(CUstream_st *stream)
{
    uint32_t target;
    {
        std::lock_guard<std::mutex> hold(stream->callers);
        target = stream->enqueued.load(std::memory_order_relaxed);
    }
    word_wait(stream->done, target, std::memory_order_acquire);
    memory_hide();
}

bool is_idle()
{
    std::shared_lock<std::shared_mutex> hold(tables_lock);
    for (const CUstream_st *s : workers)
        if (s->done.load(std::memory_order_relaxed) != s->enqueued.load(std::memory_order_relaxed))
            return false;
    return true;
}

void drain_all(int device)
{
    for (const auto &s : workers_of(device))
        stream_drain(s.get());
}

static bool is_done(const CUstream_st *stream)
{
    const uint32_t enqueued = stream->enqueued.load(std::memory_order_relaxed);
    return stream->done.load(std::memory_order_acquire) == enqueued;
}

cudaError_t find_stream(cudaStream_t &stream)
{
    if (stream == cudaStreamPerThread)
        return cudaErrorInvalidValue;
    if (is_default(stream)) {
        stream = legacy_of(current_device());
        return cudaSuccess;
    }
    std::shared_lock<std::shared_mutex> hold(tables_lock);
    return streams.count(stream) != 0 ? cudaSuccess : cudaErrorInvalidResourceHandle;
}

cudaError_t check_stream(cudaStream_t &stream)
{
    const cudaError_t error = find_stream(stream);
    return error == cudaSuccess && stream->is_legacy ? check_legacy(stream->device, true) : error;
}

cudaError_t submit(cudaStream_t stream, Work work, const char *name, const kvf_emu_kernel *kernel)
{
    if (is_captured(stream))
        return capture_add(stream, std::move(work), name, kernel);
    push(stream, std::move(work), false);
    return cudaSuccess;
}

} // namespace emu

using emu::count;
using emu::counts;
using emu::fail;
using emu::Ref;
using emu::tables_lock;

extern "C" {

/* ---- streams ---- */

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned flags, int)
{
    EMU_ENTER(0);
    if (out == nullptr || (flags & ~(unsigned)cudaStreamNonBlocking) != 0)
        return fail(cudaErrorInvalidValue);
    Ref<CUstream_st> stream = emu::stream_open(emu::current_device(), flags);
    uint32_t queues = std::min(emu::config().connections, emu::CONNECTIONS_MAX);
    if (queues != 0)
        stream->queue = &emu::connections[stream->number % queues];
    std::unique_lock<std::shared_mutex> hold(tables_lock);
    emu::streams.insert(stream.get());
    count(counts.streams);
    *out = stream.give();
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags)
{
    return cudaStreamCreateWithPriority(out, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t *out)
{
    return cudaStreamCreateWithPriority(out, cudaStreamDefault, 0);
}

/* Work that is queued still happens, as in CUDA. */
cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    EMU_ENTER_RELEASE(0, outcome);
    cudaError_t error =
        emu::is_default(stream) ? cudaErrorInvalidResourceHandle : emu::find_stream(stream);
    if (error != cudaSuccess)
        return fail(outcome != cudaSuccess ? outcome : error);
    emu::capture_forget(stream);
    {
        std::unique_lock<std::shared_mutex> hold(tables_lock);
        emu::streams.erase(stream);
    }
    emu::uncount(counts.streams);
    Ref<CUstream_st> last = Ref<CUstream_st>::take(stream);
    emu::stream_close(stream);
    return outcome;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    EMU_ENTER(emu::ENTRY_UNSAFE);
    cudaError_t error = emu::check_stream(stream);
    if (error == cudaSuccess)
        error = emu::refuse_captured(stream);
    if (error != cudaSuccess)
        return fail(error);
    count(counts.waits);
    if (stream->is_legacy) /* which now comes after what blocking streams have */
        emu::push(
            stream, [] {}, true);
    emu::stream_drain(stream);
    return emu::lost() == cudaSuccess ? cudaSuccess : fail(emu::lost());
}

cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    EMU_ENTER(emu::ENTRY_UNSAFE);
    cudaError_t error = emu::check_stream(stream);
    if (error == cudaSuccess)
        error = emu::refuse_captured(stream);
    if (error != cudaSuccess)
        return fail(error);
    bool is_done = emu::is_done(stream);
    if (stream->is_legacy)
        for (const auto &other : emu::workers_of(stream->device))
            is_done = is_done && (!emu::is_blocking(other.get()) || emu::is_done(other.get()));
    return is_done ? cudaSuccess : fail(cudaErrorNotReady);
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    EMU_ENTER(0);
    if (least != nullptr)
        *least = 0;
    if (greatest != nullptr)
        *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void)
{
    EMU_ENTER(emu::ENTRY_UNSAFE);
    count(counts.waits);
    emu::drain_all(emu::current_device());
    return emu::lost() == cudaSuccess ? cudaSuccess : fail(emu::lost());
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t fn, void *user)
{
    EMU_ENTER(0);
    cudaError_t error = emu::check_stream(stream);
    if (error != cudaSuccess || fn == nullptr)
        return fail(error != cudaSuccess ? error : cudaErrorInvalidValue);
    auto call = [=] {
        emu::set_in_host_function(true);
        fn(user);
        emu::set_in_host_function(false);
    };
    error = emu::submit(stream, call, "host function");
    return error == cudaSuccess ? error : fail(error);
}

} // extern "C"
