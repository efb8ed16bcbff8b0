"""Traces of processes that end in all the ways that a worker can: each case is a real process."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

from modelpool.actors.worker.crash_trace import (
    TRACES_KEPT,
    CrashEvidence,
    CrashTrace,
    count_oom_kills,
    read_evidence,
    remove_trace,
)

PROCESS = """
import ctypes, os, signal, sys, threading
from pathlib import Path
from modelpool.actors.worker.crash_trace import CrashTrace
trace = CrashTrace(Path(sys.argv[1]), "w", [Path(sys.argv[2])])
print("ready", flush=True)
sys.stdin.readline()
def end():
    exec(sys.argv[3])
end()
"""


def end_of(folder: Path, counter: Path, code: str, kill: bool = False, counted_later: str = "") -> CrashEvidence:
    """The evidence of a process that runs `code` at its end."""
    with subprocess.Popen(
        [sys.executable, "-c", PROCESS, str(folder), str(counter), code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        if counted_later:
            counter.write_text(counted_later)
        if kill:
            process.send_signal(signal.SIGKILL)
        process.communicate("go\n" if not kill else None)
    return read_evidence(folder, "w", [counter])


def test_each_end_leaves_its_own_traces(tmp_path) -> None:
    counter = tmp_path / "memory.events"
    endless = "sys.stdin.read()"
    cases = {
        "ctypes.string_at(0)": "Segmentation fault",
        "os.abort()": "Aborted",
        "os.kill(os.getpid(), signal.SIGBUS)": "Bus error",
    }
    for number, (code, words) in enumerate(cases.items()):
        counter.write_text("oom 0\noom_kill 3\n")
        found = end_of(tmp_path / str(number), counter, code)
        assert (found.found, found.fatal_error, found.exited, found.oom_kills) == (True, words, False, 0), code
        assert found.place, code
    for number, code in enumerate(("sys.exit(3)", "ctypes.CDLL(None).exit(1)", "pass")):
        found = end_of(tmp_path / f"exit{number}", counter, code)
        assert found == CrashEvidence(found=True, exited=True), code
    assert end_of(tmp_path / "kill", counter, endless, kill=True) == CrashEvidence(found=True)
    killed = end_of(tmp_path / "oom", counter, endless, kill=True, counted_later="oom 1\noom_kill 4\n")
    assert killed == CrashEvidence(found=True, oom_kills=1)


def test_only_kills_after_the_last_refresh_count(tmp_path) -> None:
    counter = tmp_path / "vmstat"
    counter.write_text("pgfault 9\noom_kill 1\n")
    trace = CrashTrace(tmp_path / "traces", "w", [tmp_path / "missing", counter])
    counter.write_text("pgfault 9\noom_kill 12\n")
    assert read_evidence(tmp_path / "traces", "w", [counter]).oom_kills == 11
    trace.refresh()
    assert read_evidence(tmp_path / "traces", "w", [counter]).oom_kills == 0
    trace.close()
    assert list((tmp_path / "traces").iterdir()) == []
    assert read_evidence(tmp_path / "traces", "w", [counter]) == CrashEvidence()


def test_the_traces_are_private_and_few(tmp_path) -> None:
    folder = tmp_path / "traces"
    folder.mkdir(mode=0o700)
    for number in range(TRACES_KEPT + 20):
        (folder / f"old-{number}.trace").touch()
        os.utime(folder / f"old-{number}.trace", (number, number))
        (folder / f"old-{number}.alive").touch()
    trace = CrashTrace(folder, "new", [])
    try:
        assert {stat.S_IMODE(path.stat().st_mode) for path in folder.glob("new.*")} == {0o600}
        kept = {path.stem for path in folder.glob("*.trace")}
        assert len(kept) == TRACES_KEPT
        assert {"new", f"old-{TRACES_KEPT + 19}"} <= kept
        assert {path.stem for path in folder.glob("*.alive")} == kept
    finally:
        trace.close()
    remove_trace(folder, "never existed")


def test_a_machine_without_counters_counts_nothing(tmp_path) -> None:
    (tmp_path / "odd").write_text("no such line\n")
    assert count_oom_kills([tmp_path / "missing", tmp_path / "odd"]) == 0
    assert count_oom_kills() >= 0
