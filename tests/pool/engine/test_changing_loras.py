"""LoRAs with a strength that changes over the steps, or that act for some texts only.

Proves: a run of the engine is what a program composes of the patcher's hooks and keyframes, bit for bit, also after an
interruption and with the smallest budget; texts without such a LoRA are encoded and predicted without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.devices.sim import device as sim
from modelpool.pool.engine.task_runner import TaskRunner
from modelpool.pool.inference.conditioning.conditions import Condition
from modelpool.pool.inference.conditioning.prompts import Prompts
from modelpool.pool.inference.conditioning.regions import Regions, region_weights
from modelpool.pool.inference.guidance.call_model import call_model
from modelpool.pool.inference.guidance.guided_steps import ModelCall
from modelpool.pool.inference.guidance.guiders import ClassifierFreeGuidance
from modelpool.pool.inference.guidance.sampling_run import ImagesToDenoise, denoise_images
from modelpool.pool.inference.sampling.schedules import make_sigmas, sd1_sigma_table
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.core.sample_conditions import RegionParams
from modelpool.pool.values.core.sampling_facts import PLAIN_SAMPLING
from modelpool.pool.values.core.stage_params import (
    Encoded,
    EncodeParams,
    FloatArray,
    Latent,
    LoraRef,
    Result,
    RunState,
    SampleParams,
    batch_key,
    task_id,
)
from modelpool.pool.values.specs.spec import JobId, Role
from modelpool.pool.weights.patcher.hooked_run import hooked_run
from modelpool.pool.weights.patcher.hooks import HookGroup, WeightHook
from modelpool.pool.weights.patcher.keyframes import HookKeyframe, HookKeyframes
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher, WeightsTarget
from tests.pool.pipeline import PLENTY_BYTES, QUIET, Pipeline, inputs_of, open_engine
from tests.pool.two_loras import STEPS, catalog_of_two_loras, latent_of, paused

TABLE = sd1_sigma_table()
SIGMAS = make_sigmas("normal", STEPS, TABLE).tolist()


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    return catalog_of_two_loras(tmp_path_factory.mktemp("weights"))


@pytest.fixture
def pipe(catalog: Catalog) -> Iterator[Pipeline]:
    engine = open_engine("sim", PLENTY_BYTES)
    yield Pipeline(engine, catalog, {"twist": 1.0, "turn": 0.5})
    engine.close()


def texts_of(pipe: Pipeline) -> tuple[Result, ...]:
    prompt, negative, *_ = pipe.works()
    return pipe.run(replace(prompt, loras=())), pipe.run(replace(negative, loras=()))


def with_loras(pipe: Pipeline, *loras: LoraRef, **changes: Any) -> SampleParams:
    work = pipe.works()[2]
    return replace(work, loras=loras, schedule=replace(work.schedule, steps=STEPS), **changes)


def hook(pipe: Pipeline, lora: LoraRef, *keyframes: HookKeyframe) -> WeightHook:
    """The patches of a LoRA as a hook of the patcher."""
    patches = pipe.engine._opened(pipe.model).patch_set(Role.DIFFUSION_MODEL, (lora,)).patches
    return WeightHook(patches, keyframes=HookKeyframes(keyframes))


def by_hand(pipe: Pipeline, work: SampleParams, texts: tuple[Result, ...], *groups: HookGroup | None) -> FloatArray:
    """The latent of a run with texts that have these hooks: the prompt, the negative prompt, those of regions."""
    patcher = pipe.engine.patcher(pipe.model, Role.DIFFUSION_MODEL)
    conditions = []
    for text, group in zip(texts, groups, strict=True):
        assert isinstance(text, Encoded)
        conditions.append(Condition(torch.from_numpy(text.context_LD.copy())[None], group))

    def sigma_at(share: float) -> float:
        return SIGMAS[round(share * STEPS)] if share else float("inf")

    with (
        pipe.engine.ready(patcher, 64 << 20),
        patcher.running() as module,
        hooked_run(patcher, SIGMAS[0], sigma_at) as apply_hooks,
    ):

        def predict(x: Tensor, timestep: Tensor, context: Tensor, **kwargs: Tensor) -> Tensor:
            x, context = x.to(patcher.compute_dtype), context.to(patcher.compute_dtype)
            return call_model(PLAIN_SAMPLING, module, x, timestep, context, kwargs, None)

        cond, uncond, *regional = conditions
        weights = region_weights(work.regions, [[]], (8, 8))
        found = denoise_images(
            ImagesToDenoise(work, [work.seed], (4, 8, 8)),
            Prompts(cond, uncond, Regions(tuple(regional), weights)),
            ModelCall(predict, TABLE, apply_hooks=apply_hooks),
            ClassifierFreeGuidance(work.guidance.cfg),
            patcher.device,
            QUIET,
        )
    samples: FloatArray = found[0].numpy()
    return samples


@pytest.mark.parametrize("interpolation", ["", "linear"])
def test_keyframes_of_a_lora_are_those_of_the_patcher(pipe: Pipeline, interpolation: str) -> None:
    texts, (twist, turn) = texts_of(pipe), pipe.loras
    keyframes = ((0.0, 0.25), (0.5, 1.0))
    changing = replace(twist, keyframes=keyframes, interpolation=interpolation)
    work = with_loras(pipe, changing, turn)
    found = latent_of(pipe, work, texts)
    strengths = [0.25, 0.25, 1.0, 1.0] if not interpolation else [0.25, 0.625, 1.0, 1.0]
    places = [HookKeyframe(strength, place / STEPS, 0) for place, strength in enumerate(strengths)]
    group = HookGroup((hook(pipe, twist, *places), hook(pipe, turn)))
    assert np.array_equal(found, by_hand(pipe, work, texts, group, group))
    assert not np.array_equal(found, latent_of(pipe, with_loras(pipe, twist, turn), texts))
    for pause_at in (1, 3):
        state = paused(pipe, work, texts, pause_at)
        assert isinstance(state, RunState)
        assert np.array_equal(latent_of(pipe, work, texts, resume=state), found), f"interrupted after step {pause_at}"


def test_a_lora_for_some_texts_is_a_hook_of_their_conditions(pipe: Pipeline) -> None:
    (twist, turn), region = pipe.loras, RegionParams(1.0, (0.0, 0.0, 0.5, 1.0))
    prompt = pipe.works()[0]
    texts = (*texts_of(pipe), pipe.run(replace(prompt, loras=(), text="a blue square")))
    both, only_turn = HookGroup((hook(pipe, twist), hook(pipe, turn))), HookGroup((hook(pipe, turn),))
    seen = []
    for only, expected in (
        ("negative", (only_turn, both, only_turn)),
        ("positive", (both, only_turn, both)),
        ("prompt", (both, only_turn, only_turn)),
        ("region0", (only_turn, only_turn, both)),
    ):
        work = with_loras(pipe, replace(twist, only=(only,)), turn, conditions=(region,))
        work = replace(work, schedule=replace(work.schedule, steps=2))
        seen.append(latent_of(pipe, work, texts))
        assert np.array_equal(seen[-1], by_hand(pipe, work, texts, *expected)), only
    assert len({each.tobytes() for each in seen}) == 4


def test_weights_change_once_in_a_step_for_two_texts(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text with weights that are in place is predicted first."""
    texts, (twist, turn) = texts_of(pipe), pipe.loras
    seen, realize = [], ModelPatcher.realize

    def counted(patcher: ModelPatcher, target: WeightsTarget, *args: Any) -> Any:
        seen.append(target.patches.digest)
        return realize(patcher, target, *args)

    work = with_loras(pipe, replace(twist, only=("negative",)), turn)
    work = replace(work, schedule=replace(work.schedule, sampler="euler"))
    latent_of(pipe, work, texts)
    monkeypatch.setattr(ModelPatcher, "realize", counted)
    latent_of(pipe, work, texts)
    assert len(set(seen)) == 2
    assert len(seen) == STEPS + 1, "the first is that of the lease"


def test_weights_that_change_from_text_to_text_cross_the_bus_once(pipe: Pipeline) -> None:
    """Those with the patches of the other text stay on the device, next to weights and activations."""
    texts, (twist, turn) = texts_of(pipe), pipe.loras
    crossed: list[int] = []
    hooks = replace(QUIET, on_step=lambda done, steps: crossed.append(sim.memory_stats(0).h2d_bytes))
    work = with_loras(pipe, replace(twist, only=("negative",)), turn)
    work = replace(work, schedule=replace(work.schedule, sampler="euler"))
    _, cost = pipe.engine.run(pipe.task(work), work, inputs_of(work, *texts), hooks)
    assert cost.working_bytes == 0, "unknown: the peak includes the cache"
    moved = [after - before for before, after in pairwise(crossed)]
    plain = replace(work, loras=(twist, turn))
    crossed.clear()
    _, cost = pipe.engine.run(pipe.task(plain), plain, inputs_of(plain, *texts), hooks)
    assert moved == [after - before for before, after in pairwise(crossed)], "no more than without such a LoRA"
    assert cost.working_bytes > 0


def test_a_device_that_runs_out_of_memory_gives_up_the_cache(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if another program took what was free next to the run, once the cache has some of it."""
    texts, (twist, turn) = texts_of(pipe), pipe.loras
    work = with_loras(pipe, replace(twist, only=("negative",)), turn)
    expected, offered = latent_of(pipe, work, texts), []

    def on_step(done: int, steps: int) -> None:
        if done == 2 and len(offered) == 1:
            sim.configure(0, sim.memory_stats(0).used_bytes)

    plenty = TaskRunner.cache_bytes.fget
    monkeypatch.setattr(TaskRunner, "cache_bytes", property(lambda self: offered.append(plenty(self)) or offered[-1]))
    hooks = replace(QUIET, on_step=on_step)
    found, cost = pipe.engine.run(pipe.task(work), work, inputs_of(work, *texts), hooks)
    assert isinstance(found, Latent)
    assert np.array_equal(found.samples_CHW, expected)
    assert cost.oom_steps
    assert offered[0] > 0
    assert set(offered[1:]) == {0}


def test_they_work_together_and_do_not_depend_on_the_budget(catalog: Catalog) -> None:
    images = []
    for is_small in (False, True):
        engine = open_engine("sim", PLENTY_BYTES)
        whole = Pipeline(engine, catalog, {"twist": 1.0, "turn": 0.5})
        twist, turn = whole.loras
        whole.loras = (replace(twist, keyframes=((0.0, 0.2), (0.5, 1.0)), only=("negative",)), turn)
        if is_small:
            budget_bytes = whole.smallest_bytes()
            engine.close()
            engine = open_engine("sim", budget_bytes)
            whole.engine = engine
        prompt, negative, sample, decode = whole.works()
        plain = (replace(prompt, loras=(turn,)), replace(negative, loras=(turn,)))
        encoded = (whole.run(plain[0]), whole.run(plain[1]))
        images.append(whole.run(decode, whole.run(sample, *encoded)))
        engine.close()
    assert np.array_equal(images[0].pixels_HWC, images[1].pixels_HWC)


def test_other_keyframes_and_texts_are_other_work(catalog: Catalog) -> None:
    model, lora = catalog.find_model("toy"), catalog.find_lora("twist", 1.0)
    variants = [
        lora,
        replace(lora, keyframes=((0.0, 0.2), (0.5, 1.0))),
        replace(lora, keyframes=((0.0, 0.2), (0.5, 1.0)), interpolation="linear"),
        replace(lora, keyframes=((0.0, 0.3), (0.5, 1.0))),
        replace(lora, only=("negative",)),
        replace(lora, only=("positive",)),
    ]
    works = [EncodeParams(model, (each,), "a") for each in variants]
    assert len({task_id(work, {}) for work in works}) == len({batch_key(work) for work in works}) == len(variants)
    assert [each.for_text() for each in variants] == [lora] * len(variants), "a text encoder has one strength"
    assert [each.for_diffusion_model() for each in variants] == variants


def loras_by_text(catalog: Catalog, lora: Any, **fields: Any) -> dict[str, tuple[LoraRef, ...]]:
    """The LoRAs of each encoding of a request, by its text; those of the sampling under ""."""
    fields = {"width": 64, "height": 64, "negative": "grey", "cfg": 4, "seed": 1, **fields}
    _, graph = build_graph(GenerateRequest(model="toy", prompt="p", loras=[lora], **fields), JobId("j"), catalog)
    return {
        work.text if isinstance(work, EncodeParams) else "": work.loras
        for work in graph.works.values()
        if isinstance(work, EncodeParams | SampleParams)
    }


def test_only_the_texts_of_a_lora_are_encoded_with_it(catalog: Catalog) -> None:
    twist = catalog.find_lora("twist", 1.0)
    regions = ["0,0,32,64=a", "32,0,32,64=b"]
    for only, texts in {
        "positive": "pab",
        "prompt": "p",
        "regions": "ab",
        "region1": "b",
        "negative": ["grey"],
        "negative,region0": ["grey", "a"],
    }.items():
        found = loras_by_text(catalog, f"twist:1:only={only}", regions=regions)
        assert {text for text, loras in found.items() if loras} - {""} == set(texts)
        assert set(found.values()) <= {(), (twist,), found[""]}
        assert [lora.only for lora in found[""]] == [tuple(only.split(","))]
    found = loras_by_text(catalog, "twist:0.2@0,0.4@0.5")
    assert {lora.strength for lora in (*found["p"], *found["grey"])} == {0.4}, "the strongest on the text encoders"


@pytest.mark.parametrize(
    ("lora", "fields", "message"),
    [
        ("twist:1:only=region1", {"regions": ["0,0,32,64=a"]}, r"loras\.only: found 'region1' of LoRA 'twist', "
         r"expected texts of this run: prompt, negative, region0"),
        ("twist:1:only=regions", {}, r"loras\.only: found 'regions'"),
        ("twist:1:only=negative", {"cfg": 1}, r"loras\.only: found 'negative' .*: prompt; at cfg 1 no negative prompt"),
    ],
)  # fmt: skip
def test_a_lora_for_a_text_that_is_not_read_is_refused(
    catalog: Catalog, lora: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnusableField, match=message):
        loras_by_text(catalog, lora, **fields)
    assert loras_by_text(catalog, "twist:0:only=regions") == {"p": (), "grey": (), "": ()}, "it has no effect"


def test_guidance_that_reads_the_negative_prompt_decides_whether_it_is_read(catalog: Catalog) -> None:
    assert loras_by_text(catalog, "twist:1:only=negative", cfg=1, sampler="euler_cfg_pp")["grey"]
