"""One real pool in this process (real engines on the CPU, no Ray) and one server for all tests of a module."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from modelpool import ModelPool
from modelpool.actors.config.config import PoolConfig
from modelpool.actors.config.serve_section import ServeSection
from modelpool.actors.http.application import application
from modelpool.actors.http.ending_server import EndingServer
from modelpool.actors.http.server import listen, server_config
from modelpool.actors.http.service.limit_log import LimitLog
from modelpool.actors.http.service.ports import HttpPool
from tests.actors.loop_connection import open_real_pool

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "configs" / "laptop.toml"


@contextmanager
def served(pool: HttpPool, folder: Path, port: int = 0, **settings: object) -> Iterator[str]:
    """The address of a server in a thread of this process, on a free port of loopback or on `port`."""
    section = ServeSection(port=port, **settings)
    listening = listen(section)
    log = LimitLog()
    config = server_config(application(pool, section, folder, limits=log), section, log)
    server = EndingServer(config)
    ready = threading.Event()
    startup = server.startup

    async def notified(sockets: list[socket.socket] | None = None) -> None:
        await startup(sockets)
        ready.set()

    server.startup = notified  # type: ignore[method-assign]
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        assert ready.wait(60)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


@pytest.fixture(scope="session")
def real_pool() -> Iterator[ModelPool]:
    with open_real_pool(PoolConfig.load(CONFIG).override(device="cpu", workers=1)) as opened:
        yield opened


@pytest.fixture(scope="session")
def server(real_pool: ModelPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(real_pool, tmp_path_factory.mktemp("outputs"), webhook_secret="s" * 32) as address:
        yield address


Eventually = Callable[[Callable[[], object]], None]
