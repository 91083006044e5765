# SPDX-License-Identifier: Apache-2.0
"""Processes of an unmodified llama.cpp, with kvferry's plug-in and without it.

Knows where `./dev llama` put builds; without one a test is skipped. Invariant: a process without the
plug-in has no variable of kvferry, so it is the program as it comes.
"""
import os
import re
import subprocess
import sys
import sysconfig

HERE = os.path.dirname(os.path.abspath(__file__))
PLACE = os.environ.get("KVF_LLAMA", "")
GLIBC = os.environ.get("KVF_LLAMA_GLIBC", "")
PLUGIN = os.environ.get("KVFERRY_LLAMA_PLUGIN", "")
MODEL = os.environ.get("KVF_LLAMA_MODEL", "")
NATIVE = os.path.join(PLACE, "native", "bin")
NEWEST = "b11739"


def require(*paths):
    """End the test with 77 where one of the files is missing."""
    for name, path in (("KVF_LLAMA", PLACE), ("KVFERRY_LLAMA_PLUGIN", PLUGIN), *(("", path) for path in paths)):
        if not path or not os.path.exists(path):
            print("skipped: there is no %s; ./dev llama makes what this needs" % (path or name))
            sys.exit(77)


def versions():
    """Names of the builds that are there, the newest wheel first."""
    wheels = os.path.join(PLACE, "wheels")
    names = sorted(os.listdir(wheels), key=lambda name: -int(name[1:])) if os.path.isdir(wheels) else []
    return names + (["native"] if os.path.exists(os.path.join(NATIVE, "llama-server")) else [])


def libraries(version):
    """The folder of the shared libraries of a build."""
    return NATIVE if version == "native" else os.path.join(PLACE, "wheels", version)


def interpreter(version):
    """This interpreter as a command, under the glibc that the build wants."""
    python = os.path.realpath(sys.executable)
    if version == "native" or not GLIBC:
        return [python]
    own = sysconfig.get_config_var("LIBDIR") or ""
    return [os.path.join(GLIBC, "ld-linux-x86-64.so.2"), "--library-path",
            ":".join([GLIBC, libraries(version), own, "/usr/lib/x86_64-linux-gnu"]), python]


def environment(settings=None, **more):
    """Variables of a process: settings of the plug-in, None for a process without it."""
    env = {name: value for name, value in os.environ.items()
           if not name.startswith(("KVFERRY_LLAMA", "GGML_", "LLAMA_", "LD_PRELOAD"))}
    if settings is not None:
        env.update(GGML_BACKEND_PATH=PLUGIN, KVFERRY_LLAMA=settings)
    return {**env, "OMP_NUM_THREADS": "1", **more}


def run(version, script, *arguments, settings=None, limit=600, **more):
    """Run a script of this folder in a build; its output and what it said on standard error."""
    done = subprocess.run([*interpreter(version), os.path.join(HERE, script), libraries(version), *map(str, arguments)],
                          env=environment(settings, **more), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          timeout=limit, check=False)
    if done.returncode:
        raise RuntimeError("%s ended with %d:\n%s" % (script, done.returncode, done.stderr[-3000:]))
    return done.stdout, done.stderr


def summary(said):
    """Numbers of the plug-in's last summary, {} where it wrote none."""
    lines = re.findall(r"^kvferry: attended (.*)$", said, re.M)
    return {name: float(value) for name, value in re.findall(r"([\w.-]+)=([\d.]+)\b", lines[-1])} if lines else {}


def reasons(said):
    """Operations that the plug-in left to llama.cpp, in its words."""
    return re.findall(r"^kvferry: (?:left to llama\.cpp|not loaded): (.*)$", said, re.M)
