# SPDX-License-Identifier: Apache-2.0
"""kvferry in vLLM: an attention backend whose keys and values are pages in host memory.

    vllm serve MODEL --attention-backend CUSTOM --additional-config '{"kvferry": {"budget": 1024}}'

vLLM finds `register` by the entry point vllm.general_plugins and calls it in every process. Nothing
changes for an engine that does not ask for the backend CUSTOM. docs/vllm.md says what to set and what
is refused.
"""


def register() -> None:
    """Tell vLLM where the backend is. May be called twice."""
    from vllm.platforms import current_platform # pylint: disable=import-outside-toplevel
    from vllm.v1.attention.backends.registry import ( # pylint: disable=import-outside-toplevel
        AttentionBackendEnum, register_backend)
    from vllm.model_executor.layers.attention import Attention # pylint: disable=import-outside-toplevel
    from . import asked, metrics, narrow # pylint: disable=import-outside-toplevel
    metrics.announce()
    register_backend(AttentionBackendEnum.CUSTOM, __name__ + ".backend.Backend")
    asked.watch(type(current_platform))
    narrow.follow(Attention)
    if current_platform.is_cpu():
        from .cpu import offer # pylint: disable=import-outside-toplevel
        offer(type(current_platform))
