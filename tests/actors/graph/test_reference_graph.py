"""Images to work from: how many a model takes, in which sizes they are read and seen, and which tasks read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from modelpool.actors.control.inputs.input_images import InputImages
from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.graph.common.task_collector import JobGraph
from modelpool.actors.graph.features.recipe import Recipe
from modelpool.actors.outputs.recipe_json import recipe_from_json
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.models.components.vision.qwen import LEAST_PIXELS, MOST_PIXELS, STEP
from modelpool.pool.values.core.assembly import Assembly
from modelpool.pool.values.core.errors import UnusableField, UserError
from modelpool.pool.values.core.sampling_facts import (
    PLAIN_SAMPLING,
    ImageConcat,
    ModelDefaults,
    ReferenceMode,
    SamplingFacts,
)
from modelpool.pool.values.core.stage_params import (
    EncodeImageParams,
    EncodeParams,
    ImagePixels,
    ReferenceCondition,
    SampleParams,
    VisionEncodeParams,
)
from modelpool.pool.values.specs.spec import ComponentSpec, JobId, Role, Stage
from tests.actors.fakes import MIB, FakeCatalog, component_key

RANDOM = np.random.default_rng(0)
WIDE, HIGH = (RANDOM.integers(0, 256, (*sides, 3), np.uint8) for sides in ((40, 80), (90, 30)))
EDITING = replace(
    PLAIN_SAMPLING,
    reads=frozenset({"reference"}),
    side_multiple=16,
    reference_mode=ReferenceMode.BY_NAME,
    model="qwen_image",
)
MADE = 1328


class Sees(FakeCatalog):
    """Models that are all sampled as `sampling` says, with a part that sees images."""

    def __init__(self, sampling: SamplingFacts) -> None:
        self._sampling = sampling

    def model_defaults(self, model: Any) -> ModelDefaults:
        return ModelDefaults(MADE, MADE, self._sampling)

    def components(self, model: Any) -> dict[Role, ComponentSpec]:
        key, role = component_key(model, Role.VISION_ENCODER), Role.VISION_ENCODER
        return {**super().components(model), role: ComponentSpec(key, role, MIB, MIB)}


def cut(sampling: SamplingFacts = EDITING, **fields: Any) -> tuple[Recipe, JobGraph, Mapping[Any, Any]]:
    request = GenerateRequest(**{"model": "shapes", "prompt": "p", "seed": 1, **fields})
    sent, brought = InputImages(lambda result: result).bring(request)
    return *build_graph(sent, JobId("job"), Sees(sampling)), brought


def works(job: JobGraph, kind: type) -> list[Any]:
    return [job.works[task.task_id] for task in job.job.tasks if isinstance(job.works[task.task_id], kind)]


def test_references_that_nodes_of_a_workflow_make_are_read_and_seen_as_other_images() -> None:
    """They were left out, and nothing said so: an edit was made of the prompt alone. Sizes left out follow them."""
    run = {"model": "shapes", "prompt": "p"}
    nodes = {
        "i": {"kind": "image", "image": WIDE},
        "v": {"kind": "operation", "name": "image_invert", "inputs": {"image": "i"}},
        "s": {"kind": "sample", "request": run, "inputs": {"reference.0": "v"}},
        "d": {"kind": "decode", "model": "shapes", "inputs": {"latent": "s"}},
    }
    request = GenerateRequest(workflow={"nodes": nodes, "output": "d"}, seed=1)
    sent, _ = InputImages(lambda result: result).bring(request)
    job = build_graph(sent, JobId("job"), Sees(EDITING))[1]
    plain = cut(reference=WIDE)[1]
    for kind in (EncodeImageParams, VisionEncodeParams):
        assert works(job, kind) == works(plain, kind), kind
    (sample,), (wanted,) = works(job, SampleParams), works(plain, SampleParams)
    assert (sample.references, sample.shape) == (wanted.references, wanted.shape)
    (inverted,) = (task.task_id for task in job.job.tasks if task.stage is Stage.OPERATE)
    readers = [task for task in job.job.tasks if inverted in task.needs]
    assert sorted(type(job.works[task.task_id]).__name__ for task in readers) == [
        "EncodeImageParams", "VisionEncodeParams",
    ]  # fmt: skip


def test_a_image_is_seen_by_the_text_encoder_in_the_size_in_which_it_is_read() -> None:
    """Of a million pixels, whatever the model was made for; sizes left out follow it, and both texts see it."""
    recipe, job, brought = cut(reference=WIDE)
    (sample,), (read,), (seen,) = (
        works(job, SampleParams),
        works(job, EncodeImageParams),
        works(job, VisionEncodeParams),
    )
    assert (sample.shape.width, sample.shape.height) == (1456, 720)  # in steps of 16
    assert (read.width, read.height) == (seen.width, seen.height) == (1440, 736)  # of 32
    assert sample.references == (ReferenceCondition(1440, 736),)
    texts = works(job, EncodeParams)
    assert [(text.seen, text.numbered) for text in texts] == [(((1440, 736),), False)] * 2
    for task in job.job.tasks:
        needs = [type(brought[need]) if need in brought else type(job.works[need]) for need in task.needs]
        match job.works[task.task_id]:
            case EncodeParams():
                assert needs == [VisionEncodeParams]
            case VisionEncodeParams() | EncodeImageParams():
                assert needs == [ImagePixels]
            case SampleParams():
                assert needs == [EncodeParams, EncodeParams, EncodeImageParams]
    assert recipe.pictures is not None
    assert (recipe.pictures.reference_as, recipe.pictures.more_references) == ("whole", ())


def test_several_are_numbered_and_smaller_for_the_text_encoder() -> None:
    recipe, job, _ = cut(reference=[WIDE, HIGH], width=512, height=512)
    (sample,) = works(job, SampleParams)
    assert sample.references == (ReferenceCondition(736, 352), ReferenceCondition(288, 896))
    assert [(one.width, one.height) for one in works(job, EncodeImageParams)] == [(736, 352), (288, 896)]
    seen = ((544, 256), (224, 672))
    assert tuple((one.width, one.height) for one in works(job, VisionEncodeParams)) == seen
    assert {(text.seen, text.numbered) for text in works(job, EncodeParams)} == {(seen, True)}
    assert recipe.pictures is not None
    assert recipe.pictures.reference_as == "numbered"
    assert len(recipe.pictures.more_references) == len(recipe.pictures.more_reference_files) == 1
    assert recipe_from_json(recipe.as_json()) == recipe
    other, _, _ = cut(reference=[HIGH, WIDE], width=512, height=512)
    assert other.digest != recipe.digest


@pytest.mark.parametrize(
    ("model", "numbered"),
    [
        ("qwen_image_edit_fp8", False),
        ("Qwen-Image-Edit-2509", True),
        ("qwen_image_edit_2511_bf16", True),
        ("qwen-image-edit-plus", True),
        ("qwen-edit-2601", True),
        ("Qwen-Image-Edit-2701-rapid_v2_1024", True),
        ("QwenImageEdit2509", True),
        ("qwenedit_1024_2511", True),
        ("Qwen_Edit_Plus", True),
        ("qwen-image-editplus", True),
        ("edit_surplus", False),
        ("made_2509", False),
        ("edit_2508", False),
        ("edit_2513", False),
        ("credit-2512", False),
        ("edited_2512", False),
        ("my_edit_20250915", False),
        ("edit_125091", False),
        ("Qwen-Image-2512-editorial", False),
    ],
)
def test_a_models_name_tells_how_it_was_trained_unless_somebody_says_it(
    model: str, numbered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Sees.find_model
    monkeypatch.setattr(Sees, "find_model", lambda self, name: plain(self, "shapes"))
    for said, expected in ((None, numbered), ("whole", False), ("numbered", True)):
        _, job, _ = cut(model=model, reference=WIDE, reference_as=said)
        assert {text.numbered for text in works(job, EncodeParams)} == {expected}


@pytest.mark.parametrize(
    "said", [{"name": "qwen_image_edit_2509"}, {"assembly": "diffusion_model"}, {"assembly": "checkpoint"}]
)
def test_the_name_of_the_file_tells_it_whatever_the_model_is_called(
    said: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Sees.find_model
    if "assembly" in said:
        files = {str(said["assembly"]): "/models/Qwen-Image-Edit-2511.safetensors"}
        said = {"assembly": Assembly("paint", **files)}
    monkeypatch.setattr(Sees, "find_model", lambda self, name: replace(plain(self, name), **said))
    _, job, _ = cut(reference=WIDE)
    assert {text.numbered for text in works(job, EncodeParams)} == {True}


@pytest.mark.parametrize("mode", [ReferenceMode.WHOLE, ReferenceMode.NUMBERED])
def test_a_folder_tells_it_whatever_the_model_is_called(mode: ReferenceMode, monkeypatch: pytest.MonkeyPatch) -> None:
    """But several images have numbers with any model."""
    plain = Sees.find_model
    monkeypatch.setattr(Sees, "find_model", lambda self, name: plain(self, "shapes"))
    for model in ("Qwen-Image-Edit-2509", "Qwen-Image-Edit"):
        for images, expected in ((WIDE, mode is ReferenceMode.NUMBERED), ([WIDE, HIGH], True)):
            _, job, _ = cut(replace(EDITING, reference_mode=mode), model=model, reference=images)
            assert {text.numbered for text in works(job, EncodeParams)} == {expected}


@pytest.mark.parametrize("how", ["whole", "numbered"])
@pytest.mark.parametrize("sides", [(2, 900), (900, 2), (10, 4000)])
def test_a_image_that_is_too_long_to_be_seen_is_refused_before_it_is_queued(sides: tuple[int, int], how: str) -> None:
    """One that is so when it is seen: its sides are multiples there."""
    found = f"an image of {sides[0]}x{sides[1]} pixels, read at .*"
    message = rf"reference: found '{found}', expected a ratio of its sides of at most 200"
    with pytest.raises(UnusableField, match=message):
        cut(reference=np.zeros((sides[1], sides[0], 3), np.uint8), reference_as=how, width=1024, height=1024)


@given(st.integers(1, 64), st.integers(1, 6400), st.sampled_from(["whole", "numbered"]))
@settings(max_examples=40, deadline=None)
def test_what_is_seen_is_what_the_encoder_takes(width: int, height: int, how: str) -> None:
    """Whatever its proportions: it is refused here, or nowhere."""
    image = np.zeros((height, width, 3), np.uint8)
    try:
        _, job, _ = cut(reference=image, reference_as=how, width=512, height=512)
    except UnusableField:
        assert height > 100 * width
        return
    (seen,) = works(job, VisionEncodeParams)
    smart_resize(seen.height, seen.width, STEP, LEAST_PIXELS, MOST_PIXELS)


def test_an_editing_model_that_begins_with_a_image_alone_says_what_it_does_not_see(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By its name; nothing is told of others, nor where there is a reference."""
    plain = Sees.find_model
    monkeypatch.setattr(Sees, "find_model", lambda self, name: plain(self, "shapes"))
    for model, fields, expected in (
        ("qwen-image-edit-2509", {"image": WIDE}, 1),
        ("QwenImageEditRapid", {"image": WIDE}, 1),
        ("qwen-image", {"image": WIDE}, 0),
        ("credit", {"image": WIDE}, 0),
        ("qwen-image-edit", {"image": WIDE, "reference": HIGH}, 0),
        ("qwen-image-edit", {}, 0),
    ):
        recipe, job, _ = cut(model=model, **fields)
        assert len(recipe.warnings) == len(job.warnings) == expected
        assert all("as reference" in warning for warning in job.warnings)
    other, _, _ = cut(replace(EDITING, model="flux_dev", reference_mode=None), model="flux-edit", image=WIDE)
    assert not other.warnings


def test_a_prompt_of_one_image_shares_what_was_seen_with_another() -> None:
    found = [cut(reference=WIDE, prompt=prompt)[1] for prompt in ("p", "q")]
    seen = [
        {task.task_id for task in job.job.tasks if isinstance(job.works[task.task_id], VisionEncodeParams)}
        for job in found
    ]
    assert seen[0] == seen[1]
    texts = [
        {task.task_id for task in job.job.tasks if isinstance(job.works[task.task_id], EncodeParams)} for job in found
    ]
    assert len(texts[0] & texts[1]) == 1  # the negative one
    plain = {task.task_id for task in cut()[1].job.tasks}
    assert not plain & texts[0]


def test_flux_2_takes_several_that_nobody_else_sees() -> None:
    facts = replace(EDITING, reference_mode=None, model="flux2_klein", several_references=True)
    _, job, _ = cut(facts, reference=[WIDE, HIGH], width=512, height=512)
    (sample,) = works(job, SampleParams)
    assert sample.references == (ReferenceCondition(720, 368), ReferenceCondition(288, 880))
    assert not works(job, VisionEncodeParams)
    assert {text.seen for text in works(job, EncodeParams)} == {()}


REFERRING = replace(EDITING, reference_mode=None, model="flux_dev")
REFUSED = {
    "a model that takes one": (REFERRING, {"reference": [WIDE, HIGH]}, "reference: found '2 images', expected one"),
    "a model that sees none": (REFERRING, {"reference": WIDE, "reference_as": "whole"}, "reference_as: found 'whole'"),
    "how without what": (EDITING, {"reference_as": "whole"}, "requires reference"),
    "two as one": (EDITING, {"reference": [WIDE, HIGH], "reference_as": "whole"}, "'numbered' for several images"),
    "one twice": (EDITING, {"reference": [WIDE, WIDE]}, "found 'the same image twice', expected different images"),
    "a blind encoder": (
        replace(EDITING, reads=frozenset(), reference_mode=None), {"reference": WIDE},
        "a text encoder without the vision part",
    ),
    "another kind of part": (
        replace(EDITING, reads=frozenset(), reference_mode=None, why_no_vision="found no x.weight"),
        {"reference": WIDE},
        "is not that of Qwen 2.5 VL, which editing requires: found no x.weight",
    ),
    "a model that is shown its image": (
        replace(PLAIN_SAMPLING, image_concat=ImageConcat.LATENT), {"reference": WIDE},
        "reads the image that it edits from the field image",
    ),
    "another model": (PLAIN_SAMPLING, {"reference": WIDE}, "reads no reference images"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_model_cannot_be_told_is_refused(case: str) -> None:
    sampling, fields, message = REFUSED[case]
    with pytest.raises(UnusableField, match=message):
        cut(sampling, **fields)


@pytest.mark.parametrize("images", [[], [WIDE] * 5, [None, WIDE], "no/such/file.png"])
def test_images_are_checked_where_they_come_in(images: Any) -> None:
    with pytest.raises(UserError, match="reference"):
        GenerateRequest(model="shapes", prompt="p", reference=images)


def test_what_would_act_on_a_part_of_guidance_by_a_blank_reference_is_refused() -> None:
    """Before: images with another scale than the request's, errors inside of a run, and a second pass of another size
    than its reference."""
    edits = replace(EDITING, reference_mode=None, reference_covers=True, blank_reference=True)
    given = {"reference": WIDE, "width": 64, "height": 64, "cfg": 5.0}
    for options in ({"cfg_override": {"cfg": 1.0}}, {"cfg_zero": {}}, {"perp_neg": {}}):
        (name,) = options
        with pytest.raises(UnusableField, match=rf"options\.{name}: found it next to image_cfg"):
            cut(edits, **given, image_cfg=4.0, options=options)
    with pytest.raises(UnusableField, match="hires: found a second pass next to reference"):
        cut(edits, **given, hires={"scale": 2.0})
