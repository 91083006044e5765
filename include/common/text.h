/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_COMMON_TEXT_H
#define KVF_COMMON_TEXT_H

/*
 * Numbers as people read them. It knows nothing of what is counted.
 */

#include <stdint.h>
#include <stdio.h>

/* A size, e.g. "1.50 GiB"; UINT64_MAX is "unlimited". Returns text. */
static inline const char *kvf_bytes_text(uint64_t bytes, char text[32])
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    if (bytes == UINT64_MAX) {
        snprintf(text, 32, "unlimited");
        return text;
    }
    double value = (double)bytes;
    unsigned unit = 0;
    while (value >= 1024.0 && unit < 6) {
        value /= 1024.0;
        unit++;
    }
    if (unit == 0)
        snprintf(text, 32, "%llu B", (unsigned long long)bytes);
    else
        snprintf(text, 32, "%.2f %s", value, units[unit]);
    return text;
}

#endif
