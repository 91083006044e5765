/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_MOVE_ARGS_H
#define KVF_KERNELS_MOVE_ARGS_H

/*
 * Contracts, arguments and tasks: tokens, pages and page tables, from where they are to where they
 * are needed.
 * See kernels.h for what holds for every kernel.
 */

#include "paging.h"
#include "score/score_args.h"

/* ---- append: one token per row into the window. A token that begins a block takes its ring
 * block. Keeps the query, unless the row has no `queries`, notes what is not finite, and writes how
 * many pages each list chooses. Rows may be consecutive tokens of the same tables.
 *
 * For a fused step, where a launch is the cost: fp32 numbers are rounded as narrow rounds them,
 * queries also to `rounded`; and queries, of the element type then, are rotated as rotate rotates
 * them. One task per row. */
typedef struct kvf_append_args {
    kvf_paging paging;
    uint32_t rows;
    uint32_t wide_queries; /* 1: q is fp32, and the element type is not */
    uint32_t wide_keys;    /* the same of k and v */
    const kvf_row *row;    /* [rows] */
    const void *q;         /* [rows, kv_heads, group, head_dim] */
    const void *k;         /* [rows, kv_heads, head_dim]; NULL = nothing is appended */
    const void *v;         /* [rows, kv_heads, value_dim] */
    void *rounded;         /* out: fp32 queries in the element type */
    int8_t *rotated;       /* of rotate: y, y_scale and scale; NULL = not rotated */
    float *rotated_scale;
    float scale;
    uint32_t choose_lists;
    uint32_t *choose; /* [rows * choose_lists] out */
} kvf_append_args;
KVF_TASKS(append, kvf_append_args, a->rows)

/* Rotation of the queries of one row. */
KVF_INLINE kvf_rotate_args kvf_append_rotate(const kvf_append_args *a, uint32_t row)
{
    const kvf_shape *shape = &a->paging.shape;
    kvf_rotate_args rotate;
    rotate.dtype = shape->dtype;
    rotate.head_dim = shape->head_dim;
    rotate.queries = a->paging.kv_heads * a->paging.group;
    rotate.scale = a->scale;
    rotate.q = kvf_offset(a->wide_queries ? a->rounded : a->q,
                          (size_t)row * rotate.queries * kvf_key_bytes(shape));
    rotate.y = a->rotated + (size_t)row * rotate.queries * shape->head_dim;
    rotate.y_scale = a->rotated_scale + (size_t)row * rotate.queries;
    return rotate;
}

/* ---- seal: blocks sealed_before .. sealed-1 of each row: clear static bits, move sink tokens to
 * the front of the static store, write digest jobs: job j of KV head h of the row's i-th block is
 * ((job_first + i) * block_jobs + j) * kv_heads + h, of block_size / block_jobs tokens. block_of
 * gets new_block_of, and nobody has chosen their pages. Folds chunk_fault (relative to chunk_first)
 * into the row's fault word. One task per (row, KV head). */
typedef struct kvf_seal_args {
    kvf_paging paging;
    uint32_t rows;
    const kvf_row *row; /* [rows] */
    kvf_digest_job *jobs;
    const uint32_t *chunk_fault; /* [1] of a prefill chunk, one row; may be NULL */
    uint32_t chunk_first;
} kvf_seal_args;
KVF_TASKS(seal, kvf_seal_args, a->rows * a->paging.kv_heads)

/* ---- table: block tables of rows. Entries sealed_before .. blocks(length)-1: a sealed block gets
 * its address of `pool`, the others that of their ring block. One task per row. */
typedef struct kvf_table_args {
    kvf_paging paging;
    uint32_t rows;
    const kvf_row *row; /* [rows] */
} kvf_table_args;
KVF_TASKS(table, kvf_table_args, a->rows)

/* ---- stage: blocks of rows to one place, for a chunk that attends to all of them ----
 * The first count blocks of each row, of exact pages, as far as the row has them: block b of row r
 * to block r * count + b of `to`. A page that has a slot comes from there, any other from where the
 * table names it; its bytes are counted (bytes_prompt). If `home` is given the table names `to`
 * from then on, and home[b] is what it named: of one row. One task per (row, block). */
typedef struct kvf_stage_args {
    kvf_paging paging;
    uint32_t rows;
    uint32_t count;
    const kvf_row *row; /* [rows] */
    char *to;           /* [rows, count] blocks */
    void **home;        /* [count] out, or NULL */
    kvf_layer_counters *counters;
} kvf_stage_args;
KVF_TASKS(stage, kvf_stage_args, a->rows * a->count)

/* ---- ring: one token per row into the rings of its streaming heads, and the spans that it attends
 * to: tokens below sink and the newest `recent`. kvf_row.ring is [sink_blocks + ring_blocks, heads,
 * page bytes]: the pages of the sink, then page p in block (p - sink_blocks) % ring_blocks of the
 * others. Notes what is not finite. One task per (row, head). Invariant: ring_blocks pages hold
 * `recent` consecutive tokens wherever they begin, or sink and ring hold every token there may be.
 */
typedef struct kvf_ring {
    kvf_shape shape;
    uint32_t heads;
    uint32_t sink;
    uint32_t recent;
    uint32_t sink_blocks;
    uint32_t ring_blocks; /* at least 1 */
} kvf_ring;

typedef struct kvf_ring_args {
    kvf_ring ring;
    uint32_t rows;
    uint32_t kv_heads;    /* of k and v */
    uint32_t spans_max;   /* >= kvf_ring_total */
    const uint32_t *head; /* [ring.heads] of kv_heads; NULL = 0, 1, ... */
    const kvf_row *row;   /* [rows]: ring, fault, fault_key, length; nothing else is looked at */
    const void *k;        /* [rows, kv_heads, head_dim] */
    const void *v;        /* [rows, kv_heads, value_dim] */
    kvf_span *spans;      /* [rows * ring.heads, spans_max] out */
    uint32_t *span_count; /* [rows * ring.heads] out */
} kvf_ring_args;
KVF_TASKS(ring, kvf_ring_args, a->rows * a->ring.heads)

/* ---- rings of streaming heads ---- */

/* Blocks of a ring, those of the sink included. */
KVF_INLINE uint32_t kvf_ring_total(const kvf_ring *r)
{
    return r->sink_blocks + r->ring_blocks;
}

/* Block of page p among those of a row. */
KVF_INLINE uint32_t kvf_ring_block(const kvf_ring *r, uint32_t page)
{
    return page < r->sink_blocks ? page : r->sink_blocks + (page - r->sink_blocks) % r->ring_blocks;
}

KVF_INLINE char *kvf_ring_page(const kvf_ring *r, char *blocks, uint32_t page, uint32_t head)
{
    return blocks + ((size_t)kvf_ring_block(r, page) * r->heads + head) * kvf_page_bytes(&r->shape);
}

/* Tokens below `sink`, and those from the result on, are what the newest of `length` sees. */
KVF_INLINE uint32_t kvf_ring_recent(const kvf_ring *r, uint32_t length)
{
    return length > r->recent ? length - r->recent : 0;
}

/* The first page after those of the sink that the newest of `length` tokens sees. */
KVF_INLINE uint32_t kvf_ring_first(const kvf_ring *r, uint32_t length)
{
    return kvf_max_u32(r->sink_blocks, kvf_ring_recent(r, length) / r->shape.page_size);
}

KVF_INLINE uint32_t kvf_ring_spans(const kvf_ring *r, uint32_t length)
{
    const uint32_t pages = kvf_div_ceil_u32(length, r->shape.page_size);
    const uint32_t first = kvf_ring_first(r, length);
    return kvf_min_u32(r->sink_blocks, pages) + (pages > first ? pages - first : 0);
}

/* Span i of what the newest of `length` tokens attends to. */
KVF_INLINE kvf_span kvf_ring_span(const kvf_ring *r, char *blocks, uint32_t length, uint32_t head,
                                  uint32_t i)
{
    const uint32_t page_size = r->shape.page_size, recent = kvf_ring_recent(r, length);
    const uint32_t page = i < r->sink_blocks ? i : kvf_ring_first(r, length) + (i - r->sink_blocks);
    const uint32_t first = page * page_size;
    const uint32_t from = r->sink > first ? kvf_min_u32(r->sink - first, page_size) : 0;
    const uint32_t end = recent > first ? kvf_min_u32(recent - first, page_size) : 0;
    kvf_span span;
    span.page = kvf_ring_page(r, blocks, page, head);
    span.skip = from < end ? kvf_live_bits(end, 0) & ~kvf_live_bits(from, 0) : 0;
    span.count = kvf_min_u32(page_size, length - first);
    span.home = NULL;
    span.quantized = 0;
    return span;
}

/* ---- repack: a chunk in token order into pages ----
 * Token i of the chunk becomes token (first + i) % page_size of block (first + i) / page_size,
 * whose page of KV head h starts at blocks[b] + h * page bytes. If a key or value is not
 * finite, the lowest index i seen is kept in *fault by an atomic minimum (fault starts at
 * UINT32_MAX). One task per (block, KV head).
 */
typedef struct kvf_repack_args {
    kvf_shape shape;
    uint32_t kv_heads;
    uint32_t tokens;
    uint32_t first;      /* place in blocks[0] of the first token, < page_size */
    const void *k;       /* [tokens, kv_heads, head_dim] dtype */
    const void *v;       /* [tokens, kv_heads, value_dim] dtype */
    void *const *blocks; /* [ceil((first + tokens) / page_size)] */
    uint32_t *fault;     /* [1] */
} kvf_repack_args;
KVF_TASKS(repack, kvf_repack_args,
          a->tokens ? kvf_div_ceil_u32(a->first + a->tokens, a->shape.page_size) * a->kv_heads : 0)

/* ---- quantize: sealed blocks of rows into storage format ----
 * Blocks first .. first + count - 1 of those below `sealed` that the call seals, of every row: from
 * the ring, or from block b of `scratch`, to the row's `pool`. Then tokens of the source that are
 * not of the sink become what the quantized ones say, so that digests and attention see what is
 * stored. The source of block sealed - 1 goes to the row's spare block as it was, if rings have
 * one. One task per (row, block, KV head).
 */
typedef struct kvf_quantize_args {
    kvf_paging paging;
    uint32_t rows;
    uint32_t count;
    uint32_t first;     /* of the row's blocks, if `scratch` is given; else sealed_before */
    char *scratch;      /* [blocks_max] blocks in full precision; NULL = the ring */
    const kvf_row *row; /* [rows] */
} kvf_quantize_args;
KVF_TASKS(quantize, kvf_quantize_args, a->rows * a->count * a->paging.kv_heads)

/* ---- dequantize: sealed blocks of one row in full precision ----
 * Blocks first .. first + count - 1, which the row's table has in the pool: to block b of
 * `scratch`, or to the ring if that is NULL. Tokens of the sink come from the static store. If
 * `view` is given it becomes the row with `table`, which names `scratch` for sealed blocks and the
 * ring for the others, and without slots: what reads it finds exact pages. Task 0 makes the view;
 * one more per (block, KV head).
 */
typedef struct kvf_dequantize_args {
    kvf_paging paging;
    uint32_t first;
    uint32_t count;
    char *scratch;      /* [blocks_max] blocks */
    const void *block;  /* where the block is, if count is 1; NULL = where the table says */
    void **table;       /* [blocks_max] out, or NULL */
    kvf_row *view;      /* [1] out, or NULL */
    const kvf_row *row; /* [1] */
} kvf_dequantize_args;
KVF_TASKS(dequantize, kvf_dequantize_args, 1 + a->count * a->paging.kv_heads)

/* ---- carry: kept tokens of quantized pages into the blocks that they seal ----
 * Blocks sealed_before .. sealed - 1 of a row, in its `pool`. Token i of KV head h there was token
 * id = ids[h * stride + i]. If id is of a block below `quantized`, it moves as it was quantized,
 * out of from[id / block_size]; else it is quantized from block i / block_size of `scratch`. Then
 * tokens of `scratch` that are not of the sink become what the quantized ones say. Ids ascend, so
 * none is below i: from[b] may be where block b goes, because a task takes one block after the
 * other and reads a place before it writes there. One task per KV head.
 */
typedef struct kvf_carry_args {
    kvf_paging paging;
    uint32_t quantized;
    uint32_t stride;         /* stride of ids */
    const void *const *from; /* [quantized] blocks in storage format */
    const uint32_t *ids;     /* [kv_heads, stride] */
    char *scratch;           /* [blocks_max] blocks in full precision */
    const kvf_row *row;      /* [1] */
} kvf_carry_args;
KVF_TASKS(carry, kvf_carry_args, a->paging.kv_heads)

/* ---- read: listed pages in full precision ----
 * Page indices[i] of list l, indptr[l] <= i < indptr[l + 1], to page i of `out`, dequantized if it
 * is quantized, with tokens of the sink out of the static store. Tokens that the page has not are
 * zeros. One task per list.
 */
typedef struct kvf_read_args {
    kvf_paging paging;
    uint32_t rows;
    const kvf_row *row;    /* [rows] */
    const int32_t *indptr; /* [rows * kv_heads + 1] */
    const int32_t *indices;
    void *out; /* [indptr[rows * kv_heads], page_size, head_dim + value_dim] */
} kvf_read_args;
KVF_TASKS(read, kvf_read_args, a->rows * a->paging.kv_heads)

/* ---- take: tokens of pages by index ----
 * k[i, h] and v[i, h] <- key and value of token ids[h * stride + i] of KV head h, which is token
 * id % page_size of the head's page in blocks[id / page_size]. A task is KVF_TAKE_TOKENS tokens of
 * one KV head.
 */
#define KVF_TAKE_TOKENS 64u

typedef struct kvf_take_args {
    kvf_shape shape;
    uint32_t kv_heads;
    uint32_t count;            /* tokens per KV head */
    uint32_t stride;           /* stride of ids */
    const void *const *blocks; /* [pages] by token range; head h's page is at h * page bytes */
    const uint32_t *ids;       /* [kv_heads, stride] */
    void *k;                   /* [count, kv_heads, head_dim] dtype */
    void *v;                   /* [count, kv_heads, value_dim] dtype */
} kvf_take_args;
KVF_TASKS(take, kvf_take_args, kvf_div_ceil_u32(a->count, KVF_TAKE_TOKENS) * a->kv_heads)

/* ---- narrow: numbers in fp32 to the element type ----
 * Rounded to nearest, ties to even; what is too large becomes infinity. A job without numbers does
 * nothing. A task is KVF_NARROW_NUMBERS numbers of one job. */
#define KVF_NARROW_NUMBERS 2048u
#define KVF_NARROW_JOBS    3u

typedef struct kvf_narrow_job {
    const float *from; /* [count] */
    void *to;          /* [count] dtype */
    size_t count;      /* a multiple of 16 */
} kvf_narrow_job;

typedef struct kvf_narrow_args {
    kvf_dtype dtype; /* of 16 bits */
    uint32_t parts;  /* tasks of a job: enough for the longest */
    kvf_narrow_job jobs[KVF_NARROW_JOBS];
} kvf_narrow_args;
KVF_TASKS(narrow, kvf_narrow_args, a->parts *KVF_NARROW_JOBS)

/* Numbers first .. end - 1 of its job are those of a task. */
KVF_INLINE size_t kvf_narrow_first(const kvf_narrow_args *a, uint32_t task)
{
    return (size_t)(task % a->parts) * KVF_NARROW_NUMBERS;
}

KVF_INLINE size_t kvf_narrow_end(const kvf_narrow_args *a, uint32_t task)
{
    const size_t count = a->jobs[task / a->parts].count;
    const size_t end = kvf_narrow_first(a, task) + KVF_NARROW_NUMBERS;
    return end < count ? end : count;
}

/* ---- heads: chosen heads of tokens. Per job, head from_head[i] of every token of `from` becomes
 * head to_head[i] of that token of `to`, i < count; a NULL list is 0, 1, ... Heads of `to` that are
 * not named keep what they have. A task is KVF_HEADS_TOKENS tokens of one job. */
#define KVF_HEADS_TOKENS 8u

typedef struct kvf_heads_job {
    const void *from; /* [tokens, from_heads, bytes] */
    void *to;         /* [tokens, to_heads, bytes] */
    const uint32_t *from_head;
    const uint32_t *to_head;
    uint32_t from_heads;
    uint32_t to_heads;
    uint32_t count;
    uint32_t bytes; /* a multiple of 4 */
} kvf_heads_job;

typedef struct kvf_heads_args {
    uint32_t tokens;
    uint32_t job_count;
    const kvf_heads_job *jobs; /* [job_count] */
} kvf_heads_args;
KVF_TASKS(heads, kvf_heads_args, kvf_div_ceil_u32(a->tokens, KVF_HEADS_TOKENS) * a->job_count)

/* ---- copy: scattered equal blocks of bytes ----
 * to[i] <- from[i], `bytes` each. The SIMD variants store past the cache when `stream` is set and
 * the blocks are whole lines of the destination. A task is `per_task` consecutive blocks.
 */
typedef struct kvf_copy_args {
    size_t bytes; /* a multiple of 16 */
    uint32_t count;
    uint32_t per_task;
    uint32_t stream;
    const void *const *from; /* [count] */
    void *const *to;         /* [count] */
} kvf_copy_args;
KVF_TASKS(copy, kvf_copy_args, kvf_div_ceil_u32(a->count, a->per_task))

/* ---- publish: a miss list of the device for a thread of the host ----
 * n = *count. low <= n < high, or n == 0: others move it, *done <- ticket and out_count <- 0. Else
 * out_count <- n, and the lists are copied unless n > list_max. Then *request <- ticket. A host
 * thread that has seen the ticket in *request sees the rest; out and words are registered host
 * memory. One task.
 */
typedef struct kvf_publish_args {
    uint32_t low, high;
    uint32_t list_max;
    uint32_t ticket;
    const uint32_t *count;   /* [1] */
    const void *const *from; /* [n] */
    void *const *to;         /* [n] */
    const void **out_from;   /* [list_max] */
    void **out_to;           /* [list_max] */
    uint32_t *out_count;     /* [1] */
    uint32_t *request;       /* [1] */
    uint32_t *done;          /* [1] */
} kvf_publish_args;
KVF_TASKS(publish, kvf_publish_args, 1)

/* ---- move: pages of registered host memory into slots, as the device finds their list ----
 * n = *count. If low <= n < high: to[i] <- from[i] for i < n, `bytes` each; then, if done is not
 * NULL, *done <- value, seen by a host thread or another stream only after every byte. Else nothing
 * is moved or written. `blocks` bounds what the launch takes of the device; one task per block.
 */
#define KVF_MOVE_BLOCKS_MAX 64u

typedef struct kvf_move_args {
    size_t bytes;            /* a multiple of 64 */
    const void *const *from; /* [n] device aliases of pages, 16-byte aligned */
    void *const *to;         /* [n] */
    const uint32_t *count;   /* [1] */
    uint32_t low, high;
    uint32_t blocks; /* 1 .. KVF_MOVE_BLOCKS_MAX */
    uint32_t value;
    uint32_t *arrived; /* [1] of the device, 0 before and after; unused if done is NULL */
    uint32_t *done;    /* [1] of registered host memory, or NULL */
} kvf_move_args;
KVF_TASKS(move, kvf_move_args, a->blocks)

/* ---- writeback: the blocks that a decode step sealed, from the ring to the pool: blocks
 * sealed_before .. sealed-1 of each row. The same copies as the host enqueues one by one, for a
 * recorded step, whose pages the host does not know. One task per row. */
typedef struct kvf_writeback_args {
    kvf_paging paging;
    uint32_t rows;
    const kvf_row *row; /* [rows] */
} kvf_writeback_args;
KVF_TASKS(writeback, kvf_writeback_args, a->rows)

/* ---- frame: arguments of a recorded step. The host writes them into a ring of frames; every part
 * goes to its fixed place, and the part's turn moves on, so that the next run of the same recording
 * finds the next frame. Turns wrap at 2^32: `frames` is a power of two. One task per part. */
typedef struct kvf_frame_args {
    uint32_t frames;
    uint32_t parts;
    size_t bytes;     /* of a part, a multiple of 16 */
    const char *from; /* [frames, parts, bytes], host memory at its device alias */
    char *to;         /* [parts, bytes] */
    uint32_t *turns;  /* [parts] runs so far */
} kvf_frame_args;
KVF_TASKS(frame, kvf_frame_args, a->parts)

/* ---- stamp: the time in stream order. sum += now - *last; *last = now. One task. ---- */
typedef struct kvf_stamp_args {
    uint64_t *last;
    uint64_t *sum; /* NULL = only set *last */
} kvf_stamp_args;
KVF_TASKS(stamp, kvf_stamp_args, 1)

#endif
