"""The stages of one image on one engine, as the scheduler would order them, and engines to run them on."""

from __future__ import annotations

import numpy as np

from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.devices.sim import device as sim
from modelpool.pool.devices.vram_policy import VramPolicy
from modelpool.pool.engine.engine import AHEAD_SHARE, Engine, EngineSettings
from modelpool.pool.values.core.stage_params import (
    DecodeParams,
    EncodeParams,
    GuidanceParams,
    ImagePixels,
    OutputShape,
    Result,
    RunHooks,
    SampleParams,
    SamplingSchedule,
    StageParams,
    stage_of,
    task_id,
)
from modelpool.pool.values.specs.spec import ComponentKey, Role, RunCost, TaskSpec
from modelpool.pool.weights.plan.eviction_plan import needed_bytes
from tests.pool.input_names import inputs_of

QUIET = RunHooks(on_step=lambda done, steps: None, should_stop=lambda: False)
PLENTY_BYTES = 256 << 20
STEPS = 2


class Pipeline:
    """Runs the stages of one image on an engine, as the scheduler would order them."""

    def __init__(self, engine: Engine, catalog: Catalog, loras: dict[str, float], is_divisible: bool = False) -> None:
        self.engine, self.catalog, self.is_divisible = engine, catalog, is_divisible
        self.model = catalog.find_model("toy")
        self.loras = tuple(catalog.find_lora(name, strength) for name, strength in loras.items())
        self.costs: list[RunCost] = []

    def task(self, work: StageParams) -> TaskSpec:
        role = {"encode": Role.TEXT_ENCODER, "sample": Role.DIFFUSION_MODEL, "decode": Role.VAE}[stage_of(work).value]
        loras = () if isinstance(work, DecodeParams) else work.loras
        use = self.catalog.use(self.model, role, loras, work.schedule.steps if isinstance(work, SampleParams) else 1)
        activation_bytes = self.catalog.figures.activation_bytes(self.model, work)
        divisions = self.catalog.figures.divisions(self.model, work) if self.is_divisible else ()
        return TaskSpec(task_id(work, {}), stage_of(work), (use,), activation_bytes, 0.1, divisions=divisions)

    def run(
        self, work: StageParams, *inputs: Result, hooks: RunHooks = QUIET, needed_next: tuple[ComponentKey, ...] = ()
    ) -> Result:
        result, cost = self.engine.run(self.task(work), work, inputs_of(work, *inputs), hooks, needed_next=needed_next)
        self.costs.append(cost)
        return result

    def works(self) -> tuple[EncodeParams, EncodeParams, SampleParams, DecodeParams]:
        sample = SampleParams(
            self.model,
            self.loras,
            OutputShape(64, 64),
            SamplingSchedule(STEPS, "euler_ancestral", "normal"),
            GuidanceParams(4.0),
            7,
        )
        return (
            EncodeParams(self.model, self.loras, "a (red:1.3) circle"),
            EncodeParams(self.model, self.loras, ""),
            sample,
            DecodeParams(self.model, OutputShape(64, 64)),
        )

    def image(self) -> np.ndarray:
        prompt, negative, sample, decode = self.works()
        encoded = (self.run(prompt), self.run(negative))
        image = self.run(decode, self.run(sample, *encoded))
        assert isinstance(image, ImagePixels)
        return image.pixels_HWC

    def smallest_bytes(self) -> int:
        tasks = [self.task(work) for work in self.works()]
        return max(needed_bytes(t.uses, t.activation_bytes) for t in tasks)

    def streaming_budget_bytes(self, share: float, workspaces_bytes: int | None = None) -> int:
        """The budget of a CUDA engine in which each stage runs, with `share` of the diffusion model's weights resident
        if no other stage needs more. Copies ahead of use, and workspaces (by default of the engine), come out of a
        budget."""
        sample = self.task(self.works()[2])
        weight_bytes = self.catalog.components(self.model)[Role.DIFFUSION_MODEL].weight_bytes
        wanted_bytes = needed_bytes(sample.uses, sample.activation_bytes) + int(share * weight_bytes)
        if workspaces_bytes is None:
            workspaces_bytes = self.engine.introduce().overhead_bytes - self.engine._pipeline.ahead_bytes
        wanted_bytes = max(wanted_bytes, self.smallest_bytes()) + workspaces_bytes
        return -(-wanted_bytes * AHEAD_SHARE // (AHEAD_SHARE - 1))


def open_engine(device: str, budget_bytes: int, policy: VramPolicy = VramPolicy.NORMAL) -> Engine:
    """An engine with `budget_bytes`; of the simulated device the only user, with nothing wrong with it."""
    if device == "sim":
        sim.install()
        sim.configure(0, budget_bytes)
        sim.recover(0)
        sim.reset_peak(0)
    return Engine.open(EngineSettings(device, 0, budget_bytes, vram_policy=policy))
