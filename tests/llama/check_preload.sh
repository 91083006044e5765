#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# The plug-in under LD_PRELOAD in processes without ggml: they run as ever, and only those that a
# llama.cpp started take it out of their environment.
#
# usage: check_preload.sh LIBRARY
set -eu
library=$1

# seen NAME=VALUE...: LD_PRELOAD as a program sees it that a shell starts.
seen() {
    env "$@" LD_PRELOAD="$library" sh -c 'printf "%s" "${LD_PRELOAD:-none}"' 2>&1
}

[ "$(seen A=1)" = "$library" ] || { echo "a script before llama.cpp lost LD_PRELOAD: $(seen A=1)"; exit 1; }
[ "$(seen KVFERRY_LLAMA_INSIDE=)" = none ] || { echo "a tool of llama.cpp kept LD_PRELOAD"; exit 1; }
others=$(env KVFERRY_LLAMA_INSIDE=libm.so.6 LD_PRELOAD="libm.so.6:$library" sh -c 'printf "%s" "$LD_PRELOAD"')
[ "$others" = libm.so.6 ] || { echo "other libraries of LD_PRELOAD: $others"; exit 1; }
