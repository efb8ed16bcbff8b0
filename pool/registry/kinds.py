"""What a file of weights is for: told by its keys, else by the folder that it lies in. Pure; torch-free.

Knows the folder names that ComfyUI, A1111 and Forge use, and keys that give a file away. Which architecture a model has
is `pool.loading.detect_family`'s business.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from enum import Enum

from modelpool.pool.keymaps.adapter_keys import looks_like_lora


class Kind(Enum):
    """What a file of weights is for. The value is what people write and read."""

    CHECKPOINT = "checkpoint"
    DIFFUSION_MODEL = "diffusion model"
    LORA = "LoRA"
    VAE = "VAE"
    TEXT_ENCODER = "text encoder"
    CLIP_VISION = "vision encoder"
    CONTROLNET = "ControlNet"
    EMBEDDING = "embedding"
    UPSCALER = "upscaler"
    HYPERNETWORK = "hypernetwork"


#: what images can be made with: whole checkpoints, and diffusion models in a file of their own
MODELS = frozenset({Kind.CHECKPOINT, Kind.DIFFUSION_MODEL})
LORAS = frozenset({Kind.LORA})
#: what models are made of: equal parts of these are found by their content
WITH_COMPONENTS = frozenset({*MODELS, Kind.VAE, Kind.TEXT_ENCODER})

#: usual names of folders, in lower case with "_" for "-" and " "
FOLDER_KINDS: Mapping[str, Kind] = {
    # ComfyUI
    "checkpoints": Kind.CHECKPOINT,
    "diffusion_models": Kind.DIFFUSION_MODEL,
    "unet": Kind.DIFFUSION_MODEL,
    "loras": Kind.LORA,
    "vae": Kind.VAE,
    "vae_approx": Kind.VAE,
    "text_encoders": Kind.TEXT_ENCODER,
    "clip": Kind.TEXT_ENCODER,
    "clip_vision": Kind.CLIP_VISION,
    "controlnet": Kind.CONTROLNET,
    "t2i_adapter": Kind.CONTROLNET,
    "embeddings": Kind.EMBEDDING,
    "upscale_models": Kind.UPSCALER,
    "hypernetworks": Kind.HYPERNETWORK,
    # A1111 and Forge
    "stable_diffusion": Kind.CHECKPOINT,
    "lora": Kind.LORA,
    "lycoris": Kind.LORA,
    "text_encoder": Kind.TEXT_ENCODER,
    "esrgan": Kind.UPSCALER,
    "realesrgan": Kind.UPSCALER,
    "swinir": Kind.UPSCALER,
}

_CONTROLNET_BEGINNINGS = ("control_model.", "controlnet_", "control_all_x_embedder.", "input_hint_block.")
_DIFFUSION_PREFIXES = ("model.diffusion_model.", "model.model.", "net.")
#: what other components of a checkpoint in one file begin with
_BUNDLED_PREFIXES = (
    "first_stage_model.",
    "cond_stage_model.",
    "conditioner.",
    "text_encoders.",
    "vae.",
    "pretransform.",
)
#: beginnings of keys, and what has them. The first that fits counts, so what has the keys of another comes before it
_BEGINNINGS: tuple[tuple[str, Kind], ...] = (
    ("emb_params", Kind.EMBEDDING),
    ("string_to_param", Kind.EMBEDDING),
    ("first_stage_model.", Kind.VAE),
    ("decoder.conv_in.", Kind.VAE),
    ("decoder.up_blocks.", Kind.VAE),
    ("decoder.upsamples.", Kind.VAE),
    ("text_model.encoder.", Kind.TEXT_ENCODER),
    ("transformer.resblocks.", Kind.TEXT_ENCODER),
    ("encoder.block.0.layer.0.SelfAttention.", Kind.TEXT_ENCODER),
    ("model.embed_tokens.", Kind.TEXT_ENCODER),
    ("model.layers.0.self_attn.", Kind.TEXT_ENCODER),
    ("vision_model.encoder.", Kind.CLIP_VISION),
    ("conv_first.", Kind.UPSCALER),
    ("model.0.weight", Kind.UPSCALER),
)
#: an embedding of SDXL has these tensors alone
_EMBEDDING_PAIR = frozenset({"clip_l", "clip_g"})


def kind_of_keys(keys: Collection[str], is_diffusion_model: bool) -> Kind | None:
    """What a file with tensors called `keys` is for; None where they do not tell.

    `is_diffusion_model` says that the keys are those of a known diffusion model, under any prefix.
    """
    if looks_like_lora(keys):
        return Kind.LORA
    if _any_begins(keys, _CONTROLNET_BEGINNINGS):
        return Kind.CONTROLNET
    if _any_begins(keys, _DIFFUSION_PREFIXES):
        bundled = _any_begins(keys, _BUNDLED_PREFIXES)
        return Kind.CHECKPOINT if bundled else Kind.DIFFUSION_MODEL
    if is_diffusion_model:
        return Kind.DIFFUSION_MODEL
    if keys and _EMBEDDING_PAIR.issuperset(keys):
        return Kind.EMBEDDING
    return next((kind for beginning, kind in _BEGINNINGS if _any_begins(keys, (beginning,))), None)


def kind_of_folders(names: Iterable[str]) -> Kind | None:
    """What the first usual name among `names` says, the nearest folder first; None where none is one."""
    usual = (FOLDER_KINDS.get(name.lower().replace("-", "_").replace(" ", "_")) for name in names)
    return next((kind for kind in usual if kind is not None), None)


def _any_begins(keys: Iterable[str], beginnings: tuple[str, ...]) -> bool:
    return any(key.startswith(beginnings) for key in keys)
