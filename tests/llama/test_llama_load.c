/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Loading: an interface that is not known, settings that mean nothing, and what whoever started the
 * process is told. And numbers: conversions and masks against plain loops.
 */

#include <math.h>
#include <unistd.h>

#include "common/convert.h"
#include "common/random.h"
#include "llama_rig.h"

const char *kvferry_llama_plan(const char *settings, const uint32_t *shape, uint64_t *bytes);

/* The line that loading writes to the pipe; "" = none. */
static const char *reported(const char *setting)
{
    static char line[1024];
    int ends[2];
    char number[16];
    assert_int_equal(pipe(ends), 0);
    snprintf(number, sizeof number, "%d", ends[1]);
    setenv("KVFERRY_LLAMA_REPORT", number, 1);
    rig_listen();
    rig_load(setting);
    rig_said();
    if (getenv("KVFERRY_LLAMA_REPORT")) { /* nothing was written */
        unsetenv("KVFERRY_LLAMA_REPORT");
        close(ends[1]);
    }
    const ssize_t n = read(ends[0], line, sizeof line - 1);
    line[n > 0 ? n : 0] = '\0';
    close(ends[0]);
    return line;
}

TEST(an_unknown_interface_is_refused)
{
    const char *const why[STANDIN_FAULTS] = {
        [STANDIN_NO_OPERATION] = "no operation FLASH_ATTN_EXT",
        [STANDIN_TYPES] = "type 1 of this ggml is",
        [STANDIN_TENSOR] = "struct ggml_tensor has another layout",
        [STANDIN_BACKEND] = "struct ggml_backend has another layout",
        [STANDIN_DEVICE] = "struct ggml_backend_device has another layout",
        [STANDIN_BUFFER] = "struct ggml_backend_buffer has another layout",
        [STANDIN_NO_CPU] = "there is no CPU backend"};
    for (int fault = STANDIN_RIGHT + 1; fault < STANDIN_FAULTS; fault++) {
        standin_break((standin_fault)fault);
        rig_listen();
        assert_null(rig_load(NULL));
        const char *text = rig_said();
        assert_non_null(strstr(text, why[fault]));
        assert_non_null(strstr(text, "llama.cpp runs on without it"));
        assert_ptr_equal(strchr(text, '\n') + 1, text + strlen(text)); /* one line */
        assert_true(!strncmp(reported(NULL), "refused ", 8));
    }
    standin_break(STANDIN_RIGHT);
}

TEST(a_known_one_is_loaded)
{
    assert_string_equal(reported(NULL), "loaded ggml=0.0.0-standin api=42\n");
    assert_true(kvl_the_plugin()->gg.op.flash_attn == STANDIN_FLASH_ATTN);
    assert_int_equal(rig_load(NULL)->api_version, 42);
    rig_unload();
}

TEST(off_loads_nothing)
{
    assert_string_equal(reported("off"), "off\n");
    assert_null(rig_load("off"));
}

TEST(wrong_settings_are_told)
{
    const char *const cases[][2] = {
        {"budget=0", "budget = 0: must be a whole number from 1 to 67108864, or full"},
        {"budget", "budget: must be name=value, or off alone"},
        {"page=4", "there is no setting page"},
        {"page_size=5", "page_size = 5: must be 1, 2, 4, 8, 16, 32 or 64"},
        {"layers=3", "there is no layers here: llama.cpp and the model decide it"},
        {"pages=k2", "pages = k2: must be"},
        {"log=-1", "log = -1: must be a number from 0"},
        {"rows=0", "rows = 0: must be a whole number from 1 to 512"},
        {"prompts=mine", "prompts = mine: must be auto, llama or kvferry"},
        {"copies=three", "copies = three: must be auto, one or two"},
        {"budget=64 local=64", "budget_tokens = 64"},
        {"select=quest", "select"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *text = kvferry_llama_plan(cases[i][0], NULL, NULL);
        assert_non_null(text);
        if (!strstr(text, cases[i][1]))
            fail_msg("%s: %s", cases[i][0], text);
        assert_true(!strncmp(reported(cases[i][0]), "refused KVFERRY_LLAMA: ", 23));
    }
    assert_null(kvferry_llama_plan(NULL, NULL, NULL));
    assert_null(kvferry_llama_plan(
        "budget=2048 pages=native device_memory=4GiB host_memory=48GiB log=10s verify=64", NULL,
        NULL));
    assert_null(kvferry_llama_plan("budget=full, pages=k8v4, rows=64, threads=3", NULL, NULL));
}

TEST(plans_keep_what_is_said)
{
    enum { HOST, DEVICE, CODES, OWN, BLOCKS, SUMS };
    uint32_t shape[] = {4, 4, 2, 64, 64, 4096, 1};
    uint64_t all[SUMS], few[SUMS];
    assert_null(kvferry_llama_plan("budget=full", shape, all));
    assert_true(all[HOST] > UINT64_C(4096) * 4 * 2 * 64 * 2 * 2);
    assert_null(kvferry_llama_plan("budget=full host_memory=3MiB", shape, few));
    assert_true(few[HOST] <= 3u << 20 && few[HOST] > 2u << 20);
    assert_true(few[BLOCKS] < all[BLOCKS] && few[CODES] < all[CODES]);
    /* A small cache has few spare blocks. */
    shape[5] = 512;
    assert_null(kvferry_llama_plan("budget=full", shape, few));
    assert_true(few[BLOCKS] <= 5 * shape[5] / 32 / 2);
    assert_non_null(strstr(kvferry_llama_plan("budget=0", shape, few), "budget"));
    shape[3] = 7;
    assert_non_null(strstr(kvferry_llama_plan("budget=full", shape, few), "head_dim"));
}

/* Rows as the library gets them: numbers of the cell, exactly, and told if F16 has them not. */
TEST(rows_are_those_of_plain_conversions)
{
    enum { COUNT = 64 };
    uint64_t random = 3;
    for (int turn = 0; turn < 3000; turn++) {
        uint16_t halves[COUNT], same[COUNT];
        char blocks[2 * 34];
        float out[COUNT], own[COUNT];
        const int type = turn % 2 ? GG_BF16 : GG_Q8_0;
        int fits = 1;
        for (size_t i = 0; i < COUNT; i++) {
            const uint32_t bits = (uint32_t)kvf_random_next(&random);
            halves[i] = (uint16_t)bits;
            blocks[2 + i / 32 * 34 + i % 32] = (char)(bits >> 24);
        }
        memcpy(blocks, halves, 2), memcpy(blocks + 34, halves + 1, 2);
        for (size_t i = 0; i < COUNT; i++) {
            own[i] = type == GG_BF16 ? kvf_bf16_to_float(halves[i])
                                     : kvf_fp16_to_float(halves[i / 32]) *
                                           (float)(int8_t)blocks[2 + i / 32 * 34 + i % 32];
            fits &= !(isinf(kvf_fp16_to_float(kvf_fp16_from_float(own[i]))) && isfinite(own[i]));
        }
        assert_int_equal(
            kvl_row_read(type, type == GG_BF16 ? (void *)halves : blocks, out, 1, COUNT), fits);
        assert_int_equal(kvl_fits_f16(own, COUNT), fits);
        assert_memory_equal(out, own, sizeof own);
        assert_true(kvl_row_read(GG_F16, halves, same, 0, COUNT));
        assert_memory_equal(same, halves, sizeof same);
    }
}

TEST(masks_are_sets)
{
    enum { CELLS = 320 };
    uint64_t random = 5, set[CELLS / 64] = {0}, own[CELLS / 64];
    uint16_t mask[CELLS];
    for (int turn = 0; turn < 500; turn++) {
        int64_t open = 0;
        memset(own, 0, sizeof own);
        for (uint32_t i = 0; i < CELLS; i++) {
            const int is_open = kvf_random_below(&random, 3) == 0;
            mask[i] = is_open ? 0 : 0xfc00;
            own[i / 64] |= (uint64_t)is_open << i % 64;
            open += is_open;
        }
        int same;
        assert_int_equal(kvl_open_cells(mask, CELLS, set, &same), open);
        assert_memory_equal(set, own, sizeof own);
        assert_false(same);
        assert_int_equal(kvl_open_cells(mask, CELLS, set, &same), open);
        assert_true(same);
        mask[kvf_random_below(&random, CELLS)] = turn % 2 ? 0x8000 : 0x3c00;
        assert_int_equal(kvl_open_cells(mask, CELLS, set, &same), -1);
    }
}
