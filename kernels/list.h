/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_LIST_H
#define KVF_KERNELS_LIST_H

/*
 * Every kernel, once. The table, the declarations of all variants and launchers, the checks and
 * meson.build are made of this list; meson reads the lines that begin with one of these words.
 *
 *     PLAIN(family, op)    <family>/<op>_ref.c and <op>.cu: one form on the host device
 *     SIMD(family, op)     <op>_simd.c beside them, built once per instruction set
 *
 *     DOT(family, op)      those of them that live on products of bytes: built for more sets
 *     PAIR(family, op)     those with products of bf16 pairs: built for one more, which has both
 *
 * The files of an operation in parts (observe_stats, observe_score) have the name before the
 * underscore; those of operations of one idea have its name (`kernel_shared` in meson.build).
 */
#define KVF_KERNEL_LIST(PLAIN, SIMD)                                                               \
    SIMD(score, digest)                                                                            \
    SIMD(score, score)                                                                             \
    SIMD(score, reduce)                                                                            \
    SIMD(score, encode)                                                                            \
    SIMD(score, rotate)                                                                            \
    SIMD(score, score_codes)                                                                       \
    SIMD(score, reduce_mass)                                                                       \
    PLAIN(score, centroids)                                                                        \
    SIMD(score, score_centroids)                                                                   \
    PLAIN(score, filter)                                                                           \
    PLAIN(select, caller_scores)                                                                   \
    SIMD(select, topk)                                                                             \
    PLAIN(select, trim)                                                                            \
    PLAIN(select, newest)                                                                          \
    PLAIN(select, spread)                                                                          \
    PLAIN(select, mask)                                                                            \
    PLAIN(select, resolve)                                                                         \
    PLAIN(select, select)                                                                          \
    PLAIN(select, admit)                                                                           \
    PLAIN(select, collect)                                                                         \
    PLAIN(select, fetch)                                                                           \
    PLAIN(select, drop)                                                                            \
    PLAIN(select, overlap)                                                                         \
    PLAIN(attend, assemble)                                                                        \
    SIMD(attend, attend)                                                                           \
    PLAIN(attend, attend_step)                                                                     \
    SIMD(attend, merge)                                                                            \
    SIMD(attend, prefill)                                                                          \
    PLAIN(attend, compare)                                                                         \
    PLAIN(attend, csr_out)                                                                         \
    PLAIN(attend, csr_in)                                                                          \
    SIMD(move, narrow)                                                                             \
    PLAIN(move, append)                                                                            \
    PLAIN(move, seal)                                                                              \
    PLAIN(move, table)                                                                             \
    PLAIN(move, stage)                                                                             \
    PLAIN(move, ring)                                                                              \
    SIMD(move, repack)                                                                             \
    SIMD(move, quantize)                                                                           \
    SIMD(move, dequantize)                                                                         \
    SIMD(move, carry)                                                                              \
    SIMD(move, read)                                                                               \
    PLAIN(move, take)                                                                              \
    PLAIN(move, heads)                                                                             \
    SIMD(move, copy)                                                                               \
    PLAIN(move, publish)                                                                           \
    PLAIN(move, move)                                                                              \
    PLAIN(move, writeback)                                                                         \
    PLAIN(move, frame)                                                                             \
    PLAIN(move, stamp)                                                                             \
    SIMD(blocks, write)                                                                            \
    PLAIN(blocks, admit_written)                                                                   \
    PLAIN(blocks, rows)                                                                            \
    PLAIN(blocks, validate)                                                                        \
    PLAIN(blocks, average)                                                                         \
    PLAIN(blocks, gather_window)                                                                   \
    PLAIN(blocks, scatter_heads)                                                                   \
    PLAIN(blocks, fill_nan)                                                                        \
    PLAIN(blocks, clone)                                                                           \
    SIMD(blocks, dequantize_chunks)                                                                \
    SIMD(observe, observe_stats)                                                                   \
    SIMD(observe, observe_score)                                                                   \
    SIMD(observe, pool)                                                                            \
    PLAIN(observe, profile)                                                                        \
    PLAIN(observe, cover)                                                                          \
    PLAIN(observe, pack)

#define KVF_DOT_LIST(DOT)                                                                          \
    DOT(score, score_codes)                                                                        \
    DOT(score, score_centroids)

#define KVF_PAIR_LIST(DOT, PAIR)                                                                   \
    KVF_DOT_LIST(DOT)                                                                              \
    PAIR(attend, attend)

#endif
