/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Everything that offload reserves, with the N-th request refused, for every N: a status that fits
 * what was refused, a message, and no trace.
 */

#include "common/text.h"
#include "offload_rig.h"
#include "page_pool.h"
#include "sweep.h"
#include "transfer.h"

typedef struct everything {
    kvf_context *context;
    kvf_device *device;
    kvf_page_pool pool;
    kvf_residency residency;
    kvf_transfer_engine *engine;
    kvf_stream *stream;
    kvf_event *event;
} everything;

static kvf_status open_all(everything *e, rig_fault *fault, kvf_transfer method)
{
    kvf_allocator allocator = {.alloc = rig_alloc, .free = rig_free, .user = fault};
    KVF_TRY(kvf_context_create(&allocator, NULL, NULL, &e->context));
    e->context->fault = rig_refuse;
    e->context->fault_user = fault;
    kvf_device_config device = {.threads = 3, .isa_mask = KVF_ISA_ALL};
    KVF_TRY(kvf_device_open(e->context, rig_kind(), &device, &e->device));
    kvf_host_memory_config memory = {
        .node = -1, .touch_threads = 2, .arena_bytes_max = 6u << 20, .lower = "bytes"};
    KVF_TRY(kvf_page_pool_create(e->context, e->device, &memory, NULL, 1u << 20, 17, &e->pool));
    const kvf_residency shape = {
        .device = e->device, .heads = 4, .pages = 64, .slots = 32, .slot_bytes = 4096};
    KVF_TRY(kvf_residency_create(&shape, &e->residency));
    kvf_transfer_config transfer = {.method = method,
                                    .page_bytes = 4096,
                                    .pages_max = 64,
                                    .requests_max = 2,
                                    .chunk_bytes = 65536,
                                    .depth = 2,
                                    .gather_threads = 2,
                                    .memory = {.node = -1, .touch_threads = 1},
                                    .pool = &e->pool.memory};
    KVF_TRY(kvf_transfer_open(e->device, &transfer, &e->engine));
    KVF_TRY(e->device->ops->stream_create(e->device, KVF_PRIORITY_LOW, &e->stream));
    return e->device->ops->event_create(e->device, false, &e->event);
}

static void close_all(everything *e)
{
    if (e->context == NULL)
        return;
    if (e->device != NULL) {
        e->device->ops->event_destroy(e->event);
        e->device->ops->stream_destroy(e->stream);
        kvf_transfer_close(e->engine);
        kvf_residency_destroy(&e->residency);
        kvf_page_pool_destroy(&e->pool);
        kvf_device_close(e->device);
    }
    assert_int_equal(e->context->live_blocks, 0);
    assert_int_equal(e->context->live_bytes, 0);
    kvf_context_destroy(e->context);
}

static int fits(const char *refused, kvf_status status)
{
    if (strcmp(refused, "thread") == 0)
        return status == KVF_SYSTEM;
    if (strcmp(refused, "register") == 0)
        return status == KVF_PIN_FAILED;
    if (strcmp(refused, "device memory") == 0)
        return status == KVF_OUT_OF_DEVICE_MEMORY;
    if (strcmp(refused, "alloc") == 0)
        return status == KVF_OUT_OF_MEMORY || status == KVF_OUT_OF_DEVICE_MEMORY;
    if (strcmp(refused, "hugetlb map") == 0)
        return status == KVF_OK;       /* the next tier is taken */
    if (strcmp(refused, "touch") == 0) /* of a hugetlb arena: the next tier is taken */
        return status == KVF_OK || status == KVF_OUT_OF_MEMORY;
    return status == KVF_OUT_OF_MEMORY; /* map, stream, event */
}

static uint64_t run_faults(kvf_transfer method)
{
    const uint32_t step = sweep_step();
    uint64_t failures = 0;
    for (uint64_t n = 1;; n += step) {
        everything e = {0};
        rig_fault fault = {.at = n};
        kvf_status status = open_all(&e, &fault, method);
        if (fault.refused[0] == '\0') {
            RIG_OK(status);
            close_all(&e);
            sweep_tell_step(n - 1, step);
            return failures;
        }
        if (!fits(fault.refused, status))
            fail_msg("request %llu, '%s', refused: %d", (unsigned long long)n, fault.refused,
                     (int)status);
        if (status != KVF_OK && e.context != NULL) {
            kvf_error error;
            kvf_context_error(e.context, &error);
            assert_int_equal(error.status, status);
            assert_true(strlen(error.text) > 10);
        }
        failures += status != KVF_OK;
        close_all(&e);
    }
}

TEST(test_every_refusal)
{
    const kvf_transfer methods[] = {KVF_TRANSFER_DIRECT, KVF_TRANSFER_EACH, KVF_TRANSFER_GATHER,
                                    KVF_TRANSFER_MAPPED, KVF_TRANSFER_BATCH};
    for (size_t i = rig_kind() == KVF_DEVICE_HOST ? 0 : 1; i < 5; i++) { /* a GPU has no direct */
        uint64_t failures = run_faults(methods[i]);
        printf("%s: %llu refusals failed cleanly\n", kvf_transfer_name(methods[i]),
               (unsigned long long)failures);
        assert_true(failures * sweep_step() > 20);
    }
}

/* Three arenas, the register of the last refused: the first two are given back in reverse order. */
TEST(test_rollback_of_arenas)
{
    rig r;
    rig_open(&r, NULL);
    uint64_t before = r.context->live_blocks;
    kvf_host_memory_config config = {.lower = "bytes",
                                     .bytes = 3 * 65536,
                                     .granule = 4096,
                                     .node = -1,
                                     .touch_threads = 1,
                                     .arena_bytes_max = 65536};
    kvf_host_memory memory;
    for (uint64_t n = 1; n <= 3; n++) {
        rig_fault fault = {.at = n, .only = "register"};
        kvf_device_set_fault(r.device, rig_refuse, &fault);
        assert_int_equal(kvf_host_memory_create(r.context, r.device, &config, &memory),
                         KVF_PIN_FAILED);
        assert_int_equal(fault.seen, n);
        assert_int_equal(r.context->live_blocks, before);
        assert_null(memory.arenas);
    }
    rig_close(&r); /* asserts inside that no registration is left */
}

TEST(test_context)
{
    kvf_context *context;
    kvf_allocator half = {.alloc = rig_alloc};
    assert_int_equal(kvf_context_create(&half, NULL, NULL, &context), KVF_INVALID);
    RIG_OK(kvf_context_create(NULL, NULL, NULL, &context));
    assert_null(kvf_alloc(context, SIZE_MAX / 2, 3)); /* overflow */
    char *bytes = kvf_alloc(context, 3, 7);
    assert_int_equal((uintptr_t)bytes % 64, 0);
    for (int i = 0; i < 21; i++)
        assert_int_equal(bytes[i], 0);
    assert_int_equal(context->live_bytes, 21);
    kvf_free(context, bytes);
    kvf_free(context, NULL);
    assert_int_equal(kvf_fail(context, KVF_FULL, 5, "page %d", 9), KVF_FULL);
    kvf_error error;
    kvf_context_error(context, &error);
    assert_string_equal(error.text, "page 9");
    assert_int_equal(error.foreign, 5);
    char text[32];
    assert_string_equal(kvf_bytes_text(999, text), "999 B");
    assert_string_equal(kvf_bytes_text(1536, text), "1.50 KiB");
    assert_string_equal(kvf_bytes_text((uint64_t)16 << 30, text), "16.00 GiB");
    assert_string_equal(kvf_bytes_text(UINT64_MAX, text), "unlimited");
    assert_int_equal(context->live_blocks, 0);
    kvf_context_destroy(context);
    kvf_context_destroy(NULL);

    RIG_OK(kvf_context_create(NULL, NULL, NULL, &context));
    kvf_device *device;
    kvf_device_config config = {.threads = 1};
    assert_int_equal(kvf_device_open(context, (kvf_device_kind)9, &config, &device),
                     KVF_UNSUPPORTED);
    assert_null(device);
    kvf_device_close(NULL);
    assert_int_equal(context->live_blocks, 0);
    kvf_context_destroy(context);
}
