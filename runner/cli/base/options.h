/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_OPTIONS_H
#define KVF_CLI_OPTIONS_H

/*
 * The options of every subcommand: rows in; a filled struct, messages and help out. And axes of a
 * sweep, which are options with several values.
 *
 * A row says what kvf_setting says of a field, here of the subcommand's own struct of options; the
 * library's settings become rows by themselves. It knows text and ranges, not what an option is
 * for. Invariant: whatever is refused was told on stderr: the option, what was given, and what to
 * give instead.
 */

#include <kvferry/setting.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

typedef struct cli_option {
    kvf_setting is;       /* name: without the dashes; offset: from @c base */
    const char *argument; /* in the help; NULL = as the kind has it; a switch has none then */
    const char *absent;   /* in the help: what holds without it; NULL = the value, "" = nothing */
    /* Reads the text into @p at, the struct of the row; NULL = kvf_setting_parse. @return false
     * after a message */
    bool (*take)(const struct cli_option *option, const char *text, void *at);
    char letter;   /* 0 = none */
    bool is_first; /* taken before the others, wherever it stands: it sets what they may change */
    bool is_list;  /* values of a sweep, separated by commas */

    /* Filled here. */
    size_t base; /* of the row's struct in that of the subcommand */
    const char *heading;
    const char *given; /* NULL = not given; the last one counts */
    const char *field; /* of the library; NULL = the row is the subcommand's own */
    char spelled[28];
} cli_option;

/* Shape of a row: the field of a struct. */
#define CLI_FIELD(type, field) .offset = offsetof(type, field), .bytes = sizeof(((type *)0)->field)

#define CLI_OPTIONS_MAX 96u

typedef struct cli_command {
    const char *name;  /* for messages: "run" */
    const char *usage; /* the help begins with it */
    const char *notes; /* the help ends with it; may be NULL */
    const char *stray; /* what to do with a word that belongs to no option; used without `word` */
    void (*defaults)(void *options);
    bool (*word)(const char *word, void *options); /* NULL = no words */
    cli_option options[CLI_OPTIONS_MAX];
    uint32_t count;
    const char *heading; /* of the next row */
} cli_command;

/** How a field of the library is an option. */
typedef enum cli_how {
    CLI_PLAIN,
    CLI_HIDDEN, /* it is none */
    CLI_FLAG,   /* a switch without an argument */
    CLI_LIST,   /* several values: a sweep */
    CLI_FOLDER, /* a path, but of no file */
    CLI_BUDGET, /* tokens, and a share of the context: 1024+5% */
} cli_how;

typedef struct cli_spelling {
    const char *field;  /* NULL after the last */
    const char *option; /* NULL = the field with dashes */
    cli_how how;
    const char *absent; /* as in cli_option; NULL = that of cli_settings */
} cli_spelling;

typedef struct cli_settings {
    const kvf_setting *(*at)(uint32_t index);
    size_t base;                   /* of the config in the struct of options */
    const cli_spelling *spellings; /* may be NULL; others are as in `also` */
    const cli_spelling *also;      /* may be NULL; others are plain */
    bool only;                     /* others are no options */
    size_t from;                   /* nor are fields before this offset */
    const char *absent;            /* as in cli_option */
    bool (*take)(const cli_option *option, const char *text, void *at);
} cli_settings;

/* ---- a subcommand and its options ---- */

/** The next row begins a group with this heading. */
void cli_heading(cli_command *command, const char *heading);
void cli_add(cli_command *command, const cli_option *rows, size_t count, size_t base);
void cli_add_settings(cli_command *command, const cli_settings *settings);
/** --preset and the settings of a kvf_cache_config at @p base, but for geometry and limits;
 * @p spellings are the command's own, or NULL. */
void cli_add_cache(cli_command *command, size_t base, const cli_spelling *spellings);
/** Those of a kvf_runtime_config at @p base. */
void cli_add_runtime(cli_command *command, size_t base);
/** --cublas, of commands that run a model; the `const char *` at @p base. */
void cli_add_cublas(cli_command *command, size_t base);

/** Set the defaults, then what the command line says. @return -1 to go on, else the exit status */
int cli_parse(cli_command *command, int argc, char **argv, void *options);

/** The option of this name, which must exist. */
const cli_option *cli_option_find(const cli_command *command, const char *name);

/** An error of the library, with the option that sets the field which the text begins with. */
void cli_complain(const cli_command *command, const char *text);

/** The field of a config of the library, as text. @return @p text */
const char *cli_show(const kvf_setting *(*at)(uint32_t index), const char *field,
                     const void *config, char text[32]);

/* ---- for those who read a value themselves ---- */

/** "kvferry: --name is 'text'; give ..." @p give NULL = the range. @return false */
bool cli_refuse(const cli_option *option, const char *text, const char *give);
/** The candidate nearest to a misspelt word, or NULL if none is near. names ends with NULL. */
const char *cli_suggest(const char *word, const char *const *names);

/** Words of a text after an indent, in lines of at most 100 columns. @p column is where the line
 * is. */
void cli_print_words(FILE *file, int indent, int *column, const char *text);

/*
 * Axes of a sweep: options with several values, as text separated by commas, and the walk over all
 * their combinations.
 *
 * It knows lists, not what is measured. Invariant: every value of a list is one of its option.
 */

#define CLI_AXES_MAX 16u

typedef struct cli_axis {
    const cli_option *option;
    const char *values;
} cli_axis;

/** How many values a list has. */
uint32_t cli_axis_count(const char *values);

#define CLI_WORD_BYTES 64u
/** One value of a list. */
void cli_axis_at(const char *values, uint64_t index, char word[CLI_WORD_BYTES]);

/** Combinations of @p count axes. */
uint64_t cli_axes_product(const cli_axis *axes, uint32_t count);

/** Set the fields of @p options to combination @p index; the last axis turns fastest. */
void cli_axes_set(const cli_axis *axes, uint32_t count, uint64_t index, void *options);

#endif
