# SPDX-License-Identifier: Apache-2.0
"""CUSTOM on vLLM's platform of CPUs, which by itself gives every layer its own attention.

Knows no layer. Invariant: whoever does not ask for CUSTOM gets what the platform gives without this
plug-in.
"""
from typing import Any, Optional

from .._errors import Unsupported
from .upstream import CUSTOM


def offer(platform: Any) -> None:
    """Let the platform's class give CUSTOM to layers that ask for it. May be called twice."""
    theirs = platform.get_attn_backend_cls
    if getattr(theirs, "gives_custom", False):
        return

    def get_attn_backend_cls(_: Any, selected_backend: Any, attn_selector_config: Any,
                             num_heads: Optional[int] = None) -> str:
        if selected_backend is not CUSTOM:
            return theirs(selected_backend, attn_selector_config, num_heads)
        reasons = CUSTOM.get_class().validate_configuration(
            device_capability=None, **attn_selector_config._asdict())
        if reasons:
            raise Unsupported(". ".join(reasons))
        return CUSTOM.get_path()

    get_attn_backend_cls.gives_custom = True # type: ignore[attr-defined]
    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
