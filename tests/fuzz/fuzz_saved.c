/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Bytes become changes of a saved sequence, with checksums that are made right again or not, and
 * the file is restored: refused with a status and a text, or a sequence that takes a step.
 *
 * A file with right checksums may hold any numbers, so this is what stands between a file and
 * memory. Looks inside: only the library can make checksums.
 */

#include "fuzz_heap.h"
#include "fuzz_input.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "extents.h"
#include "saved_format.h"
#include "saving.h"

enum { TOKENS = 70, HEAD_DIM = 16, CHANGES_MAX = 64, EXTENT = 4096 };

static struct {
    kvf_runtime *runtime;
    kvf_stream *stream;
    kvf_cache *cache;
    uint8_t *good[2]; /* the files that are changed: of usual attention parameters, and of others */
    size_t bytes[2];
    char path[64]; /* of memory that is a file */
    int file;
} world;

static kvf_cache_config settings(void)
{
    kvf_cache_config c;
    kvf_cache_config_init(&c);
    kvf_cache_config_preset(&c, KVF_PRESET_PRKV);
    c.refresh = KVF_REFRESH_RESIDENT;
    c.sink_tokens = 4;
    c.layers = 2;
    c.query_heads = c.kv_heads = 1;
    c.head_dim = HEAD_DIM;
    c.dtype = KVF_FP32;
    c.tokens_max = 128;
    c.sequences_max = 2;
    c.page_size = 8;
    c.local_tokens = 8;
    c.budget_tokens = 80;
    return c;
}

static void step(kvf_sequence *s)
{
    static float row[HEAD_DIM], out[HEAD_DIM];
    for (uint32_t layer = 0; layer < 2; layer++) {
        const kvf_decode_args args = {
            .layer = layer, .batch = 1, .sequences = &s, .q = row, .k = row, .v = row, .out = out};
        const kvf_status status = kvf_decode(world.cache, &args, world.stream);
        fuzz_require(status == KVF_OK || status == KVF_FULL || status == KVF_INVALID);
    }
    fuzz_require(kvf_stream_wait(world.stream) == KVF_OK);
}

/* For every layer, or the usual ones. */
static void give_params(uint32_t has_params)
{
    static const float sinks[] = {1.0f};
    kvf_attention_params params;
    kvf_attention_params_init(&params);
    if (has_params)
        params.scale = 0.5f, params.soft_cap = 30.0f, params.sinks = sinks;
    for (uint32_t layer = 0; layer < 2; layer++)
        fuzz_require(kvf_cache_attention_params(world.cache, layer, &params) == KVF_OK);
}

static void make_good(uint32_t has_params)
{
    static float rows[TOKENS * HEAD_DIM];
    kvf_sequence *s = NULL;
    kvf_save *save = NULL;
    kvf_save_args args;
    char name[] = "/tmp/kvf-fuzz-XXXXXX";
    const int file = mkstemp(name);
    give_params(has_params);
    fuzz_require(file >= 0 && kvf_sequence_create(world.cache, &s) == KVF_OK);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        rows[i] = (float)(i % 23) - 11.0f;
    for (uint32_t layer = 0; layer < 2; layer++)
        fuzz_require(
            kvf_prefill(world.cache,
                        &(kvf_prefill_args){
                            .sequence = s, .layer = layer, .tokens = TOKENS, .k = rows, .v = rows},
                        world.stream) == KVF_OK);
    step(s);
    kvf_save_args_init(&args);
    args.sequence = s;
    args.path = name;
    args.note = "note";
    args.note_bytes = 4;
    fuzz_require(kvf_sequence_save(world.cache, &args, world.stream, &save) == KVF_OK);
    fuzz_require(kvf_save_finish(save, NULL) == KVF_OK);
    kvf_sequence_destroy(s);
    close(file);
    FILE *in = fopen(name, "rb");
    uint8_t *good = world.good[has_params] = malloc(1 << 20);
    fuzz_require(in && good);
    const size_t bytes = world.bytes[has_params] = fread(good, 1, 1 << 20, in);
    fuzz_require(bytes > 0 && bytes < 1 << 20);
    fclose(in);
    unlink(name);
}

static void open_world(void)
{
    const kvf_cache_config c = settings();
    const kvf_runtime_test_hooks test_hooks = {.extent_bytes = EXTENT, .io_engine = &kvf_io_plain};
    kvf_runtime_config rc;
    kvf_runtime_config_init(&rc);
    rc.device = KVF_DEVICE_HOST;
    rc.threads = 1;
    rc.huge_pages = KVF_HUGE_PAGES_OFF;
    rc.allow_unpinned = 1;
    fuzz_require(kvf_runtime_open_with(&rc, &test_hooks, &world.runtime, NULL) == KVF_OK);
    fuzz_require(kvf_stream_create(world.runtime, &world.stream) == KVF_OK);
    fuzz_require(kvf_cache_open(world.runtime, &c, &world.cache, NULL) == KVF_OK);
    for (uint32_t has_params = 0; has_params < 2; has_params++)
        make_good(has_params);
    world.file = memfd_create("saved", 0);
    fuzz_require(world.file >= 0);
    snprintf(world.path, sizeof world.path, "/proc/self/fd/%d", world.file);
}

/* Checksums of what the header says, as far as the bytes go. */
static void mend(uint8_t *data, size_t bytes)
{
    kvf_saved_header h;
    kvf_saved_head head;
    if (bytes < sizeof head)
        return;
    memcpy(&head, data, sizeof head);
    if (head.extent_bytes == 0 || head.header_bytes > bytes ||
        head.header_bytes < KVF_SAVED_HEAD_ALIGN || head.layers > 1024 || head.kv_heads > 1024)
        return;
    const uint64_t rest = bytes - head.header_bytes;
    const uint64_t extents = kvf_extent_count(rest, head.extent_bytes);
    const uint64_t header_bytes = head.header_bytes;
    kvf_saved_carve_header(&head, extents, (char *)data, &h);
    if (head.header_bytes == header_bytes)
        for (uint64_t i = 0; i < extents; i++) {
            const uint64_t at = i * head.extent_bytes;
            h.checksums[i] = kvf_checksum_of(
                data + header_bytes + at,
                (size_t)(rest - at < head.extent_bytes ? rest - at : head.extent_bytes));
        }
    h.head = (kvf_saved_head *)(void *)data;
    if (h.head->byte_order == 0x01020304)
        kvf_saved_seal_header(&h);
}

static void restore(uint32_t exact)
{
    kvf_restore_args args;
    kvf_sequence *s = NULL;
    kvf_error error;
    kvf_saved saved;
    kvf_restore_args_init(&args);
    args.path = world.path;
    args.exact = exact;
    const uint32_t free_before = world.cache->kv_groups[0].pool.free_count;
    const kvf_status read = kvf_saved_read(world.runtime, world.path, 1, &saved, NULL, 0, &error);
    fuzz_require(read == KVF_OK || error.text[0]);
    const kvf_status status = kvf_sequence_restore(world.cache, &args, world.stream, &s);
    fuzz_require((status == KVF_OK) == (s != NULL));
    fuzz_require(status != KVF_OK || read == KVF_OK);
    if (s) {
        step(s);
        kvf_sequence_destroy(s);
    }
    fuzz_require(world.cache->broken == KVF_OK);
    fuzz_require(world.cache->kv_groups[0].pool.free_count == free_before);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fuzz_input in = {data, size};
    if (!world.runtime)
        open_world();
    const uint32_t how = fuzz_range(&in, 0, 255);
    const uint32_t has_params = how >> 3 & 1;
    const size_t whole = world.bytes[has_params];
    const size_t bytes = how & 4 ? whole - fuzz_range(&in, 0, 255) : whole;
    uint8_t *file = malloc(whole);
    fuzz_require(file != NULL);
    memcpy(file, world.good[has_params], whole);
    give_params(has_params);
    for (uint32_t i = 0; i < CHANGES_MAX && !fuzz_is_empty(&in); i++) {
        /* Most numbers are in the header and in front of the pages. */
        const size_t high = fuzz_range(&in, 0, 255), low = fuzz_range(&in, 0, 255);
        file[(high << 8 | low) % whole] = (uint8_t)fuzz_range(&in, 0, 255);
    }
    if (how & 1)
        mend(file, bytes);
    fuzz_require(ftruncate(world.file, 0) == 0);
    fuzz_require(pwrite(world.file, file, bytes, 0) == (ssize_t)bytes);
    free(file);
    restore(how >> 1 & 1);
    return 0;
}
