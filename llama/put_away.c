/* SPDX-License-Identifier: Apache-2.0 */

/*
 * One copy: pages of llama.cpp's tensors whose tokens are in the library's pages are given back to
 * the system, and hidden. Whoever touches one of them, in whatever way, gets a fault, and in it the
 * page as it was, from kvf_blocks_get: kernels of llama.cpp, functions of buffers, callbacks.
 *
 * A page goes only if the library gives its bytes back as they are, unless one copy of quantized
 * tokens is asked for. A place of a chain that such a page needs is not given up before the page is
 * back (kvl_bring_cell), nor is a mark of a write set (kvl_layer_wrote).
 *
 * Invariant: of every cell of a page that is away, a chain has a place that is put.
 */

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "plugin.h"

enum {
    AWAY_PART = 128, /* of the cells */
    RUNS = 128       /* of pages of a tensor that are away, and that are not */
};

static size_t page_bytes(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

/* ---- pages and cells ---- */

static size_t first_cell(const kvl_pages *g, size_t page)
{
    return (g->before + page * page_bytes()) / g->row;
}

static size_t end_cell(const kvl_pages *g, size_t page)
{
    return (g->before + (page + 1) * page_bytes() - 1) / g->row + 1;
}

/* Pages from one on, before another, that are all away, or all not. */
static size_t same(const kvl_pages *g, size_t page, size_t end)
{
    const unsigned char *from = g->away + page, *other = memchr(from, !*from, end - page);
    return other ? (size_t)(other - from) : end - page;
}

/* Likewise those whose cells fit into a call. */
static size_t window(const kvl_pages *g, size_t page)
{
    const size_t most = (KVL_PUT - 2) * g->row / page_bytes(), n = same(g, page, g->count);
    return n < most ? n : most;
}

static void find_homes(const kvl_layer *l, const kvl_pages *g, size_t page, size_t n)
{
    const size_t first = first_cell(g, page);
    kvl_chains_homes(l->cache->chains, l->index, first,
                     (uint32_t)(end_cell(g, page + n - 1) - first), l->cache->homes);
}

/* Are all cells of page `page + i` of a window at home? */
static int is_whole(const kvl_layer *l, const kvl_pages *g, size_t page, size_t i)
{
    const int64_t *homes = l->cache->homes - first_cell(g, page);
    for (size_t cell = first_cell(g, page + i); cell < end_cell(g, page + i); cell++)
        if (homes[cell] < 0)
            return 0;
    return 1;
}

/* The bytes of a window, from the library; NULL = it failed. */
static const char *read_back(const kvl_layer *l, const kvl_pages *g, size_t page, size_t n)
{
    const kvl_cache *c = l->cache;
    const size_t first = first_cell(g, page);
    const int is_key = g == l->pages;
    char *to = is_key ? c->put_k : c->put_v;
    const kvf_blocks_get_args args = {.layer = l->index,
                                      .tokens = (uint32_t)(end_cell(g, page + n - 1) - first),
                                      .k = is_key ? to : NULL,
                                      .v = is_key ? NULL : to,
                                      .slots = c->homes};
    return kvf_blocks_get(c->blocks, &args, c->stream) == KVF_OK
               ? to + (g->before + page * page_bytes() - first * g->row)
               : NULL;
}

/* ---- back ---- */

/* A window from a page that is away on. @return its pages; 0 = they cannot be read */
static size_t bring_window(kvl_layer *l, kvl_pages *g, size_t page)
{
    const size_t n = window(g, page), bytes = page_bytes();
    int is_known = l->cache->chains != NULL;
    if (is_known)
        find_homes(l, g, page, n);
    for (size_t i = 0; is_known && i < n; i++)
        is_known = is_whole(l, g, page, i);
    const char *content = is_known ? read_back(l, g, page, n) : NULL;
    if (!content || !kvl_pages_show(g->first + page * bytes, n * bytes, content)) {
        if (!l->cache->is_lost)
            kvl_say("tokens of %s cannot be read back", l->k->name);
        l->cache->is_lost = 1;
        return 0;
    }
    memset(g->away + page, 0, n);
    l->back += n;
    return n;
}

void kvl_bring_back(kvl_layer *l, size_t first, size_t end)
{
    for (kvl_pages *g = l->pages; g < l->pages + 2; g++) {
        if (!g->away)
            continue;
        const size_t bytes = page_bytes(), cells = (g->before + g->count * bytes) / g->row + 1;
        const size_t from = first * g->row, to = (end < cells ? end : cells) * g->row;
        size_t page = from > g->before ? (from - g->before) / bytes : 0, n = 1;
        while (n && page < g->count && g->before + page * bytes < to)
            page += !g->away[page] ? 1 : (n = bring_window(l, g, page));
    }
}

void kvl_bring_cell(void *cache, uint32_t layer, size_t cell)
{
    for (kvl_layer *l = ((kvl_cache *)cache)->members; l; l = l->sibling)
        if (layer == KVL_ALL_LAYERS || layer == l->index)
            kvl_bring_back(l, cell, cell + 1);
}

/* Where the library has cells from one on that follow each other, as many as fit into a call. */
static uint32_t find_run(const kvl_layer *l, const int64_t *cells, uint32_t count)
{
    uint32_t n = 1;
    while (n < count && n < KVL_PUT && cells[n] == cells[0] + n)
        n++;
    kvl_chains_homes(l->cache->chains, l->index, (size_t)cells[0], n, l->cache->homes);
    return n;
}

int kvl_cells_are_put(const kvl_layer *l, const int64_t *cells, uint32_t count)
{
    int64_t lacks = 0; /* below 0: one is nowhere */
    for (uint32_t at = 0, n; at < count; at += n) {
        n = find_run(l, cells + at, count - at);
        for (uint32_t i = 0; i < n; i++)
            lacks |= l->cache->homes[i];
    }
    return lacks >= 0;
}

int kvl_cells_give(const kvl_layer *l, const int64_t *cells, uint32_t count)
{
    kvf_status status = KVF_OK;
    for (uint32_t at = 0, n; at < count && status == KVF_OK; at += n) {
        n = find_run(l, cells + at, count - at);
        const kvf_blocks_get_args args = {.layer = l->index,
                                          .tokens = n,
                                          .k = (char *)l->k->data + (size_t)cells[at] * l->k->nb[1],
                                          .v = (char *)l->v->data + (size_t)cells[at] * l->v->nb[1],
                                          .slots = l->cache->homes};
        status = kvf_blocks_get(l->cache->blocks, &args, l->cache->stream);
    }
    return status == KVF_OK;
}

void kvl_pages_forget(kvl_layer *l)
{
    for (kvl_pages *g = l->pages; g < l->pages + 2; g++) {
        if (g->away)
            (void)kvl_pages_show(g->first, g->count * page_bytes(), NULL);
        free(g->away);
        g->away = NULL;
    }
}

/* ---- faults ---- */

static struct sigaction others; /* what happened at faults before */

/* @return whether the address has its content now */
static int bring_address(const kvl_plugin *p, const char *address)
{
    for (const kvl_buffer *b = p->buffers; b; b = b->next)
        for (kvl_layer *l = b->layers; l; l = l->next)
            for (kvl_pages *g = l->pages; g < l->pages + 2; g++) {
                const size_t bytes = page_bytes();
                if (!g->away || address < g->first || address >= g->first + g->count * bytes)
                    continue;
                const size_t page = (size_t)(address - g->first) / bytes;
                if (g->away[page])
                    return bring_window(l, g, page) > 0;
                return kvl_pages_show(g->first + page * bytes, bytes, NULL); /* it has come */
            }
    return 0;
}

/* The lock is checked: a fault of its owner is not one of these. */
static void on_fault(int number, siginfo_t *info, void *context)
{
    kvl_plugin *p = kvl_the_plugin();
    const int error = errno;
    int is_there = 0;
    if (info->si_code > 0 && pthread_mutex_lock(&p->lock) == 0) {
        is_there = bring_address(p, info->si_addr);
        pthread_mutex_unlock(&p->lock);
    }
    errno = error;
    if (is_there)
        return;
    if (others.sa_flags & SA_SIGINFO) {
        others.sa_sigaction(number, info, context);
    } else if (others.sa_handler != SIG_DFL && others.sa_handler != SIG_IGN) {
        others.sa_handler(number);
    } else {
        signal(number, SIG_DFL);
        raise(number);
    }
}

/* Others may have taken faults over since pages were put away before. On the stack of whoever
 * touches a page: a stack for signals is too small for the library. */
static int catches_faults(void)
{
    struct sigaction now, own = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};
    if (sigaction(SIGSEGV, NULL, &now) != 0)
        return 0;
    if (now.sa_flags & SA_SIGINFO && now.sa_sigaction == on_fault)
        return 1;
    others = now;
    return sigaction(SIGSEGV, &own, NULL) == 0;
}

/* ---- away ---- */

static int is_quantized(const kvl_plugin *p)
{
    return p->settings.cache.pages != KVF_PAGES_NATIVE;
}

void kvl_pages_learn(const kvl_plugin *p, kvl_layer *l)
{
    static int can_hide = -1;
    if (can_hide < 0)
        can_hide = kvl_can_hide();
    const kvl_tokens_kept kept = p->settings.copies;
    l->stays |= !can_hide || kept == KVL_COPIES_TWO || (kept != KVL_COPIES_ONE && is_quantized(p));
    for (int i = 0; i < 2; i++) {
        const gg_tensor *t = i ? l->v : l->k;
        const size_t page = page_bytes(), bytes = t->nb[2] * (size_t)t->ne[2];
        const size_t before = (page - (uintptr_t)t->data % page) % page;
        l->pages[i] = (kvl_pages){.first = (char *)t->data + before,
                                  .count = before < bytes ? (bytes - before) / page : 0,
                                  .before = before,
                                  .row = t->nb[1]};
        const int is_of_malloc = t->data && t->buffer->size >= bytes &&
                                 t->buffer->buft == p->gg.backend_cpu_buffer_type();
        if (is_of_malloc)
            kvl_give_back_zeros(t->data, bytes);
        /* A window has to be more than a page. */
        l->stays |= !is_of_malloc || t->type != GG_F16 || t->nb[1] * KVL_PUT < 2 * page;
    }
}

static void put_away_window(kvl_layer *l, const kvl_pages *g, size_t page, size_t n)
{
    const size_t bytes = page_bytes();
    char *at = g->first + page * bytes;
    size_t whole = 0;
    find_homes(l, g, page, n);
    for (size_t i = 0; i < n; i++)
        whole += (size_t)is_whole(l, g, page, i);
    /* Nobody writes them meanwhile: whoever tries waits for the lock. */
    const char *content = whole && kvl_pages_guard(at, n * bytes) ? read_back(l, g, page, n) : NULL;
    for (size_t i = 0; content && i < n; i++)
        g->away[page + i] =
            is_whole(l, g, page, i) &&
            (is_quantized(kvl_the_plugin()) || !memcmp(at + i * bytes, content + i * bytes, bytes));
    for (size_t i = 0, run; whole && i < n; i += run, at += run * bytes) {
        run = same(g, page + i, page + n);
        if (!g->away[page + i])
            (void)kvl_pages_show(at, run * bytes, NULL);
        else if (!kvl_pages_hide(at, run * bytes))
            memset(g->away + page + i, 0, run), l->stays = 1;
    }
}

/* Where pages that are away lie scattered the system would have to keep many mappings. */
static int is_scattered(const kvl_pages *g)
{
    size_t runs = 0;
    for (size_t page = 0; page < g->count; runs++)
        page += same(g, page, g->count);
    return runs > RUNS;
}

static void put_away(kvl_layer *l)
{
    l->fresh = l->back = 0;
    if (l->stays || !l->cache || !l->cache->chains || l->cache->is_lost || !catches_faults())
        return;
    for (kvl_pages *g = l->pages; g < l->pages + 2; g++) {
        if (!g->away && !(g->away = calloc(1, g->count + 1)))
            return;
        for (size_t page = 0, n; page < g->count && !is_scattered(g); page += n) {
            n = g->away[page] ? same(g, page, g->count) : window(g, page);
            if (!g->away[page])
                put_away_window(l, g, page, n);
        }
    }
}

void kvl_put_away_some(const kvl_plugin *p, kvl_layer *l)
{
    const kvl_shape *s = &l->cache->shape;
    const size_t cells = (size_t)s->cells * s->streams; /* all of them are looked at */
    if (l->fresh >= p->away_at && l->fresh >= cells / AWAY_PART)
        put_away(l);
}

void kvl_put_away_again(kvl_plugin *p, const gg_tensor *of)
{
    pthread_mutex_lock(&p->lock);
    kvl_layer *l = kvl_find_layer(p, of);
    if (l && l->back)
        put_away(l);
    pthread_mutex_unlock(&p->lock);
}
