"""`modelpool autoscale`: which nodes a running pool would request for its waiting work now, and why."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from modelpool.actors.cli.terminal import options
from modelpool.actors.cli.terminal.options import PoolOptions
from modelpool.actors.cli.terminal.session import session_of
from modelpool.pool.values.core.errors import UnusableField, counted

if TYPE_CHECKING:
    from modelpool.scheduler.autoscaling.preview import GroupPreview, ScalingPreview

_Groups = Annotated[
    Path | None,
    typer.Option(
        "--groups",
        metavar="FILE",
        help="A configuration file whose [groups.NAME] and [autoscaling] are tried in place of the pool's.",
    ),
]


def autoscale(
    context: typer.Context, groups: _Groups = None, as_json: options.AsJson = False, pool: options.PoolName = None
) -> None:
    """Show how many nodes of each group the pool would request for its waiting work now, and why. Requests nothing.

    With --groups, also for a pool or a cluster that does not scale: what other groups of nodes would be worth.
    """
    from modelpool.actors.cli.cluster.serve import name_of_running
    from modelpool.actors.cli.terminal.screen import print_json, say, show, user_console
    from modelpool.actors.cli.terminal.tables import facts_table, rows_table
    from modelpool.actors.config.config import PoolConfig

    config = PoolConfig() if groups is None else PoolConfig.load(groups)
    tried = config.scheduler
    if groups is not None and not tried.groups:
        raise UnusableField(f"--groups: found {groups} without groups, expected tables such as [groups.a100]")
    with session_of(context).open_pool(PoolOptions(pool=pool or name_of_running())) as running:
        found = running.operator.would_request(tried.groups, tried.autoscaling)
    if as_json:
        print_json(sys.stdout, dataclasses.asdict(found))
        return
    console = user_console(sys.stdout)
    headings = ["group", "nodes", "starting", "out of use", "most", "price per hour", "now"]
    rows = [_row(group) for group in found.groups]
    show(console, rows_table(headings, rows, right=headings[1:6]))
    say(console, "")
    show(console, facts_table([("waiting", _waiting(found)), *((g.name, why) for g in found.groups for why in g.why)]))
    if found.held_back:
        say(console, f"no node is given up now: {found.held_back}")


def _row(group: GroupPreview) -> tuple[str, ...]:
    change = "nothing" if not group.change else f"request {counted(group.change, 'node')}"
    if group.change < 0:
        change = f"give up {counted(-group.change, 'node')}"
    numbers = (group.nodes, group.starting, group.cordoned, group.max_nodes)
    return (group.name, *map(str, numbers), f"{group.price_per_hour:g}", change)


def _waiting(found: ScalingPreview) -> str:
    if not found.waiting:
        return "nothing"
    end = "never end" if found.end_seconds is None else f"end in {found.end_seconds:.0f} s"
    return f"{'; '.join(level.words for level in found.waiting)}. On the nodes that exist they {end}"
