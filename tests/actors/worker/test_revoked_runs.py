"""A run starts or is revoked: whichever comes first."""

from __future__ import annotations

import threading

import pytest

from modelpool.actors.worker.revoked_runs import MOST_REMEMBERED, RevokedRuns
from modelpool.actors.worker.wire.messages import RunRequest
from modelpool.actors.worker.worker_lease import OlderEpoch
from tests.actors.worker.test_gpu_worker import Bench


def test_a_run_that_is_revoked_first_does_not_start() -> None:
    runs = RevokedRuns()
    assert runs.start(1)
    assert runs.revoke(2)
    assert runs.revoke(2), "asking twice changes nothing"
    assert not runs.start(2)
    assert runs.start(3)


def test_a_run_that_has_started_cannot_be_revoked() -> None:
    runs = RevokedRuns()
    assert runs.start(4)
    assert not runs.revoke(4)
    assert runs.start(4), "it is sent again after its call failed"


def test_a_run_that_is_sent_again_is_revoked_while_a_later_one_has_started() -> None:
    """A call of runs 5 to 8 failed before it started, and 9 has started. 6 was called too late to revoke, ran, and
    kept its worker from what should go first."""
    bench = Bench()
    bench.worker.start()

    def request(run: int) -> RunRequest:
        return RunRequest(bench.task, bench.work, 1, run)

    for run in (4, 9, 5):
        assert bench.worker.may_start(request(run))
    assert bench.worker.revoke(6)
    assert bench.worker.may_start(request(7))
    assert not bench.worker.revoke(7)
    assert not bench.worker.may_start(request(6))
    assert bench.worker.revoke(8)


def test_what_was_decided_long_ago_has_started() -> None:
    runs = RevokedRuns()
    for run in range(1, 2 * MOST_REMEMBERED):
        assert runs.start(run)
    assert not runs.revoke(1)
    assert len(runs._decided) <= MOST_REMEMBERED


def test_of_a_start_and_a_revocation_at_once_one_wins() -> None:
    for run in range(1, 200):
        runs, told = RevokedRuns(), []
        other = threading.Thread(target=lambda runs=runs, run=run, told=told: told.append(runs.revoke(run)))
        other.start()
        may_start = runs.start(run)
        other.join()
        assert told == [not may_start]


def test_a_new_controller_counts_from_one_again() -> None:
    bench = Bench()
    bench.worker.start()
    request = RunRequest(bench.task, bench.work, 1, 7)
    assert bench.worker.may_start(request)
    bench.worker.change_controller(1)
    assert bench.worker.revoke(2, epoch=1)
    with pytest.raises(OlderEpoch):
        bench.worker.revoke(8)
    with pytest.raises(OlderEpoch):
        bench.worker.may_start(request)
