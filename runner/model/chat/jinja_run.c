/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The statements of a template, and what they write. It knows only the values that a statement
 * needs. Invariant: after a statement the token is the one after it, and scope, dryness and loops
 * are as before it.
 */

#include "jinja_parts.h"

#include <string.h>

/* ---- statements ---- */

static const char *run_block(jinja_machine *m, const char *const *ends);

static void write_text(jinja_machine *m, const char *bytes, size_t size)
{
    if (!jinja_is_live(m) || size == 0)
        return;
    jinja_spend(m, size);
    if (m->status != KVF_OK)
        return;
    const kvf_status status = kvf_text_append(m->out, bytes, size, m->error);
    if (status != KVF_OK)
        jinja_fail(m, status, "%zu bytes could not be written", size);
}

/* The output of a block, instead of writing it. */
static jinja_value capture(jinja_machine *m, const char *const *ends)
{
    const size_t start = m->out->size;
    run_block(m, ends);
    const size_t size = m->out->size - start;
    char *bytes = size ? jinja_take(m, size) : NULL;
    if (bytes)
        memcpy(bytes, m->out->bytes + start, size);
    m->out->size = start;
    return bytes ? jinja_text(bytes, size) : jinja_words("");
}

/* From after "if" to after "endif". */
static void run_if(jinja_machine *m)
{
    static const char *const ends[] = {"elif", "else", "endif", NULL};
    bool taken = !jinja_is_live(m);
    const uint32_t dry = m->dry;
    const char *end = "elif";
    while (end && strcmp(end, "endif") != 0 && m->status == KVF_OK) {
        m->dry = dry + taken;
        const bool is_else = strcmp(end, "else") == 0;
        const bool is_true = is_else || jinja_truth(jinja_expression(m));
        jinja_expect_end(m, TOKEN_TAG_END);
        m->dry = dry + (taken || !is_true);
        taken = taken || is_true;
        end = run_block(m, is_else ? ends + 2 : ends);
    }
    m->dry = dry;
    jinja_expect_end(m, TOKEN_TAG_END);
}

/* One name, or several for items that are lists. @return how many */
static size_t read_targets(jinja_machine *m, jinja_token *names, size_t max)
{
    size_t count = 0;
    const bool open = jinja_accept(m, "(");
    do {
        if (count == max)
            jinja_fail(m, KVF_UNSUPPORTED, "more than %zu names of a loop", max);
        else
            names[count++] = jinja_take_name(m);
    } while (m->status == KVF_OK && jinja_accept(m, ","));
    if (open)
        jinja_expect(m, ")");
    return count;
}

typedef struct loop_frame {
    jinja_token names[4];
    size_t name_count;
    size_t body;      /* token where it begins */
    size_t condition; /* the same of its `if`; 0 = none */
    jinja_value list;
    jinja_value info; /* the variable `loop` */
    bool is_through;  /* the body once reached its end */
} loop_frame;

static void bind_targets(jinja_machine *m, const loop_frame *loop, jinja_value item)
{
    if (loop->name_count == 1) {
        jinja_variable_push(m, loop->names[0].bytes, loop->names[0].size, item);
        return;
    }
    if (item.kind != JINJA_LIST || item.size != loop->name_count) {
        jinja_fail(m, KVF_INVALID, "%s is no list of %zu items", jinja_kind_name(item),
                   loop->name_count);
        return;
    }
    for (size_t i = 0; i < item.size; i++)
        jinja_variable_push(m, loop->names[i].bytes, loop->names[i].size, item.as.items[i]);
}

/* Only the items for which the condition of the loop holds. */
static void filter_items(jinja_machine *m, loop_frame *loop, size_t resume)
{
    jinja_value kept = jinja_list_new(m, loop->list.size);
    if (kept.kind != JINJA_LIST)
        return;
    kept.size = 0;
    for (size_t i = 0; i < loop->list.size && m->status == KVF_OK; i++) {
        const size_t variables = m->variable_count;
        bind_targets(m, loop, loop->list.as.items[i]);
        if (m->status == KVF_OK)
            m->at = loop->condition;
        if (jinja_truth(jinja_expression(m)))
            kept.as.items[kept.size++] = loop->list.as.items[i];
        m->variable_count = variables;
    }
    loop->list = kept;
    if (m->status == KVF_OK)
        m->at = resume;
}

static void describe_loop(jinja_machine *m, const loop_frame *loop, size_t i)
{
    const int64_t count = (int64_t)loop->list.size, at = (int64_t)i;
    const jinja_value *items = loop->list.as.items, nothing = {0};
    jinja_map_put(m, loop->info, "index0", jinja_int(at));
    jinja_map_put(m, loop->info, "index", jinja_int(at + 1));
    jinja_map_put(m, loop->info, "revindex0", jinja_int(count - at - 1));
    jinja_map_put(m, loop->info, "revindex", jinja_int(count - at));
    jinja_map_put(m, loop->info, "depth0", jinja_int(0));
    jinja_map_put(m, loop->info, "depth", jinja_int(1));
    jinja_map_put(m, loop->info, "length", jinja_int(count));
    jinja_map_put(m, loop->info, "first", jinja_bool(i == 0));
    jinja_map_put(m, loop->info, "last", jinja_bool(at + 1 == count));
    jinja_map_put(m, loop->info, "previtem", i > 0 ? items[i - 1] : nothing);
    jinja_map_put(m, loop->info, "nextitem", at + 1 < count ? items[i + 1] : nothing);
}

/* The body once for each item. @return the word after the body */
static const char *run_items(jinja_machine *m, loop_frame *loop, const char *const *ends)
{
    const char *end = NULL;
    const size_t scope = m->scope;
    jinja_jump jump = JUMP_NONE;
    loop->info = jinja_map_new(m);
    m->loops++;
    for (size_t i = 0; i < loop->list.size && jump != JUMP_BREAK && m->status == KVF_OK; i++) {
        const size_t variables = m->variable_count;
        m->scope = variables;
        describe_loop(m, loop, i);
        jinja_variable_push(m, "loop", 4, loop->info);
        bind_targets(m, loop, loop->list.as.items[i]);
        if (m->status == KVF_OK)
            m->at = loop->body;
        end = run_block(m, ends);
        jump = m->jump;
        loop->is_through = loop->is_through || jump == JUMP_NONE;
        m->jump = JUMP_NONE;
        m->variable_count = variables;
        m->scope = scope;
    }
    m->loops--;
    return end;
}

/* From after "for" to after "endfor". */
static void run_for(jinja_machine *m)
{
    static const char *const ends[] = {"else", "endfor", NULL};
    loop_frame loop = {0};
    loop.name_count = read_targets(m, loop.names, sizeof loop.names / sizeof *loop.names);
    jinja_expect(m, "in");
    const bool live = jinja_is_live(m);
    const jinja_value over = jinja_expression_plain(m);
    const uint32_t dry = m->dry;
    if (jinja_accept(m, "if")) {
        loop.condition = m->at;
        m->dry++;
        (void)jinja_expression(m);
        m->dry = dry;
    }
    if (jinja_accept(m, "recursive"))
        jinja_fail(m, KVF_UNSUPPORTED, "recursive loops are not known here");
    jinja_expect_end(m, TOKEN_TAG_END);
    loop.body = m->at;
    if (live)
        loop.list = jinja_list_of(m, over);
    if (live && loop.condition)
        filter_items(m, &loop, loop.body);
    const char *end;
    if (live && loop.list.size > 0) {
        end = run_items(m, &loop, ends);
    } else {
        m->dry = dry + 1;
        m->loops++;
        end = run_block(m, ends);
        m->loops--;
        m->dry = dry;
    }
    if (end && strcmp(end, "else") == 0) {
        jinja_expect_end(m, TOKEN_TAG_END);
        m->dry = dry + loop.is_through; /* also after jumps alone, as in Jinja */
        run_block(m, ends + 1);
        m->dry = dry;
    }
    jinja_expect_end(m, TOKEN_TAG_END);
}

/* From after "set". */
static void run_set(jinja_machine *m)
{
    static const char *const ends[] = {"endset", NULL};
    const jinja_token name = jinja_take_name(m);
    jinja_token member = {0};
    if (jinja_accept(m, "."))
        member = jinja_take_name(m);
    jinja_value value;
    if (jinja_accept(m, "=")) {
        value = jinja_expression(m);
        jinja_expect_end(m, TOKEN_TAG_END);
    } else {
        jinja_expect_end(m, TOKEN_TAG_END);
        value = capture(m, ends);
        jinja_expect_end(m, TOKEN_TAG_END);
    }
    if (!jinja_is_live(m))
        return;
    if (!member.size) {
        jinja_variable_set(m, name.bytes, name.size, value);
        return;
    }
    const jinja_value *holder = jinja_variable_find(m, name.bytes, name.size);
    if (!holder || holder->kind != JINJA_MAP || !holder->as.map->is_namespace)
        jinja_fail(m, KVF_INVALID, "members can be set of a namespace only");
    else
        jinja_map_set(m, holder->as.map, member.bytes, member.size, value);
}

/* ---- macros ---- */

/* From after the name past ")": names and what they are without an argument. */
static void bind_parameters(jinja_machine *m, const jinja_arguments *arguments)
{
    uint32_t position = 0;
    jinja_expect(m, "(");
    while (m->status == KVF_OK && !jinja_accept(m, ")")) {
        const jinja_token name = jinja_take_name(m);
        jinja_value value = {0};
        if (jinja_accept(m, "="))
            value = jinja_expression(m);
        for (uint32_t i = 0; arguments && i < arguments->count; i++) {
            const jinja_token *given = &arguments->names[i];
            if (given->size
                    ? given->size == name.size && memcmp(given->bytes, name.bytes, name.size) == 0
                    : i == position)
                value = arguments->values[i];
        }
        position++;
        if (jinja_is_live(m))
            jinja_variable_push(m, name.bytes, name.size, value);
        if (!jinja_is(jinja_peek(m, 0), ")"))
            jinja_expect(m, ",");
    }
    jinja_expect_end(m, TOKEN_TAG_END);
}

static const char *const macro_ends[] = {"endmacro", NULL};

static void define_macro(jinja_machine *m)
{
    const jinja_token name = jinja_take_name(m);
    const size_t at = m->at;
    const bool live = jinja_is_live(m);
    m->dry++;
    bind_parameters(m, NULL);
    const uint32_t loops = m->loops;
    m->loops = 0;
    run_block(m, macro_ends);
    m->loops = loops;
    jinja_expect_end(m, TOKEN_TAG_END);
    m->dry--;
    if (live)
        jinja_variable_set(m, name.bytes, name.size,
                           (jinja_value){.kind = JINJA_MACRO, .as.macro = at});
}

jinja_value jinja_macro_call(jinja_machine *m, size_t macro, const jinja_arguments *arguments)
{
    jinja_value value = jinja_words("");
    if (!jinja_enter(m))
        return value;
    const size_t at = m->at, scope = m->scope, frame = m->frame, variables = m->variable_count;
    const uint32_t loops = m->loops;
    m->at = macro;
    m->frame = m->scope = variables;
    m->loops = 0;
    bind_parameters(m, arguments);
    value = capture(m, macro_ends);
    m->variable_count = variables;
    m->scope = scope;
    m->frame = frame;
    m->loops = loops;
    if (m->status == KVF_OK)
        m->at = at;
    jinja_leave(m);
    return value;
}

/* ---- blocks ---- */

static void run_statement(jinja_machine *m, const jinja_token *word)
{
    if (jinja_is(word, "if")) {
        run_if(m);
    } else if (jinja_is(word, "for")) {
        run_for(m);
    } else if (jinja_is(word, "set")) {
        run_set(m);
    } else if (jinja_is(word, "macro")) {
        define_macro(m);
    } else if (jinja_is(word, "generation") || jinja_is(word, "endgeneration")) {
        jinja_expect_end(m, TOKEN_TAG_END); /* marks answers for training; writes nothing */
    } else if ((jinja_is(word, "break") || jinja_is(word, "continue")) && m->loops) {
        if (jinja_is_live(m))
            m->jump = jinja_is(word, "break") ? JUMP_BREAK : JUMP_CONTINUE;
        jinja_expect_end(m, TOKEN_TAG_END);
    } else {
        jinja_fail(m, KVF_UNSUPPORTED, "the statement '%.*s' is not known here",
                   jinja_shown(word->size), word->bytes);
    }
}

/* Up to one of the words @p ends, which end with NULL, and past it; up to the end of the template
 * if there are none. @return the word, or NULL */
static const char *run_block(jinja_machine *m, const char *const *ends)
{
    const char *end = NULL;
    if (!jinja_enter(m))
        return NULL;
    while (!end && m->status == KVF_OK) {
        const jinja_token *token = jinja_peek(m, 0);
        if (token->kind == TOKEN_END) {
            while (*ends && ends[1])
                ends++;
            if (*ends)
                jinja_fail(m, KVF_CORRUPT, "it ends where %s was expected", *ends);
            break;
        }
        jinja_next(m);
        if (token->kind == TOKEN_TEXT) {
            write_text(m, token->bytes, token->size);
        } else if (token->kind == TOKEN_OUT) {
            const jinja_value text = jinja_string(m, jinja_expression(m));
            write_text(m, text.as.text, text.size);
            jinja_expect_end(m, TOKEN_OUT_END);
        } else {
            const jinja_token *word = jinja_peek(m, 0);
            for (const char *const *e = ends; *e && !end; e++)
                end = jinja_is(word, *e) ? *e : NULL;
            jinja_next(m);
            if (!end)
                run_statement(m, word);
        }
    }
    jinja_leave(m);
    return end;
}

kvf_status jinja_run(jinja_machine *m, const char *source, size_t bytes, kvf_text *out,
                     kvf_error *error)
{
    static const char *const none[] = {NULL};
    const size_t size = out->size;
    m->error = error;
    m->out = out;
    if (m->status != KVF_OK) /* a value found no memory */
        return model_fail(error, m->status, "the chat could not be laid out for its template");
    jinja_lex(m, source, bytes);
    if (m->status == KVF_OK)
        run_block(m, none);
    if (m->status != KVF_OK)
        out->size = size;
    if (out->capacity)
        out->bytes[out->size] = '\0';
    return m->status;
}
