"""What runs took reaches the catalog, which cuts later tasks: from reports, through the controller.

Proves: each run that ended well is told once, with its task, before the next question; one that failed teaches nothing;
what nobody asks about does not pile up.
"""

from __future__ import annotations

import pytest

from modelpool.actors.control import catalog_service as catalog_desk
from modelpool.actors.control.catalog_questions import MODELS
from modelpool.pool.values.specs.spec import RunCost, RunErrorKind, Stage, TaskSpec
from tests.actors.control.test_controller import request
from tests.actors.fake_fleet import Desk, dialogue
from tests.actors.fakes import FakeCatalog

ModelKwargs = list[tuple[TaskSpec, RunCost]]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> ModelKwargs:
    found: ModelKwargs = []
    # the runs of a fake fleet measure no memory
    monkeypatch.setattr(RunCost, "shows_activations", property(lambda cost: True))
    monkeypatch.setattr(FakeCatalog, "learn", lambda catalog, task, cost: found.append((task, cost)))
    return found


def test_each_run_that_ended_well_is_told_once(told: ModelKwargs) -> None:
    @dialogue
    async def talk() -> None:
        desk = await Desk().open()
        await desk.submit(request())
        await desk.run_dry()
        await desk.controller.ask_catalog(MODELS)

    talk()
    assert [task.stage for task, _ in told] == [Stage.ENCODE, Stage.ENCODE, Stage.SAMPLE, Stage.DECODE]


@pytest.mark.parametrize("kind", [RunErrorKind.OUT_OF_VRAM, RunErrorKind.BAD_INPUT], ids=str)
def test_failures_are_not_told(told: ModelKwargs, kind: RunErrorKind) -> None:
    """Found in a review: a report of running out of memory has no division, and taught figures of other runs."""

    @dialogue
    async def talk() -> None:
        desk = await Desk().open()
        await desk.submit(request())
        desk.fleet.fail(desk.fleet.running[0], kind)
        await desk.finish()
        await desk.controller.ask_catalog(MODELS)

    talk()
    assert told == []


def test_what_was_learnt_does_not_pile_up_while_nobody_asks(told: ModelKwargs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog_desk, "LEARN_BATCH", 3)

    @dialogue
    async def talk() -> None:
        desk = await Desk().open()
        await desk.submit(request())
        await desk.run_dry()

    talk()
    assert [task.stage for task, _ in told] == [Stage.ENCODE, Stage.ENCODE, Stage.SAMPLE]
