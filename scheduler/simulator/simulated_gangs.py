"""Runs that several simulated workers share: when they begin, how long they take, and the steps that are left when one
is lost.

Every member loads its own weights; the run begins when the slowest one has them and all have found each other. Then all
compute each step together, for the published times (`scheduler.model.gang_times`) or others that are passed in, and
wait for the slowest one's weights that stream, from its host or from the GPUs of others. When a
member is lost, or fails, the others notice `NOTICE_SECONDS` later and end with the state of the last complete step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from modelpool.pool.values.specs.spec import RunCost, TaskSpec
from modelpool.scheduler.model.gang_times import FORMING_SECONDS, prior_seconds
from modelpool.scheduler.model.messages import GangMember, RunInGang
from modelpool.scheduler.simulator.machines import Machine, SimulatedWork

#: task, seconds of its run on one GPU, number of GPUs, part of its steps -> seconds of the run
GangSeconds: TypeAlias = Callable[[TaskSpec, float, int, float], float]
#: until the other members notice the loss of one
NOTICE_SECONDS = 0.5


@dataclass(slots=True)
class GangPart:
    """One member's part of a run: its command, its machine, and what it loads."""

    command: RunInGang
    machine: Machine
    work: SimulatedWork


@dataclass(slots=True)
class GangAssembly:
    """The commands of one gang, until all of them are there."""

    parts: list[GangPart] = field(default_factory=list)


class SimulatedGangs:
    """The gangs of which not all commands have been executed, and the times of shared runs."""

    def __init__(self, seconds: GangSeconds = prior_seconds) -> None:
        self._seconds = seconds
        self._assembling: dict[str, GangAssembly] = {}

    def join(self, part: GangPart) -> Sequence[GangPart]:
        """Add a part; return all parts of its gang, in the order of their ranks, if it was the last one."""
        command = part.command
        assembly = self._assembling.setdefault(command.gang_id, GangAssembly())
        assert len(assembly.parts) == command.rank, f"{command}: its rank comes out of order"
        assembly.parts.append(part)
        if len(assembly.parts) < len(command.members):
            return ()
        del self._assembling[command.gang_id]
        return assembly.parts

    def costs(self, parts: Sequence[GangPart], task: TaskSpec, remaining: float) -> list[RunCost]:
        """Return the cost of each part of a run that begins now; `task` is the rest of it, the fraction `remaining` of
        its steps."""
        met_seconds = max(part.work.cost.load_seconds for part in parts) + FORMING_SECONDS
        met_seconds += max(part.work.share_seconds for part in parts)
        alone_seconds = max(part.work.computing_seconds for part in parts)
        run_seconds = self._seconds(task, alone_seconds, len(parts), remaining)
        run_seconds += remaining * max(part.work.moving_seconds for part in parts)
        costs = []
        for part in parts:
            cost = part.work.cost
            meeting_seconds = met_seconds - cost.load_seconds
            costs.append(
                replace(
                    cost,
                    run_seconds=meeting_seconds + run_seconds,
                    meeting_seconds=meeting_seconds,
                    streamed_bytes=int(remaining * cost.streamed_bytes),
                    exchanged_bytes=int(remaining * cost.exchanged_bytes),
                )
            )
        return costs


def members_besides(members: Sequence[GangMember], machine: Machine) -> list[GangMember]:
    """Return the other members of the gang of a machine."""
    return [member for member in members if member.worker_id != machine.gpu.worker_id]
