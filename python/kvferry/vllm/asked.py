# SPDX-License-Identifier: Apache-2.0
"""An engine that asks for kvferry and has no layer for it does not start.

vLLM asks nothing of a backend that no layer has. So its platform is followed, where it fits blocks to the
backends of a rank, once all its layers are there. Invariant: an engine that does not ask is as it was.
"""
from typing import Any

from .._errors import Unsupported
from .upstream import Engine


def watch(platform: Any) -> None:
    """Let the platform's class look. May be called twice."""
    theirs = platform.update_block_size_for_backend
    if getattr(theirs, "looks", False):
        return

    def update_block_size_for_backend(_: Any, vllm_config: Any) -> None:
        check(Engine(vllm_config))
        theirs(vllm_config)

    update_block_size_for_backend.looks = True # type: ignore[attr-defined]
    platform.update_block_size_for_backend = classmethod(update_block_size_for_backend)


def check(engine: Engine) -> None:
    """Refuse a rank without a layer of ours, if one was asked for."""
    is_asked = engine.asks_for_custom
    if not is_asked and not (isinstance(engine.settings, dict) and "kvferry" in engine.settings):
        return
    if not is_asked:
        raise Unsupported("kvferry is in --additional-config, but no layer uses it: add --attention-backend CUSTOM")
    from .backend import Backend # pylint: disable=import-outside-toplevel
    theirs = engine.backends()
    if not any(issubclass(one, Backend) for one in theirs):
        raise Unsupported("no layer of this model is kvferry's: %s; leave CUSTOM out, or take a model with layers that "
                          "see everything" % (", ".join(sorted("%s has some" % one.get_name() for one in theirs))
                                              or "none has attention"))
