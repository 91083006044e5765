/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_EMU_EMU_STATE_H
#define KVF_TESTS_EMU_EMU_STATE_H

/*
 * State that files of the emulated CUDA runtime share: entry checks, ranges of memory, streams,
 * events, plans of graphs.
 *
 * The one thing this design is about: a thread sanitizer must see the order that CUDA promises and
 * no other. So workers never take a lock that a caller or another worker takes; queues, events and
 * counters are atomics whose acquires follow the promised order, and threads sleep in futexes,
 * which the sanitizer does not see. Locks order callers only, and readers of the tables share
 * theirs.
 */

#include <atomic>
#include <cuda_runtime_api.h>
#include <functional>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <stdint.h>
#include <thread>
#include <vector>

#include "emu_control.h"
#include "emu_launch.h"

namespace emu
{

/* ---- references that order nothing but the deletion ---- */

struct Counted {
    std::atomic<uint32_t> references{0};
    virtual ~Counted() = default;
};

template <typename T> class Ref
{
  public:
    Ref() = default;
    explicit Ref(T *object) : object_(object)
    {
        if (object_ != nullptr)
            object_->references.fetch_add(1, std::memory_order_relaxed);
    }
    Ref(const Ref &other) : Ref(other.object_)
    {
    }
    Ref(Ref &&other) noexcept : object_(other.object_)
    {
        other.object_ = nullptr;
    }
    Ref &operator=(Ref other) noexcept
    {
        std::swap(object_, other.object_);
        return *this;
    }
    ~Ref()
    {
        if (object_ == nullptr || object_->references.fetch_sub(1, std::memory_order_release) != 1)
            return;
        (void)object_->references.load(std::memory_order_acquire);
        delete object_;
    }
    /* The reference that a handle holds: given to it, and taken back. */
    T *give()
    {
        T *object = object_;
        object_ = nullptr;
        return object;
    }
    static Ref take(T *object)
    {
        Ref taken;
        taken.object_ = object;
        return taken;
    }
    T *operator->() const
    {
        return object_;
    }
    T *get() const
    {
        return object_;
    }
    explicit operator bool() const
    {
        return object_ != nullptr;
    }

  private:
    T *object_ = nullptr;
};

/* ---- words that threads sleep on ---- */

typedef std::atomic<uint32_t> Word;

void word_sleep(const Word &word, uint32_t seen, uint64_t timeout_ns);
void word_wake(Word &word);
/* Until (int32_t)(word - value) >= 0. */
void word_wait(const Word &word, uint32_t value, std::memory_order order);
/* Maybe pause, if this thread works off a stream that has a seed. */
void maybe_delay();
/* A random number of this stream; 0 without a seed. */
uint32_t delay_random();

/* ---- entry points: emu_fault.cc ---- */

struct EntryPoint {
    explicit EntryPoint(const char *function);
    const char *name;
    std::atomic<uint64_t> calls{0};
    EntryPoint *next;
};

enum EntryPolicy : unsigned {
    ENTRY_PLAIN = 0,
    ENTRY_NO_DEVICE = 1, /* answers without a device */
    ENTRY_UNSAFE = 2     /* what a capture may forbid to whole threads */
};

/* Counts, faults, lost devices, host functions, captures. Not success: return it. */
cudaError_t enter(EntryPoint &point, unsigned policy);
/* Keep an error for cudaGetLastError; returns it. */
cudaError_t fail(cudaError_t error);
/* True if the last enter() of this thread failed by a fault or a lost device. */
bool failed_by_fault();
/* cudaSuccess, or what the device was lost with. */
cudaError_t lost();
void lose(cudaError_t error);
/* Marks the thread as one inside a host function. */
void set_in_host_function(bool is_in);
/* The error that waits for cudaGetLastError on this thread. */
cudaError_t pending_error(bool is_cleared);
kvf_emu_config config();
/* The device whose context this thread's calls use. */
int current_device();
/* The same, -1 if the thread has no context; and change it. */
int current_context();
void set_context(int device);
/* No kernel was launched since: emu_runtime.cc. */
void forget_launches();

struct Counts {
    std::atomic<uint64_t> allocations{0}, pinned_allocations{0}, registrations{0}, streams{0},
        events{0}, graphs{0}, graph_execs{0}, cublas_handles{0}, contexts{0}, allocated_bytes{0},
        pinned_bytes{0}, calls{0}, waits{0}, pageable_copies{0}, launches{0}, early_starts{0},
        carveout_changes{0}, copies{0}, copied_bytes{0}, graph_launches{0}, chain_nodes{0},
        forbidden_calls{0}, dropped_batches{0}, full_queues{0}, late_loads{0}, faults{0};
};
extern Counts counts;
inline void count(std::atomic<uint64_t> &counter, uint64_t by = 1)
{
    counter.fetch_add(by, std::memory_order_relaxed);
}
inline void uncount(std::atomic<uint64_t> &counter, uint64_t by = 1)
{
    counter.fetch_sub(by, std::memory_order_relaxed);
}

#define EMU_ENTER(policy)                                                                          \
    do {                                                                                           \
        static emu::EntryPoint entry_point(__func__);                                              \
        cudaError_t refused = emu::enter(entry_point, policy);                                     \
        if (refused != cudaSuccess)                                                                \
            return refused;                                                                        \
    } while (0)

/* For calls that give something back: a fault comes out after that, in `outcome`. */
#define EMU_ENTER_RELEASE(policy, outcome)                                                         \
    static emu::EntryPoint entry_point(__func__);                                                  \
    cudaError_t outcome = emu::enter(entry_point, policy);                                         \
    if (outcome != cudaSuccess && !emu::failed_by_fault())                                         \
    return outcome

/* ---- memory: emu_memory.cc ---- */

enum class Place { Pageable, Pinned, Device, Outside };

/* Where [pointer, pointer + bytes) lies; Outside if it leaves the allocation or registration that
 * it touches. */
Place place_of(const void *pointer, size_t bytes);
/* Whether all pages under these bytes, which are pageable, can be read, or written, by a system
 * call: CUDA copies them by such, to which a page that is taken away is an error, and no fault. */
bool is_there(const void *pointer, size_t bytes, bool writes);
/* While one lives, device memory can be read and written; memory_hide() takes it away from
 * everybody once no work is queued, so that a host which touches it fails as on a GPU. */
struct Visible {
    Visible();
    ~Visible();
    Visible(const Visible &) = delete;
    Visible &operator=(const Visible &) = delete;
};
void memory_hide();
/* A copy that its caller waits for, at once and on this thread, if device memory is hidden: then no
 * work is queued, and none is before it returns. Shows the pages that it touches. False if memory
 * is not hidden, and nothing was done. */
bool memory_copy_hidden(void *to, const void *from, size_t bytes);

/* ---- streams: emu_stream.cc ---- */

struct Capture;
struct Plan;
struct Connection;

typedef std::function<void()> Work;

/* Skipped once the device is lost, unless it is one that others wait for. */
struct Entry {
    Work work;
    bool always = false;
    Connection *queue = nullptr; /* that it shares, and its place there */
    uint32_t turn = 0;
    std::atomic<Entry *> next{nullptr};
};

} // namespace emu

/* One worker and an unbounded list with a bounded length. The worker owns `head`, callers own
 * `tail` under `callers`. done <= enqueued; both only grow. */
struct CUstream_st : emu::Counted {
    int device = 0;
    unsigned flags = 0;
    bool is_legacy = false; /* the default stream of its device; set before anybody else has it */
    uint32_t number = 0;
    std::mutex callers;
    emu::Entry *tail = nullptr;
    emu::Word enqueued{0};
    emu::Word done{0};
    std::atomic<bool> is_closing{false};
    uint64_t delay_state = 0;
    emu::Connection *queue = nullptr; /* set before its first entry; nullptr: its own */
    uint32_t legacy_seen = 0;         /* under callers: what it waited for of the legacy stream */
    /* Under the lock of captures. */
    std::atomic<emu::Capture *> capture{nullptr};
    std::vector<uint32_t> frontier;
    uint32_t lane = 0;
};

/* Record g lives in slot g % SLOTS, which is free only once record g - SLOTS is done: a slot that
 * says g or more means that record g is done. */
struct CUevent_st : emu::Counted {
    static const uint32_t SLOTS = 64;
    struct Slot {
        std::atomic<uint64_t> done{0};
        std::atomic<uint64_t> ns{0};
    };
    int device = 0;
    unsigned flags = 0;
    std::mutex callers;
    uint64_t recorded = 0; /* under callers */
    Slot slots[SLOTS];
    emu::Word changes{0};
    /* Under the lock of captures. */
    std::atomic<uint64_t> capture_id{0}; /* of its last record, 0 = none */
    std::vector<uint32_t> frontier;

    bool is_done(uint64_t record, std::memory_order order) const
    {
        return record == 0 || slots[record % SLOTS].done.load(order) >= record;
    }
};

namespace emu
{

/* The stream that a handle names, which NULL does too. Not success: unknown or destroyed; or the
 * default stream while a blocking one is captured, which voids that capture. */
cudaError_t check_stream(cudaStream_t &stream);
/* The same, whatever is captured. */
cudaError_t find_stream(cudaStream_t &stream);
inline bool is_default(cudaStream_t handle)
{
    return handle == nullptr || handle == cudaStreamLegacy;
}
/* In the order of the stream, or into its capture. */
cudaError_t submit(cudaStream_t stream, Work work, const char *name,
                   const kvf_emu_kernel *kernel = nullptr);
/* The same, never into a capture. */
void push(CUstream_st *stream, Work work, bool always);
Ref<CUstream_st> stream_open(int device, unsigned flags);
/* No more work comes: the worker ends when it has none. */
void stream_close(CUstream_st *stream);
/* Until everything that was enqueued so far is done. */
void stream_drain(CUstream_st *stream);
void drain_all(int device);
/* No stream has work. */
bool is_idle();

/* ---- events: emu_event.cc ---- */

/* As check_stream(). */
cudaError_t check_event(cudaEvent_t event);

/* ---- captures and graphs: emu_graph.cc ---- */

struct Node {
    Work work;
    const char *name;
    std::vector<uint32_t> after;
    uint32_t lane;   /* the stream it was recorded on */
    bool is_awaited; /* by a node of another lane */
    bool is_kernel;
    bool starts_early; /* a kernel that may begin before what it comes after is done */
    bool is_overtaken; /* the next node of its lane may begin first */
};

/* Nodes in the order of recording, which is one that is valid. */
struct Plan : Counted {
    std::vector<Node> nodes;
    uint32_t lanes = 1;
};

/* The question of ENTRY_UNSAFE; voids the captures that forbid the call. */
cudaError_t check_unsafe();
/* Success if no blocking stream of the device is capturing; else the default stream cannot be used,
 * and whoever tries may void those captures. */
cudaError_t check_legacy(int device, bool voids);
/* Success if the stream is not capturing; else voids the capture and says so. */
cudaError_t refuse_captured(cudaStream_t stream);
bool is_captured(cudaStream_t stream);
cudaError_t capture_add(cudaStream_t stream, Work work, const char *name,
                        const kvf_emu_kernel *kernel = nullptr);
/* The work that the grid that is about to run may start before, or NULL: once, on the thread of a
 * lane. */
const Work *take_earlier();
cudaError_t capture_record(cudaEvent_t event, cudaStream_t stream);
/* Sets *is_handled unless neither event nor stream has to do with a capture. */
cudaError_t capture_wait(cudaStream_t stream, cudaEvent_t event, bool *is_handled);
void capture_forget(cudaStream_t stream);
/* Drop what cudaDeviceReset drops. */
void graphs_reset();

/* ---- batch copies, for runtime and driver: emu_transfer.cc ---- */

cudaError_t copy_batch(void *const *to, const void *const *from, const size_t *bytes, size_t count,
                       const cudaMemcpyAttributes *attributes, const size_t *indices,
                       size_t attribute_count, cudaStream_t stream);

/* Is the flag set that CUDA 12.8 and later need? */
inline bool has_batch_copy()
{
    return config().driver_version >= 12080;
}

} // namespace emu

#endif
