"""Which tests run: the usual ones, or all of them with --nightly.

Two markers take tests out of the usual run:

- `nightly(usually=FILE)`: slow and rarely informative. A faster test of the same property in FILE runs usually.
- `rotates`: one seventh runs usually, and another with the next rotation, so that seven rotations run all: of each
  marked function with parameters a seventh of its cases, and of each file a seventh of its other marked functions; at
  least one of each. The tests of each file of `COMPARISONS` rotate, too, and, all together, the tests that were
  recorded above `LONG_SECONDS`, with Ray above `LONG_RAY_SECONDS` (tests/durations.json), in parts that take equally
  long.

A test with the fixture `in_rotation` loops over a seventh of its cases. It runs in each rotation: in one of seven, it
would always try the same cases.

A test that the command line names with "::" always runs.
"""

from __future__ import annotations

import heapq
import subprocess
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, TypeVar

import pytest
from hypothesis import settings

#: Tests that run the tiny models of all families or every architecture of the zoo, most of them beside diffusers: more
#: than half the time of all tests without Ray.
COMPARISONS = (
    "tests/pool/inference/conditioning/test_image_concat.py",
    "tests/pool/catalog/estimates/test_stage_peak_bytes.py",
    "tests/pool/devices/test_stream_order.py",
    "tests/pool/engine/gang/",
    "tests/pool/engine/test_run_parts.py",
    "tests/pool/families/",
    "tests/pool/inference/image_prompts/",
    "tests/pool/models/loading/test_diffusers_folders.py",
    "tests/pool/models/loading/test_forms_of_a_model.py",
    "tests/pool/models/loading/test_scaled_weights.py",
    "tests/pool/models/loading/test_separate_files.py",
    "tests/pool/models/components/",
    "tests/pool/models/lora_names/test_lora_names_layouts.py",
    "tests/pool/weights/ops/test_zoo.py",
    "tests/pool/weights/patcher/test_every_budget.py",
    "tests/pool/weights/quant/test_checkpoints.py",
    "tests/pool/weights/quant/test_gguf_models.py",
    "tests/pool/weights/tracing/test_activation_bytes.py",
    "tests/pool/models/saving/",
)
#: files of these folders with tests that are fast
FAST = ("tests/pool/families/test_image_facts.py", "tests/pool/families/definitions/test_definitions.py")
#: seconds above which a test rotates: without and with Ray
LONG_SECONDS, LONG_RAY_SECONDS = 0.8, 10.0
#: rotations after which every test has run. Tests that rotate take 45 CPU minutes in all: with five, they were 40 % of
#: a usual run, which took 15 minutes on two cores. A prime: every second or third commit tries all parts, too.
ROTATIONS = 7
ROOT = Path(__file__).parents[1]
#: the groups of long tests
_LONG, _LONG_RAY = "", "ray"
Case = TypeVar("Case")


class InRotation(Protocol):
    """The fixture `in_rotation`: returns the cases that this run tries, by their names."""

    def __call__(self, cases: Iterable[Case], name: Callable[[Case], str] = str) -> list[Case]:
        """Return a seventh of them, or all in nightly runs and if the command line names the test."""
        ...


#: examples of a property that states no number of its own
USUAL_EXAMPLES, NIGHTLY_EXAMPLES = 20, 100


def examples(nightly: int) -> int:
    """Return the number of examples in this run of a property that tries `nightly` of them in a nightly run."""
    return max(4, nightly * settings().max_examples // NIGHTLY_EXAMPLES)


def rotation_of_commit() -> int:
    """Return a number that grows by one with each commit of the main line, so that a commit determines its tests.

    A shallow clone does not know its number of commits, and takes the time of the last one. Without git it is 0.
    """
    if _git("rev-parse", "--is-shallow-repository") == "false":
        return int(_git("rev-list", "--count", "--first-parent", "HEAD") or 0)
    return int(_git("log", "-1", "--format=%ct") or 0)


def left_out(
    items: Iterable[pytest.Item], rotation: int, recorded_seconds: Mapping[str, float] = MappingProxyType({})
) -> set[pytest.Item]:
    """Return the tests that run in nightly runs alone, or with another rotation."""
    out: set[pytest.Item] = set()
    groups: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("nightly"):
            out.add(item)
        elif "in_rotation" in getattr(item, "fixturenames", ()):
            continue
        elif recorded_seconds.get(item.nodeid, 0.0) > _long_seconds(item):
            groups[_LONG_RAY if item.get_closest_marker("ray") else _LONG].append(item)
        elif rotates(item):
            groups[_group(item)].append(item)
    for name, group in groups.items():
        parts = _parts(group, recorded_seconds if name in (_LONG, _LONG_RAY) else {})
        turn = (rotation + _hash(name)) % len(parts)
        out.update(item for number, part in enumerate(parts) if number != turn for item in part)
    return out


def _group(item: pytest.Item) -> str:
    """Return the name of the tests with which this one takes turns."""
    file, function = item.nodeid.partition("::")[0], item.nodeid.partition("[")[0]
    return function if item.get_closest_marker("rotates") and function != item.nodeid else file


def _parts(group: list[pytest.Item], seconds: Mapping[str, float]) -> list[list[pytest.Item]]:
    """Divide tests into parts for one rotation each, which take equally long: the longest of the tests that remain is
    added to the shortest part. Tests without a record are counted; by a hash, so that a part has cases of all kinds."""
    parts: list[list[pytest.Item]] = [[] for _ in range(min(ROTATIONS, len(group)))]
    taken = [(0.0, number) for number in range(len(parts))]
    group.sort(key=lambda item: (-seconds.get(item.nodeid, 1.0), _hash(item.nodeid), item.nodeid))
    for item in group:
        used, number = heapq.heappop(taken)
        parts[number].append(item)
        heapq.heappush(taken, (used + seconds.get(item.nodeid, 1.0), number))
    return parts


def _long_seconds(item: pytest.Item) -> float:
    return LONG_RAY_SECONDS if item.get_closest_marker("ray") else LONG_SECONDS


def rotates(item: pytest.Item) -> bool:
    """Whether this test runs in one of several rotations."""
    if item.get_closest_marker("rotates"):
        return True
    return item.nodeid.startswith(COMPARISONS) and not item.nodeid.startswith(FAST)


def part_of(cases: Iterable[Case], rotation: int, name: Callable[[Case], str] = str) -> list[Case]:
    """Return the seventh of the cases that one rotation tries, by the hashes of their names."""
    turn = rotation % ROTATIONS
    return [case for case in cases if _hash(name(case)) % ROTATIONS == turn]


def is_named(item: pytest.Item, arguments: Sequence[str]) -> bool:
    """Whether the command line names this test or its function."""
    return any("::" in each and item.nodeid.startswith(each.removeprefix("./")) for each in arguments)


def _hash(text: str) -> int:
    return zlib.crc32(text.encode())


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
