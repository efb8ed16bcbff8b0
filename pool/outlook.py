"""What is known of the time after a task: what is needed next, and what somebody wants kept.

Values for `pool.residency.plan`; torch-free. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pool.spec import ComponentKey


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a plan may consider beside its own task.

    needed_next  components of tasks that are expected on this GPU, soonest first; each at most once
    floors       bytes of components that must stay on the GPU whatever the task needs; a task for which nothing is left
                 does not fit
    priorities   components that leave before others do (below 0) or after them (above 0), whatever else is known
    """

    needed_next: tuple[ComponentKey, ...] = ()
    floors: Mapping[ComponentKey, int] = field(default_factory=dict)
    priorities: Mapping[ComponentKey, int] = field(default_factory=dict)


#: nothing is known
NO_OUTLOOK = Outlook()
