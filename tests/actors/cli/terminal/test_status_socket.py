"""`modelpool status` asks the process of a pool over a socket: the same status as over Ray, without importing Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from modelpool.actors.cli.terminal.open_pool import ask_status
from modelpool.actors.cli.terminal.status_socket import StatusSocket, asked_status, plain_status
from modelpool.actors.control.status_values import (
    FailedJob,
    NodeCosts,
    NodeGroupStatus,
    PinnedModel,
    PoolStatus,
    ResidentPart,
    RunStatus,
)
from modelpool.actors.outputs.results.outcomes import PoolLost
from modelpool.actors.ray.run_file import RunningPool, write_run_file
from modelpool.pool.values.core.errors import UserError
from tests.actors.cli.fakes import FakePool

ROOT = Path(__file__).parents[4]
COMMAND = """
import sys
from modelpool.actors.cli.main import run
run(sys.argv[1:])
print(sorted({"ray", "torch", "numpy"} & set(sys.modules)))
"""


def full_status() -> PoolStatus:
    """A status with every kind of value."""
    status = FakePool().status()
    first, *others = status.workers
    run = RunStatus("job", "ann", "sample", 1, 2, 3, 4.5, False, mates=1)
    first = replace(first, run=run, parts=(ResidentPart("shapes/vae", 1, 2, True),), leaves_in=3.5)
    return replace(
        status,
        workers=(first, *others),
        pins=(PinnedModel("shapes", 2, ("gpu-0",)),),
        failures=(FailedJob("x", "broken", 1.5),),
        scaling=NodeCosts((NodeGroupStatus("a100", 1, 2, 0, 3.6),), 1.0, 2.0, "more"),
        waiting_by_user={"ann": {"sample": 2}},
        left_seconds=12.5,
    )


def test_the_answer_is_the_present_status_or_why_there_is_none(tmp_path: Path) -> None:
    answers: list[PoolStatus | Exception] = [full_status(), PoolLost("the controller is gone")]

    def read() -> PoolStatus:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    path = tmp_path / "s"
    socket = StatusSocket(path, read)
    try:
        assert asked_status(str(path)) == full_status()
        with pytest.raises(UserError, match="the pool does not answer: the controller is gone"):
            asked_status(str(path))
    finally:
        socket.close()
    assert asked_status(str(path)) is None  # Ray is asked instead


def test_a_reader_that_waits_holds_up_no_other(tmp_path: Path) -> None:
    first, go_on = threading.Event(), threading.Event()

    def read() -> PoolStatus:
        if not first.is_set():
            first.set()
            assert go_on.wait(60)
        return full_status()

    socket = StatusSocket(tmp_path / "s", read)
    slow = threading.Thread(target=asked_status, args=(str(tmp_path / "s"),))
    slow.start()
    try:
        assert first.wait(60)
        assert asked_status(str(tmp_path / "s")) == full_status()
        assert slow.is_alive()
    finally:
        go_on.set()
        slow.join()
        socket.close()


def test_an_answer_of_another_version_is_left_to_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for changed in ({"workers": None}, {"jobs": "many"}):
        path = tmp_path / next(iter(changed))
        answer = {**plain_status(full_status()), **changed}
        monkeypatch.setattr(
            "modelpool.actors.cli.terminal.status_socket.plain_status", lambda status, answer=answer: answer
        )
        socket = StatusSocket(path, full_status)
        assert asked_status(str(path)) is None
        socket.close()
        monkeypatch.undo()


def test_the_command_shows_it_without_importing_ray_torch_or_numpy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They took 5 s of CPU time for a status that the process of the pool has at hand."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    socket = StatusSocket(tmp_path / "s", full_status)
    me = psutil.Process()
    running = RunningPool("mine", "modelpool", "127.0.0.1:1", me.pid, me.create_time(), "", 0.0, str(tmp_path / "s"))
    write_run_file(running)
    try:
        assert ask_status("mine") == full_status()
        assert ask_status("127.0.0.1:1") is None
        for arguments in (["status"], ["status", "mine", "--json"]):
            ran = subprocess.run(
                [sys.executable, "-c", COMMAND, *arguments],
                env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True,
            )  # fmt: skip
            *shown, loaded = ran.stdout.splitlines()
            assert loaded == "[]", ran.stderr
        assert json.loads(shown[0])["failures"] == [{"job_id": "x", "message": "broken", "seconds": 1.5}]
    finally:
        socket.close()
