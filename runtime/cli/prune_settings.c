/* SPDX-License-Identifier: Apache-2.0 */

/*
 * One table of the settings of pruning, from which text, JSON and the listing come.
 *
 * It knows fields and ranges. Invariant: rows[s] is the row of setting s.
 */

#include "prune_settings.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef enum kind {
    COUNT,  /* uint32_t, least to most */
    LAYER,  /* uint32_t, or auto */
    SHARE,  /* float in (0, 1] */
    REAL,   /* float, least to most */
    NAME,   /* an enum */
    SWITCH, /* uint32_t 0 or 1 */
    THREE,  /* float[3], each least to most */
} kind;

typedef struct row {
    const char *name;
    kind kind;
    size_t offset;
    double least, most;
    const cli_named *names;
} row;

static const cli_named pool_names[] = {{"max", KVF_POOL_MAX}, {"avg", KVF_POOL_AVERAGE}, {NULL, 0}};
static const cli_named reduce_names[] = {{"mean-softmax", KVF_GROUP_MEAN_SOFTMAX},
                                         {"max", KVF_GROUP_MAX},
                                         {"sum", KVF_GROUP_SUM},
                                         {NULL, 0}};
static const cli_named pivot_names[] = {{"online", KVF_PIVOT_ONLINE},
                                        {"calibrated", KVF_PIVOT_CALIBRATED},
                                        {"fixed", KVF_PIVOT_FIXED},
                                        {NULL, 0}};
const cli_named cli_retention_names[] = {
    {"offload", KVF_RETENTION_OFFLOAD}, {"evict", KVF_RETENTION_EVICT}, {NULL, 0}};
const cli_named cli_eviction_names[] = {{"none", KVF_EVICTION_NONE},
                                        {"naive", KVF_EVICTION_NAIVE},
                                        {"patched", KVF_EVICTION_PATCHED},
                                        {NULL, 0}};

#define TOKENS_MAX 1073741824.0
#define WINDOW_MAX 128.0
#define LAYERS_MAX 1023.0

#define AT(field) offsetof(kvf_prune_settings, field)

static const row rows[SETTING_COUNT] = {
    [SETTING_KEEP] = {"keep", SHARE, AT(keep), 0, 1, NULL},
    [SETTING_KEEP_TOKENS] = {"keep_tokens", COUNT, AT(keep_tokens), 0, TOKENS_MAX, NULL},
    [SETTING_PROPAGATE] = {"propagate", SHARE, AT(propagate), 0, 1, NULL},
    [SETTING_PROPAGATE_TOKENS] = {"propagate_tokens", COUNT, AT(propagate_tokens), 0, TOKENS_MAX,
                                  NULL},
    [SETTING_LAYER] = {"layer", LAYER, AT(layer), 0, LAYERS_MAX, NULL},
    [SETTING_WINDOW] = {"window", COUNT, AT(window), 1, WINDOW_MAX, NULL},
    [SETTING_POOL] = {"pool", NAME, AT(pool), 0, 0, pool_names},
    [SETTING_POOL_WIDTH] = {"pool_width", COUNT, AT(pool_width), 1, 1023, NULL},
    [SETTING_GROUP_REDUCE] = {"group_reduce", NAME, AT(group_reduce), 0, 0, reduce_names},
    [SETTING_WINDOW_MEAN] = {"window_mean", SWITCH, AT(window_mean), 0, 1, NULL},
    [SETTING_SINK_TOKENS] = {"sink_tokens", COUNT, AT(sink_tokens), 0, TOKENS_MAX, NULL},
    [SETTING_RECENT_SHARE] = {"recent_share", REAL, AT(recent_share), 0, 1, NULL},
    [SETTING_BETA] = {"beta", COUNT, AT(beta), 1, TOKENS_MAX, NULL},
    [SETTING_DECAY] = {"decay", REAL, AT(decay), 0, 1, NULL},
    [SETTING_WEIGHTS] = {"weights", THREE, AT(weights), 0, 1e6, NULL},
    [SETTING_MASS_SHARE] = {"mass_share", SHARE, AT(mass_share), 0, 1, NULL},
    [SETTING_PIVOT] = {"pivot", NAME, AT(pivot), 0, 0, pivot_names},
    [SETTING_BLOCK_TOKENS] = {"block_tokens", COUNT, AT(block_tokens), 0, TOKENS_MAX, NULL},
    [SETTING_LAYER_MIN] = {"layer_min", LAYER, AT(layer_min), 0, LAYERS_MAX, NULL},
    [SETTING_LAYER_MAX] = {"layer_max", LAYER, AT(layer_max), 0, LAYERS_MAX, NULL},
    [SETTING_LAYERS_OBSERVED] = {"layers_observed", COUNT, AT(layers_observed), 1, LAYERS_MAX,
                                 NULL},
    [SETTING_THRESHOLD] = {"threshold", REAL, AT(threshold), 0, 1e6, NULL},
    [SETTING_TWO_PASS] = {"two_pass", SWITCH, AT(two_pass), 0, 1, NULL},
};

/* ---- fields of a struct ---- */

static void put_u32(kvf_prune_settings *s, const row *r, uint32_t value)
{
    memcpy((char *)s + r->offset, &value, sizeof value);
}

static uint32_t get_u32(const kvf_prune_settings *s, const row *r)
{
    uint32_t value;
    memcpy(&value, (const char *)s + r->offset, sizeof value);
    return value;
}

static void put_float(kvf_prune_settings *s, const row *r, size_t index, double value)
{
    float f = (float)value;
    memcpy((char *)s + r->offset + index * sizeof f, &f, sizeof f);
}

static double get_float(const kvf_prune_settings *s, const row *r, size_t index)
{
    float f;
    memcpy(&f, (const char *)s + r->offset + index * sizeof f, sizeof f);
    return (double)f;
}

/* Enums by their own type: their size is the compiler's. */
static void put_name(kvf_prune_settings *s, cli_setting setting, int value)
{
    if (setting == SETTING_POOL)
        s->pool = (kvf_pool_kind)value;
    else if (setting == SETTING_GROUP_REDUCE)
        s->group_reduce = (kvf_group_reduce)value;
    else
        s->pivot = (kvf_pivot)value;
}

static int get_name(const kvf_prune_settings *s, cli_setting setting)
{
    return setting == SETTING_POOL           ? (int)s->pool
           : setting == SETTING_GROUP_REDUCE ? (int)s->group_reduce
                                             : (int)s->pivot;
}

static bool in_range(const row *r, double value)
{
    /* 0 is no share; comparisons with NaN are false. */
    return r->kind == SHARE ? (float)value > 0.0f && value <= 1.0
                            : value >= r->least && value <= r->most;
}

const char *cli_setting_name(cli_setting setting)
{
    return rows[setting].name;
}

const char *cli_setting_range(cli_setting setting, char text[96])
{
    const row *r = &rows[setting];
    int used = 0;
    switch (r->kind) {
    case COUNT:
    case LAYER:
        snprintf(text, 96, "a whole number from %.0f to %.0f%s", r->least, r->most,
                 r->kind == LAYER ? ", or auto" : "");
        break;
    case SHARE:
        snprintf(text, 96, "a number above 0, at most 1");
        break;
    case REAL:
        snprintf(text, 96, "a number from %g to %g", r->least, r->most);
        break;
    case SWITCH:
        snprintf(text, 96, "0 or 1");
        break;
    case THREE:
        snprintf(text, 96, "three numbers from %g to %g", r->least, r->most);
        break;
    case NAME:
        for (const cli_named *n = r->names; n->name; n++)
            used += snprintf(text + used, 96 - (size_t)used, "%s%s",
                             n == r->names ? ""
                             : n[1].name   ? ", "
                                           : " or ",
                             n->name);
        break;
    }
    return text;
}

/* ---- text ---- */

static bool parse_real(const char *text, const char **end, double *out)
{
    char *after = NULL;
    errno = 0;
    *out = isspace((unsigned char)text[0]) ? NAN : strtod(text, &after);
    *end = after ? after : text;
    return after && after != text && errno == 0;
}

static bool parse_count(const char *text, const row *r, uint32_t *out)
{
    char *end = NULL;
    errno = 0;
    unsigned long long value = isdigit((unsigned char)text[0]) ? strtoull(text, &end, 10) : 0;
    if (!end || *end || errno || value > UINT32_MAX || !in_range(r, (double)value))
        return false;
    *out = (uint32_t)value;
    return true;
}

static bool parse_three(const char *text, const row *r, kvf_prune_settings *to)
{
    for (size_t i = 0; i < 3; i++) {
        double value;
        const char *end;
        if (!parse_real(text, &end, &value) || !in_range(r, value) || *end != (i < 2 ? ',' : '\0'))
            return false;
        put_float(to, r, i, value);
        text = end + 1;
    }
    return true;
}

static bool parse_named(cli_setting setting, const char *text, kvf_prune_settings *to)
{
    for (const cli_named *n = rows[setting].names; n->name; n++)
        if (strcmp(n->name, text) == 0) {
            put_name(to, setting, n->value);
            return true;
        }
    return false;
}

bool cli_setting_parse(cli_setting setting, const char *text, cli_prune_values *out)
{
    const row *r = &rows[setting];
    uint32_t count = KVF_PRUNE_LAYER_AUTO;
    const char *end;
    double value;
    bool fine = false;
    switch (r->kind) {
    case LAYER:
    case COUNT:
    case SWITCH:
        fine = (r->kind == LAYER && strcmp(text, "auto") == 0) || parse_count(text, r, &count);
        if (fine)
            put_u32(&out->settings, r, count);
        break;
    case SHARE:
    case REAL:
        fine = parse_real(text, &end, &value) && !*end && in_range(r, value);
        if (fine)
            put_float(&out->settings, r, 0, value);
        break;
    case NAME:
        fine = parse_named(setting, text, &out->settings);
        break;
    case THREE:
        fine = parse_three(text, r, &out->settings);
        break;
    }
    if (fine)
        out->given |= SETTING_BIT(setting);
    return fine;
}

bool cli_setting_assign(const cli_option *option, const char *text, cli_prune_values *out)
{
    const char *names[SETTING_COUNT + 1], *equals = strchr(text, '=');
    char name[32], range[96];
    snprintf(name, sizeof name, "%.*s", (int)strcspn(text, "="), text);
    for (unsigned s = 0; s < SETTING_COUNT; s++) {
        names[s] = rows[s].name;
        if (!equals || strcmp(name, rows[s].name) != 0)
            continue;
        if (cli_setting_parse((cli_setting)s, equals + 1, out))
            return true;
        fprintf(stderr, "kvferry: --%s %s is '%s'; give %s\n", option->name, name, equals + 1,
                cli_setting_range((cli_setting)s, range));
        return false;
    }
    names[SETTING_COUNT] = NULL;
    if (!equals) {
        fprintf(stderr, "kvferry: --%s is '%s'; give NAME=VALUE\n", option->name, text);
        return false;
    }
    const char *near = cli_suggest(name, names);
    fprintf(stderr, "kvferry: --%s: there is no setting '%s'", option->name, name);
    fprintf(stderr, near ? "; did you mean '%s'?\n" : "; see kvferry run --prune help\n", near);
    return false;
}

const char *cli_setting_show(cli_setting setting, const kvf_prune_settings *s, char text[64])
{
    const row *r = &rows[setting];
    switch (r->kind) {
    case LAYER:
    case COUNT:
    case SWITCH:
        if (r->kind == LAYER && get_u32(s, r) == KVF_PRUNE_LAYER_AUTO)
            snprintf(text, 64, "auto");
        else
            snprintf(text, 64, "%u", get_u32(s, r));
        break;
    case SHARE:
    case REAL:
        snprintf(text, 64, "%.6g", get_float(s, r, 0));
        break;
    case NAME:
        snprintf(text, 64, "%s", cli_name_of(r->names, get_name(s, setting)));
        break;
    case THREE:
        snprintf(text, 64, "%.6g,%.6g,%.6g", get_float(s, r, 0), get_float(s, r, 1),
                 get_float(s, r, 2));
        break;
    }
    return text;
}

void cli_settings_apply(const cli_prune_values *values, kvf_prune_settings *to)
{
    for (unsigned i = 0; i < SETTING_COUNT; i++) {
        const cli_setting s = (cli_setting)i;
        if (!(values->given & SETTING_BIT(s)))
            continue;
        if (rows[s].kind == NAME)
            put_name(to, s, get_name(&values->settings, s));
        else
            memcpy((char *)to + rows[s].offset, (const char *)&values->settings + rows[s].offset,
                   rows[s].kind == THREE ? 3 * sizeof(float) : sizeof(uint32_t));
    }
}

/* ---- JSON ---- */

void cli_settings_write(cli_json *json, const char *key, const kvf_prune_settings *s, uint32_t mask)
{
    char text[64];
    cli_json_object(json, key);
    for (unsigned i = 0; i < SETTING_COUNT; i++) {
        const row *r = &rows[i];
        if (!(mask & SETTING_BIT(i)))
            continue;
        if (r->kind == COUNT || r->kind == SWITCH ||
            (r->kind == LAYER && get_u32(s, r) != KVF_PRUNE_LAYER_AUTO)) {
            cli_json_integer(json, r->name, get_u32(s, r));
        } else if (r->kind == SHARE || r->kind == REAL) {
            /* Shares are floats: as short as tells them apart, not the double behind them. */
            snprintf(text, sizeof text, "%.7g", get_float(s, r, 0));
            cli_json_real(json, r->name, strtod(text, NULL));
        } else if (r->kind == THREE) {
            cli_json_array(json, r->name);
            for (size_t k = 0; k < 3; k++) {
                snprintf(text, sizeof text, "%.7g", get_float(s, r, k));
                cli_json_real(json, NULL, strtod(text, NULL));
            }
            cli_json_end(json, ']');
        } else {
            cli_json_text(json, r->name, cli_setting_show((cli_setting)i, s, text));
        }
    }
    cli_json_end(json, '}');
}

/* A member as the text that the command line would have. @return false if its type is wrong */
static bool member_text(const row *r, const json_value *member, char text[64])
{
    text[0] = '\0';
    if (r->kind == NAME || (r->kind == LAYER && member->kind == JSON_STRING)) {
        if (member->kind != JSON_STRING || member->size >= 64)
            return false;
        snprintf(text, 64, "%s", member->as.string);
        return true;
    }
    if (r->kind == COUNT || r->kind == SWITCH || r->kind == LAYER) {
        if (member->kind == JSON_INTEGER)
            snprintf(text, 64, "%llu", (unsigned long long)member->as.integer);
        return member->kind == JSON_INTEGER;
    }
    if (r->kind != THREE) {
        if (json_is_number(member))
            snprintf(text, 64, "%.17g", json_number(member));
        return json_is_number(member);
    }
    int used = 0;
    if (member->kind != JSON_ARRAY || member->size != 3)
        return false;
    for (const json_value *v = json_first(member); v; v = json_next(member, v)) {
        if (!json_is_number(v))
            return false;
        used += snprintf(text + used, 64 - (size_t)used, "%s%.9g", used ? "," : "", json_number(v));
    }
    return true;
}

kvf_status cli_settings_read(const json_value *object, const char *what, cli_prune_values *out,
                             kvf_error *error)
{
    const char *names[SETTING_COUNT + 1] = {NULL};
    char text[64], range[96], shown[48];
    for (unsigned i = 0; i < SETTING_COUNT; i++)
        names[i] = rows[i].name;
    if (object->kind != JSON_OBJECT)
        return model_fail(error, KVF_CORRUPT, "%s is %s; it must be an object", what,
                          json_kind_name(object));
    const json_value *unknown = json_unknown_key(object, names);
    if (unknown)
        return model_fail(error, KVF_CORRUPT, "%s.%.40s is no setting of pruning", what,
                          unknown->key);
    for (unsigned i = 0; i < SETTING_COUNT; i++) {
        const json_value *member = json_get(object, names[i]);
        if (member &&
            (!member_text(&rows[i], member, text) || !cli_setting_parse((cli_setting)i, text, out)))
            return model_fail(error, KVF_CORRUPT, "%s.%s is %s; it must be %s", what, names[i],
                              json_show(member, shown, sizeof shown),
                              cli_setting_range((cli_setting)i, range));
    }
    return KVF_OK;
}

/* ---- policies ---- */

uint32_t cli_settings_of(const char *policy)
{
    const kvf_prune_policy *known = kvf_prune_policy_find(policy);
    uint32_t mask = 0;
    for (unsigned s = 0; s < SETTING_COUNT; s++)
        if (kvf_prune_policy_takes(known, rows[s].name))
            mask |= SETTING_BIT(s);
    return mask;
}

#define LISTING_INDENT  15
#define LISTING_COLUMNS 95

/* Words one after the other, in lines behind an indent. */
typedef struct listing {
    FILE *file;
    int column; /* 0 = a line begins */
} listing;

static void put_word(listing *l, const char *word, int size)
{
    if (l->column > 0 && l->column + 1 + size > LISTING_COLUMNS) {
        fputs("\n", l->file);
        l->column = 0;
    }
    if (l->column == 0)
        l->column = fprintf(l->file, "%*s", LISTING_INDENT, "");
    else
        l->column += fprintf(l->file, " ");
    l->column += fprintf(l->file, "%.*s", size, word);
}

static void put_source(listing *l, const char *name, const char *source)
{
    l->column = fprintf(l->file, "\n  %-*s", LISTING_INDENT - 3, name);
    while (source && *source) {
        const size_t size = strcspn(source, " ");
        put_word(l, source, (int)size);
        source += size + strspn(source + size, " ");
    }
    fputs("\n", l->file);
    l->column = 0;
}

/* Of a share and a number of tokens, the one that counts is shown. */
static bool is_shown(cli_setting setting, const kvf_prune_settings *s)
{
    switch (setting) {
    case SETTING_KEEP:
        return s->keep_tokens == 0;
    case SETTING_KEEP_TOKENS:
        return s->keep_tokens != 0;
    case SETTING_PROPAGATE:
        return s->propagate_tokens == 0;
    case SETTING_PROPAGATE_TOKENS:
        return s->propagate_tokens != 0;
    default:
        return true;
    }
}

void cli_policies_print(FILE *file)
{
    const kvf_prune_policy *policy;
    fputs("Policies of --prune, what they are from, and the settings that they look at with their "
          "defaults.\nA setting that has no option of its own is given with --prune-set "
          "NAME=VALUE.\n",
          file);
    for (uint32_t i = 0; (policy = kvf_prune_policy_at(i)) != NULL; i++) {
        kvf_prune_config config;
        listing l = {.file = file};
        const uint32_t mask = cli_settings_of(policy->name);
        kvf_prune_config_init(&config, policy);
        put_source(&l, policy->name, policy->source);
        for (unsigned s = 0; s < SETTING_COUNT; s++) {
            char value[64], item[112];
            if (!(mask & SETTING_BIT(s)) || !is_shown((cli_setting)s, &config.settings))
                continue;
            const int size = snprintf(item, sizeof item, "%s=%s", rows[s].name,
                                      cli_setting_show((cli_setting)s, &config.settings, value));
            put_word(&l, item, size);
        }
        if (l.column > 0)
            fputs("\n", file);
    }
}

const kvf_prune_policy *cli_policy_find(const cli_option *option, const char *name)
{
    const kvf_prune_policy *policy = kvf_prune_policy_find(name);
    const char *names[64];
    size_t count = 0;
    if (policy)
        return policy;
    for (const kvf_prune_policy *p; count < 63 && (p = kvf_prune_policy_at((uint32_t)count));)
        names[count++] = p->name;
    names[count] = NULL;
    const char *near = cli_suggest(name, names);
    fprintf(stderr, "kvferry: --%s is '%s'; give ", option->name, name);
    for (size_t i = 0; i < count; i++)
        fprintf(stderr, "%s%s", i == 0 ? "" : i + 1 == count ? " or " : ", ", names[i]);
    fprintf(stderr, near ? " (did you mean '%s'?)\n" : "\n", near);
    return NULL;
}

const char *cli_retention_name(kvf_retention value)
{
    return cli_name_of(cli_retention_names, (int)value);
}

const char *cli_eviction_name(kvf_eviction value)
{
    return cli_name_of(cli_eviction_names, (int)value);
}

const char *cli_pool_name(kvf_pool_kind value)
{
    return cli_name_of(pool_names, (int)value);
}
