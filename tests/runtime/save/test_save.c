/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Saved sequences continue bit for bit: under every kind of settings, of a fork, while decoding
 * goes on, into another cache; and what cannot be restored is refused by name.
 */

#include "save_rig.h"

#include <sys/stat.h>

#include <kvferry/prune.h>

#include "attention_params.h"
#include "saved_format.h"

static void make_tokens(test_tokens *t, const kvf_cache_config *c, uint32_t count, uint64_t seed)
{
    test_tokens_make(
        t, c, &(test_tokens_spec){.count = count, .seed = seed, .sharpness = 2.0f, .topics = 6});
}

/* Which nobody else may read, either. */
static bool is_same_file(const char *a, const char *b)
{
    struct stat about;
    size_t lengths[2];
    char *bytes[2] = {save_read(a, &lengths[0]), save_read(b, &lengths[1])};
    assert_int_equal(stat(a, &about), 0);
    assert_int_equal(about.st_mode & 0777, 0600);
    const bool is_same = lengths[0] == lengths[1] && memcmp(bytes[0], bytes[1], lengths[0]) == 0;
    free(bytes[0]);
    free(bytes[1]);
    return is_same;
}

/* A prompt, some steps, a save; both the sequence and what is restored elsewhere go on. Saved again
 * it gives the same file: nothing of other sequences, or of memory, is in it. */
static void check_case(const save_case *c, uint32_t prompt, uint32_t before)
{
    const kvf_cache_config config = save_config(c);
    const char *path = save_path("case");
    test_world a, b;
    test_tokens t;
    make_tokens(&t, &config, prompt + before + SAVE_STEPS, 7);
    test_world_open(&a, NULL, &config);
    kvf_sequence *s = test_sequence(&a);
    if (prompt)
        test_fill(&a, s, &t, 0, prompt);
    free(test_steps(&a, s, &t, prompt, before));
    if (save_now(&a, s, path, NULL) != KVF_OK)
        fail_msg("%s: %s", c->name, kvf_runtime_error(a.runtime)->text);
    /* Quantized pages: a cut that takes back the block that was sealed last finds it as it was. */
    const uint32_t length = prompt + before - (config.pages == KVF_PAGES_NATIVE ? 0 : 7);
    if (length < prompt + before)
        test_ok(&a, kvf_sequence_truncate(a.cache, s, length, a.stream));
    void *wanted = test_steps(&a, s, &t, length, SAVE_STEPS);
    test_world_close(&a);

    test_world_open(&b, NULL, &config);
    kvf_sequence *other = test_sequence(&b); /* so that slots and blocks are not the same */
    test_fill(&b, other, &t, 0, prompt + before + SAVE_STEPS < 60 ? 1 : 60);
    kvf_sequence *r = save_restore(&b, path, 1);
    for (uint32_t layer = 0; layer < config.layers; layer++)
        assert_int_equal(kvf_sequence_length(r, layer), prompt + before);
    assert_int_equal(save_now(&b, r, save_path("again"), NULL), KVF_OK);
    if (!is_same_file(path, save_path("again")))
        fail_msg("%s: another file", c->name);
    if (length < prompt + before)
        test_ok(&b, kvf_sequence_truncate(b.cache, r, length, b.stream));
    void *got = test_steps(&b, r, &t, length, SAVE_STEPS);
    if (memcmp(wanted, got, test_steps_bytes(&t, SAVE_STEPS)) != 0)
        fail_msg("%s, prompt %u, %u steps: continues otherwise", c->name, prompt, before);
    kvf_sequence_destroy(r);
    free(got);
    free(wanted);
    test_close(&b, &t);
}

TEST(continues_bit_for_bit)
{
    for (const save_case *c = save_cases; c->name; c++) {
        if (!test_takes((size_t)(c - save_cases)))
            continue;
        check_case(c, SAVE_PROMPT, 11);
        check_case(c, SAVE_PROMPT, 0); /* before the first refresh */
    }
    /* Values narrower than keys, in the widths that a GPU has, too. */
    check_case(&(save_case){"narrow values", "digest=codes select=dynamic page_size=4 head_dim=192 "
                                             "value_dim=128"},
               SAVE_PROMPT, SAVE_STEPS / 2);
}

TEST(continues_from_little)
{
    static const struct {
        uint32_t settings, prompt, steps;
    } rows[] = {
        {0, 0, 0}, /* nothing was ever written */
        {0, 1, 0},     {1, 0, 5},
        {12, 3, 1},    {13, 330, 11}, /* long enough that coarse heads leave segments out */
        {14, 330, 11},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (test_takes(i))
            check_case(&save_cases[rows[i].settings], rows[i].prompt, rows[i].steps);
}

/* ---- pruned sequences ---- */

/* A sequence in memory and one restored elsewhere have the same positions, and go on alike. */
static void check_same(test_world *w, kvf_sequence *s, const test_tokens *t, uint32_t first)
{
    test_world other;
    const uint32_t layers = kvf_cache_settings(w->cache)->layers;
    assert_int_equal(save_now(w, s, save_path("pruned"), NULL), KVF_OK);
    test_world_open(&other, NULL, &w->config);
    kvf_sequence *r = save_restore(&other, save_path("pruned"), 1);
    for (uint32_t layer = 0; layer < layers; layer++) {
        const uint32_t length = kvf_sequence_length(s, layer);
        assert_int_equal(kvf_sequence_length(r, layer), length);
        for (uint32_t i = 0; i < length; i++)
            assert_int_equal(kvf_sequence_position(r, layer, i),
                             kvf_sequence_position(s, layer, i));
    }
    void *wanted = test_steps(w, s, t, first, SAVE_STEPS);
    test_steps_again(wanted, &other, r, t, first, SAVE_STEPS);
    test_world_close(&other);
}

static void check_pruned(kvf_retention retention, uint32_t steps)
{
    kvf_cache_config config = save_config(&save_cases[0]);
    kvf_prune_config pc;
    kvf_prune *prune = NULL;
    test_world w;
    test_tokens t;
    kvf_prune_config_init(&pc, kvf_prune_policy_find("snapkv"));
    pc.retention = retention;
    pc.settings.keep = 0.5f;
    pc.settings.window = 8;
    config.observe_window = 8;
    make_tokens(&t, &config, SAVE_PROMPT + steps + SAVE_STEPS, 21);
    test_world_open(&w, NULL, &config);
    kvf_sequence *s = test_sequence(&w);
    test_ok(&w, kvf_prune_open(w.cache, &pc, &prune, NULL));
    test_ok(&w, kvf_prune_begin(prune, s, SAVE_PROMPT));
    for (uint32_t layer = 0; layer < config.layers; layer++) {
        kvf_prune_result result;
        char *out = test_alloc(SAVE_PROMPT * 4096);
        test_prefill(&w, s, &t, &(test_range){.layer = layer, .count = SAVE_PROMPT, .chunk = 40},
                     out);
        test_ok(&w, kvf_prune_layer(prune, s, layer, w.stream, &result));
        assert_true(result.keep_count < SAVE_PROMPT);
        test_wait(&w);
        test_release(out);
    }
    kvf_prune_close(prune);
    free(test_steps(&w, s, &t, SAVE_PROMPT, steps));
    check_same(&w, s, &t, SAVE_PROMPT + steps);
    test_close(&w, &t);
}

TEST(of_pruned_prompts)
{
    for (uint32_t i = 0; i < 4; i++)
        if (test_takes(i))
            check_pruned(i % 2 ? KVF_RETENTION_OFFLOAD : KVF_RETENTION_EVICT, i / 2 * 5);
}

/* Layers of their own lengths, and positions with gaps. */
TEST(of_unequal_layers)
{
    const kvf_cache_config config = save_config(&save_cases[1]);
    uint32_t positions[100];
    test_world w;
    test_tokens t;
    make_tokens(&t, &config, SAVE_PROMPT + SAVE_STEPS, 25);
    test_world_open(&w, NULL, &config);
    kvf_sequence *s = test_sequence(&w);
    test_prefill(&w, s, &t, &(test_range){.count = SAVE_PROMPT, .chunk = 64, .append_only = 1},
                 NULL);
    for (uint32_t i = 0; i < 100; i++)
        positions[i] = 3 * i + i / 7;
    test_ok(&w, kvf_prefill(w.cache,
                            &(kvf_prefill_args){.sequence = s,
                                                .layer = 1,
                                                .tokens = 100,
                                                .k = test_k(&t, 1, 0),
                                                .v = test_v(&t, 1, 0),
                                                .positions = positions},
                            w.stream));
    check_same(&w, s, &t, SAVE_PROMPT);
    test_close(&w, &t);
}

/* ---- whatever the order of work ---- */

/* Streams that pause at random, and an arena whose blocks are on their way to the pool. */
TEST(whatever_the_order)
{
    for (uint32_t round = 0; round < test_afford(6); round++) {
        const kvf_cache_config config = save_config(&save_cases[round % 2 ? 8 : 12]);
        const kvf_runtime_config rc = test_runtime_config();
        test_world w;
        test_tokens t;
        make_tokens(&t, &config, SAVE_PROMPT + SAVE_STEPS, 27);
        test_hooks.delay_seed = test_on_cuda() ? 0 : round + 1;
        test_hooks.prefill_arena = 1 + round / 2 % 2;
        test_world_open(&w, &rc, &config);
        kvf_sequence *s = test_sequence(&w), *child = NULL;
        test_fill(&w, s, &t, 0, SAVE_PROMPT);
        kvf_save *save = save_begin(&w, s, save_path("order"), "test");
        test_ok(&w, kvf_sequence_fork(w.cache, s, w.stream, &child));
        kvf_sequence_destroy(s);
        void *wanted = test_steps(&w, child, &t, SAVE_PROMPT, SAVE_STEPS);
        test_ok(&w, kvf_save_finish(save, NULL));
        kvf_sequence_destroy(child);
        kvf_sequence *r = save_restore(&w, save_path("order"), 1);
        test_steps_again(wanted, &w, r, &t, SAVE_PROMPT, SAVE_STEPS);
        test_close(&w, &t);
    }
}

/* ---- other settings ---- */

/* Blocks of 32 tokens, as they are outside of tests: boxes and codes have the same. */
static void open_usual(test_world *w, const kvf_cache_config *config)
{
    const kvf_runtime_config rc = test_runtime_config();
    test_hooks.block_size = 0;
    test_world_open(w, &rc, config);
}

static kvf_status restore_with(const kvf_cache_config *config, uint32_t exact, const char *model,
                               kvf_error *error)
{
    test_world w;
    kvf_restore_args args;
    kvf_sequence *s = NULL;
    open_usual(&w, config);
    kvf_restore_args_init(&args);
    args.path = save_path("settings");
    args.model = model;
    args.exact = exact;
    const kvf_status status = kvf_sequence_restore(w.cache, &args, w.stream, &s);
    *error = *kvf_runtime_error(w.runtime);
    assert_true((status == KVF_OK) == (s != NULL));
    for (uint32_t i = 0; status != KVF_OK && i < config->sequences_max; i++)
        (void)test_sequence(&w); /* none was taken */
    test_world_close(&w);
    return status;
}

static void save_with(const kvf_cache_config *config)
{
    test_world w;
    test_tokens t;
    make_tokens(&t, config, SAVE_PROMPT, 17);
    open_usual(&w, config);
    kvf_sequence *s = test_sequence(&w);
    test_fill(&w, s, &t, 0, SAVE_PROMPT);
    assert_int_equal(save_now(&w, s, save_path("settings"), NULL), KVF_OK);
    test_close(&w, &t);
}

/* A file of some settings, and a cache of others. A refusal names the layer whose window is
 * another; windows that are all equal are one setting. */
static const struct {
    const char *saved, *mine;
    kvf_status exact, other; /* of a restore that must be exact, and of one that need not */
    const char *word;
} differing[] = {
    {"", "", KVF_OK, KVF_OK, NULL},
    {"", "layers=3", KVF_INVALID, KVF_INVALID, "layers"},
    {"", "query_heads=8", KVF_INVALID, KVF_INVALID, "query_heads"},
    {"", "head_dim=32", KVF_INVALID, KVF_INVALID, "head_dim"},
    {"", "value_dim=32", KVF_INVALID, KVF_INVALID, "was saved with value_dim = "},
    {"", "dtype=bf16", KVF_INVALID, KVF_INVALID, "dtype"},
    {"dtype=bf16", "dtype=bf16 pages=k8v8", KVF_INVALID, KVF_INVALID,
     "was saved with pages = bf16, this cache has k8v8; open a cache with that"},
    {"dtype=bf16 pages=k8v4", "dtype=bf16", KVF_INVALID, KVF_INVALID,
     "was saved with pages = k8v4, this cache has bf16; open a cache with that"},
    {"dtype=bf16 pages=k8v4 budget_tokens=200",
     "dtype=bf16 pages=k8v4 local_tokens=60 budget_tokens=200", KVF_INVALID, KVF_INVALID,
     "local_tokens = "},
    {"", "head_mask=1011", KVF_INVALID, KVF_INVALID, "head_mask"},
    {"", "tokens_max=128", KVF_FULL, KVF_FULL, "tokens_max"},
    {"", "host_tokens_max=64", KVF_FULL, KVF_FULL, "host_tokens_max"},
    {"", "budget_tokens=128", KVF_INVALID, KVF_OK, "budget_tokens"},
    {"", "digest=codes", KVF_INVALID, KVF_OK, "digest"},
    {"", "local_tokens=24", KVF_INVALID, KVF_OK, "local_tokens"},
    {"", "sink_tokens=2", KVF_INVALID, KVF_OK, "sink_tokens"},
    {"budget_tokens=224 local_tokens=8", "page_size=64 budget_tokens=224 local_tokens=8",
     KVF_INVALID, KVF_INVALID, "page_size"},
    {"", "device_bytes=0", KVF_OK, KVF_OK, NULL},
    {"", "sequences_max=7", KVF_OK, KVF_OK, NULL},
    {"", "transfer=gather", KVF_OK, KVF_OK, NULL},
    {"", "prefill_chunk_max=77", KVF_OK, KVF_OK, NULL},
#define WINDOWS(saved, mine, status, words)                                                        \
    {                                                                                              \
        "head_mask=0001 " saved, "head_mask=0001 " mine, status, status, words                     \
    }
    WINDOWS("layer_windows=9,21", "layer_windows=9,21", KVF_OK, NULL),
    WINDOWS("layer_windows=9,21", "layer_windows=8,21", KVF_INVALID,
            "layer_windows[0] = 9, this cache has 8"),
    WINDOWS("layer_windows=9,21", "layer_windows=9,22", KVF_INVALID,
            "layer_windows[1] = 21, this cache has 22"),
    WINDOWS("layer_windows=9,21", "streaming_recent=21", KVF_INVALID,
            "layer_windows[0] = 9, this cache has 21"),
    WINDOWS("streaming_recent=21", "layer_windows=9,21", KVF_INVALID,
            "layer_windows[0] = 21, this cache has 9"),
    WINDOWS("streaming_recent=21", "layer_windows=21,21", KVF_OK, NULL),
    WINDOWS("layer_windows=21,21", "streaming_recent=21", KVF_OK, NULL),
    WINDOWS("layer_windows=9,9", "streaming_recent=10", KVF_INVALID,
            "streaming_recent = 9, this cache has 10"),
#undef WINDOWS
};

/* Where windows are the same, so are the files. */
TEST(names_what_differs)
{
    for (size_t i = 0; i < sizeof differing / sizeof *differing; i++) {
        kvf_cache_config saved = save_config(&save_cases[0]), mine = saved;
        kvf_error why;
        if (test_on_cuda() && strstr(differing[i].mine, "value_dim"))
            continue; /* which has no such width */
        test_set(&saved, differing[i].saved);
        test_set(&mine, differing[i].mine);
        save_with(&saved);
        for (uint32_t exact = 0; exact < 2; exact++) {
            const kvf_status want = exact ? differing[i].exact : differing[i].other;
            const kvf_status status = restore_with(&mine, exact, "test", &why);
            if (status != want || (want != KVF_OK && !strstr(why.text, differing[i].word)))
                fail_msg("\"%s\" into \"%s\", exact %u: %s \"%s\"", differing[i].saved,
                         differing[i].mine, exact, kvf_status_name(status), why.text);
        }
        if (differing[i].exact == KVF_OK && saved.head_mask) {
            assert_int_equal(rename(save_path("settings"), save_path("theirs")), 0);
            save_with(&mine);
            assert_true(is_same_file(save_path("settings"), save_path("theirs")));
        }
    }
}

/* A restore may ask for the model that a file was saved with. */
TEST(names_the_model)
{
    const kvf_cache_config config = save_config(&save_cases[0]);
    kvf_error error;
    save_with(&config);
    assert_int_equal(restore_with(&config, 1, "another", &error), KVF_INVALID);
    assert_non_null(strstr(error.text, "another"));
    assert_int_equal(restore_with(&config, 1, NULL, &error), KVF_OK);
}

/* A sound header of one layer beside settings of two, of a sequence without tokens, so that nothing
 * follows it: it has a mask of one layer, and the cache's has more. */
TEST(names_a_forged_header)
{
    enum { BYTES = KVF_SAVED_HEAD_ALIGN };
    kvf_cache_config config = save_config(&save_cases[0]);
    test_world w;
    kvf_error why;
    kvf_saved_header is, forged;
    size_t bytes;
    test_set(&config, "head_mask=1011");
    open_usual(&w, &config);
    const char *path = save_path("settings");
    assert_int_equal(save_now(&w, test_sequence(&w), path, NULL), KVF_OK);
    char *data = save_read(path, &bytes), *mine = calloc(1, BYTES);
    assert_non_null(mine);
    assert_int_equal(bytes, BYTES);
    test_ok(&w, kvf_saved_parse(w.runtime->context, path, data, bytes, bytes, &is));
    test_world_close(&w);

    is.head->layers = 1;
    kvf_saved_carve_header(is.head, 0, mine, &forged);
    *forged.head = *is.head;
    forged.layers[0] = is.layers[0];
    memcpy(forged.mask, is.mask, config.kv_heads);
    memcpy(forged.attention, is.attention, (2 + config.query_heads) * sizeof *is.attention);
    memcpy(forged.settings, is.settings, is.head->settings_bytes);
    kvf_saved_seal_header(&forged);
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(mine, 1, BYTES, file), BYTES);
    fclose(file);
    assert_int_equal(restore_with(&config, 1, NULL, &why), KVF_CORRUPT);
    assert_non_null(strstr(why.text, "its header contradicts its settings"));
    free(data);
    free(mine);
}

/* With other settings a sequence goes on like one that was given the same tokens without queries.
 */
TEST(other_settings_take_tokens)
{
    for (const save_case *c = save_cases; c->name; c++) {
        const kvf_cache_config config = save_config(&save_cases[0]);
        kvf_cache_config other = save_config(c);
        if (other.head_mask || other.page_size > 8 || other.dtype != config.dtype)
            continue;
        other.local_tokens = 40;
        other.page_size = 4;
        other.budget_tokens = 160;
        test_world w;
        test_tokens t;
        save_with(&config);
        make_tokens(&t, &config, SAVE_PROMPT, 17);
        open_usual(&w, &other);
        kvf_sequence *r = save_restore(&w, save_path("settings"), 0), *s = test_sequence(&w);
        for (uint32_t layer = 0; layer < t.layers; layer++)
            test_prefill(
                &w, s, &t,
                &(test_range){.layer = layer, .count = SAVE_PROMPT, .chunk = 64, .append_only = 1},
                NULL);
        test_tokens next;
        make_tokens(&next, &config, SAVE_STEPS, 18);
        void *wanted = test_steps(&w, s, &next, 0, SAVE_STEPS);
        void *got = test_steps(&w, r, &next, 0, SAVE_STEPS);
        if (memcmp(wanted, got, test_steps_bytes(&next, SAVE_STEPS)) != 0)
            fail_msg("%s: not as if appended", c->name);
        free(wanted);
        free(got);
        test_close(&w, &next);
        test_tokens_free(&t);
    }
}

/* ---- attention parameters of layers ---- */

/* Attention parameters of layer 1, where only query head 1 has a sink. */
typedef struct params_case {
    float scale, cap, sink;
    const char *refusal; /* NULL = it comes back */
} params_case;

static kvf_status give_params(const test_world *w, const params_case *f)
{
    enum { HEADS = 16 };
    float sinks[HEADS];
    kvf_attention_params params;
    kvf_attention_params_init(&params);
    for (uint32_t h = 0; h < HEADS; h++)
        sinks[h] = h == 1 ? f->sink : -INFINITY;
    params.scale = f->scale;
    params.soft_cap = f->cap;
    params.sinks = f->sink > -INFINITY ? sinks : NULL;
    return kvf_cache_attention_params(w->cache, 1, &params);
}

/* Into a cache whose layer 1 has these parameters; what comes back goes on as `wanted` says. */
static void restore_under(const kvf_cache_config *config, const params_case *f, uint32_t exact,
                          const test_tokens *t, const void *wanted)
{
    test_world w;
    kvf_restore_args args;
    kvf_sequence *s = NULL;
    open_usual(&w, config);
    test_ok(&w, give_params(&w, f));
    kvf_restore_args_init(&args);
    args.path = save_path("formed");
    args.exact = exact;
    test_expect(w.runtime, kvf_sequence_restore(w.cache, &args, w.stream, &s),
                f->refusal ? KVF_INVALID : KVF_OK);
    if (f->refusal) {
        const char *text = kvf_runtime_error(w.runtime)->text;
        assert_memory_equal(text, args.path, strlen(args.path));
        assert_string_equal(text + strlen(args.path), f->refusal);
        assert_null(s);
    } else { /* all settings are the same, so it goes on either way */
        void *got = test_steps(&w, s, t, SAVE_PROMPT, SAVE_STEPS);
        assert_memory_equal(got, wanted, test_steps_bytes(t, SAVE_STEPS));
        free(got);
    }
    test_world_close(&w);
}

/* Whatever `exact` says: keys of deeper layers follow from what a layer attended to. */
TEST(comes_back_to_its_attention_params_alone)
{
#define DIFFERENT(what, theirs, mine)                                                              \
    " was saved with " what " = " theirs " in layer 1, this cache has " mine                       \
    "; set it for the layer before, or prefill again"
    static const params_case rows[][5] = {
        {{0.25f, 20.0f, 1.5f, NULL},
         {0.5f, 20.0f, 1.5f, DIFFERENT("scale", "0.25", "0.5")},
         {0.25f, 0.0f, 1.5f, DIFFERENT("soft_cap", "20", "0")},
         {0.25f, 20.0f, 2.0f, DIFFERENT("sinks[1]", "1.5", "2")},
         {0.25f, 20.0f, -INFINITY, DIFFERENT("sinks[1]", "1.5", "-inf")}},
        {{0.0f, 0.0f, -INFINITY, NULL},
         {0.5f, 0.0f, -INFINITY, DIFFERENT("scale", "0.125", "0.5")},
         {0.0f, 20.0f, -INFINITY, DIFFERENT("soft_cap", "0", "20")},
         {0.0f, 0.0f, 1.5f, DIFFERENT("sinks[1]", "-inf", "1.5")},
         {0.125f, 0.0f, -INFINITY, NULL}},
    };
#undef DIFFERENT
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const kvf_cache_config config = save_config(&save_cases[0]);
        test_world w;
        test_tokens t;
        make_tokens(&t, &config, SAVE_PROMPT + SAVE_STEPS, 23);
        open_usual(&w, &config);
        test_ok(&w, give_params(&w, &rows[i][0]));
        kvf_sequence *s = test_sequence(&w);
        test_fill(&w, s, &t, 0, SAVE_PROMPT);
        assert_int_equal(save_now(&w, s, save_path("formed"), NULL), KVF_OK);
        void *wanted = test_steps(&w, s, &t, SAVE_PROMPT, SAVE_STEPS);
        test_world_close(&w);
        for (size_t n = 0; n < sizeof rows[i] / sizeof *rows[i]; n++)
            for (uint32_t exact = 0; exact < 2; exact++)
                restore_under(&config, &rows[i][n], exact, &t, wanted);
        free(wanted);
        test_tokens_free(&t);
    }
}

TEST(attention_params_come_before_tokens)
{
    const kvf_cache_config config = save_config(&save_cases[0]);
    const params_case first = {0.25f, 20.0f, 1.5f, NULL}, other = {0.25f, 20.0f, 2.0f, NULL};
    test_world w;
    test_tokens t;
    make_tokens(&t, &config, 40, 29);
    open_usual(&w, &config);
    test_ok(&w, give_params(&w, &other));
    test_ok(&w, give_params(&w, &first));
    kvf_sequence *s = test_sequence(&w);
    test_fill(&w, s, &t, 0, 40);
    test_ok(&w, give_params(&w, &first));
    test_expect(w.runtime, give_params(&w, &other), KVF_INVALID);
    assert_string_equal(
        kvf_runtime_error(w.runtime)->text,
        "layer = 1: a sequence has 40 tokens in it under other attention "
        "parameters; set them before the first token, or truncate the sequence to 0");
    test_ok(&w, kvf_sequence_truncate(w.cache, s, 0, w.stream));
    test_ok(&w, give_params(&w, &other));
    test_close(&w, &t);
}

/* As restores have it: sinks that no head has are none, so the parameters are the same. */
TEST(sinks_of_no_head_are_none)
{
    const kvf_cache_config config = save_config(&save_cases[0]);
    const params_case none = {0.25f, 20.0f, -INFINITY, NULL};
    float sinks[16];
    kvf_attention_params params;
    test_world w;
    test_tokens t;
    kvf_attention_params_init(&params);
    params.scale = none.scale;
    params.soft_cap = none.cap;
    params.sinks = sinks;
    for (size_t h = 0; h < 16; h++)
        sinks[h] = -INFINITY;
    make_tokens(&t, &config, 40, 31);
    open_usual(&w, &config);
    test_ok(&w, give_params(&w, &none));
    test_fill(&w, test_sequence(&w), &t, 0, 40);
    test_ok(&w, kvf_cache_attention_params(w.cache, 1, &params));
    test_close(&w, &t);
}

/* ---- what a file says ---- */

TEST(tells_what_it_holds)
{
    const kvf_cache_config config = save_config(&(save_case){"told", "head_dim=192 value_dim=128"});
    const char note[] = "ids of tokens";
    char read[64] = "";
    test_world w;
    test_tokens t;
    kvf_save_args args;
    kvf_save *save = NULL;
    kvf_saved saved;
    kvf_error error;
    make_tokens(&t, &config, SAVE_PROMPT, 19);
    test_world_open(&w, NULL, &config);
    kvf_save_args_init(&args);
    args.sequence = test_sequence(&w);
    args.path = save_path("told");
    args.model = "a model";
    args.note = note;
    args.note_bytes = sizeof note;
    test_fill(&w, args.sequence, &t, 0, SAVE_PROMPT);
    test_ok(&w, kvf_sequence_save(w.cache, &args, w.stream, &save));
    test_ok(&w, kvf_save_finish(save, &error));
    assert_int_equal(error.status, KVF_OK);
    test_ok(&w, kvf_saved_read(w.runtime, args.path, 1, &saved, read, sizeof read, &error));
    assert_int_equal(saved.tokens, SAVE_PROMPT);
    assert_int_equal(saved.layers, config.layers);
    assert_int_equal(saved.kv_heads, config.kv_heads);
    assert_int_equal(saved.head_dim, config.head_dim);
    assert_int_equal(saved.value_dim, config.value_dim);
    assert_int_equal(saved.note_bytes, sizeof note);
    assert_string_equal(saved.model, "a model");
    assert_string_equal(saved.library, kvf_version());
    assert_string_equal(read, note);
    test_close(&w, &t);
}

TEST(bad_arguments_are_named)
{
    const kvf_cache_config config = save_config(&save_cases[0]);
    test_world w;
    kvf_save *save = NULL;
    kvf_sequence *s = NULL;
    char model[80] = "";
    test_world_open(&w, NULL, &config);
    const kvf_save_args good = save_args(test_sequence(&w), save_path("bad"), NULL);
    kvf_save_args args[6];
    for (uint32_t i = 0; i < 6; i++)
        args[i] = good;
    args[0].path = NULL;
    args[1].path = save_folder();
    args[2].size = 1;
    args[3].model = memset(model, 'm', sizeof model - 1);
    args[4].note_bytes = 4;
    args[5].sequence = NULL;
    for (uint32_t i = 0; i < 6; i++)
        test_expect(w.runtime, kvf_sequence_save(w.cache, &args[i], w.stream, &save), KVF_INVALID);
    assert_null(save);
    const char *const paths[] = {save_path("none"), save_folder(), ""};
    for (uint32_t i = 0; i < 3; i++) {
        kvf_restore_args from;
        kvf_restore_args_init(&from);
        from.path = paths[i];
        test_expect(w.runtime, kvf_sequence_restore(w.cache, &from, w.stream, &s),
                    i ? KVF_INVALID : KVF_SYSTEM);
    }
    assert_null(s);
    test_world_close(&w);
}

TESTS_RUN_BETWEEN(NULL, save_remove_folder)
