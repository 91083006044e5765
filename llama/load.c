/* SPDX-License-Identifier: Apache-2.0 */

/*
 * How the plug-in gets into llama.cpp, and the functions that it exports.
 *
 * ggml calls ggml_backend_init where it loads backends (GGML_BACKEND_PATH). Where it does not, a
 * constructor under LD_PRELOAD, or kvferry_llama_load, asks ggml to load this library. Nothing here
 * ends a process: what is not understood is said in a line, and llama.cpp runs on.
 */

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "plugin.h"

#define EXPORTED __attribute__((visibility("default")))

EXPORTED gg_registry *ggml_backend_init(void);
EXPORTED const char *kvferry_llama_check_settings(const char *text);
EXPORTED const char *kvferry_llama_plan(const char *settings, const uint32_t *shape,
                                        uint64_t *bytes);
EXPORTED int kvferry_llama_load(void);

/* A library for tests sees no writes. */
#ifndef KVL_UNCOUNTED
#define KVL_UNCOUNTED 0
#endif

enum { PLANNED = 6 }; /* numbers of a shape that a plan is asked for */

static kvl_plugin the_plugin = {
    .lock = PTHREAD_MUTEX_INITIALIZER, .threads = 1, .no_counts = KVL_UNCOUNTED};

kvl_plugin *kvl_the_plugin(void)
{
    return &the_plugin;
}

/* The file of this library. */
static const char *own_path(void)
{
    Dl_info info;
    return dladdr(&the_plugin, &info) ? info.dli_fname : NULL;
}

static gg_registry *refuse(const char *why)
{
    kvl_say("not loaded: %s; llama.cpp runs on without it", why);
    kvl_report("refused %s", why);
    return NULL;
}

/* The plan of layers of one shape: how many, and the first numbers of a kvl_shape. */
static kvf_status make_plan(const kvl_settings *settings, const uint32_t *shape, kvl_plan *plan,
                            kvf_error *error)
{
    kvl_cache cache = {.layers = shape[0]};
    memcpy(&cache.shape, shape + 1, PLANNED * sizeof *shape);
    kvf_runtime *runtime = NULL;
    kvf_status status = kvf_runtime_open(&settings->runtime, &runtime, error);
    if (status == KVF_OK)
        status = kvl_plan_make(runtime, settings, &cache, plan, error);
    kvf_runtime_close(runtime);
    return status;
}

/* Settings of a text. Whether they go together, the library says of a layer of some model. */
static int read_settings(const char *text, kvl_settings *settings, char *why)
{
    static const uint32_t some[] = {1, 8, 8, 128, 128, 1 << 20, 1};
    kvl_plan plan;
    kvf_error error;
    if (!kvl_settings_read(text, settings, why))
        return 0;
    const kvf_status status = settings->off ? KVF_OK : make_plan(settings, some, &plan, &error);
    /* Memory is asked for when the model is known. */
    if (status != KVF_INVALID && status != KVF_UNSUPPORTED)
        return 1;
    snprintf(why, KVL_SETTING_TEXT, "KVFERRY_LLAMA: %s", error.text);
    return 0;
}

/* Under the lock. */
static gg_registry *load(kvl_plugin *p, const void *inside)
{
    char why[KVL_SETTING_TEXT] = "";
    if (p->is_loaded)
        return kvl_registry(&p->gg);
    if (!read_settings(getenv("KVFERRY_LLAMA"), &p->settings, why))
        return refuse(why);
    if (p->settings.off) {
        kvl_report("off");
        return NULL;
    }
    if (!gg_open(&p->gg, inside, why))
        return refuse(why);
    /* Buffers may have our functions until the end of the process: stay, whatever is closed. */
    const char *path = own_path();
    void *self = path ? dlopen(path, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE) : NULL;
    if (self)
        dlclose(self);
    p->is_loaded = 1;
    p->told_at = kvl_now();
    kvl_say("loaded into llama.cpp (ggml %s, backend interface %d)", p->gg.version,
            p->gg.api_version);
    kvl_report("loaded ggml=%s api=%d", p->gg.version, p->gg.api_version);
    return kvl_registry(&p->gg);
}

gg_registry *ggml_backend_init(void)
{
    kvl_plugin *p = &the_plugin;
    pthread_mutex_lock(&p->lock);
    gg_registry *registry = load(p, __builtin_return_address(0));
    pthread_mutex_unlock(&p->lock);
    return registry;
}

const char *kvferry_llama_check_settings(const char *text)
{
    static _Thread_local char why[KVL_SETTING_TEXT];
    kvl_settings settings;
    return read_settings(text, &settings, why) ? NULL : why;
}

/* Bytes of layers: on the host, the device, in codes, of the plug-in's own; and blocks. */
const char *kvferry_llama_plan(const char *text, const uint32_t *shape, uint64_t *bytes)
{
    static _Thread_local char why[KVL_SETTING_TEXT];
    kvl_settings settings;
    kvl_plan plan;
    kvf_error error;
    if (!read_settings(text, &settings, why))
        return why;
    if (make_plan(&settings, shape, &plan, &error) != KVF_OK) {
        snprintf(why, sizeof why, "%s", error.text);
        return why;
    }
    const uint64_t sums[] = {plan.memory.host_bytes, plan.memory.device_bytes, plan.codes, plan.own,
                             plan.blocks.block_count};
    memcpy(bytes, sums, sizeof sums);
    return NULL;
}

/* Ask the ggml of this process to load us. */
static int ask_ggml(void *load_function)
{
    gg_registry *(*backend_load)(const char *path);
    memcpy(&backend_load, &load_function, sizeof backend_load);
    const char *path = own_path();
    return path && backend_load(path) != NULL;
}

int kvferry_llama_load(void)
{
    void *function = gg_find(NULL, "ggml_backend_load");
    if (the_plugin.is_loaded)
        return 0;
    if (!function) {
        refuse("there is no ggml with shared libraries in this process");
        return 1;
    }
    return !ask_ggml(function);
}

/* Is the file one of LD_PRELOAD's? With `leave` it is taken out, for programs that start from here.
 */
static int is_preloaded(const char *file, int leave)
{
    const char *list = getenv("LD_PRELOAD");
    char *rest = list ? calloc(1, strlen(list) + 2) : NULL;
    int found = 0;
    const size_t name = strlen(file);
    for (const char *at = list; rest && *(at += strspn(at, ": ")) != '\0';) {
        const size_t length = strcspn(at, ": ");
        if (length >= name && !memcmp(at + length - name, file, name))
            found = 1;
        else
            strncat(*rest ? strcat(rest, ":") : rest, at, length);
        at += length;
    }
    if (found && leave && *rest)
        setenv("LD_PRELOAD", rest, 1);
    else if (found && leave)
        unsetenv("LD_PRELOAD");
    free(rest);
    return found;
}

/* Under LD_PRELOAD. A process that has ggml loads us, and so do those that it starts, if they have
 * it, too, as a router of llama-server does. Tools that it starts leave LD_PRELOAD; a script that
 * will become llama.cpp does nothing. */
__attribute__((constructor)) static void preloaded(void)
{
    static const char mark[] = "KVFERRY_LLAMA_INSIDE";
    void *function = dlsym(RTLD_DEFAULT, "ggml_backend_load");
    const char *path = own_path();
    const char *slash = path ? strrchr(path, '/') : NULL;
    if (!path || !is_preloaded(slash ? slash + 1 : path, !function && getenv(mark)) || !function)
        return;
    setenv(mark, "1", 1);
    gg_registry *(*by_name)(const char *) = NULL;
    void *found = dlsym(RTLD_DEFAULT, "ggml_backend_reg_by_name");
    memcpy(&by_name, &found, sizeof found);
    if (by_name && by_name("CPU"))
        ask_ggml(function);
    else /* this build loads its backends later, and this one with them */
        setenv("GGML_BACKEND_PATH", path, 0);
}

/* The end of the process. Other threads may be at work: only counters are read. */
__attribute__((destructor)) static void end(void)
{
    kvl_plugin *p = &the_plugin;
    if (!p->is_loaded || pthread_mutex_trylock(&p->lock) != 0)
        return;
    kvl_summary(p, 1);
    pthread_mutex_unlock(&p->lock);
}
