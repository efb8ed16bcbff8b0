"""What a worker was created for, and which worker of an earlier controller continues as which one. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from modelpool.pool.values.specs.spec import WorkerId


@dataclass(frozen=True, slots=True)
class WorkerOrigin:
    """What a worker was created for.

    trace   the name of the traces that it leaves for the case of its sudden end
    epoch   of the controller that created it
    kind    digest of everything that its process depends on (`actors.control.pool_plan.worker_kind`)
    """

    worker_id: WorkerId
    incarnation: int
    group: str = ""
    trace: str = ""
    epoch: int = 0
    kind: str = ""


def successor(left: Sequence[WorkerOrigin], worker_id: WorkerId, group: str) -> int | None:
    """Return the place of the worker in `left` that continues as `worker_id` of `group`: the one of that name, else the
    first of the group. None if there is none."""
    mine = [place for place, origin in enumerate(left) if origin.group == group]
    named = (place for place in mine if left[place].worker_id == worker_id)
    return next(named, mine[0] if mine else None)
