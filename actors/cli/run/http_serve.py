"""`modelpool serve`: the HTTP interfaces of a running pool, or of a pool of its own."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, cast

import typer

from modelpool.actors.cli.terminal import options
from modelpool.actors.cli.terminal.option_groups import Without, with_option_groups
from modelpool.actors.cli.terminal.options import PoolOptions
from modelpool.actors.cli.terminal.session import session_of

if TYPE_CHECKING:
    from pathlib import Path

    from modelpool.actors.config.config import PoolConfig
    from modelpool.actors.http.service.ports import HttpPool

Host = Annotated[
    str | None,
    typer.Option("--host", help="Address to listen on (default: 127.0.0.1).", metavar="ADDRESS", show_default=False),
]
Port = Annotated[
    int | None,
    typer.Option("--port", help="Port; 0 for any free one (default: 8000).", metavar="N", show_default=False),
]
Folder = Annotated[
    str | None,
    typer.Option("--out", help="Local folder for outputs (default: outputs).", metavar="DIR", show_default=False),
]


@with_option_groups
def serve(
    context: typer.Context,
    host: Host = None,
    port: Port = None,
    out: Folder = None,
    *,
    where: Annotated[PoolOptions, Without.of("allow_pickle", "config", "pool")],
    config: options.Config = None,
    pool: options.PoolName = None,
) -> None:
    """Serve a web page and the HTTP interfaces (native, OpenAI, A1111, ComfyUI) of a running pool (--pool), or of a
    pool that ends with this command. Keys and limits are in [serve] of the configuration. When a running pool
    ends, calls get 503 until the next `modelpool up`, with which the server starts again.
    """
    from modelpool.actors.cli.cluster.rejoin import wait_for_end, wait_for_next
    from modelpool.actors.cli.run.run_jobs import started
    from modelpool.actors.cli.terminal.open_pool import settings_for
    from modelpool.actors.cli.terminal.screen import say, user_console
    from modelpool.actors.graph.features.vision_graph import UNGUIDED
    from modelpool.actors.http import server
    from modelpool.actors.outputs.atomic_write import make_private_folder
    from modelpool.actors.outputs.results.outcomes import PoolLost

    # the configuration has [serve] also for a running pool, which has its own configuration otherwise
    settings = settings_for(PoolOptions(config=config)).override(host=host, port=port)
    server.check_packages()
    folder = served_folder(out, settings)
    where = replace(where, config=None if pool else config, pool=pool)
    warnings.filterwarnings("ignore", UNGUIDED)  # answers have it, but for clients that expect it
    console, environment = user_console(), dict(os.environ)
    lost: list[PoolLost] = []
    ended: list[str] = []
    with server.listen(settings.serve) as listening, started(session_of(context), where) as opened:
        with contextlib.suppress(OSError):  # the pool names the problem of the folder
            make_private_folder(folder)

        def ready(address: str) -> None:
            say(console, f"listening on {address}; outputs: {folder}", "bold")
            say(console, f"Describe it:  {address}/docs   Ctrl-C ends it", "dim")

        def wait_for_next_pool() -> None:
            reason = wait_for_end(opened)
            try:
                wait_for_next(pool or "", reason, console)
            except PoolLost as gone:
                lost.append(gone)
            ended.append(reason)

        wait = None if pool is None else wait_for_next_pool
        server.serve(cast("HttpPool", opened), settings.serve, folder.absolute(), listening, ready, wait)
    if lost:
        raise lost[0]
    if ended:  # all of its state is on disk, and a new process knows nothing of the Ray that has ended
        say(console, f"pool {pool!r} runs again; the server starts again")
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def served_folder(out: str | None, settings: PoolConfig) -> Path:
    """Return the folder of outputs and uploaded images: `out`, else the one that is configured. Raises UnusableField
    for an object store, from which this server cannot read what it serves.
    """
    from modelpool.actors.cli.terminal.open_pool import OUTPUT_FOLDER
    from modelpool.actors.config.output_address import local_folder

    if out is not None:
        return local_folder(out, "--out")
    if settings.serve.folder is not None:
        return settings.serve.folder
    if settings.output.folder is None:
        return OUTPUT_FOLDER
    return local_folder(settings.output.folder, "[output] folder")
