/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_EMU_EMU_CONTROL_H
#define KVF_TESTS_EMU_EMU_CONTROL_H

/*
 * Questions and settings of the emulated CUDA runtime for tests: the machine it pretends to be,
 * faults, delays, and counts of what is alive and of what was called.
 *
 * Errors are numbers of cudaError_t. The first configuration comes from the environment:
 * KVF_EMU_DEVICES, KVF_EMU_DEVICE_ERROR, KVF_EMU_MEMORY_MIB, KVF_EMU_PINNED_MIB,
 * KVF_EMU_INTEGRATED, KVF_EMU_DELAY_SEED, KVF_EMU_CONNECTIONS (0), KVF_EMU_COMPUTE (90),
 * KVF_EMU_DRIVER (13010), KVF_EMU_BATCH_CAPTURE (allowed, refused, dropped), KVF_EMU_FAIL
 * (name:nth:error[:sticky], with an empty name for any call).
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The fate of cudaMemcpyBatchAsync on a stream under capture. */
typedef enum kvf_emu_batch_capture {
    KVF_EMU_BATCH_ALLOWED, /* it is recorded */
    KVF_EMU_BATCH_REFUSED, /* cudaErrorStreamCaptureUnsupported, and the capture is void */
    KVF_EMU_BATCH_DROPPED  /* success, but nothing is recorded */
} kvf_emu_batch_capture;

typedef struct kvf_emu_config {
    uint32_t devices;         /* 0: every call says cudaErrorNoDevice */
    int device_error;         /* not 0: what every call that needs a device says */
    uint64_t memory_bytes;    /* of one device */
    uint64_t pinned_bytes;    /* that may be registered and allocated, in all */
    bool refuses_registering; /* cudaErrorNotSupported, as under Confidential Computing */
    bool is_integrated;       /* it has no memory of its own, as a GB10 */
    bool reads_pageable;      /* what the host allocates, by its page tables: GB10 and GH200 */
    uint32_t delay_seed;      /* of streams created from now on; 0: no delays */
    uint32_t compute_major, compute_minor;
    uint32_t driver_version; /* 1000 * major + 10 * minor */
    uint32_t multiprocessors;
    uint32_t queue_entries; /* of one stream; a full queue holds the caller up */
    /* Queues of the hardware, which streams share: work of one begins only after all that was
     * enqueued before is done, whatever its stream. 0: every stream has its own. */
    uint32_t connections;
    kvf_emu_batch_capture batch_capture;
    char name[64];
    char pci_address[16]; /* of device 0 */
} kvf_emu_config;

typedef struct kvf_emu_counts {
    /* Alive now. */
    uint64_t allocations, pinned_allocations, registrations, streams, events, graphs, graph_execs,
        cublas_handles, contexts; /* contexts that are retained */
    uint64_t allocated_bytes, pinned_bytes;
    /* Since the last kvf_emu_reset(). */
    uint64_t calls;           /* of every entry point that can fail */
    uint64_t waits;           /* that held the caller up: synchronize, blocking copies and frees */
    uint64_t pageable_copies; /* "asynchronous" copies that waited, as their memory is not pinned */
    uint64_t launches;        /* of kernels, replayed ones included */
    uint64_t early_starts;    /* those of them that might begin before all before them is done */
    uint64_t carveout_changes; /* launches that divide memory otherwise than the one before them */
    uint64_t copies;           /* done; those of a batch one by one, replayed ones included */
    uint64_t copied_bytes;
    uint64_t graph_launches;
    uint64_t chain_nodes;     /* of the last graph made: those of the stream whose capture it was */
    uint64_t forbidden_calls; /* calls of CUDA from inside a host function */
    uint64_t dropped_batches;
    uint64_t full_queues; /* calls that waited because a queue was full */
    uint64_t late_loads;  /* kernels that were loaded by their first launch */
    uint64_t faults;      /* that fired */
} kvf_emu_counts;

/* The configuration in force; at first that of the environment. */
void kvf_emu_get_config(kvf_emu_config *out);
void kvf_emu_set_config(const kvf_emu_config *config);

void kvf_emu_get_counts(kvf_emu_counts *out);
/* 1 if nothing is alive; else what is goes to stderr. */
int kvf_emu_is_clean(void);

/* No fault, no lost device, no error pending on this thread, counts since now, the configuration of
 * the environment. Objects that are alive stay. */
void kvf_emu_reset(void);

/* The nth call from now (1 = the next) of the entry point `name` (NULL: of any) fails with `error`
 * and does nothing; if sticky, the device is lost with it. A call that gives something back
 * (cudaFree, cudaStreamDestroy, ...) gives it back and then fails. One fault at a time; nth 0:
 * none. */
void kvf_emu_fail_call(const char *name, uint64_t nth, int error, int is_sticky);
/* The name of the entry point that failed last in this way, or NULL. */
const char *kvf_emu_failed_call(void);
/* As after an error of a kernel: every later call fails, work in streams is skipped. */
void kvf_emu_lose_device(int error);

/* Entry points that were called since the last reset: fills up to `max`, returns how many. */
size_t kvf_emu_called(const char **names, uint64_t *calls, size_t max);
/* Calls of one entry point since the last reset. */
uint64_t kvf_emu_calls_of(const char *name);
/* Launches since the last reset, replayed ones included, of kernels whose name, with its template
 * arguments, a pattern of fnmatch() describes. */
uint64_t kvf_emu_launches_of(const char *pattern);

#ifdef __cplusplus
}
#endif

#endif
