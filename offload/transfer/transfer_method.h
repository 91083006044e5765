/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_OFFLOAD_TRANSFER_METHOD_H
#define KVF_OFFLOAD_TRANSFER_METHOD_H

/*
 * Shared by the transfer engine, its thread and its methods.
 *
 * The engine owns the requests and their order; a method owns what carries the bytes. Invariants:
 * - slot s holds ticket t with t % slot_count == s, slot_count is a power of two >= requests_max,
 *   and a slot is written again only after its request is done and the thread needs it no more;
 * - word `request` of a slot holds its ticket from the moment on that the lists may be read, word
 *   `done` from the moment on that the last byte has arrived or the request has failed; neither
 *   ever goes back.
 */

#include <stdatomic.h>

#include "transfer.h"

/* Registered host memory, one per slot. The device writes the first line and `done`. */
typedef struct kvf_transfer_words {
    _Alignas(64) uint32_t request;
    uint32_t count;
    _Alignas(64) uint32_t done;
    _Alignas(64) uint32_t unused; /* a line of its own for `done`, whatever follows */
} kvf_transfer_words;

typedef struct kvf_transfer_slot {
    kvf_transfer_request request;
    uint32_t ticket;           /* of the caller */
    kvf_transfer_words *words; /* as the host sees them */
    kvf_transfer_words *device_words;
    const void **from; /* [pages_max] written by publish; NULL where the host
                          reads the request */
    void **to;
    const void **device_from; /* the same at their aliases */
    void **device_to;
    kvf_event *sent; /* on the copy stream, after the last copy; where no functions tell of it */
    kvf_event *begin, *arrived;                   /* of `on_device`: round its kernel */
    kvf_event *recorded_begin, *recorded_arrived; /* the same in a recording */
    /* guarded by the engine's lock */
    kvf_status status;
    bool is_told;   /* some stream has the status */
    bool is_copied; /* `sent` comes after its copies; the thread's until `sent` has grown */
} kvf_transfer_slot;

typedef struct kvf_transfer_counters {
    atomic_uint_fast64_t pages, bytes, copies, gather_ns, copy_ns, waits;
} kvf_transfer_counters;

/* The request of a method that works on the engine's thread: arrays that the host can read. */
typedef struct kvf_transfer_list {
    const void *const *from; /* [count] device aliases */
    void *const *to;         /* [count] */
    void *const *device_to;  /* the same array as the device sees it */
    uint32_t count;
} kvf_transfer_list;

/* A method. It has `move` if it works on the engine's thread, `enqueue` if on
 * the device alone, which can be recorded, and neither if pages are attended where they lie, for
 * which the engine takes no stream, no event and no staging. Others may be NULL or 0. */
typedef struct kvf_transfer_ops {
    /* Reserve what the method needs; on failure close is called, which must take a half-open
     * engine. */
    kvf_status (*open)(kvf_transfer_engine *engine);
    void (*close)(kvf_transfer_engine *engine);
    /* On the engine's thread: enqueue all copies on copy_stream. */
    kvf_status (*move)(kvf_transfer_engine *engine, const kvf_transfer_list *list);
    /* Enqueue the request beside `stream`, between `begin` and `arrived` of the slot. It moves
     * nothing if the count is outside of [device_low, device_high) and the call is not recorded. */
    kvf_status (*enqueue)(kvf_transfer_engine *engine, const kvf_transfer_slot *slot,
                          kvf_stream *stream, bool is_recorded);
    void (*needs)(const kvf_transfer_config *config, uint64_t *host_bytes, uint64_t *device_bytes);
    /* Those of `out` that it has. */
    void (*shape)(const kvf_transfer_config *config, kvf_transfer_shape *out);
    bool copies_pages; /* a copy per page costs what a copy costs, however small the page */
} kvf_transfer_ops;

/* KVF_TRANSFER_<NAME> is kvf_transfer_<name>. */
#define KVF_TRANSFER_ROWS(X)                                                                       \
    X(DIRECT, direct) X(GATHER, gather) X(EACH, each) X(MAPPED, mapped) X(BATCH, batch)
#define KVF_TRANSFER_EXTERN(NAME, name) extern const kvf_transfer_ops kvf_transfer_##name;
KVF_TRANSFER_ROWS(KVF_TRANSFER_EXTERN)

/* NULL for AUTO, and what is no method. */
const kvf_transfer_ops *kvf_transfer_find(kvf_transfer method);

#define KVF_TRANSFER_CLOCKS 32u

/* A span of one stream, for copy_ns. */
typedef struct kvf_transfer_clock {
    kvf_event *begin, *end;
    enum { KVF_CLOCK_FREE, KVF_CLOCK_OPEN, KVF_CLOCK_CLOSED } state;
} kvf_transfer_clock;

struct kvf_transfer_engine {
    kvf_device *device;
    kvf_transfer_config config;
    const kvf_transfer_ops *by_bucket[KVF_TRANSFER_BUCKETS];
    uint32_t methods;                  /* bit m: method m is open or being opened */
    const kvf_transfer_ops *on_device; /* the method that works there; NULL = none */
    uint32_t device_low, device_high;  /* it takes low <= count < high; equal = none */
    bool shares;                       /* the host reads the device's memory */
    kvf_stream *copy_stream;           /* carries the copies of the thread */
    kvf_stream *read_stream;           /* carries the kernels of `on_device` */
    kvf_transfer_slot *slots;          /* [slot_count] */
    uint32_t slot_count;
    uint32_t next_ticket;   /* of the caller */
    uint32_t next_recorded; /* of the caller */
    bool is_tainted; /* of the caller: read_stream may carry the error of a stream that failed */
    kvf_host_memory words; /* one arena; none where the device shares memory */
    kvf_transfer_words *plain_words;
    void *method[KVF_TRANSFER_METHODS]; /* of each method */
    kvf_transfer_counters counters;

    pthread_t thread;
    bool has_locks, has_thread;
    pthread_mutex_t lock;
    pthread_cond_t news;    /* for the thread: a request, a word, the end */
    pthread_cond_t changed; /* for others: `sent` or a done word */
    uint32_t submitted;     /* guarded: tickets below are known to the thread */
    uint32_t sent;          /* guarded: the thread is through with tickets below */
    bool is_closing;        /* guarded */
    bool is_asleep;         /* guarded: the thread waits for news */
    kvf_status untold;      /* guarded: of a request whose slot was used again before a
                               join */
    kvf_error error;        /* guarded: the text of the latest that failed on the thread */
    atomic_uint rung;       /* grows with every word that a stream of the host device wrote */

    pthread_mutex_t clock_lock;
    kvf_transfer_clock clocks[KVF_TRANSFER_CLOCKS]; /* guarded by clock_lock */
};

static inline kvf_transfer_slot *kvf_transfer_slot_of(kvf_transfer_engine *engine, uint32_t ticket)
{
    return &engine->slots[ticket & (engine->slot_count - 1)];
}

static inline bool kvf_transfer_is_done(const kvf_transfer_slot *slot, uint32_t ticket)
{
    return (int32_t)(kvf_word_load(&slot->words->done) - ticket) >= 0;
}

/* ---- transfer_clock.c ---- */

KVF_CHECKED kvf_status kvf_transfer_clocks_create(kvf_transfer_engine *engine);
void kvf_transfer_clocks_destroy(kvf_transfer_engine *engine);
/* Bracket copies on a stream; the time between goes to copy_ns once both are done. *clock = NULL:
 * every clock is under way, and the caller does not want to wait for one. */
KVF_CHECKED kvf_status kvf_transfer_clock_start(kvf_transfer_engine *engine, kvf_stream *stream,
                                                bool may_wait, kvf_transfer_clock **clock);
KVF_CHECKED kvf_status kvf_transfer_clock_stop(kvf_transfer_engine *engine, kvf_stream *stream,
                                               kvf_transfer_clock *clock);
/* Add the spans that are done. */
void kvf_transfer_clocks_read(kvf_transfer_engine *engine);

static inline void kvf_transfer_count(atomic_uint_fast64_t *counter, uint64_t amount)
{
    atomic_fetch_add_explicit(counter, amount, memory_order_relaxed);
}

#endif
