"""Images of other families than the shapes model join a pass at a step, too, with the bytes of a closed pass.

Found: HiDream's experts compute the tokens of all images of a pass in one product, so that its images had other last
bits beside others, also in closed passes of one size. It has no batch size above 1 now, and says why.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from modelpool.pool.engine.engine import EngineSettings
from modelpool.pool.families.definitions import defined_families
from modelpool.pool.values.core.joining import pass_key, why_not_joining, why_single
from modelpool.pool.values.core.stage_params import (
    BatchMember,
    GuidanceParams,
    ModelRef,
    OutputShape,
    SampleParams,
    SamplingSchedule,
    stage_of,
    task_id,
)
from modelpool.pool.values.specs.spec import Role, TaskSpec
from tests.pool.engine.test_open_pass import Arrivals, array
from tests.pool.families.tiny_relatives import SMALL_FAMILIES as FAMILIES
from tests.pool.families.whole_transformer import Whole
from tests.pool.input_names import inputs_of
from tests.pool.pipeline import QUIET

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:In CPU autocast:UserWarning"),  # Mochi, as diffusers has it
]
SIZE = 4
#: of each kind of inputs: guidance as a number, masks, pooled texts, sizes, frame rates, several texts
JOINING = ("z_image", "auraflow", "pixart_sigma", "hunyuan_dit", "ltxv", "mochi", "flux2_klein")


def members_of(whole: Whole, count: int) -> list[BatchMember]:
    """With texts, samplers, steps and guidance scales of their own."""
    texts = whole.texts()
    plain = replace(whole.sampling(len(texts)), batch_size=SIZE)
    use = whole.catalog.use(whole.model, Role.DIFFUSION_MODEL, ())
    needed_bytes = SIZE * whole.catalog.figures.activation_bytes(whole.model, plain)
    found = []
    for number in range(count):
        sampler = (plain.schedule.sampler, "euler_ancestral", "dpmpp_2m")[number % 3]
        guidance = plain.guidance
        guidance = replace(guidance, cfg=guidance.cfg + number / 4) if len(texts) > 1 else guidance
        schedule = replace(plain.schedule, steps=2 + number % 3, sampler=sampler)
        work = replace(plain, seed=number, schedule=schedule, guidance=guidance)
        own = replace(texts[0], context_LD=texts[0].context_LD * np.float32(1 + number / 8))
        task = TaskSpec(task_id(work, {}), stage_of(work), (use,), needed_bytes, 0.1, batch_size=SIZE)
        found.append(BatchMember(task, work, inputs_of(work, own, *texts[1:]), QUIET))
    return found


@pytest.mark.parametrize("name", JOINING)
def test_whoever_joins_has_the_bytes_of_a_closed_pass(name: str, tmp_path: Path) -> None:
    whole = Whole(tmp_path, FAMILIES[name], settings=EngineSettings("cpu"))
    members = members_of(whole, 5)
    works = [member.work for member in members if isinstance(member.work, SampleParams)]
    assert [why_not_joining(work, whole.family.sampling) for work in works] == [""] * len(members)
    assert len({pass_key(work, whole.family.sampling) for work in works}) == 1
    closed = [array(whole.engine.run_batch([member])[0]) for member in members]
    arrivals = Arrivals({0: members[:2], 1: members[2:4], 2: members[4:]})
    whole.engine.run_pass(arrivals)
    whole.engine.close()
    assert max(arrivals.together) == SIZE
    for member, one in zip(members, closed, strict=True):
        outcome = arrivals.of(member)
        assert isinstance(outcome, tuple), outcome
        assert np.array_equal(array(outcome), one), member.work


def test_a_model_that_routes_tokens_to_experts_has_no_batch_size() -> None:
    """Each family with routed experts has none."""
    routing = {family.name: family.sampling for family in defined_families() if family.sampling.routes_tokens}
    assert set(routing) == {"hidream_i1"}
    work = SampleParams(
        ModelRef("m", "m.safetensors", "00"),
        (),
        OutputShape(64, 64),
        SamplingSchedule(2, "euler", "normal"),
        GuidanceParams(1.0),
        1,
    )
    for facts in routing.values():
        assert "experts" in why_single(work, facts)
        assert why_not_joining(replace(work, batch_size=SIZE), facts) == why_single(work, facts)
    whole = FAMILIES["hidream_i1"].model()
    assert any("MOE" in type(module).__name__ for module in whole.modules())
    for name in JOINING:
        modules = FAMILIES[name].model().modules()
        assert not any("moe" in type(module).__name__.lower() for module in modules), name
