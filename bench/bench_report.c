/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Options, percentiles and the head of a JSON file; see bench_report.h.
 */

#include "bench_report.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/percentile.h"

/* ---- options ---- */

static const char *program(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static _Noreturn void stop_with_usage(const char *path, const bench_option *options)
{
    fprintf(stderr, "usage: %s", program(path));
    for (; options->name; options++)
        if (options->number)
            fprintf(stderr, " [%s %u..%u]", options->name, options->least, options->most);
        else
            fprintf(stderr, " [%s TEXT]", options->name);
    fputs(" [--json FILE]\n", stderr);
    exit(2);
}

static int read_number(const char *text, const bench_option *option)
{
    char *end = NULL;
    errno = 0;
    const unsigned long long value = strtoull(text, &end, 10);
    if (end == text || *end || errno || value < option->least || value > option->most)
        return 0;
    *option->number = (uint32_t)value;
    return 1;
}

bench_args bench_args_read(int argc, char **argv, const bench_option *options)
{
    bench_args args = {argc, argv, NULL};
    for (int i = 1; i < argc; i += 2) {
        const bench_option *o = options;
        if (i + 1 == argc)
            stop_with_usage(argv[0], options);
        if (strcmp(argv[i], "--json") == 0) {
            args.json = argv[i + 1];
            continue;
        }
        while (o->name && strcmp(o->name, argv[i]) != 0)
            o++;
        if (!o->name || (o->number && !read_number(argv[i + 1], o)))
            stop_with_usage(argv[0], options);
        if (o->text)
            *o->text = argv[i + 1];
    }
    return args;
}

/* ---- figures ---- */

void bench_percentiles(double *values, size_t count, double out[3])
{
    static const unsigned percents[3] = {10, 50, 90};
    kvf_sort(values, count);
    for (int i = 0; i < 3; i++)
        out[i] = kvf_percentile(values, count, percents[i]);
}

/* ---- JSON ---- */

static void json_text(FILE *f, const char *text)
{
    for (const char *c = text; *c; c++) {
        if (*c == '"' || *c == '\\')
            fputc('\\', f);
        if ((unsigned char)*c >= 0x20)
            fputc(*c, f);
    }
}

static void json_machine(FILE *f)
{
    char line[256] = "";
    FILE *info = fopen("/proc/cpuinfo", "r");
    while (info && fgets(line, sizeof line, info) && strncmp(line, "model name", 10) != 0)
        ;
    if (info)
        fclose(info);
    const char *colon = strncmp(line, "model name", 10) == 0 ? strchr(line, ':') : NULL;
    fputs("  \"machine\": \"", f);
    json_text(f, colon ? colon + 2 : "unknown");
    fprintf(f, ", %ld cores\",\n", sysconf(_SC_NPROCESSORS_ONLN));
}

FILE *bench_json_open(const bench_args *args)
{
    if (!args->json)
        return NULL;
    FILE *f = fopen(args->json, "w");
    if (!f) {
        perror(args->json);
        exit(1);
    }
    fputs("{\n", f);
    json_machine(f);
    fputs("  \"command\": \"", f);
    for (int i = 0; i < args->argc; i++) {
        fputs(i ? " " : "", f);
        json_text(f, i ? args->argv[i] : program(args->argv[0]));
    }
    fputs("\",\n", f);
    return f;
}

void bench_json_three(FILE *json, const char *name, const double values[3], const char *end)
{
    fprintf(json, "\"%s\": {\"p10\": %.6g, \"p50\": %.6g, \"p90\": %.6g}%s", name, values[0],
            values[1], values[2], end);
}

void bench_json_close(FILE *json)
{
    if (!json)
        return;
    fputs("}\n", json);
    const int failed = ferror(json);
    if (fclose(json) == 0 && !failed)
        return;
    perror("the JSON file");
    exit(1);
}
