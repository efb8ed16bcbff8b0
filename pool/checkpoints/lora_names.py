"""The names that LoRA files use for a model's weights, and what each of their tensors is. Torch-free at run time.

Knows the public naming conventions. Which weight a name means is not written here: it follows from the key map, which
has both spellings of every weight, the checkpoint's and the module's. Does not read tensors and does not compute
(`pool.patches`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from pool.spec import Role

if TYPE_CHECKING:
    from pool.checkpoints.build import BuiltComponent
    from pool.checkpoints.key_map import KeyMap, RowRange

#: ends of a LoRA file's keys and the part that each is. The longer of two that fit is meant.
PARTS: tuple[tuple[str, str], ...] = (
    (".lora_up.weight", "up"),
    (".lora_down.weight", "down"),
    (".lora_mid.weight", "mid"),
    (".lora_B.weight", "up"),
    (".lora_A.weight", "down"),
    (".lora_B.default.weight", "up"),
    (".lora_A.default.weight", "down"),
    (".lora_B", "up"),
    (".lora_A", "down"),
    (".lora.up.weight", "up"),
    (".lora.down.weight", "down"),
    ("_lora.up.weight", "up"),
    ("_lora.down.weight", "down"),
    (".lora_linear_layer.up.weight", "up"),
    (".lora_linear_layer.down.weight", "down"),
    (".alpha", "alpha"),
    (".dora_scale", "dora_scale"),
    (".lora_magnitude_vector.weight", "dora_scale"),
    (".lora_magnitude_vector", "dora_scale"),
    (".diff", "diff"),
    (".diff_b", "diff_b"),
    (".hada_w1_a", "hada_w1_a"),
    (".hada_w1_b", "hada_w1_b"),
    (".hada_w2_a", "hada_w2_a"),
    (".hada_w2_b", "hada_w2_b"),
    (".hada_t1", "hada_t1"),
    (".hada_t2", "hada_t2"),
    (".lokr_w1", "lokr_w1"),
    (".lokr_w1_a", "lokr_w1_a"),
    (".lokr_w1_b", "lokr_w1_b"),
    (".lokr_w2", "lokr_w2"),
    (".lokr_w2_a", "lokr_w2_a"),
    (".lokr_w2_b", "lokr_w2_b"),
    (".lokr_t2", "lokr_t2"),
    (".oft_blocks", "oft_blocks"),
)

#: parts that only a LoRA, or one of its relatives, has
_TELLING_PARTS = frozenset({"up", "down", "hada_w1_a", "lokr_w1", "lokr_w1_a", "oft_blocks", "diff"})

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


def split_key(key: str) -> tuple[str, str] | None:
    """The base name and the part of one key of a LoRA file; None for a key that is no part of a LoRA.

    `split_key("lora_unet_mid_block_resnets_0_conv1.lora_up.weight") == ("lora_unet_mid_block_resnets_0_conv1", "up")`
    """
    fitting = [(len(end), end, part) for end, part in PARTS if key.endswith(end) and len(key) > len(end)]
    if not fitting:
        return None
    length, _, part = max(fitting)
    return key[:-length], part


def looks_like_lora(keys: Iterable[str]) -> bool:
    """Whether a file with `keys` is a LoRA or one of its relatives."""
    return any((split := split_key(key)) is not None and split[1] in _TELLING_PARTS for key in keys)


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
