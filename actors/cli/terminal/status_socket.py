"""`StatusSocket`: the process of a pool answers `modelpool status` on a Unix socket, so that the command needs no Ray.

Only the user of that process can enter the socket's folder. An answer is one JSON object: the present status of the
pool, which the controller is asked for each time, or why there is none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import socketserver
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelpool.pool.values.core.errors import UserError

if TYPE_CHECKING:
    from modelpool.actors.control.status_values import PoolStatus

#: silence after which a controller counts as lost: it answers within seconds even while 100,000 jobs arrive
ANSWER_SECONDS = 60.0
_STATUS, _PROBLEM = "status", "problem"
_READ_BYTES = 1 << 16


class StatusSocket:
    """Answers each connection with what `read` returns then; an error of `read` is the answer, too."""

    def __init__(self, path: Path, read: Callable[[], PoolStatus]) -> None:
        """Listen at `path`, which must be short (some 100 bytes) and not exist. `read` is called by several threads."""

        class StatusHandler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                try:
                    answer: dict[str, Any] = {_STATUS: plain_status(read())}
                except Exception as failed:
                    answer = {_PROBLEM: str(failed) or type(failed).__name__}
                with contextlib.suppress(OSError):  # who asked has gone
                    self.wfile.write(json.dumps(answer).encode())

        self._server = socketserver.ThreadingUnixStreamServer(str(path), StatusHandler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="answer status", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def plain_status(status: PoolStatus) -> dict[str, Any]:
    """Return a status as JSON values."""
    return {**dataclasses.asdict(status), "waiting": dict(status.waiting), "jobs": dict(status.jobs)}


def asked_status(path: str) -> PoolStatus | None:
    """Return the present status of the pool with the socket at `path`; None if no process of this version answers
    there, which Ray may do instead. Raises UserError if its controller does not answer.
    """
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(ANSWER_SECONDS)
            connection.connect(path)
            content = b"".join(iter(lambda: connection.recv(_READ_BYTES), b""))
        answer = json.loads(content)
    except TimeoutError:
        raise UserError(f"the process of the pool has not answered for {ANSWER_SECONDS:.0f} s") from None
    except (OSError, ValueError):
        return None
    if isinstance(answer, dict) and _PROBLEM in answer:
        raise UserError(f"the pool does not answer: {answer[_PROBLEM]}")
    return _parsed(answer)


def _parsed(answer: Any) -> PoolStatus | None:
    from pydantic import TypeAdapter, ValidationError

    from modelpool.actors.control.status_values import PoolStatus

    try:
        return TypeAdapter(PoolStatus).validate_python(answer[_STATUS])
    except (ValidationError, KeyError, TypeError):  # of another version
        return None
