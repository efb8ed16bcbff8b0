"""`Journal`: what a pool has promised, in one SQLite file: submissions, requests, outcomes, output commits, pins; and
what a controller hands to the next one.

Rules
1. A method that writes returns after the data is on disk (`synchronous=FULL`). Writes of several threads that arrive
   while the disk is busy share one transaction (group commit).
2. One process has the journal: a lock on a file next to it. Opening starts a new epoch; a write of an older epoch, by a
   process that lost the lock without noticing, raises Fenced and changes nothing.
3. One driver at a time hands over the submission of an id. It names itself in each call.
4. A request has at most one outcome: the first one counts, and a second one is reported as such.
5. Times are wall-clock times.
6. The oldest ended submissions are removed when more than `most_requests` requests are stored, and the oldest histories
   of jobs when there are more than MOST_HISTORIES.
7. Rows have checksums, and submissions know how many requests they have: a file with altered contents is refused
   when it is opened. The lock file has the number of the latest epoch: an emptied file is refused, too. A file that is
   not there begins anew. Rows of earlier versions have no checksums and are read as they are.
8. Once a statement has failed, `trouble` says why, until `probe` has found that the file takes writes again.

Knows no pool and no output folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import queue
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, TypeVar

from modelpool.actors.control.detached.records import (
    NewSubmission,
    PendingRequest,
    RequestOutcome,
    SubmissionRecord,
    SubmissionState,
    labels_in_text,
)
from modelpool.pool.values.core.errors import UnknownName, UserError, counted, unknown_name
from modelpool.scheduler.model.messages import Outcome

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: requests that are kept: about 1 GiB
MOST_REQUESTS = 1_000_000
#: writes that share one transaction
MOST_IN_TRANSACTION = 256
#: a driver that hands over a submission and sends nothing for so long has ended: another one may take it over
SILENCE_SECONDS = 30.0
#: how long a statement waits for another process's lock, which only a backup or a person's sqlite3 holds
BUSY_SECONDS = 10.0

#: histories of jobs that are kept: some 10 MB
MOST_HISTORIES = 5_000
#: bytes that a probe writes: more than a group of outcomes takes, so that a disk with less room is not tried again and
#: again
PROBE_BYTES = 1 << 16

#: the statements that bring a journal from version N to N + 1
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        "CREATE TABLE epoch (number INTEGER NOT NULL)",
        "INSERT INTO epoch VALUES (0)",
        """CREATE TABLE submission (
            number INTEGER PRIMARY KEY AUTOINCREMENT,
            id TEXT NOT NULL UNIQUE,
            state TEXT NOT NULL,
            output TEXT NOT NULL,
            user TEXT NOT NULL,
            request_count INTEGER NOT NULL,
            created_at REAL NOT NULL,
            succeeded INTEGER NOT NULL DEFAULT 0,
            failed INTEGER NOT NULL DEFAULT 0,
            cancelled INTEGER NOT NULL DEFAULT 0,
            trouble TEXT NOT NULL DEFAULT ''
        )""",
        """CREATE TABLE request (
            submission INTEGER NOT NULL REFERENCES submission (number) ON DELETE CASCADE,
            place INTEGER NOT NULL,
            request TEXT NOT NULL,
            outcome TEXT,
            file TEXT NOT NULL DEFAULT '',
            file_bytes INTEGER NOT NULL DEFAULT 0,
            pixels_sha256 TEXT NOT NULL DEFAULT '',
            error_kind TEXT NOT NULL DEFAULT '',
            message TEXT NOT NULL DEFAULT '',
            epoch INTEGER,
            PRIMARY KEY (submission, place)
        ) WITHOUT ROWID""",
        "CREATE INDEX pending ON request (submission, place) WHERE outcome IS NULL",
    ),
    ("CREATE TABLE pin (model TEXT PRIMARY KEY, replicas INTEGER NOT NULL)",),
    ("ALTER TABLE submission ADD COLUMN file_name TEXT NOT NULL DEFAULT ''",),
    ("CREATE TABLE probe (one INTEGER PRIMARY KEY, content BLOB NOT NULL)",),
    (
        "CREATE TABLE memory (one INTEGER PRIMARY KEY, content TEXT NOT NULL)",
        "CREATE TABLE history (number INTEGER PRIMARY KEY AUTOINCREMENT, job TEXT NOT NULL, sent TEXT NOT NULL, "
        "content BLOB NOT NULL)",
        "CREATE INDEX history_of_job ON history (job)",
    ),
    (
        "ALTER TABLE submission ADD COLUMN checksum INTEGER",
        "ALTER TABLE request ADD COLUMN checksum INTEGER",
        "ALTER TABLE request ADD COLUMN outcome_checksum INTEGER",
        "ALTER TABLE memory ADD COLUMN checksum INTEGER",
    ),
)
VERSION = len(MIGRATIONS)

_COLUMNS = "id, state, output, user, request_count, created_at, succeeded, failed, cancelled, trouble, file_name"
_OUTCOME_COLUMNS = "place, outcome, file, file_bytes, pixels_sha256, error_kind, message"


class JournalFailed(UserError):
    """A journal that cannot be opened or written. The message names the file and the reason."""


class Fenced(RuntimeError):
    """Another process has opened the journal since: this one must stop."""


class SubmissionExists(UserError):
    """The id of a new submission belongs to another one."""


class BeingReceived(UserError):
    """Raised while another driver is handing over a submission under this id."""


@dataclass(frozen=True, slots=True)
class _Receiver:
    """The driver that hands over a submission, and when it last sent something, on the monotonic clock."""

    driver: str
    at: float


@dataclass(frozen=True, slots=True)
class _Write:
    """A change that waits for its transaction."""

    change: Callable[[sqlite3.Connection], Any]
    done: Future[Any]


class Journal:
    """An open journal. Thread-safe. `close` releases it."""

    def __init__(
        self, path: Path, most_requests: int = MOST_REQUESTS, wall_clock: Callable[[], float] = time.time
    ) -> None:
        """Open or create the journal at `path`. Raises JournalFailed, also if another process has it."""
        self.path = path
        self._most_requests = most_requests
        self._wall_clock = wall_clock
        had_file = path.exists()
        self._lock_file = _locked(path)
        opened = contextlib.ExitStack()
        try:
            with _failures_named(path):
                self._connection = opened.enter_context(contextlib.closing(_opened(path)))
                known_epoch = _noted_epoch(self._lock_file) if had_file else 0
                self.epoch = _begin_epoch(self._connection, known_epoch)
                self._readers = _opened(path)
            _note_epoch(self._lock_file, self.epoch)
        except BaseException:
            opened.close()
            self._lock_file.close()
            raise
        self._reading = threading.Lock()
        self._writes: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        #: by id, of submissions that are being received; only the thread below uses it
        self._receivers: dict[str, _Receiver] = {}
        self._closed = False
        #: why the latest statement failed, until a probe succeeds; "" if none has
        self.trouble = ""
        self._thread = threading.Thread(target=self._write_all, name="modelpool journal", daemon=True)
        self._thread.start()

    # ---- submissions ----------------------------------------------------------------------------------------------

    def begin(self, new: NewSubmission, driver: str = "") -> SubmissionRecord:
        """Start a submission; its requests follow with `append`. Returns the known one if the id was acknowledged.
        If it is still being received from `driver`, or from another one that has sent nothing for SILENCE_SECONDS, what
        it has is dropped. Raises SubmissionExists if the known one differs from `new`, and BeingReceived.
        """

        def change(connection: sqlite3.Connection) -> SubmissionRecord:
            known = self._acknowledged(connection, new, driver)
            if known is not None:
                return known
            self._receivers[new.submission_id] = _Receiver(driver, time.monotonic())
            connection.execute("DELETE FROM submission WHERE id = ?", (new.submission_id,))
            values = (new.submission_id, SubmissionState.RECEIVING, new.output, new.user, new.request_count)
            connection.execute(
                "INSERT INTO submission (id, state, output, user, request_count, file_name, created_at, checksum) "
                "VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, checksum_of(?1, ?3, ?4, ?6))",
                (*values, new.file_name, self._wall_clock()),
            )
            return _required(connection, new.submission_id)

        return self._write(change)

    def require_free(self, new: NewSubmission, driver: str = "") -> None:
        """Raise what `begin` would raise now. Changes nothing."""
        self._write(lambda connection: self._acknowledged(connection, new, driver))  # that thread knows the receivers

    def append(self, submission_id: str, first_place: int, texts: Sequence[str], driver: str = "") -> None:
        """Add requests, as `records.request_text` writes them, to a submission that is being received from `driver`.
        Has no effect on one that was acknowledged meanwhile: another driver has handed it over under the same id.
        Raises BeingReceived while another one does so.
        """

        def change(connection: sqlite3.Connection) -> None:
            if _required(connection, submission_id).state is not SubmissionState.RECEIVING:
                return
            self._note_sender(submission_id, driver)
            number = _number(connection, submission_id)
            rows = [(number, place, text) for place, text in enumerate(texts, start=first_place)]
            connection.executemany(
                "INSERT OR REPLACE INTO request (submission, place, request, checksum) "
                "VALUES (?1, ?2, ?3, checksum_of(?1, ?2, ?3))",
                rows,
            )

        self._write(change)

    def seal(self, submission_id: str, request_count: int | None = None, driver: str = "") -> SubmissionRecord:
        """Acknowledge a submission with complete requests: `request_count`, or as many as it was begun with.
        Raises JournalFailed if some are missing, and BeingReceived as `append`.
        """

        def change(connection: sqlite3.Connection) -> SubmissionRecord:
            known = _required(connection, submission_id)
            if known.state is not SubmissionState.RECEIVING:
                return known
            self._note_sender(submission_id, driver)
            number = _number(connection, submission_id)
            (count,) = connection.execute("SELECT count(*) FROM request WHERE submission = ?", (number,)).fetchone()
            expected = known.request_count if request_count is None else request_count
            if count != expected or not count:
                raise JournalFailed(
                    f"submission {submission_id}: received {count} of {expected} requests; submit it again"
                )
            connection.execute(
                "UPDATE submission SET state = ?, created_at = ?, request_count = ? WHERE number = ?",
                (SubmissionState.ACTIVE, self._wall_clock(), count, number),
            )
            self._prune(connection)
            self._receivers.pop(submission_id, None)
            return _required(connection, submission_id)

        return self._write(change)

    def abandon(self, submission_id: str, driver: str = "") -> None:
        """Forget a submission of `driver` that was not acknowledged. Has no effect on others."""

        def change(connection: sqlite3.Connection) -> None:
            receiver = self._receivers.get(submission_id)
            if receiver is None or receiver.driver != driver:
                return
            del self._receivers[submission_id]
            connection.execute(
                "DELETE FROM submission WHERE id = ? AND state = ?", (submission_id, SubmissionState.RECEIVING)
            )

        self._write(change)

    def _acknowledged(self, connection: sqlite3.Connection, new: NewSubmission, driver: str) -> SubmissionRecord | None:
        """Return the known submission of the id of `new` if it was acknowledged; None if `driver` may begin it. Raises
        SubmissionExists and BeingReceived, see `begin`."""
        known = _find(connection, new.submission_id)
        if known is not None and known.state is not SubmissionState.RECEIVING:
            # how many requests there are may turn out later
            like = new if new.request_count else replace(new, request_count=known.request_count)
            require_same(known, like)
            return known
        receiver = self._receivers.get(new.submission_id)
        if known is not None and receiver is not None and receiver.driver != driver:
            silent_seconds = time.monotonic() - receiver.at
            if silent_seconds < SILENCE_SECONDS:
                raise BeingReceived(
                    f"id {new.submission_id!r} is being handed over by another driver, which sent something "
                    f"{silent_seconds:.0f} s ago; after {SILENCE_SECONDS:.0f} s it counts as ended"
                )
        return None

    def submissions(self) -> tuple[SubmissionRecord, ...]:
        """Return all acknowledged submissions, oldest first."""
        rows = self._read(
            f"SELECT {_COLUMNS} FROM submission WHERE state != ? ORDER BY number", (SubmissionState.RECEIVING,)
        )
        return tuple(_record(row) for row in rows)

    def active(self) -> tuple[SubmissionRecord, ...]:
        """Return the submissions with pending requests, oldest first."""
        rows = self._read(
            f"SELECT {_COLUMNS} FROM submission WHERE state = ? ORDER BY number", (SubmissionState.ACTIVE,)
        )
        return tuple(_record(row) for row in rows)

    def find(self, submission_id: str) -> SubmissionRecord:
        """Return the submission with this id, or with this unique start of an id. Raises UnknownName."""
        rows = self._read(
            f"SELECT {_COLUMNS} FROM submission WHERE state != ? AND (id = ? OR substr(id, 1, ?) = ?) LIMIT 3",
            (SubmissionState.RECEIVING, submission_id, len(submission_id), submission_id),
        )
        found = [_record(row) for row in rows]
        exact = [record for record in found if record.submission_id == submission_id]
        if len(exact or found) != 1:
            recent = self._read("SELECT id FROM submission ORDER BY number DESC LIMIT 50", ())
            raise unknown_name("submission", submission_id, [str(row[0]) for row in recent])
        return (exact or found)[0]

    def remove(self, submission_id: str) -> None:
        """Forget a submission that has ended. Output files stay. Raises JournalFailed while it is active."""

        def change(connection: sqlite3.Connection) -> None:
            if _required(connection, submission_id).state is SubmissionState.ACTIVE:
                raise JournalFailed(f"submission {submission_id} is active; cancel it first")
            connection.execute("DELETE FROM submission WHERE id = ?", (submission_id,))

        self._write(change)

    def note_trouble(self, submission_id: str, trouble: str) -> None:
        """Store why no request of the submission starts; "" once they do."""
        self._write(
            lambda connection: connection.execute(
                "UPDATE submission SET trouble = ? WHERE id = ?", (trouble, submission_id)
            )
        )

    # ---- requests -------------------------------------------------------------------------------------------------

    def pending(self, submission_id: str, after_place: int, count: int) -> tuple[PendingRequest, ...]:
        """Return up to `count` requests without an outcome, in order, from the first one after `after_place`."""
        rows = self._read(
            "SELECT place, request FROM request WHERE submission = (SELECT number FROM submission WHERE id = ?) "
            "AND place > ? AND outcome IS NULL ORDER BY place LIMIT ?",
            (submission_id, after_place, count),
        )
        return tuple(PendingRequest(int(place), text) for place, text in rows)

    def request_text(self, submission_id: str, place: int) -> str:
        """Return a request as `request_text` of the records wrote it; "{}" if it is not known any more."""
        rows = self._read(
            "SELECT request FROM request WHERE submission = (SELECT number FROM submission WHERE id = ?) AND place = ?",
            (submission_id, place),
        )
        return next((str(text) for (text,) in rows), "{}")

    def outcomes(self, submission_id: str, after_place: int = -1, count: int = 1000) -> tuple[RequestOutcome, ...]:
        """Return up to `count` outcomes of a submission by place, from the first one after `after_place`."""
        rows = self._read(
            f"SELECT {_OUTCOME_COLUMNS}, request FROM request "
            "WHERE submission = (SELECT number FROM submission WHERE id = ?) "
            "AND place > ? AND outcome IS NOT NULL ORDER BY place LIMIT ?",
            (submission_id, after_place, count),
        )
        return tuple(
            replace(RequestOutcome(submission_id, int(place), Outcome(outcome), *rest), labels=labels_in_text(request))
            for place, outcome, *rest, request in rows
        )

    def end(self, outcomes: Sequence[RequestOutcome]) -> tuple[RequestOutcome, ...]:
        """Commit outcomes; return those that count. One that its request already has is left out."""

        def change(connection: sqlite3.Connection) -> tuple[RequestOutcome, ...]:
            return tuple(each for each in outcomes if self._end_one(connection, each))

        return self._write(change)

    def cancel(self, submission_id: str) -> int:
        """End all pending requests of a submission as cancelled; return their number."""

        def change(connection: sqlite3.Connection) -> int:
            number = _number(connection, submission_id)
            cancelled = connection.execute(
                "UPDATE request SET outcome = ?1, epoch = ?2, "
                "outcome_checksum = checksum_of(place, ?1, '', 0, '', '', '') "
                "WHERE submission = ?3 AND outcome IS NULL",
                (Outcome.CANCELLED.value, self.epoch, number),
            ).rowcount
            _count(connection, number, Outcome.CANCELLED, cancelled)
            return cancelled

        return self._write(change)

    # ---- pins -----------------------------------------------------------------------------------------------------

    def pins(self) -> dict[str, int]:
        """Return the models that users have pinned while the pool runs, with their replicas; 0 for unpinned ones."""
        return dict(self._read("SELECT model, replicas FROM pin ORDER BY model", ()))

    def keep_pins(self, models: Sequence[str], replicas: int) -> None:
        """Note that users have pinned these models, or unpinned them (0)."""

        def change(connection: sqlite3.Connection) -> None:
            rows = [(model, replicas) for model in models]
            connection.executemany("INSERT OR REPLACE INTO pin (model, replicas) VALUES (?, ?)", rows)

        self._write(change)

    def drop_pins(self) -> None:
        """Forget all pins: the pool ends."""
        self._write(lambda connection: connection.execute("DELETE FROM pin").rowcount)

    # ---- controllers ----------------------------------------------------------------------------------------------

    def memory(self) -> str:
        """Return the text that `keep_memory` has stored last; "" if there is none."""
        return next((str(text) for (text,) in self._read("SELECT content FROM memory", ())), "")

    def keep_memory(self, memory: str, histories: Sequence[tuple[str, str, bytes]] = ()) -> None:
        """Store what the next controller is given, in place of the last text, and histories of jobs that have ended:
        the id of each job in the journal and in the pool, and its history."""

        def change(connection: sqlite3.Connection) -> None:
            connection.execute("INSERT OR REPLACE INTO memory VALUES (1, ?1, checksum_of(?1))", (memory,))
            connection.executemany("INSERT INTO history (job, sent, content) VALUES (?, ?, ?)", histories)
            connection.execute(
                "DELETE FROM history WHERE number <= (SELECT coalesce(max(number), 0) FROM history) - ?",
                (MOST_HISTORIES,),
            )

        self._write(change)

    def history(self, job: str) -> bytes | None:
        """Return the latest history of the job with this id, or of the only job with an id that contains it; None if
        there is none."""
        found = self._read(
            "SELECT content FROM history WHERE job = ?1 OR sent = ?1 ORDER BY number DESC LIMIT 1", (job,)
        )
        if not found and job:
            part = "%" + job.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_") + "%"
            like = "FROM history WHERE job LIKE ?1 ESCAPE '\\' OR sent LIKE ?1 ESCAPE '\\'"
            if len(self._read(f"SELECT DISTINCT job {like} LIMIT 2", (part,))) == 1:
                found = self._read(f"SELECT content {like} ORDER BY number DESC LIMIT 1", (part,))
        return next((bytes(content) for (content,) in found), None)

    # ---- upkeep ---------------------------------------------------------------------------------------------------

    def probe(self) -> bool:
        """Whether the journal takes writes: writes `PROBE_BYTES` in place of the last probe's, and reads. Ends
        its `trouble` if so, and renews it otherwise.
        """

        def change(connection: sqlite3.Connection) -> None:
            connection.execute("INSERT OR REPLACE INTO probe VALUES (1, zeroblob(?))", (PROBE_BYTES,))

        try:
            self._write(change)
            self._read("SELECT one FROM probe", ())
        except JournalFailed:
            return False
        self.trouble = ""
        return True

    def close(self) -> None:
        """Write what waits, and release the journal. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._writes.put(None)
        self._thread.join()
        self._connection.close()
        with self._reading:
            self._readers.close()
        self._lock_file.close()

    def _note_sender(self, submission_id: str, driver: str) -> None:
        """Note that `driver` sends something of a submission that is being received. Raises BeingReceived."""
        receiver = self._receivers.get(submission_id)
        if receiver is not None and receiver.driver != driver:  # None: a seal has failed on the disk
            raise BeingReceived(
                f"another driver has taken over id {submission_id!r}: this one sent nothing for "
                f"{SILENCE_SECONDS:.0f} s, or the job service was restarted; submit again to follow the other one"
            )
        self._receivers[submission_id] = _Receiver(driver, time.monotonic())

    def _end_one(self, connection: sqlite3.Connection, each: RequestOutcome) -> bool:
        found = connection.execute("SELECT number FROM submission WHERE id = ?", (each.submission_id,)).fetchone()
        if found is None:  # it was removed
            return False
        ended = connection.execute(
            "UPDATE request SET outcome = ?1, file = ?2, file_bytes = ?3, pixels_sha256 = ?4, error_kind = ?5, "
            "message = ?6, epoch = ?7, outcome_checksum = checksum_of(?9, ?1, ?2, ?3, ?4, ?5, ?6) "
            "WHERE submission = ?8 AND place = ?9 AND outcome IS NULL",
            (
                each.outcome.value,
                each.file,
                each.file_bytes,
                each.pixels_sha256,
                each.error_kind,
                each.message,
                self.epoch,
                found[0],
                each.place,
            ),
        )
        if ended.rowcount == 0:
            return False
        _count(connection, found[0], each.outcome, 1)
        return True

    def _prune(self, connection: sqlite3.Connection) -> None:
        """Rule 6."""
        (stored,) = connection.execute("SELECT coalesce(sum(request_count), 0) FROM submission").fetchone()
        ended = connection.execute(
            "SELECT number, request_count FROM submission WHERE state = ? ORDER BY number", (SubmissionState.ENDED,)
        )
        for number, count in ended.fetchall():
            if stored <= self._most_requests:
                return
            connection.execute("DELETE FROM submission WHERE number = ?", (number,))
            stored -= count

    def _read(self, statement: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        with self._reading, self._failures_noted(), _failures_named(self.path):
            return self._readers.execute(statement, values).fetchall()

    @contextlib.contextmanager
    def _failures_noted(self) -> Iterator[None]:
        try:
            yield
        except JournalFailed as failed:
            self.trouble = str(failed)
            raise

    def _write(self, change: Callable[[sqlite3.Connection], T]) -> T:
        """Have the journal's thread apply `change`, and wait until it is on disk."""
        if self._closed:
            raise JournalFailed(f"{self.path}: the journal is closed")
        done: Future[T] = Future()
        self._writes.put(_Write(change, done))
        return done.result()

    def _write_all(self) -> None:
        while (first := self._writes.get()) is not None:
            group = [first]
            last = False
            while len(group) < MOST_IN_TRANSACTION and not self._writes.empty():
                following = self._writes.get()
                if following is None:
                    last = True
                    break
                group.append(following)
            self._write_group(group)
            if last:
                return

    def _write_group(self, group: Sequence[_Write]) -> None:
        """Apply the changes in one transaction. A change that raises is undone alone."""
        answers: list[tuple[_Write, Any, BaseException | None]] = []
        try:
            with self._failures_noted(), _failures_named(self.path), _transaction(self._connection):
                (epoch,) = self._connection.execute("SELECT number FROM epoch").fetchone()
                if epoch != self.epoch:
                    raise Fenced(f"{self.path}: opened by another process (epoch {epoch}, this is {self.epoch})")
                answers.extend((write, *self._applied(write)) for write in group)
        except BaseException as failed:
            for write in group:
                write.done.set_exception(failed)
            return
        for write, answer, problem in answers:
            if problem is None:
                write.done.set_result(answer)
            else:
                write.done.set_exception(problem)

    def _applied(self, write: _Write) -> tuple[Any, BaseException | None]:
        self._connection.execute("SAVEPOINT one")
        try:
            answer = write.change(self._connection)
        except sqlite3.Error:
            raise  # of the file, not of the change: nothing of the group is written
        except Exception as problem:
            self._connection.execute("ROLLBACK TO one")
            self._connection.execute("RELEASE one")
            return None, problem
        self._connection.execute("RELEASE one")
        return answer, None


def _locked(path: Path) -> IO[bytes]:
    lock = path.with_name(f"{path.name}.lock")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # requests of all users are in the file, and in those that SQLite makes beside it with the same permissions
        for each in (path, lock):
            os.close(os.open(each, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
        file = lock.open("r+b")
    except OSError as error:
        raise JournalFailed(f"{path}: the journal cannot be opened ({error.strerror or error})") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise JournalFailed(
            f"{path}: another running pool has this journal; set [pool] journal to another file"
        ) from None
    os.set_inheritable(file.fileno(), False)
    return file


def _opened(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")
    connection.create_function("checksum_of", -1, _checksum, deterministic=True)
    return connection


def _checksum(*values: str | int | None) -> int:
    """Return the CRC-32 of values of a row."""
    return zlib.crc32("\x1f".join(map(str, values)).encode("utf-8", "surrogatepass"))


def _noted_epoch(lock_file: IO[bytes]) -> int:
    """Return the epoch that the last process with the lock has noted; 0 if none has."""
    lock_file.seek(0)
    noted = lock_file.read(32).strip()
    return int(noted) if noted.isdigit() else 0


def _note_epoch(lock_file: IO[bytes], epoch: int) -> None:
    with contextlib.suppress(OSError):  # a full disk: the one before stays, which is as good
        lock_file.seek(0)
        lock_file.write(f"{epoch}\n".encode())
        lock_file.flush()
        os.fsync(lock_file.fileno())


#: what finds rows that were altered: their place, for the message
_ALTERED = (
    """SELECT 'submission ' || id FROM submission WHERE checksum != checksum_of(id, output, user, file_name)""",
    """SELECT 'request ' || place || ' of submission ' || submission FROM request
       WHERE checksum != checksum_of(submission, place, request)""",
    """SELECT 'the outcome of request ' || place || ' of submission ' || submission FROM request
       WHERE outcome_checksum != checksum_of(place, outcome, file, file_bytes, pixels_sha256, error_kind, message)""",
    f"""SELECT 'the requests of submission ' || id FROM submission WHERE state != '{SubmissionState.RECEIVING}' AND
        request_count != (SELECT count(*) FROM request WHERE request.submission = submission.number)""",
    "SELECT 'the memory of the last controller' FROM memory WHERE checksum != checksum_of(content)",
)


def _require_unaltered(connection: sqlite3.Connection) -> None:
    """Raise sqlite3.DatabaseError for a file with rows that do not agree with their checksums."""
    for statement in _ALTERED:
        found = connection.execute(f"{statement} LIMIT 1").fetchone()
        if found is not None:
            raise sqlite3.DatabaseError(f"altered since it was written: {found[0]}")


def _begin_epoch(connection: sqlite3.Connection, known_epoch: int) -> int:
    """Bring the file to this version and start an epoch; drop submissions that were never acknowledged. `known_epoch`
    is the latest one that is known besides the file; 0 if none is."""
    (problem,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if problem != "ok":
        raise sqlite3.DatabaseError(f"damaged: {problem}")
    (before,) = connection.execute("PRAGMA user_version").fetchone()
    if known_epoch and not before:
        raise sqlite3.DatabaseError(f"it is empty, and was in use: opened {known_epoch} times")
    with _transaction(connection):
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if not 0 <= version <= VERSION:
            raise sqlite3.DatabaseError(f"version {version}, this modelpool reads up to {VERSION}; update modelpool")
        for statements in MIGRATIONS[version:]:
            for statement in statements:
                connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {VERSION}")
        _require_unaltered(connection)
        (written,) = connection.execute("SELECT number FROM epoch").fetchone()
        if written < known_epoch:
            logger.warning(
                "the journal is an older copy: it was opened %d times, and the last one %d times; what ended since "
                "runs again, unless its output is there",
                written,
                known_epoch,
            )
        connection.execute("UPDATE epoch SET number = max(number, ?) + 1", (known_epoch,))
        connection.execute("DELETE FROM submission WHERE state = ?", (SubmissionState.RECEIVING,))
        (epoch,) = connection.execute("SELECT number FROM epoch").fetchone()
    return int(epoch)


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        with contextlib.suppress(sqlite3.Error):  # SQLite ends it by itself after some errors
            connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


@contextlib.contextmanager
def _failures_named(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise JournalFailed(
            f"{path}: the journal cannot be read or written ({error}); free space or restore the file, or move it away "
            "to start with an empty one"
        ) from error


def require_same(known: SubmissionRecord, new: NewSubmission) -> None:
    """Raise SubmissionExists if a submission differs from the known one of its id."""
    if _identity(known) != _identity(new):
        raise SubmissionExists(
            f"id {new.submission_id!r} belongs to a submission of {_identity(known)}; found {_identity(new)}; choose "
            "another id"
        )


def _identity(submission: NewSubmission | SubmissionRecord) -> str:
    """Return what a submission must have in common with another one of its id."""
    named = f", file names {submission.file_name}" if submission.file_name else ""
    return f"{counted(submission.request_count, 'request')} with output {submission.output}{named}"


def _find(connection: sqlite3.Connection, submission_id: str) -> SubmissionRecord | None:
    row = connection.execute(f"SELECT {_COLUMNS} FROM submission WHERE id = ?", (submission_id,)).fetchone()
    return None if row is None else _record(row)


def _required(connection: sqlite3.Connection, submission_id: str) -> SubmissionRecord:
    found = _find(connection, submission_id)
    if found is None:
        raise UnknownName(f"unknown submission {submission_id!r}")
    return found


def _number(connection: sqlite3.Connection, submission_id: str) -> int:
    row = connection.execute("SELECT number FROM submission WHERE id = ?", (submission_id,)).fetchone()
    if row is None:
        raise UnknownName(f"unknown submission {submission_id!r}")
    return int(row[0])


def _count(connection: sqlite3.Connection, number: int, outcome: Outcome, added: int) -> None:
    """Add to the number of requests with this outcome; the last one ends the submission."""
    connection.execute(
        f"UPDATE submission SET {outcome.value} = {outcome.value} + ?, state = CASE WHEN "
        "succeeded + failed + cancelled + ? >= request_count THEN ? ELSE state END WHERE number = ?",
        (added, added, SubmissionState.ENDED, number),
    )


def _record(row: tuple[Any, ...]) -> SubmissionRecord:
    submission_id, state, *rest = row
    return SubmissionRecord(submission_id, SubmissionState(state), *rest)
