"""What an image costs the controller, as numbers of calls of Python functions: no load changes them. A feature that a
request does not use should add none."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import modelpool
from modelpool.actors.control.history import run_ledger
from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.specs.spec import JobId, RunCost
from tests.actors.fake_fleet import Desk, settle
from tests.actors.fakes import MODELS, FakeCatalog

ROOTS = tuple(str(Path(place).resolve().parent.parent) for place in modelpool.__path__)
#: calls of the project's functions, 3% above what was measured. Whoever adds a
#: feature that is not used here finds a way that costs less, or raises a number and says why
MOST_PER_IMAGE = 860
MOST_PER_IMAGE_OF_EIGHT = 630
MOST_PER_GRAPH = 580


class Calls:
    """Counts the calls of the project's functions in this thread."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Calls:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, what: str, argument: Any) -> None:
        code = frame.f_code  # comprehensions are no calls in later versions of Python
        if what == "call" and code.co_name[0] != "<" and code.co_filename.startswith(ROOTS):
            self.count += "/tests/" not in code.co_filename and "/site-packages/" not in code.co_filename


def requests(label: str, count: int, batch: int = 1) -> list[GenerateRequest]:
    about: dict[str, Any] = {"model": MODELS[0], "prompt": label, "steps": 1, "cfg": 1.0, "batch": batch}
    return [GenerateRequest(**about, seed=seed) for seed in range(1, count + 1)]


async def calls_of(desk: Desk, label: str, count: int, batch: int = 1) -> int:
    """Return the calls for a batch of images, each of two tasks, from the submission to the ends."""
    wanted = requests(label, count, batch)
    with Calls() as calls:
        await desk.submit(*wanted, submission=label)
        while desk.fleet.running:
            await desk.finish(*desk.fleet.running)
        await desk.hear()
    await settle()
    return calls.count


@pytest.mark.parametrize(("batch", "most"), [(1, MOST_PER_IMAGE), (8, MOST_PER_IMAGE_OF_EIGHT)])
def test_an_image_of_a_batch_costs_the_controller_a_bounded_number_of_calls(batch: int, most: int) -> None:
    """Of tasks that share a run, the ends are reported together: what follows is planned once, after the last."""

    async def talk() -> tuple[float, float]:
        desk = await Desk(workers=2).open()
        for label in ("first", "second"):  # the core learns how long runs take
            await calls_of(desk, label, 40, batch)
        found = [await calls_of(desk, f"{label} {count}", count, batch) for label in "ab" for count in (40, 80)]
        await desk.controller.close()
        return (found[1] - found[0]) / 40, (found[3] - found[2]) / 40

    once, again = asyncio.run(talk())
    assert abs(once - again) < 0.02 * once
    assert once <= most, f"{once} calls for each image"


def test_building_a_graph_takes_a_bounded_number_of_calls() -> None:
    catalog, wanted = FakeCatalog(), GenerateRequest(model=MODELS[0], prompt="a text", seed=5, steps=8, cfg=2.0)
    build_graph(wanted, JobId("before"), catalog)
    with Calls() as calls:
        build_graph(wanted, JobId("measured"), catalog)
    assert calls.count <= MOST_PER_GRAPH, f"{calls.count} calls"


def test_ends_of_runs_do_not_look_at_the_runs_that_wait_behind_them() -> None:
    """The ledger counts the runs that have begun: scanning them took as many steps as a worker has runs."""

    def calls_with(runs: int) -> int:
        worker = run_ledger._WorkerRuns()
        for number in range(runs):
            began_at = 0.0 if not number else run_ledger.inf
            worker.add(f"t{number}", run_ledger._Run(None, 1, 1, "", "", "", began_at))  # type: ignore[arg-type]
        with Calls() as calls:
            for number in range(10):
                assert worker.remove(f"t{number}") is not None  # type: ignore[arg-type]
                worker.begin_next(1.0)
        assert worker.begun == 1
        return calls.count

    assert calls_with(20) == calls_with(200)


def test_costs_from_which_nothing_is_learned_are_not_sent_to_the_catalog() -> None:
    """Each end of a run sent its task to the process of the catalog, also where that drops it."""

    async def talk() -> tuple[int, int]:
        desk, learned = await Desk(workers=1).open(), list[RunCost]()
        desk.controller._catalog.learn = lambda task, cost: learned.append(cost)  # type: ignore[method-assign]
        await calls_of(desk, "first", 2)
        measured = sum(cost.shows_activations for cost in learned)
        await desk.controller.close()
        return len(learned), measured

    sent, measured = asyncio.run(talk())
    assert sent == measured
    assert not RunCost(batched=2, working_bytes=1).shows_activations
    assert not RunCost(working_bytes=0).shows_activations
    assert RunCost(working_bytes=1).shows_activations
