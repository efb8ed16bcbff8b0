"""The sampler functions and wrappers of a run's options are called when and with what ComfyUI's users expect.

Each is checked against the formula written out; doing nothing gives the plain result, but for rounding where the
function sees clean latents.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from modelpool.pool.inference.conditioning.conditions import Condition
from modelpool.pool.inference.conditioning.inpainting import Inpainting
from modelpool.pool.inference.conditioning.starts import StartLatent
from modelpool.pool.inference.sampling.schedules import sd1_sigma_table
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.core.stage_params import (
    GuidanceParams,
    ModelRef,
    OutputShape,
    RunHooks,
    SampleParams,
    SamplingSchedule,
)
from modelpool.pool.weights.options.model_options import ModelOptions
from modelpool.pool.weights.options.run_context import extra_options
from modelpool.pool.weights.options.transformer_options import TransformerOptions
from modelpool.pool.weights.options.wrappers import WrapperPoint
from tests.pool.inference.sampling.one_image import denoise_image, guided

TABLE = sd1_sigma_table()
SIGMA, CFG = 3.0, 5.0
COND, UNCOND = torch.full((2, 7, 8), 0.4), torch.full((2, 7, 8), -0.2)
X = torch.randn(2, 4, 2, 2, generator=torch.Generator().manual_seed(0))
SHAPE = (4, 8, 8)
CPU = torch.device("cpu")
WORK = SampleParams(
    ModelRef("toy", "toy", "00"),
    (),
    OutputShape(64, 64),
    SamplingSchedule(5, "euler", "normal"),
    GuidanceParams(4.0),
    11,
)
QUIET = RunHooks(on_step=lambda done, steps: None, should_stop=lambda: False)
Args = dict[str, Any]


def predict_noise(x_BCHW: Tensor, timestep_B: Tensor, context_BLD: Tensor) -> Tensor:
    return torch.tanh(x_BCHW) + context_BLD.mean(dim=(1, 2))[:, None, None, None]


def clean(context: Tensor, x: Tensor = X, sigma: float = SIGMA) -> Tensor:
    return x - predict_noise(x / (1 + sigma**2) ** 0.5, torch.tensor(0.0), context) * sigma


def guess(options: ModelOptions, cfg: float = CFG, uncond: Tensor | None = UNCOND) -> Tensor:
    return guided(predict_noise, TABLE, COND, uncond, cfg, options)(X, SIGMA)


def plain_cfg(cond: Tensor, uncond: Tensor, cfg: float = CFG) -> Tensor:
    return uncond + (cond - uncond) * cfg


def image(options: ModelOptions | None = None, **more: Any) -> Tensor:
    cond, uncond = torch.full((7, 8), 0.3), torch.full((7, 8), -0.1)
    return denoise_image(predict_noise, WORK, SHAPE, cond, uncond, CPU, QUIET, options=options, **more)


def test_empty_options_are_no_options_bit_for_bit() -> None:
    assert torch.equal(image(ModelOptions()), image())


def test_a_cfg_function_gets_what_was_removed_and_returns_it_combined() -> None:
    seen: list[Args] = []

    def cfg_function(args: Args) -> Tensor:
        seen.append(args)
        return args["cond"] * 2.0 - args["uncond"]

    out = guess(ModelOptions().with_sampler_cfg_function(cfg_function))
    cond, uncond = clean(COND), clean(UNCOND)
    torch.testing.assert_close(out, X - ((X - cond) * 2.0 - (X - uncond)))
    (args,) = seen
    torch.testing.assert_close(args["cond_denoised"], cond)
    torch.testing.assert_close(args["uncond_denoised"], uncond)
    assert args["cond_scale"] == CFG
    assert args["sigma"].tolist() == args["timestep"].tolist() == [SIGMA] * 2
    assert args["input"] is X


def test_a_cfg_function_of_three_arguments_is_called_with_three() -> None:
    legacy = ModelOptions().with_sampler_cfg_function(lambda cond, uncond, scale: uncond + (cond - uncond) * scale)
    torch.testing.assert_close(guess(legacy), plain_cfg(clean(COND), clean(UNCOND)))


def test_pre_cfg_functions_change_predictions_one_after_the_other() -> None:
    options = ModelOptions().with_sampler_pre_cfg_function(lambda args: [p * 2.0 for p in args["conds_out"]])
    options = options.with_sampler_pre_cfg_function(lambda args: [p + 1.0 for p in args["conds_out"]])
    expected = plain_cfg(clean(COND) * 2.0 + 1.0, clean(UNCOND) * 2.0 + 1.0)
    torch.testing.assert_close(guess(options), expected)


def test_post_cfg_functions_change_the_guided_guess_one_after_the_other() -> None:
    options = ModelOptions().with_sampler_post_cfg_function(lambda args: args["denoised"] + args["cond_denoised"])
    options = options.with_sampler_post_cfg_function(lambda args: args["denoised"] * 0.5)
    cond = clean(COND)
    torch.testing.assert_close(guess(options), (plain_cfg(cond, clean(UNCOND)) + cond) * 0.5)


def test_calc_cond_batch_makes_the_predictions_in_place_of_the_run() -> None:
    called: list[int] = []

    def calc(args: Args) -> list[Tensor]:
        called.append(len(args["conds"]))
        assert isinstance(args["conds"][0], Condition)
        return [args["input"] * 0.1, args["input"] * 0.2]

    def never(*_: Tensor) -> Tensor:
        raise AssertionError("the model ran")

    options = ModelOptions().with_sampler_calc_cond_batch_function(calc)
    out = guided(never, TABLE, COND, UNCOND, CFG, options)(X, SIGMA)
    torch.testing.assert_close(out, plain_cfg(X * 0.1, X * 0.2))
    assert called == [2]


def test_a_model_function_wrapper_is_around_every_model_call() -> None:
    seen: list[list[int]] = []

    def wrapper(apply_model: Any, args: Args) -> Tensor:
        seen.append(args["cond_or_uncond"])
        return apply_model(args["input"], args["timestep"], **args["c"]) * 0.5

    out = guess(ModelOptions().with_model_function_wrapper(wrapper))
    torch.testing.assert_close(out, plain_cfg(clean(COND) * 0.5, clean(UNCOND) * 0.5))
    assert seen == [[1, 0]]


def test_a_model_function_wrapper_may_ask_at_another_noise_level() -> None:
    options = ModelOptions().with_model_function_wrapper(
        lambda apply_model, args: apply_model(args["input"], args["timestep"] * 0 + 1.5, **args["c"])
    )
    expected = plain_cfg(clean(COND, sigma=1.5), clean(UNCOND, sigma=1.5))
    torch.testing.assert_close(guess(options), expected)


def test_a_model_function_wrapper_and_wrappers_of_the_model_call_go_together() -> None:
    """The former with ComfyUI's keywords, the latter with what their point says, wherever they are called from."""
    order: list[str] = []

    def around(executor: Any, x: Tensor, sigma: Tensor, context: Tensor) -> Tensor:
        order.append("wrapper")
        return executor(x, sigma, context) * 0.5

    def function(apply_model: Any, args: Args) -> Tensor:
        order.append("function")
        return apply_model(args["input"], args["timestep"], **args["c"])

    options = ModelOptions().with_wrapper(WrapperPoint.APPLY_MODEL, around).with_model_function_wrapper(function)
    torch.testing.assert_close(guess(options), plain_cfg(clean(COND) * 0.5, clean(UNCOND) * 0.5))
    assert order == ["function", "wrapper"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"transformer_options": TransformerOptions().with_middle_block_patch(lambda h, extra: h)},
            "transformer_options",
        ),
        ({"c_concat": torch.ones(1)}, "c_concat"),
    ],
)
def test_what_a_model_function_wrapper_cannot_change_is_refused(changes: Args, named: str) -> None:
    def function(apply_model: Any, args: Args) -> Tensor:
        return apply_model(args["input"], args["timestep"], **{**args["c"], **changes})

    with pytest.raises(UnusableField, match=named):
        guess(ModelOptions().with_model_function_wrapper(function))


@pytest.mark.parametrize(("disabled", "ran"), [(False, [[0]]), (True, [[1, 0]])])
def test_cfg_1_runs_the_negative_prompt_only_when_asked_to(disabled: bool, ran: list[list[int]]) -> None:
    seen: list[list[int]] = []

    def wrapper(apply_model: Any, args: Args) -> Tensor:
        seen.append(args["cond_or_uncond"])
        return apply_model(args["input"], args["timestep"], **args["c"])

    options = ModelOptions().with_model_function_wrapper(wrapper).with_disable_cfg1_optimization(disabled)
    torch.testing.assert_close(guess(options, cfg=1.0), clean(COND))
    assert seen == ran


def test_a_function_may_ask_for_the_negative_prompt_itself() -> None:
    options = ModelOptions().with_sampler_cfg_function(lambda args: args["cond"], disable_cfg1_optimization=True)
    assert options.disable_cfg1_optimization
    assert ModelOptions().with_sampler_post_cfg_function(lambda args: args["denoised"], True).disable_cfg1_optimization
    assert not options.with_disable_cfg1_optimization(False).disable_cfg1_optimization


def test_without_a_negative_prompt_its_prediction_is_zero() -> None:
    seen: list[Args] = []
    options = ModelOptions().with_sampler_post_cfg_function(lambda args: (seen.append(args), args["denoised"])[1])
    torch.testing.assert_close(guess(options, cfg=1.0, uncond=None), clean(COND))
    assert not seen[0]["uncond_denoised"].any()
    assert seen[0]["uncond"] is None


def test_functions_that_do_nothing_change_rounding_only() -> None:
    options = (
        ModelOptions()
        .with_sampler_pre_cfg_function(lambda args: args["conds_out"])
        .with_sampler_post_cfg_function(lambda args: args["denoised"])
        .with_model_function_wrapper(lambda apply, args: apply(args["input"], args["timestep"], **args["c"]))
    )
    torch.testing.assert_close(image(options), image(), rtol=1e-4, atol=1e-4)


def wrapper(name: str, order: list[str]) -> Any:
    def around(executor: Any, *args: Any, **kwargs: Any) -> Any:
        order.append(name)
        return executor(*args, **kwargs)

    return around


def test_wrappers_are_called_from_the_outside_in_at_every_point() -> None:
    order: list[str] = []
    options = ModelOptions()
    points = [p for p in WrapperPoint if p is not WrapperPoint.DIFFUSION_MODEL]
    for point in points:
        options = options.with_wrapper(point, wrapper(point.value, order))
    torch.testing.assert_close(image(options), image(), rtol=1e-4, atol=1e-4)
    a_step = ["predict_noise", "calc_cond_batch", "apply_model"]
    assert order == ["outer_sample", "prepare_sampling", "sampler_sample", *a_step * WORK.schedule.steps]


@pytest.mark.parametrize(
    "point",
    [
        WrapperPoint.OUTER_SAMPLE,
        WrapperPoint.PREPARE_SAMPLING,
        WrapperPoint.SAMPLER_SAMPLE,
        WrapperPoint.PREDICT_NOISE,
    ],
)
def test_wrappers_outside_the_predictions_cost_no_bit(point: WrapperPoint) -> None:
    assert torch.equal(image(ModelOptions().with_wrapper(point, wrapper("", []))), image())


def test_wrappers_nest_in_the_order_of_their_adding_and_may_stop_the_chain() -> None:
    order: list[str] = []
    options = ModelOptions()
    for name in ("first", "second"):
        options = options.with_wrapper(WrapperPoint.PREDICT_NOISE, wrapper(name, order), key=name)
    guess(options)
    assert order == ["first", "second"]
    stopped = options.with_wrapper(WrapperPoint.PREDICT_NOISE, lambda executor, x, sigma: x * 7.0)
    assert torch.equal(guess(stopped), X * 7.0)
    without = stopped.wrappers.without(WrapperPoint.PREDICT_NOISE, "")
    assert without == options.wrappers


def test_transformer_patches_are_told_the_noise_level_and_who_is_in_the_batch() -> None:
    told: list[dict[str, Any]] = []

    def model(x: Tensor, t: Tensor, context: Tensor) -> Tensor:
        told.append(extra_options(TransformerOptions()))
        return x

    options = ModelOptions(TransformerOptions().with_middle_block_patch(lambda h, extra: h))
    cond, uncond = torch.zeros(7, 8), torch.ones(9, 8)
    denoise_image(model, WORK, SHAPE, cond, uncond, CPU, QUIET, options=options)
    assert [t["cond_or_uncond"] for t in told[:2]] == [[1], [0]]
    assert torch.equal(torch.cat([t["sigmas"] for t in told[::2]]), told[0]["sample_sigmas"][:-1].float())


def test_conditions_with_different_hooks_run_apart_each_with_its_own() -> None:
    calls: list[Any] = []

    def model(x: Tensor, t: Tensor, context: Tensor) -> Tensor:
        calls.append(len(x))
        return predict_noise(x, t, context)

    def apply_hooks(hooks: object | None, sigma: float) -> None:
        calls.append((hooks, sigma))

    cond, uncond = Condition(COND[:1], "a"), Condition(UNCOND[:1], None)
    x = X[:1]
    out = guided(model, TABLE, cond, uncond, CFG, None, apply_hooks)(x, SIGMA)
    assert calls == [(None, SIGMA), 1, ("a", SIGMA), 1]
    torch.testing.assert_close(out, plain_cfg(clean(COND[:1], x), clean(UNCOND[:1], x)))
    calls.clear()
    guided(model, TABLE, cond, Condition(UNCOND[:1], "a"), CFG, None, apply_hooks)(x, SIGMA)
    assert calls == [("a", SIGMA), 2]


def inpainting() -> Inpainting:
    mask = torch.zeros(1, 1, *SHAPE[1:])
    mask[..., :4] = 1.0
    return Inpainting(torch.full((1, *SHAPE), 0.7), mask)


def test_what_the_mask_keeps_is_kept_exactly() -> None:
    out = image(start=StartLatent(inpainting=inpainting()))
    assert torch.equal(out[..., 4:], torch.full((4, 8, 4), 0.7))
    assert out[..., :4].std() > 0.1


def test_the_denoise_mask_function_sees_every_level_and_changes_the_mask() -> None:
    levels: list[float] = []

    def everything(sigma: Tensor, mask: Tensor, more: Args) -> Tensor:
        levels.append(float(sigma[0]))
        assert len(more["sigmas"]) == WORK.schedule.steps + 1
        return torch.ones_like(mask)

    options = ModelOptions().with_denoise_mask_function(everything)
    kept = dataclasses.replace(inpainting(), latent_BCHW=torch.zeros(1, *SHAPE))
    torch.testing.assert_close(image(options, start=StartLatent(inpainting=kept)), image(), rtol=1e-5, atol=1e-5)
    assert len(levels) == WORK.schedule.steps
    assert levels == sorted(levels, reverse=True)
    assert torch.equal(image(options), image())


@pytest.mark.parametrize(
    "shape", [(8, 8), (1, 8, 8), (1, 1, 8, 4), (1, 1, 16, 16), (1, 3, 8, 8), (2, 1, 8, 8)], ids=str
)
def test_a_mask_of_another_shape_than_the_latent_is_refused_with_both(shape: tuple[int, ...]) -> None:
    found, expected = re.escape(str(shape)), re.escape("(1, 1 or 4, 8, 8)")
    wrong = dataclasses.replace(inpainting(), denoise_mask_B1HW=torch.ones(shape))
    with pytest.raises(UnusableField, match=rf"denoise_mask_B1HW.*{found}.*{expected}"):
        image(start=StartLatent(inpainting=wrong))
    options = ModelOptions().with_denoise_mask_function(lambda sigma, mask, more: torch.ones(shape))
    with pytest.raises(UnusableField, match=rf"denoise_mask_function.*{found}.*{expected}"):
        image(options, start=StartLatent(inpainting=inpainting()))


def test_a_kept_latent_of_another_shape_is_refused_with_both() -> None:
    wrong = dataclasses.replace(inpainting(), latent_BCHW=torch.zeros(1, 4, 4, 4))
    with pytest.raises(UnusableField, match=r"latent_BCHW.*\(1, 4, 4, 4\).*\(1, 4, 8, 8\)"):
        image(start=StartLatent(inpainting=wrong))


def test_a_mask_may_have_the_latents_channels() -> None:
    wide = dataclasses.replace(inpainting(), denoise_mask_B1HW=inpainting().denoise_mask_B1HW.expand(1, 4, 8, 8))
    assert torch.equal(image(start=StartLatent(inpainting=wide)), image(start=StartLatent(inpainting=inpainting())))
