"""Names of the blocks of a UNet for models that are merged with a share for each block. Torch-free.

They equal the names of `blocks` for LoRAs, with the parts of the middle block apart (MID00, MID01, MID02), and with
names for the weights outside of blocks: TIME and LABEL, the embeddings of the noise level and of labels, and HEAD, the
last normalization and convolution.
"""

from __future__ import annotations

from collections.abc import Mapping

from modelpool.pool.models.lora_names.blocks import MID, OTHER, BlockFactors, ModelBlocks
from modelpool.pool.values.core.errors import unusable_field

TIME, LABEL, HEAD = "TIME", "LABEL", "HEAD"
#: parts of the middle block, in the order of the original layout
_MIDDLE = ("mid_block.resnets.0.", "mid_block.attentions.0.", "mid_block.resnets.1.")
_OUTSIDE = (
    ("time_embedding.", TIME),
    ("add_embedding.", LABEL),
    ("class_embedding.", LABEL),
    ("conv_norm_out.", HEAD),
    ("conv_out.", HEAD),
)
#: groups of all blocks of a UNet, and the most numbers of each
_GROUPS: Mapping[str, int] = {"IN": 12, "MID": 3, "OUT": 12, TIME: 0, LABEL: 0, HEAD: 0, OTHER: 0}


def check_merge(factors: BlockFactors, blocks: ModelBlocks, model: str) -> None:
    """Raise UnusableField for factors by block of a model that is no UNet, and for blocks that no UNet has."""
    for name, _ in factors:
        group = name.rstrip("0123456789")
        number = name.removeprefix(group)
        if not blocks.layers:
            raise unusable_field("loras.blocks", name, f"none: {model!r} is no UNet, and is merged as a whole")
        if group not in _GROUPS or (number and int(number) >= _GROUPS[group]):
            raise unusable_field("loras.blocks", name, f"{', '.join(_GROUPS)}, or one with a number, such as IN04")


def merge_factor(factors: Mapping[str, float], blocks: ModelBlocks, parameter: str) -> float:
    """Return the factor of the share of another model's weights for a parameter: its block's, else the group's, else
    1."""
    block = _block_of(blocks, parameter)
    return factors.get(block, factors.get(block.rstrip("0123456789"), 1.0))


def _block_of(blocks: ModelBlocks, parameter: str) -> str:
    block = blocks.block_of(parameter)
    if block == MID:
        return next((f"MID{place:02}" for place, part in enumerate(_MIDDLE) if parameter.startswith(part)), MID)
    return next((name for start, name in _OUTSIDE if parameter.startswith(start)), block)
