"""Determines the convention of a base name of a LoRA file from its prefix. Torch-free.

Knows no model: the maps in this package determine whether a model has a weight of that name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from modelpool.pool.values.specs.spec import Role

#: prefix of base names, their component, and their convention. The longest match counts
STYLES: tuple[tuple[str, Role, str], ...] = (
    ("lora_unet_", Role.DIFFUSION_MODEL, "kohya"),
    ("oft_unet_", Role.DIFFUSION_MODEL, "kohya"),
    ("lora_prior_unet_", Role.DIFFUSION_MODEL, "kohya"),
    ("lora_te", Role.TEXT_ENCODER, "kohya"),
    ("lora_prior_te_", Role.TEXT_ENCODER, "kohya"),
    ("lora_transformer_", Role.DIFFUSION_MODEL, "onetrainer"),
    ("lycoris_", Role.DIFFUSION_MODEL, "lycoris"),
    ("unet.", Role.DIFFUSION_MODEL, "diffusers"),
    ("transformer.", Role.DIFFUSION_MODEL, "diffusers"),
    ("transformer_2.", Role.DIFFUSION_MODEL_2, "diffusers"),
    ("low_noise_model.", Role.DIFFUSION_MODEL_2, "checkpoint keys"),
    ("high_noise_model.", Role.DIFFUSION_MODEL, "checkpoint keys"),
    ("text_encoder.", Role.TEXT_ENCODER, "diffusers"),
    ("text_encoder_", Role.TEXT_ENCODER, "diffusers"),
    ("base_model.model.", Role.DIFFUSION_MODEL, "peft"),
    ("unet.base_model.model.", Role.DIFFUSION_MODEL, "peft"),
    ("base_model.model.text_model.", Role.TEXT_ENCODER, "peft"),
    ("diffusion_model.", Role.DIFFUSION_MODEL, "checkpoint keys"),
    ("model.diffusion_model.", Role.DIFFUSION_MODEL, "checkpoint keys"),
    *((prefix, Role.TEXT_ENCODER, "encoder names") for prefix in ("clip_l.", "clip_g.", "t5xxl.")),
    *((prefix, Role.TEXT_ENCODER, "encoder names") for prefix in ("te.", "te1.", "te2.", "te3.")),
    ("text_encoders.", Role.TEXT_ENCODER, "checkpoint keys"),
    ("text_model.", Role.TEXT_ENCODER, "bare keys"),
)
BARE_STYLE = "bare keys"


def style_of(base_name: str) -> tuple[Role, str]:
    """Return the component that `base_name` belongs to and its convention."""
    fitting = [style for style in STYLES if base_name.startswith(style[0])]
    if not fitting:
        return Role.DIFFUSION_MODEL, BARE_STYLE
    _, role, style = max(fitting, key=lambda fits: len(fits[0]))
    return role, style


def styles_of(base_names: Iterable[str]) -> dict[str, int]:
    """Return how many of `base_names` follow each convention, most used first."""
    return dict(Counter(style_of(name)[1] for name in base_names).most_common())
