/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Compares every kernel of every instruction set that this CPU has with its reference.
 *
 *     check_kernels [--isa baseline,avx2,...] [--op NAME] [--seed N] [--bench]
 *
 * Prints the first mismatch of a case with its parameters and seed. Exit: 0 all agree, 1 some do
 * not, 2 wrong use, 77 nothing to compare.
 */

#include <stdio.h>
#include <string.h>

#include "check_support.h"

static const struct {
    const char *name;
    void (*run)(check *c);
} checks[] = {
    {"convert", check_convert}, {"digest", check_digest},
    {"score", check_score},     {"reduce", check_reduce},
    {"topk", check_topk},       {"attend", check_attend},
    {"merge", check_merge},     {"prefill", check_prefill},
    {"repack", check_repack},   {"observe", check_observe},
    {"pool", check_pool},       {"copy", check_copy},
    {"resolve", check_resolve}, {"properties", check_properties},
};

static const struct {
    const char *name;
    uint32_t bit;
} isas[] = {
    {"reference", KVF_ISA_REFERENCE}, {"baseline", KVF_ISA_BASELINE},       {"avx2", KVF_ISA_AVX2},
    {"avx512", KVF_ISA_AVX512},       {"avx512_bf16", KVF_ISA_AVX512_BF16}, {"neon", KVF_ISA_NEON},
};

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
    fprintf(stderr, "usage: check_kernels [--isa LIST] [--op NAME] [--seed N] [--bench]\n");
    return 2;
}

static uint32_t compare_all(check *c, const char *op)
{
    uint32_t before = c->failures;
    for (size_t i = 0; i < sizeof checks / sizeof *checks; i++) {
        if (!is_listed(op, checks[i].name))
            continue;
        const double start = check_seconds();
        const uint32_t failures = c->failures;
        c->op = checks[i].name;
        c->cases = 0;
        checks[i].run(c);
        check_end(c);
        printf("%-12s %-10s %5u cases  %6.2f s  %s\n", c->isa, c->op, c->cases,
               check_seconds() - start, c->failures == failures ? "ok" : "FAILED");
    }
    return c->failures - before;
}

int main(int argc, char **argv)
{
    static check c; /* large, and the same for every run */
    const char *isa = NULL, *op = NULL;
    bool bench = false;
    uint32_t compared = 0;
    kvf_kernels ref, var;
    c.seed = 1;
    for (int i = 1; i < argc; i++) {
        const bool more = i + 1 < argc;
        if (strcmp(argv[i], "--bench") == 0)
            bench = true;
        else if (strcmp(argv[i], "--isa") == 0 && more)
            isa = argv[++i];
        else if (strcmp(argv[i], "--op") == 0 && more)
            op = argv[++i];
        else if (strcmp(argv[i], "--seed") == 0 && more)
            c.seed = strtoull(argv[++i], NULL, 10);
        else
            return usage();
    }
    if (kvf_kernels_init(&ref, KVF_ISA_REFERENCE) != KVF_OK)
        return 1;
    printf("seed %llu\n", (unsigned long long)c.seed);
    for (size_t i = 0; i < sizeof isas / sizeof *isas; i++) {
        if ((kvf_cpu_isa() & isas[i].bit) != isas[i].bit || !is_listed(isa, isas[i].name))
            continue;
        if (kvf_kernels_init(&var, isas[i].bit) != KVF_OK)
            return 1;
        if (isas[i].bit != 0 && var.isa != isas[i].bit)
            continue; /* not in this build */
        c.ref = &ref;
        c.var = &var;
        c.isa = isas[i].name;
        compared++;
        if (bench)
            bench_kernels(&c, op);
        else
            compare_all(&c, op);
    }
    if (compared == 0) {
        printf("skipped: this CPU or build has none of the instruction sets asked for\n");
        return 77;
    }
    if (!bench)
        printf("%u mismatches\n", c.failures);
    return c.failures ? 1 : 0;
}
