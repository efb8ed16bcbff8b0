"""Runs of a part of the steps: with the noise that is left, two runs are one. For flow models, too: ComfyUI divides the
latent by the share that is no noise, and multiplies it again."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from modelpool.pool.inference.conditioning.conditions import Condition
from modelpool.pool.inference.conditioning.prompts import Prompts
from modelpool.pool.inference.conditioning.starts import NOISE_ONLY, StartLatent
from modelpool.pool.inference.guidance.guided_steps import ModelCall
from modelpool.pool.inference.guidance.guiders import ClassifierFreeGuidance
from modelpool.pool.inference.guidance.sampling_run import ImagesToDenoise, denoise_images
from modelpool.pool.inference.sampling.schedules import flow_table, sd1_sigma_table
from modelpool.pool.values.core.sampling_facts import Prediction
from modelpool.pool.values.core.stage_params import StepPart
from tests.each_case import each_case
from tests.pool.changed_work import changed_work
from tests.pool.inference.guidance.test_sampling_run import COND, CPU, QUIET, SHAPE, WORK, predict_noise

TABLES = {Prediction.NOISE: sd1_sigma_table(), Prediction.FLOW: flow_table(3.0)}
EULER = changed_work(WORK, sampler="euler", noise_schedule="normal", cfg=1.0)


def run(prediction: Prediction, part: StepPart | None, first_step: int = 0, start: Tensor | None = None) -> Tensor:
    schedule = dataclasses.replace(EULER.schedule, first_step=first_step)
    work = dataclasses.replace(EULER, schedule=schedule, part=part)
    call = ModelCall(predict_noise, TABLES[prediction], prediction)
    begins = NOISE_ONLY if start is None else StartLatent(start[None])
    images = ImagesToDenoise(work, (work.seed,), SHAPE)
    prompts = Prompts(Condition(COND[None]), None)
    return denoise_images(images, prompts, call, ClassifierFreeGuidance(1.0), CPU, QUIET, begins)[0]


@each_case("prediction", TABLES)
def test_a_run_that_continues_with_the_noise_that_is_left_is_one_run(prediction: Prediction) -> None:
    left = run(prediction, StepPart(3, keeps_noise=True))
    clean = run(prediction, StepPart(3))
    whole = run(prediction, None)
    torch.testing.assert_close(run(prediction, StepPart(adds_noise=False), 3, left), whole, atol=1e-5, rtol=1e-5)
    noisy = run(prediction, None, 3, left)
    assert (noisy - whole).abs().max() > 0.01, "new noise on it is another image"
    assert (clean - left).abs().max() > 0.01, "without it, the last step removes all noise"
