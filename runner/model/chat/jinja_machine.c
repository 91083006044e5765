/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The machine of a template: its memory, its bounds, its place in the tokens, and its variables.
 *
 * It knows no statement and no operator. Invariant: scopes nest; a variable that a loop or a macro
 * sets is gone after it, as in Jinja.
 */

#include "jinja_parts.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "common/text.h"

enum {
    CHUNK_BYTES = 64 << 10,
    DEPTH_MAX = 96,
    STEP_BYTES = 16, /* that one step may look at */
    VARIABLES_MAX = 4096,
};
#define ARENA_BYTES_MIN (64u << 20)
#define ARENA_FACTOR    64u
#define STEPS_PER_BYTE  4u
#define STEPS_MAX       (8u << 20)

typedef struct jinja_chunk {
    struct jinja_chunk *next;
    size_t size, used;
    max_align_t bytes[];
} jinja_chunk;

/* ---- memory, failure, depth ---- */

jinja_machine *jinja_open(const jinja_day *day, size_t input_max)
{
    jinja_machine *m = model_alloc_zero(1, sizeof *m);
    if (!m)
        return NULL;
    m->has_day = day;
    if (day)
        m->day = *day;
    m->arena_left = ARENA_BYTES_MIN;
    if (input_max < SIZE_MAX / 2 / ARENA_FACTOR)
        m->arena_left += input_max * ARENA_FACTOR;
    m->steps_left = STEPS_MAX + STEPS_PER_BYTE * (uint64_t)input_max;
    return m;
}

void jinja_close(jinja_machine *m)
{
    if (!m)
        return;
    while (m->chunks) {
        jinja_chunk *next = m->chunks->next;
        model_free(m->chunks);
        m->chunks = next;
    }
    model_free(m->variables);
    model_free(m->tokens);
    model_free(m);
}

void jinja_fail(jinja_machine *m, kvf_status status, const char *format, ...)
{
    if (m->status != KVF_OK)
        return;
    char what[192];
    va_list list;
    va_start(list, format);
    kvf_vformat(what, sizeof what, format, list);
    va_end(list);
    m->status = status;
    if (m->count == 0)
        model_fail(m->error, status, "the chat template: %s", what);
    else
        model_fail(m->error, status, "the chat template, line %u: %s", m->tokens[m->at].line, what);
    m->at = m->count ? m->count - 1 : 0;
}

void *jinja_take(jinja_machine *m, size_t bytes)
{
    const size_t align = sizeof(max_align_t);
    if (m->status != KVF_OK)
        return NULL;
    if (bytes > m->arena_left) {
        jinja_fail(m, KVF_FULL, "it takes too much memory");
        return NULL;
    }
    const size_t needed = (bytes + align - 1) / align * align;
    jinja_chunk *chunk = m->chunks;
    if (!chunk || chunk->size - chunk->used < needed) {
        const size_t size = needed > CHUNK_BYTES ? needed : CHUNK_BYTES;
        chunk = model_alloc(sizeof *chunk + size);
        if (!chunk) {
            jinja_fail(m, KVF_OUT_OF_MEMORY, "%zu bytes could not be allocated", size);
            return NULL;
        }
        *chunk = (jinja_chunk){.next = m->chunks, .size = size};
        m->chunks = chunk;
    }
    void *taken = (char *)chunk->bytes + chunk->used;
    chunk->used += needed;
    m->arena_left -= bytes;
    return taken;
}

void *jinja_grow(jinja_machine *m, void *array, size_t count, size_t *capacity, size_t element,
                 size_t max)
{
    if (count < *capacity)
        return array;
    const size_t wanted = *capacity ? *capacity * 2 : 64;
    void *grown = wanted <= max ? model_grow(array, count * element, wanted * element) : NULL;
    if (!grown)
        jinja_fail(m, wanted > max ? KVF_FULL : KVF_OUT_OF_MEMORY,
                   "no room for more than %zu tokens or variables", count);
    else
        *capacity = wanted;
    return grown;
}

bool jinja_is_live(const jinja_machine *m)
{
    return m->dry == 0 && m->jump == JUMP_NONE && m->status == KVF_OK;
}

bool jinja_enter(jinja_machine *m)
{
    if (m->depth >= DEPTH_MAX)
        jinja_fail(m, KVF_FULL, "it nests deeper than %d", DEPTH_MAX);
    if (m->status != KVF_OK)
        return false;
    m->depth++;
    return true;
}

void jinja_leave(jinja_machine *m)
{
    m->depth--;
}

/* ---- tokens ---- */

const jinja_token *jinja_peek(const jinja_machine *m, size_t ahead)
{
    const size_t left = m->count - 1 - m->at;
    return &m->tokens[m->at + (ahead < left ? ahead : left)];
}

bool jinja_is(const jinja_token *token, const char *word)
{
    return (token->kind == TOKEN_NAME || token->kind == TOKEN_OPERATOR) &&
           token->size == strlen(word) && memcmp(token->bytes, word, token->size) == 0;
}

bool jinja_is_any(const jinja_token *token, const char *const *words)
{
    for (; *words; words++)
        if (jinja_is(token, *words))
            return true;
    return false;
}

void jinja_next(jinja_machine *m)
{
    if (m->at + 1 < m->count)
        m->at++;
    jinja_spend(m, 0);
}

void jinja_spend(jinja_machine *m, size_t bytes)
{
    const uint64_t steps = 1 + bytes / STEP_BYTES;
    if (m->steps_left < steps)
        jinja_fail(m, KVF_FULL, "it runs too long");
    m->steps_left -= m->steps_left < steps ? m->steps_left : steps;
}

bool jinja_accept(jinja_machine *m, const char *word)
{
    if (!jinja_is(jinja_peek(m, 0), word))
        return false;
    jinja_next(m);
    return true;
}

static void fail_token(jinja_machine *m, const char *expected)
{
    const jinja_token *found = jinja_peek(m, 0);
    if (found->kind == TOKEN_END)
        jinja_fail(m, KVF_CORRUPT, "it ends where %s was expected", expected);
    else
        jinja_fail(m, KVF_CORRUPT, "'%.*s' stands where %s was expected", jinja_shown(found->size),
                   found->bytes, expected);
}

void jinja_expect(jinja_machine *m, const char *word)
{
    if (!jinja_accept(m, word))
        fail_token(m, word);
}

void jinja_expect_end(jinja_machine *m, jinja_token_kind kind)
{
    if (jinja_peek(m, 0)->kind == kind)
        jinja_next(m);
    else
        fail_token(m, kind == TOKEN_OUT_END ? "}}" : "%}");
}

jinja_token jinja_take_name(jinja_machine *m)
{
    const jinja_token token = *jinja_peek(m, 0);
    if (token.kind != TOKEN_NAME)
        fail_token(m, "a name");
    else
        jinja_next(m);
    return token;
}

/* ---- variables ---- */

jinja_value *jinja_variable_find(jinja_machine *m, const char *name, size_t size)
{
    jinja_spend(m, m->variable_count);
    for (size_t i = m->variable_count; i-- > 0;) {
        if (i < m->frame && i >= m->global_count)
            i = m->global_count;
        else if (m->variables[i].name_size == size && memcmp(m->variables[i].name, name, size) == 0)
            return &m->variables[i].value;
    }
    return NULL;
}

void jinja_variable_push(jinja_machine *m, const char *name, size_t size, jinja_value value)
{
    if (m->status != KVF_OK)
        return;
    jinja_variable *variables = jinja_grow(m, m->variables, m->variable_count,
                                           &m->variable_capacity, sizeof *variables, VARIABLES_MAX);
    if (!variables)
        return;
    m->variables = variables;
    m->variables[m->variable_count++] =
        (jinja_variable){.name = name, .name_size = size, .value = value};
}

void jinja_variable_set(jinja_machine *m, const char *name, size_t size, jinja_value value)
{
    for (size_t i = m->scope; i < m->variable_count; i++)
        if (m->variables[i].name_size == size && memcmp(m->variables[i].name, name, size) == 0) {
            m->variables[i].value = value;
            return;
        }
    jinja_variable_push(m, name, size, value);
    if (m->scope == 0)
        m->global_count = m->variable_count;
}

void jinja_set_global(jinja_machine *m, const char *name, jinja_value value)
{
    jinja_variable_set(m, name, strlen(name), value);
}
