# SPDX-License-Identifier: Apache-2.0
"""How many requests of how many tokens fit, and what a step brings to the card, before anything is loaded.

    python -m kvferry.vllm MODEL --gpu 80GiB --host 512GiB [OPTION...] [budget=1024 pages=k8v4 ...]

MODEL is a folder with a config.json. Other names are those of `vllm serve` and of docs/vllm.md. Activations
are estimated; a server measures them, and its first line says what is in force.
"""
import argparse
import json
import os
import sys
from typing import List, NamedTuple, Optional

from .. import Runtime
from .._errors import Error, Invalid
from .._planner import GIB, RATES, Plan, plan
from . import estimate, options
from .memory import Asked, Card, shown, warning

LENGTHS = (1024, 4096, 16384, 65536)


class Defaults(NamedTuple):
    """Defaults of `vllm serve`."""
    requests: int
    tokens_of_a_pass: int


def defaults_of(card: int, name: str = "") -> Defaults:
    """By a card's memory and name, as vLLM's EngineArgs.get_batch_defaults has it."""
    if card >= 160 * GIB:
        return Defaults(1024, 16384)
    if card >= 70 * GIB and "a100" not in name.lower() and "gb10" not in name.lower():
        return Defaults(1024, 8192)
    return Defaults(256, 2048)


def _arguments(given: Optional[List[str]]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m kvferry.vllm", description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("model", metavar="MODEL", help="a folder with a config.json")
    parser.add_argument("settings", metavar="NAME=VALUE", nargs="*", help="settings of kvferry")
    parser.add_argument("--gpu", required=True, metavar="SIZE", help="memory of a card: 80GiB, or 80GB as it is sold")
    parser.add_argument("--gpu-name", default="", metavar="NAME", help="as nvidia-smi has it: A100s have other defaults")
    parser.add_argument("--host", metavar="SIZE", help="host memory for pages, of all ranks; default: what a server here takes, "
                        "by what is free and what the container may have")
    parser.add_argument("--weights", metavar="SIZE", help="default: of MODEL's files, or two bytes a number")
    parser.add_argument("--max-model-len", type=int, help="default: what the model was made for")
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.92)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    return parser.parse_intermixed_args(given)


def _weights(args: argparse.Namespace, config: dict, model: estimate.Model) -> int:
    """Bytes: of the files, if they are there."""
    if args.weights:
        return options.bytes_of("weights", args.weights)
    found = estimate.size_of_files(args.model)
    if not found and config.get("quantization_config"):
        raise Invalid("weights are quantized, and their files are not here: give --weights SIZE")
    return found or 2 * model.weights


def _default_host(ranks: int) -> int:
    with Runtime(device="host") as runtime:
        return options.default_memory(ranks, 0, runtime.describe()["memory"], True)


def main(given: Optional[List[str]] = None) -> None:
    """Print what fits."""
    args = _arguments(given)
    with open(os.path.join(args.model, "config.json"), encoding="utf-8") as text:
        config = json.load(text)
    if not all("=" in one for one in args.settings):
        raise Invalid("give settings as NAME=VALUE: %s" % " ".join(args.settings))
    said = options.read(dict(one.split("=", 1) for one in args.settings), {})
    model, ranks, gpu = estimate.read(config), args.tensor_parallel_size, options.bytes_of("gpu", args.gpu)
    rank, default = estimate.rank_of(model, ranks), defaults_of(gpu, args.gpu_name)
    requests = args.max_num_seqs or default.requests
    weights, ahead = _weights(args, config, model) // ranks, estimate.activations(
        rank, args.max_num_batched_tokens or default.tokens_of_a_pass, requests) + estimate.graphs(
            rank, estimate.graph_sizes(requests), estimate.layers_of(model))
    tokens = args.max_model_len or model.attention.tokens
    if not tokens:
        raise Invalid("config.json does not limit the tokens of a request: give --max-model-len")
    host = options.bytes_of("host", args.host) // ranks if args.host else _default_host(ranks)
    load = Asked(host, requests, tokens, own=said.device_memory, request_bytes=rank.vocabulary * estimate.LOGIT_BYTES,
                 left=Card(gpu, args.gpu_memory_utilization, gpu).left(gpu - weights, weights, weights, ahead))
    with Runtime(device="host") as runtime:
        p = plan(runtime, rank.attention, load, said.cache)
    print("%.1f GiB of %s: weights %.1f, activations, graphs about %.1f, %s %.1f, windows, pages %.1f" % (
        gpu * args.gpu_memory_utilization / GIB, "each card" if ranks > 1 else "the card", weights / GIB, ahead / GIB,
        "vLLM's blocks" if rank.attention.windows else "codes", p.code_bytes / GIB, p.there.device_bytes / GIB))
    print("\n".join(lines_of(p)))


def lines_of(p: Plan) -> List[str]:
    """A plan in words."""
    load = p.load
    told = ["%d tokens fit%s, by %s; of these %d stay on the card, and windows of %d requests" % (
        p.tokens, " where other layers take no block" if p.groups.others else "",
        "host memory" if p.by_host else "the card", p.resident_tokens, p.windows)]
    for length in [length for length in LENGTHS if length < load.tokens] + [load.tokens]:
        count = p.requests_of(length)
        told.append("%7d requests of %d tokens%s" % (count, length,
                                                     ", by max_num_seqs" if count == load.requests else ""))
    at = min(load.tokens, 4096)
    count = p.requests_of(at)
    told.append("a step of %d requests of %d tokens brings %s at %s hits" % (
        count, at, ", ".join(shown(p.step_bytes(count, rate)) for rate in RATES), ", ".join("%d%%" % (100 * r) for r in RATES)))
    told.append("%d requests keep their budget on the card; with admit=resident %d run at once" % (min(p.kept, count), p.admitted))
    text = warning(load.host, p.tokens, p.model.token_bytes, load.left)
    return told + ([text] if text else [])


if __name__ == "__main__":
    try:
        main()
    except (Error, OSError) as error:
        sys.exit("kvferry.vllm: %s" % error)
