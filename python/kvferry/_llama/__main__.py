# SPDX-License-Identifier: Apache-2.0
"""usage: kvferry-llama PROGRAM [ARGUMENT...]       llama.cpp with kvferry, e.g. llama-server -m model.gguf -c 131072
       kvferry-llama --path                      where the plug-in is, for GGML_BACKEND_PATH
       kvferry-llama --check PROGRAM|LIBRARY     whether a build can load it, and by which way
       kvferry-llama --plan MODEL.gguf --gpu 24GiB --host 64GiB [-c TOKENS] [-np SLOTS]

The program runs in place of this command. Flash attention, which is how it hands attention over, is switched on
where no -fa says otherwise. Settings are in KVFERRY_LLAMA, as in KVFERRY_LLAMA="budget=1024": docs/llama.md.
"""
import os
import sys
from typing import Dict, List

from . import SETTINGS, Refused, check_settings, plugin_path, programs

REPORT = "KVFERRY_LLAMA_REPORT"
BEFORE = "KVFERRY_LLAMA_BEFORE" # what LD_PRELOAD is in tools that the program starts
WAIT_SECONDS = 20 # a program that has not loaded the plug-in by then goes on without
# Programs whose -fa takes on, off or auto; others say what they need by their own names.
FLASH = ("llama-server", "llama-cli", "llama-bench", "llama-completion", "llama-perplexity", "llama-batched-bench",
         "llama-mtmd-cli", "llama-parallel", "llama-speculative", "llama-lookup", "llama-embedding", "llama-imatrix",
         "llama-tts")


def with_flash_attention(program: str, given: List[str], environment: Dict[str, str]) -> List[str]:
    """The arguments, with `-fa on` where neither they nor the environment say anything of it."""
    said = any(word.split("=")[0] in ("-fa", "--flash-attn") for word in given)
    if said or os.path.basename(program) not in FLASH or "LLAMA_ARG_FLASH_ATTN" in environment:
        return given
    return [*given, "-fa", "on"]


def environment_of(program: programs.Program, given: Dict[str, str]) -> Dict[str, str]:
    """The program's environment, by which it loads the plug-in."""
    plugin, name = plugin_path(), programs.way(program, given)
    if name == programs.PATH:
        return {**given, name: plugin}
    before = given.get(name, "")
    return {**given, name: plugin + (":" + before if before else ""), BEFORE: before}


def watch(path: str) -> int:
    """Start a process that says so if the program stays without the plug-in; where that is to report."""
    import select
    reads, writes = os.pipe()
    os.set_inheritable(writes, True)
    if os.fork():
        os.close(reads)
        os.wait()
        return writes
    if os.fork(): # the watcher is nobody's child: the program waits for its own alone
        os._exit(0)
    for each in (writes, 0, 1): # what reads the program's output waits for the program alone
        os.close(each)
    os.setsid()
    ready, _, _ = select.select([reads], [], [], WAIT_SECONDS)
    if not ready:
        what = "has not loaded kvferry after %d seconds" % WAIT_SECONDS
    else:
        what = "" if os.read(reads, 512) else "ended without having loaded kvferry"
    if what:
        os.write(2, ("kvferry: %s %s: kvferry-llama --check %s tells whether it can\n" % (
            os.path.basename(path), what, path)).encode())
    return os._exit(0)


def launch(given: List[str]) -> None:
    """Become the program, with the plug-in."""
    check_settings(os.environ.get(SETTINGS, ""))
    path = programs.find(given[0])
    program = programs.look(path)
    environment = environment_of(program, dict(os.environ))
    arguments = with_flash_attention(given[0], given[1:], environment)
    sys.stdout.flush()
    environment[REPORT] = str(watch(path))
    os.execve(path, [given[0], *arguments], environment)


def main() -> None:
    """The command kvferry-llama."""
    given = sys.argv[1:]
    try:
        if not given or given[0] in ("-h", "--help"):
            print((__doc__ or "").rstrip(), file=sys.stdout if given else sys.stderr)
            sys.exit(0 if given else 2)
        if given[0] == "--path":
            print(plugin_path())
        elif given[0] == "--check":
            from . import check
            check.main(given[1:])
        elif given[0] == "--plan":
            from . import plan
            plan.main(given[1:])
        elif given[0].startswith("-"):
            raise Refused("there is no option %s; kvferry-llama --help lists all" % given[0], 2)
        else:
            launch(given)
    except Refused as error:
        print("kvferry-llama: %s" % error, file=sys.stderr)
        sys.exit(error.status)


if __name__ == "__main__":
    main()
