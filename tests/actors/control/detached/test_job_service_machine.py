"""The job service and its controller under any order of events, in virtual time: both crash after any event and before
any command, and recover from the journal. No acknowledged request is lost, and none is committed twice.

The pool is a real controller and core over a fake fleet. The service's threads are replaced by calls of the test.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from modelpool import GenerateRequest
from modelpool.actors.control.connection import UnknownDriver
from modelpool.actors.control.controller import Controller
from modelpool.actors.control.detached import job_service
from modelpool.actors.control.detached.job_service import CLIENT, JobService, _Link
from modelpool.actors.control.detached.records import NewSubmission, SubmissionState, request_text
from modelpool.actors.control.detached.submission_journal import Journal
from modelpool.actors.control.event_reader import EventReader
from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.outputs import store_manifest
from modelpool.actors.outputs.folder import OutputFolder, pixels_sha256
from modelpool.actors.outputs.objects import ObjectPrefix
from modelpool.actors.outputs.results.outcomes import PoolLost
from modelpool.actors.outputs.store import OutputStore
from modelpool.pool.values.specs.spec import JobId
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import Outcome
from tests.actors.fake_fleet import Desk, InlineExecutor, settle
from tests.actors.fakes import FakeCatalog, image_of
from tests.tiers import examples

WORKERS = 2
#: workers die often here; a task that several of them died with is no reason to give it up
CONFIG = SchedulerConfig(crash_limit=10_000, max_attempts=10_000, start_retry_limit=10_000, kept_results=3)


class Crash(BaseException):
    """The process ends here."""


class Points:
    """The places where the service may crash: before and after each effect that another process or a disk sees."""

    def __init__(self) -> None:
        #: so many points are passed before the crash; None: no crash
        self.left: int | None = None

    def passed(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.left = None
                raise Crash

    def around(self, effect: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.passed()
        answer = effect(*args, **kwargs)
        self.passed()
        return answer


class CrashingJournal(Journal):
    def __init__(self, path: Path, points: Points) -> None:
        super().__init__(path)
        self._points = points

    def _write(self, change: Any) -> Any:
        return self._points.around(super()._write, change)


class SteppedReader(EventReader):
    """Reads when the test says so."""

    cursor = 0

    def start(self) -> None: ...

    def stop(self, wake: Callable[[], None]) -> None: ...

    def read(self) -> None:
        self.cursor = self._notify(self._connection.call(Controller.events, CLIENT, self.cursor, 0.0))


class SteppedService(JobService):
    """Does nothing by itself."""

    def __init__(self, journal: Journal) -> None:
        super().__init__(journal, lambda: pytest.fail("the test connects"))
        self._thread.join()
        self._writers.shutdown()
        self._openers.shutdown()
        self._openers = InlineExecutor()
        self._writers = InlineExecutor()  # type: ignore[assignment]

    def _run(self) -> None: ...


class Connection:
    """A connection to the controller of a desk, on the test's loop."""

    def __init__(self, machine: ServiceMachine, desk: Desk) -> None:
        self._machine, self._desk = machine, desk

    def call(self, question: Any, *args: Any, **kwargs: Any) -> Any:
        async def asked() -> Any:
            answer = await question(self._desk.controller, *args, **kwargs)
            await settle()
            return answer

        if self._desk is not self._machine.desk:
            raise PoolLost("the controller of the pool is gone")
        return self._machine.points.around(lambda: self._machine.do(asked()))

    def fetch(self, ref: Any) -> Any:
        self._machine.points.passed()
        return ref.value

    def give(self, result: Any) -> Any:
        raise AssertionError("no request has inputs")


class FolderOutputs:
    """Outputs in a folder, for the service, which crashes there, and for the checks."""

    def __init__(self, folder: Path, points: Points) -> None:
        self.address = folder

        class CrashingFolder(OutputFolder):
            def write(self, *args: Any) -> Any:
                return points.around(super().write, *args)

            def _append_entry(self, *args: Any) -> Any:
                points.passed()
                return super()._append_entry(*args)

        self.open = CrashingFolder

    def size(self, file: str) -> int | None:
        return (self.address / file).stat().st_size

    def require_single_entries(self) -> None:
        if self.address.exists():
            listed = Counter(entry.digest for entry in OutputFolder(self.address).entries())
            lines = (self.address / "manifest.jsonl").read_text().splitlines()
            assert len(lines) == len(listed), "an output is listed twice"

    def remove(self) -> None: ...


class StoreOutputs:
    """Outputs in an object store, likewise. Nothing in the store is ever replaced."""

    def __init__(self, url: str, points: Points) -> None:
        self.address = url

        class CrashingPrefix(ObjectPrefix):
            def create(self, *args: Any) -> Any:
                return points.around(super().create, *args)

            def remove(self, *args: Any) -> Any:
                return points.around(super().remove, *args)

            def replace(self, name: str, content: bytes) -> None:
                raise AssertionError(f"{name} is replaced")

        def opened(address: str) -> OutputStore:
            return OutputStore(address, objects=CrashingPrefix(address))

        self.open = opened
        self._objects = ObjectPrefix(url)

    def size(self, file: str) -> int | None:
        return self._objects.size(file)

    def require_single_entries(self) -> None:
        store = OutputStore(self.address)
        assert len({entry.file for entry in store.entries()}) == len(store.entries())
        assert store.damaged_line_count == 0

    def remove(self) -> None:
        self._objects.remove(self._objects.sizes())


class ServiceMachine(RuleBasedStateMachine):
    """A journal, outputs, and services and controllers that come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = Path(tempfile.mkdtemp())
        self.points = Points()
        self.patch = pytest.MonkeyPatch()
        self.outputs = self.make_outputs()
        self.patch.setattr(job_service, "EventReader", SteppedReader)
        self.patch.setattr(job_service, "open_outputs", self.outputs.open)
        self.patch.setattr(job_service, "CHUNK", 2)
        self.patch.setattr(job_service, "LEAST_WINDOW", 4)
        self.desk = self.new_desk()
        self.link: _Link | None = None
        self.service = self.opened()
        self.names = 0
        #: acknowledged submissions, and those of which it is unknown
        self.acknowledged: dict[str, int] = {}
        self.unknown: dict[str, int] = {}
        self.cancelled: set[str] = set()
        #: outcomes that a reader of the journal has seen
        self.committed: dict[tuple[str, int], Any] = {}

    def teardown(self) -> None:
        try:
            self.end_all()
        finally:
            self.clean_up()

    def end_all(self) -> None:
        """Without further faults, everything that was acknowledged ends."""
        self.points.left = None
        for _ in range(200):
            if all(record.state is SubmissionState.ENDED for record in self.service.submissions()):
                break
            self.serve()
            self.read()
            self.finish_all()
            self.do(self.desk.clock.advance(8.0))  # lost workers start again after a pause
        self.agrees()
        for record in self.service.submissions():
            assert record.state is SubmissionState.ENDED
            if record.submission_id not in self.cancelled:
                assert record.succeeded == record.request_count

    def clean_up(self) -> None:
        self.service.close()
        self.do(self.desk.controller.close())
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.do(settle())
        self.loop.close()
        self.patch.undo()
        self.outputs.remove()
        shutil.rmtree(self.folder)

    def make_outputs(self) -> FolderOutputs | StoreOutputs:
        return FolderOutputs(self.folder / "out", self.points)

    def do(self, what: Any) -> Any:
        return self.loop.run_until_complete(what)

    def new_desk(self) -> Desk:
        return self.do(Desk(WORKERS, CONFIG).open())

    def opened(self) -> SteppedService:
        return SteppedService(CrashingJournal(self.folder / "journal.sqlite", self.points))

    def crash(self) -> None:
        """End the service; its journal, its files and its controller are all that is left of it."""
        self.points.left = None
        journal = self.service._journal
        self.service, self.link = None, None  # type: ignore[assignment]
        journal.close()
        self.service = self.opened()

    def step(self, action: Callable[[], None]) -> None:
        """Have the service do something, which may end with its crash, or with the loss of its controller."""
        try:
            action()
        except Crash:
            self.crash()
        except (PoolLost, UnknownDriver) as problem:
            self.link = None
            self.service._lose(str(problem))

    @rule(count=st.integers(0, 12))
    def crash_soon(self, count: int) -> None:
        self.points.left = count

    @rule()
    def crash_now(self) -> None:
        self.crash()

    @rule(size=st.integers(1, 5), again=st.booleans())
    def submit(self, size: int, again: bool) -> None:
        """A driver submits; again under the same id, if it does not know whether it succeeded."""
        if again and self.unknown:
            name, size = next(iter(self.unknown.items()))
        else:
            self.names += 1
            name = f"s{self.names}"
        self.unknown[name] = size

        def handed_over() -> None:
            record = self.service.begin(NewSubmission(name, str(self.outputs.address), "", size))
            if record.state is SubmissionState.RECEIVING:
                texts = [request_text(request_of(name, place), self.folder) for place in range(size)]
                self.service.append(name, 0, texts[:2])
                self.service.append(name, 2, texts[2:])
                self.service.seal(name)
            self.acknowledged[name] = self.unknown.pop(name)

        self.step(handed_over)

    @precondition(lambda self: self.acknowledged)
    @rule(number=st.integers(0, 99))
    def cancel(self, number: int) -> None:
        name = sorted(self.acknowledged)[number % len(self.acknowledged)]
        self.cancelled.add(name)
        self.step(lambda: self.service.cancel(name) and None)

    @rule()
    def serve(self) -> None:
        """One turn of the service's thread."""

        def turn() -> None:
            if self.link is None:
                self.link = _Link(Connection(self, self.desk), self.service)
                self.link.enter()
            self.service._cancel_in_pool(self.link)
            self.service._send_some(self.link)

        self.step(turn)

    @precondition(lambda self: self.link is not None)
    @rule()
    def read(self) -> None:
        """The service receives what has ended, and writes it."""
        if self.link is not None:
            self.step(self.link._reader.read)  # type: ignore[attr-defined]

    @precondition(lambda self: self.desk.fleet.running)
    @rule(number=st.integers(0, 99))
    def finish(self, number: int) -> None:
        running = self.desk.fleet.running
        self.do(self.desk.finish(running[number % len(running)]))

    @rule()
    def finish_all(self) -> None:
        while self.desk.fleet.running:
            self.do(self.desk.finish(*self.desk.fleet.running))

    @precondition(lambda self: self.desk.fleet.workers)
    @rule(number=st.integers(0, 99))
    def kill_a_worker(self, number: int) -> None:
        names = sorted(self.desk.fleet.workers)
        self.desk.fleet.kill(names[number % len(names)][0])
        self.do(settle())

    @rule()
    def lose_the_controller(self) -> None:
        self.do(self.desk.controller.close())
        self.desk = self.new_desk()

    @rule()
    def be_silent(self) -> None:
        """The controller drops drivers that it does not hear of."""
        self.do(self.desk.clock.advance(90.0))

    @invariant()
    def agrees(self) -> None:
        records = {record.submission_id: record for record in self.service.submissions()}
        assert set(self.acknowledged) <= set(records) <= set(self.acknowledged) | set(self.unknown)
        for name, record in records.items():
            outcomes = {each.place: each for each in self.service.outcomes(name)}
            counts = Counter(each.outcome for each in outcomes.values())
            assert (counts[Outcome.SUCCEEDED], counts[Outcome.CANCELLED]) == (record.succeeded, record.cancelled)
            assert record.failed == 0
            for place, outcome in outcomes.items():
                assert self.committed.setdefault((name, place), outcome) == outcome
                if outcome.outcome is Outcome.SUCCEEDED:
                    assert self.outputs.size(outcome.file) == outcome.file_bytes
                    assert outcome.pixels_sha256 == expected_sha256(name, place)
                else:
                    assert name in self.cancelled
            places = {place for committed, place in self.committed if committed == name}
            assert places == set(outcomes)
        self.outputs.require_single_entries()


class StoreMachine(ServiceMachine):
    """The same with outputs in an object store."""

    def make_outputs(self) -> StoreOutputs:
        self.patch.setattr(store_manifest, "MERGED_RECORDS", 3)
        return StoreOutputs(f"memory://{self.folder.name}/outputs", self.points)


def request_of(name: str, place: int) -> GenerateRequest:
    return GenerateRequest(model="shapes", prompt=f"{name} {place}", seed=place, steps=2, cfg=1.0)


@cache
def expected_sha256(name: str, place: int) -> str:
    _, graph = build_graph(request_of(name, place), JobId("x"), FakeCatalog())
    return pixels_sha256(image_of(graph.works, graph.job.tasks).pixels_HWC)


TestService = ServiceMachine.TestCase
TestService.settings = settings(max_examples=examples(10), stateful_step_count=40, deadline=None)
TestServiceWithStore = StoreMachine.TestCase
TestServiceWithStore.settings = settings(max_examples=examples(5), stateful_step_count=30, deadline=None)
