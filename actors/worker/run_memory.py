"""`RunMemory`: the last runs of a worker, from which its next controller learns how long runs take.

What a controller has learned is lost with it. The workers that it leaves have measured it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import replace

from modelpool.pool.values.specs.spec import ComponentKey, PastRun, RunCost, Stage, TaskSpec

#: kinds of run that are remembered, and runs of each: a median of three passes over one that is wrong
MOST_KINDS, MOST_RUNS = 32, 3

_Kind = tuple[Stage, tuple[ComponentKey, ...], int, int]


class RunMemory:
    """The memory of one worker, for the thread that runs."""

    def __init__(self) -> None:
        #: by stage, components, magnitude of the activations, and size of the batch; the latest kind last
        self._runs: OrderedDict[_Kind, deque[PastRun]] = OrderedDict()

    def note(self, task: TaskSpec, cost: RunCost) -> None:
        """Remember a run that succeeded."""
        components = tuple([use.component for use in task.uses])
        kind = (task.stage, components, task.activation_bytes.bit_length(), cost.batched)
        runs = self._runs.setdefault(kind, deque(maxlen=MOST_RUNS))
        self._runs.move_to_end(kind)
        runs.append(PastRun(task, cost))
        if len(self._runs) > MOST_KINDS:
            self._runs.popitem(last=False)

    def runs(self) -> tuple[PastRun, ...]:
        """Return the remembered runs, without what only the tasks themselves need."""
        return tuple(
            replace(past, task=replace(past.task, needs=(), divisions=(), together="", input_names=()))
            for runs in self._runs.values()
            for past in runs
        )
