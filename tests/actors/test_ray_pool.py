"""The pool on a real Ray, with fake engines: processes that die, stop, tell and are found again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray

from modelpool import ModelPool, ray_data
from modelpool.actors.client.opening import start_pool
from modelpool.actors.client.ray_data import ROW_ID, RowOptions
from modelpool.actors.config.config import ClusterSection, PoolConfig, PoolSection
from modelpool.actors.control.catalog_process import MAIN as CATALOG_MODULE
from modelpool.actors.control.metrics.exposition import metrics_text
from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.graph.common.stage_request import InputLatent, StageRequest
from modelpool.actors.outputs.results.outcomes import JobFailed, JobFailure, PoolLost
from modelpool.actors.ray.survivors import left_workers
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.worker.worker_lease import OlderEpoch
from modelpool.benchmarks.rows_to_shards import run_trial, write_rows
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.stage_params import Latent
from modelpool.pool.values.specs.spec import JobId, RunErrorKind, Stage, TaskId
from tests.actors.fakes import (
    CAPACITY_BYTES,
    ENDLESS,
    FAIL,
    HOLD_ONCE,
    MODELS,
    FakeCatalog,
    GrowingEngine,
    TellingEngine,
    TracedImage,
    TracingEngine,
    fake_plan,
    image_of,
    make_pipes,
    start_fake_pool,
)
from tests.s3_server import s3_server

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_session")]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_pipes(tmp_path_factory.mktemp("pipes"))


@pytest.fixture(scope="module")
def pool(ray_session, folder) -> Iterator[ModelPool]:
    with start_fake_pool("shared", workers=2, folder=folder) as opened:
        opened.wait_ready(120)
        yield opened


def request(prompt: str = "a red circle", **fields) -> GenerateRequest:
    return GenerateRequest(**{"model": "shapes", "prompt": prompt, "seed": 1, "steps": 2, **fields})


def expected(wanted: GenerateRequest, side: int = 0) -> np.ndarray:
    _, cut = build_graph(wanted, JobId("x"), FakeCatalog())
    return image_of(cut.works, cut.job.tasks, side).pixels_HWC


def eventually(what: Callable[[], bool]) -> None:
    """Ask until it is so; the test's own time limit says when that is too long."""
    while not what():
        pass


def test_images_are_what_they_must_be_wherever_they_are_made(pool) -> None:
    wanted = [request(seed=seed, loras=["light"] if seed % 2 else []) for seed in range(12)]
    images = list(pool.submit(wanted).images())
    assert len(images) == 12
    assert {image.worker for image in images} == {"gpu-0", "gpu-1"}
    for image in images:
        assert (image.pixels == expected(image.request)).all()
    text = metrics_text(pool.metrics()).decode()
    assert 'modelpool_tasks_total{outcome="succeeded",stage="sample"} 12.0' in text
    assert 'modelpool_gpu_busy_seconds_total{worker="gpu-1"}' in text


def test_a_job_that_fails_says_why_and_sinks_no_other(pool) -> None:
    results = sorted(pool.submit([request(), request(FAIL), request(seed=3)]).results(), key=lambda r: r.index)
    assert [type(result).__name__ for result in results] == ["ImageResult", "JobFailure", "ImageResult"]
    failure = results[1]
    assert isinstance(failure, JobFailure)
    assert failure.kind is RunErrorKind.INTERNAL
    assert "the engine was asked to fail" in failure.message
    assert "_sample" in failure.traceback_text


def test_a_worker_killed_in_the_middle_is_replaced_and_the_image_is_the_same(pool, folder) -> None:
    before = pool.status()
    jobs = pool.submit([request(HOLD_ONCE), *(request(seed=seed) for seed in range(4))])
    pid = int((folder / "reached").read_text())
    os.kill(pid, signal.SIGKILL)
    images = list(jobs.images())
    assert jobs.failures == ()
    assert len(images) == 5
    for image in images:
        assert (image.pixels == expected(image.request)).all()
    pool.wait_ready(120)
    after = pool.status()
    assert after.restarts == before.restarts + 1
    assert pid not in {memory.pid for memory in pool.memory().values()}


def test_a_worker_that_is_stopped_by_another_process_is_killed_and_its_image_is_the_same(tmp_path) -> None:
    """SIGSTOP: the process stays, Ray takes it for busy, and the run would never end."""
    folder = make_pipes(tmp_path)
    with start_fake_pool("stopped", workers=1, folder=folder, heartbeat_seconds=0.4) as opened:
        opened.submit(request(seed=7)).wait(120)  # how long a run takes is known from now on
        jobs = opened.submit(request(HOLD_ONCE))
        worker = psutil.Process(int((folder / "reached").read_text()))
        worker.suspend()
        eventually(lambda: opened.status().workers[0].silent_seconds > 0)
        (image,) = jobs.images()
        assert (image.pixels == expected(image.request)).all()
        assert opened.status().restarts == 1
        assert "another process stopped it" in opened.status().workers[0].trouble
        worker.wait(60)


def catalogs() -> set[psutil.Process]:
    """The processes of the catalogs of this session's pools."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if CATALOG_MODULE in process.cmdline():
                found.add(process)
    return found


def test_the_death_of_the_catalog_loses_no_submission_and_it_ends_with_its_pool() -> None:
    others = catalogs()
    with start_fake_pool("catalog", workers=1) as pool:
        models = pool.models()
        (process,) = catalogs() - others
        process.kill()
        eventually(lambda: _has_ended(process))
        (image,) = pool.submit(request("after the end")).images()
        assert (image.pixels == expected(image.request)).all()
        assert pool.models() == models
        (new,) = catalogs() - others
        assert new.pid != process.pid
    eventually(lambda: not new.is_running())


def _has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_an_idle_worker_takes_memory_that_others_have_freed(folder) -> None:
    with start_fake_pool("grows", workers=1, engine=GrowingEngine, folder=folder, heartbeat_seconds=0.1) as opened:
        eventually(lambda: [worker.capacity_bytes for worker in opened.status().workers] == [2 * CAPACITY_BYTES])


def test_the_death_of_an_idle_worker_is_noticed(pool) -> None:
    restarts = pool.status().restarts
    pid = pool.memory()["gpu-0"].pid
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: pool.status().restarts == restarts + 1)
    pool.wait_ready(120)
    assert pool.memory()["gpu-0"].pid != pid
    assert len(list(pool.submit(request(seed=seed) for seed in range(4)).images())) == 4


def test_workers_outlive_a_killed_controller_and_serve_the_next_one_with_their_weights(tmp_path) -> None:
    """As in `modelpool up`. The worker is in the middle of a run when the controller is killed."""
    config = PoolConfig(
        pool=PoolSection(workers=1, journal=False, worker_lease_seconds=600.0), cluster=ClusterSection(name="lasting")
    )
    opened = start_pool(config, partial(fake_plan, folder=make_pipes(tmp_path)), keeps_jobs=True, preload=())
    try:
        before = ModelPool(opened.connection, lambda: None, None)
        (first,) = before.submit(request(seed=7)).images()
        assert not all(task.resident for task in first.tasks), "the first run loads"
        pid = before.memory()["gpu-0"].pid
        before.submit(request(ENDLESS))
        assert int((tmp_path / "reached").read_text()) == pid
        os.kill(controller_pid("lasting"), signal.SIGKILL)
        with pytest.raises(PoolLost):
            eventually(lambda: before.status() is None)
        assert opened.restart is not None
        opened.restart()
        with ModelPool(opened.connection, lambda: None, None) as after:
            (again,) = after.submit(request(seed=8)).images()
            assert (again.pixels == expected(again.request)).all()
            assert [(task.resident, task.uploaded_bytes) for task in again.tasks] == [(True, 0)] * len(again.tasks)
            assert after.memory()["gpu-0"].pid == pid
            assert after.status().restarts == 0
            (worker,) = left_workers("modelpool", "lasting")
            with pytest.raises(OlderEpoch, match="epoch 2; the call is of epoch 1"):
                ray.get(worker.ping.remote(1))
    finally:
        opened.close()
    eventually(lambda: not left_workers("modelpool", "lasting"))


def controller_pid(name: str) -> int:
    """The process of a controller."""
    actor = ray.get_actor(name, "modelpool")
    return int(ray._private.state.state.actor_table(actor._actor_id.hex())["Pid"])


def test_progress_arrives_and_cancelling_stops_at_the_next_step(pool, folder) -> None:
    jobs = pool.submit([request(ENDLESS, seed=seed) for seed in range(5)])
    pid = int((folder / "reached").read_text().split()[0])  # both workers may speak at once
    eventually(lambda: any(running.step > 1 for running in jobs.progress().running))
    running = next(running for running in jobs.progress().running if running.step > 1)
    assert (running.prompt, running.stage) == (ENDLESS, Stage.SAMPLE)
    jobs.cancel()
    while jobs.progress().ended < 5:  # the second worker may wait for its reader
        _read_if_spoken(folder / "reached")
    assert jobs.wait(60).cancelled == 5
    assert pid in {memory.pid for memory in pool.memory().values()}  # nothing was killed for that
    (image,) = pool.submit(request()).images()
    assert (image.pixels == expected(request())).all()


def _read_if_spoken(pipe: Path) -> None:
    """Let go whoever waits for a reader of `pipe`."""
    os.close(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK))


CONNECT = """
import sys
if sys.argv[2] == "ray first":
    import ray
from modelpool import GenerateRequest, ModelPool
from modelpool.actors.client.opening import OpenedPool, _join
opened = _join(sys.argv[1], "modelpool", "shared")
with ModelPool(opened.connection, opened.close, None) as pool:
    (image,) = pool.submit(GenerateRequest(model="shapes", prompt="a red circle", seed=1, steps=2)).images()
    print(image.pixels.tobytes().hex())
    try:
        pool.submit(GenerateRequest(model="shaps", prompt="a red circle"))
    except ValueError as error:
        print(error)
"""


@pytest.mark.rotates
@pytest.mark.parametrize("order", ["modelpool first", "ray first"])
def test_another_program_connects_works_and_leaves(pool, order) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CONNECT, pool.address, order],
        cwd=ROOT, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.stderr == ""
    pixels, error = done.stdout.splitlines()
    assert bytes.fromhex(pixels) == expected(request()).tobytes()
    assert error == f"unknown model 'shaps'; did you mean 'shapes'? Known: {', '.join(sorted(MODELS))}."
    assert len(list(pool.submit(request()).images())) == 1


def test_a_second_pool_needs_a_name_of_its_own(pool) -> None:
    with pytest.raises(UserError, match="already has a pool called 'shared'"):
        start_fake_pool("shared")
    with pytest.raises(UserError, match="connected to the Ray at"):
        ModelPool.connect("127.0.0.1:1")


def test_bytes_of_results_go_past_the_controller(pool, folder, tmp_path) -> None:
    """Notes are left by every process that unpickles a result; what a process reads and holds is told by the kernel."""
    side, count = 1000, 12
    with start_fake_pool("traced", workers=2, folder=tmp_path, image_side=side, engine=TracingEngine) as traced:
        traced.submit(request()).wait(120)
        family = psutil.Process().children(recursive=True)
        controllers = [p for p in family if any("ray::ControllerActor" in word for word in p.cmdline())]
        before = {p: (p.io_counters().read_chars, p.memory_info().rss) for p in controllers}
        images = list(traced.submit([request(seed=seed, width=256, height=256) for seed in range(count)]).images())
        grown = [(p.io_counters().read_chars - b[0], p.memory_info().rss - b[1]) for p, b in before.items()]
        workers = {memory.pid for memory in traced.memory().values()}
    total_bytes = sum(image.pixels.nbytes for image in images)
    assert total_bytes == 3 * side * side * count
    assert len(grown) == 2  # of this pool and of the module's
    for read_bytes, held_bytes in grown:
        assert read_bytes < total_bytes / 10
        assert held_bytes < total_bytes / 2
    notes = {path.name for path in tmp_path.iterdir()}
    assert {int(name.removeprefix("picture-")) for name in notes if name.startswith("picture-")} == {os.getpid()}
    assert {int(name.removeprefix("latent-")) for name in notes if name.startswith("latent-")} <= workers
    assert any(name.startswith("latent-") for name in notes)


def test_bytes_of_given_images_go_past_the_controller(folder, tmp_path, monkeypatch) -> None:
    """Notes are left by every process that unpickles the image: the workers that read it, and no other."""
    traced = partial(TracedImage, notes=tmp_path)
    monkeypatch.setattr("modelpool.actors.control.inputs.input_images.ImagePixels", traced)
    pixels = np.random.default_rng(1).integers(0, 256, (256, 256, 3), np.uint8)
    wanted = [request(seed=seed, image=pixels, mask=pixels[:, :, 0] > 9, strength=0.5) for seed in range(3)]
    with start_fake_pool("given", workers=1) as opened:
        images = list(opened.submit(wanted).images())
        workers = {memory.pid for memory in opened.memory().values()}
    assert len(images) == 3
    notes = {int(path.name.removeprefix("picture-")) for path in tmp_path.iterdir()}
    assert notes == workers


@pytest.mark.rotates
@pytest.mark.parametrize("side", [8, 256], ids=["small enough to travel along", "in the object store"])
def test_an_input_whose_owner_died_is_told_as_lost(pool, side) -> None:
    class Owner:
        def put(self) -> list[ray.ObjectRef]:
            return [ray.put(Latent(np.zeros((4, side, side), np.float32)))]

    owner = ray.remote(num_cpus=0)(Owner).remote()
    (ref,) = ray.get(owner.put.remote())
    ray.kill(owner)
    given = TaskId(f"given-{side}")
    decode = StageRequest(Stage.DECODE, request(), latent=InputLatent(given, (side, side)))

    failures: list[JobFailure] = []
    while not failures:  # until the news of the owner's death is everywhere, the bytes may still be found
        try:
            pool._stage(decode, {given: ref}).result(120)
        except JobFailed as raised:
            failures.append(raised.failure)
    assert failures[0].kind is RunErrorKind.INPUT_LOST
    assert "was lost" in failures[0].message


JOIN = """
import os, sys
from modelpool.actors.ray import ray_session
session = ray_session.open_session(sys.argv[1], "joined", bring_code=True)
import ray

class Where:
    def say(self):
        import modelpool
        from modelpool import actors, pool, scheduler
        return [module.__file__ for module in (pool, scheduler, actors, modelpool)]

print(ray.get(ray.remote(num_cpus=0)(Where).remote().say.remote()))
session.close()
"""


def test_a_cluster_that_is_joined_gets_our_code(ray_session) -> None:
    done = subprocess.run(
        [sys.executable, "-c", JOIN, ray_session.address],
        cwd="/", env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.stderr == ""
    places = [Path(place) for place in eval(done.stdout)]
    assert [place.parent.name for place in places] == ["pool", "scheduler", "actors", "modelpool"]
    assert all("py_modules_files" in place.parts for place in places)


def test_our_packages_are_ours_inside_an_actor() -> None:
    with start_fake_pool("telling", workers=1, engine=TellingEngine) as telling:
        telling.wait_ready(120)
        places = [Path(place) for place in telling.status().workers[0].device.split(os.pathsep)]
    package = ROOT / "modelpool"
    assert places == [
        *(package / name / "__init__.py" for name in ("pool", "scheduler", "actors")),
        package / "__init__.py",
    ]


def test_a_dataset_streams_through_the_pool_and_keeps_its_columns(pool, tmp_path) -> None:
    """Rows become images of this pool, in their order, with their other columns; one that fails says why."""
    import ray.data

    rows = [{"text": "a red circle", "number": i} for i in range(5)] + [{"text": FAIL, "number": 5}]
    made = ray_data.generate(
        ray.data.from_items(rows).repartition(1),
        pool,
        column="text",
        columns={"seed": "number"},
        model="shapes",
        steps=2,
        on_error="column",
        batch_size=3,
        concurrency=1,
    )
    found = sorted(made.take_all(), key=lambda row: row["number"])
    assert [(row["text"], row["number"], row["seed"]) for row in found] == [
        (row["text"], row["number"], row["number"]) for row in rows
    ]
    for row in found[:5]:
        assert row["error"] == ""
        assert (row["image"] == expected(request(seed=row["number"]))).all()
    assert found[5]["error"]
    assert found[5]["image"].size == 0
    list(pool.submit([request(seed=seed) for seed in range(3)], output=tmp_path / "outputs").results())
    read = ray_data.from_outputs(tmp_path / "outputs").take_all()
    assert sorted(json.loads(row["recipe"])["seed"] for row in read) == [0, 1, 2]
    assert all(row["image"].startswith(b"\x89PNG") for row in read)


def test_equal_rows_of_a_dataset_have_seeds_of_their_own(pool) -> None:
    """Not only the tasks of one batch, and a batch that is repeated has the same."""
    import ray.data

    rows = ray.data.from_items([{"prompt": "a red circle"}] * 6).repartition(2)
    made = ray_data.generate(rows, pool, model="shapes", steps=1, batch_size=2, concurrency=1)
    found = made.take_all()
    assert set(found[0]) == {"prompt", "seed", "image"}
    assert len({row["seed"] for row in found}) == 6
    batch = {"prompt": np.array(["a red circle"] * 3), ROW_ID: np.arange(3)}
    options = RowOptions({"prompt": "prompt"}, {"model": "shapes"}, "image", 0, "raise")
    assert options.requests(batch) == options.requests(batch)


def test_a_killed_driver_outputs_each_row_exactly_once_in_shards_on_s3(ray_session, tmp_path) -> None:
    """Rows of Parquet, WebDataset shards in S3, and the command killed midway: the same command completes them."""
    with s3_server(), start_fake_pool("modelpool", workers=1) as running:
        running.wait_ready(120)
        write_rows(tmp_path / "rows.parquet", 10, steps=1)
        command = [sys.executable, "-m", "modelpool", "batch", str(tmp_path / "rows.parquet"), "--model", "shapes"]
        command += ["--out", "s3://bucket/rows", "--shards", "4", "--pool", running.address]
        trial = run_trial(command, "s3://bucket/rows", rows=10, kills=1, environment={})
    assert trial.exit_code == 0
    assert trial.is_exactly_once(10), trial
    assert max(trial.shard_rows) <= 4
