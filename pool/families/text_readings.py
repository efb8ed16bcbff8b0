"""Readings of a prompt by each family's text encoders: templates, lengths, layers, masks. Torch-free.

One row per set of text encoders, as in `pool.detection.text_encoders.MEMBERS`, with the readings in the order of its
members; families that read a set differently have a row of their own. Numbers and templates are the defaults of the
pipelines of diffusers 0.42 and of the tokenizers published with them; comments state where ComfyUI differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from modelpool.pool.families.modules import defined_families
from modelpool.pool.families.parts.text_reading import OPEN_CLIP_PAD, SDXL_CLIP_G, Pooled, Reading

#: layers of the published CLIP-H; files for transformers leave out the last one
_CLIP_H_DEPTH = 24


#: by set, or by family if a family reads the encoders of a set differently
READINGS: Mapping[str, tuple[Reading, ...]] = MappingProxyType(
    {
        **{family.readings_name: family.texts for family in defined_families()},
        "sd1": (Reading("clip_l", 768),),
        "sd2": (Reading("clip_h", 1024, clip_pad_id=OPEN_CLIP_PAD, layers_left_out=1, depth=_CLIP_H_DEPTH),),
        "sdxl": (Reading("clip_l", 768, layers_left_out=1, final_norm=False), SDXL_CLIP_G),
        "sdxl_refiner": (SDXL_CLIP_G,),
        # as `StableCascadePriorPipeline`: the last state without its norm, and the encoder gets the mask
        "stable_cascade": (Reading("clip_g", 1280, is_masked=True, final_norm=False, pooled=Pooled.PROJECTED),),
    }
)

#: the row of `READINGS` of each family whose row has another name
_ROWS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "sd1": ("sd1_ip2p", "sd1_inpaint"),
        "sd2": ("sd2_inpaint", "sd2_depth", "sd_x4", "sd21_unclip_l", "sd21_unclip_h", "lotus_d"),
        "sdxl": (
            "sdxl_inpaint", "sdxl_ip2p", "cosxl_edit", "ssd_1b", "vega", "koala_700m", "koala_1b", "playground_25",
        ),
        "stable_cascade": ("cascade_c", "cascade_c_lite", "cascade_b", "cascade_b_lite"),
        "chroma": ("chroma_radiance",),
        "wan": ("wan21_camera", "wan22_camera", "wan22_animate"),
    }
)  # fmt: skip
ROW_OF: Mapping[str, str] = MappingProxyType(
    {name: name for name in READINGS}
    | {family: row for row, families in _ROWS.items() for family in families}
    | {family.name: family.readings_name for family in defined_families()}
)


#: encoders that the models of a row can run without, but not all of them at once
OPTIONAL_ENCODERS: Mapping[str, frozenset[str]] = MappingProxyType(
    {family.readings_name: family.optional_encoders for family in defined_families() if family.optional_encoders}
)


def readings_of(family: str) -> tuple[Reading, ...] | None:
    """Return how the text encoders of `family` (or of a set of text encoders) are read, in their order.

    None if no reading is known.
    """
    row = ROW_OF.get(family)
    return None if row is None else READINGS[row]
