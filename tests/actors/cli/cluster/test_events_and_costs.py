"""`modelpool events` and `modelpool costs` on a history that the test has written."""

from __future__ import annotations

import csv
import io
import signal
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from rich.console import Console

from modelpool.actors.cli.cluster import history_options
from modelpool.actors.cli.cluster.costs import COLUMNS, costs_table
from modelpool.actors.cli.cluster.events import MOST_SHOWN, events_table
from modelpool.actors.cli.cluster.history_options import parse_since
from modelpool.actors.cli.main import run
from modelpool.actors.cli.terminal.fitted_table import FittedTable
from modelpool.actors.cli.terminal.session import Session
from modelpool.actors.control.history.history_file import HistoryBounds, HistoryFile
from modelpool.actors.control.history.history_reader import NO_WORK, HistoryReader
from modelpool.actors.control.history.history_values import (
    CostKey,
    EventKind,
    HistoryBatch,
    HistoryEvent,
    RunCharge,
    RunEnd,
)
from modelpool.actors.ray.run_file import RunningPool
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.core.user_folders import STATE_VARIABLE
from tests.actors.cli.cluster.test_top import STATUS
from tests.actors.cli.conftest import Command
from tests.each_case import each_case

NOW = time.time()
HOUR = int(NOW // 3600)
LOST = "worker gpu-0 was lost (node lost): its node is gone without notice"


def charge(user: str, model: str, lora: str, seconds: float, end: RunEnd = RunEnd.USED, hour: int = HOUR) -> RunCharge:
    return RunCharge(CostKey(hour, user, model, lora, "a100"), end, seconds, seconds / 10, 0.001)


def filled() -> HistoryBatch:
    batch = HistoryBatch()
    for each in (
        charge("ann", "a-model-with-a-rather-long-name-v1-5", "watercolour", 7200.0),
        charge("ann", "shapes", "", 30.0, RunEnd.FAILED),
        charge("bob", "shapes", "ink + glow", 61.0),
        charge("", "shapes", "", 5.0, RunEnd.LOST),
        charge("bob", "shapes", "", 100.0, hour=HOUR - 24 * 40),
    ):
        batch.charge(each)
    batch.node_costs[HOUR, "a100"] = 9.0
    batch.events = [
        HistoryEvent(NOW - 86400 * 5, EventKind.POOL_STARTED, "the pool has started: pool modelpool, controller 1"),
        HistoryEvent(NOW - 7200, EventKind.WORKER_LOST, LOST, "rack-12.example", "gpu-0", "a100"),
        HistoryEvent(NOW - 60, EventKind.TASK_FAILED, "sample of shapes: internal: no", "rack-1", "gpu-1", "", "one"),
        HistoryEvent(NOW - 50, EventKind.TASK_FAILED, "sample of shapes: internal: no", "rack-1", "gpu-1", "", "one"),
    ]
    return batch


@pytest.fixture
def history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "state"))
    path = tmp_path / "state" / "modelpool.history.sqlite"
    with closing(HistoryFile(path)) as file:
        file.write(filled())
    return path


def test_costs_are_summed_by_the_fields_that_were_asked_for(history: Path, command: Command) -> None:
    ended = command("costs", "--by", "user,lora", "--json")
    assert ended.code == 0
    by = {(row["user"], row["lora"]): row for row in ended.objects}
    assert by["ann", "watercolour"]["gpu_seconds"] == 7200.0
    assert by["ann", ""]["failed_runs"] == 1
    assert by["ann", ""]["failed_gpu_seconds"] == 30.0
    assert by["", ""]["lost_gpu_seconds"] == 5.0
    assert sum(row["cost"] + row["failed_cost"] for row in by.values()) == pytest.approx(9.0)
    assert by[NO_WORK, ""]["cost"] == pytest.approx(9.0 - 7.296)
    assert ("bob", "") not in by, "40 days ago"
    assert {row["user"] for row in command("costs", "--by", "user", "--since", "60d", "--json").objects} >= {"bob"}
    table = command("costs", "--by", "user,lora").out
    assert "total" in table
    assert "9.00" in table
    assert "2:00:00" in table
    assert "1: 30.0 s" in table
    failures = "failed or cancelled: 1 run, 30.0 s; lost with workers: 1 run, 5.0 s; their cost: 0.03"
    assert failures in " ".join(table.split())


def test_csv_has_the_same_rows_as_json(history: Path, command: Command) -> None:
    rows = list(csv.DictReader(io.StringIO(command("costs", "--by", "model,group,day", "--csv").out)))
    objects = command("costs", "--by", "model,group,day", "--json").objects
    assert [list(row) for row in rows] == [["model", "group", "day", *COLUMNS]] * len(objects)
    assert [{name: str(value) for name, value in each.items()} for each in objects] == rows
    assert {row["day"] for row in rows} == {time.strftime("%Y-%m-%d", time.localtime(HOUR * 3600))}


def test_events_are_chosen_and_printed(history: Path, command: Command) -> None:
    ended = command("events", "--json")
    assert [event["kind"] for event in ended.objects] == ["worker_lost", "task_failed"]
    assert ended.objects[1]["count"] == 2
    assert len(command("events", "--since", "1w", "--json").objects) == 3
    assert [event["worker"] for event in command("events", "--node", "rack-12", "--json").objects] == ["gpu-0"]
    picked = command("events", "--kind", "task_failed,node_left", "--kind", "pool_started", "--since", "9d", "--json")
    assert [event["kind"] for event in picked.objects] == ["pool_started", "task_failed"]
    table = command("events").out
    assert LOST in table
    assert "(x2, until " in table
    assert "rack-12.example" in table
    assert "no such events" in command("events", "--kind", "node_left").err


@each_case(
    ("arguments", "said"),
    [
        (("costs", "--by", "usr,model"), "unknown field in --by 'usr'; did you mean 'user'? Known: day, group, hour,"),
        (("costs", "--by", ","), "Known: day, group, hour, lora, model, month, user."),
        (("costs", "--csv", "--json"), "--csv: found --json, too"),
        (("costs", "--since", "yesterday"), "--since: found 'yesterday', expected an age such as 90m, 12h, 2d or 3w"),
        (("events", "--since", "2999-01-01"), "expected a time that has passed"),
        (("events", "--kind", "worker_gone"), "--kind: unknown kind of event 'worker_gone'. Known: pool_started, "),
        (("events", "--pool", "nights"), "this folder has histories of: modelpool (--pool)"),
        (("events", "--pool", "10.0.0.1:6379"), "a history is read on the machine of the pool's controller"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused_with_what_is(arguments, said: str, history: Path, command: Command) -> None:
    ended = command(*arguments)
    assert ended.code == 2
    assert not ended.out
    assert said in ended.err, ended.err


def test_an_age_or_a_date_is_a_time() -> None:
    now = datetime(2026, 3, 1, 12).timestamp()
    ages = {"90s": 90, "1.5h": 5400, "2d": 172800, "3w": 1814400, "10m": 600}
    assert {text: now - parse_since(text, now) for text in ages} == ages
    assert parse_since("2026-02-01", now) == datetime(2026, 2, 1).timestamp()
    assert parse_since("2026-02-01T18:00", now) == datetime(2026, 2, 1, 18).timestamp()
    for wrong in ("", "2", "d", "-1d", "2 days", "2026-13-01", "0x1d"):
        with pytest.raises(UnusableField, match="--since"):
            parse_since(wrong, now)


def drawn(table: FittedTable, width: int) -> list[str]:
    console = Console(width=width, force_terminal=True, no_color=True, legacy_windows=False, color_system=None)
    with console.capture() as captured:
        console.print(table)
    return [line.rstrip() for line in captured.get().splitlines()]


@each_case("width", [60, 80, 100])
def test_tables_fit_the_terminal_and_keep_what_matters(width: int, tmp_path: Path) -> None:
    path = tmp_path / "h.sqlite"
    with closing(HistoryFile(path)) as file:
        file.write(filled())
    reader = HistoryReader(path)
    events = drawn(events_table(reader.events()), width)
    fields = ("user", "model", "lora")
    costs = drawn(costs_table(fields, reader.costs(fields)), width)
    for lines in (events, costs):
        assert max(map(len, lines)) <= width, lines
    text = " ".join(events)
    for at in (NOW - 7200, NOW - 60):
        assert history_options.time_of_year(at, NOW) in text
    for kind in ("pool_started", "worker_lost", "task_failed"):
        assert kind in text, events
    for word in ("gone", "without", "notice"):
        assert word in text, "the reason continues on the next line"
    heading = costs[0]
    for name in ("user", "model", "GPU time", "cost"):
        assert name in heading, heading
    assert any("ann" in line and "2:00:00" in line and "7.20" in line for line in costs), costs
    assert any(line.startswith("total") and "9.00" in line for line in costs), costs
    assert "failed" in drawn(costs_table(fields, reader.costs(fields)), 140)[0]


def test_what_was_removed_and_what_is_not_written_is_said(
    history: Path, command: Command, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with closing(HistoryFile(history, HistoryBounds(events=2, cost_rows=2))) as file:
        file.write(HistoryBatch(events=[HistoryEvent(NOW, EventKind.WORKER_UP, "up")]))
        file.prune()
    assert "2 older ones were removed" in command("events", "--since", "9d").err
    assert "older ones were removed" in command("costs", "--since", "60d").err
    running = RunningPool("modelpool", "modelpool", "127.0.0.1:1", 1, 0.0, "", history=str(history))
    monkeypatch.setattr("modelpool.actors.ray.run_file.running_pool", lambda name=None: running)
    troubled = replace(STATUS, history_trouble="/disk: full")
    for arguments in (["events"], ["costs"]):
        run(arguments, Session(tuple(arguments), lambda options: None, ask_status=lambda name: troubled))
        assert "this is not complete: /disk: full" in capfd.readouterr().err


def test_a_long_answer_says_what_it_leaves_out(history: Path, command: Command) -> None:
    with closing(HistoryFile(history)) as file:
        file.write(HistoryBatch(events=[HistoryEvent(NOW, EventKind.WORKER_UP, "up")] * (MOST_SHOWN + 5)))
    ended = command("events")
    assert "7 earlier events are left out; --json prints all" in ended.err
    assert len(command("events", "--json").objects) == MOST_SHOWN + 7


def test_follow_prints_what_is_written_later_until_it_is_interrupted(history: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from modelpool.actors.cli.main import main; main()", "events", "--follow"]
    following = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    try:
        assert following.stdout is not None
        assert LOST in following.stdout.readline()
        assert "task_failed" in following.stdout.readline()
        with closing(HistoryFile(history)) as file:
            file.write(HistoryBatch(events=[HistoryEvent(time.time(), EventKind.NODE_LEFT, "node x has left: idle")]))
        assert following.stdout.readline().endswith("  node_left  node x has left: idle\n")
        following.send_signal(signal.SIGINT)
        assert following.wait(30) in (0, 130)
    finally:
        following.kill()
        following.wait()


def test_status_names_the_trouble_of_the_history_once(command: Command, capfd: pytest.CaptureFixture[str]) -> None:
    troubled = replace(STATUS, history_trouble="/disk/h.sqlite: the history cannot be used (disk is full)")
    session = Session(("status",), lambda options: None, ask_status=lambda name: troubled)
    assert run(["status", "mine"], session) == 0
    assert capfd.readouterr().out.count("not written: /disk/h.sqlite: the history cannot be used (disk is full)") == 1
