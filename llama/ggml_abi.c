/* SPDX-License-Identifier: Apache-2.0 */

/*
 * ggml in this process: its functions, and proofs that its structs are those of ggml_abi.h.
 *
 * Every field that this plug-in reads or fills is proved by an object that ggml makes, or by a
 * field after it that a public function reads, too. An unknown interface is no error: the plug-in
 * is not loaded then, and says why.
 */

#include "ggml_abi.h"

#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
#include <string.h>

enum {
    OPERATIONS_LOOKED_AT = 90,
    WHY = 160
}; /* fewer than any version has, after FLASH_ATTN_EXT */

/* The first object of the process that is named after ggml or llama and has the function. */
typedef struct search {
    const char *name;
    void *found;
} search;

static int look_into(struct dl_phdr_info *object, size_t size, void *user)
{
    (void)size;
    search *s = user;
    const char *slash = strrchr(object->dlpi_name, '/');
    const char *file = slash ? slash + 1 : object->dlpi_name;
    if (!strstr(file, "ggml") && !strstr(file, "llama"))
        return 0;
    void *handle = dlopen(object->dlpi_name, RTLD_LAZY | RTLD_NOLOAD);
    if (!handle)
        return 0;
    s->found = dlsym(handle, s->name);
    dlclose(handle);
    return s->found != NULL;
}

void *gg_find(const void *inside, const char *name)
{
    Dl_info object;
    if (inside && dladdr(inside, &object) && object.dli_fname) {
        void *handle = dlopen(object.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
        void *found = handle ? dlsym(handle, name) : NULL;
        if (handle)
            dlclose(handle);
        if (found)
            return found;
    }
    void *found = dlsym(RTLD_DEFAULT, name);
    if (found)
        return found;
    /* Bindings of other languages load it without giving its names to others. */
    search s = {.name = name};
    dl_iterate_phdr(look_into, &s);
    return s.found;
}

static bool find_functions(gg_api *api, const void *inside, char *why)
{
#define FIND(result, function, parameters)                                                         \
    {                                                                                              \
        void *found = gg_find(inside, "ggml_" #function);                                          \
        if (!found) {                                                                              \
            snprintf(why, WHY, "this ggml has no function ggml_" #function);                       \
            return false;                                                                          \
        }                                                                                          \
        memcpy(&api->function, &found, sizeof found);                                              \
    }
    GG_FUNCTIONS(FIND)
#undef FIND
    const char *(*version)(void) = NULL;
    void *found = gg_find(inside, "ggml_version");
    memcpy(&version, &found, sizeof found);
    snprintf(api->version, sizeof api->version, "%s", version ? version() : "unknown");
    return true;
}

/* Numbers of operations and types by their names. */
static bool find_operations(gg_api *api, char *why)
{
#define UNKNOWN(name, text) api->op.name = -1;
    GG_OPERATIONS(UNKNOWN)
    for (int op = 0; op < OPERATIONS_LOOKED_AT; op++) {
        const char *is = api->op_name(op);
#define COMPARE(name, text)                                                                        \
    if (!strcmp(is, text))                                                                         \
        api->op.name = op;
        GG_OPERATIONS(COMPARE)
    }
#define PRESENT(name, text)                                                                        \
    if (api->op.name < 0) {                                                                        \
        snprintf(why, WHY, "this ggml has no operation " text);                                    \
        return false;                                                                              \
    }
    GG_OPERATIONS(PRESENT)
#undef UNKNOWN
#undef COMPARE
#undef PRESENT
    const struct {
        int type;
        const char *name;
    } types[] = {
        {GG_F32, "f32"}, {GG_F16, "f16"}, {GG_Q8_0, "q8_0"}, {GG_I64, "i64"}, {GG_BF16, "bf16"}};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (strcmp(api->type_name(types[i].type), types[i].name) != 0) {
            snprintf(why, WHY, "type %d of this ggml is %s, not %s", types[i].type,
                     api->type_name(types[i].type), types[i].name);
            return false;
        }
    return true;
}

/* Is struct ggml_tensor the one that is declared here? Made by the process, read by us. */
static bool prove_tensors(gg_api *api, char *why)
{
    gg_context *context = api->init((gg_init_params){1 << 17, NULL, true});
    if (!context) {
        snprintf(why, WHY, "this ggml makes no context");
        return false;
    }
    gg_tensor *k = api->new_tensor_4d(context, GG_F16, 64, 96, 3, 2);
    gg_tensor *q = api->new_tensor_4d(context, GG_F32, 64, 5, 6, 2);
    api->set_name(k, "kvferry");
    gg_tensor *view = api->view_2d(context, k, 32, 7, 128, 256);
    gg_tensor *f = api->flash_attn_ext(context, q, k, k, NULL, 0.125f, 0.0f, 30.0f);
    float parameters[3];
    memcpy(parameters, f->op_params, sizeof parameters);
    bool known = k->ne[0] == 64 && k->ne[1] == 96 && k->ne[3] == 2 && k->nb[1] == 128 &&
                 k->nb[3] == 128 * 96 * 3 && k->type == GG_F16 && q->type == GG_F32 && !k->buffer &&
                 !k->data && k->name == api->get_name(k) && !strcmp(k->name, "kvferry");
    known = known && view->view_src == k && view->view_offs == 256 && view->op == api->op.view &&
            view->nb[1] == 128 && view->ne[1] == 7;
    known = known && f->op == api->op.flash_attn && f->src[0] == q && f->src[1] == k &&
            f->src[2] == k && !f->src[3] && !f->src[4] && parameters[0] == 0.125f &&
            parameters[1] == 0.0f && parameters[2] == 30.0f && f->ne[0] == 64 && f->ne[1] == 6 &&
            f->ne[2] == 5 && f->ne[3] == 2;
    known = known && api->tensor_overhead() >= sizeof(gg_tensor) &&
            api->tensor_overhead() <= sizeof(gg_tensor) + 64;
    if (known) {
        gg_graph *graph = api->new_graph_custom(context, 8, false);
        api->build_forward_expand(graph, f);
        const int nodes = api->graph_n_nodes(graph);
        known = nodes == 1 && api->graph_node(graph, 0) == f;
        api->flags_compute = (f->flags & GG_FLAG_COMPUTE) != 0;
    }
    if (!known)
        snprintf(why, WHY, "struct ggml_tensor has another layout");
    api->free(context);
    return known;
}

/* Sizes of the structs of functions, by a field after each that a public function reads, too. */
static bool prove_interface(gg_api *api, char *why)
{
    api->cpu = api->backend_reg_by_name("CPU");
    gg_backend *backend = api->cpu ? api->backend_init_by_type(GG_DEVICE_CPU, NULL) : NULL;
    if (!backend) {
        snprintf(why, WHY, "there is no CPU backend");
        return false;
    }
    api->api_version = api->cpu->api_version;
    void *set = api->backend_reg_get_proc_address(api->cpu, "ggml_backend_set_n_threads");
    memcpy(&api->set_n_threads, &set, sizeof set);
    gg_device *device = api->backend_get_device(backend);
    gg_buffer *buffer = api->backend_buft_alloc_buffer(api->backend_cpu_buffer_type(), 4096);
    const char *unknown = NULL;
    if (!set)
        unknown = "the CPU backend has no ggml_backend_set_n_threads";
    else if (backend->device != device || backend->guid != api->backend_guid(backend) ||
             !backend->iface.graph_compute || !backend->iface.get_name || !backend->iface.free)
        unknown = "struct ggml_backend has another layout";
    else if (device->reg != api->backend_dev_backend_reg(device) || device->reg != api->cpu ||
             !device->iface.supports_op || !device->iface.supports_buft ||
             device->iface.get_type(device) != GG_DEVICE_CPU)
        unknown = "struct ggml_backend_device has another layout";
    else if (!buffer || buffer->buft != api->backend_buffer_get_type(buffer) ||
             buffer->size != api->backend_buffer_get_size(buffer) || buffer->size < 4096 ||
             !buffer->iface.set_tensor || !buffer->iface.clear || !buffer->iface.memset_tensor)
        unknown = "struct ggml_backend_buffer has another layout";
    if (unknown)
        snprintf(why, WHY, "%s", unknown);
    if (buffer)
        api->backend_buffer_free(buffer);
    api->backend_free(backend);
    return !unknown;
}

bool gg_open(gg_api *api, const void *inside, char *why)
{
    memset(api, 0, sizeof *api);
    return find_functions(api, inside, why) && find_operations(api, why) &&
           prove_tensors(api, why) && prove_interface(api, why);
}
