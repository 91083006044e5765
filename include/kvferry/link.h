/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVFERRY_LINK_H
#define KVFERRY_LINK_H

/**
 * @file
 * kvferry/link: how fast scattered pages of host memory reach the device.
 *
 * One case in, one result out. A case describes which pages of host memory go to the device, by
 * which method, and under which other load. The result contains times over all repetitions, on the
 * copying stream and end to end, and the number of bytes that were verified. On the host device the
 * same cases are measured with memory copies.
 *
 *     kvf_link_open(runtime, &link);
 *     kvf_link_case c;
 *     kvf_link_case_init(&c);
 *     c.method = KVF_TRANSFER_GATHER; c.page_bytes = 16384; c.pages = 256;
 *     kvf_link_result r;
 *     kvf_link_measure(link, &c, NULL, &r);
 *     double bytes_per_second = 1e9 * (double)r.bytes / (double)r.total.median_ns;
 *     kvf_link_close(link);
 */

#include <kvferry/kvferry.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvf_link kvf_link;

#define KVF_LINK_WHAT_LIST(X)                                                                      \
    X(KVF_LINK_BOTH, 0, "both", "bring the pages as `method` does")                                \
    X(KVF_LINK_GATHER, 1, "gather",                                                                \
      "the workers alone: pages into staging; nothing crosses the link")                           \
    X(KVF_LINK_COPY, 2, "copy",                                                                    \
      "the copies alone: full staging chunks, as many bytes as the pages have")                    \
    X(KVF_LINK_PEAK, 3, "peak",                                                                    \
      "one contiguous copy of `pages * page_bytes`: what the link can do")                         \
    X(KVF_LINK_PIN, 4, "pin", "the cost to touch, register and unregister `pool_bytes`")           \
    X(KVF_LINK_CADENCE, 5, "cadence", "`layers` fetches in a row, compute of `gap_ns` after each") \
    X(KVF_LINK_TAX, 6, "tax", "compute alone, then the same compute while pages are brought")      \
    X(KVF_LINK_MEMCPY, 7, "memcpy",                                                                \
      "one core copies page after page into staging: the baseline of GATHER")                      \
    X(KVF_LINK_BACK, 8, "back",                                                                    \
      "one contiguous copy of `pages * page_bytes` to the host, and nothing to the device")

typedef enum kvf_link_what { KVF_LINK_WHAT_LIST(KVF_ENUMERATOR) } kvf_link_what;

#define KVF_LINK_PATTERN_LIST(X)                                                                   \
    X(KVF_LINK_UNIFORM, 0, "uniform", "distinct pages, anywhere in the pool")                      \
    X(KVF_LINK_ZIPF, 1, "zipf",                                                                    \
      "page of rank r with weight r^-zipf; ranks spread over the pool, repeats")                   \
    X(KVF_LINK_RUNS, 2, "runs", "runs of `run_pages` neighbours, anywhere")

typedef enum kvf_link_pattern { KVF_LINK_PATTERN_LIST(KVF_ENUMERATOR) } kvf_link_pattern;

typedef struct kvf_link_case {
    size_t size;         /**< set by init */
    kvf_link_what what;  /**< default BOTH */
    kvf_transfer method; /**< GATHER, EACH, MAPPED or BATCH; of BOTH, CADENCE and TAX; GATHER */
    kvf_link_pattern pattern;   /**< default UNIFORM */
    uint32_t run_pages;         /**< of RUNS; default 8 */
    double zipf;                /**< exponent of ZIPF, 0.1 … 4; default 1 */
    size_t page_bytes;          /**< a multiple of 64, 64 … 1 MiB; default 16384 */
    uint32_t pages;             /**< of one fetch, 1 … 65536; default 256 */
    uint64_t pool_bytes;        /**< of host memory, at least one fetch; default 256 MiB */
    size_t chunk_bytes;         /**< of staging; 0 = the library's choice */
    uint32_t depth;             /**< of staging; 0 = the library's choice */
    uint32_t workers;           /**< that gather, 1 … 256; 0 = the runtime's setting */
    uint32_t blocks;            /**< of the device that MAPPED takes; 0 = the library's choice */
    int32_t numa_node;          /**< of the pool and of staging; -1 = the runtime's choice */
    kvf_huge_pages huge_pages;  /**< of the pool; default AUTO */
    uint32_t writeback_percent; /**< bytes to the host at the same time, of those to the device;
                                   default 0; not of BACK */
    uint32_t layers;            /**< of CADENCE; default 32 */
    uint32_t gap_ns;      /**< of CADENCE and TAX: length of one piece of compute; default 100000 */
    uint32_t repetitions; /**< measured, 1 … 65536; default 20 */
    uint32_t warmup;      /**< not measured; default 3 */
    uint64_t seed;        /**< of the pages chosen; each repetition draws again; default 1 */
    uint32_t
        slots_in_order; /**< 1: slots follow each other; 0: scattered, as in a cache; default 0 */
} kvf_link_case;

/** Nanoseconds; all 0 if the case does not measure that time. */
typedef struct kvf_link_times {
    uint64_t min_ns, median_ns, p95_ns, p99_ns, max_ns;
} kvf_link_times;

typedef struct kvf_link_result {
    /** From submission until the host sees the bytes' arrival, one per repetition. CADENCE: of a
        whole step. TAX: of the compute during fetches. PIN: touch + register + unregister. */
    kvf_link_times total;
    /** Time on the copying stream, by its own clock, one per repetition. BOTH, COPY, PEAK, BACK. */
    kvf_link_times copying;
    kvf_link_times gather; /**< of the workers, one per repetition; GATHER, BOTH with GATHER */
    kvf_link_times
        fetch; /**< CADENCE: of each fetch on the caller's stream, layers x repetitions */
    kvf_link_times alone; /**< TAX: the compute without fetches */
    uint64_t bytes;       /**< to the device (GATHER, MEMCPY: to staging; BACK: to the host), per
                             repetition */
    uint64_t copies;      /**< submitted, per repetition */
    uint64_t writeback_bytes; /**< to the host during all measured repetitions */
    uint64_t verified_bytes;  /**< compared with what the pool holds; none differed */
    double touch_s_per_gib;   /**< PIN */
    double register_s_per_gib;
    double unregister_s_per_gib;
    char tier[16];     /**< huge pages that the pool obtained: "hugetlb", "thp", "4k" */
    int32_t numa_node; /**< that the pool is bound to; -1 = none */
    uint32_t workers, depth, blocks; /**< in force */
    size_t chunk_bytes;              /**< in force */
} kvf_link_result;

KVF_API void kvf_link_case_init_sized(kvf_link_case *c, size_t size);
static inline void kvf_link_case_init(kvf_link_case *c)
{
    kvf_link_case_init_sized(c, sizeof *c);
}

/**
 * Open a bench on a runtime. It keeps the pool of the case before, so cases that differ in anything
 * but pool_bytes, numa_node and huge_pages do not pay for it again.
 *
 * @return KVF_OK, KVF_OUT_OF_MEMORY, KVF_SYSTEM
 */
KVF_API KVF_CHECKED kvf_status kvf_link_open(kvf_runtime *runtime, kvf_link **out);

/** Close it before its runtime. NULL is fine. */
KVF_API void kvf_link_close(kvf_link *link);

/**
 * Measure one case. Waits until it is done; the text of an error is kvf_runtime_error's.
 *
 * @param samples_ns   receives the totals of all repetitions in order, [repetitions]; may be NULL
 * @return KVF_OK; KVF_INVALID naming the field; KVF_UNSUPPORTED if the device lacks the method;
 *         KVF_OUT_OF_MEMORY, KVF_OUT_OF_DEVICE_MEMORY or KVF_PIN_FAILED; KVF_DEVICE_FAILED.
 *         KVF_CORRUPT if a byte that arrived is not the one that was sent
 *
 * Thread: one at a time per bench. Memory: reserves pool, slots and staging, and frees the last
 * two.
 */
KVF_API KVF_CHECKED kvf_status kvf_link_measure_sized(kvf_link *link, const kvf_link_case *c,
                                                      uint64_t *samples_ns, kvf_link_result *result,
                                                      size_t size);
static inline KVF_CHECKED kvf_status kvf_link_measure(kvf_link *link, const kvf_link_case *c,
                                                      uint64_t *samples_ns, kvf_link_result *result)
{
    return kvf_link_measure_sized(link, c, samples_ns, result, sizeof *result);
}

/** y = intercept + slope x, by least squares. */
typedef struct kvf_link_line {
    double intercept;
    double slope;
    double r_squared; /**< 1 = the points lie on the line; 1 too if all y are the same */
} kvf_link_line;

/**
 * Fit a line, each point weighted by 1 / y^2, so that small transfers count as much as large ones.
 *
 * @param weighted   0: plain least squares
 * @return KVF_INVALID with fewer than two distinct x, or y <= 0 where weighted
 */
KVF_API KVF_CHECKED kvf_status kvf_link_fit(const double *x, const double *y, uint32_t count,
                                            int weighted, kvf_link_line *out);

#ifdef __cplusplus
}
#endif

#endif
