"""`modelpool replay` and `modelpool trace`: a recorded log, decided again or made a workload of."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from modelpool.actors.cli.simulate.simulate_workload import read_trace
from modelpool.scheduler.simulator.record.event_log import gap_line
from modelpool.scheduler.simulator.record.log_trace import live_trace
from tests.actors.cli.conftest import Command
from tests.scheduler.recorded import RecordedShell, busy_afternoon


@pytest.fixture(scope="module")
def afternoon() -> RecordedShell:
    return busy_afternoon()


@pytest.fixture
def log(afternoon: RecordedShell, tmp_path: Path) -> Path:
    path = tmp_path / "pool.jsonl"
    path.write_text("".join(afternoon.lines))
    return path


def test_the_same_decisions_are_made_again(command: Command, log: Path, afternoon: RecordedShell) -> None:
    ended = command("replay", str(log), "--check")
    assert ended.code == 0
    assert ended.out.startswith(f"{len(afternoon.lines) - 1} events in ")
    assert ended.out.endswith("all commands are identical to the recorded ones\n")
    [found] = command("replay", str(log), "--json").objects
    assert (found["same"], found["difference"], found["events"]) == (True, None, len(afternoon.lines) - 1)


def test_a_different_decision_is_told_and_is_no_success(command: Command, log: Path) -> None:
    lines = log.read_text().splitlines(keepends=True)
    number = next(n for n, line in enumerate(lines) if '"RunTask"' in line and n > 20)
    lines[number] = lines[number].replace('"RunTask":{"worker_id":"', '"RunTask":{"worker_id":"other-')
    log.write_text("".join(lines))
    ended = command("replay", str(log))
    assert ended.code == 1
    assert f"{log}:{number + 1}: different decision after: " in ended.out
    assert "  worker_id: 'other-" in ended.out
    assert "  event log of the task:\n" in ended.out
    [found] = command("replay", str(log), "--json").objects
    assert (found["same"], found["difference"]["line"]) == (False, number + 1)


def test_a_log_makes_a_trace_that_can_be_simulated(command: Command, log: Path, afternoon: RecordedShell) -> None:
    ended = command("trace", str(log), "jobs.trace")
    assert ended.code == 0
    assert ended.out.startswith("jobs.trace: 12 jobs over ")
    assert "1 job of these had been cancelled" in ended.out
    assert read_trace(Path("jobs.trace")) == live_trace(afternoon.entries, "pool").workload


@pytest.mark.parametrize("name", ["replay", "trace"])
def test_what_is_no_log_is_refused_by_name(command: Command, tmp_path: Path, name: str) -> None:
    more = ["out"] if name == "trace" else []
    strange = tmp_path / "strange"
    strange.write_text('{"digest": 1}\n')
    for path, complaint in (
        (strange, f"{strange}: line 1: modelpool: found None"),
        (tmp_path / "nowhere", f"{tmp_path / 'nowhere'}: cannot be read"),
    ):
        ended = command(name, str(path), *more)
        assert ended.code == 2
        assert complaint in ended.err
    strange.write_bytes(b"\xff\xfe")
    assert "not a text file" in command(name, str(strange), *more).err
    assert not Path("out").exists()


def test_a_broken_line_is_told_by_number(command: Command, log: Path) -> None:
    lines = log.read_text().splitlines(keepends=True)
    lines[4] = lines[4].replace('"at":', '"when":', 1)
    log.write_text("".join(lines))
    ended = command("replay", str(log))
    assert ended.code == 2
    assert f"{log}: line 5: " in ended.err


def test_a_trace_never_goes_over_a_log_or_anything_else_that_is_no_trace(command: Command, log: Path) -> None:
    """Found in a review: `trace LOG LOG` replaced the log."""
    recorded = log.read_text()
    (log.parent / "link").symlink_to(log)
    Path("notes.txt").write_text("mine\n")
    Path("folder").mkdir()
    for out in (log, log.parent / "link", Path("notes.txt"), Path("folder"), Path("/dev/null")):
        ended = command("trace", str(log), str(out))
        assert ended.code == 2
        assert f"OUT: {out} " in ended.err
    assert log.read_text() == recorded
    assert Path("notes.txt").read_text() == "mine\n"
    ended = command("simulate", "zipf:jobs=3", "--save-trace", "notes.txt")
    assert (ended.code, Path("notes.txt").read_text()) == (2, "mine\n")
    assert "--save-trace: notes.txt exists and is not a trace" in ended.err
    assert Path("/dev/null").is_char_device()


def test_an_older_trace_is_written_over(command: Command, log: Path) -> None:
    Path("jobs.trace").write_text("")
    for _ in range(2):
        assert command("trace", str(log), "jobs.trace").code == 0
    assert len(read_trace(Path("jobs.trace")).jobs) == 12
    assert not list(Path().glob("*.part"))


def test_a_log_that_ends_in_the_middle_says_so(command: Command, log: Path) -> None:
    """Found in a review: its last line was left out in silence."""
    whole = log.read_text().splitlines(keepends=True)
    log.write_text("".join(whole[:-1]) + whole[-1][:-20])
    note = f"{log}:{len(whole)}: the last line is truncated and ignored\n"
    ended = command("replay", str(log))
    assert ended.code == 0
    assert note in ended.out
    assert re.match(rf"{len(whole) - 2} events in \d+\.\d s, log truncated, \d+ comm", ended.out)
    [found] = command("replay", str(log), "--json").objects
    assert (found["same"], found["cut_off"]) == (True, len(whole))
    assert note in command("trace", str(log), "jobs.trace").out


def test_a_log_with_a_gap_is_replayed_up_to_it_and_says_so(command: Command, log: Path) -> None:
    lines = log.read_text().splitlines(keepends=True)
    lines[20:25] = [gap_line(5, "no space")]
    log.write_text("".join(lines))
    note = f"{log}:21: the log lacks 5 events (no space): "
    ended = command("replay", str(log))
    assert ended.code == 0
    assert f"{note}replayed up to here\n" in ended.out
    [found] = command("replay", str(log), "--json").objects
    assert (found["same"], found["events"], found["gap"]["lost"]) == (True, 19, 5)
    assert f"{note}without jobs" in command("trace", str(log), "jobs.trace").out


def test_a_log_without_a_job_makes_no_trace(command: Command, log: Path, afternoon: RecordedShell) -> None:
    log.write_text(afternoon.lines[0])
    ended = command("trace", str(log), "jobs.trace")
    assert ended.code == 2
    assert "no jobs that can be simulated" in ended.err
    assert not Path("jobs.trace").exists()
