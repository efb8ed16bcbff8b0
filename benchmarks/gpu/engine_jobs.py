"""`EngineJobs`: runs the stages of images on one engine, with figures of memory, as a worker of the pool would."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.devices.detection import capabilities_here
from modelpool.pool.engine.engine import Engine, EngineSettings
from modelpool.pool.values.core.sampling_facts import Guidance, SamplingDefaults
from modelpool.pool.values.core.stage_params import (
    BatchMember,
    DecodeParams,
    Encoded,
    EncodeParams,
    GuidanceParams,
    ImagePixels,
    Latent,
    LoraRef,
    ModelRef,
    OutputShape,
    PixelArray,
    Result,
    RunHooks,
    SampleParams,
    SamplingSchedule,
    StageParams,
    VideoFrames,
    stage_of,
    task_id,
)
from modelpool.pool.values.specs.spec import Role, RunCost, TaskSpec
from modelpool.pool.weights.plan.eviction_plan import needed_bytes
from tests.pool.input_names import inputs_of

PROMPT, NEGATIVE = "a small red cat on the moon", "a dog"
QUIET = RunHooks(on_step=lambda done, steps: None, should_stop=lambda: False)
#: frames per second of videos
FRAME_RATE = 16.0
#: of UNets, whose requests have defaults of their own
UNET_DEFAULTS = SamplingDefaults(20, 7.0, "euler", "normal", Guidance.CLASSIFIER_FREE)


@dataclass(frozen=True, slots=True)
class Extent:
    """Size and steps of an image or a video (`frames` above 0)."""

    width: int
    height: int
    steps: int
    frames: int = 0


def model_ref(path: Path) -> ModelRef:
    """Return a reference to a file without reading all of it: its path stands for its content."""
    return ModelRef(path.stem, str(path), hashlib.sha256(str(path).encode()).hexdigest())


def lora_ref(path: Path, strength: float = 1.0) -> LoraRef:
    """Return a reference to a LoRA, as `model_ref`."""
    return LoraRef(path.stem, str(path), hashlib.sha256(str(path).encode()).hexdigest(), strength)


class EngineJobs:
    """Images of one model on one engine. `costs` has the cost of each run."""

    def __init__(self, path: Path, engine: Engine, as_float32: bool = False) -> None:
        """`as_float32` computes in float32 whatever the device prefers, to compare devices; the engine must be new."""
        capabilities = capabilities_here(engine.device.kind.value)
        if as_float32:
            capabilities = replace(capabilities, float16=False, bfloat16=False)
            engine._capabilities = replace(engine._capabilities, float16=False, bfloat16=False)
        self.engine, self.model = engine, model_ref(path)
        self.catalog = Catalog((path.parent,), (), capabilities)
        opened = engine._opened(self.model)
        self.family, self.latent_facts = opened.checkpoint.family, opened.latent
        self.costs: list[RunCost] = []

    def task(self, work: StageParams) -> TaskSpec:
        """Return the task of `work`, with its estimates."""
        roles: tuple[Role, ...] = (Role.VAE,)
        if isinstance(work, EncodeParams):
            roles = self.family.text_encoders
        elif isinstance(work, SampleParams):
            roles = (Role.DIFFUSION_MODEL,)
        loras = work.loras if isinstance(work, SampleParams) else ()
        passes = work.schedule.steps if isinstance(work, SampleParams) else 1
        uses = tuple(self.catalog.use(self.model, role, loras, passes) for role in roles)
        activation_bytes = self.catalog.figures.activation_bytes(self.model, work)
        return TaskSpec(task_id(work, {}), stage_of(work), uses, activation_bytes, 0.1)

    def run(self, work: StageParams, *inputs: Result) -> Result:
        """Run one stage."""
        result, cost = self.engine.run(self.task(work), work, inputs_of(work, *inputs), QUIET)
        self.costs.append(cost)
        return result

    def image_seconds(self, extent: Extent, texts: Sequence[Encoded], seed: int) -> float:
        """Return the seconds of one image on the wall clock, from its texts to pixels on the host, with everything that
        the engine does for it but the estimates, which the controller computes."""
        sampling, decoding = self.sample_work(extent, seed=seed), self.decode_work(extent)
        tasks = self.task(sampling), self.task(decoding)
        started = time.perf_counter()
        latent, cost = self.engine.run(tasks[0], sampling, inputs_of(sampling, *texts), QUIET)
        _, decode_cost = self.engine.run(tasks[1], decoding, inputs_of(decoding, latent), QUIET)
        self.costs += [cost, decode_cost]
        return time.perf_counter() - started

    def sample_seconds(self, work: SampleParams, texts: Sequence[Encoded], hooks: RunHooks = QUIET) -> float:
        """Return the seconds of one sampling run on the wall clock, with moving weights and opening LoRAs. The result
        is on the host, so the device has finished."""
        task = self.task(work)
        started = time.perf_counter()
        _, cost = self.engine.run(task, work, inputs_of(work, *texts), hooks)
        self.costs.append(cost)
        return time.perf_counter() - started

    def texts(self) -> tuple[Encoded, ...]:
        """Encode the prompt, and the negative prompt if the model reads one."""
        wanted = (PROMPT,) if self._is_distilled else (PROMPT, NEGATIVE)
        found = [self.run(EncodeParams(self.model, (), text)) for text in wanted]
        return tuple(text for text in found if isinstance(text, Encoded))

    def sample_work(
        self, extent: Extent, loras: tuple[LoraRef, ...] = (), seed: int = 7, sampler: str = ""
    ) -> SampleParams:
        """Return the parameters of a sampling run."""
        defaults = self.family.sampling.defaults or UNET_DEFAULTS
        guidance = GuidanceParams(1.0, defaults.cfg) if self._is_distilled else GuidanceParams(defaults.cfg)
        return SampleParams(
            self.model,
            loras,
            self._shape(extent),
            SamplingSchedule(extent.steps, sampler or defaults.sampler, defaults.schedule),
            guidance,
            seed,
        )

    def sample(self, work: SampleParams, texts: Sequence[Encoded]) -> Latent:
        """Sample one latent."""
        latent = self.run(work, *texts)
        assert isinstance(latent, Latent)
        return latent

    def sample_together(self, works: Sequence[SampleParams], texts: Sequence[Encoded]) -> float:
        """Sample several latents as one batch; returns the seconds of the run."""
        members = [BatchMember(self.task(work), work, inputs_of(work, *texts), QUIET) for work in works]
        costs = []
        for outcome in self.engine.run_batch(members):
            if isinstance(outcome, BaseException):
                raise outcome
            costs.append(outcome[1])
        return sum(cost.run_seconds for cost in costs)

    def decode_work(self, extent: Extent) -> DecodeParams:
        """Return the parameters of a decode."""
        return DecodeParams(self.model, self._shape(extent))

    def decode(self, extent: Extent, latent: Latent) -> PixelArray:
        """Decode a latent: [H, W, C], of a video [T, H, W, C]."""
        made = self.run(self.decode_work(extent), latent)
        assert isinstance(made, ImagePixels | VideoFrames)
        return made.pixels_HWC if isinstance(made, ImagePixels) else made.frames_THWC

    def budget_for(self, work: SampleParams, share: float) -> int:
        """Return the budget with which about `share` of the diffusion model stays resident while `work` runs, with what
        an engine takes beside its plans."""
        task = self.task(work)
        weight_bytes = self.catalog.components(self.model)[Role.DIFFUSION_MODEL].weight_bytes
        overhead_bytes = self.engine.introduce().overhead_bytes
        return needed_bytes(task.uses, task.activation_bytes) + int(share * weight_bytes) + overhead_bytes

    @property
    def workspaces_bytes(self) -> int:
        """Device memory that plans leave to workspaces of libraries."""
        return self.engine.introduce().overhead_bytes - self.engine._pipeline.ahead_bytes

    @property
    def _is_distilled(self) -> bool:
        """Whether the model reads its guidance scale as an input, and no negative prompt."""
        defaults = self.family.sampling.defaults
        return defaults is not None and defaults.guidance in (Guidance.DISTILLED, Guidance.NONE)

    def _shape(self, extent: Extent) -> OutputShape:
        duration = {"frames": extent.frames, "frame_rate": FRAME_RATE} if extent.frames else {}
        return OutputShape(extent.width, extent.height, **duration)  # type: ignore[arg-type]


def open_engine(device: str, budget_bytes: int | None = None, **settings: Any) -> Engine:
    """Return an engine that may use `budget_bytes`, and as many threads as torch chooses on a CPU. Other `settings` as
    in `EngineSettings`."""
    if device == "sim":
        from modelpool.pool.devices.sim import device as sim

        sim.install()
        budget_bytes = budget_bytes or 2 << 30
        sim.configure(0, budget_bytes)
    threads = torch.get_num_threads()
    return Engine.open(EngineSettings(device, 0, budget_bytes, threads=threads, **settings))
