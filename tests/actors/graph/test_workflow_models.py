"""Latents of several models in one workflow, operations in the scale of their VAE, and fields of requests with passes:
each acts, or is refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from modelpool.actors.control.inputs.input_images import InputImages
from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.inference.operations.latent_edits import VaeScale
from modelpool.pool.inference.operations.operate import operate
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.family_facts import LatentFacts
from modelpool.pool.values.core.sampling_facts import ModelDefaults, TextStates
from modelpool.pool.values.core.stage_params import DecodeParams, Latent, ModelRef, OperationParams, SampleParams
from modelpool.pool.values.specs.spec import JobId
from tests.actors.fakes import FakeCatalog
from tests.actors.graph.test_workflow_graph import BASE, REQUEST, operation, request_of, sampling
from tests.each_case import each_case

FLUX, SD1 = LatentFacts(16, 8, 0.3611, shift=0.1159), LatentFacts(4, 8, 0.18215)
WAN = LatentFacts(4, 8, 1.0, means=(0.5, -1.0, 0.0, 2.0), deviations=(2.0, 1.0, 0.5, 3.0))


class Catalog(FakeCatalog):
    """The models "shapes" and "forms" with these latents."""

    def __init__(self, shapes: LatentFacts, forms: LatentFacts) -> None:
        super().__init__()
        self._latents = {"shapes": shapes, "forms": forms}

    def model_defaults(self, model: ModelRef) -> ModelDefaults:
        return replace(super().model_defaults(model), latent=self._latents.get(model.name))


def works_of(request: GenerateRequest, shapes: LatentFacts = SD1, forms: LatentFacts = SD1) -> list[Any]:
    return list(build_graph(request, JobId("x"), Catalog(shapes, forms))[1].works.values())


OTHER = {**BASE, "s2": sampling("s", request={"model": "forms"}, strength=0.5)}
#: workflows of two models, and the node and the input that reads the latent of the other one
OF_TWO_MODELS = {
    "node s2: latent: ": {**OTHER, "d": {**BASE["d"], "inputs": {"latent": "s2"}, "model": "forms"}},
    "node d: latent: ": {**BASE, "d": {**BASE["d"], "model": "forms"}},
    "node add: second: ": {
        **BASE,
        "s3": sampling(request={"model": "forms"}),
        "add": operation("latent_add", {"first": "s", "second": "s3"}),
        "d": {**BASE["d"], "inputs": {"latent": "add"}},
    },
}


@each_case("place", OF_TWO_MODELS)
@each_case("forms", [FLUX, replace(SD1, scaling_factor=0.13025), WAN, replace(SD1, downscale=16)])
def test_a_latent_passes_only_between_models_that_read_it_equally(place: str, forms: LatentFacts) -> None:
    """With another scale or layout the same numbers are another image, and nothing would say so."""
    for alike in (SD1, FLUX):
        assert works_of(request_of(OF_TWO_MODELS[place]), alike, alike)
    with pytest.raises(UserError) as found:
        works_of(request_of(OF_TWO_MODELS[place]), SD1, forms)
    assert str(found.value).startswith(place), found.value
    assert "decode the latent" in str(found.value)


class TextCatalog(FakeCatalog):
    """The models "shapes" and "forms" that read texts like this."""

    def __init__(self, shapes: TextStates, forms: TextStates) -> None:
        super().__init__()
        self._texts = {"shapes": shapes, "forms": forms}

    def model_defaults(self, model: ModelRef) -> ModelDefaults:
        return replace(super().model_defaults(model), texts=self._texts.get(model.name))


def read_by(shapes: TextStates, forms: TextStates, nodes: dict[str, Any]) -> tuple[str, ...]:
    """The warnings of a workflow of models that read texts like this."""
    return build_graph(request_of(nodes), JobId("x"), TextCatalog(shapes, forms))[0].warnings


TEXT = {"kind": "text", "model": "forms", "prompt": "a cat"}
OF_SHAPES = {**TEXT, "model": "shapes"}


def reading(**texts: str) -> dict[str, Any]:
    """A run of "shapes" that reads texts of nodes."""
    request = {"model": "shapes", "steps": 4, "cfg": 3.0, "width": 64, "height": 64}
    request |= {} if "positive" in texts else {"prompt": "p"}
    return {"kind": "sample", "request": request, "inputs": texts}


#: workflows in which a text of the model "forms" is read for "shapes", and the node and the input that reads it
OF_TWO_TEXTS = {
    "node s: positive: ": {**BASE, "t": TEXT, "s": reading(positive="t")},
    "node s: negative: ": {**BASE, "t": TEXT, "u": OF_SHAPES, "s": reading(positive="u", negative="t")},
    "node both: second: ": {
        **BASE, "t": TEXT, "u": OF_SHAPES, "both": operation("encoded_concat", {"first": "u", "second": "t"}),
        "s": reading(positive="both"),
    },
    'node s: positive: found "a text for': {
        **BASE, "t": TEXT, "both": operation("encoded_concat", {"first": "t", "second": "t"}),
        "s": reading(positive="both"),
    },
}  # fmt: skip
CLIP, T5 = TextStates(("clip_l",), "sd1"), TextStates(("t5xxl",), "mochi")


@each_case("place", OF_TWO_TEXTS)
def test_a_text_is_read_only_by_models_of_its_text_encoders(place: str) -> None:
    """Before: an internal error for states of another width, and another image without a word for equal widths."""
    assert not read_by(CLIP, CLIP, OF_TWO_TEXTS[place])
    with pytest.raises(UserError) as found:
        read_by(CLIP, T5, OF_TWO_TEXTS[place])
    assert str(found.value).startswith(place), found.value
    assert 'of t5xxl", expected one of clip_l' in str(found.value)
    told = read_by(T5, replace(T5, reading="ltxv"), OF_TWO_TEXTS[place])
    assert any("reads the same text encoders in another way" in each for each in told)


@each_case(
    ("name", "inputs", "settings"),
    [
        ("latent_add", {"first": "s", "second": "s2"}, {}),
        ("latent_subtract", {"first": "s", "second": "s2"}, {}),
        ("latent_multiply", {"samples": "s"}, {"factor": 0.5}),
        ("latent_interpolate", {"first": "s", "second": "s2"}, {"ratio": 0.25}),
        ("latent_upscale_by", {"samples": "s"}, {"factor": 2.0, "method": "bislerp"}),
        ("latent_upscale_to_pixels", {"samples": "s"}, {"width": 96, "height": 96, "method": "bislerp"}),
    ],
)
def test_operations_that_depend_on_the_scale_have_that_of_the_vae(
    name: str, inputs: dict[str, str], settings: dict[str, Any]
) -> None:
    """ComfyUI has latents between nodes in the VAE's scale: with a shift, half of the sum is not half of each."""
    rng = np.random.default_rng(3)
    one, other = (rng.normal(size=(4, 8, 8)).astype(np.float32) for _ in range(2))
    scale = VaeScale.of(WAN)
    nodes = {
        **BASE,
        "s2": sampling(request={"seed": 9}),
        "o": operation(name, inputs, **settings),
        "d": {**BASE["d"], "inputs": {"latent": "o"}},
    }
    work, of_sd1 = (
        next(each for each in works_of(request_of(nodes), facts, facts) if isinstance(each, OperationParams))
        for facts in (WAN, SD1)
    )
    assert dict(of_sd1.settings)["scale"] == (), "a factor alone changes nothing"
    given: Any = {key: Latent(one if source == "s" else other) for key, source in inputs.items()}
    of_vae: Any = {key: Latent(scale.to_vae(value.samples_CHW)) for key, value in given.items()}
    found, plain, in_vae = operate(work, given), operate(of_sd1, given), operate(of_sd1, of_vae)
    assert isinstance(found, Latent)
    assert isinstance(plain, Latent)
    assert isinstance(in_vae, Latent)
    expected = scale.to_model(in_vae.samples_CHW)
    np.testing.assert_allclose(found.samples_CHW, expected, atol=1e-5)
    assert np.abs(plain.samples_CHW - expected).max() > 0.01, "the scale is no detail"


def test_fields_of_a_request_with_passes_act_on_each_run() -> None:
    passes = [{"scale": 2.0, "via": "image", "strength": 0.5}]
    plain = {**REQUEST, "seed": 3, "passes": passes}
    tiled = [each for each in works_of(GenerateRequest(**plain, vae_tile=128)) if isinstance(each, DecodeParams)]
    assert {each.tile for each in tiled} == {128}
    assert len({each.shape.width for each in tiled}) == 2
    shared = [each for each in works_of(GenerateRequest(**plain, gpus=2)) if isinstance(each, SampleParams)]
    assert [each.gpus for each in shared] == [2, 2]
    control = {"model": "canny", "image": np.full((64, 64, 3), 90, np.uint8)}
    given = GenerateRequest(**plain, controls=[control])
    brought, _ = InputImages(lambda result: result).bring(given)
    guided = [each for each in works_of(brought) if isinstance(each, SampleParams)]
    assert [[one.name for one in each.controls] for each in guided] == [["canny"], ["canny"]]
    own_image = {"image": np.full((64, 64, 3), 90, np.uint8), "strength": 0.5, "controls": [{"model": "canny"}]}
    brought, _ = InputImages(lambda result: result).bring(GenerateRequest(**plain, **own_image))
    graph = build_graph(brought, JobId("x"), Catalog(SD1, SD1))[1]
    reading = [task for task in graph.job.tasks if isinstance(graph.works[task.task_id], SampleParams)]
    assert all(any("control" in name for name in task.input_names) for task in reading)
    sigmas = [5.0, 3.0, 2.0, 1.0]
    own = {**{name: value for name, value in plain.items() if name != "steps"}, "sigmas": sigmas}
    levels = [each.schedule.sigmas for each in works_of(GenerateRequest(**own)) if isinstance(each, SampleParams)]
    assert levels == [tuple(sigmas), tuple(sigmas)]


@each_case(("name", "value"), [("vae_tile", 128), ("vae_frames", 9), ("paste", False), ("batch", 2)])
def test_fields_that_would_not_act_in_a_node_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=name):
        request_of({**BASE, "s": sampling(request={name: value})})


def test_fields_that_would_not_act_on_passes_are_refused_or_named() -> None:
    with pytest.raises(UserError, match="batch: found 4"):
        GenerateRequest(**REQUEST, batch=4, passes=[{"strength": 0.5}])
    region = {"box": (0, 0, 32, 32), "prompt": "q"}
    request = GenerateRequest(**REQUEST, seed=3, regions=[region], passes=[{"strength": 0.5}])
    assert any("regions" in each for each in build_graph(request, JobId("x"), FakeCatalog())[1].warnings)


def test_a_node_shares_its_run_and_tiles_its_decode() -> None:
    nodes = {"s": sampling(request={"gpus": 2}), "d": {**BASE["d"], "vae_tile": 128}}
    works = works_of(request_of(nodes))
    assert [each.gpus for each in works if isinstance(each, SampleParams)] == [2]
    assert [each.tile for each in works if isinstance(each, DecodeParams)] == [128]


def test_a_mask_of_a_workflow_may_be_black_as_other_nodes_may_invert_it() -> None:
    """The alpha channel of an opaque photo is such a mask. 0 and 1 are still read as no mask."""
    black, odd = np.zeros((64, 64), np.uint8), np.ones((64, 64), np.uint8)
    nodes = {"m": {"kind": "mask", "mask": black}, "i": operation("mask_invert", {"mask": "m"})}
    run = sampling("s", strength=0.5)
    more = {**BASE, **nodes, "s2": {**run, "inputs": {"latent": "s", "mask": "i"}}}
    request = request_of({**more, "d": {**BASE["d"], "inputs": {"latent": "s2"}}})
    brought, refs = InputImages(lambda result: result).bring(request)
    assert len(refs) == 1
    assert works_of(brought)
    wrong = request_of({**more, "m": {"kind": "mask", "mask": odd}})
    with pytest.raises(UserError, match="node m: found 'a mask whose brightest pixel is 1"):
        InputImages(lambda result: result).bring(wrong)
    with pytest.raises(UserError, match=r"regions\.mask"):
        InputImages(lambda result: result).bring(GenerateRequest(**REQUEST, regions=[{"mask": black, "prompt": "q"}]))
