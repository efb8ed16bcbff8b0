"""Determines what a file of weights is for, from its keys, else from its folder. Pure; torch-free.

Knows the folder names that ComfyUI, A1111 and Forge use, and identifying keys. `pool.models.loading.detect_family`
determines the architecture of a model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from modelpool.pool.families.detection.file_kinds import FileKind as FileKind
from modelpool.pool.families.detection.other_files import CONTROL_PREFIX, other_file

#: what can generate images: complete checkpoints, and diffusion models in a separate file
MODELS = frozenset({FileKind.CHECKPOINT, FileKind.DIFFUSION_MODEL})
LORAS = frozenset({FileKind.LORA})
CONTROLNETS = frozenset({FileKind.CONTROLNET})
UPSCALERS = frozenset({FileKind.UPSCALER})
EMBEDDINGS = frozenset({FileKind.EMBEDDING})
IMAGE_PROMPTS = frozenset({FileKind.IMAGE_PROMPT})
GLIGENS = frozenset({FileKind.GLIGEN})
VISION_ENCODERS = frozenset({FileKind.CLIP_VISION})
#: kinds with components: equal ones are found by content
WITH_COMPONENTS = frozenset({*MODELS, FileKind.VAE, FileKind.TEXT_ENCODER})

#: common names of folders, in lower case with "_" for "-" and " "
FOLDER_KINDS: Mapping[str, FileKind] = {
    # ComfyUI
    "checkpoints": FileKind.CHECKPOINT,
    "diffusion_models": FileKind.DIFFUSION_MODEL,
    "unet": FileKind.DIFFUSION_MODEL,
    "loras": FileKind.LORA,
    "vae": FileKind.VAE,
    "vae_approx": FileKind.VAE,
    "text_encoders": FileKind.TEXT_ENCODER,
    "clip": FileKind.TEXT_ENCODER,
    "clip_vision": FileKind.CLIP_VISION,
    "controlnet": FileKind.CONTROLNET,
    "t2i_adapter": FileKind.CONTROLNET,
    "ipadapter": FileKind.IMAGE_PROMPT,
    "ip_adapter": FileKind.IMAGE_PROMPT,
    "style_models": FileKind.IMAGE_PROMPT,
    "gligen": FileKind.GLIGEN,
    "embeddings": FileKind.EMBEDDING,
    "upscale_models": FileKind.UPSCALER,
    "latent_upscale_models": FileKind.UPSCALER,
    "hypernetworks": FileKind.HYPERNETWORK,
    # A1111 and Forge
    "stable_diffusion": FileKind.CHECKPOINT,
    "lora": FileKind.LORA,
    "lycoris": FileKind.LORA,
    "text_encoder": FileKind.TEXT_ENCODER,
    "esrgan": FileKind.UPSCALER,
    "realesrgan": FileKind.UPSCALER,
    "swinir": FileKind.UPSCALER,
}

_DIFFUSION_PREFIXES = ("model.diffusion_model.", "model.model.", "net.")
#: key prefixes of other components of a checkpoint in one file
_BUNDLED_PREFIXES = (
    "first_stage_model.",
    "cond_stage_model.",
    "conditioner.",
    "text_encoders.",
    "vae.",
    "pretransform.",
)
#: prefixes of keys, and the kind that has them. The first match counts, so a kind that includes the keys of another
#: precedes it
_PREFIX_KINDS: tuple[tuple[str, FileKind], ...] = (
    ("first_stage_model.", FileKind.VAE),
    ("taesd_decoder.", FileKind.VAE),
    ("decoder.layers.2.conv.", FileKind.VAE),
    ("3.conv.0.weight", FileKind.VAE),
    ("decoder.conv_in.", FileKind.VAE),
    ("decoder.up_blocks.", FileKind.VAE),
    ("decoder.upsamples.", FileKind.VAE),
    ("text_model.encoder.", FileKind.TEXT_ENCODER),
    ("transformer.resblocks.", FileKind.TEXT_ENCODER),
    ("encoder.block.0.layer.0.SelfAttention.", FileKind.TEXT_ENCODER),
    ("model.embed_tokens.", FileKind.TEXT_ENCODER),
    ("model.layers.0.self_attn.", FileKind.TEXT_ENCODER),
    ("vision_model.encoder.", FileKind.CLIP_VISION),
    ("visual.transformer.resblocks.", FileKind.CLIP_VISION),
)


def kind_of_keys(keys: Collection[str], is_diffusion_model: bool) -> FileKind | None:
    """Return the kind of a file with tensors named `keys`; None if they do not determine it.

    `is_diffusion_model`: the keys belong to a known diffusion model, under any prefix.
    """
    if (found := other_file(keys)) is not None:
        return found.kind
    if _any_starts_with(keys, (CONTROL_PREFIX,)):  # a checkpoint with a ControlNet in it
        return FileKind.CONTROLNET
    if _any_starts_with(keys, _DIFFUSION_PREFIXES):
        bundled = _any_starts_with(keys, _BUNDLED_PREFIXES)
        return FileKind.CHECKPOINT if bundled else FileKind.DIFFUSION_MODEL
    if is_diffusion_model:
        return FileKind.DIFFUSION_MODEL
    return next((kind for prefix, kind in _PREFIX_KINDS if _any_starts_with(keys, (prefix,))), None)


def kind_of_folders(names: Iterable[str]) -> FileKind | None:
    """Return the kind of the first known folder name among `names`, the nearest folder first; None without any."""
    known_kinds = (FOLDER_KINDS.get(name.lower().replace("-", "_").replace(" ", "_")) for name in names)
    return next((kind for kind in known_kinds if kind is not None), None)


def _any_starts_with(keys: Iterable[str], prefixes: tuple[str, ...]) -> bool:
    return any(key.startswith(prefixes) for key in keys)
