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
from modelpool.pool.families.parts import hunyuan
from modelpool.pool.families.parts.text_reading import Cleaning, MaskMode, Padding, Pooled, Reading

#: padding token of open_clip
_OPEN_CLIP_PAD = 0
#: layers of the published CLIP-H; files for transformers leave out the last one
_CLIP_H_DEPTH = 24

_CLIP_L = Reading("clip_l", width=768)
_CLIP_G = Reading("clip_g", width=1280, clip_pad_id=_OPEN_CLIP_PAD)
_SDXL_L = Reading("clip_l", width=768, layers_left_out=1, final_norm=False)
_SDXL_G = Reading(
    "clip_g", width=1280, clip_pad_id=_OPEN_CLIP_PAD, layers_left_out=1, final_norm=False, pooled=Pooled.PROJECTED
)


def _t5(encoder: str, tokens: int, width: int = 4096, **more: Any) -> Reading:
    """Return the reading of a T5 with a fixed text length."""
    return Reading(encoder, width=width, least_tokens=tokens, most_tokens=tokens, **more)


_LUMINA2_TEMPLATE = (
    "You are an assistant designed to generate superior images with the superior degree of image-text alignment based "
    "on textual prompts or user prompts. <Prompt Start> {}"
)
_QWEN_IMAGE_TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
_QWEN_IMAGE_BEFORE = 34
_HUNYUAN_IMAGE_TEMPLATE = _QWEN_IMAGE_TEMPLATE.removesuffix("\n<|im_start|>assistant\n")
_FLUX2_TEMPLATE = (
    "[SYSTEM_PROMPT]You are an AI that reasons about image descriptions. You give structured responses focusing on "
    "object relationships, object\nattribution and actions without speculation.[/SYSTEM_PROMPT][INST]{}[/INST]"
)
_QWEN3_TEMPLATE = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
_QWEN3_WITHOUT_THINKING = _QWEN3_TEMPLATE + "<think>\n\n</think>\n\n"


_PIXART_ALPHA = _t5("t5xxl", 120, cleaning=Cleaning.LOWERED, is_masked=True, mask=MaskMode.REAL)

#: by set, or by family if a family reads the encoders of a set differently
READINGS: Mapping[str, tuple[Reading, ...]] = MappingProxyType(
    {
        **{family.readings_name: family.texts for family in defined_families()},
        "sd1": (_CLIP_L,),
        "sd2": (Reading("clip_h", 1024, clip_pad_id=_OPEN_CLIP_PAD, layers_left_out=1, depth=_CLIP_H_DEPTH),),
        "sdxl": (_SDXL_L, _SDXL_G),
        "sdxl_refiner": (_SDXL_G,),
        # # as `StableCascadePriorPipeline`: the last state without its norm, and the encoder gets the mask
        "stable_cascade": (
            Reading("clip_g", 1280, is_masked=True, final_norm=False, pooled=Pooled.PROJECTED),
        ),
        # # ComfyUI does not pad T5 to 256
        "sd3": (
            Reading("clip_l", 768, layers_left_out=1, final_norm=False, pooled=Pooled.PROJECTED),
            _SDXL_G,
            _t5("t5xxl", 256),
        ),
        # # ComfyUI pads T5 to 256 at least; Flux dev was trained with 512, schnell with 256
        "flux": (Reading("clip_l", 768, pooled=Pooled.PLAIN, reads_states=False), _t5("t5xxl", 512)),
        "flux2": (
            Reading(
                "mistral3_24b", 5120, _FLUX2_TEMPLATE, least_tokens=512, most_tokens=512, pads_left=True,
                is_masked=True, layers=(10, 20, 30),
            ),
        ),
        # Klein: Qwen3 4B or 8B instead of Mistral
        "flux2_klein": (
            Reading(
                "qwen3_4b", 2560, _QWEN3_WITHOUT_THINKING, least_tokens=512, most_tokens=512, is_masked=True,
                layers=(9, 18, 27),
            ),
        ),
        # # ComfyUI drops all padding but one token; here the mask hides it
        "chroma": (_t5("t5xxl", 512, is_masked=True, mask=MaskMode.ONE_MORE),),
        "aura_flow": (_t5("t5xl", 256, 2048, is_masked=True, padding=Padding.ZEROED),),
        "pixart": (_PIXART_ALPHA,),
        "pixart_sigma": (_t5("t5xxl", 300, cleaning=Cleaning.LOWERED, is_masked=True, mask=MaskMode.REAL),),
        "hunyuan_dit": (
            Reading("hydit_bert", 1024, least_tokens=77, most_tokens=77, is_masked=True, mask=MaskMode.REAL),
            _t5("t5xl", 256, 2048, is_masked=True, mask=MaskMode.REAL),
        ),
        # # only the positive prompt gets the system prompt. ComfyUI leaves it to the user
        "lumina2": (
            Reading(
                "gemma2_2b", 2304, _LUMINA2_TEMPLATE, "{}", least_tokens=256, most_tokens=256, is_masked=True,
                mask=MaskMode.REAL, layers_left_out=1, final_norm=False,
            ),
        ),
        "z_image": (
            Reading(
                "qwen3_4b", 2560, _QWEN3_TEMPLATE, most_tokens=512, is_masked=True, layers_left_out=1,
                final_norm=False, padding=Padding.DROPPED,
            ),
        ),
        "qwen_image": (
            Reading(
                "qwen25_7b", 3584, _QWEN_IMAGE_TEMPLATE, dropped_tokens=_QWEN_IMAGE_BEFORE,
                most_tokens=512 + _QWEN_IMAGE_BEFORE, is_masked=True, padding=Padding.DROPPED,
            ),
        ),
        # # ByT5 reads only the text to render in the image
        "hunyuan_image": (
            hunyuan.qwen_reading(_HUNYUAN_IMAGE_TEMPLATE, _QWEN_IMAGE_BEFORE),
            hunyuan.glyph_reading(128, Cleaning.QUOTED),
        ),
        # # the model reads the states of several of Llama's layers, one per block
        "hidream": (
            Reading("clip_l", 768, chunk_tokens=128, pooled=Pooled.PROJECTED, reads_states=False),
            Reading(
                "clip_g", 1280, clip_pad_id=_OPEN_CLIP_PAD, chunk_tokens=128, pooled=Pooled.PROJECTED,
                reads_states=False,
            ),
            _t5("t5xxl", 128, is_masked=True),
            Reading(
                "llama3_8b", 4096, least_tokens=128, most_tokens=128, is_masked=True, every_layer=True,
                pad="<|eot_id|>",
            ),
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
        "sd3": ("sd35_large", "sd35_medium"),
        "flux": ("flux_dev", "flux_schnell", "flux_fill", "flux_control"),
        "flux2": ("flux2_dev",),
        "chroma": ("chroma_radiance",),
        "aura_flow": ("auraflow",),
        "pixart": ("pixart_alpha", "pixart_alpha_512"),
        "hunyuan_dit": ("hunyuan_dit_1",),
        "hunyuan_image": ("hunyuan_image_21",),
        "qwen_image": ("qwen_image_layered",),
        "hidream": ("hidream_i1",),
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
    {
        "sd3": frozenset({"clip_l", "clip_g", "t5xxl"}),
        "hunyuan_image": frozenset({"byt5_small_glyph"}),
    }
    | {family.readings_name: family.optional_encoders for family in defined_families() if family.optional_encoders}
)


def readings_of(family: str) -> tuple[Reading, ...] | None:
    """Return how the text encoders of `family` (or of a set of text encoders) are read, in their order.

    None if no reading is known.
    """
    row = ROW_OF.get(family)
    return None if row is None else READINGS[row]
