"""Terms of drivers reach the scheduler's core, and what it says of deadlines reaches the driver."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

from modelpool.actors.client.client import DeadlineTooSoon, ModelPool
from modelpool.actors.request.qos import user_of_this_process
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.worker.wire.messages import Submission, SubmissionId
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.specs.spec import JobSpec
from tests.actors.fake_fleet import ME, Desk, dialogue
from tests.actors.loop_connection import open_pool


def request(prompt: str = "a red circle", **fields) -> GenerateRequest:
    return GenerateRequest(**{"model": "shapes", "prompt": prompt, "seed": 1, "steps": 2, **fields})


def live_jobs(desk: Desk) -> list[JobSpec]:
    return [job.spec for job in desk.state.demand.jobs.values()]


@dialogue
async def test_the_core_learns_the_terms_of_each_job() -> None:
    desk = await Desk().open()
    began = desk.state.at
    mine = request(seed=1, priority=3, user="ann", deadline="10m")
    part = Submission(ME, SubmissionId("s"), 0, (mine, request(seed=2)), user="bob")
    await desk.controller.submit(part)
    ann, bob = live_jobs(desk)
    assert (ann.priority, ann.user, ann.batch) == (3, "ann", "s")
    assert (bob.priority, bob.user, bob.batch, bob.deadline) == (0, "bob", "s", None)
    assert ann.deadline is not None
    assert began + 600.0 <= ann.deadline <= desk.state.at + 600.0


@dialogue
async def test_a_deadline_counts_from_the_first_part_of_a_submission() -> None:
    """A long list comes in parts; all of its images are due together, however long the last part takes to come."""
    desk = await Desk().open()
    first = Submission(ME, SubmissionId("s"), 0, (request(seed=1, deadline=60.0),), hold=True)
    await desk.controller.submit(first)
    await desk.clock.advance(5.0)
    last = Submission(ME, SubmissionId("s"), 1, (request(seed=2, deadline=60.0),))
    await desk.controller.submit(last)
    due = {job.deadline for job in live_jobs(desk)}
    assert len(due) == 1


@dialogue
async def test_a_deadline_that_cannot_be_met_is_told_once_and_not_written_into_recipes() -> None:
    desk = await Desk().open()
    requests = tuple(request(seed=seed, deadline=1e-6) for seed in range(3))
    recipes = await desk.controller.submit(Submission(ME, SubmissionId("s"), 0, requests))
    told = [text for recipe in recipes for text in recipe.warnings]
    assert len(told) == 1
    assert "3 images cannot be finished in time" in told[0]
    ended = await desk.run_dry()
    assert all(not job.recipe.warnings for job in ended)


def seconds_by_user(pool: ModelPool) -> dict[str, float]:
    """The users with accounts in the core."""
    return pool._connection.controller._state.snapshot().seconds_by_user


@pytest.fixture
def pool() -> Iterator[ModelPool]:
    with open_pool() as opened:
        yield opened


def test_what_submit_says_is_for_requests_that_do_not(pool: ModelPool) -> None:
    jobs = pool.submit([request(), request(seed=2, priority=7)], priority=2, user="ann", deadline="2h")
    said = {image.index: image.request for image in jobs.images()}
    assert (said[0].priority, said[1].priority) == (2, 7)
    assert (said[0].deadline, said[1].deadline) == (7200.0, 7200.0)
    assert seconds_by_user(pool).keys() == {"ann"}


def test_who_says_nothing_is_who_runs_the_program_and_an_empty_name_is_nobody(pool: ModelPool) -> None:
    pool.submit(request()).wait()
    pool.submit(request(seed=2), user="").wait()
    pool.encode("a text", model="shapes").result()
    assert seconds_by_user(pool).keys() == {user_of_this_process(), ""}


def test_terms_that_cannot_be_are_refused_before_anything_is_queued(pool: ModelPool) -> None:
    with pytest.raises(UnusableField, match="deadline"):
        pool.submit(request(), deadline="soon")
    with pytest.raises(UnusableField, match="priority"):
        pool.submit(request(), priority=10_000)


def test_a_deadline_that_cannot_be_met_is_a_warning_of_its_own(pool: ModelPool) -> None:
    with pytest.warns(DeadlineTooSoon, match="an image cannot be finished in time"):
        pool.submit(request(), deadline=1e-6).wait()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pool.submit(request(seed=2), deadline="2h").wait()
