#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Pruning on the command line: every policy and option, statistics that are JSON, the tune command and
# its file, and every mistake: its exit status, and what it names.
# check_prune.sh KVFERRY EXAMPLES [DEVICE]; both paths are absolute.

set -u
model=$2/recall/model
device=${3:-auto}
# shellcheck source=tests/cli/checks.sh
. "$(dirname "$0")/checks.sh"
# json FILE EXPRESSION: of d, the object in FILE, in Python; p and f are its members prune and footprint.
json() { check "$1: $2" python3 -S -c "import json, sys
d = json.load(open(sys.argv[1]))
p, f = d.get('prune'), d.get('footprint')
sys.exit(not ($2))" "$1"; }

# A text of 400 tokens without chance: all words of the model in turn.
python3 - "$model/tokenizer.json" >text.txt <<'END' || exit 1
import json, sys
vocab = json.load(open(sys.argv[1], encoding="utf-8"))["model"]["vocab"]
words = sorted((w for w in vocab if w.isalpha()), key=vocab.get)
print(" ".join(words[(i * 7) % len(words)] for i in range(400)))
END
run="run --model $model -n 2 --ignore-eos --prompt-file text.txt --threads 2 --device $device"
bad="run --model x"

# the listing, and help
try 0 run --prune help
for policy in full streaming h2o snapkv pyramidkv pyramidinfer gemfilter fastkv asl structkv; do
    prints "^  $policy "
done
prints 'PyramidInfer'; prints 'weights=0.2,0.3,0.5'
try 0 run --help; prints '--prune-config FILE'; prints '--head-sparsity R'
try 0 tune --help; prints '--layers A..B'; prints '--pool KIND'
try 0 --help; prints '^  tune '

# every policy, both retentions: tokens come out, statistics are JSON and agree with themselves
$kvferry $run --stats full.json >full.out 2>err || check 'a run without pruning' false
json full.json '"prune" not in d and d["footprint"]["footprint"] == 1'
for policy in full streaming h2o snapkv pyramidkv pyramidinfer gemfilter fastkv asl structkv; do
    more=
    [ $policy = asl ] && more='--prune-set layers_observed=2 --keep 0.3 --propagate 0.3'
    for retention in offload evict; do
        try 0 $run --prune $policy --retention $retention $more --stats s.json
        says "^pruning   $policy"
        json s.json "p['policy'] == '$policy' and p['retention'] == '$retention'
            and p['tokens_full'] == 4 * d['prompt_tokens'] and d['decode_steps'] == 1 and len(p['tokens_held']) == 4
            and 0 < p['compute_rate'] <= 1 and 0 <= p['share_of_prefill'] < 1
            and d['prefill_ms'] <= d['ttft_ms']
            and abs(f['device'] + f['host'] - f['footprint']) < 1e-6"
    done
done
try 0 $run --prune full --stats s.json
check 'full changes nothing' cmp out full.out
try 0 $run --prune snapkv --keep 1
check 'keep 1 changes nothing' cmp out full.out

# settings arrive
try 0 $run --prune fastkv --keep 100tok --propagate 200tok --prune-layer 2 --prune-window 16 \
    --pool avg:5 --prune-set group_reduce=max --retention evict --stats s.json
json s.json 'p["settings"]["keep_tokens"] == 100 and p["settings"]["window"] == 16
    and p["settings"]["pool"] == "avg" and p["settings"]["pool_width"] == 5
    and p["settings"]["group_reduce"] == "max" and p["chosen_layer"] == 2
    and p["tokens_held"] == [100] * 4 and p["tokens_kept_per_layer"] == 100
    and p["tokens_computed"] == 3 * d["prompt_tokens"] + 200'
try 0 $run --prune fastkv --keep 100tok --keep 0.5 --stats s.json
json s.json 'p["settings"]["keep_tokens"] == 0 and p["settings"]["keep"] == 0.5'
try 0 $run --prune structkv --prune-layer 1 --prune-block 32 --stats s.json
json s.json 'p["settings"]["pivot"] == "fixed" and p["chosen_layer"] == 1
    and p["settings"]["block_tokens"] == 32'
try 0 $run --prune structkv --pivot online --prune-set weights=1,0,0 --stats s.json
json s.json 'p["settings"]["weights"] == [1, 0, 0] and p["chosen_layer"] is not None'
try 0 $run --prune asl --two-pass --prune-set layers_observed=2 --propagate 100tok --stats s.json
json s.json 'p["settings"]["two_pass"] == 1 and p["tokens_held"] == [100] * 4'
json s.json 'p["chosen_layer"] == 3'
try 0 $run --prune asl --keep 1 --propagate 100tok --stats s.json
json s.json 'p["chosen_layer"] is None and p["compute_rate"] == 1'
try 0 $run --prune asl --prune-layer 1 --keep 80tok --propagate 200tok --retention evict --stats s.json
json s.json 'p["tokens_held"] == [80] * 4 and p["chosen_layer"] == 1'
try 0 $run --prune asl --prune-layer 1 --prune-set keep=0.2 --prune-set propagate=0.5 --retention evict --stats s.json
json s.json 'p["tokens_held"] == [80] * 4 and p["tokens_computed"] == 2 * 400 + 2 * 200'
try 0 $run --prune structkv --stats s.json; json s.json 'p["settings"]["layer_min"] == "auto"'
try 0 $run --prune snapkv --dry-run; says '^  pruning '; silent

# chunks, with and without eviction
try 0 $run --chunk 100; check 'chunks alone change nothing' cmp out full.out
try 0 $run --prune snapkv --chunk 100 --stats s.json; json s.json 'p["eviction"] == "none"'
for evict in naive patched; do
    try 0 $run --prune snapkv --keep 0.5 --chunk 150 --evict $evict --stats s.json
    json s.json "p['eviction'] == '$evict' and p['retention'] == 'evict'
        and max(p['tokens_held']) <= 75 + 75 + 64
        and ('$evict' == 'patched' or f['footprint'] < 1)"
done
try 0 $run --prune snapkv --keep 0.2 --chunk 150 --evict naive --chunk-queries 8
try 0 $run --prune snapkv --keep 1 --chunk 390 --evict patched
# chunks that are shorter than the local window, behind a front that stays
for evict in naive patched; do
    try 0 $run --prune streaming --keep 0.9 --chunk 16 --evict $evict --chunk-queries 4 --local 128
    try 0 $run --prune snapkv --keep 0.5 --prune-window 4 --chunk 20 --evict $evict --chunk-queries 4 --local 32
done

# head masks
printf '1\t1\n1\t1\n1\t1\n1\t1\n' >ones.tsv
printf '1\t0\n1\t1\n0\t0\n1\t0\n' >mask.tsv
printf '0.9\t0.1\n0.8\t0.7\n0.2\t0.3\n0.6\t0.4\n' >float.tsv
try 0 $run --head-mask ones.tsv; check 'a mask of ones changes nothing' cmp out full.out
try 0 $run --head-mask mask.tsv --streaming-sink 4 --streaming-recent 64 --stats s.json
json s.json 'd["head_mask"]["streaming_heads"] == 4 and d["head_mask"]["heads"] == 8
    and d["head_mask"]["streaming_recent"] == 64'
try 0 $run --head-mask float.tsv --head-sparsity 0.5 --stats s.json
json s.json 'd["head_mask"]["streaming_heads"] == 4 and d["head_mask"]["sparsity"] == 0.5'

try 0 run --model "$model" -n 1 --prune streaming --keep 1 --prompt document

# questions on forks of a pruned document
printf 'question the code of alice\nquestion the code of bob\n' >two.txt
try 0 $run --prune snapkv --ask two.txt --stats s.json
check 'two answers' test "$(wc -l <out)" -eq 2
json s.json 'len(d["questions"]) == 2 and p["policy"] == "snapkv"'

# completed: behind the first answer, the document is the one that was never pruned
printf 'question the code of alice\nquestion the code of bob\nquestion quiet\n' >three.txt
try 0 $run --select full --ask three.txt --emit-ids plain.ids
for policy in 'fastkv --keep 0.2' 'structkv --keep 0.2' pyramidinfer; do
    try 0 $run --select full --prune $policy --propagate 0.3 --retention complete --ask three.txt \
        --emit-ids complete.ids --stats s.json
    check "$policy: later answers are those of the whole document" \
        sh -c 'tail -n +3 plain.ids >wanted; tail -n +3 complete.ids | cmp - wanted'
    json s.json 'p["complete"]["whole"] and p["complete"]["tokens"] == 400
        and p["complete"]["rows"] > 0 == p["complete"]["rows_left"] and d["settings"]["sequences_max"] == 3'
done
json s.json 'p["complete"]["hidden_disk_bytes"] == 0 < p["complete"]["hidden_host_bytes"]'
try 0 $run --select full --prune fastkv --keep 0.2 --propagate 0.3 --retention complete --ask three.txt \
    --emit-ids complete.ids --disk . --host-memory 1M --disk-bundle-bytes 4K --stats s.json
check 'on disk: later answers are those of the whole document' \
    sh -c 'tail -n +3 plain.ids >wanted; tail -n +3 complete.ids | cmp - wanted'
json s.json '(lambda c: c["whole"] and c["hidden_disk_bytes"] == c["hidden_host_bytes"] > 0
    and c["hidden_disk_bytes"] % (400 * 4) == 0)(p["complete"])'

# quantized pages: in memory, on disk and in files the same; what keeps all, or gets all later, loses nothing
quantized="run --model $model -n 2 --ignore-eos --threads 2 --device $device --pages k8v4"
try 0 $quantized --select full --prompt-file text.txt --ask three.txt --emit-ids plain.ids
try 0 $quantized --select full --prompt-file text.txt --ask three.txt --emit-ids kept.ids --prune snapkv --keep 1 \
    --retention evict
check 'keep 1 changes nothing of quantized pages' cmp plain.ids kept.ids
for policy in 'snapkv --retention evict' 'structkv --retention evict' 'fastkv --retention offload'; do
    pruned="$quantized --prune $policy --keep 0.3 --prompt-file text.txt --ask three.txt"
    try 0 $pruned --emit-ids memory.ids --save pruned.kvs --stats s.json
    json s.json 'p["tokens_full"] == 4 * 400'
    try 0 $pruned --emit-ids disk.ids --disk . --host-memory 1M --disk-bundle-bytes 4K
    check "$policy: a disk changes nothing of quantized pages" cmp memory.ids disk.ids
    try 0 $quantized --load pruned.kvs --ask three.txt --emit-ids loaded.ids
    check "$policy: a file changes nothing of quantized pages" cmp memory.ids loaded.ids
done
try 0 $quantized --select full --prune fastkv --keep 0.2 --propagate 0.3 --retention complete --prompt-file text.txt \
    --ask three.txt --emit-ids complete.ids
check 'later answers are those of the whole document in quantized pages' \
    sh -c 'tail -n +3 plain.ids >wanted; tail -n +3 complete.ids | cmp - wanted'
try 0 $quantized --prune snapkv --keep 0.5 --chunk 150 --evict patched --prompt-file text.txt

try 0 $run --prune fastkv --retention complete --ask two.txt --dry-run; says '^  pruning '; silent
try 0 $run --prune fastkv --retention complete --ask two.txt --disk . --host-memory 1M --dry-run
says '^  hidden states on disk '; silent
try 0 $run -n 9 --prune fastkv --retention complete --ask three.txt --emit-ids plain.ids
try 0 $run -n 9 --prune fastkv --retention complete --complete-share 0.9 --ask three.txt --emit-ids share.ids --stats s.json
json s.json 'p["complete"]["whole"]'; check 'pieces between tokens change no answer' cmp plain.ids share.ids

# tune: bars, a file, pictures; run reads the file. It prints the model's path, which here is short
# wherever the tree lies.
ln -s "$model" model || exit 1
tune="tune --model model --text text.txt --tokens 128 --samples 3 --threads 2 --device $device --questions 0"
"$kvferry" $tune --layers 0..2 --out tuned.json >out 2>err </dev/null
check 'tune ends with 0' test $? -eq 0
prints '^fastkv: layer [0-2] '; prints '^structkv: pivot at layer [0-3] '; prints 'chosen'; prints '##'
check 'no line is wider than 80 columns' sh -c '! grep -E "^.{81}" out'
json tuned.json 'd["kvferry_prune"] == 1 and d["model"]["layers"] == 4 and d["samples"] == 3
    and len(d["fastkv"]["scores"]) == 3 and min(d["fastkv"]["scores"]) == d["fastkv"]["scores"][d["fastkv"]["layer"]]
    and len(d["structkv"]["entropy"]) == 4 and 0 <= d["structkv"]["layer"] <= 2'
json tuned.json 'all(t["recovery"][:t["layer"] + 1] == [1] * (t["layer"] + 1) and
    all(0 < x < 1 for x in t["recovery"][t["layer"] + 1:]) for t in (d["fastkv"], d["structkv"]))'
prints '^structkv: entropy of attention'; prints '^structkv: share of attention on the top 0.1 of the tokens'
prints '^structkv: variance of attention'; prints "^fastkv: share of a whole prompt's attention"
cp tuned.json first.json
"$kvferry" $tune --layers 0..2 --out - >again.json 2>err </dev/null
check 'the same text gives the same figures' cmp first.json again.json
if [ -w /dev/full ]; then
    "$kvferry" $tune --layers 0..2 --out - >/dev/full 2>err </dev/null
    check 'a result that a full disk does not take ends with 1' test $? -eq 1
    says 'kvferry: standard output: No space left'
fi
layer=$(python3 -c 'import json; print(json.load(open("tuned.json"))["fastkv"]["layer"])')
try 0 $run --prune fastkv --prune-config tuned.json --stats s.json
json s.json "p['chosen_layer'] == $layer and p['config'] == 'tuned.json'"
try 0 $run --prune structkv --prune-config tuned.json --stats s.json
json s.json 'p["settings"]["pivot"] == "calibrated" and p["chosen_layer"] == json.load(open("tuned.json"))["structkv"]["layer"]'
try 0 $run --prune structkv --prune-config tuned.json --pivot online --stats s.json
json s.json 'p["settings"]["pivot"] == "online" and p["settings"]["layer"] == "auto"'
try 0 $run --prune fastkv --prune-config tuned.json --prune-layer 0 --propagate 0.5 --stats s.json
json s.json 'p["chosen_layer"] == 0 and p["settings"]["propagate"] == 0.5'
try 0 $tune --method fastkv --propagate 0.5 --layers 1 --out one.json
json one.json '"structkv" not in d and d["fastkv"]["layer"] == 1 and d["fastkv"]["settings"]["propagate"] == 0.5'
try 0 $tune --method fastkv --propagate 0.9 --layers 1 --out most.json
json most.json 'all(a < b for a, b in zip(json.load(open("one.json"))["fastkv"]["recovery"][2:], d["fastkv"]["recovery"][2:]))'
try 0 $run --prune fastkv --prune-config one.json --stats s.json
json s.json 'p["settings"]["propagate"] == 0.5'

# tune: the facts of a document; its ranks settle of a document are the lines that are hidden, and run keeps them
python3 "$2/recall/generate.py" document --tokens 600 --questions 4 --seed 3 --out . >/dev/null || exit 1
python3 - <<'END' || exit 1
import re
fact = r'the code of (\w+ \w+) is (\w+ \w+) \.'
text = open("document.txt", encoding="utf-8").read()
with open("lines.tsv", "w", encoding="utf-8") as f:
    for m in re.finditer(fact, text):
        f.write("%s\tquestion the code of %s is\t%s\n" % (m[0], m[1], m[2]))
with open("plain.txt", "w", encoding="utf-8") as f:
    f.write(re.sub(fact + " ?", "", text))
END
try 0 $tune --method asl --propagate 0.3 --text document.txt --tokens 400 --samples 1 --out asl.json
prints '^asl: layer_min 1, threshold 0[.][0-9]*; the mean piece chooses layer 2 of 0 to 3'; prints '^ *2 .*<- chosen'
json asl.json 'list(d)[4:] == ["asl"] and d["asl"]["settings"]["layer_min"] == 1 and d["asl"]["first_layer"] == 1
    and d["asl"]["scores"][0] == 1 and d["asl"]["scores"][1] < d["asl"]["settings"]["threshold"] < 1'
try 0 $run --prune asl --prune-config asl.json --keep 1 --prune-set threshold=9 --stats s.json
json s.json 'p["chosen_layer"] == 1 and p["relative_variance"] == [None, 1, None, None] and
    p["settings"]["layer_min"] == 1 and p["settings"]["layer"] == "auto"'
ask="tune --model model --text plain.txt --hide lines.tsv --questions 6 --samples 2 --tokens 160 --threads 2 --device $device"
try 0 $ask --out asked.json
prints '^full attention answers [4-6] of 6 questions'; prints '^fastkv: layer [0-2], propagate 0.[0-9]* of the tokens, keep'
prints 'keeps [4-6] of [4-6] answers, computes [0-9]*% of a full prefill, first token after'
prints '^structkv: layer [0-2], '
json asked.json 'all(d[n]["answers"]["kept"] >= 0.95 * d[n]["answers"]["full"] and "scores" not in d[n]
    and 0 < d[n]["answers"]["computed"] < 1 for n in ("fastkv", "structkv"))'
cp asked.json first.json
try 0 $ask --out - --method both; check 'asked again, the same' cmp first.json out
for policy in fastkv structkv; do
    try 0 run --model model -n 2 --threads 2 --device "$device" --prune $policy --prune-config asked.json \
        --retention evict --prompt-file document.txt --stats s.json
    json s.json "(lambda t: p['chosen_layer'] == t['layer'] and p['settings']['keep'] == t['settings']['keep']
        and p['settings']['propagate'] == t['settings']['propagate'])(json.load(open('asked.json'))['$policy'])"
done
json asked.json 'd["fastkv"]["answers"]["asked"] == "end"'
try 0 $ask --method fastkv --asked after --out after.json
prints '^full attention answers [4-6] of 6 questions, asked afterwards'; prints '^fastkv: layer [0-2], propagate'
json after.json '(lambda a: a["asked"] == "after" and a["kept"] >= 0.95 * a["full"])(d["fastkv"]["answers"])'
cp after.json first.json
try 0 $ask --method fastkv --asked after --out -; check 'asked afterwards again, the same' cmp first.json out
try 0 $ask --method fastkv --propagate 0.5 --layers 1..1; prints 'layer 1, propagate 0.5'
try 0 $ask --method fastkv --propagate 100tok --layers 1..1; prints 'layer 1, propagate 100 tokens'
try 0 $ask --method asl --propagate 0.5 --goal 0.1 --out asl.json
prints '^asl: layer_min 1, threshold 0[.][0-9]* (layer 2 in the mean), propagate 0.5 of the tokens, keep'
json asl.json '(lambda a: a["answers"]["kept"] >= 0.1 * a["answers"]["full"] and "scores" not in a and
    a["settings"]["layer_min"] == 1)(d["asl"])'
try 1 $ask --layers 0 --propagate 0.1 --out none.json; says 'nothing is written to none.json'
prints 'no setting keeps 95% of the answers; the best: layer 0'
check 'no file' test ! -e none.json

printf 'quiet \377\376 river' >bad.txt

# files that are damaged, or of another model: named, nothing printed
poison() { # poison STATEMENT WHAT: change d, the object of tuned.json, and run with it
    python3 -c "import json
d = json.load(open('tuned.json'))
$1
json.dump(d, open('poisoned.json', 'w'))" || exit 1
    try 1 $run --prune fastkv --prune-config poisoned.json
    says "$2"
    says 'poisoned.json'
    silent
}
poison 'd["kvferry_prune"] = 2' 'kvferry_prune is 2, this version reads 1'
poison 'del d["kvferry_prune"]' 'kvferry_prune is missing'
poison 'del d["model"]' 'model is missing'
poison 'd["model"]["weights"] = "0123456789abcdef"' 'weights is "0123456789abcdef".* another model'
poison 'd["fastkv"]["layer"] = 4' 'fastkv.layer is 4; it must be a whole number from 0 to 3'
poison 'd["fastkv"]["layer"] = "1"' 'fastkv.layer is "1"; it must be a whole number'
poison 'd["fastkv"]["layer"] = 1.5' 'fastkv.layer is 1.5'
poison 'del d["fastkv"]["layer"]' 'fastkv.layer is missing'
poison 'del d["fastkv"]["settings"]' 'fastkv.settings is missing'
poison 'd["fastkv"]["settings"]["propagate"] = 0' 'settings.propagate is 0; it must be a number above 0'
poison 'd["fastkv"]["settings"]["window"] = -1' 'settings.window is -1'
poison 'd["fastkv"]["settings"]["pool"] = "min"' 'settings.pool is "min"; it must be max or avg'
poison 'd["fastkv"]["settings"]["speed"] = 1' 'settings.speed is no setting'
poison 'd["fastkv"] = 3' 'fastkv is'
poison 'd = [d]' 'kvferry_prune is missing'
head -c 200 tuned.json >cut.json

refusals prune "run=$run" "bad=$bad" "tune=$tune" "ask=$ask" "model=$model"
told
