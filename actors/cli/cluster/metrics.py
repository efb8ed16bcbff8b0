"""`modelpool metrics`: serves the metrics of a running pool to Prometheus, or prints them."""

from __future__ import annotations

import contextlib
import sys
from typing import Annotated

import typer

from modelpool.actors.cli.terminal import options
from modelpool.actors.cli.terminal.options import PoolOptions
from modelpool.actors.cli.terminal.session import session_of
from modelpool.pool.values.core.errors import unusable_field

#: not registered by another exporter in Prometheus' list of default ports
DEFAULT_PORT = 9955
MOST_PORT = 65535


def metrics(
    context: typer.Context,
    pool: options.PoolName = None,
    port: Annotated[
        int, typer.Option("--port", help="Port on loopback; 0 chooses a free one.", metavar="N")
    ] = DEFAULT_PORT,
    once: Annotated[bool, typer.Option("--once", help="Print the metrics and exit.", metavar=" ")] = False,
) -> None:
    """Serve the metrics of a running pool at http://127.0.0.1:PORT/metrics for Prometheus, until Ctrl-C. When the pool
    ends, answers are 503 until the next `modelpool up`.
    """
    from modelpool.actors.cli.cluster.rejoin import Rejoining
    from modelpool.actors.cli.cluster.serve import name_of_running
    from modelpool.actors.cli.terminal.screen import say, user_console
    from modelpool.actors.control.metrics.exposition import metrics_text
    from modelpool.actors.control.metrics.metrics_server import MetricsServer

    if not 0 <= port <= MOST_PORT:
        raise unusable_field("--port", port, f"a number from 0 to {MOST_PORT}")
    metrics_text(())  # whether the extra is installed
    called = pool or name_of_running()
    if once:
        with session_of(context).open_pool(PoolOptions(pool=called)) as running:
            sys.stdout.write(metrics_text(running.metrics()).decode())
        return
    console = user_console()
    with (
        contextlib.closing(Rejoining(session_of(context), called, console)) as joined,
        MetricsServer(lambda: metrics_text(joined.pool.metrics()), port) as server,
    ):
        say(console, f"serving {server.url}; Ctrl-C ends it, the pool keeps running")
        with contextlib.suppress(KeyboardInterrupt):
            joined.keep_joined()
