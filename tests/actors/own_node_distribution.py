"""Writes an installed distribution with nodes of a user, as an installer leaves it: a package and its .dist-info."""

from __future__ import annotations

from pathlib import Path

MODULE = '''
"""Nodes of a user."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from modelpool import CustomNode, Size, node_setting


@dataclass(frozen=True)
class Frame:
    """A frame around an image."""

    pixels: int = node_setting(4, least=1, most=64)
    level: float = node_setting(0.5, least=0.0, most=1.0)
    side: str = node_setting("all", choices=("all", "top"))


def size(settings, sizes):
    image = sizes["image"]
    more = 2 * settings.pixels if settings.side == "all" else settings.pixels
    wider = more if settings.side == "all" else 0
    return Size(image.width + wider, image.height + more, image.frames)


def run(settings, inputs):
    image = inputs["image"]
    around = (settings.pixels, settings.pixels) if settings.side == "all" else (settings.pixels, 0)
    beside = around if settings.side == "all" else (0, 0)
    made = np.pad(image, (around, beside, (0, 0)), constant_values=round(255 * settings.level))
    return made


def broken(settings, inputs):
    if settings.pixels == 1:
        raise ValueError("one pixel is no frame")
    if settings.pixels == 2:
        return inputs["image"].astype(np.float32)
    if settings.pixels == 3:
        inputs["image"][:] = 0
    return inputs["image"]


ADD_FRAME = CustomNode(version="VERSION", inputs={"image": "image"}, result="image", settings=Frame, run=run, size=size,
                    threads=2, memory_bytes=64 << 20, title="Add a frame")
BROKEN = CustomNode(version="1", inputs={"image": "image"}, result="image", settings=Frame, run=broken, size=size)
'''
LISTED = """[modelpool.nodes]
add_frame = framing:ADD_FRAME
broken_frame = framing:BROKEN
not_there = framing:NOT_THERE
image_blur = framing:ADD_FRAME
"""


def install(folder: Path, version: str = "1") -> Path:
    """Install it into a folder, which belongs on PYTHONPATH; return the folder."""
    (folder / "framing.py").write_text(MODULE.replace("VERSION", version))
    info = folder / f"framing-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: framing\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(LISTED)
    (info / "RECORD").write_text("")
    return folder
