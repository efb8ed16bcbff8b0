"""The cards of the golden decisions, as their drivers describe them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from modelpool.pool.devices.capabilities import DeviceCapabilities, cuda_capabilities

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[1] / "golden" / "misc.json").read_text())
CARDS = {
    "gtx1080": ("NVIDIA GeForce GTX 1080", (6, 1)),
    "gtx1660": ("NVIDIA GeForce GTX 1660 SUPER", (7, 5)),
    "rtx2080": ("NVIDIA GeForce RTX 2080 Ti", (7, 5)),
    "v100": ("Tesla V100-SXM2-16GB", (7, 0)),
    "a100": ("NVIDIA A100-SXM4-40GB", (8, 0)),
    "rtx4090": ("NVIDIA GeForce RTX 4090", (8, 9)),
    "h100": ("NVIDIA H100 80GB HBM3", (9, 0)),
    "b200": ("NVIDIA B200", (10, 0)),
    "k80": ("Tesla K80", (3, 7)),
}
GIB = 1 << 30


def card(name: str, vram_gb: int = 8) -> DeviceCapabilities:
    """What the card called `name` can do."""
    return cuda_capabilities(*CARDS[name], vram_gb * GIB)
