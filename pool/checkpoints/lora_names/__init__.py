"""The names that LoRA files use for a model's weights. Torch-free at run time.

Knows the public naming conventions. Which weight a name means is not written here: it follows from the key map, which
has both spellings of every weight, the checkpoint's and the module's. Does not read tensors and does not compute
(`pool.patches`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pool.spec import Role

if TYPE_CHECKING:
    from pool.checkpoints.build import BuiltComponent
    from pool.checkpoints.key_map import KeyMap, RowRange

#: how the base names of each component begin, and whose convention that is. The first that fits counts.
STYLES: tuple[tuple[str, Role, str], ...] = (
    ("lora_unet_", Role.DIFFUSION_MODEL, "kohya"),
    ("lora_te", Role.TEXT_ENCODER, "kohya"),
    ("unet.", Role.DIFFUSION_MODEL, "diffusers"),
    ("transformer.", Role.DIFFUSION_MODEL, "diffusers"),
    ("text_encoder", Role.TEXT_ENCODER, "diffusers"),
    ("base_model.model.text_model.", Role.TEXT_ENCODER, "peft"),
    ("base_model.model.", Role.DIFFUSION_MODEL, "peft"),
    ("diffusion_model.", Role.DIFFUSION_MODEL, "checkpoint keys"),
    ("model.diffusion_model.", Role.DIFFUSION_MODEL, "checkpoint keys"),
    ("lycoris_", Role.DIFFUSION_MODEL, "lycoris"),
    ("text_model.", Role.TEXT_ENCODER, "bare keys"),
)
BARE_STYLE = "bare keys"


def style_of(base_name: str) -> tuple[Role, str]:
    """The component that `base_name` belongs to and the convention that it follows."""
    for beginning, role, style in STYLES:
        if base_name.startswith(beginning):
            return role, style
    return Role.DIFFUSION_MODEL, BARE_STYLE


def lora_key_map(built: BuiltComponent) -> dict[str, tuple[RowRange, ...]]:
    """Every base name that a LoRA may use for a weight of `built`, and the parameter rows that it means.

    A delta for a name has the shape `ranges[0].source_shape`; `RowRange.place` cuts it up. Biases are not in the map.
    """
    return lora_targets(built.role, built.key_map, built.family.prefixes[built.role])


def lora_targets(role: Role, key_map: KeyMap, prefix: str) -> dict[str, tuple[RowRange, ...]]:
    """As `lora_key_map`, for a component that is not built. `prefix` begins its keys in the checkpoint."""
    targets: dict[str, tuple[RowRange, ...]] = {}
    for key in key_map.sources:
        ranges = key_map.targets(key)
        if ranges and key.endswith(".weight"):
            for name in _checkpoint_names(role, key.removeprefix(prefix).removesuffix(".weight")):
                targets.setdefault(name, ranges)
    for key in key_map.origins:
        if key.endswith(".weight"):
            for name in _module_names(role, key.removesuffix(".weight")):
                targets.setdefault(name, (key_map.parameter_range(key),))
    return targets


def _checkpoint_names(role: Role, base: str) -> Iterator[str]:
    """Names for a weight that the checkpoint calls `base`."""
    if role is Role.DIFFUSION_MODEL:
        joined = base.replace(".", "_")
        yield from (f"lora_unet_{joined}", f"lycoris_{joined}")
        yield from (f"diffusion_model.{base}", f"model.diffusion_model.{base}")


def _module_names(role: Role, base: str) -> Iterator[str]:
    """Names for a weight that the module calls `base`."""
    joined = base.replace(".", "_")
    if role is Role.DIFFUSION_MODEL:
        yield from (f"lora_unet_{joined}", f"lycoris_{joined}")
        for name in (base, _as_attention_processor(base)):
            yield from (f"unet.{name}", f"base_model.model.{name}", name)
    elif role is Role.TEXT_ENCODER:
        # the module has no text_model level, the conventions are older and have it
        yield from (f"lora_te_text_model_{joined}", f"lora_te1_text_model_{joined}", f"text_encoder.{base}")
        for beginning in ("text_encoder.", "text_encoders.clip_l.transformer.", "base_model.model.", ""):
            yield f"{beginning}text_model.{base}"


def _as_attention_processor(base: str) -> str:
    """`base` as diffusers spelled it while LoRAs lived in attention processors."""
    return base.replace(".to_out.0", ".to_out").replace(".to_", ".processor.to_")
