#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A private Python with torch and Transformers, and the tests and examples that need them.

usage: python_env.py --library FILE --command FILE [TEST...]
       python_env.py --library FILE --command FILE --run SCRIPT [ARG...]

The environment is made once, in the cache folder of the user, from the pinned packages below. torch
for x86-64 drags the libraries of CUDA along and does not import without them: 6 GB in all. Two more, of
0.2 GB each, have the newest Transformers that pip gives and the oldest that is served, and take the rest
from the first. The real model is unpacked there too, from its GGUF file, as a Hugging Face directory
(0.5 GB). Without --run the tests of `kvferry.hf` run in all of them, in the oldest those that need no
other version, then those of pruned prompts; names choose some of check_hf.py.
"""
import argparse
import os
import subprocess
import sys
import tempfile

import real_model

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PACKAGES = ["torch==2.15.0", "transformers==5.23.0", "gguf==0.19.0", "accelerate==1.15.0",
            "numpy==2.4.6", "fastapi==0.165.0", "uvicorn==0.54.0", "openai==3.54.0"]
OLDEST = "transformers==5.16.0" # as kvferry/_hf_known.py has it
OLD_TESTS = ["check_hf_known.py", "check_hf_generate.py", "check_hf_ways.py"]
TESTS = ["check_hf.py", "check_hf_guard.py", "check_hf_known.py", "check_hf_generate.py",
         "check_hf_shared.py", "check_hf_ways.py", "check_hf_judge.py",
         "check_hf_models.py --shard 1/2", "check_hf_models.py --shard 2/2"]
TRIES = 3  # registries time out
UNPACK = """
import copy, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, name, out = sys.argv[1:]
read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
config = copy.deepcopy(read.config) # of a model that is not quantised any more
if hasattr(config, "quantization_config"):
    del config.quantization_config
plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
plain.load_state_dict(read.state_dict())
plain.save_pretrained(out)
AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(out)
"""


def install(python, *arguments):
    """pip, as often as it takes."""
    for left in reversed(range(TRIES)):
        if subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-cache-dir",
                           "--disable-pip-version-check", *arguments]).returncode == 0:
            return
        if not left:
            sys.exit("%s: pip cannot install %s" % (os.path.basename(sys.argv[0]),
                                                    " ".join(arguments)))


def environment(name="python", packages=PACKAGES, fill=install, size=" (6 GB)"):
    """Its interpreter; brought up to date where an older list of packages had made it.

    fill    puts the packages into it: fill(python, *packages)
    """
    folder = os.path.join(real_model.cache_folder(), name)
    python, mark = os.path.join(folder, "bin", "python"), os.path.join(folder, "packages")
    wanted = "\n".join(packages)
    if os.path.exists(mark) and open(mark).read() == wanted:
        return python
    print("making %s: %s%s" % (folder, " ".join(packages), size), file=sys.stderr)
    if not os.path.exists(python):
        subprocess.run([real_model.python_with_pip(), "-m", "venv", folder], check=True)
    fill(python, *packages)
    with open(mark, "w") as out:
        out.write(wanted)
    return python


def beside(python, name, *packages):
    """An interpreter with those packages in place of its own; others are those of `python`."""
    folder = os.path.join(real_model.cache_folder(), name)
    above = os.path.join(folder, "bin", "python")
    if not os.path.exists(above):
        subprocess.run([python, "-m", "venv", folder], check=True)
        sites = [subprocess.run([each, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
                                stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
                 for each in (above, python)]
        with open(os.path.join(sites[0], "packages_below.pth"), "w") as out:
            out.write(sites[1] + "\n")
    if subprocess.run([above, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--upgrade",
                       "--disable-pip-version-check", *packages]).returncode:
        print("%s: pip gives nothing; tests run on the packages that are there" %
              os.path.basename(sys.argv[0]), file=sys.stderr)
    return above


def made_once(folder, make):
    """That folder; make(path) makes it beside its place the first time. Where several do, one of theirs stays."""
    if os.path.exists(folder):
        return folder
    os.makedirs(os.path.dirname(folder), exist_ok=True)
    with tempfile.TemporaryDirectory(dir=os.path.dirname(folder)) as scratch:
        made = os.path.join(scratch, "made")
        make(made)
        try:
            os.rename(made, folder)
        except OSError:
            if not os.path.isdir(folder):
                raise
    return folder


def model_folder(python):
    """The real model as a Hugging Face directory of fp32."""
    def unpack(made):
        path = real_model.fetch()
        subprocess.run([python, "-c", UNPACK, os.path.dirname(path), os.path.basename(path), made], check=True)
    return made_once(os.path.join(real_model.cache_folder(), real_model.NAME + ".hf"), unpack)


def run(python, args, rest, tests, path=(), also=(), **variables):
    """Run a script under that interpreter, and end as it ends: args.run, or tests of tests/python.

    also    more of (interpreter, tests)
    """
    env = dict(os.environ, KVFERRY_LIBRARY=os.path.abspath(args.library),
               KVF_COMMAND=os.path.abspath(args.command), KVF_HF_MODEL=model_folder(python),
               PYTHONPATH=os.pathsep.join([os.path.join(ROOT, "python"), *path]),
               PYTHONDONTWRITEBYTECODE="1", HF_HUB_OFFLINE="1", **variables)
    if args.run:
        os.execve(python, [python, args.run, *rest], env)
    codes = []
    for each, names in [(python, tests), *also]:
        for test in names:
            script, *words = test.split()
            codes.append(subprocess.run([each, os.path.join(ROOT, "tests", "python", script), *words,
                                         *rest], env=env).returncode)
    sys.exit(max(codes))


def arguments(about, more=lambda parser: None):
    """The command line: what is ours, with `more` of it, and what is the script's."""
    parser = argparse.ArgumentParser(description=about.split("\n")[0])
    parser.add_argument("--library", required=True, help="libkvferry.so")
    parser.add_argument("--command", required=True, help="the kvferry command")
    parser.add_argument("--run", metavar="SCRIPT", help="run this instead of the tests")
    more(parser)
    return parser.parse_known_args()


def main():
    args, rest = arguments(__doc__)
    python = environment()
    tests = TESTS[:1] if rest else TESTS
    also = [] if args.run else [(beside(python, "python-newest", "transformers"), tests),
                                (beside(python, "python-oldest", OLDEST), tests if rest else OLD_TESTS)]
    run(python, args, rest, tests if rest else [*TESTS, "check_prune_tokens.py"], also=also)


if __name__ == "__main__":
    main()
