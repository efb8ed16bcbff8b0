"""Reference images that are read apart, once in a run: latents are the latents of diffusers' pipeline for models that
were trained so; batches, texts and checkpoints change nothing; memory is what was estimated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from PIL import Image
from torch import Tensor

from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.graph.features.reference_graph import edit_model_warnings
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.families.gang_support import gang_obstacle
from modelpool.pool.inference.extensions.reference_cache import ReadReferences
from modelpool.pool.inference.pixels.latent_pixels import latent_shape
from modelpool.pool.inference.sampling.noise import ImageNoise
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.core.stage_params import BatchMember, Latent, RunState, SampleParams
from modelpool.pool.values.specs.spec import JobId, Role, Stage
from tests.pool.families.test_from_images import image
from tests.pool.families.test_needs_from_images import MOST_OVER
from tests.pool.families.test_needs_shown import on_sim
from tests.pool.families.tiny_model import Made, TinyModel
from tests.pool.families.tiny_shown import TinyFamilyModel
from tests.pool.families.tiny_transformers import FAMILIES
from tests.pool.input_names import results_read
from tests.pool.pipeline import QUIET

WIDTH, HEIGHT, STEPS, SEED = 64, 48, 4, 11
SIZES: dict[str, Any] = {"width": WIDTH, "height": HEIGHT, "steps": STEPS, "seed": SEED}
CACHED: dict[str, Any] = {"options": {"kv_cache": True}}
ONE, TWO = [image(32, 96)], [image(32, 96), image(96, 32)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyModel]:
    """FLUX.2 klein."""
    made = TinyFamilyModel(tmp_path_factory.mktemp("klein"), FAMILIES["flux2_klein"])
    yield made
    made.close()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets the number of images in each call that reads references."""
    found: list[int] = []
    read = ReadReferences._read

    def counted(self: ReadReferences, forward: Any, kwargs: Any, rows: Tensor, ids: Tensor) -> Any:
        if not rows.is_meta:  # the estimate of its memory has no values
            found.append(len(rows))
        return read(self, forward, kwargs, rows, ids)

    monkeypatch.setattr(ReadReferences, "_read", counted)
    return found


def by_diffusers(tiny: TinyModel, made: Made, references: list[Image.Image]) -> Tensor:
    """The latent of the pipeline for models with a cache. It replaces the attention of the module, which ours calls
    with its own again afterwards."""
    vae, model = tiny.module(Role.VAE), tiny.module(Role.DIFFUSION_MODEL)
    processors = dict(model.attn_processors)
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    pipeline: Any = diffusers.Flux2KleinKVPipeline(scheduler, vae, None, None, model, True)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.image_processor.check_image_input = lambda image: image  # that it is not smaller than 64x64
    noise = ImageNoise(SEED).draw((1, *latent_shape(WIDTH, HEIGHT, 0, tiny.engine._opened(tiny.model).latent)))
    try:
        found = pipeline(
            **made.texts, image=references, height=HEIGHT, width=WIDTH, num_inference_steps=STEPS,
            output_type="latent", latents=noise,
        ).images  # fmt: skip
    finally:
        model.set_attn_processor(processors)
    deviation = torch.sqrt(vae.bn.running_var.view(1, -1, 1, 1) + vae.config.batch_norm_eps)
    patches: Tensor = (pipeline._patchify_latents(found) - vae.bn.running_mean.view(1, -1, 1, 1)) / deviation
    return patches


@pytest.mark.parametrize("references", [ONE, TWO], ids=["one", "two"])
def test_references_that_are_read_once_make_the_latents_of_diffusers(
    references: list[Image.Image], tiny: TinyModel, reads: list[int]
) -> None:
    made = tiny.made(reference=references, **SIZES, **CACHED)
    expected = by_diffusers(tiny, made, references)
    np.testing.assert_allclose(made.latents[0], expected, atol=1e-5 * max(1.0, float(expected.std())))
    assert reads == [1]
    usual = tiny.made(reference=references, **SIZES)
    assert (usual.latents[0] - made.latents[0]).abs().max() > 1e-3


def test_the_time_of_references_is_a_setting(tiny: TinyModel) -> None:
    zero, half = (tiny.made(reference=ONE, **SIZES, options={"kv_cache": time}).latents[0] for time in (0, 0.5))
    assert torch.equal(zero, tiny.made(reference=ONE, **SIZES, **CACHED).latents[0])
    assert (zero - half).abs().max() > 1e-4


def test_without_references_nothing_changes(tiny: TinyModel) -> None:
    plain, cached = tiny.made(**SIZES), tiny.made(**SIZES, **CACHED)
    assert torch.equal(plain.latents[0], cached.latents[0])


def _sampling(tiny: TinyModel, **fields: Any) -> BatchMember:
    """The sampling task of a request, with its inputs."""
    made = tiny.made(**{**SIZES, **CACHED, **fields})
    (place,) = [place for place, task in enumerate(made.tasks) if task.stage is Stage.SAMPLE]
    task = made.tasks[place]
    return BatchMember(task, made.works[task.task_id], results_read(task, made.results), QUIET)


def _latent(result: Any) -> Any:
    assert isinstance(result, Latent)
    return result.samples_CHW


def test_each_image_of_a_batch_has_the_references_that_are_its_own(tiny: TinyModel, reads: list[int]) -> None:
    shown = [image(32, 96), image(32, 96).rotate(180)]
    members = [_sampling(tiny, reference=one, seed=seed) for seed, one in enumerate(shown)]
    alone = [_latent(tiny.engine.run(each.task, each.work, each.inputs, QUIET)[0]) for each in members]
    reads.clear()
    both = tiny.engine.run_batch(members)
    assert reads == [2]
    for outcome, expected in zip(both, alone, strict=True):
        assert isinstance(outcome, tuple), outcome
        np.testing.assert_allclose(_latent(outcome[0]), expected, atol=1e-5)
    assert np.abs(alone[0] - alone[1]).max() > 1e-3


def test_a_run_that_continues_makes_the_same_bytes(tiny: TinyModel, reads: list[int]) -> None:
    member = _sampling(tiny, reference=TWO)
    states: list[RunState] = []

    def checkpoint(made: Callable[[], Sequence[RunState]]) -> None:
        states.extend(made())

    hooks = replace(QUIET, checkpoint=checkpoint)
    whole = _latent(tiny.engine.run(member.task, member.work, member.inputs, hooks)[0])
    assert [state.step for state in states] == [1, 2, 3]
    reads.clear()
    for state in states:
        found, _ = tiny.engine.run(member.task, member.work, member.inputs, QUIET, resume=state)
        assert np.array_equal(_latent(found), whole)
    assert reads == [1] * len(states)


def test_both_texts_of_guidance_read_what_was_read_once(tmp_path: Path, reads: list[int]) -> None:
    """For equal texts guidance changes nothing, in one call for both texts or in two."""
    base = TinyFamilyModel(tmp_path, FAMILIES["flux2_klein"])
    same = {"prompt": "a cat", "negative": "a cat", "reference": ONE, **SIZES, **CACHED}
    plain, guided = (base.made(**same, cfg=cfg) for cfg in (1.0, 4.0))
    base.close()
    assert reads == [1, 1]
    np.testing.assert_allclose(guided.latents[0], plain.latents[0], atol=1e-4)


@pytest.mark.parametrize("fields", [{"reference": TWO}, {"reference": ONE, "cfg": 4.0, "negative": "a dog"}])
def test_runs_hold_what_was_estimated(fields: dict[str, Any], tmp_path: Path) -> None:
    tiny = on_sim(tmp_path, "flux2_klein")
    try:
        made = tiny.made(**{"width": 64, "height": 64, "steps": 3, **fields}, **CACHED)
        (place,) = [place for place, task in enumerate(made.tasks) if task.stage is Stage.SAMPLE]
        task, working_bytes = made.tasks[place], made.costs[place].working_bytes
        assert working_bytes <= task.activation_bytes <= (1 + MOST_OVER) * working_bytes
    finally:
        tiny.close()


@pytest.mark.parametrize("other", ["slg", "block_scale", "fbcache"])
def test_what_changes_blocks_in_some_calls_is_refused(other: str, tiny: TinyModel) -> None:
    setting: dict[str, Any] = {"slg": {"layers": [0]}, "block_scale": {"blocks": "D*0.5"}, "fbcache": 0.1}
    options = {"kv_cache": True, other: setting[other]}
    request = GenerateRequest(model="tiny", prompt="p", **SIZES, options=options)
    with pytest.raises(UnusableField, match=f"options.kv_cache: found together with {other}, "):
        build_graph(request, JobId("job"), tiny.catalog)


def test_gpus_that_divide_the_tokens_refuse_it(tiny: TinyModel) -> None:
    work = _sampling(tiny, reference=ONE).work
    assert isinstance(work, SampleParams)
    assert "kv_cache keeps the keys and values" in gang_obstacle(tiny.family.sampling, work, 2)
    assert gang_obstacle(tiny.family.sampling, replace(work, options=replace(work.options, kv_cache=None)), 2) == ""


@pytest.mark.parametrize(("name", "warns"), [("flux-2-klein-9b-kv", True), ("flux-2-klein-9b", False)])
def test_a_model_that_is_named_after_it_is_read_as_usual_with_a_warning(
    name: str, warns: bool, tiny: TinyModel
) -> None:
    request = GenerateRequest(model=name, prompt="p", reference=ONE)
    found = list(edit_model_warnings(request, tiny.family.sampling, replace(tiny.model, name=name)))
    assert ["options.kv_cache" in warning for warning in found] == [True] * warns
    asked = GenerateRequest(model=name, prompt="p", reference=ONE, **CACHED)
    assert not list(edit_model_warnings(asked, tiny.family.sampling, replace(tiny.model, name=name)))
