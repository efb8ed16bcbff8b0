"""Options for input images: image-to-image, inpainting, ControlNets, regions, reference images.

Knows words on a command line; `actors.request.image_fields` and `actors.request.control_fields` parse them.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

_PANEL = "Input images"
#: metavar of a flag, where typer would write <bool>
_NO_VALUE = " "


def _option(flag: str, text: str, metavar: str) -> Any:
    return typer.Option(flag, help=text, rich_help_panel=_PANEL, show_default=False, metavar=metavar)


_STRENGTH = "Denoising strength (default: 0.6, or 1 with a mask)."
_CONTROL = (
    "ControlNet (NAME@MODE if it has several modes), its control image (without =FILE: --image), "
    "strength, and start and end as shares of the steps; repeatable."
)
_REGION = "Prompt for a box of the image, and its strength (default: 1); repeatable."
_HIRES = "Two-pass generation: scale, strength, steps, as in 2, 2:0.5 or 2:0.5:10."
_REFERENCE = "Reference image, for models that accept one (Flux Kontext, Qwen-Image-Edit); repeatable."
_REFERENCE_AS = "How the text encoder sees --reference: whole or numbered (default: depends on the model)."
_IMAGE_CFG = "Image guidance scale, for instruction-editing models (default: depends on the model)."
_NOISE_LEVEL = "Noise level 0 to 350 for --image, for upscaling models (default: depends on the model)."

Image = Annotated[str | None, _option("--image", "Start image; sets the size.", "FILE")]
Mask = Annotated[str | None, _option("--mask", "Mask image; white areas are regenerated.", "FILE")]
Strength = Annotated[float | None, _option("--strength", _STRENGTH, "X")]
NoPaste = Annotated[bool, _option("--no-paste", "Do not paste the unmasked area back (default: paste).", _NO_VALUE)]
Hires = Annotated[str | None, _option("--hires", _HIRES, "X:Y:N")]
Reference = Annotated[list[str] | None, _option("--reference", _REFERENCE, "FILE")]
ReferenceAs = Annotated[str | None, _option("--reference-as", _REFERENCE_AS, "HOW")]
ImageCfg = Annotated[float | None, _option("--image-cfg", _IMAGE_CFG, "X")]
NoiseLevel = Annotated[int | None, _option("--noise-level", _NOISE_LEVEL, "N")]


Controls = Annotated[list[str] | None, _option("--control", _CONTROL, "NAME=FILE:X")]

Regions = Annotated[list[str] | None, _option("--region", _REGION, "X,Y,W,H:S=TEXT")]


def image_fields(
    image: str | None,
    mask: str | None,
    strength: float | None,
    no_paste: bool,
    hires: str | None,
    control: list[str] | None,
    region: list[str] | None,
) -> dict[str, Any]:
    """Return the fields of a request that were set."""
    fields = {
        "image": image,
        "mask": mask,
        "strength": strength,
        "paste": False if no_paste else None,
        "hires": hires,
        "controls": tuple(control) if control else None,
        "regions": tuple(region) if region else None,
    }
    return {name: value for name, value in fields.items() if value is not None}


def reference_fields(
    reference: list[str] | None, reference_as: str | None, image_cfg: float | None, noise_level: int | None
) -> dict[str, Any]:
    """Return the fields of a request that were set for models with a reference image or image guidance."""
    fields = {
        "reference": tuple(reference) if reference else None,
        "reference_as": reference_as,
        "image_cfg": image_cfg,
        "noise_level": noise_level,
    }
    return {name: value for name, value in fields.items() if value is not None}
