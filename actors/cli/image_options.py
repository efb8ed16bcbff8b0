"""The options that name images to start from and what is done with them.

Knows words on a command line; what they mean stands in `actors.request.image_fields` and
`actors.request.control_fields`.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

_PANEL = "From an image"
#: in the place of a flag's value, where typer would write <bool>
_NO_VALUE = " "


def _option(flag: str, text: str, metavar: str) -> Any:
    return typer.Option(flag, help=text, rich_help_panel=_PANEL, show_default=False, metavar=metavar)


_STRENGTH = "How much of it is made anew (default: 0.6, or 1 with a mask)."
_CONTROL = (
    "A ControlNet (NAME@MODE for one of several modes), its image (without =FILE, that of --image), and how strongly "
    "(and from which share of the steps to which); again for more."
)
_REGION = "A text for a box of the image, and how strongly it counts there (default: 1); again for more."
_HIRES = "Make it small, scale it up, make a part again: 2, 2:0.5 or 2:0.5:10 (scale, strength, steps)."
_REFERENCE = "An image to work from, for models that are told one (Flux Kontext, Qwen-Image-Edit); again for more."
_REFERENCE_AS = "How a text encoder sees --reference too: whole or numbered (default: as the model was made for)."
_IMAGE_CFG = "How strongly --image counts with models that do to it what PROMPT says (default: the model's own)."
_NOISE_LEVEL = "Noise, 0 to 350, on an --image that the model makes larger (default: the model's own)."

Image = Annotated[str | None, _option("--image", "An image to start from; sets the size.", "FILE")]
Mask = Annotated[str | None, _option("--mask", "An image that is white where it is made anew.", "FILE")]
Strength = Annotated[float | None, _option("--strength", _STRENGTH, "X")]
NoPaste = Annotated[bool, _option("--no-paste", "Do not put back what the mask keeps (default: do).", _NO_VALUE)]
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
    """The fields of a request that were given."""
    said = {
        "image": image,
        "mask": mask,
        "strength": strength,
        "paste": False if no_paste else None,
        "hires": hires,
        "controls": tuple(control) if control else None,
        "regions": tuple(region) if region else None,
    }
    return {name: value for name, value in said.items() if value is not None}


def shown_fields(
    reference: list[str] | None, reference_as: str | None, image_cfg: float | None, noise_level: int | None
) -> dict[str, Any]:
    """The fields of a request that were given, of models that are shown an image."""
    said = {
        "reference": tuple(reference) if reference else None,
        "reference_as": reference_as,
        "image_cfg": image_cfg,
        "noise_level": noise_level,
    }
    return {name: value for name, value in said.items() if value is not None}
