"""The history of a real pool with a controller that is killed, as `modelpool events` and `costs` read it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from modelpool.actors.cli.cluster.daemon import start_in_background, stop_running_pool
from modelpool.actors.cli.main import run
from modelpool.actors.config.config import PoolConfig
from modelpool.actors.control.history.pool_history import spool_prefix
from modelpool.actors.control.history.spool import spools_left
from modelpool.actors.ray.fork_server import SERVER_VARIABLE
from modelpool.actors.ray.run_file import running_pool
from tests.actors.control.history.alert_rules import missing_of

ROOT = Path(__file__).parents[4]

#: three batches; the controller is killed just after the first and the second one, and during the third
DRIVER = """
import json, sys, time
import psutil
from pathlib import Path
from modelpool import GenerateRequest, ModelPool
daemon, folder = psutil.Process(int(sys.argv[1])), Path(sys.argv[2])

def requests(batch):
    seeds, fields = range(10 * batch, 10 * batch + 6), {"model": "shapes", "steps": 4, "user": f"user {batch}"}
    return [GenerateRequest(prompt=f"circle {batch}", seed=seed, **fields) for seed in seeds]

def kill():
    (controller,) = [p for p in daemon.children(recursive=True) if p.name().startswith("ray::Controller")]
    controller.kill()
    controller.wait(30)

def controllers():
    return [p.pid for p in daemon.children(recursive=True) if p.name().startswith("ray::Controller")]

for batch in range(3):
    while not controllers():
        time.sleep(0.1)
    with ModelPool.connect() as pool:
        jobs = pool.submit_detached(requests(batch), output=folder / str(batch))
        if batch < 2:
            jobs.wait(120)
        else:
            while not jobs.progress().record.succeeded:
                time.sleep(0.01)
        kill()
        jobs.wait(120)
with ModelPool.connect() as pool:
    print(json.dumps(pool.status().seconds_by_user))
"""


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict]:
    capsys.readouterr()
    assert run([*arguments, "--json", "--pool", "mine"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.ray
def test_a_pool_whose_controller_is_killed_loses_no_cost_and_counts_none_twice(tmp_path, monkeypatch, capsys) -> None:
    """A batch of six images has 14 tasks: two texts, six samplings, six decodings. A batch that has ended is counted
    completely when the controller is killed a moment later."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv(SERVER_VARIABLE, raising=False)
    config = PoolConfig.load(ROOT / "configs" / "laptop.toml").override(device="sim", workers=1, name="mine")
    started = start_in_background(config)
    try:
        used = subprocess.run(
            [sys.executable, "-c", DRIVER, str(started.pid), str(tmp_path)],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert used.returncode == 0, used.stderr
        command = (sys.executable, "-m", "modelpool", "metrics", "--once", "--pool", "mine")  # connects to its Ray
        metrics = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert metrics.returncode == 0, metrics.stderr
        assert missing_of(metrics.stdout) == [], "what the alert rules read"
        while_it_runs = printed(capsys, "costs", "--by", "user")
    finally:
        stop_running_pool("mine")
    accounts = json.loads(used.stdout.splitlines()[-1])
    rows = printed(capsys, "costs", "--by", "user,model,lora")
    assert [(row["user"], row["model"], row["lora"]) for row in rows] == [(f"user {n}", "shapes", "") for n in range(3)]
    assert [row["runs"] for row in rows[:2]] == [14, 14]
    # what the killed controller had heard of it, and its repetition
    assert 14 <= rows[2]["runs"] <= 28
    for row in rows:  # the pool's own account loses what its journal has not got before a kill
        assert row["gpu_seconds"] >= accounts.get(row["user"], 0.0) * (1 - 1e-6)
    assert [row["runs"] for row in while_it_runs[:2]] == [14, 14], "it is read while the pool runs, too"
    events = [event["kind"] for event in printed(capsys, "events")]
    assert events[0] == "pool_started"
    assert events[-1] == "pool_ended"
    assert events.count("controller_restarted") == 3
    assert events.count("worker_taken_over") == 3
    assert not spools_left(spool_prefix(Path(started.history))), "a pool that has ended in order leaves no spool"
    assert running_pool() is None


def test_a_pool_without_a_journal_says_that_it_keeps_no_history(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "pool.toml").write_text('[cluster]\nname = "mine"\n[pool]\njournal = false\n')
    said = []
    monkeypatch.setattr("modelpool.actors.cli.terminal.screen.say", lambda console, text, *style: said.append(text))
    assert run(["costs", "--config", str(tmp_path / "pool.toml")]) == 2
    assert run(["events", "--pool", "other"]) == 2
    assert "pool 'mine' keeps no history: it has [pool] journal = false" in said[0]
    assert "other.history.sqlite does not exist" in said[1]
