"""A tiny checkpoint, on the CPU if nothing else is said, run stage by stage as the cutter orders the stages; and what
diffusers needs of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import EulerDiscreteScheduler
from safetensors.torch import load_file, save_file
from torch import Tensor

from modelpool.actors.control.inputs.input_images import InputImages
from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.graph.common.task_collector import JobGraph
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.engine.engine import Engine, EngineSettings
from modelpool.pool.inference.sampling.schedules import make_sigmas, sigma_table
from modelpool.pool.values.core.stage_params import Encoded, ImagePixels, Latent, Result, RunHooks, SampleParams
from modelpool.pool.values.specs.spec import JobId, Role, RunCost, TaskId
from tests.pool.input_names import results_read
from tests.pool.models.loading.layouts import Layout
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint

QUIET = RunHooks(on_step=lambda done, steps: None, should_stop=lambda: False)


class TinyModel:
    """The model called "tiny" in a folder of its own."""

    def __init__(
        self,
        folder: Path,
        layout: Layout,
        seed: int = 3,
        device: str = "cpu",
        tensors: Mapping[str, Tensor] | None = None,
        loras: tuple[Path, ...] = (),
    ) -> None:
        """`tensors` are in the file beside random ones, or in their place; `loras` are folders of them."""
        path = write_tiny_checkpoint(folder / "tiny.safetensors", seed=seed, dtype=torch.float32, layout=layout)
        if tensors:
            save_file({**load_file(path), **tensors}, path)
        self._open(folder, device, loras)

    @classmethod
    def of_folder(cls, folder: Path, device: str = "cpu", loras: tuple[Path, ...] = ()) -> TinyModel:
        """The model called "tiny" that is in `folder` already."""
        self = cls.__new__(cls)
        self._open(folder, device, loras)
        return self

    def _open(self, folder: Path, device: str, loras: tuple[Path, ...] = ()) -> None:
        self.catalog = Catalog((folder,), loras, device)
        self.model = self.catalog.find_model("tiny")
        self.engine = Engine.open(EngineSettings(device))
        self.family = self.engine._opened(self.model).checkpoint.family

    def module(self, role: Role) -> Any:
        """The component as diffusers or transformers has it."""
        return self.engine._opened(self.model).component(role).built.module

    def made(self, **fields: Any) -> Made:
        """All results of a request for this model, or of a workflow."""
        given: dict[TaskId, Result] = {}
        usual = {} if "workflow" in fields else {"model": "tiny", "prompt": "a photo of a red cube"}
        request, refs = InputImages(lambda result: result).bring(GenerateRequest(**{**usual, "seed": 11, **fields}))
        given.update(refs)  # type: ignore[arg-type] # here a reference is the result itself
        _, cut = build_graph(request, JobId("job"), self.catalog)
        results: dict[TaskId, Result] = dict(given)
        costs = []
        for task in cut.job.tasks:
            inputs = results_read(task, results)
            results[task.task_id], cost = self.engine.run(task, cut.works[task.task_id], inputs, QUIET)
            costs.append(cost)
        return Made(cut, results, tuple(costs))

    def close(self) -> None:
        """Let go of the device."""
        self.engine.close()


class Made:
    """The results of one job."""

    def __init__(self, cut: JobGraph, results: dict[TaskId, Result], costs: tuple[RunCost, ...]) -> None:
        self.works, self.tasks, self.components = cut.works, cut.job.tasks, cut.components
        self.results, self.costs = results, costs
        self._wanted, self._order = cut.job.wanted, [task.task_id for task in cut.job.tasks]

    @property
    def pixels(self) -> Any:
        """Of the image, [H, W, C]."""
        image = self.results[self._wanted]
        assert isinstance(image, ImagePixels)
        return image.pixels_HWC

    def of(self, kind: type) -> list[Result]:
        """The results of all works of a kind, in the order in which they were made."""
        return [self.results[task] for task in self._order if isinstance(self.works[task], kind)]

    @property
    def latents(self) -> list[Tensor]:
        """What was sampled, [1, C, H, W] each."""
        found = [one for one in self.of(SampleParams) if isinstance(one, Latent)]
        return [torch.from_numpy(one.samples_CHW.copy())[None] for one in found]

    @property
    def texts(self) -> dict[str, Tensor]:
        """The prompt and the negative prompt, by the names that pipelines of diffusers take them by."""
        found = [one for one in self.results.values() if isinstance(one, Encoded)]
        named: dict[str, Tensor] = {}
        for name, text in zip(("", "negative_"), found, strict=False):
            named[f"{name}prompt_embeds"] = torch.from_numpy(text.context_LD.copy())[None]
            if text.pooled_V is not None:
                named[f"{name}pooled_prompt_embeds"] = torch.from_numpy(text.pooled_V.copy())[None]
        return named


class OurLevels(EulerDiscreteScheduler):
    """diffusers' Euler, whose own levels differ from ours in the last bits, at our levels. From noise alone it begins
    as training saw the last level, with a clean latent of deviation 1 below the noise."""

    @property
    def init_noise_sigma(self) -> float:
        """What the first noise is multiplied with."""
        return (float(self.sigmas.max()) ** 2 + 1) ** 0.5

    def set_timesteps(self, *args: Any, **kwargs: Any) -> None:
        """As diffusers does; then the levels are ours."""
        super().set_timesteps(*args, **kwargs)
        self.sigmas = make_sigmas("normal", self.num_inference_steps, sigma_table())


def euler() -> OurLevels:
    """At the noise of Stable Diffusion."""
    return OurLevels(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1)
