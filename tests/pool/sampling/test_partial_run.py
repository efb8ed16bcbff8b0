"""A run in two parts, with what a sampler remembers handed on as arrays, is the run as a whole, bit for bit."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from modelpool.pool.conditioning.conditions import Condition
from modelpool.pool.conditioning.inpainting import Inpainting
from modelpool.pool.core.sampling_facts import Prediction
from modelpool.pool.core.stage_params import ModelRef, RunHooks, SampleParams, SamplerState
from modelpool.pool.guidance.sampling_run import denoise_images
from modelpool.pool.sampling.names import SAMPLERS
from modelpool.pool.sampling.partial_run import PartialRun, partial_run_of, sampler_states
from modelpool.pool.sampling.schedules import flow_table

CPU = torch.device("cpu")
SHAPE, SEEDS, STEPS = (4, 6, 6), (11, 12), 7
WORK = SampleParams(ModelRef("toy", "toy.safetensors", "00"), (), 48, 48, STEPS, 3.0, "euler", "normal", 0)
KINDS: dict[str, dict[str, Any]] = {
    "noise": {}, "flow": {"prediction": Prediction.FLOW, "table": flow_table(5.0)}
}  # fmt: skip


def predict(x_BCHW: Tensor, timestep_B: Tensor, context_BLD: Tensor) -> Tensor:
    """A model of nothing, that depends on all three."""
    mix = torch.sin(timestep_B) + context_BLD.mean(dim=(1, 2))
    return torch.tanh(x_BCHW) * 0.9 + mix[:, None, None, None] * 0.05


def run(work: SampleParams, part: PartialRun | None, kind: str, told: list[tuple[int, int]] | None = None) -> Tensor:
    texts = [Condition(torch.full((len(SEEDS), 7, 8), value)) for value in (0.3, -0.1)]
    hooks = RunHooks(lambda *step: None if told is None else told.append(step), lambda: False)
    kept = None
    if work.masked:
        kept = Inpainting(torch.full((1, *SHAPE), 0.5), torch.linspace(0, 1, 36).reshape(1, 1, 6, 6))
    more = {"inpainting": kept, "start_BCHW": None if kept is None else kept.latent_BCHW}
    return denoise_images(predict, work, SEEDS, SHAPE, *texts, CPU, hooks, part=part, **KINDS[kind], **more)


def travelled(halfway: SamplerState) -> SamplerState:
    """What comes out of another process."""
    arrived: SamplerState = pickle.loads(pickle.dumps(halfway))
    return arrived


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_two_parts_make_what_one_run_makes(sampler: str, kind: str) -> None:
    """Wherever it is cut: at the head, where a sampler has looked back to little yet, and in its last steps."""
    whole = replace(WORK, sampler=sampler)
    expected = run(whole, None, kind)
    for switch in range(1, STEPS):
        first, told = replace(whole, switch=switch), list[tuple[int, int]]()
        part = partial_run_of((first,), ((),), CPU)
        assert part is not None
        halfway = sampler_states(run(first, part, kind, told), part.memory)
        assert told == [(done, switch) for done in range(1, switch + 1)]
        second = replace(first, low_noise=True)
        rest = partial_run_of((second,) * 2, [(travelled(each),) for each in halfway], CPU)
        assert rest is not None
        told.clear()
        assert torch.equal(run(second, rest, kind, told), expected), switch
        assert told == [(done, STEPS - switch) for done in range(1, STEPS - switch + 1)]


@pytest.mark.parametrize("sampler", ["euler_ancestral", "uni_pc"])
def test_a_part_of_a_run_from_a_image_keeps_what_its_mask_keeps(sampler: str) -> None:
    """With the noise that the first part put on it, at the levels of a schedule whose head is left out."""
    whole = replace(WORK, sampler=sampler, first_step=2, starts=True, masked=True)
    expected = run(whole, None, "flow")
    first = replace(whole, switch=4)
    assert (whole.steps_run, first.steps_run, replace(first, low_noise=True).steps_run) == (5, 2, 3)
    part = partial_run_of((first,), ((),), CPU)
    assert part is not None
    halfway = sampler_states(run(first, part, "flow"), part.memory)
    second = replace(first, low_noise=True)
    rest = partial_run_of((second,) * 2, [(each,) for each in halfway], CPU)
    assert torch.equal(run(second, rest, "flow"), expected)


def test_what_is_handed_on_is_one_images_own() -> None:
    """So that the second part may run beside other images than the first."""
    first = replace(WORK, sampler="uni_pc", switch=4)
    part = partial_run_of((first,), ((),), CPU)
    assert part is not None
    one, other = sampler_states(run(first, part, "noise"), part.memory)
    assert one.predictions_NCHW is not None
    assert one.predictions_NCHW.shape == (len(one.levels), *SHAPE) == (3, *SHAPE)
    assert not np.array_equal(one.samples_CHW, other.samples_CHW)
    second = replace(first, low_noise=True)
    both = run(second, partial_run_of((second,) * 2, ((one,), (other,)), CPU), "noise")
    turned = run(second, partial_run_of((second,) * 2, ((other,), (one,)), CPU), "noise")
    assert torch.equal(both, turned.flip(0))


def test_a_run_that_no_other_has_a_part_in_has_no_part() -> None:
    assert partial_run_of((WORK,), ((),), CPU) is None
    assert partial_run_of((replace(WORK, low_noise=True),), ((),), CPU) is None
    assert replace(WORK, low_noise=True).span == (0, STEPS)
