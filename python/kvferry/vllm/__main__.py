# SPDX-License-Identifier: Apache-2.0
"""How many requests of how many tokens fit, before anything is loaded.

    python -m kvferry.vllm MODEL --gpu 80GiB --host 512GiB [OPTION...] [budget=1024 pages=k8v4 ...]

MODEL is a folder with a config.json. Other names are those of `vllm serve` and of docs/vllm.md. Activations
are estimated; a server measures them, and its first line says what is in force.
"""
import argparse
import glob
import json
import os
import sys
from typing import List, Optional

from .. import Runtime
from .._blocks import Blocks
from .._errors import Error, Invalid
from .._settings import fill
from ..capi import BlocksPlan, CacheConfig
from . import estimate, options
from .memory import Asked, Sums, blocks_that_fit, divide_own

GIB = 1 << 30
LARGE = 70 * GIB # from here on vLLM takes more requests, and longer passes
BLOCK = 32
LENGTHS = (1024, 4096, 16384, 65536)


def _arguments(given: Optional[List[str]]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m kvferry.vllm", description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("model", metavar="MODEL", help="a folder with a config.json")
    parser.add_argument("settings", metavar="NAME=VALUE", nargs="*", help="settings of kvferry")
    parser.add_argument("--gpu", required=True, help="memory of a card, as 80GiB")
    parser.add_argument("--host", required=True, help="host memory for pages, of all ranks")
    parser.add_argument("--max-model-len", type=int, help="default: what the model was made for")
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.92)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    return parser.parse_intermixed_args(given)


def _bytes(text: str) -> int:
    sizes = CacheConfig()
    fill(sizes, "cache", {"host_bytes": text}, [])
    return sizes.host_bytes


def _weights(folder: str, model: estimate.Model) -> int:
    """Bytes: of the files, if they are there."""
    return sum(map(os.path.getsize, glob.glob(os.path.join(folder, "*.safetensors")))) or 2 * model.weights


def main(given: Optional[List[str]] = None) -> None:
    """Print what fits."""
    args = _arguments(given)
    with open(os.path.join(args.model, "config.json"), encoding="utf-8") as text:
        config = json.load(text)
    if not all("=" in one for one in args.settings):
        raise Invalid("settings are said as NAME=VALUE: %s" % " ".join(args.settings))
    said = options.read(dict(one.split("=", 1) for one in args.settings), {})
    estimate.layers_of_all(config)
    model, ranks, gpu = estimate.read(config), args.tensor_parallel_size, _bytes(args.gpu)
    rank = estimate.rank_of(model, ranks)
    requests = args.max_num_seqs or (1024 if gpu >= LARGE else 256)
    passes = args.max_num_batched_tokens or (8192 if gpu >= LARGE else 2048)
    weights, ahead = _weights(args.model, model) // ranks, estimate.activations(rank, passes, requests)
    tokens = args.max_model_len or model.tokens

    def plan(blocks: int, regions: int, tokens_max: int, device_bytes: Optional[int] = 0) -> BlocksPlan:
        return Blocks.plan_for(
            runtime, block_count=blocks, block_tokens=BLOCK, layers=rank.layers, query_heads=rank.query_heads,
            kv_heads=rank.kv_heads, head_dim=rank.head_dim, dtype="bf16", tokens_max=tokens_max,
            sequences_max=regions, device_bytes=device_bytes, **{"transfer": "mapped", **said.cache})
    with Runtime(device="host") as runtime:
        sums = Sums(Asked(
            _bytes(args.host) // ranks, requests, tokens, BLOCK, rank.layers * plan(2, 1, BLOCK).code_bytes,
            int(gpu * args.gpu_memory_utilization) - weights - ahead, said.device_memory,
            rank.vocabulary * estimate.LOGIT_BYTES), plan)
        blocks = blocks_that_fit(sums)
        own = divide_own(sums, blocks)
        there = plan(blocks, own.regions, tokens, own.device_bytes)
        bound = "host memory" if blocks == sums.blocks_on_host(tokens) else "the card"
        print("%.1f GiB of %s: weights %.1f, activations %.1f (estimated), codes %.1f, windows and pages %.1f" % (
            gpu * args.gpu_memory_utilization / GIB, "each card" if ranks > 1 else "the card", weights / GIB,
            ahead / GIB, blocks * sums.asked.block_bytes / GIB, there.device_bytes / GIB))
    fit = (blocks - 1) * BLOCK
    print("%d tokens fit, by %s; of these %d stay on the card, and windows of %d requests" % (
        fit, bound, min(there.resident_tokens, fit), own.regions))
    for length in [length for length in LENGTHS if length < tokens] + [tokens]:
        print("%7d requests of %d tokens" % (min(requests, (blocks - 1) // -(-length // BLOCK)), length))


if __name__ == "__main__":
    try:
        main()
    except (Error, OSError) as error:
        sys.exit("kvferry.vllm: %s" % error)
