"""Processes that are forks of a server with all imports done: what they see, and who ends with whom."""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from modelpool.actors.ray.fork_server import PY_EXECUTABLE, ForkServer, fork_command, fork_environment
from modelpool.actors.ray.ray_session import short_folder
from modelpool.actors.ray.session_folder import remove_abandoned
from tests.actors.ray.local_cluster import can_hide

#: a module of the standard library that nothing else here imports
MODULE = "colorsys"
#: reports on the process that runs it, then waits
SCRIPT = f"""
import os, sys
print(os.getpid(), os.getppid(), {MODULE!r} in sys.modules, __name__, end=" ")
print(sys.argv[1:], os.getcwd(), os.environ["NEW"], flush=True)
print([name for name in ("ray", "torch") if name in sys.modules], sys.path[1], flush=True)
input()
print("errors come here too", file=sys.stderr, flush=True)
sys.exit(3)
"""


@pytest.fixture
def server() -> Iterator[ForkServer]:
    started = ForkServer.start([MODULE], short_folder())
    assert started is not None
    yield started
    started.close()


@contextlib.contextmanager
def worker(server: ForkServer, folder: Path, *prefix: str) -> Iterator[subprocess.Popen[str]]:
    """The script, started as Ray starts a worker: by a shell, after `prefix`."""
    (folder / "script.py").write_text(SCRIPT)
    python, script = (
        fork_environment(fork_command(server.socket))[PY_EXECUTABLE],
        shlex.quote(str(folder / "script.py")),
    )
    with subprocess.Popen(
        [*prefix, "bash", "-c", f"exec {python} -u {script} one 'two three'"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        cwd=folder, env={**os.environ, "NEW": "1", "PYTHONPATH": "/new/path"},
    ) as process:  # fmt: skip
        yield process
        process.kill()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def until_gone(pid: int) -> None:
    """Wait for the end of a process that is no child of this one."""
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait()


def test_a_worker_is_a_fork_with_the_arguments_folder_environment_and_streams_of_its_client(server, tmp_path) -> None:
    with worker(server, tmp_path) as process:
        pid, parent, rest = line_of(process).split(maxsplit=2)
        assert rest == f"True __main__ ['one', 'two three'] {tmp_path} 1\n"
        assert line_of(process) == "[] /new/path\n"
        assert int(pid) != process.pid
        assert psutil.Process(int(parent)).cmdline()[-1] == MODULE
        assert process.communicate("\n")[0] == "errors come here too\n"
    until_gone(int(pid))


def test_the_first_worker_does_not_wait_for_what_only_later_ones_need(tmp_path, monkeypatch) -> None:
    """1. A module waits for a file. 2. The first worker runs. 3. The second one waits. 4. With the file, it runs, and
    has both modules. 5. The processes of the server end together."""
    (tmp_path / "late.py").write_text("import os, time\nwhile not os.path.exists('now'):\n    time.sleep(0.01)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    started = ForkServer.start(["late"], short_folder(), [MODULE])
    assert started is not None
    with worker(started, tmp_path) as first:
        early = line_of(first)
        assert early.split()[2:4] == ["True", "__main__"]
        assert int(early.split()[1]) == started._process.pid
        with worker(started, tmp_path) as second:
            assert not select.select([second.stdout], [], [], 0.2)[0]
            (tmp_path / "now").touch()
            successor = psutil.Process(int(line_of(second).split()[1]))
            assert successor.ppid() == started._process.pid
            with worker(started, tmp_path) as third:
                assert int(line_of(third).split()[1]) == successor.pid
            successor.kill()
            started._process.wait()
    started.close()


def test_a_server_whose_later_imports_fail_ends(tmp_path, monkeypatch) -> None:
    (tmp_path / "unfit.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    unfit = ForkServer.start(["unfit"], short_folder(), [MODULE])
    assert unfit is not None
    assert unfit._process.wait(30) == 0
    with worker(unfit, tmp_path) as process:
        assert " False __main__ " in line_of(process)
    unfit.close()


def test_worker_and_client_end_together_and_the_server_forks_others(server, tmp_path) -> None:
    for ends_first in ("client", "worker"):
        with worker(server, tmp_path) as process:
            pid = int(line_of(process).split()[0])
            os.kill(process.pid if ends_first == "client" else pid, signal.SIGKILL)
            process.wait()
            until_gone(pid)


def test_workers_stay_when_the_server_ends_and_later_ones_start_without_it(server, tmp_path) -> None:
    with worker(server, tmp_path) as first:
        line_of(first)
        server.close()
        server.close()
        with worker(server, tmp_path) as second:
            assert f"False __main__ ['one', 'two three'] {tmp_path} 1" in line_of(second)
        line_of(first)
        assert first.communicate("\n")[0] == "errors come here too\n"


def test_a_server_ends_with_the_process_that_started_it_and_its_folder_with_the_next_pool(tmp_path) -> None:
    parent = Path(tempfile.mkdtemp(dir=short_folder()))
    program = f"""
from pathlib import Path
from modelpool.actors.ray.fork_server import ForkServer
import os, sys
server = ForkServer.start([{MODULE!r}], Path({str(parent)!r}))
print(server._process.pid, server.socket, flush=True)
input()
os._exit(0)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as starter:
        pid, socket = line_of(starter).split()
        assert remove_abandoned([parent]) == []
        starter.communicate("\n")
    until_gone(int(pid))
    assert Path(socket).exists()
    remove_abandoned([parent])
    parent.rmdir()


@pytest.mark.parametrize(
    "module",
    ["raise ImportError", "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"],
    ids=["cannot be imported", "starts a thread"],
)
def test_workers_start_without_a_server_that_cannot_be_forked(tmp_path, monkeypatch, module) -> None:
    (tmp_path / "unfit.py").write_text(module)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    unfit = ForkServer.start(["unfit"], short_folder())
    assert unfit is not None
    with worker(unfit, tmp_path) as process:
        assert " False __main__ " in line_of(process)
    unfit.close()


def test_a_process_that_has_opened_a_gpu_cannot_be_forked(tmp_path) -> None:
    (tmp_path / "gpu").touch()
    program = f"""
from modelpool.actors.ray.fork_server import can_fork
found = can_fork(("{tmp_path}/gpu",))
with open("{tmp_path}/gpu"):
    print(found, can_fork(), can_fork(("{tmp_path}/gpu",)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "True True False\n"


@pytest.mark.skipif(not can_hide(), reason="this machine allows no mount namespaces")
def test_a_worker_that_sees_other_files_than_the_server_is_no_fork_of_it(server, tmp_path) -> None:
    mounts = ("unshare", "--mount") if os.getuid() == 0 else ("unshare", "--user", "--map-root-user", "--mount")
    with worker(server, tmp_path, *mounts) as process:
        assert " False __main__ " in line_of(process)
