/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Clocks, percentiles and the machine's name; see bench_report.h.
 */

#include "bench_report.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/clock.h"

double bench_seconds(void)
{
    return kvf_now_seconds();
}

static int compare(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

void bench_percentiles(double *values, size_t count, double out[3])
{
    qsort(values, count, sizeof *values, compare);
    out[0] = values[count / 10];
    out[1] = values[count / 2];
    out[2] = values[count - 1 - count / 10];
}

static void json_text(FILE *f, const char *text)
{
    fputc('"', f);
    for (const char *c = text; *c; c++) {
        if (*c == '"' || *c == '\\')
            fputc('\\', f);
        if ((unsigned char)*c >= 0x20)
            fputc(*c, f);
    }
    fputc('"', f);
}

void bench_json_machine(FILE *f, int argc, char **argv)
{
    char line[256], model[256] = "unknown";
    FILE *info = fopen("/proc/cpuinfo", "r");
    while (info && fgets(line, sizeof line, info)) {
        const char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) == 0 && colon) {
            snprintf(model, sizeof model, "%s", colon + 2);
            model[strcspn(model, "\n")] = 0;
            break;
        }
    }
    if (info)
        fclose(info);
    char machine[320];
    snprintf(machine, sizeof machine, "%s, %ld cores", model, sysconf(_SC_NPROCESSORS_ONLN));
    fputs("  \"machine\": ", f);
    json_text(f, machine);
    fputs(",\n  \"command\": ", f);
    char command[1024] = "";
    size_t used = 0;
    for (int i = 0; i < argc && used < sizeof command; i++) {
        const char *slash = i ? NULL : strrchr(argv[0], '/');
        const int n = snprintf(command + used, sizeof command - used, "%s%s", i ? " " : "",
                               slash ? slash + 1 : argv[i]);
        used += n > 0 ? (size_t)n : 0;
    }
    json_text(f, command);
    fputs(",\n", f);
}
