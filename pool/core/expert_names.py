"""The two diffusion models of a pair, one for much noise and one for little, as people call them. Torch-free."""

from __future__ import annotations

import os

#: the two, as LoRAs name the one that they are for
HALVES = HIGH, LOW = "high", "low"


def half_named(name: str) -> str:
    """Which of the two the name of a file speaks of; "" where it speaks of none, or of both."""
    words = os.path.basename(name).lower().replace("-", "").replace("_", "").replace(" ", "")
    said = [half for half in HALVES if f"{half}noise" in words]
    return said[0] if len(said) == 1 else ""
