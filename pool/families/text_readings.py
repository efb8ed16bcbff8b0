"""Readings of a prompt by each family's text encoders: templates, lengths, layers, masks. Torch-free.

One row per set of text encoders, as in `pool.detection.text_encoders.MEMBERS`, with the readings in the order of its
members; families that read a set differently have a row of their own. Numbers and templates are the defaults of the
pipelines of diffusers 0.42 and of the tokenizers published with them; comments state where ComfyUI differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from modelpool.pool.families.modules import defined_families
from modelpool.pool.families.parts.hunyuan import glyph_reading, qwen_reading
from modelpool.pool.families.parts.text_reading import (
    OPEN_CLIP_PAD,
    SDXL_CLIP_G,
    Cleaning,
    MaskMode,
    Padding,
    Pooled,
    Reading,
)

#: layers of the published CLIP-H; files for transformers leave out the last one
_CLIP_H_DEPTH = 24

_CLIP_L = Reading("clip_l", width=768)
_SDXL_L = Reading("clip_l", width=768, layers_left_out=1, final_norm=False)


def _t5(encoder: str, tokens: int, width: int = 4096, **more: Any) -> Reading:
    """Return the reading of a T5 with a fixed text length."""
    return Reading(encoder, width=width, least_tokens=tokens, most_tokens=tokens, **more)


_HUNYUAN_VIDEO_TEMPLATE = (
    "<|start_header_id|>system<|end_header_id|>\n\nDescribe the video by detailing the following aspects: "
    "1. The main content and theme of the video."
    "2. The color, shape, size, texture, quantity, text, and spatial relationships of the objects."
    "3. Actions, events, behaviors temporal relationships, physical movement changes of the objects."
    "4. background environment, light, style and atmosphere."
    "5. camera angles, movements, and transitions used in the video:<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
)
#: the same, with an image
_HUNYUAN_VIDEO_I2V_TEMPLATE = (
    "<|start_header_id|>system<|end_header_id|>\n\n<image>\nDescribe the video by detailing the following aspects "
    "according to the reference image: "
    "1. The main content and theme of the video."
    "2. The color, shape, size, texture, quantity, text, and spatial relationships of the objects."
    "3. Actions, events, behaviors temporal relationships, physical movement changes of the objects."
    "4. background environment, light, style and atmosphere."
    "5. camera angles, movements, and transitions used in the video:<|eot_id|>\n\n"
    "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
)
_HUNYUAN_VIDEO_I2V_BEFORE = 103
#: tokens of that template before the prompt, including the begin token
_HUNYUAN_VIDEO_BEFORE = 95
#: the spaces are part of the published template
_HUNYUAN_VIDEO_15_TEMPLATE = (
    "<|im_start|>system\nYou are a helpful assistant. Describe the video by detailing the following aspects:"
    "         1. The main content and theme of the video."
    "         2. The color, shape, size, texture, quantity, text, and spatial relationships of the objects."
    "         3. Actions, events, behaviors temporal relationships, physical movement changes of the objects."
    "         4. background environment, light, style and atmosphere."
    "         5. camera angles, movements, and transitions used in the video.<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
_HUNYUAN_VIDEO_15_BEFORE = 108


#: by set, or by family if a family reads the encoders of a set differently
READINGS: Mapping[str, tuple[Reading, ...]] = MappingProxyType(
    {
        **{family.readings_name: family.texts for family in defined_families()},
        "sd1": (_CLIP_L,),
        "sd2": (Reading("clip_h", 1024, clip_pad_id=OPEN_CLIP_PAD, layers_left_out=1, depth=_CLIP_H_DEPTH),),
        "sdxl": (_SDXL_L, SDXL_CLIP_G),
        "sdxl_refiner": (SDXL_CLIP_G,),
        # # as `StableCascadePriorPipeline`: the last state without its norm, and the encoder gets the mask
        "stable_cascade": (
            Reading("clip_g", 1280, is_masked=True, final_norm=False, pooled=Pooled.PROJECTED),
        ),
        # # ComfyUI does not pad
        "hunyuan_video": (
            Reading("clip_l", 768, pooled=Pooled.PLAIN, reads_states=False),
            Reading(
                "llama3_8b", 4096, _HUNYUAN_VIDEO_TEMPLATE, dropped_tokens=_HUNYUAN_VIDEO_BEFORE,
                least_tokens=256 + _HUNYUAN_VIDEO_BEFORE, most_tokens=256 + _HUNYUAN_VIDEO_BEFORE, is_masked=True,
                mask=MaskMode.REAL, layers_left_out=2, final_norm=False,
            ),
        ),
        # # every second image state is passed to the model
        "hunyuan_video_i2v": (
            Reading("clip_l", 768, pooled=Pooled.PLAIN, reads_states=False),
            Reading(
                "llama3_8b", 4096, _HUNYUAN_VIDEO_I2V_TEMPLATE, dropped_tokens=_HUNYUAN_VIDEO_I2V_BEFORE,
                least_tokens=256 + _HUNYUAN_VIDEO_I2V_BEFORE, most_tokens=256 + _HUNYUAN_VIDEO_I2V_BEFORE,
                is_masked=True, mask=MaskMode.REAL, layers_left_out=2, final_norm=False, image_token="<image>",
                images_every=2, last_head="<|end_header_id|>",
            ),
        ),
        "hunyuan_video_15": (
            qwen_reading(_HUNYUAN_VIDEO_15_TEMPLATE, _HUNYUAN_VIDEO_15_BEFORE, Cleaning.NEVER_EMPTY),
            glyph_reading(256, Cleaning.QUOTED_ONCE),
        ),
        "cosmos": (_t5("t5xxl_old", 512, 1024, is_masked=True, padding=Padding.ZEROED),),
        "wan": (
            _t5("umt5_xxl", 512, cleaning=Cleaning.UNESCAPED, is_masked=True, padding=Padding.ZEROED),
        ),
    }
)  # fmt: skip

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
        "hunyuan_video": ("skyreels_i2v",),
        "hunyuan_video_15": ("hunyuan_video_15_sr",),
        "qwen_image": ("qwen_image_layered",),
        "cosmos": ("cosmos_t2v", "cosmos_i2v", "cosmos2_t2i", "cosmos2_i2v"),
        "wan": (
            "wan_t2v", "wan21_i2v", "wan22_i2v", "wan22_ti2v", "wan_vace", "wan21_flf2v", "wan21_fun_control",
            "wan21_camera", "wan22_camera", "wan22_animate",
        ),
    }
)  # fmt: skip
ROW_OF: Mapping[str, str] = MappingProxyType(
    {name: name for name in READINGS}
    | {family: row for row, families in _ROWS.items() for family in families}
    | {family.name: family.readings_name for family in defined_families()}
)


#: encoders that the models of a row can run without, but not all of them at once
OPTIONAL_ENCODERS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "hunyuan_video_15": frozenset({"byt5_small_glyph"}),
    }
    | {family.readings_name: family.optional_encoders for family in defined_families() if family.optional_encoders}
)


def readings_of(family: str) -> tuple[Reading, ...] | None:
    """Return how the text encoders of `family` (or of a set of text encoders) are read, in their order.

    None if no reading is known.
    """
    row = ROW_OF.get(family)
    return None if row is None else READINGS[row]
