/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A template to tokens. Here Jinja's rules of white space live: what `-` takes away, that a tag
 * takes the line break after it (trim_blocks) and the blanks in front of it on its line
 * (lstrip_blocks), and that one line break at the end of the file does not count.
 *
 * It knows no statement. Invariant: texts between tags are what a template writes as they stand.
 */

#include "jinja_parts.h"
#include "utf8.h"

#include <string.h>

enum { TOKENS_MAX = 1 << 20 };

typedef struct lexer {
    jinja_machine *m;
    const char *source;
    size_t size, at;
    uint32_t line;
} lexer;

static void push(lexer *l, jinja_token_kind kind, const char *bytes, size_t size)
{
    jinja_machine *m = l->m;
    if (m->status != KVF_OK)
        return;
    jinja_token *tokens =
        jinja_grow(m, m->tokens, m->count, &m->capacity, sizeof *tokens, TOKENS_MAX);
    if (!tokens)
        return;
    m->tokens = tokens;
    m->tokens[m->count++] =
        (jinja_token){.kind = kind, .line = l->line, .bytes = bytes, .size = size};
}

static void fail(lexer *l, const char *what)
{
    push(l, TOKEN_END, "", 0); /* the line of the message */
    l->m->at = l->m->count ? l->m->count - 1 : 0;
    jinja_fail(l->m, KVF_CORRUPT, "%s", what);
    l->at = l->size;
}

static bool starts(const lexer *l, const char *word)
{
    const size_t size = strlen(word);
    return l->size - l->at >= size && memcmp(l->source + l->at, word, size) == 0;
}

static bool is_blank(char c)
{
    return c == ' ' || (c >= '\t' && c <= '\r');
}

static void count_lines(lexer *l, size_t from, size_t to)
{
    for (size_t i = from; i < to; i++)
        l->line += l->source[i] == '\n';
}

/* ---- inside a tag ---- */

static bool is_name(char c)
{
    return c == '_' || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
           (unsigned char)c >= 0x80;
}

static uint32_t hex_value(const char *digits, size_t count)
{
    uint32_t value = 0;
    for (size_t i = 0; i < count; i++) {
        const char c = digits[i];
        const uint32_t digit = c >= '0' && c <= '9'   ? (uint32_t)(c - '0')
                               : c >= 'a' && c <= 'f' ? (uint32_t)(c - 'a') + 10
                               : c >= 'A' && c <= 'F' ? (uint32_t)(c - 'A') + 10
                                                      : UINT32_MAX;
        if (digit == UINT32_MAX)
            return UINT32_MAX;
        value = value << 4 | digit;
    }
    return value;
}

/* One escape of a string of Python, that follows the backslash. @return bytes read; 0 = unknown */
static size_t unescape(const char *from, size_t left, char *to, size_t *size)
{
    static const char letters[] = "ntrabfv\\'\"", meanings[] = "\n\t\r\a\b\f\v\\'\"";
    const char *letter = from[0] ? strchr(letters, from[0]) : NULL;
    if (letter) {
        to[(*size)++] = meanings[letter - letters];
        return 1;
    }
    if (from[0] == '\n')
        return 1;
    const size_t digits = from[0] == 'x' ? 2 : from[0] == 'u' ? 4 : from[0] == 'U' ? 8 : 0;
    if (!digits || left <= digits)
        return 0;
    const uint32_t code = hex_value(from + 1, digits);
    if (code > 0x10ffff || (code >= 0xd800 && code < 0xe000))
        return 0;
    *size += utf8_encode(code, to + *size);
    return digits + 1;
}

static void read_string(lexer *l)
{
    const char quote = l->source[l->at];
    size_t end = l->at + 1;
    while (end < l->size && l->source[end] != quote)
        end += l->source[end] == '\\' ? 2 : 1;
    if (end >= l->size) {
        fail(l, "a string has no end");
        return;
    }
    const char *from = l->source + l->at + 1;
    const size_t length = end - l->at - 1;
    char *to = jinja_take(l->m, length + 1);
    size_t size = 0;
    for (size_t i = 0; to && i < length;) {
        if (from[i] != '\\') {
            to[size++] = from[i++];
            continue;
        }
        const size_t read = unescape(from + i + 1, length - i - 1, to, &size);
        if (read == 0) /* as Python: the backslash stands for itself */
            to[size++] = '\\';
        i += 1 + read;
    }
    push(l, TOKEN_STRING, to, size);
    count_lines(l, l->at, end);
    l->at = end + 1;
}

static void read_operator(lexer *l)
{
    static const char *const operators[] = {"==", "!=", "<=", ">=", "//", "**", "+", "-", "*",
                                            "/",  "%",  "~",  "<",  ">",  "=",  "(", ")", "[",
                                            "]",  "{",  "}",  ",",  ".",  ":",  "|"};
    for (size_t i = 0; i < sizeof operators / sizeof *operators; i++)
        if (starts(l, operators[i])) {
            push(l, TOKEN_OPERATOR, l->source + l->at, strlen(operators[i]));
            l->at += strlen(operators[i]);
            return;
        }
    fail(l, "a character has no meaning here");
}

static bool is_digit(const lexer *l, size_t at)
{
    return at < l->size && l->source[at] >= '0' && l->source[at] <= '9';
}

/* A name or a number. */
static void read_word(lexer *l)
{
    const size_t from = l->at;
    const bool is_number = is_digit(l, from);
    while (l->at < l->size && is_name(l->source[l->at]))
        l->at++;
    if (is_number && starts(l, ".") && is_digit(l, l->at + 1))
        for (l->at++; is_digit(l, l->at);)
            l->at++;
    push(l, is_number ? TOKEN_INT : TOKEN_NAME, l->source + from, l->at - from);
}

/* Whether the tag ends here: "%}", "-%}" or "+%}". Brackets that are open keep "}}" to themselves.
 */
static bool tag_ends(const lexer *l, const char *end, uint32_t open)
{
    const size_t sign = l->source[l->at] == '-' || l->source[l->at] == '+';
    return open == 0 && l->size - l->at >= sign + 2 &&
           memcmp(l->source + l->at + sign, end, 2) == 0;
}

/* @return the sign in front of the end, or 0 */
static char read_tag(lexer *l, const char *end)
{
    uint32_t open = 0;
    while (l->m->status == KVF_OK && l->at < l->size) {
        const char c = l->source[l->at];
        if (is_blank(c)) {
            l->line += c == '\n';
            l->at++;
            continue;
        }
        if (tag_ends(l, end, open)) {
            push(l, end[0] == '%' ? TOKEN_TAG_END : TOKEN_OUT_END, l->source + l->at, 2);
            l->at += c == end[0] ? 2 : 3;
            return c == end[0] ? 0 : c;
        }
        if (c == '"' || c == '\'')
            read_string(l);
        else if (is_name(c))
            read_word(l);
        else {
            open += c == '(' || c == '[' || c == '{';
            open -= open && (c == ')' || c == ']' || c == '}');
            read_operator(l);
        }
    }
    if (l->m->status == KVF_OK)
        fail(l, "a tag has no end");
    return 0;
}

/* ---- between tags ---- */

/* @return the sign in front of the end of a comment, or 0 */
static char read_comment(lexer *l)
{
    for (size_t i = l->at; i + 1 < l->size; i++)
        if (l->source[i] == '#' && l->source[i + 1] == '}') {
            const char sign = i > l->at ? l->source[i - 1] : '\0';
            count_lines(l, l->at, i);
            l->at = i + 2;
            return sign == '-' || sign == '+' ? sign : '\0';
        }
    fail(l, "a comment has no end");
    return 0;
}

/* The text between two tags, from @p from, without the part that the tag after it takes. */
static void read_text(lexer *l, size_t from, bool starts_line, char kind, char sign)
{
    size_t end = l->at;
    if (sign == '-') {
        while (end > from && is_blank(l->source[end - 1]))
            end--;
    } else if (kind != '{' && sign != '+') {
        size_t blanks = end;
        while (blanks > from && is_blank(l->source[blanks - 1]) && l->source[blanks - 1] != '\n')
            blanks--;
        if (blanks > from ? l->source[blanks - 1] == '\n' : starts_line)
            end = blanks;
    }
    if (end > from)
        push(l, TOKEN_TEXT, l->source + from, end - from);
}

static bool at_tag(const lexer *l)
{
    return starts(l, "{{") || starts(l, "{%") || starts(l, "{#");
}

/* The part of the text after it that the ended tag takes. @return whether a line starts then */
static bool trim_after(lexer *l, char kind, char sign)
{
    const size_t from = l->at;
    if (sign == '-') {
        while (l->at < l->size && is_blank(l->source[l->at]))
            l->at++;
    } else if (kind != '{' && sign != '+' && l->at < l->size && l->source[l->at] == '\n') {
        l->at++;
    }
    count_lines(l, from, l->at);
    return l->at > from && l->source[l->at - 1] == '\n';
}

/* Every line break as one byte, as Jinja reads a template. @return the bytes left */
static size_t join_line_breaks(jinja_machine *m, const char **source, size_t bytes)
{
    if (!memchr(*source, '\r', bytes))
        return bytes;
    char *copy = jinja_take(m, bytes);
    size_t size = 0;
    for (size_t i = 0; copy && i < bytes; i++) {
        if ((*source)[i] != '\r')
            copy[size++] = (*source)[i];
        else if (i + 1 == bytes || (*source)[i + 1] != '\n')
            copy[size++] = '\n';
    }
    if (copy)
        *source = copy;
    return size;
}

void jinja_lex(jinja_machine *m, const char *source, size_t bytes)
{
    bytes = join_line_breaks(m, &source, bytes);
    lexer l = {.m = m, .source = source, .size = bytes, .line = 1};
    if (l.size && source[l.size - 1] == '\n')
        l.size--;
    bool starts_line = true;
    while (m->status == KVF_OK && l.at < l.size) {
        const size_t from = l.at;
        while (l.at < l.size && !at_tag(&l))
            l.at++;
        if (l.at == l.size) {
            push(&l, TOKEN_TEXT, source + from, l.at - from);
            break;
        }
        const char kind = source[l.at + 1];
        const char first = l.at + 2 < l.size ? source[l.at + 2] : '\0';
        const char before = first == '-' || first == '+' ? first : '\0';
        read_text(&l, from, starts_line, kind, before);
        count_lines(&l, from, l.at);
        l.at += before ? 3 : 2;
        char after;
        if (kind == '#') {
            after = read_comment(&l);
        } else {
            push(&l, kind == '{' ? TOKEN_OUT : TOKEN_TAG, source + from, 2);
            after = read_tag(&l, kind == '{' ? "}}" : "%}");
        }
        starts_line = trim_after(&l, kind, after);
    }
    push(&l, TOKEN_END, "", 0);
}
