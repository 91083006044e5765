/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The pool of the link bench: what its bytes are, and which pages a case takes.
 *
 * Every 8 bytes are a function of their offset in the pool, so any page of any size can be compared
 * with what it should be. Knows nothing of how pages travel.
 */

#include <math.h>
#include <string.h>

#include "common/random.h"
#include "link_rig.h"

#define MIB ((size_t)1 << 20)

void kvf_link_pool_drop(kvf_link *bench)
{
    kvf_host_memory_destroy(bench->device->context, &bench->pool);
    bench->pool = (kvf_host_memory){0};
    bench->pool_bytes = 0;
}

static void fill(kvf_link *bench)
{
    uint64_t offset = 0;
    for (uint32_t i = 0; i < bench->pool.arena_count; i++) {
        uint64_t *words = (uint64_t *)(void *)bench->pool.arenas[i].host;
        const size_t count = bench->pool.arenas[i].bytes / 8;
        for (size_t w = 0; w < count; w++)
            words[w] = kvf_link_word(offset + w * 8);
        offset += count * 8;
    }
}

kvf_status kvf_link_pool_make(kvf_link *bench, const kvf_link_case *c)
{
    const int32_t node = c->numa_node >= 0 ? c->numa_node : bench->config.memory.node;
    const uint64_t bytes = kvf_round_up(c->pool_bytes, MIB);
    if (bench->pool_bytes == bytes && bench->pool_node == node &&
        bench->pool_huge_pages == c->huge_pages)
        return KVF_OK;
    kvf_link_pool_drop(bench);
    kvf_host_memory_config memory = bench->config.memory;
    memory.bytes = bytes;
    memory.granule = MIB;
    memory.node = node;
    memory.huge_pages = c->huge_pages;
    KVF_TRY(kvf_host_memory_create(bench->device->context, bench->device, &memory, &bench->pool));
    bench->pool_bytes = bytes;
    bench->pool_node = node;
    bench->pool_huge_pages = c->huge_pages;
    fill(bench);
    return KVF_OK;
}

/* Every arena holds whole pages only; all but the last one are of the same size. */
static uint64_t pages_of_arena(const kvf_link *bench, size_t page_bytes)
{
    return bench->pool.arenas[0].bytes / page_bytes;
}

uint64_t kvf_link_pool_pages(const kvf_link *bench, size_t page_bytes)
{
    const kvf_host_memory *pool = &bench->pool;
    return (pool->arena_count - 1) * pages_of_arena(bench, page_bytes) +
           pool->arenas[pool->arena_count - 1].bytes / page_bytes;
}

char *kvf_link_page_host(const kvf_link *bench, size_t page_bytes, uint32_t id)
{
    const uint64_t per_arena = pages_of_arena(bench, page_bytes);
    return bench->pool.arenas[id / per_arena].host + id % per_arena * page_bytes;
}

char *kvf_link_page_device(const kvf_link *bench, size_t page_bytes, uint32_t id)
{
    const uint64_t per_arena = pages_of_arena(bench, page_bytes);
    return bench->pool.arenas[id / per_arena].device + id % per_arena * page_bytes;
}

uint64_t kvf_link_page_offset(const kvf_link *bench, size_t page_bytes, uint32_t id)
{
    const uint64_t per_arena = pages_of_arena(bench, page_bytes);
    return id / per_arena * bench->pool.arenas[0].bytes + id % per_arena * page_bytes;
}

bool kvf_link_is_right(const char *bytes, uint64_t offset, size_t count)
{
    for (size_t i = 0; i < count; i += 8) {
        uint64_t word;
        memcpy(&word, bytes + i, sizeof word);
        if (word != kvf_link_word(offset + i))
            return false;
    }
    return true;
}

/* ---- which pages ---- */

/* A permutation of 0 .. count-1 without a table: ranks far apart land far apart. */
static uint32_t spread(uint64_t rank, uint64_t count)
{
    static const uint64_t primes[] = {2654435761u, 2246822519u, 3266489917u};
    for (size_t i = 0; i < sizeof primes / sizeof *primes; i++)
        if (count % primes[i] != 0)
            return (uint32_t)(rank * primes[i] % count);
    return (uint32_t)rank;
}

/* A rank 0 .. count-1 with weight (rank + 1)^-s, by the inverse of the continuous distribution. */
static uint64_t zipf_rank(double s, uint64_t count, double u)
{
    const double n = (double)count + 1;
    double x;
    if (fabs(s - 1) < 1e-6)
        x = exp(u * log(n));
    else
        x = pow(1 + u * (pow(n, 1 - s) - 1), 1 / (1 - s));
    uint64_t rank = x >= 1 ? (uint64_t)x - 1 : 0;
    return rank < count ? rank : count - 1;
}

void kvf_link_choose(const kvf_link_case *c, uint64_t pool_pages, uint64_t *random, uint32_t *ids)
{
    const uint32_t run = kvf_min_u32(c->run_pages, (uint32_t)pool_pages);
    for (uint32_t i = 0; i < c->pages; i++) {
        const uint64_t r = kvf_random_next(random);
        switch (c->pattern) {
        case KVF_LINK_ZIPF:
            ids[i] =
                spread(zipf_rank(c->zipf, pool_pages, (double)(r >> 11) * 0x1p-53), pool_pages);
            break;
        case KVF_LINK_RUNS:
            ids[i] = i % run > 0 ? ids[i - 1] + 1 : (uint32_t)(r % (pool_pages - run + 1));
            break;
        case KVF_LINK_UNIFORM:
        default:
            /* One page of each of `pages` equal parts, the parts in any order: all distinct. */
            {
                const uint64_t part = pool_pages / c->pages;
                ids[i] = (uint32_t)(part * i + r % part);
            }
            break;
        }
    }
    if (c->pattern != KVF_LINK_UNIFORM)
        return;
    for (uint32_t i = c->pages; i-- > 1;) {
        const uint32_t j = (uint32_t)(kvf_random_next(random) % (i + 1)), other = ids[i];
        ids[i] = ids[j];
        ids[j] = other;
    }
}
