"""Runs a pool that outlives the command that started it: `modelpool up` and `modelpool down`.

The daemon is a separate process that owns Ray (unless it joined a cluster) and the controller. A run file tells other
programs where to connect. Run as a module, it reads its configuration from standard input.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import psutil

from modelpool.actors.cli.terminal.interrupts import STOP_SIGNALS, StoppableCommand, exit_code, leave_closed_terminal
from modelpool.actors.cli.terminal.status_socket import ANSWER_SECONDS, StatusSocket
from modelpool.actors.config.config import PoolConfig
from modelpool.actors.control.detached.service_watch import ServiceWatch
from modelpool.actors.control.history.pool_history import history_path
from modelpool.actors.outputs.results.outcomes import PoolLost
from modelpool.actors.ray.code_folder import code_path
from modelpool.actors.ray.ray_session import short_folder
from modelpool.actors.ray.run_file import RunningPool, process_of, remove_run_file, running_pool, write_run_file
from modelpool.actors.ray.session_folder import SessionFolder
from modelpool.actors.ray.state_folder import journal_path, pool_log_path
from modelpool.actors.ray.unused_state import StateUpkeep
from modelpool.pool.values.core.errors import UserError, counted
from modelpool.pool.values.core.process_identity import process_start
from modelpool.pool.values.core.user_folders import machine_folder

if TYPE_CHECKING:
    from modelpool.actors.client.opening import OpenedPool
    from modelpool.actors.control.status import PoolStatus

#: interval at which the daemon checks its controller and its job service
HEALTH_SECONDS = 2.0
#: interval of checks for signals while the daemon waits for its controller
CHECK_SECONDS = 0.1
#: a drain may end this much later than its time
LATE_SECONDS = 5.0
#: controllers that are started within a time in place of lost ones: a pool that ends at once each time is given up
MOST_RESTARTS, RESTART_WINDOW_SECONDS = 5, 600.0
_READY = "ready"


def start_in_background(config: PoolConfig) -> RunningPool:
    """Start a daemon for `config` and wait until its controller answers.

    Raises UserError with the daemon's message, or if a pool of that name is already running.
    """
    name = config.cluster.name
    if (known := running_pool(name)) is not None:
        raise UserError(
            f"a pool called {name!r} is already running (process {known.pid}); stop it with `modelpool down`"
        )
    log = pool_log_path(None, name)
    reading_end, say = os.pipe()
    # behind what earlier pools of the name have written: that says why they ended
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "ab") as output, os.fdopen(reading_end) as answer:
        before_bytes = os.fstat(descriptor).st_size
        daemon = subprocess.Popen(
            [sys.executable, "-P", "-m", "modelpool.actors.cli.cluster.daemon", "--ready-fd", str(say)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            pass_fds=(say,),
            start_new_session=True,
            cwd="/",
            env={**os.environ, "PYTHONPATH": code_path()},
        )
        os.close(say)
        assert daemon.stdin is not None, "opened with stdin=PIPE"
        daemon.stdin.write(config.model_dump_json().encode())
        daemon.stdin.close()
        answer_text = answer.read()  # ends when the daemon reports, or when it exits
    if answer_text != _READY:
        daemon.wait()
        raise UserError(answer_text or f"the pool did not start; last lines of {log}:\n{_tail(log, before_bytes)}")
    running = running_pool(name)
    assert running is not None, "the daemon writes its run file before it reports that it is ready"
    return running


def stop_running_pool(name: str | None = None, patience_seconds: float = 30.0) -> RunningPool | None:
    """Stop the pool called `name`, or the latest one, and wait until its process has ended: the time of its running
    tasks (`[cluster] drain_seconds`), and `patience_seconds` for the rest. None if none runs.
    """
    pool = running_pool(name)
    process = process_of(pool) if pool is not None else None
    if pool is None or process is None:
        return None
    process.terminate()
    try:
        process.wait(pool.drain_seconds + patience_seconds)
    except psutil.TimeoutExpired:
        process.kill()
        process.wait()
    remove_run_file(pool)
    return pool


def serve_forever(config: PoolConfig, on_ready: Callable[[], None]) -> None:
    """Run a pool for `config` until a stop signal, or until its controller or Ray's control service is lost.

    The first signal starts a drain: nothing starts any more, and running tasks end or stop at a step within
    `drain_seconds`. A second one ends the pool at once. Raises UserError if it cannot start, and PoolLost.
    """
    from modelpool.actors.client.start_checks import check_device, check_folders, check_named_models
    from modelpool.actors.ray.forks import Forks

    check_folders(config)
    check_device(config)
    check_named_models(config)
    name = config.cluster.name
    with _lock_file(name).open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            hint = "stop it with `modelpool down`, or choose another name in [cluster] of the configuration"
            raise UserError(f"a pool called {name!r} is already starting or running; {hint}") from None
        # imports torch and diffusers while this process imports the rest
        with contextlib.closing(Forks.start(config.cluster.address)) as forks:
            from modelpool.actors.client.opening import start_pool

            opened = start_pool(config, controller="head", keeps_jobs=True, forks=forks)
            try:
                _serve(opened, config, on_ready)
            finally:
                opened.close()


def _history_file(config: PoolConfig) -> str:
    """Return the path of the history of a pool; "" if it keeps none."""
    if config.pool.journal is False:
        return ""
    return str(history_path(journal_path(config.pool.journal, config.cluster.name)))


def _lock_file(name: str) -> Path:
    return machine_folder() / f"{name}.lock"


class _StopSignals:
    """The stop signals that a daemon has received, from now on. Main thread only."""

    def __init__(self) -> None:
        self.first, self.second = threading.Event(), threading.Event()
        for number in STOP_SIGNALS:  # after Ray has installed its own handlers
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            leave_closed_terminal()
            self.first.set()  # closed shells send several
        elif self.first.is_set():
            self.second.set()
        else:
            self.first.set()


def _serve(opened: OpenedPool, config: PoolConfig, on_ready: Callable[[], None]) -> None:
    signals = _StopSignals()
    me = psutil.Process()
    with _status_socket(opened) as status_socket:
        _serve_until(opened, config, on_ready, signals, me, status_socket)


@contextlib.contextmanager
def _status_socket(opened: OpenedPool) -> Iterator[str]:
    """Answer questions for the status of the pool at the yielded path; "" if that is impossible here."""
    from modelpool.actors.control.controller import Controller

    folder = SessionFolder(short_folder(), "status-")
    path = folder.path / "socket"
    answering: StatusSocket | None = None
    try:
        # the connection is another one after a restart of the controller
        answering = StatusSocket(path, lambda: opened.connection.call(Controller.status))
    except OSError as failed:
        print(f"`modelpool status` asks Ray: no socket at {path} ({failed})", file=sys.stderr, flush=True)
    try:
        yield "" if answering is None else str(path)
    finally:
        if answering is not None:
            answering.close()
        folder.close()


def _serve_until(
    opened: OpenedPool,
    config: PoolConfig,
    on_ready: Callable[[], None],
    signals: _StopSignals,
    me: psutil.Process,
    status_socket: str,
) -> None:
    """Serve until a stop signal, and drain."""
    running = RunningPool(
        name=config.cluster.name,
        namespace=config.cluster.namespace,
        address=opened.address,
        pid=me.pid,
        started_at=me.create_time(),
        log=str(pool_log_path(None, config.cluster.name)),
        drain_seconds=config.cluster.drain_seconds,
        status_socket=status_socket,
        start=process_start(me.pid),
        history=_history_file(config),
    )
    write_run_file(running)
    upkeep = StateUpkeep(_lock_file(config.cluster.name), time.monotonic(), opened.tidy)
    try:
        on_ready()
        waited_for = ""
        restarts: list[float] = []
        jobs: ServiceWatch | None = None
        if opened.service is not None:
            jobs = ServiceWatch(opened.service, HEALTH_SECONDS, ANSWER_SECONDS, time.monotonic())
        while not signals.first.wait(HEALTH_SECONDS):
            upkeep.beat(time.monotonic())
            if jobs is not None and (silent_seconds := jobs.beat(time.monotonic())) is not None:
                print(
                    f"the job service of the pool has not answered for {silent_seconds:.0f} s; starting another one",
                    file=sys.stderr,
                    flush=True,
                )
            try:
                status = _status(opened, signals.first)
            except PoolLost as lost:
                _restart(opened, restarts, lost)
                continue
            if status is None:
                break
            if status.waiting_for and status.waiting_for != waited_for:
                print(status.waiting_for, file=sys.stderr, flush=True)
            waited_for = status.waiting_for
        _drain(opened, config.cluster.drain_seconds, signals.second)
    finally:
        remove_run_file(running)


def _restart(opened: OpenedPool, restarts: list[float], lost: PoolLost) -> None:
    """Start another controller; detached jobs continue on it. Raises `lost` after too many restarts, and whatever
    starting raises: Ray may be gone, too.
    """
    now = time.monotonic()
    restarts[:] = [at for at in restarts if now - at < RESTART_WINDOW_SECONDS]
    if opened.restart is None or len(restarts) >= MOST_RESTARTS:
        raise lost
    restarts.append(now)
    print(f"{lost}; starting another one", file=sys.stderr, flush=True)
    try:
        opened.restart()
    except UserError:
        raise lost from None
    print("the new controller answers; detached jobs continue", file=sys.stderr, flush=True)


def _status(opened: OpenedPool, stop: threading.Event) -> PoolStatus | None:
    """Return the status of the pool; None if `stop` is set before it answers. Raises PoolLost, also for a controller
    that has not answered for `ANSWER_SECONDS`."""
    from modelpool.actors.control.controller import Controller

    answers: queue.SimpleQueue[PoolStatus | Exception] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(opened.connection.call(Controller.status))
        except Exception as raised:
            answers.put(raised)

    threading.Thread(target=ask, name="ask controller", daemon=True).start()
    until = time.monotonic() + ANSWER_SECONDS
    while not stop.is_set():
        with contextlib.suppress(queue.Empty):
            answer = answers.get(timeout=CHECK_SECONDS)
            if isinstance(answer, Exception):
                raise answer
            return answer
        if time.monotonic() > until:
            raise PoolLost(f"the controller of the pool has not answered for {ANSWER_SECONDS:.0f} s")
    return None


def _drain(opened: OpenedPool, seconds: float, hurry: threading.Event) -> None:
    """Wait until the running tasks have ended, at most `seconds` and a little more, or until `hurry` is set."""
    from modelpool.actors.control.controller import Controller

    def drain() -> None:
        try:
            left = opened.connection.call(Controller.drain, seconds)
        except PoolLost as lost:
            print(lost, file=sys.stderr, flush=True)
            return
        if left:
            print(f"{counted(left, 'running task')} did not end within {seconds:g} s", file=sys.stderr, flush=True)

    draining = threading.Thread(target=drain, name="drain", daemon=True)
    draining.start()
    until = time.monotonic() + seconds + LATE_SECONDS
    while draining.is_alive() and not hurry.is_set() and time.monotonic() < until:
        draining.join(CHECK_SECONDS)


def _tail(log: Path, begin_bytes: int, lines: int = 20) -> str:
    """Return the last lines of a log, of those behind its first `begin_bytes`."""
    content = log.read_bytes()
    new = content[begin_bytes:] if len(content) >= begin_bytes else content  # it was rotated meanwhile
    return "\n".join(new.decode(errors="replace").splitlines()[-lines:])


def main() -> None:
    """Serve the configuration on standard input; report the result of starting on the named file descriptor."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ready-fd", type=int, required=True)
    ready_fd: int = parser.parse_args().ready_fd
    os.set_inheritable(ready_fd, False)
    reported = False

    def report(word: str) -> None:
        nonlocal reported
        if not reported:
            reported = True
            os.write(ready_fd, word.encode())
            os.close(ready_fd)

    with StoppableCommand() as command:
        try:
            serve_forever(PoolConfig.model_validate_json(sys.stdin.read()), lambda: report(_READY))
        except (UserError, PoolLost) as problem:
            report(str(problem))
            sys.exit(str(problem))
        except KeyboardInterrupt:
            report("the pool was stopped while it started")
            sys.exit(exit_code(command.number))


if __name__ == "__main__":
    main()
