"""Tiny models in separate files, and engines that make images of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.engine.engine import Engine
from modelpool.pool.values.core.stage_params import (
    DecodeParams,
    EncodeParams,
    GuidanceParams,
    ImagePixels,
    LoraRef,
    ModelRef,
    OutputShape,
    Result,
    SampleParams,
    SamplingSchedule,
    StageParams,
    roles_of,
    stage_of,
    task_id,
)
from modelpool.pool.values.specs.spec import RunCost, TaskSpec
from tests.pool.input_names import inputs_of
from tests.pool.models.loading import layouts
from tests.pool.models.loading.layouts import Layout
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint
from tests.pool.pipeline import QUIET

UNET, VAE = "model.diffusion_model.", "first_stage_model."
#: of each layout: what the keys of its text encoders begin with, by the name that their file gets
ENCODERS: Mapping[str, Mapping[str, str]] = {
    "tiny_sd1": {"clip_l": "cond_stage_model.transformer."},
    "tiny_sd2": {"clip_h": "cond_stage_model.model."},
    "tiny_sdxl": {"clip_l": "conditioner.embedders.0.transformer.", "clip_g": "conditioner.embedders.1.model."},
    "tiny_sdxl_refiner": {"clip_g": "conditioner.embedders.0.model."},
}
_FOLDERS = {"unet": "unet", "vae": "vae"}


def prefixes_of(layout: str) -> dict[str, str]:
    """What the keys of each part begin with in a whole file."""
    return {"unet": UNET, "vae": VAE, **ENCODERS[layout]}


def write_atomically(path: Path, layout: str, seed: int = 0, dtype: torch.dtype = torch.float16) -> Path:
    """A whole checkpoint of `layout`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made: Callable[[], Layout] = getattr(layouts, layout)
    return write_tiny_checkpoint(path, seed, layout=made(), dtype=dtype)


def split_up(whole: Path, layout: str, base: Path, name: str = "paint") -> dict[str, Path]:
    """The parts of a whole checkpoint as files of their own, in folders below `base` as ComfyUI has them."""
    tensors, parts = load_file(whole), {}
    for part, prefix in prefixes_of(layout).items():
        folder = base / _FOLDERS.get(part, "clip")
        folder.mkdir(parents=True, exist_ok=True)
        own = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
        parts[part] = folder / f"{name}_{part}.safetensors"
        save_file(own, parts[part])
    return parts


class Painter:
    """Makes images of any model of a catalog on one engine, and keeps what each run cost."""

    def __init__(self, engine: Engine, catalog: Catalog) -> None:
        self.engine, self.catalog = engine, catalog
        self.costs: list[RunCost] = []

    def image(self, name: str, loras: Mapping[str, float] | None = None, seed: int = 7) -> np.ndarray:
        """The pixels of one small image."""
        model = self.catalog.find_model(name)
        chosen = tuple(self.catalog.find_lora(lora, strength) for lora, strength in (loras or {}).items())
        prompt = self._run(EncodeParams(model, chosen, "a (red:1.3) circle"))
        negative = self._run(EncodeParams(model, chosen, "blurry"))
        latent = self._run(self._sample(model, chosen, seed), prompt, negative)
        found = self._run(DecodeParams(model, OutputShape(64, 64)), latent)
        assert isinstance(found, ImagePixels)
        return found.pixels_HWC

    @property
    def uploaded_bytes(self) -> int:
        """Of all runs so far."""
        return sum(cost.uploaded_bytes for cost in self.costs)

    def _sample(self, model: ModelRef, loras: tuple[LoraRef, ...], seed: int) -> SampleParams:
        return SampleParams(
            model, loras, OutputShape(64, 64), SamplingSchedule(2, "euler", "normal"), GuidanceParams(4.0), seed
        )

    def _run(self, work: StageParams, *inputs: Result) -> Result:
        count = len(self.engine._opened(work.model).checkpoint.family.text_encoders)
        roles = roles_of(work, count if isinstance(work, EncodeParams) else 1)
        loras = work.loras if isinstance(work, (EncodeParams, SampleParams)) else ()
        passes = work.schedule.steps if isinstance(work, SampleParams) else 1
        uses = tuple(self.catalog.use(work.model, role, loras, passes) for role in roles)
        activation_bytes = self.catalog.figures.activation_bytes(work.model, work)
        task = TaskSpec(task_id(work, {}), stage_of(work), uses, activation_bytes, 0.1)
        result, cost = self.engine.run(task, work, inputs_of(work, *inputs), QUIET)
        self.costs.append(cost)
        return result
