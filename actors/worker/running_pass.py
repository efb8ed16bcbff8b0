"""`RunningPass`: a pass that runs, or is about to: who joins it, and who has left it.

Other threads let runs join and wait for ends; the thread of the engine takes the runs and reports them
(`pool.engine.open_pass.Joining`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Protocol, TypeAlias

from modelpool.actors.worker.file_verifier import FilesInUse
from modelpool.actors.worker.wire.messages import CallId, EndsWanted, RunRequest
from modelpool.actors.worker.worker_lease import WorkerLease
from modelpool.pool.values.core.stage_params import BatchMember, Outcome, Result
from modelpool.pool.values.specs.spec import ComponentKey, TaskReport

#: a run with its inputs
Call: TypeAlias = tuple[RunRequest, tuple[Result, ...]]
#: the report of a run, and its result
End: TypeAlias = tuple[TaskReport, Result | None]


class PassIsOver(RuntimeError):
    """Runs that should begin a pass that is over. The message has its number."""


class Members(Protocol):
    """Runs passes, prepares runs for them, and reports these."""

    def run(self, running: RunningPass, needed_next: tuple[ComponentKey, ...]) -> None:
        """Run a pass to its end, by the thread of the engine, which prepares and reports the runs, too."""

    def prepare(self, request: RunRequest, inputs: tuple[Result, ...], joins: bool) -> tuple[BatchMember, FilesInUse]:
        """Return the member of a run, which begins a pass or joins others. May raise anything."""

    def report(self, request: RunRequest, member: BatchMember | None, outcome: Outcome, in_use: FilesInUse) -> End:
        """Return the end of a run; of one that could not be prepared, there is no `member`."""

    def stepped(self) -> None:
        """All runs of the pass have done a step."""


class RunningPass:
    """Runs that wait to join, those that are in the pass, and the ends that may not have arrived yet. It is over when
    nobody is in it and nobody waits; nobody may join it then."""

    def __init__(self, members: Members) -> None:
        self._made_by = members
        self._changed = threading.Condition()
        self._waiting: deque[Call] = deque()
        self._ends: deque[End] = deque()
        #: ends that were told before those
        self._told = 0
        self._is_over = False
        #: all has ended
        self._is_closed = False
        #: those in the pass, by identity; used by the thread of the engine alone
        self._members: dict[int, tuple[RunRequest, BatchMember, FilesInUse]] = {}

    def join(self, request: RunRequest, inputs: tuple[Result, ...]) -> bool:
        """Let a run join at the next step; False if the pass is over."""
        with self._changed:
            if not self._is_over:
                self._waiting.append((request, inputs))
            return not self._is_over

    def ends(self, told: int, most: int, waits: bool) -> Sequence[End]:
        """Return at most `most` ends after the first `told`, which are forgotten. With `waits`, it waits for one, and
        returns none if none follows."""
        with self._changed:
            while self._ends and self._told < told:
                self._ends.popleft()
                self._told += 1
            if waits:
                self._changed.wait_for(lambda: self._ends or self._is_closed)
            return tuple(islice(self._ends, most))

    def close(self) -> None:
        """It is over, and no end follows. Idempotent."""
        with self._changed:
            self._is_over = self._is_closed = True
            self._changed.notify_all()

    def take(self, most: int, going_on: int) -> Sequence[BatchMember]:
        """Return the members that join now, without those that could not be prepared, which have ended then."""
        found: list[BatchMember] = []
        while len(found) < most and (call := self._next_call(going_on + len(found))) is not None:
            request, inputs = call
            try:
                member, in_use = self._made_by.prepare(request, inputs, bool(going_on + len(found)))
            except (Exception, SystemExit) as raised:
                failed = raised if isinstance(raised, Exception) else RuntimeError(f"sys.exit({raised.code!r})")
                self._tell(self._made_by.report(request, None, failed, FilesInUse()))
                continue
            self._members[id(member)] = request, member, in_use
            found.append(member)
        return found

    def ended(self, member: BatchMember, outcome: Outcome) -> None:
        """A member has left."""
        request, _, in_use = self._members.pop(id(member))
        self._tell(self._made_by.report(request, member, outcome, in_use))

    def stepped(self) -> None:
        """All members have done a step."""
        self._made_by.stepped()

    def _next_call(self, going_on: int) -> Call | None:
        with self._changed:
            if self._waiting:
                return self._waiting.popleft()
            self._is_over = self._is_closed or not going_on
            return None

    def _tell(self, end: End) -> None:
        with self._changed:
            self._ends.append(end)
            self._changed.notify_all()


class Passes:
    """The passes of a worker, one at a time. A pass has a number, higher than those before it."""

    def __init__(self, lease: WorkerLease, members: Members) -> None:
        self._lease = lease
        self._members = members
        self._lock = threading.Lock()
        #: those with ends that nobody was told of, or that go on, by epoch and number
        self._known: dict[tuple[int, int], RunningPass] = {}
        #: the last one that has begun, or that somebody asked for
        self._last = (0, 0)
        #: one that has not begun
        self._expected: RunningPass | None = None

    def run(self, call: CallId, requests: Sequence[RunRequest], inputs: Sequence[Result]) -> None:
        """Run a pass that begins with these requests, until nobody is in it: others may `join` it at each step, and
        `ends` has their ends. `inputs` are the inputs of the first request, then of the second, and so on. Raises
        OlderEpoch, and PassIsOver if nobody would hear of their ends."""
        rest = iter(inputs)
        self._lease.check(call.epoch)
        running = self._find(call)
        with self._lock:
            if self._expected is running:
                self._expected = None
        for request in requests:
            if not running.join(request, tuple(islice(rest, input_count(request)))):
                raise PassIsOver(f"pass {call.number}: found one that is over, expected one that has not begun")
        try:
            self._members.run(running, requests[0].needed_next)
        finally:
            running.close()

    def join(self, call: CallId, request: RunRequest, inputs: tuple[Result, ...]) -> bool:
        """Let a run join a pass at its next step. Returns at once, on any thread: False if the pass is over. It need
        not have begun. Raises OlderEpoch."""
        self._lease.check(call.epoch)
        return self._find(call).join(request, inputs)

    def ends(self, wanted: EndsWanted) -> Sequence[End]:
        """Return ends of runs of a pass, which need not have begun: none after waiting if it is over and all were told.
        On any thread. Raises OlderEpoch."""
        self._lease.check(wanted.call.epoch)
        found = self._find(wanted.call).ends(wanted.told, wanted.most, wanted.waits)
        if wanted.waits and not found:
            with self._lock:
                self._known.pop(_key(wanted.call), None)
        return found

    def close(self) -> None:
        """No run joins a pass any more, and nobody waits for an end."""
        with self._lock:
            for known in self._known.values():
                known.close()
            self._known = {}

    def _find(self, call: CallId) -> RunningPass:
        """Return the pass with this number; an unknown one is new, or was forgotten and is over. One that is expected
        does not come any more if there is a new one: what should have begun it has failed."""
        key = _key(call)
        with self._lock:
            found = self._known.get(key)
            if found is None:
                found = RunningPass(self._members)
                if key <= self._last:
                    found.close()
                    return found
                if self._expected is not None:
                    self._expected.close()
                self._last, self._known[key], self._expected = key, found, found
            return found


def _key(call: CallId) -> tuple[int, int]:
    """Return the sort key of passes: the passes of earlier controllers come first."""
    return call.epoch, call.number


def input_count(request: RunRequest) -> int:
    """Return the number of inputs that travel with a request."""
    return len(request.task.needs) - len([run for run in request.own if run]) + request.resume
