/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Memory of the emulated device: allocations and registrations, and who may touch them.
 *
 * Device memory lies in an arena of its own, each allocation between pages that nobody may touch;
 * the address sanitizer knows its ends to the byte. It is filled with a pattern that is no number
 * in any format and no index of anything, and its addresses are never used again. As long as no
 * work is queued, the host may not touch it either. A range that a call names must lie inside one
 * allocation or one registration, or touch none. Two registrations side by side are two: CUDA
 * refuses copies across them.
 */

#include <algorithm>
#include <chrono>
#include <map>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <thread>

#include "emu_fiber.h"
#include "emu_launch.h"
#include "emu_state.h"

#if KVF_ASAN
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(pointer, bytes) ((void)(pointer), (void)(bytes))
#endif

namespace emu
{
namespace
{

struct Range {
    size_t bytes;
    Place place;
    bool is_owned; /* allocated here */
    int device;
    unsigned flags;
};

std::shared_mutex ranges_lock;
std::map<uintptr_t, Range> ranges;

/* ---- device memory ---- */

const size_t ARENA_BYTES = (size_t)256 << 30; /* of addresses */
const size_t PAGE_BYTES = 4096;
const size_t HUGE_BYTES = (size_t)4 << 20; /* enough to have some of 2 MiB inside */
const size_t ALIGNMENT = 512;
char *arena;       /* under ranges_lock, as the next */
size_t arena_used; /* of it, in pages; only grows */

size_t round_up(size_t bytes, size_t unit)
{
    return (bytes + unit - 1) / unit * unit;
}

/* The pages of an allocation, which ends where they end. */
char *pages_of(uintptr_t pointer)
{
    return (char *)(pointer / PAGE_BYTES * PAGE_BYTES);
}

size_t pages_bytes(uintptr_t pointer, size_t bytes)
{
    return round_up(pointer + bytes, PAGE_BYTES) - pointer / PAGE_BYTES * PAGE_BYTES;
}

/* Under the lock; NULL if it cannot be had. */
void *device_take(size_t bytes)
{
    if (arena == nullptr) {
        void *base = mmap(nullptr, ARENA_BYTES, PROT_NONE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (base == MAP_FAILED)
            return nullptr;
        arena = (char *)base;
    }
    const size_t whole = round_up(bytes, ALIGNMENT), pages = round_up(whole, PAGE_BYTES);
    if (bytes > ARENA_BYTES || pages + PAGE_BYTES > ARENA_BYTES - arena_used)
        return nullptr;
    char *base = arena + arena_used, *pointer = base + pages - whole;
    if (mprotect(base, pages, PROT_READ | PROT_WRITE) != 0)
        return nullptr;
    /* What lies in huge pages is hidden and shown again in a fraction of the time. */
    if (pages >= HUGE_BYTES)
        (void)madvise(base, pages, MADV_HUGEPAGE);
    arena_used += pages + PAGE_BYTES;
    ASAN_POISON_MEMORY_REGION(base, (size_t)(pointer - base));
    ASAN_POISON_MEMORY_REGION(pointer + bytes, whole - bytes);
    return pointer;
}

void device_give(uintptr_t pointer, size_t bytes)
{
    char *base = pages_of(pointer);
    const size_t pages = pages_bytes(pointer, bytes);
    (void)madvise(base, pages, MADV_DONTNEED);
    (void)mprotect(base, pages, PROT_NONE);
}

/* Callers that enqueue right now; -1: protections change. Relaxed throughout, because it shall
 * order nothing that a thread sanitizer sees. */
std::atomic<int32_t> gate{0};
std::atomic<bool> is_hidden{false};

bool close_gate()
{
    int32_t none = 0;
    return gate.compare_exchange_strong(none, -1, std::memory_order_relaxed);
}

void protect_all(int protection)
{
    std::shared_lock<std::shared_mutex> hold(ranges_lock);
    for (const auto &r : ranges)
        if (r.second.place == Place::Device)
            (void)mprotect(pages_of(r.first), pages_bytes(r.first, r.second.bytes), protection);
}

const uint32_t POISON = 0x7fe17fe1u; /* NaN in bf16, fp16 and fp32 */

void poison(void *pointer, size_t bytes)
{
    char *at = (char *)pointer;
    size_t whole = bytes < sizeof POISON ? 0 : sizeof POISON;
    memcpy(at, &POISON, whole != 0 ? whole : bytes);
    for (size_t done = whole; done != 0 && done < bytes;) {
        size_t n = done < bytes - done ? done : bytes - done;
        memcpy(at + done, at, n);
        done += n;
    }
}

/* Under the lock. The range that holds the pointer, or end(). */
std::map<uintptr_t, Range>::iterator find(uintptr_t pointer)
{
    auto at = ranges.upper_bound(pointer);
    if (at == ranges.begin())
        return ranges.end();
    --at;
    return pointer - at->first < at->second.bytes ? at : ranges.end();
}

bool overlaps(uintptr_t pointer, size_t bytes)
{
    auto next = ranges.lower_bound(pointer);
    return find(pointer) != ranges.end() || (next != ranges.end() && next->first - pointer < bytes);
}

cudaError_t allocate(void **out, size_t bytes, Place place, unsigned flags)
{
    bool is_device = place == Place::Device;
    kvf_emu_config machine = config();
    Visible visible;
    std::unique_lock<std::shared_mutex> hold(ranges_lock);
    uint64_t used = is_device ? 0 : counts.pinned_bytes.load(std::memory_order_relaxed);
    for (const auto &r : ranges)
        if (is_device && r.second.place == Place::Device && r.second.device == current_device())
            used += r.second.bytes;
    uint64_t limit = is_device ? machine.memory_bytes : machine.pinned_bytes;
    void *pointer = nullptr;
    if (bytes <= limit && used <= limit - bytes) {
        if (is_device)
            pointer = device_take(bytes);
        else if (posix_memalign(&pointer, PAGE_BYTES, bytes) != 0)
            pointer = nullptr;
    }
    if (pointer == nullptr)
        return fail(cudaErrorMemoryAllocation);
    ranges[(uintptr_t)pointer] = {bytes, place, true, current_device(), flags};
    count(is_device ? counts.allocations : counts.pinned_allocations);
    count(is_device ? counts.allocated_bytes : counts.pinned_bytes, bytes);
    hold.unlock();
    poison(pointer, bytes);
    *out = pointer;
    return cudaSuccess;
}

cudaError_t release(void *pointer, Place place)
{
    std::unique_lock<std::shared_mutex> hold(ranges_lock);
    auto at = ranges.find((uintptr_t)pointer);
    if (at == ranges.end() || !at->second.is_owned || at->second.place != place)
        return fail(cudaErrorInvalidValue);
    bool is_device = place == Place::Device;
    uncount(is_device ? counts.allocations : counts.pinned_allocations);
    uncount(is_device ? counts.allocated_bytes : counts.pinned_bytes, at->second.bytes);
    const size_t bytes = at->second.bytes;
    ranges.erase(at);
    hold.unlock();
    if (is_device)
        device_give((uintptr_t)pointer, bytes);
    else
        free(pointer);
    return cudaSuccess;
}

/* Freeing waits for the device, as CUDA does; what a lost device still works off, too. */
cudaError_t release_call(void *pointer, Place place, cudaError_t outcome)
{
    if (pointer == nullptr)
        return outcome;
    count(counts.waits);
    drain_all(current_device());
    cudaError_t error = release(pointer, place);
    return outcome != cudaSuccess ? outcome : error;
}

} // namespace

/* ---- what the host may touch ---- */

Visible::Visible()
{
    for (;;) {
        int32_t users = gate.load(std::memory_order_relaxed);
        if (users >= 0 && !is_hidden.load(std::memory_order_relaxed)) {
            if (gate.compare_exchange_weak(users, users + 1, std::memory_order_relaxed))
                return;
        } else if (close_gate()) {
            protect_all(PROT_READ | PROT_WRITE);
            is_hidden.store(false, std::memory_order_relaxed);
            gate.store(0, std::memory_order_relaxed);
        } else {
            sched_yield();
        }
    }
}

Visible::~Visible()
{
    gate.fetch_sub(1, std::memory_order_relaxed);
}

void memory_hide()
{
#if !KVF_TSAN
    if (is_hidden.load(std::memory_order_relaxed) || !close_gate())
        return;
    if (is_idle()) {
        protect_all(PROT_NONE);
        is_hidden.store(true, std::memory_order_relaxed);
    }
    gate.store(0, std::memory_order_relaxed);
#endif
}

/* Pages of device memory in which [pointer, pointer + bytes) lies: whole huge ones, where the
 * allocation has such. Of other memory none. */
static void protect_range(const void *pointer, size_t bytes, int protection)
{
    std::shared_lock<std::shared_mutex> hold(ranges_lock);
    const auto at = find((uintptr_t)pointer);
    if (at == ranges.end() || at->second.place != Place::Device)
        return;
    const uintptr_t base = (uintptr_t)pages_of(at->first), unit = HUGE_BYTES / 2;
    const uintptr_t end = base + pages_bytes(at->first, at->second.bytes);
    const uintptr_t from = std::max(base, (uintptr_t)pointer / unit * unit);
    const uintptr_t to = std::min(end, (uintptr_t)round_up((uintptr_t)pointer + bytes, unit));
    (void)mprotect((void *)from, to - from, protection);
}

bool memory_copy_hidden(void *to, const void *from, size_t bytes)
{
    if (!is_hidden.load(std::memory_order_relaxed) || !close_gate())
        return false;
    const bool hidden = is_hidden.load(std::memory_order_relaxed);
    if (hidden) {
        protect_range(to, bytes, PROT_READ | PROT_WRITE);
        protect_range(from, bytes, PROT_READ | PROT_WRITE);
        memmove(to, from, bytes);
        protect_range(to, bytes, PROT_NONE);
        protect_range(from, bytes, PROT_NONE);
    }
    gate.store(0, std::memory_order_relaxed);
    return hidden;
}

Place place_of(const void *pointer, size_t bytes)
{
    std::shared_lock<std::shared_mutex> hold(ranges_lock);
    uintptr_t p = (uintptr_t)pointer;
    auto at = find(p);
    if (at == ranges.end())
        return overlaps(p, bytes) ? Place::Outside : Place::Pageable;
    return bytes <= at->second.bytes - (p - at->first) ? at->second.place : Place::Outside;
}

static bool populate(const void *pointer, size_t bytes, bool writes)
{
    enum { POPULATE_READ = 22, POPULATE_WRITE = 23 }; /* of madvise, which change no content */
    const uintptr_t first = (uintptr_t)pointer / PAGE_BYTES * PAGE_BYTES;
    return madvise((void *)first, (uintptr_t)pointer + bytes - first,
                   writes ? POPULATE_WRITE : POPULATE_READ) == 0;
}

bool is_there(const void *pointer, size_t bytes, bool writes)
{
    static char own[1];
    return populate(pointer, bytes, writes) || !populate(own, sizeof own, writes);
}

/* Everything that is still allocated or registered; for cudaDeviceReset. */
static void memory_reset()
{
    std::unique_lock<std::shared_mutex> hold(ranges_lock);
    for (const auto &r : ranges)
        if (r.second.place == Place::Device)
            device_give(r.first, r.second.bytes);
        else if (r.second.is_owned)
            free((void *)r.first);
    ranges.clear();
    for (auto *counter : {&counts.allocations, &counts.pinned_allocations, &counts.registrations,
                          &counts.allocated_bytes, &counts.pinned_bytes})
        counter->store(0, std::memory_order_relaxed);
}

} // namespace emu

using emu::count;
using emu::counts;
using emu::fail;
using emu::Place;

const char *kvf_emu_refuses(const void *pointer)
{
    switch (emu::place_of(pointer, 1)) {
    case Place::Pageable:
        if (emu::config().reads_pageable)
            return nullptr;
        return "neither device memory nor registered host memory";
    case Place::Outside:
        return "outside of the allocation it touches";
    default:
        return nullptr;
    }
}

/* ---- what kernels may touch ---- */

namespace emu
{

/* Is there memory at all? What is not mapped, or lies where no heap, stack or library does, is a
 * number and no address; so is a small number of 32 bits beside what padding happens to hold, the
 * upper half of an old address: no object lies in the first page of a multiple of 4 GiB, where a
 * thread's heap has its own words. */
static bool is_memory(uintptr_t pointer)
{
    unsigned char is_in_core;
    return pointer >= (uintptr_t)0x500000000000u && pointer < (uintptr_t)0x800000000000u &&
           (uint32_t)pointer >= PAGE_BYTES &&
           mincore((void *)(pointer / PAGE_BYTES * PAGE_BYTES), 1, &is_in_core) == 0;
}

} // namespace emu

void kvf_emu_check_arg(const kvf_emu_kernel *kernel, const void *arg, size_t bytes)
{
    if (emu::config().reads_pageable)
        return;
    for (size_t at = 0; at + sizeof(uintptr_t) <= bytes; at += sizeof(uintptr_t)) {
        uintptr_t word;
        memcpy(&word, (const char *)arg + at, sizeof word);
        if (word % 4 != 0 || emu::place_of((const void *)word, 1) != Place::Pageable ||
            !emu::is_memory(word))
            continue;
        fprintf(stderr, "emulated CUDA: %s is launched with the address %p: %s\n", kernel->name,
                (const void *)word, kvf_emu_refuses((const void *)word));
        abort();
    }
}

extern "C" {

cudaError_t cudaMalloc(void **pointer, size_t bytes)
{
    EMU_ENTER(emu::ENTRY_UNSAFE);
    if (pointer == nullptr)
        return fail(cudaErrorInvalidValue);
    *pointer = nullptr;
    return bytes == 0 ? cudaSuccess : emu::allocate(pointer, bytes, Place::Device, 0);
}

cudaError_t cudaFree(void *pointer)
{
    EMU_ENTER_RELEASE(emu::ENTRY_UNSAFE, outcome);
    return emu::release_call(pointer, Place::Device, outcome);
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total)
{
    EMU_ENTER(0);
    if (free_bytes == nullptr || total == nullptr)
        return fail(cudaErrorInvalidValue);
    uint64_t used = counts.allocated_bytes.load(std::memory_order_relaxed);
    *total = emu::config().memory_bytes;
    *free_bytes = used < *total ? *total - used : 0;
    return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned flags)
{
    EMU_ENTER(emu::ENTRY_UNSAFE);
    if (pointer == nullptr || (flags & ~7u) != 0)
        return fail(cudaErrorInvalidValue);
    *pointer = nullptr;
    return bytes == 0 ? cudaSuccess : emu::allocate(pointer, bytes, Place::Pinned, flags);
}

cudaError_t cudaMallocHost(void **pointer, size_t bytes)
{
    EMU_ENTER(emu::ENTRY_UNSAFE);
    if (pointer == nullptr)
        return fail(cudaErrorInvalidValue);
    *pointer = nullptr;
    return bytes == 0 ? cudaSuccess : emu::allocate(pointer, bytes, Place::Pinned, 0);
}

cudaError_t cudaFreeHost(void *pointer)
{
    EMU_ENTER_RELEASE(emu::ENTRY_UNSAFE, outcome);
    return emu::release_call(pointer, Place::Pinned, outcome);
}

cudaError_t cudaHostRegister(void *pointer, size_t bytes, unsigned flags)
{
    EMU_ENTER(emu::ENTRY_UNSAFE);
    const unsigned known = cudaHostRegisterPortable | cudaHostRegisterMapped |
                           cudaHostRegisterIoMemory | cudaHostRegisterReadOnly;
    if (pointer == nullptr || bytes == 0 || (flags & ~known) != 0)
        return fail(cudaErrorInvalidValue);
    if (emu::config().refuses_registering)
        return fail(cudaErrorNotSupported);
    uint64_t limit = emu::config().pinned_bytes;
    std::unique_lock<std::shared_mutex> hold(emu::ranges_lock);
    if (emu::overlaps((uintptr_t)pointer, bytes))
        return fail(cudaErrorHostMemoryAlreadyRegistered);
    uint64_t used = counts.pinned_bytes.load(std::memory_order_relaxed);
    if (bytes > limit || used > limit - bytes)
        return fail(cudaErrorMemoryAllocation);
    emu::ranges[(uintptr_t)pointer] = {bytes, Place::Pinned, false, emu::current_device(), flags};
    count(counts.registrations);
    count(counts.pinned_bytes, bytes);
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *pointer)
{
    EMU_ENTER_RELEASE(emu::ENTRY_UNSAFE, outcome);
    std::unique_lock<std::shared_mutex> hold(emu::ranges_lock);
    auto at = emu::ranges.find((uintptr_t)pointer);
    if (at == emu::ranges.end() || at->second.is_owned || at->second.place != Place::Pinned)
        return fail(outcome != cudaSuccess ? outcome : cudaErrorHostMemoryNotRegistered);
    emu::uncount(counts.registrations);
    emu::uncount(counts.pinned_bytes, at->second.bytes);
    emu::ranges.erase(at);
    return outcome;
}

cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned flags)
{
    EMU_ENTER(0);
    if (device == nullptr || flags != 0 || emu::place_of(host, 1) != Place::Pinned)
        return fail(cudaErrorInvalidValue);
    *device = host;
    return cudaSuccess;
}

cudaError_t cudaDeviceReset(void)
{
    EMU_ENTER_RELEASE(emu::ENTRY_NO_DEVICE, outcome);
    emu::drain_all(-1);
    emu::graphs_reset();
    emu::memory_reset();
    emu::lose(cudaSuccess);
    return outcome;
}

} // extern "C"
