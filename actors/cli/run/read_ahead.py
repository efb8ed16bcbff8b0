"""`ReadAhead`: takes the items of an iterator in a thread, some ahead of their consumer.

So that a slow source (a large file, the output of another program) and its consumer work at the same time, and what has
arrived is not kept waiting for what has not.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Generic, Self, TypeVar

T = TypeVar("T")

#: items that are taken ahead
MOST_AHEAD = 4096
#: maximum delay of Ctrl-C in a thread that waits
_SIGNAL_SECONDS = 0.5


class ReadAhead(Generic[T]):
    """The items of an iterable, taken in a thread while entered. One consumer."""

    def __init__(self, items: Iterable[T], name: str, most_ahead: int = MOST_AHEAD) -> None:
        """`name` is the thread's."""
        self._items = items
        self._most_ahead = most_ahead
        self._taken: deque[T] = deque()
        #: guards everything; notified when an item is taken or given, and at the end
        self._changed = threading.Condition()
        self._ended = False
        self._closed = False
        self._problem: BaseException | None = None
        self._thread = threading.Thread(target=self._take, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take nothing more. Does not wait for an iterator that waits itself."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait(self) -> bool:
        """Wait for the first item; return whether there is one. Raises what the iterator raises instead."""
        with self._changed:
            while not (self._taken or self._ended):
                self._changed.wait(_SIGNAL_SECONDS)
            if not self._taken and self._problem is not None:
                raise self._problem
            return bool(self._taken)

    def wait_ahead(self, seconds: float) -> None:
        """Wait until all items are taken, or as many as are taken ahead, but at most `seconds`."""
        until = time.monotonic() + seconds
        with self._changed:
            while not (self._ended or len(self._taken) >= self._most_ahead):
                if (left := until - time.monotonic()) <= 0:
                    return
                self._changed.wait(min(left, _SIGNAL_SECONDS))

    def count_of_few(self, most: int) -> int:
        """Wait until all items are taken, or more than `most`. Return how many there are, and 0 for more than `most`.
        Call it before `chunks`, with fewer items than are taken ahead."""
        with self._changed:
            while not self._ended and len(self._taken) <= most:
                self._changed.wait(_SIGNAL_SECONDS)
            return len(self._taken) if len(self._taken) <= most else 0

    def chunks(self, first: int, most: int) -> Iterator[list[T]]:
        """Yield all items in lists of what has arrived, of at least one and at most `most`; the first of at most
        `first`. Raises what the iterator raises, after the items before it. Ends early once this is left.
        """
        size = first
        while True:
            with self._changed:
                while not (self._taken or self._ended or self._closed):
                    self._changed.wait()
                if self._closed:
                    return
                if not self._taken:
                    if self._problem is not None:
                        raise self._problem
                    return
                chunk = [self._taken.popleft() for _ in range(min(size, len(self._taken)))]
                self._changed.notify_all()
            yield chunk
            size = most

    def _take(self) -> None:
        try:
            for item in self._items:
                with self._changed:
                    while len(self._taken) >= self._most_ahead and not self._closed:
                        self._changed.wait()
                    if self._closed:
                        return
                    self._taken.append(item)
                    self._changed.notify_all()
        except BaseException as problem:  # whoever waits for the items must learn of it
            self._problem = problem
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()
