/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A plug-in without one of its proofs, which tests must find wrong: KVF_TEST_WITHOUT=writes sees no
 * writes, KVF_TEST_WITHOUT=pages brings zeros back. The linker sends calls here (--wrap).
 */

#include "plugin.h"

#include <stdlib.h>
#include <string.h>

static int is_without(const char *what)
{
    const char *lacks = getenv("KVF_TEST_WITHOUT");
    return lacks && !strcmp(lacks, what);
}

void __real_kvl_chains_wrote(kvl_chains *chains, uint32_t layer, size_t first, size_t end);
void __wrap_kvl_chains_wrote(kvl_chains *chains, uint32_t layer, size_t first, size_t end);
void __wrap_kvl_chains_wrote(kvl_chains *chains, uint32_t layer, size_t first, size_t end)
{
    if (!is_without("writes"))
        __real_kvl_chains_wrote(chains, layer, first, end);
}

int __real_kvl_pages_show(void *pages, size_t bytes, const void *content);
int __wrap_kvl_pages_show(void *pages, size_t bytes, const void *content);
int __wrap_kvl_pages_show(void *pages, size_t bytes, const void *content)
{
    return __real_kvl_pages_show(pages, bytes, is_without("pages") ? NULL : content);
}
