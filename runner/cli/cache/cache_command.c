/* SPDX-License-Identifier: Apache-2.0 */

/*
 * `kvferry cache ls|verify DIR`.
 *
 * It knows folders and what kvf_saved_read says of a file. Invariant: nothing is changed.
 */

#include "commands.h"

#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include <kvferry/save.h>

#include "common/text.h"
#include "options.h"
#include "output.h"

typedef enum file_kind { FILE_OTHER, FILE_SAVED, FILE_DAMAGED, FILE_UNFINISHED } file_kind;

typedef struct cache_options {
    const char *folder;
} cache_options;

typedef struct cache_scan {
    const cache_options *options;
    kvf_runtime *runtime;
    cli_table table;
    uint32_t found, damaged;
    bool failed;
} cache_scan;

#define COLUMNS(X)                                                                                 \
    X(CACHE_FILE, "file", "file", TEXT, 0)                                                         \
    X(CACHE_STATE, "state", "state", TEXT, 0)                                                      \
    X(CACHE_TOKENS, "tokens", "tokens", INTEGER, 0)                                                \
    X(CACHE_MIB, "mib", "MiB", REAL, 1)                                                            \
    X(CACHE_LAYERS, "layers", "layers", INTEGER, 0)                                                \
    X(CACHE_MODEL, "model", "model", TEXT, 0)

enum { COLUMNS(CLI_COLUMN_NUMBER) CACHE_COLUMNS };

static const cli_column columns[] = {COLUMNS(CLI_COLUMN_ROW)};

/* ---- files ---- */

/* NAME.tmp-XXXXXX: a save that was killed, or one that is under way. */
static bool is_unfinished(const char *name)
{
    const size_t length = strlen(name);
    return length > 11 && strncmp(name + length - 11, ".tmp-", 5) == 0;
}

typedef enum file_start { START_OTHER, START_SAVED, START_EMPTY } file_start;

/* How it begins: as a saved sequence, which it is even if it is damaged after that; or with a
 * header that was never written, since a save writes that last. */
static file_start start_of(const char *path)
{
    enum { HEADER_BYTES_MIN = 4096 };
    static const char zeros[HEADER_BYTES_MIN], magic[8] = {"KVFSEQ\r\n"};
    char first[HEADER_BYTES_MIN];
    FILE *file = fopen(path, "rb");
    if (!file)
        return START_OTHER;
    const size_t bytes = fread(first, 1, sizeof first, file);
    const bool is_read = !ferror(file);
    fclose(file);
    if (bytes >= sizeof magic && memcmp(first, magic, sizeof magic) == 0)
        return START_SAVED;
    return is_read && (bytes == 0 || bytes == sizeof first) && memcmp(first, zeros, bytes) == 0
               ? START_EMPTY
               : START_OTHER;
}

static file_kind look_at(cache_scan *scan, const char *path, const char *name, int verify,
                         kvf_saved *saved, kvf_error *error)
{
    struct stat about;
    if (lstat(path, &about) != 0 || !S_ISREG(about.st_mode))
        return FILE_OTHER;
    *saved = (kvf_saved){.bytes = (uint64_t)about.st_size};
    const file_start start = start_of(path);
    if (start != START_SAVED)
        return start == START_EMPTY && is_unfinished(name) ? FILE_UNFINISHED : FILE_OTHER;
    kvf_saved read;
    const kvf_status status = kvf_saved_read(scan->runtime, path, verify, &read, NULL, 0, error);
    if (status != KVF_OK)
        return status == KVF_CORRUPT && is_unfinished(name) ? FILE_UNFINISHED : FILE_DAMAGED;
    *saved = read;
    return FILE_SAVED;
}

static void list_file(cache_scan *scan, const char *name, file_kind kind, const kvf_saved *saved)
{
    static const char *const states[] = {"", "saved", "damaged", "unfinished"};
    cli_cell *row = cli_table_row(&scan->table);
    if (!row) {
        scan->failed = true;
        return;
    }
    cli_cell_text(&row[CACHE_FILE], name);
    cli_cell_text(&row[CACHE_STATE], states[kind]);
    cli_cell_real(&row[CACHE_MIB], (double)saved->bytes / 1048576.0);
    if (kind != FILE_SAVED)
        return;
    cli_cell_integer(&row[CACHE_TOKENS], saved->tokens);
    cli_cell_integer(&row[CACHE_LAYERS], saved->layers);
    cli_cell_text(&row[CACHE_MODEL], saved->model);
}

/* ---- a folder ---- */

typedef void (*file_fn)(cache_scan *scan, const char *path, const char *name);

static void visit_list(cache_scan *scan, const char *path, const char *name)
{
    kvf_saved saved;
    kvf_error error;
    const file_kind kind = look_at(scan, path, name, 0, &saved, &error);
    if (kind != FILE_OTHER)
        list_file(scan, name, kind, &saved);
    scan->found += kind != FILE_OTHER;
}

static void visit_verify(cache_scan *scan, const char *path, const char *name)
{
    kvf_saved saved;
    kvf_error error;
    const file_kind kind = look_at(scan, path, name, 1, &saved, &error);
    if (kind == FILE_SAVED)
        printf("%s ok\n", name);
    else if (kind == FILE_DAMAGED)
        fprintf(stderr, "kvferry: %s\n", error.text);
    scan->damaged += kind == FILE_DAMAGED;
    scan->found += kind != FILE_OTHER;
}

static bool visit_folder(cache_scan *scan, file_fn visit)
{
    struct dirent **entries = NULL;
    const char *folder = scan->options->folder;
    const int count = scandir(folder, &entries, NULL, alphasort);
    if (count < 0) {
        fprintf(stderr, "kvferry: %s: %s\n", folder, kvf_errno_text(errno));
        return false;
    }
    for (int i = 0; i < count; i++) {
        const size_t bytes = strlen(folder) + strlen(entries[i]->d_name) + 2;
        char *path = malloc(bytes);
        if (path) {
            snprintf(path, bytes, "%s/%s", folder, entries[i]->d_name);
            visit(scan, path, entries[i]->d_name);
        }
        scan->failed = scan->failed || !path;
        free(path);
        free(entries[i]);
    }
    free(entries);
    return !scan->failed;
}

/* ---- the commands ---- */

static bool take_word(const char *word, void *options)
{
    cache_options *o = options;
    if (o->folder) {
        fputs("kvferry: one folder at a time; see kvferry cache --help\n", stderr);
        return false;
    }
    o->folder = word;
    return true;
}

static void set_defaults(void *options)
{
    *(cache_options *)options = (cache_options){0};
}

static int run_scan(const cache_options *o, file_fn visit)
{
    cache_scan scan = {.options = o, .table = {.columns = columns, .column_count = CACHE_COLUMNS}};
    kvf_runtime_config config;
    kvf_error error = {0};
    kvf_runtime_config_init(&config);
    config.device = KVF_DEVICE_HOST;
    config.threads = 1;
    if (kvf_runtime_open(&config, &scan.runtime, &error) != KVF_OK) {
        fprintf(stderr, "kvferry: %s\n", error.text);
        return 1;
    }
    bool is_done = visit_folder(&scan, visit);
    if (scan.table.row_count)
        is_done = cli_table_write(&scan.table, CLI_FORMAT_TABLE, &(cli_fact){0}, stdout) && is_done;
    else if (is_done && !scan.found)
        fprintf(stderr, "kvferry: no saved sequence in %s\n", o->folder);
    if (fflush(stdout) != 0) {
        perror("kvferry: standard output");
        is_done = false;
    }
    cli_table_free(&scan.table);
    kvf_runtime_close(scan.runtime);
    return is_done && !scan.damaged ? 0 : 1;
}

int cli_cache_main(int argc, char **argv)
{
    static const struct {
        const char *name, *usage;
        file_fn visit;
    } commands[] = {
        {"ls", "usage: kvferry cache ls DIR\n\nList saved sequences of a folder.", visit_list},
        {"verify",
         "usage: kvferry cache verify DIR\n\nRead every saved sequence of a folder and check it.",
         visit_verify},
    };
    const char *what = argc > 1 ? argv[1] : "";
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++) {
        if (strcmp(what, commands[i].name) != 0)
            continue;
        char name[24];
        cache_options o;
        snprintf(name, sizeof name, "cache %s", what);
        cli_command command = {
            .name = name, .usage = commands[i].usage, .defaults = set_defaults, .word = take_word};
        const int parsed = cli_parse(&command, argc - 1, argv + 1, &o);
        if (parsed >= 0)
            return parsed;
        if (o.folder)
            return run_scan(&o, commands[i].visit);
        fprintf(stderr, "kvferry: a folder is needed; see kvferry %s --help\n", name);
        return 2;
    }
    const bool wants_help = strcmp(what, "--help") == 0 || strcmp(what, "-h") == 0;
    fputs("usage: kvferry cache ls DIR\n"
          "       kvferry cache verify DIR\n",
          wants_help ? stdout : stderr);
    return wants_help ? 0 : 2;
}
