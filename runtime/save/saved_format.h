/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_SAVED_FORMAT_H
#define KVF_RUNTIME_SAVED_FORMAT_H

/*
 * The file of a saved sequence: a header, then the layers one after the other.
 *
 * A layer is its state (kvf_snapshot), then its blocks: sealed ones as they are in the pool, and
 * the others in full precision.
 * Digests are there only if they tell of what happened: a resident refresh widens the box of a page
 * that it cannot read, and unless boxes are minmax that is another box than the page's. All others
 * follow from pages and static bits. The header says every size; it has a checksum over itself and
 * one per extent of the layers. Numbers are in the byte order of the machine that wrote them, which
 * the header tells. It stores the attention parameters of all layers, and windows of several
 * lengths; a single length is in the settings.
 *
 * Knows no sequence and no device. Invariant: a header that was parsed is whole, its sizes add up
 * to those of the file, and every count is in the range of a cache.
 */

#include <stdbool.h>

#include "common/carve.h"
#include "context.h"
#include "paging.h"

#define KVF_SAVED_VERSION    6u
#define KVF_SAVED_MODEL_MAX  64u
#define KVF_SAVED_NOTE_MAX   (64u << 20)
#define KVF_SAVED_HEAD_ALIGN 4096u

/* Bits of kvf_saved_layer.flags. */
enum {
    KVF_SAVED_FRESH = 1, /* nothing was ever written: there is no state */
    KVF_SAVED_NEEDS_EXACT = 2,
    KVF_SAVED_AUTO = 4, /* static_ratio = auto */
    KVF_SAVED_SPARE =
        8, /* the newest sealed block is there as it was before it was quantized, too */
    KVF_SAVED_RECENT = 16, /* recent choices are there */
    KVF_SAVED_FLAGS = 31,
};

typedef struct kvf_saved_layer {
    uint32_t length;
    uint32_t sealed; /* blocks */
    uint32_t queries, since_refresh, steps, flags;
    uint32_t heads;       /* that have pages; heads + streaming == kv_heads */
    uint32_t streaming;   /* heads that have a ring */
    uint32_t static_room; /* per head */
    uint32_t query_window;
    uint32_t ring_pages;   /* of a streaming head, of a block's tokens each */
    uint32_t queries_from; /* those before it are lost */
    uint32_t kept;         /* tokens that an eviction chose */
    uint32_t static_from, share_from, exact_from; /* as in kvf_layer */
} kvf_saved_layer;

typedef struct kvf_saved_head {
    char magic[8];
    uint32_t version, byte_order;
    uint64_t checksum; /* of the header, this field 0 */
    uint64_t header_bytes, data_bytes;
    uint32_t note_bytes, settings_bytes, extent_bytes;
    uint16_t has_mask, has_windows;
    uint32_t layers, kv_heads, query_heads;
    uint16_t head_dim, value_dim;                 /* value_dim 0 = head_dim */
    uint32_t dtype, page_size, block_size, pages; /* storage format: kvf_pages */
    char model[KVF_SAVED_MODEL_MAX];              /* text of the caller */
    char library[16];                             /* version that wrote it */
} kvf_saved_head;

/* Where the parts of a header are; all in one piece of memory that begins with the head. */
typedef struct kvf_saved_header {
    kvf_saved_head *head;
    kvf_saved_layer *layers; /* [layers] */
    uint8_t *mask;           /* [layers, kv_heads], or NULL */
    float *attention;    /* [layers, 2 + query_heads] scale, soft cap, sinks (-infinity = none) */
    uint32_t *windows;   /* [layers] as kvf_cache_config.layer_windows, or NULL */
    char *settings;      /* "name=value\n" of every setting, NUL-terminated */
    uint64_t *checksums; /* [extents] */
    char *note;          /* [note_bytes] of the caller */
} kvf_saved_header;

/* State of a layer besides its blocks. An array that it does not have is NULL. */
typedef struct kvf_snapshot {
    uint32_t *positions;    /* [length] */
    uint8_t *by_step;       /* [length] as in kvf_layer */
    char *ring;             /* [ring_pages, streaming, run bytes] */
    uint32_t *static_count; /* [heads] */
    uint32_t *static_ids;   /* [heads, static_room] */
    char *static_kv;        /* [heads, static_room, token bytes] */
    uint64_t *bits;         /* [heads, sealed] */
    uint32_t *share;        /* [2] */
    char *queries;          /* [query_window, heads * group, key bytes] */
    char *spare;            /* [heads, block bytes] of one head */
    uint32_t *chosen_at;    /* [heads, pages of sealed blocks] as in kvf_row */
} kvf_snapshot;

kvf_shape kvf_saved_shape(const kvf_saved_head *head); /* of a page */
void kvf_snapshot_carve(const kvf_saved_head *head, const kvf_saved_layer *layer,
                        kvf_carver *carver, kvf_snapshot *out);
uint64_t kvf_snapshot_bytes(const kvf_saved_head *head, const kvf_saved_layer *layer);
/* Blocks of a layer, and the bytes of one that is sealed and of one that is not. */
uint32_t kvf_saved_blocks(const kvf_saved_head *head, const kvf_saved_layer *layer);
size_t kvf_saved_sealed_bytes(const kvf_saved_head *head, const kvf_saved_layer *layer);
size_t kvf_saved_block_bytes(const kvf_saved_head *head, const kvf_saved_layer *layer);
uint64_t kvf_saved_blocks_bytes(const kvf_saved_head *head, const kvf_saved_layer *layer);
/* Bytes of all layers; more than KVF_CARVE_MAX if they are more than any file. */
uint64_t kvf_saved_data_bytes(const kvf_saved_header *header);

/* [2 + query_heads] of a layer. */
float *kvf_saved_attention(const kvf_saved_header *header, uint32_t layer);

/* A header by the counts of `head`, whose header_bytes it sets; NULL base: only that. */
void kvf_saved_carve_header(kvf_saved_head *head, uint64_t extents, char *base,
                            kvf_saved_header *out);
/* Everything else is there: its checksum. */
void kvf_saved_seal_header(kvf_saved_header *header);

/* Bytes that a whole header takes, from its first KVF_SAVED_HEAD_ALIGN bytes. KVF_CORRUPT if it is
 * no such file, KVF_UNSUPPORTED for another version or byte order. */
KVF_CHECKED kvf_status kvf_saved_measure(kvf_context *context, const char *path, const void *first,
                                         size_t bytes, uint64_t *header_bytes);
/* `data` is the whole header, aligned to 8, and stays; `file_bytes` is the size of the file. */
KVF_CHECKED kvf_status kvf_saved_parse(kvf_context *context, const char *path, void *data,
                                       size_t bytes, uint64_t file_bytes, kvf_saved_header *out);

/* Settings as text; returns the bytes with the NUL, also if they are more than `capacity`. */
size_t kvf_saved_settings_write(const kvf_cache_config *config, char *text, size_t capacity);
/* Value of a setting in such a text. False if it has none. */
bool kvf_saved_setting(const char *settings, const char *name, char *value, size_t capacity);

#endif
