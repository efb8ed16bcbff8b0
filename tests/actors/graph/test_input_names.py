"""The inputs of each task have the names of what they are: swapped names in the task graph fail here."""

from __future__ import annotations

import numpy as np
import pytest

from modelpool.actors.control.inputs.input_images import InputImages
from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.graph.common.task_collector import JobGraph
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.stage_params import (
    DecodeParams,
    EncodeImageParams,
    EncodeParams,
    ImagePixels,
    Mask,
    Result,
    SampleParams,
)
from modelpool.pool.values.core.task_inputs import TaskInputs
from modelpool.pool.values.specs.spec import JobId, TaskId
from tests.actors.fakes import FakeCatalog

RANDOM = np.random.default_rng(0)
IMAGE, MASK, AREA, SECOND_AREA = (RANDOM.integers(0, 256, shape, np.uint8) for shape in ((64, 64, 3), *[(64, 64)] * 3))
REGIONS = [
    {"prompt": "a hat", "mask": AREA},
    {"prompt": "a shoe", "box": (0, 0, 32, 32)},
    {"prompt": "a tie", "mask": SECOND_AREA},
]


class Graph:
    """The task graph of a request, and the inputs that the driver brings."""

    def __init__(self, **fields: object) -> None:
        self.brought: dict[TaskId, Result] = {}
        request, refs = InputImages(lambda result: result).bring(
            GenerateRequest(model="shapes", prompt="a cat", negative="blurry", seed=1, cfg=4.0, **fields)
        )
        self.brought.update(refs)  # type: ignore[arg-type]  # here, a reference is the result itself
        self.graph: JobGraph = build_graph(request, JobId("job"), FakeCatalog())[1]

    def inputs(self, kind: type) -> list[dict[str, object]]:
        """By name, the parameters of the task that computes each input, or the value that the driver brings; of each
        task of a kind."""
        return [
            {
                name: self.graph.works.get(need, self.brought.get(need))
                for name, need in zip(task.input_names, task.needs, strict=True)
            }
            for task in self.graph.job.tasks
            if isinstance(self.graph.works[task.task_id], kind)
        ]


def text(found: object) -> str:
    assert isinstance(found, EncodeParams)
    return found.text


def is_mask(found: object, expected: np.ndarray) -> bool:
    return isinstance(found, Mask) and np.array_equal(found.values_HW, expected)


def test_texts_have_their_names() -> None:
    (plain,) = Graph().inputs(SampleParams)
    assert {name: text(found) for name, found in plain.items()} == {"positive": "a cat", "negative": "blurry"}
    (regional,) = Graph(regions=REGIONS).inputs(SampleParams)
    texts = {name: text(found) for name, found in regional.items() if "mask" not in name}
    expected = {"region.0": "a hat", "region.1": "a shoe", "region.2": "a tie"}
    assert texts == {"positive": "a cat", "negative": "blurry", **expected}


def test_masks_of_the_image_and_of_regions_have_their_names() -> None:
    (found,) = Graph(image=IMAGE, mask=MASK, strength=0.5, regions=REGIONS).inputs(SampleParams)
    assert isinstance(found["start"], EncodeImageParams)
    assert is_mask(found["mask"], MASK)
    assert is_mask(found["region_mask.0"], AREA)
    assert is_mask(found["region_mask.2"], SECOND_AREA)
    assert "region_mask.1" not in found


def test_an_image_is_encoded_and_pasted_back_around_its_mask() -> None:
    graph = Graph(image=IMAGE, mask=MASK, strength=0.5)
    (encoded,), (decoded,) = graph.inputs(EncodeImageParams), graph.inputs(DecodeParams)
    assert set(encoded) == {"image"}
    assert isinstance(decoded["latent"], SampleParams)
    assert is_mask(decoded["mask"], MASK)
    for found in (encoded["image"], decoded["image"]):
        assert isinstance(found, ImagePixels)
        assert np.array_equal(found.pixels_HWC, IMAGE)


def test_a_second_pass_starts_from_the_first() -> None:
    first, second = Graph(hires={"scale": 2.0, "strength": 0.5}).inputs(SampleParams)
    assert "start" not in first
    assert isinstance(second["start"], SampleParams)


@pytest.mark.parametrize("fields", [{}, {"image": IMAGE, "mask": MASK, "strength": 0.5, "regions": REGIONS}], ids=str)
def test_every_input_has_one_name(fields: dict[str, object]) -> None:
    for task in Graph(**fields).graph.job.tasks:
        TaskInputs.named(task.input_names, [MASK_RESULT] * len(task.needs))


MASK_RESULT = Mask(MASK)
