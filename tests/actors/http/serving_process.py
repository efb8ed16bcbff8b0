"""A process that serves a pool of fake engines until a signal, as `modelpool serve` does: for tests of its end.

`python -m tests.actors.http.serving_process FOLDER [journal]` prints its address, and `ended` when the pool is closed.
With `journal` it is the pool of `test_job_service.Service`, with jobs that wait for a controller.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from modelpool.actors.cli.terminal.interrupts import StoppableCommand
from modelpool.actors.client.client import ModelPool
from modelpool.actors.config.serve_section import ServeSection
from modelpool.actors.http.server import listen, serve
from modelpool.actors.outputs.results.outcomes import PoolLost
from modelpool.pool.catalog.registry.listings import FileNames
from tests.actors.control.detached.test_job_service import Service
from tests.actors.http.fake_page_pool import open_page_pool

#: a prompt with it keeps the pool from answering until it is closed
BUSY = "BUSY"
UPSCALER = "4x"


class EndlessStage:
    """An upscaling that does not end."""

    def watch(self, ended: Callable[[], None]) -> None:
        pass

    def cancel(self) -> None:
        pass

    def result(self, timeout: float | None = None) -> Any:
        raise AssertionError("it has not ended")


class BusyPool:
    """A pool that answers some calls only when it is closed, as a lost controller or a busy catalog does."""

    def __init__(self, pool: ModelPool) -> None:
        self._pool = pool
        self._closed = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def submit(self, requests: Any, **terms: Any) -> Any:
        requests = list(requests)
        if any(BUSY in request.prompt for request in requests):
            self._wait()
        return self._pool.submit(requests, **terms)

    def history(self, job: str) -> Any:
        return self._wait()

    def file_names(self) -> FileNames:
        return FileNames(upscalers=(UPSCALER,))

    def upscale(self, image: object, upscale: object, **_: Any) -> EndlessStage:
        return EndlessStage()

    def _wait(self) -> Any:
        self._closed.wait()
        raise PoolLost("the pool was closed")

    def close(self) -> None:
        self._closed.set()
        self._pool.close()


def main(folder: Path, has_journal: bool) -> None:
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    settings = ServeSection(port=0)
    pool: Any
    if has_journal:
        service = Service(folder)
        service.keep_jobs_waiting()
        pool, folder = service.pool, service.out
    else:
        pool = BusyPool(open_page_pool(output=folder / "pool"))
    try:
        with StoppableCommand(), listen(settings) as listening:
            serve(pool, settings, folder, listening, lambda address: print(address, flush=True))
    except KeyboardInterrupt:
        pass
    finally:
        pool.close()
    print("ended", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] == ["journal"])
