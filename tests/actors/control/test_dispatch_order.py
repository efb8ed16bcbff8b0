"""What the dispatcher does first when a run ends: its worker gets the next task before anything is noted about it."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from modelpool.actors.control.recorder import Recorder
from modelpool.actors.worker.wire.messages import CallId, RunEnds
from modelpool.pool.values.specs.spec import RunErrorKind, WorkerId
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import ResolveJob, RunEnded, RunTask
from modelpool.scheduler.simulator.record.event_log import read_entries
from tests.actors.control.test_controller import request
from tests.actors.fake_fleet import Desk, dialogue
from tests.actors.fakes import FakeEngine
from tests.actors.loop_connection import ThreadFleet

ALONE = SchedulerConfig(send_ahead_seconds=0.0)


def traced(desk: Desk) -> list[str]:
    """What the dispatcher does from now on, in order."""
    done: list[str] = []

    def note(name: str, owner: object, method: str) -> None:
        called = getattr(owner, method)

        def noting(*args, **kwargs):  # type: ignore[no-untyped-def]
            done.append(name)
            return called(*args, **kwargs)

        setattr(owner, method, noting)

    note("sent", desk.fleet, "run")
    note("noted", desk.controller._dispatcher, "_on_handled")
    note("resolved", desk.controller._dispatcher, "_on_resolved")
    return done


@dialogue
async def test_the_next_task_is_sent_before_the_end_of_the_run_is_noted() -> None:
    desk = await Desk(config=ALONE).open()
    await desk.submit(request(cfg=1.0), request("other", cfg=1.0))
    done = traced(desk)
    while desk.fleet.running:
        done.append("ended")
        await desk.finish(desk.fleet.running[0])
    ends = [part.split() for part in " ".join(done).split("ended ")[1:]]
    assert len(ends) == 6
    assert all(end[:2] == ["sent", "noted"] for end in ends[:-1]), ends
    assert ends[-1] == ["noted", "resolved"]
    assert sum("resolved" in end for end in ends) == 2
    failing = await Desk(config=ALONE).open()
    await failing.submit(request(cfg=1.0), request("other", cfg=1.0))
    done = traced(failing)
    failing.fleet.fail(failing.fleet.running[0], RunErrorKind.BAD_INPUT)
    await failing.finish()
    assert done[:3] == ["sent", "noted", "resolved"], "after a failure, too"


@pytest.mark.parametrize("fails", [False, True])
def test_the_record_has_the_events_in_order_with_their_commands_and_also_one_whose_start_fails(
    tmp_path: Path, fails: bool
) -> None:
    path = tmp_path / "log"

    @dialogue
    async def talk() -> None:
        desk = await Desk(config=ALONE, recorder=Recorder(path, ALONE)).open()
        await desk.submit(request(cfg=1.0), request("other", cfg=1.0))
        if fails:

            def fail(*_: object) -> None:
                raise RuntimeError("a bug")

            desk.fleet.run = fail
        await desk.run_dry()
        await desk.controller.close()

    talk()
    entries = list(read_entries(path.read_text().splitlines(keepends=True)[1:]))
    ats = [entry.event.at for entry in entries]
    assert ats == sorted(ats)
    started = [command.task_id for entry in entries for command in entry.commands if isinstance(command, RunTask)]
    ended = [entry.event.report.task_id for entry in entries if isinstance(entry.event, RunEnded)]
    resolved = [command for entry in entries for command in entry.commands if isinstance(command, ResolveJob)]
    assert started[: len(ended)] == ended
    assert (len(ended), len(started), len(resolved)) == ((1, 2, 0) if fails else (6, 6, 2))


def test_the_fleet_of_threads_begins_calls_in_the_order_in_which_they_were_sent() -> None:
    """As the fleet of Ray does. It began a call when somebody waited for its reports, and a call of several runs is
    waited for one turn of the loop later: under load, an endless run passed the runs in front of it."""
    begun: list[list[Any]] = []

    class Worker:
        def run(self, call: CallId, requests: list[Any]) -> RunEnds:
            begun.append(requests)
            return RunEnds(tuple(requests), (None,) * len(requests))

    async def talk() -> None:
        fleet, place = ThreadFleet(FakeEngine), (WorkerId("gpu-0"), 1)
        with ThreadPoolExecutor(1) as thread:
            fleet.workers[place] = Worker(), thread  # type: ignore[assignment]
            first = fleet.run(*place, CallId(1), [("a", ()), ("b", ())])  # type: ignore[list-item]
            second = fleet.run(*place, CallId(3), [("c", ())])  # type: ignore[list-item]
            assert [await second.reports, await first.reports] == [("c",), ("a", "b")]

    asyncio.run(talk())
    assert begun == [["a", "b"], ["c"]]
