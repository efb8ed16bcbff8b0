"""The journal: what was acknowledged is there after a crash, an outcome counts once, and only one process writes."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from PIL import Image

from modelpool import GenerateRequest, UserError
from modelpool.actors.control.detached import submission_journal as journals
from modelpool.actors.control.detached.records import (
    NewSubmission,
    RequestOutcome,
    SubmissionState,
    request_text,
    restored_request,
    with_deadline,
)
from modelpool.actors.control.detached.submission_journal import Fenced, Journal, JournalFailed, SubmissionExists
from modelpool.scheduler.model.messages import Outcome

TEXT = '{"model": "shapes", "prompt": "a red circle", "seed": 1}'


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    opened = Journal(tmp_path / "journal.sqlite")
    yield opened
    opened.close()


def submit(journal: Journal, name: str, count: int) -> None:
    journal.begin(NewSubmission(name, "/out", "ann", count))
    journal.append(name, 0, [TEXT] * count)
    journal.seal(name)


def succeeded(name: str, place: int, file: str = "a.png") -> RequestOutcome:
    return RequestOutcome(name, place, Outcome.SUCCEEDED, file, 10, "digest")


def crashed(path: Path, folder: Path) -> Path:
    """A copy of the journal as a crash would leave it: without the checkpoint of a regular close."""
    folder.mkdir(exist_ok=True)
    for file in path.parent.glob(f"{path.name}*"):
        if not file.name.endswith((".lock", "-shm")):
            shutil.copy(file, folder / file.name)
    return folder / path.name


def test_what_was_acknowledged_survives_a_crash(journal: Journal, tmp_path: Path) -> None:
    submit(journal, "kept", 3)
    journal.begin(NewSubmission("torn", "/out", "", 5))
    journal.append("torn", 0, [TEXT])
    journal.end([succeeded("kept", 1)])
    again = Journal(crashed(journal.path, tmp_path / "crashed"))
    (record,) = again.submissions()
    assert (record.submission_id, record.succeeded, record.pending) == ("kept", 1, 2)
    assert [each.place for each in again.pending("kept", -1, 10)] == [0, 2]
    assert again.outcomes("kept") == (succeeded("kept", 1),)
    assert again.epoch == journal.epoch + 1
    again.close()


def test_a_second_driver_with_the_same_id_changes_nothing_that_was_acknowledged(journal: Journal) -> None:
    """It began at the same time and is slower. What has an outcome would run again, with another seed."""
    submit(journal, "a", 2)
    journal.end([succeeded("a", 0)])
    journal.append("a", 0, [TEXT.replace("red", "blue")] * 3)
    assert journal.outcomes("a") == (succeeded("a", 0),)
    assert [each.place for each in journal.pending("a", -1, 10)] == [1]
    assert [journal.request_text("a", place) for place in range(2)] == [TEXT] * 2
    assert journal.seal("a", 3).request_count == 2


def test_an_outcome_counts_once_and_the_last_one_ends_the_submission(journal: Journal) -> None:
    submit(journal, "a", 2)
    assert journal.end([succeeded("a", 0), succeeded("a", 0, "other.png")]) == (succeeded("a", 0),)
    assert journal.end([succeeded("a", 0, "late.png")]) == ()
    assert journal.outcomes("a")[0].file == "a.png"
    journal.end([RequestOutcome("a", 1, Outcome.FAILED, error_kind="bad_input", message="why")])
    record = journal.find("a")
    assert (record.state, record.succeeded, record.failed) == (SubmissionState.ENDED, 1, 1)
    assert not journal.active()
    assert journal.end([succeeded("removed", 0)]) == ()


def test_submitting_again_under_an_id_has_no_effect_and_another_submission_is_refused(journal: Journal) -> None:
    submit(journal, "a", 2)
    journal.end([succeeded("a", 0)])
    assert journal.begin(NewSubmission("a", "/out", "ann", 2)).succeeded == 1
    for other in (NewSubmission("a", "/out", "ann", 3), NewSubmission("a", "/elsewhere", "ann", 2)):
        with pytest.raises(SubmissionExists, match="'a' belongs to a submission of 2 requests"):
            journal.begin(other)
    journal.begin(NewSubmission("b", "/out", "", 2))
    journal.append("b", 0, [TEXT])
    with pytest.raises(JournalFailed, match="received 1 of 2"):
        journal.seal("b")
    journal.begin(NewSubmission("b", "/out", "", 2))  # its driver died in between, and tries again
    journal.append("b", 0, [TEXT, TEXT])
    assert journal.seal("b").pending == 2


def test_cancelling_ends_what_is_pending_and_removing_needs_an_end(journal: Journal) -> None:
    submit(journal, "abc", 3)
    journal.end([succeeded("abc", 2)])
    with pytest.raises(JournalFailed, match="is active"):
        journal.remove("abc")
    assert journal.cancel("abc") == 2
    assert (journal.find("ab").cancelled, journal.find("ab").succeeded) == (2, 1)
    journal.remove("abc")
    with pytest.raises(UserError, match="abc"):
        journal.find("abc")
    submit(journal, "abc1", 1)
    submit(journal, "abc2", 1)
    with pytest.raises(UserError, match="abc"):
        journal.find("abc")


def test_one_process_has_the_journal_and_an_older_epoch_changes_nothing(journal: Journal, tmp_path: Path) -> None:
    with pytest.raises(JournalFailed, match="another running pool"):
        Journal(journal.path)
    submit(journal, "a", 1)
    with sqlite3.connect(journal.path) as other:  # a process that was suspended comes back after another took over
        other.execute("UPDATE epoch SET number = number + 1")
    other.close()
    with pytest.raises(Fenced):
        journal.end([succeeded("a", 0)])
    assert journal.find("a").pending == 1


def test_a_damaged_journal_is_refused_by_name(tmp_path: Path) -> None:
    cases = {"garbage": b"garbage" * 1000, "newer": None, "torn page": None}
    for name, content in cases.items():
        path = tmp_path / name / "journal.sqlite"
        if content is not None:
            path.parent.mkdir()
            path.write_bytes(content)
        else:
            opened = Journal(path)
            submit(opened, "a", 2000)
            opened.close()
            if name == "newer":
                with sqlite3.connect(path) as other:
                    other.execute(f"PRAGMA user_version = {journals.VERSION + 1}")
                other.close()
            else:
                with path.open("r+b") as file:
                    file.seek(4096 * 5)
                    file.write(b"\xff" * 4096 * 10)
        with pytest.raises(JournalFailed, match=r"journal\.sqlite"):
            Journal(path)
        assert not any(thread.name == "modelpool journal" for thread in threading.enumerate()), name


def test_a_full_disk_is_reported_and_nothing_of_the_write_remains(journal: Journal) -> None:
    submit(journal, "a", 1)
    (pages,) = journal._connection.execute("PRAGMA page_count").fetchone()
    journal._connection.execute(f"PRAGMA max_page_count = {pages}")
    journal.begin(NewSubmission("big", "/out", "", 10_000))
    with pytest.raises(JournalFailed, match="full"):
        journal.append("big", 0, [TEXT] * 10_000)
    journal._connection.execute("PRAGMA max_page_count = 1000000")
    journal.append("big", 0, [TEXT] * 10_000)
    assert journal.seal("big").pending == 10_000


def test_writes_that_arrive_together_share_a_transaction(journal: Journal) -> None:
    submit(journal, "a", 100)
    commits = list[str]()
    journal._connection.set_trace_callback(lambda text: commits.append(text) if text == "COMMIT" else None)
    begun, release = threading.Event(), threading.Event()

    def hold(connection: sqlite3.Connection) -> None:
        begun.set()
        release.wait()

    blocker = threading.Thread(target=journal._write, args=(hold,))
    blocker.start()
    begun.wait()
    writers = [threading.Thread(target=journal.end, args=([succeeded("a", place)],)) for place in range(100)]
    for writer in writers:
        writer.start()
    while journal._writes.qsize() < len(writers):
        pass
    release.set()
    for writer in (blocker, *writers):
        writer.join()
    assert len(commits) == 2
    assert journal.find("a").succeeded == 100


def test_the_oldest_ended_submissions_are_removed(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite", most_requests=10)
    submit(journal, "active", 4)
    for number in range(5):
        submit(journal, f"n{number}", 3)
        journal.cancel(f"n{number}")
    submit(journal, "last", 1)
    assert [record.submission_id for record in journal.submissions()] == ["active", "n4", "last"]
    assert journal._read("SELECT count(*) FROM request", ()) == [(8,)]
    journal.close()


def test_a_journal_of_every_version_is_brought_to_this_one(tmp_path: Path) -> None:
    """The file of the first version is in the repository; a later one gets a case here with its migration."""
    path = tmp_path / "journal.sqlite"
    script = (Path(__file__).parent / "journal_1.sql").read_text()
    with sqlite3.connect(path) as old:
        old.executescript(script)
    old.close()
    journal = Journal(path)
    assert [(r.submission_id, r.succeeded, r.pending) for r in journal.submissions()] == [("first", 1, 1)]
    assert [each.text for each in journal.pending("first", -1, 5)] == [TEXT]
    assert journal.pins() == {}, "the table is of version 2"
    assert (journal.probe(), journal.memory(), journal.history("a")) == (True, "", None), "tables of versions 4 and 5"
    journal.keep_pins(["shapes", "forms"], 2)
    journal.close()


def test_pins_are_kept_as_users_last_set_them_until_the_pool_ends(journal: Journal, tmp_path: Path) -> None:
    journal.keep_pins(["shapes", "forms"], 2)
    journal.keep_pins(["shapes"], 0)
    again = Journal(crashed(journal.path, tmp_path / "crashed"))
    assert again.pins() == {"forms": 2, "shapes": 0}
    again.drop_pins()
    assert again.pins() == {}
    again.close()


def test_a_request_comes_back_as_it_was_with_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("in.png", "edge.png"):
        Image.new("RGB", (64, 64)).save(name)
    request = GenerateRequest(
        model="shapes",
        prompt="a",
        seed=3,
        image="in.png",
        strength=0.5,
        controls=[{"model": "canny", "image": "edge.png"}],
        loras=["light:0.5"],
        deadline="1m",
    )
    restored = restored_request(request_text(request, tmp_path))
    assert Path(str(restored.image)) == tmp_path / "in.png"
    assert Path(str(restored.controls[0].image)) == tmp_path / "edge.png"
    same = {"image": request.image, "controls": request.controls}
    assert restored.model_copy(update=same) == request
    assert with_deadline(restored, 20.0).deadline == 40.0
    assert with_deadline(restored, 90.0).deadline == 1.0
    with pytest.raises(UserError, match="seed"):
        request_text(request.model_copy(update={"seed": None}), tmp_path)
    in_memory = request.model_copy(update={"image": Image.new("RGB", (64, 64))})
    with pytest.raises(UserError, match=r"image.*path of a file"):
        request_text(in_memory, tmp_path)


class JournalMachine(RuleBasedStateMachine):
    """Whatever happens, and wherever it crashes: the journal has exactly the acknowledged submissions, each outcome
    once, and the counts of both agree."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.crashes = 0
        self.journal = Journal(self.folder / "0" / "journal.sqlite")
        #: acknowledged submissions: the outcome of each place
        self.model: dict[str, list[Outcome | None]] = {}
        self.count = 0

    def teardown(self) -> None:
        self.journal.close()
        shutil.rmtree(self.folder)

    @rule(size=st.integers(1, 4), seal=st.booleans())
    def submit(self, size: int, seal: bool) -> None:
        self.count += 1
        name = f"s{self.count}"
        self.journal.begin(NewSubmission(name, "/out", "", size))
        self.journal.append(name, 0, [TEXT] * size)
        if seal:
            self.journal.seal(name)
            self.model[name] = [None] * size

    @precondition(lambda self: self.model)
    @rule(number=st.integers(0, 99), place=st.integers(0, 3), outcome=st.sampled_from(list(Outcome)))
    def end(self, number: int, place: int, outcome: Outcome) -> None:
        name = sorted(self.model)[number % len(self.model)]
        known = self.model[name]
        counted = self.journal.end([RequestOutcome(name, place, outcome)])
        is_new = place < len(known) and known[place] is None
        assert bool(counted) == is_new
        if is_new:
            known[place] = outcome

    @precondition(lambda self: self.model)
    @rule(number=st.integers(0, 99))
    def cancel(self, number: int) -> None:
        name = sorted(self.model)[number % len(self.model)]
        assert self.journal.cancel(name) == self.model[name].count(None)
        self.model[name] = [outcome or Outcome.CANCELLED for outcome in self.model[name]]

    @rule(clean=st.booleans())
    def restart(self, clean: bool) -> None:
        self.crashes += 1
        if clean:
            self.journal.close()
        path = crashed(self.journal.path, self.folder / str(self.crashes))
        if not clean:
            self.journal.close()
        before = self.journal.epoch
        self.journal = Journal(path)
        assert self.journal.epoch == before + 1

    @invariant()
    def agrees(self) -> None:
        assert {record.submission_id for record in self.journal.submissions()} == set(self.model)
        for record in self.journal.submissions():
            outcomes = self.model[record.submission_id]
            assert record.pending == outcomes.count(None)
            assert (record.state is SubmissionState.ENDED) == (None not in outcomes)
            found = {each.place: each.outcome for each in self.journal.outcomes(record.submission_id)}
            assert found == {place: outcome for place, outcome in enumerate(outcomes) if outcome is not None}
            pending = [each.place for each in self.journal.pending(record.submission_id, -1, 10)]
            assert pending == [place for place, outcome in enumerate(outcomes) if outcome is None]


TestJournal = JournalMachine.TestCase
TestJournal.settings = settings(max_examples=10, stateful_step_count=12, deadline=None)


def test_an_altered_or_emptied_journal_is_refused_and_names_what_is_wrong(tmp_path: Path) -> None:
    """Its requests ran with other texts, its outcomes counted, or everything was forgotten without a word."""
    whole = Journal(tmp_path / "whole" / "journal.sqlite")
    submit(whole, "a", 3)
    whole.end([succeeded("a", 1)])
    submit(whole, "b", 2)
    whole.cancel("b")
    whole.keep_memory('{"spent": 1}')
    whole.close()
    cases = {
        "UPDATE request SET request = replace(request, 'red', 'rad') WHERE place = 2": "request 2 of submission 1",
        "UPDATE request SET file = 'b.png' WHERE place = 1": "the outcome of request 1 of submission 1",
        "UPDATE request SET outcome = 'succeeded' WHERE submission = 2 AND place = 0": "request 0 of submission 2",
        "UPDATE submission SET output = '/elsewhere' WHERE id = 'b'": "submission b",
        "DELETE FROM request WHERE place = 2": "the requests of submission a",
        """UPDATE memory SET content = '{"spent": 0}'""": "the memory of the last controller",
    }
    for number, (statement, named) in enumerate(cases.items()):
        path = crashed(whole.path, tmp_path / str(number))
        with sqlite3.connect(path) as other:
            other.execute(statement)
        other.close()
        with pytest.raises(JournalFailed, match=rf"journal\.sqlite.*altered since it was written: .*{named}"):
            Journal(path)
    for _ in range(2):
        whole.path.write_bytes(b"")
        with pytest.raises(JournalFailed, match="it is empty, and was in use: opened 1 times"):
            Journal(whole.path)
    whole.path.unlink()  # moved away, as the message says
    again = Journal(whole.path)
    assert (again.submissions(), again.epoch) == ((), 1)
    again.close()


def test_an_older_copy_is_used_with_a_warning_and_a_larger_epoch(
    journal: Journal, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    submit(journal, "a", 1)
    copy = crashed(journal.path, tmp_path / "copy")
    path = tmp_path / "used" / "journal.sqlite"
    for _ in range(3):
        Journal(path).close()
    for file in copy.parent.iterdir():
        shutil.copy(file, path.parent / file.name)
    restored = Journal(path)
    assert ([each.submission_id for each in restored.submissions()], restored.epoch) == (["a"], 4)
    assert "the journal is an older copy: it was opened 1 times, and the last one 3 times" in caplog.text
    restored.close()


def test_histories_are_found_by_ids_and_by_parts_and_the_oldest_are_removed(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "MOST_HISTORIES", 3)
    journal.keep_memory("1", [("a-1", "a.1.1-1", b"old"), ("a%-2", "a%.1.1-2", b"other")])
    journal.keep_memory("2", [("a-1", "a.2.1-1", b"new"), ("b-1", "b.1.1-1", b"last")])
    found = [journal.history(job) for job in ("a-1", "a.2.1-1", "a.1.1-1", "a%", "b", "-1", "", "c")]
    assert found == [b"new", b"new", None, b"other", b"last", None, None, None]
    assert journal.memory() == "2"
