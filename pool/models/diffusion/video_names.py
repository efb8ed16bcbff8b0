"""Convert published names to those of diffusers' video transformers, where diffusers' converters do not suffice.

Like diffusers' own, these functions only rename and split tensors, so that `pool.keymaps.key_map` can trace them. They
work for every size. Sources: the key lists of the published files (tests/golden/detection_keys.json.gz) and those of
the modules.
"""

from __future__ import annotations

from torch import Tensor

from modelpool.pool.models.diffusion.key_maps import layout_converter

#: Wan's position embedding for the states of first and last frame, which the converter ignores
_WAN_POSITIONS = ("img_emb.emb_pos", "condition_embedder.image_embedder.pos_embed")


def convert_wan(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert Wan 2.1 and 2.2. The convolution for a reference image (`ref_conv`) does not exist in diffusers'
    class."""
    theirs, ours = _WAN_POSITIONS
    converted = layout_converter("wan")({key: x for key, x in tensors.items() if not key.startswith("ref_conv.")})
    return {ours if key == theirs else key: tensor for key, tensor in converted.items()}
