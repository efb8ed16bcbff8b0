"""The command against real pools: Ray, workers on simulated GPUs, the example model."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

from examples.shapes.checker import matches, read_image
from modelpool.actors.client.client import ModelPool
from modelpool.actors.outputs.folder import OutputFolder
from modelpool.actors.ray import fork_server
from modelpool.actors.ray.fork_server import SERVER_VARIABLE
from tests.architecture.source_tree import ROOT

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelPool]:
    """One worker with so little memory that every task streams."""
    state = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(state))
        with ModelPool.start(ROOT / "configs" / "laptop.toml", workers=1, device="sim", vram="8MiB") as running:
            yield running


def started(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """The command, in `folder`."""
    return subprocess.Popen(
        [sys.executable, "-m", "modelpool", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command, run to its end."""
    process = started(folder, *arguments)
    out, err = process.communicate()
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def images(process: subprocess.CompletedProcess[str]) -> dict[int, dict]:
    """The objects on stdout, by index."""
    assert process.returncode == 0, process.stderr
    return {o["index"]: o for o in map(json.loads, process.stdout.splitlines())}


@pytest.mark.nightly(usually="tests/actors/test_shapes_pool.py")
def test_the_same_command_on_other_gpus_and_memory_gives_the_same_pixels(
    pool: ModelPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers with room for everything, in a pool of the command's own; one worker that streams, in another."""
    monkeypatch.delenv(SERVER_VARIABLE)  # the command starts everything itself, as for a user
    what = ("generate", "a red circle", "--model", "shapes", "-n", "2", "--seed", "7", "--json")
    own = images(
        ended(tmp_path, *what, "--out", "own", "--gpus", "2", "--device", "sim", "--vram", "64MiB"),
    )
    other = images(ended(tmp_path, *what, "--out", "other", "--pool", pool.address))
    assert sorted(own) == sorted(other) == [0, 1]
    for index in (0, 1):
        assert own[index]["seed"] == 7 + index
        assert own[index]["sha256"] == other[index]["sha256"]
        assert own[index]["recipe"] == other[index]["recipe"]
        pixels = np.asarray(Image.open(tmp_path / own[index]["path"]))
        assert hashlib.sha256(pixels.tobytes()).hexdigest() == own[index]["sha256"]
    assert own[0]["sha256"] != own[1]["sha256"]
    assert any(matches(read_image(np.asarray(Image.open(tmp_path / o["path"]))), "a red circle") for o in own.values())
    assert sum(task["streamed_bytes"] for o in other.values() for task in o["tasks"]) > 0
    assert sum(task["streamed_bytes"] for o in own.values() for task in o["tasks"]) == 0


def test_the_processes_of_a_pool_are_forks_of_one_server(pool: ModelPool) -> None:
    """They had imported everything on their own: 7 CPU-seconds each."""
    pool.wait_ready(120)
    family = [psutil.Process(memory.pid) for memory in pool.memory().values()]
    (server,) = {process.parent() for process in family}
    assert server is not None
    assert fork_server.__name__ in server.cmdline()
    assert "ray" not in {Path(mapped.path).parent.name for mapped in server.memory_maps()}


def test_ctrl_c_in_the_middle_of_a_batch_and_the_same_command_again(pool: ModelPool, tmp_path: Path) -> None:
    """1. An image is being sampled. 2. Ctrl-C: the command ends with 130 and the pool is idle. 3. The same command
    makes every image once."""
    lines = [{"prompt": "a blue square", "seed": seed, "steps": 60} for seed in range(3)]
    (tmp_path / "jobs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ("batch", "jobs.jsonl", "--model", "shapes", "--out", "p", "--pool", pool.address)
    process = started(tmp_path, *command)
    wait_until(lambda: pool.status().workers[0].task == "sample", process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130, err
    assert f"Stopped. To resume: modelpool {' '.join(command)}\n" in err
    finished = len(OutputFolder(tmp_path / "p").finished())
    assert finished < 3
    wait_until(lambda: pool.status().workers[0].task is None)

    again = images(ended(tmp_path, *command, "--json"))
    assert [again[index]["skipped"] for index in range(3)].count(True) == finished
    assert len((tmp_path / "p" / "manifest.jsonl").read_text().splitlines()) == 3


def test_kill_9_in_the_middle_of_a_batch_and_the_same_command_again(pool: ModelPool, tmp_path: Path) -> None:
    """1. One image is written, and another one is being sampled. 2. The command is killed. 3. The same command skips
    outputs that exist and makes the rest, each image once; nothing is left of the killed one."""
    lines = [{"prompt": "a blue square", "seed": seed, "steps": 60} for seed in range(3)]
    (tmp_path / "jobs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ("batch", "jobs.jsonl", "--model", "shapes", "--out", "p", "--pool", pool.address)
    process = started(tmp_path, *command)
    manifest = tmp_path / "p" / "manifest.jsonl"
    wait_until(lambda: manifest.exists() and manifest.read_text().count("\n") >= 1, process)
    process.kill()
    process.communicate()
    entries = list(map(json.loads, manifest.read_text().splitlines()))
    assert all(entry["job_id"] and entry["worker"] for entry in entries), "the ends and ids of its jobs are there"
    assert 1 <= len(entries) < 3

    again = images(ended(tmp_path, *command, "--json"))
    assert [again[index]["skipped"] for index in range(3)].count(True) >= len(entries)
    assert all(again[entry["recipe"]["seed"] - again[0]["seed"]]["job"] == entry["job_id"] for entry in entries)
    assert len(manifest.read_text().splitlines()) == 3
    assert list((tmp_path / "p").glob("*.partial")) == []
    assert {path.name for path in (tmp_path / "p").glob("*.png")} - {"contact_sheet.png"} == {
        json.loads(line)["file"] for line in manifest.read_text().splitlines()
    }


def test_what_only_the_pool_can_know_is_one_line(pool: ModelPool, tmp_path: Path) -> None:
    for arguments, complaint in (
        (("--model", "shape"), "unknown model 'shape'; did you mean 'shapes'?"),
        (("--lora", "ligt:0.8"), "unknown LoRA 'ligt'; did you mean 'light'?"),
        (("--size", "1024x1024"), "needs at least"),
    ):
        process = ended(tmp_path, "generate", "a red circle", *arguments, "--pool", pool.address)
        assert process.returncode == 2
        assert complaint in process.stderr.splitlines()[-1]
        assert "Traceback" not in process.stderr


@pytest.mark.nightly(usually="tests/actors/cli/cluster/test_daemon.py")
def test_up_status_and_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that outlives the command which started it, found by name."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    config = str(ROOT / "configs" / "laptop.toml")
    options = ("--config", config, "--gpus", "1", "--device", "sim", "--vram", "32MiB")
    up = ended(tmp_path, "up", "--detach", "--name", "stays", *options)
    assert up.returncode == 0, up.stderr
    try:
        assert len(images(ended(tmp_path, "generate", "a red circle", "--pool", "stays", "--json"))) == 1
        status = json.loads(ended(tmp_path, "status", "--json").stdout)
        assert status["jobs"]["succeeded"] == 1
        assert "is already running" in ended(tmp_path, "up", "--detach", "--name", "stays", *options).stderr
    finally:
        down = ended(tmp_path, "down", "stays")
    assert down.returncode == 0, down.stderr
    assert ended(tmp_path, "status").returncode == 2


def wait_until(holds, process: subprocess.Popen[str] | None = None) -> None:
    """Look until it holds, or the process that should bring it about has ended. The test's own time limit applies."""
    while not holds():
        assert process is None or process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
