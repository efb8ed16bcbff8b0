"""`FileVerifier`: compares the files that runs of a worker read with the SHA-256 that the recipes name.

A sampled fingerprint lets a file be used at once (`actors.worker.file_check`); its hash is computed meanwhile, once on
each machine (`pool.catalog.registry.node_hashes`). A run ends with the numbers of the states of files with hashes
not known by then, and the controller learns of each such state later whether it was right. Rules
1. A state of a file lasts until its size, times, inode or device change. A run fails if its file has another size,
   inode or device at its end. Other times are no failure, as a file that was only touched has them too: it is hashed
   again, and what the run made waits for that. Where no hash of the state before is known, it is made again.
2. A file that differs is not used, but other files with equal components are; when it changes again, the new one is
   hashed, and is used once it is right.
3. A file that cannot be read is not used, either. It is read again after a while, ever more seldom; the
   first failures are not told.
4. After a change, models are opened again: they have mapped the file as it was.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from modelpool.actors.worker.file_check import ComponentFile, FilesUnavailable
from modelpool.actors.worker.wire.messages import ExpectedFile
from modelpool.pool.catalog.registry.node_hashes import (
    FileState,
    HashingStopped,
    NodeHashes,
    file_state,
    is_same_file,
    is_unchanged,
    members_of,
)
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.file_part import FilePart
from modelpool.pool.values.specs.spec import ComponentKey, FileVerdict, JudgedFile

logger = logging.getLogger(__name__)

#: files that are remembered; the oldest right ones are forgotten first
MOST_FILES = 16_384
#: interval of looking whether files have changed, and the files that are looked at: the last ones that runs used
POLL_SECONDS = 5.0
MOST_POLLED = 256
#: niceness of the thread that hashes: runs come first
NICENESS = 10
#: longest time until a file is read again that could not be read; the first is the interval of polling
LONGEST_RETRY_SECONDS = 300.0
#: failures in a row to read a file until it is not used any more: jobs fail where no other machine has it
FAILURES_BEFORE_VERDICT = 3
#: verdicts on files that no run uses
_NOT_USED = (FileVerdict.DIFFERS, FileVerdict.UNREADABLE)


@dataclass(slots=True)
class _Watched:
    """A file that runs read, or all files of a model, in its latest state.

    number   of the state; 0 before the first run
    verdict  None while its hash is not known
    found    the hash, or why there is none
    failures, retry_at  attempts in a row to read it that failed; when it is read again
    is_used  a run has read this state before its hash was known
    same_as  number of the first state since which the file was right whenever only its times had changed; 0: none
    began    number of the first state of the file with this size, inode and device
    read_at  `FileVerifier.changes` when a run began to read it last: more since then means that no model has mapped it
    told     components that were told of when it was judged
    """

    part: FilePart
    components: dict[ComponentKey, None] = field(default_factory=dict)
    members: tuple[str, ...] = ()
    states: tuple[FileState, ...] = ()
    number: int = 0
    verdict: FileVerdict | None = None
    found: str = ""
    is_used: bool = False
    same_as: int = 0
    failures: int = 0
    retry_at: float = 0.0
    told: int = 0
    began: int = 0
    read_at: int = -1

    def is_other(self, number: int) -> bool:
        """Whether the file has changed in more than its times since the state `number`."""
        return number < self.began

    @property
    def files(self) -> tuple[ComponentFile, ...]:
        """The file, for each component that is read from it."""
        return tuple((key, self.part) for key in self.components)

    def judged(self, verdict: FileVerdict) -> JudgedFile:
        """Return its state with this verdict."""
        part = self.part
        return JudgedFile(self.number, verdict, tuple(self.components), part.path, part.sha256, self.found)


@dataclass(frozen=True, slots=True)
class FilesInUse:
    """The files of a run, with the numbers of their states at its start. `has_changed`: one of them is not as earlier
    runs found it."""

    files: tuple[tuple[_Watched, int], ...] = ()
    has_changed: bool = False


class FileVerifier:
    """The files of one worker. Thread-safe."""

    def __init__(
        self,
        on_judged: Callable[[tuple[JudgedFile, ...]], None],
        hashes: Callable[[], NodeHashes] = NodeHashes,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        """`on_judged` is called in several threads, and must not block. Each of two threads has its own `hashes`."""
        self._on_judged = on_judged
        self._poll_seconds = poll_seconds
        self._known_hashes, self._hashes = hashes(), hashes()
        #: guards everything below; held while files are looked at, not while they are read
        self._lock = threading.Lock()
        #: by path and expected hash; the last one used most recently
        self._watched: OrderedDict[tuple[str, str], _Watched] = OrderedDict()
        self._of_component: dict[ComponentKey, dict[tuple[str, str], None]] = {}
        self._last_number = 0
        self._queue: deque[_Watched] = deque()
        #: the one that is hashed now
        self._hashing: _Watched | None = None
        #: counts changes of files that runs have used: models that were opened before are out of date
        self.changes = 0
        self._wake = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None

    def expect(self, files: Iterable[ExpectedFile]) -> None:
        """Note which files components are read from. Those without a hash are not verified."""
        with self._lock:
            for file in files:
                if not file.part.sha256:
                    continue
                key = (file.part.path, file.part.sha256)
                watched = self._watched.setdefault(key, _Watched(file.part))
                watched.components[file.component] = None
                self._of_component.setdefault(file.component, {})[key] = None
            for key in [key for key, each in self._watched.items() if each.verdict is FileVerdict.RIGHT]:
                if len(self._watched) <= MOST_FILES:
                    break
                self._forget(key)

    def begin(self, files: Iterable[ComponentFile], joins: bool = False) -> FilesInUse:
        """Look at the files of a run before it reads them. Raises FilesUnavailable for those that are known not to be
        the expected ones, or are gone. What else its components were read from is looked at, too: models of earlier
        runs may have mapped it. If that differs or is gone, all models are opened again, and it does not concern the
        run. Nor does one that no open model has mapped, such as one that is being written; a run that `joins` others
        has their models, which stay open."""
        read = tuple(files)
        own = {(part.path, part.sha256) for _, part in read}
        problems: dict[str, tuple[ComponentFile, ...]] = {}
        news: list[JudgedFile] = []
        used: list[tuple[_Watched, int]] = []
        owned: list[_Watched] = []
        has_changed = False
        with self._lock:
            for watched in self._files_of(key for key, _ in read):
                is_own = (watched.part.path, watched.part.sha256) in own
                try:
                    has_changed = self._look(watched, news) or has_changed
                except UserError as missing:
                    if is_own:
                        problems[str(missing)] = watched.files
                        continue
                    if watched.verdict is not FileVerdict.RIGHT and watched.read_at == self.changes:
                        self.changes += 1  # the bytes that were read from it are unknown
                    continue
                if is_own:
                    owned.append(watched)
                elif not joins and watched.read_at != self.changes:
                    continue
                if watched.verdict in _NOT_USED:
                    if not is_own:
                        continue
                    judged = watched.judged(watched.verdict)
                    problems[judged.reason] = watched.files
                    if len(judged.components) > watched.told and judged not in news:
                        news.append(judged)  # a file of several components, which were not known before
                    watched.told = len(judged.components)
                used.append((watched, watched.number))
            for watched in owned:
                watched.read_at = self.changes
        self._tell(news)
        _raise(problems)
        return FilesInUse(tuple(used), has_changed)

    def end(self, in_use: FilesInUse) -> tuple[int, ...]:
        """Look at the files again after a run that succeeded; return the numbers of the states with unknown
        hashes. Raises FilesUnavailable if one has changed meanwhile, or is not the expected one."""
        problems: dict[str, tuple[ComponentFile, ...]] = {}
        news: list[JudgedFile] = []
        unverified = []
        with self._lock:
            for watched, number in in_use.files:
                with suppress(UserError):  # removed: the run has read all that it needed
                    self._look(watched, news)
                if watched.number != number and watched.is_other(number):
                    problems[f"{watched.part.path}: was changed during the run"] = watched.files
                elif watched.verdict in _NOT_USED:
                    problems[watched.judged(watched.verdict).reason] = watched.files
                elif watched.number != number and not 0 < watched.same_as <= number:
                    # only its times are others, but what the run has read is not known: it is made again
                    self._last_number += 1
                    remade = JudgedFile(
                        self._last_number,
                        FileVerdict.CHANGED,
                        tuple(watched.components),
                        watched.part.path,
                        watched.part.sha256,
                    )
                    news.append(remade)
                    unverified.append(remade.state)
                elif watched.verdict is None:
                    watched.is_used = True
                    unverified.append(watched.number)
        self._tell(news)
        _raise(problems)
        return tuple(unverified)

    def tell_again(self) -> None:
        """Another controller has come, which has heard of no file: tell it of those that differ when it needs them."""
        with self._lock:
            for watched in self._watched.values():
                watched.told = 0

    @property
    def is_settled(self) -> bool:
        """Whether the hashes of all files that runs have used are known."""
        with self._lock:
            return not self._queue and self._hashing is None

    def close(self) -> None:
        """Stop hashing. Idempotent."""
        self._closed = True
        self._wake.set()

    def _files_of(self, components: Iterable[ComponentKey]) -> list[_Watched]:
        """Return the files that these components are, or were, read from. Requires the lock."""
        keys = dict.fromkeys(key for each in components for key in self._of_component.get(each, ()))
        for key in keys:
            self._watched.move_to_end(key)
        return [self._watched[key] for key in keys]

    def _forget(self, key: tuple[str, str]) -> None:
        for component in self._watched.pop(key).components:
            self._of_component[component].pop(key, None)
            if not self._of_component[component]:
                del self._of_component[component]

    def _look(self, watched: _Watched, news: list[JudgedFile]) -> bool:
        """Compare a file with its latest state; return whether it has changed. Requires the lock. Raises UserError."""
        if not watched.number:
            self._note_state(watched, news)
            return False
        if all(map(is_unchanged, watched.members, watched.states)):
            return False
        if watched.verdict is None and watched.is_used:
            news.append(watched.judged(FileVerdict.CHANGED))
        is_touched = all(map(is_same_file, watched.members, watched.states))
        if is_touched and watched.verdict is FileVerdict.RIGHT:
            self._note_state(watched, news)
            return False
        watched.same_as = 0
        self.changes += 1
        self._note_state(watched, news)
        if not is_touched:
            watched.began = watched.number
        return True

    def _note_state(self, watched: _Watched, news: list[JudgedFile]) -> None:
        """Note the state of a file, and its verdict if known. Requires the lock. Raises UserError."""
        members = members_of(watched.part)
        states = tuple(file_state(path) for path in members)
        known = self._known_hashes.known(watched.part)  # before anything is noted: this may raise, too
        self._last_number += 1
        watched.members, watched.states, watched.number = members, states, self._last_number
        was_refused = watched.verdict in _NOT_USED
        watched.verdict, watched.found, watched.is_used, watched.failures = None, "", False, 0
        if known is not None:
            self._judge(watched, known)
            if watched.verdict is FileVerdict.DIFFERS or was_refused:
                news.append(watched.judged(watched.verdict or FileVerdict.DIFFERS))
            return
        self._queue.append(watched)
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._run, name="hash files", daemon=True)
            self._thread.start()
        self._wake.set()

    def _judge(self, watched: _Watched, found: str) -> None:
        is_right = found == watched.part.sha256
        watched.found, watched.verdict = found, FileVerdict.RIGHT if is_right else FileVerdict.DIFFERS
        watched.told = len(watched.components)
        watched.same_as = (watched.same_as or watched.number) if is_right else 0
        if not is_right:
            self.changes += 1  # what was read from it must not stay
            logger.warning("%s", watched.judged(FileVerdict.DIFFERS).reason)

    def _tell(self, news: list[JudgedFile]) -> None:
        if news:
            try:
                self._on_judged(tuple(news))
            except Exception:  # the controller is gone; the next one asks again
                logger.exception("what was found out about files was not told")

    def _run(self) -> None:
        """Hash files, and look whether those that are in use change."""
        if sys.platform == "linux":  # there, threads have a niceness of their own
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while not self._closed:
            self._wake.wait(self._poll_seconds)
            self._wake.clear()
            while (watched := self._next()) is not None:
                self._hash(watched)
            self._poll()

    def _next(self) -> _Watched | None:
        with self._lock:
            self._hashing = self._queue.popleft() if self._queue and not self._closed else None
            return self._hashing

    def _hash(self, watched: _Watched) -> None:
        with self._lock:
            number, part = watched.number, watched.part
        is_read = True
        try:
            found = self._hashes.sha256(part, lambda: self._closed)
        except HashingStopped:
            return
        except Exception as problem:  # results wait for it: whatever happens, they must not wait for ever
            found, is_read = str(problem) or type(problem).__name__, False
        news: list[JudgedFile] = []
        with self._lock:
            with suppress(UserError):
                self._look(watched, news)
            if watched.number == number and watched.verdict in (None, FileVerdict.UNREADABLE):
                before = (watched.verdict, watched.found)
                if is_read:
                    self._judge(watched, found)
                else:
                    self._judge_unreadable(watched, found)
                if watched.verdict is not None and before != (watched.verdict, watched.found):
                    news.append(watched.judged(watched.verdict))
        self._tell(news)

    def _judge_unreadable(self, watched: _Watched, why: str) -> None:
        """Note that a file could not be read, and when it is read again. Requires the lock."""
        seconds = min(self._poll_seconds * 2 ** min(watched.failures, 30), LONGEST_RETRY_SECONDS)
        watched.failures, watched.retry_at = watched.failures + 1, time.monotonic() + seconds
        if watched.failures < FAILURES_BEFORE_VERDICT or (watched.verdict, watched.found) == (
            FileVerdict.UNREADABLE,
            why,
        ):
            return
        watched.verdict, watched.found, watched.same_as = FileVerdict.UNREADABLE, why, 0
        watched.told = len(watched.components)
        self.changes += 1
        logger.warning("%s", watched.judged(FileVerdict.UNREADABLE).reason)

    def _poll(self) -> None:
        news: list[JudgedFile] = []
        with self._lock:
            polled = list(self._watched.values())[-MOST_POLLED:]
            for watched in polled:
                if watched.number:
                    with suppress(UserError):  # gone: the next run that needs it says so
                        self._look(watched, news)
            now = time.monotonic()
            for watched in self._watched.values():
                if watched.failures and now >= watched.retry_at and watched.verdict in (None, FileVerdict.UNREADABLE):
                    self._queue.append(watched)
        self._tell(news)
        if self._queue:
            self._wake.set()


def _raise(problems: dict[str, tuple[ComponentFile, ...]]) -> None:
    if problems:
        raise FilesUnavailable("; ".join(problems), [file for files in problems.values() for file in files])
