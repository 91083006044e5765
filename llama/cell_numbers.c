/* SPDX-License-Identifier: Apache-2.0 */

/* Rows of a cache in F16, BF16 or Q8_0 as the library gets them, and masks as sets of cells. A
 * number that F16 cannot hold is told, never made infinite. */

#include <string.h>

#include "common/convert.h"
#include "plugin.h"

enum { Q8_0_BYTES = 34, F16_HIDDEN = 0xfc00 };
#define LOW_BITS UINT64_C(0x0001000100010001) /* of four elements */
#define GATHER   UINT64_C(0x0001000200040008) /* times them, they are bits 48 to 51 */

size_t kvl_row_bytes(int type, size_t count)
{
    if (type == GG_F16 || type == GG_BF16)
        return count * 2;
    if (type == GG_Q8_0 && count % GG_Q8_0_ELEMENTS == 0)
        return count / GG_Q8_0_ELEMENTS * Q8_0_BYTES;
    return 0;
}

void kvl_row_to_f32(int type, const void *from, float *to, size_t count)
{
    if (type != GG_Q8_0) {
        for (size_t i = 0; i < count; i++)
            to[i] = kvf_element_get(from, type == GG_F16 ? KVF_FP16 : KVF_BF16, i);
        return;
    }
    const char *block = from;
    for (size_t i = 0; i < count; i += GG_Q8_0_ELEMENTS, block += Q8_0_BYTES) {
        uint16_t scale;
        memcpy(&scale, block, sizeof scale);
        for (size_t j = 0; j < GG_Q8_0_ELEMENTS; j++)
            to[i + j] = kvf_fp16_to_float(scale) * (float)(int8_t)block[sizeof scale + j];
    }
}

int kvl_fits_f16(const float *x, size_t count)
{
    const uint32_t top = kvf_float_bits(kvf_rounds_below(KVF_FP16));
    uint32_t bad = 0;
    for (size_t i = 0; i < count; i++) {
        const uint32_t magnitude = kvf_float_bits(x[i]) & 0x7fffffffu;
        bad |= magnitude >= top && magnitude < 0x7f800000u;
    }
    return !bad;
}

int kvl_row_read(int type, const void *from, void *to, uint32_t is_wide, size_t count)
{
    if (!is_wide) {
        memcpy(to, from, kvl_row_bytes(type, count));
        return 1;
    }
    kvl_row_to_f32(type, from, to, count);
    return kvl_fits_f16(to, count);
}

int64_t kvl_open_cells(const uint16_t *mask, size_t count, uint64_t *set, int *same)
{
    int64_t open = 0;
    uint64_t other = 0, changed = 0;
    for (size_t w = 0; w < count / 64; w++) {
        uint64_t hidden = 0, counts = 0; /* of four lanes */
        for (size_t i = 0; i < 64; i += 4) {
            uint64_t four;
            memcpy(&four, mask + w * 64 + i, sizeof four);
            const uint64_t signs = four >> 15 & LOW_BITS;
            other |= four ^ signs * F16_HIDDEN;
            hidden |= (signs * GATHER >> 48 & 15) << i;
            counts += signs;
        }
        changed |= ~hidden ^ set[w];
        set[w] = ~hidden;
        open += 64 - (int64_t)(counts * LOW_BITS >> 48);
    }
    *same = changed == 0;
    return other ? -1 : open;
}
