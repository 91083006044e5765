# SPDX-License-Identifier: Apache-2.0
"""Whether answers are still right: the same questions with full attention and with kvferry, and what is kept.

    python -m kvferry.judge --url http://localhost:8000/v1 --full http://localhost:8001/v1
    python -m kvferry.judge --url http://localhost:8001/v1 --record full.jsonl    # full attention first, then
    python -m kvferry.judge --url http://localhost:8000/v1 --full full.jsonl      # the same card with kvferry
    python -m kvferry.judge --model DIR --sweep budget=512,1024                   # Transformers
    python -m kvferry.judge --model DIR --command kvferry                         # the runner

Exit status: 0 enough is kept, 1 less is kept, 2 it could not be asked, 3 no verdict. The same command goes on with a
run that was cut.
"""
import argparse
import hashlib
import json
import os
import sys
from typing import Any, Dict, List, Optional

from .._errors import Error
from . import programs, report, servers, tasks, texts, work
from .record import AGAIN, FULL, Record, Refused

RULER = [name for name in tasks.TASKS if name != "mrcr"]


def tokens(text: str) -> int:
    """1500, or 32K."""
    return int(text[:-1]) * 1024 if text[-1:] in "kK" else int(text)


def arguments(given: Optional[List[str]]) -> argparse.Namespace:
    """As they are checked."""
    parser = argparse.ArgumentParser("python -m kvferry.judge", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    who = parser.add_argument_group("who is asked")
    who.add_argument("--url", help="a server with kvferry, of OpenAI's interface; with --record the one without")
    who.add_argument("--full", metavar="URL|FILE", help="the server without, or what --record kept of it")
    who.add_argument("--record", metavar="FILE", help="ask full attention alone, and keep its answers")
    who.add_argument("--model", metavar="DIR", help="a folder of a model: Transformers in this process, or --command")
    who.add_argument("--command", metavar="PROGRAM", nargs="?", const="kvferry", help="the runner, with --model")
    who.add_argument("--name", help="of a server's model; the first that it has")
    who.add_argument("--chat", action="store_true", help="servers are asked by messages")
    who.add_argument("--log", metavar="FILE", help="what a llama-server at --url writes, with KVFERRY_LLAMA=log=1s")
    who.add_argument("--budget", metavar="N[+P%]", help="1024; of a server it is what the report calls it")
    who.add_argument("--set", metavar="NAME=VALUE", action="append", default=[], help="a setting of kvferry, with --model")
    who.add_argument("--verify", metavar="N", type=int, default=16, help="measure the share of attention every N steps (16)")
    what = parser.add_argument_group("what is asked")
    what.add_argument("--text", metavar="FOLDER", help="files to hide questions in; else text is made")
    what.add_argument("--questions", metavar="FILE", help='lines {"fact", "question", "answers"} or {"prompt", "answers"}')
    what.add_argument("--lengths", metavar="N", nargs="+", type=tokens, help="tokens: 8K 32K (4K)")
    what.add_argument("--tasks", metavar="NAME", nargs="+", choices=list(tasks.TASKS), help="of %s" % " ".join(tasks.TASKS))
    what.add_argument("--samples", metavar="N", type=int, help="documents of a task and length (5; 3 if quick)")
    what.add_argument("--quick", action="store_true", help="2K, and short texts and answers: a first look")
    out = parser.add_argument_group("what is told")
    out.add_argument("--sweep", metavar="budget=A,B", help="several budgets: the smallest that keeps enough")
    out.add_argument("--keep", metavar="SHARE", type=float, default=0.99, help="of full's score that is enough (0.99)")
    out.add_argument("--out", metavar="FOLDER", default="judge", help="gets answers.jsonl, judge.md, judge.json, judge.svg")
    out.add_argument("--dry-run", action="store_true", help="tell what it costs, and stop")
    args = parser.parse_args(given)
    problem = wrong(args)
    if problem:
        parser.error(problem)
    return args


def wrong(args: argparse.Namespace) -> Optional[str]:
    """The first thing that does not go together."""
    if bool(args.url) == bool(args.model):
        return "give --url or --model"
    if args.command and not args.model:
        return "--command needs --model"
    if args.url and not args.full and not args.record:
        return "--url is compared with --full, a server or a file; --record makes the file"
    if args.record and (args.full or args.sweep):
        return "--record asks full attention alone; leave --full and --sweep out"
    if args.full and not is_url(args.full) and not os.path.exists(args.full):
        return "--full %s: no such file; an address begins with http://" % args.full
    if args.full and not is_url(args.full) and (args.lengths or args.tasks or args.text or args.questions):
        return "--full %s brings its questions along; leave --lengths, --tasks, --text and --questions out" % args.full
    if args.full and is_url(args.full) and args.model:
        return "--model is its own full attention; --full takes a file beside it"
    if args.url and (args.sweep or args.set):
        return "a server has its budget and settings from its start; leave --sweep and --set out"
    if args.sweep and (args.budget or not args.sweep.startswith("budget=")):
        return "--sweep is budget=A,B,..., in place of --budget"
    if args.url and args.budget in (FULL, AGAIN):
        return "--budget %s is what full attention itself is called; say the number of tokens, or whole" % args.budget
    if args.log and not (args.url and os.path.exists(args.log)):
        return "--log %s: it is a file of the server at --url" % args.log
    if not all("=" in one for one in args.set):
        return "--set is NAME=VALUE"
    return next(("budget %s: give 1024, or 1024+5%%" % b for b in budgets_of(args) if args.model and not is_budget(b)), None)


def is_url(text: str) -> bool:
    """Rather than a file."""
    return text.startswith(("http://", "https://"))


def is_budget(text: str) -> bool:
    """N, or N+P%"""
    count, _, share = text.partition("+")
    return count.isdigit() and int(count) > 0 and (not share or share.rstrip("%").replace(".", "", 1).isdigit())


def budgets_of(args: argparse.Namespace) -> List[str]:
    """The smallest first; a server's is the name of its side."""
    if args.record:
        return []
    if args.sweep:
        return sorted(args.sweep[len("budget="):].split(","), key=lambda b: (len(b.split("+")[0]), b))
    return [args.budget or ("kvferry" if args.url else "1024")]


def wanted(args: argparse.Namespace) -> work.Wanted:
    """Documents and tasks."""
    quick, own = args.quick, tasks.read_own(args.questions) if args.questions else []
    default = [2048 if quick else 4096] if not own or any("fact" in q for q in own) else [] # whole prompts are enough
    lengths = sorted(args.lengths or default)
    return work.Wanted(
        lengths=lengths, samples=args.samples or (3 if quick else 5),
        tasks=args.tasks if args.tasks else [] if own else RULER, texts=1 if quick else 2,
        text_tokens=min([64 if quick else 256, *(n // 8 for n in lengths)]),
        long_tokens=384 if quick else 3000, tools=(2 if quick else 5) if args.url else 0, own=own)


def engine_of(args: argparse.Namespace, url: str) -> Any:
    """Who is asked."""
    if args.url:
        return servers.Server(url, args.name, os.environ.get("OPENAI_API_KEY", ""), args.chat,
                              args.log if url == args.url else None)
    if args.command:
        return programs.Program(args.command, args.model, args.verify)
    from . import models
    return models.Model(args.model, args.verify)


def opened(args: argparse.Namespace, engine: Any) -> Record:
    """The file of answers, with its documents: those of an earlier run, of a recorded one, or new ones."""
    record = Record(args.record or os.path.join(args.out, "answers.jsonl"))
    if args.full and not is_url(args.full):
        other = Record(args.full).read()
        if record.exists() and record.read().asked != other.asked:
            raise Refused("%s has other questions than %s: give another --out" % (record.path, args.full))
        return record if record.exists() else record.take(other)
    want = wanted(args)
    text = texts.of_folder(args.text) if args.text else texts.made()
    asked = json.loads(json.dumps({**want._asdict(), "text": hashlib.sha256(text.encode()).hexdigest()[:16], "chat": args.chat}))
    if record.exists():
        if record.read().asked != asked:
            raise Refused("%s is of other questions: give %s, or remove it" % (
                record.path, "another name" if args.record else "another --out"))
        return record
    print("judge: making documents", file=sys.stderr, flush=True)
    return record.begin(asked, work.documents(want, texts.Material(text, more=True), engine.count))


def tell(record: Record, args: argparse.Namespace, sides: List[work.Side], stopped: Optional[str]) -> int:
    """Print and write all that is known. @return the exit status"""
    judged = [side.name for side in sides if side.kinds is None and side.name != report.FULL]
    names = list(dict.fromkeys([side.name for side in sides if side.name != report.FULL] + [AGAIN]))
    told: Dict[str, Any] = {name: report.rows(record, name) for name in names}
    found = [j for j in report.judgements(told) if j.side in judged]
    line, status = report.verdict(record, found, judged, args.keep) if judged else ("full attention is recorded", 0)
    if stopped:
        line, status = line + "; cut: %s; the same command goes on" % stopped, report.UNKNOWN
    lines = ["# Are answers still right?", "", line + ".", ""]
    lines += ["%s: %s" % (name, row["engine"]) for (name, d, _), row in record.said.items() if d < 0]
    for name in names:
        lines += report.of_side(record, name, told[name])
    if args.record:
        print("\n".join(lines))
        return status
    picture = report.draw(found, args.keep, os.path.join(args.out, "judge.svg")) if found else None
    lines += ["", picture] if picture else []
    with open(os.path.join(args.out, "judge.md"), "w", encoding="utf-8") as f:
        f.write("\n".join(lines) + "\n")
    with open(os.path.join(args.out, "judge.json"), "w", encoding="utf-8") as f:
        json.dump({"verdict": line, "status": status, "keep": args.keep, "sides": {name: {
            "rows": told[name], "likelihoods": report.likelihoods(record, name), "long": report.long_answers(record, name),
            "calls": report.calls(record, name), "served": report.served(record, name),
            "foresight": report.foresight(record, name)} for name in names}}, f, indent=1)
    print("\n".join(lines + ["", "verdict: " + line]))
    return status


def judge(args: argparse.Namespace) -> int:
    """@return the exit status"""
    engine = engine_of(args, args.url)
    is_live = bool(args.full and is_url(args.full))
    full = engine_of(args, args.full) if is_live else None if args.full else engine
    record = opened(args, engine)
    names = [" ".join([budget, *args.set]) for budget in budgets_of(args)]
    sides = work.sides_of(full, engine, names, 1 if args.quick else 2, bool(args.model and not args.record))
    sides = [side for side in sides if any(map(side.wants, record.documents))]
    print("judge: " + work.cost(record, sides, engine.count), file=sys.stderr, flush=True)
    if args.dry_run:
        return 0
    stopped = None
    try:
        work.go_on(record, sides)
    except (servers.Stopped, KeyboardInterrupt) as why:
        stopped = str(why) or "by hand"
    return tell(record, args, sides, stopped)


def main(given: Optional[List[str]] = None) -> None:
    """The command kvferry-judge."""
    try:
        sys.exit(judge(arguments(given)))
    except (Refused, servers.Stopped, servers.Cannot, Error, ValueError, OSError, ImportError) as why:
        print("kvferry.judge: %s" % why, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
