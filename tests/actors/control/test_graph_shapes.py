"""A graph that is derived from the graph of another seed equals one that is built from nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from modelpool.actors.control.build_requests import build_requests
from modelpool.actors.control.catalog_questions import BUILD_SOME
from modelpool.actors.control.graph_shapes import BuiltRequest
from modelpool.actors.control.inputs.input_images import InputImages
from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.specs.spec import JobId
from tests.actors.fakes import AUDIOS, FILLS_HOLES, HANDS_ON, PAIR, VIDEOS, FakeCatalog
from tests.each_case import each_case

PIXELS = np.random.default_rng(0).integers(0, 256, (40, 64, 3), np.uint8)
MASK = PIXELS[:, :, 0] > 100
#: fields of requests, and whether later seeds need no build
KINDS: dict[str, tuple[dict[str, Any], bool]] = {
    "text": ({}, True),
    "guided": ({"negative": "n", "cfg": 5.0, "loras": ["thick", ("words", 0.5)]}, True),
    "a chosen batch size": ({"batch": "auto"}, True),
    "image": ({"image": PIXELS, "strength": 0.5}, True),
    "inpaint": ({"model": FILLS_HOLES, "image": PIXELS, "mask": MASK}, True),
    "hires": ({"hires": {"scale": 2.0}}, True),
    "control": ({"controls": [{"model": "depth", "image": PIXELS}]}, True),
    "region": ({"regions": [{"prompt": "q", "box": (0, 0, 32, 32)}]}, True),
    "video": ({"model": VIDEOS}, True),
    "audio": ({"model": AUDIOS}, True),
    "two experts": ({"model": PAIR}, True),
    "two stages": ({"model": HANDS_ON, "width": 256, "height": 256}, False),
}


class Counting:
    """Builds graphs, and counts."""

    def __init__(self) -> None:
        self.builds = 0

    def __call__(self, request: GenerateRequest, job_id: JobId) -> BuiltRequest:
        self.builds += 1
        return BuiltRequest(*build_graph(request, job_id, FakeCatalog()))

    async def ask(
        self, question: object, wanted: Sequence[tuple[JobId, GenerateRequest]], *_: object
    ) -> list[BuiltRequest | UserError]:
        assert question is BUILD_SOME
        return [self(request, job_id) for job_id, request in wanted]

    def all(self, *wanted: GenerateRequest) -> list[BuiltRequest | UserError]:
        named = [(JobId(f"job {number}"), one) for number, one in enumerate(wanted)]
        return asyncio.run(build_requests(self, named, None))


def request(seed: int, **fields: Any) -> GenerateRequest:
    wanted = GenerateRequest(**{"model": "shapes", "prompt": "p", "steps": 3, "seed": seed, **fields})
    return InputImages(lambda result: result).bring(wanted)[0]


@each_case("kind", KINDS)
@each_case("seeds", [(7, 9, 0), (0, 7, 9), (2**32 - 1, 1, 2)])
def test_a_derived_graph_is_the_one_that_would_be_built(kind: str, seeds: tuple[int, ...]) -> None:
    fields, is_derived = KINDS[kind]
    counting, alone = Counting(), Counting()
    wanted = [request(seed, **fields) for seed in seeds]
    expected = [alone(one, JobId(f"job {number}")) for number, one in enumerate(wanted)]
    assert counting.all(*wanted) == expected
    # seed 0 cannot be told from a run without a seed
    builds = (3 if seeds[0] == 0 else 1) if is_derived else len(seeds)
    assert counting.builds == builds


def test_other_requests_are_built_for_themselves() -> None:
    counting, alone = Counting(), Counting()
    wanted = (request(1), request(1, prompt="q"), request(1, cfg=1.0), request(1, width=128), request(2))
    assert counting.all(*wanted) == [alone(one, JobId(f"job {number}")) for number, one in enumerate(wanted)]
    assert counting.builds == 4
