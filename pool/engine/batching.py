"""Batches several tasks in one run of a module: grouping, cost shares, and fallback when a batch fails.

A batch is all or nothing for a device, but not for its tasks: if it fails, its members are run again in smaller batches
(halves if memory ran out) or one by one, so that each has the outcome of a single run. Knows no module and no device;
`attempt` is provided by `pool.engine.engine`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TypeAlias

import torch

from modelpool.pool.values.core.errors import DoesNotFit
from modelpool.pool.values.core.stage_params import (
    AudioSamples,
    BatchMember,
    DecodedTiles,
    Encoded,
    FloatArray,
    ImageEmbeds,
    ImagePixels,
    Latent,
    Mask,
    Outcome,
    PreloadRequest,
    Result,
    RunHooks,
    RunState,
    SamplerState,
    Stopped,
    VideoFrames,
    VideoMask,
    batch_key,
)
from modelpool.pool.values.specs.spec import OomStep, RunCost, TaskSpec
from modelpool.pool.weights.patcher.out_of_memory import exhausted_memory, release_frames

#: runs these members as one batch: returns the result of each, in order, and the cost. May raise anything
Attempt: TypeAlias = Callable[[Sequence[BatchMember]], tuple[Sequence[Result], RunCost]]


def groups(members: Sequence[BatchMember]) -> list[list[int]]:
    """Return the positions of `members` that may share a run, grouped, in the order of the first of each group.

    Members of a group run the same stage on equally large inputs with the same weights. The caller should have grouped
    them; members that do not match are run separately and still correct.
    """
    found: dict[object, list[int]] = {}
    for place, member in enumerate(members):
        found.setdefault(_kind(member), []).append(place)
    return list(found.values())


def batch_task(tasks: Sequence[TaskSpec]) -> TaskSpec:
    """Return one task that represents the batch for planning: one of tasks with a fixed batch size, as it is.

    Its activations are at most one task's times the number of tasks (the largest task's, if corrections made them
    differ). It has no execution modes: a batch that does not fit is split instead.
    """
    count, size = len(tasks), tasks[0].batch_size
    if size > 1:  # its sizes are of a whole pass
        return tasks[0]
    largest = max(tasks, key=lambda task: task.activation_bytes)
    if count == 1:
        return largest
    return replace(
        largest,
        activation_bytes=count * largest.activation_bytes,
        counted_bytes=count * largest.counted_bytes,
        divisions=(),
    )


def padded(members: Sequence[BatchMember]) -> Sequence[BatchMember]:
    """Return `members`, and copies of the first one up to their batch size. Nobody reads the results of copies."""
    missing = members[0].task.batch_size - len(members)
    return [*members, *[members[0]] * missing] if missing > 0 else members


def batch_hooks(members: Sequence[BatchMember]) -> RunHooks:
    """Return hooks that report steps to all members. The batch stops when all members should stop, and pauses when all
    should stop or pause; each has its own state at a checkpoint. Padding has no hooks."""
    if len(members) == 1 and members[0].task.batch_size <= 1:
        return members[0].hooks

    def on_step(done: int, steps: int) -> None:
        for member in members:
            member.hooks.on_step(done, steps)

    def preload_request() -> PreloadRequest | None:
        return next((request for member in members if (request := member.hooks.preload_request()) is not None), None)

    def should_pause() -> bool:
        return any(member.hooks.should_pause() for member in members) and _all_end(members)

    def checkpoint(states: Callable[[], Sequence[RunState]]) -> None:
        copied = cache(states)  # copied from the device once, and only if a member wants it
        for place, member in enumerate(members):
            member.hooks.checkpoint(partial(_one_state, copied, place))

    def preview(latents: Callable[[], Sequence[FloatArray]]) -> None:
        copied = cache(latents)  # likewise
        for place, member in enumerate(members):
            if member.hooks.preview is not None:
                member.hooks.preview(partial(_one_latent, copied, place))

    return RunHooks(
        on_step,
        lambda: all(member.hooks.should_stop() for member in members),
        preload_request,
        should_pause,
        checkpoint,
        preview if any(member.hooks.preview is not None for member in members) else None,
    )


def shares(cost: RunCost, count: int) -> tuple[RunCost, ...]:
    """Split `cost` of one run into the shares of its `count` tasks, which add up to it. Memory peaks are the batch's;
    patch switches are assigned to the first task. Padding counts as tasks: its shares are charged to nobody."""
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


def _one_state(states: Callable[[], Sequence[RunState]], place: int) -> tuple[RunState]:
    """Return the state of one member."""
    return (states()[place],)


def _one_latent(latents: Callable[[], Sequence[FloatArray]], place: int) -> tuple[FloatArray]:
    """Return the clean latent of one member."""
    return (latents()[place],)


def run_batch(members: Sequence[BatchMember], attempt: Attempt) -> tuple[Outcome, ...]:
    """Return the outcome of each of `members`, in order.

    A batch that runs out of memory is run again in halves; one that fails otherwise is run again one by one, so that a
    failing member does not fail the others. A lost device is an outcome for all. Members that were asked to stop before
    a run starts are left out; during a run they continue as long as others want it, and then have a result. Never
    raises an Exception.
    """
    outcomes: list[Outcome | None] = [None] * len(members)
    for places in groups(members):
        found = _outcomes([members[place] for place in places], attempt, ())
        for place, outcome in zip(places, found, strict=True):
            outcomes[place] = outcome
    return tuple(outcome for outcome in outcomes if outcome is not None)


def _outcomes(members: Sequence[BatchMember], attempt: Attempt, oom_steps: tuple[OomStep, ...]) -> list[Outcome]:
    """Outcomes of one group; `oom_steps` were taken before."""
    if _all_end(members):
        return [Stopped() for _ in members]
    wanted = [member for member in members if not member.hooks.should_stop()]
    if len(wanted) < len(members):
        found = iter(_outcomes(wanted, attempt, oom_steps)) if wanted else iter(())
        still = {id(member) for member in wanted}
        return [next(found) if id(member) in still else Stopped() for member in members]
    try:
        results, cost = attempt(members)
    except Exception as error:
        release_frames(error)
        if len(members) == 1 or isinstance(error, Stopped) or _device_is_gone(error):
            return [error] * len(members)
        lacks_memory = isinstance(error, DoesNotFit) or exhausted_memory(error) is not None
        if lacks_memory and members[0].task.batch_size > 1:  # fewer members have as large a pass
            return [error] * len(members)
    else:
        count = max(len(members), members[0].task.batch_size)
        costs = shares(replace(cost, oom_steps=oom_steps + cost.oom_steps), count)
        return list(zip(results[: len(members)], costs[: len(members)], strict=True))
    size, oom_steps = ((len(members) + 1) // 2, (*oom_steps, OomStep.DIVIDE)) if lacks_memory else (1, oom_steps)
    parts = [members[start : start + size] for start in range(0, len(members), size)]
    return [outcome for part in parts for outcome in _outcomes(part, attempt, oom_steps)]


def _kind(member: BatchMember) -> object:
    """Key of members that may share a run."""
    sizes = tuple(_size(result) for result in member.inputs.values())
    uses = tuple((use.component, use.patch_digest, use.passes) for use in member.task.uses)
    # an empty key is never batched
    return batch_key(member.work) or id(member), sizes, uses, None if member.resume is None else member.resume.step


def _all_end(members: Sequence[BatchMember]) -> bool:
    """Whether all of `members` should stop or pause."""
    return all(member.hooks.should_stop() or member.hooks.should_pause() for member in members)


def _size(result: Result) -> tuple[int, ...]:
    """Shape of a result's arrays."""
    match result:
        case Encoded():
            return tuple(size for array in result.arrays for size in array.shape)
        case ImageEmbeds():
            return result.states_LD.shape
        case Latent() | VideoFrames() | DecodedTiles():
            return tuple(size for array in result.arrays for size in array.shape)
        case SamplerState() | RunState():
            return tuple(size for array in result.arrays for size in array.shape)
        case ImagePixels():
            return result.pixels_HWC.shape
        case AudioSamples():
            return result.samples_SC.shape
        case Mask():
            return result.values_HW.shape
        case VideoMask():
            return result.values_THW.shape


def _share(total: int, place: int, count: int) -> int:
    """Share of an integer for one of `count` parts; the first parts get the remainder."""
    return total // count + (place < total % count)


def _device_is_gone(error: Exception) -> bool:
    """Whether no later run can succeed in this process. See `actors.worker.gpu_worker.run_error`."""
    return isinstance(error, torch.AcceleratorError) and exhausted_memory(error) is None
