"""A pool that outlives the command that started it: `modelpool up` and `modelpool down`.

The daemon is a process of its own that owns Ray (unless it joined a cluster) and the controller, and waits. A run file
says where it is; other programs connect to it. Run as a module it reads its configuration from standard input.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import psutil

from modelpool.actors.control.controller import Controller
from modelpool.actors.ray.code_folder import code_path
from modelpool.actors.ray.run_file import RunningPool, process_of, remove_run_file, running_pool, write_run_file
from modelpool.actors.ray.state_folder import state_folder
from modelpool.actors.results.outcomes import PoolLost
from modelpool.actors.settings.config import PoolConfig
from modelpool.pool.core.errors import UserError

if TYPE_CHECKING:
    from modelpool.actors.api.opening import OpenedPool

#: how often the daemon looks whether its controller is alive
HEALTH_SECONDS = 5.0
_READY = "ready"


def start_in_background(config: PoolConfig) -> RunningPool:
    """Start a daemon for `config` and wait until its controller answers.

    Raises UserError with what the daemon says is wrong, or when a pool of that name runs already.
    """
    name = config.cluster.name
    if (known := running_pool(name)) is not None:
        raise UserError(f"a pool called {name!r} runs already (process {known.pid}); end it with `modelpool down`")
    log = _log_of(name)
    hear, say = os.pipe()
    with log.open("wb") as output, os.fdopen(hear) as answer:
        daemon = subprocess.Popen(
            [sys.executable, "-P", "-m", "modelpool.actors.cli.daemon", "--ready-fd", str(say)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            pass_fds=(say,),
            start_new_session=True,
            cwd="/",
            env={**os.environ, "PYTHONPATH": code_path()},
        )
        os.close(say)
        assert daemon.stdin is not None, "a pipe was asked for"
        daemon.stdin.write(config.model_dump_json().encode())
        daemon.stdin.close()
        said = answer.read()  # ends with the daemon's word, or with the daemon
    if said != _READY:
        daemon.wait()
        raise UserError(said or f"the pool did not start; its last words, in {log}:\n{_tail(log)}")
    running = running_pool(name)
    assert running is not None, "the daemon writes its run file before it says that it is ready"
    return running


def stop_running_pool(name: str | None = None, patience_seconds: float = 30.0) -> RunningPool | None:
    """End the pool called `name`, or the one started last, and wait until it is gone. None when none runs."""
    pool = running_pool(name)
    process = process_of(pool) if pool is not None else None
    if pool is None or process is None:
        return None
    process.terminate()
    try:
        process.wait(patience_seconds)
    except psutil.TimeoutExpired:
        process.kill()
        process.wait()
    remove_run_file(pool)
    return pool


def serve_forever(config: PoolConfig, on_ready: Callable[[], None]) -> None:
    """Keep a pool for `config` until SIGTERM or SIGINT, or until its controller is lost.

    Raises UserError when it cannot start, and PoolLost.
    """
    from modelpool.actors.api.opening import start_pool

    name = config.cluster.name
    with (state_folder() / f"{name}.lock").open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"a pool called {name!r} is starting or running already") from None
        opened = start_pool(config)
        try:
            _serve(opened, config, on_ready)
        finally:
            opened.close()


def _serve(opened: OpenedPool, config: PoolConfig, on_ready: Callable[[], None]) -> None:
    stop = threading.Event()

    def ask_to_stop(number: int, frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):  # after Ray has put its own handlers there
        signal.signal(number, ask_to_stop)
    me = psutil.Process()
    running = RunningPool(
        name=config.cluster.name,
        namespace=config.cluster.namespace,
        address=opened.address,
        pid=me.pid,
        started_at=me.create_time(),
        log=str(_log_of(config.cluster.name)),
    )
    write_run_file(running)
    try:
        on_ready()
        while not stop.wait(HEALTH_SECONDS):
            opened.line.ask(Controller.status)
    finally:
        remove_run_file(running)


def _log_of(name: str) -> Path:
    return state_folder() / f"{name}.log"


def _tail(log: Path, lines: int = 20) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def main() -> None:
    """Serve the configuration on standard input; say how starting went on the file descriptor that is named."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ready-fd", type=int, required=True)
    ready_fd: int = parser.parse_args().ready_fd
    os.set_inheritable(ready_fd, False)
    told = False

    def tell(word: str) -> None:
        nonlocal told
        if not told:
            told = True
            os.write(ready_fd, word.encode())
            os.close(ready_fd)

    try:
        serve_forever(PoolConfig.model_validate_json(sys.stdin.read()), lambda: tell(_READY))
    except (UserError, PoolLost) as problem:
        tell(str(problem))
        sys.exit(str(problem))


if __name__ == "__main__":
    main()
