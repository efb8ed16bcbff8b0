"""`CatalogProcess`: the catalog of a controller, in a process of its own on the controller's node.

A dry run of a model in the controller's process would take the interpreter from its event loop, and so from the workers
that wait for their next task. Rules
1. One question at a time is answered, in order of arrival; others are on their way meanwhile. A process that ends is
   replaced, and the questions that it had are asked again, each alone: answers depend on nothing but the files. After
   `MOST_TRIES` a question fails, and no other.
2. Measurements (`learn`) are sent in batches and are lost with the process: they only improve estimates.
3. The process ends when the controller does, as its line ends. It prints to where the controller does.

Both sides send pickles, each after its length. Knows no Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import copyreg
import io
import itertools
import logging
import os
import pickle
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar, TypeVarTuple, cast

from modelpool.actors.control.catalog_questions import LEARN_ALL, CatalogQuestion
from modelpool.actors.control.catalog_service import LEARN_BATCH
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.specs.spec import RunCost, TaskSpec

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

logger = logging.getLogger(__name__)

#: processes that may end while they have the same question, before it fails
MOST_TRIES = 3
#: the number of bytes of a message, before it
LENGTH = struct.Struct("Q")
#: the module that is the process
MAIN = "modelpool.actors.control.catalog_main"
_NO_MORE = "the catalog is closed"


@dataclass(frozen=True, slots=True)
class Call:
    """A question with its arguments. Calls with number 0 are not answered."""

    number: int
    question: CatalogQuestion[*tuple[Any, ...], Any]
    arguments: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """The value or the error of a call, and the address of the catalog's files."""

    number: int
    value: object
    error: BaseException | None
    files_address: str


class _Lost(Exception):
    """Raised if the process has ended before it answered."""


class _Process:
    """One process, and the questions that it has."""

    def __init__(self, opener: bytes, python: Sequence[str]) -> None:
        """Start it; raises OSError. Returns at once: the process opens the catalog meanwhile."""
        ours, theirs = socket.socketpair()
        with theirs:
            # modules that this process can import are those that the catalog may need
            paths = os.pathsep.join(dict.fromkeys(filter(None, sys.path)))
            self._process = subprocess.Popen(
                [*python, "-P", "-m", MAIN], stdin=theirs.fileno(), env={**os.environ, "PYTHONPATH": paths}
            )
        self._socket = ours
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self.is_over = False
        try:
            self._socket.sendall(LENGTH.pack(len(opener)) + opener)
        except OSError:
            self.end()
            raise
        self._socket.setblocking(False)

    async def send(self, call: Call) -> asyncio.Future[Answer]:
        """Send a question; return its answer, which may be _Lost. Raises _Lost."""
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[call.number] = answer
        answer.add_done_callback(partial(self._forget, call.number))
        try:
            await self.tell(call)
        except BaseException:
            answer.cancel()
            raise
        return answer

    def _forget(self, number: int, answer: asyncio.Future[Answer]) -> None:
        self._waiting.pop(number, None)
        if not answer.cancelled():
            answer.exception()  # else asyncio reports one that nobody has read

    async def settled(self) -> None:
        """Wait until every question has its answer, or will have none."""
        if self._waiting:
            await asyncio.wait(tuple(self._waiting.values()))

    async def tell(self, call: Call) -> None:
        """Send a question. Raises _Lost."""
        message = _packed(call)
        try:
            writer = self._writer or await self._connected()
            writer.writelines((LENGTH.pack(len(message)), message))
            await writer.drain()
        except (OSError, RuntimeError) as closed:  # the latter of uvloop, which Ray uses where it is installed
            self.end()  # now: the caller may ask again before the reader notices
            raise _Lost(str(closed)) from closed

    async def _connected(self) -> asyncio.StreamWriter:
        try:
            reader, self._writer = await asyncio.open_connection(sock=self._socket)
        except asyncio.CancelledError:  # asyncio has closed the socket
            self.end()
            raise
        self._reading = asyncio.ensure_future(self._read(reader))
        return self._writer

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                answer: Answer = pickle.loads(await reader.readexactly(size))
                waiting = self._waiting.get(answer.number)
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
        except (OSError, asyncio.IncompleteReadError):
            problem: Exception = _Lost("it ended")
        except Exception as unreadable:  # of the message: the caller gets the error, and the next process starts
            logger.exception("an answer of the catalog cannot be read")
            problem = _Lost(f"its answer cannot be read: {unreadable!r}")
        self._end(problem)

    def end(self) -> None:
        """End it. Idempotent."""
        if self._reading is not None:
            self._reading.cancel()
        self._end(_Lost("it was ended"))

    def _end(self, problem: Exception) -> None:
        self.is_over = True
        for waiting in tuple(self._waiting.values()):
            if not waiting.done():
                waiting.set_exception(problem)
        if self._writer is not None:
            # close() would go on writing, to a file descriptor that the next process may get
            self._writer.transport.abort()
        self._socket.close()
        self._process.kill()
        self._process.wait()


class CatalogProcess:
    """A `CatalogQueries`. Starts the first process at once; use it in one event loop."""

    def __init__(
        self,
        opener: bytes,
        python: Sequence[str] = (sys.executable,),
        computed_by: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`opener` is the pickle of a function that opens the catalog, and `python` starts Python. `computed_by` is for
        recipes."""
        self._opener = pickle.dumps((opener, dict(computed_by)))
        self._python = tuple(python)
        self._numbers = itertools.count(1)
        #: questions are sent in the order of the calls; the process answers them in that order
        self._turn = asyncio.Lock()
        self._measured: list[tuple[TaskSpec, RunCost]] = []
        self._flushing: asyncio.Task[None] | None = None
        self._files_address = ""
        self._closed = False
        self._process: _Process | None = None
        with contextlib.suppress(OSError):  # the first question says why
            self._process = _Process(self._opener, self._python)

    @property
    def files_address(self) -> str:
        """See `CatalogQueries`."""
        return self._files_address

    def learn(self, task: TaskSpec, cost: RunCost) -> None:
        """See `CatalogQueries`."""
        self._measured.append((task, cost))
        if len(self._measured) >= LEARN_BATCH and (self._flushing is None or self._flushing.done()):
            self._flushing = asyncio.ensure_future(self._flush())

    def close(self) -> None:
        """End the process. Idempotent."""
        self._closed = True
        process, self._process = self._process, None
        if process is not None:
            process.end()

    async def _flush(self) -> None:
        """Send measurements that have no question after them. Without a process they are lost, too: the next question
        may be long in coming."""
        async with self._turn:
            if self._process is None or self._process.is_over:
                self._measured.clear()
                return
            with contextlib.suppress(_Lost):  # the next question notices
                await self._send_measured(self._process)

    async def ask(self, question: CatalogQuestion[*Ts, T], *arguments: *Ts) -> T:
        """See `CatalogQueries`. Raises UserError after `MOST_TRIES`."""
        answer = await self._answer(Call(next(self._numbers), question, arguments))
        self._files_address = answer.files_address
        if answer.error is not None:
            raise answer.error
        return cast("T", answer.value)

    async def _answer(self, call: Call) -> Answer:
        """Return the answer to a question, of as many processes as it takes. Raises UserError.

        The next question is sent while the process answers this one: on a busy event loop, a turn of each question from
        sending to its answer would take many times as long as the answer. After a process has ended, a question that
        it has not answered is asked alone: another one may have ended it.
        """
        try:
            async with self._turn:
                sent = await self._sent(call)
            return await sent
        except (_Lost, OSError) as lost:
            problem = self._noted(lost)
        async with self._turn:
            for _ in range(1, MOST_TRIES):
                if self._closed:
                    break
                try:
                    await self._started().settled()
                    return await (await self._sent(call))
                except (_Lost, OSError) as lost:
                    problem = self._noted(lost)
        if self._closed:
            raise UserError(_NO_MORE)
        raise UserError(
            f"the process that reads model files ended {MOST_TRIES} times in a row while it answered this "
            f"({call.question.name}; {problem}); the output of the controller shows why, or it was out of memory"
        )

    async def _sent(self, call: Call) -> asyncio.Future[Answer]:
        """Send a question; return its answer. Raises _Lost, and OSError if no process starts."""
        process = self._started()
        await self._send_measured(process)
        return await process.send(call)

    def _noted(self, lost: Exception) -> str:
        if not self._closed:
            logger.warning("the process of the catalog is started again: %s", lost)
        return str(lost)

    def _started(self) -> _Process:
        if self._closed:
            raise UserError(_NO_MORE)
        if self._process is None or self._process.is_over:
            before, self._process = self._process, None
            if before is not None:
                before.end()
            self._process = _Process(self._opener, self._python)
        return self._process

    async def _send_measured(self, process: _Process) -> None:
        measured, self._measured = self._measured, []
        if measured:
            await process.tell(Call(0, LEARN_ALL, (measured,)))


class _Pickler(pickle.Pickler):
    """Pickler that supports read-only views of dicts."""

    dispatch_table = copyreg.dispatch_table | {MappingProxyType: lambda view: (_read_only, (dict(view),))}


def _read_only(values: dict[Any, Any]) -> MappingProxyType[Any, Any]:
    return MappingProxyType(values)


def _packed(value: object) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def answer_of(number: int, value: object, error: BaseException | None, files_address: str) -> bytes:
    """Return the message of an answer, length first. An error that cannot be sent is replaced by its text."""
    try:
        message = _packed(Answer(number, value, error, files_address))
        if error is not None:
            pickle.loads(message)  # an error of any class need not survive it
    except Exception as unsent:
        text = f"the catalog failed: {error if error is not None else unsent!r}"
        message = _packed(Answer(number, None, RuntimeError(text), files_address))
    return LENGTH.pack(len(message)) + message


def read_message(line: socket.socket) -> Any:
    """Read a message. Raises EOFError at the end of the line."""
    return pickle.loads(_read_bytes(line, *LENGTH.unpack(_read_bytes(line, LENGTH.size))))


def _read_bytes(line: socket.socket, size: int) -> bytes:
    read = bytearray()
    while len(read) < size:
        part = line.recv(size - len(read))
        if not part:
            raise EOFError("the line ended")
        read += part
    return bytes(read)
