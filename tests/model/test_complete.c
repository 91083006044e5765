/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Completing a pruned prompt: at the end every key and value has the bits of an unpruned prefill of
 * the prompt and of the tokens that were decoded meanwhile. Before that, and where it is given up
 * or its file fails, the sequence says what it says without completing.
 */

#include "completion.h"
#include "prune_run_rig.h"
#include "sweep.h"

#include <errno.h>
#include <kvferry/save.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#define SEQUENCES 4u
#define TOKENS    (PROMPT + 4 * STEPS)
#define ROW       64u /* head_dim of the rig */

typedef enum place { IN_MEMORY, ROWS_ON_DISK, ALL_ON_DISK } place;

typedef struct scene {
    rig r;
    kvf_prune *prune;
    kvf_completion *completion;
    int file; /* of the hidden states, on disk */
    uint32_t ids[PROMPT + STEPS];
} scene;

/* The descriptor that the next open gets. */
static int next_file(void)
{
    const int file = dup(STDERR_FILENO);
    assert_true(file >= 0);
    (void)close(file);
    return file;
}

static void scene_open_as(scene *s, kvf_select select, const kvf_prune_config *config, place where)
{
    const bool on_disk = where != IN_MEMORY;
    kvf_error error;
    struct stat about;
    const rig_prompt b = one_prompt(0, PROMPT);
    rig *r = &s->r;
    rig_open_as(r, &(rig_shape){select, 64, 1, SEQUENCES, TOKENS, where == ALL_ON_DISK});
    s->prune = rig_open_prune(r, config);
    s->file = next_file();
    if (kvf_completion_open(r->runtime, &r->model, PROMPT, on_disk ? r->directory : NULL,
                            &s->completion, &error) != KVF_OK)
        fail_msg("kvf_completion_open: %s", error.text);
    if (on_disk) {
        assert_int_equal(fstat(s->file, &about), 0);
        assert_int_equal(about.st_size, PROMPT * HIDDEN * sizeof(float));
        assert_int_equal(about.st_nlink, 0);
        assert_int_equal(about.st_mode & 0777, 0600);
    }
    kvf_transformer_keep(r->transformer, s->completion);
    memcpy(s->ids, b.ids, PROMPT * sizeof *s->ids);
    for (uint32_t i = 0; i < STEPS; i++)
        s->ids[PROMPT + i] = rig_id(9, i);
}

static void scene_open(scene *s, kvf_select select, const kvf_prune_config *config)
{
    scene_open_as(s, select, config, IN_MEMORY);
}

static void scene_close(scene *s)
{
    kvf_transformer_keep(s->r.transformer, NULL);
    kvf_completion_close(s->completion);
    kvf_prune_close(s->prune);
    model_rig_close(&s->r);
}

static kvf_sequence *prune(scene *s)
{
    kvf_sequence *sequence = model_rig_sequence(&s->r);
    rig_prefill_pruned(&s->r, s->prune, sequence, s->ids, PROMPT);
    return sequence;
}

static void step(scene *s)
{
    model_rig_must(&s->r,
                   kvf_completion_step(s->completion, s->r.transformer, s->r.cache, s->r.stream),
                   "kvf_completion_step");
}

static void end(scene *s, uint32_t count)
{
    while (kvf_completion_left(s->completion))
        step(s);
    model_rig_must(&s->r,
                   kvf_completion_end(s->completion, s->r.transformer, s->r.cache, s->ids + PROMPT,
                                      count, s->r.stream),
                   "kvf_completion_end");
    assert_null(kvf_completion_of(s->completion));
}

/* Every key and value of both, wherever their pages are. */
static void expect_same_pages(scene *s, const kvf_sequence *a, const kvf_sequence *b)
{
    const size_t token = 2 * (size_t)ROW * 2; /* a key and a value of 16 bits */
    void *host[2], *device[2];
    for (uint32_t i = 0; i < 2; i++)
        model_rig_must(&s->r, kvf_pinned_alloc(s->r.runtime, PAGE * token, &host[i], &device[i]),
                       "kvf_pinned_alloc");
    assert_int_equal(s->r.model.head_dim, ROW);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        const uint32_t length = kvf_sequence_length(a, layer);
        assert_int_equal(length, kvf_sequence_length(b, layer));
        for (uint32_t at = 0; at < HEADS * length;
             at += at % length + PAGE < length ? PAGE : length - at % length) {
            const uint32_t head = at / length, page = at % length / PAGE;
            const uint32_t rest = length - page * PAGE;
            const kvf_sequence *of[2] = {a, b};
            for (uint32_t i = 0; i < 2; i++)
                model_rig_must(&s->r,
                               kvf_memory_copy(s->r.stream, device[i],
                                               kvf_page_address(of[i], layer, head, page),
                                               PAGE * token),
                               "kvf_memory_copy");
            model_rig_wait(&s->r);
            if (memcmp(host[0], host[1], (rest < PAGE ? rest : PAGE) * token) != 0)
                fail_msg("layer %u, head %u, page %u differs", layer, head, page);
        }
    }
    for (uint32_t i = 0; i < 2; i++)
        kvf_pinned_free(s->r.runtime, host[i]);
}

static kvf_prune_config config_of(const char *name)
{
    kvf_prune_config config = rig_config_of(name);
    config.settings.window = WINDOW;
    config.settings.keep = 0.2f;
    config.settings.keep_tokens = 0;
    config.settings.propagate = 0.3f;
    config.settings.propagate_tokens = 0;
    config.settings.layer =
        kvf_prune_policy_takes(config.policy, "layer") ? 1 : KVF_PRUNE_LAYER_AUTO;
    config.settings.pivot = KVF_PIVOT_FIXED;
    config.retention = KVF_RETENTION_COMPLETE;
    return config;
}

/* ---- whole at the end ---- */

static void ends_as_unpruned(const char *name, kvf_select select, uint32_t before, place where)
{
    static outcome pruned, whole, plain;
    const kvf_prune_config config = config_of(name);
    scene s;
    scene_open_as(&s, select, &config, where);
    kvf_sequence *a = prune(&s), *b = model_rig_sequence(&s.r);
    assert_int_equal(kvf_sequence_length(a, 0), PROMPT);
    assert_true(kvf_sequence_length(a, LAYERS - 1) < PROMPT);
    assert_ptr_equal(kvf_completion_of(s.completion), a);
    for (uint32_t i = 0; i < before; i++)
        step(&s);
    rig_decode(&s.r, a, &pruned);
    end(&s, STEPS);
    model_rig_prefill(&s.r, b, s.ids, PROMPT);
    model_rig_prefill(&s.r, b, s.ids + PROMPT, STEPS);
    if (where != ALL_ON_DISK) /* where a call brings some pages, and others are in the file */
        expect_same_pages(&s, a, b);
    rig_decode(&s.r, a, &whole);
    rig_decode(&s.r, b, &plain);
    assert_false(outcome_is_same_logits(&pruned, &plain));
    if (select == KVF_SELECT_FULL)
        assert_true(outcome_is_same_logits(&whole, &plain));
    kvf_sequence_destroy(b);
    kvf_sequence_destroy(a);
    model_rig_wait(&s.r);
    scene_close(&s);
}

TEST(every_policy_ends_as_unpruned)
{
    static const char *const names[] = {"fastkv", "structkv", "asl", "pyramidinfer"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        ends_as_unpruned(names[i], KVF_SELECT_FULL, (uint32_t)(3 * i), IN_MEMORY);
}

TEST(so_it_is_on_disk)
{
    ends_as_unpruned("fastkv", KVF_SELECT_FULL, 2, ALL_ON_DISK);
    ends_as_unpruned("pyramidinfer", KVF_SELECT_FULL, 0, ROWS_ON_DISK);
}

/* Whatever the answer attended to. */
TEST(so_does_a_selection)
{
    ends_as_unpruned("fastkv", KVF_SELECT_HYBRID, 1, IN_MEMORY);
    ends_as_unpruned("fastkv", KVF_SELECT_DYNAMIC, 0, IN_MEMORY);
}

/* ---- in the middle ---- */

typedef enum what { NOTHING, STEPS_ONLY, FORK, CUT, GIVE_UP, DESTROY_FORK, NO_ROOM } what;

/* No sequence is left for the completed one. */
static void fail_for_room(scene *s)
{
    rig *r = &s->r;
    kvf_sequence *others[SEQUENCES - 1];
    kvf_completion_drop(s->completion, r->transformer);
    kvf_sequence *b = prune(s);
    for (uint32_t i = 0; i < SEQUENCES - 2; i++)
        others[i] = model_rig_sequence(r);
    assert_int_equal(kvf_completion_step(s->completion, r->transformer, r->cache, r->stream),
                     KVF_FULL);
    assert_null(kvf_completion_of(s->completion));
    for (uint32_t i = 0; i < SEQUENCES - 2; i++)
        kvf_sequence_destroy(others[i]);
    kvf_sequence_destroy(b);
}

/* Some pieces, something else, and the answer of the sequence, or of its fork. */
static void answer_in_the_middle(const kvf_prune_config *config, what w, outcome *out)
{
    static outcome other;
    scene s;
    scene_open(&s, KVF_SELECT_HYBRID, config);
    kvf_sequence *a = prune(&s), *fork = NULL;
    for (uint32_t i = 0; w != NOTHING && i < 7; i++)
        step(&s);
    if (w == FORK || w == DESTROY_FORK)
        model_rig_must(&s.r, kvf_sequence_fork(s.r.cache, a, s.r.stream, &fork), "fork");
    if (w == NO_ROOM)
        fail_for_room(&s);
    if (w == GIVE_UP)
        kvf_completion_drop(s.completion, s.r.transformer);
    if (w == DESTROY_FORK)
        kvf_sequence_destroy(fork);
    if (w == CUT) {
        rig_decode(&s.r, a, &other);
        model_rig_must(&s.r, kvf_sequence_truncate(s.r.cache, a, PROMPT, s.r.stream), "cut");
        end(&s, 0);
        rig_decode(&s.r, a, out);
    } else {
        rig_decode(&s.r, w == FORK ? fork : a, out);
    }
    if (w == FORK)
        kvf_sequence_destroy(fork);
    kvf_completion_drop(s.completion, s.r.transformer);
    kvf_sequence_destroy(a);
    model_rig_wait(&s.r);
    for (uint32_t i = 0; i < SEQUENCES; i++) /* nothing of it is left */
        (void)model_rig_sequence(&s.r);
    scene_close(&s);
}

TEST(pieces_change_nothing_before_the_end)
{
    static outcome wanted, got;
    const kvf_prune_config config = config_of("fastkv");
    answer_in_the_middle(&config, NOTHING, &wanted);
    for (what w = STEPS_ONLY; w <= NO_ROOM; w++) {
        if (w == CUT)
            continue;
        answer_in_the_middle(&config, w, &got);
        assert_true(outcome_is_same_logits(&wanted, &got));
    }
    answer_in_the_middle(&config, CUT, &got);
    assert_false(outcome_is_same_logits(&wanted, &got)); /* it is whole */
}

/* A file that is written while the sequence becomes whole has what was pruned. */
TEST(a_save_in_the_middle_is_pruned)
{
    static outcome wanted, got;
    char path[256];
    kvf_save *save = NULL;
    kvf_sequence *restored = NULL;
    kvf_save_args args;
    kvf_restore_args from;
    kvf_error error;
    const kvf_prune_config config = config_of("fastkv");
    scene s;
    answer_in_the_middle(&config, NOTHING, &wanted);
    scene_open(&s, KVF_SELECT_HYBRID, &config);
    rig *r = &s.r;
    kvf_sequence *a = prune(&s);
    snprintf(path, sizeof path, "%s/middle.kvs", r->directory);
    kvf_save_args_init(&args);
    args.path = path;
    args.sequence = a;
    step(&s);
    const kvf_status status = kvf_sequence_save(r->cache, &args, r->stream, &save);
    if (status == KVF_UNSUPPORTED) {
        scene_close(&s);
        skip(); /* a build without xxHash */
    }
    model_rig_must(r, status, "kvf_sequence_save");
    end(&s, 0);
    model_rig_must(r, kvf_save_finish(save, &error), "kvf_save_finish");
    kvf_restore_args_init(&from);
    from.path = path;
    model_rig_must(r, kvf_sequence_restore(r->cache, &from, r->stream, &restored), "restore");
    rig_decode(r, restored, &got);
    assert_true(outcome_is_same_logits(&wanted, &got));
    remove(path);
    scene_close(&s);
}

/* A cut into the prompt: the completed sequence is cut as the sequence was. */
TEST(a_cut_prompt_can_be_whole)
{
    static outcome whole, plain;
    const uint32_t left = PROMPT - 40;
    const kvf_prune_config config = config_of("fastkv");
    scene s;
    scene_open(&s, KVF_SELECT_FULL, &config);
    rig *r = &s.r;
    kvf_sequence *a = prune(&s), *b = model_rig_sequence(&s.r), *w = NULL;
    end(&s, 0);
    model_rig_must(r, kvf_sequence_truncate(r->cache, a, left, r->stream), "truncate");
    model_rig_prefill(&s.r, b, s.ids, PROMPT);
    model_rig_must(r, kvf_sequence_truncate(r->cache, b, left, r->stream), "truncate");
    expect_same_pages(&s, a, b);
    rig_decode(r, a, &whole);
    rig_decode(r, b, &plain);
    assert_true(outcome_is_same_logits(&whole, &plain));
    assert_int_equal(kvf_complete_begin(r->cache, a, 1, left, r->stream, &w), KVF_OK);
    assert_int_equal(kvf_complete_end(r->cache, a, w, r->stream), KVF_INVALID);
    kvf_sequence_destroy(w);
    scene_close(&s);
}

/* ---- a file that fails ---- */

/* From now on no file of this process is written after so many bytes. Returns the limit so far. */
static rlim_t limit_files(rlim_t bytes)
{
    struct rlimit limit;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &limit), 0);
    const rlim_t before = limit.rlim_cur;
    limit.rlim_cur = bytes;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
    return before;
}

/* A step that meets a failure: the sequence stays pruned. */
static void expect_step_fails(scene *s, int code, const char *text)
{
    rig *r = &s->r;
    assert_int_equal(kvf_completion_step(s->completion, r->transformer, r->cache, r->stream),
                     KVF_SYSTEM);
    assert_int_equal(kvf_runtime_error(r->runtime)->foreign, code);
    if (!strstr(kvf_runtime_error(r->runtime)->text, text))
        fail_msg("%s", kvf_runtime_error(r->runtime)->text);
    assert_null(kvf_completion_of(s->completion));
}

/* Behind `before` pieces the file loses its bytes, or takes no more. */
static void fail_behind(scene *s, uint32_t before, bool writes, const outcome *wanted)
{
    static outcome got;
    kvf_sequence *a = prune(s);
    for (uint32_t i = 0; i < before; i++)
        step(s);
    const rlim_t limit = writes ? limit_files(0) : 0;
    if (!writes)
        assert_int_equal(ftruncate(s->file, 0), 0);
    expect_step_fails(s, writes ? EFBIG : EIO,
                      writes ? "disk_path: writing" : "disk_path: reading");
    if (writes)
        limit_files(limit);
    rig_decode(&s->r, a, &got);
    assert_true(outcome_is_same_logits(wanted, &got));
    kvf_sequence_destroy(a);
    model_rig_wait(&s->r);
}

/* Request n fails, for all n: the sequence answers as a pruned one, the next prompt is completed.
 */
TEST(a_file_that_fails_leaves_what_was_pruned)
{
    static outcome wanted, got;
    const kvf_prune_config config = config_of("fastkv");
    scene s;
    scene_open_as(&s, KVF_SELECT_FULL, &config, ROWS_ON_DISK);
    rig *r = &s.r;
    (void)signal(SIGXFSZ, SIG_IGN);
    kvf_sequence *a = prune(&s);
    const uint32_t pieces =
        (uint32_t)(kvf_completion_rows(s.completion) / PROMPT * ((PROMPT + CHUNK - 1) / CHUNK));
    rig_decode(r, a, &wanted);
    kvf_completion_drop(s.completion, r->transformer);
    kvf_sequence_destroy(a);
    model_rig_wait(&s.r);
    for (uint32_t n = 0; n < pieces; n += sweep_step()) {
        fail_behind(&s, n, false, &wanted);
        if (n < pieces / 2) /* what the last layer gives is not kept */
            fail_behind(&s, n, true, &wanted);
    }
    sweep_tell_step(pieces, sweep_step());
    const rlim_t limit = limit_files(0); /* the prompt itself */
    a = prune(&s);
    limit_files(limit);
    assert_null(kvf_completion_of(s.completion));
    assert_non_null(strstr(kvf_completion_lost(s.completion)->text, "disk_path: writing"));
    rig_decode(r, a, &got);
    assert_true(outcome_is_same_logits(&wanted, &got));
    kvf_sequence_destroy(a);
    model_rig_wait(&s.r);
    a = prune(&s);
    assert_null(kvf_completion_lost(s.completion));
    end(&s, 0);
    assert_int_equal(kvf_sequence_length(a, LAYERS - 1), PROMPT);
    scene_close(&s);
}

/* ---- refused ---- */

static void expect_text(const scene *s, const char *text)
{
    const char *told = kvf_runtime_error(s->r.runtime)->text;
    if (!strstr(told, text))
        fail_msg("'%s' is not in '%s'", text, told);
}

TEST(what_cannot_be_completed_is_named)
{
    const kvf_prune_config config = config_of("fastkv");
    kvf_prune_config evicts = config;
    kvf_sequence *w = NULL;
    scene s;
    scene_open(&s, KVF_SELECT_FULL, &config);
    rig *r = &s.r;
    kvf_sequence *a = prune(&s), *b;
    assert_int_equal(kvf_complete_begin(r->cache, a, 0, PROMPT, r->stream, &w), KVF_INVALID);
    expect_text(&s, "first_layer = 0, tokens = 150");
    assert_null(w);
    assert_int_equal(kvf_complete_begin(r->cache, a, LAYERS, PROMPT, r->stream, &w), KVF_INVALID);
    assert_int_equal(kvf_complete_begin(r->cache, a, 3, PROMPT, r->stream, &w), KVF_INVALID);
    expect_text(&s, "layer 2 does not hold all of them");
    assert_int_equal(kvf_complete_begin(r->cache, a, 2, PROMPT + 1, r->stream, &w), KVF_INVALID);
    assert_int_equal(kvf_complete_begin(r->cache, a, 2, PROMPT, r->stream, &w), KVF_OK);
    assert_int_equal(kvf_complete_end(r->cache, a, w, r->stream), KVF_INVALID);
    expect_text(&s, "layer 2 of the whole sequence holds 0 tokens");
    assert_int_equal(kvf_complete_end(r->cache, a, a, r->stream), KVF_INVALID);
    kvf_sequence_destroy(w);
    kvf_prune_close(s.prune);
    evicts.retention = KVF_RETENTION_EVICT;
    s.prune = rig_open_prune(r, &evicts);
    b = prune(&s);
    assert_int_equal(kvf_complete_begin(r->cache, b, 2, PROMPT, r->stream, &w), KVF_INVALID);
    expect_text(&s, "layer 0 does not hold all of them; open the pruner with retention COMPLETE");
    scene_close(&s);
}
