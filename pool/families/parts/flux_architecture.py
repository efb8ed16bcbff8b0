"""The architecture that Flux introduced, as functions for the families that share it: patches, sizes, names.
Torch-free to import.

Legend: B batch, C channels, H W cells of a latent, N patches, L tokens of text, D width of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from modelpool.pool.families.detection.layouts.shape_sizes import Config
from modelpool.pool.families.parts.arguments import PATCH
from modelpool.pool.families.parts.forward import Arguments, Convert, ModelKwargs, Shapes, config_of, sample_of
from modelpool.pool.families.parts.lora_naming import TRANSFORMER, BaseNames, NameSource, Ranges
from modelpool.pool.families.parts.patches import packed, patch_ids, unpacked

if TYPE_CHECKING:
    from torch import Tensor, nn

#: the norm that tells the width of a head
_HEAD = "transformer_blocks.0.attn.norm_q.weight"

#: modules of a double and of a single block in the names of the original code, and in diffusers' names; one with
#: several names is cut into equal parts
_DOUBLE: Mapping[str, tuple[str, ...]] = {
    "img_mod.lin": ("norm1.linear",),
    "txt_mod.lin": ("norm1_context.linear",),
    "img_attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "txt_attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "img_attn.norm.query_norm": ("attn.norm_q",),
    "img_attn.norm.key_norm": ("attn.norm_k",),
    "txt_attn.norm.query_norm": ("attn.norm_added_q",),
    "txt_attn.norm.key_norm": ("attn.norm_added_k",),
    "img_attn.proj": ("attn.to_out.0",),
    "txt_attn.proj": ("attn.to_add_out",),
    "img_mlp.0": ("ff.net.0.proj",),
    "img_mlp.2": ("ff.net.2",),
    "txt_mlp.0": ("ff_context.net.0.proj",),
    "txt_mlp.2": ("ff_context.net.2",),
    "img_mlp.down_proj": ("ff.net.2",),
    "txt_mlp.down_proj": ("ff_context.net.2",),
}
#: gated feed-forwards, with both halves as one tensor in diffusers: the gate is the second one
_GATED: Mapping[str, str] = {"img_mlp": "ff.net.0.proj", "txt_mlp": "ff_context.net.0.proj"}
_SINGLE: Mapping[str, str] = {
    "modulation.lin": "norm.linear",
    "norm.query_norm": "attn.norm_q",
    "norm.key_norm": "attn.norm_k",
    "linear2": "proj_out",
}
_OUTER: Mapping[str, str] = {
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "txt_norm": "context_embedder_norm",
    "final_layer.linear": "proj_out",
}
#: the layers of a feed-forward in diffusers' other transformers -> in its Flux 2
_FLUX_2_LAYERS = {"0.proj": "linear_in", "2": "linear_out"}
_LAST_MODULATION = "final_layer.adaLN_modulation.1"


def block_arguments(found: Config, shapes: Shapes) -> tuple[Arguments, int]:
    """Return the arguments for blocks and channels that the classes of all these families have, and the width of a
    head."""
    sizes: dict[str, Any] = dict(found)
    head = shapes[_HEAD][0]
    return {
        "in_channels": sizes["in_channels"] * PATCH,
        "num_layers": sizes["depth"],
        "num_single_layers": sizes["depth_single_blocks"],
        "attention_head_dim": head,
        "num_attention_heads": sizes["hidden_size"] // head,
        "joint_attention_dim": sizes["context_in_dim"],
    }, head


def call_with_text_positions(
    module: nn.Module,
    x_BCHW: Tensor,
    level_B: Tensor,
    kwargs: ModelKwargs,
    text_ids: Callable[[Tensor], Tensor],
    image_start: tuple[int, int, int] = (0, 0, 0),
) -> Tensor:
    """Call `module` with patches of 2x2 cells and the positions `text_ids` of the text, [L,3], given its states. The
    first patch is at `image_start`. Return the prediction as a latent."""
    context = kwargs["context"]
    out_BND = sample_of(
        module(
            hidden_states=packed(x_BCHW),
            timestep=level_B,
            encoder_hidden_states=context,
            txt_ids=text_ids(context),
            img_ids=patch_ids(x_BCHW, 2) + x_BCHW.new_tensor(image_start),
            return_dict=False,
        )
    )
    return unpacked(out_BND, *x_BCHW.shape[-2:])


def diagonal_ids(context_BLD: Tensor) -> Tensor:
    """Return 0, i, i for the i-th token of a text, [L,3]."""
    ids_L3 = context_BLD.new_zeros(context_BLD.shape[1], 3)
    ids_L3[:, 1:] = ids_L3.new_ones(context_BLD.shape[1]).cumsum(0)[:, None] - 1
    return ids_L3


def guidance(module: nn.Module, kwargs: ModelKwargs) -> Tensor | None:
    """Return the guidance scale, for modules that read it."""
    return kwargs["guidance"] if config_of(module).guidance_embeds else None


def _flux_fused(names_by_source: BaseNames) -> Iterator[tuple[NameSource, str, Ranges]]:
    """Names for the fused layers of single blocks: queries, keys and values of `linear1` as one, and the names of the
    same layers in Flux 2, which diffusers keeps fused. Feed-forwards have the names in Flux 2 as well."""
    names = names_by_source[NameSource.DIFFUSERS]
    for base, ranges in names.items():
        block, found, layer = base.rpartition(".net.")
        if found and layer in _FLUX_2_LAYERS:
            yield NameSource.DIFFUSERS, f"{block}.{_FLUX_2_LAYERS[layer]}", ranges
    for base, ranges in names_by_source[NameSource.CHECKPOINT].items():
        _, block, layer = (*base.split("."), "", "")[:3]
        if not base.startswith("single_blocks.") or layer not in ("linear1", "linear2"):
            continue
        attention = f"single_transformer_blocks.{block}.attn"
        if layer == "linear2":
            yield NameSource.DIFFUSERS, f"{attention}.to_out", ranges
        else:
            yield NameSource.DIFFUSERS, f"{attention}.to_qkv_mlp_proj", ranges
            rows = sum(part.rows for q in "qkv" for part in names.get(f"{attention}.to_{q}", ()))
            if rows:
                (whole,) = ranges
                shape = (rows, *whole.source_shape[1:])
                yield NameSource.CHECKPOINT, f"{base}_qkv", (replace(whole, source_shape=shape, rows=rows),)


#: names of weights in LoRA files
LORA = replace(TRANSFORMER, extra_names=_flux_fused)


def names_of_diffusers(time_embedding: str) -> Convert:
    """Return the converter from the original names to names in diffusers, for a class with an embedding of the noise
    level named `time_embedding`. It raises KeyError for a missing half of a gated feed-forward."""

    def convert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        import torch

        converted: dict[str, Tensor] = {}
        for key, tensor in tensors.items():
            module, _, end = key.rpartition(".")
            end = "weight" if end == "scale" else end
            kind, _, rest = module.partition(".")
            number, _, part = rest.partition(".")
            if kind == "double_blocks":
                block, last = f"transformer_blocks.{number}", part.rpartition(".")
                if last[2] == "up_proj":
                    gate = tensors[key.replace(".up_proj.", ".gate_proj.")]
                    converted[f"{block}.{_GATED[last[0]]}.{end}"] = torch.cat((tensor, gate))
                elif last[2] != "gate_proj":
                    names = _DOUBLE[part]
                    pieces = tensor.chunk(len(names)) if len(names) > 1 else (tensor,)
                    converted |= {f"{block}.{name}.{end}": piece for name, piece in zip(names, pieces, strict=True)}
            elif kind == "single_blocks" and part == "linear1":
                width = tensors["img_in.weight"].shape[0]
                pieces = tensor.split((width, width, width, tensor.shape[0] - 3 * width))
                names = ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")
                block = f"single_transformer_blocks.{number}"
                converted |= {f"{block}.{name}.{end}": piece for name, piece in zip(names, pieces, strict=True)}
            elif kind == "single_blocks":
                converted[f"single_transformer_blocks.{number}.{_SINGLE[part]}.{end}"] = tensor
            elif kind == "time_in":
                converted[f"{time_embedding}.linear_{1 if rest == 'in_layer' else 2}.{end}"] = tensor
            elif module == _LAST_MODULATION:
                shift, scale = tensor.chunk(2)
                converted[f"norm_out.linear.{end}"] = torch.cat((scale, shift))
            else:
                converted[f"{_OUTER[module]}.{end}"] = tensor
        return converted

    return convert
