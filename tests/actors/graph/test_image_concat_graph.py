"""What can be asked of models that are shown an image: refusals name the field, numbers left out are the model's,
sizes follow the reference, and tasks read what they are told in order."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from modelpool.actors.control.inputs.input_images import InputImages
from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.graph.common.task_collector import JobGraph
from modelpool.actors.graph.features.image_concat_graph import reference_size
from modelpool.actors.graph.features.recipe import Recipe
from modelpool.actors.outputs.image_file import parameters_text
from modelpool.actors.outputs.recipe_json import recipe_from_json
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.families.definitions.stable_diffusion_1 import SD1_INSTRUCT
from modelpool.pool.families.definitions.stable_diffusion_2 import SD_X4
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.core.sampling_facts import (
    PLAIN_SAMPLING,
    ImageConcat,
    ModelDefaults,
    Prediction,
    SamplingFacts,
)
from modelpool.pool.values.core.stage_params import (
    DecodeParams,
    EncodeImageParams,
    EncodeParams,
    ImagePixels,
    ReferenceCondition,
    SampleParams,
    StartCondition,
)
from modelpool.pool.values.specs.spec import JobId
from tests.actors.fakes import FakeCatalog

PIXELS = np.random.default_rng(0).integers(0, 256, (40, 64, 3), np.uint8)
CONTROL = replace(PLAIN_SAMPLING, image_concat=ImageConcat.LATENT)
REFERRING = replace(PLAIN_SAMPLING, reads=frozenset({"reference"}), side_multiple=16)


class Shows(FakeCatalog):
    """Models that are all sampled as `sampling` says."""

    def __init__(self, sampling: SamplingFacts) -> None:
        self._sampling = sampling

    def model_defaults(self, model: Any) -> ModelDefaults:
        return ModelDefaults(64, 64, self._sampling)


def cut(sampling: SamplingFacts, **fields: Any) -> tuple[Recipe, JobGraph, dict[Any, Any]]:
    request = GenerateRequest(**{"model": "shapes", "prompt": "p", "seed": 1, **fields})
    sent, given = InputImages(lambda result: result).bring(request)
    return *build_graph(sent, JobId("job"), Shows(sampling)), given


def works(job: JobGraph, kind: type) -> list[Any]:
    return [job.works[task.task_id] for task in job.job.tasks if isinstance(job.works[task.task_id], kind)]


def read_by_sampling(job: JobGraph, given: dict[Any, Any]) -> list[type]:
    (task,) = [task for task in job.job.tasks if isinstance(job.works[task.task_id], SampleParams)]
    return [type(given[need]) if need in given else type(job.works[need]) for need in task.needs]


def test_a_image_that_is_shown_is_read_as_a_latent_and_all_steps_are_made() -> None:
    recipe, job, given = cut(SD1_INSTRUCT.sampling, image=PIXELS)
    assert read_by_sampling(job, given) == [EncodeParams, EncodeParams, EncodeImageParams]
    (work,) = works(job, SampleParams)
    assert (work.image is not None, work.has(StartCondition), work.schedule.first_step, work.schedule.steps) == (
        True,
        False,
        0,
        100,
    )
    assert (work.guidance.image_cfg, work.guidance.cfg, work.texts) == (1.5, 7.5, 3)
    assert recipe.pictures is not None
    assert (recipe.pictures.image_cfg, recipe.pictures.first_step) == (1.5, 0)
    assert recipe_from_json(recipe.as_json()) == recipe
    assert "Denoising strength: 1, Image CFG scale: 1.5" in parameters_text(recipe)


@pytest.mark.parametrize(("fields", "texts"), [({"image_cfg": 1.0}, 2), ({"cfg": 1.0}, 1), ({"image_cfg": 2.0}, 3)])
def test_a_model_is_asked_without_a_image_where_that_changes_something(fields: dict[str, float], texts: int) -> None:
    _, job, _ = cut(SD1_INSTRUCT.sampling, image=PIXELS, **fields)
    assert works(job, SampleParams)[0].texts == texts


def test_a_scale_of_the_image_that_is_not_read_is_named() -> None:
    (warning,) = cut(SD1_INSTRUCT.sampling, image=PIXELS, image_cfg=2.0, cfg=1.0)[0].warnings
    assert warning == "image_cfg 2: it is not read with cfg 1, which is no guidance by the text"
    for fields in ({"image_cfg": 2.0}, {"image_cfg": 1.0, "cfg": 1.0}, {"cfg": 1.0}):
        assert cut(SD1_INSTRUCT.sampling, image=PIXELS, **fields)[0].warnings == (), fields


def test_a_image_that_is_enlarged_is_read_as_it_is() -> None:
    recipe, job, given = cut(SD_X4.sampling, image=PIXELS, cfg=1.0)
    assert read_by_sampling(job, given) == [EncodeParams, ImagePixels]
    assert not works(job, EncodeImageParams)
    (work,), (decoded,) = works(job, SampleParams), works(job, DecodeParams)
    assert (
        (work.shape.width, work.shape.height, work.image_numbers.noise_level)
        == (decoded.shape.width, decoded.shape.height, 20)
        == (256, 160, 20)
    )
    assert (recipe.width, recipe.height) == (256, 160)
    _, other, _ = cut(SD_X4.sampling, image=PIXELS, cfg=1.0, noise_level=0)
    assert works(other, SampleParams)[0].image_numbers.noise_level == 0


@pytest.mark.parametrize("step", [0, 16, 32, 64, 128])
def test_sizes_that_a_image_has_are_in_the_models_steps_and_those_of_a_person_are_refused(step: int) -> None:
    """The driver knows no model, and brings all of it; it is brought to cover them where it is read."""
    facts = replace(PLAIN_SAMPLING, side_multiple=step)
    wide = np.zeros((1080, 1920, 3), np.uint8)
    recipe, job, given = cut(facts, image=wide, mask=wide[:, :, 0] == 0)
    (work,), (encoded,) = works(job, SampleParams), works(job, EncodeImageParams)
    size = (1920 // (step or 8) * (step or 8), 1080 // (step or 8) * (step or 8))
    assert (
        (work.shape.width, work.shape.height)
        == (encoded.width, encoded.height)
        == (recipe.width, recipe.height)
        == size
    )
    assert {found.pixels_HWC.shape for found in given.values() if isinstance(found, ImagePixels)} == {(1080, 1920, 3)}
    _, job, _ = cut(facts, image=wide, width=1024)
    (work,) = works(job, SampleParams)
    assert (work.shape.width, work.shape.height) == (1024, 576 // (step or 8) * (step or 8))
    if step > 8:
        with pytest.raises(UnusableField, match=r"^height: found 1080, expected a multiple of"):
            cut(facts, image=wide, height=1080, width=1920)


def test_a_image_that_is_smaller_than_a_step_is_made_as_large() -> None:
    _, job, _ = cut(replace(PLAIN_SAMPLING, side_multiple=64), image=PIXELS)
    assert (works(job, SampleParams)[0].shape.width, works(job, SampleParams)[0].shape.height) == (64, 64)


def test_a_strength_is_held_against_the_models_own_steps() -> None:
    """Of a hundred, a twenty-fifth is made; of four, none."""
    for steps, made in ((100, 4), (50, 2), (4, None)):
        facts = replace(PLAIN_SAMPLING, defaults=replace(SD1_INSTRUCT.sampling.defaults, steps=steps))
        for fields in ({"image": PIXELS, "strength": 0.04}, {"hires": {"strength": 0.04}}):
            if made is None:
                with pytest.raises(UnusableField, match=r"strength: found 0.04, expected at least 0.25: with 4 steps"):
                    cut(facts, **fields)
                continue
            assert works(cut(facts, **fields)[1], SampleParams)[-1].steps_run == made


@pytest.mark.parametrize("fields", [{"image": PIXELS, "strength": 0.3}, {"hires": {"strength": 0.3}}])
def test_a_flow_makes_the_whole_of_a_step_that_is_made_in_part(fields: dict[str, Any]) -> None:
    """Of four steps 1.2: two, where others make one. The recipe says so too, of an image that is started from."""
    for prediction, made in ((Prediction.FLOW, 2), (Prediction.NOISE, 1)):
        recipe, job, _ = cut(replace(PLAIN_SAMPLING, prediction=prediction), steps=4, **fields)
        assert works(job, SampleParams)[-1].steps_run == made
        assert recipe.pictures is not None
        assert recipe.pictures.first_step == (4 - made if "image" in fields else 0)


def test_one_step_is_made_of_a_image_that_is_shown() -> None:
    """Nothing of it is left out, so that no strength has to be said."""
    _, job, _ = cut(SD1_INSTRUCT.sampling, image=PIXELS, steps=1)
    assert works(job, SampleParams)[0].steps_run == 1
    with pytest.raises(UnusableField, match=r"strength: found 0.6, expected at least 1: with 1 step,"):
        cut(PLAIN_SAMPLING, image=PIXELS, steps=1)


def test_a_reference_is_read_at_its_own_proportions_and_sizes_follow_it() -> None:
    recipe, job, given = cut(REFERRING, reference=PIXELS, cfg=1.0)
    assert read_by_sampling(job, given) == [EncodeParams, EncodeImageParams]
    (work,), (encoded,) = works(job, SampleParams), works(job, EncodeImageParams)
    assert (work.shape.width, work.shape.height) == (encoded.width, encoded.height) == (80, 48)
    assert work.references == (ReferenceCondition(80, 48),)
    assert recipe.pictures is not None
    assert recipe.pictures.reference_sha256
    assert recipe_from_json(recipe.as_json()) == recipe
    _, high, _ = cut(REFERRING, reference=PIXELS, width=32, height=160, cfg=1.0)
    (work,) = works(high, SampleParams)
    assert (work.shape.width, work.shape.height, work.references) == (32, 160, (ReferenceCondition(96, 64),))
    _, wide, _ = cut(REFERRING, reference=PIXELS, width=128, cfg=1.0)
    assert (works(wide, SampleParams)[0].shape.width, works(wide, SampleParams)[0].shape.height) == (128, 80)


def test_a_reference_goes_with_a_image_to_start_from_and_after_it() -> None:
    _, job, given = cut(REFERRING, reference=PIXELS, image=255 - PIXELS[:32], strength=0.5, cfg=1.0)
    assert read_by_sampling(job, given) == [EncodeParams, EncodeImageParams, EncodeImageParams]
    (work,) = works(job, SampleParams)
    assert (work.has(StartCondition), work.image is not None, work.schedule.first_step) == (True, False, 10)
    first, second = works(job, EncodeImageParams)
    assert ((first.width, first.height), (second.width, second.height)) == (
        (64, 32),
        (work.references[0].width, work.references[0].height),
    )


def test_a_second_pass_has_the_reference_of_the_first() -> None:
    _, job, _ = cut(REFERRING, reference=PIXELS, hires=2, cfg=1.0)
    first, second = works(job, SampleParams)
    assert first.references == second.references == (ReferenceCondition(80, 48),)
    assert len(works(job, EncodeImageParams)) == 1


@pytest.mark.parametrize("found", [(100, 100), (333, 1000), (4000, 30), (2000, 1999)])
def test_a_reference_has_about_the_pixels_of_what_is_made(found: tuple[int, int]) -> None:
    width, height = reference_size(found, 1024 * 1024, 16)
    assert (width % 16, height % 16) == (0, 0)
    assert 0.9 < width * height / 1024**2 < 1.1
    assert abs(math.log(width / height) - math.log(found[0] / found[1])) < 0.1


def test_a_reference_that_is_a_line_is_read_as_one_of_sides_that_can_be() -> None:
    assert reference_size((1, 16384), 1024 * 1024, 16) == (16, 16384)


REFUSED: tuple[tuple[SamplingFacts, dict[str, Any], str], ...] = (
    (CONTROL, {}, "image: missing"),
    (SD_X4.sampling, {}, "image: missing"),
    (CONTROL, {"image": PIXELS, "strength": 0.5}, "strength: not supported"),
    (CONTROL, {"image": PIXELS, "hires": 2}, "hires: not supported"),
    (SD1_INSTRUCT.sampling, {"image": PIXELS, "mask": PIXELS[:, :, 0]}, "mask: not supported"),
    (SD_X4.sampling, {"image": PIXELS, "controls": [{"model": "canny", "image": PIXELS}]}, "controls: not supported"),
    (SD_X4.sampling, {"image": PIXELS, "width": 8192, "height": 8}, "image: found"),
    (PLAIN_SAMPLING, {"reference": PIXELS}, "reference: not supported"),
    (CONTROL, {"image": PIXELS, "image_cfg": 2.0}, "image_cfg: found"),
    (PLAIN_SAMPLING, {"noise_level": 3}, "noise_level: found"),
)


@pytest.mark.parametrize(("sampling", "fields", "message"), REFUSED)
def test_what_a_model_cannot_be_asked_for_is_refused_by_name(
    sampling: SamplingFacts, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnusableField, match=message):
        cut(sampling, **fields)


@pytest.mark.parametrize(
    ("field", "value"), [("image_cfg", 0.5), ("image_cfg", 1e9), ("noise_level", 351), ("noise_level", True)]
)
def test_numbers_that_cannot_be_are_refused_at_the_edge(field: str, value: Any) -> None:
    with pytest.raises(UnusableField, match=field):
        GenerateRequest(model="m", prompt="p", **{field: value})
