"""Renames the keys of published ControlNets to diffusers' names, where diffusers has no converter.

`pool.weights.keymaps.key_map.discover` traces each function: it only renames and splits tensors. Keys are without
prefix. Source of the names: the files of XLabs-AI/flux-controlnet-collections and of
stabilityai/stable-diffusion-3.5-controlnets.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

#: key of the number in Stability's files that tells the kind of control image, and its value for edges
IMAGE_KIND, EDGES = "control_type", 1


@dataclass(frozen=True, slots=True)
class _Names:
    """The names of the tensors of a file layout: patterns with their replacements; and for fused query, key and value
    tensors, the names of the three."""

    renamed: tuple[tuple[str, str], ...]
    cut: Mapping[str, tuple[str, str, str]]

    def converted(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return `tensors` with diffusers' names."""
        found: dict[str, Tensor] = {}
        for key, tensor in tensors.items():
            whole = next((part for part in self.cut if part in key), None)
            if whole is None:
                found[self._named(key)] = tensor
                continue
            for name, part in zip(self.cut[whole], tensor.chunk(3, dim=0), strict=True):
                found[self._named(key.replace(whole, name))] = part
        return found

    def _named(self, key: str) -> str:
        for pattern, name in self.renamed:
            key = re.sub(pattern, name, key)
        return key


_XLABS = _Names(
    renamed=(
        (r"^pos_embed_input\.", "controlnet_x_embedder."),
        (r"^img_in\.", "x_embedder."),
        (r"^txt_in\.", "context_embedder."),
        (r"^time_in\.", "time_text_embed.timestep_embedder."),
        (r"^guidance_in\.", "time_text_embed.guidance_embedder."),
        (r"^vector_in\.", "time_text_embed.text_embedder."),
        (r"(_embedder\.)in_layer\.", r"\1linear_1."),
        (r"(_embedder\.)out_layer\.", r"\1linear_2."),
        (r"^double_blocks\.", "transformer_blocks."),
        (r"\.img_attn\.proj\.", ".attn.to_out.0."),
        (r"\.txt_attn\.proj\.", ".attn.to_add_out."),
        (r"\.img_attn\.norm\.query_norm\.scale$", ".attn.norm_q.weight"),
        (r"\.img_attn\.norm\.key_norm\.scale$", ".attn.norm_k.weight"),
        (r"\.txt_attn\.norm\.query_norm\.scale$", ".attn.norm_added_q.weight"),
        (r"\.txt_attn\.norm\.key_norm\.scale$", ".attn.norm_added_k.weight"),
        (r"\.img_mod\.lin\.", ".norm1.linear."),
        (r"\.txt_mod\.lin\.", ".norm1_context.linear."),
        (r"\.img_mlp\.0\.", ".ff.net.0.proj."),
        (r"\.img_mlp\.2\.", ".ff.net.2."),
        (r"\.txt_mlp\.0\.", ".ff_context.net.0.proj."),
        (r"\.txt_mlp\.2\.", ".ff_context.net.2."),
        (r"^input_hint_block\.0\.", "input_hint_block.conv_in."),
        (r"^input_hint_block\.14\.", "input_hint_block.conv_out."),
        # the numbers between its convolutions have no tensors
        *((rf"^input_hint_block\.{2 * place + 2}\.", f"input_hint_block.blocks.{place}.") for place in range(6)),
    ),
    cut={
        ".img_attn.qkv.": (".attn.to_q.", ".attn.to_k.", ".attn.to_v."),
        ".txt_attn.qkv.": (".attn.add_q_proj.", ".attn.add_k_proj.", ".attn.add_v_proj."),
    },
)
_SD35 = _Names(
    renamed=(
        (r"\.attn\.proj\.", ".attn.to_out.0."),
        (r"\.mlp\.fc1\.", ".ff.net.0.proj."),
        (r"\.mlp\.fc2\.", ".ff.net.2."),
        (r"\.adaLN_modulation\.1\.", ".norm1.linear."),
    ),
    cut={".attn.qkv.": (".attn.to_q.", ".attn.to_k.", ".attn.to_v.")},
)


def xlabs_to_diffusers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert a ControlNet of Flux with Black Forest Labs' names, which has double-stream blocks only."""
    return _XLABS.converted(tensors)


def sd35_to_diffusers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert a ControlNet of Stable Diffusion 3.5 large from its single-file layout."""
    return _SD35.converted({key: tensor for key, tensor in tensors.items() if key != IMAGE_KIND})
