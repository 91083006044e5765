/* SPDX-License-Identifier: Apache-2.0 */

/* See the header. */

#include "refusals.h"
#include "unit.h"

#include <ctype.h>

#include <kvferry/setting.h>

static const char *const names[] = {
    "OK",   "INVALID",     "OUT_OF_MEMORY", "OUT_OF_DEVICE_MEMORY", "PIN_FAILED", "FULL",
    "BUSY", "UNSUPPORTED", "NOT_FINITE",    "DEVICE_FAILED",        "SYSTEM",     "CORRUPT"};

static const char *name_of(kvf_status status)
{
    const size_t index = (size_t) - (int)status;
    return index < sizeof names / sizeof *names ? names[index] : "?";
}

/* In place; returns how many bytes there are. */
static size_t unescape(char *text)
{
    char *to = text;
    for (const char *from = text; *from != '\0';) {
        unsigned byte;
        const char *letter =
            from[0] == '\\' && from[1] != '\0' ? strchr("n\nr\rt\t", from[1]) : NULL;
        if (letter) {
            *to++ = letter[1];
            from += 2;
        } else if (from[0] == '\\' && from[1] == 'x' && isxdigit((unsigned char)from[2]) &&
                   sscanf(from + 2, "%2x", &byte) == 1) {
            *to++ = (char)byte;
            from += 4;
        } else {
            *to++ = *from++;
        }
    }
    *to = '\0';
    return (size_t)(to - text);
}

/* `STATUS text`, with the place taken out. */
static void write_answer(const refusals *table, kvf_status status, const kvf_error *error,
                         char *out, size_t capacity)
{
    const char *text = error->text, *place = table->place;
    int used = snprintf(out, capacity, "%s ", name_of(status));
    for (const char *at; place && (at = strstr(text, place)); text = at + strlen(place))
        used += snprintf(out + used, capacity - (size_t)used, "%.*sPLACE", (int)(at - text), text);
    snprintf(out + used, capacity - (size_t)used, "%s", text);
    if (error->status != status)
        snprintf(out, capacity, "%s, but the error says %s", name_of(status),
                 name_of(error->status));
}

static int check_row(const refusals *table, const char *change, const char *wanted, FILE *write)
{
    kvf_error error = {.status = KVF_OK, .text = ""};
    char *copy = strdup(change), got[1200];
    assert_non_null(copy);
    const size_t size = unescape(copy);
    write_answer(table, table->call(table->user, copy, size, &error), &error, got, sizeof got);
    free(copy);
    if (write)
        fprintf(write, "%s\n    %s\n", change, got);
    if (write || strcmp(got, wanted) == 0)
        return 0;
    print_error("%s\n    %s\n  was answered, in place of\n    %s\n", change, got, wanted);
    return 1;
}

void refusals_check(const refusals *table)
{
    const char *wish = getenv("KVF_WRITE_REFUSALS");
    char *text = NULL, *rest = NULL;
    size_t size = 0, rows = 0, failed = 0;
    FILE *file = fopen(table->path, "r");
    if (!file || getdelim(&text, &size, '\0', file) < 0)
        fail_msg("%s cannot be read", table->path);
    fclose(file);
    file = wish && *wish == '1' ? fopen(table->path, "w") : NULL;
    for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        if (*line == '#') {
            if (file)
                fprintf(file, "%s\n", line);
            continue;
        }
        char *answer = strtok_r(NULL, "\n", &rest);
        if (!answer)
            fail_msg("%s: the last row has no answer", table->path);
        failed += (size_t)check_row(table, line, answer + strspn(answer, " "), file);
        rows++;
    }
    free(text);
    if (file)
        fclose(file);
    if (failed || !rows)
        fail_msg("%s: %zu of %zu rows are answered otherwise", table->path, failed, rows);
}

char *refusals_value(char *change)
{
    char *space = strchr(change, ' ');
    if (!space)
        return change + strlen(change);
    *space = '\0';
    return space + 1;
}

char *refusals_part(char *change, char **next)
{
    *next = strstr(change, " & ");
    if (*next) {
        **next = '\0';
        *next += 3;
    }
    return refusals_value(change);
}

void refusals_expect(kvf_status got, const kvf_error *error, kvf_status status, const char *text)
{
    if (got != status || error->status != status || strcmp(error->text, text) != 0)
        fail_msg("expected %s with \"%s\", got %s (%s) with \"%s\"", name_of(status), text,
                 name_of(got), name_of(error->status), error->text);
}

int refusals_set(const kvf_setting *(*settings)(uint32_t index), void *config, const char *name,
                 const char *value)
{
    const size_t length = strcspn(name, "[");
    const kvf_setting *s;
    for (uint32_t i = 0; (s = settings(i)) != NULL; i++) {
        if (strncmp(s->name, name, length) != 0 || s->name[length] != '\0')
            continue;
        const uint32_t element = name[length] ? (uint32_t)strtoul(name + length + 1, NULL, 10) : 0;
        const int is_real = s->kind == KVF_SETTING_REAL || s->kind == KVF_SETTING_SHARE;
        const uint32_t bytes = s->bytes / (s->count ? s->count : 1);
        char *at = (char *)config + s->offset + (size_t)element * bytes;
        const double real = strtod(value, NULL);
        const float narrow = (float)real;
        const uint64_t whole = (uint64_t)strtoll(value, NULL, 10); /* little-endian */
        memcpy(at,
               is_real && bytes == 4 ? (const void *)&narrow
               : is_real             ? (const void *)&real
                                     : (const void *)&whole,
               bytes);
        return 1;
    }
    return 0;
}

/* [1,2,3] */
static const void *array_of(const char *value)
{
    static uint32_t arrays[4][64], next;
    uint32_t *to = arrays[next++ % 4], count = 0;
    for (const char *at = value; at; at = strchr(at + 1, ','))
        to[count++] = (uint32_t)strtoul(at + 1, NULL, 10);
    return to;
}

void refusals_put(const refusals_field *fields, void *to, const char *name, const char *value,
                  const void *here)
{
    const void *address = *value == '[' ? array_of(value) : here;
    const uint64_t number = strtoull(value, NULL, 0); /* a word is 0 */
    while (fields->name && strcmp(fields->name, name) != 0)
        fields++;
    if (!fields->name)
        fail_msg("there is no field %s", name);
    memcpy((char *)to + fields->offset,
           *value == '[' || strcmp(value, "here") == 0 ? (const void *)&address : &number,
           fields->bytes);
}
