#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Files that the kvferry command is given, and places where it shall write, as they are found in the
# world: names of any length and of any bytes, links that lead nowhere, marks of a byte order, folders
# that are full. check_files.sh KVFERRY RECALL_MODEL; both paths are absolute.

set -u
model=$2
# shellcheck source=tests/cli/checks.sh
. "$(dirname "$0")/checks.sh"

text="document the code of alice brown is seven tiger . quiet river guards heavy lantern"
run="run --model $model --device host --threads 1 -n 2 --ignore-eos"
before_the_prompt() { check "nothing was read before that" sh -c '! grep -q "^prefill" err'; }

# what follows from the model is no option, of no command that runs one
for command in run score; do
    try 0 $command --help
    for option in layers query-heads kv-heads head-dim value-dim dtype softmax-scale sequences-max tokens-max \
        host-tokens-max prefill-chunk-max tokens-per-step-max observe-window; do
        check "$command has no --$option" sh -c "! grep -q -e '--$option ' out"
    done
done
try 0 bench decode --help
for option in layers kv-heads head-dim value-dim; do prints "--$option N"; done

# where the build has checksums
"$kvferry" info >out 2>err
has_files() { grep -A1 xxHash told_of | grep -q yes; }
cp out told_of
if has_files; then
    # --save: names up to the longest that the file system takes, and no others
    zeros=$(printf '%0255d' 0)
    for size in 244 245 250 255; do
        long=$(echo "$zeros" | cut -c1-$size)
        try 0 $run --prompt "$text" --save "$long"
        check "a name of $size bytes" test -s "$long"
        try 0 $run --prompt "$text" --save "$long" --stats "stats$(echo "$long" | cut -c1-$((size - 5)))"
        rm -f "$long" stats*
    done
    try 1 $run --prompt "$text" --save "${zeros}0"; says "File name too long"; before_the_prompt
    # links that lead nowhere: to a new file, to a folder that is not there, in a circle
    ln -s new.kvs dangling
    try 0 $run --prompt "$text" --save dangling
    check 'a link to a new file stays one' test -L dangling -a -s new.kvs
    ln -s none/new.kvs astray
    try 1 $run --prompt "$text" --save astray; says 'astray: .*No such file or directory'; before_the_prompt
    ln -s circle2 circle1; ln -s circle1 circle2
    try 1 $run --prompt "$text" --save circle1; says 'Too many levels of symbolic links'; before_the_prompt
    try 1 $run --prompt "$text" --save none/new.kvs; says 'No such file or directory'; before_the_prompt
    mkdir folder
    try 1 $run --prompt "$text" --save folder; says 'is a folder'; before_the_prompt
    # no room: told by name before the prompt is read
    (
        ulimit -f 8
        "$kvferry" $run --prompt "$text" --save large.kvs >out 2>err
        echo $? >status
    )
    check 'a file beyond its limit is refused' test "$(cat status)" -eq 1
    says 'no room for .*File too large; RLIMIT_FSIZE is the limit: raise `ulimit -f`'
    before_the_prompt
    check 'and nothing is left of it' sh -c '! ls | grep -q large'
    # what the kernel would refuse once all is done: another file in the place of a mount
    if unshare -m true 2>/dev/null; then
        : >mounted; : >source
        unshare -m sh -c 'mount --bind source mounted && exec "$@"' - "$kvferry" $run --prompt "$text" --save mounted >out 2>err
        check 'a file that is a mount is refused' test $? -eq 1
        says 'cannot be replaced: Device or resource busy'
        before_the_prompt
    fi
fi

# statistics are UTF-8, whatever a path is
odd=$(printf 'odd \377\376 \303\244 \355\240\200 "name"')
mkdir "$odd"
disk='--host-memory 1M --disk'
has_files || disk=--calibration
"$kvferry" $run --prompt "$text" --stats stats.json $disk "$odd" >out 2>err
check 'a folder of any bytes' test $? -eq 0
check 'statistics are JSON' python3 -c 'import json; json.load(open("stats.json", encoding="utf-8"))'
check 'valid letters are kept' grep -q 'ä' stats.json
"$kvferry" info --json --calibration "$odd/links" >out 2>err
check 'so is a description' python3 -c 'import json; json.load(open("out", encoding="utf-8"))'

# a mark of the byte order at the start of a file is no part of it
mark=$(printf '\357\273\277')
printf '%s' "$text" >plain.txt
printf '%s%s' "$mark" "$text" >marked.txt
try 0 $run --prompt-file plain.txt --emit-ids plain.ids
try 0 $run --prompt-file marked.txt --emit-ids marked.ids
check 'of a prompt' cmp plain.ids marked.ids
"$kvferry" $run --emit-ids marked.ids <marked.txt >out 2>err
check 'of standard input' cmp plain.ids marked.ids
printf '%s{"prompt": "%s"}\n{"prompt": "%s"}\n' "$mark" "$text" "$text" >marked.jsonl
try 0 $run --prompts marked.jsonl
check 'of lines of prompts' test "$(grep -c '"id": [12]' out)" -eq 2
cp out answers.jsonl
{ printf '%s' "$mark"; cat answers.jsonl; } >marked_answers.jsonl
printf '%s{"prompt": " is"}\n' "$mark" >ask.jsonl
printf ' is\n' >ask.txt; printf '%s is\n' "$mark" >marked_ask.txt
try 0 $run --prompt "$text" --ask ask.txt --emit-ids plain.ids
for file in ask.jsonl marked_ask.txt; do
    try 0 $run --prompt "$text" --ask $file --emit-ids marked.ids
    check "of questions in $file" cmp plain.ids marked.ids
done
printf '%s[{"role": "user", "content": "hi"}]' "$mark" >messages.json
try 1 $run --messages messages.json --chat-format chatml; says 'format chatml writes' # it was read
printf '%s3 4 5 6' "$mark" >marked_ids.txt
try 0 $run --token-ids marked_ids.txt
try 0 score --model "$model" --device host --prompts marked.jsonl --answers marked_answers.jsonl

# a model: folders above it, and links to weights that lead nowhere
mkdir -p hub/models--maker--name/refs hub/models--maker--name/snapshots/abc123 hub/models--maker--name/blobs
printf abc123 >hub/models--maker--name/refs/main
cp "$model/config.json" "$model"/tokenizer*.json hub/models--maker--name/snapshots/abc123/
try 1 $run --prompt a --model hub/models--maker--name; says 'give hub/models--maker--name/snapshots/abc123'; silent
try 1 $run --prompt a --model hub; says 'give the folder of one, such as hub/models--maker--name/snapshots/'
try 1 $run --prompt a --model .; says 'such as ./hub/models--maker--name/snapshots/'
snapshot=hub/models--maker--name/snapshots/abc123
try 1 $run --prompt a --model $snapshot; says 'holds neither model.safetensors nor'
ln -s ../../blobs/0123 $snapshot/model.safetensors
try 1 $run --prompt a --model $snapshot
says 'model.safetensors is a link to ../../blobs/0123, and nothing is there'
rm $snapshot/model.safetensors $snapshot/config.json
ln -s ../../blobs/4567 $snapshot/config.json
try 1 $run --prompt a --model $snapshot; says 'config.json is a link to ../../blobs/4567, and nothing is there'
ln -s none.gguf link.gguf
try 1 $run --prompt a --model link.gguf; says 'link.gguf is a link to none.gguf, and nothing is there'
rm -r hub/models--maker--name/snapshots/*
try 1 $run --prompt a --model hub/models--maker--name; says 'its snapshots/ is empty; download the model'

# a thread that cannot be started is told with its limit
cat >limited.py <<'PY'
import os, resource, sys
resource.setrlimit(resource.RLIMIT_STACK, (1 << 36, resource.RLIM_INFINITY))
resource.setrlimit(resource.RLIMIT_AS, (1 << 35, 1 << 35))
os.execv(sys.argv[1], sys.argv[1:])
PY
if python3 limited.py "$kvferry" --version >/dev/null 2>&1; then # a sanitizer takes more by itself
    python3 limited.py "$kvferry" $run --prompt "$text" >out 2>err
    check 'no thread, no run' test $? -eq 1
    says "thread 'kvf-stream-[0-9]*' could not be started"
    says 'ulimit -v'
fi
told
