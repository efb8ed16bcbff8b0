"""The reports of a worker that shares runs: only the leader has the result, and a broken gang leaves a state."""

from __future__ import annotations

from typing import Any

import numpy as np

from modelpool.actors.worker.wire.messages import RunRequest
from modelpool.pool.values.core.gang_errors import GangBroken, GangsDiffer
from modelpool.pool.values.core.results import GuidanceState, Latent, RunState, SamplerState
from modelpool.pool.values.specs.gang import Gang
from modelpool.pool.values.specs.spec import RunErrorKind, WorkerId
from tests.actors.fakes import FakeEngine
from tests.actors.worker.one_run import run_one
from tests.actors.worker.test_gpu_worker import Bench

STATE = RunState(2, 5, SamplerState(np.zeros((4, 2, 2), np.float32)), GuidanceState())


class SharingEngine(FakeEngine):
    """Notes the gangs of its runs, and ends them with an error if there is one."""

    def __init__(self, raised: Exception | None = None) -> None:
        super().__init__()
        self.raised = raised
        self.gangs: list[Gang] = []

    def run(self, *args: Any, **named: Any) -> Any:
        *args, gang = args
        self.gangs.append(gang)
        if self.raised is not None:
            raise self.raised
        return super().run(*args, **named)


def shared(engine: SharingEngine, rank: int) -> Any:
    bench = Bench(engine)
    bench.worker.start()
    gang = Gang("g", (WorkerId("gpu-0"), WorkerId("gpu-1")), rank, bench.worker.gang_address())
    made = run_one(bench.worker, RunRequest(bench.task, bench.work, 1, 1, gang=gang), *bench.inputs)
    assert engine.gangs == [gang]
    assert bench.worker.gang_address() == gang.address, "it is opened once"
    bench.worker.close()
    return made


def test_only_the_leader_has_the_result() -> None:
    report, result = shared(SharingEngine(), 0)
    assert report.error is None
    assert isinstance(result, Latent)
    report, result = shared(SharingEngine(), 1)
    assert (report.error, result, report.result_bytes) == (None, None, 0)


def test_a_broken_gang_leaves_its_state_on_every_member() -> None:
    for rank in (0, 1):
        report, result = shared(SharingEngine(GangBroken("gpu-1 is gone", (1,), STATE)), rank)
        assert report.error is not None
        assert (report.error.kind, report.error.suspected_ranks) == (RunErrorKind.GANG_BROKEN, (1,))
        assert (report.has_state, report.step, report.steps) == (True, 2, 5)
        assert result is STATE
    report, result = shared(SharingEngine(GangBroken("gpu-1 did not come", (1,))), 0)
    assert (report.has_state, result) == (False, None)


def test_members_that_differ_are_a_fault_and_not_tried_again() -> None:
    report, _ = shared(SharingEngine(GangsDiffer("gpu-1 has other weights")), 0)
    assert report.error is not None
    assert report.error.kind is RunErrorKind.INTERNAL
