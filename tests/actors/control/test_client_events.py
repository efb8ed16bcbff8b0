"""When a driver is told of ends: together while more are to come, at once when there are none.

Proves: the last end does not wait for others, neither when that is known before nor when it turns out meanwhile; ends
in between do wait, and are told by one answer; progress that an answer with ends has is not told again.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from modelpool.actors.control import client_events as feed
from modelpool.actors.control.client_events import ClientEvents
from modelpool.actors.worker.wire.messages import DriverEvents


class Talk:
    """A feed and whoever listens to it. Jobs are numbers here: a feed does not look into them."""

    def __init__(self) -> None:
        self.feed = ClientEvents(0.0)
        self.more_to_come = True
        self._cursor = 0

    def end(self, job: Any) -> None:
        self.feed.ended(job)

    async def hear(self) -> tuple[Any, ...]:
        news: DriverEvents = await self.feed.events(self._cursor, 60.0, tuple, lambda: 0.0, lambda: self.more_to_come)
        self._cursor = news.cursor
        return news.ended


@pytest.fixture(autouse=True)
def gathering_never_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever gathers where there is nothing to gather runs into the time-out of the test."""
    monkeypatch.setattr(feed, "GATHER_SECONDS", 1e6)


async def _told_one(talk: Talk) -> None:
    """The first answer waits for nothing; from now on answers keep apart."""
    talk.end(0)
    assert await talk.hear() == (0,)


def test_the_last_end_is_told_at_once() -> None:
    async def scene() -> None:
        talk = Talk()
        await _told_one(talk)
        talk.more_to_come = False
        talk.end(1)
        assert await talk.hear() == (1,)

    asyncio.run(asyncio.wait_for(scene(), 30))


def test_an_end_that_waits_is_told_when_no_more_are_to_come() -> None:
    """As when the result was there already: the job ends before its submission is known to be over."""

    async def scene() -> None:
        talk = Talk()
        await _told_one(talk)
        talk.end(1)
        answer = asyncio.ensure_future(talk.hear())
        for _ in range(10):
            await asyncio.sleep(0)
        assert not answer.done()
        talk.feed.all_ended()
        assert await answer == (1,)

    asyncio.run(asyncio.wait_for(scene(), 30))


def test_ends_that_come_while_others_are_to_come_are_told_together() -> None:
    async def scene() -> None:
        talk = Talk()
        await _told_one(talk)
        talk.feed.all_ended()  # of what was before
        answer = asyncio.ensure_future(talk.hear())
        for job in (1, 2, 3):
            talk.end(job)
            await asyncio.sleep(0)
        assert not answer.done()
        talk.feed.all_ended()
        assert await answer == (1, 2, 3)

    asyncio.run(asyncio.wait_for(scene(), 30))


def test_ends_of_one_batch_are_told_by_one_answer() -> None:
    """They come in turns of the event loop: the first one was told alone, and the others by a second answer."""

    async def scene() -> None:
        talk = Talk()
        answer = asyncio.ensure_future(talk.hear())
        await asyncio.sleep(0)
        for job in range(8):
            talk.end(job)
            await asyncio.sleep(0)
        assert await answer == tuple(range(8))

    asyncio.run(asyncio.wait_for(scene(), 30))


def test_progress_waits_longer_while_ends_come_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of small images had twice as many answers about progress as about ends."""
    monkeypatch.setattr(feed, "GATHER_SECONDS", 0.0)
    monkeypatch.setattr(feed, "PATIENT_SECONDS", 1e6)

    async def scene() -> None:
        talk, loop = Talk(), asyncio.get_running_loop()
        for ends in range(3):
            answer = asyncio.ensure_future(talk.hear())
            await asyncio.sleep(0)
            talk.feed.progressed()
            assert talk.feed._wake_later is not None
            is_patient = talk.feed._wake_later.when() - loop.time() > 2 * feed.PROGRESS_SECONDS
            assert is_patient == (ends == 2), "after two answers with ends that came soon after each other"
            talk.end(ends)
            await answer

    asyncio.run(asyncio.wait_for(scene(), 30))


def test_progress_is_told_alone_only_if_no_end_has_told_it() -> None:
    async def scene() -> None:
        talk = Talk()
        talk.feed.progressed()
        answer = asyncio.ensure_future(talk.hear())
        await asyncio.sleep(0)
        talk.feed.progressed()
        assert talk.feed._wake_later is not None, "alone, if nothing else comes"
        talk.end(0)
        assert await answer == (0,)
        assert talk.feed._wake_later is None, "that answer had it"
        answer = asyncio.ensure_future(talk.hear())
        await asyncio.sleep(0)
        talk.feed.progressed()
        assert await answer == ()

    asyncio.run(asyncio.wait_for(scene(), 30))


def test_an_answer_is_sent_though_every_turn_brings_further_ends() -> None:
    """Before, a busy controller waited 256 turns for an answer of at most 256 ends, and held the others for seconds."""

    async def scene() -> None:
        talk = Talk()
        await _told_one(talk)
        talk.feed._last_sent_at = float("-inf")
        turns = 0

        async def work() -> None:
            nonlocal turns
            while True:
                turns += 1
                for _ in range(4):
                    talk.end(turns)
                await asyncio.sleep(0)

        for number in range(feed.ENDS_IN_ONE_ANSWER):
            talk.end(number)
        busy = asyncio.create_task(work())
        found = await talk.hear()
        assert (len(found), turns) == (feed.ENDS_IN_ONE_ANSWER, 0), "a full answer waits for nothing"
        talk.feed._last_sent_at = float("-inf")
        while len(talk.feed._ended) > 8:
            talk.feed._ended.pop()
        turns = 0
        await talk.hear()
        assert turns <= feed.ENDS_IN_ONE_ANSWER // 4 + 1
        busy.cancel()

    asyncio.run(asyncio.wait_for(scene(), 30))
