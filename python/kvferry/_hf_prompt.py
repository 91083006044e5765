# SPDX-License-Identifier: Apache-2.0
"""Queries of a first prompt that no pages serve, and what a mask says of a prompt.

Padding asks where logits of it are wanted, and so do layers that attend with keys of another layer: all
keys are at hand. Knows no model and no pages. Invariant: queries of padding before the first token stay zero.
"""
from typing import Optional

import torch

from ._hf_attention import WITHOUT, AttentionParams, no

_MASK_QUERIES = 1024 # looked at together
_PADDING_QUERIES = 64 # likewise


def causal_columns(mask: torch.Tensor, columns: int, queries: int) -> torch.Tensor:
    """[rows, columns] that are no padding, of a causal mask [rows, heads, queries, columns] of the newest."""
    seen = mask[:, 0, -1] if mask.dtype == torch.bool else mask[:, 0, -1] == 0
    is_causal, order = mask.shape[2:] == (queries, columns), torch.arange(columns, device=mask.device)
    for at in range(0, queries if is_causal else 0, _MASK_QUERIES):
        part = mask[:, :, at:at + _MASK_QUERIES]
        allowed = part if mask.dtype == torch.bool else part == 0
        wanted = order <= columns - queries + at + torch.arange(part.shape[2], device=mask.device)[:, None]
        is_causal = bool((allowed == (wanted & seen[:, None])[:, None]).all()) and (
            mask.dtype == torch.bool or bool((part[~allowed] <= torch.finfo(mask.dtype).min / 2).all()))
        if not is_causal:
            break
    if not is_causal:
        raise no("the mask is not causal (an image, a window, packed sequences, a bias, or a mask of 4 "
                 "dimensions that was passed)", "pass a mask of [rows, tokens] or none, or " + WITHOUT)
    return seen


def attend_from_padding(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, valid: torch.Tensor,
                        out: torch.Tensor, params: AttentionParams) -> None:
    """Queries of padding after the first token of a prompt: nobody needs them, but logits show them."""
    padding, keys = (~valid & (valid.cumsum(0) > 0)).nonzero()[:, 0], valid.nonzero()[:, 0]
    k, v = (x[keys].transpose(0, 1).float().repeat_interleave(q.shape[1] // k.shape[1], 0) for x in (k, v))
    for late in padding.split(_PADDING_QUERIES) if len(padding) else ():
        scores = q[late].transpose(0, 1).float() @ k.transpose(1, 2) * params.scale
        if params.cap is not None:
            scores = torch.tanh(scores / params.cap) * params.cap
        scores = scores.masked_fill(keys >= late[:, None], -torch.inf)
        if params.sinks is not None: # a score that has no token
            scores = torch.cat([scores, params.sinks.float()[:, None, None].expand(-1, len(late), 1)], 2)
        out[late] = (scores.softmax(2)[..., :len(keys)] @ v).transpose(0, 1).to(out.dtype)


def attend_to_prompt(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, valid: Optional[torch.Tensor],
                     scale: float, out: torch.Tensor) -> None:
    """The newest queries of a first prompt, over keys and values that are all at hand: out[queries, heads]."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    keys, first = k.shape[1], k.shape[1] - q.shape[1]
    order = torch.arange(keys, device=q.device)
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], 0) for x in (k, v))
    for at in range(first, keys, _MASK_QUERIES):
        end = min(at + _MASK_QUERIES, keys)
        mask = order[:end] <= order[at:end, None]
        if valid is not None:
            mask &= valid[:end]
        part = torch.nn.functional.scaled_dot_product_attention(
            q[None, :, at - first:end - first], k[None, :, :end], v[None, :, :end], attn_mask=mask,
            scale=scale)[0].transpose(0, 1)
        out[at - first:end - first] = part.masked_fill(~mask.any(1)[:, None, None], 0)
