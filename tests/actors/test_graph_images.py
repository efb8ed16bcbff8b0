"""Requests with images, cut: equal work is one task, what a task reads is in order, the recipe says it all; and the
whole way through a pool."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from modelpool.actors.control.inputs.input_images import InputImages
from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.graph.common.task_collector import JobGraph
from modelpool.actors.graph.features.recipe import Recipe
from modelpool.actors.outputs.image_file import parameters_text
from modelpool.actors.outputs.recipe_json import recipe_from_json
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.core.stage_params import (
    DecodeParams,
    EncodeImageParams,
    EncodeParams,
    ImagePixels,
    Mask,
    OutputShape,
    RegionParams,
    SampleParams,
    StageParams,
    StartCondition,
    roles_of,
)
from modelpool.pool.values.specs.spec import JobId, Role, Stage, TaskId
from tests.actors.fakes import FILLS_HOLES, FakeCatalog, image_of
from tests.actors.loop_connection import open_pool

PIXELS = np.random.default_rng(0).integers(0, 256, (40, 64, 3), np.uint8)
MASK = PIXELS[:, :, 0] > 100


def request(**fields: Any) -> GenerateRequest:
    return GenerateRequest(**{"model": "shapes", "prompt": "p", "seed": 1, **fields})


def cut(**fields: Any) -> tuple[Recipe, JobGraph, dict[TaskId, Any]]:
    sent, given = InputImages(lambda result: result).bring(request(**fields))
    return *build_graph(sent, JobId("job"), FakeCatalog()), given


def works_of(job: JobGraph) -> list[StageParams]:
    return [job.works[task.task_id] for task in job.job.tasks]


def read_by(job: JobGraph, kind: type, given: dict[TaskId, Any]) -> list[type]:
    """The kinds of what the last task of a kind reads."""
    task = [t for t in job.job.tasks if isinstance(job.works[t.task_id], kind)][-1]
    return [type(given[need]) if need in given else type(job.works[need]) for need in task.needs]


def test_a_image_is_encoded_by_a_task_of_its_own_that_seeds_and_strengths_share() -> None:
    _, one, given = cut(image=PIXELS, strength=0.5)
    _, other, _ = cut(image=PIXELS, strength=0.8, seed=2, prompt="q")
    assert [t.stage for t in one.job.tasks] == [Stage.ENCODE] * 3 + [Stage.SAMPLE, Stage.DECODE]
    assert one.job.given == tuple(given)
    encodes = [
        {t.task_id for t in job.job.tasks if isinstance(job.works[t.task_id], EncodeImageParams)}
        for job in (one, other)
    ]
    assert encodes[0] == encodes[1]
    assert read_by(one, SampleParams, given) == [EncodeParams, EncodeParams, EncodeImageParams]
    sample = next(work for work in works_of(one) if isinstance(work, SampleParams))
    assert (sample.shape.width, sample.shape.height, sample.schedule.first_step, sample.steps_run) == (
        64,
        40,
        10,
        10,
    )
    uses = {t.stage: t.uses[0].passes for t in one.job.tasks}
    assert uses[Stage.SAMPLE] == 10


def test_another_image_is_another_task() -> None:
    _, one, _ = cut(image=PIXELS)
    _, other, _ = cut(image=255 - PIXELS)
    assert one.job.wanted != other.job.wanted


def test_a_hole_is_read_by_what_samples_and_by_what_pastes() -> None:
    _, job, given = cut(image=PIXELS, mask=MASK, cfg=1)
    assert read_by(job, SampleParams, given) == [EncodeParams, EncodeImageParams, Mask]
    assert read_by(job, DecodeParams, given) == [SampleParams, ImagePixels, Mask]
    _, unpasted, given = cut(image=PIXELS, mask=MASK, cfg=1, paste=False)
    assert read_by(unpasted, DecodeParams, given) == [SampleParams]
    assert job.job.tasks[-2].task_id == unpasted.job.tasks[-2].task_id


def test_a_model_that_fills_holes_is_told_of_the_hole_and_starts_from_noise_where_all_is_made_anew() -> None:
    _, part, given = cut(model=FILLS_HOLES, image=PIXELS, mask=MASK, strength=0.5, cfg=1)
    assert read_by(part, SampleParams, given) == [EncodeParams, EncodeImageParams, Mask, EncodeImageParams]
    assert read_by(part, EncodeImageParams, given) == [ImagePixels, Mask]
    _, whole, given = cut(model=FILLS_HOLES, image=PIXELS, mask=MASK, cfg=1)
    assert read_by(whole, SampleParams, given) == [EncodeParams, Mask, EncodeImageParams]
    assert [work.hides for work in works_of(whole) if isinstance(work, EncodeImageParams)] == [True]


def test_a_model_that_fills_holes_is_refused_without_one() -> None:
    for fields in ({}, {"image": PIXELS}):
        with pytest.raises(UnusableField, match=r"mask: missing; model .* is an inpainting model"):
            cut(model=FILLS_HOLES, **fields)


@pytest.mark.parametrize(
    ("via", "kinds"),
    [
        ("latent", [SampleParams, SampleParams, DecodeParams]),
        ("image", [SampleParams, DecodeParams, EncodeImageParams, SampleParams, DecodeParams]),
    ],
)
def test_a_second_pass_is_tasks_of_one_job_and_shares_the_first(via: str, kinds: list[type]) -> None:
    recipe, job, _ = cut(hires={"scale": 1.6, "strength": 0.5, "steps": 8, "via": via})
    assert [type(work) for work in works_of(job) if not isinstance(work, EncodeParams)] == kinds
    first, second = [work for work in works_of(job) if isinstance(work, SampleParams)]
    assert second == replace(
        first,
        shape=replace(first.shape, width=104, height=104),
        schedule=replace(first.schedule, steps=8, first_step=4),
        conditions=(StartCondition(),),
    )
    _, plain, _ = cut()
    assert {t.task_id for t in plain.job.tasks if t.stage is Stage.SAMPLE} < {t.task_id for t in job.job.tasks}
    assert (recipe.width, recipe.height) == (64, 64)
    decoded = works_of(job)[-1]
    assert isinstance(decoded, DecodeParams)
    assert decoded.shape == OutputShape(104, 104)


def test_a_second_pass_that_would_be_too_large_is_refused() -> None:
    with pytest.raises(
        UnusableField, match=r"hires.scale: found 8.0, expected a scale that gives sides of up to 16384"
    ):
        cut(hires=8, width=4096)


def test_the_recipe_says_what_a_image_was_made_from_and_reads_it_back() -> None:
    recipe, _, given = cut(image=PIXELS, mask=MASK, strength=0.5, hires=None)
    assert recipe.pictures is not None
    assert {f"given-image-{recipe.pictures.image_sha256[:20]}", f"given-mask-{recipe.pictures.mask_sha256[:20]}"} == {
        *given
    }
    assert recipe_from_json(recipe.as_json()) == recipe
    assert "Denoising strength: 0.5" in parameters_text(recipe)
    twice, _, _ = cut(hires="2:0.5:10")
    assert "Denoising strength: 0.5, Hires upscale: 2, Hires steps: 10, Hires upscaler: Latent" in parameters_text(
        twice
    )
    assert recipe_from_json(twice.as_json()) == twice


CANNY = {"model": "canny", "image": PIXELS, "strength": 0.5, "end": 0.8}


def test_controlnets_are_used_by_what_samples_after_the_diffusion_model() -> None:
    recipe, job, given = cut(controls=[CANNY, {**CANNY, "model": "depth", "image": 255 - PIXELS}], cfg=1)
    assert read_by(job, SampleParams, given) == [EncodeParams, ImagePixels, ImagePixels]
    sample = next(t for t in job.job.tasks if t.stage is Stage.SAMPLE)
    roles = {component.key: component.role for component in job.components}
    expected = [Role.DIFFUSION_MODEL, Role.CONTROLNET, Role.CONTROLNET]
    assert [roles[use.component] for use in sample.uses] == expected
    assert roles_of(job.works[sample.task_id], 3) == tuple(expected)
    assert {use.passes for use in sample.uses} == {20}
    assert recipe.pictures is not None
    assert [(c.name, c.strength, c.start, c.end) for c in recipe.pictures.controls] == [
        ("canny", 0.5, 0.0, 0.8),
        ("depth", 0.5, 0.0, 0.8),
    ]
    assert recipe_from_json(recipe.as_json()) == recipe
    _, other, _ = cut(controls=[{**CANNY, "end": 0.7}], cfg=1)
    _, one, _ = cut(controls=[CANNY], cfg=1)
    assert other.job.wanted != one.job.wanted


UNION = {"model": "union", "image": PIXELS, "mode": "depth"}


def test_a_controlnet_that_reads_latents_reads_those_of_its_image_behind_all_others() -> None:
    """Made by the model's own VAE at the size of the output, in whatever order they are asked for."""
    other = {**UNION, "image": 255 - PIXELS, "mode": 0}
    recipe, job, given = cut(image=PIXELS, strength=0.5, controls=[UNION, CANNY, other], cfg=1)
    expected = [EncodeParams, EncodeImageParams, EncodeImageParams, ImagePixels, EncodeImageParams]
    assert read_by(job, SampleParams, given) == expected
    (sample,) = [task for task in job.job.tasks if task.stage is Stage.SAMPLE]
    # it begins with the image that the first of them reads too
    assert sample.needs[1] == sample.needs[2] != sample.needs[4]
    encoded = [work for work in works_of(job) if isinstance(work, EncodeImageParams)]
    assert [(work.width, work.height) for work in encoded] == [(64, 40)] * 2
    assert recipe.pictures is not None
    assert [control.mode for control in recipe.pictures.controls] == [1, None, 0]
    assert recipe_from_json(json.loads(json.dumps(recipe.as_json()))) == recipe


def test_another_mode_is_another_image_and_none_changes_no_name_that_is_known() -> None:
    recipes, jobs = [], []
    for fields in ({"mode": "canny"}, {"mode": "depth"}, {"mode": 1}):
        recipe, job, _ = cut(controls=[{**UNION, **fields}])
        recipes.append(recipe.digest)
        jobs.append(job.job.wanted)
    assert recipes[0] != recipes[1] == recipes[2]
    assert jobs[0] != jobs[1] == jobs[2]
    recipe, _, _ = cut(controls=[CANNY])
    assert recipe.pictures is not None
    assert "mode" not in recipe.determining()["pictures"]["controls"][0]


def test_each_pass_reads_the_latent_of_its_size() -> None:
    _, job, _ = cut(controls=[UNION], hires=2)
    encoded = [work for work in works_of(job) if isinstance(work, EncodeImageParams)]
    assert [(work.width, work.height) for work in encoded] == [(64, 64), (128, 128)]


INPAINT = {"model": "inpaint"}


def test_a_controlnet_that_is_told_a_hole_reads_the_image_and_the_mask_of_the_request() -> None:
    """Or its own; the mask behind all others, and what a recipe says of it is what it read."""
    regions = [{"prompt": "a circle", "mask": MASK}]
    recipe, job, given = cut(image=PIXELS, mask=~MASK, controls=[CANNY, INPAINT], regions=regions, cfg=1)
    expected = [EncodeParams] * 2 + [EncodeImageParams, Mask, Mask, ImagePixels, ImagePixels, Mask]
    assert read_by(job, SampleParams, given) == expected
    (sample,) = [task for task in job.job.tasks if task.stage is Stage.SAMPLE]
    assert sample.needs[3] == sample.needs[-1] != sample.needs[4]
    assert recipe.pictures is not None
    canny, inpaint = recipe.pictures.controls
    assert (canny.mask_sha256, inpaint.mask_sha256) == ("", recipe.pictures.mask_sha256)
    assert inpaint.image_sha256 == recipe.pictures.image_sha256 == canny.image_sha256
    assert recipe_from_json(json.loads(json.dumps(recipe.as_json()))) == recipe
    own = {**INPAINT, "image": 255 - PIXELS, "mask": MASK}
    alone, job, given = cut(controls=[own], cfg=1)
    assert read_by(job, SampleParams, given) == [EncodeParams, ImagePixels, Mask]
    other, other_job, _ = cut(controls=[{**own, "mask": ~MASK}], cfg=1)
    assert other.digest != alone.digest
    assert other_job.job.wanted != job.job.wanted


def test_one_that_may_be_told_a_hole_is_told_where_there_is_a_mask() -> None:
    repaint = {"model": "repaint"}
    masked, job, given = cut(image=PIXELS, mask=MASK, controls=[repaint], cfg=1)
    assert read_by(job, SampleParams, given) == [EncodeParams, EncodeImageParams, Mask, ImagePixels, Mask]
    assert masked.pictures is not None
    assert masked.pictures.controls[0].mask_sha256 == masked.pictures.mask_sha256
    plain, job, given = cut(image=PIXELS, controls=[repaint], cfg=1)
    assert read_by(job, SampleParams, given) == [EncodeParams, EncodeImageParams, ImagePixels]
    assert plain.pictures is not None
    assert "mask_sha256" not in plain.determining()["pictures"]["controls"][0]


def test_one_that_is_told_a_hole_beside_its_image_reads_both_and_the_mask() -> None:
    """The image with the hole comes from the request; it is grey there. Without a mask it reads its own alone."""
    beside = {"model": "beside", "image": 255 - PIXELS}
    _, job, given = cut(image=PIXELS, controls=[{**beside, "mask": MASK}, UNION], cfg=1)
    expected = [EncodeParams, *[EncodeImageParams] * 3, Mask, EncodeImageParams]
    assert read_by(job, SampleParams, given) == expected
    (sample,) = [task for task in job.job.tasks if task.stage is Stage.SAMPLE]
    read = [job.works[need] for need in sample.needs if need in job.works]
    hidden = [(work.hides, work.black) for work in read if isinstance(work, EncodeImageParams)]
    assert hidden == [(False, False), (False, False), (True, False), (False, False)]
    tasks = {task.task_id: task for task in job.job.tasks}
    assert tasks[sample.needs[1]].needs[0] == tasks[sample.needs[3]].needs[0] != tasks[sample.needs[2]].needs[0]
    _, job, given = cut(image=PIXELS, controls=[beside], cfg=1)
    assert read_by(job, SampleParams, given) == [EncodeParams, EncodeImageParams, EncodeImageParams]
    with pytest.raises(UnusableField, match=r"image: missing; ControlNet 'beside' reads the inpainted image"):
        cut(controls=[{**beside, "mask": MASK}])


@pytest.mark.parametrize("fields", [{"image": PIXELS}, {"controls": [{**INPAINT, "image": PIXELS}]}])
def test_a_controlnet_that_must_be_told_a_hole_is_refused_without_one(fields: dict[str, Any]) -> None:
    expected = "controls.mask: missing; ControlNet 'inpaint' requires a mask"
    with pytest.raises(UnusableField, match=expected):
        cut(**{"controls": [INPAINT], **fields})


def test_a_mask_of_a_controlnet_that_is_told_none_is_refused() -> None:
    with pytest.raises(UnusableField, match=r"controls.mask: not supported by ControlNet 'canny'"):
        cut(controls=[{**CANNY, "mask": MASK}])


def test_a_controlnet_of_strength_0_is_left_out() -> None:
    recipe, job, _ = cut(controls=[{**CANNY, "strength": 0}])
    plain_recipe, plain, _ = cut()
    assert job.job.wanted == plain.job.wanted
    assert recipe.digest == plain_recipe.digest


BOX = {"prompt": "a square", "box": (32, 0, 32, 40), "strength": 1.5}


def test_regions_have_texts_of_their_own_and_what_samples_reads_them_after_the_negative_prompt() -> None:
    regions = [BOX, {"prompt": "a circle", "mask": MASK}]
    recipe, job, given = cut(image=PIXELS, mask=~MASK, regions=regions, controls=[CANNY])
    expected = [EncodeParams] * 4 + [EncodeImageParams, Mask, Mask, ImagePixels]
    assert read_by(job, SampleParams, given) == expected
    sample = next(work for work in works_of(job) if isinstance(work, SampleParams))
    assert sample.regions == (RegionParams(1.5, (0.5, 0.0, 0.5, 1.0)), RegionParams(1.0))
    assert sample.texts == 4
    assert recipe_from_json(json.loads(json.dumps(recipe.as_json()))) == recipe
    _, other, _ = cut(image=PIXELS, mask=~MASK, regions=[BOX, {"prompt": "a circle", "mask": ~MASK}])
    assert other.job.wanted != job.job.wanted


def test_a_region_of_a_second_pass_is_where_it_was() -> None:
    _, job, _ = cut(regions=[{**BOX, "box": (16, 8, 32, 40)}], hires=2)
    first, second = [work for work in works_of(job) if isinstance(work, SampleParams)]
    assert first.regions == second.regions == (RegionParams(1.5, (0.25, 0.125, 0.5, 0.625)),)


def test_a_box_that_reaches_out_of_the_image_is_refused() -> None:
    with pytest.raises(
        UnusableField, match=r"regions.box: found \(40, 0, 32, 40\), expected a box within the image of 64x64"
    ):
        cut(regions=[{**BOX, "box": (40, 0, 32, 40)}])


FROM_IMAGES: list[dict[str, Any]] = [
    {"image": PIXELS},
    {"image": PIXELS, "mask": MASK, "seed": 2},
    {"image": PIXELS, "mask": MASK, "model": FILLS_HOLES, "strength": 0.5},
    {"image": 255 - PIXELS, "hires": 2},
    {"hires": {"via": "image"}},
    {"regions": [BOX, {"prompt": "a circle", "mask": MASK}], "cfg": 1},
    {"controls": [CANNY, {**CANNY, "image": 255 - PIXELS}], "image": PIXELS},
    {"controls": [UNION, {**UNION, "mode": 0}, CANNY], "image": PIXELS, "hires": 2},
    {"controls": [{"model": "beside"}, INPAINT], "image": PIXELS, "mask": MASK},
    {"controls": [INPAINT, {**INPAINT, "image": 255 - PIXELS, "mask": ~MASK}], "image": PIXELS, "mask": MASK},
]


def test_images_go_through_a_pool_and_it_forgets_them() -> None:
    """What comes back is what the tasks make of the images; afterwards nothing of a driver is held."""
    wanted = [request(steps=4, **fields) for fields in FROM_IMAGES]
    with open_pool() as pool:
        images = sorted(pool.submit(wanted).images(), key=lambda image: image.index)
        assert [type(recipe) for recipe in pool.recipes(wanted)] == [Recipe] * len(wanted)
        tasks = pool._connection.controller._tasks
        assert not tasks._inputs
    for image, one in zip(images, wanted, strict=True):
        assert image.request == one
        sent, given = InputImages(lambda result: result).bring(one)
        recipe, job = build_graph(sent, JobId("x"), FakeCatalog())
        assert (image.pixels == image_of(job.works, job.job.tasks, given=given).pixels_HWC).all()
        assert image.recipe.digest == recipe.digest


def test_a_image_that_cannot_be_brought_is_told_before_anything_is_queued() -> None:
    with open_pool() as pool:
        bad = request(image=PIXELS, mask=MASK[:, :8])
        with pytest.raises(UnusableField, match="mask"):
            pool.submit([request(), bad])
        assert [type(found) for found in pool.recipes([bad, request()])] == [UnusableField, Recipe]
        assert not pool._connection.controller._queue.jobs
