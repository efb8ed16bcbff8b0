"""The model of `benchmarks.chaos` notices each broken guarantee, and its faults are those of its seed.

The runner itself has a short form in tests/actors/cli/cluster/test_daemon.py.
"""

from __future__ import annotations

import json
import random
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.chaos import Faults, role_of
from benchmarks.chaos_model import Guarantees, digest, read_journal
from modelpool.actors.control.detached.records import NewSubmission, RequestOutcome
from modelpool.actors.control.detached.submission_journal import Journal
from modelpool.scheduler.model.messages import Outcome


@pytest.fixture
def model(tmp_path: Path) -> Guarantees:
    """Two requests were acknowledged, and both are committed with their files."""
    journal = Journal(tmp_path / "journal.sqlite")
    journal.begin(NewSubmission("a", str(tmp_path / "out"), "", 2))
    journal.append("a", 0, ["{}", "{}"])
    journal.seal("a")
    (tmp_path / "out").mkdir()
    manifest = []
    for place, name in enumerate(("a.png", "b.png")):
        (tmp_path / "out" / name).write_bytes(name.encode())
        manifest.append(json.dumps({"file": name}) + "\n")
        journal.end([RequestOutcome("a", place, Outcome.SUCCEEDED, name, len(name), "pixels")])
    (tmp_path / "out" / "manifest.jsonl").write_text("".join(manifest))
    journal.close()
    found = Guarantees({name: digest(name.encode()) for name in ("a.png", "b.png")})
    found.acknowledge("a", 2, [tmp_path / "out"])
    assert found.violations(read_journal(journal.path)) == []
    assert found.wrong_at_end("a") == []
    return found


def changed(statement: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        with sqlite3.connect(folder / "journal.sqlite") as connection:
            connection.execute(statement)
        connection.close()

    return change


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (changed("DELETE FROM submission"), "acknowledged, and not in the journal"),
        (changed("DELETE FROM request WHERE place = 1"), "acknowledged 2 requests, 1 are in the journal"),
        (changed("UPDATE request SET outcome = NULL WHERE place = 1"), "request 1: committed"),
        (changed("UPDATE request SET file = 'c.png' WHERE place = 0"), "request 0: committed"),
        (changed("UPDATE submission SET succeeded = 3"), "2 requests succeeded, its own row counts 3"),
        (changed("UPDATE submission SET state = 'active'"), "active with 2 of 2 outcomes"),
        (changed("UPDATE epoch SET number = 0"), "was followed by 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_journal_that_breaks_a_guarantee_is_reported(model, tmp_path, change, problem) -> None:
    change(tmp_path)
    assert problem in "\n".join(model.violations(read_journal(tmp_path / "journal.sqlite")))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda out: (out / "a.png").unlink(), "a.png was committed and does not exist"),
        (lambda out: (out / "a.png").write_bytes(b"other"), "a.png has other bytes"),
        (lambda out: (out / ".b.png.partial").touch(), ".b.png.partial is left behind"),
        (lambda out: (out / "manifest.jsonl").write_text('{"file": "a.png"}\n' * 2), "a.png is listed 2 times"),
    ],
    ids=["lost", "damaged", "left behind", "listed twice"],
)
def test_an_output_folder_that_breaks_a_guarantee_is_reported(model, tmp_path, change, problem) -> None:
    change(tmp_path / "out")
    assert problem in "\n".join(model.wrong_at_end("a"))


def test_the_faults_are_those_of_the_seed(tmp_path: Path) -> None:
    first, second = (Faults(random.Random(7), tmp_path) for _ in range(2))
    drawn = [first.draw() for _ in range(200)]
    assert drawn == [second.draw() for _ in range(200)]
    assert {kind for kind, _, _ in drawn} == {
        *("kill", "stop", "disk full", "folder moved away", "file in place of the folder"),
    }


def test_processes_have_roles() -> None:
    lines = {
        "ray::GpuWorkerActor.run_packed": "worker",
        "ray::IDLE": "",
        "/x/ray/core/src/ray/raylet/raylet --static": "raylet",
        "/x/ray/core/src/ray/gcs/gcs_server --log": "GCS",
        "python -P -m modelpool.actors.cli.cluster.daemon --ready-fd 4": "daemon",
        "python -m modelpool wait batch-1": "driver",
        "python -m modelpool up --detach": "",
    }
    assert {line: role_of(line.split()) for line in lines} == lines
