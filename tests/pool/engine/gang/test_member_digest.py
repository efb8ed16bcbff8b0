"""Digests of what a member is about to compute: whatever changes a pixel changes one of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from modelpool.pool.devices.vram_policy import VramPolicy
from modelpool.pool.engine.engine import EngineSettings
from modelpool.pool.engine.gang.member_digest import expect_equal, request_digest, weight_digests
from modelpool.pool.values.core.gang_errors import GangsDiffer
from modelpool.pool.values.core.run_options import FrequencyScale
from modelpool.pool.values.core.stage_params import Latent, Mask, Result
from modelpool.pool.values.core.task_inputs import TaskInputs
from modelpool.pool.values.specs.gang import Gang
from modelpool.pool.values.specs.spec import Role, WorkerId
from tests.each_case import each_case
from tests.pool.families.tiny_relatives import ALL_FAMILIES
from tests.pool.families.whole_transformer import Whole


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return Whole(tmp_path_factory.mktemp("tiny"), ALL_FAMILIES["flux_dev"])


ZEROS = np.zeros((4, 6, 8), np.float32)


@each_case(
    ("name", "one", "other"),
    [
        ("mask", Mask(ZEROS[0]), Mask(ZEROS[0] + 1)),
        ("start", Latent(ZEROS), Latent(ZEROS + 1)),
        ("start", Latent(ZEROS), Latent(ZEROS.reshape(4, 8, 6))),
    ],
    ids=("a mask", "a latent", "a shape"),
)
def test_every_input_counts(name: str, one: Result, other: Result, whole: Whole) -> None:
    """A mask was left out, as it has no `arrays`; so was a change of shape with the same bytes."""
    work = whole.sampling(1)
    found = {request_digest([work], [TaskInputs({name: each})], []) for each in (one, one, other)}
    assert len(found) == 2
    others = [replace(work, seed=work.seed + 1)]
    assert request_digest([work], [TaskInputs()], []) != request_digest(others, [TaskInputs()], [])
    with_option = [replace(work, options=replace(work.options, fresca=FrequencyScale(low))) for low in (1.5, 2.0)]
    assert len({request_digest([each], [TaskInputs()], []) for each in (work, *with_option)}) == 3


def test_weights_on_the_host_count_wherever_they_are_resident(whole: Whole) -> None:
    """One member has them on its GPU, and another streams them: only these were not compared."""
    patcher = whole.engine.patcher(whole.model, Role.DIFFUSION_MODEL, ())
    before = weight_digests(patcher, patcher.module)
    name = max(patcher.host_parameters, key=lambda each: patcher.host_parameters[each].numel())
    weight = patcher.host_parameters[name]
    kept = weight.detach().clone()
    gang = Gang("g", (WorkerId("a"), WorkerId("b")), 0)
    expect_equal(gang, ["", ""], [before, weight_digests(patcher, patcher.module)])
    with torch.no_grad():
        weight.add_(0.01)
        changed = weight_digests(patcher, patcher.module)
        weight.copy_(kept)
    with pytest.raises(
        GangsDiffer, match=rf"b \(rank 1\) has other patched weights .* {name} (on the host|as it is used)"
    ):
        expect_equal(gang, ["", ""], [before, {key: each for key, each in changed.items() if key != name}])


def test_weights_that_stream_are_compared_where_they_are(tmp_path: Path) -> None:
    """Each of them was brought to the device first: as many bytes as the model has, before every shared run."""
    settings = EngineSettings("sim", budget_bytes=512 << 20, vram_policy=VramPolicy.NONE)
    streaming = Whole(tmp_path, ALL_FAMILIES["flux_dev"], settings=settings)
    patcher, memory = streaming.engine.patcher(streaming.model, Role.DIFFUSION_MODEL), streaming.engine._device.memory
    with patcher.running() as module:
        before_bytes = memory.transfers().h2d_bytes
        found = weight_digests(patcher, module)
        assert memory.transfers().h2d_bytes - before_bytes == 0
    assert len(found) > len(patcher.host_parameters)
    streaming.engine.close()
