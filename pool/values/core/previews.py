"""Previews of a sampling run: requests and results. Values only; torch-free.

A preview is a small image of the clean latent that the model predicts at a step. Previews change no result: no task id,
seed or recipe depends on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from io import BytesIO
from typing import TYPE_CHECKING, Any

from modelpool.pool.values.core.errors import unusable_field

if TYPE_CHECKING:
    from PIL.Image import Image

#: shortest time between two previews of one image, unless a program asks for another: they are for people
INTERVAL_SECONDS = 0.5
#: longest side of a preview in pixels
MAX_SIDE = 256
#: largest preview; noise of `MAX_SIDE` squared takes about half of it
MAX_PREVIEW_BYTES = 64 << 10
#: format of previews: the name that Pillow uses, and the media type
FORMAT, MEDIA_TYPE = "WEBP", "image/webp"


class PreviewKind(Enum):
    """How a preview is computed."""

    NONE = "none"
    #: a linear map of the channels of each latent cell to a colour
    LATENT_RGB = "latent_rgb"
    #: a tiny decoder that was distilled for these latents (TAESD, TAEF1)
    TAESD = "taesd"
    #: the tiny decoder if the pool has one for these latents, else the linear map
    AUTO = "auto"


@dataclass(frozen=True, slots=True)
class PreviewWish:
    """The previews that somebody wants of a run.

    interval_seconds  shortest time between two of one image; 0 is one for each step
    tiny_decoders     files of tiny decoders by name, as in `LatentFormat.tiny`
    """

    kind: PreviewKind = PreviewKind.AUTO
    interval_seconds: float = INTERVAL_SECONDS
    tiny_decoders: tuple[tuple[str, str], ...] = ()

    @property
    def reads_colours(self) -> bool:
        """Whether the linear map may be used."""
        return self.kind in (PreviewKind.LATENT_RGB, PreviewKind.AUTO)


@dataclass(frozen=True, slots=True)
class Preview:
    """One preview: a small image after `step` of `steps`, at most `MAX_SIDE` pixels on a side; of a video, its middle
    frame.

    content  a WebP file
    """

    step: int
    steps: int
    content: bytes

    @property
    def pil(self) -> Image:
        """The preview as a Pillow image, decoded at each access."""
        from PIL import Image

        with Image.open(BytesIO(self.content)) as image:
            return image.convert("RGB")

    def as_format(self, file_format: str) -> bytes:
        """Return the preview as a file of another format of Pillow, such as "JPEG"."""
        if file_format.upper() == FORMAT:
            return self.content
        written = BytesIO()
        self.pil.save(written, file_format.upper())
        return written.getvalue()


def checked_preview(value: Any) -> str:
    """Return the name of a `PreviewKind`. Raises UnusableField."""
    names = [kind.value for kind in PreviewKind]
    if value not in names:
        raise unusable_field("preview", value, f"one of {', '.join(names)}")
    return str(value)
