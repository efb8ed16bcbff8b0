"""A pool that waits for GPUs: the commands say so, once, until something runs."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from modelpool.actors.cli.run import run_jobs
from modelpool.actors.cli.run.run_jobs import waiting_for
from modelpool.actors.control.status import PoolStatus
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
                record="log.jsonl",
            )

    shown = command("status", "mine", pool=OnNodes())
    assert "node" in shown.out.split("gpu-0")[0]
    for text in ("box-1", WAITS, "on the-head", "pending: no node with a free GPU"):
        assert text in shown.out
    frame = command("top", "mine", "--once", pool=OnNodes())
    for text in ("box-1", WAITS, "log.jsonl on the-head", "pending: no node with a free GPU"):
        assert text in frame.out
    alone = command("status", "mine", pool=FakePool())
    assert "node" not in alone.out.split("gpu-0")[0]
    assert "controller" not in alone.out
