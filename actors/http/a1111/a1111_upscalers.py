"""Names of ways to enlarge an image in the A1111 web UI, and what they mean for a request."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

#: names of upscalers in the web UI, and of the files that it downloads for them
_FILES: Mapping[str, str] = MappingProxyType(
    {
        "R-ESRGAN 4x+": "RealESRGAN_x4plus",
        "R-ESRGAN 4x+ Anime6B": "RealESRGAN_x4plus_anime_6B",
        "R-ESRGAN 2x+": "RealESRGAN_x2plus",
        "R-ESRGAN General 4xV3": "realesr-general-x4v3",
        "R-ESRGAN General WDN 4xV3": "realesr-general-wdn-x4v3",
        "R-ESRGAN AnimeVideo": "realesr-animevideov3",
    }
)
#: names of scaling without an upscaler
NEAREST = "nearest"
_PLAIN = ("none", "lanczos", NEAREST, "")
#: the same, as the web UI lists them
PLAIN_NAMES = ("None", "Lanczos", "Nearest")
#: beginning of the names that scale latents
LATENT = "Latent"


def upscaler_name(name: str) -> str:
    """Return the name of the file of an upscaler, from its name in the web UI; "" for scaling without one."""
    name = name.strip()
    return "" if name.lower() in _PLAIN else _FILES.get(name, name)


def scaling_fields(name: str | None) -> dict[str, Any]:
    """Return the fields of `Hires` for the name of an upscaler: of latents if there is none."""
    if (name or LATENT).strip().startswith(LATENT):
        return {"via": "latent"}
    upscaler = upscaler_name(name or "")
    return {"via": "image", **({"upscaler": upscaler} if upscaler else {})}


def scaling_note(name: str | None) -> str:
    """Return what differs from the web UI when an upscaler of this name enlarges the image of a first pass; "" if
    nothing does."""
    plain = (name or LATENT).strip()
    if plain.startswith(LATENT) and plain != LATENT:
        return f"found {plain}, latents are scaled in one way only"
    return f"found {plain}, the image is scaled with Lanczos" if plain.lower() == NEAREST else ""
