/* SPDX-License-Identifier: Apache-2.0 */

/* The file of a saved sequence; see the header. A reader trusts nothing before it is checked. */

#include "saved_format.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include <kvferry/setting.h>

#include "extents.h"

#define MAGIC            "KVFSEQ\r\n"
#define BYTE_ORDER_MARK  0x01020304u
#define HEADER_BYTES_MAX (UINT64_C(1) << 30)
#define COUNT_MAX        (1u << 26)
#define EXTENT_MAX       (1u << 30)

_Static_assert(sizeof(kvf_saved_layer) == 64 && sizeof(kvf_saved_head) % 8 == 0,
               "what is in a file has no holes");

/* ---- sizes ---- */

kvf_shape kvf_saved_shape(const kvf_saved_head *head)
{
    return (kvf_shape){.dtype = (kvf_dtype)head->dtype,
                       .head_dim = head->head_dim,
                       .value_dim = head->value_dim,
                       .page_size = head->page_size,
                       .pages = (kvf_pages)head->pages};
}

void kvf_snapshot_carve(const kvf_saved_head *head, const kvf_saved_layer *l, kvf_carver *k,
                        kvf_snapshot *out)
{
    const kvf_shape shape = kvf_saved_shape(head);
    const uint64_t token = kvf_token_bytes(&shape), run = head->block_size * token;
    const uint64_t group = head->query_heads / head->kv_heads;
    const uint64_t heads = l->flags & KVF_SAVED_FRESH ? 0 : l->heads;
    kvf_snapshot i;
    KVF_CARVE(k, i.positions, l->length);
    KVF_CARVE(k, i.by_step, heads ? l->length : 0);
    KVF_CARVE(k, i.ring, l->length ? l->streaming : 0, l->ring_pages, run);
    KVF_CARVE(k, i.static_count, heads);
    KVF_CARVE(k, i.static_ids, heads, l->static_room);
    KVF_CARVE(k, i.static_kv, heads, l->static_room, token);
    KVF_CARVE(k, i.bits, heads, l->sealed);
    KVF_CARVE(k, i.share, heads && (l->flags & KVF_SAVED_AUTO) ? 2 : 0);
    KVF_CARVE(k, i.queries, l->query_window, heads, group, kvf_key_bytes(&shape));
    KVF_CARVE(k, i.spare, l->flags & KVF_SAVED_SPARE ? heads : 0, run);
    KVF_CARVE(k, i.chosen_at, l->flags & KVF_SAVED_RECENT ? heads : 0, l->sealed,
              head->block_size / head->page_size);
    if (out)
        *out = i;
}

uint64_t kvf_snapshot_bytes(const kvf_saved_head *head, const kvf_saved_layer *layer)
{
    kvf_carver carver = {0};
    kvf_snapshot_carve(head, layer, &carver, NULL);
    return carver.bytes;
}

uint32_t kvf_saved_blocks(const kvf_saved_head *head, const kvf_saved_layer *layer)
{
    return layer->heads ? kvf_div_ceil_u32(layer->length, head->block_size) : 0;
}

size_t kvf_saved_sealed_bytes(const kvf_saved_head *head, const kvf_saved_layer *layer)
{
    const kvf_shape shape = kvf_saved_shape(head);
    return layer->heads * (head->block_size / head->page_size) * kvf_stored_page_bytes(&shape);
}

size_t kvf_saved_block_bytes(const kvf_saved_head *head, const kvf_saved_layer *layer)
{
    const kvf_shape shape = kvf_saved_shape(head);
    return layer->heads * head->block_size * kvf_token_bytes(&shape);
}

uint64_t kvf_saved_blocks_bytes(const kvf_saved_head *head, const kvf_saved_layer *layer)
{
    const uint32_t blocks = kvf_saved_blocks(head, layer);
    const uint32_t sealed = kvf_min_u32(blocks, layer->sealed);
    return (uint64_t)sealed * kvf_saved_sealed_bytes(head, layer) +
           (uint64_t)(blocks - sealed) * kvf_saved_block_bytes(head, layer);
}

uint64_t kvf_saved_data_bytes(const kvf_saved_header *header)
{
    const kvf_saved_head *head = header->head;
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < head->layers && bytes <= KVF_CARVE_MAX; i++) {
        const kvf_saved_layer *l = &header->layers[i];
        bytes += kvf_snapshot_bytes(head, l);
        bytes += kvf_saved_blocks_bytes(head, l);
    }
    return bytes;
}

void kvf_saved_carve_header(kvf_saved_head *head, uint64_t extents, char *base,
                            kvf_saved_header *out)
{
    kvf_carver k = {.base = base};
    kvf_saved_header h;
    const uint64_t layers = head->layers, heads = head->kv_heads;
    KVF_CARVE(&k, h.head, 1);
    KVF_CARVE(&k, h.layers, layers);
    KVF_CARVE(&k, h.mask, head->has_mask ? layers : 0, heads);
    KVF_CARVE(&k, h.attention, layers, 2 + head->query_heads);
    KVF_CARVE(&k, h.windows, head->has_windows ? layers : 0);
    KVF_CARVE(&k, h.settings, head->settings_bytes);
    KVF_CARVE(&k, h.checksums, extents);
    KVF_CARVE(&k, h.note, head->note_bytes);
    head->header_bytes = kvf_round_up(k.bytes, KVF_SAVED_HEAD_ALIGN);
    if (out)
        *out = h;
}

float *kvf_saved_attention(const kvf_saved_header *header, uint32_t layer)
{
    return header->attention + (size_t)layer * (2 + header->head->query_heads);
}

static uint64_t checksum_of(const kvf_saved_head *head)
{
    const char *data = (const char *)head;
    const size_t at = offsetof(kvf_saved_head, checksum) + sizeof head->checksum;
    return kvf_checksum_of(data + at, head->header_bytes - at) ^
           kvf_checksum_of(data, offsetof(kvf_saved_head, checksum));
}

void kvf_saved_seal_header(kvf_saved_header *header)
{
    kvf_saved_head *head = header->head;
    memcpy(head->magic, MAGIC, sizeof head->magic);
    head->byte_order = BYTE_ORDER_MARK;
    head->checksum = checksum_of(head);
}

/* ---- reading ---- */

kvf_status kvf_saved_measure(kvf_context *context, const char *path, const void *first,
                             size_t bytes, uint64_t *header_bytes)
{
    kvf_saved_head head;
    if (bytes < sizeof head)
        KVF_FAIL(context, KVF_CORRUPT, "%s has %zu bytes: it is no saved sequence", path, bytes);
    memcpy(&head, first, sizeof head);
    if (memcmp(head.magic, MAGIC, sizeof head.magic) != 0)
        KVF_FAIL(context, KVF_CORRUPT, "%s is no saved sequence: it begins with other bytes", path);
    if (head.byte_order != BYTE_ORDER_MARK)
        KVF_FAIL(context, KVF_UNSUPPORTED,
                 "%s was saved by a machine of another byte order; save it on this one", path);
    if (head.version != KVF_SAVED_VERSION)
        KVF_FAIL(context, KVF_UNSUPPORTED,
                 "%s has format version %u: this library reads %u; save it again with this one",
                 path, head.version, KVF_SAVED_VERSION);
    if (head.header_bytes < sizeof head || head.header_bytes > HEADER_BYTES_MAX ||
        head.header_bytes % KVF_SAVED_HEAD_ALIGN != 0)
        KVF_FAIL(context, KVF_CORRUPT,
                 "%s: its header says that it has %" PRIu64 " bytes; the file is damaged", path,
                 head.header_bytes);
    *header_bytes = head.header_bytes;
    return KVF_OK;
}

static bool is_geometry(const kvf_saved_head *h)
{
    return h->layers >= 1 && h->layers <= 1024 && h->kv_heads >= 1 && h->kv_heads <= 1024 &&
           h->query_heads % h->kv_heads == 0 && h->query_heads >= h->kv_heads &&
           h->query_heads / h->kv_heads <= KVF_GROUP_MAX_HEADS && h->head_dim >= 16 &&
           h->head_dim <= KVF_HEAD_DIM_MAX && h->head_dim % 16 == 0 && h->dtype <= KVF_FP32 &&
           h->value_dim < h->head_dim &&
           (h->value_dim == 0 || (h->head_dim - h->value_dim) % 32 == 0) &&
           h->pages <= KVF_PAGES_K8V4 && h->page_size >= 1 && h->page_size <= KVF_PAGE_SIZE_MAX &&
           (h->page_size & (h->page_size - 1)) == 0 && h->block_size >= h->page_size &&
           h->block_size <= 64 && h->block_size % h->page_size == 0;
}

static bool is_layer(const kvf_saved_head *h, const kvf_saved_layer *l)
{
    return l->heads <= h->kv_heads && l->heads + l->streaming == h->kv_heads &&
           (l->flags & ~(uint32_t)KVF_SAVED_FLAGS) == 0 && l->length <= COUNT_MAX &&
           (uint64_t)l->sealed * h->block_size <= l->length &&
           !(l->flags & KVF_SAVED_FRESH && l->heads && l->length) &&
           !(l->flags & KVF_SAVED_SPARE && (l->sealed == 0 || h->pages == KVF_PAGES_NATIVE)) &&
           l->static_room <= COUNT_MAX && l->query_window <= COUNT_MAX &&
           l->ring_pages <= COUNT_MAX && l->queries_from <= l->queries && l->kept <= l->length &&
           l->static_from <= l->length && l->share_from <= l->length && l->exact_from <= l->length;
}

/* Numbers that a layer may have; see kvf_attention_params. */
static bool is_attention(const kvf_saved_head *h, const float *p)
{
    bool is_right = p[0] > 0.0f && !isinf(p[0]) && p[1] >= 0.0f && !isinf(p[1]);
    for (uint32_t i = 0; is_right && i < h->query_heads; i++)
        is_right = p[2 + i] < INFINITY;
    return is_right;
}

/* The parts, of a header whose checksum is right. */
static bool check_parts(void *data, size_t bytes, uint64_t file_bytes, kvf_saved_header *out)
{
    kvf_saved_head *head = data;
    if (!is_geometry(head) || head->has_mask > 1 || head->has_windows > 1 ||
        head->note_bytes > KVF_SAVED_NOTE_MAX || head->extent_bytes == 0 ||
        head->extent_bytes > EXTENT_MAX || head->data_bytes > KVF_CARVE_MAX ||
        file_bytes - bytes != head->data_bytes)
        return false;
    const uint64_t extents =
        head->data_bytes / head->extent_bytes + (head->data_bytes % head->extent_bytes != 0);
    kvf_saved_head copy = *head;
    kvf_saved_carve_header(&copy, extents, NULL, NULL);
    if (copy.header_bytes != bytes || head->settings_bytes == 0)
        return false;
    kvf_saved_carve_header(head, extents, data, out);
    for (uint32_t i = 0; i < head->layers; i++)
        if (!is_layer(head, &out->layers[i]) || !is_attention(head, kvf_saved_attention(out, i)) ||
            (out->windows && (out->windows[i] == 0) != (out->layers[i].streaming == 0)))
            return false;
    return out->settings[head->settings_bytes - 1] == '\0' &&
           memchr(head->model, '\0', sizeof head->model) &&
           memchr(head->library, '\0', sizeof head->library) &&
           kvf_saved_data_bytes(out) == head->data_bytes;
}

kvf_status kvf_saved_parse(kvf_context *context, const char *path, void *data, size_t bytes,
                           uint64_t file_bytes, kvf_saved_header *out)
{
    uint64_t header_bytes = 0;
    KVF_TRY(kvf_saved_measure(context, path, data, bytes, &header_bytes));
    if (header_bytes != bytes || bytes > file_bytes ||
        checksum_of(data) != ((kvf_saved_head *)data)->checksum)
        KVF_FAIL(context, KVF_CORRUPT,
                 "%s: its header is not the one that was saved; the file is damaged", path);
    if (!check_parts(data, bytes, file_bytes, out))
        KVF_FAIL(context, KVF_CORRUPT,
                 "%s: its header contradicts itself, or the file's size of %" PRIu64
                 " bytes; the file is damaged or was cut short",
                 path, file_bytes);
    return KVF_OK;
}

/* ---- settings ---- */

size_t kvf_saved_settings_write(const kvf_cache_config *config, char *text, size_t capacity)
{
    const kvf_setting *s;
    size_t n = 0;
    if (capacity)
        text[0] = '\0';
    for (uint32_t i = 0; (s = kvf_cache_setting(i)) != NULL; i++) {
        char value[128];
        /* A path says nothing about a sequence, nor does the type that its tokens came in. */
        if (s->kind == KVF_SETTING_TEXT || strcmp(s->name, "tensors") == 0)
            continue;
        n += (size_t)snprintf(n < capacity ? text + n : NULL, n < capacity ? capacity - n : 0,
                              "%s=%s\n", s->name, kvf_setting_show(s, config, value, sizeof value));
    }
    return n + 1;
}

bool kvf_saved_setting(const char *settings, const char *name, char *value, size_t capacity)
{
    const size_t length = strlen(name);
    for (const char *line = settings; *line;) {
        const char *end = strchr(line, '\n');
        if (!end)
            return false;
        if (strncmp(line, name, length) == 0 && line[length] == '=') {
            snprintf(value, capacity, "%.*s", (int)(end - line - (ptrdiff_t)length - 1),
                     line + length + 1);
            return true;
        }
        line = end + 1;
    }
    return false;
}
