# SPDX-License-Identifier: Apache-2.0
"""What vLLM's platform of CPUs finds by the names of its own backends, whatever backend was asked for.

An engine with `--attention-backend CUSTOM` gets kvferry's, every other one what the name says. Knows
no layer. Invariant: without CUSTOM nothing differs from vLLM without this plug-in.
"""
from typing import Any

from vllm.config import get_current_vllm_config_or_none
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from .refusals import refuse


def __getattr__(name: str) -> Any:
    if name not in AttentionBackendEnum.__members__:
        raise AttributeError(name)
    config = get_current_vllm_config_or_none()
    if config is None or config.attention_config.backend is not AttentionBackendEnum.CUSTOM:
        return resolve_obj_by_qualname(AttentionBackendEnum[name].value)
    if name != "CPU_ATTN":
        refuse("multi-head latent attention (MLA)", "take another model")
    from .backend import Backend # pylint: disable=import-outside-toplevel
    return Backend
