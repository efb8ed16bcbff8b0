"""The file of a history: bounds, versions, damaged and full disks, readers beside the writer; and the spool."""

from __future__ import annotations

import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from modelpool.actors.control.history.event_rules import full_groups, submission_name
from modelpool.actors.control.history.history_file import (
    TOGETHER_SECONDS,
    USUAL_BOUNDS,
    VERSION,
    HistoryBounds,
    HistoryBusy,
    HistoryFailed,
    HistoryFile,
    batch_of,
)
from modelpool.actors.control.history.history_reader import COST_FIELDS, NO_WORK, HistoryReader
from modelpool.actors.control.history.history_values import (
    CostKey,
    CostSums,
    EventKind,
    HistoryBatch,
    HistoryEvent,
    RunCharge,
    RunEnd,
    charge_text,
    event_text,
    record_in_text,
)
from modelpool.actors.control.history.money_meter import MEMORY_SECONDS, MoneyMeter
from modelpool.actors.control.history.pool_history import history_path
from modelpool.actors.control.history.spool import Spool, remove_orphans, spooled_records, spools_left
from modelpool.pool.values.core.errors import UnknownName
from modelpool.scheduler.model.node_groups import NodeGroup
from tests.each_case import each_case

HOUR = 500_000
AT = HOUR * 3600.0


def charge(user: str = "ann", seconds: float = 2.0, hour: int = HOUR, **fields) -> RunCharge:
    key = CostKey(hour, user, fields.pop("model", "shapes"), fields.pop("lora", ""), fields.pop("group", ""))
    return RunCharge(key, fields.pop("end", RunEnd.USED), seconds, **fields)


def batch(*charges: RunCharge, events: int = 0, **fields) -> HistoryBatch:
    made = HistoryBatch(**fields)
    for each in charges:
        made.charge(each)
    made.events = [HistoryEvent(AT + number, EventKind.WORKER_UP, f"event {number}") for number in range(events)]
    return made


@contextmanager
def opened(path: Path, bounds: HistoryBounds = USUAL_BOUNDS) -> Iterator[HistoryFile]:
    with closing(HistoryFile(path, bounds)) as file:
        yield file


def test_sums_of_batches_add_up_and_are_read_by_any_fields(tmp_path: Path) -> None:
    path = tmp_path / "h.sqlite"
    with opened(path) as file:
        file.write(
            batch(charge(price=0.5), charge(seconds=1.0, end=RunEnd.FAILED, price=0.5), charge("bob", lora="ink"))
        )
        file.write(batch(charge(load_seconds=0.5), charge("bob", 3.0, HOUR + 24, end=RunEnd.LOST)))
        reader = HistoryReader(path)
        by_user = {row.values: row for row in reader.costs(("user",))}
        ann = by_user["ann",]
        assert (ann.sums.runs, ann.sums.seconds, ann.sums.load_seconds) == (2, 4.0, 0.5)
        assert (ann.sums.failed_runs, ann.sums.failed_seconds, ann.cost, ann.sums.failed_cost) == (1, 1.0, 1.5, 0.5)
        assert by_user["bob",].sums.lost_seconds == 3.0
        (all_rows,) = reader.costs(())
        for fields in (("user",), ("lora", "model"), COST_FIELDS):
            found = CostSums()
            for row in reader.costs(fields):
                assert len(row.values) == len(fields)
                found.add(row.sums)
            assert found == all_rows.sums, fields
        assert len(reader.costs(("day",))) == 2
        assert {row.values for row in reader.costs(("user",), since=AT + 3600.0)} == {("bob",)}
        with pytest.raises(UnknownName, match=r"(?s)'usr'.*user"):
            reader.costs(("usr",))


def test_money_of_nodes_beyond_that_of_runs_has_rows_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "h.sqlite"
    with opened(path) as file:
        file.write(batch(charge(seconds=100.0, group="a100", price=0.001), node_costs={(HOUR, "a100"): 3.6}))
    rows = {row.values: row.cost for row in HistoryReader(path).costs(("user",))}
    assert rows == pytest.approx({("ann",): 0.1, (NO_WORK,): 3.5})
    assert sum(row.cost for row in HistoryReader(path).costs(("group", "day"))) == pytest.approx(3.6)


def test_a_million_rows_are_pruned_the_oldest_first_in_a_short_log(tmp_path: Path) -> None:
    path = tmp_path / "h.sqlite"
    with opened(path, HistoryBounds(events=50_000, cost_rows=20_000)) as file:
        connection = file._connection
        connection.execute("BEGIN")
        rows = (
            (AT + number, AT + number, 1, "worker_up", "", "", "", f"event {number}") for number in range(1_000_000)
        )
        connection.executemany(
            "INSERT INTO event (at, until, count, kind, node, worker, node_group, text) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            rows,
        )
        connection.execute("COMMIT")
        file.write(batch(*(charge(f"user {number}") for number in range(30_000))))
        file.write(batch(charge("user 29999"), charge("late", hour=1)))
        before_bytes = file.used_bytes()
        file.prune()
        assert file.used_bytes() < before_bytes / 5
        assert path.stat().st_size < before_bytes / 5, "the disk gets the room back"
        log = path.with_name(f"{path.name}-wal")
        assert log.stat().st_size <= 8 << 20
        reader = HistoryReader(path)
        kept = reader.events()
        assert (len(kept), kept[0].event.text, kept[-1].event.text) == (50_000, "event 950000", "event 999999")
        users = {row.values[0] for row in reader.costs(("user",))}
        assert len(users) == 20_000
        assert {"user 29999", "late"} <= users, "what was changed last stays, also in an hour long ago"
        span = reader.span()
        assert (span.events_removed, span.costs_removed) == (950_000, 10_001)
        assert span.events_since == AT + 950_000


def test_a_file_beyond_its_bytes_gives_up_events_first(tmp_path: Path) -> None:
    path = tmp_path / "h.sqlite"
    with opened(path, HistoryBounds(size_bytes=1 << 20)) as file:
        long = [HistoryEvent(AT + number, EventKind.WORKER_LOST, "x" * 300) for number in range(20_000)]
        file.write(HistoryBatch(events=long))
        file.write(batch(charge()))
        assert file.used_bytes() > 5 << 20
        file.prune()
        assert file.used_bytes() <= 1 << 20
        reader = HistoryReader(path)
        assert 500 < len(reader.events()) < 20_000
        assert len(reader.costs(())) == 1


def test_equal_events_of_a_minute_are_one_row_with_a_count(tmp_path: Path) -> None:
    path = tmp_path / "h.sqlite"

    def failure(seconds: float, same: str = "gpu-0 bad_input", text: str = "failed") -> HistoryEvent:
        return HistoryEvent(AT + seconds, EventKind.TASK_FAILED, text, same=same)

    with opened(path) as file:
        file.write(HistoryBatch(events=[failure(0), failure(1), failure(2, "gpu-1 bad_input")]))
        file.write(HistoryBatch(events=[failure(TOGETHER_SECONDS, text="the last")]))
        file.write(HistoryBatch(events=[failure(TOGETHER_SECONDS + 1), failure(-5)]))  # the clock is set back
    found = [(each.event.count, each.event.at - AT, each.event.text) for each in HistoryReader(path).events()]
    assert found == [
        (3, 0, "the last"),
        (1, 2, "failed"),
        (1, TOGETHER_SECONDS + 1, "failed"),
        (1, -5, "failed"),
    ]


def test_events_are_chosen_by_time_kind_node_and_number(tmp_path: Path) -> None:
    path = tmp_path / "h.sqlite"
    with opened(path) as file:
        file.write(
            HistoryBatch(
                events=[
                    HistoryEvent(AT, EventKind.NODE_JOINED, "one", "rack-1"),
                    HistoryEvent(AT + 10, EventKind.WORKER_LOST, "two", "rack-1", "gpu-7"),
                    HistoryEvent(AT + 20, EventKind.NODE_LEFT, "three", "rack-2"),
                ]
            )
        )
        reader = HistoryReader(path)

        def texts(**choice) -> list[str]:
            return [each.event.text for each in reader.events(**choice)]

        assert texts(since=AT + 10) == ["two", "three"]
        assert texts(kinds=[EventKind.NODE_LEFT, EventKind.NODE_JOINED]) == ["one", "three"]
        assert texts(node="rack-1") == ["one", "two"]
        assert texts(node="gpu-7") == ["two"]
        assert texts(after=2) == ["three"]
        assert texts(most=2) == ["two", "three"]


def test_a_later_version_and_a_damaged_file_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "h.sqlite"
    with opened(path) as file:
        file.write(batch(charge()))
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version={VERSION + 1}")
    for use in (HistoryFile, HistoryReader):
        with pytest.raises(HistoryFailed, match=rf"h.sqlite: version {VERSION + 1} .*expected at most {VERSION}"):
            use(path)
    path.write_bytes(b"no database" * 1000)
    for use in (HistoryFile, HistoryReader):
        with pytest.raises(HistoryFailed, match=r"h.sqlite: .*not a database"):
            use(path)
    with pytest.raises(HistoryFailed, match="there is no history"):
        HistoryReader(tmp_path / "none.sqlite")


def test_one_process_writes_and_others_read_meanwhile_and_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "h.sqlite"
    with opened(path) as file:
        file.write(batch(charge(), events=1))
        with pytest.raises(HistoryBusy, match="another process"):
            HistoryFile(path)
        script = (
            "import sys; from pathlib import Path; "
            "from modelpool.actors.control.history.history_reader import HistoryReader; "
            "print(len(HistoryReader(Path(sys.argv[1])).events()), 'torch' in sys.modules)"
        )
        printed = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, check=True)
        assert printed.stdout.split() == ["1", "False"]
        file.write(batch(events=1))
        assert len(HistoryReader(path).events()) == 2
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(HistoryReader(path).events()) == 2
    tmp_path.chmod(0o500)
    try:
        assert len(HistoryReader(path).events()) == 2, "a folder that nobody can write is read"
    finally:
        tmp_path.chmod(0o700)


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"this user may mount no disk: {mounted.stderr.decode()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_batch_that_a_full_disk_refuses_is_not_there_at_all_and_can_be_written_again(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk"):
        path = tmp_path / "disk" / "h.sqlite"
        with opened(path) as file:
            file.write(batch(charge()))
            with suppress(OSError), (path.parent / "fill").open("wb", buffering=0) as fill:
                while True:
                    fill.write(bytes(4096))
            large = batch(*(charge(f"user {number}") for number in range(5_000)), events=2_000)
            for _ in range(2):
                with pytest.raises(HistoryFailed, match=r"h.sqlite: .*(full|disk)"):
                    file.write(large)
            assert len(HistoryReader(path).costs(("user",))) == 1
            (path.parent / "fill").unlink()
            file.write(large)
            (total,) = HistoryReader(path).costs(())
            assert (total.sums.runs, len(HistoryReader(path).events())) == (5_001, 2_000)


# ---- the spool -----------------------------------------------------------------------------------------------------


def test_records_of_a_process_that_was_killed_are_there(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path; "
        "from modelpool.actors.control.history.spool import Spool; "
        "spool = Spool(Path(sys.argv[1])); "
        "[spool.append(f'record {n}') for n in range(5)]; spool.turn(); "
        "[spool.append(f'later {n}') for n in range(3)]; os.kill(os.getpid(), signal.SIGKILL)"
    )
    prefix = tmp_path / "pool"
    ended = subprocess.run([sys.executable, "-c", script, prefix])
    assert ended.returncode == -9
    ((_, path),) = spools_left(prefix)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [record.text for record in spooled_records(path, after=4)] == ["record 4", "later 0", "later 1", "later 2"]


def test_records_of_before_a_turn_do_not_come_back_when_the_half_is_used_again(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "pool", half_bytes=400)
    for turn in range(5):
        for number in range(6):
            assert spool.append(f"turn {turn} record {number}")
        found = [record.text for record in spooled_records(spool.path, spool.number - 6, half_bytes=400)]
        assert found == [f"turn {turn} record {number}" for number in range(6)]
        spool.append("short")
        spool.turn()
    assert not all(spool.append("x" * 90) for _ in range(9)), "a full half takes no more"
    found = spooled_records(spool.path, 35, half_bytes=400)
    assert [record.number for record in found] == [36, 37, 38]
    spool.close()
    assert not spools_left(tmp_path / "pool")


@each_case("damage", ["magic", "empty", "cut", "checksum"])
def test_a_damaged_spool_has_the_records_before_the_damage(damage: str, tmp_path: Path) -> None:
    spool = Spool(tmp_path / "pool", half_bytes=4096)
    for number in range(4):
        spool.append(f"record {number}")
    content = bytearray(spool.path.read_bytes())
    match damage:
        case "magic":
            content[0] ^= 1
        case "empty":
            content.clear()
        case "cut":
            del content[4096 + 3 * 24 + 10 :]
        case "checksum":
            content[content.index(b"record 2")] ^= 1
    spool.path.write_bytes(content)
    expected = {
        "magic": [],
        "empty": [],
        "cut": ["record 0", "record 1", "record 2"],
        "checksum": ["record 0", "record 1"],
    }
    assert [each.text for each in spooled_records(spool.path, 0, half_bytes=4096)] == expected[damage]


def test_records_are_read_as_they_were_written_and_others_are_counted() -> None:
    awkward = 'ann\n"quoted" \x1f \u00fcn\u00ef'
    for made in (
        charge(awkward, 1 / 3, end=RunEnd.LOST, load_seconds=0.1, price=1e-9),
        HistoryEvent(AT, EventKind.NODE_LEFT, awkward, "node", "gpu-0", "group", "same"),
    ):
        text = charge_text(made, {}) if isinstance(made, RunCharge) else event_text(made)
        assert record_in_text(text) == made
    for wrong in ("", "[]", '["c", [1, 2], "used", 1, 2, 3]', '["c", [1, "", "", "", ""], "new", 1, 2, 3]'):
        with pytest.raises(ValueError):
            record_in_text(wrong)


def test_spools_of_pools_whose_folder_is_gone_are_removed_after_a_day(tmp_path: Path) -> None:
    there = Spool(tmp_path / "modelpool-0-a", history=tmp_path / "h.sqlite")
    gone = Spool(tmp_path / "modelpool-0-b", history=tmp_path / "no folder" / "h.sqlite")
    (tmp_path / "modelpool-0-c.1.spool").write_bytes(b"something else")
    for days, left in ((0.5, {"a", "b", "c"}), (2.0, {"a", "c"})):
        remove_orphans(tmp_path, "modelpool-0-*", time.time() + days * 86400)
        assert {path.name[12] for path in tmp_path.glob("*.spool")} == left, days
    there.close()
    gone.close()


def test_what_was_stored_of_a_spool_is_not_counted_again(tmp_path: Path) -> None:
    """A writer is killed between the commit of a batch and the removal of the spool."""
    path = tmp_path / "h.sqlite"
    spool = Spool(tmp_path / "pool")
    with opened(path) as file:
        for number in range(3):
            spool.append(charge_text(charge(f"user {number}"), {}))
        first = batch(*(charge(f"user {number}") for number in range(3)), spool=spool.name, sequence=spool.turn())
        file.write(first)
        spool.append(charge_text(charge("user 3"), {}))
        for _ in range(2):
            left = spooled_records(spool.path, file.stored_number(spool.name))
            if left:
                file.write(batch_of(spool.name, left))
    (total,) = HistoryReader(path).costs(())
    assert total.sums.runs == 4


def test_names_that_utf_8_has_no_bytes_for_are_stored_with_escapes(tmp_path: Path) -> None:
    """A file is named in another encoding, and the error of a job names it: neither the writer nor the next controller,
    which finds the record in a spool, fails because of it."""
    path, name = tmp_path / "h.sqlite", "m\udcff\udcfe"
    spool = Spool(tmp_path / "pool")
    event = HistoryEvent(AT, EventKind.JOB_FAILED, f"no file {name}", name, name, name)
    made = charge(name, model=name, lora=name, group=name)
    for text in (event_text(event), charge_text(made, {})):
        spool.append(text)
    own = batch(made, node_costs={(HOUR, name): 1.0})
    own.events.append(event)
    with opened(path) as file:
        file.write(own)
        file.write(batch_of(spool.name, spooled_records(spool.path, 0)))
    reader, escaped = HistoryReader(path), r"m\udcff\udcfe"
    runs = {row.values: row.sums.runs for row in reader.costs(("user", "model", "lora", "group"))}
    assert runs == {(escaped,) * 4: 2, (NO_WORK, "", "", escaped): 0}
    assert [each.event.text for each in reader.events()] == [f"no file {escaped}"] * 2


def test_a_record_costs_the_event_loop_microseconds(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "pool")
    best, texts = 1.0, {}
    for _ in range(5):
        spool.turn()
        began = time.perf_counter()
        for number in range(1000):
            spool.append(charge_text(charge(seconds=number / 7), texts))
        best = min(best, (time.perf_counter() - began) / 1000)
    assert best < 100e-6


def test_instance_types_of_one_group_reach_its_maximum_together() -> None:
    types = [NodeGroup(f"l4-{zone}", max_nodes=3, part_of="l4") for zone in ("a", "b")]
    groups = (*types, NodeGroup("a100", max_nodes=1), NodeGroup("off", max_nodes=0))
    cases = {
        (("l4-a", 1), ("l4-b", 1)): (),
        (("l4-a", 1), ("l4-b", 2)): ("group l4 has max_nodes, 3, while tasks wait",),
        (("a100", 1),): ("group a100 has max_nodes, 1, while tasks wait",),
    }
    assert {counts: full_groups(groups, dict(counts)) for counts in cases} == cases


# ---- money ---------------------------------------------------------------------------------------------------------


def test_a_meter_counts_each_part_of_an_account_once() -> None:
    """Cases: level in the history, money that the controller remembers (None: nothing is said), account, counted."""
    cases = [
        ("a new pool", 0.0, None, 5.0, 5.0),
        ("a controller after a killed one", 8.0, 7.5, 9.0, 1.0),
        ("one whose memory is newer than the history", 7.0, 8.0, 8.5, 1.5),
        ("a new pool after a regular end", 0.0, 0.0, 2.0, 2.0),
        ("a new pool after one that was killed, whose account begins anew", 8.0, 0.0, 2.0, 2.0),
        ("a new history of a pool that has spent before", 0.0, 50.0, 51.0, 1.0),
    ]
    wrong = []
    for name, level, memory, spent, expected in cases:
        meter = MoneyMeter()
        assert meter.advance(1.0, 0.0) == 0.0, "the history is not open yet"
        meter.opened(level)
        if memory is not None:
            meter.remembered(memory)
        counted = meter.advance(spent, 1.0)
        counted += meter.advance(spent, 2.0)
        if abs(counted - expected) > 1e-9:
            wrong.append((name, counted, expected))
    assert not wrong


def test_a_controller_that_is_given_no_account_counts_its_own_money_after_a_while() -> None:
    meter = MoneyMeter()
    meter.opened(8.0)
    assert meter.advance(1.0, 1.0) == 0.0, "the memory may still come"
    assert meter.advance(2.0, MEMORY_SECONDS) == 2.0
    meter.remembered(9.0)  # late: 8 of it are in the history
    assert meter.advance(11.5, MEMORY_SECONDS + 1.0) == pytest.approx(1.5)


def test_the_history_is_beside_the_journal() -> None:
    names = {
        "/state/night.journal.sqlite": "/state/night.history.sqlite",
        "/disk/jobs.sqlite": "/disk/jobs.history.sqlite",
        "/disk/jobs": "/disk/jobs.history.sqlite",
    }
    assert {journal: str(history_path(Path(journal))) for journal in names} == names
    assert [submission_name(name) for name in ("night.3.12", "a1b2c3", "v1.2", "x.y.1")] == [
        "night", "a1b2c3", "v1.2", "x.y.1",
    ]  # fmt: skip
