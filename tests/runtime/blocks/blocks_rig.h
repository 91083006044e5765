/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_RUNTIME_BLOCKS_RIG_H
#define KVF_TESTS_RUNTIME_BLOCKS_RIG_H

/*
 * A small engine over kvferry/blocks.h: requests with block tables, chunks and steps in one pass,
 * and what kvf_prefill and kvf_decode of a sequence give for the same tokens.
 *
 * The engine gives ids and regions away as the test says. Every output is compared bit for bit.
 */

#include <kvferry/blocks.h>

#include "device.h"
#include "harness.h"

#define RIG_LAYERS   2u
#define RIG_REQUESTS 6u
#define RIG_TOKENS   400u /* most of a request */
#define RIG_GIVEN    40u  /* entries of a list that is given */

typedef enum rig_form { RIG_NOTHING, RIG_IDS, RIG_SCORES } rig_form;

/* A request, and what its sequence gave. */
typedef struct rig_request {
    test_tokens tokens;
    uint32_t prompt, count, chunk; /* tokens of the prompt, in all, of a chunk */
    char *out;                     /* [layers, count, query_heads, head_dim] */
    float *lse;                    /* [layers, count, query_heads], of steps */
    /* and where it is */
    uint32_t length; /* tokens put so far */
    int32_t region;  /* of the pass */
    uint32_t ids_count;
    int32_t *ids;
} rig_request;

typedef struct rig {
    kvf_runtime *runtime;
    kvf_stream *stream;
    kvf_blocks *blocks;
    kvf_blocks_config config;
    test_random random;
    uint32_t requests;
    rig_request request[RIG_REQUESTS];
    uint32_t free_count;
    int32_t *free_ids;
    char *codes; /* [layers, blocks, stride] */
    size_t stride;
    uint32_t table_stride;
    int captures; /* 1: steps of a layer are recorded once, and replayed */
    kvf_graph *graphs[RIG_LAYERS];
    uint32_t replays;
    /* of a pass; chunks lie after the rows of all steps where those are captured */
    test_rows rows; /* [tokens of a pass] */
    void *given; /* [RIG_REQUESTS, kv_heads, RIG_GIVEN] ids or scores, where steps are given them */
    rig_form form;
    int64_t *slots;
    int32_t *table, *lengths, *regions;
    uint32_t differs; /* outputs that were not the sequence's */
    uint32_t compared;
    int records; /* 1: outputs take the place of the sequence's */
} rig;

/* In rigs opened from now on, steps are given this, which follows from layer and length. */
extern rig_form rig_gives;

/* Settings of the reference are those of `bc->cache`. Requests run through sequences first. */
void rig_open(rig *r, const kvf_runtime_config *rc, const kvf_blocks_config *bc, uint32_t requests,
              uint64_t seed);
/* Other blocks, which hold nothing yet, with so much of the device. */
void rig_open_again(rig *r, uint64_t device_bytes);
void rig_close(rig *r);

/* Where pages are quantized, tokens are such that quantization does not change them. Now they are
 * any, and sequences have not given their outputs. */
void rig_take_any_tokens(rig *r, uint64_t seed);

/* A small geometry with codes: 2 layers, 2 KV heads, group 2, pages of 8, blocks of 32. */
kvf_blocks_config rig_config(void);

/* Ids until `length` tokens have a place: any free ones, or the lowest. */
void rig_grow(rig *r, rig_request *q, uint32_t length, int shuffled);
/* Its ids are free; it begins anew. */
void rig_drop(rig *r, rig_request *q);

/* One pass: the next chunk or the next token of every request in `list`, whose regions are set.
 * Returns how many outputs differ from the sequences'. */
uint32_t rig_pass(rig *r, rig_request *const *list, uint32_t count);
/* Tokens below `length` once more, without queries, as an engine that has dropped their blocks. */
void rig_put(rig *r, rig_request *q, uint32_t first, uint32_t end);
int rig_is_done(const rig_request *q);
/* Passes of requests that come, wait, lose their blocks and go, until all are done. */
void rig_serve(rig *r, int moves_regions);

/* [layers, kv_heads] */
extern const uint8_t rig_kinds[4], rig_all_kinds[4];
extern const uint32_t rig_windows[RIG_LAYERS]; /* for rig_all_kinds */
/* Segments of 64 tokens, of which coarse heads rank up to five and take one or two. */
kvf_blocks_config rig_coarse_config(void);

/* Two requests whose tokens are put. */
void rig_open_two(rig *r);
void rig_open_two_of(rig *r, kvf_blocks_config bc);
/* The last token of the first two requests, which are put; row 0 is the first. */
kvf_blocks_rows rig_last_tokens(rig *r);
/* Calls that succeed; a step is of r->rows.q, to its out and lse. */
void rig_decode(rig *r, uint32_t layer, const kvf_blocks_rows *rows);
void rig_extend(rig *r, const kvf_blocks_extend_args *args);
/* Decodes; `bad` has a bit per row that must be NaN, and the others are the sequences'. */
void rig_expect_rows(rig *r, const kvf_blocks_rows *rows, uint32_t bad);
/* Bytes of the queries of a token. */
kvf_blocks_stats rig_stats(const rig *r);

#endif
