"""Options that skip blocks of a transformer agree with diffusers; TeaCache with its paper's rule. Guidance of flows
agrees with the guiders of diffusers."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import diffusers
import pytest
import torch
from diffusers.guiders.classifier_free_zero_star_guidance import ClassifierFreeZeroStarGuidance
from diffusers.guiders.guider_utils import rescale_noise_cfg
from diffusers.hooks import FirstBlockCacheConfig, HookRegistry, apply_first_block_cache
from torch import Tensor, nn

from modelpool.pool.families.definitions import defined_families
from modelpool.pool.families.parts.teacache import TeaCacheFacts
from modelpool.pool.families.supported import running_families
from modelpool.pool.families.teacache_facts import TEACACHE_FACTS, teacache_facts
from modelpool.pool.inference.extensions.block_runs import ACROSS, FirstBlocks, ModulatedInputs, polynomial
from modelpool.pool.inference.extensions.run_extension import check_fits
from modelpool.pool.inference.guidance.guiders import (
    ClassifierFreeGuidance,
    DeviationRescaledGuidance,
    Predictions,
    ZeroStarGuidance,
)
from modelpool.pool.inference.sampling.partial_run import PartialRun
from modelpool.pool.inference.sampling.predictions import clean_latent
from modelpool.pool.inference.sampling.schedules import sd1_sigma_table
from modelpool.pool.inference.sampling.step_clock import StepClock
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.run_options import FirstBlockCache, RunOptions, SkipLayers, TeaCache
from modelpool.pool.values.core.sampling_facts import Prediction
from modelpool.pool.values.core.stage_params import SamplingSchedule
from modelpool.pool.weights.options.run_context import call_facts
from modelpool.pool.weights.patcher.blocks.diffusers_names import block_lists
from tests.each_case import each_case
from tests.pool.inference.extensions.extended import counted, extended, inner, latents
from tests.pool.inference.sampling.one_image import guided
from tests.pool.zoo import build
from tests.pool.zoo.case import Case, quiet_libraries, tensors_in
from tests.pool.zoo.image_transformers import IMAGE_TRANSFORMERS
from tests.pool.zoo.video_transformers import VIDEO_TRANSFORMERS

STEPS = 6


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad(), quiet_libraries():
        yield


def flux() -> Case:
    torch.manual_seed(0)
    module = diffusers.FluxTransformer2DModel(
        in_channels=4,
        num_layers=2,
        num_single_layers=2,
        num_attention_heads=2,
        attention_head_dim=16,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    case = build("flux")
    inputs = {name: value for name, value in case.inputs.items() if name != "guidance"}
    return Case(module.eval(), inputs)


def steps_of(case: Case, change: float, steps: int = STEPS, time: float = 0.02) -> Iterator[dict[str, Any]]:
    """Inputs of a few steps, each a little different from the one before, and one very different."""
    first = case.inputs["hidden_states"]
    for step in range(steps):
        moved = first + change * step * latents(*first.shape, seed=step) + 3.0 * (step == 3)
        yield {**case.inputs, "hidden_states": moved, "timestep": case.inputs["timestep"] * (1 - time * step)}


def output(module: nn.Module, inputs: dict[str, Any]) -> Tensor:
    plain: Any = module
    return tensors_in(plain(**inputs))[0]


@pytest.mark.parametrize("make", [flux, lambda: build("wan"), lambda: build("qwenimage")])
def test_fbcache_is_that_of_diffusers(make: Any) -> None:
    case = make()
    blocks = {f"{n}": inner(b) for n, (_, b) in enumerate(_blocks(case.module))}
    ours, calls = [], counted(blocks)
    for threshold in (0.2, 0.5):
        with extended(case.module, RunOptions(fbcache=FirstBlockCache(threshold=threshold)), steps=STEPS) as run:
            for step, inputs in enumerate(steps_of(case, 0.02)):
                run.step(step)
                ours.append(output(case.module, inputs))
    last = calls[str(len(blocks) - 1)]
    assert calls["0"] == 2 * STEPS
    assert 2 < last < 2 * STEPS, "no step, or each, was computed in full"
    expected = []
    for threshold in (0.2, 0.5):
        plain: Any = case.module
        apply_first_block_cache(plain, FirstBlockCacheConfig(threshold))
        registry = HookRegistry.check_if_exists_or_initialize(plain)
        with plain.cache_context("one"):
            expected += [output(plain, inputs) for inputs in steps_of(case, 0.02)]
        for name in ("fbc_leader_block_hook", "fbc_block_hook"):
            registry.remove_hook(name, recurse=True)
    for found, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(found, theirs, atol=1e-5, rtol=1e-5)


def _blocks(module: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(kind, block) for kind, found in block_lists(module) for block in found]


def test_slg_guides_away_from_what_diffusers_predicts_without_the_layers() -> None:
    case = build("sd35")
    plain: Any = case.module
    texts = latents(1, 7, 32, seed=1), latents(1, 7, 32, seed=2)
    x, sigma, table = latents(1, 4, 8, 8), 0.5, sd1_sigma_table()

    def predict(x: Tensor, t: Tensor, context: Tensor, **more: Any) -> Tensor:
        pooled = context.mean(1).repeat(1, 2)
        found = plain(x, encoder_hidden_states=context, pooled_projections=pooled, timestep=t, **more)
        predicted: Tensor = found.sample
        return predicted

    time = torch.full((1,), table.time_input(sigma))
    cond, uncond = (predict(x, time, text) for text in texts)
    skipped = predict(x, time, texts[0], skip_layers=[1])
    expected = x - sigma * (uncond + 5.0 * (cond - uncond) + 2.8 * (cond - skipped))
    with extended(plain, RunOptions(slg=SkipLayers(layers=(1,)))) as run:
        for step, wanted in ((1, expected), (2, x - sigma * (uncond + 5.0 * (cond - uncond)))):
            run.step(step)
            options = run.extension.model_options
            denoise = guided(predict, table, *texts, 5.0, options, prediction=Prediction.FLOW)
            torch.testing.assert_close(denoise(x, sigma), wanted, atol=1e-5, rtol=1e-5)
    with extended(plain, RunOptions(slg=SkipLayers(layers=(1,), rescale=0.6))) as run:
        run.step(1)
        denoise = guided(predict, table, *texts, 5.0, run.extension.model_options, prediction=Prediction.FLOW)
        # rescaled as the result of guidance by the negative prompt: to the deviation of the clean latent of the prompt
        factor = 0.6 * (x - sigma * cond).std() / expected.std() + 0.4
        torch.testing.assert_close(denoise(x, sigma), expected * factor, atol=1e-5, rtol=1e-5)
    with (
        pytest.raises(UserError, match=r"options.slg: found \('double_block', 7\), expected a block of this SD3"),
        extended(plain, RunOptions(slg=SkipLayers())),
    ):
        pass


#: a model of each kind of input, the row of its published coefficients, and its number of blocks
TEACACHE_CASES: dict[str, tuple[Callable[[], Case], int]] = {
    "flux_dev": (lambda: flux(), 4),
    "hunyuan_video": (lambda: build("hunyuanvideo"), 2),
    "ltxv": (lambda: build("ltxv"), 28),
    "mochi": (lambda: build("mochi"), 2),
    "lumina2": (lambda: build("lumina2"), 2),
    "omnigen2": (lambda: build("omnigen2"), 2),
    "cogvideox": (lambda: build("cogvideox"), 2),
    "wan_t2v": (lambda: build("wan"), 30),
}


def with_blocks(case: Case, count: int) -> Case:
    """Return `case` with `count` blocks, of which the last ones are those that it has."""
    ((_, last),) = list(block_lists(case.module))[-1:]
    missing = count - len(_blocks(case.module))
    for _ in range(missing):
        last.append(copy.deepcopy(last[-1]))
    return case


def measured_inputs(case: Case, of_vector: bool, steps: Sequence[dict[str, Any]]) -> list[Tensor]:
    """Return what TeaCache compares in each step: the input of the first attention, or the vector of the first block,
    as calls without options have it."""
    plain: Any = case.module
    first: Any = _blocks(plain)[0][1]
    watched, name = (first, "temb") if of_vector else (getattr(first, "attn1", getattr(first, "attn", None)), "")
    seen: list[Tensor] = []

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
        seen.append(bound[name or "hidden_states"].clone())

    hook = watched.register_forward_pre_hook(note, with_kwargs=True)
    for inputs in steps:
        plain(**inputs)
    hook.remove()
    return seen


def computed_steps(facts: TeaCacheFacts, seen: Sequence[Tensor], threshold: float) -> list[bool]:
    """Return whether each step is computed by the paper's rule: the change of the input since the last step, rescaled
    by the published polynomial and added up; the first steps and the last one are computed."""
    total, found = 0.0, list[bool]()
    for step, now in enumerate(seen):
        forced = step < facts.first_steps or step == len(seen) - 1
        if not forced:
            change = float((now - seen[step - 1]).abs().mean() / seen[step - 1].abs().mean())
            total += sum(c * change**power for power, c in enumerate(reversed(facts.coefficients)))
        found.append(forced or total >= threshold)
        total = 0.0 if found[-1] else total
    return found


@pytest.mark.parametrize("row", TEACACHE_CASES)
def test_teacache_skips_while_the_accumulated_change_is_below_its_threshold(row: str) -> None:
    make, count = TEACACHE_CASES[row]
    case = with_blocks(make(), count)
    plain: Any = case.module
    (facts, *_) = teacache_facts(row, count)
    steps = list(steps_of(case, 0.02, 10, time=0.0005 if facts.of_vector else 0.02))
    seen = measured_inputs(case, facts.of_vector, steps)
    # the tiny model is not the one that the coefficients are for: a threshold at which some steps are skipped
    forced = facts.first_steps + 1
    tried = ((t, computed_steps(facts, seen, t)) for t in (facts.threshold, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4))
    threshold, expected = next((t, e) for t, e in tried if forced < sum(e) < len(steps))
    calls = counted({"last": inner(_blocks(plain)[-1][1])})
    found = []
    with extended(plain, RunOptions(teacache=TeaCache(threshold=threshold)), len(steps), row) as run:
        for step, inputs in enumerate(steps):
            run.step(step)
            before = calls["last"]
            plain(**inputs)
            found.append(calls["last"] > before)
    assert found == expected


def test_teacache_without_a_threshold_has_the_published_one() -> None:
    case = flux()
    options = [RunOptions(teacache=TeaCache(threshold=t)) for t in (0.0, 0.25, 0.7)]
    found = []
    for each in options:
        with extended(case.module, each, STEPS, "flux_dev") as run:
            made = []
            for step, inputs in enumerate(steps_of(case, 0.02)):
                run.step(step)
                made.append(output(case.module, inputs))
        found.append(torch.stack(made))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_models_without_published_coefficients_of_teacache_are_refused() -> None:
    """By their family, or by their number of blocks: the sizes of Wan 2.1 have their own coefficients."""
    wan = build("wan")
    for row, module, message in (
        ("sd3", build("sd3").module, r"options\.teacache: found 'SD3Transformer2DModel of the family sd3 with 2 "
         r"blocks', expected one for which coefficients of TeaCache were published$"),
        ("wan_t2v", wan.module, r"WanTransformer3DModel of the family wan_t2v with 2 blocks', .*: 30, 40 blocks$"),
        ("wan22_i2v", with_blocks(build("wan"), 40).module, r"of the family wan22_i2v with 40 blocks"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message):
            check_fits(RunOptions(teacache=TeaCache()), module, row)
    check_fits(RunOptions(teacache=TeaCache()), with_blocks(wan, 40).module, "wan_t2v")
    assert all(len(facts.coefficients) == 5 for each in TEACACHE_FACTS.values() for facts in each)
    # a family that is derived from one of these inherits its coefficients, unless it says otherwise
    wan, cogvideox = ("wan_t2v", "wan21_i2v"), ("cogvideox", "cogvideox_2b", "cogvideox_i2v", "cogvideox_15")
    flux_models = ("flux_dev", "flux_schnell", "flux_fill", "flux_control")
    others = ("cogvideox_15_i2v", "hunyuan_video", "ltxv", "mochi", "lumina2", "omnigen2")
    assert TEACACHE_FACTS.keys() == {*wan, *cogvideox, *flux_models, *others}
    assert TEACACHE_FACTS.keys() <= running_families().keys()


def test_the_size_of_the_frames_selects_the_coefficients_of_the_image_to_video_model_of_wan() -> None:
    """Those for 480 and 720 lines have one layout: 832 x 480 and 1280 x 720 pixels."""
    small, large = teacache_facts("wan21_i2v", 40)
    clock = StepClock(SamplingSchedule(10, "euler", "normal"), PartialRun())
    values = {"img": torch.ones(1, 4, 8), "vec": torch.ones(1, 6, 8)}
    for (width, height), facts in (((832, 480), small), ((624, 624), small), ((1280, 720), large), ((960, 960), large)):
        cache = ModulatedInputs(clock, option=TeaCache(), block=nn.Identity(), published=(small, large))
        extra = {"original_shape": (1, 36, 21, height // 8, width // 8)}
        for clock.part.done in range(6):
            moved = {**values, "vec": values["vec"] * 1.01**clock.part.done, "transformer_options": extra}
            cache.first(moved, lambda v: v)
            if not cache.state(moved).skips:
                cache.last(moved, moved)
        assert cache.state(moved).accumulated == pytest.approx(polynomial(facts.coefficients, 0.01), rel=1e-3)


def test_the_polynomial_starts_with_the_highest_power() -> None:
    assert polynomial((2.0, 3.0, 5.0), 10.0) == 235.0


#: the classes of diffusers of models with blocks that options may skip, and of some without
SKIPPED = {family.module for family in defined_families() if family.options.skips_blocks}
WITHOUT_SKIPPED_BLOCKS = (
    "HunyuanDiT2DModel",
    "HiDreamImageTransformer2DModel",
    "SanaTransformer2DModel",
    "StableAudioDiTModel",
)


@each_case("name", [*IMAGE_TRANSFORMERS, *VIDEO_TRANSFORMERS])
def test_every_supported_transformer_repeats_its_prediction_for_equal_inputs(name: str) -> None:
    case = build(name)
    kind = type(case.module).__name__
    options = [(RunOptions(fbcache=FirstBlockCache()), "")] * (kind in SKIPPED)
    for row, (make, count) in TEACACHE_CASES.items():
        if type(make().module).__name__ == kind:
            case = with_blocks(case, count)
            options.append((RunOptions(teacache=TeaCache(threshold=10.0)), row))
    if not options:
        assert kind in WITHOUT_SKIPPED_BLOCKS, f"{kind} has no option that skips blocks"
        return
    plain = case.run()
    for each, row in options:
        with extended(case.module, each, row=row) as run:
            for step in range(2):
                run.step(step)
                for found, expected in zip(case.run(), plain, strict=True):
                    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_each_group_of_texts_has_its_own_state() -> None:
    """A call for other texts is no reason to skip: with equal inputs, the first call of each is computed."""
    case = build("sd3")
    plain: Any = case.module
    calls = counted({"last": inner(plain.transformer_blocks[1])})
    with extended(case.module, RunOptions(fbcache=FirstBlockCache())) as run:
        for step in range(2):
            run.step(step)
            for members in ((0,), (1,)):
                with call_facts(members=members):
                    case.run()
            with call_facts(members=(0,), perturbed="slg"):
                case.run()
    assert calls["last"] == 3


@pytest.mark.parametrize("options", [RunOptions(fbcache=FirstBlockCache()), RunOptions(teacache=TeaCache(10.0))])
def test_a_skipped_step_adds_the_residuals_of_a_controlnet_once(options: RunOptions) -> None:
    """They are added after each block, also of those that are skipped."""
    case = flux()
    rows, width = case.inputs["hidden_states"].shape[1], 32
    for names in (("controlnet_block_samples",), ("controlnet_block_samples", "controlnet_single_block_samples")):
        residuals = {name: [latents(1, rows, width, seed=n) for n in range(2)] for name in names}
        inputs = {**case.inputs, **residuals}
        expected = output(case.module, inputs)
        assert (expected - output(case.module, case.inputs)).abs().max() > 1e-2
        with extended(case.module, options, row="flux_dev") as run:
            for step in range(3):
                run.step(step)
                torch.testing.assert_close(output(case.module, inputs), expected, atol=1e-5, rtol=0)


def test_zero_star_is_that_of_diffusers() -> None:
    cond, uncond = latents(2, 4, 8, 8, seed=1), latents(2, 4, 8, 8, seed=2)
    theirs, step = ClassifierFreeZeroStarGuidance(4.0, zero_init_steps=1), 0
    ours = ZeroStarGuidance(4.0, lambda: step < 1)
    for step in range(2):
        theirs._step = step
        expected = theirs.forward(cond, uncond).pred
        torch.testing.assert_close(ours.combine(Predictions(cond, uncond), 0.5), expected, atol=1e-5, rtol=1e-5)
    x = latents(2, 4, 8, 8)
    clean = ours.combine_clean(x, Predictions(x - 0.5 * cond, x - 0.5 * uncond), 0.5)
    torch.testing.assert_close(clean, x - 0.5 * expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("prediction", Prediction)
def test_rescaled_guidance_is_that_of_diffusers_for_every_prediction(prediction: Prediction) -> None:
    cond, uncond, x = (latents(2, 4, 8, 8, seed=seed) for seed in range(3))
    plain = ClassifierFreeGuidance(6.0)
    expected = rescale_noise_cfg(uncond + 6.0 * (cond - uncond), cond, 0.7)
    guider = DeviationRescaledGuidance(plain, 0.7, prediction, 0.5)
    torch.testing.assert_close(guider.combine(Predictions(cond, uncond), 2.0), expected, atol=1e-5, rtol=1e-5)
    clean = Predictions(*(clean_latent(prediction, x, each, 2.0, 0.5) for each in (cond, uncond)))
    found = guider.combine_clean(x, clean, 2.0)
    torch.testing.assert_close(found, clean_latent(prediction, x, expected, 2.0, 0.5), atol=1e-4, rtol=1e-5)


def test_members_of_a_gang_skip_the_same_blocks() -> None:
    """The change is of the tokens of all: one member had none, the other one much, and each would decide for itself."""
    reference, added = torch.ones(1, 4, 2), torch.ones(1, 4, 2)
    added[:, 2:] += 0.5  # of the second member's
    sums = torch.stack([(added - reference).abs().sum(), reference.abs().sum()])
    for threshold, skips in ((0.2, False), (0.3, True)):
        found = []
        for share in (slice(0, 4), slice(0, 2), slice(2, 4)):
            is_whole = share == slice(0, 4)
            cache = FirstBlocks(
                StepClock(SamplingSchedule(STEPS, "euler", "normal"), PartialRun()), option=FirstBlockCache(threshold)
            )
            extra = {} if is_whole else {ACROSS: lambda own: sums}
            for each in (reference, added):
                values = {"img": torch.zeros_like(each[:, share]), "transformer_options": extra}
                out = cache.first(values, lambda at, each=each, share=share: {**at, "img": each[:, share]})
                if not cache.state(values).skips:
                    cache.last(out, out)
            found.append(cache.state(values).skips)
        assert found == [skips] * 3, threshold
