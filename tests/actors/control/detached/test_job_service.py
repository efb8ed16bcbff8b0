"""Detached jobs run to their end, each output is committed once, and any process may be lost in between.

The pool runs in this process with fake engines; the service is dropped as a crash would drop it, and opened again.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from modelpool import GenerateRequest, ModelPool, UserError
from modelpool.actors.client import detached_jobs
from modelpool.actors.control.connection import CONTROLLER
from modelpool.actors.control.detached import job_service, submission_journal
from modelpool.actors.control.detached.handover import Handover
from modelpool.actors.control.detached.job_service import CHUNK, CLIENT, LEAST_WINDOW, WINDOW, JobService, window_after
from modelpool.actors.control.detached.left_memory import left_memory
from modelpool.actors.control.detached.records import NewSubmission, SubmissionState
from modelpool.actors.control.detached.submission_journal import BeingReceived, Journal
from modelpool.actors.control.operator_orders import OperatorOrder, Order
from modelpool.actors.control.past_jobs import memory_in_text
from modelpool.actors.control.pool_log import PoolLog
from modelpool.actors.control.status import PoolStatus
from modelpool.actors.outputs.folder import FinishedOutput, OutputFolder
from modelpool.actors.outputs.layout import LayoutKind, OutputLayout
from modelpool.actors.outputs.objects import ObjectPrefix
from modelpool.actors.outputs.open_outputs import existing_outputs, open_outputs
from modelpool.actors.outputs.results.outcomes import PoolLost
from modelpool.actors.outputs.sharded import ShardedOutputs
from modelpool.actors.worker.wire.messages import SubmissionId
from modelpool.pool.values.core.batch_gains import MeasuredGain
from modelpool.pool.values.core.stage_params import ImagePixels
from modelpool.scheduler.model.messages import Outcome
from tests.actors.fakes import ENDLESS, FAIL, FakeCatalog, FakeEngine
from tests.actors.loop_connection import LoopConnection
from tests.s3_server import s3_server

WAIT_SECONDS = 60.0


class Service:
    """A job service on one pool, which can crash. Also its own `JobsConnection`."""

    def __init__(self, folder: Path, journal: Path | None = None) -> None:
        self.folder = folder
        self.journal = journal or folder / "journal.sqlite"
        self.out = folder / "out"
        self.line = LoopConnection(2, partial(FakeEngine, self.folder))
        self.lines = [self.line]
        self.connected = threading.Event()
        self.connected.set()
        self.service = self._opened()
        self.pool = ModelPool(self.line, lambda: None, None, jobs=lambda: self)

    def _opened(self) -> JobService:
        return JobService(Journal(self.journal), self._connect)

    def _connect(self) -> LoopConnection:
        if not self.connected.is_set():
            raise PoolLost("the controller of the pool is gone")
        return self.line

    def call(self, question: Callable[..., Any], *args: Any) -> Any:
        return question(self.service, *args)

    def crash(self) -> None:
        """End the service without a word to the pool; what it wrote is all that is left."""
        dead = self.service
        dead._stopping = True
        dead._writers.shutdown(wait=True, cancel_futures=True)
        dead._wake.set()
        dead._thread.join()
        dead._journal.close()

    def reopen(self) -> None:
        self.service = self._opened()

    def lose_controller(self) -> None:
        self.connected.clear()
        self.line.lose()

    def keep_jobs_waiting(self) -> None:
        """Lose the controller of the jobs, until `new_controller`; the pool answers questions over another one."""
        self.pool.close()
        self.lose_controller()
        self.lines.append(LoopConnection(2, partial(FakeEngine, self.folder)))
        self.pool = ModelPool(self.lines[-1], lambda: None, None, jobs=lambda: self)

    def new_controller(self, pins: tuple[tuple[str, int], ...] = ()) -> None:
        self.line = LoopConnection(2, partial(FakeEngine, self.folder), predecessor=self.line, pins=pins)
        self.lines.append(self.line)
        self.pool._connection = self.line
        self.connected.set()

    def submit(self, prompts: list[str], **terms: Any) -> Any:
        requests = [GenerateRequest(model="shapes", prompt=prompt, seed=n, steps=3) for n, prompt in enumerate(prompts)]
        return self.pool.submit_detached(requests, output=self.out, **terms)

    def manifest(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.out / "manifest.jsonl").read_text().splitlines()]

    def until(self, is_true: Callable[[], object]) -> None:
        for _ in range(int(WAIT_SECONDS * 100)):
            if is_true():
                return
            threading.Event().wait(0.01)
        raise AssertionError("it did not happen")


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setattr(job_service, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(job_service, "FOLDER_RETRY_SECONDS", 0.05)
    monkeypatch.setattr(job_service, "IDLE_SECONDS", 0.05)
    monkeypatch.setattr(job_service, "CHUNK", 4)
    with opened(tmp_path) as found:
        yield found


@contextmanager
def opened(folder: Path, journal: Path | None = None) -> Iterator[Service]:
    found = Service(folder, journal)
    try:
        yield found
    finally:
        found.service.close()
        found.pool.close()
        for line in found.lines:
            line.end()


def prompts(count: int) -> list[str]:
    return [f"a thing {n}" for n in range(count)]


def require_complete(service: Service, jobs: Any, count: int) -> None:
    """Every request succeeded once: in the journal, in the manifest, and as a file."""
    record = jobs.wait(WAIT_SECONDS)
    assert (record.succeeded, record.pending) == (count, 0)
    outcomes = list(jobs.outcomes())
    assert [each.place for each in outcomes] == list(range(count))
    for each in outcomes:
        assert (service.out / each.file).stat().st_size == each.file_bytes
    entries = service.manifest()
    assert sorted(entry["file"] for entry in entries) == sorted(each.file for each in outcomes)
    assert {e["file"]: e["pixels_sha256"] for e in entries} == {each.file: each.pixels_sha256 for each in outcomes}
    assert not list(service.out.glob("*.partial"))


def test_a_submission_keeps_the_batch_sizes_of_its_images_when_the_measurements_change(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of it is done when the service ends; the next one knows other gains. Nothing is rendered twice."""

    def gains(*sizes: int) -> None:
        by_size = {size: 1.5 * place for place, size in enumerate(sizes, start=1)}
        row = MeasuredGain(frozenset({"a"}), frozenset({"cpu"}), "card", 512, 1000, by_size, "here")
        monkeypatch.setattr(FakeCatalog, "gains", (row,) if sizes else ())

    def wanted(count: int) -> list[GenerateRequest]:
        return [GenerateRequest(model="shapes", prompt=p, seed=1, steps=3, batch="auto") for p in prompts(count)]

    gains(4)
    require_complete(service, service.pool.submit_detached(wanted(4), output=service.out, jobs_id="x"), 4)
    service.crash()
    gains(2)
    service.reopen()
    jobs = service.pool.submit_detached(wanted(8), output=service.out, jobs_id="y")
    require_complete(service, jobs, 8)
    assert [entry["recipe"]["batch"] for entry in service.manifest()] == [4] * 8
    gains()
    elsewhere = service.pool.submit_detached(wanted(2), output=service.folder / "old")
    assert elsewhere.wait(WAIT_SECONDS).succeeded == 2
    gains(2)
    assert service.pool.submit_detached(wanted(6), output=service.folder / "old").wait(WAIT_SECONDS).succeeded == 6
    entries = OutputFolder(service.folder / "old").entries()
    assert [entry.recipe.batch for entry in entries] == [0] * 6


def test_requests_are_handed_over_as_they_are_read_and_nothing_is_left_of_a_submission_that_ends_early(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list of 50,000 was held three times; a wrong place of outputs was found after all of them were checked."""
    monkeypatch.setattr(detached_jobs, "CHUNK", 4)
    monkeypatch.setattr(detached_jobs, "FIRST_CHUNK", 2)
    made: list[int] = []

    def in_journal() -> int:
        return int(service.service._journal._read("SELECT count(*) FROM request", ())[0][0])

    def requests(count: int, wrong: bool = False) -> Iterator[GenerateRequest]:
        for number in range(count):
            made.append(number)
            assert in_journal() >= number - 6, "it waits for no request that is still to be read"
            yield GenerateRequest(model="shapes", prompt=f"a thing {number}", seed=number, steps=3)
        if wrong:
            raise UserError("line 23: wrong")

    with pytest.raises(UserError, match="line 23"):
        service.pool.submit_detached(requests(22, wrong=True), output=service.out, jobs_id="x")
    with pytest.raises(UserError, match="at least one"):
        service.pool.submit_detached([], output=service.out, jobs_id="x")
    assert (service.pool.detached(), in_journal()) == ((), 0)
    (service.folder / "file").write_text("")
    made.clear()
    with pytest.raises(UserError, match="file"):
        service.pool.submit_detached(requests(22), output=service.folder / "file")
    assert len(made) == 2
    require_complete(service, service.pool.submit_detached(requests(22), output=service.out, jobs_id="x"), 22)
    assert service.pool.submit_detached(requests(22), output=service.out, jobs_id="x").progress().record.succeeded == 22
    with pytest.raises(UserError, match=r"belongs to a submission of 22 requests .*; found 21 requests"):
        service.pool.submit_detached(requests(21), output=service.out, jobs_id="x")


def test_one_of_two_drivers_hands_over_a_submission_and_the_other_follows_it(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both wrote their requests into one submission: one of them got an error, or half of each ran."""
    monkeypatch.setattr(detached_jobs, "FIRST_CHUNK", 2)
    monkeypatch.setattr(detached_jobs, "FOLLOW_SECONDS", 0.01)
    first_has_begun, second_has_asked = threading.Event(), threading.Event()
    call = service.call

    def noting(question: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(question, *args)
        except BeingReceived:
            second_has_asked.set()
            raise

    monkeypatch.setattr(service, "call", noting)

    def requests(name: str, count: int, wait: bool = False) -> Iterator[GenerateRequest]:
        for number in range(count):
            if number == 3 and wait:  # two of them are handed over
                first_has_begun.set()
                assert second_has_asked.wait(WAIT_SECONDS)
            yield GenerateRequest(model="shapes", prompt=f"a {name} thing {number}", seed=1, steps=3)

    with ThreadPoolExecutor() as threads:
        for submission_id, count in (("same", 5), ("other", 4)):
            first_has_begun.clear()
            second_has_asked.clear()
            out = service.folder / submission_id
            first = threads.submit(
                service.pool.submit_detached, requests("red", 5, True), output=out, jobs_id=submission_id
            )
            assert first_has_begun.wait(WAIT_SECONDS)
            second = threads.submit(
                service.pool.submit_detached, requests("blue", count), output=out, jobs_id=submission_id
            )
            assert first.result(WAIT_SECONDS).wait(WAIT_SECONDS).succeeded == 5
            if count == 5:
                assert second.result(WAIT_SECONDS).wait(WAIT_SECONDS).succeeded == 5
            else:
                with pytest.raises(UserError, match=r"belongs to a submission of 5 requests .*; found 4 requests"):
                    second.result(WAIT_SECONDS)
            prompts = [json.loads(line)["recipe"]["prompt"] for line in (out / "manifest.jsonl").open()]
            assert sorted(prompts) == [f"a red thing {number}" for number in range(5)]


def test_a_submission_whose_driver_has_ended_is_taken_over(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detached_jobs, "FIRST_CHUNK", 2)
    monkeypatch.setattr(detached_jobs, "CHUNK", 2)
    monkeypatch.setattr(detached_jobs, "FOLLOW_SECONDS", 0.01)
    monkeypatch.setattr(submission_journal, "SILENCE_SECONDS", 0.05)
    texts = ['{"model": "shapes", "prompt": "a", "seed": 1}'] * 2
    service.service.begin(NewSubmission("x", str(service.out), service.pool._user, 0), "killed")
    service.service.append("x", 0, texts, "killed")
    service.submit(prompts(3), jobs_id="x").wait(WAIT_SECONDS)
    require_complete(service, service.pool.attach("x"), 3)
    service.service.append("x", 2, texts, "killed")  # it was only slow: what it sends is too late
    assert service.service.seal("x", 4, "killed").request_count == 3
    service.service.begin(NewSubmission("y", str(service.out), "", 0), "slow")
    monkeypatch.setattr(submission_journal, "SILENCE_SECONDS", 0.0)
    service.service.begin(NewSubmission("y", str(service.out), "", 0), "fast")
    for question in (partial(service.service.append, "y", 0, texts), partial(service.service.seal, "y", 2)):
        with pytest.raises(BeingReceived, match="another driver has taken over id 'y'"):
            question(driver="slow")
    service.service.abandon("y", "slow")
    service.service.append("y", 0, texts, "fast")
    assert service.service.seal("y", 2, "fast").pending == 2


def test_a_place_that_cannot_be_opened_leaves_its_id_free(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detached_jobs, "FOLLOW_SECONDS", 60.0)
    (service.folder / "file").write_text("")
    for _ in range(2):
        with pytest.raises(UserError, match="file"):
            service.pool.submit_detached(
                GenerateRequest(model="shapes", prompt="a"), output=service.folder / "file", jobs_id="x"
            )
    require_complete(service, service.submit(prompts(1), jobs_id="x"), 1)


def test_a_begin_that_fails_drops_nothing_of_an_earlier_one(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """It dropped the requests that an earlier call with the same id had appended, and then the submission."""
    (service.folder / "file").write_text("")
    texts = ['{"model": "shapes", "prompt": "a", "seed": 1}'] * 2
    for silence_seconds, second in ((30.0, "first"), (0.0, "second")):
        monkeypatch.setattr(submission_journal, "SILENCE_SECONDS", silence_seconds)
        service.service.begin(NewSubmission(second, str(service.out), "", 0), "first")
        service.service.append(second, 0, texts, "first")
        with pytest.raises(UserError, match="file"):
            service.service.begin(NewSubmission(second, str(service.folder / "file"), "", 0), second)
        assert service.service.seal(second, 2, "first").request_count == 2


def test_pins_outlive_the_controller_and_the_service_and_end_with_the_pool(service: Service) -> None:
    """Also the unpinning of what the configuration pins."""

    def pins() -> dict[str, int]:
        return {pinned.model: pinned.replicas for pinned in service.line.call(CONTROLLER.status).pins}

    assert [pinned.model for pinned in service.pool.pin("shapes", "forms")] == ["shapes", "forms"]
    service.pool.pin("shapes", replicas=2)
    service.pool.unpin("forms")
    with pytest.raises(UserError, match="unknown"):
        service.pool.pin("unknown")
    service.lose_controller()
    service.new_controller(pins=(("forms", 1),))
    service.until(lambda: pins() == {"shapes": 2})  # although the service has no submission
    service.crash()
    service.lose_controller()
    service.new_controller(pins=(("forms", 1), ("shapes", 1)))
    assert pins() == {"forms": 1, "shapes": 1}
    service.reopen()
    service.until(lambda: pins() == {"shapes": 2})
    assert service.service._journal.pins() == {"forms": 0, "shapes": 2}
    service.service.close()
    service.reopen()
    assert service.service._journal.pins() == {}


def test_counts_shares_and_histories_outlive_the_controller_and_the_service(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPU time of users and deadlines started at 0 with each controller, and `why` knew no job from before."""
    monkeypatch.setattr(job_service, "MEMORY_SECONDS", 0.02)
    requests = [
        GenerateRequest(model="shapes", prompt=f"a thing {seed}", seed=seed, steps=3, user="ann", deadline=600.0)
        for seed in range(5)
    ]
    jobs = service.pool.submit_detached(requests, output=service.out, jobs_id="first")
    require_complete(service, jobs, 5)
    before = service.pool.status()
    told = service.pool.history("first-3")
    assert (before.deadlines_met, before.controller_restarts, before.seconds_by_user["ann"] > 0.0) == (5, 0, True)

    def kept() -> bool:
        stored = left_memory(service.service._journal.memory()).memory
        if not stored or service.service.history("first-3") is None:
            return False
        memory = memory_in_text(stored)  # of all five: it is stored at intervals
        return memory.deadlines_met == 5 and [user.seconds for user in memory.users] == [
            pytest.approx(before.seconds_by_user["ann"])
        ]

    service.until(kept)
    service.lose_controller()
    service.crash()
    service.reopen()
    service.new_controller()
    service.until(lambda: service.pool.status().controller_restarts == 1)
    now = service.pool.status()
    assert (now.deadlines_met, now.seconds_by_user["ann"]) == (5, pytest.approx(before.seconds_by_user["ann"]))
    for name in ("first-3", str(told.job_id), "irst-3"):
        again = service.pool.history(name)
        assert (again.job_id, again.status, again.tasks, again.lines) == (
            told.job_id,
            "succeeded",
            told.tasks,
            told.lines,
        )
    with pytest.raises(UserError, match="unknown job 'second-3'"):
        service.pool.history("second-3")
    service.crash()
    service.reopen()  # the controller has the memory already: it must not count twice
    assert service.submit(prompts(2)).wait(WAIT_SECONDS).succeeded == 2
    service.until(kept)
    now = service.pool.status()
    assert (now.controller_restarts, now.deadlines_met) == (1, 5)
    assert now.seconds_by_user["ann"] == pytest.approx(before.seconds_by_user["ann"])
    service.service.close()  # the pool ends in order: what was measured stays
    service.lose_controller()
    service.new_controller()
    service.reopen()
    assert service.submit(["another thing"]).wait(WAIT_SECONDS).succeeded == 1
    now = service.pool.status()
    assert (now.controller_restarts, now.deadlines_met, now.seconds_by_user.get("ann")) == (0, 0, None)
    measured = {kind.stage for kind in service.line.controller._state.costs.run_kinds if kind.measured}
    assert len(measured) == 3


def test_an_order_that_comes_before_the_handover_does_not_replace_what_is_handed_over(service: Service) -> None:
    """An operator is faster than the service, which looks for the next controller at intervals: the journal kept the
    memory of a controller that had none yet."""
    service.crash()
    with closing(Journal(service.journal)) as journal:
        first = Handover(journal, lambda: service.line)
        first.hand_over(service.line)
        first.operate(OperatorOrder(Order.CORDON, "gpu-0"))
        service.lose_controller()
        service.new_controller()
        second = Handover(journal, lambda: service.line)
        second.operate(OperatorOrder(Order.CORDON, "gpu-1"))
        second.hand_over(service.line)
        memory = memory_in_text(left_memory(journal.memory()).memory)
        assert {cordon.worker_id for cordon in memory.cordons} == {"gpu-0", "gpu-1"}
        assert service.line.controller._state.worker_table.cordons.workers.keys() == {"gpu-0", "gpu-1"}
    service.reopen()


def test_orders_and_pins_while_the_pool_ends_leave_nothing_for_the_next_pool(service: Service) -> None:
    """The service has cleared the journal already: the next pool found the cordons, pins and cost of this one."""
    service.crash()
    with closing(Journal(service.journal)) as journal:
        handover = Handover(journal, lambda: service.line)
        handover.hand_over(service.line)
        for worker in ("gpu-0", "gpu-1"):
            handover.operate(OperatorOrder(Order.CORDON, worker))
            stored = left_memory(journal.memory()).memory
            assert bool(memory_in_text(stored).cordons) == (worker == "gpu-0"), worker
            handover.pin(["shapes"], 1)
            assert bool(journal.pins()) == (worker == "gpu-0"), worker
            handover.drop()
    service.reopen()


def test_a_pin_that_only_the_journal_has_is_unpinned(service: Service) -> None:
    """The file of the model was gone when the controller started, or an earlier service was lost between the controller
    and the journal."""
    controller, kept = service.line.controller, service.service._journal.pins
    for name in ("shapes", "forms"):
        service.pool.pin(name)
    del controller._pins.weights["shapes"]
    with pytest.raises(UserError, match="unknown"):
        service.pool.unpin("shapes", "forms", "unknown")
    assert kept() == {"forms": 1, "shapes": 1}
    assert [pinned.model for pinned in service.pool.unpin("shapes")] == ["forms"]
    assert kept() == {"forms": 1, "shapes": 0}
    service.pool.pin("shapes")
    del controller._pins.weights["shapes"]
    assert service.pool.unpin("forms", "shapes") == ()
    assert kept() == {"forms": 0, "shapes": 0}


def test_slow_pins_do_not_cost_the_service_its_place(service: Service) -> None:
    """The controller drops drivers that do not poll, and the service polls only once it has pinned everything."""
    service.pool.pin("shapes")
    service.crash()
    controller = service.line.controller
    pin, while_pinning = controller._pins.pin, []

    async def slow_pin(models: tuple[str, ...], replicas: int) -> None:
        while_pinning.append(CLIENT in controller._drivers.known)
        await pin(models, replicas)

    controller._pins.pin = slow_pin  # type: ignore[method-assign]
    service.reopen()
    require_complete(service, service.submit(prompts(2)), 2)
    assert while_pinning == [False]


def test_a_submission_in_shards_with_names_and_a_format_is_complete_when_it_has_ended(service: Service) -> None:
    """Each output is in one shard, the last one too, although the service was lost in between. The shards that did not
    fill up had remained files."""
    layout = OutputLayout(LayoutKind.WEBDATASET, 4)
    requests = [
        GenerateRequest(model="shapes", prompt="a thing", seed=seed, steps=3, id=f"row-{seed}", format="webp")
        for seed in range(10)
    ]
    terms: dict[str, Any] = {"output": service.out, "layout": layout, "name": "{id}-{index:02}"}
    jobs = service.pool.submit_detached(requests, jobs_id="packed", **terms)
    service.until(lambda: jobs.progress().record.succeeded >= 5)
    service.crash()
    service.reopen()
    assert service.pool.submit_detached(requests, jobs_id="packed", **terms).wait(WAIT_SECONDS).succeeded == 10
    found = []
    for path in sorted(service.out.glob("shard-*.tar")):
        with tarfile.open(path) as tar:
            found.append(sorted(name for name in tar.getnames() if name.endswith(".webp")))
    assert sorted(map(len, found)) == [2, 4, 4]
    assert sorted(name for shard in found for name in shard) == [f"row-{n}.webp" for n in range(10)]
    # in a sharded place, names have digits of the key: the files are removed, and no name is used again
    assert [each.file.rpartition("-")[0] for each in jobs.outcomes()] == [f"row-{n}-{n:02}" for n in range(10)]
    assert not list(service.out.glob("*.webp"))


def test_a_submission_that_its_place_does_not_fit_is_refused_and_so_is_a_template_without_its_field(
    service: Service,
) -> None:
    request = GenerateRequest(model="shapes", prompt="a", seed=1, steps=3)
    service.pool.submit_detached(request, output=service.out, jobs_id="files").wait(WAIT_SECONDS)
    layout = OutputLayout(LayoutKind.PARQUET, 2)
    with pytest.raises(UserError, match="this one has files"):
        service.pool.submit_detached(request, output=service.out, layout=layout)
    with pytest.raises(UserError, match="has no id"):
        service.pool.submit_detached(request, output=service.out, name="{id}")
    with pytest.raises(UserError, match="belongs to a submission of 1 request "):
        service.pool.submit_detached(request, output=service.out, jobs_id="files", name="{seed}")
    # nor has it left a layout in a place that another submission may have as files
    with pytest.raises(UserError, match="belongs to a submission of 1 request "):
        service.pool.submit_detached(request, output=service.folder / "new", jobs_id="files", layout=layout)
    assert not (service.folder / "new").exists()
    assert [record.submission_id for record in service.pool.detached()] == ["files"]


def test_a_shard_that_cannot_be_completed_holds_its_submission_until_it_can_be(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The temporary folder is full, say. The last output was never committed, and the submission never ended."""
    finish, is_full = ShardedOutputs.finish, threading.Event()
    is_full.set()

    def finish_with_space(outputs: ShardedOutputs) -> None:
        if is_full.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        finish(outputs)

    monkeypatch.setattr(ShardedOutputs, "finish", finish_with_space)
    jobs = service.submit(prompts(3), layout=OutputLayout(LayoutKind.WEBDATASET, 4))
    service.until(lambda: "No space left" in jobs.progress().waiting_for)
    is_full.clear()
    assert jobs.wait(WAIT_SECONDS).succeeded == 3
    assert len(list(service.out.glob("shard-*.tar"))) == 1


def test_the_outputs_of_a_cancelled_submission_are_packed_too(service: Service) -> None:
    jobs = service.submit([*prompts(2), ENDLESS], layout=OutputLayout(LayoutKind.WEBDATASET, 4))
    service.until(lambda: jobs.progress().record.succeeded == 2)
    assert jobs.cancel().cancelled == 1
    service.until(lambda: list(service.out.glob("shard-*.tar")))
    service.until(lambda: not list(service.out.glob("*.png")))


def test_a_damaged_layout_holds_its_submission_only(service: Service) -> None:
    """The service connected to the controller again and again, and cancelled what the others had there."""
    jobs = service.submit([*prompts(2), ENDLESS])
    service.until(lambda: jobs.progress().record.succeeded == 2)
    service.crash()
    (service.out / "layout.json").write_text("[")
    service.reopen()
    service.until(lambda: "layout.json" in jobs.progress().record.trouble)
    request = GenerateRequest(model="shapes", prompt="b", seed=1, steps=3)
    other = service.pool.submit_detached(request, output=service.folder / "other")
    assert other.wait(WAIT_SECONDS).succeeded == 1
    jobs.cancel()


def test_jobs_run_without_their_driver(service: Service) -> None:
    jobs = service.submit(prompts(20))
    service.pool.close()
    again = ModelPool(service.line, lambda: None, None, jobs=lambda: service)
    require_complete(service, again.attach(jobs.id[:6]), 20)
    assert [record.submission_id for record in again.detached()] == [jobs.id]
    assert len(jobs) == 20
    again.close()


def test_labels_outlive_the_driver_and_name_the_outputs(service: Service) -> None:
    """Also when the same recipe has two ids."""
    wanted = [GenerateRequest(model="shapes", prompt="a", seed=1, steps=2, id=name, line=7) for name in ("x", "y")]
    other = {"model": "shapes", "prompt": "b", "metadata": [1]}
    jobs = service.pool.submit_detached([*wanted, other], output=service.out)
    assert jobs.wait(60).succeeded == 3
    outcomes = list(jobs.outcomes())
    assert [(each.labels.id, each.labels.line) for each in outcomes] == [("x", 7), ("y", 7), ("", None)]
    entries = {entry.file: entry.labels for entry in OutputFolder(service.out).entries()}
    assert [entries[each.file] for each in outcomes] == [each.labels for each in outcomes]


def test_the_pool_has_a_window_of_a_long_submission(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_service, "LEAST_WINDOW", 8)
    monkeypatch.setattr(job_service, "WINDOW", 16)
    most = 0
    add = service.line.controller._queue._queue

    def watched(*args: Any, **more: Any) -> Any:
        nonlocal most
        found = add(*args, **more)
        most = max(most, len(service.line.controller._queue.jobs))
        return found

    service.line.controller._queue._queue = watched  # type: ignore[method-assign]
    require_complete(service, service.submit(prompts(60)), 60)
    assert 4 <= most <= 16


def test_few_outputs_wait_for_a_slow_disk(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """They occupy the object store. Before, they were as many as the largest window has."""
    monkeypatch.setattr(job_service, "LEAST_WINDOW", 8)
    disk, write = threading.Event(), OutputFolder.write

    def slow(*args: Any) -> Any:
        disk.wait()
        return write(*args)

    monkeypatch.setattr(OutputFolder, "write", slow)
    jobs = service.submit(prompts(60))
    service.until(lambda: jobs.progress().in_pool == 8 and not service.line.controller._queue.jobs)
    service.service._wake.set()
    assert jobs.progress().in_pool == 8
    disk.set()
    require_complete(service, jobs, 60)


def test_the_window_follows_the_pool_and_the_disk() -> None:
    assert window_after(LEAST_WINDOW, False, 0, 0) == LEAST_WINDOW, "nothing was sent yet"
    assert window_after(LEAST_WINDOW, True, LEAST_WINDOW - CHUNK + 1, 0) == LEAST_WINDOW
    assert window_after(LEAST_WINDOW, True, LEAST_WINDOW - CHUNK, 0) == 2 * LEAST_WINDOW, "as after every chunk"
    assert window_after(LEAST_WINDOW, True, LEAST_WINDOW - CHUNK, LEAST_WINDOW // 4) == LEAST_WINDOW
    assert window_after(LEAST_WINDOW, True, 1, 0) == 2 * LEAST_WINDOW
    assert window_after(WINDOW, True, 1, 0) == WINDOW
    assert window_after(WINDOW, True, WINDOW, WINDOW // 2) == WINDOW // 2
    assert window_after(LEAST_WINDOW, True, LEAST_WINDOW, LEAST_WINDOW) == LEAST_WINDOW


def test_a_crash_of_the_service_loses_nothing(service: Service) -> None:
    """Also the outputs that were written, but not committed: they are not made again."""
    jobs = service.submit(prompts(40))
    service.until(lambda: jobs.progress().record.succeeded >= 5)
    service.crash()
    written = {entry["file"] for entry in service.manifest()}
    service.reopen()
    require_complete(service, jobs, 40)
    assert len(written) >= 5


def test_an_output_that_was_written_before_the_crash_is_committed_without_a_run(service: Service) -> None:
    jobs = service.submit(prompts(6))
    jobs.wait(WAIT_SECONDS)
    service.crash()
    before = (service.out / "manifest.jsonl").read_bytes()
    os.unlink(service.folder / "journal.sqlite")  # as if the crash had come between file and journal, for all of them
    for suffix in ("-wal", "-shm"):
        (service.folder / f"journal.sqlite{suffix}").unlink(missing_ok=True)
    service.reopen()
    asked = len(service.line.asked)
    require_complete(service, service.submit(prompts(6)), 6)
    assert (service.out / "manifest.jsonl").read_bytes() == before
    assert "submit" not in service.line.asked[asked:]


#: a process with a pool and its job service, which is killed after the fifth output
KILLED_SERVICE = """
import os, signal, sys
from pathlib import Path
from modelpool.actors.control.detached import job_service
from tests.actors.control.detached.test_job_service import opened, prompts
job_service.CHUNK = 4
with opened(Path(sys.argv[1])) as service:
    jobs = service.submit(prompts(24), jobs_id="lasting")
    service.until(lambda: jobs.progress().record.succeeded >= 5)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_service_whose_process_is_killed_commits_each_output_once(tmp_path: Path) -> None:
    """The next one continues from the journal, three times; committed files stay, and nothing is left behind."""
    command = [sys.executable, "-c", KILLED_SERVICE, str(tmp_path)]
    for _ in range(3):  # the same command hands over the same submission
        killed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_SECONDS)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
    with opened(tmp_path) as service:
        jobs = service.pool.attach("lasting")
        committed = {each.place: each for each in jobs.outcomes()}
        record = jobs.wait(WAIT_SECONDS)
        assert (record.succeeded, record.pending) == (24, 0)
        outcomes = {each.place: each for each in jobs.outcomes()}
        assert committed.items() <= outcomes.items()
        files = sorted(each.file for each in outcomes.values())
        assert sorted(entry["file"] for entry in service.manifest()) == files
        assert sorted(path.name for path in service.out.iterdir()) == sorted([".lock", "manifest.jsonl", *files])


class ServiceKilled(BaseException):
    """The process ends here."""


def test_outputs_in_s3_are_committed_once_though_the_service_is_killed_around_each_commit(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between an upload and its record, and between a record and the journal: nothing is generated again. The
    killed service changes nothing when it goes on later."""
    with s3_server():
        url = service.out = "s3://bucket/outputs"  # type: ignore[assignment]
        create, end = ObjectPrefix.create, Journal.end
        records, ends = itertools.count(1), itertools.count(1)

        def killed_before_a_record(self: ObjectPrefix, name: str, content: bytes) -> bool:
            if name.startswith("manifest/") and next(records) % 4 == 0:
                raise ServiceKilled
            return create(self, name, content)

        def killed_before_the_journal(self: Journal, outcomes: Any) -> Any:
            if next(ends) % 3 == 0:
                raise ServiceKilled
            return end(self, outcomes)

        with monkeypatch.context() as patch:
            patch.setattr(ObjectPrefix, "create", killed_before_a_record)
            patch.setattr(Journal, "end", killed_before_the_journal)
            jobs = service.submit(prompts(12))
            objects = ObjectPrefix(url)
            service.until(lambda: sum(name.endswith(".png") for name in objects.sizes()) == 12)
            service.until(lambda: jobs.progress().record.succeeded == 6)
        zombie = service.service._feeds[jobs.id].place
        service.crash()
        asked = len(service.line.asked)
        service.reopen()
        record = jobs.wait(WAIT_SECONDS)
        assert (record.succeeded, record.pending) == (12, 0)
        assert "submit" not in service.line.asked[asked:], "nothing was generated again"
        outcomes = {each.file: each for each in jobs.outcomes()}
        place = existing_outputs(url)
        assert {entry.file: entry.pixels_sha256 for entry in place.entries()} == {
            file: each.pixels_sha256 for file, each in outcomes.items()
        }
        assert list(place.damaged()) == []
        for entry in place.entries():
            late = FinishedOutput(entry.recipe, ImagePixels(np.zeros((64, 64, 3), np.uint8)), 0, "late", "gpu-0", 0.0)
            assert zombie.write(late).pixels_sha256 == outcomes[entry.file].pixels_sha256
        assert list(place.damaged()) == []
        with pytest.raises(UserError, match="no such bucket"):
            service.pool.submit_detached(
                [GenerateRequest(model="shapes", prompt="a", seed=1)], output="s3://nobucket/x"
            )
        assert [each.submission_id for each in service.pool.detached()] == [jobs.id]


def test_a_lost_controller_loses_nothing(service: Service) -> None:
    jobs = service.submit(prompts(40))
    service.until(lambda: jobs.progress().record.succeeded >= 3)
    service.lose_controller()
    service.until(lambda: "controller of the pool is gone" in jobs.progress().waiting_for)
    assert jobs.progress().record.pending > 0
    service.new_controller()
    require_complete(service, jobs, 40)


def test_an_output_that_is_removed_after_its_feed_began_is_generated_again(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A submission may take days. Its requests ended with files that were there on its first day."""
    require_complete(service, service.submit(prompts(3)), 3)
    first = {path.name: path.read_bytes() for path in service.out.glob("*.png")}
    removed = sorted(first)[1]
    without_finished = job_service._without_finished
    sent: list[int] = []

    def removing(link: Any, feed: Any, usable: Any) -> Any:
        if not sent:
            assert len(feed.kept) == 3
            (service.out / removed).unlink()
        left, found = without_finished(link, feed, usable)
        sent.append(len(left))
        return left, found

    monkeypatch.setattr(job_service, "_without_finished", removing)
    jobs = service.submit(prompts(3))
    assert jobs.wait(WAIT_SECONDS).succeeded == 3
    assert {path.name for path in service.out.glob("*.png")} == set(first), "none is lost, and none is there twice"
    assert sorted(each.file for each in jobs.outcomes()) == sorted(first)
    assert sum(sent) == 1, "nothing else runs"


def test_a_wall_clock_that_is_set_back_gives_no_job_its_deadline_again(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """400 of 600 s had passed; then the clock was set back by an hour, and the controller was lost."""
    ahead_seconds = [400.0]
    clocks = SimpleNamespace(time=lambda: time.time() + ahead_seconds[-1], monotonic=time.monotonic)
    monkeypatch.setattr(job_service, "time", clocks)
    deadlines: list[float] = []
    submit = job_service._Link.submit

    def noting(link: Any, submission_id: Any, user: str, part: Any, batches: Any) -> None:
        deadlines.extend(request.deadline for _, request in part)
        submit(link, submission_id, user, part, batches)

    monkeypatch.setattr(job_service._Link, "submit", noting)
    request = GenerateRequest(model="shapes", prompt=f"{ENDLESS} one", seed=1, steps=3, deadline=600.0)
    jobs = service.pool.submit_detached(request, output=service.out)
    service.until(lambda: len(deadlines) == 1)
    ahead_seconds.append(-3600.0)
    service.lose_controller()
    service.new_controller()
    service.until(lambda: len(deadlines) == 2)
    assert deadlines[1] <= deadlines[0] <= 200.0
    jobs.cancel()
    service.until(lambda: not service.service._ages)


def test_a_service_that_its_controller_has_dropped_sends_its_requests_again(service: Service) -> None:
    """It was stopped for a minute, say. The controller remembers the ids of ended jobs and ignores them: under equal
    ids, nothing ran any more."""
    jobs = service.submit([*prompts(6), f"{ENDLESS} one"])
    service.until(lambda: jobs.progress().record.succeeded == 6)
    service.until(lambda: len(jobs.progress().running) == 1)
    dropped = set(service.service._running)
    service.line.call(CONTROLLER.leave, CLIENT)
    # not that nothing runs in between: that may be over before this thread looks
    service.until(lambda: len(jobs.progress().running) == 1 and dropped.isdisjoint(service.service._running))
    jobs.cancel()


def test_a_service_that_stops_or_loses_its_controller_while_it_looks_for_work_notices_at_once(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either was forgotten if it came between the look whether it had come and the look for work: for 5 s, the service
    sent nothing, or did not end."""
    happens: list[Callable[[], None]] = []

    class LateEvent(threading.Event):
        def clear(self) -> None:
            if happens and threading.current_thread() is service.service._thread:
                happens.pop()()
            super().clear()

    monkeypatch.setattr(job_service, "IDLE_SECONDS", 2 * WAIT_SECONDS)
    links: list[job_service._Link] = []
    enter = job_service._Link.enter

    def entering(link: job_service._Link) -> None:
        links.append(link)
        enter(link)

    monkeypatch.setattr(job_service._Link, "enter", entering)
    service.crash()
    service.reopen()
    service.until(lambda: links)
    before, service.service._wake = service.service._wake, LateEvent()
    before.set()
    lost = job_service._Listener(links[0], SubmissionId(""), service.service)
    happens.append(lambda: lost.on_lost(PoolLost("it is gone")))
    service.service._wake.set()
    service.until(lambda: len(links) == 2)

    def stop() -> None:
        service.service._stopping = True
        service.service._wake.set()

    happens.append(stop)
    service.service._wake.set()
    service.service._thread.join(WAIT_SECONDS)
    assert not service.service._thread.is_alive()


def test_failed_and_impossible_requests_have_their_reasons(service: Service) -> None:
    """An impossible kind is refused at once; a request that fails later does not hold up the others."""
    jobs = service.submit(["fine", f"{FAIL} now", "fine too"])
    record = jobs.wait(WAIT_SECONDS)
    assert (record.succeeded, record.failed) == (2, 1)
    failed = next(each for each in jobs.outcomes() if each.outcome is Outcome.FAILED)
    assert (failed.place, failed.error_kind) == (1, "internal")
    assert "asked to fail" in failed.message
    (noted,) = existing_outputs(service.out).failures()
    assert (noted.index, noted.kind, noted.message) == (1, "internal", failed.message)
    with pytest.raises(UserError, match="nosuch"):
        service.pool.submit_detached([GenerateRequest(model="nosuch", prompt="a", seed=1)], output=service.out)
    assert [record.submission_id for record in service.pool.detached()] == [jobs.id]


def test_cancelling_stops_what_runs_and_keeps_what_is_finished(service: Service) -> None:
    jobs = service.submit(["first", f"{ENDLESS} one", f"{ENDLESS} two", "never"])
    service.until(lambda: len(jobs.progress().running) == 2)
    record = jobs.cancel()
    assert (record.state, record.pending) == (SubmissionState.ENDED, 0)
    assert record.cancelled >= 2
    service.until(lambda: not service.line.controller._queue.jobs)
    assert len(service.pool.attach(jobs.id)) == 4
    assert jobs.progress().running == ()
    jobs.remove()
    assert not service.pool.detached()
    service.until(lambda: not service.service._feeds)


def test_what_was_cancelled_in_the_journal_is_cancelled_in_the_pool_whoever_notices_first(service: Service) -> None:
    """The service's thread may look between the two halves of `cancel`. Then nothing ended the runs."""
    jobs = service.submit([f"{ENDLESS} one", f"{ENDLESS} two"])
    service.until(lambda: len(jobs.progress().running) == 2)
    service.service._journal.cancel(jobs.id)
    service.until(lambda: not service.service._feeds)
    service.until(lambda: not service.line.controller._queue.jobs)


def test_an_unexpected_failure_does_not_end_the_service(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The controller's scheduler failed, say: it raises PoolBroken."""
    reasons = [RuntimeError("the scheduler failed"), KeyError("a bug")]
    connect = service.service._connect

    def failing() -> LoopConnection:
        if reasons:
            raise reasons.pop()
        return connect()

    jobs = service.submit(prompts(40))
    monkeypatch.setattr(service.service, "_connect", failing)
    service.lose_controller()
    service.new_controller()
    require_complete(service, jobs, 40)
    assert not reasons
    assert "the scheduler failed" in caplog.text


def test_a_folder_that_cannot_be_written_holds_its_submission_only(service: Service) -> None:
    service.out.mkdir()
    jobs = service.submit(prompts(30))
    service.until(lambda: jobs.progress().record.succeeded >= 2)
    service.out.rename(service.folder / "away")
    service.out.write_text("in the way")
    service.until(lambda: "out" in jobs.progress().waiting_for)
    service.until(lambda: not service.line.controller._queue.jobs)
    other = service.pool.submit_detached(
        [GenerateRequest(model="shapes", prompt="b", seed=1)], output=service.folder / "other"
    )
    assert other.wait(WAIT_SECONDS).succeeded == 1
    missing = jobs.progress().record.pending
    assert missing > 0
    service.out.unlink()
    record = jobs.wait(WAIT_SECONDS)
    assert (record.succeeded, record.trouble) == (30, "")
    assert len(service.manifest()) >= missing


@contextmanager
def small_disk(folder: Path) -> Iterator[Callable[[bool], None]]:
    """A disk of 8 MiB at `folder`; yields a function that fills it, or makes room again."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"this user may mount no disk: {mounted.stderr.decode()}")

    def fill(full: bool) -> None:
        (folder / "fill").unlink(missing_ok=True)
        with suppress(OSError), (folder / "fill").open("wb", buffering=0) as file:
            while full:
                file.write(bytes(4096))

    try:
        yield fill
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_while_the_disk_of_the_journal_is_full_nothing_is_sent_and_everybody_reads_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No reason was shown anywhere, and jobs were submitted and cancelled every 10 s for ever, thousands of lines of
    the log."""
    for name in ("RETRY_SECONDS", "FOLDER_RETRY_SECONDS", "IDLE_SECONDS", "PROBE_SECONDS"):
        monkeypatch.setattr(job_service, name, 0.02)
    caplog.set_level("INFO", "modelpool.actors.control.pool_log")
    with small_disk(tmp_path / "disk") as fill, opened(tmp_path, tmp_path / "disk" / "journal.sqlite") as service:
        service.line.controller._log = PoolLog()
        jobs = service.submit(prompts(200))
        service.until(lambda: jobs.progress().record.succeeded >= 2)
        fill(True)

        def status() -> PoolStatus:
            return service.line.call(CONTROLLER.status)

        service.until(lambda: "disk is full" in "".join(status().jobs_troubles))
        service.until(lambda: status().jobs["live"] == 0)  # the pool runs what it has
        before = status()
        assert "disk is full" in jobs.progress().waiting_for
        (record,) = service.pool.detached()
        assert (record.pending > 0, "disk is full" in record.trouble) == (True, True)
        for _ in range(5):
            with pytest.raises(UserError, match="disk is full"):
                service.submit(prompts(1))
        threading.Event().wait(0.5)  # 25 times the intervals after which jobs were sent again
        assert status().jobs == before.jobs
        assert (before.jobs["cancelled"], before.jobs["failed"]) == (0, 0)
        fill(False)
        require_complete(service, jobs, 200)
        service.until(lambda: status().jobs_troubles == ())
        assert status().jobs == {"live": 0, "succeeded": 200, "failed": 0, "cancelled": 0}
        assert jobs.progress().waiting_for == ""
        (record,) = service.pool.detached()
        assert record.trouble == ""
    about = [each.message.split(":")[0] for each in caplog.records if "detached jobs" in each.message]
    assert about == ["detached jobs wait", "detached jobs continue"]


def test_a_service_that_could_open_its_journal_again_ends_the_trouble_of_the_one_before(service: Service) -> None:
    """`status` said for ever that jobs wait, though they ran."""
    service.crash()
    service.line.call(CONTROLLER.jobs_troubled, ("the journal cannot be opened",))
    assert service.line.call(CONTROLLER.status).jobs_troubles == ("the journal cannot be opened",)
    service.reopen()
    service.until(lambda: service.line.call(CONTROLLER.status).jobs_troubles == ())


def test_a_store_that_does_not_answer_holds_up_its_submission_only(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, driver = threading.Event(), threading.current_thread()

    def opened_late(address: Any) -> Any:
        if address == service.out and threading.current_thread() is not driver:
            answers.wait(WAIT_SECONDS)
        return open_outputs(address)

    monkeypatch.setattr(job_service, "open_outputs", opened_late)
    jobs, cancelled = service.submit(prompts(3)), service.submit(prompts(3))
    service.until(lambda: jobs.progress().waiting_for == f"{service.out} is being opened")
    other = service.pool.submit_detached(
        [GenerateRequest(model="shapes", prompt="b", seed=1)], output=service.folder / "other"
    )
    assert other.wait(WAIT_SECONDS).succeeded == 1
    cancelled.cancel()
    assert cancelled.wait(WAIT_SECONDS).cancelled == 3
    assert jobs.progress().record.pending == 3
    answers.set()
    assert jobs.wait(WAIT_SECONDS).succeeded == 3
    assert not service.service._opening


def test_submitting_again_under_an_id_runs_nothing_twice(service: Service) -> None:
    jobs = service.submit(prompts(5), jobs_id="night")
    require_complete(service, jobs, 5)
    assert service.submit(prompts(5), jobs_id="night").wait(WAIT_SECONDS).succeeded == 5
    with pytest.raises(UserError, match="'night' belongs to a submission of 5"):
        service.submit(prompts(6), jobs_id="night")
    require_complete(service, jobs, 5)


def test_a_submission_is_handed_over_again_if_the_service_is_restarted_meanwhile(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It forgets what it has not acknowledged."""
    crashes = ["append", "seal"]
    call = service.call

    def crashing(question: Callable[..., Any], *args: Any) -> Any:
        if crashes and question.__name__ == crashes[0]:
            del crashes[0]
            service.crash()
            service.reopen()
        return call(question, *args)

    monkeypatch.setattr(service, "call", crashing)
    require_complete(service, service.submit(prompts(4)), 4)
    assert not crashes


def test_of_two_drivers_the_one_that_begins_later_after_a_restart_follows_the_other(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It got an error, as if it had been silent for 30 s."""
    monkeypatch.setattr(detached_jobs, "FOLLOW_SECONDS", 0.01)
    texts = [f'{{"model": "shapes", "prompt": "b", "seed": {seed}, "steps": 3}}' for seed in range(4)]
    asked: list[str] = []
    call = service.call

    def crashing(question: Callable[..., Any], *args: Any) -> Any:
        asked.append(question.__name__)
        if asked == ["begin", "append"]:
            service.crash()
            service.reopen()
            service.service.begin(NewSubmission("x", str(service.out), service.pool._user, 0), "other")
            service.service.append("x", 0, texts, "other")
        try:
            return call(question, *args)
        except BeingReceived:
            if question is JobService.begin:
                service.service.seal("x", 4, "other")
            raise

    monkeypatch.setattr(service, "call", crashing)
    require_complete(service, service.submit(prompts(4), jobs_id="x"), 4)
    assert asked[:4] == ["begin", "append", "begin", "begin"]
    assert {entry["recipe"]["prompt"] for entry in service.manifest()} == {"b"}


def test_a_pool_of_a_driver_has_no_detached_jobs(service: Service) -> None:
    pool = ModelPool(service.line, lambda: None, None)
    with pytest.raises(UserError, match="modelpool up"):
        pool.submit_detached(GenerateRequest(model="shapes", prompt="a"), output=service.out)
    pool.close()
