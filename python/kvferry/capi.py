# SPDX-License-Identifier: Apache-2.0
"""The C declarations of include/kvferry/*.h as tables, and the library that they belong to.

Knows nothing of arrays and of what a call means. Invariant: every function, struct, enumerator and
constant of the headers is here with the same layout, or in LEFT_OUT with a reason; the test
`python_capi` compares them with the headers.
"""
import ctypes
import ctypes.util
import enum
import os
import pathlib
import re
import sysconfig

LEFT_OUT = {
    "KVF_API": "an attribute of the compiler",
    "KVF_CHECKED": "an attribute of the compiler",
    "KVF_ENUMERATOR": "builds enums from lists; the values are here",
}

_WORDS = {
    "u8": ctypes.c_uint8, "u32": ctypes.c_uint32, "u64": ctypes.c_uint64, "i32": ctypes.c_int32,
    "f32": ctypes.c_float, "f64": ctypes.c_double, "size": ctypes.c_size_t, "char": ctypes.c_char,
    "ptr": ctypes.c_void_p, "text": ctypes.c_char_p, "int": ctypes.c_int, "enum": ctypes.c_int,
    "void": None,
}


# ---- enums: Python's name, the prefix of the C names, values ----

def _enum(name: str, prefix: str, values: str, kind: type = enum.IntEnum) -> type:
    """NAME counts from the value before it, NAME=N says its own."""
    rows, following = {}, 0
    for word in values.split():
        word, _, number = word.partition("=")
        value = int(number, 0) if number else following
        rows[word] = value
        following = value + 1
    made = kind(name, rows, module=__name__)
    made.__doc__ = "Values of the C names %s*." % prefix
    made.c_names = {prefix + word: value for word, value in rows.items()}
    ENUMS.append(made)
    return made


ENUMS: list = []

Status = _enum("Status", "KVF_", """OK=0 INVALID=-1 OUT_OF_MEMORY=-2 OUT_OF_DEVICE_MEMORY=-3
    PIN_FAILED=-4 FULL=-5 BUSY=-6 UNSUPPORTED=-7 NOT_FINITE=-8 DEVICE_FAILED=-9 SYSTEM=-10
    CORRUPT=-11""")
Device = _enum("Device", "KVF_DEVICE_", "AUTO HOST CUDA")
HugePages = _enum("HugePages", "KVF_HUGE_PAGES_", "AUTO OFF REQUIRED")
Isa = _enum("Isa", "KVF_ISA_", """REFERENCE=0 BASELINE=1 AVX2=2 AVX512=4 AVX512_BF16=8 NEON=16
    AVX_VNNI=32 AVX512_VNNI=64 ALL=0x7fffffff""", enum.IntFlag)
Dtype = _enum("Dtype", "KVF_", "BF16 FP16 FP32")
Pages = _enum("Pages", "KVF_PAGES_", "NATIVE K8V8 K8V4")
Tensors = _enum("Tensors", "KVF_TENSORS_", "DTYPE FP32 FP32_QUERIES")
Select = _enum("Select", "KVF_SELECT_",
               "HYBRID FULL STATIC DYNAMIC STREAMING QUEST ARKVALE ORACLE CUSTOM")
Digest = _enum("Digest", "KVF_DIGEST_", "MINMAX CUBOID_MEAN MEAN CODES")
Fill = _enum("Fill", "KVF_FILL_", "PAGES TOKENS")
GroupReduce = _enum("GroupReduce", "KVF_GROUP_", "MEAN_SOFTMAX MAX SUM")
Refresh = _enum("Refresh", "KVF_REFRESH_", "RESIDENT EXACT")
Transfer = _enum("Transfer", "KVF_TRANSFER_", "AUTO DIRECT GATHER EACH MAPPED BATCH")
Preset = _enum("Preset", "KVF_PRESET_", "DEFAULT PRKV")
LinkWhat = _enum("LinkWhat", "KVF_LINK_", "BOTH GATHER COPY PEAK PIN CADENCE TAX MEMCPY BACK")
DiskWhat = _enum("DiskWhat", "KVF_DISK_", "RANDOM SEQUENTIAL WRITE")
DiskEngine = _enum("DiskEngine", "KVF_DISK_", "URING PREADV")
LinkPattern = _enum("LinkPattern", "KVF_LINK_", "UNIFORM ZIPF RUNS")
Pool = _enum("Pool", "KVF_POOL_", "MAX AVERAGE")
Retention = _enum("Retention", "KVF_RETENTION_", "OFFLOAD EVICT COMPLETE")
Eviction = _enum("Eviction", "KVF_EVICTION_", "NONE NAIVE PATCHED")
Pivot = _enum("Pivot", "KVF_PIVOT_", "ONLINE CALIBRATED FIXED")
PruneNeeds = _enum("PruneNeeds", "KVF_PRUNE_",
                   "NOTHING=0 SCORES=1 PROFILE=2 LOGITS=4 SUMS=8 WEIGHTED=16 ALL=31", enum.IntFlag)
PruneReach = _enum("PruneReach", "KVF_PRUNE_REACH_", "LAYER PROPAGATE RESTART")
SettingKind = _enum("SettingKind", "KVF_SETTING_", "WHOLE POWER SWITCH NAME REAL SHARE TEXT")

CONSTANTS = {"KVF_VERSION_MAJOR": 0, "KVF_VERSION_MINOR": 1, "KVF_VERSION_PATCH": 0,
             "KVF_STATIC_RATIO_AUTO": -1.0, "KVF_DEVICE_BYTES_AUTO": 2**63, "KVF_PRUNE_LAYER_AUTO": 2**32 - 1}


# ---- structs: "type name name; type name[count]", in the order of C ----

class Struct(ctypes.Structure):
    """A struct of C whose fields can be seen at once."""

    def as_dict(self) -> dict:
        """Fields by name; texts are str, structs are dicts, pointers are addresses."""
        def plain(value: object) -> object:
            if isinstance(value, bytes):
                return value.decode(errors="replace")
            if isinstance(value, Struct):
                return value.as_dict()
            return list(value) if isinstance(value, ctypes.Array) else value
        return {name: plain(getattr(self, name)) for name, _ in self._fields_}

    def __repr__(self) -> str:
        fields = ", ".join("%s=%r" % row for row in self.as_dict().items())
        return "%s(%s)" % (type(self).__name__, fields)


def _struct(c_name: str, text: str) -> type:
    fields = []
    for row in text.split(";"):
        kind, *names = row.split()
        for name, count in (re.fullmatch(r"(\w+)(?:\[(\d+)\])?", name).groups() for name in names):
            fields.append((name, _WORDS[kind] * int(count) if count else _WORDS[kind]))
    python_name = "".join(word.capitalize() for word in c_name.split("_")[1:])
    made = type(python_name, (Struct,), {"_fields_": fields, "__doc__": "The struct " + c_name + "."})
    made.c_name = c_name
    _WORDS[c_name] = made
    STRUCTS.append(made)
    return made


STRUCTS: list = []

ErrorText = _struct("kvf_error", "enum status; int foreign; char text[512]")
_struct("kvf_allocator", "ptr alloc free user")
RuntimeConfig = _struct("kvf_runtime_config", """size size; enum device; u32 threads gather_threads;
    i32 numa_node; enum huge_pages; u32 allow_unpinned isa_mask; kvf_allocator allocator;
    ptr log log_user; u32 device_ordinal calibrate early_starts; text calibration_path""")
SelectView = _struct("kvf_select_view", """u32 layer kv_head pages pages_max; ptr scores static_bits;
    u32 page_size block_size""")
CacheConfig = _struct("kvf_cache_config", """size size; u32 layers query_heads kv_heads head_dim value_dim;
    enum dtype; f32 softmax_scale; enum tensors; u32 sequences_max tokens_max; u64 host_tokens_max;
    u32 prefill_chunk_max tokens_per_step_max observe_window reserved_limits page_size budget_tokens; f32 budget_share;
    u32 sink_tokens local_tokens; enum select; f32 static_ratio; u32 refresh_interval; enum refresh digest; u32 sub_digests;
    enum fill group_reduce; u32 reserved_policy; ptr select_fn select_user head_mask layer_windows; f32 coarse_share;
    u32 streaming_sink streaming_recent verify_interval phase_times; enum pages; u64 device_bytes; enum transfer;
    u32 disk_bundle_bytes; text disk_path; u64 host_bytes disk_bytes""")
AttentionParams = _struct("kvf_attention_params", "size size; f32 scale; ptr sinks; f32 soft_cap")
CachePlan = _struct("kvf_cache_plan", """u64 host_kv_bytes host_staging_bytes device_kv_bytes
    device_digest_bytes device_table_bytes; u32 static_tokens dynamic_pages slots; enum transfer;
    u64 host_table_bytes; u32 block_size disk_bundle_bytes; u64 disk_bytes; enum digest; u64 resident_tokens prompt_bytes""")
BlocksConfig = _struct("kvf_blocks_config",
                       "size size; u32 block_count block_tokens on_demand reserved[5]; kvf_cache_config cache")
BlocksPlan = _struct("kvf_blocks_plan", """u64 code_bytes host_bytes device_block_bytes
    device_region_bytes device_bytes; u32 slots; enum transfer; u64 resident_tokens prompt_bytes""")
BlocksPutArgs = _struct("kvf_blocks_put_args", "u32 layer tokens; ptr k v; size k_stride v_stride; ptr slots")
BlocksGetArgs = _struct("kvf_blocks_get_args",
                        "u32 layer tokens; ptr k v; size k_stride v_stride; ptr slots; u32 fp32")
BlocksRows = _struct("kvf_blocks_rows", "u32 rows table_stride; ptr table lengths regions")
BlocksDecodeArgs = _struct("kvf_blocks_decode_args",
                           "u32 layer; ptr rows q out lse page_scores page_ids; u32 page_stride")
BlocksExtendArgs = _struct("kvf_blocks_extend_args", "u32 layer; ptr rows starts contexts q out lse")
BlocksStats = _struct("kvf_blocks_stats", """u64 tokens_put tokens_attended pages_selected hits misses
    bytes_to_device pages_voided tokens_brought bad_rows bad_slots bytes_prompt""")
PrefillArgs = _struct("kvf_prefill_args", "ptr sequence; u32 layer tokens; ptr q k v positions out")
DecodeArgs = _struct("kvf_decode_args",
                     """u32 layer batch; ptr sequences q k v positions out lse tokens page_scores page_ids;
    u32 page_stride""")
PageLists = _struct("kvf_page_lists", "ptr indptr indices; u32 capacity; ptr last_page_len")
Stats = _struct("kvf_stats", """u64 steps tokens_attended tokens_held pages_selected hits misses
    bytes_to_device bytes_to_host bytes_refresh copies refreshes append_ns score_ns select_ns gather_ns copy_ns
    attend_ns refresh_ns verified; f64 recall_sum error_max; u32 static_tokens_min
    static_tokens_max; u64 disk_wanted
    disk_reads bytes_from_disk bytes_to_disk pages_from_disk disk_wait_ns bytes_prompt""")
Footprint = _struct("kvf_footprint", """f64 footprint device host peak device_peak; u64 steps
    entry_steps device_entry_steps full_entry_steps peak_entries device_peak_entries
    full_entries""")
LinkCase = _struct("kvf_link_case", """size size; enum what method pattern; u32 run_pages; f64 zipf;
    size page_bytes; u32 pages; u64 pool_bytes; size chunk_bytes; u32 depth workers blocks;
    i32 numa_node; enum huge_pages; u32 writeback_percent layers gap_ns repetitions warmup; u64 seed;
    u32 slots_in_order""")
_struct("kvf_link_times", "u64 min_ns median_ns p95_ns p99_ns max_ns")
LinkResult = _struct("kvf_link_result", """kvf_link_times total copying gather fetch alone;
    u64 bytes copies writeback_bytes verified_bytes; f64 touch_s_per_gib register_s_per_gib
    unregister_s_per_gib; char tier[16]; i32 numa_node; u32 workers depth blocks;
    size chunk_bytes""")
DiskCase = _struct("kvf_disk_case", """size size; enum what engine; u32 direct; size extent_bytes;
    u32 depth extents; u64 seed""")
DiskResult = _struct("kvf_disk_result", """u64 ns bytes; kvf_link_times request; u64 verified_bytes;
    u32 kept align""")
LinkLine = _struct("kvf_link_line", "f64 intercept slope r_squared")
PruneSettings = _struct("kvf_prune_settings", """size size; f32 keep propagate; u32 keep_tokens
    propagate_tokens layer window; enum pool; u32 pool_width; enum group_reduce; u32 window_mean
    sink_tokens; f32 recent_share; u32 beta; f32 decay weights[3] mass_share; enum pivot;
    u32 block_tokens layer_min layer_max layers_observed; f32 threshold; u32 two_pass""")
PruneProfile = _struct("kvf_prune_profile", "f32 entropy mass variance")
PruneView = _struct("kvf_prune_view", """ptr settings user state; u32 layer layers kv_heads
    query_heads tokens prompt pass window candidates; ptr scores profile positions""")
PruneAnswer = _struct("kvf_prune_answer", """ptr keep; u32 keep_count; ptr propagate;
    u32 propagate_count restart is_chosen; f64 measure""")
PruneShape = _struct("kvf_prune_shape", "u32 layers kv_heads query_heads tokens_max")
PrunePolicyRow = _struct("kvf_prune_policy", """size size; text name source settings; enum reach;
    u32 needs; ptr needs_at check state_bytes decide user""")
PruneConfig = _struct("kvf_prune_config", """size size; ptr policy; enum retention eviction;
    u32 chunk_queries reserved[5]; kvf_prune_settings settings""")
PrunePlan = _struct("kvf_prune_plan", "u64 device_bytes host_bytes")
HiddenPlan = _struct("kvf_hidden_plan", "u64 host_bytes disk_bytes")
PruneResult = _struct("kvf_prune_result", "u32 keep_count; ptr propagate; u32 propagate_count restart")
PruneStats = _struct("kvf_prune_stats", """u64 prompts tokens_computed tokens_full kept;
    u32 chosen_layer; u64 observe_ns decide_ns retain_ns""")
StructkvMeasures = _struct("kvf_structkv_measures", "f64 entropy sparsity variance")
SaveArgs = _struct("kvf_save_args", "size size; ptr sequence; text path model; ptr note; u32 note_bytes")
RestoreArgs = _struct("kvf_restore_args", "size size; text path model; u32 exact")
Saved = _struct("kvf_saved", """u64 bytes; u32 tokens layers query_heads kv_heads head_dim;
    enum dtype; u32 page_size note_bytes; char model[64] library[16]; u32 value_dim reserved""")
SettingRow = _struct("kvf_setting", """text name; enum kind; u32 count bytes; size offset;
    f64 low high; ptr names; text special; f64 special_value; text meaning""")


# ---- functions that C calls ----

CALLBACKS = {
    "kvf_log_fn": ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p),
    "kvf_task_fn": ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32),
    "kvf_select_fn": ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_void_p, ctypes.POINTER(SelectView),
                                      ctypes.POINTER(ctypes.c_int32)),
}
NeedsAt = ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.POINTER(PruneView))
Check = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(PruneSettings), ctypes.POINTER(PruneShape),
                         ctypes.c_void_p, ctypes.c_size_t)
StateBytes = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p)
Decide = ctypes.CFUNCTYPE(None, ctypes.POINTER(PruneView), ctypes.POINTER(PruneAnswer))


# ---- functions: name, what it returns, what it takes ----

FUNCTIONS = """
kvf_status_name           text  enum
kvf_status_text           text  enum
kvf_version               text

kvf_runtime_config_init_sized void ptr size
kvf_runtime_open          enum  ptr ptr ptr
kvf_runtime_close         void  ptr
kvf_runtime_error         ptr   ptr
kvf_runtime_describe      enum  ptr ptr size ptr
kvf_runtime_calibrate     enum  ptr
kvf_runtime_threads       u32   ptr
kvf_runtime_device_name   text  ptr
kvf_runtime_numa_nodes    u32   ptr ptr u32
kvf_runtime_device        enum  ptr

kvf_stream_create         enum  ptr ptr
kvf_stream_destroy        void  ptr
kvf_stream_wait           enum  ptr
kvf_stream_wrap           enum  ptr ptr ptr
kvf_stream_native         ptr   ptr
kvf_stream_launch         enum  ptr ptr ptr size u32
kvf_memory_alloc          enum  ptr size ptr
kvf_memory_free           void  ptr ptr
kvf_pinned_alloc          enum  ptr size ptr ptr
kvf_pinned_free           void  ptr ptr
kvf_memory_copy           enum  ptr ptr ptr size

kvf_cache_config_init_sized void ptr size
kvf_cache_config_preset   void  ptr enum
kvf_cache_plan_make_sized enum  ptr ptr ptr size ptr
kvf_cache_open            enum  ptr ptr ptr ptr
kvf_cache_close           void  ptr
kvf_cache_settings        ptr   ptr
kvf_cache_memory          ptr   ptr
kvf_attention_params_init_sized       void  ptr size
kvf_cache_attention_params            enum  ptr u32 ptr
kvf_sequence_create       enum  ptr ptr
kvf_sequence_fork         enum  ptr ptr ptr ptr
kvf_sequence_truncate     enum  ptr ptr u32 ptr
kvf_sequence_destroy      void  ptr
kvf_sequence_length       u32   ptr u32
kvf_sequence_position     u32   ptr u32 u32
kvf_prefill_sized         enum  ptr ptr size ptr
kvf_decode_sized          enum  ptr ptr size ptr
kvf_record_begin          enum  ptr ptr u32 ptr
kvf_record_end            enum  ptr ptr
kvf_replay_is_possible    int   ptr
kvf_replay                enum  ptr ptr
kvf_recording_nodes       u32   ptr
kvf_recording_destroy     void  ptr
kvf_select_pages_max      u32   ptr
kvf_select_pages_sized    enum  ptr ptr size ptr size ptr
kvf_page_address          ptr   ptr u32 u32 u32
kvf_attend_pages_sized    enum  ptr ptr size ptr size ptr
kvf_read_pages_sized      enum  ptr ptr size ptr size ptr
kvf_cache_stats_sized     void  ptr ptr size
kvf_cache_layer_stats_sized void  ptr u32 ptr size
kvf_cache_stats_reset     void  ptr
kvf_cache_footprint_sized void  ptr ptr size

kvf_prune_policy_find     ptr   text
kvf_prune_policy_at       ptr   u32
kvf_prune_policy_takes    int   ptr text
kvf_prune_config_init_sized void ptr ptr size
kvf_prune_config_check_sized enum  ptr ptr size ptr
kvf_prune_plan_make_sized enum  ptr ptr ptr ptr size ptr
kvf_prune_open            enum  ptr ptr ptr ptr
kvf_prune_close           void  ptr
kvf_prune_config_get      ptr   ptr
kvf_prune_begin           enum  ptr ptr u32
kvf_prune_append_sized    enum  ptr ptr size ptr
kvf_prune_layer_sized     enum  ptr ptr u32 ptr ptr size
kvf_prune_chunk           enum  ptr ptr u32 u32 u32 ptr
kvf_complete_begin        enum  ptr ptr u32 u32 ptr ptr
kvf_complete_end          enum  ptr ptr ptr ptr
kvf_hidden_plan_make_sized void  u64 u32 int ptr size
kvf_hidden_open           enum  ptr u64 u32 text ptr
kvf_hidden_close          void  ptr
kvf_hidden_put            enum  ptr u32 u32 ptr ptr
kvf_hidden_get            enum  ptr u32 u32 ptr ptr
kvf_prune_stats_get_sized void  ptr ptr size
kvf_prune_measures        void  ptr ptr u32

kvf_blocks_config_init_sized void ptr size
kvf_blocks_plan_make_sized enum  ptr ptr ptr size ptr
kvf_blocks_open           enum  ptr ptr ptr ptr
kvf_blocks_close          void  ptr
kvf_blocks_memory         ptr   ptr
kvf_blocks_bind           enum  ptr u32 ptr size
kvf_blocks_attention_params           enum  ptr u32 ptr
kvf_blocks_put_sized      enum  ptr ptr size ptr
kvf_blocks_get_sized      enum  ptr ptr size ptr
kvf_blocks_decode_sized   enum  ptr ptr size size ptr
kvf_blocks_extend_sized   enum  ptr ptr size size ptr
kvf_blocks_copy           enum  ptr ptr ptr u32 ptr
kvf_blocks_stats_get_sized void  ptr ptr size
kvf_blocks_stats_reset    void  ptr
kvf_structkv_measure      kvf_structkv_measures ptr u32
kvf_structkv_transition   void  ptr ptr u32 ptr
kvf_structkv_pivot        u32   ptr u32 u32 u32

kvf_link_case_init_sized void ptr size
kvf_link_open             enum  ptr ptr
kvf_link_close            void  ptr
kvf_link_measure_sized    enum  ptr ptr ptr ptr size
kvf_link_fit              enum  ptr ptr u32 int ptr

kvf_disk_case_init_sized void ptr size
kvf_disk_open             enum  ptr text u64 ptr
kvf_disk_close            void  ptr
kvf_disk_measure_sized    enum  ptr ptr ptr size

kvf_save_args_init_sized void ptr size
kvf_sequence_save         enum  ptr ptr ptr ptr
kvf_save_is_done          int   ptr
kvf_save_finish           enum  ptr ptr
kvf_restore_args_init_sized void ptr size
kvf_sequence_restore      enum  ptr ptr ptr ptr
kvf_saved_read_sized      enum  ptr text int ptr size ptr size ptr

kvf_setting_range         text  ptr ptr size
kvf_setting_parse         int   ptr text ptr
kvf_setting_show          text  ptr ptr ptr size
kvf_runtime_setting       ptr   u32
kvf_cache_setting         ptr   u32
kvf_prune_setting         ptr   u32
kvf_link_setting          ptr   u32
kvf_disk_setting          ptr   u32
"""


def _library_path() -> str:
    """Where libkvferry is: KVFERRY_LIBRARY, the wheel, or what the system has installed."""
    named = os.environ.get("KVFERRY_LIBRARY")
    if named:
        return named
    places = [pathlib.Path(__file__).parent.parent, pathlib.Path(sysconfig.get_path("platlib"))]
    found = [path for place in places
             for path in sorted(place.glob(".kvferry.mesonpy.libs/libkvferry.so"))]
    path = found[0] if found else ctypes.util.find_library("kvferry")
    if not path:
        raise ImportError("kvferry: no libkvferry. Install the package with pip, install the library, "
                          "or set KVFERRY_LIBRARY to its path")
    return str(path)


def _load() -> ctypes.CDLL:
    """A CDLL frees the interpreter's lock in every call."""
    library = ctypes.CDLL(_library_path())
    for row in FUNCTIONS.split("\n"):
        if row:
            name, result, *arguments = row.split()
            try:
                function = getattr(library, name)
            except AttributeError:
                raise ImportError("kvferry: %s has no %s; the package needs version 0.1 of the "
                                  "library" % (library._name, name)) from None
            function.restype = _WORDS[result]
            function.argtypes = [_WORDS[word] for word in arguments]
    return library


lib = _load()


def sized(row: Struct) -> tuple:
    """A struct as functions ..._sized take it: its address, and its size."""
    return ctypes.byref(row), ctypes.sizeof(row)
