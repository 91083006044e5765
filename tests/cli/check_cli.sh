#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# The kvferry command from outside: what it prints where, what it refuses and how, which files it
# leaves. check_cli.sh KVFERRY RECALL_MODEL; both paths are absolute.

set -u
model=$2
# shellcheck source=tests/cli/checks.sh
. "$(dirname "$0")/checks.sh"
no_leftover() { check "no partial file is left" sh -c '! ls | grep -E "\.[A-Za-z0-9]{6}$"'; }

text="document the code of alice brown is seven tiger . quiet river guards heavy lantern"
run="run --model $model -n 4"

# help, version, usage
try 0 --help; prints 'usage: kvferry COMMAND'
try 0 --version; prints '^kvferry [0-9]*\.[0-9]*\.[0-9]*$'
try 0 run --help; prints 'static-ratio'; prints '--disk DIR'
# The tables of the documentation name options that exist, with the defaults that hold
cat >tables.py <<'PY'
import re, sys
held, rows = {}, 0
for block in re.split(r"\n(?=  (?:-., )?--)", open(sys.argv[1]).read()):
    name = re.search(r"--([a-z-]+)", block)
    value = re.search(r"\(default: (.*?)\)", " ".join(block.split()))
    held[name[1]] = value[1] if value else None
others = ("/judge.md",)  # tables of another command
for line in (line for page in sys.argv[2:] if not page.endswith(others) for line in open(page)):
    row = re.match(r"\| (`--[^|]*) \| ([^|]*) \|", line)
    if not row:
        continue
    names, values = re.findall(r"`--([a-z-]+)", row[1]), row[2].strip().split(", ")
    assert all(name in held for name in names), line
    if len(names) == len(values) and all(re.match(r"`|[0-9]", v) for v in values):
        assert [held[n] for n in names] == [v.strip("`") for v in values], line
        rows += 1
assert rows >= 9, rows
PY
check 'the tables tell the defaults of run --help' \
    python3 tables.py out "$model/../../../README.md" "$model"/../../../docs/*.md
check 'every default of the cache is told' test "$(grep -c 'default: ' out)" -ge 40
try 2; says 'usage:'; silent
try 0 plan --help; prints 'usage: kvferry plan --vllm MODEL'
try 2 plan --gpu 80GiB; says 'usage: kvferry plan --vllm MODEL'; silent
# The Python that it finds is told all its words.
mkdir path
printf '#!/bin/sh\nshift 2\nprintf "%%s|" "$@"\n' >path/python3
chmod +x path/python3
usual=$PATH
PATH=$PWD/path:$usual
try 0 plan --vllm 'a model' --gpu 80GiB budget=512
PATH=$usual
prints '^a model|--gpu|80GiB|budget=512|'
PATH=$PWD/path:$usual
try 0 plan --llama 'a model' -c 8192
PATH=$usual
prints '^a model|-c|8192|'
# A Python without the package: -S leaves out all that was installed.
printf '#!/bin/sh\nexec "%s" -S "$@"\n' "$(python3 -c 'import sys; print(sys.executable)')" >path/python3
PATH=$PWD/path:$usual
try 1 plan --vllm x
PATH=$usual
says "cannot import kvferry.vllm: .*No module named 'kvferry'"
silent
PATH=$PWD/path:$usual
try 1 plan --llama x
PATH=$usual
says "cannot import kvferry._llama: .*No module named 'kvferry'"
silent
# shellcheck disable=SC2123 # where no program is
PATH=$PWD/none
try 1 plan --vllm x
PATH=$usual
says 'cannot run python3: No such file'
try 0 info --help; prints 'default: auto'

# info
try 0 info; prints 'matrix products'; prints '^disk tier'; prints '^  engine  *[ip]'
try 0 info --json; prints '"runner"'; prints '"llama_plugin"'

# operating errors: named, nothing on standard output
printf 'quiet \377\376 river' >bad.txt
"$kvferry" $run <bad.txt >out 2>err
says 'standard input: the text is not UTF-8'
(echo quiet && cat bad.txt) >worse.txt
try 0 $run --prompt "$text" --verify dense:1 --stats layers.json
check 'statistics of each layer' python3 -c 'import json; d = json.load(open("layers.json")); l = d["layers"]
assert len(l) == 4 and "static_ratio_mean" not in d and all(sum(x[k] for x in l) == d[k] for k in ("hits", "misses", "tokens_attended"))
assert abs(sum(x["attention_recall"] for x in l) / 4 - d["attention_recall"]) < 1e-6'
try 0 $run --prompt "$(yes "$text" | head -n 40)" --select hybrid --static-ratio auto --budget 128 --local 32 --stats layers.json
check 'the share of each layer, and one for the model' python3 -c 'import json; d = json.load(open("layers.json")); l = d["layers"]
k = d["static_ratio_mean"]; m = sum(x["static_ratio"] for x in l) / 4; assert 0 < m and k <= m + 1e-9 < k + 4 / 61 and all(abs(61 * x["static_ratio"] - x["static_tokens_max"]) < 1e-6 for x in l)'
try 0 run --model "$model" -n 1 --prompt "$text" --select quest --dry-run; says 'digests .* minmax'
try 0 $run --prompt "$text" --context 40000; says 'context 40000 is past the 32768 positions .*max_position'
mkdir begins && ln -s "$model"/tokenizer.json "$model"/config.json "$model"/*.safetensors begins/
echo '{"add_bos_token": true, "bos_token": "<bos>"}' >begins/tokenizer_config.json
try 0 run --model begins --device host -n 1 --prompt "$text"; says 'add_bos_token .* is true: texts get a "<bos>"'
check 'one BOS is not told' test "$(grep -c 'there are two' err)" -eq 0
try 0 run --model begins --device host -n 1 --prompt "<bos> $text"; says 'begins with <bos>, which the tokenizer adds too'
printf '{"prompt": "<bos> %s"}\n{"prompt": "<bos> a"}\n' "$text" >begins.jsonl
try 0 run --model begins --device host -n 1 --prompts begins.jsonl
says 'line 1 begins with <bos>, which'
check 'one line is told' test "$(grep -c 'begins with <bos>' err)" -eq 1
mkdir far && ln -s "$model"/tokenizer* "$model"/*.safetensors far/
sed 's/"max_position_embeddings": *[0-9]*/"max_position_embeddings": 16/
    s/"rope_scaling": null/"rope_scaling": {"type": "yarn", "factor": 2.5, "finetuned": true}/' "$model/config.json" >far/config.json
try 1 run --model far --device host -n 40 --prompt "$text"; says 'made for 40 (factor of the RoPE scaling.* give --context'; silent
try 0 run --model far --device host -n 40 --prompt "$text" --context 60; says 'context 60 is past the 40 positions'
sed 's/"max_position_embeddings": *[0-9]*/"max_position_embeddings": 100000000/' "$model/config.json" >far/config.json
try 1 run --model far --device host --prompt "$text" --context 60000000; says 'shorten the prompt'; silent
: >empty.txt

# a run: text, ids and logits belong together; threads and transfer do not change them
try 0 $run --prompt "$text" --emit-ids a.ids --dump-logits a.f32 --stats a.json --ignore-eos
cp out a.out
check 'four ids' test "$(wc -l <a.ids)" -eq 4
check 'logits are [4, 1024] float32' test "$(wc -c <a.f32)" -eq 16384
for key in prompt_tokens generated_tokens ttft_ms tpot_ms p50 p95 host_kv_bytes device_kv_bytes \
    hits misses bytes_moved pages_selected settings; do
    check "statistics have $key" grep -q "\"$key\"" a.json
done
check 'no recall that was not measured' sh -c '! grep -q attention_recall a.json'
no_leftover
(
    ulimit -f 8
    "$kvferry" $run --prompt "$text" --ignore-eos --dump-logits large.f32 >out 2>err
    echo $? >status
)
check 'a file beyond its limit is an error' test "$(cat status)" -eq 1
says 'large.f32: cannot be written: File too large'
no_leftover
# a closed standard output is not the file that is opened next, and what cannot be written is told
"$kvferry" $run --prompt "$text" --ignore-eos --emit-ids closed.ids >&- 2>err
check 'a closed standard output is an error' test $? -eq 1
says 'standard output'
check 'no text is in the ids' sh -c '! grep -s "[a-z]" closed.ids'
for words in --version --help 'run --help' info; do
    "$kvferry" $words >/dev/full 2>err
    check "kvferry $words to a full disk fails" test $? -eq 1
    says 'standard output: No space left'
done
# a file that standard output or error goes to is not replaced
"$kvferry" $run --prompt "$text" --ignore-eos --emit-ids /dev/stdout >both 2>err
check 'ids follow the text' sh -c 'cat a.out a.ids | cmp - both'
try 0 $run --prompt "$text" --ignore-eos --stats /dev/stderr
says 'every step is dense'; says '"generated_tokens": 4,'
# so is a pipe that nobody reads: files are complete all the same
closed_pipe() { python3 -S -c 'import os, subprocess, sys
read, write = os.pipe()
os.close(read)
sys.exit(subprocess.run(sys.argv[1:], stdout=write).returncode)' "$kvferry" "$@" 2>err; }
closed_pipe $run --prompt "$text" --ignore-eos --emit-ids piped.ids --stats piped.json
check 'a pipe that nobody reads is an error' test $? -eq 1
says 'standard output cannot be written: Broken pipe'
check 'the token that was not printed is in the ids' sh -c 'head -n 1 a.ids | cmp - piped.ids'
check 'statistics are there' grep -q '"generated_tokens": 1,' piped.json
for words in --version info; do
    closed_pipe $words
    check "kvferry $words into a pipe that nobody reads fails" test $? -eq 1
    says 'standard output: Broken pipe'
done
try 0 $run --prompt "$text" --emit-ids b.ids --dump-logits b.f32 --ignore-eos --threads 1 \
    --transfer gather --verify dense --stats json
says '"attention_recall"'
check 'the same text' cmp a.out out
check 'the same ids' cmp a.ids b.ids
check 'the same logits' cmp a.f32 b.f32
printf '%s' "$text" | "$kvferry" $run --ignore-eos >out 2>err
check 'standard input gives the same text' cmp a.out out
try 0 run --model "$model" -n 0 --prompt "$text"; silent
try 0 $run --prompt document; says 'prefill   1 tokens'
try 0 $run --prompt "$text" --dry-run; says 'memory plan'; silent
try 0 $run --prompt "$text" --temperature 1 --seed 3 --ignore-eos; cp out c.out
try 0 $run --prompt "$text" --temperature 1 --seed 3 --ignore-eos
check 'a seed repeats' cmp c.out out

# questions on forks: each as if it were alone
printf 'question the code of alice brown is\r\n\nquestion the code of alice\n' >two.txt
printf 'question the code of alice\n' >one.txt
try 0 $run --prompt "$text" --ask two.txt --stats q.json --ignore-eos; cp out two.out
check 'two answers' test "$(wc -l <two.out)" -eq 2
check 'figures per question' grep -q '"questions": \[{' q.json
try 0 $run --prompt "$text" --ask one.txt --ignore-eos
check 'an answer does not depend on other questions' sh -c 'tail -n 1 two.out | cmp - out'

# score: a text after a prompt; one JSON object on standard output
score="score --model $model"
echo 'question the code of alice brown is seven tiger .' >text.txt
try 0 score --help; prints 'usage: kvferry score'; prints '\-\-static-ratio'
check 'score draws nothing' sh -c '! grep -q -e "--temperature" out'
try 0 $score --prompt "$text" --text text.txt --stats score.json
prints '^{"loss": [0-9.]*, "scored_tokens": 10,'; says '^score '
check 'a loss of every token' test "$(grep -o '"id":' score.json | wc -l)" -eq 10
cp out score.out
try 0 $score --prompt "$text" --text text.txt --threads 1
check 'threads do not change the loss' cmp score.out out
try 0 $score --prompt "$text" --text text.txt --dry-run; says 'memory plan'; silent
if [ -w /dev/full ]; then
    "$kvferry" $score --prompt "$text" --text text.txt >/dev/full 2>err
    check 'a result that cannot be written ends with 1' test $? -eq 1
fi

# what cannot be written: named, no partial file, tokens stay
if [ -w /dev/full ]; then
    try 1 $run --prompt "$text" --stats /dev/full --ignore-eos; says '/dev/full'
    check 'tokens were printed all the same' cmp a.out out
    "$kvferry" $run --prompt "$text" >/dev/full 2>err
    check 'standard output full ends with 1' test $? -eq 1
    says 'standard output cannot be written'
fi
echo old >keep.ids
(ulimit -f 8; trap '' XFSZ; "$kvferry" $run --prompt "$text" --dump-logits big.f32 --ignore-eos \
    --emit-ids keep.ids >out 2>err)
check 'a full disk ends with 1' test $? -eq 1
says 'big.f32'
check 'no file that is cut short' test ! -e big.f32
no_leftover

# Ctrl-C between tokens: summary, 130, complete files
: >out
"$kvferry" run --model "$model" -n 20000 --prompt "$text" --ignore-eos --emit-ids int.ids \
    --stats int.json >out 2>err &
process=$!
tries=0
while [ ! -s out ] && [ $tries -lt 1200 ]; do
    sleep 0.05
    tries=$((tries + 1))
done
kill -INT $process
wait $process
check 'Ctrl-C ends with 130' test $? -eq 130
says '^decode '
check 'the statistics say so' grep -q '"stop": "interrupted"' int.json
check 'every token printed is in the ids' \
    test "$(wc -w <out)" -eq "$(wc -l <int.ids)"

# Ctrl-C before the first token: one line, 130, statistics, and no file of ids. The pipe opens when the
# command reads its prompt.
mkfifo late
"$kvferry" $run --device host --prompt-file late --emit-ids late.ids --stats late.json >out 2>err &
process=$!
exec 3>late
kill -INT $process
echo "$text" >&3
exec 3>&-
wait $process
check 'Ctrl-C while the model is loaded ends with 130' test $? -eq 130
says 'nothing was generated'; silent
check 'one line says so' test "$(grep -c . err)" -eq 1
check 'its statistics say so' grep -q '"generated_tokens": 0, .*"stop": "interrupted"' late.json
check 'no ids' test ! -e late.ids
no_leftover

# a prompt that was prefilled once, where the build has checksums
"$kvferry" info >out 2>err
if grep -A1 'xxHash' out | grep -q yes; then
    mkdir saved
    # pages on disk, as few in memory as a call needs
    long="$text $text $text $text $text $text $text $text $text $text $text $text $text $text $text $text"
    disk="$run --budget 96 --local 16 --ignore-eos --disk . --disk-bundle-bytes 4K"
    try 0 $run --budget 96 --local 16 --ignore-eos --prompt "$long" --emit-ids memory.ids
    check 'what is selected from is not called dense' sh -c '! grep -q "every step is dense" err'
    try 1 $disk --prompt "$long" --host-memory 1K; says '--host-memory: .*give at least [0-9]'
    least=$(sed -n 's/.*give at least \([0-9]*\).*/\1/p' err)
    try 0 $disk --prompt "$long" --host-memory "$least" --emit-ids disk.ids --stats disk.json
    says '^disk .* was in memory'
    check 'the folder is told' grep -q '"disk_path": "\."' disk.json
    check 'where there is none, too' grep -q '"disk_path": null' a.json
    check 'pages came from disk' grep -q '"disk_reads": [1-9]' disk.json
    check 'the answer is that of pages in memory' cmp memory.ids disk.ids
    check 'no file of the tier is left' sh -c '! ls -A | grep -q kvferry-'
    try 1 $disk --prompt "$long" --disk missing --host-memory "$least"; says 'missing'
    asked="$text the code of alice brown"
    try 0 $run --prompt "$asked is" --emit-ids whole.ids
    says 'every step is dense: .* --budget [0-9]*, the default'
    try 0 $run --prompt "$asked" --save saved/document.kvs
    try 0 $run --prompt "$asked is" --load saved/document.kvs --emit-ids loaded.ids --stats loaded.json
    check 'what is loaded is not prefilled' grep -q '"prefilled_tokens": 2,' loaded.json
    check 'and the answer is the same' cmp whole.ids loaded.ids
    try 1 $run --prompt "$text and more than that and more than that" --load saved/document.kvs
    says 'is of another prompt: token'
    try 1 $run --prompt "$text" --load saved/document.kvs; says 'must begin with them'
    try 1 $run --prompt "$asked is" --load saved/none; says 'No such file'
    # the same weights make other keys under another RoPE
    mkdir turned; ln -s "$model"/* turned/; rm turned/config.json
    sed 's/"rope_theta": *[0-9.]*/"rope_theta": 500.0/' "$model/config.json" >turned/config.json
    try 1 run --model turned --device host --prompt "$asked is" --load saved/document.kvs
    says 'was saved with another config.json'; silent
    try 0 run --model turned --device host --prompt "$asked" --save turned/document.kvs
    try 0 run --model turned --device host --prompt "$asked is" --load turned/document.kvs
    try 1 $run --prompt "$asked is" --load saved/document.kvs --local 33; says 'local_tokens = 64'
    try 1 $run --prompt "$asked" --save saved/none/document.kvs; says 'saved/none/.*: No such file or directory'
    # nothing else than a file is replaced, and that is said before the prompt is read
    mkfifo saved/pipe
    try 1 $run --prompt "$asked" --save saved/pipe; says 'saved/pipe is no regular file'; silent
    try 1 $run --prompt "$asked" --save saved; says 'saved is a folder'; silent
    check 'the pipe is there' test -p saved/pipe
    try 1 $run --prompt "$asked is" --load saved/pipe; says 'saved/pipe: it is no regular file'
    try 1 $run --model saved/pipe; says 'saved/pipe'
    rm saved/pipe
    # a file that others may read stays one, behind its symbolic link, and so does a file of results
    mkdir shared; touch shared/document.kvs shared/stats.json
    chmod 664 shared/document.kvs; chmod 640 shared/stats.json
    ln -s ../shared/document.kvs saved/link.kvs; ln -s shared/stats.json link.json
    try 0 $run --prompt "$asked" --save saved/link.kvs --stats link.json
    check 'a link to a saved sequence stays' test -L saved/link.kvs -a -s shared/document.kvs
    check 'and its mode' test "$(stat -c %a shared/document.kvs)" = 664
    check 'a link to statistics stays' test -L link.json -a -s shared/stats.json
    check 'and their mode' test "$(stat -c %a shared/stats.json)" = 640
    rm -r saved/link.kvs link.json shared
    try 2 $run --prompt a --load x --prune snapkv; says 'leave --prune out'
    try 1 $run --prompt document --save saved/one.kvs; says 'the prompt has 1 token'; silent
    check 'no file' test ! -e saved/one.kvs
    # without a prompt, what was saved is one
    try 0 $run --prompt "$asked" --emit-ids whole.ids
    try 0 $run --load saved/document.kvs --emit-ids loaded.ids --stats loaded.json </dev/null
    check 'its last token alone is prefilled' grep -q '"prefilled_tokens": 1,' loaded.json
    check 'what was saved goes on' cmp whole.ids loaded.ids
    printf ' is\nquiet river\n' >questions
    try 0 $run --prompt "$asked" --ask questions --emit-ids whole.ids
    try 0 $run --load saved/document.kvs --ask questions --emit-ids loaded.ids </dev/null
    check 'questions to a saved document are answered as ever' cmp whole.ids loaded.ids
    try 0 $run --prompt "$asked" --prune snapkv --keep 0.5 --prune-window 4 --save saved/pruned.kvs
    try 1 $run --load saved/pruned.kvs </dev/null; says 'was pruned, and no token is left'
    try 0 $run --prompt "$asked" --prune snapkv --keep 0.5 --prune-window 4 --ask questions --emit-ids whole.ids
    try 0 $run --load saved/pruned.kvs --ask questions --emit-ids loaded.ids </dev/null
    check 'also to a pruned one' cmp whole.ids loaded.ids
    try 2 $run --load x --prompts y --chat; says 'leave --chat out'
    try 2 $run --prompt a --save x --samples 2; says 'leave --prompts and --samples out'
    rm saved/pruned.kvs
    head -c 5000 saved/document.kvs >saved/cut.kvs
    echo nothing >saved/notes
    touch saved/killed.kvs.tmp-abc123
    # a save writes its header last
    head -c 9000 /dev/zero >saved/zeros.kvs.tmp-abc123
    cp saved/cut.kvs saved/begun.kvs.tmp-abc123
    # names alone say nothing
    cp saved/document.kvs saved/whole.tmp-abc123
    echo another >saved/report.tmp-abc123
    head -c 100 /dev/zero >saved/short.tmp-abc123
    try 0 cache ls saved; prints '^document.kvs .*saved'; prints '^cut.kvs .*damaged'; prints 'unfinished'
    check 'other files are not listed' sh -c '! grep -q notes out'
    try 1 cache verify saved; prints 'document.kvs ok'; says 'cut.kvs'
    try 0 cache ls saved; prints '^whole.tmp-abc123 *saved'; prints '^begun.kvs.tmp-abc123 *unfinished'
    check 'what is no saved sequence is not listed' sh -c '! grep -q -e report -e short out'
    try 2 cache ls; says 'a folder is needed'
    try 2 cache ls saved saved; says 'one folder at a time'
    try 2 cache; says 'usage: kvferry cache ls DIR'
    try 0 cache --help
    try 1 cache ls missing; says 'No such file'
else
    try 1 $run --prompt "$text" --save document.kvs; says 'libxxhash-dev'
fi

refusals cli "run=$run" "score=$score" "model=$model" "text=$text"
told
