#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Install into an empty DESTDIR, then be a stranger: build the program of docs/c.md and the examples from
# the installed copy with nothing but pkg-config, against the shared library and the static one, and run them.
#
# usage: check_install.sh SOURCE_FOLDER BUILD_FOLDER WHY_THERE_IS_NO_CUDA_DEVICE

set -euo pipefail
source=$1
build=$2
cc=${CC:-cc}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

meson install -C "$build" --no-rebuild --destdir "$work/shared" >"$work/install.txt"
cp -a "$work/shared" "$work/static"
find "$work/static" -name 'libkvferry.so*' -delete

# The first block of C in docs/c.md.
awk '/^```c$/ { on = 1; next } on && /^```$/ { exit } on' "$source/docs/c.md" >"$work/page.c"
cp "$source"/examples/*.c "$work"
programs=(page decode_loop own_attention own_blocks custom_policy)

for kind in shared static; do
    root=$work/$kind
    library=$(find "$root" -name 'libkvferry.a' -printf '%h\n' | head -n 1)
    [ -n "$library" ] || { echo "no libkvferry.a was installed"; exit 1; }
    export PKG_CONFIG_SYSROOT_DIR=$root PKG_CONFIG_PATH=$library/pkgconfig
    options=()
    [ $kind = shared ] || options=(--static)
    read -ra flags <<<"$(pkg-config "${options[@]}" --cflags --libs kvferry)"
    for example in "${programs[@]}"; do
        "$cc" -std=c11 -O1 -o "$work/$example" "$work/$example.c" "${flags[@]}" -lm
        LD_LIBRARY_PATH=$library "$work/$example" >"$work/output.txt" ||
            { cat "$work/output.txt"; echo "$example failed, $kind"; exit 1; }
        linked=$(readelf -d "$work/$example" | grep -c 'NEEDED.*libkvferry' || true)
        [ "$kind/$linked" = shared/1 ] || [ "$kind/$linked" = static/0 ] ||
            { echo "$example: wrong kind of library was linked, $kind"; exit 1; }
    done
    echo "$kind: ${programs[*]}"
done

# A build without the CUDA device says so, and pip shows it among the last lines.
absence=$3
[ -z "$absence" ] || ninja -C "$build" cuda-absence | grep -F "kvferry: $absence" ||
    { echo "a build does not say that it has no CUDA device"; exit 1; }

# Only what the header declares is visible.
shared=$(find "$work/shared" -name 'libkvferry.so' | head -n 1)
nm -D --defined-only "$shared" | awk '$2 != "A" { sub(/@.*/, "", $3); print $3 }' | sort >"$work/exported"
grep -ohE '\bkvf_[a-z_]+\(' "$source"/include/kvferry/*.h | tr -d '(' | sort -u >"$work/declared"
if comm -23 "$work/exported" "$work/declared" | grep -q .; then
    echo "exported, but not in the header:"
    comm -23 "$work/exported" "$work/declared"
    exit 1
fi
echo "exports: $(wc -l <"$work/exported") functions, all in the header"

# Every function has a manual page, where the tools that make them are: NAME has that of NAME_sized.
pages=$(find "$work/shared" -type d -name man3)
if [ -n "$pages" ]; then
    missing=$(comm -23 <(grep -v '_sized$' "$work/declared") <(basename -s .3 "$pages"/*.3 | sort))
    [ -z "$missing" ] || { echo "no man page: $missing"; exit 1; }
    for page in kvf_decode kvf_decode_args; do # what it does, and what the fields are
        grep -q 'query_heads, head_dim\|score, select, fetch, attend' "$pages/$page.3" ||
            { echo "$page.3 says nothing"; exit 1; }
    done
    echo "man pages: $(find "$pages" -name '*.3' | wc -l)"
else
    echo "man pages: none were made"
fi
