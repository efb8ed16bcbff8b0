"""Notice commands: the forms of a deadline, and that one worker of a machine runs the command."""

from __future__ import annotations

import threading
from pathlib import Path

from modelpool.actors.worker.node_notices import NoticePoller, notice_deadline, notice_lock

NOW = 1_800_000_000.0


def test_the_forms_of_a_deadline() -> None:
    cases = {
        "": None,
        "  \n": None,
        "FALSE": None,
        "404 - Not Found": None,
        "30": NOW + 30,
        "+30\n": NOW + 30,
        "2.5": NOW + 2.5,
        "1800000120": NOW + 120,
        "2027-01-15T08:02:00Z": NOW + 120,
        "2027-01-15T08:02:00": NOW + 120,
        "2027-01-15T10:02:00+02:00": NOW + 120,
        '{"action": "terminate", "time": "2027-01-15T08:02:00Z"}\n': NOW + 120,
        "2027-99-15T08:02:00Z": None,
    }
    for printed, deadline in cases.items():
        assert notice_deadline(printed, NOW) == deadline, printed


def poller(folder: Path, command: str, found: list) -> NoticePoller:
    return NoticePoller(command, 3600.0, folder / "lock", lambda deadline, reason: found.append(deadline))


def test_a_notice_is_reported_once_and_its_end_too(tmp_path) -> None:
    found: list[float | None] = []
    notice = tmp_path / "notice"
    polled = poller(tmp_path, f"cat {notice}", found)
    polled.poll()  # the command fails
    assert found == []
    notice.write_text("1900000000\n")
    polled.poll()
    polled.poll()
    assert found == [1900000000.0]
    notice.write_text("1900000099\n")
    polled.poll()
    notice.unlink()
    polled.poll()
    polled.poll()
    assert found == [1900000000.0, 1900000099.0, None]


def test_the_next_controller_is_told_of_a_notice(tmp_path) -> None:
    """Found by reading: a notice that came while there was no controller was lost, since it had been told. The next
    controller placed work on the node until it was taken back."""
    found: list[float | None] = []
    notice = tmp_path / "notice"
    polled = poller(tmp_path, f"cat {notice}", found)
    notice.write_text("1900000000\n")
    polled.poll()
    polled.tell_again()
    polled.poll()
    polled.poll()
    assert found == [1900000000.0, 1900000000.0]
    notice.unlink()
    polled.tell_again()
    polled.poll()
    assert found == [1900000000.0, 1900000000.0], "the next controller knows of none"


def test_a_command_that_prints_no_text_ends_no_thread(tmp_path) -> None:
    found: list[float | None] = []
    polled = poller(tmp_path, "printf '\\377\\376'", found)
    polled.poll()
    assert found == []


def test_seconds_from_now_are_one_notice(tmp_path) -> None:
    found: list[float | None] = []
    polled = poller(tmp_path, "echo +100", found)
    for _ in range(3):
        polled.poll()
    assert len(found) == 1


def test_one_worker_of_a_machine_runs_the_command_and_another_takes_over(tmp_path) -> None:
    runs = tmp_path / "runs"
    first, second = (poller(tmp_path, f"echo x >> {runs}", []) for _ in range(2))
    first.poll()
    second.poll()
    assert runs.read_text() == "x\n"
    first.start()
    first.close()
    ran = runs.read_text()
    second.poll()
    assert runs.read_text() == f"{ran}x\n"


def test_each_pool_and_each_node_of_a_machine_reads_the_notice(tmp_path) -> None:
    """One lock was shared by all pools and nodes of a machine: only the pool of the first worker drained its node."""
    told: list[tuple[str, str]] = []
    for place in (("ns/a", "n1"), ("ns/a", "n1"), ("ns/b", "n1"), ("ns/a", "n2")):
        lock = notice_lock(tmp_path, *place)
        NoticePoller("echo 1900000000", 3600.0, lock, lambda deadline, reason, place=place: told.append(place)).poll()
    assert told == [("ns/a", "n1"), ("ns/b", "n1"), ("ns/a", "n2")]


def test_without_a_folder_for_the_lock_every_worker_runs_the_command() -> None:
    found: list[float | None] = []
    for _ in range(2):
        NoticePoller("echo 1900000000", 3600.0, None, lambda deadline, reason: found.append(deadline)).poll()
    assert found == [1900000000.0, 1900000000.0]


def test_the_thread_does_its_other_work_without_a_command(tmp_path) -> None:
    done = threading.Event()
    polled = NoticePoller("", 0.01, tmp_path / "lock", lambda deadline, reason: None, done.set)
    polled.start()
    assert done.wait(60)
    polled.close()
    assert not (tmp_path / "lock").exists()
