"""Invented jobs name what they need: LoRAs where they patch, ControlNets beside the diffusion model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from modelpool.pool.values.specs.spec import UNPATCHED, ComponentSpec, JobId, Role
from modelpool.scheduler.model.messages import Submitted
from modelpool.scheduler.simulator.workloads.models import InventedModel
from modelpool.scheduler.simulator.workloads.workload import Workload

MODEL = InventedModel("m", diffusion_bytes=1000, text_encoder_bytes=100, lora_bytes=10, controlnet_bytes=50)


def test_loras_are_adapters_of_what_they_patch() -> None:
    encode, sample, decode = MODEL.job("a", "cat", 1, loras=["x", "y"]).tasks
    assert sample.uses[0].adapters == (MODEL.key(Role.LORA, "x"), MODEL.key(Role.LORA, "y"))
    assert sample.uses[0].patched_bytes == 250
    assert encode.uses[0].adapters == sample.uses[0].adapters
    assert encode.uses[0].patch_digest == sample.uses[0].patch_digest
    assert decode.uses[0].patch_digest == UNPATCHED
    swapped = MODEL.job("b", "cat", 1, loras=["y", "x"]).tasks[1]
    assert swapped.uses[0].patch_digest != sample.uses[0].patch_digest, "the order is part of a patch set"
    assert swapped.task_id != sample.task_id


def test_where_loras_leave_the_text_encoder_alone_all_share_its_work() -> None:
    model = replace(MODEL, loras_reach_text=False)
    bare, patched = model.job("a", "cat", 1), model.job("b", "cat", 1, loras=["x"])
    assert bare.tasks[0] == patched.tasks[0]
    assert bare.tasks[1].task_id != patched.tasks[1].task_id
    assert MODEL.job("a", "cat", 1).tasks[0].task_id != MODEL.job("b", "cat", 1, loras=["x"]).tasks[0].task_id


def test_controlnets_run_beside_the_diffusion_model_at_every_step() -> None:
    bare = MODEL.job("a", "cat", 1, steps=10).tasks[1]
    sample = MODEL.job("b", "cat", 1, steps=10, controlnets=["pose", "edge"]).tasks[1]
    assert [use.component for use in sample.uses] == [
        MODEL.key(Role.DIFFUSION_MODEL),
        MODEL.key(Role.CONTROLNET, "pose"),
        MODEL.key(Role.CONTROLNET, "edge"),
    ]
    assert all(use.passes == 10 for use in sample.uses)
    assert sample.run_seconds == pytest.approx(bare.run_seconds * (1 + 2 * MODEL.controlnet_step_share))
    assert sample.task_id != bare.task_id
    assert sample.task_id != MODEL.job("c", "pose+edge cat", 1, steps=10).tasks[1].task_id


def test_adapters_are_components_of_their_own() -> None:
    assert MODEL.adapters(["x", ""], ["pose", ""]) == (
        ComponentSpec(MODEL.key(Role.LORA, "x"), Role.LORA, 10, 10),
        ComponentSpec(MODEL.key(Role.CONTROLNET, "pose"), Role.CONTROLNET, 50, 50),
    )


def test_user_deadline_and_batch_are_the_job_s() -> None:
    job = MODEL.job("a", "cat", 1, user="ann", deadline=9.0, batch="night", priority=3)
    assert (job.user, job.deadline, job.batch, job.priority) == ("ann", 9.0, "night", 3)


def test_a_workload_is_in_order_and_names_everything_once() -> None:
    first, second = Submitted(1.0, MODEL.job("a", "cat", 1)), Submitted(2.0, MODEL.job("b", "cat", 2))
    assert Workload("two", MODEL.components, (first, second)).seconds == 2.0
    with pytest.raises(ValueError, match="at of a: found 1"):
        Workload("two", MODEL.components, (second, first))
    with pytest.raises(ValueError, match="jobs: found 'a'"):
        Workload("two", MODEL.components, (first, replace(second, job=replace(second.job, job_id=JobId("a")))))
    with pytest.raises(ValueError, match="components: found 'm/text_encoder'"):
        Workload("two", (*MODEL.components, *MODEL.components), ())
    with pytest.raises(ValueError, match="nan"):
        Workload("two", MODEL.components, (replace(first, at=float("nan")),))
