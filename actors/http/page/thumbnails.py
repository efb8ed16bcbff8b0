"""`Thumbnails`: small copies of output images for pages that show many of them, in a bounded cache."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from io import BytesIO
from pathlib import Path

from modelpool.actors.http.service.problems import HttpProblem
from modelpool.actors.http.service.turns import Turns

#: largest side in pixels: a tile of the page on a display with two pixels for each of its own
SIDE = 384
MEDIA_TYPE = "image/webp"
_QUALITY = 82
#: of all thumbnails that are remembered
MOST_BYTES = 64 << 20
#: images that are decoded at a time, in all and of each owner: other calls need the processor, too
MOST_DECODED, MOST_DECODED_OF_OWNER = 2, 1


class Thumbnails:
    """Belongs to one event loop."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._known: OrderedDict[Path, bytes] = OrderedDict()
        self._bytes = 0
        self._decoding = Turns(MOST_DECODED, MOST_DECODED_OF_OWNER)

    async def of(self, path: Path, owner: str = "") -> bytes:
        """Return the thumbnail of an output of `owner`, which never changes. Raises HttpProblem (415) for other files
        than images."""
        if path not in self._known:
            async with self._decoding.turn(owner):
                # another call may have been faster
                content = self._known[path] if path in self._known else await asyncio.to_thread(thumbnail, path)
            self._add(path, content)
        self._known.move_to_end(path)
        return self._known[path]

    def _add(self, path: Path, content: bytes) -> None:
        self._bytes += len(content) - len(self._known.get(path, b""))
        self._known[path] = content
        while self._bytes > self._most_bytes and len(self._known) > 1:
            self._bytes -= len(self._known.popitem(last=False)[1])


def thumbnail(path: Path) -> bytes:
    """Return the image in a file as WebP of at most SIDE pixels. Raises HttpProblem (415)."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            image.draft("RGB", (SIDE, SIDE))
            small = image.convert("RGBA" if image.mode in ("RGBA", "LA", "PA") else "RGB")
            small.thumbnail((SIDE, SIDE))
            content = BytesIO()
            small.save(content, "WEBP", quality=_QUALITY, method=2)
            return content.getvalue()
    except (OSError, ValueError, Image.DecompressionBombError):
        raise HttpProblem(415, f"{path.name}: there are thumbnails of images only") from None
