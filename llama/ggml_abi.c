/* SPDX-License-Identifier: Apache-2.0 */

/*
 * ggml in this process: its functions, and proofs that its structs are those of ggml_abi.h. Every
 * field that this plug-in reads or fills is proved by an object that ggml makes, or by a field
 * after it that a public function reads, too.
 */

#include "ggml_abi.h"

#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "common/text.h"

/* Fewer than any version has, after FLASH_ATTN_EXT; bytes of a text. */
enum { OPERATIONS_LOOKED_AT = 90, WHY = 160 };

__attribute__((format(printf, 2, 3))) static bool unknown(char *why, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    kvf_vformat(why, WHY, format, list);
    va_end(list);
    return false;
}

/* So two copies of ggml do not mix. */
void *gg_find(const void *inside, const char *name)
{
    Dl_info object;
    void *found = NULL, *handle = NULL;
    if (dladdr(inside, &object) && object.dli_fname)
        handle = dlopen(object.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    if (handle) {
        found = dlsym(handle, name);
        dlclose(handle);
    }
    return found ? found : dlsym(RTLD_DEFAULT, name);
}

static bool find_functions(gg_api *api, const void *inside, char *why)
{
#define ROW(result, function, parameters) {"ggml_" #function, offsetof(gg_api, function)},
    static const struct {
        const char *name;
        size_t at;
    } rows[] = {GG_FUNCTIONS(ROW)};
#undef ROW
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        void *found = gg_find(inside, rows[i].name);
        if (!found)
            return unknown(why, "this ggml has no function %s", rows[i].name);
        memcpy((char *)api + rows[i].at, &found, sizeof found);
    }
    const char *(*version)(void) = NULL;
    void *found = gg_find(inside, "ggml_version");
    memcpy(&version, &found, sizeof found);
    snprintf(api->version, sizeof api->version, "%s", version ? version() : "unknown");
    return true;
}

/* Numbers of operations by their names; those of types are known. */
static bool find_numbers(gg_api *api, char *why)
{
#define ROW(operation, name) {name, &api->op.operation},
    const struct {
        const char *name;
        int *number;
    } operations[] = {GG_OPERATIONS(ROW)};
#undef ROW
    static const struct {
        const char *name;
        int number;
    } types[] = {
        {"f32", GG_F32}, {"f16", GG_F16}, {"q8_0", GG_Q8_0}, {"i64", GG_I64}, {"bf16", GG_BF16}};
    for (size_t i = 0; i < sizeof operations / sizeof *operations; i++) {
        int *op = operations[i].number;
        while (*op < OPERATIONS_LOOKED_AT && strcmp(api->op_name(*op), operations[i].name) != 0)
            ++*op;
        if (*op == OPERATIONS_LOOKED_AT)
            return unknown(why, "this ggml has no operation %s", operations[i].name);
    }
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (strcmp(api->type_name(types[i].number), types[i].name) != 0)
            return unknown(why, "type %d of this ggml is %s, not %s", types[i].number,
                           api->type_name(types[i].number), types[i].name);
    return true;
}

/* Is struct ggml_tensor the one that is declared here? Made by the process, read by us. */
static bool prove_tensors(gg_api *api, char *why)
{
    gg_context *context = api->init((gg_init_params){GG_ROOM, NULL, true});
    if (!context)
        return unknown(why, "this ggml makes no context");
    gg_tensor *k = api->new_tensor_4d(context, GG_F16, 64, 96, 3, 2);
    gg_tensor *q = api->new_tensor_4d(context, GG_F32, 64, 5, 6, 2);
    api->set_name(k, "kvferry");
    gg_tensor *view = api->view_2d(context, k, 32, 7, 128, 256);
    gg_tensor *f = api->flash_attn_ext(context, q, k, k, NULL, 0.125f, 0.0f, 30.0f);
    float parameters[3];
    memcpy(parameters, f->op_params, sizeof parameters);
    bool known = k->ne[0] == 64 && k->ne[1] == 96 && k->ne[3] == 2 && k->nb[1] == 128 &&
                 k->nb[3] == 128 * 96 * 3 && k->type == GG_F16 && q->type == GG_F32 && !k->buffer &&
                 !k->data && !strcmp(k->name, "kvferry");
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
    api->free(context);
    return known || unknown(why, "struct ggml_tensor has another layout");
}

/* Sizes of the structs of functions, by a field after each that a public function reads, too. */
static bool prove_interface(gg_api *api, char *why)
{
    api->cpu = api->backend_reg_by_name("CPU");
    gg_backend *backend = api->cpu ? api->backend_init_by_type(GG_DEVICE_CPU, NULL) : NULL;
    if (!backend)
        return unknown(why, "there is no CPU backend");
    api->api_version = api->cpu->api_version;
    void *set = api->backend_reg_get_proc_address(api->cpu, "ggml_backend_set_n_threads");
    memcpy(&api->set_n_threads, &set, sizeof set);
    gg_device *device = api->backend_get_device(backend);
    gg_buffer *buffer = api->backend_buft_alloc_buffer(api->backend_cpu_buffer_type(), 4096);
    const char *strange = NULL;
    if (!set)
        strange = "the CPU backend has no ggml_backend_set_n_threads";
    else if (backend->device != device || backend->guid != api->backend_guid(backend) ||
             !backend->iface.graph_compute || !backend->iface.get_name || !backend->iface.free)
        strange = "struct ggml_backend has another layout";
    else if (device->reg != api->backend_dev_backend_reg(device) || device->reg != api->cpu ||
             !device->iface.supports_op || !device->iface.supports_buft ||
             device->iface.get_type(device) != GG_DEVICE_CPU)
        strange = "struct ggml_backend_device has another layout";
    else if (!buffer || buffer->buft != api->backend_buffer_get_type(buffer) ||
             buffer->size != api->backend_buffer_get_size(buffer) || buffer->size < 4096 ||
             !buffer->iface.set_tensor || !buffer->iface.clear || !buffer->iface.memset_tensor)
        strange = "struct ggml_backend_buffer has another layout";
    if (buffer)
        api->backend_buffer_free(buffer);
    api->backend_free(backend);
    return !strange || unknown(why, "%s", strange);
}

bool gg_open(gg_api *api, const void *inside, char *why)
{
    memset(api, 0, sizeof *api);
    return find_functions(api, inside, why) && find_numbers(api, why) && prove_tensors(api, why) &&
           prove_interface(api, why);
}
