"""Layouts of UNets: latent diffusion, in its own naming and in diffusers', and Stable Cascade. Torch-free.

Both namings yield the same fields, so one row of the table of families covers both.
"""

from __future__ import annotations

from modelpool.pool.families.detection.layouts.shape_sizes import Config, ShapeReader, Value
from modelpool.pool.families.detection.layouts.signature import Layout, diffusers, published

#: width of an attention head in Stable Cascade, at every published width
_CASCADE_HEAD = 64


def _ldm(reader: ShapeReader) -> Config:
    """Return the sizes of a UNet in latent diffusion's own naming."""
    width = reader.size("input_blocks.0.0.weight", 0, 4)
    levels: list[list[tuple[int, int]]] = [[]]
    for i in reader.numbers("input_blocks.")[1:]:
        if reader.has(f"input_blocks.{i}.0.op.weight"):
            levels.append([])
        else:
            channels = reader.size(f"input_blocks.{i}.0.out_layers.3.weight", 0, 4)
            levels[-1].append((channels, len(reader.numbers(f"input_blocks.{i}.1.transformer_blocks."))))
    out_depths = [
        len(reader.numbers(f"output_blocks.{i}.1.transformer_blocks."))
        for i in reversed(reader.numbers("output_blocks."))
    ]
    attentions = [f"input_blocks.{i}.1." for i in reader.numbers("input_blocks.")] + ["middle_block.1."]
    label = "label_emb.0.0.weight"
    return {
        "in_channels": reader.size("input_blocks.0.0.weight", 1, 4),
        "out_channels": reader.size("out.2.weight", 0, 4) if reader.has("out.2.weight") else None,
        "model_channels": width,
        **_ladder(levels, width),
        "transformer_depth_output": tuple(out_depths),
        "transformer_depth_middle": _middle(
            len(reader.numbers("middle_block.1.transformer_blocks.")), bool(reader.numbers("middle_block."))
        ),
        **_attention(reader, [(stem + "proj_in.weight", stem + "transformer_blocks.0.") for stem in attentions]),
        "adm_in_channels": reader.size(label, 1) if reader.has(label) else None,
        "use_temporal_resblock": reader.has("input_blocks.1.0.time_stack.in_layers.0.weight"),
        "use_temporal_attention": any(reader.has(f"{stem}time_stack.0.norm_in.weight") for stem in attentions),
    }


def _diffusers(reader: ShapeReader) -> Config:
    """Return the sizes of a UNet in diffusers' naming."""
    width = reader.size("conv_in.weight", 0, 4)
    downs = reader.numbers("down_blocks.")
    levels = [
        [
            (
                _resnet_channels(reader, f"down_blocks.{b}.resnets.{i}."),
                len(reader.numbers(f"down_blocks.{b}.attentions.{i}.transformer_blocks.")),
            )
            for i in reader.numbers(f"down_blocks.{b}.resnets.")
        ]
        for b in downs
    ]
    out_depths = [
        len(reader.numbers(f"up_blocks.{b}.attentions.{i}.transformer_blocks."))
        for b in reversed(reader.numbers("up_blocks."))
        for i in reversed(reader.numbers(f"up_blocks.{b}.resnets."))
    ]
    attentions = [
        f"down_blocks.{b}.attentions.{i}." for b in downs for i in reader.numbers(f"down_blocks.{b}.attentions.")
    ] + ["mid_block.attentions.0."]
    labels = ("add_embedding.linear_1.weight", "class_embedding.linear_1.weight")
    return {
        "in_channels": reader.size("conv_in.weight", 1, 4),
        "out_channels": reader.size("conv_out.weight", 0, 4) if reader.has("conv_out.weight") else None,
        "model_channels": width,
        **_ladder(levels, width),
        "transformer_depth_output": tuple(out_depths),
        "transformer_depth_middle": _middle(
            len(reader.numbers("mid_block.attentions.0.transformer_blocks.")),
            bool(reader.numbers("mid_block.resnets.")),
        ),
        **_attention(reader, [(stem + "proj_in.weight", stem + "transformer_blocks.0.") for stem in attentions]),
        "adm_in_channels": next((reader.size(label, 1) for label in labels if reader.has(label)), None),
        "use_temporal_resblock": reader.has("down_blocks.0.resnets.0.temporal_res_block.norm1.weight"),
        "use_temporal_attention": any(
            reader.has(f"{stem}temporal_transformer_blocks.0.norm_in.weight") for stem in attentions
        ),
    }


def _resnet_channels(reader: ShapeReader, stem: str) -> int:
    for part in ("", "spatial_res_block."):
        if reader.has(f"{stem}{part}conv1.weight"):
            return reader.size(f"{stem}{part}conv1.weight", 0, 4)
    return reader.size(f"{stem}conv1.weight", 0, 4)


def _ladder(levels: list[list[tuple[int, int]]], width: int) -> dict[str, Value]:
    """Return the fields that follow from the (channels, transformer blocks) of each residual block of the down path."""
    own = [level for level in levels if level]
    return {
        "num_res_blocks": tuple(len(level) for level in own),
        "transformer_depth": tuple(depth for level in own for _, depth in level),
        "channel_mult": tuple(_times(level[-1][0], width) for level in own),
    }


def _times(channels: int, width: int) -> int | float:
    """Return `channels / width`; an integer for every published model."""
    return channels // width if width and channels % width == 0 else channels / max(1, width)


def _middle(depth: int, there: bool) -> int:
    """Return the transformer blocks in the middle block; -1 for a middle block without any, -2 without a middle
    block."""
    if depth:
        return depth
    return -1 if there else -2


def _attention(reader: ShapeReader, places: list[tuple[str, str]]) -> dict[str, Value]:
    """Return the fields that follow from the first existing transformer."""
    for proj_in, block in places:
        if reader.has(proj_in):
            to_k = f"{block}attn2.to_k.weight"
            return {
                "use_linear_in_transformer": reader.rank(proj_in) == 2,
                "context_dim": reader.size(to_k, 1) if reader.has(to_k) else None,
            }
    return {"use_linear_in_transformer": False, "context_dim": None}


def _cascade(reader: ShapeReader) -> Config:
    """Return the sizes of a stage of Stable Cascade: C (prior) reads texts, B (decoder) the output of C."""
    is_c = reader.has("clip_txt_mapper.weight")
    if not is_c and not reader.has("clip_txt_pooled_mapper.weight"):
        # name of stage B's weight in the published naming
        reader.shape("clip_mapper.weight")
    widths: list[int] = []
    head_counts: list[int] = []
    blocks: list[tuple[int, ...]] = []
    for path in ("down_blocks.", "up_blocks."):
        stems = [f"{path}{level}." for level in reader.numbers(path)]
        blocks.append(
            tuple(sum(reader.has(f"{stem}{i}.depthwise.weight") for i in reader.numbers(stem)) for stem in stems)
        )
        if path == "down_blocks.":
            widths = [reader.size(f"{stem}0.depthwise.weight", 0, 4) for stem in stems]
            attends = [any(reader.has(f"{stem}{i}.kv_mapper.1.weight") for i in reader.numbers(stem)) for stem in stems]
            head_counts = [width // _CASCADE_HEAD if used else -1 for width, used in zip(widths, attends, strict=True)]
    repeats = {
        path: tuple(1 + len(reader.numbers(f"{path}_repeat_mappers.{i}.")) for i in range(len(widths)))
        for path in ("down", "up")
    }
    text: dict[str, Value] = {"c_cond": reader.size("clip_txt_mapper.weight", 0)} if is_c else {}
    return {
        "stable_cascade_stage": "c" if is_c else "b",
        **text,
        "c_hidden": tuple(widths),
        "nhead": tuple(head_counts),
        "blocks": tuple(blocks),
        "block_repeat": (repeats["down"], repeats["up"]),
    }


LDM_UNET = Layout(
    "a UNet of latent diffusion",
    (
        published("input_blocks.0.0.weight", measure=_ldm),
        diffusers(
            "conv_in.weight",
            "down_blocks.0.resnets.0.norm1.weight",
            "down_blocks.0.resnets.0.conv1.weight",
            "time_embedding.linear_1.weight",
            measure=_diffusers,
            # a ControlNet, AnimateDiff's motion, and video UNets older than Stable Video Diffusion
            without=(
                "controlnet_cond_embedding.conv_in.weight",
                "down_blocks.0.motion_modules.0.norm.weight",
                "transformer_in.norm.weight",
            ),
        ),
        # video: each residual block is a spatial and a temporal one
        diffusers("conv_in.weight", "down_blocks.0.resnets.0.spatial_res_block.norm1.weight", measure=_diffusers),
    ),
)

#: both namings have the same first keys: diffusers has other names for the queries of stage C and the text of stage
#: B
CASCADE = Layout(
    "Stable Cascade",
    (
        diffusers("clf.1.weight", "embedding.1.weight", "down_blocks.0.2.attention.to_q.weight", measure=_cascade),
        diffusers(
            "clf.1.weight",
            "embedding.1.weight",
            "clip_txt_pooled_mapper.weight",
            without=("clip_txt_mapper.weight",),
            measure=_cascade,
        ),
        published("clf.1.weight", "embedding.1.weight", measure=_cascade),
    ),
)
