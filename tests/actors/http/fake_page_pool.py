"""A pool of fake engines for tests of the page: models and LoRAs with listings, and prompts that take time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from modelpool.actors.client.client import ModelPool
from modelpool.pool.catalog.registry.listings import FileNames, LoraListing, ModelListing
from modelpool.pool.values.core.stage_params import Result, RunHooks, RunState, SampleParams, Stopped
from modelpool.scheduler.model.config import SchedulerConfig
from tests.actors.fakes import LORAS, FakeCatalog, FakeEngine, text_of
from tests.actors.loop_connection import LoopConnection

#: a prompt with it samples until it is stopped, a step in STEP_SECONDS
SLOW = "SLOW"
STEP_SECONDS = 0.05


class PageCatalog(FakeCatalog):
    """Two models and a ControlNet, listed as a registry would."""

    def models(self) -> tuple[ModelListing, ...]:
        return tuple(ModelListing(name, f"{name}.safetensors", "SD 1.5", 1, 64, 64) for name in ("shapes", "forms"))

    def loras(self) -> tuple[LoraListing, ...]:
        return tuple(LoraListing(name, f"{name}.safetensors", 1) for name in LORAS)

    def file_names(self) -> FileNames:
        return FileNames(controlnets=("edges",))


class PacedEngine(FakeEngine):
    """Takes its time where the prompt says so."""

    def _sample(
        self, inputs: Mapping[str, Result], work: SampleParams, hooks: RunHooks, resume: RunState | None
    ) -> RunState | None:
        if SLOW not in text_of(inputs["positive"]):
            return super()._sample(inputs, work, hooks, resume)
        for step in range(1, 10_000):
            if hooks.should_stop():
                raise Stopped
            hooks.on_step(step, 10_000)
            time.sleep(STEP_SECONDS)
        return None


def open_page_pool(workers: int = 2, output: Path | None = None) -> ModelPool:
    """Open it; closing it ends everything."""
    # the scheduler cannot know which runs are slow: it would queue short ones behind them
    line = LoopConnection(workers, PacedEngine, PageCatalog, SchedulerConfig(send_ahead_seconds=0.0))
    return ModelPool(line, line.end, output)
