/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Part of kvferry/kvferry.h. The machine, the device and this build, as one JSON object.
 *
 * Knows nothing of caches. Unknown or unlimited numbers are null. The writer counts what does not
 * fit, so one pass gives both the text and the room a whole answer takes.
 */

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "common/cgroup.h"
#include "common/text.h"
#include "disk_tier.h"
#include "runtime.h"
#include "settings.h"

typedef struct writer {
    char *text;
    size_t capacity;
    size_t used; /* without the NUL; may exceed capacity */
    char last;   /* character put last */
} writer;

static void put(writer *w, char c)
{
    if (w->used + 1 < w->capacity)
        w->text[w->used] = c;
    w->used++;
    w->last = c;
}

KVF_PRINTF(2, 3) static void format(writer *w, const char *pattern, ...)
{
    char piece[256];
    va_list arguments;
    va_start(arguments, pattern);
    const int n = kvf_vformat(piece, sizeof piece, pattern, arguments);
    va_end(arguments);
    KVF_ASSERT(n >= 0 && (size_t)n < sizeof piece);
    for (int i = 0; i < n; i++)
        put(w, piece[i]);
}

static void string(writer *w, const char *s)
{
    put(w, '"');
    while (*s) {
        const unsigned char c = (unsigned char)*s;
        const size_t valid = kvf_utf8_size(s, strlen(s));
        if (c == '"' || c == '\\')
            put(w, '\\');
        if (c < 0x20)
            format(w, "\\u%04x", c);
        else
            format(w, "%.*s", (int)(valid ? valid : 3), valid ? s : KVF_UTF8_REPLACEMENT);
        s += valid ? valid : 1;
    }
    put(w, '"');
}

static void member(writer *w, const char *name)
{
    string(w, name);
    put(w, ':');
}

static void number(writer *w, const char *name, uint64_t value)
{
    member(w, name);
    if (value == UINT64_MAX)
        format(w, "null,");
    else
        format(w, "%" PRIu64 ",", value);
}

static void text_member(writer *w, const char *name, const char *value)
{
    member(w, name);
    string(w, value);
    put(w, ',');
}

/* Take back the comma after the last member, then close. */
static void close_with(writer *w, char c)
{
    if (w->last == ',')
        w->used--;
    put(w, c);
}

static void features(writer *w, const char *name, uint32_t isa)
{
    static const struct {
        uint32_t bit;
        const char *name;
    } names[] = {{KVF_ISA_BASELINE, "baseline"},
                 {KVF_ISA_AVX2, "avx2"},
                 {KVF_ISA_AVX512, "avx512"},
                 {KVF_ISA_AVX512_BF16, "avx512_bf16"},
                 {KVF_ISA_NEON, "neon"},
                 {KVF_ISA_AVX_VNNI, "avx_vnni"},
                 {KVF_ISA_AVX512_VNNI, "avx512_vnni"}};
    const char *separator = "";
    member(w, name);
    put(w, '[');
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (isa & names[i].bit) {
            format(w, "%s\"%s\"", separator, names[i].name);
            separator = ",";
        }
    format(w, "],");
}

/* "13.1" of 13010, and "" of 0. */
static void version_member(writer *w, const char *name, uint32_t version)
{
    char text[24] = "";
    if (version)
        snprintf(text, sizeof text, "%u.%u", version / 1000, version % 1000 / 10);
    text_member(w, name, text);
}

/* How pages reach a GPU that sees the host's memory as its own. */
static const char *unified_memory(const kvf_device_properties *p)
{
    if (p->shares_host_memory)
        return "integrated, as GB10: pages are read in place";
    return p->is_coherent ? "coherent, as GH200: pages are pinned and copied, as over a link"
                          : "none";
}

static void gpu(writer *w, const kvf_device_properties *p)
{
    text_member(w, "uuid", p->uuid);
    format(w, "\"compute_capability\":\"%u.%u\",", p->compute_major, p->compute_minor);
    number(w, "multiprocessors", p->multiprocessors);
    number(w, "shared_memory_max_bytes", p->shared_memory_max);
    version_member(w, "driver_supports_cuda", p->driver_version);
    version_member(w, "runtime_is_cuda", p->runtime_version);
    number(w, "pcie_generation", p->link_generation ? p->link_generation : UINT64_MAX);
    number(w, "pcie_lanes", p->link_width ? p->link_width : UINT64_MAX);
    text_member(w, "unified_memory", unified_memory(p));
    format(w, "\"records_graphs\":%s,", p->can_capture ? "true" : "false");
    format(w, "\"copies_in_batches\":%s,", p->can_copy_batch ? "true" : "false");
    format(w, "\"records_batches\":%s,", p->can_capture_batch ? "true" : "false");
}

static void device(writer *w, const kvf_runtime *rt)
{
    const kvf_device_properties *p = &rt->properties;
    format(w, "\"devices\":[{");
    text_member(w, "kind", rt->device->ops->name);
    text_member(w, "name", p->name);
    text_member(w, "pci_address", p->pci_address);
    format(w, "\"numa_node\":%d,", p->numa_node);
    number(w, "memory_bytes", p->memory_bytes);
    if (rt->device->ops->kind == KVF_DEVICE_CUDA)
        gpu(w, p);
    else
        number(w, "compute_threads", p->compute_threads);
    format(w, "\"shares_host_memory\":%s,", p->shares_host_memory ? "true" : "false");
    format(w, "\"pins_host_memory\":%s}],", p->pins_host_memory ? "true" : "false");
}

static void nodes(writer *w, const kvf_topology *t)
{
    format(w, "\"numa\":{\"known\":%s,", t->known ? "true" : "false");
    number(w, "cores", t->core_count);
    number(w, "cpus", t->cpu_count);
    if (t->cpu_quota == UINT64_MAX)
        number(w, "cpu_quota", UINT64_MAX);
    else
        format(w, "\"cpu_quota\":%.6g,", (double)t->cpu_quota * 1e-3);
    format(w, "\"nodes\":[");
    for (uint32_t i = 0; i < t->node_count; i++) {
        const kvf_node *n = &t->nodes[i];
        format(w, "%s{\"id\":%d,", i ? "," : "", n->id);
        number(w, "memory_bytes", n->memory_bytes ? n->memory_bytes : UINT64_MAX);
        number(w, "free_bytes", n->free_bytes ? n->free_bytes : UINT64_MAX);
        format(w, "\"cpus\":%u}", n->cpu_count);
    }
    format(w, "]},");
}

/* Figures of calibration for pages of one size: a line per method, and which one AUTO takes from
 * how many pages on. */
static void calibration(writer *w, const kvf_calibration *c)
{
    kvf_transfer_choice choice;
    put(w, '{');
    text_member(w, "key", c->key);
    format(w, "\"page_bytes\":%zu,", c->page_bytes);
    format(w, "\"peak_gb_per_s\":%.3f,", c->peak_bytes_per_second * 1e-9);
    format(w, "\"from_file\":%s,\"measured_s\":%.3f,", c->is_cached ? "true" : "false", c->seconds);
    text_member(w, "note", c->note);
    format(w, "\"fit\":[");
    for (uint32_t m = 0; m < KVF_TRANSFER_METHODS; m++)
        if (c->fit[m].is_measured)
            format(w,
                   "{\"method\":\"%s\",\"intercept_us\":%.3f,\"gb_per_s\":%.3f,"
                   "\"r_squared\":%.4f},",
                   kvf_transfer_name((kvf_transfer)m), c->fit[m].intercept_ns * 1e-3,
                   1.0 / c->fit[m].ns_per_byte, c->fit[m].r_squared);
    close_with(w, ']');
    kvf_calibration_choose(c, c->page_bytes, &choice);
    format(w, ",\"choice\":[");
    for (uint32_t b = 0; b < KVF_TRANSFER_BUCKETS; b++)
        if (b == 0 || choice.method[b] != choice.method[b - 1])
            format(w, "{\"pages_from\":%u,\"method\":\"%s\"},", 1u << b,
                   kvf_transfer_name(choice.method[b]));
    close_with(w, ']');
    format(w, "},");
}

static void links(writer *w, const kvf_runtime *rt)
{
    format(w, "\"links\":[");
    for (uint32_t i = 0; i < KVF_LINK_SIZES; i++)
        if ((rt->is_calibrated >> i & 1) && rt->calibration[i].is_measured)
            calibration(w, &rt->calibration[i]);
    close_with(w, ']');
    put(w, ',');
}

/* "always [madvise] never" -> madvise; "" if the system does not say. */
static void read_thp(char *out, size_t capacity)
{
    char line[128];
    out[0] = '\0';
    if (!kvf_file_line("/sys/kernel/mm/transparent_hugepage/enabled", line, sizeof line))
        return;
    const char *open = strchr(line, '[');
    const char *end = open ? strchr(open, ']') : NULL;
    if (end)
        snprintf(out, capacity, "%.*s", (int)(end - open - 1), open + 1);
}

static void memory(writer *w, const kvf_runtime *rt)
{
    static const char *const huge[] = {KVF_HUGE_PAGES_LIST(KVF_NAME_TEXT) NULL};
    kvf_headroom headroom;
    char thp[32];
    kvf_headroom_read(rt->topology, rt->node, &headroom);
    read_thp(thp, sizeof thp);
    format(w, "\"memory\":{\"node\":%d,", rt->node);
    number(w, "memlock_bytes", headroom.memlock);
    number(w, "pin_budget_bytes", headroom.pinned);
    number(w, "cgroup_headroom_bytes", headroom.cgroup);
    number(w, "available_bytes", headroom.node_free);
    format(w, "\"allow_unpinned\":%s,", rt->config.allow_unpinned ? "true" : "false");
    format(w, "\"huge_pages\":{\"setting\":\"%s\",", huge[rt->config.huge_pages]);
    number(w, "hugetlb_free_bytes", headroom.hugetlb_free);
    text_member(w, "transparent", thp);
    close_with(w, '}');
    format(w, "},");
}

/* How pages on disk would be read, and how much of host memory the kernel would know beforehand. */
static void disk_tier(writer *w, const kvf_runtime *rt)
{
    kvf_headroom headroom;
    kvf_error ring;
    kvf_headroom_read(rt->topology, rt->node, &headroom);
    const kvf_io_ops *engine = kvf_io_probe(rt->context, KVF_DISK_READS + KVF_DISK_WRITES, &ring);
    format(w, "\"disk_tier\":{");
    text_member(w, "engine",
                rt->test_hooks.io_engine ? rt->test_hooks.io_engine->name : engine->name);
    format(w, "\"liburing\":%s,", KVF_HAVE_URING ? "true" : "false");
    text_member(w, "io_uring", ring.text);
    number(w, "registered_max_bytes", headroom.memlock);
    close_with(w, '}');
    put(w, ',');
}

static void part(writer *w, const char *name, int is_present, const char *use, const char *how)
{
    put(w, '{');
    text_member(w, "name", name);
    format(w, "\"present\":%s,", is_present ? "true" : "false");
    text_member(w, "use", use);
    text_member(w, "how_to_get", how);
    close_with(w, '}');
    put(w, ',');
}

static void parts(writer *w)
{
    char absence[256];
    kvf_device_cuda_absence(absence);
    format(w, "\"parts\":[");
    part(w, "libnuma", KVF_HAVE_NUMA, "binding host memory to a node",
         "install libnuma-dev, then build with -Dnuma=enabled");
    part(w, "liburing", KVF_HAVE_URING, "several requests of a file at a time",
         "install liburing-dev, then build with -During=enabled");
    part(w, "xxHash", KVF_HAVE_XXHASH, "saved sequences",
         "install libxxhash-dev, then build with -Dxxhash=enabled");
    part(w, "cuda", absence[0] == '\0', "attending on an NVIDIA GPU",
         absence[0] ? absence : "nothing to do");
    close_with(w, ']');
    put(w, ',');
}

static void describe(writer *w, const kvf_runtime *rt)
{
    put(w, '{');
    text_member(w, "version", kvf_version());
    device(w, rt);
    format(w, "\"cpu\":{");
    features(w, "found", kvf_cpu_isa());
    features(w, "used", rt->device->kernels.isa);
    close_with(w, '}');
    put(w, ',');
    nodes(w, rt->topology);
    links(w, rt);
    memory(w, rt);
    disk_tier(w, rt);
    format(w, "\"threads\":{\"compute\":%u,\"gather\":%u},", rt->config.threads,
           rt->config.gather_threads);
    parts(w);
    close_with(w, '}');
}

kvf_status kvf_runtime_describe(kvf_runtime *runtime, char *text, size_t capacity, size_t *needed)
{
    KVF_CHECK_HANDLE(runtime, runtime);
    writer w = {.text = text, .capacity = text ? capacity : 0};
    describe(&w, runtime);
    if (w.capacity)
        text[w.used < w.capacity ? w.used : w.capacity - 1] = '\0';
    if (needed)
        *needed = w.used + 1;
    return w.used < w.capacity ? KVF_OK : KVF_FULL;
}

/* ---- single answers ---- */

const char *kvf_runtime_device_name(const kvf_runtime *runtime)
{
    return runtime ? runtime->properties.name : "";
}

uint32_t kvf_runtime_numa_nodes(const kvf_runtime *runtime, int32_t *ids, uint32_t capacity)
{
    const kvf_topology *t = runtime ? runtime->topology : NULL;
    if (!t || !t->known)
        return 0;
    for (uint32_t i = 0; ids && i < kvf_min_u32(capacity, t->node_count); i++)
        ids[i] = t->nodes[i].id;
    return t->node_count;
}
