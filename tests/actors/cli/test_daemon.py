"""`modelpool up` and `down` without the command line: a pool that outlives the program that started it."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import psutil
import pytest

from modelpool.actors.api.opening import start_pool
from modelpool.actors.cli.daemon import serve_forever, start_in_background, stop_running_pool
from modelpool.actors.ray.fork_server import SERVER_VARIABLE
from modelpool.actors.ray.ray_session import RaySession
from modelpool.actors.ray.run_file import running_pool
from modelpool.actors.settings.config import PoolConfig
from modelpool.pool.core.errors import UserError

ROOT = Path(__file__).parents[3]

DRIVER = """
from modelpool import ModelPool
with ModelPool.connect() as pool:
    print([worker.id for worker in pool.status().workers])
"""


@pytest.mark.ray
def test_a_pool_in_the_background_is_found_used_and_ended(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv(SERVER_VARIABLE, raising=False)  # so that all processes are its own
    config = PoolConfig.load(ROOT / "configs" / "laptop.toml").override(device="sim", workers=1, name="mine")
    assert running_pool() is None
    started = start_in_background(config)
    try:
        assert running_pool("mine") == started
        with pytest.raises(UserError, match="a pool called 'mine' is already running"):
            start_in_background(config)
        used = subprocess.run([sys.executable, "-c", DRIVER], cwd=ROOT, capture_output=True, text=True, check=False)
        assert used.stdout == "['gpu-0']\n", used.stderr
        family = [psutil.Process(started.pid), *psutil.Process(started.pid).children(recursive=True)]
    finally:
        assert stop_running_pool("mine") == started
    assert not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert running_pool() is None
    assert stop_running_pool() is None
    with pytest.raises(UserError, match="no pool is running on this machine"):
        _connect()


def test_the_controller_of_a_pool_that_stays_is_on_the_head_unless_configured(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    places = []

    def start_controller(plan, namespace, name, place, models, environment):
        places.append(place)
        raise UserError("as far as this test goes")

    session = RaySession("127.0.0.1:1", False, None)
    monkeypatch.setattr("modelpool.actors.api.opening.open_session", lambda *args, **more: session)
    monkeypatch.setattr("modelpool.actors.api.opening.is_on_this_machine", lambda address: False)
    monkeypatch.setattr(RaySession, "gpu_count", lambda self: 0)
    monkeypatch.setattr("modelpool.actors.ray.cluster.start_controller", start_controller)
    for configured in (None, "head", "driver"):
        config = PoolConfig().override(controller=configured, device="sim")
        for start in (partial(serve_forever, config, lambda: None), partial(start_pool, config)):
            with pytest.raises(UserError, match="as far as"):
                start()
    assert places == ["head", "driver", "head", "head", "driver", "driver"]


def test_a_pool_that_cannot_start_says_why(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    config = PoolConfig().override(address="127.0.0.1:1", name="mine")
    with pytest.raises(UserError, match=r"no Ray cluster answers at '127\.0\.0\.1:1'"):
        start_in_background(config)
    assert running_pool() is None


def _connect() -> None:
    from modelpool import ModelPool

    ModelPool.connect()
