"""`modelpool up` and `down` without the command line: a pool that outlives the program that started it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from modelpool.actors.cli.cluster.daemon import _serve, serve_forever, start_in_background, stop_running_pool
from modelpool.actors.cli.terminal.interrupts import StoppableCommand
from modelpool.actors.cli.terminal.open_pool import ask_status
from modelpool.actors.client.client import ModelPool
from modelpool.actors.client.jobs import Jobs
from modelpool.actors.client.opening import OpenedPool, start_pool
from modelpool.actors.config.config import ClusterSection, PoolConfig
from modelpool.actors.outputs.results.outcomes import PoolLost
from modelpool.actors.ray.fork_server import SERVER_VARIABLE
from modelpool.actors.ray.ray_session import RaySession
from modelpool.actors.ray.run_file import running_pool
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.errors import UserError
from tests.actors.fakes import GATED, FakeEngine, make_pipes
from tests.actors.loop_connection import LoopConnection

ROOT = Path(__file__).parents[4]

#: kills the controller with the jobs of a submission, and renders the same ones again
DRIVER = """
import sys, time
import psutil
from pathlib import Path
from modelpool import GenerateRequest, ModelPool
daemon, folder = psutil.Process(int(sys.argv[1])), Path(sys.argv[2])
requests = [GenerateRequest(model="shapes", prompt="a red circle", seed=seed, steps=4) for seed in range(6)]
with ModelPool.connect() as pool:
    print([worker.id for worker in pool.status().workers])
    jobs = pool.submit_detached(requests, output=folder / "killed")
    while not jobs.progress().record.succeeded:
        time.sleep(0.01)
    (controller,) = [p for p in daemon.children(recursive=True) if p.name().startswith("ray::Controller")]
    controller.kill()
    with ModelPool.connect() as after:  # waits for the next one
        jobs.wait(120)
        after.submit_detached(requests, output=folder / "again").wait(120)
        print([one.outcome.value for one in after.attach(jobs.id).outcomes()])
"""


@pytest.mark.ray
def test_a_pool_in_the_background_is_found_used_survives_its_controller_and_is_ended(tmp_path, monkeypatch) -> None:
    """A short form of `benchmarks.chaos`: detached jobs with a controller that is killed (SIGKILL) are committed once,
    with the bytes that they have without that."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv(SERVER_VARIABLE, raising=False)  # so that all processes are its own
    config = PoolConfig.load(ROOT / "configs" / "laptop.toml").override(device="sim", workers=1, name="mine")
    assert running_pool() is None
    started = start_in_background(config)
    try:
        assert running_pool("mine") == started
        with pytest.raises(UserError, match="a pool called 'mine' is already running"):
            start_in_background(config)
        used = subprocess.run(
            [sys.executable, "-c", DRIVER, str(started.pid), str(tmp_path)],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert used.stdout == f"['gpu-0']\n{['succeeded'] * 6}\n", used.stderr
        require_equal_once(tmp_path / "killed", tmp_path / "again")
        family = [psutil.Process(started.pid), *psutil.Process(started.pid).children(recursive=True)]
    finally:
        assert stop_running_pool("mine") == started
    assert not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert running_pool() is None
    assert stop_running_pool() is None
    with pytest.raises(UserError, match="no pool is running on this machine"):
        _connect()


def require_equal_once(folder: Path, other: Path) -> None:
    """Both folders have the same six images, each listed once."""
    for each in (folder, other):
        assert len((each / "manifest.jsonl").read_text().splitlines()) == 6
    images = {path.name: path.read_bytes() for path in folder.glob("*.png")}
    assert len(images) == 6
    assert images == {path.name: path.read_bytes() for path in other.glob("*.png")}


def test_the_controller_of_a_pool_that_stays_is_on_the_head_unless_configured(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    places = []

    def start_controller(plan, namespace, name, place, models, environment):
        places.append(place)
        raise UserError("as far as this test goes")

    session = RaySession("127.0.0.1:1", False, None)
    monkeypatch.setattr("modelpool.actors.client.opening.open_session", lambda *args, **more: session)
    monkeypatch.setattr("modelpool.actors.ray.forks.is_on_this_machine", lambda address: False)
    monkeypatch.setattr(RaySession, "gpu_count", lambda self: 0)
    monkeypatch.setattr("modelpool.actors.ray.cluster.start_controller", start_controller)
    for configured in (None, "head", "driver"):
        config = PoolConfig().override(controller=configured, device="sim")
        for start in (partial(serve_forever, config, lambda: None), partial(start_pool, config)):
            with pytest.raises(UserError, match="as far as"):
                start()
    assert places == ["head", "driver", "head", "head", "driver", "driver"]


def test_a_pool_that_cannot_start_says_why(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    config = PoolConfig().override(address="127.0.0.1:1", name="mine")
    with pytest.raises(UserError, match=r"no Ray cluster answers at '127\.0\.0\.1:1'"):
        start_in_background(config)
    assert running_pool() is None


def _connect() -> None:
    from modelpool import ModelPool

    ModelPool.connect()


@pytest.fixture
def gated(tmp_path, monkeypatch) -> Iterator[tuple[OpenedPool, ModelPool, Path]]:
    """A pool of one worker with runs that wait at a gate, without Ray; the gate is the folder's."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = make_pipes(tmp_path)
    line = LoopConnection(1, lambda: FakeEngine(folder))
    pool = ModelPool(line, lambda: None, None)
    with StoppableCommand():  # restores the signal handlers
        yield OpenedPool(line, "127.0.0.1:1", lambda: None), pool, folder
    pool.close()
    line.end()


def running_step(pool: ModelPool, jobs: Jobs) -> None:
    """Wait until a step is done."""
    while not any(running.step for running in jobs.progress().running):
        time.sleep(0.01)


def test_the_daemon_answers_with_its_status_while_it_serves(gated) -> None:
    """`modelpool status` needs no Ray for it. The socket ends with the daemon."""
    opened, pool, folder = gated
    found: list[Any] = []

    def work_comes_and_status_is_asked() -> None:
        jobs = pool.submit(GenerateRequest(model="shapes", prompt=GATED, seed=1, steps=4))
        running_step(pool, jobs)
        found.append(ask_status("modelpool"))
        (folder / "gate").write_text("on")
        jobs.wait(60)
        found.append(ask_status("modelpool"))
        found.append(Path(running_pool("modelpool").status_socket))
        os.kill(os.getpid(), signal.SIGTERM)

    _serve(opened, PoolConfig(), work_comes_and_status_is_asked)
    busy, idle, path = found
    assert (busy.workers[0].task, busy.jobs["live"]) == ("sample", 1)
    assert (idle.workers[0].task, idle.jobs["live"], idle.jobs["succeeded"]) == (None, 0, 1)
    assert path.name == "socket"
    assert not path.parents[1].exists()


def test_sigterm_drains_the_daemon_what_runs_stops_at_a_step_and_nothing_starts(gated) -> None:
    opened, pool, folder = gated
    submitted = []

    def work_comes_and_sigterm() -> None:
        submitted.append(pool.submit([GenerateRequest(model="shapes", prompt=GATED, seed=s, steps=4) for s in (1, 2)]))
        running_step(pool, submitted[0])
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Timer(0.2, (folder / "gate").write_text, ("on",)).start()

    _serve(opened, PoolConfig(), work_comes_and_sigterm)
    status = pool.status()
    assert (status.jobs["live"], status.jobs["failed"]) == (2, 0)
    assert [worker.state for worker in status.workers] == ["idle"]
    assert running_pool() is None
    (task,) = [task for task in opened.connection.controller._state.demand.tasks.values() if task.kept is not None]
    assert (task.kept.step, task.kept.steps) == (1, 4)
    submitted[0].cancel()


def test_a_second_signal_does_not_wait_for_the_drain(gated) -> None:
    opened, pool, folder = gated
    patient = PoolConfig(cluster=ClusterSection(drain_seconds=3600.0))
    submitted = []

    def work_comes_and_two_signals() -> None:
        submitted.append(pool.submit(GenerateRequest(model="shapes", prompt=GATED, seed=1, steps=4)))
        running_step(pool, submitted[0])
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGHUP)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()

    _serve(opened, patient, work_comes_and_two_signals)
    assert pool.status().workers[0].state == "busy"
    (folder / "gate").write_text("on")
    submitted[0].cancel()
    submitted[0].wait(60)


def test_a_daemon_ends_when_its_controller_hangs_and_on_a_signal_even_then(gated, monkeypatch) -> None:
    opened, _, _ = gated
    never = threading.Event()
    hung = OpenedPool(SimpleNamespace(call=lambda *arguments: never.wait()), opened.address, opened.close)
    monkeypatch.setattr("modelpool.actors.cli.cluster.daemon.HEALTH_SECONDS", 0.01)
    monkeypatch.setattr("modelpool.actors.cli.cluster.daemon.ANSWER_SECONDS", 0.2)
    with pytest.raises(PoolLost, match="the controller of the pool has not answered"):
        _serve(hung, PoolConfig(), lambda: None)
    monkeypatch.setattr("modelpool.actors.cli.cluster.daemon.ANSWER_SECONDS", 3600.0)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    monkeypatch.setattr("modelpool.actors.cli.cluster.daemon.LATE_SECONDS", 0.2)
    _serve(hung, PoolConfig(cluster=ClusterSection(drain_seconds=0.1)), lambda: None)
    never.set()


def test_a_daemon_starts_a_job_service_that_hangs_again(gated, monkeypatch, capsys) -> None:
    class Hung:
        def ask(self) -> Future[None]:
            return Future()

        def restart(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    opened, _, _ = gated
    monkeypatch.setattr("modelpool.actors.cli.cluster.daemon.HEALTH_SECONDS", 0.01)
    monkeypatch.setattr("modelpool.actors.cli.cluster.daemon.ANSWER_SECONDS", 0.1)
    # the controller answers, on a busy machine too
    answer = SimpleNamespace(waiting_for="")
    monkeypatch.setattr("modelpool.actors.cli.cluster.daemon._status", lambda opened, stop: answer)
    _serve(replace(opened, service=Hung()), PoolConfig(), lambda: None)
    told = r"the job service of the pool has not answered for \d+ s; starting another one"
    assert re.search(told, capsys.readouterr().err)


def test_a_daemon_ends_when_its_pool_is_lost(gated, monkeypatch) -> None:
    """The control service of Ray is gone, say: see `RayConnection.call`."""
    opened, _, _ = gated

    def lost(*arguments, **more):
        raise PoolLost("the control service of Ray (GCS) at 127.0.0.1:1 has not answered for 31 s")

    broken = OpenedPool(SimpleNamespace(call=lost), opened.address, opened.close)
    monkeypatch.setattr("modelpool.actors.cli.cluster.daemon.HEALTH_SECONDS", 0.01)
    with pytest.raises(PoolLost, match="has not answered for 31 s"):
        _serve(broken, PoolConfig(), lambda: None)
    assert running_pool() is None
