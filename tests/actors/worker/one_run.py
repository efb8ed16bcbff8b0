"""Calls of `GpuWorker.run` as tests want them: one run, several with the end of the last, or a batch."""

from __future__ import annotations

from collections.abc import Sequence

from modelpool.actors.worker.gpu_worker import GpuWorker
from modelpool.actors.worker.wire.messages import CallId, EndsWanted, RunEnds, RunMode, RunRequest
from modelpool.pool.values.core.stage_params import Result
from modelpool.pool.values.specs.spec import TaskReport


def run_one(worker: GpuWorker, request: RunRequest, *inputs: Result) -> tuple[TaskReport | None, Result | None]:
    """Return the report and the result of one run, also if it decodes beside the next one."""
    (report,), (result,) = run_all(worker, (request,), *inputs)
    return report, result


def run_all(worker: GpuWorker, requests: Sequence[RunRequest], *inputs: Result) -> RunEnds:
    """Return the ends of the runs of one call, also if the last one decodes beside the next call."""
    found = worker.run(call_of(requests), requests, *inputs)
    if len(found.reports) == len(requests):
        return found
    last = worker.ends(EndsWanted(call_of(requests), len(found.reports), waits=True))
    return RunEnds((*found.reports, *last.reports), (*found.results, *last.results))


def run_batch(worker: GpuWorker, requests: Sequence[RunRequest], *inputs: Result) -> RunEnds:
    """Return the ends of runs in a batch."""
    return worker.run(call_of(requests, RunMode.BATCH), requests, *inputs)


def call_of(requests: Sequence[RunRequest], mode: RunMode = RunMode.IN_ORDER) -> CallId:
    """Return the call in which a controller sends these."""
    return CallId(requests[0].run, mode, requests[0].epoch)
