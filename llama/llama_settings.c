/* SPDX-License-Identifier: Apache-2.0 */

/*
 * KVFERRY_LLAMA as settings: `name=value` separated by blanks, or `off` alone. Names, ranges and
 * messages are rows of the library; the few of this plug-in are below. A word that means nothing is
 * an error, never passed over.
 */

#include <float.h>
#include <kvferry/setting.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "common/text.h"
#include "plugin.h"

/* Names that are shorter here, as `kvferry run` and vLLM's plug-in have them. */
static const char *const aliases[][2] = {
    {"device_memory", "device_bytes"}, {"sink", "sink_tokens"}, {"local", "local_tokens"}};

/* Said by llama.cpp and the model, or without a home under blocks. */
static const char taken[] =
    " layers query_heads kv_heads head_dim value_dim dtype tensors softmax_scale sequences_max "
    "tokens_max host_tokens_max tokens_per_step_max prefill_chunk_max host_bytes disk_path "
    "disk_bytes disk_bundle_bytes observe_window verify_interval phase_times device "
    "device_ordinal head_mask layer_windows ";

#define OWN(field) sizeof(((kvl_settings *)0)->field), offsetof(kvl_settings, field)

static const kvf_setting own[] = {
    {"budget", KVF_SETTING_WHOLE, 1, OWN(cache.budget_tokens), 1, 0x1p26, NULL, "full", UINT32_MAX,
     "tokens attended per KV head and step; full = the context"},
    {"host_memory", KVF_SETTING_WHOLE, 1, OWN(host_memory), 0, 0x1p48, NULL, NULL, 0,
     "most bytes of pages in host memory; 0 = what there is"},
    {"rows", KVF_SETTING_WHOLE, 1, OWN(rows), 1, 512, NULL, NULL, 0,
     "most tokens of a pass that are attended as a step; more are a prompt"},
    {"prompts", KVF_SETTING_NAME, 1, OWN(prompts), 0, 2,
     (const char *const[]){"auto", "llama", "kvferry", NULL}, NULL, 0,
     "whose kernels compute prompts; auto = llama.cpp's, on a card kvferry's"},
    {"copies", KVF_SETTING_NAME, 1, OWN(copies), 0, 2,
     (const char *const[]){"auto", "one", "two", NULL}, NULL, 0,
     "of a token in memory; auto = one where no bit changes, two needs no SIGSEGV"},
    {"log", KVF_SETTING_REAL, 1, OWN(log_seconds), 0, 1e9, NULL, NULL, 0,
     "seconds between summaries; 0 = at the end only"},
    {"verify", KVF_SETTING_WHOLE, 1, OWN(verify), 0, 1e9, NULL, NULL, 0,
     "every N-th step of a layer is compared with llama.cpp's own; 0 = none"},
};

static const kvf_setting *own_setting(uint32_t index)
{
    return index < sizeof own / sizeof *own ? &own[index] : NULL;
}

__attribute__((format(printf, 2, 3))) static int fault(char *error, const char *format, ...)
{
    const int at = snprintf(error, KVL_SETTING_TEXT, "KVFERRY_LLAMA: ");
    va_list list;
    va_start(list, format);
    kvf_vformat(error + at, KVL_SETTING_TEXT - (size_t)at, format, list);
    va_end(list);
    return 0;
}

static int set(kvl_settings *settings, const char *name, char *value, char *error)
{
    const struct {
        const kvf_setting *(*row)(uint32_t);
        void *config;
    } homes[] = {{own_setting, settings},
                 {kvf_cache_setting, &settings->cache},
                 {kvf_runtime_setting, &settings->runtime}};
    const size_t length = strlen(value);
    if (!strcmp(name, "pages") && !strcmp(value, "native"))
        value = "bf16"; /* the library's word for pages as they came */
    if (!strcmp(name, "log") && length > 1 && value[length - 1] == 's')
        value[length - 1] = '\0';
    const char *full = name;
    for (size_t i = 0; i < sizeof aliases / sizeof *aliases; i++)
        if (!strcmp(aliases[i][0], name))
            full = aliases[i][1];
    char word[264], range[256];
    snprintf(word, sizeof word, " %s ", full);
    if (strstr(taken, word))
        return fault(error, "there is no %s here: llama.cpp and the model decide it", name);
    for (size_t i = 0; i < sizeof homes / sizeof *homes; i++) {
        const kvf_setting *s;
        for (uint32_t row = 0; (s = homes[i].row(row)); row++)
            if (!strcmp(s->name, full) && s->kind != KVF_SETTING_TEXT)
                return kvf_setting_parse(s, value, homes[i].config) ||
                       fault(error, "%s = %s: must be %s (%s)", name, value,
                             kvf_setting_range(s, range, sizeof range), s->meaning);
    }
    return fault(error, "there is no setting %s", name);
}

int kvl_settings_read(const char *text, kvl_settings *settings, char *error)
{
    memset(settings, 0, sizeof *settings);
    kvf_runtime_config_init(&settings->runtime);
    settings->runtime.device = KVF_DEVICE_HOST;
    settings->runtime.allow_unpinned = 1;
    kvf_cache_config_init(&settings->cache);
    settings->cache.dtype = KVF_FP16;
    settings->cache.phase_times = 0;
    settings->rows = 16;
    static const char blanks[] = " \t\n,";
    char word[256];
    for (const char *at = text ? text : ""; *(at += strspn(at, blanks)) != '\0';) {
        const size_t length = strcspn(at, blanks);
        snprintf(word, sizeof word, "%.*s", (int)length, at);
        at += length;
        char *value = strchr(word, '=');
        if (!strcmp(word, "off")) {
            settings->off = 1;
            continue;
        }
        if (!value || length >= sizeof word)
            return fault(error, "%s: must be name=value, or off alone", word);
        *value++ = '\0';
        if (!set(settings, word, value, error))
            return 0;
    }
    return 1;
}
