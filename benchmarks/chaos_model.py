"""The guarantees of detached jobs as a model: what was acknowledged, and what was committed, checked against a journal.

Knows the journal's file and output folders; no processes. `benchmarks.chaos` checks with it after each fault.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

MANIFEST_NAME = "manifest.jsonl"


@dataclass(frozen=True, slots=True)
class Commit:
    """The outcome of one request in the journal."""

    outcome: str
    file: str
    file_bytes: int
    pixels_sha256: str
    epoch: int


@dataclass(frozen=True, slots=True)
class SubmissionRows:
    """A submission in the journal.

    request_count, succeeded  as its own row states them
    rows                      number of its requests
    commits                   by place
    """

    state: str
    request_count: int
    succeeded: int
    rows: int
    commits: Mapping[int, Commit]


@dataclass(frozen=True, slots=True)
class JournalRows:
    """The content of a journal at one time."""

    epoch: int
    submissions: Mapping[str, SubmissionRows]

    @property
    def commit_count(self) -> int:
        """Outcomes of all submissions."""
        return sum(len(each.commits) for each in self.submissions.values())


def read_journal(path: Path) -> JournalRows:
    """Read a journal without changing it. Raises sqlite3.Error, also for a damaged file."""
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10.0, isolation_level=None)
    try:
        connection.execute("BEGIN")
        (problem,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if problem != "ok":
            raise sqlite3.DatabaseError(f"damaged: {problem}")
        (epoch,) = connection.execute("SELECT number FROM epoch").fetchone()
        submissions = {}
        for number, name, state, count, succeeded in connection.execute(
            "SELECT number, id, state, request_count, succeeded FROM submission"
        ).fetchall():
            (rows,) = connection.execute("SELECT count(*) FROM request WHERE submission = ?", (number,)).fetchone()
            commits = {
                place: Commit(*values)
                for place, *values in connection.execute(
                    "SELECT place, outcome, file, file_bytes, pixels_sha256, epoch FROM request "
                    "WHERE submission = ? AND outcome IS NOT NULL",
                    (number,),
                )
            }
            submissions[name] = SubmissionRows(state, count, succeeded, rows, commits)
        return JournalRows(epoch, submissions)
    finally:
        connection.close()


@dataclass(slots=True)
class Guarantees:
    """The model. `reference` are the SHA-256 digests of the files of a fault-free run, by file name."""

    reference: Mapping[str, str] = field(default_factory=dict)
    #: acknowledged submissions: their number of requests and the folders that have had their outputs
    acknowledged: dict[str, tuple[int, list[Path]]] = field(default_factory=dict)
    #: by submission and place
    committed: dict[tuple[str, int], Commit] = field(default_factory=dict)
    epoch: int = 0

    def acknowledge(self, name: str, count: int, folders: list[Path]) -> None:
        """Note that the pool has acknowledged a submission. `folders` may grow later."""
        self.acknowledged[name] = (count, folders)

    def forget(self, name: str) -> None:
        """Note that a submission was removed."""
        self.acknowledged.pop(name, None)
        self.committed = {key: commit for key, commit in self.committed.items() if key[0] != name}

    def violations(self, found: JournalRows) -> list[str]:
        """Return every guarantee that the journal breaks, and note what it has committed since the last call."""
        broken: list[str] = []
        if found.epoch < self.epoch:
            broken.append(f"epoch {self.epoch} was followed by {found.epoch}")
        self.epoch = found.epoch
        for name, (count, _) in self.acknowledged.items():
            rows = found.submissions.get(name)
            if rows is None or rows.state == "receiving":
                broken.append(f"{name}: acknowledged, and not in the journal")
            elif (rows.request_count, rows.rows) != (count, count):
                broken.append(f"{name}: acknowledged {count} requests, {rows.rows} are in the journal")
        for name, rows in found.submissions.items():
            succeeded = sum(commit.outcome == "succeeded" for commit in rows.commits.values())
            if succeeded != rows.succeeded:
                broken.append(f"{name}: {succeeded} requests succeeded, its own row counts {rows.succeeded}")
            if (rows.state == "ended") != (len(rows.commits) == rows.request_count):
                broken.append(f"{name}: {rows.state} with {len(rows.commits)} of {rows.request_count} outcomes")
        for (name, place), commit in self.committed.items():
            now = found.submissions[name].commits.get(place) if name in found.submissions else None
            if now != commit:
                broken.append(f"{name}, request {place}: committed {commit}, found {now}")
        for name, rows in found.submissions.items():
            for place, commit in rows.commits.items():
                if (name, place) not in self.committed:
                    self.committed[name, place] = commit
                    broken += self._wrong_commit(name, place, commit)
        return broken

    def _wrong_commit(self, name: str, place: int, commit: Commit) -> list[str]:
        """Check a new commit: its file exists, and has the bytes of the fault-free run."""
        where = f"{name}, request {place}"
        if commit.outcome != "succeeded":
            return [f"{where}: {commit.outcome}, although every request can succeed"]
        _, folders = self.acknowledged.get(name, (0, []))
        if not folders:  # acknowledged in the journal, and the command has not returned yet
            return []
        return [f"{where}: {problem}" for problem in self._wrong_file(folders, commit)]

    def _wrong_file(self, folders: Iterable[Path], commit: Commit) -> list[str]:
        contents = [path.read_bytes() for folder in folders if (path := folder / commit.file).exists()]
        if not contents:
            return [f"{commit.file} was committed and does not exist"]
        expected = self.reference.get(commit.file, digest(contents[0]))
        return [f"{commit.file} has other bytes" for content in contents if digest(content) != expected]

    def wrong_at_end(self, name: str) -> list[str]:
        """Return what is wrong with the outputs of a submission that has ended: each request committed once, each file
        listed once in its folder, no other files, all bytes as in the fault-free run.
        """
        count, folders = self.acknowledged[name]
        commits = [commit for (owner, _), commit in self.committed.items() if owner == name]
        broken = [problem for commit in commits for problem in self._wrong_file(folders, commit)]
        files = Counter(commit.file for commit in commits)
        if len(files) != count:
            broken.append(f"{name}: {count} requests, {len(files)} files were committed")
        for folder in folders:
            listed = Counter(listed_files(folder))
            broken += [f"{folder}: {file} is listed {times} times" for file, times in listed.items() if times > 1]
            found = {path.name for path in folder.iterdir()} if folder.exists() else set()
            strange = sorted(found - set(listed) - {MANIFEST_NAME, ".lock"})
            broken += [f"{folder}: {file} is left behind" for file in strange]
        return broken


def listed_files(folder: Path) -> Sequence[str]:
    """Return the files in the manifest of a folder; () without one."""
    try:
        text = (folder / MANIFEST_NAME).read_text()
    except FileNotFoundError:
        return ()
    return [json.loads(line)["file"] for line in text.splitlines()]


def digest(content: bytes) -> str:
    """Return the SHA-256 of a file's content."""
    return hashlib.sha256(content).hexdigest()
