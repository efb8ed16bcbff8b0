"""Sampling runs of a job again, with changes that a program makes at the patcher instead of options of the request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from modelpool.pool.engine.sampling_stage import sample_batch
from modelpool.pool.values.core.run_options import NO_OPTIONS
from modelpool.pool.values.core.stage_params import FloatArray, Latent, SampleParams
from modelpool.pool.values.core.task_inputs import TaskInputs
from modelpool.pool.values.specs.spec import Role
from modelpool.pool.weights.options.model_options import ModelOptions
from tests.pool.families.tiny_model import QUIET, Made, TinyModel
from tests.pool.input_names import results_read


def sampled_by_hand(tiny: TinyModel, made: Made, change: Callable[[ModelOptions], ModelOptions]) -> FloatArray:
    """The latent of the sampling of `made` without its options, by a clone of the patcher with the options `change`."""
    (place,) = [place for place, task in enumerate(made.tasks) if isinstance(made.works[task.task_id], SampleParams)]
    task = made.tasks[place]
    work = made.works[task.task_id]
    assert isinstance(work, SampleParams)
    opened = tiny.engine._opened(tiny.model)
    patcher = tiny.engine.patcher(tiny.model, Role.DIFFUSION_MODEL).clone()
    patcher.state = patcher.state.with_options(change)
    work, inputs = replace(work, options=NO_OPTIONS), TaskInputs(results_read(task, made.results))
    facts = opened.checkpoint.family.sampling
    (found,) = sample_batch((work,), (inputs,), patcher, opened.latent, QUIET, facts=facts)
    assert isinstance(found, Latent)
    return found.samples_CHW
