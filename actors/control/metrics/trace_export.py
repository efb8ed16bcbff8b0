"""`TraceExport`: turns the trace of each job that ends into OpenTelemetry spans: job > task > fetch, load, run.

The library is imported on use: it belongs to the extra `tracing`. Its global provider is not used. Exporters are found
by the entry points that OpenTelemetry's packages define, and are configured by its environment variables.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from modelpool.actors.control.metrics.job_traces import JobTrace, JobTraces, TracedRun
from modelpool.pool.values.core.errors import UserError, unknown_name
from modelpool.pool.values.core.install_hint import install_command
from modelpool.pool.values.specs.spec import TaskSpec
from modelpool.scheduler.decisions.queue.demand import Demand
from modelpool.scheduler.model.messages import Command, Event, Outcome

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span
    from opentelemetry.util.types import AttributeValue

_EXPORTERS = "opentelemetry_traces_exporter"
_NANOSECONDS = 1e9


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a run, in seconds on the clock of the events."""

    name: str
    start: float
    end: float
    attributes: Mapping[str, AttributeValue]


class TraceExport:
    """Exports the jobs of one controller to one provider."""

    def __init__(self, provider: TracerProvider, pool: str, unix_offset_seconds: Callable[[], float]) -> None:
        """`unix_offset_seconds` is added to the time of an event to get Unix time. It is read for each job: the wall
        clock may have been set since the start."""
        self._provider = provider
        self._tracer = provider.get_tracer("modelpool")
        self._pool = pool
        self._read_offset_seconds = unix_offset_seconds
        #: of the job that is exported
        self._offset_seconds = 0.0
        self._jobs: JobTraces | None = None

    def follow(self, demand: Demand) -> None:
        """Collect the jobs of the core that has this demand. Call before its first event."""
        self._jobs = JobTraces(demand)

    def note(self, event: Event, commands: Sequence[Command]) -> None:
        """Note an event that the core has handled; export the jobs that it ended."""
        assert self._jobs is not None, "`follow` is called first"
        for trace in self._jobs.note(event, commands):
            self._export(trace)

    def close(self) -> None:
        """Export waiting spans, and stop."""
        self._provider.shutdown()

    def _export(self, trace: JobTrace) -> None:
        self._offset_seconds = self._read_offset_seconds()
        job = trace.job
        span = self._begin(
            "job",
            trace.submitted_at,
            None,
            {
                "modelpool.pool": self._pool,
                "modelpool.job.id": job.job_id,
                "modelpool.job.user": job.user,
                "modelpool.job.priority": job.priority,
                "modelpool.job.outcome": trace.outcome.value,
            },
        )
        for spec, runs in trace.tasks:
            if runs:
                self._export_task(span, spec, runs, trace.ended_at)
        self._finish(span, trace.ended_at, trace.message if trace.outcome is Outcome.FAILED else "")

    def _export_task(self, parent: Span, spec: TaskSpec, runs: Sequence[TracedRun], until: float) -> None:
        last = runs[-1]
        span = self._begin(
            f"task {spec.stage.value}",
            runs[0].ready_at,
            parent,
            {
                "modelpool.task.id": spec.task_id,
                "modelpool.task.stage": spec.stage.value,
                "modelpool.task.components": [use.component for use in spec.uses],
                "modelpool.task.attempts": len(runs),
                "modelpool.task.queue_seconds": runs[0].sent_at - runs[0].ready_at,
                "modelpool.task.outcome": last.end,
            },
        )
        for run in runs:
            for part in _parts(run, until):
                child = self._begin(part.name, part.start, span, part.attributes)
                self._finish(child, part.end, run.message if part.name == "run" else "")
        self._finish(span, until if last.ended_at is None else last.ended_at, last.message)

    def _begin(self, name: str, at: float, parent: Span | None, attributes: Mapping[str, AttributeValue]) -> Span:
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context

        # without a parent: an empty context, not the caller's
        context = Context() if parent is None else set_span_in_context(parent)
        return self._tracer.start_span(name, context, attributes=attributes, start_time=self._unix(at))

    def _finish(self, span: Span, at: float, error: str) -> None:
        from opentelemetry.trace import StatusCode

        if error:
            span.set_status(StatusCode.ERROR, error)
        span.end(self._unix(at))

    def _unix(self, at: float) -> int:
        """Return nanoseconds of Unix time."""
        return round((at + self._offset_seconds) * _NANOSECONDS)


def open_traces(exporter: str, pool: str) -> TraceExport:
    """Return an export to the installed exporter of this name, for a controller on the monotonic clock of this process.
    Raises UserError if the extra `tracing` is not installed, or the exporter is not.
    """
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise UserError(
            f"traces need the package opentelemetry-sdk; install it with: {install_command('tracing')}"
        ) from None
    found = {point.name: point for point in entry_points(group=_EXPORTERS)}
    if exporter not in found:
        raise unknown_name("traces exporter", exporter, found)
    provider = TracerProvider(resource=Resource.create({"service.name": "modelpool"}))
    provider.add_span_processor(BatchSpanProcessor(found[exporter].load()()))
    return TraceExport(provider, pool, lambda: time.time() - time.monotonic())


def _parts(run: TracedRun, until: float) -> Iterator[_Part]:
    """Return the parts of a run. The worker measured their lengths; they are placed before its end, in their order."""
    cost = run.cost
    ended_at = until if run.ended_at is None else run.ended_at
    run_at = max(run.sent_at, ended_at - cost.run_seconds) if cost.run_seconds else run.sent_at
    load_at = max(run.sent_at, run_at - cost.load_seconds)
    where: dict[str, AttributeValue] = {
        "modelpool.worker": run.worker_id,
        "modelpool.incarnation": run.incarnation,
        "modelpool.attempt": run.attempt,
    }
    if cost.fetch_seconds:
        fetched = {"modelpool.fetched_bytes": cost.fetched_bytes, "modelpool.peer_bytes": cost.peer_bytes}
        yield _Part("fetch", max(run.sent_at, load_at - cost.fetch_seconds), load_at, {**where, **fetched})
    if cost.load_seconds:
        loaded = {
            "modelpool.uploaded_bytes": cost.uploaded_bytes,
            "modelpool.storage_bytes": cost.storage_bytes,
            "modelpool.patch_switches": cost.patch_switches,
        }
        yield _Part("load", load_at, run_at, {**where, **loaded})
    ran: dict[str, AttributeValue] = {
        "modelpool.streamed_bytes": cost.streamed_bytes,
        "modelpool.peak_bytes": cost.peak_bytes,
        "modelpool.resident": cost.resident,
        "modelpool.batched": cost.batched,
        "modelpool.outcome": run.end,
    }
    if run.why is not None:
        ran["modelpool.why"] = run.why.words
    yield _Part("run", run_at, ended_at, {**where, **ran})
