"""The sampling runs of a request, and the tasks that they read. Values and pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from modelpool.actors.graph.common.input_ids import input_image_id
from modelpool.actors.graph.common.output_shape import size_of
from modelpool.actors.request.image_fields import skipped_steps
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.sampling_facts import ModelDefaults, SamplingFacts
from modelpool.pool.values.core.stage_params import EncodeImageParams, ModelRef, StageParams
from modelpool.pool.values.core.task_inputs import IMAGE, MASK
from modelpool.pool.values.specs.spec import Role, TaskId


@dataclass(frozen=True, slots=True)
class SamplingRun:
    """One run of a diffusion model for a request with its defaults filled in.

    defaults    of `model`, the model of the request
    steps       length of the full schedule
    cfg         as requested
    first_step, switch, low_noise  as in `pool.values.core.stage_params.SamplingSchedule`
    scale       factor of the sizes of the request
    is_second   the second pass: it starts from the result of the first
    reads_prior  the second model of two, on the latent of the first one
    """

    request: GenerateRequest
    model: ModelRef
    defaults: ModelDefaults
    steps: int
    cfg: float
    first_step: int = 0
    scale: float = 1.0
    is_second: bool = False
    switch: int = 0
    low_noise: bool = False
    reads_prior: bool = False

    @property
    def facts(self) -> SamplingFacts:
        """Sampling facts of the model."""
        return self.defaults.sampling

    @property
    def role(self) -> Role:
        """The diffusion model that runs."""
        return Role.DIFFUSION_MODEL_2 if self.low_noise else Role.DIFFUSION_MODEL

    @property
    def seed(self) -> int:
        """The seed of the noise."""
        assert self.request.seed is not None, "the client draws missing seeds"
        return self.request.seed

    def size(self, scale: float = 1.0) -> tuple[int, int]:
        """Return width and height of the image that `scale` gives, in pixels; 0 for audio. Raises UnusableField."""
        return size_of(self.request, self.model.name, self.defaults, scale)


@dataclass(frozen=True, slots=True)
class StageTask:
    """The parameters of a task, and the tasks or input images that it reads, by name."""

    work: StageParams
    needs: Mapping[str, TaskId]


def sampling_passes(request: GenerateRequest, model: ModelRef, defaults: ModelDefaults) -> tuple[SamplingRun, ...]:
    """Return the passes over `request`: one, or with `hires` a second one over the scaled result of the first. Raises
    UnusableField for a strength that leaves no step."""
    rounds_up, hires = defaults.sampling.rounds_steps_up, request.hires
    first = SamplingRun(request, model, defaults, request.steps, request.cfg, request.first_step(rounds_up))
    if hires is None:
        return (first,)
    steps = hires.steps or request.steps
    skipped = skipped_steps("hires.strength", hires.strength, steps, rounds_up)
    return first, SamplingRun(request, model, defaults, steps, request.cfg, skipped, hires.scale, is_second=True)


def start_image_task(run: SamplingRun, is_masked: bool = False) -> StageTask:
    """Return the encoding of the image that `run` starts from; `is_masked` hides the part under the mask."""
    request = run.request
    needs = {IMAGE: input_image_id(request.image)}
    if is_masked:
        needs[MASK] = input_image_id(request.mask, is_mask=True)
    return StageTask(EncodeImageParams(run.model, *run.size(), hides=is_masked), needs)
