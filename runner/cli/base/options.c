/* SPDX-License-Identifier: Apache-2.0 */

/* The options of every subcommand; see the header. */

#include "options.h"

#include "common/base.h"

#include <getopt.h>
#include <stdlib.h>
#include <string.h>

#include "common/text.h"

#define INDENT  29
#define COLUMNS 100
#define TEXT    256u

/* ---- rows ---- */

static cli_option *add(cli_command *c, const cli_option *row, size_t base)
{
    KVF_ASSERT(c->count < CLI_OPTIONS_MAX);
    cli_option *o = &c->options[c->count++];
    *o = *row;
    o->base = base;
    o->heading = c->heading;
    c->heading = NULL;
    return o;
}

void cli_heading(cli_command *c, const char *heading)
{
    c->heading = heading;
}

void cli_add(cli_command *c, const cli_option *rows, size_t count, size_t base)
{
    for (size_t i = 0; i < count; i++)
        add(c, &rows[i], base);
}

/* Tokens, and a share of the context after a plus: 1024+5%. */
static bool take_budget(const cli_option *option, const char *text, void *at)
{
    static const char give[] = "tokens, or tokens and a share of the context: 1024 or 1024+5%";
    kvf_cache_config *config = at;
    const char *plus = strchr(text, '+');
    char tokens[32], *end;
    const double percent = plus ? kvf_real_of(plus + 1, &end) : 0.0;
    if (plus && (plus[1] < '0' || plus[1] > '9' || strcmp(end, "%") != 0 || percent > 100.0))
        return cli_refuse(option, text, give);
    snprintf(tokens, sizeof tokens, "%.*s", (int)strcspn(text, "+"), text);
    if (!kvf_setting_parse(&option->is, tokens, at))
        return cli_refuse(option, text, plus ? give : NULL);
    config->budget_share = (float)(percent / 100.0);
    return true;
}

/* Spellings of kvf_cache_setting, for every command. Hidden is what another option sets, and by
 * `from` below geometry and limits, which follow from the model and the prompt: those are options
 * only of a command that spells them. */
static const cli_spelling cache_spellings[] = {
    {"budget_tokens", "budget", CLI_BUDGET, NULL},
    {"budget_share", NULL, CLI_HIDDEN, NULL}, /* --budget says it */
    {"sink_tokens", "sink", CLI_PLAIN, NULL},
    {"local_tokens", "local", CLI_PLAIN, NULL},
    {"refresh_interval", "refresh", CLI_PLAIN, NULL},
    {"refresh", "refresh-mode", CLI_PLAIN, NULL},
    {"verify_interval", NULL, CLI_HIDDEN, NULL},
    {"coarse_share", NULL, CLI_HIDDEN, NULL},
    {"streaming_sink", NULL, CLI_HIDDEN, NULL},
    {"streaming_recent", NULL, CLI_HIDDEN, NULL},
    {"disk_path", "disk", CLI_FOLDER, NULL},
    {"host_bytes", "host-memory", CLI_PLAIN, NULL},
    {"device_bytes", "device-memory", CLI_PLAIN, NULL},
    {0},
};

static const cli_spelling *find_spelling(const cli_spelling *list, const char *field)
{
    for (; list && list->field; list++)
        if (strcmp(list->field, field) == 0)
            return list;
    return NULL;
}

static const cli_spelling *spelling_of(const cli_settings *settings, const kvf_setting *row)
{
    static const cli_spelling plain = {0}, hidden = {.how = CLI_HIDDEN};
    const cli_spelling *s = find_spelling(settings->spellings, row->name);
    if (!s)
        s = find_spelling(settings->also, row->name);
    if (!s)
        s = settings->only || row->offset < settings->from ? &hidden : &plain;
    return s;
}

void cli_add_settings(cli_command *c, const cli_settings *settings)
{
    const kvf_setting *setting;
    for (uint32_t i = 0; (setting = settings->at(i)) != NULL; i++) {
        const cli_spelling *s = spelling_of(settings, setting);
        if (s->how == CLI_HIDDEN)
            continue;
        const cli_option row = {.is = *setting,
                                .absent = s->absent ? s->absent : settings->absent,
                                .take = settings->take,
                                .is_list = s->how == CLI_LIST};
        cli_option *o = add(c, &row, settings->base);
        if (s->how == CLI_BUDGET) {
            o->take = take_budget;
            o->argument = "N[+P%]";
        }
        if (setting->kind == KVF_SETTING_SWITCH && s->how != CLI_FLAG)
            o->argument = "on|off";
        if (s->how == CLI_FOLDER)
            o->argument = "DIR";
        snprintf(o->spelled, sizeof o->spelled, "%s", s->option ? s->option : setting->name);
        for (char *at = o->spelled; (at = strchr(at, '_')) != NULL;)
            *at = '-';
        o->is.name = o->spelled;
        o->field = setting->name;
    }
}

static bool take_preset(const cli_option *option, const char *text, void *at)
{
    kvf_preset preset;
    if (!kvf_setting_parse(&option->is, text, &preset))
        return cli_refuse(option, text, NULL);
    kvf_cache_config_preset(at, preset);
    return true;
}

static void add_preset(cli_command *c, size_t base)
{
#define NAME(name, value, text, meaning) text,
    static const char *const names[] = {KVF_PRESET_LIST(NAME) NULL};
    static const cli_option row = {.is = {"preset", KVF_SETTING_NAME, .bytes = sizeof(kvf_preset),
                                          .names = names, .high = sizeof names / sizeof *names - 2,
                                          .meaning = "values of the options below"},
                                   .absent = "default",
                                   .is_first = true,
                                   .take = take_preset};
    cli_add(c, &row, 1, base);
}

void cli_add_cache(cli_command *c, size_t base, const cli_spelling *spellings)
{
    add_preset(c, base);
    cli_add_settings(c, &(cli_settings){.at = kvf_cache_setting,
                                        .base = base,
                                        .spellings = spellings,
                                        .also = cache_spellings,
                                        .from = offsetof(kvf_cache_config, page_size)});
}

void cli_add_runtime(cli_command *c, size_t base)
{
    static const cli_spelling spellings[] = {
        {"allow_unpinned", NULL, CLI_FLAG, NULL},
        {"calibration_path", "calibration", CLI_PLAIN, "~/.cache/kvferry/links; - = no file"},
        {0}};
    cli_heading(c, "Machine:");
    cli_add_settings(
        c, &(cli_settings){.at = kvf_runtime_setting, .base = base, .spellings = spellings});
}

void cli_add_cublas(cli_command *c, size_t base)
{
    static const cli_option row = {.is = {"cublas", KVF_SETTING_TEXT, .bytes = sizeof(const char *),
                                          .meaning = "cuBLAS, or the folder that has it (CUDA)"},
                                   .argument = "PATH",
                                   .absent = "look for it, also in the Python environment"};
    cli_add(c, &row, 1, base);
}

static bool is_flag(const cli_option *o)
{
    return o->is.kind == KVF_SETTING_SWITCH && !o->argument;
}

const cli_option *cli_option_find(const cli_command *c, const char *name)
{
    for (uint32_t i = 0; i < c->count; i++)
        if (strcmp(c->options[i].is.name, name) == 0)
            return &c->options[i];
    abort(); /* the caller knows its options */
}

const char *cli_show(const kvf_setting *(*at)(uint32_t index), const char *field,
                     const void *config, char text[32])
{
    const kvf_setting *setting;
    for (uint32_t i = 0; (setting = at(i)) != NULL; i++)
        if (strcmp(setting->name, field) == 0)
            return kvf_setting_show(setting, config, text, 32);
    abort(); /* the caller knows the fields */
}

/* ---- help ---- */

static void print_word(FILE *file, int indent, int *column, const char *word, size_t size)
{
    if (*column > indent && *column + 1 + (int)size > COLUMNS) {
        fputs("\n", file);
        *column = 0;
    }
    *column += fprintf(file, "%*s", *column < indent ? indent - *column : 1, "");
    *column += fprintf(file, "%.*s", (int)size, word);
}

void cli_print_words(FILE *file, int indent, int *column, const char *text)
{
    while (*text) {
        const size_t size = strcspn(text, " ");
        print_word(file, indent, column, text, size);
        text += size + strspn(text + size, " ");
    }
}

static const char *argument_of(const cli_option *o)
{
    static const char *const of_kind[] = {
        [KVF_SETTING_WHOLE] = "N",   [KVF_SETTING_POWER] = "N", [KVF_SETTING_SWITCH] = "",
        [KVF_SETTING_NAME] = "NAME", [KVF_SETTING_REAL] = "X",  [KVF_SETTING_SHARE] = "X",
        [KVF_SETTING_TEXT] = "FILE"};
    return o->argument ? o->argument : of_kind[o->is.kind];
}

/* The value without the option; nothing where that is plain. */
static const char *default_of(const cli_option *o, const void *options, char text[TEXT])
{
    const void *at = (const char *)options + o->base;
    if (o->absent || is_flag(o))
        return o->absent ? o->absent : "";
    kvf_setting_show(&o->is, at, text, TEXT);
    const unsigned long long mib = o->is.kind == KVF_SETTING_WHOLE ? strtoull(text, NULL, 10) : 0;
    if (mib > 0 && mib % 1048576 == 0)
        snprintf(text, TEXT, "%lluM", mib / 1048576);
    return text;
}

static void print_option(const cli_option *o, const void *options, FILE *file)
{
    const bool has_names = o->is.kind == KVF_SETTING_NAME || o->is.kind == KVF_SETTING_POWER;
    char text[TEXT], range[TEXT], value[TEXT];
    if (o->heading)
        fprintf(file, "\n%s\n\n", o->heading);
    snprintf(text, sizeof text, "-%c, ", o->letter);
    int column = fprintf(file, "  %s--%s %s%s", o->letter ? text : "", o->is.name, argument_of(o),
                         o->is_list ? ",..." : "");
    if (column >= INDENT) {
        fputs("\n", file);
        column = 0;
    }
    cli_print_words(file, INDENT, &column, o->is.meaning);
    if (has_names || o->is.special)
        snprintf(text, sizeof text, has_names ? "%s" : "or %s",
                 has_names ? kvf_setting_range(&o->is, range, sizeof range) : o->is.special);
    if (has_names || o->is.special) {
        column += fprintf(file, has_names ? ":" : ",");
        cli_print_words(file, INDENT, &column, text);
    }
    const char *held = default_of(o, options, value);
    const int size = snprintf(text, sizeof text, "(default: %s)", held);
    if (held[0])
        print_word(file, INDENT, &column, text, (size_t)size);
    fputs("\n", file);
}

static void print_help(const cli_command *c, const void *options, FILE *file)
{
    static const cli_option help = {
        .is = {.name = "help", .kind = KVF_SETTING_SWITCH, .meaning = "print this text"},
        .letter = 'h'};
    fprintf(file, "%s\n", c->usage);
    for (uint32_t i = 0; i < c->count; i++)
        print_option(&c->options[i], options, file);
    print_option(&help, options, file);
    fprintf(file,
            "\n%s%sNumbers may end with K, M or G (1024s).\n"
            "Exit status: 0 done, 1 something failed, 2 wrong usage, 128 and the number\n"
            "of the signal when interrupted (130: Ctrl-C).\n",
            c->notes ? c->notes : "", c->notes ? "\n" : "");
}

/* ---- one value ---- */

bool cli_refuse(const cli_option *o, const char *text, const char *give)
{
    char range[TEXT];
    const char *near =
        !give && o->is.kind == KVF_SETTING_NAME ? cli_suggest(text, o->is.names) : NULL;
    fprintf(stderr, "kvferry: --%s %s '%s'; give %s", o->is.name, o->is_list ? "has" : "is", text,
            give ? give : kvf_setting_range(&o->is, range, sizeof range));
    fprintf(stderr, near ? " (did you mean '%s'?)\n" : "\n", near);
    return false;
}

/* Every value of a list must be one; the field stays as it is. */
static bool take_list(const cli_option *o, const char *text, void *at)
{
    char word[TEXT], field[32], *to = (char *)at + o->is.offset;
    size_t size;
    bool fine = true;
    KVF_ASSERT(o->is.bytes <= sizeof field);
    memcpy(field, to, o->is.bytes);
    for (;; text += size + 1) {
        size = strcspn(text, ",");
        snprintf(word, sizeof word, "%.*s", (int)(size < TEXT ? size : TEXT), text);
        fine = kvf_setting_parse(&o->is, word, at);
        if (!fine || !text[size])
            break;
    }
    memcpy(to, field, o->is.bytes);
    return fine || cli_refuse(o, word, NULL);
}

static bool take(cli_option *o, const char *text, void *options)
{
    void *at = (char *)options + o->base;
    o->given = text;
    if (o->is_list)
        return take_list(o, text, at);
    if (o->take)
        return o->take(o, text, at);
    return kvf_setting_parse(&o->is, text, at) || cli_refuse(o, text, NULL);
}

/* ---- the command line ---- */

static bool is_name_of(const char *text, const char *name)
{
    const size_t size = strlen(name);
    return strncmp(text, name, size) == 0 && text[size] == ' ';
}

/* Whether the option sets the field that the text begins with. */
static bool says(const cli_option *o, const char *text)
{
    return (o->field && is_name_of(text, o->field)) ||
           (o->take == take_budget && is_name_of(text, "budget_share"));
}

void cli_complain(const cli_command *c, const char *text)
{
    fputs("kvferry: ", stderr);
    for (uint32_t i = 0; i < c->count; i++)
        if (says(&c->options[i], text)) {
            fprintf(stderr, "--%s: ", c->options[i].is.name);
            break;
        }
    fprintf(stderr, "%s\n", text);
}

static int unknown_option(const cli_command *c, const char *word)
{
    const char *names[CLI_OPTIONS_MAX + 2] = {"help"};
    char bare[64];
    for (uint32_t i = 0; i < c->count; i++)
        names[i + 1] = c->options[i].is.name;
    snprintf(bare, sizeof bare, "%s", word + strspn(word, "-"));
    bare[strcspn(bare, "=")] = '\0';
    const char *near = cli_suggest(bare, names);
    fprintf(stderr, "kvferry: unknown option '%s'", word);
    if (near)
        fprintf(stderr, "; did you mean --%s?\n", near);
    else
        fprintf(stderr, "; see kvferry %s --help\n", c->name);
    return 2;
}

/* Values above those of letters: the row's number. */
#define FIRST_ROW 256

static void fill_table(const cli_command *c, struct option *table, char *letters)
{
    *letters++ = ':';
    *letters++ = 'h';
    for (uint32_t i = 0; i < c->count; i++) {
        const cli_option *o = &c->options[i];
        table[i] = (struct option){.name = o->is.name,
                                   .has_arg = is_flag(o) ? no_argument : required_argument,
                                   .val = FIRST_ROW + (int)i};
        if (o->letter) {
            *letters++ = o->letter;
            *letters++ = ':';
        }
    }
    table[c->count] = (struct option){.name = "help", .val = 'h'};
    *letters = '\0';
}

static cli_option *row_of(cli_command *c, int id)
{
    uint32_t i = 0;
    if (id >= FIRST_ROW)
        return &c->options[id - FIRST_ROW];
    while (c->options[i].letter != id)
        i++;
    return &c->options[i];
}

static int take_words(const cli_command *c, int argc, char **argv, void *options)
{
    for (; optind < argc; optind++) {
        if (!c->word)
            fprintf(stderr, "kvferry: '%s' belongs to no option; %s\n", argv[optind], c->stray);
        if (!c->word || !c->word(argv[optind], options))
            return 2;
    }
    return -1;
}

/* Rows that are taken first; what is wrong with others is said later. */
static bool take_first(cli_command *c, int argc, char **argv, const struct option *table,
                       const char *letters, void *options)
{
    optind = 0; /* begin anew: getopt has moved words after the options */
    for (int id; (id = getopt_long(argc, argv, letters, table, NULL)) != -1;) {
        if (id == '?' || id == ':' || id == 'h')
            continue;
        cli_option *row = row_of(c, id);
        if (row->is_first && !take(row, optarg, options))
            return false;
    }
    return true;
}

int cli_parse(cli_command *c, int argc, char **argv, void *options)
{
    struct option table[CLI_OPTIONS_MAX + 2] = {{0}};
    char letters[2 * CLI_OPTIONS_MAX + 3];
    fill_table(c, table, letters);
    c->defaults(options);
    opterr = 0;
    if (!take_first(c, argc, argv, table, letters, options))
        return 2;
    optind = 0;
    for (int id; (id = getopt_long(argc, argv, letters, table, NULL)) != -1;) {
        if (id == '?')
            return unknown_option(c, argv[optind - 1]);
        if (id == ':') {
            fprintf(stderr, "kvferry: %s needs a value; see kvferry %s --help\n", argv[optind - 1],
                    c->name);
            return 2;
        }
        if (id == 'h') {
            c->defaults(options);
            print_help(c, options, stdout);
            return 0;
        }
        cli_option *row = row_of(c, id);
        if (!row->is_first && !take(row, optarg ? optarg : "on", options))
            return 2;
    }
    return take_words(c, argc, argv, options);
}

/* The walk over a sweep; see the header. */

uint32_t cli_axis_count(const char *values)
{
    uint32_t count = 1;
    while ((values = strchr(values, ',')) != NULL) {
        values++;
        count++;
    }
    return count;
}

void cli_axis_at(const char *values, uint64_t index, char word[CLI_WORD_BYTES])
{
    for (; index > 0; index--)
        values = strchr(values, ',') + 1;
    snprintf(word, CLI_WORD_BYTES, "%.*s", (int)strcspn(values, ","), values);
}

uint64_t cli_axes_product(const cli_axis *axes, uint32_t count)
{
    uint64_t product = 1;
    for (uint32_t i = 0; i < count; i++)
        product *= cli_axis_count(axes[i].values);
    return product;
}

void cli_axes_set(const cli_axis *axes, uint32_t count, uint64_t index, void *options)
{
    for (uint32_t i = count; i-- > 0;) {
        const uint32_t values = cli_axis_count(axes[i].values);
        char word[CLI_WORD_BYTES];
        cli_axis_at(axes[i].values, index % values, word);
        const int is_set =
            kvf_setting_parse(&axes[i].option->is, word, (char *)options + axes[i].option->base);
        KVF_ASSERT(is_set);
        (void)is_set;
        index /= values;
    }
}

/*
 * Suggestions for a misspelt word.
 *
 * It knows words only. Invariant: a suggestion differs in fewer letters than the word has.
 */

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
