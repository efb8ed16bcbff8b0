"""Workers on a real Ray that begin the next run while they decode: calls begin in their order, and images are whole."""

from __future__ import annotations

import numpy as np
import pytest
import ray

from modelpool import GenerateRequest
from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.ray.actor_options import COMPUTE, worker_threads
from modelpool.actors.worker.wire.packing import packed
from modelpool.pool.values.specs.spec import JobId
from tests.actors.fakes import FakeCatalog, image_of, start_fake_pool
from tests.actors.ray.late_decodes import LateDecodes, Recorder, Slow

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_session")]

IMAGES = 8


def test_calls_of_a_worker_begin_in_the_order_in_which_they_were_sent() -> None:
    """Found in an audit: with two threads for runs, one with small inputs overtook the one before it. What follows a
    run did not find its result then, and was sent again."""
    actor = ray.remote(num_cpus=0, concurrency_groups=worker_threads(True))(Recorder).remote()
    note = actor.note.options(concurrency_group=COMPUTE)
    ray.get([note.remote("first", packed(Slow())), note.remote("second")])
    assert ray.get(actor.calls.options(concurrency_group=COMPUTE).remote()) == ["first", "second"]
    ray.kill(actor)


def test_images_are_the_same_with_decodes_that_overlap() -> None:
    wanted = [GenerateRequest(model="shapes", prompt=f"image {n % 3}", seed=n, steps=2) for n in range(IMAGES)]
    with start_fake_pool("overlap", workers=1, engine=LateDecodes, overlaps_decode=True) as pool:
        pool.wait_ready(120)
        found = {image.index: image.pixels for image in pool.submit(wanted).images()}
        assert pool.status().restarts == 0
    assert sorted(found) == list(range(IMAGES))
    for number, request in enumerate(wanted):
        _, cut = build_graph(request, JobId("x"), FakeCatalog())
        assert np.array_equal(found[number], image_of(cut.works, cut.job.tasks, 0).pixels_HWC)
