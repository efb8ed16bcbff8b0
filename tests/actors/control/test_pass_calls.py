"""The controller's side of passes: each run is answered once, whatever becomes of its pass.

Proves: one that comes too late to join begins a pass of its own, and others join that; an input that is gone fails the
run that reads it, or all that were to begin with it; a lost worker is reported once.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from modelpool.actors.control.background import Background
from modelpool.actors.control.fleet import InputsLost, SentRuns, WorkerLost
from modelpool.actors.control.pass_calls import PassCalls, PassRun
from modelpool.actors.worker.wire.messages import CallId, EndsWanted, RunMode


class Worker:
    """A live worker, as far as passes know it."""

    key = ("gpu-0", 1)
    last_wait = None


class Desk:
    """A controller with one worker, and a fleet in the test's hand."""

    def __init__(self) -> None:
        self.worker: Any = Worker()
        self.passes: dict[int, list[int]] = {}
        self.begun: dict[int, asyncio.Future[Any]] = {}
        #: how many ends the controller had at each question
        self.asked: list[int] = []
        self.told: dict[int, asyncio.Queue[Any]] = {}
        self.accepts, self.lost_inputs = True, set[int]()
        self.ended: list[str] = []
        self.lost: list[str] = []
        self.number = 100
        self.calls = PassCalls(
            SimpleNamespace(has=lambda worker: True, lose=lambda *about: self.lost.append(about[0])),  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            Background(lambda bug: self.ended.append(f"bug: {bug!r}")),
            self.next_number,
            lambda report, result, worker, run: self.ended.append(f"{run} ended"),
            lambda run, worker, raised: self.ended.append(f"{run.number} failed: {raised}"),
        )

    def next_number(self) -> int:
        self.number += 1
        return self.number

    def run(self, worker_id: str, incarnation: int, call: CallId, runs: Any) -> SentRuns:
        assert call.mode is RunMode.PASS
        self.passes[call.number] = [request.run for request, _ in runs]
        self.begun[call.number], self.told[call.number] = asyncio.get_running_loop().create_future(), asyncio.Queue()
        return SentRuns(self.begun[call.number], [])

    async def join(self, worker_id: str, incarnation: int, call: CallId, sent: Any) -> bool:
        run = sent[0].run
        if run in self.lost_inputs:
            raise InputsLost("it is gone")
        if self.accepts:
            self.passes[call.number].append(run)
        return self.accepts

    def ends(self, worker_id: str, incarnation: int, wanted: EndsWanted) -> SentRuns:
        self.asked.append(wanted.told)

        async def report() -> Any:
            found = await self.told[wanted.call.number].get()
            if isinstance(found, Exception):
                raise found
            return found

        return SentRuns(report(), ["its result"])

    async def end(self, number: int, *runs: int, is_over: bool = False) -> None:
        for run in runs:
            await self.told[number].put((SimpleNamespace(task_id=f"t{run}"),))
        if is_over:
            self.begun[number].set_result(())
            await self.told[number].put(())
        await settle()


def run_of(number: int) -> PassRun:
    return PassRun(SimpleNamespace(task_id=f"t{number}"), (SimpleNamespace(run=number, epoch=0), ()))  # type: ignore[arg-type]


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_runs_join_end_by_themselves_and_come_too_late() -> None:
    async def talk() -> None:
        desk = Desk()
        desk.calls.open(desk.worker, [run_of(1), run_of(2)])
        desk.calls.enter(desk.worker, run_of(3))
        await settle()
        assert desk.passes == {101: [1, 2, 3]}
        await desk.end(101, 3, 1)
        assert (desk.ended, desk.asked) == (["3 ended", "1 ended"], [0, 1, 2])
        desk.accepts = False
        desk.calls.enter(desk.worker, run_of(4))
        await settle()
        desk.accepts = True
        desk.calls.enter(desk.worker, run_of(5))
        await settle()
        assert desk.passes == {101: [1, 2, 3], 102: [4, 5]}, "a pass of its own, which others join"
        await desk.end(101, 2, is_over=True)
        await desk.end(102, 5, 4, is_over=True)
        assert desk.ended == ["3 ended", "1 ended", "2 ended", "5 ended", "4 ended"]
        desk.calls.enter(desk.worker, run_of(6))
        await settle()
        assert desk.passes[103] == [6], "the last one is over"

    asyncio.run(talk())


def test_a_lost_input_fails_those_that_read_it() -> None:
    async def talk() -> None:
        desk = Desk()
        desk.lost_inputs = {2}
        desk.calls.open(desk.worker, [run_of(1)])
        desk.calls.enter(desk.worker, run_of(2))
        await settle()
        assert desk.ended == ["2 failed: it is gone"]
        desk.calls.enter(desk.worker, run_of(3))
        await settle()
        desk.begun[101].set_exception(InputsLost("so is another"))
        await settle()
        assert desk.ended[1:] == ["1 failed: so is another", "3 failed: so is another"]

    asyncio.run(talk())


def test_a_lost_worker_is_reported_once_and_its_runs_are_not_answered() -> None:
    async def talk() -> None:
        desk = Desk()
        desk.calls.open(desk.worker, [run_of(1)])
        await settle()
        await desk.told[101].put(WorkerLost("killed"))
        await settle()
        assert (desk.lost, desk.ended) == (["gpu-0"], [])

    asyncio.run(talk())
