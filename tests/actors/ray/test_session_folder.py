"""The folder of a local Ray: who can enter it, and which left-behind folders and processes are removed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from modelpool.actors.ray import fork_client
from modelpool.actors.ray.session_folder import LOCK_NAME, PREFIX, SessionFolder, remove_abandoned

#: creates a folder and lets itself be killed with it
OWNER = """
import sys, time
from pathlib import Path
from modelpool.actors.ray.session_folder import SessionFolder
folder = SessionFolder(Path(sys.argv[1]))
print(folder.path, flush=True)
time.sleep(600)
"""
SLEEP = "import time; time.sleep(600)"


def rays_process(output: IO[bytes]) -> subprocess.Popen[bytes]:
    """A process with the title of one of Ray's, and a file of theirs."""
    return subprocess.Popen(
        ["ray::DashboardAgent", "-c", SLEEP], executable=sys.executable, pass_fds=(output.fileno(),)
    )


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A program that has started Ray."""
    with subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def path_of(owner: subprocess.Popen[str]) -> Path:
    assert owner.stdout is not None
    return Path(owner.stdout.readline().strip())


def test_only_the_user_can_enter_and_the_name_is_random(tmp_path: Path) -> None:
    first, second = SessionFolder(tmp_path), SessionFolder(tmp_path)
    first.path.chmod(0o777)  # Ray does this
    assert first.path.parent.stat().st_mode & 0o777 == 0o700
    assert first.path.parent.name.removeprefix(PREFIX) != second.path.parent.name.removeprefix(PREFIX)
    longest = Path("/tmp") / first.path.relative_to(tmp_path) / "session_2026-11-23_09-11-00_779683_4194304/sockets"
    assert len(str(longest / f"plasma_store_{'9' * 6}")) <= 107
    first.close()
    first.close()
    assert list(tmp_path.iterdir()) == [second.path.parent]
    second.close()


def test_what_a_killed_program_left_is_removed_with_its_processes(tmp_path: Path, owner) -> None:
    path = path_of(owner)
    (path / "session").mkdir()
    with (path / "session" / "agent.out").open("wb") as output:
        left = rays_process(output)
        reader = subprocess.Popen(
            [sys.executable, "-c", SLEEP, "/opt/ray/app.py", str(path / "session" / "agent.out")], stdout=output
        )
    try:
        assert remove_abandoned([tmp_path, tmp_path]) == []
        owner.kill()
        owner.wait()
        assert remove_abandoned([tmp_path]) == [path.parent]
        left.wait(60)  # of 600 s
        assert reader.poll() is None, "a program of the user that looks into the folder is none of Ray's"
        assert not path.parent.exists()
    finally:
        for process in (left, reader):
            process.kill()
            process.wait()


def test_programs_in_a_home_folder_called_ray_go_on(tmp_path: Path) -> None:
    """As in images of Ray. Only our stand-in for an agent was added to the killed processes."""
    (tmp_path / "ray").mkdir()
    folder, processes = SessionFolder(tmp_path), []
    for name in ("dashboard_client.py", "autoscaler.py", "agent_stand_in.py"):
        (program := tmp_path / "ray" / name).write_text(SLEEP)
        processes.append(subprocess.Popen([sys.executable, program, folder.path / "file"]))
    folder.kill_processes()
    try:
        assert [process.poll() is None for process in processes] == [True, True, False]
    finally:
        for process in processes:
            process.kill()
            process.wait()
        folder.close()


def test_forks_of_a_lost_daemon_that_another_one_has_adopted_go_on(tmp_path: Path, owner) -> None:
    """The clients of a fork server name its socket. They end with the Ray that has started them."""
    path = path_of(owner)
    client = [sys.executable, "-c", SLEEP, fork_client.__file__, str(path / "socket")]
    script = "/site-packages/ray/_private/workers/default_worker.py"
    adopted = subprocess.Popen([*client, script, "--object-store-name=/tmp/ray/session/plasma_store"])
    own = subprocess.Popen([*client, script, f"--object-store-name={path}/session/plasma_store"])
    owner.kill()
    owner.wait()
    try:
        assert remove_abandoned([tmp_path]) == [path.parent]
        own.wait(60)  # of 600 s
        assert adopted.poll() is None
    finally:
        for process in (adopted, own):
            process.kill()
            process.wait()


def test_a_living_program_keeps_its_folder_and_its_processes(tmp_path: Path) -> None:
    folder = SessionFolder(tmp_path)
    with (folder.path / "raylet.out").open("wb") as output:
        raylet = rays_process(output)
    try:
        assert remove_abandoned([tmp_path]) == []
        assert raylet.poll() is None
        folder.kill_processes()
        raylet.wait(60)  # of 600 s
    finally:
        raylet.kill()
        folder.close()


def test_folders_that_are_not_provably_left_behind_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a lock, open to others, a link, another user's, not ours by name."""
    (tmp_path / f"{PREFIX}without").mkdir(mode=0o700)
    opened = tmp_path / f"{PREFIX}open"
    opened.mkdir()
    opened.chmod(0o777)
    (opened / LOCK_NAME).touch()
    target = tmp_path / "target"
    target.mkdir(mode=0o700)
    (target / LOCK_NAME).touch()
    (tmp_path / f"{PREFIX}link").symlink_to(target)
    before = sorted(tmp_path.rglob("*"))
    assert remove_abandoned([tmp_path, tmp_path / "missing"]) == []
    theirs = tmp_path / f"{PREFIX}theirs"
    theirs.mkdir(mode=0o700)
    (theirs / LOCK_NAME).touch()
    uid = os.getuid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: uid + 1)
        assert remove_abandoned([tmp_path]) == []
    assert remove_abandoned([tmp_path]) == [theirs]
    assert sorted(tmp_path.rglob("*")) == before


def test_old_logs_of_ended_drivers_are_removed(tmp_path: Path) -> None:
    """Ray keeps a log of each driver that ever joined: a command a minute was 43,000 files a month. Logs of processes
    that live stay, as do the latest, and Ray's own ones."""
    folder = SessionFolder(tmp_path)
    logs = folder.path / "session_2026-11-30_08-26-13_109981_3160" / "logs"
    logs.mkdir(parents=True)
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    gone, lives = ended.pid, os.getpid()
    named = [f"python-core-driver-{n:02}000000ffff_{gone}.log" for n in range(3)]
    named += [f"worker-053f7d24-0100000{n}-{gone}.{kind}" for n in range(2) for kind in ("out", "err")]
    others = ["gcs_server.out", "raylet.err", f"python-core-driver-09000000ffff_{lives}.log"]
    others.append(f"worker-053f7d24-01000000-{lives}.out")
    for age, name in enumerate([*others, *named]):
        (logs / name).write_text(name)
        os.utime(logs / name, (1e9 + age, 1e9 + age))
    folder.remove_old_logs(most=2)
    assert {path.name for path in logs.iterdir()} == {*others, *named[-2:]}
    folder.remove_old_logs()
    assert len(list(logs.iterdir())) == len(others) + 2
    folder.close()
    folder.remove_old_logs()
