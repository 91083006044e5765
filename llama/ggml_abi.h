/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVL_GGML_ABI_H
#define KVL_GGML_ABI_H

/*
 * The binary interface of ggml as far as a backend needs it. Declared from ggml's ggml.h and
 * src/ggml-backend-impl.h (MIT licence, ggml authors), fields in their order, so that no header of
 * a version is compiled in. gg_open proves on objects of the process that structs lie so: neither
 * ggml's version nor its API number says it.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { GG_SOURCES = 10, GG_NAME = 64, GG_Q8_0_ELEMENTS = 32, GG_FLAG_COMPUTE = 16 };
enum { GG_ROOM = 1 << 17 }; /* bytes of a context: more than a graph of some nodes takes */
/* Values of enum ggml_status, and of enum ggml_backend_dev_type. */
enum { GG_FAILED = -1, GG_SUCCESS = 0 };
enum { GG_DEVICE_CPU, GG_DEVICE_GPU, GG_DEVICE_IGPU, GG_DEVICE_ACCEL };
/* Numbers of types, which gg_open compares with the names that the process has for them. */
enum { GG_F32 = 0, GG_F16 = 1, GG_Q8_0 = 8, GG_I64 = 27, GG_BF16 = 30 };

typedef struct gg_tensor gg_tensor;
typedef struct gg_buffer gg_buffer;
typedef struct gg_buffer_type gg_buffer_type;
typedef struct gg_backend gg_backend;
typedef struct gg_device gg_device;
typedef struct gg_registry gg_registry;
typedef struct gg_graph gg_graph;     /* seen through functions only */
typedef struct gg_context gg_context; /* likewise */

struct gg_tensor {
    int32_t type;
    gg_buffer *buffer;
    int64_t ne[4]; /* elements */
    size_t nb[4];  /* strides in bytes */
    int32_t op;
    int32_t op_params[16];
    int32_t flags;
    gg_tensor *src[GG_SOURCES];
    gg_tensor *view_src;
    size_t view_offs;
    void *data;
    char name[GG_NAME];
    void *extra;
    char padding[8];
};

/* Functions that nobody here calls or fills are `void *`. */
typedef struct gg_buffer_i {
    void (*free_buffer)(gg_buffer *buffer);
    void *(*base)(gg_buffer *buffer);
    void *init_tensor;
    void (*memset_tensor)(gg_buffer *buffer, gg_tensor *tensor, uint8_t value, size_t offset,
                          size_t size);
    void (*set_tensor)(gg_buffer *buffer, gg_tensor *tensor, const void *data, size_t offset,
                       size_t size);
    void (*get_tensor)(gg_buffer *buffer, const gg_tensor *tensor, void *data, size_t offset,
                       size_t size);
    void *set_tensor_2d, *get_tensor_2d, *cpy_tensor;
    void (*clear)(gg_buffer *buffer, uint8_t value);
    void *reset;
} gg_buffer_i;

/* Later versions have fields after these, which nobody here looks at. */
struct gg_buffer {
    gg_buffer_i iface;
    gg_buffer_type *buft;
    void *context;
    size_t size;
};

typedef struct gg_backend_i {
    const char *(*get_name)(const void *self);
    void (*free)(gg_backend *backend);
    void *async[6], *plans[4];
    int (*graph_compute)(gg_backend *backend, gg_graph *graph);
    void *events[2], *graph_optimize;
} gg_backend_i;

struct gg_backend {
    void *guid;
    gg_backend_i iface;
    gg_device *device;
    void *context;
};

/* Fields that every version has in front; the caller has zeroed the rest. */
typedef struct gg_device_props {
    const char *name;
    const char *description;
    size_t memory_free;
    size_t memory_total;
    int type;
} gg_device_props;

typedef struct gg_device_i {
    const char *(*get_name)(const void *self);
    const char *(*get_description)(const void *self);
    void (*get_memory)(gg_device *device, size_t *free, size_t *total);
    int (*get_type)(gg_device *device);
    void (*get_props)(gg_device *device, gg_device_props *props);
    gg_backend *(*init_backend)(gg_device *device, const char *params);
    gg_buffer_type *(*get_buffer_type)(gg_device *device);
    void *get_host_buffer_type, *buffer_from_host_ptr;
    bool (*supports_op)(gg_device *device, const gg_tensor *op);
    bool (*supports_buft)(gg_device *device, gg_buffer_type *type);
    void *offload_op, *events[3];
} gg_device_i;

struct gg_device {
    gg_device_i iface;
    gg_registry *reg;
    void *context;
};

typedef struct gg_registry_i {
    const char *(*get_name)(const void *self);
    size_t (*get_device_count)(gg_registry *registry);
    gg_device *(*get_device)(gg_registry *registry, size_t index);
    void *(*get_proc_address)(gg_registry *registry, const char *name);
} gg_registry_i;

struct gg_registry {
    int api_version;
    gg_registry_i iface;
    void *context;
};

typedef struct gg_init_params {
    size_t mem_size;
    void *mem_buffer;
    bool no_alloc;
} gg_init_params;

/* Functions of ggml: X(result, name without "ggml_", parameters). All are in every version that is
 * served; what is newer must not be named here. */
#define GG_FUNCTIONS(X)                                                                            \
    X(const char *, op_name, (int op))                                                             \
    X(const char *, type_name, (int type))                                                         \
    X(size_t, nbytes, (const gg_tensor *))                                                         \
    X(gg_context *, init, (gg_init_params))                                                        \
    X(void, free, (gg_context *))                                                                  \
    X(size_t, tensor_overhead, (void))                                                             \
    X(gg_tensor *, new_tensor_4d, (gg_context *, int type, int64_t, int64_t, int64_t, int64_t))    \
    X(gg_tensor *, set_name, (gg_tensor *, const char *name))                                      \
    X(gg_tensor *, view_2d, (gg_context *, gg_tensor *, int64_t, int64_t, size_t nb1, size_t at))  \
    X(gg_tensor *, flash_attn_ext,                                                                 \
      (gg_context *, gg_tensor * q, gg_tensor * k, gg_tensor * v, gg_tensor * mask, float scale,   \
       float max_bias, float softcap))                                                             \
    X(gg_graph *, new_graph_custom, (gg_context *, size_t nodes, bool grads))                      \
    X(void, graph_clear, (gg_graph *))                                                             \
    X(void, graph_add_node, (gg_graph *, gg_tensor *))                                             \
    X(void, build_forward_expand, (gg_graph *, gg_tensor *))                                       \
    X(int, graph_n_nodes, (gg_graph *))                                                            \
    X(gg_tensor *, graph_node, (gg_graph *, int index))                                            \
    X(gg_registry *, backend_reg_by_name, (const char *name))                                      \
    X(void *, backend_reg_get_proc_address, (gg_registry *, const char *name))                     \
    X(gg_registry *, backend_dev_backend_reg, (gg_device *))                                       \
    X(gg_backend *, backend_init_by_type, (int type, const char *params))                          \
    X(void, backend_free, (gg_backend *))                                                          \
    X(gg_device *, backend_get_device, (gg_backend *))                                             \
    X(void *, backend_guid, (gg_backend *))                                                        \
    X(int, backend_graph_compute, (gg_backend *, gg_graph *))                                      \
    X(gg_buffer_type *, backend_cpu_buffer_type, (void))                                           \
    X(bool, backend_buft_is_host, (gg_buffer_type *))                                              \
    X(gg_buffer *, backend_buft_alloc_buffer, (gg_buffer_type *, size_t size))                     \
    X(void, backend_buffer_free, (gg_buffer *))                                                    \
    X(gg_buffer_type *, backend_buffer_get_type, (gg_buffer *))                                    \
    X(size_t, backend_buffer_get_size, (gg_buffer *))                                              \
    X(void, backend_tensor_get, (const gg_tensor *, void *to, size_t at, size_t bytes))            \
    X(void, backend_tensor_set, (gg_tensor *, const void *from, size_t at, size_t bytes))          \
    X(size_t, backend_dev_count, (void))                                                           \
    X(gg_device *, backend_dev_get, (size_t index))                                                \
    X(int, backend_dev_type, (gg_device *))                                                        \
    X(const char *, backend_dev_name, (gg_device *))                                               \
    X(gg_buffer_type *, backend_dev_buffer_type, (gg_device *))                                    \
    X(gg_device *, backend_buft_get_device, (gg_buffer_type *))                                    \
    X(size_t, backend_buft_get_alignment, (gg_buffer_type *))                                      \
    X(size_t, backend_buft_get_alloc_size, (gg_buffer_type *, const gg_tensor *))

/* Operations that are told apart, by ggml's names: their numbers differ between versions. */
#define GG_OPERATIONS(X)                                                                           \
    X(none, "NONE")                                                                                \
    X(view, "VIEW")                                                                                \
    X(reshape, "RESHAPE")                                                                          \
    X(permute, "PERMUTE")                                                                          \
    X(transpose, "TRANSPOSE")                                                                      \
    X(set_rows, "SET_ROWS")                                                                        \
    X(flash_attn, "FLASH_ATTN_EXT")

#define GG_POINTER(result, name, parameters) result(*name) parameters;
#define GG_OPERATION(name, text)             int name;
/** ggml of this process. */
typedef struct gg_api {
    GG_FUNCTIONS(GG_POINTER)
    struct {
        GG_OPERATIONS(GG_OPERATION)
    } op;
    gg_registry *cpu;
    void (*set_n_threads)(gg_backend *backend, int threads); /* of the CPU backend */
    int api_version;                                         /* as the CPU backend says it */
    bool flags_compute; /* nodes that must be computed are flagged: others are skipped */
    char version[32];   /* "unknown" where ggml does not say it */
} gg_api;
#undef GG_POINTER
#undef GG_OPERATION

/** Find functions of the ggml that @p inside is an address of, and prove its structs.
 * @param why  receives what is unknown, at least 160 bytes */
bool gg_open(gg_api *api, const void *inside, char *why);

/** A function of the library that @p inside is in, or of what it needs; else of the process. */
void *gg_find(const void *inside, const char *name);

/** An operation that moves nothing: a view and its like. */
static inline bool gg_is_view(const gg_api *api, const gg_tensor *t)
{
    return t->op == api->op.none || t->op == api->op.view || t->op == api->op.reshape ||
           t->op == api->op.permute || t->op == api->op.transpose;
}

#endif
