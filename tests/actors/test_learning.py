"""What runs took reaches the catalog, which cuts later tasks: from reports, through the controller.

Proves: each run that ended well is told once, with its task; one that ran out of device memory is told as that; one
that failed otherwise teaches nothing.
"""

from __future__ import annotations

import pytest

from pool.spec import RunCost, RunErrorKind, Stage, TaskSpec
from tests.actors.fake_fleet import Desk, dialogue
from tests.actors.fakes import FakeCatalog
from tests.actors.test_controller import request

Told = list[tuple[TaskSpec, RunCost, bool]]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    found: Told = []
    monkeypatch.setattr(
        FakeCatalog, "learn", lambda catalog, task, cost, ran_out=False: found.append((task, cost, ran_out))
    )
    return found


def test_each_run_that_ended_well_is_told_once(told: Told) -> None:
    @dialogue
    async def talk() -> None:
        desk = await Desk().open()
        await desk.submit(request())
        await desk.run_dry()

    talk()
    assert [task.stage for task, _, _ in told] == [Stage.ENCODE, Stage.ENCODE, Stage.SAMPLE, Stage.DECODE]
    assert not any(ran_out for _, _, ran_out in told)


@pytest.mark.parametrize(
    ("kind", "expected"), [(RunErrorKind.OUT_OF_VRAM, [True]), (RunErrorKind.BAD_INPUT, [])], ids=str
)
def test_running_out_is_told_and_other_failures_are_not(told: Told, kind: RunErrorKind, expected: list[bool]) -> None:
    @dialogue
    async def talk() -> None:
        desk = await Desk().open()
        await desk.submit(request())
        desk.fleet.fail(desk.fleet.running[0], kind)
        await desk.finish()

    talk()
    assert [ran_out for _, _, ran_out in told] == expected
