/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_RUNTIME_H
#define KVF_RUNTIME_RUNTIME_H

/*
 * A runtime: one context, one device, and what is known of the machine. Knows nothing of caches.
 *
 * Invariant: the context is created first and destroyed last; everything else hangs on it.
 */

#include <pthread.h>

#include "device.h"
#include "host_memory.h"
#include "runtime.h"
#include "transfer_calibrate.h"

/* Switches that only tests set; all 0 otherwise. */
typedef struct kvf_runtime_test_hooks {
    uint32_t delay_seed;                /* not 0: streams pause at random */
    uint32_t prefill_arena;             /* 1: caches have one, 2: none, whatever the device */
    uint32_t block_size;                /* tokens of a block, if a page has not more; 0 = 32 */
    uint32_t ignores_writes;            /* 1: blocks do not count writes, and nothing is admitted to
                                    the device cache; 2: means stay */
    uint32_t extent_bytes;              /* of a saved sequence; 0 = 1 MiB */
    uint64_t device_left;               /* bytes that are free there; 0 = ask */
    const struct kvf_io_ops *io_engine; /* for its file; NULL = the best there is */
} kvf_runtime_test_hooks;

#define KVF_LINK_SIZES 2u

struct kvf_runtime {
    kvf_context *context;
    kvf_device *device;
    kvf_topology *topology;
    kvf_runtime_config config; /* resolved: threads and gather_threads are not 0 */
    kvf_device_properties properties;
    int32_t node; /* for host memory; -1 = do not bind */
    kvf_runtime_test_hooks test_hooks;
    pthread_mutex_t calibration_lock;
    uint32_t has_calibration_lock;
    uint32_t is_calibrated; /* bit i: calibration[i] is what the link was measured to be */
    char *calibration_path; /* NULL = no file */
    kvf_calibration calibration[KVF_LINK_SIZES]; /* for pages of one token, and for large ones */
};

/* kvf_runtime_open; `test_hooks` may be NULL. */
KVF_CHECKED kvf_status kvf_runtime_open_with(const kvf_runtime_config *config,
                                             const kvf_runtime_test_hooks *test_hooks,
                                             kvf_runtime **out, kvf_error *error);

/* The policy for host memory; bytes and granule are still to be set. */
kvf_host_memory_config kvf_runtime_memory(const kvf_runtime *runtime);

/* Hands the last error to the caller's struct, if there is one; returns `status`. */
kvf_status kvf_runtime_report(const kvf_runtime *runtime, kvf_status status, kvf_error *error);

/* The lock and the path; close takes a runtime that was never opened that far. */
KVF_CHECKED kvf_status kvf_calibration_open(kvf_runtime *rt, const char *path);
void kvf_calibration_close(kvf_runtime *rt);
/* AUTO's methods for pages of this size; measures it, or reads the file, unless that was done
 * before. *out = NULL if nothing was measured, else `choice`. */
KVF_CHECKED kvf_status kvf_runtime_choose(kvf_runtime *rt, size_t page_bytes,
                                          kvf_transfer_choice *choice,
                                          const kvf_transfer_choice **out);

#endif
