#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# `kvferry tune --heads`: the heads of the recall model that find facts come out hot, by questions and
# by text; the file is a head mask that answers stay right with; the same text gives the same file,
# whatever the threads; the learnt mask of the examples; and what is refused. check_heads.sh KVFERRY EXAMPLES;
# both paths are absolute.

set -u
examples=$2
# shellcheck source=tests/cli/checks.sh
. "$(dirname "$0")/checks.sh"

ln -s "$examples/recall/model" model || exit 1
python3 "$examples/recall/generate.py" document --tokens 2048 --questions 6 --seed 7 --out . || exit 1
# Facts of another document are hidden; those of this one are in its text.
python3 "$examples/recall/generate.py" document --tokens 600 --questions 4 --seed 3 --out other || exit 1
python3 - <<'END' || exit 1
import re
with open("other/document.txt", encoding="utf-8") as f, open("lines.tsv", "w", encoding="utf-8") as to:
    for m in re.finditer(r"the code of (\w+ \w+) is (\w+ \w+) \.", f.read()):
        to.write("%s\tquestion the code of %s is\t%s\n" % (m[0], m[1], m[2]))
END
tune="tune --heads --model model --text document.txt --hide lines.tsv --samples 2 --tokens 1408"

# Layer 1 looks for facts; nothing else reaches further than some words.
"$kvferry" $tune --questions 4 --hot-share 0.25 --out hot.tsv >out 2>err </dev/null
check 'tune --heads ends with 0' test $? -eq 0
printf '2\t2\n1\t1\n2\t2\n2\t2\n' >layer_1.tsv
check 'the heads of layer 1 are hot' cmp layer_1.tsv hot.tsv
prints '^the model foresees [34] of 4 answers$'; prints '^hot heads: 2 of 8$'; prints '@ @$'; prints '[.] [.]$'
check 'these two have nearly all sensitivity' awk '/a third/ { found = $3 + 0 > 99 } END { exit !found }' out
check 'no line is wider than 80 columns' sh -c '! grep -E "^.{81}" out'

# With so many coarse heads the answers are those of a cache without a mask.
"$kvferry" run --model model --prompt-file document.txt --ask questions.txt -n 2 --budget 512 >plain.txt 2>err </dev/null
"$kvferry" run --model model --prompt-file document.txt --ask questions.txt -n 2 --budget 512 --head-mask hot.tsv \
    --coarse-share 0 >masked.txt 2>err </dev/null
check 'six answers' test "$(wc -l <masked.txt)" -eq 6
check 'the same answers with the mask' cmp plain.txt masked.txt
tr 12 21 <hot.tsv >cold.tsv
"$kvferry" run --model model --prompt-file document.txt --ask questions.txt -n 2 --budget 512 --head-mask cold.tsv \
    --coarse-share 0 >cold.txt 2>err </dev/null
check 'others with its opposite' sh -c '! cmp plain.txt cold.txt'

# The same again, on other threads; on text too.
"$kvferry" $tune --questions 4 --threads 1 --out - >one.tsv 2>one.err </dev/null
"$kvferry" $tune --questions 4 --threads 3 --out - >three.tsv 2>err </dev/null
check 'threads change nothing' cmp one.tsv three.tsv
check 'a third of eight is three' test "$(tr -cd 1 <one.tsv | wc -c)" -eq 3
text="tune --heads --model model --text document.txt --questions 0 --samples 2 --tokens 1408 --hot-share 0.25"
try 0 $text --out text.tsv; check 'no answers are told of' sh -c '! grep -q foresees out'
check 'by text at least one of layer 1 is hot' sh -c 'sed -n 2p text.tsv | grep -q 1'
"$kvferry" $text --threads 1 --out - >again.tsv 2>err </dev/null
check 'the same text, the same file' cmp text.tsv again.tsv
try 0 $text --hot-share 1 --out - ; check 'all hot' sh -c '! grep -q 2 out'
try 0 $text --hot-share 0.01 --out - ; check 'one at least' test "$(tr -cd 1 <out | wc -c)" -eq 1

# On quantized pages, as the cache that will have them: the same heads, and sensitivity of its own.
"$kvferry" $tune --questions 4 --hot-share 0.25 --pages k8v4 --out quantized.tsv >out 2>err </dev/null
check 'quantized, the heads of layer 1 are hot' cmp layer_1.tsv quantized.tsv
"$kvferry" run --model model --prompt-file document.txt --ask questions.txt -n 2 --budget 512 --pages k8v4 \
    --head-mask quantized.tsv --coarse-share 0 >masked.txt 2>err </dev/null
check 'the same answers on quantized pages' cmp plain.txt masked.txt
"$kvferry" $tune --questions 4 --pages k8v4 --threads 1 --out - >one.tsv 2>err </dev/null
"$kvferry" $tune --questions 4 --pages k8v4 --threads 3 --out - >three.tsv 2>err </dev/null
check 'threads change nothing of quantized ones' cmp one.tsv three.tsv

# The learnt mask of the examples is worth something: with it facts are found, with its opposite they are not.
python3 "$examples/recall/generate.py" document --tokens 2048 --questions 10 --seed 3 --out facts || exit 1
sed -n 's/.*"answer": "\(.*\)".*/\1/p' facts/questions.json >answers.txt
tr 01 10 <"$examples/train_mask/recall_mask.tsv" >opposite.tsv
right() { # right MASK: how many questions are answered with it
    "$kvferry" run --model model --prompt-file facts/document.txt --ask facts/questions.txt -n 2 --ignore-eos \
        --select full --head-mask "$1" --streaming-sink 4 --streaming-recent 64 2>err </dev/null |
        sed 's/^ *//; s/ *$//' | paste -d '|' - answers.txt | awk -F '|' '$1 == $2 { n++ } END { print n + 0 }'
}
check 'ten answers' test "$(wc -l <answers.txt)" -eq 10
check 'with the learnt mask nine are right' test "$(right "$examples/train_mask/recall_mask.tsv")" -ge 9
check 'with its opposite one is, at most' test "$(right opposite.tsv)" -le 1

# mistakes
refusals heads "tune=$tune"
check 'no file' test ! -e none.tsv
told
