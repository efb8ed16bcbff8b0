"""Who asks the catalog next: no user and no submission waits for all that others have submitted before."""

from __future__ import annotations

import asyncio
from typing import Any

from modelpool.actors.control.question_turns import (
    LONG_CHARACTERS,
    MOST_ASKED_AT_ONCE,
    MOST_LONG_AT_ONCE,
    Asker,
    QuestionTurns,
)

LONG = LONG_CHARACTERS + 1


class World:
    """Turns under a clock that questions move on."""

    def __init__(self) -> None:
        self.now = 0.0
        self.turns = QuestionTurns(lambda: self.now)
        self.answered: list[str] = []

    async def ask(self, name: str, asker: Asker, characters: int = 0, seconds: float = 1.0) -> None:
        async with self.turns.turn(asker, characters):
            await asyncio.sleep(0)
            self.now += seconds
            self.answered.append(name)


def answered(*questions: tuple[str, Asker, int]) -> list[str]:
    """The names of questions that are asked at the same time, in the order of their answers."""
    world = World()

    async def run() -> None:
        await asyncio.gather(*(world.ask(*question) for question in questions))

    asyncio.run(run())
    return world.answered


def test_another_user_waits_for_what_is_being_answered_only() -> None:
    many = [(f"a{place}", Asker("ann"), LONG) for place in range(32)]
    found = answered(*many, ("bob", Asker("bob"), 0))
    assert found.index("bob") <= MOST_LONG_AT_ONCE
    assert len(found) == 33


def test_of_one_user_a_short_text_goes_before_long_ones() -> None:
    found = answered(*((f"long{place}", Asker(), LONG) for place in range(8)), ("short", Asker(), 10))
    assert found.index("short") <= MOST_LONG_AT_ONCE


def test_a_long_text_is_patient_for_some_time_only() -> None:
    async def run() -> list[str]:
        world = World()

        async def short(place: int) -> None:
            for turn in range(5):
                await world.ask(f"short{place}.{turn}", Asker(), 0)

        asking = [asyncio.create_task(short(place)) for place in range(4)]
        await asyncio.sleep(0)
        await asyncio.gather(*asking, world.ask("long", Asker(), LONG))
        return world.answered

    assert 3 < asyncio.run(run()).index("long") < 12


def test_a_submission_that_has_had_less_goes_first() -> None:
    async def run() -> list[str]:
        world = World()

        async def submission(name: str, count: int) -> None:
            asker = Asker("ann")
            for place in range(count):
                await world.ask(f"{name}{place}", asker)

        large = [asyncio.create_task(submission(name, 20)) for name in "abcd"]
        while len(world.answered) < 12:
            await asyncio.sleep(0)
        await asyncio.gather(submission("small", 1), *large)
        return world.answered

    assert asyncio.run(run()).index("small0") <= 12 + 2 * MOST_ASKED_AT_ONCE


def test_a_job_waits_for_one_slow_question() -> None:
    async def run() -> list[str]:
        world = World()

        async def sizes(name: str) -> None:
            asker = Asker()
            for place in range(10):
                await world.ask(f"{name}{place}", asker)

        asking = [asyncio.create_task(sizes(name)) for name in "abcdefgh"]
        while len(world.answered) < 20:
            await asyncio.sleep(0)
        await asyncio.gather(world.ask("job", Asker()), *asking)
        return world.answered

    assert asyncio.run(run()).index("job") <= 20 + MOST_LONG_AT_ONCE


def test_who_does_not_wait_any_more_takes_no_turn() -> None:
    async def run() -> Any:
        world = World()
        asking = [asyncio.create_task(world.ask(str(place), Asker())) for place in range(10)]
        await asyncio.sleep(0)
        for place in (0, 3, 5):
            asking[place].cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await world.ask("last", Asker())
        return world.answered

    assert asyncio.run(run()) == ["1", "2", "4", "6", "7", "8", "9", "last"]
