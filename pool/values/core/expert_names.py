"""Names of the two experts of a model, high-noise and low-noise. Torch-free."""

from __future__ import annotations

import os

#: as LoRAs name their expert
EXPERTS = HIGH, LOW = "high", "low"


def expert_named(name: str) -> str:
    """Return the expert that a file name mentions; "" if it mentions none or both."""
    words = os.path.basename(name).lower().replace("-", "").replace("_", "").replace(" ", "")
    named = [half for half in EXPERTS if f"{half}noise" in words]
    return named[0] if len(named) == 1 else ""
