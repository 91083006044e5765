/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_CHECK_BENCH_H
#define KVF_TESTS_CHECK_BENCH_H

/*
 * Shape and size of the timed layers, and how a launch is timed and told.
 *
 * Knows nothing of single kernels.
 */

#include "check_support.h"

#define BENCH_HEADS      8u
#define BENCH_GROUP      4u
#define BENCH_HEAD_DIM   128u
#define BENCH_PAGE       4u
#define BENCH_BLOCK      32u
#define BENCH_SINK_PAGES 1u
#define BENCH_WINDOW     64u /* tokens, two blocks */
#define BENCH_ROWS_MAX   32u

/* The least cost of a launch. */
typedef struct bench_cost {
    double bytes, link_bytes, operations;
} bench_cost;

typedef struct bench {
    check *c;
    FILE *json;
    uint32_t written; /* figures in it */
    check_rates rates;
    uint32_t rows, tokens, pages, blocks; /* of a row */
    uint32_t prompt, chunk;               /* tokens before a chunk, and in it */
    uint32_t times;
    bool is_small;
    double reference_ns; /* of the last launch, on a core; else 0 */
    kvf_paging paging;
} bench;

void *bench_zeros(check *c, size_t bytes);
/* Random bf16, the same ones every 64K. */
void *bench_numbers(check *c, size_t count);

/* Launches of one graph, on the CUDA device; figures are those of a part of it, of `parts`. */
void bench_time_graph(bench *b, const char *title, const check_launch *launches, uint32_t count,
                      uint32_t parts, uint32_t batch, const bench_cost *k);

/* ---- pages under block tables ---- */

typedef struct bench_tables bench_tables;

/* The same layers again, under block tables of the caller, on the CUDA device: `codes` is memory
 * for their codes, and pages are `home_blocks` blocks of the host's, named again and again. */
typedef struct bench_layers_data {
    void *codes;
    char *home;
    uint32_t home_blocks;
    const char *q, *k, *v;            /* of a step: [rows, heads, head_dim] */
    const char *chunk_kv;             /* of a chunk: [chunk, KV heads, head_dim] */
    char *slots;                      /* [KV heads, slots] pages */
    char *out;                        /* [rows, query heads, head_dim] */
    kvf_score_codes_args score_codes; /* of all rows */
} bench_layers_data;
bench_tables *bench_tables_make(bench *b, const bench_layers_data *data);
/* Kernels of a step, and of a chunk; op NULL: all. */
void bench_tables_time(bench *b, bench_tables *t, const char *op, uint32_t batch);
void bench_tables_time_chunk(bench *b, bench_tables *t, const char *op);
/* After all of that: rows were good, and each launch that had something new brought it. */
void bench_tables_look(bench *b, const bench_tables *t);

#endif
