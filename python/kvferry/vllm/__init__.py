# SPDX-License-Identifier: Apache-2.0
"""kvferry in vLLM: an attention backend whose keys and values are pages in host memory.

    vllm serve MODEL --attention-backend CUSTOM --additional-config '{"kvferry": {"budget": 1024}}'

vLLM finds `register` by the entry point vllm.general_plugins and calls it in every process. Nothing
changes for an engine that does not ask for the backend CUSTOM. docs/vllm.md says what to set and what
is refused.
"""
import logging

from .._errors import Unsupported
from . import known

log = logging.getLogger("vllm.kvferry") # vLLM shows what is under its own name


def register() -> None:
    """Tell vLLM where the backend is. May be called twice. Where vLLM lacks what kvferry takes of it, an engine that does
    not ask for kvferry goes on."""
    import vllm # pylint: disable=import-outside-toplevel
    if not known.is_known(vllm.__version__):
        log.warning("%s", known.line_of(vllm.__version__))
    try:
        from . import admit, asked, cpu, narrow, upstream # pylint: disable=import-outside-toplevel
    except Unsupported as error:
        log.warning("%s", error)
        return
    from . import metrics # pylint: disable=import-outside-toplevel
    metrics.announce()
    upstream.announce(__name__ + ".backend.Backend")
    asked.watch(upstream.Platform)
    admit.follow(upstream.Platform, upstream.Engine)
    narrow.follow(upstream.Layer)
    if upstream.IS_CPU:
        cpu.offer(upstream.Platform)
