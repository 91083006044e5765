/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Compares every kernel of every instruction set that this CPU has, and of the CUDA device, with
 * its reference.
 *
 *     check_kernels [--isa baseline,avx2,...] [--family score,...] [--op NAME,...] [--seed N]
 *                   [--case N] [--bench [--json FILE]]
 *     check_kernels --list
 *
 * `--isa cuda` is the CUDA device, on a GPU or in the emulator, `--isa cpu` all the others. In the
 * emulator, and under a sanitizer, the seed chooses a part of the cases of the slowest; `--case`
 * runs one. Prints the first mismatch of a case with its parameters and seed. `--bench` takes times
 * of a layer's kernels instead, and writes those of a GPU as JSON, too. `--list` prints the names
 * that `--op` takes. Exit: 0 all agree, 1 some do not, 2 wrong use, 77 nothing to compare.
 */

#include <stdio.h>
#include <string.h>

#include "check_support.h"
#include "common/clock.h"
#include "cuda_kernels.h"

static const struct {
    const char *family;
    const char *name;
    void (*run)(check *c);
    uint32_t one_in;
} checks[] = {
#define CHECK(family, name, function, one_in) {#family, #name, function, one_in},
    CHECK_LIST(CHECK)
#undef CHECK
};

#define DOT_NAME(family, op) "," #op

static const struct {
    const char *name;
    uint32_t bit;
    const char *ops; /* all that it has, if not all */
} isas[] = {
    {"reference", KVF_ISA_REFERENCE, NULL},
    {"baseline", KVF_ISA_BASELINE, NULL},
    {"avx2", KVF_ISA_AVX2, NULL},
    {"avx512", KVF_ISA_AVX512, NULL},
    {"avx512_bf16", KVF_ISA_AVX512_BF16, KVF_PAIR_LIST(DOT_NAME, DOT_NAME)},
    {"neon", KVF_ISA_NEON, NULL},
    {"avx_vnni", KVF_ISA_AVX_VNNI, KVF_DOT_LIST(DOT_NAME)},
    {"avx512_vnni", KVF_ISA_AVX512_VNNI, KVF_DOT_LIST(DOT_NAME)},
};
#undef DOT_NAME

/* Operations that say something of a reference without another kernel beside it. */
static const char alone[] = "properties,codes";

/* NULL means any; else the name must be in the comma-separated list. */
static bool is_listed(const char *list, const char *name)
{
    const size_t n = strlen(name);
    while (list) {
        if (strncmp(list, name, n) == 0 && (list[n] == ',' || list[n] == '\0'))
            return true;
        list = strchr(list, ',');
        if (!list)
            return false;
        list++;
    }
    return true;
}

static int usage(void)
{
    fprintf(stderr,
            "usage: check_kernels [--isa LIST] [--family LIST] [--op LIST] [--seed N] [--case N] "
            "[--bench [--json FILE]] | --list\n");
    return 2;
}

static int list(void)
{
    for (size_t i = 0; i < sizeof checks / sizeof *checks; i++)
        printf("%s\n", checks[i].name);
    return 0;
}

/* A family that was checked as a whole has run all its kernels, or a kernel has no case. */
static void missing(check *c, const char *family)
{
    size_t i = 0;
#define MISSING(in, kernel)                                                                        \
    if (!c->ran[i++] && is_listed(family, #in)) {                                                  \
        printf("FAIL %s [%s]: no case runs it\n", #kernel, c->isa);                                \
        c->failures++;                                                                             \
    }
    KVF_KERNEL_LIST(MISSING, MISSING)
#undef MISSING
}

/* References that take long, and write no pointers. */
static const char remembered[] = "score,score_codes,score_centroids,topk,attend,prefill";
static check_memory memories[sizeof checks / sizeof *checks];

/* `has`: what the instruction set has; NULL = all. */
static void compare_all(check *c, const char *family, const char *op, const char *has)
{
    memset(c->ran, 0, sizeof c->ran);
    for (size_t i = 0; i < sizeof checks / sizeof *checks; i++) {
        if (!is_listed(op, checks[i].name) || !is_listed(has, checks[i].name) ||
            !is_listed(family, checks[i].family))
            continue;
        const double start = kvf_now_seconds();
        const uint32_t failures = c->failures;
        c->op = checks[i].name;
        c->cases = c->run = 0;
        const bool is_slow =
            KVF_CHECK_SANITIZED || KVF_CHECK_CROSS || (c->cuda && check_cuda_is_emulated(c->cuda));
        c->one_in = is_slow ? checks[i].one_in : 1;
        if (KVF_CHECK_CROSS && c->one_in > 1)
            c->one_in *= 3;
        c->memory = !c->cuda && is_listed(remembered, c->op) ? &memories[i] : NULL;
        memories[i].at = 0;
        checks[i].run(c);
        check_end(c);
        memories[i].is_full = c->memory != NULL;
        printf("%-12s %-10s %5u cases  %6.2f s  %s\n", c->isa, c->op, c->run,
               kvf_now_seconds() - start, c->failures == failures ? "ok" : "FAILED");
    }
    if (!op && !has && c->only == UINT32_MAX)
        missing(c, family);
}

static void compare_or_time(check *c, const char *family, const char *op, const char *has,
                            bool bench)
{
    if (bench)
        bench_layers(c, op, NULL);
    else
        compare_all(c, family, op, has);
}

/* The number of instruction sets compared. */
static uint32_t compare_cpu(check *c, const char *isa, const char *family, const char *op,
                            bool bench)
{
    uint32_t compared = 0;
    kvf_kernels var;
    for (size_t i = 0; i < sizeof isas / sizeof *isas; i++) {
        const bool is_named = is_listed(isa, isas[i].name);
        if ((kvf_cpu_isa() & isas[i].bit) != isas[i].bit || !(is_named || is_listed(isa, "cpu")))
            continue;
        if (kvf_kernels_init(&var, isas[i].bit) != KVF_OK ||
            (isas[i].bit != 0 && var.isa != isas[i].bit))
            continue; /* not in this build */
        c->var = &var;
        c->isa = isas[i].name;
        compared++;
        const bool is_itself = isas[i].bit == KVF_ISA_REFERENCE && !is_named;
        compare_or_time(c, family, op, is_itself ? alone : isas[i].ops, bench);
    }
    return compared;
}

static void time_cuda(check *c, const char *op, const char *path)
{
    FILE *json = path ? fopen(path, "w") : NULL;
    if (path && !json) {
        perror(path);
        c->failures++;
        return;
    }
    bench_layers(c, op, json);
    if (json && fclose(json) != 0) {
        perror(path);
        c->failures++;
    }
}

/* 1 if the CUDA device was compared. */
static uint32_t compare_cuda(check *c, const char *family, const char *op, bool bench,
                             const char *json)
{
    char why[256] = "";
    kvf_kernels var = {0};
    c->cuda = check_cuda_open(bench, why);
    if (!c->cuda) {
        printf("cuda         skipped: %s\n", why);
        return 0;
    }
    c->var = &var;
    c->isa = check_cuda_name(c->cuda);
#if KVF_HAVE_CUDA
    if (kvf_kernels_init_cuda(&var) != KVF_OK) {
        check_fail(c, "the table of the CUDA device has a hole");
        return 1;
    }
#endif
    if (bench)
        time_cuda(c, op, json);
    else
        compare_all(c, family, op, NULL);
    check_cuda_close(c->cuda);
    c->cuda = NULL;
    return 1;
}

int main(int argc, char **argv)
{
    static check c; /* large, and the same for every run */
    const char *isa = NULL, *family = NULL, *op = NULL, *json = NULL;
    bool bench = false;
    kvf_kernels ref;
    c.seed = 1;
    c.one_in = 1;
    c.only = UINT32_MAX;
    if (argc == 2 && strcmp(argv[1], "--list") == 0)
        return list();
    for (int i = 1; i < argc; i++) {
        const bool more = i + 1 < argc;
        if (strcmp(argv[i], "--bench") == 0)
            bench = true;
        else if (strcmp(argv[i], "--json") == 0 && more)
            json = argv[++i];
        else if (strcmp(argv[i], "--isa") == 0 && more)
            isa = argv[++i];
        else if (strcmp(argv[i], "--family") == 0 && more)
            family = argv[++i];
        else if (strcmp(argv[i], "--op") == 0 && more)
            op = argv[++i];
        else if (strcmp(argv[i], "--seed") == 0 && more)
            c.seed = strtoull(argv[++i], NULL, 10);
        else if (strcmp(argv[i], "--case") == 0 && more)
            c.only = (uint32_t)strtoul(argv[++i], NULL, 10);
        else
            return usage();
    }
    if (json && !bench)
        return usage();
    if (kvf_kernels_init(&ref, KVF_ISA_REFERENCE) != KVF_OK)
        return 1;
    printf("seed %llu\n", (unsigned long long)c.seed);
    c.ref = &ref;
    uint32_t compared = compare_cpu(&c, isa, family, op, bench);
    if (is_listed(isa, "cuda"))
        compared += compare_cuda(&c, family, op, bench, json);
    if (compared == 0) {
        printf("skipped: this CPU or build has none of the devices asked for\n");
        return 77;
    }
    if (!bench)
        printf("%u mismatches\n", c.failures);
    return c.failures ? 1 : 0;
}
