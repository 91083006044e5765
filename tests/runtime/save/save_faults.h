/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_RUNTIME_SAVE_FAULTS_H
#define KVF_TESTS_RUNTIME_SAVE_FAULTS_H

/*
 * Helpers of tests of files that fail or take their time: an engine that does what a plan says and
 * tells what it was asked, and a small cache with a sequence to save, whose allocator may be
 * refused.
 */

#include "io_engine.h"
#include "save_rig.h"

enum { NOTHING, SHORT, KILL, FULL_QUEUE, ERRNO }; /* ERRNO + code */

/* A plan of the engine: what happens to which request. */
typedef struct fail_plan_of {
    uint32_t count, at; /* requests so far, and the one that meets it */
    int what;
    uint32_t always;                               /* 1: from there on */
    int kind;                                      /* of requests that count */
    void (*record)(const kvf_io_request *request); /* of every request; may be NULL */
} fail_plan_of;

enum { FAIL_ANY, FAIL_READS, FAIL_WRITES };

extern const kvf_io_ops fail_engine;
extern fail_plan_of fail_plan;
void fail_plan_set(uint32_t at, int what, uint32_t always);

/* Requests of one piece stay in flight until somebody waits for them, half of their bytes moved;
 * fail_at_wait is called when a read is waited for, before the other half moves. */
extern _Atomic uint32_t fail_holds_reads, fail_holds_writes;
extern void (*fail_at_wait)(void);

#define FAIL_TOKENS 60u

typedef struct fail_world {
    test_world w;
    test_tokens t;
    kvf_sequence *s;
} fail_world;

void fail_world_open(fail_world *f, uint32_t extent_bytes);
void fail_world_close(fail_world *f);

/* Restore and destroy again; nothing stays in the cache. */
kvf_status fail_restore(fail_world *f, const char *path, kvf_error *error);

#endif
