/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_KV_GROUP_H
#define KVF_RUNTIME_KV_GROUP_H

/*
 * A KV group: the pages of layers with the same number of heads, on the device and in the host's
 * pool, and the tables to choose among them, fetch and attend.
 *
 * A KV group is addressed by rows, and knows no sequence. A row is a layer of something that grows;
 * its block table and its counts are a kvf_layer, which whoever owns the rows keeps and hands in,
 * at the time of enqueueing. The device has them as kvf_row, one per call. All work on a KV group
 * runs in one order (kvf_order), which is its owner's too. So whatever a later call overwrites,
 * earlier calls have read, and blocks of the pool may be given back as soon as the host no longer
 * needs them.
 *
 * Invariants, per row: sealed == max(0, (length - local_tokens) / block_size) after every call;
 * blocks[b] is a pool block iff b < sealed; the static store in force is `store`.
 */

#include <stdbool.h>

#include "layer.h"
#include "layout.h"
#include "page_pool.h"
#include "paging.h"
#include "runtime.h"
#include "select_policy.h"
#include "transfer.h"

/* Calls whose arguments are in flight; the next one waits for the oldest. */
#define KVF_FRAMES           16u
/* Partial results are formed over a power of two of tokens in this range: as few as leave a list at
 * most KVF_SPLITS parts, so that one sequence alone keeps a GPU busy. */
#define KVF_SPLIT_TOKENS_MIN 32u
#define KVF_SPLIT_TOKENS_MAX 512u
#define KVF_SPLITS           32u
/* New tokens of a sequence in one call, at most. */
#define KVF_STEP_TOKENS_MAX  16u

/* Sizes that follow from the settings; nothing else decides how much is reserved. */
struct kvf_dims {
    kvf_paging paging;
    uint32_t budget_max;    /* tokens of a step's budget, at most */
    uint32_t rest_tokens;   /* of budget_tokens, beyond sink and the largest window */
    uint32_t static_tokens; /* most of a static set, sink not included */
    uint32_t ids_max;       /* most pages a list chooses */
    uint32_t spans_max;     /* per list */
    uint32_t splits_max;
    uint32_t step_tokens;   /* of a sequence in one step, at most; 1 where the host brings pages */
    uint32_t choose_lists;  /* lists that are chosen for, per row: lists, or 1 */
    uint32_t window_pages;  /* most pages that are not sealed */
    uint32_t tokens_max;    /* ids of tokens per KV head: static set, auto, oracle; 0 = unused */
    uint32_t cover_max;     /* spans of observe per KV head; 0 = unused */
    uint32_t observe_max;   /* queries of one launch of observe; 0 = unused */
    uint32_t chunk_blocks;  /* that a prefill call seals */
    uint32_t dynamic_pages; /* most pages of a list beyond those that fit anyway */
    uint64_t jobs_max;      /* digest jobs of one launch */
    uint32_t recalls;       /* 1: rows know their recent choices, of which a refresh takes tokens */
    uint32_t arena_blocks;  /* of the prefill arena; 0 = there is none */
    uint32_t scratch_blocks; /* room for a row in full precision, where pages are quantized; under
                             blocks of the caller the room of chunks; else 0 */
    uint32_t by_block;       /* 1: under blocks of the caller; rows have no tables here */
    bool on_demand;          /* memory of host and device is resident as it is written */
    uint32_t needs_mirror;   /* 1: functions of the host cannot read device memory */
    uint32_t block_count;    /* of the pool */
    uint32_t digest_blocks;  /* whose digests are on the device: all of the pool, or none */
    uint32_t bundle_blocks;  /* blocks that come and go together */
    uint32_t page_frames;    /* bundles in memory; 0 = all blocks are there, none come and go */
};

/* The host's half of a row. */
typedef struct kvf_layer {
    /* set once */
    kvf_kv_group *kv_group; /* NULL: there are lengths and positions only */
    uint32_t index;         /* of the layer in the KV group */
    uint32_t row;           /* of the KV group */
    char *ring;      /* of heads that are in no KV group, in device memory; see rings.h; or NULL */
    uint64_t *fault; /* where the device says that a key or value was not finite */
    kvf_block *blocks;   /* [blocks_max] */
    uint32_t *positions; /* [tokens_max] */
    uint8_t *by_step;    /* [tokens_max] 1: the token came with a decode step */
    /* and anew for every sequence */
    uint32_t fault_key; /* see kvf_row */

    kvf_layer_extent extent;
    kvf_layer_queries queries;
    kvf_layer_refresh refresh;
    kvf_layer_cut cut;
    uint32_t steps;       /* decode steps, for verify_interval */
    uint32_t is_fresh;    /* tables on the device hold another sequence's data */
    uint32_t is_verified; /* in this call: dense attention is compared */
    uint64_t arrivals;    /* of the pool when the page table was sent; see addressable.h */
} kvf_layer;

/* Arguments of one call: built on the host, copied to the device in stream order. */
typedef struct kvf_frame {
    kvf_carver host; /* over NULL it is dry: what a call takes is only added up */
    char *device;
    kvf_event *done;
    uint32_t is_busy;
} kvf_frame;

/* The order of calls: on one stream, or on several that wait for each other (kvf_call_begin). */
typedef struct kvf_order {
    kvf_frame frames[KVF_FRAMES];
    uint32_t next_frame;
    kvf_stream *last_stream; /* that it ended on; compared only */
    kvf_event *last_done;    /* of the last call */
    uint32_t is_listed; /* 1: the last call listed pages that the caller reads where they are */
} kvf_order;

/* Wait for all calls so far. */
KVF_CHECKED static inline kvf_status kvf_order_wait(const kvf_order *order,
                                                    const kvf_device *device)
{
    return order->last_done ? device->ops->event_wait(order->last_done) : KVF_OK;
}

/* Whose pages lie in the prefill arena; see prefill_arena.h. */
typedef struct kvf_prefill_arena {
    kvf_layer *owner;    /* NULL = nobody's */
    uint32_t first, end; /* pages that lie there */
    uint32_t is_pending; /* 1: a write-back that the order has not waited for */
} kvf_prefill_arena;

struct kvf_kv_group {
    kvf_runtime *runtime;
    kvf_context *context;
    kvf_device *device;
    const kvf_order *order;  /* that its work is in */
    kvf_cache_config config; /* resolved; layers and heads are the KV group's */
    kvf_dims dims;
    const kvf_select_policy *policy;

    kvf_tables tables;
    kvf_control control;        /* as the host sees it */
    kvf_control control_device; /* the same memory, as the device sees it */
    kvf_page_pool pool;
    kvf_residency residency;
    kvf_transfer_engine *transfer;
    kvf_stream *writeback;
    kvf_event *sealed;  /* on the caller's stream: the pages to write back are complete */
    kvf_event *written; /* on the write-back stream */
    kvf_event *chosen;  /* where the host brings pages: a choice is known; addresses were read */
    kvf_event *placed;
    uint32_t places_used;   /* of control.places */
    uint64_t pages_brought; /* of choices, which had none in memory */
    kvf_prefill_arena arena;
};

/* Every reservation that is not carved; its order is there. The reservation that it is carved from
 * comes first. */
KVF_CHECKED kvf_status kvf_kv_group_open(kvf_kv_group *kv_group);
void kvf_kv_group_close(
    kvf_kv_group *kv_group); /* half of a KV group is fine; nothing of it is enqueued */

static inline kvf_layer_counters *kvf_counters_device(const kvf_kv_group *kv_group, uint32_t index)
{
    /* Atomics across a link would be slow: there the control memory only takes copies (stats.c). */
    return (kv_group->dims.needs_mirror ? kv_group->tables.counters
                                        : kv_group->control_device.counters) +
           index;
}

/* Rows of a step, at most: tokens of all sequences. */
static inline uint32_t kvf_rows_max(const kvf_cache_config *config)
{
    return config->sequences_max * config->tokens_per_step_max;
}

/* Scores come from codes of tokens, and not from boxes of pages. */
static inline bool kvf_has_codes(const kvf_kv_group *kv_group)
{
    return kv_group->config.digest == KVF_DIGEST_CODES;
}

/* The budget of a step on a sequence of this length. */
static inline uint32_t kvf_budget_tokens(const kvf_cache_config *config, uint32_t length)
{
    const double share = (double)config->budget_share * (double)length;
    return kvf_max_u32(config->budget_tokens, (uint32_t)(share + 0.5));
}

/* Tokens of the budget beside sink and window: at least dims.rest_tokens. */
static inline uint32_t kvf_rest_tokens(const kvf_kv_group *kv_group, const kvf_layer *layer)
{
    const uint32_t sealed = layer->extent.sealed * kv_group->dims.paging.block_size;
    const uint32_t fixed = kv_group->config.sink_tokens + layer->extent.length - sealed;
    const uint32_t budget = kvf_budget_tokens(&kv_group->config, layer->extent.length);
    return budget > fixed ? budget - fixed : 0;
}

/* Queries of the layer that are on the device: the newest ones. */
static inline uint32_t kvf_kept_queries(const kvf_kv_group *kv_group, const kvf_layer *layer)
{
    return kvf_min_u32(layer->queries.count - layer->queries.from,
                       kv_group->dims.paging.query_window);
}

/* All queries of a token. */
static inline size_t kvf_queries_bytes(const kvf_paging *p)
{
    return (size_t)p->kv_heads * p->group * kvf_key_bytes(&p->shape);
}

/* Queries, and blocks of the ring, that a call may take from a row; see undo.h. */
static inline uint32_t kvf_undo_queries(const kvf_kv_group *kv_group)
{
    return kvf_min_u32(kv_group->config.tokens_per_step_max, kv_group->dims.paging.query_window);
}

static inline uint32_t kvf_undo_blocks(const kvf_kv_group *kv_group)
{
    return kvf_div_ceil_u32(kv_group->config.tokens_per_step_max, kv_group->dims.paging.block_size);
}

/* Spans of a split, of lists of at most `spans_max` spans of so many tokens each. Settings alone
 * decide, so results have the same bits on every device and however they come about. */
static inline uint32_t kvf_split(uint32_t spans_max, uint32_t span_tokens)
{
    uint32_t tokens = KVF_SPLIT_TOKENS_MIN;
    while (tokens < KVF_SPLIT_TOKENS_MAX && (uint64_t)spans_max * span_tokens > KVF_SPLITS * tokens)
        tokens *= 2;
    return tokens > span_tokens ? tokens / span_tokens : 1;
}

/* 0: pages are attended where they live. */
static inline bool kvf_moves_pages(const kvf_kv_group *kv_group)
{
    return kvf_transfer_moves(kv_group->config.transfer);
}

/* Sealed pages have another storage format than those of the window. */
static inline bool kvf_quantizes_pages(const kvf_kv_group *kv_group)
{
    return kv_group->config.pages != KVF_PAGES_NATIVE;
}

/* Under blocks of the caller: tokens of window and tails are brought to their region, from memory
 * across a link, or because they are quantized where they live. */
static inline bool kvf_brings_tokens(const kvf_kv_group *kv_group)
{
    return kvf_moves_pages(kv_group) || kvf_quantizes_pages(kv_group);
}

/* The device cache that it has, without addresses. */
static inline kvf_residency kvf_kv_group_residency(const kvf_kv_group *kv_group)
{
    const kvf_paging *p = &kv_group->dims.paging;
    return (kvf_residency){.device = kv_group->device,
                           .heads = p->kv_heads,
                           .pages = p->pool_pages,
                           .slots = p->slots,
                           .is_tagged = kv_group->dims.by_block,
                           .slot_bytes =
                               kvf_moves_pages(kv_group) ? kvf_stored_page_bytes(&p->shape) : 0};
}

static inline uint32_t kvf_sealed_blocks(const kvf_kv_group *kv_group, uint32_t length)
{
    const uint32_t local = kv_group->config.local_tokens;
    return length < local ? 0 : (length - local) / kv_group->dims.paging.block_size;
}

#endif
