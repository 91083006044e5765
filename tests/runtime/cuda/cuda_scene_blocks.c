/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Pages under block tables of the caller, as scenes: a prompt, steps and a copy; the same in
 * captures of the caller. See cuda_scenes.h.
 */

#include "cuda_scenes.h"

#include <cuda_runtime_api.h>

#include <kvferry/blocks.h>

#define BLOCKS       4u
#define BLOCK_TOKENS 32u

/* An engine's arrays on the device: lengths[i] is i. Codes of all layers follow. */
typedef struct block_arrays {
    int64_t slots[TOKENS];
    int32_t tables[2][2]; /* before and after the copy of a block */
    int32_t lengths[TOKENS + 1];
} block_arrays;

#define CODES_AT ((sizeof(block_arrays) + 255) / 256 * 256)

static block_arrays make_arrays(void)
{
    block_arrays a = {.tables = {{2, 0}, {2, 3}}};
    for (uint32_t i = 0; i < TOKENS; i++) {
        a.slots[i] = a.tables[0][i / BLOCK_TOKENS] * (int64_t)BLOCK_TOKENS + i % BLOCK_TOKENS;
        a.lengths[i + 1] = (int32_t)(i + 1);
    }
    return a;
}

static kvf_status open_blocks(stage *st, const scene *s, kvf_stream *stream, kvf_blocks **out,
                              char **memory)
{
    const block_arrays arrays = make_arrays();
    void *device = NULL;
    kvf_blocks_config bc;
    kvf_error error;
    kvf_blocks_config_init(&bc);
    bc.cache = stage_small_config();
    test_set(&bc.cache,
             "transfer=mapped local_tokens=1 select=dynamic static_ratio=0 digest=codes");
    test_set(&bc.cache, s->settings);
    bc.block_count = BLOCKS;
    kvf_status status = kvf_blocks_open(st->runtime, &bc, out, &error);
    if (status != KVF_OK)
        return status;
    const size_t layer = BLOCKS * kvf_blocks_memory(*out)->code_bytes;
    status = kvf_memory_alloc(st->runtime, CODES_AT + LAYERS * layer, &device);
    *memory = device;
    if (status == KVF_OK)
        status = kvf_memory_copy(stream, *memory, &arrays, sizeof arrays);
    for (uint32_t l = 0; l < LAYERS && status == KVF_OK; l++)
        status = kvf_blocks_bind(*out, l, *memory + CODES_AT + l * layer, layer / BLOCKS);
    return status;
}

/* Tokens first .. end - 1 of a layer, and their queries: a chunk, or a step. */
static kvf_status pass_blocks(stage *st, kvf_blocks *blocks, char *memory, uint32_t layer,
                              uint32_t first, uint32_t end, kvf_stream *stream)
{
    block_arrays *a = (block_arrays *)(void *)memory;
    const uint32_t starts[] = {0, end - first};
    const float *q = stage_token(st->q, HEADS, layer, first);
    const kvf_blocks_put_args put = {.layer = layer,
                                     .tokens = end - first,
                                     .k = stage_token(st->k, KV_HEADS, layer, first),
                                     .v = stage_token(st->v, KV_HEADS, layer, first),
                                     .slots = a->slots + first};
    const kvf_blocks_rows rows = {.rows = 1,
                                  .table_stride = 2,
                                  .table = a->tables[first > PROMPT],
                                  .lengths = a->lengths + end};
    const kvf_blocks_decode_args step = {.layer = layer, .rows = &rows, .q = q, .out = st->out};
    const kvf_blocks_extend_args chunk = {.layer = layer,
                                          .rows = &rows,
                                          .starts = starts,
                                          .contexts = &first,
                                          .q = q,
                                          .out = st->out};
    kvf_status status = kvf_blocks_put(blocks, &put, stream);
    if (status == KVF_OK && end - first > 1)
        status = kvf_blocks_extend(blocks, &chunk, stream);
    else if (status == KVF_OK)
        status = kvf_blocks_decode(blocks, &step, stream);
    return status;
}

/* The same in a capture of the caller's, in the mode in which whole programs may do least. */
static kvf_status capture_pass(stage *st, kvf_blocks *blocks, char *memory, uint32_t layer,
                               uint32_t first, uint32_t end, kvf_stream *stream)
{
    const cudaStream_t native = kvf_stream_native(stream);
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    assert_int_equal(cudaStreamBeginCapture(native, cudaStreamCaptureModeGlobal), cudaSuccess);
    const kvf_status status = pass_blocks(st, blocks, memory, layer, first, end, stream);
    if (st->meanwhile)
        st->meanwhile(st);
    assert_int_equal(cudaStreamEndCapture(native, &graph), cudaSuccess);
    assert_int_equal(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
    assert_int_equal(cudaGraphLaunch(exec, native), cudaSuccess);
    assert_int_equal(cudaGraphExecDestroy(exec), cudaSuccess);
    assert_int_equal(cudaGraphDestroy(graph), cudaSuccess);
    return status;
}

/* A block onto another: what is the library's, and codes. */
static kvf_status copy_block(kvf_blocks *blocks, char *memory, kvf_stream *stream)
{
    const uint32_t from = 0, to = 3;
    const size_t bytes = kvf_blocks_memory(blocks)->code_bytes;
    kvf_status status = kvf_blocks_copy(blocks, &from, &to, 1, stream);
    for (uint32_t l = 0; l < LAYERS && status == KVF_OK; l++) {
        char *base = memory + CODES_AT + l * BLOCKS * bytes;
        status = kvf_memory_copy(stream, base + to * bytes, base + from * bytes, bytes);
    }
    return status;
}

/* The newest token of the last layer; exact pages give what was put. */
static kvf_status read_back(const stage *st, const scene *s, kvf_blocks *blocks, kvf_stream *stream)
{
    enum { NEWEST = PROMPT + 1, FLOATS = KV_HEADS * DIM };
    const block_arrays a = make_arrays();
    static float put[2][FLOATS]; /* a copy may come late where a wait fails */
    float got[2][FLOATS];
    const kvf_blocks_get_args args = {.layer = LAYERS - 1,
                                      .tokens = 1,
                                      .k = got[0],
                                      .v = got[1],
                                      .slots = a.slots + NEWEST,
                                      .fp32 = 1};
    kvf_status status = kvf_memory_copy(
        stream, put[0], stage_token(st->k, KV_HEADS, LAYERS - 1, NEWEST), sizeof put[0]);
    if (status == KVF_OK)
        status = kvf_memory_copy(stream, put[1], stage_token(st->v, KV_HEADS, LAYERS - 1, NEWEST),
                                 sizeof put[1]);
    if (status == KVF_OK)
        status = kvf_blocks_get(blocks, &args, stream);
    if (status == KVF_OK && s != &quantized_blocks_scene)
        assert_memory_equal(got, put, sizeof put);
    return status;
}

/* A prompt, and steps before and after the copy of its last block. */
static kvf_status play_blocks(stage *st, const scene *s, float *out)
{
    static const uint32_t ends[] = {0, PROMPT, PROMPT + 1};
    kvf_status (*const pass)(stage *, kvf_blocks *, char *, uint32_t, uint32_t, uint32_t,
                             kvf_stream *) =
        s == &captured_blocks_scene ? capture_pass : pass_blocks;
    kvf_stream *stream = NULL;
    kvf_blocks *blocks = NULL;
    char *memory = NULL;
    kvf_status status = stage_stream(st, &stream);
    if (status == KVF_OK)
        status = open_blocks(st, s, stream, &blocks, &memory);
    for (uint32_t i = 0; i < 2; i++)
        for (uint32_t l = 0; l < LAYERS && status == KVF_OK; l++)
            status = pass(st, blocks, memory, l, ends[i], ends[i + 1], stream);
    if (status == KVF_OK)
        status = copy_block(blocks, memory, stream);
    for (uint32_t l = 0; l < LAYERS && status == KVF_OK; l++)
        status = pass(st, blocks, memory, l, PROMPT + 1, PROMPT + 2, stream);
    if (status == KVF_OK)
        status = kvf_memory_copy(stream, out, st->out, OUT_FLOATS * sizeof *out);
    if (status == KVF_OK)
        status = read_back(st, s, blocks, stream);
    if (stream) {
        const kvf_status waited = kvf_stream_wait(stream);
        status = status == KVF_OK ? waited : status;
    }
    kvf_stream_destroy(stream);
    kvf_blocks_close(blocks);
    kvf_memory_free(st->runtime, memory);
    return status;
}

const scene quantized_blocks_scene = {"quantized blocks", "pages=k8v4 dtype=bf16",
                                      .play = play_blocks};
const scene blocks_scene = {"blocks", "", .play = play_blocks};
const scene captured_blocks_scene = {"blocks in captures", "", .play = play_blocks};
