#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Try a wheel where there is no compiler: in roots made from packages of Debian.

usage: release_root.py WHEEL SUITE...       for example dist/kvferry-0.1.0+cpu-....whl bookworm trixie

mmdebstrap makes each root once, in the cache folder of the user (0.2 GB; it has to be root), with Python and
nothing that compiles. tools/release_inside.py says what is done there; torch and Transformers come from PyPI,
6 GB for the time of the trial.
"""
import os
import shutil
import subprocess
import sys
import tempfile

import llama_env
import python_env
import real_model

PACKAGES = "python3,python3-venv,ca-certificates,libgomp1" # the last is of llama.cpp and torch
# Files by which a machine reaches packages, as this one does.
REACH = ("/etc/resolv.conf", "/etc/ssl/certs/ca-certificates.crt")


def root(suite):
    """A root of that suite of Debian, as it comes."""
    def make(made):
        print("making a root of %s" % suite, file=sys.stderr)
        subprocess.run(["mmdebstrap", "--quiet", "--variant=apt", "--include=" + PACKAGES, suite, made,
                        llama_env.mirror()], check=True)
    return python_env.made_once(os.path.join(real_model.cache_folder(), "root-" + suite), make)


def bring(place, wheel):
    """Files that the trial reads; large ones are links, where the file system allows."""
    def link(source, target):
        try:
            os.link(source, target)
        except OSError:
            shutil.copy(source, target)
    model = real_model.fetch()
    whole = python_env.model_folder(python_env.environment())
    link(model, os.path.join(place, os.path.basename(model)))
    shutil.copytree(whole, os.path.join(place, os.path.basename(whole)), copy_function=link)
    for path in (wheel, os.path.join(python_env.ROOT, "README.md"),
                 os.path.join(python_env.ROOT, "tools", "release_inside.py")):
        shutil.copy(path, place)


def glibc(folder):
    """The version of the glibc in a root, as two numbers."""
    name = subprocess.run(["chroot", folder, "dpkg-query", "-W", "-f", "${Version}", "libc6"], stdout=subprocess.PIPE,
                          text=True, check=True).stdout
    return tuple(map(int, name.split("-")[0].split(".")[:2]))


def attempt(wheel, suite):
    folder = root(suite)
    for path in REACH:
        shutil.copy(path, folder + path)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        bring(place, wheel)
        if glibc(folder) < llama_env.WHEELS_GLIBC:
            shutil.copytree(os.path.dirname(os.path.dirname(os.path.dirname(llama_env.newer_glibc()))),
                            os.path.join(place, "glibc"), symlinks=True)
        inside = "/" + os.path.basename(place)
        env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": inside, "TMPDIR": inside, "LANG": "C.UTF-8"}
        return subprocess.run(["unshare", "--mount", "--pid", "--fork", "--root=" + folder, "--mount-proc", "python3",
                               inside + "/release_inside.py", inside, llama_env.WHEELS[llama_env.NEWEST]],
                              env=env).returncode


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    codes = []
    for suite in sys.argv[2:]:
        print("== %s" % suite, flush=True)
        codes.append(attempt(sys.argv[1], suite))
    sys.exit(max(codes))


if __name__ == "__main__":
    main()
