"""Times on several GPUs: the published figures, and what was measured instead."""

from __future__ import annotations

from modelpool.pool.values.specs.spec import ComponentKey, ComponentUse, Stage, TaskId, TaskSpec
from modelpool.scheduler.model.gang_times import GangTimes, prior_seconds, speedup
from modelpool.scheduler.model.run_kinds import RunKinds


def sampling(steps: int, step_seconds: float, degrees: tuple[int, ...] = (1, 2, 4, 8)) -> TaskSpec:
    use = ComponentUse(ComponentKey("model"), 0, passes=steps)
    return TaskSpec(TaskId("s"), Stage.SAMPLE, (use,), 1, steps * step_seconds, degrees=degrees)


def test_the_published_figures_are_met() -> None:
    flux, wan, guidance = sampling(28, 0.24), sampling(40, 1.75), sampling(20, 0.1, (1, 2))
    found = [speedup(flux, 2), speedup(flux, 4), speedup(wan, 8), speedup(guidance, 2)]
    assert [round(one, 2) for one in found] == [1.55, 2.2, 6.9, 1.8]


def test_more_gpus_pay_less_and_short_steps_do_not_pay() -> None:
    for steps, seconds in ((28, 0.24), (28, 0.7), (40, 1.75), (40, 9.0)):
        task = sampling(steps, seconds)
        used = [speedup(task, degree) / degree for degree in (1, 2, 4, 8)]
        assert used == sorted(used, reverse=True), (steps, seconds)
    assert speedup(sampling(20, 0.02), 2) < 1.0
    assert prior_seconds(sampling(20, 0.5), 4.0, 2, remaining=0.4) * 2.5 == prior_seconds(sampling(20, 0.5), 10.0, 2)


def test_measurements_count_by_kind_gpu_size_and_number() -> None:
    times, kinds = GangTimes(), RunKinds()
    kind = kinds.kind(Stage.SAMPLE, (ComponentKey("model"),))
    times.learn(kind, "H100", 20, 2, 0.6)
    assert times.ratio(kind, "H100", 20, 2) == 0.6
    others = [("H100", 20, 4), ("H100", 21, 2), ("A100", 20, 2)]
    assert [times.ratio(kind, *other) for other in others] == [None] * 3
