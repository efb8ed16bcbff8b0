"""Several tasks in one run of one module: which go together, what each is charged, and what is done when it goes wrong.

A run of several is all or nothing for a device, but not for the tasks: where one fails, its members are run again in
smaller runs (halves, when memory ran out) or each by itself, so that each has the outcome that it would have had alone.
Knows no module and no device; `attempt` is `pool.engine.engine`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch

from modelpool.pool.core.errors import DoesNotFit
from modelpool.pool.core.stage_params import (
    AudioSamples,
    Coming,
    Encoded,
    Halfway,
    ImagePixels,
    Latent,
    Mask,
    Member,
    Outcome,
    Result,
    RunHooks,
    Seen,
    Stopped,
    VideoFrames,
    VideoMask,
    together_key,
)
from modelpool.pool.patcher.out_of_memory import exhausted, let_go
from modelpool.pool.specs.spec import RunCost, Rung, TaskSpec

#: runs these members at once: the result of each, in order, and what the run cost. May raise anything
Attempt: TypeAlias = Callable[[Sequence[Member]], tuple[Sequence[Result], RunCost]]


def groups(members: Sequence[Member]) -> list[list[int]]:
    """The places of `members` that may share a run, by the place of the first of each.

    Those do the same to equally large inputs on the same weights. Whoever put them together should have seen to it;
    what does not go together is run apart and still right.
    """
    found: dict[object, list[int]] = {}
    for place, member in enumerate(members):
        found.setdefault(_kind(member), []).append(place)
    return list(found.values())


def joint_task(tasks: Sequence[TaskSpec]) -> TaskSpec:
    """A run of `tasks` as one task to plan with.

    Its activations are at most as many times those of one as there are tasks (the largest one's, where figures that
    runs corrected have come to differ). It has no divisions: a run that finds too little memory is made of fewer tasks
    instead.
    """
    count = len(tasks)
    largest = max(tasks, key=lambda task: task.activation_bytes)
    if count == 1:
        return largest
    return replace(
        largest,
        activation_bytes=count * largest.activation_bytes,
        counted_bytes=count * largest.counted_bytes,
        divisions=(),
    )


def joint_hooks(members: Sequence[Member]) -> RunHooks:
    """Steps are told to all; a run is stopped when nobody wants it any more."""
    if len(members) == 1:
        return members[0].hooks

    def on_step(done: int, steps: int) -> None:
        for member in members:
            member.hooks.on_step(done, steps)

    def coming() -> Coming | None:
        return next((told for member in members if (told := member.hooks.coming()) is not None), None)

    return RunHooks(on_step, lambda: all(member.hooks.should_stop() for member in members), coming)


def shares(cost: RunCost, count: int) -> tuple[RunCost, ...]:
    """`cost` of one run as the shares of its `count` tasks, which add up to it. Memory peaks are the whole run's; patch
    switches are the first task's."""
    if count == 1:
        return (cost,)
    return tuple(
        replace(
            cost,
            load_seconds=cost.load_seconds / count,
            run_seconds=cost.run_seconds / count,
            uploaded_bytes=_share(cost.uploaded_bytes, place, count),
            streamed_bytes=_share(cost.streamed_bytes, place, count),
            ahead_bytes=_share(cost.ahead_bytes, place, count),
            storage_bytes=_share(cost.storage_bytes, place, count),
            patch_switches=cost.patch_switches if place == 0 else 0,
            batched=count,
        )
        for place in range(count)
    )


def run_together(members: Sequence[Member], attempt: Attempt) -> tuple[Outcome, ...]:
    """The outcome of each of `members`, in order.

    A run that finds too little memory is made again in halves; one that fails in another way is made again with each
    member by itself, so that a member that cannot be done takes nobody along. A device that no longer answers is an
    outcome for all. Members that were asked to stop before a run begins are left out; in a run they go on as long as
    others want it, and have a result then. Never raises an Exception.
    """
    outcomes: list[Outcome | None] = [None] * len(members)
    for places in groups(members):
        found = _outcomes([members[place] for place in places], attempt, ())
        for place, outcome in zip(places, found, strict=True):
            outcomes[place] = outcome
    return tuple(outcome for outcome in outcomes if outcome is not None)


def _outcomes(members: Sequence[Member], attempt: Attempt, rungs: tuple[Rung, ...]) -> list[Outcome]:
    """Of members that go together; `rungs` are what was done about memory before."""
    wanted = [member for member in members if not member.hooks.should_stop()]
    if len(wanted) < len(members):
        found = iter(_outcomes(wanted, attempt, rungs)) if wanted else iter(())
        still = {id(member) for member in wanted}
        return [next(found) if id(member) in still else Stopped() for member in members]
    try:
        results, cost = attempt(members)
    except Exception as error:
        let_go(error)
        if len(members) == 1 or isinstance(error, Stopped) or _device_is_gone(error):
            return [error] * len(members)
        lacks_memory = isinstance(error, DoesNotFit) or exhausted(error) is not None
    else:
        costs = shares(replace(cost, rungs=rungs + cost.rungs), len(members))
        return list(zip(results, costs, strict=True))
    size, rungs = ((len(members) + 1) // 2, (*rungs, Rung.DIVIDE)) if lacks_memory else (1, rungs)
    parts = [members[start : start + size] for start in range(0, len(members), size)]
    return [outcome for part in parts for outcome in _outcomes(part, attempt, rungs)]


def _kind(member: Member) -> object:
    """Equal for members that may share a run."""
    sizes = tuple(_size(result) for result in member.inputs)
    uses = tuple((use.component, use.patch_digest, use.passes) for use in member.task.uses)
    return together_key(member.work), sizes, uses


def _size(result: Result) -> tuple[int, ...]:
    """The shape of a result's array."""
    match result:
        case Encoded():
            return tuple(size for array in result.arrays for size in array.shape)
        case Seen():
            return result.states_LD.shape
        case Latent():
            return result.samples_CHW.shape
        case Halfway():
            return tuple(size for array in result.arrays for size in array.shape)
        case ImagePixels():
            return result.pixels_HWC.shape
        case VideoFrames():
            return result.frames_THWC.shape
        case AudioSamples():
            return result.samples_SC.shape
        case Mask():
            return result.values_HW.shape
        case VideoMask():
            return result.values_THW.shape


def _share(total: int, place: int, count: int) -> int:
    """The part of a whole number that falls to one of `count`; the first ones take what is left over."""
    return total // count + (place < total % count)


def _device_is_gone(error: Exception) -> bool:
    """No later run can succeed in this process. See `actors.worker.gpu_worker.run_error`."""
    return isinstance(error, torch.AcceleratorError) and exhausted(error) is None
