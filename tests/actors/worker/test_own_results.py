"""Runs that read what earlier runs of the same worker made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.worker.own_results import MOST_BYTES, MOST_KEPT, OwnResults
from modelpool.actors.worker.wire.messages import RunRequest
from modelpool.pool.values.core.stage_params import Latent, Result
from modelpool.pool.values.specs.spec import JobId, RunErrorKind
from tests.actors.fakes import FAIL, FakeCatalog, image_of
from tests.actors.worker.one_run import run_all, run_one
from tests.actors.worker.test_gpu_worker import Bench


def image_runs(prompt: str = "a red circle", epoch: int = 0) -> tuple[list[RunRequest], object]:
    """The runs of one image, each of which reads what those before it made; and the image."""
    request = GenerateRequest(model="shapes", prompt=prompt, seed=1, steps=3)
    _, cut = build_graph(request, JobId("x"), FakeCatalog())
    runs = {task.task_id: number for number, task in enumerate(cut.job.tasks, start=1)}
    requests = [
        RunRequest(
            task, cut.works[task.task_id], 1, runs[task.task_id], epoch=epoch, own=tuple(runs[n] for n in task.needs)
        )
        for task in cut.job.tasks
    ]
    return requests, None if FAIL in prompt else image_of(cut.works, cut.job.tasks)


def one_by_one(bench: Bench, requests: Sequence[RunRequest]) -> list[Result | None]:
    return [run_one(bench.worker, one)[1] if bench.worker.may_start(one) else None for one in requests]


@pytest.mark.parametrize("together", [False, True])
def test_an_image_needs_no_inputs(together: bool) -> None:
    bench = Bench()
    bench.worker.start()
    requests, expected = image_runs()
    results = run_all(bench.worker, requests)[1] if together else one_by_one(bench, requests)
    assert (results[-1].pixels_HWC == expected.pixels_HWC).all()
    assert not bench.worker.may_start(requests[-1]), "its input is forgotten"


def test_an_input_may_be_sent_beside_one_that_is_there() -> None:
    bench = Bench()
    bench.worker.start()
    requests, expected = image_runs()
    *encodings, sampling, decoding = requests
    first, *others = one_by_one(bench, encodings)
    assert others, "a sampling reads two"
    mixed = RunRequest(sampling.task, sampling.work, 1, sampling.run, own=(0, *sampling.own[1:]))
    (_, (latent,)) = run_all(bench.worker, [mixed], first)
    image = one_by_one(bench, [decoding])[0]
    assert latent is not None
    assert (image.pixels_HWC == expected.pixels_HWC).all()


def test_what_follows_a_failed_run_does_not_start() -> None:
    bench = Bench()
    bench.worker.start()
    requests, _ = image_runs(FAIL)
    reports, results = run_all(bench.worker, requests)
    *encoded, sampled, decoded = reports
    assert all(report.error is None for report in encoded)
    assert sampled.error.kind is RunErrorKind.INTERNAL
    assert (decoded, results[-2:]) == (None, (None, None))


def test_what_follows_a_revoked_run_does_not_start() -> None:
    bench = Bench()
    bench.worker.start()
    requests, _ = image_runs()
    assert bench.worker.revoke(requests[-2].run)
    reports, _ = run_all(bench.worker, requests)
    assert reports[-2:] == (None, None)


def test_another_controller_finds_no_results() -> None:
    """It counts its runs from 1, too."""
    bench = Bench()
    bench.worker.start()
    requests, _ = image_runs()
    one_by_one(bench, requests[:-2])
    bench.worker.change_controller(1)
    again, _ = image_runs(epoch=1)
    assert not bench.worker.may_start(again[-2])


def test_what_a_run_makes_for_a_controller_that_is_replaced_meanwhile_is_not_found_by_the_next() -> None:
    """Its run of the same number may fail, and would leave another image to the run that follows it."""
    bench = Bench()
    bench.worker.start()
    requests, _ = image_runs()
    made = bench.worker._report

    def change(*report: object) -> object:
        bench.worker.change_controller(1)
        return made(*report)

    bench.worker._report = change
    bench.worker._is_current = lambda request: True  # as it was a moment ago
    with_result, encoded = run_one(bench.worker, requests[0])
    assert encoded is not None, with_result
    again, _ = image_runs(epoch=1)
    assert not bench.worker.may_start(replace(again[-2], own=(1, 0)))


def test_the_latest_results_are_kept_if_they_are_not_large() -> None:
    kept = OwnResults()
    result = Latent(np.zeros((1, 1, 1), np.float32))
    for run in range(1, MOST_KEPT + 2):
        kept.keep(run, result, 4)
    assert [kept.claim((run,)) for run in (1, 2, MOST_KEPT + 1)] == [False, True, True]
    assert kept.complete((2, 0), (result,)) == (result, result)
    assert not kept.claim((2,)), "it was read"
    kept.keep(98, result, MOST_BYTES)
    assert [kept.claim((run,)) for run in (MOST_KEPT + 1, 98)] == [False, True]
    kept.keep(99, result, MOST_BYTES + 1)
    assert not kept.claim((99,))


def test_what_a_run_is_about_to_read_is_not_replaced_by_a_decode_that_ends_meanwhile() -> None:
    """Found in a review: between its start and its first use of them, a large video took the place of its inputs, and
    the run failed."""
    kept, result = OwnResults(), Latent(np.zeros((1, 1, 1), np.float32))
    for run in (1, 2):
        kept.keep(run, result, 4)
    assert kept.claim((1, 0, 2))
    kept.keep(3, result, MOST_BYTES + 1)
    for run in range(4, 4 + MOST_KEPT):
        kept.keep(run, result, 4)
    assert kept.complete((1, 0, 2), (result,)) == (result, result, result)
    kept.keep(9, result, MOST_BYTES)
    assert [kept.claim((run,)) for run in (1, 3, 4, 9)] == [False, False, False, True]
