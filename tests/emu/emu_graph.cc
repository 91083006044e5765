/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Stream capture and graphs of the emulated runtime.
 *
 * A capture is a list of nodes; a node comes after the frontier of its stream, which is what the
 * stream, and the events it waited for, recorded last. A replay gives every stream of the capture a
 * worker of its own (a lane; lane 0 is the launching stream), so branches run side by side as they
 * would on a GPU and an order that nothing enforces shows.
 *
 * All state of captures is under one lock of callers. Launches of one graph never overlap.
 */

#include <algorithm>
#include <unordered_set>

#include "emu_state.h"

namespace emu
{

struct Capture : Counted {
    uint64_t id = 0;
    cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
    std::thread::id thread;
    CUstream_st *origin = nullptr;
    bool is_void = false;
    Ref<Plan> plan;
    std::vector<CUstream_st *> members;
};

} // namespace emu

struct CUgraph_st {
    emu::Ref<emu::Plan> plan;
};

/* For launch e: started == e once lane 0 may run, done[n] == e once node n has run, ended[l] == e
 * once lane l has. */
struct CUgraphExec_st : emu::Counted {
    emu::Ref<emu::Plan> plan;
    std::mutex callers;
    uint32_t launches = 0;                    /* under callers */
    std::vector<emu::Ref<CUstream_st>> lanes; /* [lanes - 1] */
    emu::Word started{0}, finished{0};
    std::unique_ptr<emu::Word[]> done;
    std::unique_ptr<emu::Word[]> ended;

    ~CUgraphExec_st() override
    {
        for (const auto &lane : lanes)
            emu::stream_close(lane.get());
    }
};

namespace emu
{
namespace
{

std::mutex &captures_lock = *new std::mutex; /* of the four below, and of streams' and events' */
auto &captures = *new std::vector<Ref<Capture>>;
auto &graphs = *new std::unordered_set<CUgraph_st *>;
auto &execs = *new std::unordered_set<CUgraphExec_st *>;
uint64_t capture_total = 0;
std::atomic<uint32_t> captures_alive{0};

thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

typedef std::lock_guard<std::mutex> Hold;

Capture *capture_of(cudaStream_t stream)
{
    return stream->capture.load(std::memory_order_relaxed);
}

Capture *capture_by_id(uint64_t id)
{
    for (const auto &c : captures)
        if (c->id == id)
            return c.get();
    return nullptr;
}

void unite(std::vector<uint32_t> &into, const std::vector<uint32_t> &more)
{
    into.insert(into.end(), more.begin(), more.end());
    std::sort(into.begin(), into.end());
    into.erase(std::unique(into.begin(), into.end()), into.end());
}

void join(Capture *capture, CUstream_st *stream)
{
    stream->lane = (uint32_t)capture->members.size();
    stream->frontier.clear();
    capture->members.push_back(stream);
    stream->capture.store(capture, std::memory_order_relaxed);
}

/* The streams of a capture are streams again. */
void dissolve(Capture *capture)
{
    for (CUstream_st *s : capture->members) {
        s->capture.store(nullptr, std::memory_order_relaxed);
        s->frontier.clear();
    }
    captures.erase(std::find_if(captures.begin(), captures.end(),
                                [=](const Ref<Capture> &c) { return c.get() == capture; }));
    captures_alive.fetch_sub(1, std::memory_order_relaxed);
}

/* Does every node of another stream come before something of the origin's frontier? */
bool is_joined(const Capture *capture)
{
    const std::vector<Node> &nodes = capture->plan->nodes;
    std::vector<bool> is_before(nodes.size(), false);
    for (uint32_t n : capture->origin->frontier)
        is_before[n] = true;
    for (size_t n = nodes.size(); n-- > 0;)
        if (is_before[n])
            for (uint32_t before : nodes[n].after)
                is_before[before] = true;
    return std::find(is_before.begin(), is_before.end(), false) == is_before.end();
}

/* A kernel that starts early comes after one kernel of its own stream, and nothing else. */
void mark_overtaken(Plan *plan)
{
    for (size_t n = 0; n < plan->nodes.size(); n++) {
        const Node &node = plan->nodes[n];
        if (!node.starts_early || node.after.size() != 1)
            continue;
        Node &before = plan->nodes[node.after[0]];
        before.is_overtaken |= before.is_kernel && before.lane == node.lane;
    }
}

void mark_awaited(Plan *plan)
{
    for (Node &node : plan->nodes)
        for (uint32_t before : node.after)
            if (plan->nodes[before].lane != node.lane)
                plan->nodes[before].is_awaited = true;
}

} // namespace

bool is_captured(cudaStream_t stream)
{
    return capture_of(stream) != nullptr;
}

cudaError_t check_unsafe()
{
    if (captures_alive.load(std::memory_order_relaxed) == 0 ||
        thread_mode == cudaStreamCaptureModeRelaxed)
        return cudaSuccess;
    Hold hold(captures_lock);
    cudaError_t error = cudaSuccess;
    for (const auto &c : captures) {
        bool is_own = c->thread == std::this_thread::get_id();
        bool forbids = is_own ? c->mode != cudaStreamCaptureModeRelaxed
                              : c->mode == cudaStreamCaptureModeGlobal &&
                                    thread_mode == cudaStreamCaptureModeGlobal;
        if (!forbids)
            continue;
        c->is_void = true;
        error = cudaErrorStreamCaptureUnsupported;
    }
    return error;
}

cudaError_t check_legacy(int device, bool voids)
{
    cudaError_t error = cudaSuccess;
    if (captures_alive.load(std::memory_order_relaxed) == 0)
        return cudaSuccess;
    Hold hold(captures_lock);
    for (const auto &c : captures) {
        const bool conflicts =
            std::any_of(c->members.begin(), c->members.end(), [=](const CUstream_st *s) {
                return s->device == device && (s->flags & cudaStreamNonBlocking) == 0;
            });
        c->is_void = c->is_void || (conflicts && voids);
        error = conflicts ? cudaErrorStreamCaptureImplicit : error;
    }
    return error;
}

cudaError_t refuse_captured(cudaStream_t stream)
{
    if (!is_captured(stream))
        return cudaSuccess;
    Hold hold(captures_lock);
    capture_of(stream)->is_void = true;
    return cudaErrorStreamCaptureUnsupported;
}

/* Is what the next node of the stream comes after one kernel, or nothing? */
static bool may_overtake(const Capture *capture, const CUstream_st *stream)
{
    const std::vector<uint32_t> &after = stream->frontier;
    return after.empty() || (after.size() == 1 && capture->plan->nodes[after[0]].is_kernel);
}

cudaError_t capture_add(cudaStream_t stream, Work work, const char *name,
                        const kvf_emu_kernel *kernel)
{
    Hold hold(captures_lock);
    Capture *capture = capture_of(stream);
    if (capture == nullptr)
        return cudaErrorIllegalState;
    if (capture->is_void)
        return cudaErrorStreamCaptureInvalidated;
    if (kernel != nullptr && kernel->starts_early && !may_overtake(capture, stream)) {
        capture->is_void = true;
        return cudaErrorNotSupported;
    }
    uint32_t number = (uint32_t)capture->plan->nodes.size();
    capture->plan->nodes.push_back({std::move(work), name, stream->frontier, stream->lane, false,
                                    kernel != nullptr, kernel != nullptr && kernel->starts_early,
                                    false});
    stream->frontier = {number};
    return cudaSuccess;
}

cudaError_t capture_record(cudaEvent_t event, cudaStream_t stream)
{
    Hold hold(captures_lock);
    Capture *capture = capture_of(stream);
    if (capture == nullptr)
        return cudaErrorIllegalState;
    if (capture->is_void)
        return cudaErrorStreamCaptureInvalidated;
    event->capture_id.store(capture->id, std::memory_order_relaxed);
    event->frontier = stream->frontier;
    return cudaSuccess;
}

cudaError_t capture_wait(cudaStream_t stream, cudaEvent_t event, bool *is_handled)
{
    uint64_t id = event->capture_id.load(std::memory_order_relaxed);
    *is_handled = id != 0 || is_captured(stream);
    if (!*is_handled)
        return cudaSuccess;
    Hold hold(captures_lock);
    Capture *of_event = capture_by_id(id);
    Capture *of_stream = capture_of(stream);
    if (of_stream != nullptr && of_stream->is_void)
        return cudaErrorStreamCaptureInvalidated;
    if (of_event == nullptr) {
        /* Recorded outside of a capture, never, or in one that has ended. */
        if (of_stream != nullptr)
            of_stream->is_void = true;
        return of_stream != nullptr ? cudaErrorStreamCaptureIsolation : cudaErrorCapturedEvent;
    }
    if (of_event->is_void)
        return cudaErrorStreamCaptureInvalidated;
    if (stream->is_legacy) {
        of_event->is_void = true;
        return cudaErrorStreamCaptureImplicit;
    }
    if (of_stream != nullptr && of_stream != of_event) {
        of_stream->is_void = of_event->is_void = true;
        return cudaErrorStreamCaptureMerge;
    }
    if (of_stream == nullptr)
        join(of_event, stream);
    unite(stream->frontier, event->frontier);
    return cudaSuccess;
}

void capture_forget(cudaStream_t stream)
{
    if (!is_captured(stream))
        return;
    Hold hold(captures_lock);
    Capture *capture = capture_of(stream);
    capture->is_void = true;
    if (capture->origin == stream) {
        dissolve(capture);
        return;
    }
    capture->members.erase(std::find(capture->members.begin(), capture->members.end(), stream));
    stream->capture.store(nullptr, std::memory_order_relaxed);
}

void graphs_reset()
{
    Hold hold(captures_lock);
    for (CUgraph_st *g : graphs)
        delete g;
    graphs.clear();
    for (CUgraphExec_st *e : execs) {
        Ref<CUgraphExec_st> last = Ref<CUgraphExec_st>::take(e);
    }
    execs.clear();
    counts.graphs.store(0, std::memory_order_relaxed);
    counts.graph_execs.store(0, std::memory_order_relaxed);
}

/* ---- replay ---- */

static thread_local const Work *earlier = nullptr;

const Work *take_earlier()
{
    const Work *taken = earlier;
    earlier = nullptr;
    return taken;
}

static void run_node(CUgraphExec_st *exec, size_t n, uint32_t launch)
{
    const Node &node = exec->plan->nodes[n];
    if (lost() == cudaSuccess)
        node.work();
    if (node.is_awaited) {
        exec->done[n].store(launch, std::memory_order_release);
        word_wake(exec->done[n]);
    }
}

/* A node that may begin before the one before it does, and has that done when it waits for it. */
static void run_overtaking(CUgraphExec_st *exec, size_t before, size_t n, uint32_t launch)
{
    bool is_done = false;
    const Work first = [&] {
        is_done = true;
        run_node(exec, before, launch);
    };
    earlier = &first;
    run_node(exec, n, launch);
    earlier = nullptr;
    if (!is_done) /* the device was lost */
        first();
}

/* The nodes of one lane, in launch `launch`; nodes of other lanes are waited for. Of the kernels
 * that may be overtaken, every second is, and in the next launch the others. */
static void run_lane(CUgraphExec_st *exec, uint32_t lane, uint32_t launch)
{
    const std::vector<Node> &nodes = exec->plan->nodes;
    uint32_t turn = launch;
    size_t held = nodes.size();
    word_wait(exec->started, launch, std::memory_order_acquire);
    for (size_t n = 0; n < nodes.size(); n++) {
        const Node &node = nodes[n];
        if (node.lane != lane)
            continue;
        for (uint32_t before : node.after)
            if (nodes[before].lane != lane)
                word_wait(exec->done[before], launch, std::memory_order_acquire);
        maybe_delay();
        if (held != nodes.size())
            run_overtaking(exec, held, n, launch);
        else if (turn % 2 == 0 && node.is_overtaken)
            held = n;
        else
            run_node(exec, n, launch);
        if (held != n)
            held = nodes.size();
        turn++;
    }
    exec->ended[lane].store(launch, std::memory_order_release);
    word_wake(exec->ended[lane]);
}

static void run_launch(CUgraphExec_st *exec, uint32_t launch)
{
    word_wait(exec->finished, launch - 1, std::memory_order_acquire);
    exec->started.store(launch, std::memory_order_release);
    word_wake(exec->started);
    run_lane(exec, 0, launch);
    for (uint32_t lane = 1; lane < exec->plan->lanes; lane++)
        word_wait(exec->ended[lane], launch, std::memory_order_acquire);
    exec->finished.store(launch, std::memory_order_release);
    word_wake(exec->finished);
}

static cudaError_t launch_graph(CUgraphExec_st *exec, CUstream_st *stream)
{
    Ref<CUgraphExec_st> keep(exec);
    if (is_captured(stream)) /* a child of another graph: its nodes one after the other */
        return capture_add(
            stream,
            [=] {
                for (const Node &node : keep->plan->nodes)
                    node.work();
            },
            "graph");
    std::lock_guard<std::mutex> hold(exec->callers);
    uint32_t launch = ++exec->launches;
    for (uint32_t lane = 1; lane < exec->plan->lanes; lane++)
        push(
            exec->lanes[lane - 1].get(), [=] { run_lane(keep.get(), lane, launch); }, true);
    push(
        stream, [=] { run_launch(keep.get(), launch); }, true);
    return cudaSuccess;
}

} // namespace emu

using emu::Capture;
using emu::captures_lock;
using emu::counts;
using emu::fail;
using emu::Hold;
using emu::Ref;

extern "C" {

/* ---- captures ---- */

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode)
{
    EMU_ENTER(0);
    if (emu::is_default(stream))
        return fail(cudaErrorStreamCaptureUnsupported);
    cudaError_t error = emu::check_stream(stream);
    if (error == cudaSuccess && (unsigned)mode > cudaStreamCaptureModeRelaxed)
        error = cudaErrorInvalidValue;
    if (error != cudaSuccess)
        return fail(error);
    Hold hold(captures_lock);
    if (emu::capture_of(stream) != nullptr)
        return fail(cudaErrorIllegalState);
    Ref<Capture> capture(new Capture);
    capture->id = ++emu::capture_total;
    capture->mode = mode;
    capture->thread = std::this_thread::get_id();
    capture->origin = stream;
    capture->plan = Ref<emu::Plan>(new emu::Plan);
    emu::captures.push_back(capture);
    emu::join(capture.get(), stream);
    emu::captures_alive.fetch_add(1, std::memory_order_relaxed);
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *out)
{
    EMU_ENTER_RELEASE(0, outcome);
    if (out != nullptr)
        *out = nullptr;
    cudaError_t error = emu::check_stream(stream);
    if (error != cudaSuccess)
        return fail(outcome != cudaSuccess ? outcome : error);
    Hold hold(captures_lock);
    Ref<Capture> capture(emu::capture_of(stream));
    if (outcome != cudaSuccess || !capture) {
        if (capture)
            emu::dissolve(capture.get());
        return fail(outcome != cudaSuccess ? outcome : cudaErrorIllegalState);
    }
    if (capture->origin != stream) {
        capture->is_void = true;
        return fail(cudaErrorStreamCaptureUnmatched);
    }
    if (capture->mode != cudaStreamCaptureModeRelaxed &&
        capture->thread != std::this_thread::get_id())
        return fail(cudaErrorStreamCaptureWrongThread);
    if (out == nullptr)
        error = cudaErrorInvalidValue;
    else if (capture->is_void)
        error = cudaErrorStreamCaptureInvalidated;
    else if (!emu::is_joined(capture.get()))
        error = cudaErrorStreamCaptureUnjoined;
    emu::dissolve(capture.get());
    if (error != cudaSuccess)
        return fail(error);
    capture->plan->lanes = (uint32_t)capture->members.size();
    emu::mark_awaited(capture->plan.get());
    emu::mark_overtaken(capture->plan.get());
    *out = new CUgraph_st{capture->plan};
    emu::graphs.insert(*out);
    emu::count(counts.graphs);
    return cudaSuccess;
}

static enum cudaStreamCaptureStatus status_of(const Capture *capture)
{
    return capture == nullptr ? cudaStreamCaptureStatusNone
           : capture->is_void ? cudaStreamCaptureStatusInvalidated
                              : cudaStreamCaptureStatusActive;
}

/* Who asks voids nothing. */
static cudaError_t check_asked(cudaStream_t &stream)
{
    const cudaError_t error = emu::find_stream(stream);
    return error == cudaSuccess && stream->is_legacy ? emu::check_legacy(stream->device, false)
                                                     : error;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status)
{
    EMU_ENTER(0);
    cudaError_t error = check_asked(stream);
    if (error != cudaSuccess || status == nullptr)
        return fail(error != cudaSuccess ? error : cudaErrorInvalidValue);
    Hold hold(captures_lock);
    *status = status_of(emu::capture_of(stream));
    return cudaSuccess;
}

/* A node is given to ask for its kind, and only where the next one comes after it alone: nobody
 * here adds nodes by hand. Parts of launches: not counted, and never made to fail. */
static const cudaGraphNode_t node_kinds[2] = {(cudaGraphNode_t)&node_kinds[0],
                                              (cudaGraphNode_t)&node_kinds[1]};

cudaError_t cudaGraphNodeGetType(cudaGraphNode_t node, enum cudaGraphNodeType *type)
{
    if (type == nullptr || (node != node_kinds[0] && node != node_kinds[1]))
        return fail(cudaErrorInvalidValue);
    *type = node == node_kinds[1] ? cudaGraphNodeTypeKernel : cudaGraphNodeTypeMemcpy;
    return cudaSuccess;
}

#if CUDART_VERSION < 13000
#define cudaStreamGetCaptureInfo cudaStreamGetCaptureInfo_v3
#endif
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **before, const cudaGraphEdgeData **,
                                     size_t *count)
{
    cudaError_t error = check_asked(stream);
    if (error == cudaSuccess && status == nullptr)
        error = cudaErrorInvalidValue;
    if (error == cudaSuccess && graph != nullptr)
        error = cudaErrorNotSupported;
    if (error != cudaSuccess)
        return fail(error);
    *status = cudaStreamCaptureStatusNone;
    if (!emu::is_captured(stream))
        return cudaSuccess;
    Hold hold(captures_lock);
    const Capture *capture = emu::capture_of(stream);
    *status = status_of(capture);
    if (id != nullptr && capture != nullptr)
        *id = capture->id;
    if (count != nullptr)
        *count = stream->frontier.size();
    if (before != nullptr && capture != nullptr && stream->frontier.size() == 1)
        *before = &node_kinds[capture->plan->nodes[stream->frontier[0]].is_kernel];
    return cudaSuccess;
}

/* A word of the thread: not counted, and never made to fail. */
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode)
{
    if (mode == nullptr || (unsigned)*mode > cudaStreamCaptureModeRelaxed)
        return fail(cudaErrorInvalidValue);
    std::swap(*mode, emu::thread_mode);
    return cudaSuccess;
}

/* ---- graphs ---- */

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long flags)
{
    EMU_ENTER(0);
    if (out == nullptr || flags != 0)
        return fail(cudaErrorInvalidValue);
    Hold hold(captures_lock);
    if (emu::graphs.count(graph) == 0)
        return fail(cudaErrorInvalidValue);
    Ref<CUgraphExec_st> exec(new CUgraphExec_st);
    exec->plan = graph->plan;
    exec->done.reset(new emu::Word[graph->plan->nodes.size()]());
    exec->ended.reset(new emu::Word[graph->plan->lanes]());
    for (uint32_t lane = 1; lane < graph->plan->lanes; lane++)
        exec->lanes.push_back(emu::stream_open(emu::current_device(), cudaStreamNonBlocking));
    emu::execs.insert(exec.get());
    emu::count(counts.graph_execs);
    counts.chain_nodes = (uint64_t)std::count_if(exec->plan->nodes.begin(), exec->plan->nodes.end(),
                                                 [](const emu::Node &n) { return n.lane == 0; });
    *out = exec.give();
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream)
{
    EMU_ENTER(0);
    cudaError_t error = emu::check_stream(stream);
    Ref<CUgraphExec_st> keep;
    {
        Hold hold(captures_lock);
        if (error == cudaSuccess && emu::execs.count(exec) == 0)
            error = cudaErrorInvalidValue;
        if (error == cudaSuccess)
            keep = Ref<CUgraphExec_st>(exec);
    }
    if (error == cudaSuccess) {
        emu::count(counts.graph_launches);
        error = emu::launch_graph(exec, stream);
    }
    return error == cudaSuccess ? error : fail(error);
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec)
{
    EMU_ENTER_RELEASE(0, outcome);
    Ref<CUgraphExec_st> last;
    Hold hold(captures_lock);
    if (emu::execs.erase(exec) == 0)
        return fail(outcome != cudaSuccess ? outcome : cudaErrorInvalidValue);
    emu::uncount(counts.graph_execs);
    last = Ref<CUgraphExec_st>::take(exec);
    return outcome;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    EMU_ENTER_RELEASE(0, outcome);
    Hold hold(captures_lock);
    if (emu::graphs.erase(graph) == 0)
        return fail(outcome != cudaSuccess ? outcome : cudaErrorInvalidValue);
    emu::uncount(counts.graphs);
    delete graph;
    return outcome;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count)
{
    EMU_ENTER(0);
    Hold hold(captures_lock);
    if (emu::graphs.count(graph) == 0 || count == nullptr || nodes != nullptr)
        return fail(cudaErrorInvalidValue);
    *count = graph->plan->nodes.size();
    return cudaSuccess;
}

} // extern "C"
