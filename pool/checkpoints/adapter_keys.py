"""The ends of a LoRA file's keys: which tensor of which kind of adapter each is. Torch-free.

Knows the public conventions of kohya, LyCORIS, diffusers and PEFT. Which weight a base name means is the business of
`pool.checkpoints.lora_names`; what the tensors compute is that of `pool.patches`.
"""

from __future__ import annotations

from collections.abc import Iterable

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
