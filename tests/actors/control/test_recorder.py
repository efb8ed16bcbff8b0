"""A live pool's record: written beside its work, decided again to the same commands, never in the pool's way."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from modelpool.actors.control import recorder as recorder_module
from modelpool.actors.control.recorder import FLUSH_SECONDS, RETRY_SECONDS, Recorder
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.errors import OutputFailed
from modelpool.pool.values.specs.spec import RunErrorKind, WorkerId
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import RunTask, StartWorker, Submitted, Tick, WorkerUp
from modelpool.scheduler.simulator.record.event_log import LogEntry, LogHeader, read_entries, read_header
from modelpool.scheduler.simulator.record.log_trace import live_trace
from modelpool.scheduler.simulator.record.replay import replay
from tests.actors.fake_fleet import Desk, dialogue, settle
from tests.full_disk import full_after

CONFIG = SchedulerConfig(window=24)


def request(prompt: str, seed: int) -> GenerateRequest:
    return GenerateRequest(model="shapes", prompt=prompt, seed=seed, steps=2)


def read_log(path: Path) -> tuple[LogHeader, list[LogEntry]]:
    with path.open(encoding="ascii") as file:
        return read_header(file.readline()), list(read_entries(file))


async def _busy_pool(path: Path) -> Desk:
    """Images, a worker that dies and a run that fails, on two workers; closed at the end."""
    desk = await Desk(workers=2, config=CONFIG, recorder=Recorder(path, CONFIG)).open()
    await desk.submit(*(request(f"a circle {seed % 2}", seed) for seed in range(6)))
    await desk.clock.advance(0.5)
    await desk.finish(*desk.fleet.running)
    desk.fleet.kill(WorkerId("gpu-1"))
    await settle()
    await desk.clock.advance(2.0)
    desk.fleet.fail(desk.fleet.running[0], RunErrorKind.INTERNAL)
    await settle()
    ended = await desk.run_dry()
    assert len(ended) == 6
    await desk.controller.close()
    return desk


def test_a_live_pool_is_decided_again_to_the_same_commands(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "pool.jsonl"
    desk = asyncio.run(_busy_pool(path))
    header, entries = read_log(path)
    assert header.config == CONFIG
    outcome = replay(header, entries, check=True)
    assert outcome.same, outcome
    told = [command for entry in entries for command in entry.commands]
    sent = [(c.worker_id, c.incarnation, c.task_id, c.attempt) for c in told if isinstance(c, RunTask)]
    assert sent == [(s.worker_id, s.incarnation, s.task_id, s.request.attempt) for s in desk.fleet.sent]
    live = live_trace(entries, "pool")
    assert len(live.workload.jobs) == 6
    assert all(isinstance(job, Submitted) for job in live.workload.jobs)


def test_what_was_put_aside_is_written_within_a_second(tmp_path: Path) -> None:
    async def talk() -> None:
        desk = await Desk(recorder=Recorder(tmp_path / "log")).open()
        assert (await desk.controller.status()).record == str(tmp_path / "log")
        await desk.clock.advance(FLUSH_SECONDS)
        for _ in range(200):  # another thread writes
            await asyncio.sleep(0.01)
            if len(read_log(tmp_path / "log")[1]) >= 2:
                break
        events = [entry.event for entry in read_log(tmp_path / "log")[1]]
        assert isinstance(events[-1], WorkerUp)
        await desk.controller.close()

    asyncio.run(talk())


def test_a_file_that_is_there_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text("mine\n")
    for name in ("log-2.jsonl", "log-3.jsonl"):
        recorder = Recorder(path)
        recorder.open()
        assert recorder.words == str(tmp_path / name)
        recorder.close()
    assert path.read_text() == "mine\n"


def test_a_place_that_cannot_be_written_stops_the_pool_from_opening(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    async def talk() -> None:
        desk = Desk(recorder=Recorder(tmp_path / "file" / "log"))
        with pytest.raises(OutputFailed, match=r"file/log: cannot be written"):
            await desk.open()
        await desk.controller.close()

    asyncio.run(talk())


def test_a_pool_that_has_run_before_starts_without_its_event_log_and_creates_it_once_it_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Found by a restart of a controller after the folder of its log had gone: the pool did not come back, with all
    its jobs, until somebody repaired the disk."""
    place = tmp_path / "logs"
    place.write_text("no folder")
    path = place / "pool.jsonl"

    async def talk() -> None:
        desk = await Desk(recorder=Recorder(path, CONFIG), config=CONFIG, has_run=True).open()
        await desk.submit(request("a circle", 1))
        assert (await desk.controller.status()).record == f"{path}: not written now (File exists)"
        await desk.clock.advance(RETRY_SECONDS)
        await asyncio.to_thread(desk.controller._recorder.flush)
        assert [entry.message for entry in caplog.records if "event log" in entry.message] == [
            f"the event log of the pool is not written: {path}: File exists"
        ]
        place.unlink()
        await asyncio.to_thread(desk.controller._recorder.flush)
        assert (await desk.controller.status()).record == str(path)
        assert len(await desk.run_dry()) == 1
        await desk.controller.close()

    asyncio.run(talk())
    header, entries = read_log(path)
    assert any(isinstance(entry.event, Submitted) for entry in entries), "also what was submitted before"
    outcome = replay(header, entries, check=True)
    assert outcome.same, outcome


def test_a_file_that_cannot_be_created_to_the_end_is_told_of_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps a bounded number of lines for the file, and counts the others."""
    monkeypatch.setattr(recorder_module, "MOST_WAITING", 8)
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "log"
    recorder = Recorder(path)
    recorder.open()
    ticks(recorder, 0, 20)
    recorder.flush()
    assert len(recorder._lines) == 8
    assert recorder.words == f"{path}: not written now (File exists); 12 events lost"
    recorder.close()
    assert caplog.records[-1].message == (
        f"the event log ends early: {path}: not written now (File exists); 20 events lost"
    )
    recorder.close()


def ticks(recorder: Recorder, first: int, end: int) -> None:
    for number in range(first, end):
        recorder.note(Tick(float(number)), [StartWorker(WorkerId("gpu-0"), number)])


def times(path: Path) -> list[float]:
    return [entry.event.at for entry in read_log(path)[1]]


def test_a_full_disk_does_not_end_the_pool_and_the_record_goes_on_once_there_is_space(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Found by filling a disk: recording stopped for good at the first write that failed, with a line cut off."""
    path = tmp_path / "log"

    async def talk() -> None:
        desk = await Desk(recorder=Recorder(path, CONFIG), config=CONFIG).open()
        recorder = desk.controller._recorder
        recorder.flush()
        size_bytes = path.stat().st_size
        await desk.submit(request("a circle", 1))
        with full_after(size_bytes + 100):
            recorder.flush()
            assert path.stat().st_size == size_bytes, "no part of a line stays"
            words = (await desk.controller.status()).record
            assert words.startswith(f"{path}: not written now (")
            assert len(await desk.run_dry()) == 1
        await desk.submit(request("a circle", 2))
        assert len(await desk.run_dry()) == 1
        recorder.flush()
        assert (await desk.controller.status()).record == str(path)
        await desk.controller.close()

    caplog.set_level("INFO", logger=recorder_module.__name__)
    asyncio.run(talk())
    header, entries = read_log(path)
    assert len([entry for entry in entries if isinstance(entry.event, Submitted)]) == 2
    assert replay(header, entries, check=True).same
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"], "one line each"


def test_events_that_a_full_disk_has_no_room_for_are_counted_in_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "MOST_WAITING", 5)
    path = tmp_path / "log"
    recorder = Recorder(path, CONFIG)
    recorder.open()
    ticks(recorder, 0, 3)
    recorder.flush()
    with full_after(path.stat().st_size + 10):
        ticks(recorder, 3, 23)
        recorder.flush()
        assert len(recorder._lines) == 5
        assert recorder.words.endswith("; 15 events lost")
    ticks(recorder, 23, 25)
    recorder.flush()
    assert recorder.words == f"{path}: 15 events lost"
    with path.open(encoding="ascii") as file:
        read_header(file.readline())
        whole = read_entries(file)
        assert [entry.event.at for entry in whole] == [0.0, 1.0, 2.0, *map(float, range(18, 25))]
    assert whole.gap is not None
    assert (whole.lost, whole.gap.line, whole.gap.lost) == (15, 5, 15)
    assert "not written now (" in whole.gap.reason
    with path.open(encoding="ascii") as file:
        file.readline()
        assert [entry.event.at for entry in read_entries(file).up_to_gap()] == [0.0, 1.0, 2.0]
    recorder.close()


def test_a_log_whose_header_met_a_full_disk_begins_with_it_later(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "log", CONFIG)
    with full_after(10):
        recorder.open()
        ticks(recorder, 0, 2)
        recorder.flush()
        assert (tmp_path / "log").stat().st_size == 0
    recorder.close()
    assert read_log(tmp_path / "log")[0].config == CONFIG
    assert times(tmp_path / "log") == [0.0, 1.0]


def test_a_log_that_somebody_removes_or_cuts_off_is_told(tmp_path: Path) -> None:
    for spoil in (Path.unlink, lambda path: path.write_bytes(b"")):
        recorder = Recorder(tmp_path / "log")
        recorder.open()
        ticks(recorder, 0, 1)
        recorder.flush()
        assert recorder.path is not None
        spoil(recorder.path)
        ticks(recorder, 1, 2)
        recorder.flush()
        assert "another program has removed the file or cut it off" in recorder.words
        recorder.close()
        assert recorder.words.endswith("; 1 event lost")


def test_an_event_that_cannot_be_formatted_is_a_gap_and_the_next_ones_are_written(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "log")
    recorder.open()
    recorder.note(Tick(object()), [])  # type: ignore[arg-type]
    ticks(recorder, 1, 2)
    recorder.close()
    assert recorder.words.endswith("log: 1 event lost")
    with (tmp_path / "log").open(encoding="ascii") as file:
        read_header(file.readline())
        entries = read_entries(file)
        assert [entry.event.at for entry in entries] == [1.0]
    assert entries.gap is not None
    assert entries.gap.reason.startswith("Tick cannot be written (")


def test_an_event_that_cannot_be_formatted_and_has_no_room_is_lost_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: `status` counted it twice, and the log once."""
    monkeypatch.setattr(recorder_module, "MOST_WAITING", 5)
    recorder = Recorder(tmp_path / "log")
    recorder.open()
    with full_after((tmp_path / "log").stat().st_size):
        recorder.note(Tick(object()), [])  # type: ignore[arg-type]
        ticks(recorder, 1, 9)
        recorder.flush()
    recorder.close()
    assert recorder.words.endswith("log: 4 events lost")
    with (tmp_path / "log").open(encoding="ascii") as file:
        read_header(file.readline())
        entries = read_entries(file)
        assert [entry.event.at for entry in entries] == [4.0, 5.0, 6.0, 7.0, 8.0]
    assert entries.lost == 4


def test_no_more_than_a_bound_is_put_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "MOST_WAITING", 5)
    recorder = Recorder(tmp_path / "log")
    recorder.open()
    most = 0
    for number in range(23):
        recorder.note(Tick(float(number)), [StartWorker(WorkerId("gpu-0"), number)])
        most = max(most, len(recorder._waiting))
    recorder.close()
    assert most < 5
    assert [entry.event.at for entry in read_log(tmp_path / "log")[1]] == list(map(float, range(23)))


def test_nothing_is_put_aside_without_a_file() -> None:
    recorder = Recorder()
    recorder.open()
    recorder.note(Tick(1.0), [])
    assert (len(recorder._waiting), recorder.words) == (0, "")
    recorder.close()


def test_a_record_ends_with_what_the_core_failed_at(tmp_path: Path) -> None:
    async def talk() -> None:
        desk = await Desk(recorder=Recorder(tmp_path / "log")).open()
        handle = desk.state.handle

        def fragile(event):  # type: ignore[no-untyped-def]
            assert not isinstance(event, Submitted), "planted"
            return handle(event)

        desk.state.handle = fragile  # type: ignore[method-assign]
        await desk.submit(request("a circle", 1))
        last = read_log(tmp_path / "log")[1][-1]
        assert isinstance(last.event, Submitted)
        assert last.commands == ()
        await desk.controller.close()

    asyncio.run(talk())


@dialogue
async def test_the_pool_says_why_each_task_ran_where_it_did() -> None:
    """To the driver with each job's end, and to whoever asks."""
    desk = await Desk(workers=2).open()
    await desk.submit(request("a circle", 1), request("a square", 2))
    (sent, *_) = desk.fleet.running
    await desk.tell_step(sent, 1, 2)
    worker = next(w for w in (await desk.controller.status()).workers if w.id == sent.worker_id)
    assert worker.run is not None
    assert (worker.run.job_id, worker.run.step, worker.run.steps) == ("s-0", 1, 2)
    ended = await desk.run_dry()
    for job in ended:
        history = await desk.controller.history(job.job_id)
        attempts = {(a.worker_id, a.why) for task in history.tasks for a in task.attempts}
        assert {(task.worker, task.why) for task in job.tasks} == attempts
        assert all(task.why is not None and task.why.words for task in job.tasks)
    status = await desk.controller.status()
    parts = {part.component: part for worker in status.workers for part in worker.parts}
    assert parts
    assert all(0 < part.resident_bytes <= part.whole_bytes for part in parts.values())
    assert sum(worker.runs for worker in status.workers) == status.tasks_total
    assert status.seconds == 0.0


def test_a_full_disk_does_not_break_the_end_of_the_pool(tmp_path: Path) -> None:
    """Found in a review: what the disk did not take was tried again when the file was closed, and that raised."""
    recorder = Recorder(tmp_path / "log")
    recorder.open()
    with full_after((tmp_path / "log").stat().st_size):
        ticks(recorder, 0, 1)
        recorder.close()
    assert "log: not written now (" in recorder.words
    assert recorder.words.endswith("; 1 event lost")
    recorder.close()
