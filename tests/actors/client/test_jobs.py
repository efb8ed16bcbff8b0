"""What a program and a notebook see of a submission: iteration, asyncio, single jobs, labels and names of files."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from modelpool.actors.cli.run.job_file import read_job_file
from modelpool.actors.client import opening
from modelpool.actors.client.client import ModelPool
from modelpool.actors.config.config import PoolConfig
from modelpool.actors.config.output_address import OutputDefaults
from modelpool.actors.control import job_queue as queue_module
from modelpool.actors.control import parked_jobs
from modelpool.actors.control.connection import ResultGone
from modelpool.actors.control.pool_plan import plan_pool
from modelpool.actors.outputs.folder import OutputFolder
from modelpool.actors.outputs.image_file import read_labels, read_recipe
from modelpool.actors.outputs.recipe_json import recipe_from_text
from modelpool.actors.outputs.results.outcomes import ImageResult, JobFailed
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.errors import UnusableField, UserError
from tests.actors.client.test_client import SignallingEngine, request
from tests.actors.fakes import ENDLESS, FAIL, VIDEOS, FakeEngine
from tests.actors.loop_connection import LoopConnection, open_pool

REQUEST: dict[str, Any] = {"model": "shapes", "prompt": "a red circle", "seed": 1, "steps": 2}


@pytest.fixture(scope="module")
def shared() -> Iterator[ModelPool]:
    """A pool for tests that leave nothing behind."""
    with open_pool() as opened:
        yield opened


# ---- iteration and single jobs -----------------------------------------------------------------------------------


def test_jobs_are_iterated_counted_and_indexed(shared: ModelPool) -> None:
    jobs = shared.submit(request(seed=seed) for seed in range(3))
    assert len(jobs) == 3
    assert jobs
    assert sorted(image.index for image in jobs) == [0, 1, 2]
    assert [job.index for job in jobs[1:]] == [1, 2]
    assert (jobs[-1].index, jobs[0].request.seed, jobs[2].id) == (2, 0, f"{jobs.id}-2")
    with pytest.raises(IndexError, match="the submission has 3 jobs"):
        jobs[3]
    empty = shared.submit([])
    assert empty
    assert len(empty) == 0


def test_iterating_raises_for_a_failed_job_after_the_last_image(shared: ModelPool) -> None:
    jobs = shared.submit([request(FAIL), request(seed=2), request(FAIL, seed=3), request(seed=4)])
    found: list[int] = []
    with pytest.raises(JobFailed, match="and 1 more failed") as raised:
        found.extend(image.index for image in jobs)
    assert sorted(found) == [1, 3]
    assert raised.value.failure.index in (0, 2)
    assert list(jobs.images()) == []


def test_a_video_in_an_iteration_over_images_names_the_iterator_for_it(shared: ModelPool) -> None:
    jobs = shared.submit(request(model=VIDEOS, frames=5))
    with pytest.raises(UserError, match=r"job 0 is no image; iterate over jobs.videos\(\)"):
        list(jobs)


def test_one_job_is_waited_for_and_can_be_read_again_while_it_is_kept(shared: ModelPool) -> None:
    jobs = shared.submit([request(seed=5), request(FAIL, seed=6), request(seed=7)])
    image = jobs[2].result(60)
    assert (image.index, image.seed) == (2, 7)
    assert jobs[2].result() is image
    assert (jobs[2].state, jobs[2].done()) == ("succeeded", True)
    with pytest.raises(JobFailed, match="the engine was asked to fail"):
        jobs[1].result(60)
    assert [each.index for each in jobs.images()] == [0]
    del image
    gc.collect()
    with pytest.raises(UserError, match="the output of job 2 was returned before"):
        jobs[2].result()


def test_a_written_output_can_be_read_again(shared: ModelPool, tmp_path: Path) -> None:
    jobs = shared.submit(request(seed=8), output=tmp_path)
    pixels = next(iter(jobs)).pixels
    gc.collect()
    assert (jobs[0].result().pixels == pixels).all()  # type: ignore[attr-defined]


def test_one_job_is_cancelled_whether_it_runs_waits_or_is_parked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "WINDOW", 8)
    monkeypatch.setattr(parked_jobs, "JOBS_IN_PACK", 4)
    count = 20
    with open_pool(workers=1, make_engine=SignallingEngine) as pool:
        SignallingEngine.begun.clear()
        jobs = pool.submit(request(f"{ENDLESS} {index}", seed=index) for index in range(count))
        SignallingEngine.begun.wait(60)
        assert len(pool._connection.controller._queue.parked) == count - 8  # type: ignore[attr-defined]
        last = count - 1
        for index in (last, 7, 0):
            jobs[index].cancel()
            jobs[index].cancel()
            with pytest.raises(JobFailed, match="cancelled"):
                jobs[index].result(60)
            assert jobs[index].state == "cancelled"
        assert jobs.progress().cancelled == 3
        jobs.cancel()
        assert jobs.wait(60).cancelled == count


# ---- asyncio -----------------------------------------------------------------------------------------------------


def test_asyncio_programs_iterate_and_await(shared: ModelPool) -> None:
    async def program() -> None:
        jobs = shared.submit(request(seed=seed) for seed in range(10, 14))
        first = await jobs[2]
        assert first.seed == 12
        async for image in jobs:
            assert image.seed != 12
            break
        rest = await jobs
        assert [each.index for each in rest] == sorted({0, 1, 3} - {image.index})
        assert await jobs == []
        with pytest.raises(JobFailed):
            await shared.submit([request(FAIL), request(seed=15)])
        assert jobs._followed.monitor._watchers == []

    asyncio.run(asyncio.wait_for(program(), 60))


def test_a_cancelled_coroutine_loses_no_image(shared: ModelPool) -> None:
    async def program() -> int:
        jobs = shared.submit(request(seed=seed) for seed in range(20, 26))
        for _ in range(20):
            task = asyncio.ensure_future(one(jobs))
            await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if not task.cancelled() and task.exception() is None:
                jobs._followed.outputs.put_back(task.result())
        return len(await jobs)

    async def one(jobs: Any) -> ImageResult:
        async for image in jobs:
            return image  # type: ignore[no-any-return]
        raise AssertionError("there is one")

    assert asyncio.run(asyncio.wait_for(program(), 60)) == 6


def test_awaiting_all_images_again_after_a_timeout_or_a_failure_loses_none(shared: ModelPool) -> None:
    timed_out = threading.Event()

    def chunks() -> Iterator[list[GenerateRequest]]:
        yield [request(seed=80)]
        assert timed_out.wait(60)
        yield [request(seed=81)]

    async def program() -> None:
        jobs = shared.submit_stream(chunks(), lambda index, answer: True)
        while len(jobs) == 0 or not jobs[0].done():
            await asyncio.sleep(0.01)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(jobs, 0.3)  # type: ignore[arg-type]
        timed_out.set()
        assert [image.index for image in await jobs] == [0, 1]
        jobs = shared.submit([request(FAIL, seed=82), request(seed=83)])
        with pytest.raises(JobFailed):
            await jobs
        assert (await jobs[1]).seed == 83
        assert list(jobs.images()) == []

    asyncio.run(asyncio.wait_for(program(), 60))


def test_a_job_whose_await_is_cancelled_while_it_is_read_can_be_awaited_again(shared: ModelPool) -> None:
    begun, read = threading.Event(), threading.Event()
    jobs = shared.submit(request(seed=84))
    deliver = jobs._followed.outputs._delivered

    def slow(finished: Any) -> Any:
        begun.set()
        assert read.wait(60)
        return deliver(finished)

    jobs._followed.outputs._delivered = slow  # type: ignore[method-assign]

    async def first() -> None:
        task = asyncio.ensure_future(jobs[0]._awaited())
        await asyncio.to_thread(begun.wait, 60)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        read.set()

    async def second() -> None:
        assert (await jobs[0]).seed == 84

    asyncio.run(asyncio.wait_for(first(), 60))  # waits for the thread
    gc.collect()
    asyncio.run(asyncio.wait_for(second(), 60))


def test_two_waiters_for_one_job_get_the_same_output(shared: ModelPool) -> None:
    """The second one begins while the output is read for the first one."""
    begun, read = threading.Event(), threading.Event()
    jobs = shared.submit(request(seed=86))
    deliver = jobs._followed.outputs._delivered

    def slow(finished: Any) -> Any:
        begun.set()
        assert read.wait(60)
        return deliver(finished)

    jobs._followed.outputs._delivered = slow  # type: ignore[method-assign]

    async def program() -> None:
        first = asyncio.ensure_future(jobs[0]._awaited())
        await asyncio.to_thread(begun.wait, 60)
        second = asyncio.ensure_future(jobs[0]._awaited())
        await asyncio.wait([second], timeout=0.2)
        read.set()
        assert await first is await second

    asyncio.run(asyncio.wait_for(program(), 60))


def test_iterating_waits_for_an_output_that_is_lost_at_the_end(shared: ModelPool) -> None:
    """Every job had ended when it was fetched."""
    jobs = shared.submit(request(seed=85))
    jobs.wait(60)
    deliver, again = jobs._followed.outputs._delivered, []

    def lose_once(finished: Any) -> Any:
        if again:
            return deliver(finished)
        again.append(finished)
        return jobs._followed._generate_again(finished.job, ResultGone("its node is gone"))

    jobs._followed.outputs._delivered = lose_once  # type: ignore[method-assign]

    async def program() -> list[int]:
        return [image.index for image in await jobs]

    assert asyncio.run(asyncio.wait_for(program(), 60)) == [0]
    assert again


# ---- requests ----------------------------------------------------------------------------------------------------


def test_dicts_with_names_of_diffusers_are_requests(shared: ModelPool) -> None:
    fields = {"model": "shapes", "prompt": "a red circle", "negative_prompt": "blue", "guidance_scale": 2}
    wanted = {**fields, "num_inference_steps": 2, "num_images_per_prompt": 3, "seed": 2**64 - 1}
    images = sorted(shared.submit(wanted), key=lambda image: image.index)
    assert [image.seed for image in images] == [2**64 - 1, 0, 1]
    assert (images[0].recipe.negative, images[0].recipe.cfg, images[0].recipe.steps) == ("blue", 2.0, 2)
    assert shared.recipe(wanted).digest == images[0].recipe.digest
    good, bad = shared.recipes([wanted, {**wanted, "cfg": 3}])
    assert good == images[0].recipe
    assert "guidance_scale: found 2, expected it or cfg" in str(bad)


def test_stages_refuse_what_is_no_result(shared: ModelPool) -> None:
    text = shared.encode("a", model="shapes")
    with pytest.raises(UnusableField, match=r"positive: found 'str', expected a result of encode\(\)"):
        shared.sample("a red circle", model="shapes")  # type: ignore[arg-type]
    with pytest.raises(UnusableField, match="negative: found 'int'"):
        shared.sample(text, 0, model="shapes")  # type: ignore[arg-type]
    with pytest.raises(UnusableField, match="latent: found 'ndarray'"):
        shared.decode(text.result(60).context_LD, model="shapes")  # type: ignore[union-attr]
    with pytest.raises(UnusableField, match="loras: found 'light'"):
        shared.encode("a", model="shapes", loras="light")
    with pytest.raises(UserError, match="model: found 5"):
        shared.decode(shared.sample(text, model="shapes", steps=1), model=5)  # type: ignore[arg-type]


# ---- labels and names --------------------------------------------------------------------------------------------


def test_labels_reach_results_the_manifest_and_files_and_share_the_work(shared: ModelPool, tmp_path: Path) -> None:
    about = {"row": [1, {"b": None}]}
    list(shared.submit(request(seed=29)))
    wanted = [request(seed=30), request(seed=30, id="a", metadata=about), request(seed=30, id="b", line=9)]
    before = shared.status().tasks_total
    jobs = shared.submit(wanted, output=tmp_path)
    images = sorted(jobs, key=lambda image: image.index)
    assert shared.status().tasks_total == before + 2  # one sampling and one decoding; the texts are known
    assert len({image.recipe.digest for image in images}) == 1
    assert [(image.id, image.metadata) for image in images] == [(None, None), ("a", about), ("b", None)]
    entries = OutputFolder(tmp_path).entries()
    listed = sorted((e.index, e.labels.id, e.labels.metadata, e.labels.line) for e in entries)
    assert listed == [(0, "", None, None), (1, "a", about, None), (2, "b", None, 9)]
    for image in images:
        assert image.path is not None
        labels = read_labels(image.path)
        assert (labels.id or None, labels.metadata, labels.line) == (image.id, image.metadata, image.request.line)
        assert read_recipe(image.path) == image.recipe
    assert len({image.path for image in images}) == 3
    again = list(shared.submit(wanted, output=tmp_path))
    assert {image.path for image in again} == {image.path for image in images}
    assert len(OutputFolder(tmp_path).entries()) == 3
    assert recipe_from_text(images[0].recipe.to_json()) == images[0].recipe
    assert json.loads(json.dumps(images[0].recipe.as_json())) == json.loads(images[0].recipe.to_json(indent=2))


def test_files_have_the_names_of_a_template(shared: ModelPool, tmp_path: Path) -> None:
    wanted = [
        request(seed=40, id="../../etc/x y"),
        request(seed=41, id="../../etc/x y"),
        request(seed=42, id="na\u00efve"),
    ]
    paths = [image.path for image in shared.submit(wanted, output=tmp_path, name="{id}")]
    assert all(path is not None and path.parent == tmp_path for path in paths)
    names = sorted(path.name for path in paths if path is not None)
    assert names[2:] == ["na\u00efve.png"]
    assert names[1] == "etc-x-y.png"
    assert names[0].startswith("etc-x-y-")
    assert len(names[0]) == len("etc-x-y-12345678.png")
    (padded,) = shared.submit(request(seed=43), output=tmp_path, name="{index:03}_{seed}")
    assert padded.path is not None
    assert padded.path.name == "000_43.png"


def test_a_name_that_a_request_lacks_is_refused_before_anything_is_made(shared: ModelPool, tmp_path: Path) -> None:
    before = shared.status().tasks_total
    with pytest.raises(UnusableField, match=r"requests\[1\] has no id"):
        shared.submit([request(id="a", seed=50), request(seed=51)], output=tmp_path, name="{id}")
    with pytest.raises(UserError, match=r"unknown field of name 'sed'.*seed"):
        shared.submit(request(), output=tmp_path, name="{sed}")
    assert shared.status().tasks_total == before


def test_a_configured_name_is_used_where_a_request_has_its_fields(tmp_path: Path) -> None:
    with open_pool(output=tmp_path) as pool:
        pool._outputs._file_name = "{id}"
        paths = [image.path for image in pool.submit([request(id="mine", seed=1), request(seed=2)])]
    assert sorted(path.name for path in paths if path is not None)[1] == "mine.png"


def test_labels_change_no_seed_of_a_job_file(tmp_path: Path) -> None:
    plain, labelled = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    plain.write_text(json.dumps({"model": "shapes", "prompt": "p"}) + "\n")
    labelled.write_text(json.dumps({"model": "shapes", "prompt": "p", "id": "x", "metadata": {"a": 1}, "line": 5}))
    (one,), (other,) = read_job_file(plain, {}).lines, read_job_file(labelled, {}).lines
    assert one.request.seed == other.request.seed
    assert (one.labelled.line, other.labelled.line) == (1, 5)


# ---- people and notebooks ----------------------------------------------------------------------------------------


def test_people_read_what_objects_are(shared: ModelPool, tmp_path: Path) -> None:
    jobs = shared.submit(request(seed=60, id="mine"), output=tmp_path)
    (image,) = jobs
    assert repr(jobs) == f"<Jobs {jobs.id}: 1 of 1 done>"
    assert repr(jobs[0]) == f"<Job {jobs.id}-0: succeeded>"
    assert repr(image).startswith(f"<ImageResult {jobs.id}-0: id 'mine', ")
    assert "seed 60" in repr(image)
    assert str(image.path) in repr(image)
    assert repr(GenerateRequest(**REQUEST)) == (
        "GenerateRequest(model='shapes', prompt='a red circle', steps=2, seed=1)"
    )


def test_a_notebook_shows_the_image_and_a_progress_bar(shared: ModelPool) -> None:
    jobs = shared.submit(request(seed=61))
    (image,) = jobs
    shown = Image.open(io.BytesIO(image._repr_png_()))
    assert (np.asarray(shown) == image.pixels).all()
    assert '<progress value="1" max="1"></progress> 1 of 1 done' in jobs._repr_html_()


def test_the_progress_bar_of_a_notebook_is_drawn_until_all_jobs_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []

    class Handle:
        def update(self, bar: Any) -> None:
            drawn.append(repr(bar))

    def display(bar: Any, display_id: bool) -> Handle:
        drawn.append(bar._repr_html_())
        return Handle()

    notebook = types.ModuleType("IPython")
    notebook.display = types.SimpleNamespace(display=display)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    with open_pool(workers=1, make_engine=SignallingEngine) as pool:
        SignallingEngine.begun.clear()
        jobs = pool.submit(request(ENDLESS))
        SignallingEngine.begun.wait(60)
        jobs._ipython_display_()
        jobs.cancel()
        jobs.wait(60)
        for _ in range(600):
            if drawn[-1].endswith("0 of 1 done, 1 cancelled>"):
                break
            asyncio.run(asyncio.sleep(0.1))
    assert "<progress" in drawn[0]
    assert drawn[-1] == f"<Jobs {jobs.id}: 0 of 1 done, 1 cancelled>"


def test_a_driver_that_connects_uses_the_output_of_the_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = LoopConnection(1, FakeEngine)
    line.controller._output = OutputDefaults(tmp_path / "configured", "{id}")
    monkeypatch.setattr(opening, "join_pool", lambda name: opening.OpenedPool(line, "address", lambda: None))
    try:
        with ModelPool.connect() as pool:
            (image,) = pool.submit(request(id="mine"))
            (elsewhere,) = pool.submit(request(id="mine"), output=tmp_path / "other", name="{seed}")
            (nowhere,) = pool.submit(request(), output=False)
        with ModelPool.connect(output=tmp_path / "chosen") as pool:
            (chosen,) = pool.submit(request(id="mine"))
    finally:
        line.end()
    assert image.path == tmp_path / "configured" / "mine.png"
    assert elsewhere.path == tmp_path / "other" / "1.png"
    assert nowhere.path is None
    assert chosen.path == tmp_path / "chosen" / "mine.png"


def test_a_driver_knows_the_output_of_a_configuration(tmp_path: Path) -> None:
    config = PoolConfig().override(device="sim", output=tmp_path)
    plan = plan_pool(config, gpu_count=0, can_grow=False)
    assert plan.output == config.output.defaults == OutputDefaults(tmp_path, None)
    file = tmp_path / "pool.toml"
    file.write_text('[output]\nfolder = "out"\nname = "{index}-{sed}"\n')
    with pytest.raises(UserError, match=r"pool.toml.*unknown field of name 'sed'"):
        PoolConfig.load(file)
    file.write_text('[output]\nfolder = "out"\nname = "{index}-{seed}"\n')
    assert PoolConfig.load(file).output.defaults == OutputDefaults(tmp_path / "out", "{index}-{seed}")
