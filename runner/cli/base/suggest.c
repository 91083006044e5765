/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What a misspelt word was meant to be.
 *
 * It knows words only. Invariant: a suggestion differs in fewer letters than the word has.
 */

#include "options.h"

#include <string.h>

#define WORD_MAX 32u

/* Levenshtein distance, one row at a time. */
static size_t distance(const char *a, const char *b)
{
    size_t n = strlen(a), m = strlen(b);
    if (n > WORD_MAX || m > WORD_MAX)
        return WORD_MAX;
    size_t row[WORD_MAX + 1];
    for (size_t j = 0; j <= m; j++)
        row[j] = j;
    for (size_t i = 1; i <= n; i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= m; j++) {
            size_t best = diagonal + (a[i - 1] != b[j - 1]);
            if (best > row[j] + 1)
                best = row[j] + 1;
            if (best > row[j - 1] + 1)
                best = row[j - 1] + 1;
            diagonal = row[j];
            row[j] = best;
        }
    }
    return row[m];
}

const char *cli_suggest(const char *word, const char *const *names)
{
    const char *nearest = NULL;
    size_t least = strlen(word) / 2 + 1;
    for (; *names; names++) {
        size_t d = distance(word, *names);
        if (d < least) {
            least = d;
            nearest = *names;
        }
    }
    return nearest;
}
