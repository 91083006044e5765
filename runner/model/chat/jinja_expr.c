/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Expressions, read by precedence and evaluated on the way: or, and, not, comparison, + -, ~,
 * * / // %, signs, members and calls, filters and tests.
 *
 * It knows which operand Python would not evaluate, and reads that one dry. Invariant: while dry,
 * the value is undefined and nothing fails but syntax.
 */

#include "jinja_parts.h"

static jinja_value read_or(jinja_machine *m);
static jinja_value read_primary(jinja_machine *m);
static jinja_value read_postfix(jinja_machine *m, jinja_value value);

static const jinja_value undefined = {0};

/* ---- sums ---- */

static jinja_value add(jinja_machine *m, jinja_value a, jinja_value b)
{
    int64_t sum = 0;
    if (a.kind == JINJA_TEXT && b.kind == JINJA_TEXT)
        return jinja_join(m, a, b);
    if (a.kind == JINJA_INT && b.kind == JINJA_INT) {
        if (__builtin_add_overflow(a.as.integer, b.as.integer, &sum))
            jinja_fail(m, KVF_INVALID, "a sum is too large");
        return jinja_int(sum);
    }
    if (a.kind != JINJA_LIST || b.kind != JINJA_LIST || a.form != b.form || a.form > LIST_TUPLE) {
        jinja_fail(m, KVF_INVALID, "%s and %s cannot be added", jinja_kind_name(a),
                   jinja_kind_name(b));
        return undefined;
    }
    jinja_value list = jinja_list_new(m, a.size + b.size);
    for (size_t i = 0; i < list.size; i++)
        list.as.items[i] = i < a.size ? a.as.items[i] : b.as.items[i - a.size];
    list.form = a.form;
    return list;
}

/* As Python: // and % round down. */
static jinja_value calculate(jinja_machine *m, jinja_value a, const jinja_token *sign,
                             jinja_value b)
{
    int64_t x = a.as.integer, y = b.as.integer, result = 0;
    if (a.kind != JINJA_INT || b.kind != JINJA_INT) {
        jinja_fail(m, KVF_UNSUPPORTED, "'%.*s' between %s and %s is not known here",
                   (int)sign->size, sign->bytes, jinja_kind_name(a), jinja_kind_name(b));
        return undefined;
    }
    bool fails = false;
    if (jinja_is(sign, "-")) {
        fails = __builtin_sub_overflow(x, y, &result);
    } else if (jinja_is(sign, "*")) {
        fails = __builtin_mul_overflow(x, y, &result);
    } else if (y == 0 || (x == INT64_MIN && y == -1)) {
        fails = true;
    } else {
        const int64_t rest = x % y;
        const bool rounds = rest != 0 && (rest < 0) != (y < 0);
        result = jinja_is(sign, "%") ? rest + (rounds ? y : 0) : x / y - rounds;
    }
    if (fails)
        jinja_fail(m, KVF_INVALID, "a division by zero, or a number that is too large");
    return jinja_int(result);
}

/* ---- filters and tests ---- */

/* Without brackets, a test takes the value after it as its argument. */
static bool takes_argument(const jinja_token *token)
{
    static const char *const others[] = {"else", "or", "and", "is", "if", "not", "in", NULL};
    if (token->kind == TOKEN_OPERATOR)
        return jinja_is(token, "[") || jinja_is(token, "{");
    return (token->kind == TOKEN_NAME && !jinja_is_any(token, others)) ||
           token->kind == TOKEN_STRING || token->kind == TOKEN_INT;
}

static jinja_value read_test(jinja_machine *m, jinja_value value)
{
    const bool negates = jinja_accept(m, "not");
    const jinja_token name = *jinja_peek(m, 0);
    jinja_arguments arguments = {.count = 0};
    jinja_next(m);
    if (jinja_accept(m, "(")) {
        jinja_read_arguments(m, &arguments);
    } else if (takes_argument(jinja_peek(m, 0))) {
        arguments.values[0] = read_postfix(m, read_primary(m));
        arguments.count = 1;
    }
    return jinja_is_live(m) ? jinja_bool(jinja_test(m, &name, value, &arguments) != negates)
                            : undefined;
}

static jinja_value read_filters(jinja_machine *m, jinja_value value)
{
    while (m->status == KVF_OK) {
        if (jinja_accept(m, "is")) {
            value = read_test(m, value);
        } else if (jinja_accept(m, "|")) {
            const jinja_token name = *jinja_peek(m, 0);
            jinja_arguments arguments = {.count = 0};
            jinja_next(m);
            if (jinja_accept(m, "("))
                jinja_read_arguments(m, &arguments);
            if (jinja_is_live(m))
                value = jinja_filter(m, &name, value, &arguments);
        } else {
            break;
        }
    }
    return value;
}

/* ---- primaries ---- */

void jinja_read_arguments(jinja_machine *m, jinja_arguments *out)
{
    *out = (jinja_arguments){.count = 0};
    while (m->status == KVF_OK && !jinja_accept(m, ")")) {
        if (out->count == JINJA_ARGUMENTS_MAX) {
            jinja_fail(m, KVF_UNSUPPORTED, "more than %d arguments", JINJA_ARGUMENTS_MAX);
            break;
        }
        if (jinja_peek(m, 0)->kind == TOKEN_NAME && jinja_is(jinja_peek(m, 1), "=")) {
            out->names[out->count] = *jinja_peek(m, 0);
            jinja_next(m);
            jinja_next(m);
        }
        out->values[out->count++] = jinja_expression(m);
        if (!jinja_is(jinja_peek(m, 0), ")"))
            jinja_expect(m, ",");
    }
}

/* @p list and @p item after it. */
static jinja_value append(jinja_machine *m, jinja_value list, jinja_value item)
{
    if (!jinja_is_live(m))
        return undefined;
    jinja_value one = jinja_list_new(m, 1);
    if (one.kind != JINJA_LIST)
        return undefined;
    one.as.items[0] = item;
    return add(m, list, one);
}

/* Items up to @p close, past it, after those of @p list; a comma may be the last. */
static jinja_value read_items(jinja_machine *m, jinja_value list, const char *close)
{
    while (m->status == KVF_OK && !jinja_accept(m, close)) {
        list = append(m, list, jinja_expression(m));
        if (!jinja_is(jinja_peek(m, 0), close))
            jinja_expect(m, ",");
    }
    return list;
}

static jinja_value new_list(jinja_machine *m)
{
    return jinja_is_live(m) ? jinja_list_new(m, 0) : undefined;
}

static jinja_value read_map(jinja_machine *m)
{
    jinja_value map = undefined;
    if (jinja_is_live(m))
        map = jinja_map_new(m);
    while (m->status == KVF_OK && !jinja_accept(m, "}")) {
        const jinja_value by = jinja_expression(m);
        const jinja_value key = map.kind == JINJA_MAP ? jinja_key(m, by) : undefined;
        jinja_expect(m, ":");
        const jinja_value value = jinja_expression(m);
        if (map.kind == JINJA_MAP && key.kind == JINJA_TEXT)
            jinja_map_set(m, map.as.map, key.as.text, key.size, value);
        else if (map.kind == JINJA_MAP)
            jinja_fail(m, KVF_UNSUPPORTED, "a mapping by %s is not known here",
                       jinja_kind_name(by));
        if (!jinja_is(jinja_peek(m, 0), "}"))
            jinja_expect(m, ",");
    }
    return map;
}

/* From after "(" past ")": a value in brackets, or a list. */
static jinja_value read_brackets(jinja_machine *m)
{
    jinja_value tuple = undefined;
    if (jinja_accept(m, ")")) {
        tuple = new_list(m);
        tuple.form = LIST_TUPLE;
        return tuple;
    }
    const jinja_value value = jinja_expression(m);
    if (jinja_accept(m, ",")) {
        tuple = read_items(m, append(m, new_list(m), value), ")");
        tuple.form = LIST_TUPLE;
        return tuple;
    }
    jinja_expect(m, ")");
    return value;
}

static jinja_value read_int(jinja_machine *m, const jinja_token *token)
{
    int64_t value = 0;
    for (size_t i = 0; i < token->size && jinja_is_live(m); i++)
        if (token->bytes[i] < '0' || token->bytes[i] > '9' ||
            __builtin_mul_overflow(value, 10, &value) ||
            __builtin_add_overflow(value, token->bytes[i] - '0', &value))
            jinja_fail(m, KVF_UNSUPPORTED, "the number %.*s is not known here",
                       jinja_shown(token->size), token->bytes);
    return jinja_int(value);
}

static jinja_value read_name(jinja_machine *m, const jinja_token *name)
{
    static const char *const reserved[] = {"if", "else", "elif", "for", "in",
                                           "is", "and",  "or",   "not", NULL};
    if (jinja_is_any(name, reserved)) {
        jinja_fail(m, KVF_CORRUPT, "'%.*s' stands where a value was expected", (int)name->size,
                   name->bytes);
        return undefined;
    }
    const bool truth = jinja_is(name, "true") || jinja_is(name, "True");
    if (truth || jinja_is(name, "false") || jinja_is(name, "False"))
        return jinja_bool(truth);
    if (jinja_is(name, "none") || jinja_is(name, "None"))
        return jinja_none();
    const jinja_value *variable;
    if (!jinja_accept(m, "(")) {
        variable = jinja_variable_find(m, name->bytes, name->size);
        return variable ? *variable : jinja_function_value(m, name);
    }
    jinja_arguments arguments;
    jinja_read_arguments(m, &arguments);
    if (!jinja_is_live(m))
        return undefined;
    variable = jinja_variable_find(m, name->bytes, name->size);
    return variable && variable->kind == JINJA_MACRO && variable->as.macro != JINJA_BUILT_IN
               ? jinja_macro_call(m, variable->as.macro, &arguments)
               : jinja_function(m, name, &arguments);
}

static jinja_value read_primary(jinja_machine *m)
{
    const jinja_token token = *jinja_peek(m, 0);
    if (token.kind == TOKEN_END || token.kind == TOKEN_TAG_END || token.kind == TOKEN_OUT_END) {
        jinja_fail(m, KVF_CORRUPT, "a value is missing");
        return undefined;
    }
    jinja_next(m);
    if (token.kind == TOKEN_NAME)
        return read_name(m, &token);
    if (token.kind == TOKEN_INT)
        return read_int(m, &token);
    if (token.kind == TOKEN_STRING) {
        jinja_value text = jinja_text(token.bytes, token.size);
        for (; jinja_peek(m, 0)->kind == TOKEN_STRING; jinja_next(m))
            text = jinja_join(m, text, jinja_text(jinja_peek(m, 0)->bytes, jinja_peek(m, 0)->size));
        return text;
    }
    if (jinja_is(&token, "("))
        return read_brackets(m);
    if (jinja_is(&token, "["))
        return read_items(m, new_list(m), "]");
    if (jinja_is(&token, "{"))
        return read_map(m);
    jinja_fail(m, KVF_CORRUPT, "'%.*s' stands where a value was expected", (int)token.size,
               token.bytes);
    return undefined;
}

/* ---- members and calls ---- */

/* From after "[" past "]". */
static jinja_value read_item(jinja_machine *m, jinja_value value)
{
    jinja_value bounds[3] = {{0}};
    uint32_t colons = 0;
    while (m->status == KVF_OK && !jinja_accept(m, "]")) {
        if (jinja_accept(m, ":")) {
            if (++colons > 2)
                jinja_fail(m, KVF_CORRUPT, "a slice has too many parts");
        } else {
            bounds[colons] = jinja_expression(m);
            if (!jinja_is(jinja_peek(m, 0), ":") && !jinja_is(jinja_peek(m, 0), "]"))
                jinja_expect(m, "]");
        }
    }
    if (!jinja_is_live(m))
        return undefined;
    return colons ? jinja_slice(m, value, bounds) : jinja_item(m, value, bounds[0]);
}

static jinja_value read_postfix(jinja_machine *m, jinja_value value)
{
    while (m->status == KVF_OK) {
        if (jinja_accept(m, "[")) {
            value = read_item(m, value);
        } else if (jinja_accept(m, ".")) {
            const jinja_token name = *jinja_peek(m, 0);
            if (name.kind != TOKEN_NAME && name.kind != TOKEN_INT)
                jinja_fail(m, KVF_CORRUPT, "a name is missing after '.'");
            jinja_next(m);
            if (name.kind == TOKEN_NAME && jinja_accept(m, "(")) {
                jinja_arguments arguments;
                jinja_read_arguments(m, &arguments);
                value = jinja_is_live(m) ? jinja_method(m, value, &name, &arguments) : undefined;
            } else if (!jinja_is_live(m)) {
                value = undefined;
            } else {
                value = name.kind == TOKEN_INT ? jinja_item(m, value, read_int(m, &name))
                                               : jinja_member(m, value, name.bytes, name.size);
            }
        } else {
            break;
        }
    }
    return value;
}

static jinja_value read_unary(jinja_machine *m, bool filters)
{
    jinja_value value = undefined;
    if (!jinja_enter(m))
        return value;
    const jinja_token sign = *jinja_peek(m, 0);
    if (jinja_accept(m, "-") || jinja_accept(m, "+")) {
        value = read_unary(m, false);
        if (jinja_is_live(m) && jinja_is(&sign, "-"))
            value = calculate(m, jinja_int(0), &sign, value);
    } else {
        value = read_primary(m);
    }
    value = read_postfix(m, value);
    if (filters)
        value = read_filters(m, value);
    jinja_leave(m);
    return value;
}

/* ---- operators ---- */

static jinja_value read_product(jinja_machine *m)
{
    static const char *const signs[] = {"*", "//", "%", "/", "**", NULL};
    jinja_value value = read_unary(m, true);
    while (jinja_is_any(jinja_peek(m, 0), signs)) {
        const jinja_token sign = *jinja_peek(m, 0);
        if (jinja_is(&sign, "/") || jinja_is(&sign, "**"))
            jinja_fail(m, KVF_UNSUPPORTED, "'%.*s' is not known here", (int)sign.size, sign.bytes);
        jinja_next(m);
        const jinja_value right = read_unary(m, true);
        if (jinja_is_live(m))
            value = calculate(m, value, &sign, right);
    }
    return value;
}

static jinja_value read_concatenation(jinja_machine *m)
{
    jinja_value value = read_product(m);
    while (jinja_accept(m, "~")) {
        const jinja_value right = read_product(m);
        if (jinja_is_live(m))
            value = jinja_join(m, jinja_string(m, value), jinja_string(m, right));
    }
    return value;
}

static jinja_value read_sum(jinja_machine *m)
{
    jinja_value value = read_concatenation(m);
    while (jinja_is(jinja_peek(m, 0), "+") || jinja_is(jinja_peek(m, 0), "-")) {
        const jinja_token sign = *jinja_peek(m, 0);
        jinja_next(m);
        const jinja_value right = read_concatenation(m);
        if (jinja_is_live(m))
            value = jinja_is(&sign, "+") ? add(m, value, right) : calculate(m, value, &sign, right);
    }
    return value;
}

static bool holds(jinja_machine *m, jinja_value a, const jinja_token *sign, jinja_value b)
{
    if (jinja_is(sign, "in"))
        return jinja_contains(m, a, b);
    if (jinja_is(sign, "=="))
        return jinja_equal(m, a, b);
    if (jinja_is(sign, "!="))
        return !jinja_equal(m, a, b);
    const int order = jinja_compare(m, a, b);
    return jinja_is(sign, "<")    ? order < 0
           : jinja_is(sign, "<=") ? order <= 0
           : jinja_is(sign, ">")  ? order > 0
                                  : order >= 0;
}

/* a < b < c is a < b and b < c, as in Python. */
static jinja_value read_comparison(jinja_machine *m)
{
    static const char *const signs[] = {"==", "!=", "<", "<=", ">", ">=", "in", NULL};
    jinja_value left = read_sum(m), value = left;
    bool all = true;
    while (m->status == KVF_OK) {
        const bool negates = jinja_is(jinja_peek(m, 0), "not") && jinja_is(jinja_peek(m, 1), "in");
        if (negates)
            jinja_next(m);
        const jinja_token sign = *jinja_peek(m, 0);
        if (!jinja_is_any(&sign, signs))
            break;
        jinja_next(m);
        const jinja_value right = read_sum(m);
        if (jinja_is_live(m)) {
            all = all && holds(m, left, &sign, right) != negates;
            value = jinja_bool(all);
        }
        left = right;
    }
    return value;
}

static jinja_value read_not(jinja_machine *m)
{
    if (!jinja_is(jinja_peek(m, 0), "not"))
        return read_comparison(m);
    jinja_value value = undefined;
    if (!jinja_enter(m))
        return value;
    jinja_next(m);
    value = read_not(m);
    jinja_leave(m);
    return jinja_is_live(m) ? jinja_bool(!jinja_truth(value)) : undefined;
}

static jinja_value read_and(jinja_machine *m)
{
    jinja_value value = read_not(m);
    while (jinja_accept(m, "and")) {
        const bool decided = !jinja_truth(value);
        m->dry += decided;
        const jinja_value right = read_not(m);
        m->dry -= decided;
        if (!decided)
            value = right;
    }
    return value;
}

static jinja_value read_or(jinja_machine *m)
{
    jinja_value value = read_and(m);
    while (jinja_accept(m, "or")) {
        const bool decided = jinja_truth(value);
        m->dry += decided;
        const jinja_value right = read_and(m);
        m->dry -= decided;
        if (!decided)
            value = right;
    }
    return value;
}

jinja_value jinja_expression_plain(jinja_machine *m)
{
    return read_or(m);
}

/* `x if condition else y`: the condition stands after x, so x is read dry first. */
jinja_value jinja_expression(jinja_machine *m)
{
    const size_t start = m->at;
    const bool live = jinja_is_live(m);
    jinja_value value = undefined;
    if (!jinja_enter(m))
        return value;
    m->dry++;
    (void)read_or(m);
    m->dry--;
    const bool chooses = jinja_accept(m, "if");
    bool holds_first = true;
    if (chooses)
        holds_first = jinja_truth(read_or(m));
    const size_t behind = m->at;
    if (live && holds_first && m->status == KVF_OK) {
        m->at = start;
        value = read_or(m);
        if (chooses && m->status == KVF_OK)
            m->at = behind;
    }
    if (chooses && jinja_accept(m, "else")) {
        m->dry += holds_first;
        const jinja_value other = jinja_expression(m);
        m->dry -= holds_first;
        if (!holds_first)
            value = other;
    }
    jinja_leave(m);
    return value;
}
