/* SPDX-License-Identifier: Apache-2.0 */

/*
 * How the plug-in gets into llama.cpp, and the functions that it exports.
 *
 * ggml calls ggml_backend_init where it loads backends. Where it does not, a constructor under
 * LD_PRELOAD, or an import of kvferry.llama, asks ggml to load this library.
 */

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/clock.h"
#include "plugin.h"

#define EXPORTED __attribute__((visibility("default")))

EXPORTED gg_registry *ggml_backend_init(void);
EXPORTED const char *kvferry_llama_plan(const char *text, const uint32_t *shape, uint64_t *bytes);

static kvl_plugin the_plugin = {
    .lock = PTHREAD_ERRORCHECK_MUTEX_INITIALIZER_NP, .threads = 1, .away_at = KVL_AWAY};

kvl_plugin *kvl_the_plugin(void)
{
    return &the_plugin;
}

/* A line to whoever gave KVFERRY_LLAMA_REPORT, once. */
static void report(const char *before, const char *line)
{
    const char *number = getenv("KVFERRY_LLAMA_REPORT");
    char *end;
    const long fd = number ? strtol(number, &end, 10) : 0;
    if (fd < 3 || fd > 65535 || *end)
        return;
    unsetenv("KVFERRY_LLAMA_REPORT");
    dprintf((int)fd, "%s%s\n", before, line);
    close((int)fd);
}

/* Settings of a text, and a plan of layers with them. A cache without layers becomes one of some
 * model, to be told what does not go together. */
static int read_settings(const char *text, kvl_settings *settings, kvl_cache *cache, char *why)
{
    kvf_runtime *runtime = NULL;
    const int is_some = !cache->layers;
    if (is_some)
        *cache = (kvl_cache){.layers = 1, .shape = {8, 8, 128, 128, 1 << 20, 1, 0, 0}};
    if (!kvl_settings_read(text, settings, why))
        return 0;
    kvf_status status = kvf_runtime_open(&settings->runtime, &runtime, NULL);
    if (status == KVF_OK)
        status = kvl_plan_make(runtime, settings, cache);
    kvf_runtime_close(runtime);
    /* Memory is asked for when the model is known. */
    if (status == KVF_OK || (is_some && status != KVF_INVALID && status != KVF_UNSUPPORTED))
        return 1;
    snprintf(why, KVL_SETTING_TEXT, "%s%s", is_some ? "KVFERRY_LLAMA: " : "",
             kvf_runtime_error(NULL)->text);
    return 0;
}

/* Under the lock. */
static gg_registry *load(kvl_plugin *p, const void *inside)
{
    char why[KVL_SETTING_TEXT] = "";
    kvl_cache some = {0};
    if (p->is_loaded)
        return kvl_registry(&p->gg);
    if (!read_settings(getenv("KVFERRY_LLAMA"), &p->settings, &some, why) ||
        (!p->settings.off && !gg_open(&p->gg, inside, why))) {
        kvl_say("not loaded: %s; llama.cpp runs on without it", why);
        report("refused ", why);
        return NULL;
    }
    if (p->settings.off) {
        report("off", "");
        return NULL;
    }
    p->is_loaded = 1;
    kvl_card_open(p);
    p->told_at = kvf_now_seconds();
    kvl_say("loaded into llama.cpp (ggml %s, backend interface %d)", p->gg.version,
            p->gg.api_version);
    snprintf(why, sizeof why, "ggml=%s api=%d", p->gg.version, p->gg.api_version);
    report("loaded ", why);
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

/* Bytes of layers: on the host, the device, in codes, of the plug-in's own; and blocks. The shape
 * is a number of layers, and the first six of a kvl_shape; without it, only what is wrong with the
 * settings. */
const char *kvferry_llama_plan(const char *text, const uint32_t *shape, uint64_t *bytes)
{
    static _Thread_local char why[KVL_SETTING_TEXT];
    kvl_settings settings;
    kvl_cache cache = {.layers = shape ? *shape : 0};
    const kvl_plan *plan = &cache.plan;
    if (shape)
        memcpy(&cache.shape, shape + 1, 6 * sizeof *shape);
    if (!read_settings(text, &settings, &cache, why))
        return why;
    const uint64_t sums[] = {plan->memory.host_bytes, plan->memory.device_bytes, plan->codes,
                             plan->own, plan->blocks.block_count};
    if (shape)
        memcpy(bytes, sums, sizeof sums);
    return NULL;
}

/* Under LD_PRELOAD. A process that has ggml loads us, and so do those that it starts, if they have
 * it, too, as a router of llama-server does. Tools that it starts get what the launcher found in
 * LD_PRELOAD; a script that will become llama.cpp does nothing. */
__attribute__((constructor)) static void preloaded(void)
{
    static const char mark[] = "KVFERRY_LLAMA_INSIDE";
    const char *list = getenv("LD_PRELOAD"), *before = getenv(mark);
    Dl_info own;
    if (!list || !dladdr(&the_plugin, &own) || !strstr(list, basename(own.dli_fname)))
        return;
    gg_registry *(*load_from)(const char *) = NULL, *(*by_name)(const char *) = NULL;
    void *found = dlsym(RTLD_DEFAULT, "ggml_backend_load");
    memcpy(&load_from, &found, sizeof found);
    if (!load_from) {
        if (before)
            setenv("LD_PRELOAD", before, 1);
        return;
    }
    before = getenv("KVFERRY_LLAMA_BEFORE");
    if (before)
        setenv(mark, before, 1);
    found = dlsym(RTLD_DEFAULT, "ggml_backend_reg_by_name");
    memcpy(&by_name, &found, sizeof found);
    if (by_name && by_name("CPU"))
        load_from(own.dli_fname);
    else /* this build loads its backends later, and this one with them */
        setenv("GGML_BACKEND_PATH", own.dli_fname, 0);
}

/* The end of the process. Other threads may be at work: only counters are read. */
__attribute__((destructor)) static void end(void)
{
    kvl_plugin *p = &the_plugin;
    if (!p->is_loaded || pthread_mutex_trylock(&p->lock) != 0)
        return;
    kvl_summary(p);
    pthread_mutex_unlock(&p->lock);
}
