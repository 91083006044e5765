/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_RUNTIME_CUDA_SCENES_H
#define KVF_TESTS_RUNTIME_CUDA_SCENES_H

/*
 * Scenes on the emulated device, for tests in which CUDA calls fail. A scene is a whole use of the
 * library on one runtime; it ends with the first status that is not KVF_OK, and gives everything
 * back. A play that hangs ends the program with the number of the call.
 *
 * Knows nothing of what the calls are.
 */

#include "harness.h"
#include "heap.h"

#include <driver_types.h>

#include "emu_control.h"

#define LAYERS     2u
#define PROMPT     56u
#define STEPS      3u
#define TOKENS     (PROMPT + STEPS)
#define HEADS      4u
#define KV_HEADS   2u
#define DIM        64u
#define OUT_FLOATS (HEADS * DIM)

/* ---- a runtime with the inputs of all scenes ---- */

typedef struct stage stage;
typedef struct scene scene;
struct stage {
    heap heap;
    kvf_runtime *runtime;
    int on_default;               /* scenes take the default stream, and none of their own */
    void (*meanwhile)(stage *st); /* runs in every capture of a scene's own; NULL = nothing */
    const scene *meant;           /* which it plays, */
    const float *meant_out;       /* and what that gives */
    stage *beside;                /* where: this one, with outputs of its own */
    char *q, *k, *v, *out; /* device memory: [LAYERS, TOKENS, heads, DIM] floats, [OUT_FLOATS] */
};

struct actors;
typedef kvf_status (*scene_act)(struct actors *a);
struct scene {
    const char *name;
    const char *settings;                 /* of its cache, as of test_set; NULL = none */
    void (*adjust)(kvf_cache_config *cc); /* what is no text; NULL = nothing */
    kvf_status (*play)(stage *st, const scene *s, float *out);
    const scene_act *acts; /* of a play on a cache, up to NULL */
};

kvf_runtime_config stage_config(stage *st);
kvf_cache_config stage_small_config(void);
void stage_open(stage *st);
void stage_close(stage *st);
kvf_status stage_stream(stage *st, kvf_stream **out);

/* A row of st->q, st->k or st->v. */
static inline float *stage_token(char *base, uint32_t heads, uint32_t layer, uint32_t token)
{
    return (float *)(void *)base + ((size_t)layer * TOKENS + token) * heads * DIM;
}

/* ---- the watchdog ---- */

/* Watches the whole program: call it first. */
void scene_watch_start(void);
/* From here to alarm(0): a play of `what` in which call `nth` fails. */
void scene_watch(const char *what, uint64_t nth);

/* ---- the scenes ---- */

/* Plays once without a fault, for the outputs. @return the CUDA calls that it made */
uint64_t scene_count_calls(stage *st, const scene *s, float *wanted);

extern const scene memory_scene, gather_scene, mapped_scene, batch_scene, each_scene,
    verified_scene, refresh_scene, custom_scene, given_scene, pages_scene, record_scene,
    record_masked_scene, stats_scene, prune_scene, chunks_scene, truncate_scene, disk_scene,
    link_scene, blocks_scene, quantized_blocks_scene, captured_blocks_scene;

/* A row of a table of cmocka's: a test of that scene, which is its state. */
#define PLAYED(test, s)                                                                            \
    {                                                                                              \
        .name = #test ": " #s, .test_func = test, .initial_state = (void *)(uintptr_t)&s           \
    }

#endif
