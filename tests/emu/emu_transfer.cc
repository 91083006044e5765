/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Copies and fills of the emulated runtime.
 *
 * Knows where memory lies only by asking. What CUDA refuses is refused before anything is queued;
 * the bytes move on the stream's worker.
 */

#include <string.h>

#include "emu_state.h"

namespace emu
{

/* Is this a legal copy, and must it wait? */
static cudaError_t check_copy(const void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                              bool *is_pageable)
{
    *is_pageable = false;
    if ((unsigned)kind > cudaMemcpyDefault)
        return cudaErrorInvalidMemcpyDirection;
    if (to == nullptr || from == nullptr)
        return cudaErrorInvalidValue;
    Place target = place_of(to, bytes), source = place_of(from, bytes);
    if (target == Place::Outside || source == Place::Outside)
        return cudaErrorInvalidValue;
    /* Pinned memory has one address for both sides, so it passes as either. */
    bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    bool to_host = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyHostToHost;
    bool from_host = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyHostToHost;
    if ((to_device && target == Place::Pageable) || (from_device && source == Place::Pageable) ||
        (to_host && target == Place::Device) || (from_host && source == Place::Device))
        return cudaErrorInvalidValue;
    if ((target == Place::Pageable && !is_there(to, bytes, true)) ||
        (source == Place::Pageable && !is_there(from, bytes, false)))
        return cudaErrorInvalidValue;
    *is_pageable = target == Place::Pageable || source == Place::Pageable;
    return cudaSuccess;
}

static void count_copy(size_t bytes)
{
    count(counts.copies);
    count(counts.copied_bytes, bytes);
}

static void copy_now(void *to, const void *from, size_t bytes)
{
    memmove(to, from, bytes);
    count_copy(bytes);
}

/* ---- batches ---- */

static cudaError_t check_batch(void *const *to, const void *const *from, const size_t *bytes,
                               size_t n, const cudaMemcpyAttributes *attributes,
                               const size_t *indices, size_t attribute_count)
{
    if (to == nullptr || from == nullptr || bytes == nullptr || n == 0 || attributes == nullptr ||
        indices == nullptr || attribute_count == 0 || attribute_count > n || indices[0] != 0)
        return cudaErrorInvalidValue;
    for (size_t i = 0; i < attribute_count; i++) {
        cudaMemcpySrcAccessOrder order = attributes[i].srcAccessOrder;
        if (order != cudaMemcpySrcAccessOrderStream &&
            order != cudaMemcpySrcAccessOrderDuringApiCall && order != cudaMemcpySrcAccessOrderAny)
            return cudaErrorInvalidValue;
        if (indices[i] >= n || (i != 0 && indices[i] <= indices[i - 1]))
            return cudaErrorInvalidValue;
    }
    for (size_t i = 0; i < n; i++) {
        bool is_pageable;
        if (bytes[i] == 0 ||
            check_copy(to[i], from[i], bytes[i], cudaMemcpyDefault, &is_pageable) != cudaSuccess)
            return cudaErrorInvalidValue;
    }
    return cudaSuccess;
}

/* The copies of a batch have no order among them: with a seed they go in a random one. */
static void run_batch(const std::vector<void *> &to, const std::vector<const void *> &from,
                      const std::vector<size_t> &bytes)
{
    size_t n = to.size();
    size_t start = delay_random() % n;
    bool is_backwards = (delay_random() & 1) != 0;
    for (size_t i = 0; i < n; i++) {
        size_t at = (start + (is_backwards ? n - i : i)) % n;
        copy_now(to[at], from[at], bytes[at]);
    }
}

cudaError_t copy_batch(void *const *to, const void *const *from, const size_t *bytes, size_t n,
                       const cudaMemcpyAttributes *attributes, const size_t *indices,
                       size_t attribute_count, cudaStream_t stream)
{
    if (!has_batch_copy())
        return cudaErrorCallRequiresNewerDriver;
    cudaError_t error = is_default(stream) ? cudaErrorInvalidValue : check_stream(stream);
    if (error == cudaSuccess)
        error = check_batch(to, from, bytes, n, attributes, indices, attribute_count);
    if (error != cudaSuccess)
        return error;
    if (is_captured(stream)) {
        switch (config().batch_capture) {
        case KVF_EMU_BATCH_REFUSED:
            return refuse_captured(stream);
        case KVF_EMU_BATCH_DROPPED:
            count(counts.dropped_batches);
            return cudaSuccess;
        case KVF_EMU_BATCH_ALLOWED:
            break;
        }
    }
    std::vector<void *> targets(to, to + n);
    std::vector<const void *> sources(from, from + n);
    std::vector<size_t> sizes(bytes, bytes + n);
    bool is_now = attributes[0].srcAccessOrder == cudaMemcpySrcAccessOrderDuringApiCall;
    error = submit(
        stream, [=] { run_batch(targets, sources, sizes); }, "batch");
    if (error == cudaSuccess && is_now && !is_captured(stream))
        stream_drain(stream);
    return error;
}

} // namespace emu

using emu::count;
using emu::counts;
using emu::fail;
using emu::Place;

extern "C" {

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream)
{
    EMU_ENTER(0);
    cudaError_t error = emu::check_stream(stream);
    if (error != cudaSuccess)
        return fail(error);
    if (bytes == 0)
        return cudaSuccess;
    bool is_pageable;
    error = emu::check_copy(to, from, bytes, kind, &is_pageable);
    if (error == cudaSuccess && is_pageable)
        error = emu::refuse_captured(stream);
    if (error != cudaSuccess)
        return fail(error);
    error = emu::submit(
        stream, [=] { emu::copy_now(to, from, bytes); }, "copy");
    if (error == cudaSuccess && is_pageable) {
        count(counts.pageable_copies);
        emu::stream_drain(stream);
        error = emu::lost();
    }
    return error == cudaSuccess ? error : fail(error);
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind)
{
    EMU_ENTER(emu::ENTRY_UNSAFE);
    bool is_pageable;
    cudaStream_t stream = nullptr;
    if (bytes == 0)
        return cudaSuccess;
    cudaError_t error = emu::check_copy(to, from, bytes, kind, &is_pageable);
    if (error == cudaSuccess)
        error = emu::check_stream(stream);
    if (error != cudaSuccess)
        return fail(error);
    count(counts.waits);
    if (emu::lost() == cudaSuccess && emu::memory_copy_hidden(to, from, bytes)) {
        emu::count_copy(bytes);
        return cudaSuccess;
    }
    emu::push(
        stream, [=] { emu::copy_now(to, from, bytes); }, false);
    emu::stream_drain(stream);
    return emu::lost() == cudaSuccess ? cudaSuccess : fail(emu::lost());
}

cudaError_t cudaMemsetAsync(void *to, int byte, size_t bytes, cudaStream_t stream)
{
    EMU_ENTER(0);
    cudaError_t error = emu::check_stream(stream);
    if (error == cudaSuccess && bytes != 0) {
        Place place = emu::place_of(to, bytes);
        if (place == Place::Outside || place == Place::Pageable)
            error = cudaErrorInvalidValue;
    }
    if (error != cudaSuccess)
        return fail(error);
    if (bytes == 0)
        return cudaSuccess;
    error = emu::submit(
        stream, [=] { memset(to, byte, bytes); }, "fill");
    return error == cudaSuccess ? error : fail(error);
}

/* Returns before the bytes are there, as CUDA does for device memory. */
cudaError_t cudaMemset(void *to, int byte, size_t bytes)
{
    EMU_ENTER(emu::ENTRY_UNSAFE);
    cudaStream_t stream = nullptr;
    if (bytes == 0)
        return cudaSuccess;
    Place place = emu::place_of(to, bytes);
    if (place == Place::Outside || place == Place::Pageable)
        return fail(cudaErrorInvalidValue);
    const cudaError_t error = emu::check_stream(stream);
    if (error != cudaSuccess)
        return fail(error);
    emu::push(
        stream, [=] { memset(to, byte, bytes); }, false);
    return cudaSuccess;
}

cudaError_t cudaMemcpyBatchAsync(void *const *to, const void *const *from, const size_t *bytes,
                                 size_t count_of_copies, struct cudaMemcpyAttributes *attributes,
                                 size_t *indices, size_t attribute_count, cudaStream_t stream)
{
    EMU_ENTER(0);
    cudaError_t error = emu::copy_batch(to, from, bytes, count_of_copies, attributes, indices,
                                        attribute_count, stream);
    return error == cudaSuccess ? error : fail(error);
}

} // extern "C"
