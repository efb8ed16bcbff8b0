"""What is known of the time after a task: what is needed next, and what somebody wants kept.

Values for `pool.plan.residency.plan`; torch-free. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from modelpool.pool.specs.spec import ComponentKey


@dataclass(slots=True, init=False, unsafe_hash=True)
class Outlook:
    """What a plan may consider beside its own task.

    needed_next  components of tasks that are expected on this GPU, soonest first; each at most once
    floors       bytes of components that must stay on the GPU whatever the task needs; a task for which nothing is left
                 does not fit
    priorities   components that leave before others do (below 0) or after them (above 0), whatever else is known
    """

    needed_next: Final[tuple[ComponentKey, ...]]
    floors: Final[Mapping[ComponentKey, int]]
    priorities: Final[Mapping[ComponentKey, int]]

    def __init__(
        self,
        needed_next: tuple[ComponentKey, ...] = (),
        floors: Mapping[ComponentKey, int] | None = None,
        priorities: Mapping[ComponentKey, int] | None = None,
    ) -> None:
        self.needed_next = needed_next
        self.floors = {} if floors is None else floors
        self.priorities = {} if priorities is None else priorities


#: nothing is known
NO_OUTLOOK = Outlook()
