"""The simulator itself: what it charges, what it stops, and that it needs neither torch nor Ray."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from modelpool.pool.values.core.errors import GIB
from modelpool.pool.values.specs.spec import NodeId, WorkerId
from modelpool.scheduler.core.invariants import validate
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.model.messages import (
    CancelRequested,
    EndWorker,
    Outcome,
    PinComponents,
    StopTask,
    Submitted,
    WorkersWanted,
)
from modelpool.scheduler.simulator.cluster import SimulatedNode, VirtualCluster
from modelpool.scheduler.simulator.machines import SimulatedGpu
from modelpool.scheduler.simulator.workloads.models import InventedModel

ROOT = Path(__file__).parents[2]
MODEL = InventedModel("one", text_encoder_bytes=1 * GIB, diffusion_bytes=5 * GIB, vae_bytes=1 * GIB)

PINNED = tuple(spec.key for spec in MODEL.components)

PROGRAM = """
import sys
from modelpool.scheduler.simulator.cluster import VirtualCluster
from modelpool.scheduler.simulator.machines import SimulatedGpu
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.model.messages import Submitted
from modelpool.scheduler.simulator.workloads.models import InventedModel

model = InventedModel("one")
cluster = VirtualCluster(SchedulerState(), [SimulatedGpu("gpu-0", 24 << 30, 1e10)])
cluster.start(model.components)
cluster.post(Submitted(0.0, model.job("job", "a cat", 1)))
cluster.run()
assert cluster.core.snapshot().resolved["succeeded"] == 1
print(sorted(name for name in ("torch", "ray", "numpy", "asyncio", "threading") if name in sys.modules))
"""


def one_gpu(capacity_gib: int = 24) -> VirtualCluster[SchedulerState]:
    gpu = SimulatedGpu(WorkerId("gpu-0"), capacity_gib * GIB, 1.0 * GIB, speed=2.0, start_seconds=3.0)
    cluster = VirtualCluster(SchedulerState(), [gpu])
    cluster.start(MODEL.components)
    return cluster


def test_a_run_takes_its_upload_and_its_seconds_at_the_speed_of_the_gpu() -> None:
    """3 s start, 7 GiB at 1 GiB/s, (0.1 + 20 x 0.1 + 0.4) s at double speed."""
    cluster = one_gpu()
    cluster.post(Submitted(0.0, MODEL.job("job", "a cat", 1)))
    cluster.run()
    assert cluster.now == pytest.approx(3.0 + 7.0 + 1.25)


def test_pinned_weights_are_loaded_before_the_first_job_and_charged() -> None:
    """3 s start, 7 GiB at 1 GiB/s; the job arrives when all of it is there."""
    cluster = one_gpu()
    cluster.post(PinComponents(0.0, PINNED, 1))
    cluster.post(Submitted(20.0, MODEL.job("job", "a cat", 1)))
    cluster.run(validate)
    assert cluster.latency_seconds == pytest.approx({"job": 1.25})
    assert (cluster.totals.pinned_bytes, cluster.totals.pinned_seconds) == (7 * GIB, pytest.approx(7.0))
    assert cluster.totals.uploaded_bytes == 0


def test_a_job_ends_the_load_of_pinned_weights_and_uses_what_has_arrived() -> None:
    """2 of 7 GiB have arrived when the job comes: the job waits for its own loads only, and nothing is loaded twice."""
    cluster = one_gpu()
    cluster.post(PinComponents(0.0, PINNED, 1))
    cluster.post(Submitted(5.0, MODEL.job("job", "a cat", 1)))
    cluster.run(validate)
    assert cluster.latency_seconds == pytest.approx({"job": 5.0 + 1.25})
    assert cluster.totals.pinned_bytes == 2 * GIB
    assert cluster.totals.uploaded_bytes + cluster.totals.preloaded_bytes == 5 * GIB


def test_pinned_weights_are_read_from_the_disk_of_a_machine() -> None:
    """7 GiB at 0.5 GiB/s, slower than the link."""
    gpu = SimulatedGpu(WorkerId("gpu-0"), 24 * GIB, 1.0 * GIB, start_seconds=3.0, node=NodeId("box"))
    cluster = VirtualCluster(SchedulerState(), [gpu], [SimulatedNode(NodeId("box"), 64 * GIB, 0.5 * GIB)])
    cluster.start(MODEL.components)
    cluster.post(PinComponents(0.0, PINNED, 1))
    cluster.run(validate)
    assert cluster.now == pytest.approx(3.0 + 14.0)
    assert cluster.storage.bytes == 7 * GIB


def test_streamed_weights_take_their_time_in_every_step() -> None:
    """On 4 GiB the 5 GiB of the diffusion model leave no room: 2 GiB go to activations, 1/8 to scratch."""
    cluster = one_gpu(4)
    cluster.post(Submitted(0.0, MODEL.job("job", "a cat", 1)))
    cluster.run()
    streamed = 20 * (5 * GIB - (2 * GIB - GIB // 8))
    assert cluster.totals.streamed_bytes == streamed
    assert cluster.now > streamed / GIB


def test_a_stopped_run_ends_early_and_an_unwanted_worker_ends() -> None:
    cluster = one_gpu()
    cluster.post(Submitted(0.0, MODEL.job("job", "a cat", 1)))
    cluster.post(CancelRequested(5.0, MODEL.job("job", "a cat", 1).job_id))
    cluster.post(WorkersWanted(6.0, ()))
    cluster.run()
    assert list(cluster.outcomes.values()) == [Outcome.CANCELLED]
    kinds = [type(command) for _, command in cluster.commands]
    assert kinds.count(StopTask) == 1
    assert kinds[-1] is EndWorker


def test_it_runs_without_torch_and_without_ray() -> None:
    """In a fresh interpreter, which says what it has loaded."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.strip()
    assert "torch" not in loaded
    assert "ray" not in loaded
    assert loaded in ("[]", "['threading']"), loaded
