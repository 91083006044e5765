/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Calls of kvferry/blocks.h, for fuzz_api.c: tokens put anywhere, rows with any tables, lengths and
 * regions, chunks, copies, layers bound anew.
 *
 * Knows the public headers, and of what is inside what quantization keeps of a token. For every
 * input there is no crash, and nothing beyond an end is read; a call is refused or done;
 * exactly the rows that the header calls bad are NaN, and are counted; the others are finite, have
 * the same bits in other regions, and equal a naive dense attention, over what was quantized where
 * pages are, where all tokens are attended; statistics add up. A broken promise aborts.
 */

#include "fuzz_library.h"

#include <kvferry/blocks.h>

#include <string.h>

#include "quantized.h"

enum {
    REGIONS = 3,
    TOKENS_MAX = 320,
    LAYERS_MAX = 2,
    KV_HEADS_MAX = 2,
    QUERY_HEADS_MAX = 4,
    DIM = 64,
    BLOCKS = 7,
    BLOCK_TOKENS_MAX = 64,
    STORE_TOKENS = BLOCKS * BLOCK_TOKENS_MAX,
    TABLE_MAX = TOKENS_MAX / 32,
    QUERIES = 96, /* of a chunk call */
    PUT_MAX = 40,
    OPERATIONS_MAX = 40,
    GIVEN = 30, /* pages that a list of the caller names */
};

/* The content of a layer, by our own account. */
typedef struct model {
    float kv[STORE_TOKENS][KV_HEADS_MAX][2 * DIM]; /* a key, and its value */
    uint8_t is_nonfinite[STORE_TOKENS];
} model;

/* Rows of a call. */
typedef struct call {
    kvf_blocks_rows rows;
    int32_t table[REGIONS][TABLE_MAX + 1];
    int32_t lengths[REGIONS];
    int32_t regions[REGIONS];
    uint32_t starts[REGIONS + 1], contexts[REGIONS];
} call;

typedef struct world {
    fuzz_input in;
    kvf_runtime *runtime;
    kvf_stream *stream;
    kvf_blocks *blocks;
    kvf_blocks_config config;
    uint32_t random;
    uint32_t params; /* see fuzz_params_of */
    int gives;       /* steps are told which pages to select */
    int has_windows; /* see fuzz_has_windows */
    uint8_t kinds[LAYERS_MAX * KV_HEADS_MAX];
    uint32_t windows[LAYERS_MAX];
    size_t stride;                /* of a block's codes */
    char *codes, *other;          /* [layers, blocks, stride]: bound, and not */
    uint64_t bad_rows, bad_slots; /* as they must be counted */
    model models[LAYERS_MAX];
    float q[QUERIES * QUERY_HEADS_MAX * DIM];
    float k[STORE_TOKENS * KV_HEADS_MAX * DIM];
    float v[STORE_TOKENS * KV_HEADS_MAX * DIM];
    float out[QUERIES * QUERY_HEADS_MAX * DIM];
    float again[QUERIES * QUERY_HEADS_MAX * DIM];
    float lse[REGIONS * QUERY_HEADS_MAX];
    int64_t slots[STORE_TOKENS];
    int32_t page_ids[REGIONS * KV_HEADS_MAX * GIVEN];
} world;

static void fill(world *w, float *values, size_t count)
{
    fuzz_fill(&w->random, values, count);
}

static void settle(const world *w)
{
    PROMISE(kvf_stream_wait(w->stream) == KVF_OK);
}

static uint32_t draw(world *w, uint32_t least, uint32_t most)
{
    return fuzz_range(&w->in, least, most);
}

static uint32_t token_count(const world *w)
{
    return w->config.block_count * w->config.block_tokens;
}

static uint32_t kv_floats(const world *w)
{
    return w->config.cache.kv_heads * w->config.cache.head_dim;
}

static uint32_t q_floats(const world *w)
{
    return w->config.cache.query_heads * w->config.cache.head_dim;
}

/* ---- tokens ---- */

/* A token of the account becomes what quantization keeps of it. */
static void keep_quantized(const world *w, float (*kv)[2 * DIM])
{
    const kvf_shape s = {KVF_FP32, DIM, 1, w->config.cache.pages, 0};
    float x[DIM];
    uint64_t page[64];
    PROMISE(kvf_stored_page_bytes(&s) <= sizeof page);
    for (uint32_t h = 0; h < w->config.cache.kv_heads; h++) {
        kvf_quantize_token(&s, page, 0, kv[h], x);
        kvf_dequantize_token(&s, page, 0, kv[h], x);
    }
}

/* Row `row` of w->k and w->v joins the account. */
static void account(world *w, uint32_t layer, uint32_t row, uint32_t at)
{
    model *m = &w->models[layer];
    const size_t first = (size_t)row * kv_floats(w);
    m->is_nonfinite[at] = 0;
    for (uint32_t h = 0; h < w->config.cache.kv_heads; h++) {
        float *kv = m->kv[at][h];
        memcpy(kv, w->k + first + (size_t)h * DIM, DIM * sizeof *kv);
        memcpy(kv + DIM, w->v + first + (size_t)h * DIM, DIM * sizeof *kv);
        for (uint32_t d = 0; d < 2 * DIM; d++)
            m->is_nonfinite[at] = m->is_nonfinite[at] || !isfinite(kv[d]);
    }
    if (!m->is_nonfinite[at] && w->config.cache.pages != KVF_PAGES_NATIVE)
        keep_quantized(w, m->kv[at]);
}

/* w->slots and w->k, w->v to a layer. */
static void put(world *w, uint32_t layer, uint32_t tokens)
{
    const kvf_blocks_put_args args = {
        .layer = layer, .tokens = tokens, .k = w->k, .v = w->v, .slots = w->slots};
    const kvf_status status = kvf_blocks_put(w->blocks, &args, w->stream);
    PROMISE(status == (layer < w->config.cache.layers ? KVF_OK : KVF_INVALID));
    if (status != KVF_OK)
        return;
    settle(w);
    for (uint32_t i = 0; i < tokens; i++) {
        const int64_t slot = w->slots[i];
        if (slot >= 0 && slot < token_count(w))
            account(w, layer, i, (uint32_t)slot);
        w->bad_slots += slot >= (int64_t)token_count(w);
    }
}

/* All tokens of a layer, so that rows may name any. */
static void put_all(world *w, uint32_t layer)
{
    const uint32_t all = token_count(w);
    for (uint32_t i = 0; i < all; i++)
        w->slots[i] = i;
    fill(w, w->k, (size_t)all * kv_floats(w));
    fill(w, w->v, (size_t)all * kv_floats(w));
    put(w, layer, all);
}

/* Tokens side by side, wherever; some are none, and one may not be a number. */
static void put_some(world *w)
{
    const uint32_t layer = draw(w, 0, w->config.cache.layers);
    const uint32_t tokens = draw(w, 0, PUT_MAX), first = draw(w, 0, 255) * 2;
    const uint32_t bad = draw(w, 0, 255);
    fill(w, w->k, (size_t)tokens * kv_floats(w));
    fill(w, w->v, (size_t)tokens * kv_floats(w));
    for (uint32_t i = 0; i < tokens; i++)
        w->slots[i] = first + i < token_count(w) ? (int64_t)first + i : -1;
    if (bad < 16 && bad < tokens)
        w->slots[bad] = INT64_MAX - bad;
    else if (bad < 32 && bad < tokens)
        w->v[bad * kv_floats(w)] = bad % 2 ? NAN : INFINITY;
    put(w, layer, tokens);
}

static void copy_blocks(world *w)
{
    const uint32_t from = draw(w, 0, BLOCKS), to = draw(w, 0, BLOCKS);
    const uint32_t size = w->config.block_tokens;
    const kvf_status status = kvf_blocks_copy(w->blocks, &from, &to, 1, w->stream);
    const int is_sound = from != to && from < w->config.block_count && to < w->config.block_count;
    PROMISE((status == KVF_OK) == is_sound);
    if (!is_sound)
        return;
    settle(w);
    for (uint32_t l = 0; l < w->config.cache.layers; l++) {
        char *base = w->codes + l * w->config.block_count * w->stride;
        model *m = &w->models[l];
        memmove(base + to * w->stride, base + from * w->stride, w->stride);
        memmove(m->kv[to * size], m->kv[from * size], size * sizeof m->kv[0]);
        memmove(m->is_nonfinite + to * size, m->is_nonfinite + from * size, size);
    }
}

static void bind(const world *w, uint32_t layer)
{
    char *base = w->codes + layer * w->config.block_count * w->stride;
    PROMISE(kvf_blocks_bind(w->blocks, layer, base, w->stride) == KVF_OK);
}

/* All layers to other memory: their blocks count as unwritten. */
static void bind_anew(world *w)
{
    char *was = w->codes;
    w->codes = w->other;
    w->other = was;
    for (uint32_t l = 0; l < w->config.cache.layers; l++) {
        bind(w, l);
        put_all(w, l);
    }
}

/* ---- rows ---- */

/* Mostly sound; now and then an id, a length or a region that there is not. */
static uint32_t draw_rows(world *w, call *c)
{
    const uint32_t count = draw(w, 0, REGIONS), poison = draw(w, 0, 31), turn = draw(w, 0, 2);
    const uint32_t which = draw(w, 0, REGIONS - 1);
    *c = (call){.rows = {.rows = count, .table_stride = TABLE_MAX + 1}};
    c->rows.table = c->table[0];
    c->rows.lengths = c->lengths;
    c->rows.regions = c->regions;
    for (uint32_t i = 0; i < REGIONS; i++) {
        for (uint32_t b = 0; b <= TABLE_MAX; b++)
            c->table[i][b] = (int32_t)draw(w, 0, w->config.block_count - 1);
        c->lengths[i] = (int32_t)(draw(w, 0, 255) * w->config.cache.tokens_max / 255);
        c->regions[i] = (int32_t)((i + turn) % w->config.cache.sequences_max);
    }
    if (poison == 1)
        c->table[which][0] = (int32_t)w->config.block_count;
    else if (poison == 2)
        c->table[which][1] = -1;
    else if (poison == 3)
        c->lengths[which] = (int32_t)w->config.cache.tokens_max + 1;
    else if (poison == 4)
        c->lengths[which] = INT32_MIN;
    else if (poison == 5)
        c->regions[which] = (int32_t)w->config.cache.sequences_max;
    else if (poison == 6)
        c->rows.table_stride = 1;
    return count;
}

/* Token `token` of row `row` in the account; -1: its id is none. */
static int64_t token_of(const world *w, const call *c, uint32_t row, uint32_t token)
{
    const uint32_t size = w->config.block_tokens;
    const int32_t id = c->rows.table[(size_t)row * c->rows.table_stride + token / size];
    return id < 0 || (uint32_t)id >= w->config.block_count ? -1 : (int64_t)id * size + token % size;
}

/* The header's refusals before a table is looked at. */
static int is_none(const world *w, const call *c, uint32_t row)
{
    const int32_t length = c->lengths[row], region = c->regions[row];
    const uint32_t size = w->config.block_tokens;
    if (length < 0 || (uint32_t)length > w->config.cache.tokens_max)
        return 1;
    if (((uint32_t)length + size - 1) / size > c->rows.table_stride)
        return 1;
    if (!c->rows.regions || length == 0)
        return 0;
    if (region < 0 || (uint32_t)region >= w->config.cache.sequences_max)
        return 1;
    for (uint32_t i = 0; i < row; i++)
        if (c->regions[i] == region && c->lengths[i])
            return 1;
    return 0;
}

/* Tokens of a row before the first one without an answer: all of them if it is sound. */
static uint32_t sound_tokens(const world *w, const call *c, uint32_t layer, uint32_t row)
{
    if (is_none(w, c, row))
        return 0;
    uint32_t sound = (uint32_t)c->lengths[row];
    for (uint32_t t = (uint32_t)c->lengths[row]; t-- > 0;) {
        const int64_t at = token_of(w, c, row, t);
        if (at < 0)
            return 0;
        if (w->models[layer].is_nonfinite[at])
            sound = t;
    }
    return sound;
}

static int is_bad(const world *w, const call *c, uint32_t layer, uint32_t row)
{
    return is_none(w, c, row) || sound_tokens(w, c, layer, row) < (uint32_t)c->lengths[row];
}

/* A KV head of a row of a layer. */
typedef struct head_of {
    const world *w;
    const call *c;
    uint32_t layer, row, kv_head;
} head_of;

static const float *token_at(void *user, uint32_t token)
{
    const head_of *h = user;
    return h->w->models[h->layer].kv[token_of(h->w, h->c, h->row, token)][h->kv_head];
}

/* One row of outputs: NaN, zeros, or finite, and right where attention is dense. */
static void check_output(const world *w, const call *c, uint32_t layer, uint32_t row,
                         uint32_t tokens, uint32_t at, int has_answer, int is_dense)
{
    const kvf_cache_config *cc = &w->config.cache;
    for (uint32_t h = 0; h < cc->query_heads; h++) {
        const size_t first = (size_t)at * q_floats(w) + (size_t)h * DIM;
        for (uint32_t d = 0; d < DIM; d++) {
            const float x = w->out[first + d];
            PROMISE(has_answer ? isfinite(x) : isnan(x));
            PROMISE(!has_answer || tokens || x == 0.0f);
        }
        const uint32_t kv_head = h / (cc->query_heads / cc->kv_heads);
        const fuzz_params params = fuzz_params_of(w->params, DIM, layer, h);
        const int streams = w->kinds[layer * cc->kv_heads + kv_head] == 0;
        const uint32_t recent = cc->layer_windows ? w->windows[layer] : cc->streaming_recent;
        if (has_answer && tokens && (streams ? tokens <= cc->streaming_sink + recent : is_dense))
            fuzz_check_dense(w->q + first, DIM, DIM, tokens, token_at,
                             &(head_of){w, c, layer, row, kv_head}, &params, w->out + first, 1e-4);
    }
}

static void decode(world *w)
{
    const kvf_cache_config *cc = &w->config.cache;
    const uint32_t layer = draw(w, 0, cc->layers);
    call c;
    const uint32_t count = draw_rows(w, &c);
    fill(w, w->q, (size_t)REGIONS * q_floats(w));
    kvf_blocks_decode_args args = {
        .layer = layer, .rows = &c.rows, .q = w->q, .out = w->out, .lse = w->lse};
    const int takes = !w->gives || cc->select == KVF_SELECT_DYNAMIC;
    if (w->gives) {
        fuzz_fill_ids(w->random, w->page_ids, sizeof w->page_ids / sizeof *w->page_ids,
                      cc->tokens_max / cc->page_size);
        args.page_ids = w->page_ids;
        args.page_stride = GIVEN;
    }
    const kvf_status status = kvf_blocks_decode(w->blocks, &args, w->stream);
    const int is_sound = layer < cc->layers && count > 0 && count <= cc->sequences_max && takes;
    PROMISE((status == KVF_OK) == is_sound);
    if (!is_sound)
        return;
    settle(w);
    for (uint32_t i = 0; i < count; i++) {
        const int bad = is_bad(w, &c, layer, i);
        const uint32_t tokens = bad ? 0 : (uint32_t)c.lengths[i];
        const int is_dense =
            cc->select == KVF_SELECT_FULL || (!w->gives && tokens <= cc->budget_tokens);
        check_output(w, &c, layer, i, tokens, i, !bad, is_dense);
        w->bad_rows += (uint64_t)bad;
        PROMISE(!bad == !isnan(w->lse[i * cc->query_heads]));
    }
    /* The content of regions changes nothing. */
    for (uint32_t i = 0; i < REGIONS; i++)
        c.regions[i] = c.regions[i] >= (int32_t)cc->sequences_max
                           ? c.regions[i]
                           : (c.regions[i] + 1) % (int32_t)cc->sequences_max;
    args.out = w->again;
    args.lse = NULL;
    PROMISE(kvf_blocks_decode(w->blocks, &args, w->stream) == KVF_OK);
    settle(w);
    for (uint32_t i = 0; i < count; i++) {
        const size_t at = (size_t)i * q_floats(w);
        w->bad_rows += (uint64_t)is_bad(w, &c, layer, i);
        if (!is_bad(w, &c, layer, i))
            PROMISE(!memcmp(w->out + at, w->again + at, q_floats(w) * sizeof(float)));
    }
}

/* Chunks of rows without regions; now and then of another length than the device has. */
static void extend(world *w)
{
    const kvf_cache_config *cc = &w->config.cache;
    const uint32_t layer = draw(w, 0, cc->layers - 1);
    int is_sound = 1;
    call c;
    const uint32_t count = draw_rows(w, &c), lie = draw(w, 0, 15);
    c.rows.regions = NULL;
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t length = c.lengths[i] < 0 ? 0 : (uint32_t)c.lengths[i];
        const uint32_t room = length < QUERIES / REGIONS ? length : QUERIES / REGIONS;
        const uint32_t queries = draw(w, room > 0, room);
        c.contexts[i] = length - queries + (lie == i);
        c.starts[i + 1] = c.starts[i] + queries;
        is_sound &= c.contexts[i] + queries <= cc->tokens_max;
    }
    fill(w, w->q, (size_t)QUERIES * q_floats(w));
    const kvf_blocks_extend_args args = {.layer = layer,
                                         .rows = &c.rows,
                                         .starts = c.starts,
                                         .contexts = c.contexts,
                                         .q = w->q,
                                         .out = w->out};
    const kvf_status status = kvf_blocks_extend(w->blocks, &args, w->stream);
    is_sound &= count > 0 && count <= cc->sequences_max;
    PROMISE((status == KVF_OK) == is_sound);
    if (!is_sound)
        return;
    settle(w);
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t queries = c.starts[i + 1] - c.starts[i];
        const int is_other = c.contexts[i] + queries != (uint32_t)c.lengths[i];
        const uint32_t sound = is_other ? 0 : sound_tokens(w, &c, layer, i);
        w->bad_rows += queries && (is_other || is_bad(w, &c, layer, i));
        for (uint32_t j = 0; j < queries; j++) {
            const uint32_t seen = c.contexts[i] + j + 1;
            check_output(w, &c, layer, i, seen, c.starts[i] + j, seen <= sound, 1);
        }
    }
}

/* Every token of a layer is that of the account, or NaN where it was not finite. */
static void read_back(world *w, uint32_t layer)
{
    const model *m = &w->models[layer];
    const uint32_t all = token_count(w), heads = w->config.cache.kv_heads;
    const kvf_blocks_get_args args = {
        .layer = layer, .tokens = all, .k = w->k, .v = w->v, .slots = w->slots};
    for (uint32_t i = 0; i < all; i++)
        w->slots[i] = i;
    PROMISE(kvf_blocks_get(w->blocks, &args, w->stream) == KVF_OK);
    for (uint32_t i = 0; i < all * heads; i++) {
        const float *kv = m->kv[i / heads][i % heads];
        const float *k = w->k + (size_t)i * DIM, *v = w->v + (size_t)i * DIM;
        for (uint32_t d = 0; m->is_nonfinite[i / heads] && d < DIM; d++)
            PROMISE(isnan(k[d]) && isnan(v[d]));
        if (!m->is_nonfinite[i / heads])
            PROMISE(!memcmp(k, kv, DIM * sizeof *k) && !memcmp(v, kv + DIM, DIM * sizeof *v));
    }
}

static void statistics(world *w)
{
    kvf_blocks_stats s;
    kvf_blocks_stats_get(w->blocks, &s);
    PROMISE(s.bad_rows == w->bad_rows && s.bad_slots == w->bad_slots);
    PROMISE(s.hits + s.misses <= s.pages_selected);
    PROMISE(draw(w, 0, 1) || s.tokens_put >= token_count(w));
}

/* ---- a store ---- */

static kvf_blocks_config draw_config(world *w)
{
    static const kvf_select selects[] = {KVF_SELECT_DYNAMIC, KVF_SELECT_FULL, KVF_SELECT_STREAMING};
    kvf_blocks_config bc;
    kvf_blocks_config_init(&bc);
    kvf_cache_config *c = &bc.cache;
    c->layers = draw(w, 1, LAYERS_MAX);
    c->kv_heads = draw(w, 1, KV_HEADS_MAX);
    c->query_heads = c->kv_heads * draw(w, 1, 2);
    c->head_dim = DIM;
    c->dtype = KVF_FP32;
    c->sequences_max = draw(w, 1, REGIONS);
    c->tokens_max = draw(w, 96, TOKENS_MAX);
    c->page_size = 1u << draw(w, 0, 6);
    c->sink_tokens = draw(w, 0, 40);
    c->local_tokens = draw(w, 1, 40);
    c->budget_tokens = draw(w, 128, 191);
    c->budget_share = draw(w, 0, 3) ? 0.0f : 0.9f;
    c->select = selects[draw(w, 0, 2)];
    c->static_ratio = 0.0f;
    c->digest = KVF_DIGEST_CODES;
    c->transfer = draw(w, 0, 1) ? KVF_TRANSFER_MAPPED : KVF_TRANSFER_DIRECT;
    c->pages =
        draw(w, 0, 1) ? (kvf_pages)draw(w, KVF_PAGES_K8V8, KVF_PAGES_K8V4) : KVF_PAGES_NATIVE;
    bc.block_tokens = c->page_size > 32 || draw(w, 0, 1) ? 64 : 32;
    bc.block_count = draw(w, 3, BLOCKS);
    const uint32_t coarse = draw(w, 0, 31), streaming = draw(w, 0, 31);
    for (uint32_t i = 0; i < sizeof w->kinds; i++)
        w->kinds[i] = streaming >> i & 1 ? 0 : coarse >> i & 1 && bc.block_tokens % 64 == 0 ? 2 : 1;
    c->head_mask = w->kinds;
    c->streaming_sink = c->sink_tokens;
    c->streaming_recent = c->local_tokens + 20;
    c->layer_windows = fuzz_windows(w->has_windows, c, w->windows);
    if (!draw(w, 0, 15)) /* a field that is not sound */
        *(&c->page_size + draw(w, 0, 3)) = draw(w, 0, 255);
    return bc;
}

static int open_store(world *w)
{
    const kvf_blocks_config bc = draw_config(w);
    kvf_blocks_plan plan;
    kvf_error error = {0};
    const kvf_status planned = kvf_blocks_plan_make(w->runtime, &bc, &plan, &error);
    const kvf_status status = kvf_blocks_open(w->runtime, &bc, &w->blocks, &error);
    PROMISE(status == planned && (status == KVF_OK) == (w->blocks != NULL));
    PROMISE(status == KVF_OK || error.text[0]);
    if (!w->blocks)
        return 0;
    w->config = bc;
    w->stride = plan.code_bytes + 16;
    const size_t bytes = bc.cache.layers * bc.block_count * w->stride;
    w->codes = aligned_alloc(64, (bytes + 63) / 64 * 64);
    w->other = aligned_alloc(64, (bytes + 63) / 64 * 64);
    PROMISE(w->codes && w->other);
    memset(w->codes, 0xff, bytes);
    memset(w->other, 0x5a, bytes);
    for (uint32_t l = 0; l < bc.cache.layers; l++) {
        float sinks[QUERY_HEADS_MAX];
        const kvf_attention_params params = fuzz_layer_params(w->params, &bc.cache, l, sinks);
        PROMISE(kvf_blocks_attention_params(w->blocks, l, &params) == KVF_OK);
        bind(w, l);
        put_all(w, l);
    }
    return 1;
}

static void run(world *w)
{
    for (int i = 0; i < OPERATIONS_MAX && !fuzz_is_empty(&w->in); i++) {
        const uint32_t what = draw(w, 0, 15);
        if (what == 0)
            bind_anew(w);
        else if (what == 1)
            copy_blocks(w);
        else if (what <= 4)
            put_some(w);
        else if (what <= 7)
            extend(w);
        else
            decode(w);
    }
    for (uint32_t l = 0; l < w->config.cache.layers; l++)
        read_back(w, l);
    statistics(w);
}

void fuzz_blocks(fuzz_input in, kvf_runtime *runtime, kvf_stream *stream)
{
    world *w = calloc(1, sizeof *w);
    if (!w)
        return;
    w->in = in;
    w->runtime = runtime;
    w->stream = stream;
    w->random = 1;
    w->params = in.size ? in.data[in.size - 1] : 0;
    w->gives = fuzz_gives(in.data, in.size);
    w->has_windows = fuzz_has_windows(in.data, in.size);
    if (open_store(w))
        run(w);
    kvf_blocks_close(w->blocks);
    free(w->codes);
    free(w->other);
    free(w);
}
