# SPDX-License-Identifier: Apache-2.0
"""One program with a limit, and what is known of it afterwards; for `./dev gpu`.

It knows no program by name. Invariant: whatever a program does, its group is gone when its limit is
over, and there is a result.
"""
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
LOG_BYTES = 40000  # of one job in its part's log
SUITE_ENV = {"KVF_TEST_DEVICE": "cuda"}
CHECK_SECONDS = 60 # of a look at what failed
REPORT_LINES = 9
# compute-sanitizer's lines on a fault; the lines after it have the place.
REPORT = re.compile(r"^=+ .*(Invalid|Program hit|Race|hazard|Misaligned|out of bounds|uninitialized)", re.I)
FAILED_CASE = re.compile(r"^FAIL (\S+) \[.*?\] case (\d+) of seed (\d+)", re.M)
TIME_OVER = "the time was over"


def say(text):
    print("gpu: " + text, file=sys.stderr, flush=True)


def python_environment():
    """Where cuBLAS lies, if it came with a Python package: the environment that runs this."""
    if "VIRTUAL_ENV" in os.environ or "CONDA_PREFIX" in os.environ:
        return {}
    return {"VIRTUAL_ENV": sys.prefix}


class Job:
    """One program with a limit. `figures` names a JSON file that it writes; `is_alone`: nothing else
    runs beside it, for it measures time."""

    def __init__(self, name, command, limit, env=None, figures=None, is_alone=False):
        self.name, self.command, self.limit = name, [str(c) for c in command], limit
        self.env, self.figures, self.is_alone = dict(SUITE_ENV, **(env or {})), figures, is_alone

    def run(self, until):
        """The result, and what the program said."""
        result = {"name": self.name, "command": " ".join(self.command)}
        seconds = min(self.limit, until - time.monotonic())
        if seconds < 1:
            return dict(result, status="not run", why=TIME_OVER), ""
        if not shutil.which(self.command[0]):
            return dict(result, status="not run", why=self.command[0] + " is not here"), ""
        if self.figures and os.path.exists(self.figures):
            os.remove(self.figures)
        begin = time.monotonic()
        with tempfile.TemporaryFile() as log:
            try:
                process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                           cwd=ROOT, env=dict(os.environ, **python_environment(), **self.env),
                                           start_new_session=True)
            except OSError as e: # made for another machine, say
                return dict(result, status="failed", why="cannot start: " + e.strerror), ""
            try:
                code = process.wait(seconds)
                status = "ok" if code == 0 else "skipped" if code == 77 else "failed"
            except subprocess.TimeoutExpired:
                status, code = "timeout", None
            end_group(process)
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size - LOG_BYTES))
            text = log.read().decode("utf-8", "replace")
        result.update(status=status, code=code, seconds=round(time.monotonic() - begin, 1),
                      limit=round(seconds, 1))
        if status in ("failed", "timeout", "skipped"):
            result["end"] = text.strip().split("\n")[-3:]
        if self.figures and os.path.exists(self.figures):
            try:
                with open(self.figures, encoding="utf-8") as f:
                    result["figures"] = json.load(f)
            except ValueError as e:
                result["figures_error"] = str(e)
        return result, text

    def again(self, text):
        """A second look at a failure: the same with launches that wait, then under memcheck; only the
        first case that failed, where `text` names one."""
        command = self.command
        case = FAILED_CASE.search(text)
        if case:
            command = command[:1] + ["--isa", "cuda", "--op", case[1], "--case", case[2], "--seed", case[3]]
        blocking = dict(self.env, CUDA_LAUNCH_BLOCKING="1")
        return [Job(self.name + ", blocking", command, CHECK_SECONDS, env=blocking),
                Job(self.name + ", memcheck", ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode",
                                               "9"] + command, CHECK_SECONDS, env=blocking)]


def first_report(text):
    """The first fault that compute-sanitizer names, or the end of what was said."""
    lines = text.strip().split("\n")
    at = next((i for i, line in enumerate(lines) if REPORT.search(line)), None)
    return lines[-3:] if at is None else lines[at:at + REPORT_LINES]


def look_at(job, result, text, until):
    """Run a failed job again, alone. [(result, text)]; the first report is in `result`."""
    done = []
    for other in job.again(text):
        found, said = other.run(until)
        done.append((found, said))
        if found["status"] in ("failed", "timeout"):
            result["first_report"] = first_report(said)
    result["looked_at"] = {r["name"].rsplit(", ", 1)[1]: r["status"] for r, _ in done}
    for line in result.get("first_report", []):
        say("    " + line)
    return done


def end_group(process):
    """End what the program started, too: a hung one ignores a polite request."""
    for number, patience in ((signal.SIGTERM, 2), (signal.SIGKILL, 5)):
        try:
            os.killpg(process.pid, number)
            process.wait(patience)
        except (ProcessLookupError, PermissionError):
            break
        except subprocess.TimeoutExpired:
            continue


def output_of(command, limit=20):
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              timeout=limit, check=False)
        return done.stdout if done.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired):
        return None


def find_gpu():
    """Its name, or None and why."""
    if not shutil.which("nvidia-smi"):
        return None, "no NVIDIA GPU here: there is no nvidia-smi, so no driver"
    name = output_of(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"])
    if not name or not name.strip():
        return None, "no NVIDIA GPU here: nvidia-smi names none"
    return name.strip().split("\n")[0], None
