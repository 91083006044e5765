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
} check_tracked;

typedef struct check {
    uint64_t seed;  /* of the run */
    uint64_t state; /* of the generator */
    const kvf_kernels *ref;
    const kvf_kernels *var;
    check_cuda *cuda; /* the device of `var`; NULL = the CPU */
    const char *isa;
    const char *op;
    char params[320];
    uint32_t cases;  /* of this operation, those left out included */
    uint32_t run;    /* cases that ran */
    uint32_t one_in; /* of so many cases one runs, chosen by the seed; 1 = all */
    uint32_t only;   /* the one case that runs; UINT32_MAX = all */
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
/* The shape, on the host often with values that are narrower than keys. */
kvf_shape check_values(check *c, const kvf_shape *shape);
kvf_subgroup check_subgroup(check *c, uint32_t group); /* mostly all of the group */
float check_cap(check *c); /* of logits; of half of all launches 0, none */
double check_normal(check *c);

void *check_in(check *c, size_t bytes);
void *check_out(check *c, size_t bytes);
/* An input with these bytes. */
void *check_put(check *c, const void *data, size_t bytes);
/* An output with these bytes in it. */
void *check_put_out(check *c, const void *data, size_t bytes);

void check_fill(check *c, void *to, kvf_dtype dtype, size_t count, check_data data);
void check_fill_nan(void *to, kvf_dtype dtype, size_t count);
double check_value(const void *base, kvf_dtype dtype, size_t i);
/* Largest Euclidean norm of the rows. NaN elements count as zero. */
double check_norm(const void *base, kvf_dtype dtype, size_t rows, uint32_t head_dim);

/* Runs every task of a kernel of `table`, which is c->ref or c->var; backwards for the variant,
 * because order must not matter. On a GPU: one launch on copies of all buffers, and back. */
#define CHECK_ARGS(args) ((check_args){(args), sizeof *(args)})
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

/* The checks; each runs every case of one kernel or property. */
void check_attend(check *c);
void check_attend_step(check *c);
void check_merge(check *c);
void check_prefill(check *c);
void check_observe(check *c);
void check_digest(check *c);
void check_score(check *c);
void check_reduce(check *c);
void check_encode(check *c);
void check_rotate(check *c);
void check_score_codes(check *c);
void check_reduce_mass(check *c);
void check_centroids(check *c);
void check_score_centroids(check *c);
void check_filter(check *c);
void check_codes(check *c);
void check_topk(check *c);
void check_pool(check *c);
void check_profile(check *c);
void check_copy(check *c);
void check_repack(check *c);
void check_take(check *c);
void check_quantize(check *c);
void check_dequantize(check *c);
void check_read(check *c);
void check_carry(check *c);
void check_quantized(check *c);
void check_admit(check *c);
void check_lodge(check *c);
void check_stage(check *c);
void check_collect(check *c);
void check_resolve(check *c);
void check_publish(check *c);
void check_move(check *c);
void check_drop(check *c);
void check_convert(check *c);
void check_lists(check *c);
void check_spans(check *c);
void check_row_moves(check *c);
void check_recorded(check *c);
void check_cover(check *c);
void check_pack(check *c);
void check_heads(check *c);
void check_ring(check *c);
void check_blocks(check *c);
void check_properties(check *c);

/* Times of a layer's kernels; op NULL: all. json may be NULL. */
void bench_layers(check *c, const char *op, FILE *json);

#endif
