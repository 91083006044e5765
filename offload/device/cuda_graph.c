/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Graphs: work that is recorded from a stream once and run many times.
 *
 * One recording at a time per device, on the stream that begins it and on those that events tie to
 * it. A graph owns the arguments of the host calls in it. Invariant: a kvf_graph that left
 * kvf_cuda_capture_end is complete; a recording that fails leaves the stream as it was before, and
 * nothing runs.
 */

#include "cuda_device.h"

struct kvf_graph {
    kvf_cuda_device *device;
    cudaGraphExec_t runnable;
    kvf_cuda_call *calls; /* list */
    size_t nodes;
};

static void free_graph(kvf_graph *graph)
{
    kvf_context *context = graph->device->base.context;
    while (graph->calls) {
        kvf_cuda_call *next = graph->calls->next;
        kvf_free(context, graph->calls);
        graph->calls = next;
    }
    kvf_free(context, graph);
}

kvf_cuda_call *kvf_cuda_graph_call(kvf_cuda_device *device)
{
    kvf_cuda_call *call = kvf_alloc(device->base.context, 1, sizeof *call);
    pthread_mutex_lock(&device->lock);
    kvf_graph *graph = device->recording;
    if (graph && call) {
        call->next = graph->calls;
        graph->calls = call;
    }
    pthread_mutex_unlock(&device->lock);
    if (!graph) { /* somebody else records this stream, and nobody would free it */
        kvf_free(device->base.context, call);
        return NULL;
    }
    return call;
}

/* Set or clear the device's recording; 0 if there is one already. */
static bool begin_recording(kvf_cuda_device *device, kvf_graph *graph)
{
    pthread_mutex_lock(&device->lock);
    const bool is_free = !device->recording;
    if (is_free)
        device->recording = graph;
    pthread_mutex_unlock(&device->lock);
    return is_free;
}

static kvf_graph *end_recording(kvf_cuda_device *device)
{
    pthread_mutex_lock(&device->lock);
    kvf_graph *graph = device->recording;
    device->recording = NULL;
    pthread_mutex_unlock(&device->lock);
    return graph;
}

kvf_status kvf_cuda_capture_begin(kvf_stream *base)
{
    kvf_cuda_device *device = kvf_cuda_device_of(base);
    kvf_context *context = device->base.context;
    cudaStream_t stream = kvf_cuda_of_stream(base)->handle;
    kvf_cuda_caller before;
    if (!device->properties.can_capture)
        KVF_FAIL(context, KVF_UNSUPPORTED,
                 "this driver cannot record kernels in graphs; update it");
    if (!stream)
        KVF_FAIL(context, KVF_UNSUPPORTED,
                 "the default stream cannot be recorded; use one of your own");
    kvf_graph *graph = kvf_alloc(context, 1, sizeof *graph);
    if (!graph)
        KVF_FAIL(context, KVF_OUT_OF_MEMORY, "no memory for a graph");
    graph->device = device;
    if (!begin_recording(device, graph)) {
        kvf_free(context, graph);
        KVF_FAIL(context, KVF_BUSY,
                 "another stream of this device is being recorded; end that first");
    }
    kvf_status status = kvf_cuda_enter(device, &before);
    /* Relaxed: whoever records may still look at events of work that is not recorded. */
    if (status == KVF_OK)
        status = kvf_cuda_leave_after(device, before,
                                      cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed),
                                      "recording could not begin");
    if (status != KVF_OK)
        free_graph(end_recording(device));
    return status;
}

kvf_status kvf_cuda_capture_end(kvf_stream *base, kvf_graph **out)
{
    kvf_cuda_device *device = kvf_cuda_device_of(base);
    cudaGraph_t recorded = NULL;
    kvf_cuda_caller before;
    *out = NULL;
    kvf_graph *graph = end_recording(device);
    if (!graph)
        KVF_FAIL(device->base.context, KVF_INVALID, "no stream of this device is being recorded");
    kvf_cuda_enter_release(device, &before); /* whatever happens, the stream is free after this */
    cudaError_t error = cudaStreamEndCapture(kvf_cuda_of_stream(base)->handle, &recorded);
    if (error == cudaSuccess)
        error = cudaGraphGetNodes(recorded, NULL, &graph->nodes);
    if (error == cudaSuccess)
        error = cudaGraphInstantiate(&graph->runnable, recorded, 0);
    const kvf_status status = kvf_cuda_failed(device, error, "a recording could not be ended");
    if (recorded)
        (void)kvf_cuda_failed(device, cudaGraphDestroy(recorded), "a graph's outline");
    kvf_cuda_leave(device, before);
    if (status != KVF_OK) {
        free_graph(graph);
        return status;
    }
    *out = graph;
    return KVF_OK;
}

int kvf_cuda_is_capturing(kvf_stream *base)
{
    enum cudaStreamCaptureStatus state = cudaStreamCaptureStatusNone;
    const cudaStream_t stream = kvf_cuda_of_stream(base)->handle;
    if (!stream || atomic_load(&kvf_cuda_device_of(base)->lost) != 0)
        return 0;
    if (kvf_cuda_failed(kvf_cuda_device_of(base), cudaStreamIsCapturing(stream, &state),
                        "whether a stream is being recorded could not be asked") != KVF_OK)
        return -1;
    return state != cudaStreamCaptureStatusNone;
}

uint32_t kvf_cuda_graph_nodes(const kvf_graph *graph)
{
    return (uint32_t)graph->nodes;
}

kvf_status kvf_cuda_graph_launch(kvf_graph *graph, kvf_stream *base)
{
    kvf_cuda_device *device = graph->device;
    kvf_cuda_caller before;
    KVF_TRY(kvf_cuda_enter(device, &before));
    return kvf_cuda_leave_after(device, before,
                                cudaGraphLaunch(graph->runnable, kvf_cuda_of_stream(base)->handle),
                                "a graph could not be launched");
}

void kvf_cuda_graph_destroy(kvf_graph *graph)
{
    kvf_cuda_caller before;
    if (!graph)
        return;
    kvf_cuda_enter_release(graph->device, &before);
    (void)kvf_cuda_leave_after(graph->device, before, cudaGraphExecDestroy(graph->runnable),
                               "a graph could not be destroyed");
    free_graph(graph);
}
