# SPDX-License-Identifier: Apache-2.0
"""Attention of a prompt's first tokens by torch: FlashAttention, cuDNN or what else it has, and no kernel of kvferry.

Tokens without context attend to each other alone, so all their keys and values are at hand, and any causal
attention serves. Its bits depend on where chunks end and on what the library chooses, so it is a setting. Knows no
model, no engine and no pages.
"""
from typing import Callable, List, Optional

import torch


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    """Causal attention of the tokens of one sequence, [tokens, heads, elements], without context."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out.copy_(torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])[0].transpose(0, 1))


def attend_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: List[int], begins: torch.Tensor,
                scale: float, out: torch.Tensor, varlen: Optional[Callable] = None) -> None:
    """The same of several sequences side by side.

    starts  first token of each, and the end of the last
    begins  int32 on the device: these numbers less the first
    varlen  FlashAttention's function of that name, for heads and a type that it takes; None: torch, one by one
    """
    if varlen is None:
        for first, end in zip(starts, starts[1:]):
            attend(q[first:end], k[first:end], v[first:end], scale, out[first:end])
        return
    tokens = slice(starts[0], starts[-1])
    longest = max(end - first for first, end in zip(starts, starts[1:]))
    out[tokens] = varlen(q[tokens], k[tokens], v[tokens], max_seqlen_q=longest, cu_seqlens_q=begins,
                         max_seqlen_k=longest, cu_seqlens_k=begins, softmax_scale=scale, causal=True)
