/* SPDX-License-Identifier: Apache-2.0 */

/* Single values on the command lines of both benches; see the header. */

#include "bench_options.h"

bool cli_bench_number(const char *option, const char *text, int64_t least, int64_t most,
                      int64_t *out)
{
    cli_axis one;
    if (!cli_axis_parse(option, text, NULL, least, most, &one))
        return false;
    if (one.count != 1) {
        fprintf(stderr, "kvferry: %s takes one number\n", option);
        return false;
    }
    *out = one.values[0];
    return true;
}

bool cli_bench_u32(const char *option, const char *text, uint32_t least, uint32_t most,
                   uint32_t *out)
{
    int64_t value = 0;
    if (!cli_bench_number(option, text, least, most, &value))
        return false;
    *out = (uint32_t)value;
    return true;
}

bool cli_bench_device(const char *text, kvf_device_kind *out)
{
    static const cli_axis_name names[] = {
        {"auto", KVF_DEVICE_AUTO}, {"host", KVF_DEVICE_HOST}, {"cuda", KVF_DEVICE_CUDA}, {NULL, 0}};
    cli_axis one;
    if (!cli_axis_parse("--device", text, names, 0, 0, &one))
        return false;
    *out = (kvf_device_kind)one.values[0];
    return true;
}

bool cli_bench_format(const char *text, cli_format *out)
{
    if (cli_format_parse(text, out))
        return true;
    fprintf(stderr, "kvferry: --format is '%s'; give table, csv, json, jsonl or md\n", text);
    return false;
}
