/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Kernels that serve the transfer of pages against their references: publish, move, writeback,
 * drop, frame. Bit for bit.
 *
 * Knows nothing of links and threads: what a host thread may see of a running kernel is for the
 * tests of the offload folder.
 */

#include <string.h>

#include "check_rows.h"

void check_publish(check *c)
{
    for (uint32_t i = 0; i < 24; i++) {
        static const uint32_t counts[] = {0, 1, 31, 32, 300, 700};
        const uint32_t n = counts[i % 6];
        kvf_publish_args a = {.low = i % 4 < 2 ? 0 : 32, .high = 300, .ticket = 77 + i};
        if (!check_begin(c))
            continue;
        a.list_max = i / 6 % 2 ? 700 : 100;
        a.low = i % 4 == 1 ? UINT32_MAX : a.low;
        check_describe(c, "count=%u low=%u high=%u list_max=%u", n, a.low, a.high, a.list_max);
        a.count = check_put(c, &n, sizeof n);
        a.from = check_noise_in(c, n * sizeof *a.from);
        a.to = check_noise_in(c, n * sizeof *a.to);
        a.out_from = check_changed(c, "out_from", a.list_max * sizeof *a.out_from);
        a.out_to = check_changed(c, "out_to", a.list_max * sizeof *a.out_to);
        a.out_count = check_changed(c, "out_count", sizeof *a.out_count);
        a.request = check_put_out(c, &(uint32_t){3}, sizeof(uint32_t));
        a.done = check_put_out(c, &(uint32_t){4}, sizeof(uint32_t));
        check_track(c, "request", a.request, sizeof *a.request);
        check_track(c, "done", a.done, sizeof *a.done);
        CHECK_BOTH(c, publish, &a);
    }
}

static void move_case(check *c, size_t bytes, uint32_t n)
{
    kvf_move_args a = {.bytes = bytes};
    if (!check_begin(c))
        return;
    a.low = check_below(c, 3) ? 0 : check_below(c, n + 2);
    a.high = check_below(c, 3) ? UINT32_MAX : check_below(c, n + 2);
    a.blocks = 1 + check_below(c, 5);
    a.value = (uint32_t)check_random(c);
    check_describe(c, "bytes=%zu count=%u low=%u high=%u blocks=%u", bytes, n, a.low, a.high,
                   a.blocks);
    uint8_t *pages = check_noise_in(c, n * bytes), *slots = check_changed(c, "slots", n * bytes);
    const void **from = check_in(c, n * sizeof *from);
    void **to = check_in(c, n * sizeof *to);
    for (uint32_t i = 0; i < n; i++) {
        from[i] = pages + check_below(c, n) * bytes;
        to[i] = slots + (n - 1 - i) * bytes;
    }
    a.from = from;
    a.to = to;
    a.count = check_put(c, &n, sizeof n);
    a.arrived = check_put_out(c, &(uint32_t){0}, sizeof(uint32_t));
    a.done = check_put_out(c, &(uint32_t){9}, sizeof(uint32_t));
    check_track(c, "arrived", a.arrived, sizeof *a.arrived);
    check_track(c, "done", a.done, sizeof *a.done);
    if (check_below(c, 4) == 0)
        a.done = NULL;
    CHECK_BOTH(c, move, &a);
}

void check_move(check *c)
{
    static const size_t bytes[] = {64, 1024, 4096, 5120, 16384, 16448, 65536};
    static const uint32_t counts[] = {0, 1, 2, 7, 40};
    for (uint32_t i = 0; i < 70; i++)
        move_case(c, bytes[i % 7], counts[i / 7 % 5]);
    /* Rows: several of them are one turn of a warp. */
    static const size_t rows[] = {64, 128, 192, 256, 512, 576, 1024, 2048, 2560};
    static const uint32_t row_counts[] = {1, 3, 8, 31, 65, 300, 1000};
    for (uint32_t i = 0; i < 63; i++)
        move_case(c, rows[i % 9], row_counts[i / 9]);
}

static void writeback_case(check *c)
{
    check_rows w;
    if (!CHECK_ROWS(c, &w, "writeback", .rows = 1 + check_below(c, 3),
                    .blocks_max = 1 + check_below(c, 12), .pool_blocks = 4))
        return;
    const kvf_writeback_args a = {.paging = w.p, .rows = w.rows, .row = w.row};
    const size_t block = kvf_block_bytes(&w.p);
    for (uint32_t b = 0; b < w.rows; b++) {
        kvf_row *row = &w.row[b];
        const uint32_t most = kvf_min_u32(row->sealed, w.p.ring_blocks);
        row->sealed_before = row->sealed - check_below(c, most + 1);
        const uint32_t sealed = row->sealed - row->sealed_before;
        char *pool = check_changed(c, "pool", sealed * block);
        void **blocks = check_in(c, sealed * sizeof *blocks);
        for (uint32_t i = 0; i < sealed; i++)
            blocks[i] = pool + (sealed - 1 - i) * block;
        row->pool = blocks;
    }
    CHECK_BOTH(c, writeback, &a);
}

static void drop_case(check *c)
{
    check_rows w;
    if (!CHECK_ROWS(c, &w, "drop", .rows = 1 + check_below(c, 4), .blocks_max = 12,
                    .pool_blocks = 4))
        return;
    const kvf_drop_args a = {
        .paging = w.p, .rows = w.rows, .sets = check_below(c, 2), .row = w.row};
    for (uint32_t b = 0; b < w.rows; b++) {
        const size_t heads = w.p.kv_heads;
        if (check_below(c, 4) == 0)
            w.row[b].chosen_at = NULL;
        else
            check_track(c, "chosen_at", w.row[b].chosen_at,
                        heads * w.p.pages_max * sizeof(uint32_t));
        check_track(c, "static_count", w.row[b].static_count, heads * sizeof(uint32_t));
        check_track(c, "bits", w.row[b].bits, heads * w.p.blocks_max * sizeof(uint64_t));
    }
    CHECK_BOTH(c, drop, &a);
}

static void frame_case(check *c)
{
    if (!check_begin(c))
        return;
    kvf_frame_args a = {.frames = 1 + check_below(c, 4), .parts = 1 + check_below(c, 5)};
    a.bytes = 16 * (1 + check_below(c, 300));
    check_describe(c, "frame, frames=%u parts=%u bytes=%zu", (unsigned)a.frames, (unsigned)a.parts,
                   (size_t)a.bytes);
    a.from = check_noise_in(c, (size_t)a.frames * a.parts * a.bytes);
    a.to = check_changed(c, "to", (size_t)a.parts * a.bytes);
    a.turns = check_changed(c, "turns", a.parts * sizeof *a.turns);
    for (uint32_t i = 0; i < a.parts; i++)
        a.turns[i] = check_below(c, 100);
    for (uint32_t i = 0; i < 3; i++)
        CHECK_BOTH(c, frame, &a);
}

void check_drop(check *c)
{
    for (uint32_t i = 0; i < 16; i++)
        drop_case(c);
}

void check_recorded(check *c)
{
    for (uint32_t i = 0; i < 16; i++) {
        writeback_case(c);
        frame_case(c);
    }
}
