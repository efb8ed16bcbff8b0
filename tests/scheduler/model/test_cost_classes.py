"""An estimate without a plan equals the plan's."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import event, given
from hypothesis import strategies as st

from modelpool.pool.values.specs.spec import ComponentKey, ComponentSpec, ComponentUse, Role, Stage, TaskId, TaskSpec
from modelpool.pool.weights.plan.eviction_plan import Resident
from modelpool.scheduler.decisions.costs.cost_model import Costs
from modelpool.scheduler.decisions.costs.predict import predict, predict_by_plan, predict_fully_resident

KEYS = tuple(ComponentKey(name) for name in ("text", "unet", "vae"))
LORAS = tuple(ComponentKey(name) for name in ("lora-1", "lora-2"))
BYTES = st.integers(1, 12)


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[ComponentSpec, ...], TaskSpec, tuple[Resident | None, ...], int]:
    """Sizes, a task, the resident part of its weights (more than there is of it, too), and a capacity."""
    specs = [ComponentSpec(key, Role.VAE, draw(BYTES), draw(BYTES)) for key in KEYS]
    loras = [ComponentSpec(key, Role.LORA, 1, draw(BYTES)) for key in LORAS if draw(st.booleans())]
    uses, seen = [], []
    for spec in specs[: draw(st.integers(0, 3))]:
        digest, patched_bytes = draw(st.sampled_from(["", "x"])), draw(st.integers(0, 12))
        adapters = LORAS[: draw(st.integers(0, 2))] if digest else ()
        passes = draw(st.integers(1, 2))
        uses.append(ComponentUse(spec.key, draw(st.integers(0, 4)), digest, patched_bytes, passes, adapters))
        held_bytes = draw(st.one_of(st.just(spec.weight_bytes), st.integers(0, 14)))
        held_digest = draw(st.sampled_from(["", "x", "y"]))
        held = Resident(spec.key, held_bytes, held_digest, draw(st.integers(0, 12)))
        seen.append(held if held_bytes else None)
    task = TaskSpec(TaskId("t"), Stage.SAMPLE, tuple(uses), draw(st.integers(0, 8)), 1.0)
    return (*specs, *loras), task, tuple(seen), draw(st.integers(12, 60))


@given(cases())
def test_what_is_whole_is_predicted_as_the_plan_says(case) -> None:
    known, task, seen, capacity_bytes = case
    costs = Costs(0.05)
    costs.know(known)
    cost_class = costs.acquire(task)
    expected = predict_by_plan(cost_class, seen, capacity_bytes, costs.components)
    short = predict_fully_resident(cost_class, seen, capacity_bytes, costs.components)
    event("reckoned" if short is not None else "asked the plan")
    assert short in (None, expected)
    for _ in range(2):
        assert predict(cost_class, seen, capacity_bytes, costs.components) == expected


def test_room_enough_needs_no_plan_and_too_little_does() -> None:
    costs = Costs(0.05)
    sizes = ComponentSpec(KEYS[1], Role.DIFFUSION_MODEL, 8, 4)
    costs.know((sizes,))
    cost_class = costs.acquire(TaskSpec(TaskId("t"), Stage.SAMPLE, (ComponentUse(KEYS[1], 1),), 3, 1.0))
    whole = predict_fully_resident(cost_class, (None,), 12, costs.components)
    assert whole is not None
    assert (whole.upload_bytes, whole.streamed_bytes, whole.room_bytes) == (4, 0, 0)
    assert predict_fully_resident(cost_class, (None,), 11, costs.components) is None
    costs.know((replace(sizes, weight_bytes=7),))
    assert predict_fully_resident(cost_class, (None,), 11, costs.components) is not None, "old sizes are remembered"


def test_what_is_all_there_is_reckoned_once_and_anew_for_other_sizes() -> None:
    costs = Costs(0.05)
    sizes = ComponentSpec(KEYS[1], Role.DIFFUSION_MODEL, 8, 4)
    costs.know((sizes,))
    cost_class = costs.acquire(TaskSpec(TaskId("t"), Stage.SAMPLE, (ComponentUse(KEYS[1], 1),), 3, 1.0))
    there = (Resident(KEYS[1], 8),)
    reckoned = [predict(cost_class, there, 20, costs.components) for _ in range(3)]
    assert reckoned[1] is reckoned[2]
    assert [(load.upload_bytes, load.present_bytes) for load in reckoned] == [(0, 8)] * 3
    costs.know((replace(sizes, weight_bytes=10),))
    assert predict(cost_class, there, 20, costs.components).upload_bytes == 1, "old sizes are remembered"
