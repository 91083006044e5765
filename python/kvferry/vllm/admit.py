# SPDX-License-Identifier: Apache-2.0
"""With admit = resident, so many requests run at once as keep their budget on the card: vLLM's own max_num_seqs is
lowered to it when the engine is configured, and its scheduler does the rest.

Ranks are other processes than the scheduler, so the number is settled before any of them is there, and is in the
settings that all of them get. Imports nothing of vLLM. Invariant: without admit = resident an engine is as it was.
"""
import functools
import logging
from typing import Any, Callable, List, Optional

from .. import Runtime
from .._errors import Invalid, OutOfMemory, Unsupported
from .._planner import plan
from . import estimate, options
from .memory import Asked, Card

log = logging.getLogger("vllm.kvferry")


def follow(platform: Any, engine_of: Callable[[Any], Any]) -> None:
    """Let the platform's class lower it, after its own checks. May be called twice.

    engine_of   an upstream.Engine of a VllmConfig
    """
    theirs = platform.check_and_update_config
    if getattr(theirs, "admits", False):
        return

    @functools.wraps(theirs)
    def check_and_update_config(_: Any, vllm_config: Any) -> None:
        theirs(vllm_config)
        engine = engine_of(vllm_config)
        if engine.has_model and engine.asks_for_custom:
            settle(engine)

    check_and_update_config.admits = True # type: ignore[attr-defined]
    platform.check_and_update_config = classmethod(check_and_update_config)


def settle(engine: Any) -> None:
    """Lower the number of requests at once, and put it into the settings in place of the word."""
    said = options.of_engine(engine)
    if said.admit == options.ALL:
        return
    if said.admit == options.RESIDENT:
        if not isinstance(engine.settings, dict):
            raise Invalid("admit = resident: set it in --additional-config, which must be an object then")
        count = _round(admitted(engine, said), engine.graph_sizes)
        engine.settings["kvferry"] = {**engine.settings.get("kvferry", {}), "admit": count}
        if count < engine.requests:
            log.info("kvferry: max_num_seqs is %d, and was %d: so many requests keep their budget on the card "
                     "(admit = resident)", count, engine.requests)
    else:
        assert isinstance(said.admit, int)
        count = said.admit
    engine.requests = min(engine.requests, count)


def admitted(engine: Any, said: options.Options) -> int:
    """How many requests that is, for a rank as for the others."""
    try:
        model = estimate.rank_of(estimate.read(engine.text.to_dict()), engine.ranks)
        attention = model.attention._replace(layers=-(-model.attention.layers // engine.stages), element=engine.dtype.itemsize)
        left = None
        if engine.card_bytes is not None:
            weights = (estimate.size_of_files(engine.folder) // engine.ranks or model.weights * engine.dtype.itemsize
                       ) // engine.stages
            left = Card(engine.card_bytes, engine.share_of_card, engine.card_bytes).left(
                engine.card_bytes - weights, weights, weights,
                estimate.activations(model, engine.tokens_of_a_pass, engine.requests, engine.dtype.itemsize)
                + estimate.graphs(model, engine.graph_sizes or (), -(-engine.layers_in_all // engine.stages),
                                  engine.dtype.itemsize))
        with Runtime(device="host") as runtime:
            host = said.host_memory or options.default_memory(
                engine.ranks_in_all, engine.number, runtime.describe()["memory"], left is not None)
            return plan(runtime, attention, Asked(
                host, engine.requests, engine.tokens, _block_tokens(engine), left=left, own=said.device_memory,
                request_bytes=model.vocabulary * estimate.LOGIT_BYTES), said.cache).admitted
    except (Unsupported, OutOfMemory) as error:
        raise type(error)("admit = resident: %s. Or say --max-num-seqs, and admit = all" % error) from error


def _block_tokens(engine: Any) -> int:
    return engine.block_tokens if engine.block_tokens_were_said else 32


def _round(count: int, sizes: Optional[List[int]]) -> int:
    """A number of requests for which there is a CUDA graph."""
    return max((size for size in sizes or () if size <= count), default=count)
