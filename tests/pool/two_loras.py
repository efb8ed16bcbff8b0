"""A tiny model with two LoRAs, and sampling runs of it that pause and go on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.values.core.stage_params import FloatArray, Latent, Result, RunState, SampleParams, task_id
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint, write_tiny_lora
from tests.pool.pipeline import QUIET, Pipeline, inputs_of

STEPS = 4


def catalog_of_two_loras(path: Path) -> Catalog:
    """Write "toy" and the LoRAs "twist" and "turn" to `path`."""
    write_tiny_checkpoint(path / "toy.safetensors", 1, metadata={"modelspec.resolution": "64x64"})
    write_tiny_lora(path / "twist.safetensors", 2)
    write_tiny_lora(path / "turn.safetensors", 5)
    return Catalog([path], [path], "sim")


def latent_of(
    pipe: Pipeline, work: SampleParams, texts: tuple[Result, ...], resume: RunState | None = None
) -> FloatArray:
    """The latent of a run to its end, from its start or from `resume`."""
    found = _ran(pipe, work, texts, 0, resume)
    assert isinstance(found, Latent)
    return found.samples_CHW


def paused(pipe: Pipeline, work: SampleParams, texts: tuple[Result, ...], pause_at: int) -> RunState:
    """The state of a run that pauses after a step."""
    state = _ran(pipe, work, texts, pause_at, None)
    assert isinstance(state, RunState)
    return state


def _ran(
    pipe: Pipeline, work: SampleParams, texts: tuple[Result, ...], pause_at: int, resume: RunState | None
) -> Result:
    done_steps = [0]
    hooks = replace(
        QUIET,
        on_step=lambda done, steps: done_steps.append(done),
        should_pause=lambda: done_steps[-1] == pause_at > 0,
    )
    task = replace(pipe.task(replace(work, conditions=())), task_id=task_id(work, {}))
    return pipe.engine.run(task, work, inputs_of(work, *texts), hooks, resume=resume)[0]
