/* SPDX-License-Identifier: Apache-2.0 */

/* See the header. The first half translates, the second half matches. */

#include "regex_split.h"

#include <string.h>

/* White_Space; see utf8_is_space. Usable inside and outside brackets. */
#define SPACES                                                                                     \
    "\\x{9}-\\x{d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}"    \
    "\\x{205f}\\x{3000}"

/* ---- translation ---- */

typedef struct regex_translation {
    const char *pattern;
    size_t size;
    size_t at;
    bool in_brackets;
    kvf_text out;
    kvf_error *error;
} regex_translation;

static kvf_status refuse(const regex_translation *t, const char *what)
{
    return model_fail(t->error, KVF_UNSUPPORTED,
                      "tokenizer.json: pre_tokenizer: the pattern \"%.120s\" has %s at byte %zu, "
                      "which is not supported",
                      t->pattern, what, t->at);
}

static kvf_status emit(regex_translation *t, const char *text)
{
    return kvf_text_append(&t->out, text, strlen(text), t->error);
}

static kvf_status copy(regex_translation *t, size_t count)
{
    kvf_status status = kvf_text_append(&t->out, t->pattern + t->at, count, t->error);
    t->at += count;
    return status;
}

static char ahead(const regex_translation *t, size_t distance)
{
    return t->size - t->at > distance ? t->pattern[t->at + distance] : '\0';
}

/* At \p or \P: one or two letters of a general category in braces. */
static kvf_status translate_property(regex_translation *t)
{
    size_t letters = 0;
    while (letters < 3 && ahead(t, 3 + letters) != '}' && ahead(t, 3 + letters) != '\0')
        letters++;
    bool known = ahead(t, 2) == '{' && (letters == 1 || letters == 2) &&
                 strchr("LMNPSZ", ahead(t, 3)) &&
                 (letters == 1 || strchr("ulmotcdefkis", ahead(t, 4)));
    return known ? copy(t, 4 + letters) : refuse(t, "a property other than a general category");
}

static kvf_status translate_escape(regex_translation *t)
{
    char c = ahead(t, 1);
    if (c == 'p' || c == 'P')
        return translate_property(t);
    if (c == 's' || c == 'd' || (c == 'S' && !t->in_brackets)) {
        t->at += 2;
        if (c == 'd')
            return emit(t, "\\p{Nd}");
        if (c == 'S')
            return emit(t, "[^" SPACES "]");
        return emit(t, t->in_brackets ? SPACES : "[" SPACES "]");
    }
    if (c == 'v') { /* a vertical tab there, any vertical space here */
        t->at += 2;
        return emit(t, "\\x{b}");
    }
    if (c != '\0' && strchr("rntf.*+?()[]{}|^$\\/-&#'\"!,:;<=>@_`~% ", c))
        return copy(t, 2);
    return refuse(t, "an escape");
}

/* At a brace: {n}, {n,} or {n,m}, neither lazy nor possessive, which the engines read differently.
 */
static kvf_status translate_repeat(regex_translation *t)
{
    size_t length = 1;
    size_t digits = 0;
    size_t commas = 0;
    for (; ahead(t, length) != '}'; length++) {
        char c = ahead(t, length);
        commas += c == ',';
        digits += c >= '0' && c <= '9' && commas == 0;
        if ((c != ',' && (c < '0' || c > '9')) || commas > 1 || digits == 0)
            return refuse(t, "a brace that is no {n,m}");
    }
    char after = ahead(t, length + 1);
    if (digits == 0 || after == '+' || after == '?')
        return refuse(t, "a brace that is no plain {n,m}");
    return copy(t, length + 1);
}

static kvf_status translate_group(regex_translation *t)
{
    if (ahead(t, 1) != '?')
        return copy(t, 1);
    if (ahead(t, 2) != '\0' && strchr(":=!>", ahead(t, 2)))
        return copy(t, 3);
    if (ahead(t, 2) == 'i' && ahead(t, 3) == ':')
        return copy(t, 4);
    return refuse(t, "a group other than (?:, (?i:, (?=, (?! and (?>");
}

static kvf_status translate_outside(regex_translation *t)
{
    switch (ahead(t, 0)) {
    case '\\':
        return translate_escape(t);
    case '{':
        return translate_repeat(t);
    case '(':
        return ahead(t, 1) == '*' ? refuse(t, "a verb") : translate_group(t);
    case '.':
    case '^':
    case '$':
        return refuse(t, "one of . ^ $");
    case '[':
        t->in_brackets = true;
        if (ahead(t, 1) == ']' || (ahead(t, 1) == '^' && ahead(t, 2) == ']'))
            return refuse(t, "an empty class");
        return copy(t, ahead(t, 1) == '^' ? 2 : 1);
    default:
        return copy(t, 1);
    }
}

static kvf_status translate_inside(regex_translation *t)
{
    char c = ahead(t, 0);
    if (c == '\\')
        return translate_escape(t);
    if (c == '[' || (c == '&' && ahead(t, 1) == '&'))
        return refuse(t, "a class within a class");
    if (c == ']')
        t->in_brackets = false;
    return copy(t, 1);
}

static kvf_status translate(regex_translation *t)
{
    KVF_TRY(emit(t, ""));
    while (t->at < t->size) {
        if (t->pattern[t->at] == '\0')
            return refuse(t, "a zero byte");
        KVF_TRY(t->in_brackets ? translate_inside(t) : translate_outside(t));
    }
    return KVF_OK;
}

/* ---- matching ---- */

struct regex_scan {
    pcre2_match_data *data;
    pcre2_match_context *limits;
};

static kvf_status compile(const char *pattern, size_t size, pcre2_code **out, kvf_error *error)
{
    int code = 0;
    PCRE2_SIZE offset = 0;
    pcre2_compile_context *context = pcre2_compile_context_create(NULL);
    if (!context)
        return model_out_of_memory(error, 0, "a regular expression");
    pcre2_set_parens_nest_limit(context, 64);
    *out = pcre2_compile((PCRE2_SPTR)pattern, size, PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C,
                         &code, &offset, context);
    pcre2_compile_context_free(context);
    if (!*out) {
        PCRE2_UCHAR reason[128] = "";
        pcre2_get_error_message(code, reason, sizeof reason);
        if (code == PCRE2_ERROR_HEAP_FAILED)
            return model_out_of_memory(error, 0, "a regular expression");
        return model_fail(
            error, KVF_CORRUPT,
            "tokenizer.json: pre_tokenizer: the pattern \"%.120s\" does not compile: %s "
            "(byte %zu)",
            pattern, (const char *)reason, (size_t)offset);
    }
    /* Faster where code may be generated; the interpreter gives the same matches elsewhere. */
    (void)pcre2_jit_compile(*out, PCRE2_JIT_COMPLETE);
    return KVF_OK;
}

kvf_status regex_create(const char *pattern, size_t size, pcre2_code **out, kvf_error *error)
{
    regex_translation t = {.pattern = pattern, .size = size, .error = error};
    kvf_status status = translate(&t);
    if (status == KVF_OK)
        status = compile(t.out.bytes, t.out.size, out, error);
    kvf_text_free(&t.out);
    return status;
}

kvf_status regex_scan_create(regex_scan **out, kvf_error *error)
{
    regex_scan *scan = model_alloc_zero(1, sizeof *scan);
    if (!scan)
        return model_out_of_memory(error, sizeof *scan, "a regular expression's match");
    scan->data = pcre2_match_data_create(1, NULL);
    scan->limits = pcre2_match_context_create(NULL);
    if (!scan->data || !scan->limits) {
        regex_scan_destroy(scan);
        return model_out_of_memory(error, 0, "a regular expression's match");
    }
    *out = scan;
    return KVF_OK;
}

void regex_scan_destroy(regex_scan *scan)
{
    if (!scan)
        return;
    pcre2_match_context_free(scan->limits);
    pcre2_match_data_free(scan->data);
    model_free(scan);
}

/*
 * Steps that one match may take. A run of a million letters is legitimate and takes a few steps per
 * character; a pattern that takes exponentially many must give up within a second.
 */
static uint32_t step_limit(size_t size)
{
    const uint32_t least = 10000000;
    return size > (UINT32_MAX - least) / 16 ? UINT32_MAX : least + (uint32_t)size * 16;
}

kvf_status regex_find(const pcre2_code *pattern, regex_scan *scan, const char *text, size_t size,
                      size_t from, size_t *start, size_t *end, kvf_error *error)
{
    *start = *end = size;
    pcre2_set_match_limit(scan->limits, step_limit(size - from));
    pcre2_set_depth_limit(scan->limits, step_limit(size - from));
    uint32_t options = PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY;
    int found =
        pcre2_match(pattern, (PCRE2_SPTR)text, size, from, options, scan->data, scan->limits);
    if (found == PCRE2_ERROR_JIT_STACKLIMIT)
        found = pcre2_match(pattern, (PCRE2_SPTR)text, size, from, options | PCRE2_NO_JIT,
                            scan->data, scan->limits);
    if (found == PCRE2_ERROR_NOMATCH)
        return KVF_OK;
    if (found == PCRE2_ERROR_NOMEMORY || found == PCRE2_ERROR_HEAPLIMIT)
        return model_out_of_memory(error, size, "matching a regular expression");
    if (found < 0) {
        PCRE2_UCHAR reason[128] = "";
        pcre2_get_error_message(found, reason, sizeof reason);
        return model_fail(error, KVF_INVALID, "the pre-tokenizer's pattern gave up at byte %zu: %s",
                          from, (const char *)reason);
    }
    const PCRE2_SIZE *offsets = pcre2_get_ovector_pointer(scan->data);
    *start = offsets[0];
    *end = offsets[1];
    return KVF_OK;
}
