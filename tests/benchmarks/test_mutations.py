"""Mutated job files, manifests, requests, recipes and images are used or refused with a typed error: a short form of
`benchmarks.mutations`, and what longer runs of it have found.
"""

from __future__ import annotations

import gc
import random
import struct
import weakref
import zlib
from pathlib import Path

import pytest

from benchmarks.mutations import Mutations, mutated_bytes, mutated_value, run
from modelpool.actors.outputs.image_file import read_recipe
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.errors import UnusableField, UserError


@pytest.fixture(scope="module")
def mutations(tmp_path_factory: pytest.TempPathFactory) -> Mutations:
    return Mutations(tmp_path_factory.mktemp("mutations"))


@pytest.mark.parametrize("kind", ["job_file", "manifest", "request", "recipe", "image"])
def test_a_mutation_is_used_or_refused_with_a_typed_error(mutations: Mutations, kind: str) -> None:
    count = run(getattr(mutations, kind), 60, seed=1)
    assert count.mistakes == ()
    assert count.refused > 10, "the mutations do harm"


def test_an_error_of_another_type_is_counted_with_its_traceback() -> None:
    def read(rng: random.Random) -> bool:
        raise KeyError("steps") if rng.random() < 0.5 else UserError("steps")

    count = run(read, 40, seed=0)
    assert 0 < count.refused < 40
    assert len(count.mistakes) == 40 - count.refused
    assert "KeyError: 'steps'" in count.mistakes[0]


def test_mutations_depend_on_their_seed_alone() -> None:
    content, value = bytes(range(200)), {"a": [1, {"b": 2}], "c": "d"}
    for seed in range(20):
        first, second = random.Random(seed), random.Random(seed)
        assert mutated_bytes(content, first) == mutated_bytes(content, second)
        assert repr(mutated_value(value, first)) == repr(mutated_value(value, second))


def test_a_deadline_that_is_no_float_is_refused_by_name() -> None:
    with pytest.raises(UnusableField, match="deadline"):
        GenerateRequest(model="shapes", prompt="", deadline=10**400)


@pytest.mark.parametrize("fields", [{"steps": -1}, {"decoder": 5}, {"stpes": 1}, {"hires": "1:2:3:4"}], ids=repr)
def test_an_invalid_request_leaves_nothing_in_memory(fields: dict) -> None:
    """Pydantic's error refers to ours without supporting garbage collection: with a reference back, both and the frames
    of their callers stayed for ever, 2.4 KiB for each invalid line."""

    def refused() -> weakref.ref[BaseException]:
        with pytest.raises(UserError) as caught:
            GenerateRequest(**{"model": "shapes", "prompt": "", **fields})
        return weakref.ref(caught.value)

    reference = refused()
    gc.collect()
    assert reference() is None


def test_a_png_with_a_short_header_is_no_image(tmp_path: Path) -> None:
    """Pillow raises a plain ValueError for it."""
    chunk = b"IHDR" + b"\0\0\0\x08"
    path = tmp_path / "short.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 4) + chunk + struct.pack(">I", zlib.crc32(chunk)))
    with pytest.raises(UserError, match="cannot be read as an image"):
        read_recipe(path)
