"""Recognise files that are no diffusion model, VAE or text encoder, by their keys. Torch-free and pure.

Rows of `OTHER_FILES` have a key or key prefix, and the kind of file with such a key. The first match wins.
"""

from __future__ import annotations

from collections.abc import Collection

from modelpool.pool.keymaps.adapter_keys import looks_like_lora

OTHER_FILES: tuple[tuple[str, str], ...] = (
    ("control_model.", "a ControlNet"),
    ("controlnet_cond_embedding.", "a ControlNet in the naming of diffusers"),
    ("controlnet_blocks.", "a ControlNet for a transformer"),
    ("control_all_x_embedder.", "a ControlNet for Z-Image"),
    ("pos_embed_input.", "a ControlNet for a transformer"),
    ("image_proj.", "an IP-Adapter"),
    ("ip_adapter.", "an IP-Adapter"),
    ("ip_adapter_proj_model.", "an IP-Adapter"),
    ("pulid_encoder.", "a PuLID face adapter"),
    ("redux_up.", "a Redux style model"),
    ("position_net.", "a GLIGEN model"),
    ("adapter.body.", "a T2I-Adapter"),
    ("body.0.block1.", "a T2I-Adapter"),
    ("down_blocks.0.motion_modules.", "an AnimateDiff motion module"),
    ("emb_params", "a textual inversion embedding"),
    ("string_to_param", "a textual inversion embedding"),
    ("detector.backbone.vision_backbone.trunk.", "a SAM 3 segmentation model"),
    ("encoder.pan_blocks.", "an RT-DETR v4 detector"),
    ("backbone.embeddings.patch_embeddings.projection.", "a Depth Anything 3 model"),
    ("conv_first.weight", "an upscaler"),
    ("model.0.weight", "an upscaler"),
    ("body.0.weight", "an upscaler"),
)

#: files with one component of a model folder that the table of families does not know
FOLDER_PARTS: tuple[tuple[str, str], ...] = (
    ("down_blocks.0.resnets.0.norm1.weight", "a UNet in the naming of diffusers, one part of a model folder"),
    ("decoder.up_blocks.0.resnets.0.norm1.weight", "a VAE in the naming of diffusers, one part of a model folder"),
    ("transformer_blocks.0.attn.to_q.weight", "a transformer in the naming of diffusers, one part of a model folder"),
    ("decoder.conv_in.weight", "a VAE on its own"),
    ("first_stage_model.decoder.conv_in.weight", "a VAE on its own"),
    ("text_model.encoder.layers.0.", "a CLIP text encoder on its own"),
    ("encoder.block.0.layer.0.SelfAttention.", "a T5 text encoder on its own"),
)

#: the vectors of one embedding, one tensor for each text encoder
_EMBEDDING_KEYS = frozenset({"clip_l", "clip_g", "t5xxl"})


def other_file(keys: Collection[str]) -> str | None:
    """Return the kind of a file with `keys`, if this table knows it."""
    if keys and _EMBEDDING_KEYS.issuperset(keys):
        return "a textual inversion embedding"
    return _first(OTHER_FILES, keys)


def folder_part(keys: Collection[str]) -> str | None:
    """Return which component of a model folder a file with `keys` is."""
    return _first(FOLDER_PARTS, keys)


def is_lora(keys: Collection[str]) -> bool:
    """Return whether a file with `keys` is a LoRA or a related adapter."""
    return looks_like_lora(keys)


def _first(table: tuple[tuple[str, str], ...], keys: Collection[str]) -> str | None:
    return next((title for beginning, title in table if any(key.startswith(beginning) for key in keys)), None)
