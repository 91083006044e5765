/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Part of cache.h. Settings of a cache: defaults, ranges, and the counts that follow from them.
 *
 * Knows nothing of bytes (layout.c). Every refusal names the field, its value and what to do. After
 * kvf_config_resolve, sink + static tokens + chosen pages + the largest window fit in the budget.
 */

#include "cache.h"

#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "disk_settings.h"
#include "quantized.h"
#include "score/codes.h"
#include "settings.h"
#include "slots.h"

#define TOKENS_MAX    (1u << 26)
#define BLOCK_TOKENS  32u
#define RECENT_MAX    (1u << 20)
/* Rows of a step: the second dimension of a grid. */
#define GPU_LISTS_MAX 65535u

static void set_policy(kvf_cache_config *c, kvf_preset preset)
{
    /* PRKV, section 5: P = 32, S = 0.25, T = 128; k = 1024 beside a window of 64 to 95, no sink. */
    c->page_size = 32;
    c->budget_tokens = 1119;
    c->budget_share = 0.0f;
    c->sink_tokens = 0;
    c->local_tokens = 64;
    c->select = KVF_SELECT_HYBRID;
    c->static_ratio = 0.25f;
    c->refresh_interval = 128;
    c->refresh = KVF_REFRESH_EXACT;
    c->digest = KVF_DIGEST_MINMAX;
    c->sub_digests = 1;
    c->fill = KVF_FILL_TOKENS;
    c->group_reduce = KVF_GROUP_MEAN_SOFTMAX;
    if (preset == KVF_PRESET_PRKV)
        return;
    /* bench/results/eval.md says why. */
    c->select = KVF_SELECT_DYNAMIC;
    c->digest = KVF_DIGEST_CODES;
    c->page_size = 4;
    c->budget_tokens = 1024;
    c->sink_tokens = 4;
    c->refresh = KVF_REFRESH_RESIDENT;
    c->fill = KVF_FILL_PAGES;
}

static kvf_cache_config defaults(void)
{
    kvf_cache_config c = {.sequences_max = 1,
                          .prefill_chunk_max = 512,
                          .tokens_per_step_max = 1,
                          .phase_times = 2,
                          .device_bytes = KVF_DEVICE_BYTES_AUTO,
                          .coarse_share = 0.1f,
                          .streaming_sink = 128,
                          .streaming_recent = 1024};
    set_policy(&c, KVF_PRESET_DEFAULT);
    return c;
}

void kvf_cache_config_init_sized(kvf_cache_config *config, size_t size)
{
    const kvf_cache_config own = defaults();
    kvf_sized_init(config, size, &own, sizeof own);
}

void kvf_cache_config_preset(kvf_cache_config *config, kvf_preset preset)
{
    kvf_cache_config own = {0};
    if (!config || (uint32_t)preset > KVF_NAMES_HIGH(KVF_PRESET_LIST))
        return;
    const size_t known = config->size < sizeof own ? config->size : sizeof own;
    memcpy(&own, config, known);
    set_policy(&own, preset);
    memcpy(config, &own, known);
}

kvf_status kvf_config_read(kvf_context *context, const kvf_cache_config *config,
                           kvf_cache_config *own)
{
    *own = defaults();
    return KVF_SIZED_READ(context, kvf_cache_config, config, own);
}

_Static_assert(sizeof(kvf_select) == sizeof(uint32_t), "enums are read as 32 bits");

/* A custom policy has a function, which no text can give. */
#define SELECT_TEXT(name, value, text, meaning) [value] = (name) == KVF_SELECT_CUSTOM ? "" : (text),

#define FIELD(field)       KVF_FIELD(kvf_cache_config, field)
#define COUNT(least, most) .kind = KVF_SETTING_WHOLE, .low = (least), .high = (most)

static const kvf_setting cache_settings[] = {
    {FIELD(layers), COUNT(1, 1024), .meaning = "layers of the model"},
    {FIELD(query_heads), COUNT(1, 16384), .meaning = "query heads of a layer"},
    {FIELD(kv_heads), COUNT(1, 1024), .meaning = "KV heads of a layer"},
    {FIELD(head_dim), COUNT(16, KVF_HEAD_DIM_MAX),
     .meaning = "elements of a head, a multiple of 16; on a GPU 32, 64, 80, 96, 128, 192 or 256"},
    {FIELD(value_dim), COUNT(0, KVF_HEAD_DIM_MAX),
     .meaning = "elements of a value, head_dim less a multiple of 32; 0 = head_dim; on a GPU "
                "head_dim, or 128 of 192"},
    {FIELD(dtype), KVF_NAMED(KVF_DTYPE_LIST), .meaning = "type of keys and values in the cache"},
    {FIELD(tensors), KVF_NAMED(KVF_TENSORS_LIST),
     .meaning = "type of the caller's queries, keys, values and outputs"},
    {FIELD(softmax_scale), .kind = KVF_SETTING_REAL, .high = FLT_MAX,
     .meaning = "factor of the scores; 0 = 1/sqrt(head_dim)"},
    {FIELD(pages), KVF_NAMED(KVF_PAGES_LIST),
     .meaning = "storage format of pages in memory, on disk and on their way"},
    {FIELD(sequences_max), COUNT(1, 4096), .meaning = "sequences alive at once"},
    {FIELD(tokens_max), COUNT(1, TOKENS_MAX), .meaning = "tokens of the longest sequence"},
    {FIELD(host_tokens_max), COUNT(0, 0x1p48),
     .meaning = "tokens over all sequences, shared ones once; 0 = tokens_max for each"},
    {FIELD(prefill_chunk_max), COUNT(1, 1u << 20), .meaning = "tokens of one prefill call"},
    {FIELD(tokens_per_step_max), COUNT(1, KVF_STEP_TOKENS_MAX),
     .meaning = "new tokens of a sequence in one decode call"},
    {FIELD(budget_tokens), COUNT(1, TOKENS_MAX),
     .meaning = "tokens attended per KV head and step, sink and window included"},
    {FIELD(budget_share), .kind = KVF_SETTING_REAL, .high = 1,
     .meaning = "attend to at least this share of a sequence's tokens; 0 = budget_tokens alone"},
    {FIELD(select), .kind = KVF_SETTING_NAME, .high = KVF_NAMES_HIGH(KVF_SELECT_LIST),
     .names = (const char *const[]){KVF_SELECT_LIST(SELECT_TEXT) NULL},
     .meaning = "how the attended tokens are selected"},
    {FIELD(page_size), .kind = KVF_SETTING_POWER, .low = 1, .high = 64,
     .meaning = "tokens of a page"},
    {FIELD(sink_tokens), COUNT(0, 1u << 16), .meaning = "first tokens, always attended"},
    {FIELD(local_tokens), COUNT(1, 1u << 16), .meaning = "newest tokens, always attended"},
    {FIELD(static_ratio), .kind = KVF_SETTING_REAL, .high = 1, .special = "auto",
     .special_value = (double)KVF_STATIC_RATIO_AUTO,
     .meaning = "share of the static set in the budget that sink and window leave"},
    {FIELD(refresh_interval), COUNT(1, UINT32_MAX),
     .meaning = "decode steps between refreshes of the static set"},
    {FIELD(refresh), KVF_NAMED(KVF_REFRESH_LIST), .meaning = "keys that a refresh looks at"},
    {FIELD(digest), KVF_NAMED(KVF_DIGEST_LIST), .meaning = "summary of a page's keys"},
    {FIELD(sub_digests), .kind = KVF_SETTING_POWER, .low = 1, .high = 4,
     .meaning = "boxes per page"},
    {FIELD(fill), KVF_NAMED(KVF_FILL_LIST), .meaning = "how pages fill the budget of hybrid"},
    {FIELD(group_reduce), KVF_NAMED(KVF_GROUP_LIST),
     .meaning = "one score from those of a group of query heads"},
    {FIELD(transfer), KVF_NAMED(KVF_TRANSFER_LIST), .meaning = "how missing pages are brought"},
    {FIELD(device_bytes), COUNT(0, 0x1p62), .special = "auto",
     .special_value = (double)KVF_DEVICE_BYTES_AUTO,
     .meaning = "most bytes on the device, what pages need last; 0 = as little as a call needs"},
    {FIELD(verify_interval), COUNT(0, UINT32_MAX),
     .meaning = "every N-th step also attends densely and measures; 0 = never"},
    {FIELD(phase_times), COUNT(0, 2),
     .meaning = "1 = measure phases, 0 = do not, 2 = where it is cheap: on the host device"},
    {FIELD(coarse_share), .kind = KVF_SETTING_REAL, .high = 1,
     .meaning = "share of its tokens that a coarse head scores by codes"},
    {FIELD(streaming_sink), COUNT(0, 1u << 16),
     .meaning = "first tokens that a streaming head attends"},
    {FIELD(streaming_recent), COUNT(1, RECENT_MAX),
     .meaning = "newest tokens that a streaming head attends"},
    {FIELD(observe_window), COUNT(0, KVF_OBSERVE_WINDOW_MAX),
     .meaning = "newest queries that can score tokens; 0 = none"},
    {FIELD(disk_path), .kind = KVF_SETTING_TEXT,
     .meaning = "folder for a private file of the pages that have no room in memory"},
    {FIELD(host_bytes), COUNT(0, 0x1p62),
     .meaning = "bytes of pages in memory, with a disk tier; 0 = there is none"},
    {FIELD(disk_bytes), COUNT(0, 0x1p62),
     .meaning = "most bytes of the disk tier's file; 0 = what all tokens take"},
    {FIELD(disk_bundle_bytes), COUNT(0, KVF_ARENA_BYTES_MAX / 4),
     .meaning = "bytes that are read from disk together at least; 0 = 128 KiB"},
};

#define SETTINGS (sizeof cache_settings / sizeof *cache_settings)

const kvf_setting *kvf_cache_setting(uint32_t index)
{
    return index < SETTINGS ? &cache_settings[index] : NULL;
}

static kvf_status check_reserved(kvf_context *context, const char *heading, uint32_t value)
{
    if (value)
        KVF_FAIL(context, KVF_INVALID,
                 "reserved_%s = %u: kvferry %s does not use it; leave it 0, or update the library",
                 heading, value, kvf_version());
    return KVF_OK;
}

static kvf_status check_ranges(kvf_context *context, const kvf_cache_config *c)
{
    char text[384];
    if (kvf_settings_wrong(cache_settings, SETTINGS, c, text, sizeof text))
        KVF_FAIL(context, KVF_INVALID, "%s", text);
    KVF_TRY(check_reserved(context, "limits", c->reserved_limits));
    KVF_TRY(check_reserved(context, "policy", c->reserved_policy));
    if (c->head_dim % 16)
        KVF_FAIL(context, KVF_INVALID, "head_dim = %u: must be a multiple of 16", c->head_dim);
    if (c->value_dim > c->head_dim || (c->value_dim && (c->head_dim - c->value_dim) % 32))
        KVF_FAIL(context, KVF_INVALID,
                 "value_dim = %u: must be head_dim = %u less a multiple of 32, or 0 for head_dim; "
                 "pad values, or keys and queries, with zeros",
                 c->value_dim, c->head_dim);
    if (c->query_heads % c->kv_heads)
        KVF_FAIL(
            context, KVF_INVALID,
            "query_heads = %u: must be a multiple of kv_heads = %u; check the model's geometry",
            c->query_heads, c->kv_heads);
    if (c->query_heads / c->kv_heads > KVF_GROUP_MAX_HEADS)
        KVF_FAIL(context, KVF_INVALID,
                 "query_heads = %u: with kv_heads = %u a group has %u heads, at most %u work",
                 c->query_heads, c->kv_heads, c->query_heads / c->kv_heads, KVF_GROUP_MAX_HEADS);
    if (c->sub_digests > c->page_size)
        KVF_FAIL(context, KVF_INVALID,
                 "sub_digests = %u: a page has page_size = %u tokens, so as many boxes at most",
                 c->sub_digests, c->page_size);
    if (kvf_select_find(c->select)->calls_function && !c->select_fn)
        KVF_FAIL(context, KVF_INVALID,
                 "select_fn = NULL: select = %s needs a function that chooses the pages",
                 kvf_select_name(c->select));
    return KVF_OK;
}

/* A GPU has matrix products for some sizes of heads. */
static kvf_status check_head_dim(const kvf_runtime *runtime, kvf_context *context,
                                 const kvf_cache_config *c)
{
#define VALUE(d) d,
    static const uint32_t sizes[] = {KVF_GPU_HEAD_DIMS(VALUE)};
#undef VALUE
    bool has_products = runtime->device->ops->kind == KVF_DEVICE_HOST;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        has_products = has_products || c->head_dim == sizes[i];
    if (!has_products)
        KVF_FAIL(context, KVF_UNSUPPORTED,
                 "head_dim = %u: the CUDA device takes 32, 64, 80, 96, 128, 192 and 256; use the "
                 "host device",
                 c->head_dim);
    const uint32_t value_dim = c->value_dim ? c->value_dim : c->head_dim;
    if (runtime->device->ops->kind != KVF_DEVICE_HOST &&
        value_dim != KVF_GPU_VALUE_DIM(c->head_dim))
        KVF_FAIL(context, KVF_UNSUPPORTED,
                 "value_dim = %u: with head_dim = %u the CUDA device takes %u; pad narrower values "
                 "with zeros, or use the host device",
                 value_dim, c->head_dim, KVF_GPU_VALUE_DIM(c->head_dim));
    return KVF_OK;
}

const char *kvf_pages_name(kvf_pages pages)
{
#define TEXT(name, value, text, meaning) [value] = (text),
    static const char *const names[] = {KVF_PAGES_LIST(TEXT)};
#undef TEXT
    return names[pages];
}

/* Kernels of a GPU dequantize pages in bf16, of some sizes of heads. */
static kvf_status check_pages(const kvf_runtime *runtime, kvf_context *context,
                              const kvf_cache_config *c)
{
#define VALUE(d) d,
    static const uint32_t sizes[] = {KVF_GPU_QUANTIZED_DIMS(VALUE)};
#undef VALUE
    bool is_taken = false;
    if (c->pages == KVF_PAGES_NATIVE || runtime->device->ops->kind == KVF_DEVICE_HOST)
        return KVF_OK;
    if (c->dtype != KVF_BF16)
        KVF_FAIL(context, KVF_UNSUPPORTED,
                 "pages = %s: the CUDA device dequantizes pages in dtype = bf16 only; set that or "
                 "pages = bf16, or use the host device",
                 kvf_pages_name(c->pages));
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        is_taken = is_taken || c->head_dim == sizes[i];
    if (!is_taken)
        KVF_FAIL(
            context, KVF_UNSUPPORTED,
            "pages = %s: the CUDA device dequantizes pages of head_dim 64, 128 and 192, not %u; "
            "set pages = bf16, or use the host device",
            kvf_pages_name(c->pages), c->head_dim);
    return KVF_OK;
}

static kvf_status check_mask(kvf_context *context, const kvf_cache_config *c)
{
    for (size_t i = 0; c->head_mask && i < (size_t)c->layers * c->kv_heads; i++)
        if (c->head_mask[i] > KVF_HEAD_COARSE)
            KVF_FAIL(context, KVF_INVALID,
                     "head_mask[%zu][%zu] = %u: must be 1 (hot head), 2 (coarse head) or 0 "
                     "(streaming head)",
                     i / c->kv_heads, i % c->kv_heads, c->head_mask[i]);
    return KVF_OK;
}

static bool layer_streams(const kvf_cache_config *c, uint32_t layer)
{
    return c->head_mask &&
           memchr(c->head_mask + (size_t)layer * c->kv_heads, KVF_HEAD_STREAMING, c->kv_heads);
}

bool kvf_config_has_heads(const kvf_cache_config *c, uint8_t kind)
{
    return c->head_mask && memchr(c->head_mask, kind, (size_t)c->layers * c->kv_heads);
}

/* A window where heads stream, and none elsewhere. */
static kvf_status check_windows(kvf_context *context, const kvf_cache_config *c)
{
    for (uint32_t i = 0; c->layer_windows && i < c->layers; i++) {
        const uint32_t window = c->layer_windows[i];
        const bool streams = layer_streams(c, i);
        if (streams && (window == 0 || window > RECENT_MAX))
            KVF_FAIL(context, KVF_INVALID,
                     "layer_windows[%u] = %u: must be from 1 to %u in a layer with streaming heads",
                     i, window, RECENT_MAX);
        if (!streams && window)
            KVF_FAIL(context, KVF_INVALID,
                     "layer_windows[%u] = %u: no head of the layer streams; write 0, or 0 for the "
                     "heads in head_mask",
                     i, window);
    }
    return KVF_OK;
}

/* Means are made of codes. */
static kvf_status check_coarse(kvf_context *context, const kvf_cache_config *c)
{
    if (!kvf_config_has_heads(c, KVF_HEAD_COARSE) || c->digest == KVF_DIGEST_CODES)
        return KVF_OK;
    const uint8_t *cell = memchr(c->head_mask, KVF_HEAD_COARSE, (size_t)c->layers * c->kv_heads);
    const size_t i = (size_t)(cell - c->head_mask);
    KVF_FAIL(context, KVF_UNSUPPORTED,
             "head_mask[%zu][%zu] = 2: coarse heads need digest = codes, and select = %s scores by "
             "boxes; set digest = codes with another select, or write 1",
             i / c->kv_heads, i % c->kv_heads, kvf_select_name(c->select));
}

/* streaming_recent is the longest window; layers tell theirs only where one is shorter. */
static void apply_windows(kvf_cache_config *c)
{
    const uint32_t *windows = c->layer_windows;
    uint32_t least = UINT32_MAX, most = 0;
    for (uint32_t i = 0; windows && i < c->layers; i++) {
        most = kvf_max_u32(most, windows[i]);
        least = windows[i] ? kvf_min_u32(least, windows[i]) : least;
    }
    if (most)
        c->streaming_recent = most;
    if (least >= most)
        c->layer_windows = NULL;
}

/* Values that the policy and zeros leave open. */
static void apply_defaults(const kvf_runtime *runtime, const kvf_select_policy *policy,
                           kvf_cache_config *c)
{
    if (!kvf_config_has_heads(c, KVF_HEAD_STREAMING) && !kvf_config_has_heads(c, KVF_HEAD_COARSE))
        c->head_mask = NULL;
    apply_windows(c);
    if (c->softmax_scale == 0.0f)
        c->softmax_scale = 1.0f / sqrtf((float)c->head_dim);
    if (c->value_dim == 0)
        c->value_dim = c->head_dim;
    if (c->host_tokens_max == 0)
        c->host_tokens_max = (uint64_t)c->sequences_max * c->tokens_max;
    if (policy->static_use == KVF_STATIC_NONE)
        c->static_ratio = 0.0f;
    if (policy->static_use == KVF_STATIC_WHOLE)
        c->static_ratio = 1.0f;
    if (policy->sets_digest)
        c->digest = policy->digest;
    c->transfer = kvf_transfer_in_force(c->transfer, runtime->properties.shares_host_memory != 0);
    /* A stamp is a launch of its own: cheap where a launch is a function call. */
    if (c->phase_times == 2)
        c->phase_times = runtime->device->ops->kind == KVF_DEVICE_HOST;
}

/* A policy that does not grow with a sequence has no use for a share of it. */
static kvf_status check_share(kvf_context *context, const kvf_select_policy *policy,
                              const kvf_cache_config *c)
{
    if (c->budget_share == 0.0f || policy->all_pages)
        return KVF_OK;
    if (policy->static_use == KVF_STATIC_WHOLE)
        KVF_FAIL(context, KVF_UNSUPPORTED,
                 "budget_share = %g: select = %s keeps a set of one size; leave budget_share 0",
                 (double)c->budget_share, kvf_select_name(c->select));
    if (c->static_ratio == KVF_STATIC_RATIO_AUTO)
        KVF_FAIL(context, KVF_UNSUPPORTED,
                 "budget_share = %g: static_ratio = auto divides a budget of one size; set "
                 "static_ratio, or leave budget_share 0",
                 (double)c->budget_share);
    return KVF_OK;
}

static kvf_status divide_budget(kvf_context *context, const kvf_select_policy *policy,
                                const kvf_cache_config *c, uint32_t block_size, kvf_dims *dims)
{
    const uint32_t fixed = c->sink_tokens + c->local_tokens + block_size - 1;
    dims->budget_max = kvf_budget_tokens(c, c->tokens_max);
    if (policy->all_pages)
        return KVF_OK;
    KVF_TRY(check_share(context, policy, c));
    if (c->budget_tokens < fixed + c->page_size)
        KVF_FAIL(
            context, KVF_INVALID,
            "budget_tokens = %u: at least %u are needed (sink_tokens %u, a window of up to %u, "
            "one page of %u); raise budget_tokens or lower the others",
            c->budget_tokens, fixed + c->page_size, c->sink_tokens,
            c->local_tokens + block_size - 1, c->page_size);
    dims->rest_tokens = c->budget_tokens - fixed;
    const bool is_auto = c->static_ratio == KVF_STATIC_RATIO_AUTO;
    dims->static_tokens = is_auto ? dims->rest_tokens
                                  : (uint32_t)((double)c->static_ratio * (double)dims->rest_tokens);
    /* While the window is short, pages have what it leaves. */
    dims->dynamic_pages =
        is_auto ? dims->rest_tokens / c->page_size
                : (dims->budget_max - fixed + block_size - 1 - dims->static_tokens) / c->page_size;
    if (policy->static_use == KVF_STATIC_WHOLE)
        dims->dynamic_pages = 0;
    return KVF_OK;
}

/* Tokens of a block: what is allocated and sealed stays large where pages are small. */
static uint32_t block_tokens(const kvf_runtime *runtime, const kvf_cache_config *c)
{
    uint32_t least = runtime->test_hooks.block_size ? runtime->test_hooks.block_size : BLOCK_TOKENS;
    if (c->digest == KVF_DIGEST_CODES)
        least = kvf_max_u32(least, KVF_CODE_TOKENS);
    return kvf_max_u32(c->page_size, least);
}

static void count_lists(const kvf_select_policy *policy, const kvf_cache_config *c,
                        uint32_t block_size, kvf_dims *dims)
{
    kvf_paging *p = &dims->paging;
    const uint32_t block_pages = block_size / c->page_size;
    const uint32_t blocks_max = kvf_div_ceil_u32(c->tokens_max, block_size);
    *p = (kvf_paging){.shape = {.dtype = c->dtype,
                                .head_dim = c->head_dim,
                                .value_dim = (uint16_t)c->value_dim,
                                .page_size = c->page_size,
                                .pages = c->pages},
                      .kv_heads = c->kv_heads,
                      .group = c->query_heads / c->kv_heads,
                      .lists = policy->per_query_head ? c->query_heads : c->kv_heads,
                      .block_size = block_size,
                      .block_pages = block_pages,
                      .block_jobs = block_pages,
                      .digest_bytes =
                          block_pages * (uint32_t)kvf_digest_bytes(c->head_dim, c->sub_digests),
                      .blocks_max = blocks_max,
                      .pages_max = blocks_max * block_pages,
                      .subs = c->sub_digests,
                      .sink = c->sink_tokens};
    if (c->pages != KVF_PAGES_NATIVE) {
        p->spare_blocks = 1;
        dims->scratch_blocks = blocks_max;
    }
    if (c->digest == KVF_DIGEST_CODES) {
        p->block_jobs = 1;
        p->digest_bytes = block_size / KVF_CODE_TOKENS * (uint32_t)kvf_code_bytes(c->head_dim);
    }
    p->static_pages =
        kvf_max_u32(1, kvf_div_ceil_u32(c->sink_tokens + dims->static_tokens, c->page_size));
    p->ring_blocks = kvf_div_ceil_u32(c->local_tokens, block_size) + 1;
    p->query_window =
        kvf_min_u32(kvf_max_u32(c->local_tokens, c->observe_window), KVF_OBSERVE_WINDOW_MAX);
    if (policy->static_use == KVF_STATIC_CONFIGURED && c->fill == KVF_FILL_TOKENS)
        p->extra_pages = kvf_div_ceil_u32(c->sink_tokens + dims->static_tokens, c->page_size);
    dims->choose_lists = policy->per_layer ? 1 : p->lists;
    dims->window_pages = kvf_div_ceil_u32(c->local_tokens + block_size - 1, c->page_size);
}

/* A launch of a GPU has so many lists. */
static kvf_status check_lists(const kvf_runtime *runtime, kvf_context *context,
                              const kvf_cache_config *c, const kvf_dims *dims)
{
    const uint64_t lists = (uint64_t)kvf_rows_max(c) * dims->paging.lists;
    if (runtime->device->ops->kind == KVF_DEVICE_HOST || lists <= GPU_LISTS_MAX)
        return KVF_OK;
    KVF_FAIL(
        context, KVF_UNSUPPORTED,
        "sequences_max = %u: with tokens_per_step_max = %u a step has %llu page lists, and the "
        "CUDA device takes %u; lower one of them, or use the host device",
        c->sequences_max, c->tokens_per_step_max, (unsigned long long)lists, GPU_LISTS_MAX);
}

/* Slots of a KV head: as few as a call chooses and seals, or one for every page. The plan may give
 * more. */
static kvf_status count_slots(kvf_context *context, const kvf_cache_config *c, kvf_dims *dims)
{
    kvf_paging *p = &dims->paging;
    const uint64_t pages = (uint64_t)dims->block_count * p->block_pages;
    const uint64_t chosen = (uint64_t)(p->lists / p->kv_heads) * dims->ids_max + p->block_pages;
    const uint64_t least = kvf_rows_max(c) * chosen;
    if (pages > KVF_SLOT_PAGES_MAX - KVF_SLOT_WAYS)
        KVF_FAIL(context, KVF_INVALID,
                 "host_tokens_max = %llu: %u layers of it are %llu pages of %u tokens per KV head, "
                 "and %u can be numbered; lower it, or raise page_size",
                 (unsigned long long)c->host_tokens_max, c->layers, (unsigned long long)pages,
                 c->page_size, KVF_SLOT_PAGES_MAX - KVF_SLOT_WAYS);
    p->pool_pages = (uint32_t)pages;
    p->slots = (uint32_t)kvf_round_up(least < pages ? least : pages, KVF_SLOT_WAYS);
    return KVF_OK;
}

static void count_pages(const kvf_select_policy *policy, const kvf_cache_config *c, kvf_dims *dims)
{
    const kvf_paging *p = &dims->paging;
    /* While all fits in the budget, every sealed page is chosen. */
    uint32_t ids =
        kvf_max_u32(dims->dynamic_pages + p->extra_pages, dims->budget_max / c->page_size);
    const uint32_t rest_max = dims->rest_tokens + dims->budget_max - c->budget_tokens;
    if (policy->by_token)
        ids = rest_max + p->block_size;
    if (policy->all_pages)
        ids = dims->dynamic_pages = p->pages_max;
    dims->ids_max = kvf_max_u32(1, kvf_min_u32(ids, p->pages_max));
    dims->spans_max = p->static_pages + dims->window_pages + dims->ids_max + kvf_parted_pages(p);
    dims->splits_max = kvf_div_ceil_u32(dims->spans_max, kvf_split(dims->spans_max, c->page_size));
    dims->tokens_max = policy->by_token ? rest_max + p->block_size : dims->static_tokens;
    /* Other queries than the kept ones come in any number, and are taken so many at a time. */
    const uint32_t observed = kvf_observe_window_max(p->group);
    dims->observe_max = c->observe_window  ? observed
                        : dims->tokens_max ? kvf_min_u32(p->query_window, observed)
                                           : 0;
    dims->chunk_blocks = c->prefill_chunk_max / p->block_size + p->ring_blocks + 1;
    const uint32_t sealed = kvf_max_u32(c->sequences_max, dims->chunk_blocks) * p->block_jobs;
    dims->jobs_max = (uint64_t)sealed * p->kv_heads;
}

/* All runs of a row, or the pages of its recent choices. */
static void count_cover(const kvf_cache_config *c, kvf_dims *dims)
{
    const kvf_paging *p = &dims->paging;
    const uint64_t recent = dims->recalls ? (uint64_t)KVF_RECENT_STEPS * dims->ids_max : 0;
    const uint32_t pages = (uint32_t)(recent < p->pages_max ? recent : p->pages_max);
    if (dims->tokens_max || c->observe_window || c->verify_interval)
        dims->cover_max = kvf_max_u32(p->blocks_max, p->static_pages + pages + dims->window_pages);
}

kvf_status kvf_config_resolve(kvf_runtime *runtime, const kvf_cache_config *config,
                              kvf_cache_config *resolved, kvf_dims *dims)
{
    kvf_context *context = runtime->context;
    KVF_TRY(check_ranges(context, config));
    KVF_TRY(check_head_dim(runtime, context, config));
    KVF_TRY(check_pages(runtime, context, config));
    KVF_TRY(check_mask(context, config));
    KVF_TRY(check_windows(context, config));
    const kvf_select_policy *policy = kvf_select_find(config->select);
    KVF_ASSERT(policy);
    *resolved = *config;
    *dims = (kvf_dims){0};
    apply_defaults(runtime, policy, resolved);
    KVF_TRY(check_coarse(context, resolved));
    KVF_TRY(kvf_disk_check(context, resolved));
    if (resolved->digest == KVF_DIGEST_CODES && resolved->sub_digests != 1)
        KVF_FAIL(context, KVF_INVALID,
                 "sub_digests = %u: digest = codes has no boxes to divide; leave it 1",
                 resolved->sub_digests);
    dims->needs_mirror = runtime->device->ops->kind != KVF_DEVICE_HOST;
    if (!kvf_transfer_moves(resolved->transfer) && !runtime->properties.shares_host_memory)
        KVF_FAIL(context, KVF_UNSUPPORTED,
                 "transfer = %s: this device cannot attend host memory in place; use auto",
                 kvf_transfer_name(resolved->transfer));
    const uint32_t block_size = block_tokens(runtime, resolved);
    KVF_TRY(divide_budget(context, policy, resolved, block_size, dims));
    count_lists(policy, resolved, block_size, dims);
    KVF_TRY(check_lists(runtime, context, resolved, dims));
    /* Chunks attend where steps do; quantized pages go through `scratch` instead. */
    if (dims->scratch_blocks == 0 &&
        (runtime->test_hooks.prefill_arena == 1 ||
         (runtime->test_hooks.prefill_arena == 0 && kvf_transfer_moves(resolved->transfer))))
        dims->arena_blocks = dims->paging.blocks_max;
    count_pages(policy, resolved, dims);

    dims->recalls = dims->static_tokens && resolved->refresh == KVF_REFRESH_RESIDENT;
    count_cover(resolved, dims);
    const uint64_t blocks =
        (resolved->host_tokens_max + block_size - 1) / block_size * resolved->layers;
    if (resolved->host_tokens_max > UINT64_C(1) << 48 || blocks >= UINT32_MAX)
        KVF_FAIL(context, KVF_INVALID,
                 "host_tokens_max = %llu: %u layers of it are more than %u blocks; lower it, "
                 "tokens_max or sequences_max",
                 (unsigned long long)resolved->host_tokens_max, resolved->layers, UINT32_MAX - 1);
    dims->block_count = (uint32_t)blocks;
    KVF_TRY(kvf_disk_count(context, resolved, dims));
    dims->step_tokens = dims->page_frames ? 1 : resolved->tokens_per_step_max;
    KVF_TRY(count_slots(context, resolved, dims));
    dims->digest_blocks = dims->block_count;
    return KVF_OK;
}
