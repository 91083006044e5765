/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_OFFLOAD_TRANSFER_CALIBRATE_H
#define KVF_OFFLOAD_TRANSFER_CALIBRATE_H

/*
 * The cost of each transfer method on this machine, and which one to take for how many pages.
 *
 * Measured through the link bench in a few seconds and kept in a file, one record per key: GPU,
 * driver, runtime, link, NUMA node, huge pages, page size, workers. A record that is damaged, cut
 * short, of another version or for another key is not used. Knows nothing of caches.
 */

#include "link_measure.h"
#include "transfer.h"

#define KVF_CALIBRATION_VERSION 1u
#define KVF_CALIBRATION_KEY_MAX 256u

/* ns of n pages = intercept_ns + n * page_bytes * ns_per_byte. */
typedef struct kvf_calibration_fit {
    bool is_measured; /* the device has the method, and there was time for it */
    double intercept_ns;
    double ns_per_byte;
    double r_squared;
} kvf_calibration_fit;

typedef struct kvf_calibration {
    bool is_measured; /* else AUTO takes kvf_transfer_choice_default */
    bool is_cached;   /* read from the file */
    char key[KVF_CALIBRATION_KEY_MAX];
    char note[256]; /* why the file was not used, or not written; "" = it was, or there is none */
    size_t page_bytes;
    double seconds; /* that measuring took */
    double peak_bytes_per_second;
    /* The extra cost of a request where two methods stand ready and the count decides. */
    double extra_ns;
    kvf_calibration_fit fit[KVF_TRANSFER_METHODS];
} kvf_calibration;

typedef struct kvf_calibration_config {
    const char *path;   /* of the file; NULL = none is read or written */
    size_t page_bytes;  /* 0 = 16384 */
    uint64_t budget_ns; /* 0 = 4 s; what is not measured by then is left out */
    bool is_forced;     /* on the host device too, which needs none */
    bool must_measure;  /* whatever the file says */
    uint32_t gather_threads;
    kvf_host_memory_config memory; /* policy */
} kvf_calibration_config;

/*
 * Read the file, or measure and write it. KVF_OK with is_measured 0 on a device that shares host
 * memory; a file that cannot be used or written is a note and no error. Any other status is one of
 * the device or of memory, and *out says that nothing is known.
 */
KVF_CHECKED kvf_status kvf_calibrate(kvf_device *device, const kvf_calibration_config *config,
                                     kvf_calibration *out);

/* The method for every size of request, for pages of `page_bytes`. */
void kvf_calibration_choose(const kvf_calibration *calibration, size_t page_bytes,
                            kvf_transfer_choice *out);

/* The cost of a request of `pages` by a method, in ns; infinite where that was not measured. */
double kvf_calibration_cost_ns(const kvf_calibration *calibration, kvf_transfer method,
                               size_t page_bytes, uint32_t pages);

/* ---- the file (calibration_cache.c); tests ---- */

/* 1 if the file has a whole record of out->key; else 0 and out->note says why not. */
bool kvf_calibration_load(kvf_context *context, const char *path, kvf_calibration *out);
/* Replace or add the record of its key, keep those of others; the file is never half-written. 0
 * with a note if that failed. */
bool kvf_calibration_save(kvf_context *context, const char *path, kvf_calibration *calibration);

#endif
