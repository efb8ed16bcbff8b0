"""What an operator wants of a running pool, as values: cordon, uncordon, drain, restart. Imports almost nothing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

#: by then the runs of a node that is drained, or of a worker that is restarted, have ended or moved
DRAIN_SECONDS = 600.0
#: most seconds of an order
MOST_ORDER_SECONDS = 30 * 86_400.0


class Order(Enum):
    """The kinds of orders."""

    CORDON = "cordon"  #: nothing new is placed there; what runs continues, and weights stay
    UNCORDON = "uncordon"  #: withdraws a cordon or a drain
    DRAIN = "drain"  #: cordons a node; its runs end or move, then its workers end
    RESTART = "restart"  #: a worker's run ends or moves, then a new process takes its place


@dataclass(frozen=True, slots=True)
class OperatorOrder:
    """One order.

    place      a node, by name, address or a part of its id from the start; or a worker, by id
    seconds    until runs there must have ended, for a drain or a restart
    is_forced  carry it out in spite of disruption limits and maintenance windows
    """

    order: Order
    place: str
    seconds: float = DRAIN_SECONDS
    is_forced: bool = False


@dataclass(frozen=True, slots=True)
class OrderTaken:
    """An order that is being carried out.

    place     display name of the node, or the id of the worker
    is_node   whether it is a node
    workers   the workers that it concerns
    warnings  what the operator should know
    """

    order: Order
    place: str
    is_node: bool
    workers: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """What happens now, as a sentence."""
        where = f"{'node' if self.is_node else 'worker'} {self.place}"
        whose = f" ({', '.join(self.workers)})" if self.is_node and self.workers else ""
        match self.order:
            case Order.CORDON:
                return f"{where}{whose} is cordoned: nothing new is placed there; what runs continues, and weights stay"
            case Order.UNCORDON:
                return f"{where}{whose} is uncordoned: it takes tasks again"
            case Order.DRAIN:
                return f"{where}{whose} is drained: its runs end or move to other workers, then its workers end"
            case Order.RESTART:
                return f"{where} is restarted: its run ends or moves, then a new process takes its place"
