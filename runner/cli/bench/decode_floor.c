/* SPDX-License-Identifier: Apache-2.0 */

/* Rates below which no decode step can be; see the header. */

#include "bench_decode.h"

#include <kvferry/link.h>

#include "common/clock.h"

#include <math.h>
#include <stdbool.h>

typedef struct reading {
    const uint64_t *words;
    size_t words_per_task;
    uint64_t *sums;
} reading;

static void read_words(const void *args, uint32_t task)
{
    const reading *r = args;
    const uint64_t *w = r->words + task * r->words_per_task;
    uint64_t s[8] = {0};
    for (size_t i = 0; i < r->words_per_task; i += 8)
        for (size_t j = 0; j < 8; j++)
            s[j] += w[i + j];
    r->sums[task] = s[0] ^ s[1] ^ s[2] ^ s[3] ^ s[4] ^ s[5] ^ s[6] ^ s[7];
}

/* Best of several passes: reading on the host device, a copy on the GPU (read plus written bytes).
 */
kvf_status decode_floor_reading(kvf_runtime *runtime, kvf_stream *stream, double *rate)
{
    enum { TASKS = 64, PASSES = 7 };
    const size_t bytes = (size_t)256 << 20;
    const bool on_gpu = kvf_runtime_device(runtime) == KVF_DEVICE_CUDA;
    void *memory = NULL;
    uint64_t sums[TASKS];
    double best = INFINITY;
    kvf_status status = kvf_memory_alloc(runtime, 2 * bytes, &memory);
    for (int i = 0; i < PASSES && status == KVF_OK; i++) {
        const reading r = {memory, 2 * bytes / 8 / TASKS, sums};
        const uint64_t start = kvf_now_ns();
        status = on_gpu ? kvf_memory_copy(stream, (char *)memory + bytes, memory, bytes)
                        : kvf_stream_launch(stream, read_words, &r, sizeof r, TASKS);
        if (status == KVF_OK)
            status = kvf_stream_wait(stream);
        best = fmin(best, (double)(kvf_now_ns() - start));
    }
    *rate = 2.0 * (double)bytes / best;
    kvf_memory_free(runtime, memory);
    return status;
}

kvf_status decode_floor_link(kvf_runtime *runtime, double *rate)
{
    kvf_link *link = NULL;
    kvf_link_case c;
    kvf_link_result r = {0};
    kvf_link_case_init(&c);
    c.what = KVF_LINK_PEAK;
    c.page_bytes = 65536;
    c.pages = 1024;
    c.repetitions = 5;
    kvf_status status = kvf_link_open(runtime, &link);
    if (status == KVF_OK)
        status = kvf_link_measure(link, &c, NULL, &r);
    kvf_link_close(link);
    const uint64_t ns = r.copying.min_ns ? r.copying.min_ns : r.total.min_ns;
    *rate = ns ? (double)r.bytes / (double)ns : 1.0;
    return status;
}
