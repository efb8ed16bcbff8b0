"""Runs with options through the sampling stage: batches, checkpoints and pauses change no image, texts that a cache
decides for run apart, and a run without options uses nothing of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.engine.sampling_stage import sample_batch
from modelpool.pool.families.supported import running_families
from modelpool.pool.inference.conditioning.run_parts import RunResources
from modelpool.pool.inference.extensions import run_extension
from modelpool.pool.inference.guidance import guided_steps, text_loras
from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.core.family_facts import LatentFacts
from modelpool.pool.values.core.run_options import (
    CfgZero,
    DeepCache,
    FirstBlockCache,
    FreeU,
    HyperTile,
    PerturbedAttention,
    RescaleCfg,
    RunOptions,
    SelfAttention,
    SkipLayers,
    TeaCache,
)
from modelpool.pool.values.core.sampling_facts import PLAIN_SAMPLING, SamplingFacts
from modelpool.pool.values.core.stage_params import (
    Encoded,
    GuidanceParams,
    Latent,
    ModelRef,
    OutputShape,
    RunHooks,
    RunState,
    SampleParams,
    SamplingSchedule,
    batch_key,
)
from modelpool.pool.values.specs.spec import ComponentKey, Role
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher, WeightsTarget
from modelpool.pool.weights.patcher.weight_form import WeightForm
from tests.pool.inference.extensions.extended import latents
from tests.pool.input_names import inputs_of
from tests.pool.zoo import build

SHAPES = Path(__file__).parents[4] / "examples" / "shapes" / "models" / "shapes.safetensors"
STEPS = 7
WORK = SampleParams(
    ModelRef("shapes", str(SHAPES), "00"),
    (),
    OutputShape(64, 64),
    SamplingSchedule(STEPS, "dpmpp_2m", "karras"),
    GuidanceParams(4.0),
    7,
)
UNET_LATENT = LatentFacts(4, 8, 0.18215)
SD3 = running_families()["sd3"]


def quiet(done: int, steps: int) -> None:
    """Called at each step."""


def patcher(module: torch.nn.Module) -> ModelPatcher:
    made = ModelPatcher.of(
        ComponentKey("model"), Role.DIFFUSION_MODEL, module, torch.device("cpu"), WeightForm(torch.float32)
    )
    made.realize(WeightsTarget(frozenset(m.name for m in made.modules()), made.patches))
    return made


@pytest.fixture(scope="module")
def shapes() -> ModelPatcher:
    return patcher(open_checkpoint(SHAPES).build(Role.DIFFUSION_MODEL).module)


@pytest.fixture(scope="module")
def sd3() -> ModelPatcher:
    return patcher(build("sd35").module)


class Runs:
    """Runs of one model with the same texts."""

    def __init__(
        self, model: ModelPatcher, latent: LatentFacts, facts: SamplingFacts, texts: Sequence[Encoded]
    ) -> None:
        self.model, self.latent, self.facts, self.texts = model, latent, facts, texts

    def run(self, work: SampleParams, seeds: Sequence[int] = (7,), resumed: Any = (), **hooks: Any) -> tuple[Any, ...]:
        works = [replace(work, seed=seed) for seed in seeds]
        inputs = [inputs_of(each, *self.texts) for each in works]
        made = RunHooks(**{"on_step": quiet, "should_stop": lambda: False, **hooks})
        return sample_batch(
            works, inputs, self.model, self.latent, made, facts=self.facts, resources=RunResources(resumed=resumed)
        )

    def states(self, work: SampleParams) -> tuple[Latent, list[RunState]]:
        """The result of a run, and its checkpoints."""
        found: list[RunState] = []

        def checkpoint(states: Callable[[], Sequence[RunState]]) -> None:
            found.extend(states())

        (latent,) = self.run(work, checkpoint=checkpoint)
        return latent, found


@pytest.fixture
def unet_runs(shapes: ModelPatcher) -> Runs:
    texts = [Encoded(latents(77, 32, seed=seed).numpy()) for seed in (1, 2)]
    return Runs(shapes, UNET_LATENT, PLAIN_SAMPLING, texts)


@pytest.fixture
def flow_runs(sd3: ModelPatcher) -> Runs:
    texts = [Encoded(latents(7, 32, seed=seed).numpy(), latents(64, seed=seed).numpy()) for seed in (1, 2)]
    return Runs(sd3, LatentFacts(4, 8, 1.0), SD3.sampling, texts)


@pytest.fixture
def lumina_runs() -> Runs:
    texts = [Encoded(latents(7, 32, seed=seed).numpy()) for seed in (1, 2)]
    return Runs(patcher(build("lumina2").module), LatentFacts(4, 8, 1.0), running_families()["lumina2"].sampling, texts)


UNET_OPTIONS = RunOptions(
    freeu=FreeU(),
    pag=PerturbedAttention(scale=1.0),
    sag=SelfAttention(),
    rescale_cfg=RescaleCfg(),
    hypertile=HyperTile(tile=32),
    deepcache=DeepCache(interval=3),
)


def test_options_give_each_image_of_a_batch_what_it_has_alone(unet_runs: Runs) -> None:
    work = replace(WORK, options=UNET_OPTIONS)
    both, alone = unet_runs.run(work, (7, 8)), [unet_runs.run(work, (seed,))[0] for seed in (7, 8)]
    for found, expected in zip(both, alone, strict=True):
        np.testing.assert_allclose(found.samples_CHW, expected.samples_CHW, atol=2e-3)
    plain = unet_runs.run(WORK)[0]
    assert np.abs(plain.samples_CHW - alone[0].samples_CHW).max() > 0.1


def test_a_run_with_deepcache_continues_only_where_its_deep_layers_are_computed(unet_runs: Runs) -> None:
    work = replace(WORK, options=RunOptions(deepcache=DeepCache(interval=3), pag=PerturbedAttention(end=0.6)))
    whole, states = unet_runs.states(work)
    assert [state.step for state in states] == [3, 6]
    for state in states:
        (resumed,) = unet_runs.run(work, resumed=(state,))
        assert np.array_equal(resumed.samples_CHW, whole.samples_CHW)
    (paused,) = unet_runs.run(work, should_pause=lambda: True)
    assert isinstance(paused, RunState)
    assert paused.step == 3
    assert np.array_equal(unet_runs.run(work, resumed=(paused,))[0].samples_CHW, whole.samples_CHW)


@pytest.mark.parametrize(
    ("runs", "options"),
    [
        ("flow_runs", RunOptions(fbcache=FirstBlockCache(0.4))),
        ("lumina_runs", RunOptions(teacache=TeaCache(5.0))),
    ],
)
def test_a_run_that_skips_by_content_has_no_state_between_steps_and_no_batch(
    request: pytest.FixtureRequest, runs: str, options: RunOptions
) -> None:
    flow_runs: Runs = request.getfixturevalue(runs)
    work = replace(WORK, schedule=replace(WORK.schedule, sampler="euler", noise_schedule="simple"), options=options)
    whole, states = flow_runs.states(work)
    assert states == []
    assert np.array_equal(flow_runs.run(work, should_pause=lambda: True)[0].samples_CHW, whole.samples_CHW)
    (plain,) = flow_runs.run(replace(work, options=RunOptions()))
    assert np.abs(plain.samples_CHW - whole.samples_CHW).max() > 0
    assert batch_key(work) == ""
    assert batch_key(replace(work, options=RunOptions(deepcache=DeepCache()))) != batch_key(WORK) != ""


def test_options_of_a_flow_run_together_and_resume(flow_runs: Runs) -> None:
    options = RunOptions(slg=SkipLayers(layers=(1,), start=0.2, end=0.7), cfg_zero=CfgZero(2), rescale_cfg=RescaleCfg())
    work = replace(WORK, schedule=replace(WORK.schedule, sampler="euler", noise_schedule="simple"), options=options)
    whole, states = flow_runs.states(work)
    assert [state.step for state in states] == list(range(1, STEPS))
    first, second = (state.sampler.samples_CHW for state in states[:2])
    np.testing.assert_allclose(first, second, atol=1e-6, err_msg="the first steps predict zero")
    for state in (states[0], states[3]):
        assert np.array_equal(flow_runs.run(work, resumed=(state,))[0].samples_CHW, whole.samples_CHW)


def test_a_run_without_options_uses_nothing_of_them(unet_runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    def used(*_: object) -> None:
        raise AssertionError("an option was prepared")

    with monkeypatch.context() as patched:
        patched.setattr(run_extension, "run_extension", used)
        unet_runs.run(replace(WORK, schedule=replace(WORK.schedule, steps=1)))
        with pytest.raises(AssertionError, match="an option was prepared"):
            unet_runs.run(replace(WORK, options=RunOptions(freeu=FreeU())))


def test_a_run_without_changing_loras_changes_no_weights(unet_runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither are its texts predicted apart, nor are weights looked at in its steps."""
    calls: list[str] = []
    batches, realize = guided_steps.batches, ModelPatcher.realize

    def counted_batches(*args: Any) -> Any:
        found = batches(*args)
        calls.append(f"{len(found)} batches")
        return found

    def counted_realize(*args: Any) -> Any:
        calls.append("realize")
        return realize(*args)

    monkeypatch.setattr(guided_steps, "batches", counted_batches)
    monkeypatch.setattr(ModelPatcher, "realize", counted_realize)
    monkeypatch.setattr(text_loras, "with_text_loras", lambda *_: calls.append("texts"))
    unet_runs.run(WORK)
    assert calls == ["1 batches"]


def test_cfg_plus_plus_reads_the_negative_prompt_at_cfg_1(unet_runs: Runs) -> None:
    """Its noise comes from the prediction for the negative prompt, at every guidance scale."""
    texts = list(unet_runs.texts)
    found = {}
    for sampler in ("euler_cfg_pp", "euler"):
        work = replace(WORK, guidance=GuidanceParams(1.0), schedule=SamplingSchedule(2, sampler, "normal"))
        reads = [texts, [texts[0], texts[0]]] if work.reads_negative else [texts[:1]]
        for number, unet_runs.texts in enumerate(reads):
            found[sampler, number] = unet_runs.run(work)[0].samples_CHW
    # with equal texts, CFG++ is Euler
    np.testing.assert_allclose(found["euler_cfg_pp", 1], found["euler", 0], atol=5e-5)
    assert np.abs(found["euler_cfg_pp", 0] - found["euler", 0]).max() > 1e-4


@pytest.mark.parametrize(("layers", "refused"), [(1, False), (8, True)])
def test_layers_that_a_model_lacks_are_refused_before_anything_runs(layers: int, refused: bool) -> None:
    catalog = Catalog([SHAPES.parent], [], "cpu")
    work = replace(WORK, model=catalog.find_model("shapes"), options=RunOptions(deepcache=DeepCache(layers=layers)))
    with pytest.raises(UnusableField, match=r"options\.deepcache\.layers: found 8") if refused else nullcontext():
        catalog.execution_modes(work.model, work, (77, 77))
