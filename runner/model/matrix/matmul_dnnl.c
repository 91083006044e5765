/* SPDX-License-Identifier: Apache-2.0 */

/*
 * kvf_matmul over oneDNN's C API.
 *
 * Version 2 describes an operation and a memory by value, version 3 by handle; the difference is
 * contained in memory_make, memory_drop and primitive_make. It knows nothing of panels or threads.
 */

#include "matmul.h"

#include <dlfcn.h>
#include <dnnl.h>
#include <stdio.h>
#include <stdlib.h>

struct kvf_matmul {
    dnnl_engine_t engine;
    dnnl_stream_t stream;
};

void kvf_matmul_describe(char *text, size_t capacity)
{
    const dnnl_version_t *v = dnnl_version();
    snprintf(text, capacity, "oneDNN %d.%d.%d", v->major, v->minor, v->patch);
}

/*
 * oneDNN takes its thread count from the OpenMP setting of the calling thread. The symbol is looked
 * up at run time because which OpenMP library it is, or whether there is one, is the business of
 * whoever built oneDNN.
 */
static void use_one_thread(void)
{
    void *symbol = dlsym(RTLD_DEFAULT, "omp_set_num_threads");
    if (!symbol)
        return;
    union {
        void *object;
        void (*function)(int);
    } set = {.object = symbol};
    set.function(1);
}

kvf_status kvf_matmul_create(kvf_matmul **out)
{
    *out = NULL;
    kvf_matmul *matmul = calloc(1, sizeof *matmul);
    if (!matmul)
        return KVF_OUT_OF_MEMORY;
    if (dnnl_engine_create(&matmul->engine, dnnl_cpu, 0) != dnnl_success ||
        dnnl_stream_create(&matmul->stream, matmul->engine, dnnl_stream_default_flags) !=
            dnnl_success) {
        kvf_matmul_destroy(matmul);
        return KVF_OUT_OF_MEMORY;
    }
    *out = matmul;
    return KVF_OK;
}

void kvf_matmul_destroy(kvf_matmul *matmul)
{
    if (!matmul)
        return;
    if (matmul->stream)
        dnnl_stream_destroy(matmul->stream);
    if (matmul->engine)
        dnnl_engine_destroy(matmul->engine);
    free(matmul);
}

/* A matrix as oneDNN sees it. */
typedef struct matrix {
    dnnl_data_type_t type;
    dnnl_dims_t dims;
    dnnl_dims_t strides;
    void *data;
} matrix;

#if DNNL_VERSION_MAJOR >= 3

typedef dnnl_memory_desc_t description;

static dnnl_status_t describe(description *out, const matrix *m)
{
    return dnnl_memory_desc_create_with_strides(out, 2, m->dims, m->type, m->strides);
}

static void describe_drop(description *d)
{
    if (*d)
        dnnl_memory_desc_destroy(*d);
}

static dnnl_status_t memory_make(dnnl_memory_t *out, description *d, dnnl_engine_t engine,
                                 void *data)
{
    return dnnl_memory_create(out, *d, engine, data);
}

static dnnl_status_t primitive_desc_make(dnnl_primitive_desc_t *out, dnnl_engine_t engine,
                                         description d[3])
{
    return dnnl_matmul_primitive_desc_create(out, engine, d[0], d[1], NULL, d[2], NULL);
}

#else

typedef dnnl_memory_desc_t description;

static dnnl_status_t describe(description *out, const matrix *m)
{
    return dnnl_memory_desc_init_by_strides(out, 2, m->dims, m->type, m->strides);
}

static void describe_drop(description *d)
{
    (void)d;
}

static dnnl_status_t memory_make(dnnl_memory_t *out, description *d, dnnl_engine_t engine,
                                 void *data)
{
    return dnnl_memory_create(out, d, engine, data);
}

static dnnl_status_t primitive_desc_make(dnnl_primitive_desc_t *out, dnnl_engine_t engine,
                                         description d[3])
{
    dnnl_matmul_desc_t operation;
    dnnl_status_t status = dnnl_matmul_desc_init(&operation, &d[0], &d[1], NULL, &d[2]);
    if (status != dnnl_success)
        return status;
    return dnnl_primitive_desc_create(out, &operation, NULL, engine, NULL);
}

#endif

static bool execute(kvf_matmul *matmul, description d[3], const matrix m[3])
{
    static const int argument[3] = {DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DST};
    dnnl_primitive_desc_t plan = NULL;
    dnnl_primitive_t primitive = NULL;
    dnnl_memory_t memory[3] = {NULL, NULL, NULL};
    dnnl_exec_arg_t args[3];
    bool done = primitive_desc_make(&plan, matmul->engine, d) == dnnl_success &&
                dnnl_primitive_create(&primitive, plan) == dnnl_success;
    for (int i = 0; i < 3 && done; i++) {
        done = memory_make(&memory[i], &d[i], matmul->engine, m[i].data) == dnnl_success;
        args[i] = (dnnl_exec_arg_t){.arg = argument[i], .memory = memory[i]};
    }
    done = done && dnnl_primitive_execute(primitive, matmul->stream, 3, args) == dnnl_success &&
           dnnl_stream_wait(matmul->stream) == dnnl_success;
    for (int i = 0; i < 3; i++)
        if (memory[i])
            dnnl_memory_destroy(memory[i]);
    if (primitive)
        dnnl_primitive_destroy(primitive);
    if (plan)
        dnnl_primitive_desc_destroy(plan);
    return done;
}

bool kvf_matmul_bf16(kvf_matmul *matmul, const kvf_matmul_shape *shape, const uint16_t *a,
                     const uint16_t *b, float *c)
{
    /* oneDNN's interface takes sources without const; it does not write to them. */
    union {
        const uint16_t *from;
        void *to;
    } a_data = {.from = a}, b_data = {.from = b};
    const matrix m[3] = {
        {dnnl_bf16, {shape->rows, shape->inputs}, {shape->a_stride, 1}, a_data.to},
        {dnnl_bf16, {shape->inputs, shape->outputs}, {1, shape->b_stride}, b_data.to},
        {dnnl_f32, {shape->rows, shape->outputs}, {shape->c_stride, 1}, c},
    };
    description d[3] = {0};
    use_one_thread();
    bool done = true;
    for (int i = 0; i < 3 && done; i++)
        done = describe(&d[i], &m[i]) == dnnl_success;
    done = done && execute(matmul, d, m);
    for (int i = 0; i < 3; i++)
        describe_drop(&d[i]);
    return done;
}

#if defined(__x86_64__)
/* A product small enough to check by hand: oneDNN may lack bf16 where the CPU has it. */
static bool bf16_probe(void)
{
    enum { SIDE = 16 };
    uint16_t a[SIDE * SIDE], b[SIDE * SIDE];
    float c[SIDE * SIDE] = {0};
    for (int i = 0; i < SIDE * SIDE; i++) {
        a[i] = 0x3f80;                         /* 1 */
        b[i] = i / SIDE % 2 ? 0x4000 : 0xbf80; /* rows of B: -1 and 2 in turn */
    }
    const kvf_matmul_shape shape = {SIDE, SIDE, SIDE, SIDE, SIDE, SIDE};
    kvf_matmul *matmul;
    if (kvf_matmul_create(&matmul) != KVF_OK)
        return false;
    bool right = kvf_matmul_bf16(matmul, &shape, a, b, c);
    for (int i = 0; i < SIDE * SIDE; i++)
        right = right && c[i] == (i % 2 ? 2.0f * SIDE : -1.0f * SIDE);
    kvf_matmul_destroy(matmul);
    return right;
}
#endif

bool kvf_matmul_bf16_native(void)
{
#if defined(__x86_64__)
    const unsigned isa = (unsigned)dnnl_get_effective_cpu_isa();
    const unsigned amx = (unsigned)dnnl_cpu_isa_avx512_core_amx;
    const unsigned bf16 = (unsigned)dnnl_cpu_isa_avx512_core_bf16;
    const unsigned wanted = __builtin_cpu_is("amd") ? bf16 : amx;
    return (isa & wanted) == wanted && bf16_probe();
#else
    return false;
#endif
}
