/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVL_STANDIN_H
#define KVL_STANDIN_H

/*
 * A stand-in for ggml: the functions that the plug-in looks up, with a CPU backend of plain loops.
 * Its structs are those of ggml_abi.h unless a test breaks one of them.
 */

#include "ggml_abi.h"

typedef enum standin_fault {
    STANDIN_RIGHT,
    STANDIN_NO_OPERATION, /* FLASH_ATTN_EXT has another name */
    STANDIN_TYPES,        /* numbers of types moved */
    STANDIN_TENSOR,       /* a field of struct ggml_tensor moved */
    STANDIN_BACKEND,      /* struct ggml_backend_i grew */
    STANDIN_DEVICE,       /* struct ggml_backend_device_i grew */
    STANDIN_BUFFER,       /* struct ggml_backend_buffer_i grew */
    STANDIN_NO_CPU,
    STANDIN_FAULTS
} standin_fault;

/** The process has this fault from now on. */
void standin_break(standin_fault fault);

/** Numbers of operations of the stand-in. */
enum { STANDIN_VIEW = 31, STANDIN_SET_ROWS = 43, STANDIN_ROPE = 49, STANDIN_FLASH_ATTN = 77 };

enum { STANDIN_WIDTH = 512 }; /* most numbers of a row of a head */

/** A head of a row of a FLASH_ATTN_EXT, in a plain loop. @param out  [width of a value] */
void standin_attend(const gg_tensor *node, int64_t token, int64_t head, int64_t stream,
                    double *out);

gg_backend *standin_cpu(void);
gg_device *standin_cpu_device(void);
/** Attentions that the CPU backend computed, and the threads that it was told. */
extern uint64_t standin_computed;
extern int standin_threads;
/** A CPU backend refuses the next operation. */
extern int standin_fails;

/* Functions of ggml.h and ggml-backend.h that tests call, too. */
#define DECLARE(result, name, parameters) result ggml_##name parameters;
GG_FUNCTIONS(DECLARE)
#undef DECLARE
const char *ggml_version(void);

void standin_clear(gg_buffer *buffer, uint8_t value);

#endif
