/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_LAYOUT_H
#define KVF_RUNTIME_LAYOUT_H

/*
 * Arrays of a KV group by name, type and shape, and the reservations that they are carved from.
 *
 * Knows nothing of who writes them. An array that these settings do not need is NULL. Shapes:
 * rows = sequences_max * layers, S = sequences_max, R = S * tokens_per_step_max, lists =
 * paging.lists, chosen = dims.choose_lists; the other names are those of kvf_dims and kvf_paging.
 */

#include "common/carve.h"
#include "paging.h"
#include "runtime.h"

typedef struct kvf_dims kvf_dims;
typedef struct kvf_kv_group kvf_kv_group;

/* Pages that lists choose, and the way of those that have no slot. `flights` of them are under way
 * at once: 1, or 2 where the host brings pages (bring.h). */
typedef struct kvf_choice {
    uint32_t ids_max;      /* most pages that a list chooses */
    int32_t *ids;          /* [R, lists, ids_max] */
    uint32_t *id_count;    /* [R, lists] */
    int32_t *list_ids;     /* [R, chosen, ids_max] where one choice serves several lists */
    uint32_t *list_count;  /* [R, chosen] */
    int32_t *slot_of_id;   /* [R, lists, ids_max] */
    uint32_t *missed;      /* [R, lists, ids_max] */
    kvf_miss *misses;      /* [R, lists, ids_max] */
    uint32_t *miss_count;  /* [R, lists] */
    const void **from;     /* [flights, R, lists, ids_max] */
    void **to;             /* [flights, R, lists, ids_max] */
    uint32_t *fetch_count; /* [flights] */
} kvf_choice;

/* Rows (sequence, layer), which have these for their life. */
typedef struct kvf_row_tables {
    /* reservation kv */
    char *rings;     /* [rows, ring_blocks + spare_blocks, block bytes] */
    char *static_kv; /* [2, rows, kv_heads, static_pages, page bytes] */
    /* reservation digest */
    char *digests; /* [kv_heads, digest_blocks, digest_bytes] of all rows, by block of the pool */
    int8_t *centroids;         /* [rows, kv_heads, segments_max, head_dim] */
    uint16_t *centroid_scales; /* [rows, kv_heads, segments_max] */
    /* reservation table */
    void **blocks;          /* [rows, blocks_max] */
    uint32_t *block_of;     /* [rows, blocks_max] which block of the pool each is */
    uint32_t *chosen_at;    /* [rows, kv_heads, pages_max] of a static set; see kvf_row */
    uint64_t *bits;         /* [rows, kv_heads, blocks_max] */
    uint32_t *static_ids;   /* [2, rows, kv_heads, static room] */
    uint32_t *static_count; /* [2, rows, kv_heads] */
    char *queries;          /* [rows, query_window, query_heads, head_dim] */
    uint32_t *share;        /* [rows, 2] of static_ratio = auto */
} kvf_row_tables;

/* Room for one row, or for chunks, in full precision; see call.h. */
typedef struct kvf_scratch_tables {
    char *blocks;  /* [scratch_blocks, block bytes] */
    void **table;  /* [scratch_blocks] */
    kvf_row *view; /* [1] if pages are quantized */
} kvf_scratch_tables;

/* Pages scored by codes. */
typedef struct kvf_code_scores {
    int8_t *rotated; /* [R, query_heads, head_dim] queries */
    float *scale;    /* [R, query_heads] of `rotated` */
    uint16_t *mass;  /* [R, query_heads, pages_max] */
    float *tile_max; /* [R, query_heads, tiles of pages_max] */
    float *tile_sum; /* [R, query_heads, tiles of pages_max] */
} kvf_code_scores;

/* Segments that coarse heads rank and choose. */
typedef struct kvf_segment_scores {
    float *scores;   /* [R, query_heads, segments_max] */
    float *ranked;   /* [R, lists, segments_max] */
    int32_t *ids;    /* [R, lists, segments_max] */
    uint32_t *count; /* [R, lists] */
    uint64_t *bits;  /* [R, lists, blocks_max] of tokens that are left to score by codes */
} kvf_segment_scores;

/* One row looked at in full; see kvf_cover_args. */
typedef struct kvf_cover_tables {
    kvf_span *spans;      /* [kv_heads, cover_max] */
    uint32_t *span_index; /* [kv_heads, cover_max] */
    uint32_t *span_count; /* [kv_heads] */
    uint32_t *first;      /* [kv_heads] */
    uint32_t *count;      /* [kv_heads] */
    uint32_t *take;       /* [kv_heads] */
    uint32_t *limit;      /* [query_window] */
} kvf_cover_tables;

/* Tokens of that row: their scores, and the best. */
typedef struct kvf_token_tables {
    float *query_max;  /* [kv_heads, chunks of spans, group * observe_max] */
    float *query_sum;  /* the same */
    float *score;      /* [kv_heads, cover_max, block_size] at most */
    uint32_t *work;    /* likewise */
    int32_t *ids;      /* [kv_heads, tokens_max of dims] */
    uint32_t *count;   /* [kv_heads] */
    int32_t *ids_b;    /* the same once more, of static_ratio = auto */
    uint32_t *count_b; /* [kv_heads] */
} kvf_token_tables;

/* Copies of arrays that a call of decode changes; see undo.h. Only where the host brings pages,
 * and of one layer. T and B are kvf_undo_queries and kvf_undo_blocks. */
typedef struct kvf_undo_tables {
    char *blocks;         /* [S, B + spare_blocks, block bytes] of the ring, and the spare one */
    char *static_kv;      /* [S, kv_heads, static_pages, page bytes] if a call may refresh twice */
    uint32_t *static_ids; /* [S, kv_heads, static room] likewise */
    uint32_t *static_count;       /* [S, kv_heads] */
    uint64_t *bits;               /* [S, kv_heads, blocks_max] of a static set */
    uint32_t *share;              /* [S, 2] of static_ratio = auto */
    uint32_t *chosen_at;          /* [S, kv_heads, pages_max] */
    char *queries;                /* [S, T, query_heads, head_dim] */
    uint64_t *faults;             /* [S] */
    kvf_layer_counters *counters; /* [1] */
} kvf_undo_tables;

/* In device memory. All but `rows` is of one call, and in reservation table but for the arena
 * and the room in full precision. */
typedef struct kvf_tables {
    kvf_row_tables rows;
    char *arena;       /* [arena_blocks, block bytes]; see prefill_arena.h */
    void **arena_pool; /* [arena_blocks] */
    kvf_scratch_tables scratch;
    kvf_undo_tables undo;

    /* choosing and fetching */
    kvf_choice now;
    uint32_t *choose; /* [R, chosen] pages to choose */
    float *scores;    /* [R, query_heads, pages_max] by boxes */
    kvf_code_scores by_codes;
    float *reduced; /* [R, chosen, pages_max] */
    kvf_segment_scores coarse;
    uint32_t *topk_work; /* [R, chosen, pages_max] */
    uint32_t *arrived;   /* [R, lists] blocks that share a list */
    uint64_t *masks;     /* [R, lists, ids_max] of a policy that chooses tokens */

    /* attending */
    kvf_span *spans;      /* [R, lists, spans_max] */
    uint32_t *span_count; /* [R, lists] */
    float *partial_o;     /* [splits, query_heads, value_dim] of a step, or of a row to verify */
    float *partial_lse;   /* [splits, query_heads] */
    float *lse;           /* [R, query_heads] */
    char *verify_out;     /* [query_heads, value_dim] */
    float *verify_lse;    /* [query_heads] */

    kvf_cover_tables cover;
    kvf_token_tables tokens;

    kvf_digest_job *jobs;         /* [jobs_max] */
    uint32_t *chunk_fault;        /* [1] */
    kvf_layer_counters *counters; /* [layers] where the control memory only takes copies */
} kvf_tables;

/* Host memory that the device sees: carved twice, from the address of either. */
typedef struct kvf_control {
    kvf_layer_counters *counters; /* [layers] */
    /* Only where the host brings pages: */
    void **places;        /* [S, blocks_max] addresses for page tables */
    uint8_t *late;        /* [S, lists, ids_max] where pages stay: 1 = it is not addressable yet */
    kvf_miss *parted;     /* [2, S, lists, ids_max] where they move: those that are, and the rest */
    uint32_t *part_count; /* [2, S, lists] */
    /* Words that the host reads and writes for the device, where it cannot do so in place: of a
     * custom choice, of page lists that are checked, or of what a step misses where the host brings
     * pages.
     */
    struct {
        uint32_t *choose;       /* [R, lists] */
        float *scores;          /* [R, lists, pages_max] */
        uint64_t *bits;         /* [R, lists, blocks_max] */
        int32_t *ids;           /* [R, lists, ids_max] */
        uint32_t *id_count;     /* [R, lists] */
        int32_t *indptr;        /* [S * lists + 1] */
        int32_t *indices;       /* [S, lists, spans_max] */
        int32_t *last_page_len; /* [S, lists] */
        kvf_miss *misses;       /* [S, lists, ids_max] */
        uint32_t *miss_count;   /* [S, lists] */
    } mirror;
} kvf_control;

typedef struct kvf_reservation {
    kvf_carver kv, digest, table;       /* device memory */
    kvf_carver control, control_device; /* the same bytes */
    kvf_carver host;
} kvf_reservation;

/* From settings, dims and frame_bytes: the bytes of `r`, and the plan. KVF_INVALID if they
 * overflow.
 */
KVF_CHECKED kvf_status kvf_layout_plan(kvf_cache *cache, kvf_reservation *r);
/* Every array to its place. */
void kvf_layout_carve(kvf_cache *cache, kvf_reservation *r);

static inline uint64_t kvf_reservation_bytes(const kvf_reservation *r)
{
    return r->kv.bytes + r->digest.bytes + r->table.bytes + r->control.bytes + r->host.bytes;
}

kvf_transfer_config kvf_kv_group_transfer_config(const kvf_kv_group *kv_group);

#endif
