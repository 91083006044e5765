/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_JINJA_PARTS_H
#define KVF_MODEL_JINJA_PARTS_H

/*
 * Shared by the files of the interpreter: jinja_machine.c is the machine, jinja_lex.c makes
 * tokens, jinja_run.c follows statements, jinja_expr.c expressions, jinja_call.c filters, tests,
 * methods and functions, jinja_json.c JSON, jinja_value.c values.
 *
 * There is no syntax tree: tokens are read in order, and what must not happen (a branch not taken)
 * is read `dry`, without effect. The first failure sticks, and moves to the last token, where every
 * loop ends. Invariant: while the status is KVF_OK, `at` is the next token.
 */

#include "jinja.h"

typedef enum jinja_token_kind {
    TOKEN_END,
    TOKEN_TEXT,
    TOKEN_OUT,     /* {{ */
    TOKEN_OUT_END, /* }} */
    TOKEN_TAG,     /* {% */
    TOKEN_TAG_END, /* %} */
    TOKEN_NAME,
    TOKEN_STRING,
    TOKEN_INT,      /* whatever begins with a digit */
    TOKEN_OPERATOR, /* its bytes */
} jinja_token_kind;

typedef struct jinja_token {
    jinja_token_kind kind;
    uint32_t line;
    const char *bytes;
    size_t size;
} jinja_token;

typedef struct jinja_entry {
    const char *key;
    size_t key_size;
    jinja_value value;
    struct jinja_entry *next;
} jinja_entry;

typedef struct jinja_map {
    jinja_entry *first, *last;
    size_t count;
    bool is_namespace; /* the only one that a template may change */
} jinja_map;

typedef struct jinja_variable {
    const char *name;
    size_t name_size;
    jinja_value value;
} jinja_variable;

typedef enum jinja_jump { JUMP_NONE, JUMP_BREAK, JUMP_CONTINUE } jinja_jump;

struct jinja_machine {
    kvf_error *error;
    kvf_status status;
    jinja_day day;
    bool has_day;

    struct jinja_chunk *chunks; /* of the arena */
    size_t arena_left;          /* bytes that may still be taken */
    uint64_t steps_left;        /* of work: see jinja_spend */

    jinja_token *tokens; /* [count]; the last one is TOKEN_END */
    size_t count, capacity, at;

    jinja_variable *variables; /* a stack */
    size_t variable_count, variable_capacity;
    size_t global_count; /* the outermost scope */
    size_t scope;        /* first variable of the innermost scope */
    size_t frame;        /* first variable of the macro that runs: it sees these and the globals */

    kvf_text *out;
    uint32_t dry;   /* > 0: read, do nothing */
    uint32_t depth; /* of nesting */
    uint32_t loops; /* around the next statement */
    jinja_jump jump;
};

enum { JINJA_ARGUMENTS_MAX = 12 };
typedef struct jinja_arguments {
    jinja_value values[JINJA_ARGUMENTS_MAX];
    jinja_token names[JINJA_ARGUMENTS_MAX]; /* size 0: positional */
    uint32_t count;
} jinja_arguments;

/* ---- the machine: jinja_machine.c ---- */

/** Remember the first failure, with the line. */
void jinja_fail(jinja_machine *m, kvf_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/** How many bytes of a name a message shows, for %.*s. */
static inline int jinja_shown(size_t size)
{
    return size < 40 ? (int)size : 40;
}
/** Memory that lives as long as the machine; NULL after a failure. */
void *jinja_take(jinja_machine *m, size_t bytes);
/** Count the work of looking at so many bytes, or names: a failure when there was too much.
 * Functions that take memory need no more, since memory is bounded and never given back. */
void jinja_spend(jinja_machine *m, size_t bytes);
/** Room for one more of @p count elements; @p max is a bound. @return the array, maybe moved; NULL
 * after a failure, and it is as before then */
void *jinja_grow(jinja_machine *m, void *array, size_t count, size_t *capacity, size_t element,
                 size_t max);
/** Whether what is read has effects. */
bool jinja_is_live(const jinja_machine *m);
/** @return false after a failure; else leave with jinja_leave */
bool jinja_enter(jinja_machine *m);
void jinja_leave(jinja_machine *m);

const jinja_token *jinja_peek(const jinja_machine *m, size_t ahead);
/** Whether the token is this name or operator. */
bool jinja_is(const jinja_token *token, const char *word);
/** Whether it is one of these words, which end with NULL. */
bool jinja_is_any(const jinja_token *token, const char *const *words);
/** Go past the next token if it is this word. */
bool jinja_accept(jinja_machine *m, const char *word);
void jinja_expect(jinja_machine *m, const char *word);
void jinja_next(jinja_machine *m);

/** TOKEN_TAG_END or TOKEN_OUT_END. */
void jinja_expect_end(jinja_machine *m, jinja_token_kind kind);
jinja_token jinja_take_name(jinja_machine *m);

jinja_value *jinja_variable_find(jinja_machine *m, const char *name, size_t size);
/** Set in the innermost scope. */
void jinja_variable_set(jinja_machine *m, const char *name, size_t size, jinja_value value);
/** Set in the innermost scope, whatever has that name already. */
void jinja_variable_push(jinja_machine *m, const char *name, size_t size, jinja_value value);

/* ---- statements: jinja_run.c ---- */

/** Call what {% macro %} defined. */
jinja_value jinja_macro_call(jinja_machine *m, size_t macro, const jinja_arguments *arguments);

/* ---- tokens: jinja_lex.c ---- */

/** Fills tokens; the source must outlive them. */
void jinja_lex(jinja_machine *m, const char *source, size_t bytes);

/* ---- expressions: jinja_expr.c ---- */

jinja_value jinja_expression(jinja_machine *m);
/** Without `x if y else z`, for what a loop runs over. */
jinja_value jinja_expression_plain(jinja_machine *m);
/** From after "(" past ")". */
void jinja_read_arguments(jinja_machine *m, jinja_arguments *out);

/* ---- filters, tests, methods, functions: jinja_call.c ---- */

jinja_value jinja_filter(jinja_machine *m, const jinja_token *name, jinja_value value,
                         const jinja_arguments *arguments);
bool jinja_test(jinja_machine *m, const jinja_token *name, jinja_value value,
                const jinja_arguments *arguments);
jinja_value jinja_method(jinja_machine *m, jinja_value value, const jinja_token *name,
                         const jinja_arguments *arguments);
jinja_value jinja_function(jinja_machine *m, const jinja_token *name,
                           const jinja_arguments *arguments);
/** A function that is named but not called: a macro that is JINJA_BUILT_IN; else undefined. */
jinja_value jinja_function_value(const jinja_machine *m, const jinja_token *name);
#define JINJA_BUILT_IN SIZE_MAX

/* ---- JSON: jinja_json.c ---- */

/** As Python writes a number that is not whole. */
jinja_value jinja_real_text(jinja_machine *m, double number);
/** A list or a mapping as Python writes it. */
jinja_value jinja_repr(jinja_machine *m, jinja_value value);
/** The filter tojson. */
jinja_value jinja_to_json(jinja_machine *m, jinja_value value, const jinja_arguments *arguments);

/* ---- values: jinja_value.c ---- */

const char *jinja_kind_name(jinja_value value);
bool jinja_truth(jinja_value value);
bool jinja_equal(jinja_machine *m, jinja_value a, jinja_value b);
/** -1, 0, 1; fails where the two have no order. */
int jinja_compare(jinja_machine *m, jinja_value a, jinja_value b);
bool jinja_contains(jinja_machine *m, jinja_value inner, jinja_value outer);
jinja_value jinja_int(int64_t integer);
jinja_value jinja_real(double real);
/** As it is written out. */
jinja_value jinja_string(jinja_machine *m, jinja_value value);
jinja_value jinja_join(jinja_machine *m, jinja_value a, jinja_value b);
/** All texts of a list; @p between is a text, or undefined for none. */
jinja_value jinja_join_all(jinja_machine *m, jinja_value texts, jinja_value between);
/** Bytes of the character at @p at; texts may be ill-formed, then 1. */
size_t jinja_character(jinja_value text, size_t at);
/** A member or an item, or undefined. */
jinja_value jinja_member(jinja_machine *m, jinja_value value, const char *key, size_t size);
jinja_value jinja_item(jinja_machine *m, jinja_value value, jinja_value index);
/** value[start:end:step]; undefined bounds are absent. */
jinja_value jinja_slice(jinja_machine *m, jinja_value value, const jinja_value bounds[3]);
/** The items of a loop, as a list. */
jinja_value jinja_list_of(jinja_machine *m, jinja_value value);
/** How a mapping keeps a key, which may be text or a whole number; undefined for others. */
jinja_value jinja_key(jinja_machine *m, jinja_value key);
jinja_value jinja_key_value(const jinja_entry *entry);
/** Counts as work. */
jinja_entry *jinja_entry_find(jinja_machine *m, jinja_value map, const char *key, size_t size);
void jinja_map_set(jinja_machine *m, jinja_map *map, const char *key, size_t size,
                   jinja_value value);
int64_t jinja_length(jinja_machine *m, jinja_value value);

#endif
