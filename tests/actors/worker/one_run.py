"""Calls of `GpuWorker.run` as tests want them: one run, or several with the end of the last."""

from __future__ import annotations

from collections.abc import Sequence

from modelpool.actors.worker.gpu_worker import GpuWorker
from modelpool.actors.worker.wire.messages import RunRequest, StillDecodes
from modelpool.pool.values.core.stage_params import Result
from modelpool.pool.values.specs.spec import TaskReport


def run_one(worker: GpuWorker, request: RunRequest, *inputs: Result) -> tuple[TaskReport | None, Result | None]:
    """Return the report and the result of one run, also if it decodes beside the next one."""
    (report,), (result,) = run_all(worker, (request,), *inputs)
    return report, result


def run_all(
    worker: GpuWorker, requests: Sequence[RunRequest], *inputs: Result
) -> tuple[tuple[TaskReport | None, ...], tuple[Result | None, ...]]:
    """Return the reports and the results of the runs of one call, also if the last one decodes beside the next call."""
    reports, results = worker.run(requests, *inputs)
    if isinstance(reports[-1], StillDecodes):
        last, result = worker.ended(requests[-1].run, requests[-1].epoch)
        reports, results = (*reports[:-1], last), (*results[:-1], result)
    return reports, results
