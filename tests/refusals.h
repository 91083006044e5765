/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_REFUSALS_H
#define KVF_TESTS_REFUSALS_H

/*
 * Tables of what an API refuses: what is changed of a valid call, the status, and the whole text.
 *
 * A table is a file, `tests/.../NAME.refusals`. A row is a line with the change, in the words of
 * its test, and below it, after spaces, the status and the text. Lines that begin with # are
 * remarks. In a change \n, \r, \t and \xHH are bytes; nothing else is escaped.
 *
 * With KVF_WRITE_REFUSALS=1 in the environment a table is written anew with the answers of today,
 * for a reader of the difference.
 */

#include <stddef.h>

#include <kvferry/kvferry.h>

typedef struct refusals {
    const char *path; /* of the table */
    /* Makes the call. @p change ends with a zero byte after its @p size bytes, and may be cut. */
    kvf_status (*call)(void *user, char *change, size_t size, kvf_error *error);
    void *user;
    const char *place; /* of texts, what differs from run to run; stands as PLACE. NULL = nothing */
} refusals;

/* Fails the test, naming every row whose call is not refused with this status and this text. */
void refusals_check(const refusals *table);

/* For rows `FIELD VALUE`: cuts at the first space. Returns VALUE, or "" without one. */
char *refusals_value(char *change);

/* The same for the first of several, ` & ` between them. Sets @p next to the next one or NULL. */
char *refusals_part(char *change, char **next);

/* For tests of one call: got, and the whole text. */
void refusals_expect(kvf_status got, const kvf_error *error, kvf_status status, const char *text);

/* Sets the field @p name of a config to a number, whatever its range, or to the text @p value
 * itself. Returns 0 if none of the settings has this name. */
struct kvf_setting;
int refusals_set(const struct kvf_setting *(*settings)(uint32_t index), void *config,
                 const char *name, const char *value);

/* A number of a struct, or an address. */
typedef struct refusals_field {
    const char *name;
    size_t offset, bytes;
} refusals_field;
#define REFUSALS_FIELD(type, field)                                                                \
    {                                                                                              \
#field, offsetof(type, field), sizeof(((type *)0)->field)                                  \
    }

/* Sets the field @p name of @p to, of those up to one without a name: to a number, to NULL, to
 * `here`, or to an array [1,2,3] of 32-bit numbers, which stays for the next three. */
void refusals_put(const refusals_field *fields, void *to, const char *name, const char *value,
                  const void *here);

#endif
