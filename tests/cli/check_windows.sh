#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# A model whose layers have windows: the recall model under another name. check_windows.sh KVFERRY MODEL;
# both paths are absolute. Its logits are those of a mask of heads that stream, and what windows rule out
# is refused. tests/model/test_logits.c compares logits with Transformers.

set -u
# shellcheck source-path=SCRIPTDIR source=checks.sh
. "$(dirname "$0")/checks.sh"
model=$2

# window FOLDER FIELDS: the model, with more fields of config.json.
window() {
    mkdir -p "$1"
    cp "$model"/* "$1"
    sed -e 's/LlamaForCausalLM/MistralForCausalLM/' -e "s/\"vocab_size\"/$2, \"vocab_size\"/" \
        "$model/config.json" >"$1/config.json"
}

# logits NAME ARGUMENT...
logits() {
    name=$1
    shift
    try 0 run --token-ids ids -n 12 --ignore-eos --select full --dump-logits "$name" --emit-ids "$name.ids" "$@"
}

awk 'BEGIN { for (i = 0; i < 200; i++) print 3 + i * 37 % 1000 }' >ids
window all '"sliding_window": 48'
window some '"sliding_window": 48, "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]'
printf '0\t0\n0\t0\n0\t0\n0\t0\n' >all.tsv
printf '0\t0\n1\t1\n1\t1\n0\t0\n' >some.tsv

logits full --model "$model"
for kind in all some; do
    logits windows --model $kind
    logits mask --model "$model" --head-mask $kind.tsv --streaming-sink 0 --streaming-recent 48
    check "$kind: the logits of a mask" cmp windows mask
    check "$kind: windows change them" test "$(cksum <windows)" != "$(cksum <full)"
done
window never '"sliding_window": 32768'
logits wide --model never
check 'a window that is never full changes nothing' cmp wide full

# near FILE FILE: logits, as far apart as rounding of an attention's output makes them. A ring sums its
# tokens in another order than pages in slots; where the sum of an element lies between two numbers of 16
# bits, it can be rounded either way: 2^-11 of it, in 4 layers, of logits that stay below 16.
near() {
    python3 -c 'import array, sys
a, b = (array.array("f", open(name, "rb").read()) for name in sys.argv[1:])
sys.exit(len(a) != len(b) or max(abs(x - y) for x, y in zip(a, b)) > 4 * 16 / 2 ** 11)' "$1" "$2"
}

# A window takes the memory of the tokens there are.
device_bytes() {
    try 0 run --token-ids ids -n 12 --ignore-eos --model "$@" --stats stats
    sed -n 's/.*"device_kv_bytes": *\([0-9]*\).*/\1/p' stats
}
window long '"sliding_window": 30000'
logits long.logits --model long
check 'the tokens of a window that is not full yet' cmp long.logits.ids full.ids
check 'a window that is not full yet changes nothing' near long.logits full
check 'a window that is full changes more than that' eval '! near windows full'
long=$(device_bytes long)
window short '"sliding_window": 200'
short=$(device_bytes short)
check "a window of 30000 takes $long bytes, one of 200 $short" test "$long" -lt $((2 * short))

# The file of a sequence has the window, whatever the context was.
try 0 run --model some --token-ids ids --save saved
echo 7 | cat ids - >longer
try 0 run --model some --token-ids longer --load saved -n 4 --ignore-eos

try 0 run --model some --token-ids ids -n 4 --ignore-eos --samples 3 --seed 1
refusals windows
told
