/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Events of the emulated runtime: records in the order of a stream, and who waits for them.
 *
 * Knows streams by what they take. A wait is for the last record at the time of the call, and
 * acquires what came before that record and no more.
 */

#include <unordered_set>

#include "common/clock.h"
#include "emu_state.h"

namespace emu
{
namespace
{

/* Never destroyed: workers may outlive main(). */
std::shared_mutex &events_lock = *new std::shared_mutex;
auto &events = *new std::unordered_set<CUevent_st *>; /* under events_lock */

} // namespace

cudaError_t check_event(cudaEvent_t event)
{
    std::shared_lock<std::shared_mutex> hold(events_lock);
    return events.count(event) != 0 ? cudaSuccess : cudaErrorInvalidResourceHandle;
}

static void event_complete(CUevent_st *event, uint64_t record)
{
    CUevent_st::Slot &slot = event->slots[record % CUevent_st::SLOTS];
    slot.ns.store(kvf_now_ns(), std::memory_order_relaxed);
    slot.done.store(record, std::memory_order_release);
    event->changes.fetch_add(1, std::memory_order_relaxed);
    word_wake(event->changes);
}

static void event_await(const CUevent_st *event, uint64_t record, std::memory_order order)
{
    for (;;) {
        uint32_t seen = event->changes.load(std::memory_order_relaxed);
        if (event->is_done(record, order))
            return;
        word_sleep(event->changes, seen, 1000000u);
    }
}

static uint64_t last_record(CUevent_st *event)
{
    std::lock_guard<std::mutex> hold(event->callers);
    return event->recorded;
}

static void event_record(CUevent_st *event, CUstream_st *stream)
{
    std::lock_guard<std::mutex> hold(event->callers);
    uint64_t record = event->recorded + 1;
    if (record > CUevent_st::SLOTS)
        event_await(event, record - CUevent_st::SLOTS, std::memory_order_relaxed);
    event->recorded = record;
    event->capture_id.store(0, std::memory_order_relaxed);
    Ref<CUevent_st> keep(event);
    push(
        stream, [=] { event_complete(keep.get(), record); }, true);
}

static cudaError_t record_call(cudaEvent_t event, cudaStream_t stream)
{
    cudaError_t error = check_stream(stream);
    if (error == cudaSuccess)
        error = check_event(event);
    if (error == cudaSuccess && event->device != stream->device)
        error = cudaErrorInvalidResourceHandle;
    if (error != cudaSuccess)
        return fail(error);
    if (is_captured(stream)) {
        error = capture_record(event, stream);
        return error == cudaSuccess ? error : fail(error);
    }
    event_record(event, stream);
    return cudaSuccess;
}

} // namespace emu

using emu::count;
using emu::counts;
using emu::fail;
using emu::Ref;

extern "C" {

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags)
{
    EMU_ENTER(0);
    if (out == nullptr || (flags & ~7u) != 0)
        return fail(cudaErrorInvalidValue);
    Ref<CUevent_st> event(new CUevent_st);
    event->device = emu::current_device();
    event->flags = flags;
    std::unique_lock<std::shared_mutex> hold(emu::events_lock);
    emu::events.insert(event.get());
    count(counts.events);
    *out = event.give();
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *out)
{
    return cudaEventCreateWithFlags(out, cudaEventDefault);
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    EMU_ENTER_RELEASE(0, outcome);
    {
        std::unique_lock<std::shared_mutex> hold(emu::events_lock);
        if (emu::events.erase(event) == 0)
            return fail(outcome != cudaSuccess ? outcome : cudaErrorInvalidResourceHandle);
    }
    emu::uncount(counts.events);
    Ref<CUevent_st> last = Ref<CUevent_st>::take(event);
    return outcome;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    EMU_ENTER(0);
    return emu::record_call(event, stream);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags)
{
    EMU_ENTER(0);
    cudaError_t error = emu::check_stream(stream);
    if (error == cudaSuccess)
        error = emu::check_event(event);
    if (error == cudaSuccess && flags != cudaEventWaitDefault)
        error = cudaErrorInvalidValue;
    if (error != cudaSuccess)
        return fail(error);
    bool is_handled;
    error = emu::capture_wait(stream, event, &is_handled);
    if (is_handled)
        return error == cudaSuccess ? error : fail(error);
    uint64_t record = emu::last_record(event);
    Ref<CUevent_st> keep(event);
    if (record != 0)
        emu::push(
            stream, [=] { emu::event_await(keep.get(), record, std::memory_order_acquire); }, true);
    return cudaSuccess;
}

static cudaError_t check_awaited(cudaEvent_t event)
{
    cudaError_t error = emu::check_event(event);
    if (error == cudaSuccess && event->capture_id.load(std::memory_order_relaxed) != 0)
        error = cudaErrorCapturedEvent;
    return error;
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    EMU_ENTER(emu::ENTRY_UNSAFE);
    cudaError_t error = check_awaited(event);
    if (error != cudaSuccess)
        return fail(error);
    if (!event->is_done(emu::last_record(event), std::memory_order_acquire))
        return fail(cudaErrorNotReady);
    return emu::lost() == cudaSuccess ? cudaSuccess : fail(emu::lost());
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    EMU_ENTER(emu::ENTRY_UNSAFE);
    cudaError_t error = check_awaited(event);
    if (error != cudaSuccess)
        return fail(error);
    count(counts.waits);
    Ref<CUevent_st> keep(event);
    emu::event_await(event, emu::last_record(event), std::memory_order_acquire);
    emu::memory_hide();
    return emu::lost() == cudaSuccess ? cudaSuccess : fail(emu::lost());
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to)
{
    EMU_ENTER(emu::ENTRY_UNSAFE);
    cudaError_t error = check_awaited(from);
    if (error == cudaSuccess)
        error = check_awaited(to);
    if (error == cudaSuccess && ms == nullptr)
        error = cudaErrorInvalidValue;
    if (error != cudaSuccess)
        return fail(error);
    uint64_t first = emu::last_record(from), second = emu::last_record(to);
    if (((from->flags | to->flags) & cudaEventDisableTiming) != 0 || first == 0 || second == 0)
        return fail(cudaErrorInvalidResourceHandle);
    if (!from->is_done(first, std::memory_order_acquire) ||
        !to->is_done(second, std::memory_order_acquire))
        return fail(cudaErrorNotReady);
    int64_t ns = (int64_t)(to->slots[second % CUevent_st::SLOTS].ns.load() -
                           from->slots[first % CUevent_st::SLOTS].ns.load());
    *ms = (float)ns * 1e-6f;
    return cudaSuccess;
}

} // extern "C"
