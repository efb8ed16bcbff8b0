"""A batch over two LoRAs: the base is brought to each worker once, and patches change seldom."""

from __future__ import annotations

from modelpool.pool.values.core.errors import GIB
from modelpool.pool.values.specs.spec import Role, Stage
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import Submitted
from modelpool.scheduler.simulator.cluster import VirtualCluster
from modelpool.scheduler.simulator.workloads.models import InventedModel
from tests.simulation.worlds import gpus

MODEL = InventedModel("base", text_encoder_bytes=1 * GIB, diffusion_bytes=5 * GIB)


def batch(placement: str) -> VirtualCluster[SchedulerState]:
    """200 jobs, LoRAs A, B, A, B ..., on 3 workers that hold every component of the base at once."""
    cluster = VirtualCluster(SchedulerState(SchedulerConfig(placement=placement)), gpus(3))
    cluster.start((*MODEL.components, *MODEL.adapters(["A", "B"])))
    for number in range(200):
        lora = "A" if number % 2 == 0 else "B"
        cluster.post(Submitted(1.0, MODEL.job(f"job-{number}", f"prompt {number}", number, loras=(lora,))))
    cluster.run()
    assert len(cluster.outcomes) == 200
    return cluster


def test_patches_change_less_than_a_third_as_often_as_in_arrival_order() -> None:
    ours, theirs = batch("soonest"), batch("arrival_order")
    assert ours.totals.patch_switches * 3 < theirs.totals.patch_switches
    ours_bytes = ours.totals.uploaded_bytes + ours.totals.preloaded_bytes
    assert ours_bytes * 3 < theirs.totals.uploaded_bytes + theirs.totals.preloaded_bytes
    assert ours.now < theirs.now, "and the batch is done sooner"


def test_base_weights_are_brought_to_each_worker_once() -> None:
    """What comes beside other runs, and is not counted as cold, included: no worker gets more than it has room for."""
    cluster = batch("soonest")
    sizes = {spec.key: spec.upload_bytes for spec in MODEL.components}
    assert all(count <= sizes[component] for (_, component), count in cluster.totals.cold_bytes.items())
    samplers = {run.worker_id for run in cluster.runs if run.stage is Stage.SAMPLE}
    assert len(samplers) == 3
    least_bytes = sum(spec.upload_bytes for spec in MODEL.components if spec.role is Role.DIFFUSION_MODEL)
    assert sum(cluster.totals.cold_bytes.values()) + cluster.totals.preloaded_bytes >= 3 * least_bytes


def test_the_snapshot_tells_the_same() -> None:
    cluster = batch("soonest")
    seen = cluster.core.snapshot()
    assert seen.patch_switches == cluster.totals.patch_switches
    assert seen.runs_resident > 0.9 * seen.runs
