"""`QuestionTurns`: in which order drivers' questions reach the catalog, which answers one after another.

A question takes from a millisecond to a second, and a caller may have any number of them. Users get equal time; of one
user, questions that take long go behind others, and submissions that have had less time before others: so a job waits
for the question that is being answered, and not for what others have submitted before.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

#: questions that the catalog has at a time: one that it answers, and one that waits for it; and such questions
#: that take long
MOST_ASKED_AT_ONCE, MOST_LONG_AT_ONCE = 2, 1
#: in this time, half of what a user has had is forgotten
HALF_LIFE_SECONDS = 5.0
#: after this time, a long text waits no longer for short ones
PATIENCE_SECONDS = 5.0
#: characters of the texts of a question, above which they are long
LONG_CHARACTERS = 4096
#: time of a question, above which the next one of its asker is expected to take as long as one of long texts
SLOW_SECONDS = 0.1
#: users with remembered times; others have had none
_MOST_USERS = 1000
_FORGOTTEN_SECONDS = 1e-3


@dataclass(slots=True, eq=False)
class Asker:
    """One submission, or another call with several questions, of a user; `seconds` is the time that it has had, and
    `is_slow` whether its last question took long."""

    user: str = ""
    seconds: float = 0.0
    is_slow: bool = False


@dataclass(slots=True, eq=False)
class _Waiting:
    asker: Asker
    is_long: bool
    since: float
    is_next: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class QuestionTurns:
    """Belongs to one event loop."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """`now` returns seconds of a monotonic clock."""
        self._now = now
        #: questions that the catalog has, by whether their texts are long
        self._asked = {False: 0, True: 0}
        self._waiting: list[_Waiting] = []
        #: what each user has had, as of when
        self._seconds: dict[str, tuple[float, float]] = {}

    @asynccontextmanager
    async def turn(self, asker: Asker, characters: int = 0) -> AsyncIterator[None]:
        """Wait for the turn of a question with texts of so many characters, and have it inside the block."""
        is_long = characters > LONG_CHARACTERS or asker.is_slow
        if self._has_turn(is_long):
            self._asked[is_long] += 1
        else:
            mine = _Waiting(asker, is_long, self._now())
            self._waiting.append(mine)
            try:
                await mine.is_next
            except asyncio.CancelledError:
                if mine in self._waiting:
                    self._waiting.remove(mine)
                else:  # its turn came at the same time
                    self._end(is_long)
                raise
        began = self._now()
        try:
            yield
        finally:
            self._note(asker, self._now() - began)
            self._end(is_long)

    def _has_turn(self, is_long: bool) -> bool:
        if is_long and self._asked[True] >= MOST_LONG_AT_ONCE:
            return False
        return sum(self._asked.values()) < MOST_ASKED_AT_ONCE

    def _end(self, is_long: bool) -> None:
        """End a turn, and give turns to those who come next."""
        self._asked[is_long] -= 1
        now = self._now()
        while possible := [each for each in self._waiting if self._has_turn(each.is_long)]:
            chosen = min(possible, key=lambda each: self._place(each, now))
            self._waiting.remove(chosen)
            self._asked[chosen.is_long] += 1
            chosen.is_next.set_result(None)

    def _place(self, waiting: _Waiting, now: float) -> tuple[float, bool, float, float]:
        is_behind = waiting.is_long and now - waiting.since < PATIENCE_SECONDS
        return self._had(waiting.asker.user, now), is_behind, waiting.asker.seconds, waiting.since

    def _had(self, user: str, now: float) -> float:
        seconds, at = self._seconds.get(user, (0.0, now))
        return seconds * math.exp2((at - now) / HALF_LIFE_SECONDS)

    def _note(self, asker: Asker, seconds: float) -> None:
        now = self._now()
        asker.seconds += seconds
        asker.is_slow = seconds > SLOW_SECONDS
        self._seconds[asker.user] = (self._had(asker.user, now) + seconds, now)
        if len(self._seconds) > _MOST_USERS:
            self._seconds = {
                user: had for user, had in self._seconds.items() if self._had(user, now) > _FORGOTTEN_SECONDS
            }
