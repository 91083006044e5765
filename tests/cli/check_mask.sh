#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# The learnt head mask of the recall model is worth something: with it a document's facts are found,
# with its opposite they are not. check_mask.sh KVFERRY EXAMPLES [DEVICE]; both paths are absolute.

set -u
kvferry=$1
examples=$2
device=${3:-auto}
dir=$(mktemp -d) || exit 1
trap 'rm -rf "$dir"' EXIT
cd "$dir" || exit 1
seed=3
asked=10

python3 "$examples/recall/generate.py" document --tokens 2048 --questions $asked --seed $seed \
    --out . || exit 1
sed -n 's/.*"question": "\(.*\)".*/\1/p' questions.json >questions.txt
sed -n 's/.*"answer": "\(.*\)".*/\1/p' questions.json >answers.txt
cp "$examples/train_mask/recall_mask.tsv" learnt.tsv
tr 01 10 <learnt.tsv >opposite.tsv

# right MASK: questions that are answered with it.
right() {
    "$kvferry" run --device "$device" --model "$examples/recall/model" --prompt-file document.txt --ask questions.txt \
        -n 2 --ignore-eos --select full --head-mask "$1" --streaming-sink 4 --streaming-recent 64 \
        >given.txt 2>err || { cat err >&2; exit 1; }
    sed 's/^ *//; s/ *$//' given.txt | paste -d '|' - answers.txt |
        awk -F '|' '$1 == $2 { n++ } END { print n + 0 }'
}

learnt=$(right learnt.tsv) || exit 1
opposite=$(right opposite.tsv) || exit 1
echo "seed $seed: $learnt of $asked right with the learnt mask, $opposite with its opposite"
[ "$(wc -l <answers.txt)" -eq $asked ] && [ "$learnt" -ge 9 ] && [ "$opposite" -le 1 ]
