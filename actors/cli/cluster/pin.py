"""`modelpool pin` and `unpin`: keep models on the GPUs of a running pool."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from modelpool.actors.cli.terminal import options
from modelpool.actors.cli.terminal.options import PoolOptions
from modelpool.actors.cli.terminal.session import session_of

if TYPE_CHECKING:
    from modelpool.actors.control.status import PinnedModel

_Models = Annotated[
    list[str] | None, typer.Argument(metavar="MODEL...", help="Names of models, as in --model.", show_default=False)
]
_Some = Annotated[list[str], typer.Argument(metavar="MODEL...", help="Names of pinned models.")]
_Replicas = Annotated[
    int, typer.Option("--replicas", "-r", help="Number of GPUs that keep each model.", metavar="N", min=1)
]


def pin(
    context: typer.Context,
    models: _Models = None,
    replicas: _Replicas = 1,
    as_json: options.AsJson = False,
    pool: options.PoolName = None,
) -> None:
    """Keep models on GPUs: idle GPUs load their weights, and evict them last.

    Without MODEL, shows the pinned models. Pins end with the pool; `pin` in [models] of the configuration sets the pins
    of its start.
    """
    from modelpool.actors.cli.cluster.serve import name_of_running

    with session_of(context).open_pool(PoolOptions(pool=pool or name_of_running())) as running:
        found = running.pin(*models, replicas=replicas) if models else running.status().pins
    _show(found, as_json)


def unpin(
    context: typer.Context, models: _Some, as_json: options.AsJson = False, pool: options.PoolName = None
) -> None:
    """Let pinned models be evicted as any others. Shows the models that are still pinned."""
    from modelpool.actors.cli.cluster.serve import name_of_running

    with session_of(context).open_pool(PoolOptions(pool=pool or name_of_running())) as running:
        found = running.unpin(*models)
    _show(found, as_json)


def _show(pins: Sequence[PinnedModel], as_json: bool) -> None:
    from modelpool.actors.cli.terminal.screen import print_json, say, show, user_console
    from modelpool.actors.cli.terminal.tables import facts_table

    if as_json:
        for pinned in pins:
            print_json(sys.stdout, dataclasses.asdict(pinned))
        return
    console = user_console(sys.stdout)
    if pins:
        show(console, facts_table([(pinned.model, pinned.words) for pinned in pins]))
    else:
        say(console, "no model is pinned")
