#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# `kvferry bench link` and `bench decode` on the device at hand: every suite runs and verifies its
# bytes, every format is what it says, pictures are drawn, and mistakes are told before anything is
# measured.
#
# usage: check_bench.sh KVFERRY [DEVICE]

set -u
device=${2:-host}
# shellcheck source=tests/cli/checks.sh
. "$(dirname "$0")/checks.sh"
scripts=$here/../../runner/cli/bench

# picture SCRIPT NAME...: what the script draws of SCRIPT.csv, if gnuplot is here.
picture() {
    command -v gnuplot >/dev/null || { echo "gnuplot is not installed: $1 was not drawn"; return; }
    gnuplot -c "$scripts/$1.gnuplot" "$1.csv" >out 2>&1
    check "$1.gnuplot draws" test $? -eq 0
    silent
    shift
    for name in "$@"; do
        check "there is $name.svg" grep -q '</svg>' "$name.svg"
    done
}

# drawn PICTURE WORDS: it has them.
drawn() {
    ! command -v gnuplot >/dev/null || check "$1.svg says $2" grep -q "$2" "$1.svg"
}

# rows NAME FILE...: a script on standard input looks at the files.
rows() {
    name=$1
    shift
    checks=$((checks + 1))
    python3 - "$@" || { failed=$((failed + 1)); echo "not ok: the rows of $name"; }
}

quick="--device $device --repetitions 2 --warmup 1 --pool 4M --gap-us 20 --layers 3"
XDG_CACHE_HOME=$dir # the file of calibration
export XDG_CACHE_HOME

# ---- every suite, and what its rows say
try 0 bench link --all $quick --page-bytes 4K,16K --pages 1,16 -o json; mv out all.json
rows 'bench link --all' all.json <<'PY'
import json, sys
j = json.load(open(sys.argv[1]))
rows = j["results"]
suites = {r["suite"] for r in rows}
assert suites == {"peak", "back", "methods", "parts", "patterns", "staging", "workers", "blocks", "numa",
                  "huge-pages", "writeback", "cadence", "pin", "tax"}, suites
assert j["peak_gb_per_s_p10"] <= j["peak_gb_per_s"] <= j["peak_gb_per_s_p90"] and j["peaks"] > 2, j["peaks"]
assert j["machine"] and j["kernel"].startswith("Linux ") and j["cpus"] > 0 and j["threads"] > 0
base = {"gather": "memcpy", "both": "copy"}
for r in rows:
    if "status" in r:
        assert r["status"] == "not here", r
        continue
    assert r["median_us"] > 0 and r["min_us"] <= r["median_us"] <= r["max_us"], r
    # Of two repetitions.
    assert abs(r["stddev_us"] - (r["max_us"] - r["min_us"]) / 2 ** 0.5) < 1e-3 * (1 + r["max_us"]), r
    if r["what"] in ("both", "cadence"):
        assert r["verified_bytes"] > 0 and r["bytes"] == r["page_bytes"] * r["pages"] * (
            1 if r["what"] == "both" else r["bytes"] // (r["page_bytes"] * r["pages"])), r
    assert ("floor_us" in r) == (r["what"] in ("both", "copy", "peak", "cadence")), r
    if "floor_us" in r: # one contiguous copy
        assert abs(r["floor_us"] * r["peak_gb_per_s"] * 1e3 / (r["page_bytes"] * r["pages"]) - 1) < 1e-6, r
    if "of_peak" in r:
        assert abs(r["of_peak"] * r["peak_gb_per_s"] / r["gb_per_s"] - 1) < 1e-6, r
    assert r["what"] != "back" or (r["verified_bytes"] == r["bytes"] and "of_peak" not in r), r
assert len({r["peak_gb_per_s"] for r in rows if "of_peak" in r}) > 1 # by turns with the cases
for r in rows:
    if "status" in r:
        continue
    if r["what"] == "cadence":
        assert r["fetch_p50_us"] <= r["fetch_p95_us"] <= r["fetch_p99_us"], r
parts = {(r["what"], r["pages"], r["page_bytes"]): r for r in rows if r["suite"] == "parts"}
assert len(parts) == 16, parts.keys()
for (what, pages, page_bytes), r in parts.items(): # a part against what it is compared with
    assert ("times_base" in r) == (what in base), r
    if what in base:
        under = parts[base[what], pages, page_bytes]["gb_per_s"]
        assert abs(r["times_base"] * under / r["gb_per_s"] - 1) < 1e-6, r
    if what in ("memcpy", "gather"):
        assert r["verified_bytes"] > 0 and "of_peak" not in r, r
assert not any("times_base" in r for r in rows if r["suite"] == "methods") # no copy alone there
methods = {r["method"] for r in rows if r["suite"] == "methods" and "median_us" in r}
assert {"gather", "mapped", "each"} <= methods, methods
fitted = [r for r in rows if "fit_r_squared" in r]
assert fitted and all(r["predicted_us"] == r["predicted_us"] for r in fitted)
PY

# The option is named, not a field that nobody gave; and nothing is not success.
for pool in 16 2K; do
    try 1 bench link methods --device "$device" --repetitions 1 --page-bytes 4K --pages 1 --pool $pool
    says '--pool: pool_bytes = '
done
try 1 bench link back --device "$device" --repetitions 1 --pages 1 --pool 16000G; says 'lower pool_bytes'
try 1 bench link methods --device "$device" --repetitions 1 --page-bytes 4K --pages 256 --pool 64K
says 'nothing was measured: see the status of each case'
if "$kvferry" bench link pin --device "$device" --huge-pages required --pool 1M --repetitions 1 --warmup 0 \
    >out 2>err; then
    prints hugetlb
else
    says 'nothing was measured'
fi
# Some CPUs alone.
cpu=$(python3 -c 'import os; print(min(os.sched_getaffinity(0)))')
taskset -c "$cpu" "$kvferry" bench link back --device "$device" --threads 2 --repetitions 1 --pages 1 --pool 4M -o json \
    >out 2>err
check 'one CPU is enough' test $? -eq 0
rows 'one CPU' out <<'PY'
import json, sys
j = json.load(open(sys.argv[1]))
assert j["cpus"] == 1 and j["threads"] == 2, j
PY
# What does not depend on the device is looked at on the host device alone.
if [ "$device" != host ]; then
    echo "# left out: 6 of 9"
else

# ---- formats
for format in table csv json jsonl md; do
    try 0 bench link parts $quick --page-bytes 16K --pages 16 -o $format; mv out $format
done
rows 'formats' . <<'PY'
import csv, json, sys
w = sys.argv[1] + "/"
rows = json.load(open(w + "json"))["results"]
lines = [json.loads(l) for l in open(w + "jsonl")]
table = list(csv.DictReader(open(w + "csv")))
assert len(rows) == len(lines) == len(table) == 4, (len(rows), len(lines), len(table))
assert [r["what"] for r in rows] == [r["what"] for r in table] == ["memcpy", "gather", "copy",
                                                                 "both"]
assert open(w + "md").read().count("\n|") == 5 and len(open(w + "table").readlines()) == 5
PY

# ---- pages of one token
try 0 bench link parts methods $quick --page-bytes 256,512,1K --pages 1,30,2K -o json; mv out rows.json
rows 'small pages' rows.json <<'PY'
import json, sys
rows = [r for r in json.load(open(sys.argv[1]))["results"] if "status" not in r]
parts = [r for r in rows if r["suite"] == "parts"]
methods = [r for r in rows if r["suite"] == "methods"]
assert len(parts) == 36 and len(methods) >= 27 and len(methods) % 9 == 0, (len(parts), len(methods))
assert all(r["bytes"] == r["page_bytes"] * r["pages"] for r in rows)
assert all(r["verified_bytes"] == 2 * r["bytes"] for r in methods)
assert all("fit_r_squared" in r for r in methods)
PY

# ---- samples, the same seed, pictures
try 0 bench link parts $quick --repetitions 5 --page-bytes 16K --pages 8 --samples samples -o csv
check 'lines of --samples' test "$(wc -l <samples)" -eq 21
try 0 bench link methods cadence $quick --page-bytes 4K,16K --pages 1,8 -o csv; mv out link.csv
picture link link-bandwidth link-time link-map-gather link-latency
drawn link-time '>one contiguous copy<'

fi # on the host device

# ---- slots in order, and a file beside the table
try 0 bench link methods $quick --page-bytes 4K --pages 1,16 --slots-in-order off,on --method each,gather --json slots
rows '--slots-in-order' slots out <<'PY'
import json, sys
rows = json.load(open(sys.argv[1]))["results"]
assert len(rows) == 8 and len(open(sys.argv[2]).readlines()) == 9
assert [r.get("slots") for r in rows].count("in order") == 4
assert all(r["verified_bytes"] == 2 * r["bytes"] for r in rows)
lines = {(r["method"], r.get("slots")): r["fit_intercept_us"] for r in rows} # a line for each order
assert len(lines) == 4 and len(set(lines.values())) == 4, lines
PY

if [ "$device" = host ]; then
# ---- disk
small="--disk . --file 16M --bytes 256K --rounds 2"
try 0 bench disk $small --extent-bytes 16K,64K --depth 1,4 --what random,write -o json; mv out disk
rows 'bench disk' disk <<'PY'
import json, sys
j = json.load(open(sys.argv[1]))
rows = j["results"]
# Two peaks; two sizes and two modes of two kinds, by a ring at two depths and by one thread.
assert len(rows) == 2 + 2 * 2 * 2 * 3 and j["rounds"] == 2, len(rows)
peaks = rows[:2]
assert all(r["what"] == "sequential" and r["of_peak_p90"] <= 1 for r in peaks), peaks
assert j["peak_gb_per_s"] >= max(r["gb_per_s"] for r in peaks) > 0
measured = [r for r in rows if "status" not in r]
assert all(r["status"] == "not here" for r in rows if "status" in r)
assert any(r["engine"] == "preadv" and r["mode"] == "buffered" for r in measured)
rings = {(r["what"], r["mode"], r["extent_bytes"]) for r in measured if r["engine"] == "io_uring"}
for r in measured:
    assert r["gb_per_s_p10"] <= r["gb_per_s"] <= r["gb_per_s_p90"], r
    assert r["request_p50_us"] <= r["request_p95_us"] <= r["request_p99_us"], r
    assert ("of_peak" in r) == (r["what"] != "write"), r
    assert ("times_preadv" in r) == (r["engine"] == "io_uring" and r not in peaks), r
    assert ("fit_r_squared" in r) == (r not in peaks), r
    if r["what"] != "write":
        assert r["verified_bytes"] == 2 * r["extent_bytes"] * min(r["depth"], r["extents"]), r
PY
try 0 bench disk $small --rounds 1 --extent-bytes 16K,64K --depth 1,4 --rest-ms 1 -o csv; mv out disk.csv
if grep -q ',not here$' disk.csv; then
    picture disk disk-extent
else
    picture disk disk-depth disk-extent
fi
# As of a build without liburing: rows without rates.
awk -F, -v OFS=, '$2 == "io_uring" { for (i = 7; i < NF; i++) $i = ""; $NF = "not here" } 1' \
    disk.csv >one.csv
mv one.csv disk.csv
rm -f disk-*.svg
picture disk disk-extent
try 1 bench disk --disk none --file 16M; says '--disk: none'
try 1 bench disk --disk . --file 16M --json none/file; says 'cannot be created'
try 1 bench disk --disk . --file 20M; says 'must be a multiple of 16777216'
try 0 bench disk --help
fi # on the host device

# ---- decode
try 0 bench decode --device "$device" --context 1024,2048 --budget 256 --layers 1 --kv-heads 2 --head-dim 64 \
    --steps 3 --warmup 1 --select hybrid,full --method gather,mapped --batch 1,2 --json decode -o csv
mv out decode.csv
rows 'bench decode' decode <<'PY'
import json, sys
rows = json.load(open(sys.argv[1]))["results"]
assert len(rows) == 16, len(rows)
assert all(r["layer_us"] > 0 and r["floor_us"] > 0 and r["enqueue_us"] > 0 for r in rows), rows
hybrid = [r for r in rows if r["select"] == "hybrid"]
assert all(r["tokens_attended"] <= 256 for r in hybrid)
assert {r["method"] for r in rows} == {"gather", "mapped"}
assert all(r["layer_p10_us"] <= r["layer_us"] <= r["layer_p95_us"] <= r["layer_p99_us"] for r in rows)
assert not any("faster_than_dense" in r for r in rows)
PY
try 0 bench decode --device "$device" --context 1024,2048 --budget 256 --layers 2 --kv-heads 2 --head-dim 64 \
    --steps 5 --dense-steps 3 --warmup 1 --method gather --batch 1,2 --json decode
rows 'bench decode --dense-steps' decode "$device" <<'PY'
import json, sys
rows = json.load(open(sys.argv[1]))["results"]
assert [(r["context_tokens"], r["select"], r["batch"]) for r in rows] == [
    (c, s, b) for c in (1024, 2048) for s, b in (("full", 1), ("dynamic", 1), ("dynamic", 2))], rows
parts = ["append_us", "score_us", "select_us", "gather_us", "copy_us", "attend_us", "refresh_us"]
for i, r in enumerate(rows):
    dense = rows[i - i % 3]
    assert ("faster_than_dense" in r) == (r is not dense) and ("budget_tokens" in r) == (r is not dense), r
    if r is not dense:
        ratio = dense["layer_us"] / r["layer_us"] * r["batch"]
        assert abs(r["faster_than_dense"] / ratio - 1) < 1e-6, (r, ratio)
    if sys.argv[2] == "host": # where phases have times
        assert all(r[p] >= 0 for p in parts) and r["attend_us"] > 0, r
        work = r["attend_us"] + r["score_us"] + r["refresh_us"]
        assert abs(r["overhead"] - max(0, 1 - work / r["layer_mean_us"])) < 1e-6, r
        assert abs(r["refresh"] - r["refresh_us"] / r["layer_mean_us"]) < 1e-6, r
PY

# Queries that have nothing of those before find less on the device.
for queries in "" --afresh; do
    try 0 bench decode --device "$device" --context 4096 --budget 128 --layers 1 --kv-heads 2 --head-dim 64 \
        --steps 3 \
        --warmup 1 --method each --device-memory 0 $queries -o jsonl
    cat out >>afresh
done
rows 'bench decode --afresh' afresh <<'PY'
import json, sys
kept, afresh = [json.loads(l)["hit_rate"] for l in open(sys.argv[1])]
assert afresh < kept / 2, (afresh, kept)
PY

# A table that is drawn; forks, beside sequences of their own; and a disk tier, beside the same in memory: three of four pages have no room.
if [ "$device" = host ]; then
    picture decode decode
    drawn decode '>hybrid, gather'
    # Forks, beside sequences of their own: the same choices, from fewer pages of the host.
    try 0 bench decode --device host --context 2048 --budget 256 --layers 1 --kv-heads 2 --head-dim 64 --steps 2 \
        --warmup 1 --digest codes --batch 3 --forks -o jsonl
    mv out decode
    rows 'bench decode --forks' decode <<'PY'
import json, sys
apart, forks = [json.loads(l) for l in open(sys.argv[1])]
assert "forks" not in apart and forks["forks"] == 1 and forks["times_apart"] > 0
assert forks["host_bytes"] < apart["host_bytes"] / 2, (forks, apart)
assert forks["read_bytes"] < apart["read_bytes"]
# Bytes, of which a layer reads at least keys and values of what it attends to (bf16, 2 heads of 64).
assert apart["read_bytes"] >= 3 * apart["tokens_attended"] * 2 * 64 * 2 * 2, apart
assert forks["tokens_attended"] == apart["tokens_attended"]
PY
    try 0 bench decode --device host --context 4096 --budget 256 --layers 4 --kv-heads 2 --head-dim 64 --steps 4 \
        --dense-steps 1 --warmup 1 --passage 32 --topics 16 --drift 0.1 --disk . --host-memory 3M -o jsonl
    mv out decode
    rows 'bench decode --disk' decode <<'PY'
import json, sys
dense, memory, disk = [json.loads(l) for l in open(sys.argv[1])]
of_disk = ["pages_in_memory", "bundles_in_memory", "bundles_wanted", "disk_mib", "disk_wait_us",
           "times_in_memory"]
assert not any(k in r for k in of_disk for r in (dense, memory)) and all(k in disk for k in of_disk)
assert disk["tokens_attended"] == memory["tokens_attended"] and disk["hit_rate"] == memory["hit_rate"]
assert 0 < disk["bundles_in_memory"] < 1 and 0 < disk["pages_in_memory"] < 1, disk
read = (1 - disk["bundles_in_memory"]) * disk["bundles_wanted"] / 8
assert abs(disk["disk_mib"] / read - 1) < 1e-6, (disk, read)
assert 0 < disk["disk_wait_us"] < disk["layer_mean_us"], disk
assert disk["times_in_memory_p10"] <= disk["times_in_memory"] <= disk["times_in_memory_p90"], disk
assert disk["host_bytes"] < memory["host_bytes"], (memory, disk)
PY
fi

if [ "$device" = host ]; then
# ---- mistakes
refusals bench
try 2 bench nothing; says 'usage: kvferry bench link'
try 1 bench link peak --device "$device" --pool 4M --json none/file; says 'cannot be created'
try 1 bench decode --device "$device" --json none/file; says 'cannot be created'
try 0 bench link --list
try 0 bench link --help
fi # on the host device

told
