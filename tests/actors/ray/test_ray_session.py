"""What a program that starts a pool does to its machine and its terminal: each test is a program of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from modelpool.actors.ray.ray_session import is_loopback, worker_niceness
from tests.actors.fakes import make_pipes

ROOT = Path(__file__).parents[3]

DRIVER = r"""
import os, re, signal, sys
from pathlib import Path
import psutil
from modelpool import GenerateRequest
from tests.actors.fakes import ENDLESS, HOLD_ONCE, start_fake_pool

folder = Path(sys.argv[1])
with start_fake_pool("mine", workers=2, folder=folder) as pool:
    pool.wait_ready(120)
    family = psutil.Process().children(recursive=True)
    (session,) = set(re.findall(r"/[\w/]*/modelpool-\w+", " ".join(arg for p in family for arg in p.cmdline())))
    print([c.laddr.ip for p in family for c in p.net_connections() if c.status == psutil.CONN_LISTEN], flush=True)
    servers = [p for p in family if p.name() in ("gcs_server", "raylet")]
    ignored = [Path(f"/proc/{p.pid}/status").read_text().split("SigIgn:")[1].split()[0] for p in servers]
    print(oct(Path(session).stat().st_mode & 0o777), [int(signals, 16) & 1 for signals in ignored], flush=True)
    print({p.nice() for p in family} == {os.nice(0)}, flush=True)
    print("PYTHONPATH" in os.environ, sorted(p.name for p in folder.iterdir()), flush=True)

    # a death, of which Ray has much to say
    jobs = pool.submit(GenerateRequest(model="shapes", prompt=HOLD_ONCE, seed=1, steps=2))
    os.kill(int((folder / "reached").read_text()), signal.SIGKILL)
    print(jobs.wait(120).succeeded, flush=True)

    # Ctrl-C, from outside, to every process of this terminal
    pool.wait_ready(120)
    restarts = pool.status().restarts
    jobs = pool.submit(GenerateRequest(model="shapes", prompt=ENDLESS, seed=1))
    print("endless", flush=True)
    try:
        for image in jobs.images():
            pass
    except KeyboardInterrupt:
        jobs.cancel()
        print(jobs.wait(120).cancelled, pool.status().restarts - restarts, flush=True)
    print(Path(session).exists(), flush=True)
print(Path(session).exists())
print([p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE], flush=True)
"""

RAYLET = """
import os, signal, sys
from pathlib import Path
import psutil
from tests.actors.fakes import start_fake_pool

pool = start_fake_pool("mine", workers=2, folder=Path(sys.argv[1]))
pool.wait_ready(120)
workers = [psutil.Process(memory.pid) for memory in pool.memory().values()]
(raylet,) = [p for p in psutil.Process().children(recursive=True) if p.name() == "raylet"]
raylet.kill()
gone, alive = psutil.wait_procs(workers, timeout=10)
print(len(gone), len(alive), flush=True)
os._exit(0)
"""


@pytest.fixture
def environment(tmp_path) -> dict[str, str]:
    """What a program finds that knows nothing of the tests."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    return {**kept, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path / "state"), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "pipes").mkdir()
    (tmp_path / "state").mkdir()
    return make_pipes(tmp_path / "pipes")


@pytest.fixture
def driver(environment, folder) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(folder)], env=environment, cwd="/", text=True, bufsize=1,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    with process:
        yield process
        if process.poll() is None:
            process.kill()


@pytest.mark.ray
def test_a_pool_keeps_to_loopback_is_quiet_survives_ctrl_c_and_leaves_nothing(driver, folder, tmp_path) -> None:
    assert driver.stdout is not None
    assert driver.stderr is not None
    listening = driver.stdout.readline()
    assert listening.startswith("['"), driver.stderr.read()
    assert all(is_loopback(host.removeprefix("::ffff:")) for host in eval(listening))
    assert driver.stdout.readline() == "0o700 [1, 1]\n", "others can enter, or a closed terminal ends Ray's processes"
    assert driver.stdout.readline() == "True\n", "other programs take the cores from the controller and the workers"
    assert driver.stdout.readline() == "True ['gate', 'never', 'reached']\n"
    assert driver.stdout.readline() == "1\n"
    assert driver.stdout.readline() == "endless\n"
    (folder / "reached").read_text()
    os.killpg(driver.pid, signal.SIGINT)
    assert driver.stdout.readline() == "1 0\n"
    assert driver.stdout.read() == "True\nFalse\n[]\n"
    assert driver.stderr.read() == ""
    assert driver.wait(60) == 0
    (token,) = (tmp_path / "state" / "modelpool" / "machines").glob("*/ray_token")
    assert token.stat().st_mode & 0o777 == 0o600


@pytest.mark.ray
def test_workers_do_not_outlive_their_raylet(environment, folder) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RAYLET, str(folder)],
        env=environment, cwd="/", capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.stdout == "2 0\n", done.stderr


def test_the_user_decides_how_nice_workers_are() -> None:
    for variables, niceness in (({}, 0), ({"RAY_worker_niceness": "7"}, 7), ({"RAY_worker_niceness": "very"}, 0)):
        assert worker_niceness(variables) == niceness


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("127.0.0.1:6379", True),
        ("localhost:6379", True),
        ("127.8.9.1:1", True),
        ("10.0.0.4:6379", False),
        ("head.cluster.local:6379", False),
        ("auto", False),
    ],
)
def test_what_counts_as_this_machine(address, local) -> None:
    assert is_loopback(address) == local
