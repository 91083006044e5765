/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_JINJA_H
#define KVF_MODEL_JINJA_H

/*
 * The part of Jinja that chat templates use, with the settings that Transformers gives it:
 * trim_blocks, lstrip_blocks, {% generation %}, {% break %} and {% continue %}.
 *
 * It knows values and text, nothing of chats. A template comes from a file that is not trusted: its
 * time, its memory and its nesting have bounds, and whatever it uses that is not known here is an
 * error with the line. Invariant: a run that succeeds wrote what Jinja writes.
 */

#include "json.h"

typedef enum jinja_kind {
    JINJA_UNDEFINED,
    JINJA_NONE,
    JINJA_BOOL,
    JINJA_INT,
    JINJA_REAL, /* from JSON; there is no arithmetic with it */
    JINJA_TEXT,
    JINJA_LIST,
    JINJA_MAP,
    JINJA_MACRO,
} jinja_kind;

/* The forms of a list in Python. Only a list and a tuple can be written out. */
typedef enum jinja_form {
    LIST_PLAIN,
    LIST_TUPLE,
    LIST_VIEW,      /* range, items, keys, values */
    LIST_GENERATOR, /* what filters choose from; always true, and without a length */
} jinja_form;

typedef struct jinja_value {
    jinja_kind kind;
    jinja_form form; /* of a list */
    size_t size;     /* bytes of a text, items of a list */
    union {
        bool truth;
        int64_t integer;
        double real;
        const char *text;
        struct jinja_value *items;
        struct jinja_map *map;
        size_t macro; /* the token after its name */
    } as;
} jinja_value;

typedef struct jinja_machine jinja_machine;

/** A day, for strftime_now. */
typedef struct jinja_day {
    uint32_t year, month, day; /* month and day from 1 */
} jinja_day;

/**
 * @param day        what strftime_now tells; NULL = there is no such function
 * @param input_max  bytes of the texts that it will be given: memory is bounded by a multiple
 * @return NULL if there is no memory
 */
jinja_machine *jinja_open(const jinja_day *day, size_t input_max);
void jinja_close(jinja_machine *machine);

/* Values. They live as long as the machine; texts are borrowed. */
jinja_value jinja_bool(bool truth);
jinja_value jinja_none(void);
jinja_value jinja_text(const char *bytes, size_t size);
jinja_value jinja_words(const char *text);
jinja_value jinja_map_new(jinja_machine *machine);
void jinja_map_put(jinja_machine *machine, jinja_value map, const char *key, jinja_value value);
/** A list of @p count undefined items. */
jinja_value jinja_list_new(jinja_machine *machine, size_t count);

/** All texts of a list, with words between them. */
jinja_value jinja_join_texts(jinja_machine *machine, jinja_value texts, const char *between);

/** The value of a JSON document, which must outlive the machine. And how much of an input that is.
 */
jinja_value jinja_from_json(jinja_machine *machine, const json_value *json);
size_t jinja_json_bytes(const json_value *json);

/** A global variable; the name is borrowed. */
void jinja_set_global(jinja_machine *machine, const char *name, jinja_value value);

/**
 * Run a template, once per machine, and append what it writes.
 *
 * @return KVF_OK; KVF_UNSUPPORTED for what is not known here, KVF_CORRUPT for what is no template,
 *         KVF_INVALID for what the template itself refuses, KVF_FULL past a bound,
 *         KVF_OUT_OF_MEMORY. @p out is as before then
 */
KVF_CHECKED kvf_status jinja_run(jinja_machine *machine, const char *source, size_t bytes,
                                 kvf_text *out, kvf_error *error);

#endif
