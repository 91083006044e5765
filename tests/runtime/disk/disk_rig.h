/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_RUNTIME_DISK_RIG_H
#define KVF_TESTS_RUNTIME_DISK_RIG_H

/*
 * Helpers of tests of the disk tier: settings of a cache that has a quarter of its pages in memory,
 * and such a cache beside one without a tier, to compare.
 */

#include "io_engine.h"
#include "save_rig.h"

/* `config` with a disk tier of small bundles, in the folder of the rig. In memory is a quarter of
 * what `tokens` tokens take, or as much as a call needs. */
void disk_config(kvf_cache_config *config, uint32_t tokens, uint32_t bundle_bytes);

#define DISK_PROMPT 170u
#define DISK_STEPS  14u

typedef struct disk_worlds {
    test_world tier, plain;
    test_tokens t; /* a prompt and four times the steps */
} disk_worlds;

/* With a head mask of 8 layers of every kind: one or two retrieval heads, or none. */
extern const save_case disk_heads[2];
/* 8 layers of the settings, for a prompt and steps in two sequences. */
kvf_cache_config disk_config_of(const save_case *c, uint32_t bundle_bytes);
/* `config` has a tier; the other cache is the same without. Engine NULL: the best there is. */
void disk_worlds_open(disk_worlds *w, kvf_cache_config config, const kvf_io_ops *engine);
/* Whatever was called, the tier and its pool are valid. */
void disk_worlds_check(disk_worlds *w);
void disk_worlds_close(disk_worlds *w);

/* A sequence in each. */
typedef struct disk_pair {
    kvf_sequence *tier, *plain;
} disk_pair;

disk_pair disk_begin(disk_worlds *w);
disk_pair disk_fork(disk_worlds *w, disk_pair p);
void disk_cut(disk_worlds *w, disk_pair p, uint32_t tokens);
void disk_end(disk_pair p);
/* Tokens that are appended to both, and steps, give the same bits. */
void disk_same_prompt(disk_worlds *w, disk_pair p, uint32_t first, uint32_t count);
void disk_same_steps(disk_worlds *w, disk_pair p, uint32_t first, uint32_t count, const char *what);

#endif
