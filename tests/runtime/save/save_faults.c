/* SPDX-License-Identifier: Apache-2.0 */

/* The engine with a plan, and the small cache; see the header. */

#include "save_faults.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include "cache.h"

/* ---- an engine that misbehaves once, or holds requests ---- */

fail_plan_of fail_plan;
_Atomic uint32_t fail_holds_reads, fail_holds_writes;
void (*fail_at_wait)(void);
/* A save writes on a thread of its own, beside the disk tier of the caller's. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

typedef struct rig_io {
    kvf_io base;
    uint32_t first, count, held_count;
    kvf_io_result results[KVF_IO_DEPTH_MAX];
    kvf_io_request held[KVF_IO_DEPTH_MAX];
} rig_io;

static kvf_status rig_open(kvf_context *context, uint32_t depth, kvf_io **out)
{
    rig_io *io = kvf_alloc(context, 1, sizeof *io);
    if (!io)
        KVF_FAIL(context, KVF_OUT_OF_MEMORY, "no memory for the engine of a test");
    io->base = (kvf_io){.ops = &fail_engine, .context = context, .depth = depth};
    *out = &io->base;
    return KVF_OK;
}

static void rig_close(kvf_io *io)
{
    kvf_free(io->context, io);
}

static int64_t rig_move(const kvf_io_request *r, const struct iovec *pieces, uint32_t count)
{
    const ssize_t n = r->is_write ? pwritev(r->file, pieces, (int)count, (off_t)r->offset)
                                  : preadv(r->file, pieces, (int)count, (off_t)r->offset);
    return n < 0 ? -errno : n;
}

/* The plan for a request. */
static int planned(const kvf_io_request *r)
{
    const int other = r->is_write ? FAIL_READS : FAIL_WRITES;
    pthread_mutex_lock(&lock);
    const uint32_t n = fail_plan.count;
    fail_plan.count += fail_plan.kind != other;
    if (fail_plan.record)
        fail_plan.record(r);
    const int what =
        fail_plan.kind != other && (n == fail_plan.at || (fail_plan.always && n > fail_plan.at))
            ? fail_plan.what
            : NOTHING;
    pthread_mutex_unlock(&lock);
    return what;
}

/* Bytes first .. end - 1 of the first piece. */
static int64_t rig_move_part(const kvf_io_request *r, size_t first, size_t end)
{
    const struct iovec part = {(char *)r->pieces[0].iov_base + first, end - first};
    kvf_io_request of = *r;
    of.offset += first;
    return rig_move(&of, &part, 1);
}

/* To an end that O_DIRECT can take, if that is possible. */
static size_t half_of(size_t bytes)
{
    return bytes % 8192 == 0 ? bytes / 2 : (bytes + 1) / 2;
}

static size_t held_part(const kvf_io_request *r)
{
    return r->pieces[0].iov_len / 2 / 4096 * 4096;
}

static void rig_end(rig_io *io, const kvf_io_request *r, int64_t bytes)
{
    io->results[(io->first + io->count++) % KVF_IO_DEPTH_MAX] =
        (kvf_io_result){.tag = r->tag, .bytes = bytes};
}

static int rig_submit(kvf_io *base, const kvf_io_request *r)
{
    rig_io *io = (rig_io *)base;
    const int what = planned(r);
    if (what == FULL_QUEUE)
        return -EBUSY;
    if (r->count == 1 && (r->is_write ? fail_holds_writes : fail_holds_reads)) {
        (void)rig_move_part(r, 0, held_part(r));
        io->held[io->held_count++] = *r;
        return 0;
    }
    int64_t bytes;
    if (what == SHORT || what == KILL)
        bytes = rig_move_part(r, 0, half_of(r->pieces[0].iov_len));
    else
        bytes = what >= ERRNO ? -(what - ERRNO) : rig_move(r, r->pieces, r->count);
    if (what == KILL)
        (void)kill(getpid(), SIGKILL);
    rig_end(io, r, bytes);
    return 0;
}

/* The oldest one; its second half moves now. */
static void finish_held(rig_io *io)
{
    const kvf_io_request r = io->held[0];
    const size_t bytes = r.pieces[0].iov_len, first = held_part(&r);
    if (!r.is_write && fail_at_wait)
        fail_at_wait();
    assert_int_equal(rig_move_part(&r, first, bytes), bytes - first);
    rig_end(io, &r, (int64_t)bytes);
    memmove(io->held, io->held + 1, --io->held_count * sizeof *io->held);
}

static void rig_wait(kvf_io *base, kvf_io_result *out)
{
    rig_io *io = (rig_io *)base;
    if (io->count == 0)
        finish_held(io);
    *out = io->results[io->first];
    io->first = (io->first + 1) % KVF_IO_DEPTH_MAX;
    io->count--;
}

static bool rig_poll(kvf_io *base, kvf_io_result *out)
{
    if (((rig_io *)base)->count == 0)
        return false;
    rig_wait(base, out);
    return true;
}

const kvf_io_ops fail_engine = {.name = "rig",
                                .open = rig_open,
                                .close = rig_close,
                                .submit = rig_submit,
                                .wait = rig_wait,
                                .poll = rig_poll};

void fail_plan_set(uint32_t at, int what, uint32_t always)
{
    pthread_mutex_lock(&lock);
    fail_plan.count = 0;
    fail_plan.kind = FAIL_ANY;
    fail_plan.at = at;
    fail_plan.what = what;
    fail_plan.always = always;
    pthread_mutex_unlock(&lock);
}

/* ---- a small world ---- */

void fail_world_open(fail_world *f, uint32_t extent_bytes)
{
    kvf_cache_config config = save_config(&save_cases[0]);
    kvf_runtime_config rc = test_runtime_config();
    rc.allocator = test_asking_allocator();
    config.head_dim = 32;
    config.tokens_max = 128;
    test_hooks.extent_bytes = extent_bytes;
    test_hooks.io_engine = &fail_engine;
    fail_plan_set(UINT32_MAX, NOTHING, 0);
    test_tokens_make(&f->t, &config, &(test_tokens_spec){.count = FAIL_TOKENS + 8, .seed = 3});
    test_world_open(&f->w, &rc, &config);
    f->s = test_sequence(&f->w);
    for (uint32_t layer = 0; layer < config.layers; layer++)
        test_prefill(
            &f->w, f->s, &f->t,
            &(test_range){
                .layer = layer, .count = FAIL_TOKENS, .chunk = FAIL_TOKENS, .append_only = 1},
            NULL);
    test_wait(&f->w);
}

void fail_world_close(fail_world *f)
{
    test_close(&f->w, &f->t);
}

kvf_status fail_restore(fail_world *f, const char *path, kvf_error *error)
{
    kvf_restore_args args;
    kvf_sequence *r = NULL;
    kvf_restore_args_init(&args);
    args.path = path;
    const uint32_t free_before = f->w.cache->kv_groups[0].pool.free_count;
    const kvf_status status = kvf_sequence_restore(f->w.cache, &args, f->w.stream, &r);
    *error = *kvf_runtime_error(f->w.runtime);
    assert_true((status == KVF_OK) == (r != NULL));
    kvf_sequence_destroy(r);
    assert_int_equal(f->w.cache->kv_groups[0].pool.free_count, free_before);
    assert_int_equal(f->w.cache->broken, KVF_OK);
    return status;
}
