"""What has joined a pool notices its end, leaves its Ray before that aborts the process, and joins the next one."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from modelpool.actors.cli.cluster.daemon import start_in_background, stop_running_pool
from modelpool.actors.cli.cluster.rejoin import ASK_SECONDS, LOST_SECONDS, wait_for_end, wait_for_next
from modelpool.actors.cli.terminal.screen import user_console
from modelpool.actors.config.config import PoolConfig
from modelpool.actors.control.status_values import PoolStatus
from modelpool.actors.outputs.results.outcomes import PoolLost
from modelpool.actors.ray.control_service import ControlService
from modelpool.actors.ray.fork_server import SERVER_VARIABLE
from modelpool.actors.ray.pool_end import PoolEndWatch
from tests.actors.cli.fakes import FakePool

ROOT = Path(__file__).parents[4]
WAIT_SECONDS = 60.0

#: a program that is idle while the pool ends, and then asks it, and waits for the next one
PROGRAM = """
import time
import ray
from modelpool import ModelPool, PoolLost, UserError
pool = ModelPool.connect("mine")
print("joined", flush=True)
while not pool.why_ended():
    time.sleep(0.1)
print(pool.why_ended(), ray.is_initialized(), flush=True)
for question in (pool.status, pool.detached, lambda: pool.submit({"prompt": "a red circle"}, output=False)):
    try:
        question()
    except PoolLost as lost:
        print("lost:", lost, flush=True)
pool.close()
while True:
    try:
        pool = ModelPool.connect("mine")
        break
    except UserError:
        time.sleep(0.5)
print("joined again:", len(pool.status().workers), flush=True)
"""


def until(
    holds: Callable[[], object], process: subprocess.Popen[str] | None = None, files: Sequence[Path] = ()
) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not holds():
        said = [f"{file.name}: {file.read_text()}" for file in files]
        assert process is None or process.poll() is None, f"it has ended: {said}"
        assert time.monotonic() < end, f"it did not happen: {said}"
        time.sleep(0.1)


def started(folder: Path, name: str, *command: str) -> tuple[subprocess.Popen[str], Path]:
    """A process of its own, and the file of its output."""
    said = folder / f"{name}.txt"
    with said.open("w") as output:
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output, text=True)
    return process, said


def answer(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=30) as found:
            return found.status, found.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read().decode()
    except urllib.error.URLError:
        return 0, ""


@pytest.mark.ray
@pytest.mark.slow
def test_servers_and_programs_notice_the_end_of_their_pool_and_join_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They died with an abort of Ray 60 s after `modelpool down`."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv(SERVER_VARIABLE, raising=False)
    config = PoolConfig.load(ROOT / "configs" / "laptop.toml").override(device="sim", workers=1, name="mine")
    start_in_background(config)
    call = (sys.executable, "-m", "modelpool")
    processes: list[subprocess.Popen[str]] = []
    try:
        metrics, of_metrics = started(tmp_path, "metrics", *call, "metrics", "--pool", "mine", "--port", "0")
        processes.append(metrics)
        server, of_server = started(tmp_path, "serve", *call, "serve", "--pool", "mine", "--port", "0")
        processes.append(server)
        program, of_program = started(tmp_path, "program", sys.executable, "-c", PROGRAM)
        processes.append(program)

        def url(said: Path) -> str:
            return ["", *re.findall(r"http://[0-9.]+:\d+(?:/metrics)?", said.read_text())][-1]

        until(lambda: url(of_metrics), metrics, [of_metrics])
        until(lambda: "listening" in of_server.read_text(), server, [of_server])
        until(lambda: "joined" in of_program.read_text(), program, [of_program])
        assert answer(url(of_metrics))[0] == answer(f"{url(of_server)}/v1/models")[0] == 200
        stop_running_pool("mine")
        until(lambda: "waiting for the next" in of_metrics.read_text(), metrics, [of_metrics])
        until(lambda: "waiting for the next" in of_server.read_text(), server, [of_server])
        until(lambda: of_program.read_text().count("lost:") == 3, program, [of_program])
        for asked in (url(of_metrics), f"{url(of_server)}/v1/models"):
            status, text = answer(asked)
            assert (status, "the pool 'mine' has ended" in text) == (503, True)
        start_in_background(config)
        until(lambda: "joined pool 'mine' again" in of_metrics.read_text(), metrics, [of_metrics])
        until(lambda: of_server.read_text().count("listening") == 2, server, [of_server])
        assert answer(url(of_metrics))[0] == answer(f"{url(of_server)}/v1/models")[0] == 200
        assert program.wait(WAIT_SECONDS) == 0, of_program.read_text()
        lines = of_program.read_text().splitlines()
        assert [line for line in lines if "lost:" not in line] == [
            "joined",
            "the pool 'mine' has ended",  # a warning of the log
            "the pool 'mine' has ended False",
            "joined again: 1",
        ]
        for process in (metrics, server):
            process.send_signal(signal.SIGINT)
        assert metrics.wait(WAIT_SECONDS) == 0
        server.wait(WAIT_SECONDS)
    finally:
        for process in processes:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
        stop_running_pool("mine")


def test_the_end_of_a_pool_waits_for_calls_under_way_and_lets_none_begin() -> None:
    """Ray must not be left during a call, and a call after that would connect this process elsewhere."""
    service = ControlService("127.0.0.1:1", lambda: True, is_connected=bool)
    left, running = threading.Event(), True
    watch = PoolEndWatch("mine", service, lambda: running, left.set, interval_seconds=0.01)
    with service.call():
        assert not left.wait(0.1)
        running = False
        until(service.problem)
        assert not left.wait(0.1), "a call is under way"
        with pytest.raises(PoolLost, match="the pool 'mine' has ended"), service.call():
            pass
        assert watch.reason() == ""
    assert left.wait(WAIT_SECONDS)
    until(lambda: watch.reason() == "the pool 'mine' has ended")
    watch.close()


def test_a_pool_whose_control_service_is_gone_has_ended_too() -> None:
    service = ControlService("127.0.0.1:1", lambda: False, patience_seconds=0.0, is_connected=bool)
    left = threading.Event()
    PoolEndWatch("mine", service, lambda: True, left.set, interval_seconds=0.01)
    assert left.wait(WAIT_SECONDS)
    assert "has not answered" in service.problem()


def test_a_watch_that_is_closed_first_leaves_nothing() -> None:
    left = threading.Event()
    watch = PoolEndWatch(
        "mine", ControlService("127.0.0.1:1", lambda: True, is_connected=bool), lambda: False, left.set, 60.0
    )
    watch.close()
    assert not left.is_set()


def test_nobody_waits_for_the_next_pool_of_an_address() -> None:
    """The command ends in order, with the reason."""
    with pytest.raises(PoolLost, match="it is gone"):
        wait_for_next("10.0.0.1:6379", "it is gone", user_console())


class Lost(FakePool):
    """A pool with a controller that is lost and back at times of a clock that `pause` moves."""

    def __init__(self, lost: Callable[[float], bool], ended_at: float = 1e9) -> None:
        super().__init__()
        self.now, self.lost, self.ended_at = 0.0, lost, ended_at

    def pause(self, seconds: float) -> None:
        self.now += seconds

    def status(self) -> PoolStatus:
        if self.lost(self.now):
            raise PoolLost("the controller of the pool is gone")
        return super().status()

    def why_ended(self) -> str:
        return "it has ended" if self.now >= self.ended_at else ""

    def ended(self) -> tuple[str, float]:
        """Why it counts as ended, and when."""
        return wait_for_end(self, lambda: self.now, self.pause), self.now


def test_a_server_whose_controller_was_replaced_joins_again() -> None:
    """It answered 503 for ever, and so did one that had joined by an address when the pool had ended."""
    reason, at = Lost(lambda now: now > 100.0).ended()
    assert reason == "the controller of the pool is gone"
    assert 100.0 + LOST_SECONDS <= at <= 100.0 + LOST_SECONDS + 2 * ASK_SECONDS
    assert Lost(lambda now: 100.0 < now < 120.0, ended_at=500.0).ended() == ("it has ended", 500.0)


@pytest.mark.ray
@pytest.mark.slow
def test_a_program_that_does_not_close_a_pool_has_its_own_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray ends a process with code 1 in which a call still waits a second after Ray's exit handler."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    config = PoolConfig.load(ROOT / "configs" / "laptop.toml").override(device="sim", workers=1, name="left")
    start_in_background(config)
    program = """
import atexit, time
atexit.register(time.sleep, 1.5)  # runs after the handler of Ray, which is imported later
from modelpool import ModelPool
print(len(ModelPool.connect("left").status().workers), flush=True)
"""
    try:
        found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=WAIT_SECONDS)
    finally:
        stop_running_pool("left")
    assert (found.returncode, found.stdout) == (0, "1\n"), found.stderr
