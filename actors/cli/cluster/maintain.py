"""`modelpool cordon`, `uncordon`, `drain` and `restart`: take parts of a running pool out of use, and back."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from modelpool.actors.cli.terminal import options
from modelpool.actors.cli.terminal.options import PoolOptions
from modelpool.actors.cli.terminal.session import session_of
from modelpool.actors.control.operator_orders import DRAIN_SECONDS, OperatorOrder, Order, OrderTaken
from modelpool.pool.values.core.errors import unusable_field

if TYPE_CHECKING:
    from modelpool.actors.cli.terminal.command_ports import Pool
    from modelpool.actors.control.status_values import PoolStatus

#: interval of looking whether an order has been carried out
POLL_SECONDS = 0.5
#: how much longer than its deadline an order is waited for
GRACE_SECONDS = 30.0
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}

_Place = Annotated[
    str, typer.Argument(metavar="NODE|WORKER", help="A node, by name, address or the start of its id; or a worker.")
]
_Node = Annotated[str, typer.Argument(metavar="NODE", help="A node, by name, address or the start of its id.")]
_Worker = Annotated[str, typer.Argument(metavar="WORKER", help="The id of a worker, as `modelpool status` shows it.")]
_Deadline = Annotated[
    str,
    typer.Option(
        "--deadline",
        metavar="TIME",
        help="By then, runs have ended or moved: 90, 90s, 15m, 2h. What has not is given up, and runs again.",
    ),
]
_Force = Annotated[
    bool, typer.Option("--force", help="In spite of disruption limits ([maintenance]) and maintenance windows.")
]
_Wait = Annotated[bool, typer.Option("--wait", help="Return when it has been done.")]


def cordon(
    context: typer.Context, place: _Place, as_json: options.AsJson = False, pool: options.PoolName = None
) -> None:
    """Place nothing new on a node or a worker. What runs there continues, and weights stay.

    The pool remembers it beyond its controller, until `modelpool uncordon`, or until the node leaves the cluster.
    """
    _order(context, OperatorOrder(Order.CORDON, place), as_json, pool)


def uncordon(
    context: typer.Context, place: _Place, as_json: options.AsJson = False, pool: options.PoolName = None
) -> None:
    """Use a cordoned node or worker again, or a node that was drained: its workers start again."""
    _order(context, OperatorOrder(Order.UNCORDON, place), as_json, pool)


def drain(
    context: typer.Context,
    node: _Node,
    deadline: _Deadline = f"{DRAIN_SECONDS:.0f}s",
    force: _Force = False,
    wait: _Wait = False,
    as_json: options.AsJson = False,
    pool: options.PoolName = None,
) -> None:
    """Cordon a node, let its runs end or move to other workers, and end its workers.

    Sampling runs that would not end by the deadline stop with their state, and continue elsewhere. No job is lost.
    """
    order = OperatorOrder(Order.DRAIN, node, seconds_of(deadline), force)
    _order(context, order, as_json, pool, wait)


def restart(
    context: typer.Context,
    worker: _Worker,
    deadline: _Deadline = f"{DRAIN_SECONDS:.0f}s",
    force: _Force = False,
    wait: _Wait = False,
    as_json: options.AsJson = False,
    pool: options.PoolName = None,
) -> None:
    """Replace the process of a worker, once its run has ended or moved. No job is lost; its weights load again."""
    order = OperatorOrder(Order.RESTART, worker, seconds_of(deadline), force)
    _order(context, order, as_json, pool, wait)


def seconds_of(text: str) -> float:
    """Return a time span such as 90, 90s, 15m or 2h in seconds. Raises UnusableField."""
    number, unit = (text[:-1], text[-1]) if text[-1:] in _UNITS else (text, "s")
    try:
        seconds = float(number) * _UNITS[unit]
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds < float("inf"):
        raise unusable_field("--deadline", text, "a time span such as 90s, 15m or 2h")
    return seconds


def _order(context: typer.Context, order: OperatorOrder, as_json: bool, pool: str | None, wait: bool = False) -> None:
    from modelpool.actors.cli.cluster.serve import name_of_running
    from modelpool.actors.cli.terminal.screen import print_json, say, user_console

    with session_of(context).open_pool(PoolOptions(pool=pool or name_of_running())) as running:
        before = running.status()
        taken = running.operator.order(order)
        if as_json:
            print_json(sys.stdout, {**dataclasses.asdict(taken), "order": taken.order.value})
        else:
            say(user_console(sys.stdout), taken.words)
            for warning in taken.warnings:
                say(user_console(), f"modelpool: {warning}", "yellow")
        seconds = order.seconds + GRACE_SECONDS
        if wait and (waiting := _not_done(running, taken, before, seconds)):
            states = ", ".join(f"{name} is {state}" for name, state in waiting.items())
            problem = f"{taken.order.value} {taken.place} is not done after {seconds:.0f} s: {states}"
            say(user_console(), f"modelpool: {problem}; it goes on, see `modelpool status`", "yellow")
            raise typer.Exit(1)


def _not_done(running: Pool, taken: OrderTaken, before: PoolStatus, seconds: float) -> dict[str, str]:
    """Wait until an order has been carried out, at most `seconds`; return the states of the workers for which it has
    not been."""
    import time

    numbers = {str(worker.id): worker.incarnation for worker in before.workers}
    until = time.monotonic() + seconds
    while True:
        workers = {str(worker.id): worker for worker in running.status().workers if str(worker.id) in taken.workers}
        waiting = {}
        for name, worker in workers.items():
            is_up = worker.state in ("idle", "busy")
            is_new = is_up and worker.incarnation > numbers.get(name, 0)
            if not is_new if taken.order is Order.RESTART else is_up:
                waiting[name] = worker.state.replace("_", " ")
        if not waiting or time.monotonic() >= until:
            return waiting
        time.sleep(POLL_SECONDS)
