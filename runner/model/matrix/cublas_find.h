/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_CUBLAS_FIND_H
#define KVF_MODEL_CUBLAS_FIND_H

/*
 * Where cuBLAS may lie: where the loader looks, in the Python environment in use, which brings its
 * own beside PyTorch, or in a CUDA toolkit. Knows nothing of what is called in it.
 */

/**
 * Load cuBLAS 13 or 12.
 *
 * @param path  the library, or a folder that has it; NULL = look for it
 * @return a handle for dlsym and dlclose; NULL if there is none
 */
void *kvf_cublas_find(const char *path);

/** The same, in Python environments alone: the active one, then those of PATH. */
void *kvf_cublas_find_of_python(void);

#endif
