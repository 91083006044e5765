/* SPDX-License-Identifier: Apache-2.0 */

/*
 * KV caches off llama.cpp's card: which buffers are taken, what is left alone by name, and that
 * nothing is read before llama.cpp's work on the card is done. Without an emulated device, that the
 * card is left alone.
 */

#include "llama_rig.h"
#include "sanitizers.h"

#define ROUNDING 0.01

static int use_the_card(void **state)
{
    (void)state;
    return standin_has_device() ? setenv("KVF_TEST_CARD", "1", 1) : 0;
}
TESTS_RUN_BETWEEN(use_the_card, NULL)

/* Load with the cards that standin_card describes. @return what is said */
static const char *said_at_load(const char *setting)
{
    rig_listen();
    assert_non_null(rig_load(setting));
    return rig_said();
}

TEST(without_a_card_nothing_is_said)
{
    standin_cards_reset();
    assert_null(strstr(said_at_load("budget=full"), "KV caches"));
    assert_null(kvl_the_plugin()->card.type);
    rig_unload();
}

TEST(a_card_that_cannot_serve_is_left)
{
    const struct {
        standin_cards cards;
        const char *why;
    } cases[] = {
        {{.count = 2}, "there are several"},
        {{.count = 1, .is_other = 1}, "it is not one of CUDA"},
        {{.count = 1, .is_misread = 1}, "struct ggml_backend_buffer_type has another layout"},
        {{.count = 1}, ""} /* without a device of the library's */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases - (size_t)standin_has_device(); i++) {
        standin_cards_reset();
        standin_card = cases[i].cards;
        standin_card.functions = 6;
        const char *text = said_at_load("budget=full");
        assert_non_null(strstr(text, "KV caches on CUDA0 are left to llama.cpp: "));
        if (standin_has_device() || i < 2)
            assert_non_null(strstr(text, cases[i].why));
        assert_null(kvl_the_plugin()->card.type);
        rig_unload();
    }
}

/* ---- with a device ---- */

typedef struct tensors {
    gg_context *context;
    gg_tensor *all[8];
    int count;
} tensors;

static void add(tensors *t, const char *name, int type, int64_t width, int64_t cells)
{
    gg_tensor *made = ggml_new_tensor_4d(t->context, type, width, cells, 1, 1);
    t->all[t->count++] = ggml_set_name(made, name);
}

/* Whether a buffer of these is the host's. It goes at once. */
static int is_taken(const tensors *t, size_t more)
{
    gg_buffer_type *type = standin_card_type();
    const uint64_t before = standin_card.allocated;
    gg_buffer *b;
    if (more) { /* another size than theirs */
        size_t bytes = more;
        for (int i = 0; i < t->count; i++)
            bytes += ggml_backend_buft_get_alloc_size(type, t->all[i]);
        b = ggml_backend_buft_alloc_buffer(type, bytes);
    } else {
        b = standin_allocate(type, t->all, t->count);
    }
    const int taken = ggml_backend_buft_is_host(b->buft);
    assert_int_equal(standin_card.allocated - before, !taken);
    ggml_backend_buffer_free(b);
    return taken;
}

TEST_IF(standin_has_device(), caches_of_many_cells_are_taken)
{
    enum { BUDGET = 512 };
    for (uint32_t functions = 6; functions <= 8; functions++) {
        standin_card.functions = functions;
        standin_cards_reset();
        standin_card.count = 1;
        const char *text = said_at_load("budget=512");
        assert_non_null(strstr(text, "more cells than the budget go from CUDA0 to host memory"));
        const struct {
            const char *names[3];
            int type;
            int64_t cells;
            size_t more;
            int taken;
        } cases[] = {
            {{"cache_k_l0", "cache_v_l0"}, GG_F16, 1024, 0, 1},
            {{"cache_k_l0", "cache_v_l0"}, GG_Q8_0, 1024, 0, 1},
            {{"cache_k_l0", "cache_v_l0"}, GG_F16, 1024, 128, 0},
            {{"cache_k_l0", "cache_v_l0"}, GG_F16, BUDGET, 0, 0}, /* attended whole */
            {{"cache_k_l0"}, GG_F16, 1024, 0, 0},                 /* latent keys */
            {{"cache_r_l0", "cache_s_l0"}, GG_F16, 1024, 0, 0},   /* recurrent states */
            {{"cache_k_l0", "cache_v_l0"}, GG_F32, 1024, 0, 0},
            {{"cache_k_l0", "cache_v_l0", "other"}, GG_F16, 1024, 0, 0},
            {{"other", "cache_k_l0", "cache_v_l0"}, GG_F16, 1024, 0, 0},
        };
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
            tensors t = {.context = ggml_init((gg_init_params){0})};
            for (int n = 0; n < 3 && cases[i].names[n]; n++)
                add(&t, cases[i].names[n], cases[i].type, 64, cases[i].cells);
            for (int turn = 0; turn < 2; turn++) { /* the second one is known anew */
                ggml_backend_buft_get_alloc_size(standin_card_type(), t.all[0]); /* asked alone */
                assert_int_equal(is_taken(&t, cases[i].more), cases[i].taken);
            }
            ggml_free(t.context);
        }
        assert_null(kvl_the_plugin()->buffers);
        rig_unload();
    }
    standin_card.functions = 6;
    standin_cards_reset();
}

/* A cache that was taken is served on the card; one in the host's memory beside it on the host. */
TEST_IF(standin_has_device(), caches_are_served_where_they_are)
{
    for (int on_card = 0; on_card < 2; on_card++) {
        rig *r = rig_open(&(rig_options){.setting = "budget=full rows=4"});
        rig_set sets[6] = {{0}};
        if (!on_card) { /* as with -nkvo: tensors of the pass are on the card, the cache is not */
            ggml_backend_buffer_free(r->buffer);
            r->has_card = 0;
            rig_make_cache(r);
            r->has_card = 1;
        }
        for (int64_t cell = 0; cell < 80; cell++) {
            assert_int_equal(rig_begin(r, cell, cell + 1, sets[0]), GG_SUCCESS);
            assert_true(r->by_kvferry);
        }
        for (int row = 5; row >= 0; row--) { /* a prompt of 6 rows, which is a chunk */
            if (row)
                memcpy(sets[row], sets[0], sizeof sets[0]);
            for (uint32_t cell = 80; cell > 75 + (uint32_t)row; cell--)
                rig_take(sets[row], cell - 1);
        }
        r->attentions = 1; /* with queries as llama.cpp has them */
        assert_int_equal(rig_attend(r, 0, 6, 0, 1, sets), GG_SUCCESS);
        assert_true(r->by_kvferry == on_card);
        assert_true(r->worst < ROUNDING);
        assert_true(!strstr(rig_end(r), "serving 2 layers on the card") == !on_card);
    }
}

/* Steps of one token, the first 40. */
static void begin(rig *r, rig_set set, uint64_t copies, uint64_t waits)
{
    for (int64_t cell = 0; cell < 40; cell++) {
        assert_int_equal(rig_begin(r, cell, cell + 1, set), GG_SUCCESS);
        assert_true(!cell || (r->copies <= copies && r->waits <= waits)); /* after the first */
    }
}

/* A step and a prompt of a layer: of rows, queries and outputs nothing is copied, but the
 * bits of tokens that are not finite; llama.cpp's part and ours are waited for. */
TEST_IF(standin_has_device(), rows_stay_on_the_card)
{
    enum { COPIES = 1, WAITS = 2, PROMPT = 6 };
    rig_set other[1] = {{0}}, sets[PROMPT] = {{0}};
    rig *r = rig_open(&(rig_options){.type = GG_BF16});
    begin(r, other[0], 2, 4); /* llama.cpp's kernels write such rows */
    assert_true(kvl_the_plugin()->card.copied >= 2 * 40 * RIG_LAYERS);
    rig_end(r);
    r = rig_open(&(rig_options){.setting = "budget=full rows=4"});
    begin(r, sets[0], COPIES, WAITS);
    assert_true(kvl_the_plugin()->card.copied <
                40); /* of the first step, and queries of every 4th */
    int64_t cells[PROMPT];
    for (int i = 0; i < PROMPT; i++) {
        if (i)
            memcpy(sets[i], sets[i - 1], sizeof sets[i]);
        cells[i] = 40 + i;
        rig_add(sets[i], 40 + (uint32_t)i);
    }
    r->attentions = 1; /* with queries as llama.cpp has them */
    for (int layer = 0; layer < RIG_LAYERS; layer++) {
        rig_write_with_next(r, layer, cells, PROMPT);
        assert_int_equal(rig_attend(r, layer, PROMPT, 0, 1, sets), GG_SUCCESS);
        assert_true(r->by_kvferry && r->copies <= COPIES && r->waits <= WAITS);
    }
    assert_true(r->worst < ROUNDING);
    kvl_summary(kvl_the_plugin());
    assert_non_null(strstr(rig_end(r), " copied="));
}

/* Rows that no attention of the graph puts are written by llama.cpp's kernels. */
TEST_IF(standin_has_device(), rows_that_nobody_sees_are_written)
{
    rig *r = rig_open(&(rig_options){0});
    rig_set set[1] = {{0}};
    begin(r, set[0], 1, 2);
    const int64_t unseen[] = {40, 90};
    rig_add(set[0], 40);
    for (int layer = 0; layer < RIG_LAYERS; layer++) {
        rig_write_with_next(r, layer, unseen, 2);
        assert_int_equal(rig_attend(r, layer, 1, 0, 1, set), GG_SUCCESS);
        assert_true(r->by_kvferry);
    }
    /* In another layer than the attention of the graph. */
    rig_write_with_next(r, 0, unseen + 1, 1);
    assert_int_equal(rig_attend(r, 1, 1, 0, 1, set), GG_SUCCESS);
    assert_int_equal(rig_write(r, 1, unseen + 1, 1), GG_SUCCESS);
    rig_add(set[0], 90);
    const char zeros[RIG_KV * RIG_DIM * 2] = {0};
    for (int layer = 0; layer < RIG_LAYERS; layer++) {
        const size_t at = 90 * r->k[layer]->nb[1];
        assert_memory_not_equal((const char *)r->k[layer]->data + at, zeros, sizeof zeros);
        assert_memory_not_equal((const char *)r->v[layer]->data + at, zeros, sizeof zeros);
        assert_int_equal(rig_attend(r, layer, 1, 0, 1, set), GG_SUCCESS);
        assert_true(r->by_kvferry);
    }
    assert_true(r->worst < ROUNDING);
    rig_end(r);
}

/* ggml hands addresses of cells to CUDA, as its scheduler does for kernels of the card: what is
 * away comes before, and cells that are written are known. */
TEST_IF(standin_has_device(), cuda_gets_pages_that_are_there)
{
    for (int is_watched = 1; is_watched >= 0; is_watched--) {
        rig *r = rig_open(&(rig_options){.away_at = 1});
        tensors t = {.context = r->context};
        rig_set set[1] = {{0}};
        r->attentions = 1; /* nobody looks at the outputs */
        assert_int_equal(rig_begin(r, 0, 200, set[0]), GG_SUCCESS);
        assert_true(rig_away() > 10);
        add(&t, "copy", GG_F16, RIG_KV * RIG_DIM, RIG_CELLS);
        standin_allocate(standin_card_type(), t.all, 1);
        if (!is_watched)
            t.all[0]->buffer->iface.set_tensor = kvl_the_plugin()->card.set_tensor;
        const size_t bytes = ggml_nbytes(t.all[0]);
        char *copy = malloc(bytes);
        ggml_backend_tensor_set(t.all[0], r->k[0]->data, 0, bytes);
        assert_int_equal(standin_card.refused, !is_watched);
        if (is_watched) {
            ggml_backend_tensor_get(t.all[0], copy, 0, bytes);
            assert_memory_equal(copy, r->k[0]->data, bytes);
            ggml_backend_tensor_get(t.all[0], r->v[0]->data, 0, bytes); /* values are keys now */
            r->o.away_at = 0;
            assert_int_equal(rig_attend(r, 0, 1, 0, 1, set), GG_SUCCESS);
            assert_true(r->by_kvferry && r->worst < ROUNDING);
        }
        free(copy);
        ggml_backend_buffer_free(t.all[0]->buffer);
        rig_end(r);
    }
}

static int does_not_wait(void)
{
    return 0;
}

/* The largest error of steps whose queries and rows come late. */
static double late_steps(int waits)
{
    rig *r = rig_open(&(rig_options){0});
    rig_set set[1] = {{0}};
    standin_card.delay = 2000000;
    if (!waits)
        kvl_the_plugin()->card.wait = does_not_wait;
    for (int64_t cell = 0; cell < 12; cell++)
        assert_int_equal(rig_begin(r, cell, cell + 1, set[0]), GG_SUCCESS);
    const double worst = r->worst;
    rig_end(r);
    return worst;
}

TEST_IF(standin_has_device(), work_on_the_card_is_waited_for)
{
    assert_true(late_steps(1) < ROUNDING);
    if (!KVF_TSAN) /* which ends the process at the race that there is without the wait */
        assert_false(late_steps(0) < ROUNDING);
}
