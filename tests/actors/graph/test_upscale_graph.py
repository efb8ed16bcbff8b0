"""Upscalers in requests: the task after the decoding, the one between two passes, and what recipes say about both."""

from __future__ import annotations

from typing import Any

import pytest

from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.graph.common.graph_catalog import GraphCatalog
from modelpool.actors.graph.common.task_collector import JobGraph
from modelpool.actors.graph.common.task_files import task_files
from modelpool.actors.graph.features.recipe import Recipe, RecipeUpscale
from modelpool.actors.graph.features.upscale_graph import enlarged_to, upscale_params
from modelpool.actors.graph.recipe_request import requests_of
from modelpool.actors.outputs.image_file import parameters_text
from modelpool.actors.outputs.recipe_json import recipe_from_text
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.request.upscale_fields import Upscale
from modelpool.pool.values.core.errors import UnknownName, UnusableField, UserError
from modelpool.pool.values.core.stage_params import (
    DecodeParams,
    EncodeImageParams,
    OutputShape,
    SampleParams,
    UpscaleParams,
    UpscalerRef,
    roles_of,
)
from modelpool.pool.values.specs.spec import JobId, Role, Stage
from tests.actors.fakes import AUDIOS, UPSCALER, VIDEOS, FakeCatalog, sha

CATALOG: GraphCatalog = FakeCatalog()


def built(**fields: Any) -> tuple[Recipe, JobGraph]:
    request = GenerateRequest(**{"model": "shapes", "prompt": "p", "seed": 1, **fields})
    return build_graph(request, JobId("job"), CATALOG)


def test_the_output_is_upscaled_after_it_is_decoded() -> None:
    recipe, graph = built(upscale=f"{UPSCALER}:3", width=64, height=96)
    *_, decode, upscale = graph.job.tasks
    work = graph.works[upscale.task_id]
    assert isinstance(work, UpscaleParams)
    assert isinstance(graph.works[decode.task_id], DecodeParams)
    assert (work.width, work.height, work.out_width, work.out_height, work.frames) == (64, 96, 192, 288, 0)
    assert (upscale.needs, upscale.input_names, upscale.stage) == ((decode.task_id,), ("image",), Stage.DECODE)
    assert graph.job.wanted == upscale.task_id
    assert roles_of(work, 1) == (Role.UPSCALER,)
    assert [part.path for part in task_files(upscale, work).values()] == [f"/upscalers/{UPSCALER}.pth"]
    assert any(spec.role is Role.UPSCALER for spec in graph.components)
    assert recipe.upscale == RecipeUpscale(UPSCALER, sha(UPSCALER), 3.0)
    assert "Size: 64x96" in parameters_text(recipe)
    assert f"Postprocess upscale by: 3, Postprocess upscaler: {UPSCALER}" in parameters_text(recipe)


def test_without_an_upscaler_nothing_changes() -> None:
    recipe, graph = built()
    assert recipe.upscale is None
    assert "upscale" not in recipe.as_json()
    assert not any(isinstance(work, UpscaleParams) for work in graph.works.values())


def test_the_first_pass_is_upscaled_before_the_second() -> None:
    recipe, graph = built(hires=f"1.5:0.4:6={UPSCALER}", upscale={"model": UPSCALER, "tile": 64, "overlap": 8})
    kinds = [type(graph.works[task.task_id]) for task in graph.job.tasks]
    images = [kind for kind in kinds if kind in (SampleParams, DecodeParams, UpscaleParams, EncodeImageParams)]
    first, second = [SampleParams, DecodeParams, UpscaleParams], [EncodeImageParams, SampleParams, DecodeParams]
    assert images == [*first, *second, UpscaleParams]
    enlarged, last = [work for work in graph.works.values() if isinstance(work, UpscaleParams)]
    assert (enlarged.width, enlarged.out_width, enlarged.tile) == (64, 96, 0)
    assert (last.width, last.out_width, last.tile, last.overlap) == (96, 192, 64, 8)
    assert recipe.pictures is not None
    expected = {"scale": 1.5, "strength": 0.4, "steps": 6, "via": "picture", "upscaler": UPSCALER}
    assert recipe.pictures.hires == {**expected, "upscaler_sha256": sha(UPSCALER)}
    assert f"Hires upscaler: {UPSCALER}" in parameters_text(recipe)


def test_a_network_that_enlarges_too_much_by_itself_is_refused_whatever_scale_is_wanted() -> None:
    """Found in a review: only the wanted size had a bound, and the host held what the network makes."""
    fourfold = UpscalerRef("4x", "/4x.pth", "00", 4)
    fine = upscale_params(Upscale(model="4x", scale=1.5), fourfold, OutputShape(4096, 4096))
    assert (fine.out_width, fine.out_height) == (6144, 6144)
    with pytest.raises(UnusableField, match=r"upscale\.model: found \"'4x', which makes 32768x32768 pixels"):
        upscale_params(Upscale(model="4x", scale=1.5), fourfold, OutputShape(8192, 8192))
    with pytest.raises(UnusableField, match=r"hires\.upscaler: .* 32768x16384 pixels"):
        enlarged_to(fourfold, (8192, 4096), (9216, 4608))


def test_recipes_with_upscalers_lead_to_the_same_request() -> None:
    fields: dict[str, Any] = {"hires": f"2:0.5={UPSCALER}", "upscale": {"model": UPSCALER, "tile": 64}}
    for each in (fields, {"upscale": UPSCALER}, {"eta": 0.5, "s_churn": 1.0}, {"sigmas": [5.0, 2.0, 1.0]}):
        recipe, _ = built(**each)
        read = recipe_from_text(recipe.to_json())
        assert read == recipe
        again = [build_graph(request, JobId("again"), CATALOG)[0] for request in requests_of(read, str)]
        assert recipe.digest in [one.digest for one in again], each


def test_videos_are_upscaled_frame_by_frame_and_audio_is_not() -> None:
    _, graph = built(model=VIDEOS, upscale=UPSCALER)
    work = graph.works[graph.job.wanted]
    assert isinstance(work, UpscaleParams)
    assert work.frames == 17
    with pytest.raises(UnusableField, match=r"upscale: not supported by model 'sounds', which generates audio clips"):
        built(model=AUDIOS, upscale=UPSCALER)


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"upscale": "triple"}, UnknownName, "unknown upscaler 'triple'"),
        ({"hires": "2=triple"}, UnknownName, "unknown upscaler 'triple'"),
        ({"upscale": f"{UPSCALER}:0.5"}, UnusableField, r"upscale.scale: found 0.5, expected a number from 1 to 16"),
        ({"upscale": ":2"}, UserError, "upscale: found ':2', expected the name of an upscaler"),
        ({"upscale": f"{UPSCALER}:8", "width": 4096}, UnusableField, r"upscale.scale: found 8.0, expected a scale"),
        ({"upscale": {"model": UPSCALER, "tile": 8}}, UserError, r"tile: found 8"),
        ({"upscale": {"model": UPSCALER, "overlap": 8}}, UserError, r"upscale.overlap: found 8, expected .* half"),
        ({"hires": {"via": "latent", "upscaler": UPSCALER}}, UserError, r"hires.via: found 'latent'"),
    ],
)
def test_what_cannot_be_upscaled_is_an_error_of_its_field(fields: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        built(**fields)


def test_short_forms() -> None:
    for text, expected in (
        ("4x-ultra", {"model": "4x-ultra"}),
        ("4x-ultra:2", {"model": "4x-ultra", "scale": 2.0}),
        ("C:/files/4x.pth", {"model": "C:/files/4x.pth"}),
    ):
        assert Upscale.model_validate(text).model_dump(exclude_none=True) == expected
