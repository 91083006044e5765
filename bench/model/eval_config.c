/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Words of a configuration; see eval_config.h.
 */

#include "eval_config.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <kvferry/setting.h>

static void set_choice(kvf_cache_config *cc, kvf_select_fn choose, void *user)
{
    cc->select = KVF_SELECT_CUSTOM;
    cc->select_fn = choose;
    cc->select_user = user;
}

/* @return false: it is none of those that are besides the settings */
static bool set_extra(kvf_cache_config *cc, eval_extras *x, const char *word, const char *value)
{
    if (strcmp(word, "shuffle") == 0) {
        set_choice(cc, eval_shuffle_choose, &x->shuffle);
    } else if (strcmp(word, "adaptive") == 0) {
        set_choice(cc, eval_adaptive_choose, &x->adaptive);
        x->adaptive.floor = strtof(value, NULL);
    } else if (strcmp(word, "window") == 0) {
        x->adaptive.knows_window = true;
    } else if (strcmp(word, "rest") == 0) {
        x->has_rest = true;
        x->rest.is_exact = strcmp(value, "keys") == 0;
    } else if (strcmp(word, "from") == 0) {
        x->rest.first_layer = (uint32_t)strtoul(value, NULL, 10);
    } else {
        return false;
    }
    return true;
}

static kvf_status set_field(kvf_cache_config *cc, eval_extras *x, char *word, kvf_error *error)
{
    char *value = strchr(word, '=');
    const kvf_setting *s;
    if (!value)
        return model_fail(error, KVF_INVALID, "'%s' is not FIELD=VALUE", word);
    *value++ = '\0';
    if (set_extra(cc, x, word, value)) {
        const size_t used = strlen(x->words);
        snprintf(x->words + used, sizeof x->words - used, " %s=%s", word, value);
        return KVF_OK;
    }
    for (uint32_t i = 0; (s = kvf_cache_setting(i)) != NULL; i++)
        if (strcmp(s->name, word) == 0)
            return kvf_setting_parse(s, value, cc)
                       ? KVF_OK
                       : model_fail(error, KVF_INVALID, "%s cannot be %s", word, value);
    return model_fail(error, KVF_INVALID, "a cache has no setting %s", word);
}

kvf_status eval_config_read(char *words, kvf_cache_config *cc, eval_extras *x, kvf_error *error)
{
    for (char *rest = NULL, *word = strtok_r(words, " ", &rest); word;
         word = strtok_r(NULL, " ", &rest))
        KVF_TRY(set_field(cc, x, word, error));
    if (cc->select_user == &x->adaptive) {
        x->adaptive.extra = cc->budget_tokens / cc->page_size;
        cc->budget_tokens *= 2; /* room for heads that get more; the total stays */
    }
    return KVF_OK;
}
