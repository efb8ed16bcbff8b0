"""Generated jobs are well formed, arrive as asked, and follow their seed."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from modelpool.scheduler.model.jobs import problem_with
from modelpool.scheduler.simulator.workloads.generators import all_at_once, bursts, poisson
from modelpool.scheduler.simulator.workloads.mix import Mix, zipf_weights
from modelpool.scheduler.simulator.workloads.models import InventedModel
from tests.simulation.worlds import mix


def test_jobs_are_well_formed_and_follow_the_seed() -> None:
    what = mix()
    first, second = (list(what.submissions(poisson(50, 1.0, rng), rng)) for rng in (Random(1), Random(1)))
    assert first == second
    assert first != list(what.submissions(poisson(50, 1.0, Random(2)), Random(2)))
    known = {spec.key for spec in what.components}
    assert [problem_with(submission.job, known) for submission in first] == [None] * 50
    assert len({submission.job.job_id for submission in first}) == 50


def test_arrivals_come_at_their_times() -> None:
    assert list(all_at_once(3)) == [0.0, 0.0, 0.0]
    assert list(bursts(5, 2, 10.0)) == [0.0, 0.0, 10.0, 10.0, 20.0]
    times = list(poisson(4000, 2.0, Random(1)))
    assert all(earlier < later for earlier, later in pairwise(times))
    assert times[-1] == pytest.approx(2000.0, rel=0.1)


def test_popularity_falls_with_rank() -> None:
    assert zipf_weights(3) == [1.0, 0.5, 1 / 3]
    assert zipf_weights(2, exponent=0.0) == [1.0, 1.0]
    models = [InventedModel("hit"), InventedModel("niche")]
    rng = Random(1)
    jobs = [s.job for s in Mix(models, model_exponent=3.0).submissions(all_at_once(400), rng)]
    hits = sum("hit" in job.wanted for job in jobs)
    assert 300 < hits < 400


def test_seeds_of_one_prompt_share_its_encode() -> None:
    what = Mix([InventedModel("one")], seeds_per_prompt=4)
    jobs = [s.job for s in what.submissions(all_at_once(8), Random(1))]
    assert len({job.tasks[0].task_id for job in jobs}) == 2
    assert len({job.wanted for job in jobs}) == 8
