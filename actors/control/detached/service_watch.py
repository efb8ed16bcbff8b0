"""`ServiceWatch`: notices that the job service of a pool hangs, by a question that it does not answer. Knows no Ray."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol

from modelpool.actors.control.heartbeats import Heartbeats

_SERVICE = "job service"


class WatchedService(Protocol):
    """A job service, as the process that started it sees it. A service that ends is started again by itself."""

    def ask(self) -> Future[Any]:
        """Ask whether it answers. The answer may be an exception, of a service that has ended."""

    def restart(self) -> None:
        """End its process, which may hang, so that another one opens the journal, under a new epoch."""


class ServiceWatch:
    """Watches one service; `beat` is called regularly."""

    def __init__(self, service: WatchedService, interval_seconds: float, limit_seconds: float, now: float) -> None:
        """After `limit_seconds` without an answer, the service is started again. `now` is monotonic seconds."""
        self._service = service
        self._limit_seconds = limit_seconds
        self._heartbeats: Heartbeats[str] = Heartbeats(interval_seconds, now)
        self._heartbeats.watch(_SERVICE)
        self._answer: Future[Any] | None = None

    def beat(self, now: float) -> float | None:
        """Ask once per interval, and start the service again if it hangs: then return for how many seconds it has not
        answered."""
        if self._answer is not None and self._answer.done():
            self._answer = None
            self._heartbeats.heard(_SERVICE)
        if self._heartbeats.beat(now):
            self._answer = self._service.ask()
        silent_seconds = self._heartbeats.silent().get(_SERVICE, 0.0)
        if silent_seconds < self._limit_seconds:
            return None
        self._service.restart()
        self._answer = None  # Ray repeats the question, and a new one as well
        self._heartbeats.heard(_SERVICE)
        return silent_seconds
