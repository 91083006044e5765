/* SPDX-License-Identifier: Apache-2.0 */

/* Settings of pruning that were given; see the header. */

#include "prune_settings.h"

#include <stdlib.h>
#include <string.h>

#include "common/text.h"

#define ROWS_MAX 32u

/* Whether a row is a policy's, not one of the configuration around it. */
static bool is_of_policy(const kvf_setting *s)
{
    const size_t first = offsetof(kvf_prune_config, settings);
    return s->offset >= first && s->offset < first + sizeof(kvf_prune_settings);
}

/* The names of the rows of policies. @return how many */
static uint32_t names_of_policies(const char *names[ROWS_MAX + 1])
{
    const kvf_setting *s;
    uint32_t count = 0;
    for (uint32_t i = 0; (s = kvf_prune_setting(i)) != NULL; i++)
        if (is_of_policy(s))
            names[count++] = s->name;
    names[count] = NULL;
    return count;
}

uint32_t cli_setting_bit(const char *field)
{
    const kvf_setting *s;
    for (uint32_t i = 0; (s = kvf_prune_setting(i)) != NULL; i++)
        if (strcmp(s->name, field) == 0)
            return UINT32_C(1) << i;
    abort(); /* the caller knows the fields */
}

bool cli_setting_parse(const kvf_setting *setting, const char *text, cli_prune_values *out)
{
    if (!kvf_setting_parse(setting, text, &out->config))
        return false;
    out->given |= cli_setting_bit(setting->name);
    return true;
}

bool cli_setting_assign(const cli_option *option, const char *text, void *values)
{
    const char *names[ROWS_MAX + 1], *equals = strchr(text, '=');
    const kvf_setting *s;
    char name[32], range[128];
    if (!equals)
        return cli_refuse(option, text, "NAME=VALUE");
    snprintf(name, sizeof name, "%.*s", (int)(equals - text), text);
    for (uint32_t i = 0; (s = kvf_prune_setting(i)) != NULL; i++) {
        if (!is_of_policy(s) || strcmp(name, s->name) != 0)
            continue;
        if (cli_setting_parse(s, equals + 1, values))
            return true;
        fprintf(stderr, "kvferry: --%s %s is '%s'; give %s\n", option->is.name, name, equals + 1,
                kvf_setting_range(s, range, sizeof range));
        return false;
    }
    names_of_policies(names);
    const char *near = cli_suggest(name, names);
    fprintf(stderr, "kvferry: --%s: there is no setting '%s'", option->is.name, name);
    fprintf(stderr, near ? "; did you mean '%s'?\n" : "; see kvferry run --prune help\n", near);
    return false;
}

void cli_settings_apply(const cli_prune_values *values, kvf_prune_config *to)
{
    const kvf_setting *s;
    for (uint32_t i = 0; (s = kvf_prune_setting(i)) != NULL; i++)
        if (values->given >> i & 1)
            memcpy((char *)to + s->offset, (const char *)&values->config + s->offset, s->bytes);
}

/* ---- JSON ---- */

void cli_settings_write(cli_json *json, const char *key, const kvf_prune_config *config,
                        uint32_t mask)
{
    const kvf_setting *s;
    cli_json_object(json, key);
    for (uint32_t i = 0; (s = kvf_prune_setting(i)) != NULL; i++)
        if (mask >> i & 1)
            cli_json_setting(json, s->name, s, config);
    cli_json_end(json, '}');
}

/* A member as the text that the command line would have. @return false if its type is wrong */
static bool member_text(const kvf_setting *s, json_t *member, char text[64])
{
    const bool is_text = json_is_string(member) && json_string_length(member) < 64;
    const bool is_real = s->kind == KVF_SETTING_REAL || s->kind == KVF_SETTING_SHARE;
    uint64_t whole;
    int used = 0;
    text[0] = '\0';
    if (s->kind == KVF_SETTING_NAME || (s->special && is_text))
        snprintf(text, 64, "%s", is_text ? json_string_value(member) : "");
    else if (!is_real && json_is_whole(member, JSON_WHOLE_MAX, &whole))
        snprintf(text, 64, "%llu", (unsigned long long)whole);
    else if (is_real && s->count <= 1 && json_is_number(member))
        kvf_format(text, 64, "%.17g", json_number_value(member));
    if (text[0] || s->count <= 1)
        return text[0] != '\0';
    if (json_array_size(member) != s->count)
        return false;
    json_t *v;
    size_t i;
    json_array_foreach (member, i, v) {
        if (!json_is_number(v))
            return false;
        used += kvf_format(text + used, 64 - (size_t)used, "%s%.9g", used ? "," : "",
                           json_number_value(v));
    }
    return true;
}

kvf_status cli_settings_read(json_t *object, const char *what, cli_prune_values *out,
                             kvf_error *error)
{
    const char *names[ROWS_MAX + 1];
    const kvf_setting *s;
    char text[64], range[128], shown[48];
    names_of_policies(names);
    if (!json_is_object(object))
        return model_fail(error, KVF_CORRUPT, "%s is %s; it must be an object", what,
                          json_kind_name(object));
    const char *unknown = json_unknown_key(object, names);
    if (unknown)
        return model_fail(error, KVF_CORRUPT, "%s.%.40s is no setting of pruning", what, unknown);
    for (uint32_t i = 0; (s = kvf_prune_setting(i)) != NULL; i++) {
        json_t *member = is_of_policy(s) ? json_object_get(object, s->name) : NULL;
        if (member && (!member_text(s, member, text) || !cli_setting_parse(s, text, out)))
            return model_fail(error, KVF_CORRUPT, "%s.%s is %s; it must be %s", what, s->name,
                              json_show(member, shown, sizeof shown),
                              kvf_setting_range(s, range, sizeof range));
    }
    return KVF_OK;
}

/* ---- policies ---- */

uint32_t cli_settings_of(const char *policy)
{
    const kvf_prune_policy *known = kvf_prune_policy_find(policy);
    const kvf_setting *s;
    uint32_t mask = 0;
    for (uint32_t i = 0; (s = kvf_prune_setting(i)) != NULL; i++)
        if (is_of_policy(s) && kvf_prune_policy_takes(known, s->name))
            mask |= UINT32_C(1) << i;
    return mask;
}

const kvf_setting *cli_settings_stray(const cli_prune_values *values, uint32_t known)
{
    const kvf_setting *s;
    for (uint32_t i = 0; (s = kvf_prune_setting(i)) != NULL; i++)
        if (is_of_policy(s) && ((values->given & ~known) >> i & 1))
            return s;
    return NULL;
}

/* A share or a number of tokens is shown, whichever counts. */
static uint32_t shown_of(const kvf_prune_settings *s)
{
    return ~(cli_setting_bit(s->keep_tokens ? "keep" : "keep_tokens") |
             cli_setting_bit(s->propagate_tokens ? "propagate" : "propagate_tokens"));
}

void cli_policies_print(FILE *file)
{
    enum { INDENT = 15 };
    const kvf_prune_policy *policy;
    fputs("Policies of --prune, what they are from, and the settings that they look at with their "
          "defaults.\nA setting that has no option of its own is given with --prune-set "
          "NAME=VALUE.\n",
          file);
    for (uint32_t i = 0; (policy = kvf_prune_policy_at(i)) != NULL; i++) {
        kvf_prune_config config;
        const kvf_setting *s;
        int column = fprintf(file, "\n  %-*s", INDENT - 3, policy->name) - 1;
        kvf_prune_config_init(&config, policy);
        cli_print_words(file, INDENT, &column, policy->source);
        const uint32_t mask = cli_settings_of(policy->name) & shown_of(&config.settings);
        column = mask ? 0 : column;
        fputs("\n", file);
        for (uint32_t k = 0; (s = kvf_prune_setting(k)) != NULL; k++) {
            char value[64], item[112];
            if (!(mask >> k & 1))
                continue;
            snprintf(item, sizeof item, "%s=%s", s->name,
                     kvf_setting_show(s, &config, value, sizeof value));
            cli_print_words(file, INDENT, &column, item);
        }
        if (mask)
            fputs("\n", file);
    }
}

const kvf_prune_policy *cli_policy_find(const cli_option *option, const char *name)
{
    const kvf_prune_policy *policy = kvf_prune_policy_find(name), *other;
    const char *names[64] = {NULL};
    cli_option named = *option;
    if (policy)
        return policy;
    for (uint32_t i = 0; i < 63 && (other = kvf_prune_policy_at(i)) != NULL; i++)
        names[i] = other->name;
    named.is.kind = KVF_SETTING_NAME;
    named.is.names = names;
    cli_refuse(&named, name, NULL);
    return NULL;
}
