# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
#
# need GROUP...: have the packages of these groups, installing with apt only what is missing.
#
# Knows Debian 12 and Ubuntu 24.04. Elsewhere it names what is missing and leaves the rest to the
# reader. When everything is there it touches neither apt nor the network. Each line of the table is:
# group, what proves that the package is there, the package. Proofs: cmd:NAME a command,
# pc:NAME a pkg-config module, h:PATH a header, rt:NAME a run-time library of Clang,
# py:NAME a module of Python, of the PATH's or the distribution's, file:PATTERN a file.

# shellcheck disable=SC2034 # read by the scripts that source this file
need_changed=0 # 1 once something was missing: what is configured may be out of date

need_table() {
    cat <<'TABLE'
build  cmd:cc                     gcc
build  h:stdio.h                  libc6-dev
build  cmd:meson                  meson
build  cmd:ninja                  ninja-build
build  cmd:pkg-config             pkg-config
build  cmd:python3                python3
build  pc:numa                    libnuma-dev
build  pc:liburing                liburing-dev
build  h:xxhash.h                 libxxhash-dev
build  h:dnnl.h                   libdnnl-dev
build  pc:libpcre2-8              libpcre2-dev
build  pc:libutf8proc             libutf8proc-dev
build  pc:jansson                 libjansson-dev
test   pc:cmocka                  libcmocka-dev
test   py:numpy                   python3-numpy
test   file:/usr/share/i18n/locales/ps_AF  locales
real   py:pip                     python3-pip
real   file:/usr/share/perl/5*/CPAN.pm  perl
eval   cmd:gnuplot                gnuplot-nox
llama  cmd:cmake                  cmake
llama  cmd:g++                    g++
llama  cmd:cc                     gcc
llama  py:pip                     python3-pip
lint   cmd:clang-format-14        clang-format-14
lint   cmd:clang-tidy-14          clang-tidy-14
lint   cmd:shellcheck             shellcheck
ci     cmd:doxygen                doxygen
ci     cmd:doxygen2man            doxygen2man
ci     cmd:git                    git
ci     cmd:clang                  clang
ci     rt:libclang_rt.fuzzer      libclang-rt-dev
ci     cmd:ld.lld                 lld
ci     cmd:g++                    g++
ci     cmd:ccache                 ccache
ci     cmd:aarch64-linux-gnu-gcc  gcc-aarch64-linux-gnu
ci     h64:stdio.h                libc6-dev-arm64-cross
ci     cmd:qemu-aarch64           qemu-user
TABLE
}

need_has() {
    case $1 in
    cmd:*) command -v "${1#cmd:}" >/dev/null ;;
    pc:*) pkg-config --exists "${1#pc:}" 2>/dev/null ;;
    h:*) echo "#include <${1#h:}>" | cc -E - >/dev/null 2>&1 ;;
    h64:*) echo "#include <${1#h64:}>" | aarch64-linux-gnu-gcc -E - >/dev/null 2>&1 ;;
    file:*) compgen -G "${1#file:}" >/dev/null ;;
    py:*) python3 -c "import ${1#py:}" 2>/dev/null ||
        /usr/bin/python3 -c "import ${1#py:}" 2>/dev/null ;;
    rt:*) [ -n "$(find "$(clang -print-resource-dir 2>/dev/null || echo /nowhere)" \
        -name "${1#rt:}*.a" 2>/dev/null)" ] ;;
    esac
}

# Packages of the groups "$@" whose proof fails, each once.
need_missing() {
    local group proof package
    need_table | while read -r group proof package; do
        case " $* " in *" $group "*) need_has "$proof" || echo "$package" ;; esac
    done
}

need_apt() {
    local as_root=()
    if [ "$(id -u)" != 0 ]; then
        command -v sudo >/dev/null || return 1
        if [ -t 0 ]; then as_root=(sudo); else as_root=(sudo -n); fi
    fi
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get "$@" </dev/null
}

# Returns 1 if something is still missing afterwards; its names are on stderr then.
need() {
    local missing package
    missing=$(need_missing "$@" | tr '\n' ' ')
    [ -n "$missing" ] || return 0
    # shellcheck disable=SC2034
    need_changed=1
    if command -v apt-get >/dev/null; then
        echo "dev: installing with apt: $missing" >&2
        local log
        log=$(mktemp)
        need_apt update -q >"$log" 2>&1 || true
        # One by one only if the batch fails, so that one unknown name does not stop the others.
        # shellcheck disable=SC2086
        need_apt install -qy --no-install-recommends $missing >>"$log" 2>&1 ||
            for package in $missing; do
                need_apt install -qy --no-install-recommends "$package" >>"$log" 2>&1 || true
            done
        missing=$(need_missing "$@" | tr '\n' ' ')
        [ -z "$missing" ] || tail -n 5 "$log" | sed 's/^/dev: apt: /' >&2
        rm -f "$log"
    fi
    [ -n "$missing" ] || return 0
    echo "dev: still missing: $missing(as root: apt-get install $missing)" >&2
    return 1
}
