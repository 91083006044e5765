/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_CHECK_SUPPORT_H
#define KVF_TESTS_CHECK_SUPPORT_H

/*
 * Helpers of every comparison of a kernel with its reference: seeded numbers, buffers that notice a
 * write outside of them, and comparisons that print the first mismatch with everything needed to
 * repeat it.
 *
 * Knows nothing of single kernels. Every case has a seed of its own, so one case can be repeated
 * alone. Inputs are allocated to the byte, so that AddressSanitizer sees a read after them;
 * outputs have guard bands and start with the same bytes for the reference and for the variant, so
 * what neither may write must compare equal too. Memory that a kernel reads and writes comes from
 * check_in and check_out, never from the stack: a GPU has its own copy of that (check_cuda.h).
 */

#include <stdbool.h>
#include <stdio.h>

#include "check_cuda.h"
#include "kernels.h"

#define CHECK_BUFFERS_MAX 4096u
#define CHECK_TRACKED_MAX 48u
#define CHECK_KERNELS_MAX (sizeof(kvf_kernels) / sizeof(kvf_task_fn))

typedef enum check_data {
    DATA_NORMAL,
    DATA_EQUAL, /* one value everywhere */
    DATA_LARGE, /* as large as q.k in fp32 allows */
    DATA_TINY,  /* subnormal in the element type */
    DATA_ZERO,  /* +0 and -0 */
    DATA_COUNT
} check_data;

typedef struct check_buffer {
    uint8_t *base;
    size_t bytes;
    bool guarded;
    bool is_of_twin; /* memory of check_cuda */
} check_buffer;

/* Memory that a kernel may change, under the name that a mismatch is reported with. */
typedef struct check_tracked {
    const char *name;
    void *data;
    size_t bytes;
    size_t count; /* of numbers that may be off; 0: bits */
    kvf_dtype dtype;
    double absolute, relative;
} check_tracked;

/* Outputs of references, in the order of their runs: the cases of an operation are the same for
 * every instruction set of the CPU, so a reference runs for the first one alone. */
typedef struct check_written {
    uint32_t buffer; /* index among those of the case; UINT32_MAX: the next run */
    uint8_t *data;
} check_written;
typedef struct check_memory {
    bool is_full;
    size_t at, count, room;
    check_written *written;
} check_memory;

typedef struct check {
    uint64_t seed;  /* of the run */
    uint64_t state; /* of the generator */
    const kvf_kernels *ref;
    const kvf_kernels *var;
    check_cuda *cuda; /* the device of `var`; NULL = the CPU */
    const char *isa;
    const char *op;
    char params[320];
    uint32_t cases;       /* of this operation, those left out included */
    uint32_t run;         /* cases that ran */
    uint32_t one_in;      /* of so many cases one runs, chosen by the seed; 1 = all */
    uint32_t only;        /* the one case that runs; UINT32_MAX = all */
    check_memory *memory; /* of this operation; NULL: references run anew */
    uint32_t failures;
    bool failed;                 /* the current case */
    bool ran[CHECK_KERNELS_MAX]; /* kernels of `var` that were run, in the order of the table */
    uint32_t buffer_count;
    check_buffer buffers[CHECK_BUFFERS_MAX];
    uint32_t tracked_count;
    check_tracked tracked[CHECK_TRACKED_MAX];
} check;

/* Begin a case: frees the buffers of the one before, after a look at their guard bands. False: this
 * case is left out. Nothing random is drawn before it, so a case does not depend on the others. */
KVF_CHECKED bool check_begin(check *c);
/* Say what the case is; printed if it fails. */
KVF_PRINTF(2, 3) void check_describe(check *c, const char *format, ...);
void check_end(check *c);

uint64_t check_random(check *c);
uint32_t check_below(check *c, uint32_t n); /* 0 .. n - 1 */
/* The dtype, head size and page size of these numbers, each modulo how many there are. */
kvf_shape check_shape(const check *c, uint32_t dtype, uint32_t head_dim, uint32_t page_size);
/* The next kind of numbers for every fourth case, usual ones for the others. */
check_data check_data_of(uint32_t i);
/* The shape, on the host often with values that are narrower than keys. */
kvf_shape check_values(check *c, const kvf_shape *shape);
kvf_subgroup check_subgroup(check *c, uint32_t group); /* mostly all of the group */
float check_cap(check *c);     /* of logits; of half of all launches 0, none */
double check_normal(check *c); /* roughly: mean 0, deviation 1, within 3.5 */

void *check_in(check *c, size_t bytes);
void *check_out(check *c, size_t bytes);
/* An input with these bytes. */
void *check_put(check *c, const void *data, size_t bytes);
/* An output with these bytes in it. */
void *check_put_out(check *c, const void *data, size_t bytes);
/* The same of random bytes. */
void check_noise(check *c, void *to, size_t bytes);
void *check_noise_in(check *c, size_t bytes);
void *check_noise_out(check *c, size_t bytes);
/* `n` counts, most of them `most`. */
uint32_t *check_counts(check *c, size_t n, uint32_t most);

void check_fill(check *c, void *to, kvf_dtype dtype, size_t count, check_data data);
/* Scores of pages of one of eleven kinds: usual, or with everything that damages a comparison. */
void check_scores(check *c, float *to, size_t count, uint32_t kind);
/* fp32 numbers that round to those of `from`, most of them not equal. */
float *check_widen(check *c, const void *from, kvf_dtype dtype, size_t count);
void check_fill_nan(void *to, kvf_dtype dtype, size_t count);
double check_value(const void *base, kvf_dtype dtype, size_t i);
/* Largest Euclidean norm of the rows. NaN elements count as zero. */
double check_norm(const void *base, kvf_dtype dtype, size_t rows, uint32_t head_dim);

/* Runs every task of a kernel of `table`, which is c->ref or c->var; backwards for the variant,
 * because order must not matter. On a GPU: one launch on copies of all buffers, and back. */
#define CHECK_ARGS(args) ((check_args){(args), sizeof *(args)})
#define CHECK_LAUNCH(c, op, args)                                                                  \
    ((check_launch){(c)->var->op, CHECK_ARGS(args), kvf_##op##_tasks(args)})
#define CHECK_RUN(c, table, op, args, backwards)                                                   \
    check_run((c), (table), (table)->op, CHECK_ARGS(args), kvf_##op##_tasks(args), (backwards))
void check_run(check *c, const kvf_kernels *table, kvf_task_fn fn, check_args args, uint32_t tasks,
               bool backwards);

/* For kernels that change what they read: track all that may change, then run the reference and the
 * variant from the same start at the same addresses, so that pointers in results compare too. Data
 * without a name is not compared. */
void check_track(check *c, const char *name, void *data, size_t bytes);
/* The memory of check_out, tracked. */
void *check_changed(check *c, const char *name, size_t bytes);
/* The same for `count` numbers, which may be off by so much; see check_elements. */
void *check_near(check *c, const char *name, kvf_dtype dtype, size_t count, double absolute,
                 double relative);
/* Masses, tops, sums and bits of what `a` says of lists, for reduce_mass; `has_ties`: of three
 * values only. */
void check_masses(check *c, kvf_reduce_mass_args *a, bool is_damaged, bool has_ties);
/* Where blocks of a list are: one after the other, or anywhere among a few more. */
const uint32_t *check_block_of(check *c, uint32_t blocks, uint32_t *all);
#define CHECK_BOTH(c, op, args)                                                                    \
    check_both((c), (c)->ref->op, (c)->var->op, CHECK_ARGS(args), kvf_##op##_tasks(args))
void check_both(check *c, kvf_task_fn ref, kvf_task_fn var, check_args args, uint32_t tasks);

void check_bits(check *c, const char *what, const void *got, const void *want, size_t bytes);
/* |got - want| <= abs + rel |want|, or both not finite in the same way, or the same bits. */
void check_elements(check *c, const char *what, const void *got, const void *want, kvf_dtype dtype,
                    size_t count, double absolute, double relative);
KVF_PRINTF(2, 3) void check_fail(check *c, const char *format, ...);

#define CHECK_HEAD_DIMS 8u
extern const uint32_t check_head_dims[CHECK_HEAD_DIMS]; /* the last one is the host device's */
uint32_t check_dims(const check *c);                    /* how many of them the device takes */
#define CHECK_GROUPS 22u
extern const uint32_t check_groups[CHECK_GROUPS]; /* up to a sub-group, then larger ones */
#define CHECK_PAGE_SIZES 7u
extern const uint32_t check_page_sizes[CHECK_PAGE_SIZES]; /* those of a block first */
const char *check_dtype_name(kvf_dtype dtype);
/* For descriptions; until the next call. */
const char *check_shape_text(const kvf_shape *shape);

/* The checks; each runs every case of one kernel or property, and every kernel of a family is run
 * by those of the family; see missing(). X(family, name, function, n): in the emulator and under a
 * sanitizer one in n cases runs. */
#define CHECK_LIST(X)                                                                              \
    X(common, convert, check_convert, 1)                                                           \
    X(common, properties, check_properties, 1)                                                     \
    X(score, digest, check_digest, 2)                                                              \
    X(score, score, check_score, 4)                                                                \
    X(score, reduce, check_reduce, 1)                                                              \
    X(score, encode, check_encode, 1)                                                              \
    X(score, rotate, check_rotate, 1)                                                              \
    X(score, score_codes, check_score_codes, 2)                                                    \
    X(score, reduce_mass, check_reduce_mass, 1)                                                    \
    X(score, codes, check_codes, 1)                                                                \
    X(score, centroids, check_centroids, 1)                                                        \
    X(score, score_centroids, check_score_centroids, 1)                                            \
    X(score, filter, check_filter, 1)                                                              \
    X(select, topk, check_topk, 2)                                                                 \
    X(select, lists, check_lists, 1)                                                               \
    X(select, resolve, check_resolve, 1)                                                           \
    X(select, admit, check_admit, 1)                                                               \
    X(select, collect, check_collect, 1)                                                           \
    X(select, drop, check_drop, 1)                                                                 \
    X(attend, spans, check_spans, 1)                                                               \
    X(attend, attend, check_attend, 1)                                                             \
    X(attend, step, check_attend_step, 1)                                                          \
    X(attend, merge, check_merge, 1)                                                               \
    X(attend, prefill, check_prefill, 2)                                                           \
    X(move, rows, check_row_moves, 1)                                                              \
    X(move, ring, check_ring, 1)                                                                   \
    X(move, repack, check_repack, 1)                                                               \
    X(move, narrow, check_narrow, 1)                                                               \
    X(move, quantize, check_quantize, 1)                                                           \
    X(move, dequantize, check_dequantize, 1)                                                       \
    X(move, read, check_read, 1)                                                                   \
    X(move, carry, check_carry, 1)                                                                 \
    X(move, quantized, check_quantized, 1)                                                         \
    X(move, take, check_take, 1)                                                                   \
    X(move, heads, check_heads, 1)                                                                 \
    X(move, copy, check_copy, 1)                                                                   \
    X(move, publish, check_publish, 1)                                                             \
    X(move, move, check_move, 1)                                                                   \
    X(move, recorded, check_recorded, 1)                                                           \
    X(observe, observe, check_observe, 2)                                                          \
    X(observe, pool, check_pool, 1)                                                                \
    X(observe, profile, check_profile, 1)                                                          \
    X(observe, cover, check_cover, 1)                                                              \
    X(observe, pack, check_pack, 1)                                                                \
    X(blocks, blocks, check_blocks, 1)                                                             \
    X(move, stage, check_stage, 1)                                                                 \
    X(blocks, admit_written, check_admit_written, 1)

#define CHECK_DECLARE(family, name, function, one_in) void function(check *c);
CHECK_LIST(CHECK_DECLARE)
#undef CHECK_DECLARE

/* Times of a layer's kernels; op NULL: all. json may be NULL. */
void bench_layers(check *c, const char *op, FILE *json);

#endif
