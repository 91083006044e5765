/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The card under the stand-in for ggml. Its work is enqueued, as that of ggml's CUDA backend: who
 * reads it without waiting finds what was there before.
 */

#include "standin_card.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#if KVL_EMULATED
#include <cuda_runtime.h>

#include "emu_control.h"
#include "sanitizers.h"
#endif

standin_cards standin_card = {.functions = 6};

/* ---- the buffer type, by places of its functions ---- */

struct gg_buffer_type {
    void *slots[20];
};

enum { ALIGNMENT = 128 };

static size_t place_of_alignment(void)
{
    return standin_card.functions == 8 ? 3 : 2;
}

static size_t place_of_size(void)
{
    return standin_card.functions == 8 ? 5 : 4;
}

gg_device *ggml_backend_buft_get_device(gg_buffer_type *type)
{
    return type->slots[standin_card.functions + (standin_card.is_misread ? 6 : 0)];
}

size_t ggml_backend_buft_get_alignment(gg_buffer_type *type)
{
    size_t (*function)(gg_buffer_type *);
    memcpy(&function, &type->slots[place_of_alignment()], sizeof function);
    return function(type);
}

size_t ggml_backend_buft_get_alloc_size(gg_buffer_type *type, const gg_tensor *tensor)
{
    size_t (*function)(gg_buffer_type *, const gg_tensor *);
    memcpy(&function, &type->slots[place_of_size()], sizeof function);
    return function ? function(type, tensor) : ggml_nbytes(tensor);
}

/* ---- memory ---- */

#if KVL_EMULATED
static cudaStream_t stream;
static void *enqueued[256]; /* pinned memory of copies */
static int enqueued_count;

int standin_has_device(void)
{
    return 1;
}

#if KVF_TSAN
/* The handler of faults calls CUDA, which allocates. Who has a fault is not in malloc, nor in CUDA.
 */
const char *__tsan_default_options(void);
const char *__tsan_default_options(void)
{
    return "report_signal_unsafe=0";
}
#endif

void standin_count_calls(uint64_t calls[2])
{
    kvf_emu_counts counts;
    kvf_emu_get_counts(&counts);
    calls[0] = counts.copies;
    calls[1] = counts.waits;
}

static void sleep_first(void *unused)
{
    (void)unused;
    nanosleep(&(struct timespec){.tv_nsec = (long)standin_card.delay}, NULL);
}

static void *card_alloc(size_t bytes)
{
    void *data = NULL;
    if (!stream && cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess)
        abort();
    return cudaMalloc(&data, bytes) == cudaSuccess ? data : NULL;
}

static void card_free(void *data)
{
    cudaFree(data);
}

static void card_copy(void *to, const void *from, size_t bytes)
{
    if (cudaMemcpy(to, from, bytes, cudaMemcpyDefault) == cudaSuccess)
        return;
    (void)cudaGetLastError();
    standin_card.refused++; /* where ggml ends the process */
}

static void finish(void)
{
    cudaStreamSynchronize(stream);
    while (enqueued_count)
        cudaFreeHost(enqueued[--enqueued_count]);
}

void standin_enqueue(gg_tensor *tensor, const void *from, size_t bytes)
{
    if (!standin_card.delay || enqueued_count == 256) {
        finish();
        card_copy(tensor->data, from, bytes);
        return;
    }
    void **pinned = &enqueued[enqueued_count++];
    if (cudaHostAlloc(pinned, bytes, 0) != cudaSuccess)
        abort();
    memcpy(*pinned, from, bytes);
    if (cudaLaunchHostFunc(stream, sleep_first, NULL) != cudaSuccess ||
        cudaMemcpyAsync(tensor->data, *pinned, bytes, cudaMemcpyHostToDevice, stream) !=
            cudaSuccess)
        abort();
}
#else
int standin_has_device(void)
{
    return 0;
}

void standin_count_calls(uint64_t calls[2])
{
    calls[0] = calls[1] = 0;
}

static void *card_alloc(size_t bytes)
{
    return malloc(bytes);
}

static void card_free(void *data)
{
    free(data);
}

static void card_copy(void *to, const void *from, size_t bytes)
{
    memcpy(to, from, bytes);
}

static void finish(void)
{
}

void standin_enqueue(gg_tensor *tensor, const void *from, size_t bytes)
{
    memcpy(tensor->data, from, bytes);
}
#endif

/* ---- buffers of the card ---- */

static void free_buffer(gg_buffer *buffer)
{
    card_free(buffer->context);
}

static void *base(gg_buffer *buffer)
{
    return buffer->context;
}

static void set_tensor(gg_buffer *buffer, gg_tensor *tensor, const void *from, size_t at,
                       size_t bytes)
{
    (void)buffer;
    card_copy((char *)tensor->data + at, from, bytes);
}

static void get_tensor(gg_buffer *buffer, const gg_tensor *tensor, void *to, size_t at,
                       size_t bytes)
{
    (void)buffer;
    card_copy(to, (const char *)tensor->data + at, bytes);
}

/* By the function that the type has. */
gg_buffer *standin_card_alloc(size_t bytes)
{
    gg_buffer *(*function)(gg_buffer_type *, size_t);
    memcpy(&function, &standin_card_type()->slots[1], sizeof function);
    return function(standin_card_type(), bytes);
}

static gg_buffer *alloc_buffer(gg_buffer_type *type, size_t bytes)
{
    gg_buffer *b = calloc(1, sizeof *b);
    b->iface = (gg_buffer_i){.free_buffer = free_buffer,
                             .base = base,
                             .set_tensor = set_tensor,
                             .get_tensor = get_tensor};
    b->buft = type;
    b->context = card_alloc(bytes);
    b->size = bytes;
    __atomic_fetch_add(&standin_card.allocated, 1, __ATOMIC_RELAXED); /* contexts have threads */
    return b;
}

static size_t alignment(gg_buffer_type *type)
{
    (void)type;
    return ALIGNMENT;
}

/* As ggml-cuda pads rows of some types. */
static size_t alloc_size(gg_buffer_type *type, const gg_tensor *tensor)
{
    (void)type;
    return ggml_nbytes(tensor) + (tensor->type == GG_Q8_0 ? 34 : 0);
}

static gg_registry cuda_registry, other_registry;
static gg_device devices[2] = {{.reg = &cuda_registry}, {.reg = &cuda_registry}};
static gg_buffer_type card_type;

gg_buffer_type *standin_card_type(void)
{
    return &card_type;
}

void standin_cards_reset(void)
{
    gg_buffer *(*make)(gg_buffer_type *, size_t) = alloc_buffer;
    size_t (*align)(gg_buffer_type *) = alignment;
    size_t (*size)(gg_buffer_type *, const gg_tensor *) = alloc_size;
    const uint32_t functions = standin_card.functions;
    finish();
    standin_card = (standin_cards){.functions = functions ? functions : 6};
    memset(&card_type, 0, sizeof card_type);
    memcpy(&card_type.slots[1], &make, sizeof make);
    memcpy(&card_type.slots[place_of_alignment()], &align, sizeof align);
    memcpy(&card_type.slots[place_of_size()], &size, sizeof size);
    card_type.slots[standin_card.functions] = &devices[0];
}

gg_buffer *standin_allocate(gg_buffer_type *type, gg_tensor *const *tensors, int count)
{
    size_t bytes = 0, at[64];
    for (int i = 0; i < count; i++) {
        at[i] = bytes;
        bytes += ggml_backend_buft_get_alloc_size(type, tensors[i]);
        bytes = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    }
    gg_buffer *b = ggml_backend_buft_alloc_buffer(type, bytes);
    for (int i = 0; i < count; i++) {
        tensors[i]->data = (char *)b->iface.base(b) + at[i];
        tensors[i]->buffer = b;
    }
    return b;
}

void ggml_backend_tensor_get(const gg_tensor *tensor, void *to, size_t at, size_t bytes)
{
    tensor->buffer->iface.get_tensor(tensor->buffer, tensor, to, at, bytes);
}

void ggml_backend_tensor_set(gg_tensor *tensor, const void *from, size_t at, size_t bytes)
{
    tensor->buffer->iface.set_tensor(tensor->buffer, tensor, from, at, bytes);
}

/* ---- devices ---- */

size_t ggml_backend_dev_count(void)
{
    return (size_t)standin_card.count + 1;
}

gg_device *ggml_backend_dev_get(size_t index)
{
    return index ? &devices[index - 1] : standin_cpu_device();
}

int ggml_backend_dev_type(gg_device *device)
{
    return device == &devices[0] || device == &devices[1] ? GG_DEVICE_GPU : GG_DEVICE_CPU;
}

const char *ggml_backend_dev_name(gg_device *device)
{
    return ggml_backend_dev_type(device) == GG_DEVICE_GPU ? "CUDA0" : "CPU";
}

gg_buffer_type *ggml_backend_dev_buffer_type(gg_device *device)
{
    (void)device;
    return &card_type;
}

gg_registry *standin_cuda_registry(void)
{
    return standin_card.is_other ? &other_registry : &cuda_registry;
}
