/* SPDX-License-Identifier: Apache-2.0 */

/*
 * KV caches off the card. llama.cpp allocates a cache in the memory of its layers' device, and
 * nothing but -nkvo changes that, for recurrent states and windows as well. So two functions of the
 * device's buffer type, of which a process has one, become ours. Where sizes of nothing but keys
 * and values are asked for, and then memory of exactly their sum, they get host memory. Everything
 * else goes to the function that was there.
 *
 * Where the functions are is found by calls of ggml on a type of our own, in which each tells its
 * place.
 */

#include "card.h"

#include <stdlib.h>
#include <string.h>

#include "plugin.h"

/* ---- functions of a buffer type ---- */

/* A struct ggml_backend_buffer_type begins with them, in another number in other versions; the
 * device comes next. */
enum { SLOTS = 10, ALLOC_BUFFER = 1, STEP = 64 };

#define EACH_SLOT(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9)
#define PLACE(n)                                                                                   \
    static size_t alignment_##n(gg_buffer_type *type)                                              \
    {                                                                                              \
        (void)type;                                                                                \
        return (n)*STEP;                                                                           \
    }                                                                                              \
    static size_t size_##n(gg_buffer_type *type, const gg_tensor *tensor)                          \
    {                                                                                              \
        (void)type;                                                                                \
        (void)tensor;                                                                              \
        return (n)*STEP;                                                                           \
    }
EACH_SLOT(PLACE)
#undef PLACE

typedef struct places {
    size_t alloc_size, device;
} places;

/* Where a public function looks. @return whether it is a layout with alloc_buffer before the
 * alignment, as all are that are known */
static bool find_places(const gg_api *gg, places *at)
{
#define NAME(n) alignment_##n,
    size_t (*const alignments[])(gg_buffer_type *) = {EACH_SLOT(NAME)};
#undef NAME
#define NAME(n) size_##n,
    size_t (*const sizes[])(gg_buffer_type *, const gg_tensor *) = {EACH_SLOT(NAME)};
#undef NAME
    void *slots[2 * SLOTS] = {NULL}; /* a version with more of them finds nothing */
    gg_buffer_type *type = (gg_buffer_type *)(void *)slots;
    const gg_tensor tensor = {.type = GG_F32, .ne = {1, 1, 1, 1}, .nb = {4, 4, 4, 4}};
    memcpy(slots, sizes, sizeof sizes);
    at->alloc_size = gg->backend_buft_get_alloc_size(type, &tensor) / STEP;
    memcpy(slots, alignments, sizeof alignments);
    const size_t alignment = gg->backend_buft_get_alignment(type) / STEP;
    const gg_device *device = gg->backend_buft_get_device(type);
    at->device = 0;
    while (at->device < SLOTS && slots[at->device] != (const void *)device)
        at->device++;
    return alignment > ALLOC_BUFFER && alignment < at->alloc_size && at->alloc_size < at->device &&
           at->device < SLOTS;
}
#undef EACH_SLOT

/* ---- what is taken ---- */

/* Cells that the library would choose among: others are attended whole, and fastest on the card. */
bool kvl_is_for_host(const kvl_plugin *p, const gg_tensor *t)
{
    const uint32_t budget = p->settings.cache.budget_tokens;
    return !t->view_src && (kvl_cache_tensor(t, 'k') || kvl_cache_tensor(t, 'v')) &&
           kvl_row_bytes(t->type, (size_t)t->ne[0]) && t->ne[1] % 64 == 0 &&
           (budget == UINT32_MAX || t->ne[1] > (int64_t)budget);
}

/* The size of a tensor was asked for: of a tensor of cells after others, of the first of them
 * again, or of another one. */
static void note_size(kvl_plugin *p, const gg_tensor *t, size_t bytes)
{
    kvl_card *c = &p->card;
    const size_t alignment = p->gg.backend_buft_get_alignment(c->type);
    if (!kvl_is_for_host(p, t) || !strcmp(t->name, c->first))
        c->bytes = 0;
    if (!kvl_is_for_host(p, t))
        return;
    if (!c->bytes) {
        memcpy(c->first, t->name, sizeof c->first);
        c->keys = c->values = 0;
    }
    c->bytes += (bytes + alignment - 1) / alignment * alignment;
    c->keys += kvl_cache_tensor(t, 'k') != NULL;
    c->values += kvl_cache_tensor(t, 'v') != NULL;
}

static size_t alloc_size(gg_buffer_type *type, const gg_tensor *t)
{
    kvl_plugin *p = kvl_the_plugin();
    const size_t bytes = p->card.alloc_size ? p->card.alloc_size(type, t) : p->gg.nbytes(t);
    pthread_mutex_lock(&p->lock);
    note_size(p, t, bytes);
    pthread_mutex_unlock(&p->lock);
    return bytes;
}

/* ---- what CUDA reads and writes of the host's ---- */

/* Addresses of llama.cpp's cache go to CUDA where ggml copies it: there is no fault, but an error,
 * where a page is away. Who has the lock copies memory of the plug-in's own. */
static void set_tensor(gg_buffer *buffer, gg_tensor *tensor, const void *from, size_t at,
                       size_t bytes)
{
    kvl_plugin *p = kvl_the_plugin();
    const int is_theirs = pthread_mutex_lock(&p->lock) == 0;
    kvl_memory_used(p, from, bytes, 0);
    p->card.set_tensor(buffer, tensor, from, at, bytes);
    if (is_theirs)
        pthread_mutex_unlock(&p->lock);
}

static void get_tensor(gg_buffer *buffer, const gg_tensor *tensor, void *to, size_t at,
                       size_t bytes)
{
    kvl_plugin *p = kvl_the_plugin();
    const int is_theirs = pthread_mutex_lock(&p->lock) == 0;
    kvl_memory_used(p, to, bytes, 1);
    p->card.get_tensor(buffer, tensor, to, at, bytes);
    if (is_theirs)
        pthread_mutex_unlock(&p->lock);
}

/* A buffer on the card. */
static gg_buffer *watched(kvl_plugin *p, gg_buffer *buffer)
{
    if (!buffer)
        return NULL;
    pthread_mutex_lock(&p->lock);
    p->card.set_tensor = buffer->iface.set_tensor;
    p->card.get_tensor = buffer->iface.get_tensor;
    buffer->iface.set_tensor = set_tensor;
    buffer->iface.get_tensor = get_tensor;
    pthread_mutex_unlock(&p->lock);
    return buffer;
}

/* Keys without values are one tensor of both, which no layer of ours has. */
static gg_buffer *alloc_buffer(gg_buffer_type *type, size_t bytes)
{
    kvl_plugin *p = kvl_the_plugin();
    kvl_card *c = &p->card;
    gg_buffer *buffer = NULL;
    pthread_mutex_lock(&p->lock);
    if (bytes && bytes == c->bytes && c->keys == c->values)
        buffer = p->gg.backend_buft_alloc_buffer(p->gg.backend_cpu_buffer_type(), bytes);
    c->bytes = 0;
    kvl_buffer *known = buffer ? kvl_buffer_of(p, buffer) : NULL;
    if (known)
        known->is_off_card = 1;
    pthread_mutex_unlock(&p->lock);
    if (known)
        return buffer;
    if (buffer)
        p->gg.backend_buffer_free(buffer);
    return watched(p, c->alloc_buffer(type, bytes));
}

/* ---- looking for the card ---- */

static gg_device *only_card(const gg_api *gg, const char **why)
{
    gg_device *card = NULL;
    for (size_t i = 0; i < gg->backend_dev_count(); i++) {
        gg_device *device = gg->backend_dev_get(i);
        const int kind = gg->backend_dev_type(device);
        if (kind != GG_DEVICE_GPU && kind != GG_DEVICE_IGPU)
            continue;
        if (card)
            *why = "there are several";
        card = device;
    }
    if (card && gg->backend_dev_backend_reg(card) != gg->backend_reg_by_name("CUDA"))
        *why = "it is not one of CUDA";
    return card;
}

/* Functions of the type become ours. */
static const char *take_over(kvl_plugin *p, gg_device *device)
{
    kvl_card *c = &p->card;
    places at;
    gg_buffer_type *type = p->gg.backend_dev_buffer_type(device);
    if (!type || !find_places(&p->gg, &at))
        return "struct ggml_backend_buffer_type has another layout";
    void **slots = (void **)(void *)type;
    if (slots[at.device] != (void *)device || p->gg.backend_buft_is_host(type))
        return "its buffer type is of another kind";
    void *found = gg_find(p->gg.backend_dev_name(device), "cudaDeviceSynchronize");
    if (!found)
        found = gg_find(slots[ALLOC_BUFFER], "cudaDeviceSynchronize");
    if (!found)
        return "its CUDA runtime is linked in";
    memcpy(&c->wait, &found, sizeof found);
    memcpy(&c->alloc_buffer, &slots[ALLOC_BUFFER], sizeof(void *));
    memcpy(&c->alloc_size, &slots[at.alloc_size], sizeof(void *));
    gg_buffer *(*buffer)(gg_buffer_type *, size_t) = alloc_buffer;
    size_t (*size)(gg_buffer_type *, const gg_tensor *) = alloc_size;
    memcpy(&slots[ALLOC_BUFFER], &buffer, sizeof(void *));
    memcpy(&slots[at.alloc_size], &size, sizeof(void *));
    c->type = type;
    return NULL;
}

void kvl_card_open(kvl_plugin *p)
{
    const char *why = NULL;
    gg_device *device = only_card(&p->gg, &why);
    if (!device || p->card.type)
        return;
    kvf_runtime_config config = p->settings.runtime;
    kvf_error error = {0};
    config.device = KVF_DEVICE_CUDA;
    if (!why && kvf_runtime_open(&config, &p->card.runtime, &error) != KVF_OK)
        why = error.text;
    if (!why && (why = take_over(p, device))) {
        kvf_runtime_close(p->card.runtime);
        p->card.runtime = NULL;
    }
    if (why)
        kvl_say("KV caches on %s are left to llama.cpp: %s", p->gg.backend_dev_name(device), why);
    else
        kvl_say("KV caches of more cells than the budget go from %s to host memory",
                p->gg.backend_dev_name(device));
}

void kvl_card_wait(const kvl_plugin *p)
{
    if (p->card.type)
        p->card.wait(); /* what fails here fails in llama.cpp's next call */
}

/* ---- tensors of the card, for the CPU ---- */

struct kvl_copy {
    struct kvl_copy *next;
    gg_tensor *of;
    void *own; /* its data on the card */
    max_align_t bytes[];
};

bool kvl_is_card_type(const kvl_plugin *p, const gg_buffer_type *type)
{
    return type && type == p->card.type;
}

bool kvl_is_on_card(const kvl_plugin *p, const gg_tensor *t)
{
    const gg_buffer *buffer = t->view_src ? t->view_src->buffer : t->buffer;
    return buffer && kvl_is_card_type(p, buffer->buft);
}

void *kvl_on_host(const kvl_plugin *p, kvl_copies *copies, gg_tensor *t)
{
    if (!kvl_is_on_card(p, t))
        return t->data;
    struct kvl_copy *copy = copies->newest;
    while (copy && copy->of != t)
        copy = copy->next;
    if (copy)
        return copy->bytes;
    const size_t bytes = p->gg.nbytes(t);
    if (!(copy = malloc(sizeof *copy + bytes)))
        return NULL;
    *copy = (struct kvl_copy){.next = copies->newest, .of = t, .own = t->data};
    copies->newest = copy;
    p->gg.backend_tensor_get(t, copy->bytes, 0, bytes);
    __atomic_fetch_add(&kvl_the_plugin()->card.copied, 1, __ATOMIC_RELAXED); /* without the lock */
    return copy->bytes;
}

void kvl_copies_free(kvl_copies *copies)
{
    for (struct kvl_copy *copy; (copy = copies->newest); free(copy))
        copies->newest = copy->next;
}

void kvl_write(const kvl_plugin *p, gg_tensor *t, const void *from)
{
    if (kvl_is_on_card(p, t))
        p->gg.backend_tensor_set(t, from, 0, p->gg.nbytes(t));
    else
        memcpy(t->data, from, p->gg.nbytes(t));
}

/* ---- rows of the card ---- */

bool kvl_rows_wait(const kvl_plugin *p, kvl_rows *rows, const kvl_layer *l, gg_tensor *node)
{
    const gg_tensor *from = node->src[0], *cells = node->src[1];
    const kvl_cache *c = l->cache;
    if (node->op != p->gg.op.set_rows || !c || !c->chains || !c->shape.is_off_card ||
        p->settings.cache.pages != KVF_PAGES_NATIVE || l->k->type != GG_F16 ||
        l->v->type != GG_F16) /* the library would have other numbers than llama.cpp */
        return false;
    const int is_value = kvl_cache_tensor(node, 'k') != l->k;
    const gg_tensor *other = rows->nodes[!is_value];
    if (rows->nodes[is_value] || (other && kvl_find_layer(p, other) != l) ||
        !kvl_is_on_card(p, from) || from->type != GG_F32 || from->nb[0] != sizeof(float) ||
        from->nb[1] % sizeof(float) || from->ne[2] != 1 || from->ne[3] != 1 ||
        from->ne[0] != node->ne[0] || !kvl_lists_cells(l, node) || cells->ne[0] != from->ne[1])
        return false;
    rows->nodes[is_value] = node;
    return true;
}

int kvl_rows_cells(kvl_plugin *p, kvl_copies *copies, const kvl_rows *rows, const kvl_layer *l,
                   const int64_t **cells, uint32_t *count)
{
    const gg_tensor *keys = rows->nodes[0], *values = rows->nodes[1];
    *count = 0;
    if (!keys && !values)
        return 1;
    if (!keys || !values || kvl_find_layer(p, keys) != l ||
        keys->src[1]->ne[0] != values->src[1]->ne[0])
        return 0;
    const int64_t *of_keys = kvl_on_host(p, copies, keys->src[1]);
    const int64_t *of_values = kvl_on_host(p, copies, values->src[1]);
    *cells = of_keys;
    *count = (uint32_t)keys->src[1]->ne[0];
    return of_keys && of_values && !memcmp(of_keys, of_values, *count * sizeof *of_keys);
}

int kvl_lend(const kvl_plugin *p, kvl_copies *copies, gg_tensor *node)
{
    gg_tensor *t;
    for (int i = -1; i < GG_SOURCES; i++)
        if ((t = i < 0 ? node : node->src[i]) && !kvl_on_host(p, copies, t))
            return 0;
    for (int i = -1; i < GG_SOURCES; i++)
        if ((t = i < 0 ? node : node->src[i]) && kvl_is_on_card(p, t))
            t->data = kvl_on_host(p, copies, t);
    return 1;
}

void kvl_take_back(const kvl_plugin *p, const kvl_copies *copies, gg_tensor *node)
{
    const void *output = node->data;
    for (const struct kvl_copy *copy = copies->newest; copy; copy = copy->next)
        if (copy->of->data == copy->bytes)
            copy->of->data = copy->own;
    if (node->data != output)
        kvl_write(p, node, output);
}
