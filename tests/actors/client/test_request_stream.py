"""`ModelPool.submit_stream`, on a whole pool in this process: requests run while later ones are read, and each is
checked once.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from PIL import Image

from modelpool.actors.client.client import ModelPool
from modelpool.actors.client.jobs import Jobs
from modelpool.actors.control.controller import Controller
from modelpool.actors.graph.features.recipe import Recipe
from modelpool.actors.outputs.results.outcomes import ImageResult, JobFailure
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.errors import UnknownName, UserError
from tests.actors.fakes import ENDLESS, FakeEngine
from tests.actors.loop_connection import open_pool

SECONDS = 30.0


@pytest.fixture
def pool() -> Iterator[ModelPool]:
    with open_pool() as opened:
        yield opened


def request(seed: int, prompt: str = "a red circle", **fields: object) -> GenerateRequest:
    return GenerateRequest(**{"model": "shapes", "prompt": prompt, "seed": seed, "steps": 2, **fields})


def is_possible(index: int, answer: Recipe | UserError) -> bool:
    return isinstance(answer, Recipe)


def test_requests_run_before_later_ones_are_read(pool: ModelPool) -> None:
    """The second chunk exists only once an image of the first one has arrived."""
    arrived = threading.Event()

    def chunks() -> Iterator[Sequence[GenerateRequest]]:
        yield [request(0), request(1)]
        assert arrived.wait(SECONDS)
        yield [request(2)]

    jobs = pool.submit_stream(chunks(), is_possible)
    images = jobs.images()
    first = next(images)
    arrived.set()
    assert sorted([first.index, *(image.index for image in images)]) == [0, 1, 2]
    assert jobs.summary().jobs == 3


def test_each_request_is_checked_once(pool: ModelPool, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    check_each = Controller.check_each

    async def count_built(self: Controller, submission):  # type: ignore[no-untyped-def]
        built.extend(one.seed for one in submission.requests)
        return await check_each(self, submission)

    async def never(self: Controller, submission):  # type: ignore[no-untyped-def]
        raise AssertionError("checked again")

    monkeypatch.setattr(Controller, "check_each", count_built)
    monkeypatch.setattr(Controller, "submit", never)
    chunks = [[request(seed) for seed in range(10)], [request(10)]]
    assert len(list(pool.submit_stream(chunks, is_possible).images())) == 11
    assert built == list(range(11))


def test_refused_and_impossible_requests_have_no_result(pool: ModelPool, tmp_path: Path) -> None:
    """One with an unknown model, one with an image that is gone by now, and one that the caller does not want."""
    answers: dict[int, Recipe | UserError] = {}

    def decide(index: int, answer: Recipe | UserError) -> bool:
        answers[index] = answer
        return isinstance(answer, Recipe) and answer.seed != 3

    Image.new("RGB", (64, 64)).save(tmp_path / "gone.png")
    unreadable = request(2, image=tmp_path / "gone.png")
    (tmp_path / "gone.png").unlink()
    chunk = [request(0), request(1, model="shaps"), unreadable, request(3), request(4)]
    jobs = pool.submit_stream([chunk], decide)
    assert sorted(image.index for image in jobs.images()) == [0, 4]
    assert jobs.summary().jobs == jobs.progress().total == 2
    assert [isinstance(answers[index], Recipe) for index in range(5)] == [True, False, False, True, True]
    assert isinstance(answers[1], UnknownName)
    assert "gone.png" in str(answers[2])


def test_awaiting_a_request_that_was_not_queued_raises_as_waiting_does(pool: ModelPool) -> None:
    jobs = pool.submit_stream([[request(0), request(1)]], lambda index, answer: index == 0)

    async def program() -> None:
        await asyncio.wait_for(jobs[1], SECONDS)  # type: ignore[arg-type]

    with pytest.raises(UserError, match="request 1 was not queued"):
        asyncio.run(program())


def test_nothing_accepted_is_nothing_made_and_no_folder(pool: ModelPool, tmp_path: Path) -> None:
    jobs = pool.submit_stream([[request(0)]], lambda index, answer: False, output=tmp_path / "p")
    assert list(jobs.results()) == []
    assert not (tmp_path / "p").exists()


def test_held_requests_run_once_all_are_checked_or_not_at_all(pool: ModelPool, tmp_path: Path) -> None:
    def decide(index: int, answer: Recipe | UserError) -> bool:
        if isinstance(answer, UserError):
            raise answer
        return True

    good = [[request(seed)] for seed in range(3)]
    assert len(list(pool.submit_stream(good, decide, hold=True).images())) == 3
    jobs = pool.submit_stream([*good, [request(9, model="shaps")]], decide, output=tmp_path / "p", hold=True)
    with pytest.raises(UnknownName, match="shaps"):
        list(jobs.images())
    assert jobs.progress().done == 0


def test_what_reading_raises_is_raised_where_results_are_read(pool: ModelPool) -> None:
    def chunks() -> Iterator[Sequence[GenerateRequest]]:
        yield [request(0)]
        raise UserError("line 40: not UTF-8")

    jobs = pool.submit_stream(chunks(), is_possible)
    with pytest.raises(UserError, match="line 40"):
        list(jobs.results())


def test_what_reading_raises_is_raised_in_asyncio_too_after_all_jobs_ended(pool: ModelPool) -> None:
    ended = threading.Event()

    def chunks() -> Iterator[Sequence[GenerateRequest]]:
        yield [request(0)]
        assert ended.wait(SECONDS)
        raise UserError("line 40: not UTF-8")

    jobs = pool.submit_stream(chunks(), is_possible)
    jobs[0].result(SECONDS)
    ended.set()
    with pytest.raises(UserError, match="line 40"):
        jobs.wait(SECONDS)

    async def collect() -> None:
        await asyncio.wait_for(jobs, SECONDS)  # type: ignore[arg-type]

    with pytest.raises(UserError, match="line 40"):
        asyncio.run(collect())
    assert jobs._followed.ends.is_over


@pytest.mark.parametrize("hold", [False, True])
def test_a_stream_whose_caller_raises_for_an_impossible_request_ends(pool: ModelPool, hold: bool) -> None:
    """Requests of the same chunk end too, and the submission is over."""

    def decide(index: int, answer: Recipe | UserError) -> bool:
        if isinstance(answer, UserError):
            raise answer
        return True

    jobs = pool.submit_stream([[request(0), request(1, model="shaps")]], decide, hold=hold)
    with pytest.raises(UnknownName, match="shaps"):
        jobs.wait(SECONDS)
    with pytest.raises(UnknownName, match="shaps"):
        jobs[1].result(SECONDS)
    assert _is_over_soon(jobs)


def test_a_stream_whose_folder_cannot_be_opened_ends(pool: ModelPool, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    jobs = pool.submit_stream([[request(0), request(1, model="shaps")]], is_possible, output=tmp_path / "file" / "p")
    with pytest.raises((UserError, OSError)):
        jobs.wait(SECONDS)
    assert _is_over_soon(jobs)


def _is_over_soon(jobs: Jobs) -> bool:
    """Whether every job ends within some seconds."""
    until = time.monotonic() + 10
    while not jobs._followed.ends.is_over and time.monotonic() < until:
        time.sleep(0.01)
    return jobs._followed.ends.is_over


def test_cancelling_ends_a_stream_whose_source_never_answers() -> None:
    """As for a program that reads lines of another one: the next may come in an hour."""
    with open_pool(workers=1) as pool:
        taken, left = threading.Event(), threading.Event()

        def chunks() -> Iterator[Sequence[GenerateRequest]]:
            yield [request(0, ENDLESS), request(1, ENDLESS)]
            taken.set()
            left.wait(SECONDS)

        jobs = pool.submit_stream(chunks(), is_possible)
        assert taken.wait(SECONDS)
        jobs.cancel()
        results = list(jobs.results())
        assert [isinstance(result, JobFailure) and result.cancelled for result in results] == [True, True]
        left.set()


def test_a_chunk_that_is_being_checked_while_the_stream_is_cancelled_ends_too(pool: ModelPool) -> None:
    """Whether the pool knows the submission already or not, and whatever was decided."""
    jobs = None
    begun, cancelled = threading.Event(), threading.Event()

    def decide(index: int, answer: Recipe | UserError) -> bool:
        begun.set()
        assert cancelled.wait(SECONDS)
        return isinstance(answer, Recipe) and index != 1

    jobs = pool.submit_stream([[request(0), request(1), request(2, model="shaps")]], decide)
    assert begun.wait(SECONDS)
    jobs.cancel()
    cancelled.set()
    ends = list(jobs.results())
    assert sorted(end.index for end in ends) == [0, 1]
    assert not any(isinstance(end, ImageResult) for end in ends)


def test_closing_a_pool_ends_its_streams() -> None:
    left = threading.Event()

    def chunks() -> Iterator[Sequence[GenerateRequest]]:
        yield [request(0)]
        left.wait(SECONDS)
        yield [request(1)]

    with open_pool(make_engine=FakeEngine) as pool:
        jobs = pool.submit_stream(chunks(), is_possible)
        next(jobs.images())
    left.set()
    assert jobs._followed.ends.is_sealed
    assert jobs.progress().total == 1
