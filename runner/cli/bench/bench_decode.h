/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_BENCH_DECODE_H
#define KVF_CLI_BENCH_DECODE_H

/* The command line of `kvferry bench decode`. Knows no results. */

#include "bench.h"

#include <kvferry/kvferry.h>

#define DECODE_BATCH_MAX 64u

typedef struct decode_options {
    kvf_runtime_config runtime;
    kvf_cache_config cache;
    uint32_t context, batch;
    uint32_t group, steps, dense_steps, warmup;
    uint32_t passage, topics;
    double hot_heads;
    double drift;
    uint64_t seed;
    bool record, eager, afresh, forks;
    bench_results results;
} decode_options;

/** @return -1 to go on, else the exit status */
int decode_options_parse(int argc, char **argv, cli_command *command, decode_options *out);

/*
 * Keys, values and queries of `kvferry bench decode`, where a model's own kernels would have left
 * them.
 *
 * Knows no caches. Keys and values are alike and random; with passages, keys of neighbouring tokens
 * share a theme as well. Queries drift slowly. With passages every query head looks at some
 * topics, which are passages; now and then it turns to another topic, and a topic becomes another
 * passage anywhere in the context. Invariant: what a seed and the options give is the same in every
 * case.
 */

#define DECODE_CHUNK 512u /* most tokens of keys at once */

typedef struct decode_vectors {
    uint16_t *host; /* pinned */
    void *alias;    /* of it */
    void *device;   /* memory of the device */
} decode_vectors;

typedef struct decode_inputs {
    kvf_runtime *runtime;
    kvf_stream *stream;
    decode_vectors kv;    /* [DECODE_CHUNK or batch, kv_heads, head_dim] bf16 */
    decode_vectors q;     /* [batch, query_heads, head_dim] */
    float *drift;         /* [DECODE_BATCH_MAX, query_heads, head_dim] */
    float *theme;         /* [kv_heads, head_dim] */
    uint32_t *passages;   /* [topics] the passage of each */
    uint32_t *looks;      /* [DECODE_BATCH_MAX, query_heads, 8] topics */
    uint32_t looks_count; /* that are used, per query head */
    uint64_t random;
} decode_inputs;

/** Closed by the caller, even after a failure. */
kvf_status decode_inputs_open(decode_inputs *in, kvf_runtime *runtime, kvf_stream *stream,
                              const decode_options *o);
void decode_inputs_close(decode_inputs *in);

/** A case begins: everything from the seed. */
void decode_inputs_begin(decode_inputs *in, const decode_options *o);
/** Keys of the tokens from `first` on. */
kvf_status decode_inputs_keys(decode_inputs *in, const decode_options *o, uint32_t first,
                              uint32_t count);
/** Queries of the next step, and the keys that it appends. */
kvf_status decode_inputs_step(decode_inputs *in, const decode_options *o, uint32_t batch);

/* The best rates of the device's memory and of the link, in bytes per ns. Knows no caches. */

kvf_status decode_floor_reading(kvf_runtime *runtime, kvf_stream *stream, double *rate);
kvf_status decode_floor_link(kvf_runtime *runtime, double *rate);

/*
 * Rows of `kvferry bench decode`: their columns, and what a case that was measured puts there.
 *
 * The floor of a step is the larger of two times: what it must read on the device over the read
 * bandwidth, and what it moved over the link's peak, both measured in the same run.
 */

/* Phases stand in the order of kvf_stats. */
#define DECODE_COLUMNS(X)                                                                          \
    X(DECODE_CONTEXT, "context_tokens", "context", INTEGER, 0)                                     \
    X(DECODE_BUDGET, "budget_tokens", "budget", INTEGER, 0)                                        \
    X(DECODE_BATCH, "batch", "batch", INTEGER, 0)                                                  \
    X(DECODE_SELECT, "select", "select", TEXT, 0)                                                  \
    X(DECODE_METHOD, "method", "method", TEXT, 0)                                                  \
    X(DECODE_PAGES, "pages", "pages", TEXT, 0)                                                     \
    X(DECODE_HOT, "hot_heads", "hot", REAL, 2)                                                     \
    X(DECODE_FORKS, "forks", "forks", INTEGER, 0)                                                  \
    X(DECODE_RECORDED, "recorded", "rec", INTEGER, 0)                                              \
    X(DECODE_NODES, "graph_nodes", NULL, INTEGER, 0)                                               \
    X(DECODE_MEDIAN, "layer_us", "us/layer", REAL, 1)                                              \
    X(DECODE_P10, "layer_p10_us", "p10", REAL, 1)                                                  \
    X(DECODE_P95, "layer_p95_us", "p95", REAL, 1)                                                  \
    X(DECODE_P99, "layer_p99_us", "p99", REAL, 1)                                                  \
    X(DECODE_MEAN, "layer_mean_us", NULL, REAL, 1)                                                 \
    X(DECODE_CPU, "layer_cpu_us", NULL, REAL, 1)                                                   \
    X(DECODE_HOST, "enqueue_us", "enqueue", REAL, 1)                                               \
    X(DECODE_FLOOR, "floor_us", "floor", REAL, 1)                                                  \
    X(DECODE_OF_FLOOR, "times_floor", "x floor", REAL, 2)                                          \
    X(DECODE_TOKENS, "tokens_attended", "tokens", REAL, 0)                                         \
    X(DECODE_READ, "read_bytes", "B read", INTEGER, 0)                                             \
    X(DECODE_MOVED, "moved_bytes", "B moved", INTEGER, 0)                                          \
    X(DECODE_HITS, "hit_rate", "hits", REAL, 3)                                                    \
    X(DECODE_VS_DENSE, "faster_than_dense", "vs dense", REAL, 1)                                   \
    X(DECODE_OVERHEAD, "overhead", "overhead", REAL, 3)                                            \
    X(DECODE_REFRESH, "refresh", "refresh", REAL, 3)                                               \
    X(DECODE_PAGES_THERE, "pages_in_memory", "pages there", REAL, 4)                               \
    X(DECODE_BUNDLES_THERE, "bundles_in_memory", "bundles there", REAL, 4)                         \
    X(DECODE_BUNDLES, "bundles_wanted", "bundles", REAL, 0)                                        \
    X(DECODE_FROM_DISK, "disk_mib", "MiB disk", REAL, 3)                                           \
    X(DECODE_DISK_WAIT, "disk_wait_us", "disk wait", REAL, 1)                                      \
    X(DECODE_VS_MEMORY, "times_in_memory", "x memory", REAL, 2)                                    \
    X(DECODE_VS_MEMORY_P10, "times_in_memory_p10", "p10", REAL, 2)                                 \
    X(DECODE_VS_MEMORY_P90, "times_in_memory_p90", "p90", REAL, 2)                                 \
    X(DECODE_VS_APART, "times_apart", "x apart", REAL, 2)                                          \
    X(DECODE_VS_APART_P10, "times_apart_p10", "p10", REAL, 2)                                      \
    X(DECODE_VS_APART_P90, "times_apart_p90", "p90", REAL, 2)                                      \
    X(DECODE_APPEND_US, "append_us", NULL, REAL, 1)                                                \
    X(DECODE_SCORE_US, "score_us", NULL, REAL, 1)                                                  \
    X(DECODE_SELECT_US, "select_us", NULL, REAL, 1)                                                \
    X(DECODE_GATHER_US, "gather_us", NULL, REAL, 1)                                                \
    X(DECODE_COPY_US, "copy_us", NULL, REAL, 1)                                                    \
    X(DECODE_ATTEND_US, "attend_us", NULL, REAL, 1)                                                \
    X(DECODE_REFRESH_US, "refresh_us", NULL, REAL, 1)                                              \
    X(DECODE_DEVICE_BYTES, "device_bytes", NULL, INTEGER, 0)                                       \
    X(DECODE_HOST_BYTES, "host_bytes", NULL, INTEGER, 0)                                           \
    X(DECODE_STATUS, "status", "", TEXT, 0)

enum decode_column { DECODE_COLUMNS(CLI_COLUMN_NUMBER) DECODE_COLUMN_COUNT };

extern const cli_column decode_columns[DECODE_COLUMN_COUNT];

/* The rates that rows are compared with. */
typedef struct decode_rates {
    double read_rate; /* bytes per ns on the device */
    double link_rate; /* bytes per ns over the link */
    double dense_ns;  /* median of dense attention over this context; NAN = not measured */
} decode_rates;

/* The objects that a case runs on. */
typedef struct decode_case {
    kvf_cache_config config;
    uint32_t context, batch, steps;
    double hot_heads; /* share of the KV heads */
    bool is_dense;    /* what the other cases of its context are compared with */
    bool is_forked;   /* all sequences are forks of the first */
    kvf_cache *cache;
    kvf_sequence *sequences[DECODE_BATCH_MAX];
    kvf_recording *recording;
    double *step_ns, *host_ns; /* [steps] per layer: the whole, and until it was enqueued */
    double *cpu_ns;            /* [steps] of all threads, likewise */
    double *ratios;            /* [steps] to the case beside it; NULL = there is none */
    cli_cell *row;
} decode_case;

/** The names of a case, before it has run. */
void decode_row_names(const decode_case *c, cli_cell *row);

/** Figures, into the case's row. Sorts its times. A dense case becomes what later ones
 * are compared with. */
void decode_row_results(const decode_case *c, decode_rates *rates);

#endif
