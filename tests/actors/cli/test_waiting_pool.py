"""A pool that waits for GPUs: the commands say so, once, until something runs."""

from __future__ import annotations

import io
import threading
from dataclasses import replace

import pytest

from modelpool.actors.cli.run import run_jobs
from modelpool.actors.cli.run.checked_requests import CheckedRequests, WantedOutputs
from modelpool.actors.cli.run.progress_view import CHECKED_SECONDS, LinesView
from modelpool.actors.cli.run.run_jobs import waiting_for
from modelpool.actors.cli.terminal.screen import user_console
from modelpool.actors.control.status import PoolStatus, WorkerStatus
from modelpool.actors.outputs.results.progress import Progress
from tests.actors.cli.conftest import Command
from tests.actors.cli.fakes import FakeJobs, FakePool

WAITS = "waiting for 2 GPUs: 0 of 4 are free; pool 'x' uses 4"


class WaitingJobs(FakeJobs):
    """Nothing runs."""

    def progress(self) -> Progress:
        return replace(super().progress(), running=())


class WaitingPool(FakePool):
    """Gets its GPUs when it was asked for its status three times."""

    def __init__(self) -> None:
        self.asked = 0
        self.asked_enough = threading.Event()
        super().__init__(before_each=lambda index: self.asked_enough.wait() and None)

    def status(self) -> PoolStatus:
        self.asked += 1
        if self.asked == 3:
            self.asked_enough.set()
        known = super().status()
        return replace(known, workers=known.workers[1:], waiting_for=WAITS)


def test_what_a_pool_waits_for_is_printed_once(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_jobs, "_WAITING_SECONDS", run_jobs._CHECK_SECONDS)
    monkeypatch.setattr("tests.actors.cli.fakes.FakeJobs", WaitingJobs)
    ended = command("generate", "a red circle", pool=WaitingPool())
    assert ended.code == 0
    assert [line for line in ended.err.splitlines() if "waiting" in line] == [WAITS]


def test_a_pool_with_a_worker_waits_for_nothing() -> None:
    status = replace(FakePool().status(), waiting_for=WAITS)

    class HalfReady(FakePool):
        def status(self) -> PoolStatus:
            return status

    assert waiting_for(HalfReady()) == ""
    assert waiting_for(WaitingPool()) == WAITS


def test_the_start_of_a_pool_says_what_it_waits_for() -> None:
    """Not "checked 0 of 8" every two seconds: first the catalog, then a worker, with what went wrong before."""
    known = FakePool().status()
    _, starts = known.workers
    again = replace(starts, not_up="starts again; before: killed by signal 9")

    class Starting(FakePool):
        workers: tuple[WorkerStatus, ...] = (replace(starts, trouble=""),)

        def status(self) -> PoolStatus:
            return replace(known, workers=self.workers)

    pool, catalog = Starting(), "waiting: the catalog loads torch and reads the models"
    checked = CheckedRequests(WantedOutputs.of(()), {}, print, print, print)
    assert checked.waits_for == catalog
    assert checked.words == ""
    assert waiting_for(pool, checked.waits_for) == catalog
    assert waiting_for(pool) == "waiting: the worker loads torch and opens its device"
    pool.workers = (replace(starts, trouble=""), again)
    assert waiting_for(pool) == (
        "waiting: worker 1 of 2 loads torch and opens its device; gpu-1: starts again; before: killed by signal 9"
    )
    pool.workers = known.workers
    assert waiting_for(pool) == "", "one is up"
    pool.workers = (replace(starts, state="given_up"),)
    assert waiting_for(pool) == ""


def test_lines_repeat_nothing_about_the_check_of_requests() -> None:
    now, stream = 0.0, io.StringIO()
    with LinesView(user_console(stream), clock=lambda: now) as view:
        for second, words in enumerate(["", "checked 3 of 9", "checked 3 of 9", "checked 5 of 9", ""] * 2):
            now = second * CHECKED_SECONDS
            view.update(Progress(9, 0, 0, 0, ()), words)
    assert stream.getvalue().splitlines() == ["checked 3 of 9", "checked 5 of 9"] * 2


def test_status_and_top_show_nodes_and_why_workers_are_not_up(command: Command) -> None:
    class OnNodes(FakePool):
        def status(self) -> PoolStatus:
            known = super().status()
            up, down = known.workers
            down = replace(down, not_up="pending: no node with a free GPU; before: killed by signal 9")
            return replace(
                known,
                workers=(replace(up, node_name="box-1"), down),
                waiting_for=WAITS,
                controller="the-head",
                record="log.jsonl: not written now (File exists)",
            )

    shown = command("status", "mine", pool=OnNodes())
    assert "node" in shown.out.split("gpu-0")[0]
    for text in ("box-1", WAITS, "on the-head", "pending: no node with a free GPU"):
        assert text in shown.out
    record = "log.jsonl: not written now (File exists) on the-head"
    assert record in shown.out, "status had named no event log"
    frame = command("top", "mine", "--once", pool=OnNodes())
    for text in ("box-1", WAITS, record, "pending: no node with a free GPU"):
        assert text in frame.out
    alone = command("status", "mine", pool=FakePool())
    assert "node" not in alone.out.split("gpu-0")[0]
    assert "controller" not in alone.out
