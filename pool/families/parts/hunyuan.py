"""The architecture of HunyuanVideo, for the families that share it: the two namings of its files, sizes, LoRA names and
texts. Torch-free.

Files are published in the naming of its original code, and in one with the names of Flux. diffusers converts the
original one; LoRAs use either.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from modelpool.pool.families.detection.layouts.shape_sizes import Config
from modelpool.pool.families.parts.forward import Arguments, Shapes
from modelpool.pool.families.parts.lora_naming import TRANSFORMER, BaseNames, NameSource, Ranges
from modelpool.pool.families.parts.text_reading import Cleaning, MaskMode, Reading, fixed_length

#: positions: an eighth of a head is rotated by time, the rest by height and width. Source: 16, 56, 56 of 128
_TIME_SHARE = 8
#: a piece of a key in Flux's naming and in the original naming; a piece that contains another precedes it
_PIECES = (
    ("_attn.qkv.", "_attn_qkv."),
    ("_attn.proj.", "_attn_proj."),
    ("_attn.norm.query_norm.", "_attn_q_norm."),
    ("_attn.norm.key_norm.", "_attn_k_norm."),
    (".norm.query_norm.", ".q_norm."),
    (".norm.key_norm.", ".k_norm."),
    ("_mod.lin.", "_mod.linear."),
    (".modulation.lin.", ".modulation.linear."),
    ("img_mlp.0.", "img_mlp.fc1."),
    ("img_mlp.2.", "img_mlp.fc2."),
    ("txt_mlp.0.", "txt_mlp.fc1."),
    ("txt_mlp.2.", "txt_mlp.fc2."),
    ("time_in.in_layer.", "time_in.mlp.0."),
    ("time_in.out_layer.", "time_in.mlp.2."),
    ("guidance_in.in_layer.", "guidance_in.mlp.0."),
    ("guidance_in.out_layer.", "guidance_in.mlp.2."),
    ("t_embedder.in_layer.", "t_embedder.mlp.0."),
    ("t_embedder.out_layer.", "t_embedder.mlp.2."),
    ("c_embedder.in_layer.", "c_embedder.linear_1."),
    ("c_embedder.out_layer.", "c_embedder.linear_2."),
)
#: the same in the blocks of the text refiner; other modules use other names
_REFINER = "individual_token_refiner."
_REFINER_PIECES = (
    (".mlp.0.", ".mlp.fc1."),
    (".mlp.2.", ".mlp.fc2."),
)

#: the encoder of the words to render in newer models: published names, and names in diffusers
SECOND_TEXT = (
    ("byt5_in.layernorm.", "context_embedder_2.norm."),
    ("byt5_in.net.0.proj.", "context_embedder_2.linear_1."),
    ("byt5_in.net.2.", "context_embedder_2.linear_2."),
    ("byt5_in.fc3.", "context_embedder_2.linear_3."),
)


def original_key(key: str) -> str:
    """Return `key` in the original naming, whichever it is in."""
    renamed = original_base(key)
    return renamed.removesuffix("scale") + "weight" if renamed.endswith(("q_norm.scale", "k_norm.scale")) else renamed


def original_base(base: str) -> str:
    """Return the same as `original_key`, for a key without its last part."""
    return _renamed(base, (*_PIECES, *_REFINER_PIECES) if _REFINER in base else _PIECES)


def flux_base(base: str) -> str:
    """Return `base` in the naming of Flux, whichever it is in."""
    pieces = (*_PIECES, *_REFINER_PIECES) if _REFINER in base else _PIECES
    return _renamed(base, tuple((new, old) for old, new in pieces))


def _renamed(text: str, pieces: tuple[tuple[str, str], ...]) -> str:
    text += "."
    for old, new in pieces:
        text = text.replace(old, new)
    return text.removesuffix(".")


def _aliases(names_by_source: BaseNames) -> Iterator[tuple[NameSource, str, Ranges]]:
    """The keys in the naming that the file does not use."""
    for base, ranges in names_by_source[NameSource.CHECKPOINT].items():
        for name in (original_base(base), flux_base(base)):
            if name != base:
                yield NameSource.CHECKPOINT, name, ranges


#: LoRAs name the weights in either naming
HUNYUAN_LORA = replace(TRANSFORMER, extra_names=_aliases)


def block_arguments(found: Config, shapes: Shapes) -> Arguments:
    """Return the arguments for channels, blocks and positions that the classes of the video models have."""
    sizes: dict[str, Any] = dict(found)
    hidden = sizes["hidden_size"]
    head = shapes["transformer_blocks.0.attn.norm_q.weight"][0]
    in_time, *in_space = sizes["patch_size"]
    turned = head // _TIME_SHARE
    return {
        "in_channels": sizes["in_channels"],
        "out_channels": sizes["out_channels"],
        "num_attention_heads": hidden // head,
        "attention_head_dim": head,
        "num_layers": sizes["depth"],
        "num_refiner_layers": len(
            {key.split(".")[3] for key in shapes if key.startswith("context_embedder.token_refiner.refiner_blocks.")}
        ),
        "mlp_ratio": shapes["transformer_blocks.0.ff.net.0.proj.weight"][0] / hidden,
        "patch_size": in_space[0],
        "patch_size_t": in_time,
        "text_embed_dim": sizes["context_in_dim"],
        "rope_axes_dim": (turned, (head - turned) // 2, (head - turned) // 2),
    }


def qwen_reading(template: str, before: int, cleaning: Cleaning = Cleaning.NONE) -> Reading:
    """Qwen 2.5 VL as the newer Hunyuan models read it; `before` tokens of the template precede the prompt."""
    return fixed_length(
        "qwen25_7b", 1000 + before, 3584, template=template, cleaning=cleaning, dropped_tokens=before, is_masked=True,
        mask=MaskMode.REAL, layers_left_out=2, final_norm=False,
    )  # fmt: skip


def glyph_reading(tokens: int, cleaning: Cleaning) -> Reading:
    """Glyph-ByT5, which reads only the text to render."""
    return fixed_length(
        "byt5_small_glyph", tokens, 1472, cleaning=cleaning, is_optional=True, is_masked=True, mask=MaskMode.REAL
    )
