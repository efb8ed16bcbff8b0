"""`Setting`: what all parts of the GPU benchmark know."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

#: begins the names of folders with models
PREFIX = "modelpool_gpu_"


@dataclass(frozen=True, slots=True)
class Setting:
    """The device and the models of a run.

    device  kind of the device
    small   tiny models instead of published shapes
    models  folder for models; they are removed with it
    """

    device: str
    small: bool
    models: Path
