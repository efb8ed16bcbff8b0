"""`Reach`: finds out why an actor that runs has not answered the first call of this process.

A process without file descriptors accepts no connections: Ray waits for ever, or says that the actor is unavailable.
Servers of gRPC begin a connection with a frame of settings, on threads of C++, however busy their Python is; so
a connection without that frame tells such a process, or a stopped one, from one that computes. Calls over a connection
that has worked are not looked at.

Imports Ray at once: import this module after a session is open.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.core.generated import gcs_pb2
from ray.exceptions import RayError

from modelpool.actors.ray.control_service import answer_within

#: limit of finding the process of an actor
PLACE_SECONDS = 5.0
#: limit of one attempt, and attempts in a row without an answer until an actor counts as unreachable
CONNECT_SECONDS = 5.0
MOST_ATTEMPTS = 3
#: what a client of HTTP/2 sends first, with empty settings
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_ADVICE = (
    "Let its processes open more files: `ulimit -n 65536` before `modelpool up`, or LimitNOFILE=65536 in a unit of "
    "systemd; or end programs that are connected to the pool. Then `modelpool down` and `modelpool up`; detached jobs "
    "continue"
)


@dataclass(frozen=True, slots=True)
class ActorPlace:
    """The process of an actor; `is_here`: on the node of this process."""

    host: str
    port: int
    pid: int
    is_here: bool


class Reach:
    """One actor, as this process reaches it. Any thread may call."""

    def __init__(
        self,
        what: str,
        place: Callable[[], ActorPlace | None],
        answers: Callable[[str, int], bool] | None = None,
        place_seconds: float = PLACE_SECONDS + 1.0,
    ) -> None:
        """`what` names the actor in messages. `place` and `answers` are asked where it does not answer. An actor whose
        place is not found within `place_seconds` counts as one without: Ray's control service is asked for it, which
        may have ended."""
        self._what = what
        self._place: Callable[[], ActorPlace | None] = partial(answer_within, place_seconds, place)
        self._answers = answers or takes_connections
        self._has_answered = False
        self._attempts = 0
        #: held by the thread that looks: attempts of several threads at a time would count as attempts in a row
        self._looking = threading.Lock()

    def answered(self) -> None:
        """A call was answered."""
        self._has_answered = True

    def problem(self) -> str:
        """Return why a call that waits will not be answered, as a sentence; "" if it may be, or another thread finds
        out. Takes up to PLACE_SECONDS and CONNECT_SECONDS."""
        if self._has_answered or not self._looking.acquire(blocking=False):
            return ""
        try:
            place = self._place()
            if place is None or self._answers(place.host, place.port):
                self._attempts = 0
                return ""
            self._attempts += 1
            return "" if self._attempts < MOST_ATTEMPTS else self._unreachable(place)
        finally:
            self._looking.release()

    def unavailable(self) -> str:
        """Describe an actor that Ray calls unavailable, and that has not ended, as a sentence. Takes up to
        PLACE_SECONDS and CONNECT_SECONDS."""
        place = self._place()
        if place is None:
            return f"{self._what} cannot be reached, though it has not ended"
        if self._answers(place.host, place.port):
            at = f"process {place.pid} at {place.host}:{place.port}"
            return f"the connection to {self._what} broke, though it runs and takes connections ({at}): try again"
        return self._unreachable(place)

    def _unreachable(self, place: ActorPlace) -> str:
        runs = f"{self._what} runs (process {place.pid} at {place.host}:{place.port}), but takes no connections"
        counted = open_files(place.pid) if place.is_here else None
        if counted is None:
            return f"{runs}: it is stopped, the network is down, or it has reached its limit of open files. {_ADVICE}"
        files, limit = counted
        if files < limit:
            return f"{runs}, with {files} of {limit} files open: it is stopped, or does not get to run"
        return f"{runs}: it has reached its limit of {limit} open files. {_ADVICE}"


def place_of(actor: ActorHandle[Any]) -> ActorPlace | None:
    """Return the process of an actor, as Ray's control service knows it; None if it has none, is not known, or the
    service does not answer within PLACE_SECONDS. Waits: for threads without an event loop.

    The table of Ray's state is no source: a call of it has no timeout, and while one waits, its connection stays when
    this process leaves the cluster, and ends this process 60 s after the control service.
    """
    with suppress(RayError, OSError, ValueError, AttributeError):  # without its client after leaving the cluster
        found = asyncio.run(_record(actor))
        if found is None or found.state != gcs_pb2.ActorTableData.ALIVE:
            return None
        is_here = found.node_id.hex() == ray.get_runtime_context().get_node_id()
        return ActorPlace(found.address.ip_address, found.address.port, found.pid, is_here)
    return None


async def _record(actor: ActorHandle[Any]) -> Any:
    client = ray._private.worker.global_worker.gcs_client
    records = await client.async_get_all_actor_info(actor_id=actor._actor_id, timeout=PLACE_SECONDS)
    return next(iter(records.values()), None)


def takes_connections(host: str, port: int, timeout_seconds: float = CONNECT_SECONDS) -> bool:
    """Return whether the gRPC server at an address begins a connection. One that refuses connections has ended, or uses
    TLS, which Ray itself finds out: True."""
    if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
        return True
    try:
        with socket.create_connection((host, port), timeout_seconds) as connection:
            connection.sendall(_PREFACE)
            connection.recv(1)
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


def open_files(pid: int) -> tuple[int, int] | None:
    """Return the number of files that a process of this machine has open, and its limit; None if this process may not
    know them, or the system does not tell."""
    try:
        count = len(os.listdir(f"/proc/{pid}/fd"))
        lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
        limit = next(line.split()[3] for line in lines if line.startswith("Max open files"))
        return (count, int(limit)) if limit.isdecimal() else None
    except (OSError, ValueError, StopIteration, IndexError):
        return None
