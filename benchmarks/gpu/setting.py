"""`Setting`: what all parts of the GPU benchmark know."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.full_size import write_model

#: begins the names of temporary folders
PREFIX = "modelpool_gpu_"


@dataclass(frozen=True, slots=True)
class Setting:
    """The device and the models of a run.

    device  kind of the device
    small   tiny models instead of published shapes
    models  folder for models, which later parts find there
    work    folder of this part for everything else; it is removed with the part
    slowness  how many times as long as planned the work of the host takes (`benchmarks.gpu.calibration`)
    """

    device: str
    small: bool
    models: Path
    work: Path
    slowness: float = 1.0

    def met(self, condition: bool) -> bool | None:
        """Whether a goal is met: None on other devices than CUDA, whose times say nothing about a GPU."""
        return condition if self.device == "cuda" else None

    def least(self, seconds: float) -> float:
        """Seconds without which a measurement is not begun, where the machine is as fast as planned: tiny models need
        none."""
        return seconds * self.slowness if self.device == "cuda" else 0.0

    def model_file(self, name: str) -> Path:
        """Return the file of `FULL_SIZE[name]`; writes it unless an earlier part did, completely."""
        folder = self.models / name
        path, written = folder / f"{name}.safetensors", folder / "written"
        if not written.exists():
            path = write_model(name, folder, self.small)
            written.touch()
        return path
