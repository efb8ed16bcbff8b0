"""The process of a catalog: answers the questions of a `CatalogProcess`, which it reads from stdin, a socket."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import select
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Executor, Future
from typing import Any

from modelpool.actors.control.catalog_process import answer_of, read_message
from modelpool.actors.control.catalog_service import CatalogService
from modelpool.actors.control.opened_catalog import ListingCatalog
from modelpool.pool.values.core.errors import UserError

#: what `poll` tells if the other side has closed the line
CLOSED = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)


class _SameThread(Executor):
    """Executor that calls functions in the calling thread: a switch of threads would cost a good part of a small
    question."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """See `Executor`."""
        called: Future[Any] = Future()
        try:
            called.set_result(fn(*args, **kwargs))
        except BaseException as raised:
            called.set_exception(raised)
        return called


async def answer_all(line: socket.socket, opener: Callable[[], ListingCatalog], computed_by: Mapping[str, str]) -> None:
    """Open the catalog, and answer questions one after the other, until the line is closed. Nothing else runs on this
    loop, and this thread reads the questions: taking them from another one would cost a switch of threads for each."""
    service = CatalogService(opener, _SameThread(), computed_by)
    with contextlib.suppress(Exception):  # the first question says why
        await service.open()
    while True:
        call, value, error = read_message(line), None, None
        try:
            value = await service.ask(call.question, *call.arguments)
        except BaseException as raised:  # panics of libraries in Rust, too; the controller must not end with one
            error = raised if isinstance(raised, Exception) else RuntimeError(f"the catalog failed: {raised!r}")
            if not isinstance(error, UserError):
                error.add_note(traceback.format_exc())
        if call.number:
            line.sendall(answer_of(call.number, value, error, service.files_address))


def main() -> None:
    """Answer questions until the socket is closed, which also ends a dry run: this thread waits for nothing else."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the terminal is not for this process
    line = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    code = 1
    try:
        opener, computed_by = read_message(line)
        answers = answer_all(line, pickle.loads(opener), computed_by)
        threading.Thread(target=_run_or_end, args=(answers,), name="answer questions", daemon=True).start()
        closed = select.poll()
        closed.register(line, CLOSED)
        closed.poll()
        code = 0
    except (EOFError, OSError):
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)  # without waiting for threads: what they do is for this controller


def _run_or_end(answers: Coroutine[Any, Any, None]) -> None:
    """Answer questions until the line is closed. If that fails, end the process: the next one has the question that
    waits."""
    code = 1
    try:
        asyncio.run(answers)
    except (EOFError, OSError):
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
