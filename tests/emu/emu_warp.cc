/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Warp operations: lanes meet, and the last of them computes the answers of all.
 *
 * Stricter than the hardware: a mask must not name lanes that have exited or never were, and lanes
 * that wait in the same warp must agree on operation and mask or be disjoint. A shuffle from a lane
 * outside the mask answers KVF_EMU_POISON. Products of 16-bit elements are exact in fp32; they are
 * added in ascending order of the inner dimension.
 */

#include <string.h>

#include "emu_machine.h"

KVF_EMU_QUIET uint32_t kvf_emu_lane(void)
{
    return kvf_emu_machine_get()->current % 32;
}

KVF_EMU_QUIET static void check_meeting(const kvf_emu_warp *warp, const kvf_emu_warp_op *op,
                                        uint32_t mask, uint32_t lane)
{
    if (!(mask >> lane & 1))
        kvf_emu_fail("%s of lanes 0x%08x called by lane %u", op->name, mask, lane);
    if (op->whole_warp && mask != ~0u)
        kvf_emu_fail("%s needs the whole warp, not lanes 0x%08x", op->name, mask);
    if (mask & warp->exited)
        kvf_emu_fail("%s of lanes 0x%08x, of which 0x%08x have exited or are not in the block",
                     op->name, mask, mask & warp->exited);
    for (uint32_t set = warp->meetings; set != 0; set &= set - 1) {
        const int i = __builtin_ctz(set);
        const uint32_t theirs = warp->meeting_mask[i];
        if ((theirs & mask) != 0 && (theirs != mask || warp->meeting_op[i] != op))
            kvf_emu_fail("%s of lanes 0x%08x, while lanes 0x%08x wait in %s of lanes 0x%08x",
                         op->name, mask, warp->meeting_arrived[i], warp->meeting_op[i]->name,
                         theirs);
    }
}

KVF_EMU_QUIET void kvf_emu_warp_meet(const kvf_emu_warp_op *op, uint32_t mask, void *operand)
{
    kvf_emu_machine *m = kvf_emu_machine_get();
    const uint32_t lane = m->current % 32, bit = 1u << lane;
    kvf_emu_warp *warp = &m->warps[m->current / 32];
    const int i = __builtin_ctz(mask | 1u << 31);
    /* Who joins a meeting as it began has nothing new to be asked. */
    if (!(mask & bit) || !(warp->meetings >> i & 1) || warp->meeting_mask[i] != mask ||
        warp->meeting_op[i] != op)
        check_meeting(warp, op, mask, lane);
    if (op->orders_memory)
        KVF_EMU_RELEASE(m, &warp->order);
    if (!(warp->meetings >> i & 1)) {
        warp->meetings |= 1u << i;
        warp->meeting_mask[i] = mask;
        warp->meeting_op[i] = op;
        warp->meeting_arrived[i] = 0;
    }
    warp->operands[lane] = operand;
    warp->meeting_arrived[i] |= bit;
    if (warp->meeting_arrived[i] == mask) {
        warp->meetings &= ~(1u << i);
        op->complete(warp->operands, mask);
        kvf_emu_wake(m, m->current / 32, mask & ~bit);
    } else {
        m->threads[m->current].mask = mask;
        kvf_emu_suspend(m, op->name);
    }
    if (op->orders_memory)
        KVF_EMU_ACQUIRE(m, &warp->order);
}

/* ---- shuffles, votes, reductions ---- */

KVF_EMU_QUIET static void shuffle(void *const *operands, uint32_t mask)
{
    uint64_t values[32];
    for (uint32_t i = 0; i < 32; i++)
        values[i] = mask >> i & 1 ? ((kvf_emu_shuffle *)operands[i])->value
                                  : KVF_EMU_POISON * 0x0001000100010001u;
    for (uint32_t set = mask; set != 0; set &= set - 1) {
        kvf_emu_shuffle *mine = (kvf_emu_shuffle *)operands[__builtin_ctz(set)];
        mine->value = values[mine->source];
    }
}

const kvf_emu_warp_op kvf_emu_shuffle_op = {"__shfl_sync", shuffle, false, false};
const kvf_emu_warp_op kvf_emu_shuffle_up_op = {"__shfl_up_sync", shuffle, false, false};
const kvf_emu_warp_op kvf_emu_shuffle_xor_op = {"__shfl_xor_sync", shuffle, false, false};

static void nothing(void *const *, uint32_t)
{
}

KVF_EMU_QUIET static void ballot(void *const *operands, uint32_t mask)
{
    uint32_t answer = 0;
    for (uint32_t set = mask; set != 0; set &= set - 1)
        answer |= (uint32_t)(((kvf_emu_vote *)operands[__builtin_ctz(set)])->value != 0)
                  << __builtin_ctz(set);
    for (uint32_t set = mask; set != 0; set &= set - 1)
        ((kvf_emu_vote *)operands[__builtin_ctz(set)])->answer = answer;
}

template <uint32_t combine(uint32_t, uint32_t)>
KVF_EMU_QUIET static void reduce(void *const *operands, uint32_t mask)
{
    uint32_t answer = (uint32_t)((kvf_emu_vote *)operands[__builtin_ctz(mask)])->value;
    for (uint32_t set = mask & (mask - 1); set != 0; set &= set - 1)
        answer = combine(answer, (uint32_t)((kvf_emu_vote *)operands[__builtin_ctz(set)])->value);
    for (uint32_t set = mask; set != 0; set &= set - 1)
        ((kvf_emu_vote *)operands[__builtin_ctz(set)])->answer = answer;
}

KVF_EMU_QUIET static uint32_t add(uint32_t a, uint32_t b)
{
    return a + b;
}
KVF_EMU_QUIET static uint32_t min_unsigned(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}
KVF_EMU_QUIET static uint32_t max_unsigned(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

const kvf_emu_warp_op kvf_emu_syncwarp_op = {"__syncwarp", nothing, true, false};
const kvf_emu_warp_op kvf_emu_ballot_op = {"vote (__ballot_sync, __any_sync)", ballot, false,
                                           false};
const kvf_emu_warp_op kvf_emu_reduce_add_op = {"__reduce_add_sync", reduce<add>, false, false};
const kvf_emu_warp_op kvf_emu_reduce_min_op = {"__reduce_min_sync", reduce<min_unsigned>, false,
                                               false};
const kvf_emu_warp_op kvf_emu_reduce_max_op = {"__reduce_max_sync", reduce<max_unsigned>, false,
                                               false};

/* ---- tiles and products ---- */

/* Lane 8 tile + row brought that row; each lane gets two neighbours of each tile. */
template <bool transposed> KVF_EMU_QUIET static void load_tiles(void *const *operands, uint32_t)
{
    uint16_t tiles[4][8][8];
    for (uint32_t i = 0; i < 32; i++)
        __builtin_memcpy(tiles[i / 8][i % 8], ((const kvf_emu_tiles *)operands[i])->row, 16);
    for (uint32_t i = 0; i < 32; i++)
        for (uint32_t tile = 0; tile < 4; tile++) {
            const uint32_t group = i / 4, pair = i % 4 * 2;
            const uint16_t(*t)[8] = tiles[tile];
            const uint32_t low = transposed ? t[pair][group] : t[group][pair];
            const uint32_t high = transposed ? t[pair + 1][group] : t[group][pair + 1];
            ((kvf_emu_tiles *)operands[i])->registers[tile] = low | high << 16;
        }
}

const kvf_emu_warp_op kvf_emu_tiles_op = {"kvf_load_tiles4", load_tiles<false>, false, true};
const kvf_emu_warp_op kvf_emu_tiles_transposed_op = {"kvf_load_tiles4_transposed", load_tiles<true>,
                                                     false, true};

typedef float row8 __attribute__((vector_size(32)));
typedef uint32_t word8 __attribute__((vector_size(32)));

/* Elements are put into arrays one by one, and taken from them by eights. */
template <typename vector, typename T>
KVF_EMU_QUIET static inline void load8(vector *to, const T *from)
{
    __builtin_memcpy(to, from, sizeof(*to));
}

KVF_EMU_QUIET static inline void widen_bf16(const word8 *halves, row8 *to)
{
    *to = (row8)(*halves << 16);
}

KVF_EMU_QUIET static inline void widen_half(const word8 *halves, row8 *to)
{
    const word8 sign = (*halves & 0x8000u) << 16, rest = (*halves & 0x7fffu) << 13;
    const word8 is_special = (word8)(rest >= 0x7c00u << 13);
    const word8 magnitude = (word8)((row8)rest * 0x1p112f);
    *to = (row8)(sign | (is_special & (rest | 0x7f800000u)) | (~is_special & magnitude));
}

/* Fragments put together: words of A by rows, words of B by k; each has 16 bits of two k, or 8 of
 * four. */
template <typename T> struct matrices {
    uint32_t a[16][8], b[8][8];
    T d[16][8];
};

template <typename product, typename T>
KVF_EMU_QUIET static inline void gather(matrices<T> *m, void *const *operands)
{
    for (uint32_t i = 0; i < 32; i++) {
        const product *p = (const product *)operands[i];
        const uint32_t group = i / 4, k = i % 4;
        for (uint32_t r = 0; r < 4; r++) {
            m->a[group + r % 2 * 8][k + r / 2 * 4] = p->a[r];
            m->d[group + r / 2 * 8][k * 2 + r % 2] = p->d[r];
        }
        for (uint32_t r = 0; r < 2; r++)
            m->b[k + r * 4][group] = p->b[r];
    }
}

template <typename product, typename T>
KVF_EMU_QUIET static inline void scatter(const matrices<T> *m, void *const *operands)
{
    for (uint32_t i = 0; i < 32; i++)
        for (uint32_t r = 0; r < 4; r++)
            ((const product *)operands[i])->d[r] = m->d[i / 4 + r / 2 * 8][i % 4 * 2 + r % 2];
}

template <void widen(const word8 *, row8 *)>
KVF_EMU_QUIET static inline void widen_pairs(const uint32_t *words, row8 pair[2])
{
    word8 both, half;
    load8(&both, words);
    half = both & 0xffffu;
    widen(&half, &pair[0]);
    half = both >> 16;
    widen(&half, &pair[1]);
}

template <void widen(const word8 *, row8 *)>
KVF_EMU_QUIET static void multiply(void *const *operands, uint32_t)
{
    matrices<float> m;
    float a[16][2][8];
    row8 b[8][2], pair[2];
    gather<kvf_emu_product>(&m, operands);
    for (uint32_t k = 0; k < 8; k++)
        widen_pairs<widen>(m.b[k], b[k]);
    for (uint32_t i = 0; i < 16; i++) {
        widen_pairs<widen>(m.a[i], pair);
        __builtin_memcpy(a[i], pair, sizeof(pair));
    }
    for (uint32_t i = 0; i < 16; i++) {
        row8 d;
        load8(&d, m.d[i]);
        for (uint32_t k = 0; k < 8; k++) {
            d += a[i][0][k] * b[k][0];
            d += a[i][1][k] * b[k][1];
        }
        __builtin_memcpy(m.d[i], &d, sizeof(d));
    }
    scatter<kvf_emu_product>(&m, operands);
}

const kvf_emu_warp_op kvf_emu_mma_bf16_op = {"kvf_mma (bf16)", multiply<widen_bf16>, false, true};
const kvf_emu_warp_op kvf_emu_mma_half_op = {"kvf_mma (fp16)", multiply<widen_half>, false, true};

KVF_EMU_QUIET static void multiply_bytes(void *const *operands, uint32_t)
{
    typedef int16_t short8 __attribute__((vector_size(16)));
    typedef int32_t int8v __attribute__((vector_size(32)));
    matrices<int32_t> m;
    gather<kvf_emu_byte_product>(&m, operands);
    short8 b[4][8];
    for (uint32_t k = 0; k < 8; k++) {
        word8 four;
        load8(&four, m.b[k]);
        for (uint32_t byte = 0; byte < 4; byte++)
            b[byte][k] = __builtin_convertvector((int8v)(four << (24 - 8 * byte)) >> 24, short8);
    }
    for (uint32_t i = 0; i < 16; i++) {
        int8v d;
        load8(&d, m.d[i]);
        for (uint32_t k = 0; k < 8; k++)
            for (uint32_t byte = 0; byte < 4; byte++) {
                const int16_t a = (int8_t)(m.a[i][k] >> (8 * byte));
                d += __builtin_convertvector(a * b[byte][k], int8v);
            }
        __builtin_memcpy(m.d[i], &d, sizeof(d));
    }
    scatter<kvf_emu_byte_product>(&m, operands);
}

const kvf_emu_warp_op kvf_emu_mma_s8_op = {"kvf_mma_s8", multiply_bytes, false, true};
