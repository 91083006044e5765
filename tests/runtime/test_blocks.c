/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Pages under the caller's block tables: outputs have the bits of sequences, whatever the ids, the
 * regions and what is resident; a write voids what the device has; mistakes cost a row and no more.
 */

#include "blocks_rig.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const kvf_transfer methods[] = {KVF_TRANSFER_DIRECT, KVF_TRANSFER_MAPPED};

static kvf_blocks_stats stats_of(const rig *r)
{
    kvf_blocks_stats s;
    kvf_blocks_stats_get(r->blocks, &s);
    return s;
}

/* Regions of a pass: any, each once. */
static void deal_regions(rig *r, rig_request *const *list, uint32_t count)
{
    uint32_t taken = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t region;
        do
            region = test_random_below(&r->random, RIG_REQUESTS);
        while (taken >> region & 1);
        taken |= 1u << region;
        list[i]->region = (int32_t)region;
    }
}

static uint32_t room_of(const rig *r, const rig_request *q)
{
    const uint32_t next = q->length < q->prompt ? kvf_min_u32(q->chunk, q->prompt - q->length) : 1;
    return kvf_div_ceil_u32(q->length + next, r->config.block_tokens) - q->ids_count;
}

/* Passes of requests that come, wait, lose their blocks and go, until all are done. */
static void serve(rig *r, int moves_regions)
{
    uint32_t dropped = 0;
    for (uint32_t pass = 0, done = 0; done < r->requests; pass++) {
        rig_request *list[RIG_REQUESTS];
        uint32_t count = 0;
        done = 0;
        for (uint32_t i = 0; i < r->requests; i++) {
            rig_request *q = &r->request[i];
            done += (uint32_t)rig_is_done(q);
            q->region = (int32_t)i;
            if (rig_is_done(q) || test_random_below(&r->random, 4) == 0)
                continue;
            if (q->length && dropped < 3 && test_random_below(&r->random, 30) == 0) {
                rig_drop(r, q); /* preempted: it begins anew, in other blocks */
                dropped++;
                continue;
            }
            if (room_of(r, q) > r->free_count)
                continue;
            rig_grow(r, q, q->length + room_of(r, q) * r->config.block_tokens, 1);
            rig_grow(r, q, q->length + 1, 1);
            list[count++] = q;
        }
        if (moves_regions)
            deal_regions(r, list, count);
        if (count && rig_pass(r, list, count))
            fail_msg("pass %u: %u outputs differ", pass, r->differs);
    }
}

static void bits_are_those_of_sequences(void **state)
{
    static const kvf_select selects[] = {KVF_SELECT_DYNAMIC, KVF_SELECT_FULL, KVF_SELECT_STREAMING};
    static const kvf_dtype dtypes[] = {KVF_FP32, KVF_BF16, KVF_FP16};
    (void)state;
    for (uint32_t i = 0; i < 12; i++) {
        if (!test_takes(i))
            continue;
        const kvf_runtime_config rc = test_runtime_config();
        kvf_blocks_config bc = rig_config();
        rig r;
        bc.cache.select = i < 6 ? KVF_SELECT_DYNAMIC : selects[i % 3];
        bc.cache.transfer = test_transfer(methods[i / 2 % 2]);
        bc.cache.dtype = dtypes[i % 3];
        bc.cache.page_size = 1u << i % 7;
        bc.cache.budget_tokens = 192;
        bc.cache.sink_tokens = (i * 5) % 40;
        bc.block_tokens = i % 2 ? 64 : 128;
        bc.block_count = 24;
        test_seed_print("blocks", 70 + i);
        rig_open(&r, &rc, &bc, 4, 70 + i);
        serve(&r, i % 4 != 3);
        const kvf_blocks_stats s = stats_of(&r);
        assert_true(r.compared > 100);
        assert_int_equal(s.bad_rows, 0);
        assert_int_equal(s.bad_slots, 0);
        assert_true(s.tokens_put > 0 && s.tokens_attended > 0);
        rig_close(&r);
    }
}

/* One request after another, with the same ids in the same region: pages, window and sink of the
 * one lie where those of the other are looked for. Returns how many outputs differ. */
static uint32_t serve_in_turn(uint32_t is_deaf, kvf_transfer transfer, kvf_blocks_stats *stats)
{
    const kvf_runtime_config rc = test_runtime_config();
    kvf_blocks_config bc = rig_config();
    rig r;
    test_seams.is_deaf = is_deaf;
    bc.cache.transfer = test_transfer(transfer);
    rig_open(&r, &rc, &bc, 3, 5);
    for (uint32_t i = 0; i < r.requests; i++) {
        rig_request *q = &r.request[i];
        rig_grow(&r, q, q->count, 0);
        for (uint32_t b = 0; b < q->ids_count; b++)
            q->ids[b] = (int32_t)b;
        while (!rig_is_done(q))
            (void)rig_pass(&r, &q, 1);
    }
    *stats = stats_of(&r);
    const uint32_t differs = r.differs;
    rig_close(&r);
    return differs;
}

static void a_write_voids_what_the_device_has(void **state)
{
    kvf_blocks_stats heard, deaf;
    (void)state;
    for (uint32_t i = 0; i < 2; i++) {
        assert_int_equal(serve_in_turn(0, methods[i], &heard), 0);
        assert_true(heard.pages_voided > 0 && heard.hits > 0);
        assert_true(heard.tokens_brought > 0);
        /* The same without counting writes: stale bytes are taken for true. */
        assert_true(serve_in_turn(1, methods[i], &deaf) > 0);
        assert_true(deaf.pages_voided < heard.pages_voided);
        assert_true(deaf.tokens_brought < heard.tokens_brought);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bits_are_those_of_sequences),
        cmocka_unit_test(a_write_voids_what_the_device_has),
    };
    return cmocka_run_group_tests_name("blocks", tests, NULL, NULL);
}
