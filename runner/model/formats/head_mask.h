/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_HEAD_MASK_H
#define KVF_MODEL_HEAD_MASK_H

/*
 * A head mask as a file of tab-separated values: which KV heads are hot, which are coarse, and
 * which only stream.
 *
 * One line per layer, one value per KV head. Values are 0, 1 and 2 (PruLong has 0 and 1), or
 * numbers that say how much a head needs its long context (DuoAttention), of which the lowest
 * become streaming heads. It knows nothing of caches. Invariant: the same file and sparsity give
 * the same mask.
 */

#include "model_memory.h"

/**
 * Read a mask.
 *
 * @param sparsity  share of streaming heads, 0 to below 1: values are clipped to [0, 1], and
 *                  exactly round(sparsity x layers x kv_heads) heads stream, halves rounded up:
 *                  those of lowest value, of equal ones the lower layer, then the lower head,
 * first. Negative = none: every value must be 0, 1 or 2
 * @param mask      receives [layers, kv_heads], as kvf_cache_config.head_mask
 * @return KVF_OK; KVF_INVALID naming file, line, column, value and fix; KVF_SYSTEM if the file
 *         cannot be read; KVF_OUT_OF_MEMORY. After an error @p mask is undefined
 */
KVF_CHECKED kvf_status kvf_head_mask_read(const char *path, uint32_t layers, uint32_t kv_heads,
                                          double sparsity, uint8_t *mask, kvf_error *error);

/**
 * The most sensitive heads are hot, the others coarse.
 *
 * @param sensitivity   [layers, kv_heads] how much each head needs its long context
 * @param share  of hot heads, above 0 and at most 1: round(share x layers x kv_heads) of them,
 *               halves rounded up, but one at least; of equal ones the lower layer, then the lower
 *               head, first
 * @param mask   receives [layers, kv_heads] of 1 and 2
 * @return KVF_OK; KVF_OUT_OF_MEMORY
 */
KVF_CHECKED kvf_status kvf_head_mask_most_sensitive(const double *sensitivity, uint32_t layers,
                                                    uint32_t kv_heads, double share, uint8_t *mask,
                                                    kvf_error *error);

/** Append a mask to @p text, as kvf_head_mask_read reads it without a sparsity. */
KVF_CHECKED kvf_status kvf_head_mask_write(const uint8_t *mask, uint32_t layers, uint32_t kv_heads,
                                           kvf_text *text, kvf_error *error);

#endif
