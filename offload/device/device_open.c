/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Which device is opened, and why not the other one.
 *
 * Knows the kinds of devices, nothing of how they work. AUTO is the one place where a GPU that
 * cannot be used makes work run on the host, and it says so in the log.
 */

#include <stdio.h>

#include "host_stream.h"
#if KVF_HAVE_CUDA
#include "cuda_device.h"
#endif

#ifndef KVF_CUDA_ABSENCE
#define KVF_CUDA_ABSENCE "this build has no CUDA device"
#endif

const char *kvf_device_cuda_absence(char text[256])
{
#if KVF_HAVE_CUDA
    (void)kvf_cuda_count(text);
#else
    snprintf(text, 256, "%s", KVF_CUDA_ABSENCE);
#endif
    return text;
}

static kvf_status open_cuda(kvf_context *context, const kvf_device_config *config, kvf_device **out)
{
#if KVF_HAVE_CUDA
    return kvf_device_cuda_open(context, config, out);
#else
    char text[256];
    (void)config;
    *out = NULL;
    KVF_FAIL(context, KVF_UNSUPPORTED, "%s", kvf_device_cuda_absence(text));
#endif
}

/* CUDA if it opens; a wrong setting is an error, everything else a reason for the host. */
static kvf_status open_auto(kvf_context *context, const kvf_device_config *config, kvf_device **out)
{
    char text[256];
    if (kvf_device_cuda_absence(text)[0] != '\0') {
        if (config->ordinal != 0)
            KVF_FAIL(context, KVF_INVALID, "device_ordinal is %u, and %s", config->ordinal, text);
        kvf_log(context, KVF_LOG_NOTE, "the host device is used: %s", text);
        return kvf_device_host_open(context, config, out);
    }
    const kvf_status status = open_cuda(context, config, out);
    if (status == KVF_OK || status == KVF_INVALID)
        return status;
    kvf_error error;
    kvf_context_error(context, &error);
    kvf_log(context, KVF_LOG_WARNING, "the host device is used, for the CUDA device failed: %s",
            error.text);
    return kvf_device_host_open(context, config, out);
}

kvf_status kvf_device_open(kvf_context *context, kvf_device_kind kind,
                           const kvf_device_config *config, kvf_device **out)
{
    *out = NULL;
    switch (kind) {
    case KVF_DEVICE_AUTO:
        return open_auto(context, config, out);
    case KVF_DEVICE_HOST:
        return kvf_device_host_open(context, config, out);
    case KVF_DEVICE_CUDA:
        return open_cuda(context, config, out);
    }
    KVF_FAIL(context, KVF_UNSUPPORTED, "device kind %d is unknown; use auto, host or cuda",
             (int)kind);
}

void kvf_device_close(kvf_device *device)
{
    if (device)
        device->ops->close(device);
}

kvf_status kvf_stream_check(const kvf_device *device, const kvf_stream *stream)
{
    if (!stream)
        KVF_FAIL(device->context, KVF_INVALID,
                 "stream is NULL; pass one of kvf_stream_create or kvf_stream_wrap");
    if (stream->device != device)
        KVF_FAIL(device->context, KVF_INVALID,
                 "stream is of another runtime; pass one of the runtime that this was opened on");
    return KVF_OK;
}

void kvf_device_set_fault(kvf_device *device, kvf_fault_fn fn, void *user)
{
    device->context->fault = fn;
    device->context->fault_user = user;
}
