/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TEST_SANITIZERS_H
#define KVF_TEST_SANITIZERS_H

/* KVF_ASAN and KVF_TSAN: 1 if AddressSanitizer, or ThreadSanitizer, sees this file; else 0. */

#if defined(__has_feature)
#define KVF_HAS_FEATURE(name) __has_feature(name)
#else
#define KVF_HAS_FEATURE(name) 0
#endif

#if defined(__SANITIZE_ADDRESS__) || KVF_HAS_FEATURE(address_sanitizer)
#define KVF_ASAN 1
#else
#define KVF_ASAN 0
#endif

#if defined(__SANITIZE_THREAD__) || KVF_HAS_FEATURE(thread_sanitizer)
#define KVF_TSAN 1
#else
#define KVF_TSAN 0
#endif

#endif
