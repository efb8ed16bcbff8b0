"""`pytest --forks` runs each test once, in processes that fork after the collection, and reports like one process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.architecture.source_tree import ROOT
from tests.forked import units_of

CONFTEST = """
from pathlib import Path
import os
import pytest
from tests.forked import add_option as pytest_addoption, configure as pytest_configure

def pytest_runtest_logreport(report):  # in the process that has collected, and in its own
    if report.when == "call" or report.failed:
        with open(Path(__file__).with_name("reports"), "a") as file:
            file.write(f"{os.getpid()} {report.nodeid} {report.outcome}\\n")

@pytest.fixture(scope="session", autouse=True)
def of_session():
    yield
    with open(Path(__file__).with_name("sessions"), "a") as file:
        file.write("ended\\n")
"""
OUTCOMES = """
import os, time, warnings
import pytest

@pytest.fixture(scope="module")
def of_module():
    return []

def test_passes(of_module, tmp_path, capfd):
    of_module.append(1)
    (tmp_path / "file").write_text("x")
    print("seen")
    assert capfd.readouterr().out == "seen\\n"

def test_fails(of_module):
    of_module.append(2)
    print("printed before")
    assert of_module == 0

@pytest.mark.skip(reason="unsuitable")
def test_is_skipped(): pass

@pytest.mark.xfail(strict=True)
def test_fails_as_expected(): assert 0

def test_warns(of_module):
    warnings.warn("of a test")
    assert of_module == [1, 2]

@pytest.fixture
def ends_badly():
    yield
    raise ValueError("at the end")

def test_ends_badly(ends_badly): pass
"""
DEATHS = """
import os
def test_before(): pass
def test_dies(): os._exit(3)
def test_behind(): pass
"""
PARENT = """
import os, time
from pathlib import Path
def test_waits():
    Path(__file__).with_name("pid").write_text(str(os.getpid()))
    time.sleep(60)
"""

LEFT = """
import os, tempfile, time, weakref
from multiprocessing import get_context
from pathlib import Path
HERE = Path(__file__).parent
left = []
class Made: pass
def ends(path):
    with open(path, "a") as file:
        file.write("once\\n")
made = Made()
weakref.finalize(made, ends, str(HERE / "ends"))
(HERE / "ends_of_import").write_text(str(HERE / "ends"))
def test_leaves():
    process = get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
    process.start()
    (HERE / "pid").write_text(str(process.pid))
    folder = tempfile.mkdtemp()
    kept = Made()
    weakref.finalize(kept, os.rmdir, folder)
    (HERE / "folder").write_text(folder)
    left.extend((process, kept))
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST)
    command = [sys.executable, "-m", "pytest", "-q", "-o", f"cache_dir={folder}/cache", *arguments, str(folder)]
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_reports_are_those_of_one_process(tmp_path: Path) -> None:
    """Outcomes, output, warnings, the cache of failed tests, fixtures of modules and sessions; and a process that dies
    fails its test alone."""
    (tmp_path / "test_outcomes.py").write_text(OUTCOMES)
    (tmp_path / "test_deaths.py").write_text(DEATHS)
    for number in range(8):
        (tmp_path / f"test_more_{number}.py").write_text("def test_one(): pass\n")
    done = run(tmp_path, "--forks", "3")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 failed, 13 passed, 1 skipped, 1 xfailed, 1 warning, 1 error" in done.stdout
    for text in ("printed before", "at the end", "UserWarning: of a test", "ended during the test (exit code 3)"):
        assert text in done.stdout
    failed = json.loads((tmp_path / "cache/v/cache/lastfailed").read_text())
    assert {name.partition("::")[2] for name in failed} == {"test_fails", "test_ends_badly", "test_dies"}
    reports = [line.split() for line in (tmp_path / "reports").read_text().splitlines()]
    (controller,) = (pid for pid, name, _ in reports if name.endswith("test_dies"))
    here = Counter(name for pid, name, _ in reports if pid == controller)
    there = Counter(name for pid, name, _ in reports if pid != controller)
    assert there == here - Counter({"test_deaths.py::test_dies": 1})
    assert sorted(there.values()) == [*[1] * 14, 2], "a call, and a failed end"
    assert (tmp_path / "sessions").read_text() == 3 * "ended\n"


def test_a_run_stops_at_the_first_failure(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("def test_fails(): assert 0\ndef test_behind(): assert 0\n")
    (tmp_path / "test_b.py").write_text(
        "import time\n" + "".join(f"def test_{n}(): time.sleep(0.5)\n" for n in range(9))
    )
    done = run(tmp_path, "--forks", "2", "-x")
    assert done.returncode == 1
    assert "1 failed" in done.stdout
    assert "9 passed" not in done.stdout


def test_the_processes_end_with_the_run(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(PARENT)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    command = [sys.executable, "-m", "pytest", "-q", "--forks", "1", str(tmp_path)]
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
    while not (tmp_path / "pid").exists() or not (pid := (tmp_path / "pid").read_text()):
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    out, _ = process.communicate()
    assert process.returncode == 143, out
    assert not Path("/proc", pid).exists()
    assert (tmp_path / "sessions").read_text() == "ended\n", "fixtures end, too"


def test_ctrl_c_in_a_terminal_ends_all_fixtures(tmp_path: Path) -> None:
    """Found: a terminal sends it to all processes, and the one that has collected told the others once more, in the
    middle of the ends of their fixtures, which left what they had started."""
    for name in ("a", "b", "c"):
        (tmp_path / f"test_{name}.py").write_text(
            PARENT.replace('"pid"', f'"pid_{name}"') + "def test_behind(): pass\n"  # else a process takes the next file
        )
    slowly = CONFTEST.replace("    yield\n", "    yield\n    __import__('time').sleep(1)\n")
    (tmp_path / "conftest.py").write_text(slowly)
    command = [sys.executable, "-m", "pytest", "-q", "--forks", "3", str(tmp_path)]
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    while len(list(tmp_path.glob("pid_*"))) < 3:
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate()
    assert process.returncode == pytest.ExitCode.INTERRUPTED, out
    assert (tmp_path / "sessions").read_text() == 3 * "ended\n"


def test_what_tests_leave_ends_with_their_process(tmp_path: Path) -> None:
    """Found: processes of `multiprocessing` that a test left, which end with their parent, outlived the run."""
    (tmp_path / "test_a.py").write_text(LEFT)
    done = run(tmp_path, "--forks", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not Path("/proc", (tmp_path / "pid").read_text()).exists()
    assert not Path((tmp_path / "folder").read_text()).exists()
    assert Path((tmp_path / "ends_of_import").read_text()).read_text() == "once\n", "of the process that has collected"


def test_files_are_units_in_their_order() -> None:
    assert units_of(["a", "a", "b", "a"]) == [range(2), range(2, 3), range(3, 4)]
    assert units_of([]) == []
