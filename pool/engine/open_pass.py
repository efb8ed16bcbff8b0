"""A sampling run of a fixed batch size that members join at a step, and leave when they are done.

Each member is a row: it runs its own sampler, with its own schedule, guidance and hooks, in a thread of its own, until
it calls the model. When all rows wait for the model, their calls become forward passes of exactly as many rows as the
batch size says, padded with copies; calls of different shapes are passes of their own. So each row is computed as in
any other pass of that size, at whatever step the others are. Of all these threads, one runs at a time.

`pool.values.core.joining` says which tasks have such rows. Knows neither the memory of the device nor the worker.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn

from modelpool.pool.engine.batching import shares
from modelpool.pool.engine.sampling_stage import ReadyRun, call_as_asked, denoised, results_of
from modelpool.pool.inference.conditioning.run_parts import CallInputs
from modelpool.pool.values.core.errors import DoesNotFit
from modelpool.pool.values.core.stage_params import BatchMember, Outcome, PreloadRequest, Result, RunHooks, Stopped
from modelpool.pool.values.core.stopping import stop_check
from modelpool.pool.values.specs.spec import RunCost, TaskSpec
from modelpool.pool.weights.patcher.out_of_memory import exhausted_memory, release_frames

#: wraps the work of another thread: it uses the stream of the caller
OnStream: TypeAlias = Callable[[Callable[[], None]], Callable[[], None]]


class Joining(Protocol):
    """Where the members of a pass come from, and where their outcomes go. Called by the thread of the pass."""

    def take(self, most: int, going_on: int) -> Sequence[BatchMember]:
        """Return members that join now, at most so many, while `going_on` others are in the pass. With none there and
        none to join, the pass is over: nobody may join it any more."""

    def ended(self, member: BatchMember, outcome: Outcome) -> None:
        """A member has left. Called once for each that was taken."""

    def stepped(self) -> None:
        """All members have done a step, and those that are in the pass have reported it to their hooks."""


class Abandoned(BaseException):
    """Ends the thread of a row, as the pass has failed. No Exception: what a row runs may catch those."""


class _Row:
    """The run of one member, in a thread that runs only while `go_on` waits for it."""

    def __init__(self, member: BatchMember, found: ReadyRun, on_stream: OnStream, clock: Callable[[], float]):
        self.member = member
        self.found = found
        self.began_at = clock()
        #: what it asks of the model; None after its end
        self.call: CallInputs | None = None
        self.outcome: Result | Exception | None = None
        self._on_stream = on_stream
        self._answer: Tensor | None = None
        self._thread: threading.Thread | None = None
        self._may_go, self._waits = threading.Semaphore(0), threading.Semaphore(0)

    def begin(self, module: nn.Module) -> None:
        """Run until it calls the model, or ends."""
        work = self._on_stream(lambda: self._run(module))
        context = contextvars.copy_context()
        thread = threading.Thread(target=lambda: context.run(work), name=f"row {self.member.task.task_id}")
        thread.start()
        self._thread = thread  # one that did not start cannot be joined
        self._waits.acquire()

    def go_on(self, answer: Tensor | None) -> None:
        """Continue with the answer of the model, or end if there is none, until it calls the model again, or ends."""
        self._answer, self.call = answer, None
        self._may_go.release()
        self._waits.acquire()

    def end(self) -> None:
        """End the thread, and wait for it: a row that waits for the model is abandoned."""
        if self.call is not None:
            self.go_on(None)
        if self._thread is not None:
            self._thread.join()

    def _run(self, module: nn.Module) -> None:
        try:
            self.outcome = results_of(self.found, denoised(self.found, module, self._ask))[0]
        except Exception as error:
            release_frames(error)
            self.outcome = error
        except BaseException as error:  # such as an exit that a library asks for: nobody else would tell of the row
            self.outcome = RuntimeError(f"the run of {self.member.task.task_id} was ended by {error!r}")
        finally:
            self.call = self._answer = None
            self._waits.release()

    def _ask(self, call: CallInputs) -> Tensor:
        self.call = call
        self._waits.release()
        self._may_go.acquire()
        answer, self._answer = self._answer, None
        if answer is None:
            raise Abandoned
        return answer


@dataclass(slots=True, eq=False)
class OpenPass:
    """The members of one pass that have not ended, through all attempts to run them.

    task       one of the members: its sizes are of a whole pass
    prepare    returns the run of a member, before its weights are used
    on_stream  for the threads of the rows
    """

    joining: Joining
    task: TaskSpec
    prepare: Callable[[BatchMember], ReadyRun]
    on_stream: OnStream
    clock: Callable[[], float] = time.perf_counter
    #: those that have not ended, in the order in which they came
    members: list[BatchMember] = field(default_factory=list)
    #: nobody may join any more
    is_over: bool = False
    #: share of the load, of those that were there then
    _loads: dict[int, RunCost] = field(default_factory=dict)
    #: ended in the last step: they get the rest of the cost
    _last: list[tuple[BatchMember, Result, float]] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Rows of each forward pass."""
        return self.task.batch_size

    def admit(self) -> list[BatchMember]:
        """Take those that join now; return them."""
        joined: list[BatchMember] = []
        while free := self.size - len(self.members):
            found = self.joining.take(free, len(self.members))
            wanted = [member for member in found if not _ends(member)]
            for member in found:
                if _ends(member):
                    self.joining.ended(member, Stopped())
            self.members += wanted
            joined += wanted
            self.is_over = not found and not self.members
            if len(wanted) == len(found):
                break
        return joined

    def loaded(self, cost: RunCost) -> None:
        """The weights are loaded, for those that are here."""
        self._loads = {id(m): share for m, share in zip(self.members, shares(cost, self.size), strict=False)}

    def end(self, member: BatchMember, outcome: Outcome) -> None:
        """A member leaves."""
        self._leaves(member)
        self._loads.pop(id(member), None)
        self.joining.ended(member, outcome)

    def _leaves(self, member: BatchMember) -> None:
        """`member` is not run again."""
        self.members = [each for each in self.members if each is not member]

    def fail(self, outcome_of: Callable[[BatchMember], Outcome]) -> None:
        """End all members after an attempt that failed."""
        self._tell_last(RunCost())
        for member in tuple(self.members):
            self.end(member, outcome_of(member))

    def finish(self, cost: RunCost) -> None:
        """The pass is over, and has had this cost."""
        self._tell_last(cost)

    @property
    def hooks(self) -> RunHooks:
        """Hooks of the device: the pass stops when all of its members should. Each reports its own steps."""

        def preload_request() -> PreloadRequest | None:
            return next((found for m in self.members if (found := m.hooks.preload_request()) is not None), None)

        return RunHooks(lambda done, steps: None, self.should_stop, preload_request)

    def should_stop(self) -> bool:
        """Return whether all members should stop."""
        return bool(self.members) and all(member.hooks.should_stop() for member in self.members)

    def run(self, hooks: RunHooks) -> None:
        """Run the members, and those that join, until none is left. Those that are here begin again. Raises what ends
        the pass: a lack of memory, a lost device, a failure of the model; all threads have ended then."""
        self._tell_last(RunCost())
        rows: list[_Row] = []
        runs, members = self._prepared(self.members)
        while not runs:
            if not self.members and not self.admit():
                return
            runs, members = self._prepared(self.members)
        first = runs[0]
        captures = all(part.captures for part in first.parts)
        try:
            with first.run.model.running(stop_check(hooks), first.run.options, captures) as module, torch.no_grad():
                while True:
                    for found, member in zip(runs, members, strict=True):
                        row = _Row(member, found, self.on_stream, self.clock)
                        rows.append(row)
                        row.begin(module)
                    rows = self._left_out(rows)
                    runs, members = self._prepared(self.admit())
                    if runs:
                        self._tell_last(RunCost())
                        continue
                    if not rows:
                        return
                    self._step(first, module, rows)
        finally:
            for row in rows:
                row.end()

    def _prepared(self, members: Sequence[BatchMember]) -> tuple[list[ReadyRun], list[BatchMember]]:
        """Return the runs of `members`, without those that cannot be prepared: they end."""
        runs, prepared = list[ReadyRun](), list[BatchMember]()
        for member in tuple(members):
            try:
                runs.append(self.prepare(member))
                prepared.append(member)
            except Exception as error:
                if not _is_own(error):
                    raise
                release_frames(error)
                self.end(member, error)
        return runs, prepared

    def _step(self, first: ReadyRun, module: nn.Module, rows: Sequence[_Row]) -> None:
        """Compute what all rows ask for, and let each go on to its next call."""
        answers: dict[int, Tensor] = {}
        for group in _groups(rows):
            calls = [row.call for row in group if row.call is not None]
            predicted = call_as_asked(first.run.facts, _joined(calls, module, self.size))
            count = len(calls[0].x_BCHW)
            answers |= {id(row): part for row, part in zip(group, predicted.split(count), strict=False)}
        for row in rows:
            row.go_on(answers.pop(id(row)))
        self.joining.stepped()

    def _left_out(self, rows: Sequence[_Row]) -> list[_Row]:
        """Tell the outcomes of the rows that have ended; return the others. Those of the last ones wait for the cost of
        the pass."""
        left = [row for row in rows if row.call is not None]
        failed: Exception | None = None
        for row in rows:
            if row.call is None:
                row.end()
                outcome = row.outcome
                assert outcome is not None, "a row that calls nothing has ended"
                if not isinstance(outcome, Exception):
                    self._leaves(row.member)
                    self._last.append((row.member, outcome, self.clock() - row.began_at))
                elif _is_own(outcome):
                    self.end(row.member, outcome)
                else:
                    failed = outcome
        if failed is not None:  # those that are done have left: what begins again does so without them
            raise failed
        if left:
            self._tell_last(RunCost())
        return left

    def _tell_last(self, cost: RunCost) -> None:
        """Tell what waits for the cost of the pass. Each has its own load and its own part of the time."""
        last, self._last = self._last, []
        for (member, result, seconds), share in zip(last, shares(cost, self.size), strict=False):
            load = self._loads.pop(id(member), RunCost(resident=True))
            own = replace(
                load,
                run_seconds=seconds / self.size,
                streamed_bytes=share.streamed_bytes,
                ahead_bytes=share.ahead_bytes,
                peak_bytes=max(load.peak_bytes, share.peak_bytes),
                planned_bytes=max(load.planned_bytes, share.planned_bytes),
                working_bytes=share.working_bytes,
                oom_steps=share.oom_steps or load.oom_steps,
                batched=self.size,
            )
            self.joining.ended(member, (result, own))


def run_open_pass(
    joining: Joining,
    open_pass: Callable[[Joining, BatchMember], OpenPass],
    run: Callable[[OpenPass], RunCost],
    run_alone: Callable[[BatchMember], Outcome],
) -> None:
    """Run what `joining` has until it is over. `run` runs a pass to its end and returns its cost, or raises what ends
    it; `run_alone` then runs each of the members that were there, unless memory or the device failed. Raises no
    Exception."""
    is_over = False
    while not is_over and (found := _first(joining)):
        try:
            one = open_pass(joining, found[0])
        except Exception as error:
            release_frames(error)
            for member in found:
                joining.ended(member, error)
            continue
        one.members += found
        one.admit()
        try:
            one.finish(run(one))
        except Exception as error:
            release_frames(error)
            is_of_all = isinstance(error, Stopped | DoesNotFit) or not _is_own(error) or len(one.members) == 1
            one.fail(partial(_outcome, error) if is_of_all else run_alone)
        is_over = one.is_over


def _first(joining: Joining) -> list[BatchMember]:
    """Return the members that a pass begins with; none if nobody is there, and it is over."""
    while found := joining.take(1, 0):
        (member,) = found
        if not _ends(member):
            return [member]
        joining.ended(member, Stopped())
    return []


def _outcome(error: Exception, member: BatchMember) -> Outcome:
    return error


def _groups(rows: Sequence[_Row]) -> list[list[_Row]]:
    """Return the rows with calls of equal shapes, grouped."""
    found: dict[object, list[_Row]] = {}
    for row in rows:
        assert row.call is not None, "a row that waits has called"
        found.setdefault(_shapes(row.call), []).append(row)
    return list(found.values())


def _shapes(call: CallInputs) -> object:
    named = tuple((name, value.shape, value.dtype) for name, value in sorted(call.model_kwargs.items()))
    return call.x_BCHW.shape, call.context_BLD.shape, named


def _joined(calls: Sequence[CallInputs], module: nn.Module, size: int) -> CallInputs:
    """Return one call of `size` rows, for calls of equal shapes: those, and copies of the first one."""
    assert all(call.residuals is None for call in calls), "a ControlNet joins no pass"
    padded = [*calls, *[calls[0]] * (size - len(calls))]
    return CallInputs(
        module,
        torch.cat([call.x_BCHW for call in padded]),
        torch.cat([call.level_B for call in padded]),
        torch.cat([call.context_BLD for call in padded]),
        {name: torch.cat([call.model_kwargs[name] for call in padded]) for name in calls[0].model_kwargs},
    )


def _ends(member: BatchMember) -> bool:
    """Whether a member that has not begun should not begin."""
    return member.hooks.should_stop() or member.hooks.should_pause()


def _is_own(error: Exception) -> bool:
    """Whether an error concerns the row that raised it alone."""
    return exhausted_memory(error) is None and not isinstance(error, torch.AcceleratorError)
