"""`serve`: runs the application on a port with uvicorn, until a stop signal."""

from __future__ import annotations

import gc
import math
import platform
import sys
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from modelpool.actors.config.serve_section import ServeSection
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.install_hint import install_command

if TYPE_CHECKING:
    import socket

    import uvicorn
    from starlette.types import ASGIApp

    from modelpool.actors.http.service.limit_log import LimitLog
    from modelpool.actors.http.service.ports import HttpPool

#: packages of the extra `serve`, by the names under which they are imported
PACKAGES = ("fastapi", "uvicorn", "python_multipart", "websockets", "httpx2")
#: how long a thread that encodes an image keeps Python's interpreter while the event loop waits for it. Python's own
#: 5 ms are waited for several times in one call
SWITCH_SECONDS = 0.001
#: blocks of this size and above are returned to the system when they are freed
MAPPED_BYTES = 1 << 17
#: a message of a web socket's client, which says nothing but its features
MOST_MESSAGE_BYTES = 1 << 16
#: heaps that the threads of a server share
MOST_HEAPS = 2
#: options of glibc's mallopt
_MALLOC_TRIM_THRESHOLD, _MALLOC_MMAP_THRESHOLD, _MALLOC_ARENA_MAX = -1, -3, -8


def check_packages() -> None:
    """Raise UserError if a package of the extra is missing."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise UserError(f"`modelpool serve` needs {', '.join(missing)}; install them: {install_command('serve')}")


def listen(settings: ServeSection) -> socket.socket:
    """Open the port of `settings`. Raises UserError if that is not possible, or not permitted."""
    import socket

    settings.check_exposure()
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((settings.host, settings.port))
    except OSError as problem:
        listening.close()
        raise UserError(f"{settings.host}:{settings.port}: cannot listen there ({problem.strerror})") from None
    return listening


def server_config(app: ASGIApp, settings: ServeSection, log: LimitLog) -> uvicorn.Config:
    """Return how uvicorn serves `app`: with limits of connections, in number and time. Raises the number of files that
    this process may open."""
    import uvicorn

    from modelpool.actors.http.ending_server import SHUTDOWN_SECONDS
    from modelpool.actors.http.service.connections import ConnectionLimits, Connections, raised_open_files
    from modelpool.actors.http.service.watched_protocols import watched_protocols

    calls, sockets = watched_protocols(Connections(ConnectionLimits.of(settings, raised_open_files()), log))
    return uvicorn.Config(
        app,
        http=calls,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        ws=sockets,
        ws_max_size=MOST_MESSAGE_BYTES,
        server_header=False,
        timeout_keep_alive=math.ceil(settings.idle_seconds),
    )


def return_freed_memory() -> None:
    """Have the allocator of this process return large blocks to the system when they are freed. Does nothing where the
    C library is not glibc.

    By default, glibc moves its threshold up to the largest block that was freed, so that the texts of large bodies stay
    in the heaps of the threads that parsed them.
    """
    import ctypes

    if platform.libc_ver()[0] == "glibc":
        set_option = ctypes.CDLL(None).mallopt
        set_option(_MALLOC_MMAP_THRESHOLD, MAPPED_BYTES)
        set_option(_MALLOC_TRIM_THRESHOLD, MAPPED_BYTES)
        set_option(_MALLOC_ARENA_MAX, MOST_HEAPS)


def serve(
    pool: HttpPool,
    settings: ServeSection,
    folder: Path,
    listening: socket.socket,
    on_ready: Callable[[str], None],
    wait_for_end: Callable[[], object] | None = None,
) -> None:
    """Answer calls until Ctrl-C or SIGTERM, or until `wait_for_end` returns, which a thread of its own calls; then end
    open calls. `on_ready` gets the address. Changes when the threads
    of this process switch, what its garbage collector looks at, when its allocator returns memory, and how many files
    it may open.
    """
    from modelpool.actors.http.application import application
    from modelpool.actors.http.ending_server import EndingServer
    from modelpool.actors.http.service.limit_log import LimitLog

    log = LimitLog()
    config = server_config(application(pool, settings, folder, limits=log), settings, log)
    config.load()
    sys.setswitchinterval(SWITCH_SECONDS)
    return_freed_memory()
    # a collection of everything that is imported would stop the event loop for 80 ms
    gc.collect()
    gc.freeze()
    host, port = listening.getsockname()[:2]
    listening.listen(config.backlog)  # who reads the address may call at once
    on_ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")
    server = EndingServer(config)

    def end_in_time(wait: Callable[[], object]) -> None:
        try:
            wait()
        finally:
            server.should_exit = True

    if wait_for_end is not None:
        threading.Thread(target=end_in_time, args=(wait_for_end,), name="wait for the pool's end", daemon=True).start()
    server.run(sockets=[listening])
