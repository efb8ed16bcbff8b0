"""Processes on the nodes of a real Ray write the outputs, with the access of their owner, which fetches none."""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from modelpool import GenerateRequest, ModelPool
from modelpool.actors.client.opening import start_pool
from modelpool.actors.config.config import PoolConfig
from modelpool.actors.config.output_address import OutputAddress
from modelpool.actors.outputs.layout import OutputLayout, declare_layout, objects_at
from modelpool.actors.outputs.open_outputs import existing_outputs
from modelpool.actors.outputs.place import OutputPlace
from modelpool.actors.ray import output_writers
from modelpool.actors.ray.output_writers import RayNodeWriters
from modelpool.actors.ray.ray_connection import RayConnection
from tests.actors.fakes import AUDIOS, VIDEOS, fake_plan
from tests.s3_server import s3_server

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_session")]

#: larger than what Ray passes on in its messages: results that are in its object store
SIDE = 256


@pytest.fixture(scope="module")
def pool(ray_session: Any) -> Iterator[ModelPool]:
    """Its Ray was started before the environment had the endpoint of the store."""
    with s3_server():
        config = PoolConfig().override(workers=1, name="writers")
        plan = partial(fake_plan, image_side=SIDE)
        pools = start_pool(config, plan, keeps_jobs=True, preload=())
        with ModelPool(pools.connection, pools.close, None, jobs=pools.jobs, node_writers=pools.node_writers) as opened:
            opened.wait_ready(120)
            yield opened


@pytest.fixture
def fetched(pool: ModelPool, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the driver fetches."""
    found: list[Any] = []
    fetch = pool._connection.fetch
    monkeypatch.setattr(pool._connection, "fetch", lambda ref: (found.append(ref), fetch(ref))[1])
    return found


def requests(seeds: range, **fields: Any) -> list[GenerateRequest]:
    return [GenerateRequest(model="shapes", prompt="a red circle", seed=seed, steps=1, **fields) for seed in seeds]


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.02)


def writers_of(pool: ModelPool) -> RayNodeWriters:
    assert isinstance(pool._outputs._node_writers, RayNodeWriters)
    return pool._outputs._node_writers


def new_writers(pool: ModelPool) -> RayNodeWriters:
    connection = pool._connection
    assert isinstance(connection, RayConnection)
    return RayNodeWriters(lambda: connection.controller)


def wait_for_writer(pool: ModelPool, address: OutputAddress) -> None:
    """Make some images there, until a process of the node writes them."""
    until(lambda: pool.submit(requests(range(4)), output=address).wait(60).succeeded == 4)
    until(lambda: any(place == address and opened.is_open for (_, place), opened in writers_of(pool)._opened.items()))


def seeds_at(address: OutputAddress) -> Counter[int]:
    place: OutputPlace = existing_outputs(address)
    assert not list(place.damaged())
    return Counter(entry.recipe.seed for entry in place.entries())


def pid_of_writer(pool: ModelPool) -> int:
    (process,) = writers_of(pool)._processes.values()
    return int(ray.get(process.actor.__ray_call__.remote(_own_pid)))


def test_outputs_go_from_the_node_to_the_store_and_to_folders(
    pool: ModelPool, fetched: list[Any], tmp_path: Path
) -> None:
    """Images, videos and audio, with thumbnails; results are read from there."""
    folder = tmp_path / "with thumbnails"
    declare_layout(folder, OutputLayout(thumbnail_pixels=32))
    for address in (f"s3://bucket/{uuid.uuid4().hex}", folder):
        wait_for_writer(pool, address)
        fetched.clear()
        results = list(pool.submit(requests(range(4, 12)), output=address).images())
        assert fetched == []
        (expected,) = pool.submit(requests(range(5, 6)), output=False).images()
        (found,) = [result for result in results if result.seed == 5]
        assert (found.pixels == expected.pixels).all()
        assert found.pixels_sha256
        wanted = [{"model": VIDEOS, "prompt": "a red circle", "seed": 1, "frames": 5, "width": 64, "height": 64}]
        wanted += [{"model": AUDIOS, "prompt": "rain", "seed": 1, "seconds": 1.0}]
        fetched.clear()
        assert pool.submit(wanted, output=address).wait(60).succeeded == 2
        assert fetched == []
        assert seeds_at(address) == Counter({**dict.fromkeys(range(12), 1), 1: 3})
    assert len(list((folder / "thumbnails").iterdir())) == 12
    assert len(writers_of(pool)._processes) == 1, "one process for each node, not for each place"


def test_a_writer_that_is_killed_while_it_writes_loses_and_repeats_nothing(pool: ModelPool, fetched: list[Any]) -> None:
    address = f"s3://bucket/{uuid.uuid4().hex}"
    wait_for_writer(pool, address)
    fetched.clear()
    pid = pid_of_writer(pool)
    jobs = pool.submit(requests(range(4, 44)), output=address)
    until(lambda: jobs.progress().done >= 5)
    os.kill(pid, signal.SIGKILL)
    assert jobs.wait(60).succeeded == 40
    assert fetched, "the driver went on"
    assert seeds_at(address) == Counter(range(44))
    images = [name for name in objects_at(address).sizes() if name.endswith(".png")]
    assert len(images) == 44


def test_the_job_service_has_outputs_written_too(pool: ModelPool, tmp_path: Path) -> None:
    """It fetches what a node has made before a process was worth it there, and nothing later."""
    connection: Any = pool._job_service()
    service = connection._service
    ray.get(service.__ray_call__.remote(_count_fetches))

    address = tmp_path / "out"
    record = pool.submit_detached(requests(range(8)), output=address).wait(60)
    assert (record.succeeded, record.failed) == (8, 0)
    until(lambda: ray.get(service.__ray_call__.remote(_has_writer)))
    before = ray.get(service.__ray_call__.remote(_fetches))
    assert before >= output_writers.START_AFTER
    record = pool.submit_detached(requests(range(8, 24)), output=address).wait(60)
    assert (record.succeeded, record.failed) == (16, 0)
    assert ray.get(service.__ray_call__.remote(_fetches)) == before
    assert seeds_at(address) == Counter(range(24))


def _count_fetches(service: Any) -> None:
    fetch = RayConnection.fetch
    service.fetches = 0

    def counted(connection: RayConnection, ref: Any) -> Any:
        service.fetches += 1
        return fetch(connection, ref)

    pytest.MonkeyPatch().setattr(RayConnection, "fetch", counted)  # of the service's process, as long as it runs


def _has_writer(service: Any) -> bool:
    return any(opened.is_open for opened in service._node_writers._opened.values())


def _fetches(service: Any) -> int:
    return int(service.fetches)


def test_a_node_that_sees_another_store_writes_nothing_and_the_driver_says_so(
    pool: ModelPool, fetched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The outputs are where the driver means them to be."""
    notes: list[str] = []
    noted = threading.Event()
    monkeypatch.setattr(writers_of(pool), "_note", lambda note: (notes.append(note), noted.set()))
    leave_mark = output_writers.place_mark

    def mark_elsewhere(address: OutputAddress) -> Any:
        return leave_mark("s3://bucket/elsewhere")

    monkeypatch.setattr(output_writers, "place_mark", mark_elsewhere)
    address = f"s3://bucket/{uuid.uuid4().hex}"
    assert pool.submit(requests(range(6)), output=address).wait(60).succeeded == 6
    assert noted.wait(60)
    assert pool.submit(requests(range(6, 12)), output=address).wait(60).succeeded == 6
    assert len(fetched) == 12
    assert seeds_at(address) == Counter(range(12))
    (note,) = notes
    assert "are written to" in note
    assert "another place for this process" in note
    assert "hidden-test-key" not in note


def test_places_of_one_process_and_folders_of_other_nodes_are_not_asked_for(pool: ModelPool, tmp_path: Path) -> None:
    writers = writers_of(pool)
    here, elsewhere = writers._node, type(writers._node)("f" * 56)
    before = set(writers._opened)
    assert not any(writers.can_write(here, "memory://bucket/outputs") for _ in range(10))
    assert not any(writers.can_write(elsewhere, tmp_path) for _ in range(10))
    assert set(writers._opened) == before


def test_processes_end_when_they_are_idle_and_with_their_owner(
    pool: ModelPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = tmp_path / "out"
    wait_for_writer(pool, address)
    first = psutil.Process(pid_of_writer(pool))
    with monkeypatch.context() as patch:
        patch.setattr(output_writers, "IDLE_SECONDS", 0.0)
        first.wait(60)
    wait_for_writer(pool, address)  # at once, unlike after one that has died
    other = new_writers(pool)
    until(lambda: other.can_write(other._node, address))
    process = psutil.Process(int(ray.get(other._processes[other._node].actor.__ray_call__.remote(_own_pid))))
    other.close()
    process.wait(60)
    assert not other.can_write(other._node, tmp_path / "another")


def _own_pid(_: Any) -> int:
    return os.getpid()


def test_the_owner_writes_what_a_process_cannot_because_of_its_code(
    pool: ModelPool, fetched: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module is missing on the node, say: that is no error of an output, and the process is not asked again soon."""
    notes: list[str] = []
    monkeypatch.setattr(writers_of(pool), "_note", notes.append)
    address = tmp_path / "out"
    wait_for_writer(pool, address)
    pid = pid_of_writer(pool)
    (process,) = writers_of(pool)._processes.values()
    ray.get(process.actor.__ray_call__.remote(_lose_a_module))
    fetched.clear()
    assert pool.submit(requests(range(4, 10)), output=address).wait(60).succeeded == 6
    assert len(fetched) == 6
    assert seeds_at(address) == Counter(range(10))
    (note,) = notes
    assert "ModuleNotFoundError: No module named 'av'" in note
    assert pid_of_writer(pool) == pid, "it still writes to other places"
    assert not writers_of(pool).can_write(writers_of(pool)._node, address)


def _lose_a_module(writer: Any) -> None:
    def write(*_: Any) -> None:
        raise ModuleNotFoundError("No module named 'av'")

    for place in writer._places.values():
        place.write = write


def test_a_process_that_ended_before_it_opened_a_place_is_replaced(
    pool: ModelPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_writers, "AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(writers_of(pool), "_note", lambda note: None)
    wait_for_writer(pool, tmp_path / "first")
    process = psutil.Process(pid_of_writer(pool))
    process.kill()
    process.wait(60)
    until(lambda: writers_of(pool).can_write(writers_of(pool)._node, tmp_path / "second"))
    assert pid_of_writer(pool) != process.pid


def test_a_process_has_the_access_that_its_owner_has_when_a_place_is_opened(
    pool: ModelPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Renewed credentials are passed on, and none is an argument of the actor, which Ray would store."""
    wait_for_writer(pool, tmp_path / "first")
    monkeypatch.setenv("AWS_TEST_TOKEN", "renewed")
    wait_for_writer(pool, tmp_path / "second")
    (process,) = writers_of(pool)._processes.values()
    assert ray.get(process.actor.__ray_call__.remote(_test_token)) == "renewed"


def _test_token(_: Any) -> str | None:
    return os.environ.get("AWS_TEST_TOKEN")


def test_files_of_a_process_have_the_permissions_that_its_owner_gives(pool: ModelPool, tmp_path: Path) -> None:
    """Ray may have been started by another shell, with a umask of its own."""
    before = os.umask(0o057)
    try:
        other = new_writers(pool)
        until(lambda: other.can_write(other._node, tmp_path / "out"))
        assert ray.get(other._processes[other._node].actor.__ray_call__.remote(_own_umask)) == 0o057
        other.close()
    finally:
        os.umask(before)


def _own_umask(_: Any) -> int:
    found = os.umask(0)
    os.umask(found)
    return found
