# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=sh
#
# For tests that look at the kvferry command from outside, in a folder that is gone afterwards. Their
# first argument is the command's absolute path; they read this file and end with `told`.

kvferry=$1
here=$(cd "$(dirname "$0")" && pwd) || exit 1
dir=$(mktemp -d) || exit 1
trap 'rm -rf "$dir"' EXIT
cd "$dir" || exit 1
failed=0
checks=0

# The interpreter itself: what python3 in PATH is on some machines, a script that looks for it, takes ten
# times as long to start.
python=$(python3 -c 'import sys; print(sys.executable)') || exit 1
python3() { "$python" "$@"; }

# check NAME CONDITION...: the condition is a command.
check() {
    name=$1
    shift
    checks=$((checks + 1))
    if ! "$@" >/dev/null 2>&1; then
        failed=$((failed + 1))
        echo "not ok: $name"
        sed 's/^/    out: /' out | head -n 5
        sed 's/^/    err: /' err | head -n 5
    fi
}

# try STATUS ARGUMENT...: run the command into out and err and check its exit status.
try() {
    want=$1
    shift
    "$kvferry" "$@" >out 2>err </dev/null
    status=$?
    check "kvferry $* ends with $want, not $status" test "$status" -eq "$want"
}

says() { check "standard error says '$1'" grep -q -e "$1" err; }
prints() { check "standard output says '$1'" grep -q -e "$1" out; }
silent() { check "nothing on standard output" test ! -s out; }

# refusals TABLE NAME=WORDS...: the rows of TABLE.refusals; see refusals.py.
refusals() {
    table=$here/$1.refusals
    shift
    checks=$((checks + 1))
    python3 "$here/refusals.py" "$kvferry" "$table" "$@" || failed=$((failed + 1))
}

# told: the last line. @return whether all checks passed
told() {
    echo "$checks checks, $failed failed"
    [ $failed -eq 0 ]
}
