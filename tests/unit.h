/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_UNIT_H
#define KVF_TESTS_UNIT_H

/*
 * cmocka, with what it wants in front of it, and the part of C's library that every test uses.
 */

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#endif
