"""`modelpool top`: a frame of a pool, the rates between two, and how it ends."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import termios
import threading

import pytest
from rich.console import Console
from rich.text import Text

from modelpool.actors.cli.cluster.top_view import BAR_CELLS, frame
from modelpool.actors.cli.main import run
from modelpool.actors.cli.terminal.fitted_table import FittedColumn, fitted_widths
from modelpool.actors.cli.terminal.session import Session
from modelpool.actors.control.status import (
    FailedJob,
    NodeCosts,
    NodeGroupStatus,
    PoolStatus,
    ResidentPart,
    RunStatus,
    WorkerStatus,
)
from modelpool.pool.values.specs.spec import WorkerId
from tests.actors.cli.conftest import Command
from tests.actors.cli.fakes import FakePool

MIB = 1 << 20
BUSY = WorkerStatus(
    id=WorkerId("gpu-0"),
    state="busy",
    device="sim:0",
    incarnation=1,
    capacity_bytes=64 * MIB,
    used_bytes=48 * MIB,
    resident=("shapes/unet@1", "shapes/vae@2"),
    task="sample",
    parts=(
        ResidentPart("shapes/unet@1", 32 * MIB, 32 * MIB, True),
        ResidentPart("shapes/vae@2", 16 * MIB, 20 * MIB, False),
    ),
    run=RunStatus("s-3", "ann", "sample", 1, 7, 20, 1.5, False),
    runs=8,
    runs_resident=6,
)
STARTING = WorkerStatus(WorkerId("gpu-1"), "starting", "", 2, 0, 0, (), None, "killed by signal 9")
STATUS = PoolStatus(
    workers=(BUSY, STARTING),
    waiting={"encode": 0, "sample": 5, "decode": 1},
    jobs={"live": 4, "succeeded": 10, "failed": 0, "cancelled": 0},
    uploaded_bytes=100 * MIB,
    streamed_bytes=0,
    patch_switches=3,
    tasks_resident=27,
    tasks_total=30,
    restarts=1,
    seconds=50.0,
    waiting_by_user={"ann": {"sample": 4}, "": {"sample": 1, "decode": 1}},
    record="/logs/pool.jsonl",
)


class TopPool(FakePool):
    """A pool with that status."""

    def status(self) -> PoolStatus:
        return STATUS


def drawn(now: PoolStatus, before: PoolStatus | None = None) -> str:
    console = Console(width=160, force_terminal=False, no_color=True)
    with console.capture() as captured:
        console.print(frame(now, before))
    return captured.get()


def test_a_frame_shows_gpus_bars_queues_and_rates(command: Command) -> None:
    ended = command("top", "mine", "--once", "--every", "2", pool=TopPool())
    assert ended.code == 0
    assert "1 of 2 GPUs up, 1 busy; jobs: 4 live, 10 succeeded; up for 50.0 s" in ended.out
    bar = "A" * (BAR_CELLS // 2) + "B" * (BAR_CELLS // 4) + "." * (BAR_CELLS // 4)
    row = rf"^gpu-0 +sim:0 +busy +sample 7/20 of s-3, 1\.5 s +{re.escape(bar)} +48\.0 MiB of 64\.0 MiB +8 +75%"
    assert re.search(row, ended.out, re.MULTILINE)
    assert re.search(r"^gpu-1 +- +starting +- +- +- +0 +-", ended.out, re.MULTILINE)
    assert re.search(r"^A +shapes/unet +32\.0 MiB +resident on 1, with LoRAs on 1$", ended.out, re.MULTILINE)
    assert re.search(r"^B +shapes/vae +20\.0 MiB +resident on 0, partial on 1$", ended.out, re.MULTILINE)
    assert re.search(r"^all users +0 +5 +1$", ended.out, re.MULTILINE)
    assert re.search(r"^ann +0 +4 +0$", ended.out, re.MULTILINE)
    assert re.search(r"^no name +0 +1 +1$", ended.out, re.MULTILINE)
    assert "0.20 jobs, 0.60 tasks per second since the start" in ended.out
    assert "90% of 30 tasks had all weights resident" in ended.out
    assert re.search(r"^record +/logs/pool\.jsonl$", ended.out, re.MULTILINE)
    assert re.search(r"^gpu-1 +killed by signal 9$", ended.out, re.MULTILINE)


def test_a_frame_shows_nodes_groups_the_time_left_and_failures() -> None:
    on_a = dataclasses.replace(BUSY, node="a1b2", node_name="big")
    on_b = dataclasses.replace(BUSY, id=WorkerId("gpu-2"), state="idle", run=None, node="c3", node_name="small")
    now = dataclasses.replace(
        STATUS,
        workers=(on_a, dataclasses.replace(on_b, leaves_in=90.0), STARTING),
        nodes={"a1b2": "big", "c3": "small"},
        left_seconds=754.0,
        failures=(FailedJob("s-1", "older", 80.0), FailedJob("s-9", "unknown LoRA\nmore", 5.0)),
        scaling=NodeCosts(
            (NodeGroupStatus("a100", 2, 4, 1, 3.5, "backing off"),), 1.25, 7.0, "requested 1 node of a100"
        ),
    )
    text = drawn(now)
    assert "; jobs: 4 live, 10 succeeded; 12:34 left; up for 50.0 s" in text
    assert re.search(r"^big +1 +1 +8 +48\.0 MiB of 64\.0 MiB +$", text, re.MULTILINE)
    assert re.search(r"^small +1 +0 +8 +48\.0 MiB of 64\.0 MiB +ends in 1:30 *$", text, re.MULTILINE)
    assert re.search(r"^a100 +2 of 4 +1 +7\.00 +backing off *$", text, re.MULTILINE)
    assert re.search(r"^all groups +7\.00 +1\.25 so far *$", text, re.MULTILINE)
    assert "requested 1 node of a100" in text
    assert re.search(r"^s-9 +5\.0 s ago +unknown LoRA *$\n^s-1 +1:20 ago +older", text, re.MULTILINE)
    assert "left" not in drawn(dataclasses.replace(now, left_seconds=None))


def test_rates_are_between_two_frames() -> None:
    later = dataclasses.replace(
        STATUS, seconds=54.0, jobs={**STATUS.jobs, "succeeded": 16}, tasks_total=50, uploaded_bytes=140 * MIB
    )
    text = drawn(later, STATUS)
    assert "1.50 jobs, 5.00 tasks per second in the last 4.0 s" in text
    assert "10.0 MiB uploaded, 0 B streamed per second in the last 4.0 s" in text


def test_a_pool_that_has_done_nothing_yet_can_be_drawn() -> None:
    nothing = PoolStatus((), {"encode": 0}, {"live": 0}, 0, 0, 0, 0, 0, 0)
    text = drawn(nothing)
    assert "0 of 0 GPUs up, 0 busy; jobs: no jobs yet" in text
    assert "waiting" not in text


def test_a_bar_is_never_longer_than_its_gpu() -> None:
    """Whatever parts there are, and however they round."""
    for count in (1, 3, 7, 40, 61):
        parts = tuple(ResidentPart(f"c{number:02}", 64 * MIB // count, 64 * MIB, False) for number in range(count))
        full = dataclasses.replace(BUSY, parts=parts, used_bytes=sum(part.resident_bytes for part in parts))
        row = next(line for line in drawn(dataclasses.replace(STATUS, workers=(full,))).splitlines() if "gpu-0" in line)
        bar = re.search(r"1\.5 s +([A-Z.]+) ", row)
        assert bar is not None
        assert len(bar[1]) == BAR_CELLS


#: three GPUs with names as clouds and vendors give them
LONG_NAMES = dataclasses.replace(
    STATUS,
    workers=(
        dataclasses.replace(
            BUSY,
            id=WorkerId("gpu-12"),
            device="NVIDIA H100 80GB HBM3",
            node_name="ip-10-0-12-133",
            resident=("sd_xl_base_1.0/diffusion_model@1", "sd_xl_base_1.0/text_encoder@2"),
            run=RunStatus("014a98b7d2-9", "ann", "sample", 1, 7, 20, 1.5, False),
        ),
        BUSY,
        STARTING,
    ),
)


def on_a_terminal(arguments: list[str], columns: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the lines that a command prints on a pseudo-terminal of this width."""

    class LongNames(FakePool):
        def status(self) -> PoolStatus:
            return LONG_NAMES

    ours, theirs = os.openpty()
    written: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):
            while part := os.read(ours, 4096):
                written.append(part)

    with monkeypatch.context() as patch, os.fdopen(theirs, "w") as screen:
        patch.setenv("TERM", "xterm")
        patch.setenv("COLUMNS", str(columns))  # Rich asks the streams of the process, which are those of the tests
        patch.setattr("sys.stdout", screen)
        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        assert run(arguments, Session((), lambda options: LongNames())) == 0
        screen.flush()
        termios.tcdrain(screen.fileno())
    reader.join(timeout=30)
    os.close(ours)
    text = b"".join(written).decode()
    return [line.rstrip() for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).splitlines()]


def test_id_state_and_task_stay_on_narrow_terminals_and_bar_and_kind_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """On 80 columns, ids were empty and states were left out, beside a bar of full length."""
    missing = {}
    wanted = {
        "top": ("gpu-12  ", " busy ", " sample 7/20 of 014a98b7d2-9, 1.5 s", "gpu-1 ", " starting "),
        "status": ("gpu-12  ", " busy ", " sample ", "gpu-1 ", " starting (restarts: 1) "),
    }
    for command_name, texts in wanted.items():
        for columns in (60, 80, 100):
            arguments = [command_name, "mine", *(["--once"] if command_name == "top" else [])]
            lines = on_a_terminal(arguments, columns, monkeypatch)
            assert max(map(len, lines)) <= columns
            rows = "\n".join(line + " " for line in lines if line.startswith("gpu-"))
            missing[command_name, columns] = [text for text in texts if text not in rows]
    assert not any(missing.values()), missing
    assert "NVIDIA H100 80GB HBM3" in "".join(on_a_terminal(["top", "mine", "--once"], 160, monkeypatch))


def test_columns_are_shortened_then_left_out_in_their_order() -> None:
    def column(cells: int, gives_way: int, least: int = 4, stays: bool = False) -> FittedColumn:
        return FittedColumn("x", [Text("y" * cells)], gives_way=gives_way, least_cells=least, stays=stays)

    columns = (column(10, 0), column(10, 2), column(10, 1), column(10, 3, stays=True))
    widths = {width: fitted_widths(columns, 1, width) for width in (50, 43, 41, 33, 31, 28, 22, 20, 5)}
    assert widths == {
        50: [10, 10, 10, 10],
        43: [10, 10, 10, 10],
        41: [10, 10, 8, 10],
        33: [10, 6, 4, 10],
        31: [10, 4, 4, 10],
        28: [10, 6, 0, 10],
        22: [10, 0, 0, 10],
        20: [10, 0, 0, 9],
        5: [10, 0, 0, 4],
    }


def test_on_a_terminal_it_draws_until_q(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pseudo-terminal whose keyboard says x, then q; the keys are as they were afterwards."""
    ours, theirs = os.openpty()
    monkeypatch.setenv("TERM", "xterm")
    asked: list[float] = []

    class Watched(TopPool):
        def status(self) -> PoolStatus:
            asked.append(1.0)
            os.write(ours, b"x" if len(asked) < 3 else b"q")
            return dataclasses.replace(STATUS, seconds=50.0 + len(asked))

    with os.fdopen(theirs, "r", closefd=False) as keyboard, os.fdopen(theirs, "w") as screen:
        monkeypatch.setattr("sys.stdin", keyboard)
        monkeypatch.setattr("sys.stdout", screen)
        before = termios.tcgetattr(keyboard)
        drain = threading.Thread(target=_read_until_closed, args=(ours,), daemon=True)
        drain.start()
        assert run(["top", "mine", "--every", "0.1"], Session((), lambda options: Watched())) == 0
        assert termios.tcgetattr(keyboard) == before
    assert len(asked) == 3


def _read_until_closed(terminal: int) -> None:
    """Whoever looks at the screen: without that, whatever draws waits in the end."""
    with contextlib.suppress(OSError):
        while os.read(terminal, 4096):
            pass


def test_without_a_terminal_it_prints_one_frame_and_too_short_pauses_are_refused(command: Command) -> None:
    assert command("top", "mine", pool=TopPool()).out.count("GPUs up") == 1
    assert command("top", "mine", "--every", "0", pool=TopPool()).code == 2


def test_mates_deadlines_and_gpu_time_of_users_are_shown(command: Command) -> None:
    """Found in a review: what the scheduler counts of deadlines and users was shown nowhere."""
    assert BUSY.run is not None
    shared = dataclasses.replace(BUSY, run=dataclasses.replace(BUSY.run, mates=3))
    seconds = {f"user-{number}": 10.0 - number for number in range(9)} | {"": 20.0}
    now = dataclasses.replace(
        STATUS, workers=(shared, STARTING), deadlines_met=3, deadlines_missed=1, seconds_by_user=seconds
    )
    text = drawn(now)
    assert "sample 7/20 of s-3 + 3 more, 1.5 s" in text
    assert re.search(r"^deadlines +3 met, 1 missed *$", text, re.MULTILINE)
    assert re.search(
        r"^GPU time +no name 20\.0 s, user-0 10\.0 s, .*user-4 6\.0 s, 4 more 14\.0 s *$", text, re.MULTILINE
    )
    plain = drawn(STATUS)
    assert "deadlines" not in plain
    assert "GPU time" not in plain

    class SharedPool(TopPool):
        def status(self) -> PoolStatus:
            return now

    ended = command("status", "mine", pool=SharedPool())
    assert re.search(r"^deadlines +3 met, 1 missed$", ended.out, re.MULTILINE)
    [found] = command("status", "mine", "--json", pool=SharedPool()).objects
    assert (found["deadlines_met"], found["deadlines_missed"], found["seconds_by_user"]) == (3, 1, seconds)


@pytest.mark.parametrize("every", ["nan", "inf", "1e12", "0.05", "-1"])
def test_frames_come_as_often_as_can_be(command: Command, every: str) -> None:
    """Found in a review: nan drew as fast as it could, and a huge number broke the wait for a key."""
    ended = command("top", "mine", "--every", every, pool=TopPool())
    assert ended.code == 2
    assert re.search(r"--every: found .*, expected a number of seconds from 0\.1 to 3600", ended.err)
