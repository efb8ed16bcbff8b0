"""How models for video and audio, Stable Cascade and special UNets are called: bit for bit as diffusers' pipelines do.

A pipeline takes a step with a tiny model, and what the model is given and gives there is compared with our call for the
same latent: padding, masks, positions, frame rates, channels of images, signs and the scale of time are the
pipeline's own. Encoders of images are replaced by what the case says that they gave.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from diffusers.models.transformers import transformer_cosmos
from diffusers.pipelines.stable_audio.modeling_stable_audio import StableAudioProjectionModel
from torch import Tensor
from torch.nn import functional

from modelpool.pool.families.definitions.stable_audio import seconds_states
from modelpool.pool.models.components.diffusion.audio_seconds import plan_seconds
from modelpool.pool.models.components.diffusion.build_diffusion_model import plan_diffusion_model
from tests.pool.models.components.diffusion.video_cases import CASES, Case, ModelKwargs
from tests.pool.models.components.diffusion.video_pipelines import PIPELINES, ByRatio, Pipeline, frames_last
from tests.pool.models.components.diffusion.video_published import seconds
from tests.pool.zoo.case import quiet_libraries


@dataclass
class Seen:
    """The first call of the model: the latent, what the scheduler calls its level, what the model gave."""

    latent: Tensor | None = None
    timestep: Tensor | None = None
    answer: Tensor | None = None


class _Enough(Exception):
    """The model was called; nothing that comes after it is looked at."""


def first_call(pipeline: Pipeline, module: Any, x: Tensor, told: ModelKwargs) -> Seen:
    """What the model is given and gives in the first step of `pipeline`."""
    scheduler = pipeline.scheduler()
    named = set(inspect.signature(pipeline.cls.__init__).parameters) - {"self"}
    required = {
        name for name, p in inspect.signature(pipeline.cls.__init__).parameters.items()
        if p.default is inspect.Parameter.empty and name != "self"
    }  # fmt: skip
    parts = dict.fromkeys(required) | {pipeline.part: module, "scheduler": scheduler} | dict(pipeline.parts)
    assert set(parts) <= named
    pipe = pipeline.cls(**parts)
    pipe.set_progress_bar_config(disable=True)
    for name, stub in pipeline.stubs(x, told).items():
        object.__setattr__(pipe, name, stub)
    seen = Seen()
    scale = getattr(scheduler, "scale_model_input", None)

    if scale is not None:

        def scaled(sample: Tensor, timestep: Any, *rest: Any) -> Tensor:
            latent: Tensor = scale(sample, timestep, *rest)
            seen.latent = latent
            return latent

        scheduler.scale_model_input = scaled

    def watch(_: Any, args: Any, kwargs: Any, output: Any) -> None:
        seen.answer, seen.timestep = output[0].clone(), scheduler.timesteps[0]
        raise _Enough

    hook = module.register_forward_hook(watch, with_kwargs=True)
    try:
        with pytest.raises(_Enough):
            pipe(
                num_inference_steps=2, output_type="latent", generator=torch.Generator().manual_seed(3),
                **pipeline.given(x, told),
            )  # fmt: skip
    finally:
        hook.remove()
    return seen


class _Resize:
    """What diffusers' Cosmos wants of torchvision, which is no dependency: the padding of nothing is zeros."""

    class InterpolationMode:
        NEAREST = "nearest"

    class functional:  # noqa: N801 - torchvision's name for it
        @staticmethod
        def resize(mask: Tensor, size: list[int], interpolation: str) -> Tensor:
            return functional.interpolate(mask, size, mode=interpolation)


def built(case: Case, module: Any) -> tuple[Any, Any]:
    """Our plan and module over the state of diffusers' `module`, as published."""
    file = case.file(module)
    plan = plan_diffusion_model({key: tuple(tensor.shape) for key, tensor in file.items()}, config=case.hints or None)
    return plan, plan.build(file)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("pipeline", PIPELINES, ids=lambda pipeline: pipeline.name)
def test_a_call_is_what_the_pipeline_does(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer_cosmos, "transforms", _Resize, raising=False)
    case = CASES[pipeline.name]
    theirs = case.module()
    plan, ours = built(case, theirs)
    x, _, told = case.inputs()
    with torch.no_grad(), quiet_libraries():
        seen = first_call(pipeline, theirs, x, told)
        assert seen.answer is not None
        assert seen.timestep is not None
        shown = x if seen.latent is None else seen.latent
        if shown.dim() == 5 and pipeline.answer is frames_last:
            shown = shown.transpose(1, 2)
        if pipeline.scheduler is ByRatio:
            shown = x * 0.5  # of what is as far from the image as the image is from nothing
        if pipeline.image_as_seen:
            told = {**told, "image": shown}
        given = plan.call(ours, shown, pipeline.level(seen.timestep).reshape(1), told)
    expected = pipeline.answer(seen.answer, x)[:, : x.shape[1]]
    if pipeline.kept:
        frames = told["image_mask"].expand(-1, -1, *x.shape[2:]).bool()
        level = pipeline.level(seen.timestep)
        shown_image = (shown - told["image"]) / level
        assert torch.equal(given.where(frames, 0), shown_image.where(frames, 0)), "leads to the image"
        given, expected = given.where(~frames, 0), expected.where(~frames, 0)
    if pipeline.off:
        torch.testing.assert_close(given, expected, rtol=0, atol=pipeline.off)
    else:
        assert torch.equal(given, expected)


def test_seconds_are_embedded_as_the_pipeline_does() -> None:
    """Beside the diffusion model, with the names of the file."""
    torch.manual_seed(0)
    theirs = StableAudioProjectionModel(12, 12, 0, 512).requires_grad_(False)
    file = {key: tensor.clone() for key, tensor in seconds(theirs.state_dict()).items()} | {"model.x": torch.ones(1)}
    plan = plan_seconds({key: tuple(tensor.shape) for key, tensor in file.items()})
    ours = plan.build(file)
    start, total = torch.tensor([0.0, 2.0]), torch.tensor([47.55, 600.0])
    expected = theirs(start_seconds=start, end_seconds=total)
    given = seconds_states(ours, start, total)
    assert torch.equal(given[:, :1], expected.seconds_start_hidden_states)
    assert torch.equal(given[:, 1:], expected.seconds_end_hidden_states)
    saved = plan.save(ours, file)
    assert saved.keys() == file.keys() - {"model.x"}
    assert all(torch.equal(saved[key], file[key]) for key in saved)
    again = plan_seconds({key: tuple(tensor.shape) for key, tensor in theirs.state_dict().items()})
    assert torch.equal(seconds_states(again.build(theirs.state_dict()), start, total), given)
