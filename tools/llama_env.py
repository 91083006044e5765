#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Unmodified builds of llama.cpp, and the tests of kvferry's plug-in in them.

usage: llama_env.py --plugin FILE --library FILE --command FILE [--quick] [TEST...]
       llama_env.py --plugin FILE --library FILE --command FILE --run PROGRAM [ARG...]

Made once, in the cache folder of the user (0.6 GB): one native build of shared libraries with llama-server,
llama-cli and llama-bench, for CPUs only, from the source package of llama-cpp-python (half an hour on two
cores), and the shared libraries of several versions from wheels of llama-cpp-py-sync. These want a glibc
that Debian 12 lacks; where it does, a newer one of Debian lies beside them, for these processes alone.
Models are tiny ones with random weights (tests/python/llama_models.py), and the real one. With --quick
there is no native build and one wheel: what takes two minutes.
"""
import glob
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import zipfile

import python_env
import real_model

ROOT = python_env.ROOT
SOURCE = "llama-cpp-python==0.3.36"
WHEELS = {"b8468": "llama-cpp-py-sync==0.8468", "b9445": "llama-cpp-py-sync==0.9445",
          "b10335": "llama-cpp-py-sync==0.10335", "b11413": "llama-cpp-py-sync==0.11413",
          "b11739": "llama-cpp-py-sync==0.11739"}
NEWEST = "b11739"
WHEELS_GLIBC = (2, 38)
PROGRAMS = ("llama-server", "llama-cli", "llama-bench", "llama-quantize")
OPTIONS = {"CMAKE_BUILD_TYPE": "Release", "BUILD_SHARED_LIBS": "ON", "LLAMA_USE_PREBUILT_UI": "OFF",
           "LLAMA_OPENSSL": "OFF", "LLAMA_BUILD_TESTS": "OFF", "LLAMA_BUILD_EXAMPLES": "OFF",
           "LLAMA_BUILD_APP": "OFF", "LLAMA_BUILD_NUMBER": "1"}
LAUNCHERS = {"CMAKE_%s_COMPILER_LAUNCHER" % language: "ccache" for language in ("C", "CXX")}
GLIBC_PACKAGES = ("libc6", "libstdc++6", "libgcc-s1", "libgomp1")
GLIBC_SUITE = "trixie" # of Debian, from the mirror that this machine has
KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
NOT_HERE = 77
TESTS = ("check_llama_launch.py", "check_llama_plan.py", "check_llama_logits.py", "check_llama_fuzz.py",
         "check_llama_server.py")
QUICK = ("check_llama_launch.py", "check_llama_logits.py --quick", "check_llama_fuzz.py --quick")


def folder(*names):
    """A path under the folder of all this."""
    return os.path.join(real_model.cache_folder(), "llama", *names)


def say(text):
    """One line of what is going on."""
    print("llama_env.py: " + text, file=sys.stderr, flush=True)


def download(package, scratch, *options):
    """The file of a package of PyPI; registries time out."""
    return real_model.download(package, scratch, *options, tries=python_env.TRIES)


def source():
    """The source tree of llama.cpp that the package of its Python binding has inside."""
    def make(whole):
        say("fetching the source of llama.cpp from %s (77 MB)" % SOURCE)
        path = download(SOURCE, whole + ".down", "--no-binary", SOURCE.split("==")[0])
        with tarfile.open(path) as tar:
            inside = tar.getnames()[0].split("/")[0] + "/vendor/llama.cpp/"
            for member in tar.getmembers():
                if member.name.startswith(inside) and not member.name.endswith(".gguf"):
                    member.name = member.name[len(inside):]
                    tar.extract(member, whole)
    return python_env.made_once(folder("llama.cpp"), make)


def is_built(name):
    """Whether build() came to its end."""
    return os.path.exists(folder(name, "built"))


def build(name, options, targets, jobs):
    """Build the targets in a folder of that name, or what is left of them."""
    launchers = LAUNCHERS if shutil.which("ccache") else {}
    subprocess.run(["cmake", "-G", "Ninja", "-S", source(), "-B", folder(name),
                    "-DCMAKE_PROJECT_llama.cpp_INCLUDE=" + os.path.join(ROOT, "tools", "llama_unity.cmake"),
                    *("-D%s=%s" % row for row in (OPTIONS | launchers | options).items())],
                   check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["ninja", "-C", folder(name), "-j%d" % jobs, *targets], check=True)
    with open(folder(name, "built"), "w", encoding="utf-8") as out:
        out.write(SOURCE)


def wheel(version):
    """The folder of shared libraries of a version, unpacked from its wheel."""
    def make(whole):
        say("fetching llama.cpp %s from %s" % (version, WHEELS[version]))
        with zipfile.ZipFile(download(WHEELS[version], whole + ".down")) as packed:
            packed.extractall(whole + ".unpacked")
        os.rename(os.path.join(whole + ".unpacked", "llama_cpp_py_sync"), whole)
    return python_env.made_once(folder("wheels", version), make)


def models():
    """Files with random weights; those that are there stay."""
    subprocess.run([python_env.environment(), os.path.join(ROOT, "tests", "python", "llama_models.py"), source(),
                    folder("models")], check=True)


def mirror():
    """The address from which this machine has its packages of Debian."""
    done = subprocess.run(["apt-get", "indextargets", "--format", "$(REPO_URI) $(LABEL)", "Created-By: Packages"],
                          stdout=subprocess.PIPE, text=True, check=False)
    found = [line.split()[0] for line in done.stdout.splitlines() if line.split()[1:2] == ["Debian"]]
    if not found:
        raise FileNotFoundError("apt has no mirror of Debian, from which a newer glibc would come")
    return found[0]


def newer_glibc():
    """A folder with ld.so and libraries as wheels want them, "" where this machine's own will do."""
    if tuple(map(int, platform.libc_ver()[1].split("."))) >= WHEELS_GLIBC:
        return ""
    inside = os.path.join("usr", "lib", "x86_64-linux-gnu")

    def make(whole):
        scratch = os.path.dirname(whole)
        say("fetching a newer glibc from Debian, for test processes alone")
        sources = os.path.join(scratch, "debian.list")
        with open(sources, "w", encoding="utf-8") as out:
            out.write("deb [signed-by=%s] %s %s main\n" % (KEYS, mirror(), GLIBC_SUITE))
        for name in ("lists", "cache"):
            os.mkdir(os.path.join(scratch, name))
        apt = ["apt-get", "-qq", "-o", "Dir::Etc::sourcelist=" + sources, "-o", "Dir::Etc::sourceparts=/dev/null",
               "-o", "Dir::State::lists=" + os.path.join(scratch, "lists"),
               "-o", "Dir::Cache=" + os.path.join(scratch, "cache"), "-o", "APT::Sandbox::User=root"]
        for words in (["update"], ["download", *GLIBC_PACKAGES]):
            if subprocess.run([*apt, *words], cwd=scratch, check=False).returncode:
                raise FileNotFoundError("apt-get %s fails for %s" % (words[0], GLIBC_SUITE))
        for package in glob.glob(os.path.join(scratch, "*.deb")):
            subprocess.run(["dpkg-deb", "-x", package, whole], check=True)
    return os.path.join(python_env.made_once(folder("glibc"), make), inside)


def with_numpy():
    """The first interpreter that has NumPy, by its own name: ld.so does not start scripts."""
    for python in (sys.executable, "/usr/bin/python3"):
        if os.path.exists(python) and subprocess.run([python, "-c", "import numpy"],
                                                     stderr=subprocess.DEVNULL).returncode == 0:
            return os.path.realpath(python)
    return sys.exit("llama_env.py: no python3 has NumPy (package python3-numpy)")


def arguments():
    """The command line: what is ours, and what is the tests'."""
    def more(parser):
        parser.add_argument("--plugin", required=True, help="libggml-kvferry.so")
        parser.add_argument("--quick", action="store_true", help="one wheel, no native build")
    return python_env.arguments(__doc__, more)


def environment(args):
    """Variables of tests, once all that they need is there."""
    env = dict(os.environ, KVFERRY_LLAMA_PLUGIN=os.path.abspath(args.plugin), KVFERRY_LIBRARY=os.path.abspath(args.library),
               KVF_COMMAND=os.path.abspath(args.command), KVF_LLAMA=folder(), KVF_LLAMA_GLIBC=newer_glibc(),
               KVF_LLAMA_MODEL=real_model.fetch(), PYTHONPATH=os.path.join(ROOT, "python"), PYTHONDONTWRITEBYTECODE="1")
    for version in [NEWEST] if args.quick else WHEELS:
        wheel(version)
    if not args.quick:
        if not is_built("native"):
            say("building llama.cpp for this machine (half an hour on two cores)")
            build("native", {}, PROGRAMS, 2)
        models()
    return env


def main():
    args, rest = arguments()
    try:
        env = environment(args)
    except FileNotFoundError as error:
        print("skipped: %s" % error)
        sys.exit(NOT_HERE)
    python = with_numpy()
    if args.run:
        os.execvpe(args.run, [args.run, *rest], env)
    tests = [rest] if rest else [test.split() for test in (QUICK if args.quick else TESTS)]
    sys.exit(max(subprocess.run([python, os.path.join(ROOT, "tests", "python", script), *words], env=env).returncode
                 for script, *words in tests))


if __name__ == "__main__":
    main()
