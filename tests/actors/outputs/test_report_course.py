"""A batch over time: sums are kept, pauses between runs are left out and named, and its size is bounded."""

from __future__ import annotations

import random

import pytest

from modelpool.actors.outputs.report_course import MOST_PARTS, Course, course_of
from modelpool.actors.outputs.report_figures import ReportOutput, ReportTask
from modelpool.actors.outputs.report_page import _course_words, shown_of_groups
from modelpool.actors.outputs.report_plots import plots
from modelpool.actors.request.requests import GenerateRequest
from tests.actors.cli.fakes import recipe_for

START = 1_790_000_000.0
RECIPE = recipe_for(GenerateRequest(model="shapes", prompt="a", seed=1))


def output(run: int, *tasks: ReportTask) -> ReportOutput:
    return ReportOutput("a.png", RECIPE, "j", 1.0, tasks, run=run)


def sample(ended_at: float, seconds: float, worker: str = "gpu-0", **more: object) -> ReportTask:
    return ReportTask.model_validate(
        {"stage": "sample", "worker": worker, "seconds": seconds, "ended_at": ended_at and START + ended_at, **more}
    )


def course(*outputs: ReportOutput, failed_at: tuple[float, ...] = ()) -> Course:
    found = course_of(outputs, tuple(START + at for at in failed_at))
    assert found is not None
    return found


def test_counts_and_gpu_seconds_are_those_of_the_tasks_whatever_their_times() -> None:
    chance = random.Random(5)
    outputs, seconds, paid = [], 0.0, 0.0
    for _ in range(500):
        took, fetched = chance.uniform(0.01, 9.0), chance.choice((0.0, 2.5))
        end, worker = chance.uniform(10.0, 5000.0), f"gpu-{chance.randrange(3)}"
        outputs.append(output(1, sample(end, took, worker, fetch_seconds=fetched)))
        seconds, paid = seconds + took, paid + took + fetched
    found = course(*outputs, failed_at=(20.0, 4000.0, 4001.0))
    assert (sum(found.ended), sum(found.failed), found.timed, found.untimed) == (500, 3, 500, 0)
    assert sum(found.busy_seconds) == pytest.approx(seconds)
    assert sum(found.paid_seconds) == pytest.approx(paid)
    assert (found.workers, len(found.ended)) == (3, MOST_PARTS)
    assert all(0.0 <= share <= 1.0 for share in found.use)


def test_a_worker_that_never_rests_is_used_to_the_full() -> None:
    found = course(*(output(1, sample(end, 1.0)) for end in range(1, 101)))
    assert found.seconds == pytest.approx(100.0)
    assert min(found.use) == pytest.approx(1.0)


def test_tasks_of_one_batch_share_the_time_of_their_run() -> None:
    """Four tasks of a run of 8 s have 2 s each: the worker was busy for 8 s, not for the last two."""
    found = course(*(output(1, sample(8.0, 2.0, batched=4)) for _ in range(4)))
    assert found.seconds == pytest.approx(8.0)
    assert min(found.use) == pytest.approx(1.0)


def test_time_between_two_runs_is_left_out_and_a_wait_within_a_run_is_not() -> None:
    first = [output(1, sample(10.0, 10.0)), output(1, sample(60.0, 10.0))]
    second = [output(2, sample(90_060.0, 60.0))]
    found = course(*first, *second)
    assert found.seconds == pytest.approx(120.0)
    (pause,) = found.pauses
    assert (pause.at_seconds, pause.seconds) == pytest.approx((60.0, 89_940.0))
    assert min(found.use) == 0.0, "of the 40 s in which the first run waited"
    assert found.began_at == START


def test_outputs_without_times_are_counted_and_a_folder_without_any_has_no_course() -> None:
    """Earlier versions noted no times, and files that were found have no tasks."""
    known = output(1, sample(10.0, 2.0))
    shared = output(1, sample(0.0, 2.0), sample(11.0, 1.0, shared=True))
    found = course(known, output(1, sample(0.0, 2.0)), output(1), shared)
    assert (found.timed, found.untimed, sum(found.ended)) == (1, 3, 1)
    assert course_of([output(1, sample(0.0, 2.0)), output(1)]) is None
    assert course_of([]) is None


def test_an_output_whose_tasks_were_all_shared_ended_with_the_last_of_them() -> None:
    found = course(output(1, sample(10.0, 2.0)), output(1, sample(10.0, 2.0, shared=True)))
    assert (found.timed, sum(found.busy_seconds)) == (2, pytest.approx(2.0))


def test_one_moment_is_a_course() -> None:
    found = course(output(1, sample(10.0, 0.0)))
    assert (sum(found.ended), len(found.ended), found.use) == (1, 1, (0.0,))


def test_small_groups_are_shown_whole_and_large_ones_share_the_rest() -> None:
    cases = {(10_000, 3, 500): [201, 3, 200], (5, 5): [5, 5], (): [], (1000,): [404], (0, 9): [0, 9]}
    for sizes, expected in cases.items():
        assert shown_of_groups(sizes, 404) == expected, sizes
    many = shown_of_groups([2, *[1] * 999], 400)
    assert (sum(many), many[0]) == (400, 1)


def test_more_seconds_than_there_were_do_not_end_the_report() -> None:
    """Manifests may be edited: such a task began before the first date that can be written."""
    for seconds in (1e13, 1e300):
        found = course(output(1, sample(10.0, seconds, batched=4)))
        assert found.began_at == 0.0
        assert all("NaN" not in each and "inf" not in each for each in plots(found, {}, 2.0))
        assert "1970-01-01" in _course_words(found)
