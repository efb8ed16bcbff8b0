"""Patches the attention of a UNet: its inputs, the softmax product, and its output.

Knows one attention module; `pool.weights.patcher.blocks.unet_blocks` knows where it is in the model.

Shape legend: B batch, L tokens, D model width, H heads, E width of one head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from modelpool.pool.weights.options.run_context import extra_options
from modelpool.pool.weights.options.transformer_options import (
    BlockKey,
    Extra,
    PatchPoint,
    ReplacePoint,
    TransformerOptions,
)


@dataclass(frozen=True, slots=True)
class AttentionPoints:
    """The points where options apply to one kind of attention: before it, after it, instead of it."""

    patch: PatchPoint
    output: PatchPoint
    replace: ReplacePoint

    @property
    def patches(self) -> tuple[PatchPoint, PatchPoint]:
        """The points before and after it."""
        return self.patch, self.output


#: name of an attention -> its points
ATTENTION_POINTS: Mapping[str, AttentionPoints] = MappingProxyType(
    {
        "attn1": AttentionPoints(PatchPoint.ATTN1_PATCH, PatchPoint.ATTN1_OUTPUT_PATCH, ReplacePoint.ATTN1),
        "attn2": AttentionPoints(PatchPoint.ATTN2_PATCH, PatchPoint.ATTN2_OUTPUT_PATCH, ReplacePoint.ATTN2),
    }
)


@dataclass(frozen=True, slots=True)
class AttentionPlace:
    """The position of an attention in a UNet.

    name               "attn1" (of the image with itself) or "attn2" (with the text)
    block              ("input", 4)
    block_index        index of the transformer block in that block
    transformer_index  index of the transformer block in the model
    """

    name: str
    block: tuple[str, int]
    block_index: int
    transformer_index: int

    @property
    def keys(self) -> tuple[BlockKey, BlockKey]:
        """The keys of replacements for this position, the preferred one first."""
        return (*self.block, self.block_index), self.block


class PatchedAttention:
    """Replaces the forward of one attention."""

    def __init__(
        self,
        attention: nn.Module,
        place: AttentionPlace,
        options: TransformerOptions,
        shape_of_input: Callable[[], Any],
    ) -> None:
        plain: Any = attention
        points = ATTENTION_POINTS[place.name]
        self._attention, self._place, self._options = plain, place, options
        self._patches = options.patches.get(points.patch, ())
        self._output_patches = options.patches.get(points.output, ())
        self._additions = options.patches.get(PatchPoint.ATTN2_ADDITION, ()) if place.name == "attn2" else ()
        table = options.patches_replace.get(points.replace, {})
        self._replacement = next((table[key] for key in place.keys if key in table), None)
        self._shape_of_input = shape_of_input

    @property
    def does_something(self) -> bool:
        """Whether there is a patch or a replacement for this position."""
        return self.computes or bool(self._output_patches)

    @property
    def computes(self) -> bool:
        """Whether the attention's computation is replaced, not only its result changed."""
        return bool(self._patches) or self._replacement is not None or bool(self._additions)

    def __call__(
        self,
        original: Callable[..., Tensor],
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the attention's result [B, L, D] with the patches of this position."""
        extra = self._extra()
        if self.computes:
            out_BLD = self._compute(hidden_states, encoder_hidden_states, attention_mask, extra)
        else:
            out_BLD = original(hidden_states, encoder_hidden_states, attention_mask, **kwargs)
        for patch in self._output_patches:
            out_BLD = patch(out_BLD, extra)
        return out_BLD

    def _compute(self, x_BLD: Tensor, context_BLD: Tensor | None, mask: Tensor | None, extra: Extra) -> Tensor:
        a = self._attention
        q_BLD, k_BLD = x_BLD, x_BLD if context_BLD is None else context_BLD
        v_BLD = k_BLD
        for patch in self._patches:
            q_BLD, k_BLD, v_BLD = patch(q_BLD, k_BLD, v_BLD, extra)
            v_BLD = k_BLD if v_BLD is None else v_BLD
        q_BLD, k_BLD, v_BLD = a.to_q(q_BLD), a.to_k(k_BLD), a.to_v(v_BLD)
        if self._replacement is not None:
            out_BLD = self._replacement(q_BLD, k_BLD, v_BLD, extra)
        else:
            out_BLD = _attend(a, q_BLD, k_BLD, v_BLD, mask)
        for addition in self._additions:
            added_BLD = addition(q_BLD, extra)
            out_BLD = out_BLD if added_BLD is None else out_BLD + added_BLD
        result: Tensor = a.to_out[1](a.to_out[0](out_BLD))
        return result

    def _extra(self) -> Extra:
        place, a = self._place, self._attention
        return extra_options(
            self._options,
            block=place.block,
            block_index=place.block_index,
            transformer_index=place.transformer_index,
            n_heads=a.heads,
            dim_head=a.inner_dim // a.heads,
            original_shape=self._shape_of_input(),
        )


def _attend(attention: Any, q_BLD: Tensor, k_BLD: Tensor, v_BLD: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax attention over heads that are contiguous in D, as the unpatched module computes it."""
    heads = attention.heads
    if mask is not None:
        mask = attention.prepare_attention_mask(mask, k_BLD.shape[1], k_BLD.shape[0])
        assert mask is not None
        mask = mask.view(k_BLD.shape[0], heads, -1, mask.shape[-1])
    q, k, v = (t.view(t.shape[0], -1, heads, t.shape[-1] // heads).transpose(1, 2) for t in (q_BLD, k_BLD, v_BLD))
    out_BHLE = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out_BHLE.transpose(1, 2).reshape(len(q_BLD), -1, q_BLD.shape[-1]).to(q_BLD.dtype)
