/* SPDX-License-Identifier: Apache-2.0 */

/*
 * See transfer_rig.h. Knows nothing of methods.
 */

#include "transfer_rig.h"

/* Guards between the slots of even requests; those of odd ones touch, as one copy needs them. */
static size_t slot_stride(const plan *p, uint32_t request)
{
    return p->page_bytes + (request % 2 == 0 ? 64 : 0);
}

size_t plan_region_bytes(const plan *p)
{
    return SLOTS * (p->page_bytes + 64);
}

static size_t slot_at(const plan *p, uint32_t request, uint32_t slot)
{
    return request * plan_region_bytes(p) + slot * slot_stride(p, request);
}

static char *source_host(const bench_memory *m, uint32_t source)
{
    return kvf_page_pool_host(&m->pool, (kvf_block){source});
}

void transfer_open_memory(rig *r, const plan *p, bench_memory *m)
{
    kvf_host_memory_config pool = {.node = -1,
                                   .huge_pages = KVF_HUGE_PAGES_OFF,
                                   .touch_threads = 1,
                                   .arena_bytes_max = 64 * p->page_bytes};
    RIG_OK(
        kvf_page_pool_create(r->context, r->device, &pool, NULL, p->page_bytes, SOURCES, &m->pool));
    m->slots = rig_memory(r, REQUESTS * plan_region_bytes(p));
    m->mirror = rig_shared(r, REQUESTS * plan_region_bytes(p));
    m->device = rig_shared(r, sizeof *m->device);
    for (uint32_t s = 0; s < SOURCES; s++)
        for (size_t b = 0; b < p->page_bytes; b++)
            source_host(m, s)[b] = (char)(s * 131 + b * 7 + (b >> 8));
    rig_set(r, m->slots, GUARD, REQUESTS * plan_region_bytes(p));
}

void plan_make(plan *p, rig_random *random, size_t page_bytes)
{
    const uint32_t special[] = {0, 1, SLOTS, 7, 16, 17};
    p->page_bytes = page_bytes;
    for (uint32_t q = 0; q < REQUESTS; q++) {
        p->count[q] = q < 6 ? special[q] : rig_below(random, SLOTS + 1);
        for (uint32_t i = 0; i < SLOTS; i++) {
            p->source[q][i] = rig_below(random, SOURCES);
            p->slot[q][i] = i;
        }
        if (q % 4 == 3) { /* in order but for two */
            p->slot[q][2] = 4;
            p->slot[q][4] = 2;
        }
        if (q % 2 == 0) /* odd requests keep their order */
            for (uint32_t i = SLOTS; i-- > 1;) {
                uint32_t j = rig_below(random, i + 1), other = p->slot[q][j];
                p->slot[q][j] = p->slot[q][i];
                p->slot[q][i] = other;
            }
    }
}

void transfer_write_request(const void *raw, uint32_t task)
{
    const write_args *a = raw;
    const plan *p = a->plan;
    uint32_t q = a->request;
    tables *t = a->memory->device;
    for (uint32_t i = 0; i < p->count[q]; i++) {
        t->from[q][i] = kvf_page_pool_device(&a->memory->pool, (kvf_block){p->source[q][i]});
        t->to[q][i] = a->memory->slots + slot_at(p, q, p->slot[q][i]);
    }
    t->count[q] = p->count[q];
}

static void check_request(const void *raw, uint32_t task)
{
    const check_args *a = raw;
    const plan *p = a->plan;
    const char *mirror = a->memory->mirror;
    uint32_t q = a->request;
    uint8_t is_taken[SLOTS] = {0};
    for (uint32_t i = 0; i < p->count[q]; i++) {
        const char *slot = mirror + slot_at(p, q, p->slot[q][i]);
        is_taken[p->slot[q][i]] = 1;
        if (memcmp(slot, source_host(a->memory, p->source[q][i]), p->page_bytes) != 0)
            atomic_fetch_add(a->wrong, 1);
    }
    for (uint32_t s = 0; s < SLOTS; s++) {
        const unsigned char *slot = (const unsigned char *)mirror + slot_at(p, q, s);
        for (size_t b = is_taken[s] ? p->page_bytes : 0; b < slot_stride(p, q); b++)
            if (slot[b] != GUARD)
                atomic_fetch_add(a->wrong, 1);
    }
    const unsigned char *rest = (const unsigned char *)mirror + slot_at(p, q, SLOTS);
    const unsigned char *end = (const unsigned char *)mirror + (q + 1) * plan_region_bytes(p);
    for (; rest < end; rest++)
        if (*rest != GUARD)
            atomic_fetch_add(a->wrong, 1);
}

void transfer_check(rig *r, const check_args *check, kvf_stream *stream)
{
    const size_t bytes = plan_region_bytes(check->plan), at = check->request * bytes;
    RIG_OK(r->ops->copy(stream, check->memory->mirror + at, check->memory->slots + at, bytes));
    RIG_OK(r->ops->host_call(stream, check_request, check, sizeof *check));
}

void transfer_enqueue(rig *r, kvf_transfer_engine *engine, const plan *p, const bench_memory *m,
                      uint32_t q, kvf_stream *stream, uint32_t *ticket)
{
    write_args write = {p, m, q};
    RIG_OK(r->ops->host_call(stream, transfer_write_request, &write, sizeof write));
    kvf_transfer_request request = {
        .from = m->device->from[q], .to = m->device->to[q], .count = &m->device->count[q]};
    kvf_status status = kvf_transfer_submit(engine, &request, stream, ticket);
    if (status == KVF_BUSY) {
        RIG_OK(kvf_transfer_wait_room(engine));
        status = kvf_transfer_submit(engine, &request, stream, ticket);
    }
    RIG_OK(status);
}

kvf_transfer_config transfer_engine_config(kvf_transfer method, size_t page_bytes)
{
    return (kvf_transfer_config){.method = method,
                                 .page_bytes = page_bytes,
                                 .pages_max = SLOTS,
                                 .requests_max = 4,
                                 .depth = 3,
                                 .gather_threads = 1,
                                 .memory = {.node = -1, .touch_threads = 1}};
}

kvf_transfer_engine *transfer_run(rig *r, kvf_transfer_config *config, const plan *p,
                                  bench_memory *m)
{
    kvf_transfer_engine *engine;
    kvf_stream *const streams[] = {rig_stream(r), rig_stream(r)};
    uint32_t tickets[REQUESTS];
    atomic_uint wrong;
    atomic_init(&wrong, 0);
    transfer_open_memory(r, p, m);
    config->pool = &m->pool.memory;
    RIG_OK(kvf_transfer_open(r->device, config, &engine));
    /* Join two requests later, so that several are in flight, on alternating streams. */
    for (uint32_t q = 0; q < REQUESTS + 2; q++) {
        if (q < REQUESTS)
            transfer_enqueue(r, engine, p, m, q, streams[q % 2], &tickets[q]);
        if (q < 2)
            continue;
        check_args check = {p, m, q - 2, &wrong};
        RIG_OK(kvf_transfer_join(engine, tickets[q - 2], streams[q % 2]));
        transfer_check(r, &check, streams[q % 2]);
    }
    for (uint32_t i = 0; i < 2; i++)
        RIG_OK(r->ops->stream_wait(streams[i]));
    assert_int_equal(atomic_load(&wrong), 0);
    return engine;
}
