/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Fixtures of the runtime's tests; see harness.h. Knows nothing of what a test wants to prove.
 */

#include "harness.h"

#include <kvferry/setting.h>

#include <math.h>
#include <stdatomic.h>

#if KVF_HAVE_CUDA
#include <cuda_runtime_api.h>
#endif

#include "attention_params.h"
#include "common/random.h"
#include "page_pool.h"

kvf_runtime_test_hooks test_hooks;

uint64_t test_random_next(test_random *r)
{
    return kvf_random_next(&r->state);
}

uint32_t test_random_below(test_random *r, uint32_t count)
{
    return kvf_random_below(&r->state, count);
}

float test_random_normal(test_random *r)
{
    return kvf_random_normal(&r->state);
}

uint64_t test_seed_print(const char *test, uint64_t seed)
{
    printf("# %s seed %llu\n", test, (unsigned long long)seed);
    fflush(stdout);
    return seed;
}

kvf_dtype test_tensor_dtype(const kvf_cache_config *c)
{
    return c->tensors == KVF_TENSORS_FP32 ? KVF_FP32 : c->dtype;
}

size_t test_dtype_bytes(kvf_dtype dtype)
{
    return dtype == KVF_FP32 ? 4 : 2;
}

#if KVF_HAVE_CUDA
/* Every device of the process sees it, at the address that the host uses. */
static void *pinned(size_t bytes)
{
    void *p = NULL, *alias = NULL;
    assert_int_equal(cudaHostAlloc(&p, bytes, cudaHostAllocMapped | cudaHostAllocPortable),
                     cudaSuccess);
    assert_int_equal(cudaHostGetDevicePointer(&alias, p, 0), cudaSuccess);
    assert_ptr_equal(alias, p);
    memset(p, 0, bytes);
    return p;
}
#endif

void *test_alloc(size_t bytes)
{
#if KVF_HAVE_CUDA
    if (test_on_cuda())
        return pinned(bytes ? bytes : 1);
#endif
    void *p = NULL;
    assert_int_equal(posix_memalign(&p, 64, bytes ? bytes : 1), 0);
    memset(p, 0, bytes);
    return p;
}

void test_release(void *p)
{
#if KVF_HAVE_CUDA
    if (test_on_cuda()) {
        assert_int_equal(cudaFreeHost(p), cudaSuccess);
        return;
    }
#endif
    free(p);
}

/* A list of pieces, so that none is lost: each begins with the address of the next one, a line
 * before what is given out. */
static void *pieces;
#define SCRATCH_HEADER 64u

void *test_scratch(size_t bytes)
{
    char *piece = test_alloc(bytes + SCRATCH_HEADER);
    memcpy(piece, &pieces, sizeof pieces);
    pieces = piece;
    return piece + SCRATCH_HEADER;
}

void test_copy(void *to, const void *from, size_t bytes)
{
#if KVF_HAVE_CUDA
    if (test_on_cuda()) {
        assert_int_equal(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), cudaSuccess);
        return;
    }
#endif
    memcpy(to, from, bytes);
}

int test_residency_is_valid(const kvf_residency *r)
{
    int32_t *slots = test_alloc(r->pages * sizeof *slots);
    uint64_t *words = test_alloc(r->slots * sizeof *words);
    int is_valid = 1;
    for (size_t i = 0; i < r->heads; i++) {
        test_copy(slots, r->slot_of_page + i * r->pages, r->pages * sizeof *slots);
        test_copy(words, r->words + i * r->slots, r->slots * sizeof *words);
        is_valid &= kvf_residency_is_valid(r, slots, words);
    }
    test_release(slots);
    test_release(words);
    return is_valid;
}

const void *test_seen(const void *address, size_t bytes)
{
    static _Alignas(64) char seen[4][1 << 16];
    static uint32_t next;
    if (!address || !test_on_cuda())
        return address;
    assert_true(bytes <= sizeof seen[0]);
    char *copy = seen[next++ % 4];
    test_copy(copy, address, bytes);
    return copy;
}

uint32_t test_value_dim(const kvf_cache_config *c)
{
    return c->value_dim ? c->value_dim : c->head_dim;
}

/* Row number `row` of one kind: direction of the topic (if any) plus noise, times `gain`. */
static void fill_row(const test_tokens *t, const float *topic, test_random *r, float gain,
                     void *base, size_t row, uint32_t width)
{
    const size_t at = row * width;
    for (uint32_t d = 0; d < width; d++) {
        float x = test_random_normal(r);
        if (topic)
            x = 0.6f * x + 1.2f * topic[d];
        kvf_element_set(base, t->dtype, at + d, gain * x);
    }
}

static void fill_layer(test_tokens *t, const test_tokens_spec *spec, uint32_t layer)
{
    test_random r = {spec->seed * 1000003u + layer};
    const uint32_t d = t->head_dim, group = t->query_heads / t->kv_heads;
    float *topics = test_alloc(sizeof *topics * spec->topics * t->kv_heads * d);
    for (size_t i = 0; i < (size_t)spec->topics * t->kv_heads * d; i++)
        topics[i] = test_random_normal(&r);
    uint32_t key_topic = 0, query_topic = 0;
    for (uint32_t i = 0; i < t->count; i++) {
        const size_t row = (size_t)layer * t->count + i;
        if (spec->topics && test_random_below(&r, 12) == 0)
            key_topic = test_random_below(&r, spec->topics);
        if (spec->topics && test_random_below(&r, 8) == 0)
            query_topic = test_random_below(&r, spec->topics);
        for (uint32_t h = 0; h < t->kv_heads; h++) {
            const float *kt =
                spec->topics ? topics + ((size_t)h * spec->topics + key_topic) * d : NULL;
            const float *qt =
                spec->topics ? topics + ((size_t)h * spec->topics + query_topic) * d : NULL;
            fill_row(t, kt, &r, 1.0f, t->k, row * t->kv_heads + h, d);
            fill_row(t, NULL, &r, 1.0f, t->v, row * t->kv_heads + h, t->value_dim);
            for (uint32_t g = 0; g < group; g++)
                fill_row(t, qt, &r, spec->sharpness, t->q,
                         row * t->query_heads + (size_t)h * group + g, d);
        }
    }
    test_release(topics);
}

void test_tokens_make(test_tokens *t, const kvf_cache_config *c, const test_tokens_spec *spec)
{
    *t = (test_tokens){.dtype = test_tensor_dtype(c),
                       .layers = c->layers,
                       .query_heads = c->query_heads,
                       .kv_heads = c->kv_heads,
                       .head_dim = c->head_dim,
                       .value_dim = test_value_dim(c),
                       .count = spec->count};
    const size_t rows = (size_t)t->layers * t->count, size = test_dtype_bytes(t->dtype);
    t->q = test_alloc(rows * t->query_heads * t->head_dim * size);
    t->k = test_alloc(rows * t->kv_heads * t->head_dim * size);
    t->v = test_alloc(rows * t->kv_heads * t->value_dim * size);
    for (uint32_t layer = 0; layer < t->layers; layer++)
        fill_layer(t, spec, layer);
}

void test_tokens_free(test_tokens *t)
{
    test_release(t->q);
    test_release(t->k);
    test_release(t->v);
    *t = (test_tokens){0};
}

static void *row_of(const test_tokens *t, void *base, uint32_t elements, uint32_t layer,
                    uint32_t token)
{
    assert_true(layer < t->layers && token < t->count);
    const size_t row = (size_t)layer * t->count + token;
    return (char *)base + row * elements * test_dtype_bytes(t->dtype);
}

void *test_q(const test_tokens *t, uint32_t layer, uint32_t token)
{
    return row_of(t, t->q, t->query_heads * t->head_dim, layer, token);
}

void *test_k(const test_tokens *t, uint32_t layer, uint32_t token)
{
    return row_of(t, t->k, t->kv_heads * t->head_dim, layer, token);
}

void *test_v(const test_tokens *t, uint32_t layer, uint32_t token)
{
    return row_of(t, t->v, t->kv_heads * t->value_dim, layer, token);
}

void test_branches_make(test_tokens branch[2], const kvf_cache_config *c, uint32_t count,
                        uint32_t common, uint64_t seed)
{
    for (uint32_t b = 0; b < 2; b++)
        test_tokens_make(
            &branch[b], c,
            &(test_tokens_spec){.count = count, .seed = seed + b, .sharpness = 2.0f, .topics = 5});
    const size_t element = test_dtype_bytes(test_tensor_dtype(c)), size = element * c->head_dim;
    for (uint32_t layer = 0; layer < c->layers; layer++) {
        memcpy(test_q(&branch[1], layer, 0), test_q(&branch[0], layer, 0),
               common * c->query_heads * size);
        memcpy(test_k(&branch[1], layer, 0), test_k(&branch[0], layer, 0),
               common * c->kv_heads * size);
        memcpy(test_v(&branch[1], layer, 0), test_v(&branch[0], layer, 0),
               common * c->kv_heads * test_value_dim(c) * element);
    }
}

kvf_cache_config test_config_small(void)
{
    kvf_cache_config c;
    kvf_cache_config_init(&c);
    kvf_cache_config_preset(&c, KVF_PRESET_PRKV);
    c.refresh = KVF_REFRESH_RESIDENT;
    c.fill = KVF_FILL_PAGES;
    c.layers = 1;
    c.query_heads = 4;
    c.kv_heads = 2;
    c.head_dim = 64;
    c.dtype = KVF_FP32;
    c.tokens_max = 512;
    c.prefill_chunk_max = 128;
    c.page_size = 8;
    c.budget_tokens = 96;
    c.sink_tokens = 4;
    c.local_tokens = 16;
    c.refresh_interval = 16;
    c.device_bytes = 0; /* so that pages move, whatever room a device has */
    /* Some programs run once more with codes. */
    const char *digest = getenv("KVF_TEST_DIGEST");
    if (digest && strcmp(digest, "codes") == 0)
        c.digest = KVF_DIGEST_CODES;
    /* And some with quantized pages. */
    const char *pages = getenv("KVF_TEST_PAGES");
    if (pages && strcmp(pages, "k8v4") == 0)
        c.pages = KVF_PAGES_K8V4;
    /* And some whose caller has wider numbers than the cache. */
    const char *tensors = getenv("KVF_TEST_TENSORS");
    if (tensors && strcmp(tensors, "fp32") == 0) {
        c.tensors = KVF_TENSORS_FP32;
        c.dtype = KVF_BF16;
    }
    return c;
}

/* One for all that have these digits: a configuration outlives the call. */
static const uint8_t *mask_of(const char *digits)
{
    enum { MASKS = 16, HEADS = 64 };
    static uint8_t masks[MASKS][HEADS];
    static uint32_t count;
    uint8_t mask[HEADS] = {0};
    assert_true(strlen(digits) <= HEADS);
    for (size_t i = 0; digits[i]; i++)
        mask[i] = (uint8_t)(digits[i] - '0');
    for (uint32_t i = 0; i < count; i++)
        if (memcmp(masks[i], mask, HEADS) == 0)
            return masks[i];
    assert_true(count < MASKS);
    return memcpy(masks[count++], mask, HEADS);
}

/* Likewise numbers between commas. */
static const uint32_t *windows_of(const char *text)
{
    enum { WINDOWS = 16, LAYERS = 8 };
    static uint32_t all[WINDOWS][LAYERS];
    static uint32_t count;
    uint32_t windows[LAYERS] = {0};
    for (uint32_t n = 0; *text; n++, text += *text == ',') {
        char *end;
        assert_true(n < LAYERS);
        windows[n] = (uint32_t)strtoul(text, &end, 10);
        text = end;
    }
    for (uint32_t i = 0; i < count; i++)
        if (memcmp(all[i], windows, sizeof windows) == 0)
            return all[i];
    assert_true(count < WINDOWS);
    return memcpy(all[count++], windows, sizeof windows);
}

void test_set(kvf_cache_config *c, const char *settings)
{
    char text[512];
    snprintf(text, sizeof text, "%s", settings);
    for (char *rest = NULL, *word = strtok_r(text, " ", &rest); word;
         word = strtok_r(NULL, " ", &rest)) {
        char *value = strchr(word, '=');
        assert_non_null(value);
        *value++ = '\0';
        if (strcmp(word, "head_mask") == 0) {
            c->head_mask = mask_of(value);
            continue;
        }
        if (strcmp(word, "layer_windows") == 0) {
            c->layer_windows = windows_of(value);
            continue;
        }
        const kvf_setting *s;
        uint32_t i = 0;
        while ((s = kvf_cache_setting(i)) != NULL && strcmp(s->name, word) != 0)
            i++;
        if (!s || !kvf_setting_parse(s, value, c))
            fail_msg("no cache has %s = %s", word, value);
    }
}

kvf_runtime_config test_runtime_config(void)
{
    kvf_runtime_config c;
    kvf_runtime_config_init(&c);
    c.threads = 2;
    c.gather_threads = 1;
    c.huge_pages = KVF_HUGE_PAGES_OFF;
    c.allow_unpinned = 1;
    c.device = test_on_cuda() ? KVF_DEVICE_CUDA : KVF_DEVICE_HOST;
    c.calibrate = 0; /* seconds per runtime, and nothing here depends on it */
    /* Small blocks, so that short sequences have many; and a device that has no room for more pages
     * than it must have, so that pages are missed. */
    test_hooks = (kvf_runtime_test_hooks){.block_size = 8, .device_left = 1};
    return c;
}

kvf_status test_runtime_open(const kvf_runtime_config *rc, kvf_runtime **out, kvf_error *error)
{
    return kvf_runtime_open_with(rc, &test_hooks, out, error);
}

kvf_runtime *test_runtime(void)
{
    const kvf_runtime_config rc = test_runtime_config();
    kvf_runtime *runtime = NULL;
    test_expect(NULL, test_runtime_open(&rc, &runtime, NULL), KVF_OK);
    return runtime;
}

int test_on_cuda(void)
{
    const char *device = getenv("KVF_TEST_DEVICE");
    if (!device || strcmp(device, "host") == 0)
        return 0;
    if (strcmp(device, "cuda") != 0)
        fail_msg("KVF_TEST_DEVICE = %s: host or cuda", device);
    return 1;
}

uint32_t test_afford(uint32_t n)
{
    return n >> (TEST_SANITIZED ? 1 + test_on_cuda() : 0);
}

static uint64_t cases_asked, cases_taken;

static void tell_cases(void)
{
    sweep_tell(cases_taken, cases_asked);
}

int test_takes(size_t i)
{
    const char *cases = getenv("KVF_TEST_CASES");
    const int takes = !cases || (i % 3 == 0) == (strcmp(cases, "thirds") == 0);
    if (cases_asked++ == 0)
        (void)atexit(tell_cases);
    cases_taken += (uint64_t)takes;
    return takes;
}

kvf_transfer test_transfer(kvf_transfer wanted)
{
    return wanted == KVF_TRANSFER_DIRECT && test_on_cuda() ? KVF_TRANSFER_MAPPED : wanted;
}

void test_expect_at(kvf_runtime *runtime, kvf_status got, kvf_status wanted, const char *what,
                    const char *file, int line)
{
    if (got == wanted)
        return;
    const kvf_error *e = runtime ? kvf_runtime_error(runtime) : NULL;
    print_error("%s: got %s, wanted %s; last error: %s %s\n", what, kvf_status_name(got),
                kvf_status_name(wanted), e ? kvf_status_name(e->status) : "-", e ? e->text : "-");
    _fail(file, line);
}

_Atomic int test_refuse_in;
static const char *refused; /* the latest */

int test_refuse(void *user, const char *question)
{
    if ((user && strcmp(user, question) != 0) || atomic_load(&test_refuse_in) <= 0 ||
        atomic_fetch_sub(&test_refuse_in, 1) != 1)
        return 0;
    refused = question;
    return 1;
}

static void *alloc_or_refuse(void *user, size_t bytes, size_t alignment)
{
    void *p = NULL;
    if (test_refuse(NULL, "memory") || posix_memalign(&p, alignment, bytes ? bytes : 1))
        return NULL;
    return memset(p, 0xa5, bytes);
}

static void give_back(void *user, void *p)
{
    free(p);
}

kvf_allocator test_asking_allocator(void)
{
    return (kvf_allocator){.alloc = alloc_or_refuse, .free = give_back};
}

uint32_t test_refuse_each(kvf_runtime *runtime, kvf_status (*call)(void *user, kvf_error *error),
                          void *user)
{
    const kvf_context *context = runtime->context;
    const uint64_t live = context->live_bytes, blocks = context->live_blocks;
    uint32_t failed = 0;
    bool is_last = false;
    kvf_device_set_fault(runtime->device, test_refuse, NULL);
    for (int n = 1; !is_last; n++) {
        kvf_error error = {0};
        atomic_store(&test_refuse_in, n);
        const kvf_status status = call(user, &error);
        is_last = atomic_exchange(&test_refuse_in, 0) > 0; /* nobody asked so often */
        failed += status != KVF_OK;
        if (status != KVF_OK && (is_last || error.status != status || !error.text[0]))
            fail_msg("question %d (%s): %s, \"%s\"", n, refused, kvf_status_name(status),
                     error.text);
        if (context->live_bytes != live || context->live_blocks != blocks)
            fail_msg("question %d (%s): %lld bytes and %lld blocks stayed", n, refused,
                     (long long)(context->live_bytes - live),
                     (long long)(context->live_blocks - blocks));
        assert_true(n < 2000);
    }
    kvf_device_set_fault(runtime->device, NULL, NULL);
    print_message("# %u calls failed\n", failed);
    return failed;
}

void test_world_open(test_world *w, const kvf_runtime_config *rc, const kvf_cache_config *cc)
{
    const kvf_runtime_config mine = rc ? *rc : test_runtime_config();
    kvf_error error = {0};
    kvf_cache_config fitting = *cc;
    fitting.transfer = test_transfer(cc->transfer);
    *w = (test_world){.config = *cc};
    kvf_status status = test_runtime_open(&mine, &w->runtime, &error);
    if (status != KVF_OK)
        fail_msg("kvf_runtime_open: %s %s", kvf_status_name(status), error.text);
    test_ok(w, kvf_stream_create(w->runtime, &w->stream));
    status = kvf_cache_open(w->runtime, &fitting, &w->cache, &error);
    if (status != KVF_OK)
        fail_msg("kvf_cache_open: %s %s", kvf_status_name(status), error.text);
    test_give_attention_params(w->cache, cc);
}

void test_world_close(test_world *w)
{
    kvf_stream_destroy(w->stream);
    kvf_cache_close(w->cache);
    kvf_runtime_close(w->runtime);
    *w = (test_world){0};
}

void test_open(test_world *w, test_tokens *t, const kvf_cache_config *cc,
               const test_tokens_spec *spec)
{
    test_tokens_make(t, cc, spec);
    test_world_open(w, NULL, cc);
}

void test_close(test_world *w, test_tokens *t)
{
    test_world_close(w);
    test_tokens_free(t);
}

kvf_sequence *test_sequence(test_world *w)
{
    kvf_sequence *s = NULL;
    test_ok(w, kvf_sequence_create(w->cache, &s));
    assert_non_null(s);
    return s;
}

void test_wait(test_world *w)
{
    test_ok(w, kvf_stream_wait(w->stream));
}

kvf_prefill_args test_chunk_args(kvf_sequence *s, const test_tokens *t, uint32_t layer,
                                 uint32_t first, uint32_t count, void *out)
{
    return (kvf_prefill_args){.sequence = s,
                              .layer = layer,
                              .tokens = count,
                              .q = test_q(t, layer, first),
                              .k = test_k(t, layer, first),
                              .v = test_v(t, layer, first),
                              .out = out};
}

kvf_decode_args test_step_args(kvf_sequence *const *s, const test_tokens *t, uint32_t layer,
                               uint32_t token, void *out)
{
    return (kvf_decode_args){.layer = layer,
                             .batch = 1,
                             .sequences = s,
                             .q = test_q(t, layer, token),
                             .k = test_k(t, layer, token),
                             .v = test_v(t, layer, token),
                             .out = out};
}

kvf_page_lists test_page_lists(const kvf_cache *cache, uint32_t batch)
{
    const uint32_t lists = batch * kvf_cache_settings(cache)->kv_heads;
    const uint32_t capacity = lists * kvf_select_pages_max(cache);
    return (kvf_page_lists){.indptr = test_alloc((lists + 1) * sizeof(int32_t)),
                            .indices = test_alloc(capacity * sizeof(int32_t)),
                            .capacity = capacity,
                            .last_page_len = test_alloc(lists * sizeof(int32_t))};
}

void test_page_lists_free(const kvf_page_lists *lists)
{
    test_release(lists->indptr);
    test_release(lists->indices);
    test_release(lists->last_page_len);
}

void test_rows_open(test_rows *r, const kvf_cache_config *c, size_t count)
{
    const size_t size = test_dtype_bytes(test_tensor_dtype(c));
    *r = (test_rows){.query_heads = c->query_heads,
                     .q_bytes = c->query_heads * c->head_dim * size,
                     .k_bytes = c->kv_heads * c->head_dim * size,
                     .v_bytes = c->kv_heads * test_value_dim(c) * size,
                     .out_bytes = c->query_heads * test_value_dim(c) * size};
    r->q = test_alloc(count * r->q_bytes);
    r->k = test_alloc(count * r->k_bytes);
    r->v = test_alloc(count * r->v_bytes);
    r->out = test_alloc(count * r->out_bytes);
    r->lse = test_alloc(count * c->query_heads * sizeof(float));
}

void test_rows_close(test_rows *r)
{
    test_release(r->q);
    test_release(r->k);
    test_release(r->v);
    test_release(r->out);
    test_release(r->lse);
}

void test_rows_put(const test_rows *r, size_t row, const test_tokens *t, uint32_t layer,
                   uint32_t token)
{
    memcpy(r->q + row * r->q_bytes, test_q(t, layer, token), r->q_bytes);
    memcpy(r->k + row * r->k_bytes, test_k(t, layer, token), r->k_bytes);
    memcpy(r->v + row * r->v_bytes, test_v(t, layer, token), r->v_bytes);
}

kvf_decode_args test_rows_args(const test_rows *r, size_t row, kvf_sequence *const *s,
                               uint32_t batch, uint32_t layer)
{
    return (kvf_decode_args){.layer = layer,
                             .batch = batch,
                             .sequences = s,
                             .q = r->q + row * r->q_bytes,
                             .k = r->k + row * r->k_bytes,
                             .v = r->v + row * r->v_bytes,
                             .out = r->out + row * r->out_bytes,
                             .lse = r->lse + row * r->query_heads};
}

void test_prefill(test_world *w, kvf_sequence *s, const test_tokens *t, const test_range *range,
                  void *out)
{
    const size_t row = (size_t)t->query_heads * t->value_dim * test_dtype_bytes(t->dtype);
    void *scratch = out ? NULL : test_alloc(range->count * row);
    char *base = out ? out : scratch;
    for (uint32_t done = 0; done < range->count;) {
        uint32_t n = range->count - done;
        if (n > range->chunk)
            n = range->chunk;
        const uint32_t token = range->first + done;
        kvf_prefill_args a = test_chunk_args(s, t, range->layer, token, n, base + done * row);
        if (range->append_only)
            a.q = a.out = NULL;
        test_ok(w, kvf_prefill(w->cache, &a, w->stream));
        done += n;
    }
    if (scratch) {
        test_wait(w);
        test_release(scratch);
    }
}

void test_decode(test_world *w, kvf_sequence *s, const test_tokens *t, uint32_t layer,
                 uint32_t token, void *out, float *lse)
{
    kvf_decode_args a = test_step_args(&s, t, layer, token, out);
    a.lse = lse;
    test_ok(w, kvf_decode(w->cache, &a, w->stream));
}

void test_fill(test_world *w, kvf_sequence *s, const test_tokens *t, uint32_t first, uint32_t count)
{
    for (uint32_t layer = 0; layer < t->layers; layer++)
        test_prefill(w, s, t,
                     &(test_range){.layer = layer, .first = first, .count = count, .chunk = 40},
                     NULL);
}

size_t test_steps_bytes(const test_tokens *t, uint32_t count)
{
    return (size_t)count * t->layers * t->query_heads * t->value_dim * test_dtype_bytes(t->dtype);
}

void *test_steps(test_world *w, kvf_sequence *s, const test_tokens *t, uint32_t first,
                 uint32_t count)
{
    const size_t bytes = test_steps_bytes(t, count), row = test_steps_bytes(t, 1) / t->layers;
    char *out = malloc(bytes + 1), *rows = test_alloc(bytes);
    assert_non_null(out);
    for (uint32_t i = 0; i < count; i++)
        for (uint32_t layer = 0; layer < t->layers; layer++)
            test_decode(w, s, t, layer, first + i, rows + (i * t->layers + layer) * row, NULL);
    test_wait(w);
    memcpy(out, rows, bytes);
    test_release(rows);
    return out;
}

void test_steps_again(void *wanted, test_world *w, kvf_sequence *s, const test_tokens *t,
                      uint32_t first, uint32_t count)
{
    void *got = test_steps(w, s, t, first, count);
    assert_memory_equal(wanted, got, test_steps_bytes(t, count));
    free(wanted);
    free(got);
}

void test_run(const test_scenario *sc, test_trace *trace)
{
    test_world w;
    test_tokens t;
    test_tokens_spec spec = sc->tokens;
    spec.count = sc->prompt + sc->steps;
    test_tokens_make(&t, &sc->cc, &spec);
    test_world_open(&w, sc->rc, &sc->cc);
    const uint32_t layers = sc->cc.layers, heads = sc->cc.query_heads;
    const kvf_dtype dtype = test_tensor_dtype(&sc->cc);
    const size_t row = (size_t)heads * test_value_dim(&sc->cc) * test_dtype_bytes(dtype);
    *trace = (test_trace){.dtype = dtype,
                          .out_bytes = row * sc->steps * layers,
                          .prefill_bytes = row * sc->prompt * layers,
                          .lse_count = (size_t)sc->steps * layers * heads};
    trace->out = test_alloc(trace->out_bytes);
    trace->prefill = test_alloc(trace->prefill_bytes);
    trace->lse = test_alloc(sizeof *trace->lse * trace->lse_count);

    kvf_sequence *s = test_sequence(&w);
    for (uint32_t layer = 0; layer < layers && sc->prompt; layer++)
        test_prefill(&w, s, &t,
                     &(test_range){.layer = layer, .count = sc->prompt, .chunk = sc->chunk},
                     (char *)trace->prefill + row * sc->prompt * layer);
    for (uint32_t step = 0; step < sc->steps; step++)
        for (uint32_t layer = 0; layer < layers; layer++) {
            const size_t at = (size_t)step * layers + layer;
            test_decode(&w, s, &t, layer, sc->prompt + step, (char *)trace->out + at * row,
                        trace->lse + at * heads);
        }
    test_wait(&w);
    kvf_cache_stats(w.cache, &trace->stats);
    kvf_sequence_destroy(s);
    test_world_close(&w);
    test_tokens_free(&t);
}

void test_trace_free(test_trace *trace)
{
    test_release(trace->out);
    test_release(trace->prefill);
    test_release(trace->lse);
    *trace = (test_trace){0};
}

void test_same_bits_at(const test_trace *a, const test_trace *b, const char *what, const char *file,
                       int line)
{
    assert_int_equal(a->out_bytes, b->out_bytes);
    const size_t size = test_dtype_bytes(a->dtype);
    if (memcmp(a->out, b->out, a->out_bytes) == 0 &&
        memcmp(a->lse, b->lse, a->lse_count * sizeof *a->lse) == 0)
        return;
    size_t i = 0;
    while (i < a->lse_count && memcmp(a->lse + i, b->lse + i, sizeof *a->lse) == 0)
        i++;
    print_error("%s: bits differ; first LSE that differs: %zu of %zu; largest distance %g\n", what,
                i, a->lse_count, test_distance(a->out, b->out, a->dtype, a->out_bytes / size));
    _fail(file, line);
}

void test_same_stats(const test_world *a, const test_world *b, int moves)
{
    kvf_stats x, y;
    kvf_cache_stats(a->cache, &x);
    kvf_cache_stats(b->cache, &y);
    assert_int_equal(x.steps, y.steps);
    assert_int_equal(x.tokens_attended, y.tokens_attended);
    assert_int_equal(x.pages_selected, y.pages_selected);
    assert_int_equal(x.hits + x.misses, y.hits + y.misses);
    assert_int_equal(x.bytes_to_host, y.bytes_to_host);
    assert_int_equal(x.refreshes, y.refreshes);
    if (!moves)
        return;
    assert_int_equal(x.hits, y.hits);
    assert_int_equal(x.bytes_to_device, y.bytes_to_device);
}

double test_distance(const void *a, const void *b, kvf_dtype dtype, size_t count)
{
    double worst = 0.0;
    for (size_t i = 0; i < count; i++) {
        double x =
            fabs((double)kvf_element_get(a, dtype, i) - (double)kvf_element_get(b, dtype, i));
        if (!(x <= worst))
            worst = isnan(x) ? INFINITY : x;
    }
    return worst;
}

/*
 * Outputs are convex combinations of values of deviation 1, so |out| <= about 5. Rounding once to
 * the dtype costs half a unit in the last place: 5 * 2^-9 (bf16), 5 * 2^-12 (fp16); twice that is
 * allowed because vector kernels may round weights to fp32 in another order.
 */
double test_tolerance(kvf_dtype dtype)
{
    return dtype == KVF_BF16 ? 2e-2 : dtype == KVF_FP16 ? 2.5e-3 : 2e-4;
}
