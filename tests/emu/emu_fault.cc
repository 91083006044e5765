/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The gate that every entry point of the emulated runtime passes, and what tests set there: the
 * configuration, the fault, the lost device, the counts.
 *
 * Knows no streams and no memory. Everything a call touches here is a relaxed atomic, so passing
 * the gate orders nothing.
 */

#include <set>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <string>

#include "emu_state.h"

namespace emu
{

Counts counts;

namespace
{

struct Fault {
    std::atomic<uint64_t> left{0}; /* calls until it fires; 0 = off */
    std::atomic<int> error{0};
    std::atomic<bool> is_sticky{false};
    std::atomic<const char *> fired{nullptr};
    std::atomic<const char *> name{nullptr}; /* nullptr: any call */
};

std::atomic<EntryPoint *> entry_points{nullptr};
std::atomic<int> lost_error{0};
Fault fault;
std::shared_mutex config_lock;

thread_local cudaError_t last_error = cudaSuccess;
thread_local bool is_in_host_function = false;
thread_local bool is_fault = false;

/* Names live on: other threads may be comparing one while the next is set. */
const char *kept_name(const char *name)
{
    static std::mutex &lock = *new std::mutex;
    static auto &names = *new std::set<std::string>;
    std::lock_guard<std::mutex> hold(lock);
    return names.insert(name).first->c_str();
}

uint64_t environment(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    return text != nullptr && *text != '\0' ? strtoull(text, nullptr, 10) : otherwise;
}

void fault_from_environment()
{
    const char *text = getenv("KVF_EMU_FAIL");
    if (text == nullptr)
        return;
    const char *colon = strchr(text, ':');
    unsigned long long nth = 0;
    int error = 0;
    if (colon == nullptr || sscanf(colon + 1, "%llu:%d", &nth, &error) != 2)
        return;
    char name[64];
    snprintf(name, sizeof name, "%.*s", (int)(colon - text), text);
    kvf_emu_fail_call(name[0] != '\0' ? name : nullptr, nth, error,
                      strstr(colon, ":sticky") != nullptr);
}

kvf_emu_config config_of_environment()
{
    kvf_emu_config c = {};
    c.devices = (uint32_t)environment("KVF_EMU_DEVICES", 1);
    c.device_error = (int)environment("KVF_EMU_DEVICE_ERROR", 0);
    c.memory_bytes = environment("KVF_EMU_MEMORY_MIB", 8192) << 20;
    c.pinned_bytes = environment("KVF_EMU_PINNED_MIB", 1 << 20) << 20;
    c.refuses_registering = environment("KVF_EMU_REGISTERS", 1) == 0;
    c.is_integrated = c.reads_pageable = environment("KVF_EMU_INTEGRATED", 0) != 0;
    c.delay_seed = (uint32_t)environment("KVF_EMU_DELAY_SEED", 0);
    c.connections = (uint32_t)environment("KVF_EMU_CONNECTIONS", 0);
    uint64_t compute = environment("KVF_EMU_COMPUTE", 90);
    c.compute_major = (uint32_t)(compute / 10);
    c.compute_minor = (uint32_t)(compute % 10);
    c.driver_version = (uint32_t)environment("KVF_EMU_DRIVER", 13010);
    c.multiprocessors = 4;
    c.queue_entries = 1024;
    const char *batch = getenv("KVF_EMU_BATCH_CAPTURE");
    if (batch != nullptr && strcmp(batch, "refused") == 0)
        c.batch_capture = KVF_EMU_BATCH_REFUSED;
    if (batch != nullptr && strcmp(batch, "dropped") == 0)
        c.batch_capture = KVF_EMU_BATCH_DROPPED;
    snprintf(c.name, sizeof c.name, "emulated GPU");
    snprintf(c.pci_address, sizeof c.pci_address, "0000:65:00.0");
    return c;
}

kvf_emu_config &current_config()
{
    static kvf_emu_config current = [] {
        fault_from_environment();
        return config_of_environment();
    }();
    return current;
}

bool fault_fires(const EntryPoint &point)
{
    uint64_t left = fault.left.load(std::memory_order_relaxed);
    const char *name = fault.name.load(std::memory_order_acquire);
    if (left == 0 || (name != nullptr && strcmp(name, point.name) != 0))
        return false;
    while (left != 0 &&
           !fault.left.compare_exchange_weak(left, left - 1, std::memory_order_relaxed)) {
    }
    return left == 1;
}

cudaError_t fire(const EntryPoint &point)
{
    cudaError_t error = (cudaError_t)fault.error.load(std::memory_order_relaxed);
    count(counts.faults);
    fault.fired.store(point.name, std::memory_order_relaxed);
    if (fault.is_sticky.load(std::memory_order_relaxed))
        lose(error);
    is_fault = true;
    return fail(error);
}

} // namespace

EntryPoint::EntryPoint(const char *function) : name(function), next(nullptr)
{
    next = entry_points.load(std::memory_order_relaxed);
    while (!entry_points.compare_exchange_weak(next, this, std::memory_order_release)) {
    }
}

cudaError_t fail(cudaError_t error)
{
    last_error = error;
    return error;
}

cudaError_t pending_error(bool is_cleared)
{
    cudaError_t error = last_error;
    if (is_cleared)
        last_error = cudaSuccess;
    return lost() != cudaSuccess ? lost() : error;
}

cudaError_t lost()
{
    return (cudaError_t)lost_error.load(std::memory_order_relaxed);
}

void lose(cudaError_t error)
{
    lost_error.store((int)error, std::memory_order_relaxed);
}

bool failed_by_fault()
{
    return is_fault;
}

void set_in_host_function(bool is_in)
{
    is_in_host_function = is_in;
}

kvf_emu_config config()
{
    std::shared_lock<std::shared_mutex> hold(config_lock);
    return current_config();
}

cudaError_t enter(EntryPoint &point, unsigned policy)
{
    kvf_emu_config machine = config();
    is_fault = false;
    count(counts.calls);
    count(point.calls);
    if (is_in_host_function) {
        count(counts.forbidden_calls);
        return fail(cudaErrorNotPermitted);
    }
    if (fault_fires(point))
        return fire(point);
    if ((policy & ENTRY_NO_DEVICE) == 0) {
        if (machine.device_error != 0)
            return fail((cudaError_t)machine.device_error);
        if (machine.devices == 0)
            return fail(cudaErrorNoDevice);
    }
    if (lost() != cudaSuccess && (policy & ENTRY_NO_DEVICE) == 0) {
        is_fault = true;
        return fail(lost());
    }
    if ((policy & ENTRY_UNSAFE) != 0) {
        cudaError_t error = check_unsafe();
        if (error != cudaSuccess)
            return fail(error);
    }
    return cudaSuccess;
}

} // namespace emu

using emu::counts;

extern "C" {

void kvf_emu_get_config(kvf_emu_config *out)
{
    *out = emu::config();
}

void kvf_emu_set_config(const kvf_emu_config *config)
{
    std::unique_lock<std::shared_mutex> hold(emu::config_lock);
    emu::current_config() = *config;
}

void kvf_emu_get_counts(kvf_emu_counts *out)
{
#define EMU_COUNT(field) out->field = counts.field.load(std::memory_order_relaxed)
    EMU_COUNT(allocations);
    EMU_COUNT(pinned_allocations);
    EMU_COUNT(registrations);
    EMU_COUNT(streams);
    EMU_COUNT(events);
    EMU_COUNT(graphs);
    EMU_COUNT(graph_execs);
    EMU_COUNT(cublas_handles);
    EMU_COUNT(contexts);
    EMU_COUNT(allocated_bytes);
    EMU_COUNT(pinned_bytes);
    EMU_COUNT(calls);
    EMU_COUNT(waits);
    EMU_COUNT(pageable_copies);
    EMU_COUNT(launches);
    EMU_COUNT(early_starts);
    EMU_COUNT(carveout_changes);
    EMU_COUNT(copies);
    EMU_COUNT(copied_bytes);
    EMU_COUNT(graph_launches);
    EMU_COUNT(chain_nodes);
    EMU_COUNT(forbidden_calls);
    EMU_COUNT(dropped_batches);
    EMU_COUNT(full_queues);
    EMU_COUNT(late_loads);
    EMU_COUNT(faults);
#undef EMU_COUNT
}

int kvf_emu_is_clean(void)
{
    kvf_emu_counts c;
    kvf_emu_get_counts(&c);
    const struct {
        const char *name;
        uint64_t count;
    } alive[] = {{"allocations", c.allocations},
                 {"pinned allocations", c.pinned_allocations},
                 {"registrations", c.registrations},
                 {"streams", c.streams},
                 {"events", c.events},
                 {"graphs", c.graphs},
                 {"graph execs", c.graph_execs},
                 {"cuBLAS handles", c.cublas_handles},
                 {"contexts", c.contexts}};
    int is_clean = 1;
    for (const auto &a : alive) {
        if (a.count != 0) {
            fprintf(stderr, "emulator: %llu %s alive\n", (unsigned long long)a.count, a.name);
            is_clean = 0;
        }
    }
    return is_clean;
}

void kvf_emu_reset(void)
{
    kvf_emu_config fresh = emu::config_of_environment();
    kvf_emu_set_config(&fresh);
    kvf_emu_fail_call(nullptr, 0, 0, 0);
    emu::fault.fired.store(nullptr, std::memory_order_relaxed);
    emu::lost_error.store(0, std::memory_order_relaxed);
    emu::last_error = cudaSuccess;
    for (auto *counter :
         {&counts.calls, &counts.waits, &counts.pageable_copies, &counts.launches,
          &counts.early_starts, &counts.carveout_changes, &counts.copies, &counts.copied_bytes,
          &counts.graph_launches, &counts.chain_nodes, &counts.forbidden_calls,
          &counts.dropped_batches, &counts.full_queues, &counts.faults})
        counter->store(0, std::memory_order_relaxed);
    emu::forget_launches();
    for (emu::EntryPoint *p = emu::entry_points.load(std::memory_order_acquire); p != nullptr;
         p = p->next)
        p->calls.store(0, std::memory_order_relaxed);
}

void kvf_emu_fail_call(const char *name, uint64_t nth, int error, int is_sticky)
{
    emu::fault.left.store(0, std::memory_order_relaxed);
    emu::fault.name.store(name != nullptr ? emu::kept_name(name) : nullptr,
                          std::memory_order_release);
    emu::fault.error.store(error, std::memory_order_relaxed);
    emu::fault.is_sticky.store(is_sticky != 0, std::memory_order_relaxed);
    emu::fault.left.store(nth, std::memory_order_relaxed);
}

const char *kvf_emu_failed_call(void)
{
    return emu::fault.fired.load(std::memory_order_relaxed);
}

void kvf_emu_lose_device(int error)
{
    emu::lose((cudaError_t)error);
}

size_t kvf_emu_called(const char **names, uint64_t *calls, size_t max)
{
    size_t n = 0;
    for (emu::EntryPoint *p = emu::entry_points.load(std::memory_order_acquire); p != nullptr;
         p = p->next) {
        uint64_t of_this = p->calls.load(std::memory_order_relaxed);
        if (of_this == 0)
            continue;
        if (n < max) {
            names[n] = p->name;
            calls[n] = of_this;
        }
        n++;
    }
    return n;
}

uint64_t kvf_emu_calls_of(const char *name)
{
    uint64_t calls = 0;
    for (emu::EntryPoint *p = emu::entry_points.load(std::memory_order_acquire); p != nullptr;
         p = p->next)
        if (strcmp(p->name, name) == 0)
            calls += p->calls.load(std::memory_order_relaxed);
    return calls;
}

} // extern "C"
